//! Management datagrams (13.4), which queue pair 1 sends and receives.

use crate::{Error, Result};

/// Length of a management datagram in bytes.
pub const LEN: usize = 256;

header! {
    /// The header that all management datagrams have (13.4.3).
    ///
    /// ```text
    ///  0      1       2         3        4        6         8        16          20        24
    /// ├──────┼───────┼─────────┼────────┼────────┼─────────┼────────┼──────┬────┼─────────┤
    /// │ base │ class │ class v.│ method │ status │ specific│ transaction │attr│ 0 │ modifier│
    /// ```
    mod header, "MAD", 24 bytes {
        /// Base version: 1.
        base_version / set_base_version: u8 = 0,
        /// Management class.
        class / set_class: u8 = 1,
        /// Class version.
        class_version / set_class_version: u8 = 2,
        /// Method; the high bit marks a response.
        method / set_method: u8 = 3,
        /// Status.
        status / set_status: u16 = 4,
        /// Transaction ID.
        transaction / set_transaction: u64 = 8,
        /// Attribute ID.
        attribute / set_attribute: u16 = 16,
        /// Attribute modifier.
        modifier / set_modifier: u32 = 20,
    }
}

/// Base version.
const BASE_VERSION: u8 = 1;
/// Management class of communication management (12.6.3).
const CLASS: u8 = 7;
/// Class version of communication management.
const CLASS_VERSION: u8 = 2;
/// The method of communication management: Send.
const SEND: u8 = 3;

/// The header of a communication management message.
pub(crate) fn communication(transaction: u64, attribute: u16) -> header::Repr {
    header::Repr {
        base_version: BASE_VERSION,
        class: CLASS,
        class_version: CLASS_VERSION,
        method: SEND,
        status: 0,
        transaction,
        attribute,
        modifier: 0,
    }
}

/// Parses the header of a communication management message into transaction ID and attribute ID.
pub(crate) fn parse_communication(bytes: &[u8]) -> Result<(u64, u16)> {
    if bytes.len() < LEN {
        return Err(Error::Truncated { header: "MAD", needed: LEN, available: bytes.len() });
    }
    let mad = header::Repr::parse(&header::Packet::new_checked(bytes)?)?;
    let fixed = [
        ("base version", mad.base_version, BASE_VERSION),
        ("class", mad.class, CLASS),
        ("class version", mad.class_version, CLASS_VERSION),
        ("method", mad.method, SEND),
    ];
    for (field, value, only) in fixed {
        if value != only {
            return Err(Error::Field { header: "MAD", field, value: value.into() });
        }
    }
    Ok((mad.transaction, mad.attribute))
}
