//! Results on standard output, and their paths.

use std::fmt::Arguments;
use std::io::{self, Write as _};
use std::path::Path;

/// Whether a path of results is `-`, standard output.
pub(crate) fn is_standard_output(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// Prints for a command that does more than print: when the reader has closed the pipe, the command goes on, and saves its
/// results. `main` lets commands that only print end then.
pub(crate) fn print(text: Arguments<'_>) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_fmt(text).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        Err(error) => Err(io::Error::new(error.kind(), format!("cannot write to standard output: {error}"))),
        Ok(()) => Ok(()),
    }
}

/// [`print`](fn@print) with the end of a line.
macro_rules! print_line {
    ($($text:tt)*) => { $crate::output::print(format_args!("{}\n", format_args!($($text)*))) };
}
pub(crate) use print_line;
