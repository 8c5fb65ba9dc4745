//! The header of a slot of a message ring: 64 bytes in front of the data.
//!
//! ```text
//!   0        1      2          3          4          8       16      24       32         40     48    56
//!   kind (1) flags  datatype   operation  length (4) inbox   total   offset   tag/addr   data   key   request
//! ```
//! A message that exceeds a slot has several slots in turn, which differ in `length` and `offset`. Every value is input.

/// Size of a header (bytes).
pub const HEADER_BYTES: usize = 64;

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// For the receives without tags.
    Message = 1,
    /// For the receives with tags.
    Tagged = 2,
    /// To be written to a memory region of the target.
    Write = 3,
    /// Asks for data of a memory region of the target.
    ReadRequest = 4,
    /// The data of a read, or the previous values of an atomic operation.
    Reply = 5,
    /// Changes values in a memory region of the target.
    Atomic = 6,
    /// The request was carried out, or failed with the error in `data`.
    Acknowledge = 7,
    /// The rest of the message that is under way does not come.
    Interrupt = 8,
}

impl Kind {
    const ALL: [Kind; 8] = [
        Kind::Message,
        Kind::Tagged,
        Kind::Write,
        Kind::ReadRequest,
        Kind::Reply,
        Kind::Atomic,
        Kind::Acknowledge,
        Kind::Interrupt,
    ];
}

/// A header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What the message is.
    pub kind: Kind,
    /// The target's completion carries `data`.
    pub has_data: bool,
    /// The source waits for [`Kind::Acknowledge`].
    pub wants_acknowledgement: bool,
    /// Element type of an atomic operation.
    pub datatype: u8,
    /// The atomic operation.
    pub operation: u8,
    /// Bytes of data in this slot.
    pub length: u32,
    /// The source's inbox, for messages back.
    pub inbox: u64,
    /// Bytes of the whole message.
    pub total: u64,
    /// Where the bytes of this slot begin in the message.
    pub offset: u64,
    /// Tag, or address in a memory region.
    pub tag: u64,
    /// Data of the completion at the target.
    pub data: u64,
    /// Key of a memory region.
    pub key: u64,
    /// The source's number of the request.
    pub request: u64,
}

impl Header {
    /// A header of a whole message, without data.
    #[must_use]
    pub fn new(kind: Kind) -> Header {
        Header {
            kind,
            has_data: false,
            wants_acknowledgement: false,
            datatype: 0,
            operation: 0,
            length: 0,
            inbox: 0,
            total: 0,
            offset: 0,
            tag: 0,
            data: 0,
            key: 0,
            request: 0,
        }
    }

    /// The last bytes of the message are in this slot.
    #[must_use]
    pub fn is_last(&self) -> bool {
        self.offset + u64::from(self.length) == self.total
    }

    /// As bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        let flags = u8::from(self.has_data) | u8::from(self.wants_acknowledgement) << 1;
        bytes[..4].copy_from_slice(&[self.kind as u8, flags, self.datatype, self.operation]);
        bytes[4..8].copy_from_slice(&self.length.to_le_bytes());
        let words = [self.inbox, self.total, self.offset, self.tag, self.data, self.key, self.request];
        for (place, word) in bytes[8..].chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// From bytes; `None` if no node sends such a header.
    #[must_use]
    pub fn decode(bytes: &[u8; HEADER_BYTES], slot_payload: usize) -> Option<Header> {
        let word = |i: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[8 * i..8 * i + 8]);
            u64::from_le_bytes(word)
        };
        let kind = Kind::ALL.into_iter().find(|&kind| kind as u8 == bytes[0])?;
        let header = Header {
            kind,
            has_data: bytes[1] & 1 != 0,
            wants_acknowledgement: bytes[1] & 2 != 0,
            datatype: bytes[2],
            operation: bytes[3],
            length: (word(0) >> 32) as u32,
            inbox: word(1),
            total: word(2),
            offset: word(3),
            tag: word(4),
            data: word(5),
            key: word(6),
            request: word(7),
        };
        let end = header.offset.checked_add(header.length.into())?;
        (header.length as usize <= slot_payload && end <= header.total).then_some(header)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_bytes_are_refused_or_keep_their_values(bytes: [u8; 32], tail: [u8; 32]) {
            let mut all = [0; HEADER_BYTES];
            all[..32].copy_from_slice(&bytes);
            all[32..].copy_from_slice(&tail);
            if let Some(header) = Header::decode(&all, 100) {
                prop_assert!(header.length <= 100 && header.offset + u64::from(header.length) <= header.total);
                prop_assert_eq!(Header::decode(&header.encode(), 100), Some(header));
            }
        }
    }

    #[test]
    fn every_field_survives() {
        for kind in Kind::ALL {
            let header = Header {
                has_data: true,
                wants_acknowledgement: true,
                datatype: 9,
                operation: 8,
                length: 77,
                inbox: u64::MAX,
                total: 1000,
                offset: 900,
                tag: 3,
                data: 4,
                key: 5,
                request: 6,
                ..Header::new(kind)
            };
            assert_eq!(Header::decode(&header.encode(), 77), Some(header));
            assert_eq!(Header::decode(&header.encode(), 76), None);
        }
    }
}
