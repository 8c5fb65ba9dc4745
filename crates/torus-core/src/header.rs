//! The 64-byte header of a packet.
//!
//! ```text
//!  0 version │ 1 kind │ 2 virtual channel* │ 3 signs │ 4 source (2) │ 6 target (2)
//!  8 generation (2) │ 10 hops* (2) │ 12 diagnosis* (2) │ 14 notification │ 15 flags: last, acknowledgement, seventh port
//! 16 sequence (4) │ 20 epoch (4) │ 24 region (8) │ 32 offset (8) │ 40 length (4) │ 44 operation (4)
//! 48 notification value (4) │ 52 operation's length (4) │ 56 index of the packet in the operation (4)
//!      of an acknowledgement:  52 next sequence (4) │ 56 generation (2) │ 58 refusals (2)
//! 60 CRC-32C of bytes 0 to 59, fields with * taken as zero (4)                      little endian
//! ```
//! Hops rewrite the fields with `*`, so the CRC does not cover them.

use crate::Epoch;
use crate::pair::{Generation, Sequence};
use crate::port::Port;
use crate::route::{Signs, VirtualChannel};
use crate::topology::NodeNumber;

/// Size of a header (bytes).
pub const HEADER_BYTES: usize = 64;
/// Version of the format.
pub const VERSION: u8 = 1;

const CRC_AT: usize = 60;
const FLAG_LAST: u8 = 1;
const FLAG_ACKNOWLEDGES: u8 = 2;
/// Of the seventh port.
const FLAG_SEVENTH: u8 = 4;

/// What a packet is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// Data for a region of the target.
    Put = 1,
    /// Request for data of a region; its payload names the requester's memory.
    GetRequest = 2,
    /// Data that answers a [`Kind::GetRequest`].
    GetData = 3,
    /// Atomic operation; its payload has the operands.
    Atomic = 4,
    /// Answer to a [`Kind::Atomic`]; its payload has the previous value.
    AtomicResult = 5,
    /// The target refused an operation; its payload has the cause.
    Refused = 6,
    /// Acknowledgement without data, outside of the pair's sequence.
    Acknowledge = 7,
    /// Diagnosis between neighbours, outside of any pair.
    Diagnosis = 8,
}

impl Kind {
    const ALL: [Kind; 8] = [
        Kind::Put,
        Kind::GetRequest,
        Kind::GetData,
        Kind::Atomic,
        Kind::AtomicResult,
        Kind::Refused,
        Kind::Acknowledge,
        Kind::Diagnosis,
    ];

    /// Whether the packet has a place in its pair's sequence.
    #[must_use]
    pub fn is_sequenced(self) -> bool {
        !matches!(self, Kind::Acknowledge | Kind::Diagnosis)
    }
}

/// What the target's application learns, after the payload is visible.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Notification {
    /// Nothing.
    #[default]
    None,
    /// A counter grows.
    Counter {
        /// The counter's index.
        index: u16,
        /// The increment.
        add: u16,
    },
    /// An event with a tag.
    Event {
        /// The tag.
        tag: u32,
    },
}

/// Cumulative acknowledgement of the reverse pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Acknowledgement {
    /// Generation of the newest packet.
    pub generation: Generation,
    /// The next expected sequence.
    pub next: Sequence,
    /// Operations of the pair that the target refused so far; wraps.
    pub refusals: u16,
}

/// A decoded header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What the packet is.
    pub kind: Kind,
    /// The virtual channel that the packet occupies; at the source, the first channel of its layer.
    pub vc: VirtualChannel,
    /// The directions of layer A.
    pub signs: Signs,
    /// The source.
    pub source: NodeNumber,
    /// The target.
    pub target: NodeNumber,
    /// The port whose pair this is. Requests of the seventh port reach only what is published for hosts outside.
    pub port: Port,
    /// Generation of the pair's route.
    pub generation: Generation,
    /// Hops so far.
    pub hops: u16,
    /// The sender's diagnosis word.
    pub diagnosis: u16,
    /// What the target's application learns.
    pub notification: Notification,
    /// Whether this is the last packet of its operation.
    pub last: bool,
    /// Place in the pair's sequence.
    pub sequence: Sequence,
    /// The epoch whose tables route the packet.
    pub epoch: Epoch,
    /// The target's region.
    pub region: u64,
    /// Offset in the region (bytes).
    pub offset: u64,
    /// Length of the payload (bytes).
    pub length: u32,
    /// The initiator's operation.
    pub operation: u32,
    /// Length of the whole operation (bytes); zero in an acknowledgement.
    pub total: u32,
    /// Index of the packet in its operation; zero in an acknowledgement.
    pub index: u32,
    /// Cumulative acknowledgement of the reverse pair.
    pub acknowledgement: Option<Acknowledgement>,
}

/// Why bytes are not a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// Another version.
    #[error("packet header: version {found}, expected {VERSION}")]
    Version {
        /// The version.
        found: u8,
    },
    /// The checksum differs.
    #[error("packet header: CRC-32C {found:#010x}, computed {computed:#010x}")]
    Crc {
        /// The header's checksum.
        found: u32,
        /// The checksum of its fields.
        computed: u32,
    },
    /// A field has an undefined value.
    #[error("packet header: {field} = {value} is not defined")]
    Field {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
}

impl Header {
    /// A header with this kind and pair; all else is zero.
    #[must_use]
    pub fn new(kind: Kind, source: NodeNumber, target: NodeNumber) -> Header {
        Header {
            kind,
            vc: VirtualChannel::BEFORE_DATELINE,
            signs: Signs::default(),
            source,
            target,
            port: Port::Local,
            generation: Generation(0),
            hops: 0,
            diagnosis: 0,
            notification: Notification::None,
            last: false,
            sequence: Sequence(0),
            epoch: Epoch(0),
            region: 0,
            offset: 0,
            length: 0,
            operation: 0,
            total: 0,
            index: 0,
            acknowledgement: None,
        }
    }

    /// The header's bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let (notification, value) = match self.notification {
            Notification::None => (0, 0),
            Notification::Counter { index, add } => (1, u32::from(index) << 16 | u32::from(add)),
            Notification::Event { tag } => (2, tag),
        };
        let (words, halves) = match self.acknowledgement {
            Some(ack) => (ack.next.0, u32::from(ack.generation.0) | u32::from(ack.refusals) << 16),
            None => (self.total, self.index),
        };
        let mut flags = 0;
        flags |= if self.last { FLAG_LAST } else { 0 };
        flags |= if self.acknowledgement.is_some() { FLAG_ACKNOWLEDGES } else { 0 };
        flags |= if self.port == Port::Seventh { FLAG_SEVENTH } else { 0 };
        let mut bytes = [0; HEADER_BYTES];
        bytes[0] = VERSION;
        bytes[1] = self.kind as u8;
        bytes[2] = self.vc.0;
        bytes[3] = self.signs.bits();
        bytes[14] = notification;
        bytes[15] = flags;
        put(&mut bytes, 4, self.source.0.to_le_bytes());
        put(&mut bytes, 6, self.target.0.to_le_bytes());
        put(&mut bytes, 8, self.generation.0.to_le_bytes());
        put(&mut bytes, 10, self.hops.to_le_bytes());
        put(&mut bytes, 12, self.diagnosis.to_le_bytes());
        put(&mut bytes, 16, self.sequence.0.to_le_bytes());
        put(&mut bytes, 20, self.epoch.0.to_le_bytes());
        put(&mut bytes, 24, self.region.to_le_bytes());
        put(&mut bytes, 32, self.offset.to_le_bytes());
        put(&mut bytes, 40, self.length.to_le_bytes());
        put(&mut bytes, 44, self.operation.to_le_bytes());
        put(&mut bytes, 48, value.to_le_bytes());
        put(&mut bytes, 52, words.to_le_bytes());
        put(&mut bytes, 56, halves.to_le_bytes());
        let crc = checksum(&bytes);
        put(&mut bytes, CRC_AT, crc.to_le_bytes());
        bytes
    }

    /// Rewrites the fields that a hop changes; the checksum stays valid.
    pub fn rewrite(&self, bytes: &mut [u8; HEADER_BYTES]) {
        bytes[2] = self.vc.0;
        put(bytes, 10, self.hops.to_le_bytes());
        put(bytes, 12, self.diagnosis.to_le_bytes());
    }

    /// Reads a header. Bytes from a neighbour are input: every value is checked.
    ///
    /// # Errors
    /// [`HeaderError`] if the version, the checksum or a field is wrong.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Header, HeaderError> {
        if bytes[0] != VERSION {
            return Err(HeaderError::Version { found: bytes[0] });
        }
        let (found, computed) = (u32::from_le_bytes(get(bytes, CRC_AT)), checksum(bytes));
        // A fuzzer reaches the fields without a valid checksum.
        if found != computed && !cfg!(fuzzing) {
            return Err(HeaderError::Crc { found, computed });
        }
        let undefined = |field, value: u64| HeaderError::Field { field, value };
        let kind = (Kind::ALL.into_iter().find(|&kind| kind as u8 == bytes[1]))
            .ok_or_else(|| undefined("kind", bytes[1].into()))?;
        if usize::from(bytes[2]) >= VirtualChannel::COUNT {
            return Err(undefined("virtual channel", bytes[2].into()));
        }
        let value = u32::from_le_bytes(get(bytes, 48));
        let notification = match bytes[14] {
            0 if value == 0 => Notification::None,
            0 => return Err(undefined("notification value", value.into())),
            1 => Notification::Counter { index: (value >> 16) as u16, add: value as u16 },
            2 => Notification::Event { tag: value },
            other => return Err(undefined("notification", other.into())),
        };
        if bytes[15] & !(FLAG_LAST | FLAG_ACKNOWLEDGES | FLAG_SEVENTH) != 0 {
            return Err(undefined("flags", bytes[15].into()));
        }
        let (words, halves) = (u32::from_le_bytes(get(bytes, 52)), u32::from_le_bytes(get(bytes, 56)));
        let acknowledgement = (bytes[15] & FLAG_ACKNOWLEDGES != 0).then_some(Acknowledgement {
            generation: Generation(halves as u16),
            next: Sequence(words),
            refusals: (halves >> 16) as u16,
        });
        let (total, index) = if acknowledgement.is_some() { (0, 0) } else { (words, halves) };
        Ok(Header {
            kind,
            vc: VirtualChannel(bytes[2]),
            signs: Signs::from_bits(bytes[3]).ok_or_else(|| undefined("signs", bytes[3].into()))?,
            source: NodeNumber(u16::from_le_bytes(get(bytes, 4))),
            target: NodeNumber(u16::from_le_bytes(get(bytes, 6))),
            port: if bytes[15] & FLAG_SEVENTH == 0 { Port::Local } else { Port::Seventh },
            generation: Generation(u16::from_le_bytes(get(bytes, 8))),
            hops: u16::from_le_bytes(get(bytes, 10)),
            diagnosis: u16::from_le_bytes(get(bytes, 12)),
            notification,
            last: bytes[15] & FLAG_LAST != 0,
            sequence: Sequence(u32::from_le_bytes(get(bytes, 16))),
            epoch: Epoch(u32::from_le_bytes(get(bytes, 20))),
            region: u64::from_le_bytes(get(bytes, 24)),
            offset: u64::from_le_bytes(get(bytes, 32)),
            length: u32::from_le_bytes(get(bytes, 40)),
            operation: u32::from_le_bytes(get(bytes, 44)),
            total,
            index,
            acknowledgement,
        })
    }
}

fn put<const N: usize>(bytes: &mut [u8; HEADER_BYTES], at: usize, value: [u8; N]) {
    bytes[at..at + N].copy_from_slice(&value);
}

fn get<const N: usize>(bytes: &[u8; HEADER_BYTES], at: usize) -> [u8; N] {
    let mut value = [0; N];
    value.copy_from_slice(&bytes[at..at + N]);
    value
}

/// CRC-32C of a header's constant fields.
fn checksum(bytes: &[u8; HEADER_BYTES]) -> u32 {
    let mut constant = *bytes;
    constant[2] = 0;
    constant[10..14].fill(0);
    crc32c(&constant[..CRC_AT])
}

/// CRC-32C (Castagnoli; RFC 3720, appendix B.4).
#[must_use]
pub fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, &byte| (crc >> 8) ^ CRC_TABLE[usize::from(crc as u8 ^ byte)])
}

const CRC_TABLE: [u32; 256] = {
    const POLYNOMIAL: u32 = 0x82f6_3b78;
    let mut table = [0; 256];
    let mut i = 0;
    while i < 256 {
        let mut crc = i as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ POLYNOMIAL } else { crc >> 1 };
            bit += 1;
        }
        table[i] = crc;
        i += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_checksum_is_that_of_rfc_3720() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
    }

    fn header() -> impl Strategy<Value = Header> {
        let notification = prop_oneof![
            Just(Notification::None),
            (any::<u16>(), any::<u16>()).prop_map(|(index, add)| Notification::Counter { index, add }),
            any::<u32>().prop_map(|tag| Notification::Event { tag }),
        ];
        let path = (0..8_usize, 0..5_u8, 0..8_u8, any::<[u16; 5]>(), notification);
        let place =
            (any::<[bool; 2]>(), any::<[u32; 6]>(), any::<[u64; 2]>(), any::<Option<(u16, u32, u16)>>());
        (path, place).prop_map(
            |((kind, vc, signs, half, notification), ([last, seventh], word, long, ack))| Header {
                kind: Kind::ALL[kind],
                vc: VirtualChannel(vc),
                signs: Signs::from_bits(signs).expect("below 8"),
                source: NodeNumber(half[0]),
                target: NodeNumber(half[1]),
                port: Port::ALL[usize::from(seventh)],
                generation: Generation(half[2]),
                hops: half[3],
                diagnosis: half[4],
                notification,
                last,
                sequence: Sequence(word[0]),
                epoch: Epoch(word[1]),
                region: long[0],
                offset: long[1],
                length: word[2],
                operation: word[3],
                total: if ack.is_some() { 0 } else { word[4] },
                index: if ack.is_some() { 0 } else { word[5] },
                acknowledgement: ack.map(|(generation, next, refusals)| Acknowledgement {
                    generation: Generation(generation),
                    next: Sequence(next),
                    refusals,
                }),
            },
        )
    }

    proptest! {
        #[test]
        fn a_header_survives_encoding(header in header()) {
            prop_assert_eq!(Header::decode(&header.encode()), Ok(header));
        }

        #[test]
        fn a_hop_rewrites_without_a_new_checksum(before in header(), vc in 0..5_u8, hops: u16, diagnosis: u16) {
            let mut bytes = before.encode();
            let after = Header { vc: VirtualChannel(vc), hops, diagnosis, ..before };
            after.rewrite(&mut bytes);
            prop_assert_eq!(Header::decode(&bytes), Ok(after));
        }

        #[test]
        fn a_changed_bit_of_a_constant_field_is_noticed(header in header(), bit in 0..512_usize) {
            let rewritten = bit / 8 == 2 || (10..14).contains(&(bit / 8));
            let mut bytes = header.encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(rewritten || Header::decode(&bytes).is_err());
        }

        #[test]
        fn garbage_is_refused(bytes: [u8; 32], more: [u8; 32]) {
            let mut garbage = [0; HEADER_BYTES];
            garbage[..32].copy_from_slice(&bytes);
            garbage[32..].copy_from_slice(&more);
            prop_assert!(Header::decode(&garbage).is_err());
        }
    }
}
