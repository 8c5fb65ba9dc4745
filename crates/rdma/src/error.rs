//! The operating system's error inside those of `sideway`.
#![forbid(unsafe_code)]

/// Unwraps `$kind(io::Error)`; `sideway`'s error enums are open, so any other variant keeps its own words.
macro_rules! os_error {
    ($error:expr, $kind:path) => {
        match $error {
            $kind(cause) => cause,
            other => std::io::Error::other(other),
        }
    };
}

pub(crate) use os_error;
