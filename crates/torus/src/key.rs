//! Keys of runs and of seventh ports: where a process gets one, and what is derived from one.
//!
//! Other users read the arguments of a process and the names of abstract sockets, so neither has a key.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use ring::hmac::{self, HMAC_SHA256, Key};

/// Environment variable with the key of a run, in hexadecimal digits.
pub const ENV_KEY: &str = "MILLSTREAM_TORUS_KEY";

/// Longest line with a key: 16 digits and what an editor leaves behind them.
const MAX_LINE: usize = 64;

/// Why a process has no key.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// Neither a file nor the environment has it.
    #[error("no key: name a file with {option}, or set {variable}")]
    Missing {
        /// The option for a file.
        option: &'static str,
        /// The environment variable.
        variable: &'static str,
    },
    /// The file cannot be read.
    #[error("key file {file:?}: {cause}")]
    Unreadable {
        /// The file.
        file: PathBuf,
        /// The cause.
        cause: io::Error,
    },
    /// It is no key. The text is not shown: it may be one in part.
    #[error("{place} has no key: expected 1 to 16 hexadecimal digits")]
    Malformed {
        /// The file or variable.
        place: String,
    },
}

/// A key from `file`, or else from an environment variable. The file `-` is a line of standard input.
///
/// # Errors
/// [`KeyError`]; `option` names the option for the file.
pub fn find(file: Option<&Path>, option: &'static str, variable: &'static str) -> Result<u64, KeyError> {
    match file {
        Some(file) => read(file),
        None => {
            let text = std::env::var(variable).map_err(|_| KeyError::Missing { option, variable })?;
            parse(&text).ok_or_else(|| KeyError::Malformed { place: variable.to_owned() })
        }
    }
}

/// A key from a file. The file `-` is a line of standard input; what follows there is left.
///
/// # Errors
/// [`KeyError`].
pub fn read(file: &Path) -> Result<u64, KeyError> {
    let (place, text) = if file == Path::new("-") {
        ("standard input".to_owned(), read_line())
    } else {
        let mut text = String::new();
        let read = File::open(file).and_then(|opened| opened.take(MAX_LINE as u64).read_to_string(&mut text));
        (format!("{file:?}"), read.map(|_| text))
    };
    let text = text.map_err(|cause| KeyError::Unreadable { file: file.to_owned(), cause })?;
    parse(&text).ok_or(KeyError::Malformed { place })
}

/// A line of standard input, byte by byte: others read the rest.
fn read_line() -> io::Result<String> {
    let input = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    let mut line = Vec::new();
    while (&input).take(1).read_to_end(&mut line)? == 1 && !line.ends_with(b"\n") && line.len() < MAX_LINE {}
    String::from_utf8(line).map_err(|_| io::ErrorKind::InvalidData.into())
}

fn parse(text: &str) -> Option<u64> {
    let digits = text.trim_ascii();
    let is_digits = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    u64::from_str_radix(digits, 16).ok().filter(|_| is_digits)
}

/// A key as text.
#[must_use]
pub fn text(key: u64) -> String {
    format!("{key:016x}")
}

/// A number that tells nothing about the key, for a label that nothing else has.
pub(crate) fn derive(key: u64, label: &[u8]) -> u64 {
    let tag = hmac::sign(&Key::new(HMAC_SHA256, &key.to_le_bytes()), label);
    tag.as_ref().iter().take(8).fold(0, |number, &byte| number << 8 | u64::from(byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_hexadecimal_digits_with_space_around() {
        for (text, key) in [("c0", Some(0xc0)), (" 00FF\n", Some(255)), ("ffffffffffffffff", Some(u64::MAX))]
        {
            assert_eq!(parse(text), key, "{text:?}");
        }
        for wrong in ["", "\n", "+1", "0x1", "10000000000000000", "1 2", "key"] {
            assert_eq!(parse(wrong), None, "{wrong:?}");
        }
        assert_eq!(parse(&text(0x1234)), Some(0x1234));
    }

    #[test]
    fn errors_name_the_file_or_the_variable_and_not_the_text() {
        let folder = std::env::temp_dir().join(format!("millstream-key-{}", std::process::id()));
        std::fs::write(&folder, "secret\n").unwrap();
        let error = read(&folder).unwrap_err().to_string();
        std::fs::remove_file(&folder).unwrap();
        assert!(error.contains("millstream-key") && !error.contains("secret"), "{error}");
        assert!(matches!(read(&folder), Err(KeyError::Unreadable { .. })));
        let error = find(None, "--key-file", "MILLSTREAM_TORUS_NO_KEY").unwrap_err().to_string();
        assert_eq!(error, "no key: name a file with --key-file, or set MILLSTREAM_TORUS_NO_KEY");
    }

    #[test]
    fn what_is_derived_depends_on_key_and_label() {
        let numbers = [derive(1, b"a"), derive(1, b"b"), derive(2, b"a"), 1, 2];
        let different = numbers.iter().collect::<std::collections::BTreeSet<_>>();
        assert_eq!(different.len(), numbers.len());
        assert_eq!(derive(1, b"a"), numbers[0]);
    }
}
