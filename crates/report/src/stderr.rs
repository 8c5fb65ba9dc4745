//! Messages on standard error.

use std::fmt::Arguments;
use std::io::Write as _;

/// Prints on standard error. The text is lost if that is a full disk or a pipe without a reader; [`eprint!`] panics then, which would
/// end a run.
pub fn eprint(text: Arguments<'_>) {
    // One write, so that lines of several processes do not mix.
    let _ = std::io::stderr().write_all(text.to_string().as_bytes());
}

/// Prints a line on standard error, like [`eprintln!`], but without a panic if that fails.
#[macro_export]
macro_rules! eprint_line {
    ($($text:tt)*) => { $crate::eprint(format_args!("{}\n", format_args!($($text)*))) };
}
