//! Datagrams of a front end: one fragment each.
//!
//! ```text
//!   0        4          8           16         24          28       32
//! ┌────────┬──────────┬───────────┬──────────┬───────────┬────────┬───────────┐
//! │ "MSFD" │ source   │ sequence  │ event    │ length    │ CRC-32 │ payload … │
//! └────────┴──────────┴───────────┴──────────┴───────────┴────────┴───────────┘
//! ```
//!
//! Numbers are little-endian. The sequence counts the datagrams of one source from 0, so a gap is a loss on the way. The
//! checksum is that of the payload, and is stored and verified as that of any fragment.

use millstream_fragment::{Fragment, SourceId};

/// Length of the header, in bytes.
pub const HEADER_LEN: usize = 32;
/// Maximum length of the payload: that of a UDP datagram over IPv4.
pub const MAX_PAYLOAD: usize = 65_507 - HEADER_LEN;

const MAGIC: [u8; 4] = *b"MSFD";

/// A fragment in a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Datagram<'a> {
    /// The source.
    pub source: SourceId,
    /// Number of datagrams that the source sent before.
    pub sequence: u64,
    /// The fragment.
    pub fragment: Fragment<'a>,
}

impl<'a> Datagram<'a> {
    /// Appends the datagram to `buffer`. The payload has at most [`MAX_PAYLOAD`] bytes.
    pub fn write(&self, buffer: &mut Vec<u8>) {
        let Fragment { event, payload, crc } = self.fragment;
        buffer.extend(MAGIC);
        buffer.extend(self.source.0.to_le_bytes());
        buffer.extend(self.sequence.to_le_bytes());
        buffer.extend(event.to_le_bytes());
        buffer.extend((payload.len() as u32).to_le_bytes());
        buffer.extend(crc.to_le_bytes());
        buffer.extend(payload);
    }

    /// Reads a datagram; `None` if it is not one.
    pub fn parse(bytes: &'a [u8]) -> Option<Datagram<'a>> {
        let (datagram, length) = Datagram::parse_header(bytes)?;
        (length as usize == datagram.fragment.payload.len()).then_some(datagram)
    }

    /// Reads a datagram whose end was cut off; `None` if it is not one.
    pub fn parse_cut(bytes: &'a [u8]) -> Option<Datagram<'a>> {
        let (datagram, length) = Datagram::parse_header(bytes)?;
        (length as usize > datagram.fragment.payload.len()).then_some(datagram)
    }

    /// Reads a datagram, and the length of its payload.
    fn parse_header(bytes: &'a [u8]) -> Option<(Datagram<'a>, u32)> {
        let (header, payload) = bytes.split_first_chunk::<HEADER_LEN>()?;
        let word =
            |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        if header[..4] != MAGIC {
            return None;
        }
        let fragment = Fragment { event: long(16), payload, crc: word(28) };
        Some((Datagram { source: SourceId(word(4)), sequence: long(8), fragment }, word(24)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn datagrams_come_back(source: u32, sequence: u64, event: u64, payload: Vec<u8>) {
            let datagram = Datagram { source: SourceId(source), sequence, fragment: Fragment::new(event, &payload) };
            let mut bytes = Vec::new();
            datagram.write(&mut bytes);
            prop_assert_eq!(Datagram::parse(&bytes), Some(datagram));
            bytes.push(0);
            prop_assert_eq!(Datagram::parse(&bytes), None);
            prop_assert_eq!(Datagram::parse_cut(&bytes), None);
            let is_cut = |cut: usize| Datagram::parse_cut(&bytes[..bytes.len() - cut]).is_some();
            prop_assert!(!is_cut(1) && (payload.is_empty() || is_cut(2)));
        }

        #[test]
        fn any_bytes_are_accepted_or_refused(bytes: Vec<u8>) {
            let _ = Datagram::parse(&bytes);
        }
    }
}
