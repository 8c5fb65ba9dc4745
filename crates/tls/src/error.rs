//! Errors of keys and of peers.

use std::io;
use std::path::PathBuf;

use rustls::{AlertDescription, CertificateError, Error};

use crate::keys::ENV_KEYS;

/// Why keys cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeysError {
    /// A file cannot be read.
    #[error("{what} {}: {cause}", .file.display())]
    Read {
        /// Its purpose.
        what: &'static str,
        /// The file.
        file: PathBuf,
        /// The cause.
        cause: io::Error,
    },
    /// A file has invalid content.
    #[error("{what} {}: {problem}", .file.display())]
    Content {
        /// Its purpose.
        what: &'static str,
        /// The file.
        file: PathBuf,
        /// The problem.
        problem: String,
    },
    /// Other users can read the private key.
    #[error("key {}: others can read it (mode {mode:04o}); set its mode to 0600", .file.display())]
    Mode {
        /// The file.
        file: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// The process has no keys.
    #[error("keys are required, and this process has none; set {ENV_KEYS} (millstream site keys)")]
    Missing,
    /// A node's name is invalid.
    #[error("node {name:?}: is neither a host name nor an address")]
    Node {
        /// The name.
        name: String,
    },
    /// A list of nodes has a name of this host, which all certificates have.
    #[error(
        "node {name:?}: the certificates of all nodes have this name; use the node's name of the site file"
    )]
    LocalNode {
        /// The name.
        name: String,
    },
    /// The environment variable has an invalid value.
    #[error("{ENV_KEYS}={value}: expected a directory, or CERTIFICATE:KEY:AUTHORITY")]
    Variable {
        /// Its value.
        value: String,
    },
}

/// Why a peer was refused, or refused this program.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SecurityError {
    /// The peer uses plain TCP.
    #[error("does not use TLS: it has no keys; set {ENV_KEYS} or [security] for it as for this program")]
    Plain,
    /// The peer closed the stream during the handshake.
    #[error(
        "closed the connection during the TLS handshake; it may have no keys: set {ENV_KEYS} or [security] for it"
    )]
    Closed,
    /// The peer presented no certificate.
    #[error("presented no certificate; give it keys of this site (millstream site keys)")]
    NoCertificate,
    /// The peer's certificate is refused.
    #[error("the certificate of {subject:?} is refused: {reason}")]
    Certificate {
        /// Its subject.
        subject: String,
        /// Why.
        reason: String,
    },
    /// The peer refused this program's certificate.
    #[error("refused this program's certificate of {subject:?}: {reason}")]
    Refused {
        /// The subject of this program's certificate.
        subject: String,
        /// Why.
        reason: String,
    },
    /// The TLS handshake or a record is invalid.
    #[error("TLS failed: {0}")]
    Protocol(String),
}

impl SecurityError {
    /// The cause of an error of a stream, if it is one of TLS.
    #[must_use]
    pub fn of(error: &io::Error) -> Option<&SecurityError> {
        error.get_ref()?.downcast_ref()
    }

    /// Classifies an error of TLS. `theirs` is the subject of the peer's certificate, `ours` that of this program.
    pub(crate) fn new(error: &Error, theirs: Option<&str>, ours: &str) -> SecurityError {
        match error {
            Error::InvalidMessage(_) | Error::PeerIncompatible(_) if theirs.is_none() => SecurityError::Plain,
            Error::NoCertificatesPresented => SecurityError::NoCertificate,
            Error::InvalidCertificate(reason) => SecurityError::Certificate {
                subject: theirs.unwrap_or("(none)").to_owned(),
                reason: reason_of(reason),
            },
            Error::AlertReceived(alert) => match alert_reason(*alert) {
                Some(reason) => {
                    SecurityError::Refused { subject: ours.to_owned(), reason: reason.to_owned() }
                }
                None => SecurityError::Protocol(format!("received alert {alert:?}")),
            },
            other => SecurityError::Protocol(other.to_string()),
        }
    }
}

impl From<SecurityError> for io::Error {
    fn from(error: SecurityError) -> io::Error {
        io::Error::new(io::ErrorKind::PermissionDenied, error)
    }
}

/// The text of a certificate's error for an operator.
fn reason_of(error: &CertificateError) -> String {
    match error {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            format!("it has expired ({error}); renew it: millstream site keys --renew")
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            format!("it is not valid yet ({error}); compare the clocks of both hosts")
        }
        CertificateError::UnknownIssuer
        | CertificateError::BadSignature
        | CertificateError::UnsupportedSignatureAlgorithmContext { .. } => {
            "the authority of this site did not issue it".to_owned()
        }
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            format!("it is of another node ({error})")
        }
        CertificateError::ApplicationVerificationFailure => {
            "its node is not on the list of nodes that may connect".to_owned()
        }
        other => other.to_string(),
    }
}

/// What the peer's alert says about this program's certificate.
fn alert_reason(alert: AlertDescription) -> Option<&'static str> {
    match alert {
        AlertDescription::CertificateExpired => {
            Some("it has expired or is not valid yet; renew it: millstream site keys --renew")
        }
        AlertDescription::UnknownCA | AlertDescription::DecryptError => {
            Some("the peer's authority did not issue it")
        }
        AlertDescription::CertificateRequired => Some("none was presented"),
        AlertDescription::BadCertificate
        | AlertDescription::CertificateUnknown
        | AlertDescription::UnsupportedCertificate => Some("it is invalid or of another node"),
        AlertDescription::AccessDenied => Some("its node is not on the peer's list of nodes"),
        _ => None,
    }
}
