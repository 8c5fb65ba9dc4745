//! The record that both ends exchange before they connect.
//!
//! ```text
//!  0               4       6       8              12              16
//! +---------------+-------+-------+---------------+---------------+
//! | magic "MsRC"  |version|  LID  | queue pair    | first PSN     |
//! +---------------+-------+-------+---------------+---------------+
//! | GID                                                           |
//! +-------+-------+---------------+---------------+---------------+
//! |mtu|rds|       reserved 0      | private bytes | CRC-32        |
//! +-------+-------+---------------+---------------+---------------+
//! | private data, as the two programs agree …
//! ```
//!
//! All numbers are big-endian. `mtu` is the code of the specification (1: 256 B … 5: 4096 B). `rds` is the number of
//! incoming READs and atomics that the end supports. `private bytes` is the length of the private data. The CRC (IEEE
//! 802.3) covers the header, with the CRC field zero, and the private data.
#![forbid(unsafe_code)]

use millstream_quantity::{Psn, Qpn};
use sideway::ibverbs::device_context::Mtu;

/// Length of the magic number, in bytes.
pub(super) const MAGIC_LEN: usize = 4;
const MAGIC: [u8; MAGIC_LEN] = *b"MsRC";
const VERSION: u16 = 1;
/// Length of the fixed part, in bytes.
pub(super) const HEADER_LEN: usize = 48;
/// Maximum length of the private data, in bytes.
pub const MAX_PRIVATE_DATA: usize = 64 * 1024;
const CRC: std::ops::Range<usize> = 44..48;
/// Queue pair numbers and packet sequence numbers have 24 bits.
const BITS_24: u32 = 0x00ff_ffff;

/// Parameters of one end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hello {
    /// Queue pair number.
    pub qpn: Qpn,
    /// First packet sequence number that it sends.
    pub psn: Psn,
    /// Its GID.
    pub gid: [u8; 16],
    /// Its LID on an InfiniBand subnet, else 0.
    pub lid: u16,
    /// The active MTU of its port.
    pub mtu: Mtu,
    /// Incoming READs and atomics that it supports (responder resources).
    pub max_rd_atomic: u8,
}

/// Why the peer's record is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HelloError {
    /// The peer is not a Millstream program.
    #[error("is not a Millstream program: sent magic {found:02x?}, expected {MAGIC:02x?}")]
    Magic {
        /// The bytes received.
        found: [u8; 4],
    },
    /// The peer uses TLS.
    #[error(
        "uses TLS: it accepts nodes of its site only; give this program keys of the site (MILLSTREAM_KEYS, \
         or [security] in the configuration)"
    )]
    Tls,
    /// Another protocol version.
    #[error(
        "uses connection protocol version {found}, this program uses {VERSION}; run the same release on both ends"
    )]
    Version {
        /// The version received.
        found: u16,
    },
    /// The checksum is wrong.
    #[error("sent a connection record with CRC {found:#010x}, expected {expected:#010x}")]
    Crc {
        /// The checksum received.
        found: u32,
        /// The computed checksum.
        expected: u32,
    },
    /// A field has an invalid value.
    #[error("sent a connection record with {field} = {value:#x}, must be {must}")]
    Field {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u32,
        /// Its valid values.
        must: &'static str,
    },
}

/// Whether these bytes start a TLS record: an alert, or a handshake (RFC 8446, section 5.1).
#[must_use]
pub fn is_tls(bytes: &[u8]) -> bool {
    matches!(bytes, [0x15 | 0x16, 0x03, 0x01..=0x04, ..])
}

impl Hello {
    /// Encodes the record.
    ///
    /// # Panics
    /// If `private_data` is longer than [`MAX_PRIVATE_DATA`].
    pub fn encode(&self, private_data: &[u8]) -> Vec<u8> {
        assert!(
            private_data.len() <= MAX_PRIVATE_DATA,
            "{} bytes of private data exceed the limit of {MAX_PRIVATE_DATA}",
            private_data.len()
        );
        let mut bytes = Vec::with_capacity(HEADER_LEN + private_data.len());
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&VERSION.to_be_bytes());
        bytes.extend_from_slice(&self.lid.to_be_bytes());
        bytes.extend_from_slice(&self.qpn.get().to_be_bytes());
        bytes.extend_from_slice(&self.psn.get().to_be_bytes());
        bytes.extend_from_slice(&self.gid);
        bytes.extend_from_slice(&[self.mtu as u8, self.max_rd_atomic]);
        bytes.extend_from_slice(&[0; 6]);
        bytes.extend_from_slice(&(private_data.len() as u32).to_be_bytes());
        bytes.extend_from_slice(&[0; 4]);
        bytes.extend_from_slice(private_data);
        let crc = crc32fast::hash(&bytes);
        bytes[CRC].copy_from_slice(&crc.to_be_bytes());
        bytes
    }

    /// Length of the private data that follows a header.
    ///
    /// # Errors
    /// [`HelloError`] if the header is invalid. [`Hello::decode`] checks the CRC.
    pub(super) fn private_data_len(header: &[u8; HEADER_LEN]) -> Result<usize, HelloError> {
        let [m0, m1, m2, m3, v0, v1, ..] = *header;
        if [m0, m1, m2, m3] != MAGIC {
            return Err(HelloError::Magic { found: [m0, m1, m2, m3] });
        }
        let version = u16::from_be_bytes([v0, v1]);
        if version != VERSION {
            return Err(HelloError::Version { found: version });
        }
        let private_data = number(header, 40);
        match usize::try_from(private_data) {
            Ok(private_data) if private_data <= MAX_PRIVATE_DATA => Ok(private_data),
            _ => Err(HelloError::Field {
                field: "bytes of private data",
                value: private_data,
                must: "at most 65536",
            }),
        }
    }

    /// Decodes the record.
    ///
    /// # Errors
    /// [`HelloError`] for the first invalid field.
    pub(super) fn decode(header: &[u8; HEADER_LEN], private_data: &[u8]) -> Result<Hello, HelloError> {
        Hello::private_data_len(header)?;
        let mut unsigned = *header;
        unsigned[CRC].fill(0);
        let mut crc = crc32fast::Hasher::new();
        crc.update(&unsigned);
        crc.update(private_data);
        let (expected, found) = (crc.finalize(), number(header, CRC.start));
        if found != expected {
            return Err(HelloError::Crc { found, expected });
        }
        let field = |field, value: u32, ok: bool, must| match ok {
            true => Ok(value),
            false => Err(HelloError::Field { field, value, must }),
        };
        let (qpn, psn) = (number(header, 8), number(header, 12));
        let mtu = match header[32] {
            1 => Mtu::Mtu256,
            2 => Mtu::Mtu512,
            3 => Mtu::Mtu1024,
            4 => Mtu::Mtu2048,
            5 => Mtu::Mtu4096,
            other => return Err(HelloError::Field { field: "mtu", value: other.into(), must: "1 to 5" }),
        };
        field(
            "reserved",
            u32::from(header[34..40].iter().any(|byte| *byte != 0)),
            header[34..40] == [0; 6],
            "0",
        )?;
        let mut gid = [0; 16];
        gid.copy_from_slice(&header[16..32]);
        Ok(Hello {
            qpn: Qpn::new(field("queue pair", qpn, qpn <= BITS_24, "of 24 bits")?),
            psn: Psn::new(field("first PSN", psn, psn <= BITS_24, "of 24 bits")?),
            gid,
            lid: u16::from_be_bytes([header[6], header[7]]),
            mtu,
            max_rd_atomic: header[33],
        })
    }
}

fn number(header: &[u8; HEADER_LEN], at: usize) -> u32 {
    u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hello() -> impl Strategy<Value = Hello> {
        let mtu =
            prop::sample::select(vec![Mtu::Mtu256, Mtu::Mtu512, Mtu::Mtu1024, Mtu::Mtu2048, Mtu::Mtu4096]);
        (0..=BITS_24, 0..=BITS_24, any::<[u8; 16]>(), any::<u16>(), mtu, any::<u8>()).prop_map(
            |(qpn, psn, gid, lid, mtu, max_rd_atomic)| Hello {
                qpn: Qpn::new(qpn),
                psn: Psn::new(psn),
                gid,
                lid,
                mtu,
                max_rd_atomic,
            },
        )
    }

    fn split(bytes: &[u8]) -> (&[u8; HEADER_LEN], &[u8]) {
        bytes.split_first_chunk().unwrap()
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded(hello in hello(), private_data in prop::collection::vec(any::<u8>(), 0..200)) {
            let bytes = hello.encode(&private_data);
            let (header, rest) = split(&bytes);
            prop_assert_eq!(Hello::private_data_len(header).unwrap(), private_data.len());
            prop_assert_eq!(rest, &private_data[..]);
            prop_assert_eq!(Hello::decode(header, rest).unwrap(), hello);
        }

        #[test]
        fn any_damaged_bit_is_noticed(
            hello in hello(),
            private_data in prop::collection::vec(any::<u8>(), 0..50),
            bit: prop::sample::Index,
        ) {
            let mut bytes = hello.encode(&private_data);
            let bit = bit.index(bytes.len() * 8);
            bytes[bit / 8] ^= 1 << (bit % 8);
            let (header, rest) = split(&bytes);
            prop_assert!(Hello::decode(header, rest).is_err());
        }

        #[test]
        fn arbitrary_bytes_are_refused_without_panic(header: [u8; HEADER_LEN]) {
            prop_assert!(Hello::decode(&header, &[]).is_err());
        }
    }

    #[test]
    fn an_error_names_the_field_and_its_value() {
        let hello = Hello {
            qpn: Qpn::new(1),
            psn: Psn::new(2),
            gid: [3; 16],
            lid: 4,
            mtu: Mtu::Mtu1024,
            max_rd_atomic: 5,
        };
        let with = |at: usize, value: u8| {
            let mut bytes = hello.encode(&[]);
            bytes[at] = value;
            bytes[CRC].fill(0);
            let crc = crc32fast::hash(&bytes);
            bytes[CRC].copy_from_slice(&crc.to_be_bytes());
            Hello::decode(split(&bytes).0, &[]).unwrap_err()
        };
        assert_eq!(with(0, b'G'), HelloError::Magic { found: *b"GsRC" });
        assert_eq!(with(5, 9), HelloError::Version { found: 9 });
        assert!(matches!(with(8, 1), HelloError::Field { field: "queue pair", value: 0x0100_0001, .. }));
        assert!(matches!(with(12, 1), HelloError::Field { field: "first PSN", .. }));
        assert!(matches!(with(32, 6), HelloError::Field { field: "mtu", value: 6, .. }));
        assert!(matches!(with(39, 1), HelloError::Field { field: "reserved", .. }));
        assert!(matches!(
            with(40, 1),
            HelloError::Field { field: "bytes of private data", value: 0x0100_0000, .. }
        ));
    }
}
