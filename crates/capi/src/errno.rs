//! Return conventions of the C ABI. Verbs have four, with one function each. Every exported function calls
//! that of its convention.

use std::{ffi::c_int, io, ptr};

/// An error number of `<errno.h>`, always positive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Errno(c_int);

impl Errno {
    /// The device does not offer this.
    pub const UNSUPPORTED: Self = Self(libc::EOPNOTSUPP);
    /// An argument is outside what the verb accepts.
    pub const INVALID: Self = Self(libc::EINVAL);
    /// There is nothing at this place of a table.
    pub const NO_DATA: Self = Self(libc::ENODATA);
    /// Other objects still use this one.
    pub const BUSY: Self = Self(libc::EBUSY);

    /// `number` as an error; zero and negative numbers name none and become EIO.
    pub const fn new(number: c_int) -> Self {
        Self(if number > 0 { number } else { libc::EIO })
    }

    /// The positive error number.
    pub const fn number(self) -> c_int {
        self.0
    }

    /// Sets the calling thread's `errno`.
    pub fn set(self) {
        // SAFETY: `__errno_location` returns the calling thread's own errno, valid while it runs.
        unsafe { *libc::__errno_location() = self.0 };
    }
}

impl From<millstream_device::Errno> for Errno {
    fn from(error: millstream_device::Errno) -> Self {
        Self::new(error.0)
    }
}

impl From<Errno> for millstream_device::Errno {
    fn from(error: Errno) -> Self {
        Self(error.number())
    }
}

impl From<io::Error> for Errno {
    fn from(error: io::Error) -> Self {
        // Errors without a system call have a kind and no number.
        let number = error.raw_os_error().unwrap_or(match error.kind() {
            io::ErrorKind::WouldBlock => libc::EAGAIN,
            io::ErrorKind::TimedOut => libc::ETIMEDOUT,
            io::ErrorKind::ConnectionRefused => libc::ECONNREFUSED,
            io::ErrorKind::InvalidInput => libc::EINVAL,
            _ => libc::EIO,
        });
        Self::new(number)
    }
}

/// 0, or the positive error number; `errno` is set as well, since callers print it with `perror`.
pub fn status(result: Result<(), Errno>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(error) => {
            error.set();
            error.number()
        }
    }
}

/// The object, or NULL and `errno`.
pub fn pointer<T>(result: Result<*mut T, Errno>) -> *mut T {
    result.unwrap_or_else(|error| {
        error.set();
        ptr::null_mut()
    })
}

/// The number (a count or an index, not negative), or -1 and `errno`.
pub fn index(result: Result<c_int, Errno>) -> c_int {
    result.unwrap_or_else(|error| {
        error.set();
        -1
    })
}

/// The count, or the negated error number.
pub fn count(result: Result<usize, Errno>) -> isize {
    match result {
        Ok(count) => count as isize,
        Err(error) => -(error.number() as isize),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn thread_errno() -> c_int {
        io::Error::last_os_error().raw_os_error().unwrap_or(0)
    }

    #[test]
    fn each_convention_reports_the_same_error() {
        let error = Errno::new(libc::ENOMEM);
        Errno::INVALID.set();
        assert_eq!(status(Err(error)), libc::ENOMEM);
        assert_eq!(thread_errno(), libc::ENOMEM);
        Errno::INVALID.set();
        assert!(pointer::<u8>(Err(error)).is_null());
        assert_eq!(thread_errno(), libc::ENOMEM);
        Errno::INVALID.set();
        assert_eq!(index(Err(error)), -1);
        assert_eq!(thread_errno(), libc::ENOMEM);
        assert_eq!(count(Err(error)), -(libc::ENOMEM as isize));
    }

    #[test]
    fn an_error_is_never_zero() {
        assert_eq!(Errno::new(0).number(), libc::EIO);
        assert_eq!(Errno::new(-5).number(), libc::EIO);
        assert_eq!(Errno::from(io::Error::other("no number")).number(), libc::EIO);
        // Programs read events until EAGAIN.
        assert_eq!(Errno::from(io::Error::from(io::ErrorKind::WouldBlock)).number(), libc::EAGAIN);
    }
}
