//! Keys of a program: certificate, private key, authority.

use std::fmt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::RootCertStore;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use serde::{Deserialize, Serialize};

use crate::error::KeysError;
#[cfg(feature = "authority")]
use crate::names::alternative_names;
use crate::subject::subject;

/// The environment variable with the keys of a program: a directory of `millstream site keys`, or three files.
pub const ENV_KEYS: &str = "MILLSTREAM_KEYS";

pub(crate) const CERTIFICATE: &str = "certificate.pem";
pub(crate) const KEY: &str = "key.pem";
pub(crate) const AUTHORITY: &str = "authority.pem";

/// The files of a program's keys, each in PEM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeyFiles {
    /// The certificate, with intermediate ones behind it.
    pub certificate: PathBuf,
    /// The private key; only its owner may read it.
    pub key: PathBuf,
    /// The certificate of the site's authority.
    pub authority: PathBuf,
}

impl KeyFiles {
    /// The files of a node's directory that `millstream site keys` made.
    #[must_use]
    pub fn in_directory(directory: &Path) -> KeyFiles {
        KeyFiles {
            certificate: directory.join(CERTIFICATE),
            key: directory.join(KEY),
            authority: directory.join(AUTHORITY),
        }
    }

    /// Relative paths are relative to `base`.
    #[must_use]
    pub fn resolved(&self, base: &Path) -> KeyFiles {
        KeyFiles {
            certificate: base.join(&self.certificate),
            key: base.join(&self.key),
            authority: base.join(&self.authority),
        }
    }

    /// The names and addresses that the certificate is valid for; none if the file is missing.
    ///
    /// # Errors
    /// [`KeysError`] names the file and the problem.
    #[cfg(feature = "authority")]
    pub fn names(&self) -> Result<Vec<String>, KeysError> {
        let chain = match certificates("certificate", &self.certificate) {
            Err(KeysError::Read { cause, .. }) if cause.kind() == std::io::ErrorKind::NotFound => {
                return Ok(Vec::new());
            }
            read => read?,
        };
        alternative_names(&chain[0])
            .ok_or_else(|| content("certificate", &self.certificate, "its names cannot be read".to_owned()))
    }

    /// The files that the environment names, if it does.
    ///
    /// # Errors
    /// [`KeysError::Variable`].
    pub fn from_environment() -> Result<Option<KeyFiles>, KeysError> {
        match std::env::var_os(ENV_KEYS) {
            None => Ok(None),
            Some(value) if value.is_empty() => Ok(None),
            Some(value) => KeyFiles::from_variable(&value.to_string_lossy()).map(Some),
        }
    }

    /// Decodes a value of [`ENV_KEYS`].
    ///
    /// # Errors
    /// [`KeysError::Variable`].
    pub fn from_variable(value: &str) -> Result<KeyFiles, KeysError> {
        match value.split(':').collect::<Vec<_>>()[..] {
            [directory] if !directory.is_empty() => Ok(KeyFiles::in_directory(Path::new(directory))),
            [certificate, key, authority] if ![certificate, key, authority].contains(&"") => {
                Ok(KeyFiles { certificate: certificate.into(), key: key.into(), authority: authority.into() })
            }
            _ => Err(KeysError::Variable { value: value.to_owned() }),
        }
    }

    /// A value of [`ENV_KEYS`] for a program that is started.
    #[must_use]
    pub fn to_variable(&self) -> String {
        let KeyFiles { certificate, key, authority } = self;
        format!("{}:{}:{}", certificate.display(), key.display(), authority.display())
    }
}

/// Keys of a program.
pub struct Keys {
    pub(crate) certified: Arc<CertifiedKey>,
    pub(crate) authority: Arc<RootCertStore>,
    pub(crate) provider: Arc<CryptoProvider>,
    /// The private key in PEM.
    pub(crate) key: Vec<u8>,
    pub(crate) authorities: Vec<CertificateDer<'static>>,
    subject: String,
}

impl Keys {
    /// Reads keys.
    ///
    /// # Errors
    /// [`KeysError`] names the file and the problem.
    pub fn load(files: &KeyFiles) -> Result<Keys, KeysError> {
        let provider = Arc::new(ring::default_provider());
        let chain = certificates("certificate", &files.certificate)?;
        let mut authority = RootCertStore::empty();
        let authorities = certificates("authority", &files.authority)?;
        for certificate in &authorities {
            authority
                .add(certificate.clone())
                .map_err(|error| content("authority", &files.authority, error.to_string()))?;
        }
        let (key, der) = private_key(&files.key)?;
        let signer = provider
            .key_provider
            .load_private_key(der)
            .map_err(|error| content("key", &files.key, error.to_string()))?;
        let subject = subject(&chain[0]);
        let certified = CertifiedKey::new(chain, signer);
        certified.keys_match().map_err(|_| {
            let other = format!("does not belong to the certificate {}", files.certificate.display());
            content("key", &files.key, other)
        })?;
        Ok(Keys {
            certified: Arc::new(certified),
            authority: Arc::new(authority),
            provider,
            key,
            authorities,
            subject,
        })
    }

    /// The subject of the certificate: the node's name.
    #[must_use]
    pub fn subject(&self) -> &str {
        &self.subject
    }
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Keys({})", self.subject)
    }
}

fn content(what: &'static str, file: &Path, problem: String) -> KeysError {
    KeysError::Content { what, file: file.to_owned(), problem }
}

fn read(what: &'static str, file: &Path) -> Result<Vec<u8>, KeysError> {
    std::fs::read(file).map_err(|cause| KeysError::Read { what, file: file.to_owned(), cause })
}

/// At least one certificate.
fn certificates(what: &'static str, file: &Path) -> Result<Vec<CertificateDer<'static>>, KeysError> {
    let bytes = read(what, file)?;
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    let all = all.map_err(|error| content(what, file, error.to_string()))?;
    if all.is_empty() {
        return Err(content(what, file, "has no certificate in PEM".to_owned()));
    }
    Ok(all)
}

/// The private key in PEM and in DER.
fn private_key(file: &Path) -> Result<(Vec<u8>, PrivateKeyDer<'static>), KeysError> {
    let bytes = read("key", file)?;
    let metadata = std::fs::metadata(file);
    let metadata = metadata.map_err(|cause| KeysError::Read { what: "key", file: file.to_owned(), cause })?;
    let mode = metadata.permissions().mode() & 0o7777;
    if mode & 0o077 != 0 {
        return Err(KeysError::Mode { file: file.to_owned(), mode });
    }
    let der = PrivateKeyDer::from_pem_slice(&bytes);
    let der = der.map_err(|error| content("key", file, error.to_string()))?;
    Ok((bytes, der))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_names_a_directory_or_three_files() {
        let directory = KeyFiles::from_variable("keys/node0").unwrap();
        assert_eq!(directory, KeyFiles::in_directory(Path::new("keys/node0")));
        assert_eq!(KeyFiles::from_variable(&directory.to_variable()).unwrap(), directory);
        for value in [":", "a:b", "a:b:", "a:b:c:d"] {
            let error = KeyFiles::from_variable(value).unwrap_err().to_string();
            assert!(error.contains("CERTIFICATE:KEY:AUTHORITY"), "{error}");
        }
    }
}
