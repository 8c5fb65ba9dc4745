//! Errors as verbs report them: positive errno values.

use std::io;

/// A positive errno value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub i32);

/// Result of a verb.
pub type Result<T> = std::result::Result<T, Errno>;

impl Errno {
    /// An argument is invalid.
    pub const INVAL: Self = Self(libc::EINVAL);
    /// A queue, a table or memory is full.
    pub const NOMEM: Self = Self(libc::ENOMEM);
    /// No entry, such as no completion to poll.
    pub const NOENT: Self = Self(libc::ENOENT);
    /// The object is still in use.
    pub const BUSY: Self = Self(libc::EBUSY);
    /// The device does not support this.
    pub const NOTSUP: Self = Self(libc::EOPNOTSUPP);
}

impl From<io::Error> for Errno {
    fn from(error: io::Error) -> Self {
        Self(error.raw_os_error().unwrap_or(libc::EIO))
    }
}
