//! Why bytes are not a packet.

/// Why bytes are not a packet, or not the header that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Fewer bytes than the header has.
    #[error("{header} needs {wants} bytes, {has} are left")]
    Truncated {
        /// Which header.
        header: &'static str,
        /// Its length.
        wants: usize,
        /// What there is.
        has: usize,
    },
    /// A transport header version other than 0 (9.6.1.1).
    #[error("transport header version {0}, only 0 is known")]
    Version(u8),
    /// An operation that is reserved, or belongs to a transport service that is not spoken here.
    #[error("unknown opcode {0:#04x}")]
    Opcode(u8),
    /// A pad count that does not fit the payload, or payload where the operation has none.
    #[error("{opcode}: {payload} bytes of payload and padding, {pad} of them padding")]
    Payload {
        /// The operation.
        opcode: u8,
        /// Bytes between headers and ICRC.
        payload: usize,
        /// What the base transport header says of padding.
        pad: u8,
    },
    /// A field with a value that means nothing.
    #[error("{header}: {field} is {value:#x}")]
    Field {
        /// Which header.
        header: &'static str,
        /// Which field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
}

/// A result whose error is [`Error`].
pub type Result<T> = core::result::Result<T, Error>;
