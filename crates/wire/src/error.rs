//! Parse errors.

/// The error of parsing a packet or header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The buffer is shorter than the header.
    #[error("{header} truncated: {available} of {needed} bytes")]
    Truncated {
        /// The header.
        header: &'static str,
        /// Its length in bytes.
        needed: usize,
        /// Bytes in the buffer.
        available: usize,
    },
    /// A transport header version other than 0 (9.6.1.1).
    #[error("unsupported transport header version {0}, expected 0")]
    Version(u8),
    /// A reserved opcode, or one of a transport service that is not supported (RD).
    #[error("unsupported opcode {0:#04x}")]
    Opcode(u8),
    /// A pad count that does not fit the payload, or payload with an operation that has none.
    #[error("opcode {opcode:#04x}: pad count {pad} does not fit {payload} bytes of payload and padding")]
    Payload {
        /// The opcode.
        opcode: u8,
        /// Bytes between headers and ICRC.
        payload: usize,
        /// The pad count of the base transport header.
        pad: u8,
    },
    /// A reserved or invalid field value.
    #[error("{header}: invalid {field} {value:#x}")]
    Field {
        /// The header.
        header: &'static str,
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
}

/// A result with [`Error`].
pub type Result<T> = core::result::Result<T, Error>;
