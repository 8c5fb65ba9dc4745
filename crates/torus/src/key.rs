//! Keys of runs and of seventh ports: where a process gets one, and what is derived from one.
//!
//! Other users read the arguments of a process and the names of abstract sockets, so neither has a key.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use ring::hmac::{self, HMAC_SHA256, Key};

/// Environment variable with the key of a run, 16 hexadecimal digits.
pub const ENV_KEY: &str = "MILLSTREAM_TORUS_KEY";

/// Digits of a key. A shorter one could be searched: whoever connects gets a proof that tells whether a key is right.
const DIGITS: usize = 16;
/// Longest line with a key: the digits, and space that an editor leaves.
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
    /// Other users can read or write the file.
    #[error("key file {file:?}: mode {mode:04o} gives others access; run `chmod 600` on it")]
    Mode {
        /// The file.
        file: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// It is no key. The text is not shown: it may be one in part.
    #[error("{place} has no key: expected 16 hexadecimal digits")]
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
        let failed = |cause| KeyError::Unreadable { file: "standard input".into(), cause };
        ("standard input".to_owned(), read_line().map_err(failed)?)
    } else {
        (format!("{file:?}"), read_file(file)?)
    };
    parse(&text).ok_or(KeyError::Malformed { place })
}

/// The start of a file that others cannot read.
fn read_file(file: &Path) -> Result<String, KeyError> {
    let failed = |cause| KeyError::Unreadable { file: file.to_owned(), cause };
    let opened = File::open(file).map_err(failed)?;
    let metadata = opened.metadata().map_err(failed)?;
    let mode = metadata.mode() & 0o777;
    // A pipe of the shell, for example, has another mode.
    if metadata.is_file() && mode & 0o077 != 0 {
        return Err(KeyError::Mode { file: file.to_owned(), mode });
    }
    let mut text = String::new();
    opened.take(MAX_LINE as u64).read_to_string(&mut text).map_err(failed)?;
    Ok(text)
}

/// A line of standard input, byte by byte: others read the rest.
fn read_line() -> io::Result<String> {
    let input = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    let mut line = Vec::new();
    while (&input).take(1).read_to_end(&mut line)? == 1 && !line.ends_with(b"\n") && line.len() < MAX_LINE {}
    String::from_utf8(line).map_err(|_| io::ErrorKind::InvalidData.into())
}

pub(crate) fn parse(text: &str) -> Option<u64> {
    let digits = text.trim_ascii();
    let is_key = digits.len() == DIGITS && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    u64::from_str_radix(digits, 16).ok().filter(|_| is_key)
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
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_key_is_sixteen_hexadecimal_digits_with_space_around() {
        for (text, key) in [(" 00000000000000FF\n", Some(255)), ("ffffffffffffffff", Some(u64::MAX))] {
            assert_eq!(parse(text), key, "{text:?}");
        }
        for wrong in
            ["", "\n", "c0", "+000000000000001", "0x00000000000001", "10000000000000000", "12345678 12345678"]
        {
            assert_eq!(parse(wrong), None, "{wrong:?}");
        }
        assert_eq!(parse(&text(0x1234)), Some(0x1234));
    }

    #[test]
    fn errors_name_the_file_or_the_variable_and_not_the_text() {
        let temporary = tempfile::Builder::new().prefix("millstream-key-").tempfile().unwrap();
        let file = temporary.path().to_owned();
        let set_mode = |mode| std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
        std::fs::write(&file, "secret\n").unwrap();
        let malformed = read(&file).unwrap_err().to_string();
        std::fs::write(&file, text(7)).unwrap();
        let key = read(&file);
        set_mode(0o640);
        let readable = read(&file).unwrap_err().to_string();
        temporary.close().unwrap();
        assert!(malformed.contains("millstream-key") && !malformed.contains("secret"), "{malformed}");
        assert!(matches!(key, Ok(7)));
        assert!(readable.contains("millstream-key") && readable.contains("mode 0640"), "{readable}");
        assert!(matches!(read(&file), Err(KeyError::Unreadable { .. })));
        let missing = find(None, "--key-file", "MILLSTREAM_TORUS_NO_KEY").unwrap_err().to_string();
        assert_eq!(missing, "no key: name a file with --key-file, or set MILLSTREAM_TORUS_NO_KEY");
    }

    #[test]
    fn what_is_derived_depends_on_key_and_label() {
        let numbers = [derive(1, b"a"), derive(1, b"b"), derive(2, b"a"), 1, 2];
        let different = numbers.iter().collect::<std::collections::BTreeSet<_>>();
        assert_eq!(different.len(), numbers.len());
        assert_eq!(derive(1, b"a"), numbers[0]);
    }
}
