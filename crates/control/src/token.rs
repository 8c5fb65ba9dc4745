//! The bearer token that permits commands, in a file that only its owner can read.

use crate::error::ControlError;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Random bytes of a new token.
const BYTES: usize = 32;
/// Length limits of a token, in characters.
const LENGTHS: std::ops::RangeInclusive<usize> = 16..=512;

/// A bearer token.
#[derive(Clone)]
pub struct Token(String);

impl Token {
    /// Reads the token. Makes a file with a random one if there is none.
    ///
    /// # Errors
    /// The file cannot be read or made, others can read it, or its content is not a token.
    pub fn load_or_create(path: &Path) -> Result<Token, ControlError> {
        let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
        match made {
            Ok(file) => Token::create(file).map_err(|cause| ControlError::io(path, "write", cause)),
            Err(cause) if cause.kind() == std::io::ErrorKind::AlreadyExists => Token::load(path),
            Err(cause) => Err(ControlError::io(path, "create", cause)),
        }
    }

    fn create(mut file: File) -> std::io::Result<Token> {
        let mut random = [0; BYTES];
        // Up to 256 bytes come whole.
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
        let token: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
        writeln!(file, "{token}")?;
        file.sync_all()?;
        Ok(Token(token))
    }

    /// Reads the token.
    ///
    /// # Errors
    /// As [`load_or_create`](Self::load_or_create).
    pub fn load(path: &Path) -> Result<Token, ControlError> {
        let refuse = |problem: String| ControlError::Token { path: path.to_owned(), problem };
        let file = File::open(path).map_err(|cause| ControlError::io(path, "open", cause))?;
        let meta = file.metadata().map_err(|cause| ControlError::io(path, "read", cause))?;
        let mode = meta.mode() & 0o777;
        if mode & 0o077 != 0 {
            let path = path.display();
            return Err(refuse(format!("mode {mode:04o} lets others read it; run `chmod 600 {path}`")));
        }
        let mut text = String::new();
        let limit = *LENGTHS.end() as u64 + 2;
        file.take(limit).read_to_string(&mut text).map_err(|cause| ControlError::io(path, "read", cause))?;
        let token = text.trim_end();
        if !LENGTHS.contains(&token.len()) || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(refuse(format!(
                "holds no token of {} to {} printable characters; remove it to get a new one",
                LENGTHS.start(),
                LENGTHS.end()
            )));
        }
        Ok(Token(token.to_owned()))
    }

    /// Whether `given` is the token. Takes equally long for all texts of one length.
    pub fn matches(&self, given: &str) -> bool {
        let different = |sum, (a, b): (u8, u8)| sum | (a ^ b);
        self.0.len() == given.len() && self.0.bytes().zip(given.bytes()).fold(0, different) == 0
    }

    /// The token as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(hidden)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_new_token_is_private_and_comes_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        let token = Token::load_or_create(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(token.as_str().len(), 2 * BYTES);
        assert!(Token::load_or_create(&path).unwrap().matches(token.as_str()));
        assert!(
            !token.matches("") && !token.matches(&token.as_str()[1..]) && !token.matches(&"0".repeat(64))
        );
        assert_eq!(format!("{token:?}"), "Token(hidden)");
    }

    #[test]
    fn a_readable_or_odd_file_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        std::fs::write(&path, "0123456789abcdef\n").unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
        let error = Token::load(&path).unwrap_err().to_string();
        assert!(error.contains("token: mode 0644") && error.contains("chmod 600"), "{error}");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        assert!(Token::load(&path).unwrap().matches("0123456789abcdef"));
        for text in ["", "short\n", "0123456789abcdef\nsecond line\n", &"x".repeat(10_000)] {
            std::fs::write(&path, text).unwrap();
            let error = Token::load(&path).unwrap_err().to_string();
            assert!(error.contains("holds no token"), "{error}");
        }
    }
}
