//! Errors of the C API: `errno` and a sentence for each thread.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::fmt::Display;

use libc::{EBUSY, EINVAL, EIO, ENODEV, ENOENT, ETIMEDOUT};
use millstream_card::{CommandError, OpenError, RemoteError, RemoteErrorKind, RingError};
use millstream_rdma::VerbsError;
use millstream_rdma::connect::ConnectErrorKind;

thread_local! {
    static LATEST: RefCell<CString> = RefCell::default();
}

/// An error of the C API.
#[derive(Debug)]
pub(crate) struct ApiError {
    errno: c_int,
    text: String,
}

impl ApiError {
    pub(crate) fn new(errno: c_int, text: impl Display) -> ApiError {
        ApiError { errno, text: text.to_string() }
    }

    /// An argument is invalid.
    pub(crate) fn invalid(text: impl Display) -> ApiError {
        ApiError::new(EINVAL, text)
    }

    fn set(self) {
        let text = CString::new(self.text.replace('\0', " ")).unwrap_or_default();
        LATEST.with_borrow_mut(|latest| *latest = text);
        // SAFETY: the C library returns the address of this thread's errno, which is valid for the thread's life.
        unsafe { *libc::__errno_location() = self.errno };
    }
}

pub(crate) type Outcome<T> = Result<T, ApiError>;

/// Zero, or -1 after an error.
pub(crate) fn status(outcome: Outcome<()>) -> c_int {
    value(outcome.map(|()| 0), -1)
}

/// The value, or `failed` after an error.
pub(crate) fn value<T>(outcome: Outcome<T>, failed: T) -> T {
    outcome.unwrap_or_else(|error| {
        error.set();
        failed
    })
}

/// A string argument.
///
/// # Safety
/// `text` is null or a C string.
pub(crate) unsafe fn text<'a>(text: *const c_char, name: &str) -> Outcome<&'a str> {
    if text.is_null() {
        return Err(ApiError::invalid(format_args!("{name} is a null pointer")));
    }
    // SAFETY: the caller passes a C string.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|error| ApiError::invalid(format_args!("{name} {text:?}: {error}")))
}

/// A reference behind a pointer argument.
///
/// # Safety
/// `pointer` is null or valid for reads during `'a`.
pub(crate) unsafe fn reference<'a, T>(pointer: *const T, name: &str) -> Outcome<&'a T> {
    // SAFETY: the caller passes null or a valid pointer.
    unsafe { pointer.as_ref() }.ok_or_else(|| ApiError::invalid(format_args!("{name} is a null pointer")))
}

/// Stores an output argument, unless its pointer is null.
///
/// # Safety
/// `pointer` is null or valid for a write.
pub(crate) unsafe fn store<T>(pointer: *mut T, value: T) {
    if !pointer.is_null() {
        // SAFETY: the caller passes a pointer that is valid for a write.
        unsafe { pointer.write(value) };
    }
}

impl From<OpenError> for ApiError {
    fn from(error: OpenError) -> ApiError {
        let errno = match &error {
            OpenError::NotFound(_) => ENODEV,
            OpenError::NoAnswer(_) => ETIMEDOUT,
            OpenError::ForeignUser { .. } | OpenError::Refused { .. } => libc::EACCES,
            _ => EIO,
        };
        ApiError::new(errno, error)
    }
}

impl From<CommandError> for ApiError {
    fn from(error: CommandError) -> ApiError {
        let errno = match &error {
            CommandError::Leased { .. } => EBUSY,
            CommandError::NoAnswer(_) => ETIMEDOUT,
            CommandError::NoSuchKernel(_) => ENOENT,
            _ => EIO,
        };
        ApiError::new(errno, error)
    }
}

impl From<RingError> for ApiError {
    fn from(error: RingError) -> ApiError {
        let errno = match &error {
            RingError::Full(_) => libc::EAGAIN,
            RingError::TimedOut(_) => ETIMEDOUT,
            RingError::CardGone => ENODEV,
            RingError::OutOfRange(_) => EINVAL,
            _ => EIO,
        };
        ApiError::new(errno, error)
    }
}

impl From<RemoteError> for ApiError {
    fn from(error: RemoteError) -> ApiError {
        let errno = match &error.kind {
            RemoteErrorKind::TimedOut(..) => ETIMEDOUT,
            RemoteErrorKind::Verbs(VerbsError::Connect(error))
                if matches!(error.kind, ConnectErrorKind::TimedOut { .. }) =>
            {
                ETIMEDOUT
            }
            RemoteErrorKind::Leased { .. } => EBUSY,
            RemoteErrorKind::NotLeased(_) => libc::EPERM,
            RemoteErrorKind::NoSuchKernel(_) => ENOENT,
            RemoteErrorKind::OutOfRange { .. } | RemoteErrorKind::NoSuchRegion { .. } => EINVAL,
            RemoteErrorKind::Verbs(VerbsError::Connect(_)) => EIO,
            _ if error.is_fatal() => libc::ENOTCONN,
            _ => EIO,
        };
        ApiError::new(errno, error)
    }
}

/// The latest error of this thread, a sentence; valid until its next error. Never null.
#[unsafe(no_mangle)]
pub extern "C" fn millstream_error() -> *const c_char {
    LATEST.with_borrow(|latest| latest.as_ptr())
}
