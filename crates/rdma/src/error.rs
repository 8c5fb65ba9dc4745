//! I/O errors inside `sideway`'s errors.
#![forbid(unsafe_code)]

/// Unwraps `$kind(io::Error)`. `sideway`'s error enums are open; any other variant keeps its text.
macro_rules! os_error {
    ($error:expr, $kind:path) => {
        match $error {
            $kind(cause) => cause,
            other => std::io::Error::other(other),
        }
    };
}

pub(crate) use os_error;
