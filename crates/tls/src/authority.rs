//! The authority of a site: its certificate and key, and the keys that it issues to nodes.
//!
//! ```text
//! DIR/authority/certificate.pem, key.pem       stay with the administrator
//! DIR/NODE/certificate.pem, key.pem, authority.pem     go to the node
//! ```
//!
//! A folder is written as `.NAME.new` and renamed when it is complete.

use std::fs::{DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rcgen::{
    BasicConstraints, Certificate, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose,
    IsCa, Issuer, KeyPair, KeyUsagePurpose,
};
use rustls::RootCertStore;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use time::OffsetDateTime;

use crate::keys::{AUTHORITY, CERTIFICATE, KEY, KeyFiles};
use crate::subject::common_name;

/// The directory of the authority.
pub const AUTHORITY_DIRECTORY: &str = "authority";

/// Certificates are valid from this time before they are made, for clocks that differ.
const CLOCK_TOLERANCE: Duration = Duration::from_secs(300);

/// Names of every node: a program that connects to its own host. A list of nodes has none of them
/// ([`Security::for_nodes`](crate::Security::for_nodes)).
const LOCAL_NAMES: [&str; 3] = ["localhost", "127.0.0.1", "::1"];

/// Why keys could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AuthorityError {
    /// A file exists.
    #[error("{} exists; choose another directory, or renew its keys with --renew", .0.display())]
    Exists(PathBuf),
    /// There is no authority to renew keys of.
    #[error(
        "{} has no authority; restore its folder \"{AUTHORITY_DIRECTORY}\", or make new keys without --renew \
         in a directory that has none",
        .0.display()
    )]
    Missing(PathBuf),
    /// A file of an authority is missing.
    #[error(
        "{} is missing; restore it, or make new keys without --renew in another directory", .0.display()
    )]
    Incomplete(PathBuf),
    /// A file cannot be read or written.
    #[error("{}: {cause}", .file.display())]
    File {
        /// The file.
        file: PathBuf,
        /// The cause.
        cause: io::Error,
    },
    /// A certificate or key could not be made or read.
    #[error("{what}: {cause}")]
    Certificate {
        /// Of what.
        what: String,
        /// The cause.
        cause: String,
    },
    /// A node's name cannot be a directory or the name of a certificate.
    #[error("node {0:?}: its name must be a host name, and not \"authority\"")]
    Name(String),
    /// The validity ends out of range.
    #[error("a validity of {} days does not end before the year 10000", .0.as_secs() / 86_400)]
    Validity(Duration),
}

/// From when to when a certificate is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    /// The first moment.
    pub from: SystemTime,
    /// The last moment.
    pub until: SystemTime,
}

impl Validity {
    /// The last moment in universal time, to the minute.
    #[must_use]
    pub fn end(&self) -> String {
        match utc(self.until) {
            Some(end) => format!(
                "{}-{:02}-{:02} {:02}:{:02} UTC",
                end.year(),
                u8::from(end.month()),
                end.day(),
                end.hour(),
                end.minute()
            ),
            None => "the end of time".to_owned(),
        }
    }

    /// From now on, less a tolerance for clocks that differ.
    #[must_use]
    pub fn starting_now(duration: Duration) -> Validity {
        let now = SystemTime::now();
        Validity { from: now - CLOCK_TOLERANCE, until: now + duration }
    }
}

/// An authority.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    /// In PEM.
    certificate: String,
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Authority").finish_non_exhaustive()
    }
}

impl Authority {
    /// Makes an authority with a new key.
    ///
    /// # Errors
    /// [`AuthorityError::Certificate`], [`AuthorityError::Validity`].
    pub fn new(name: &str, validity: Validity) -> Result<Authority, AuthorityError> {
        let failed = |error: rcgen::Error| certificate_error("authority", &error);
        let key = KeyPair::generate().map_err(failed)?;
        let mut params = authority_params(name);
        set_validity(&mut params, validity)?;
        let certificate = params.self_signed(&key).map_err(failed)?.pem();
        Ok(Authority { issuer: Issuer::new(params, key), certificate })
    }

    /// Writes the authority into a directory that has none: all of it, or nothing.
    ///
    /// # Errors
    /// [`AuthorityError::Exists`] if there is one; errors of files.
    pub fn save(&self, directory: &Path) -> Result<(), AuthorityError> {
        let key = self.issuer.key().serialize_pem();
        let own = directory.join(AUTHORITY_DIRECTORY);
        make_directory(&own, &[(KEY, &key), (CERTIFICATE, &self.certificate)])
    }

    /// Reads the authority of a directory.
    ///
    /// # Errors
    /// [`AuthorityError::Missing`], [`AuthorityError::Incomplete`]; errors of files.
    pub fn load(directory: &Path) -> Result<Authority, AuthorityError> {
        let own = directory.join(AUTHORITY_DIRECTORY);
        let read = |name: &str| {
            let file = own.join(name);
            std::fs::read_to_string(&file).map_err(|cause| match cause.kind() {
                io::ErrorKind::NotFound if own.exists() => AuthorityError::Incomplete(file),
                io::ErrorKind::NotFound => AuthorityError::Missing(directory.to_owned()),
                _ => AuthorityError::File { file, cause },
            })
        };
        let (certificate, key) = (read(CERTIFICATE)?, read(KEY)?);
        let invalid = |cause: String| AuthorityError::Certificate { what: own.display().to_string(), cause };
        let key = KeyPair::from_pem(&key).map_err(|error| invalid(error.to_string()))?;
        let der = CertificateDer::from_pem_slice(certificate.as_bytes());
        let der = der.map_err(|error| invalid(error.to_string()))?;
        let name = common_name(&der).and_then(|name| std::str::from_utf8(name).ok());
        let name = name.ok_or_else(|| invalid("its subject has no common name in UTF-8".to_owned()))?;
        Ok(Authority { issuer: Issuer::new(authority_params(name), key), certificate })
    }

    /// Verifies a certificate that this authority has issued, as a node does. It fails if an authority that was read is not as
    /// [`Authority::save`] writes it: its key is of another certificate, or its subject is encoded otherwise.
    fn verify(&self, certificate: &CertificateDer<'_>, validity: Validity) -> Result<(), rustls::Error> {
        let general = |error: &dyn std::error::Error| rustls::Error::General(error.to_string());
        let own =
            CertificateDer::from_pem_slice(self.certificate.as_bytes()).map_err(|error| general(&error))?;
        let mut roots = RootCertStore::empty();
        roots.add(own)?;
        let verifier =
            WebPkiClientVerifier::builder_with_provider(roots.into(), ring::default_provider().into());
        let verifier = verifier.build().map_err(|error| general(&error))?;
        // Any moment of its validity will do: it may have ended, or begin later.
        let from = validity.from.duration_since(UNIX_EPOCH).unwrap_or_default();
        verifier.verify_client_cert(certificate, &[], UnixTime::since_unix_epoch(from)).map(drop)
    }

    /// Issues a certificate for a new key of a node; `names` are host names or addresses of it besides its own name.
    ///
    /// # Errors
    /// [`AuthorityError::Name`], [`AuthorityError::Certificate`], [`AuthorityError::Validity`].
    pub fn issue(
        &self,
        node: &str,
        names: &[String],
        validity: Validity,
    ) -> Result<NodeKeys, AuthorityError> {
        check_name(node)?;
        let failed = |error: rcgen::Error| certificate_error(node, &error);
        let key = KeyPair::generate().map_err(failed)?;
        let mut all: Vec<String> = vec![node.to_owned()];
        for name in names.iter().map(String::as_str).chain(LOCAL_NAMES) {
            if !all.iter().any(|other| other == name) {
                all.push(name.to_owned());
            }
        }
        let mut params = CertificateParams::new(all).map_err(failed)?;
        params.distinguished_name = common_name_only(node);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        set_validity(&mut params, validity)?;
        let certificate: Certificate = params.signed_by(&key, &self.issuer).map_err(failed)?;
        self.verify(certificate.der(), validity).map_err(|error| AuthorityError::Certificate {
            what: node.to_owned(),
            cause: format!(
                "nodes would refuse the new certificate ({error}); make an authority in another directory"
            ),
        })?;
        Ok(NodeKeys {
            certificate: certificate.pem(),
            key: key.serialize_pem(),
            authority: self.certificate.clone(),
        })
    }
}

/// Keys of a node, in PEM.
#[derive(Clone)]
pub struct NodeKeys {
    certificate: String,
    key: String,
    authority: String,
}

impl std::fmt::Debug for NodeKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodeKeys").finish_non_exhaustive()
    }
}

impl NodeKeys {
    /// Writes the keys into a new directory: all of them, or nothing.
    ///
    /// # Errors
    /// [`AuthorityError::Exists`] if there is one; errors of files.
    pub fn create(&self, directory: &Path) -> Result<KeyFiles, AuthorityError> {
        let files = [(KEY, &*self.key), (CERTIFICATE, &self.certificate), (AUTHORITY, &self.authority)];
        make_directory(directory, &files)?;
        Ok(KeyFiles::in_directory(directory))
    }

    /// Replaces the keys of a directory, or makes it. Each file is replaced as a whole.
    ///
    /// # Errors
    /// Errors of files.
    pub fn replace(&self, directory: &Path) -> Result<KeyFiles, AuthorityError> {
        if !directory.exists() {
            return self.create(directory);
        }
        let files = KeyFiles::in_directory(directory);
        let contents = [
            (&files.key, &self.key),
            (&files.certificate, &self.certificate),
            (&files.authority, &self.authority),
        ];
        // All are written before the first is replaced.
        for (file, text) in contents {
            let new = file.with_extension("new");
            match std::fs::remove_file(&new) {
                Err(cause) if cause.kind() != io::ErrorKind::NotFound => {
                    return Err(AuthorityError::File { file: new, cause });
                }
                _ => write_new(&new, text)?,
            }
        }
        for (file, _) in contents {
            std::fs::rename(file.with_extension("new"), file)
                .map_err(|cause| AuthorityError::File { file: file.clone(), cause })?;
        }
        Ok(files)
    }
}

fn certificate_error(what: &str, error: &rcgen::Error) -> AuthorityError {
    AuthorityError::Certificate { what: what.to_owned(), cause: error.to_string() }
}

fn common_name_only(name: &str) -> DistinguishedName {
    let mut distinguished = DistinguishedName::new();
    distinguished.push(DnType::CommonName, name);
    distinguished
}

fn authority_params(name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = common_name_only(name);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params
}

fn utc(time: SystemTime) -> Option<OffsetDateTime> {
    let seconds = time.duration_since(UNIX_EPOCH).ok()?.as_secs();
    OffsetDateTime::from_unix_timestamp(i64::try_from(seconds).ok()?).ok()
}

fn set_validity(params: &mut CertificateParams, validity: Validity) -> Result<(), AuthorityError> {
    let out_of_range =
        || AuthorityError::Validity(validity.until.duration_since(validity.from).unwrap_or_default());
    params.not_before = utc(validity.from).ok_or_else(out_of_range)?;
    params.not_after = utc(validity.until).ok_or_else(out_of_range)?;
    Ok(())
}

/// A node's name is a directory, and a DNS name.
fn check_name(node: &str) -> Result<(), AuthorityError> {
    let is_host_name = rustls::pki_types::DnsName::try_from(node).is_ok();
    if !is_host_name || node == AUTHORITY_DIRECTORY {
        return Err(AuthorityError::Name(node.to_owned()));
    }
    Ok(())
}

/// Makes a directory with these files, each a name and its text. It gets its name when it is complete.
fn make_directory(directory: &Path, files: &[(&str, &str)]) -> Result<(), AuthorityError> {
    if directory.exists() {
        return Err(AuthorityError::Exists(directory.to_owned()));
    }
    let failed = |cause| AuthorityError::File { file: directory.to_owned(), cause };
    let name = directory.file_name().ok_or_else(|| failed(io::ErrorKind::InvalidFilename.into()))?;
    let new = directory.with_file_name(format!(".{}.new", name.to_string_lossy()));
    match std::fs::remove_dir_all(&new) {
        Err(cause) if cause.kind() != io::ErrorKind::NotFound => {
            return Err(AuthorityError::File { file: new, cause });
        }
        // There was none, or one of a process that ended.
        _ => {}
    }
    DirBuilder::new().recursive(true).mode(0o700).create(&new).map_err(failed)?;
    for (file, text) in files {
        write_new(&new.join(file), text)?;
    }
    std::fs::rename(&new, directory).map_err(failed)
}

fn write_new(file: &Path, text: &str) -> Result<(), AuthorityError> {
    let opened = OpenOptions::new().write(true).create_new(true).mode(0o600).open(file);
    let written = opened.and_then(|mut open| {
        open.write_all(text.as_bytes())?;
        open.sync_all()
    });
    written.map_err(|cause| match cause.kind() {
        io::ErrorKind::AlreadyExists => AuthorityError::Exists(file.to_owned()),
        _ => AuthorityError::File { file: file.to_owned(), cause },
    })
}
