//! TLS for HTTP: what servers and clients of other libraries need of keys.

use std::error::Error as StdError;
use std::io;
use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use rustls::pki_types::CertificateDer;
use rustls::{Error, ServerConfig};

use crate::error::SecurityError;
use crate::keys::Keys;
use crate::security::{Security, server_config};
use crate::verify::Presented;

/// The first byte of a TLS handshake (RFC 8446, section 5.1).
pub const HANDSHAKE: u8 = 0x16;

/// The TLS side of one connection to an HTTP server. Its clients present certificates as for control connections.
#[derive(Debug)]
pub struct HttpsConnection {
    config: Arc<ServerConfig>,
    presented: Presented,
    own_subject: String,
}

impl HttpsConnection {
    /// For a connection that was accepted; `None` without keys.
    ///
    /// # Errors
    /// [`SecurityError::Protocol`] if the keys cannot be used.
    pub fn new(security: &Security) -> Result<Option<HttpsConnection>, SecurityError> {
        let Some(keys) = security.keys() else { return Ok(None) };
        let made = server_config(keys, security.nodes());
        let (mut config, presented) = made.map_err(|error| SecurityError::Protocol(error.to_string()))?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Some(HttpsConnection {
            config: Arc::new(config),
            presented,
            own_subject: keys.subject().to_owned(),
        }))
    }

    /// The configuration for the handshake.
    #[must_use]
    pub fn config(&self) -> Arc<ServerConfig> {
        self.config.clone()
    }

    /// Why the handshake failed.
    #[must_use]
    pub fn explain(&self, error: &io::Error) -> String {
        match cause(error) {
            Some(error) => {
                let theirs = self.presented.get().map(String::as_str);
                SecurityError::new(error, theirs, &self.own_subject).to_string()
            }
            None => error.to_string(),
        }
    }
}

impl Keys {
    /// The certificate and its intermediates, for the client of another library.
    #[must_use]
    pub fn chain(&self) -> &[CertificateDer<'static>] {
        &self.certified.cert
    }

    /// The private key in PEM, for the client of another library.
    #[must_use]
    pub fn private_key(&self) -> &[u8] {
        &self.key
    }

    /// The implementation of cryptography, for the client of another library.
    #[must_use]
    pub fn provider(&self) -> Arc<CryptoProvider> {
        self.provider.clone()
    }

    /// The certificates of the authority, for the client of another library.
    #[must_use]
    pub fn authorities(&self) -> &[CertificateDer<'static>] {
        &self.authorities
    }

    /// Why a client of another library failed, if the cause is one of TLS.
    #[must_use]
    pub fn explain(&self, error: &(dyn StdError + 'static)) -> Option<String> {
        let error = cause(error)?;
        // Without the verifier of this crate, the subject of the peer's certificate is not known.
        Some(SecurityError::new(error, None, self.subject()).to_string())
    }
}

/// The error of TLS behind others.
fn cause<'a>(error: &'a (dyn StdError + 'static)) -> Option<&'a Error> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref::<Error>() {
            return Some(found);
        }
        next = match error.downcast_ref::<io::Error>() {
            // Its source is that of the inner error.
            Some(outer) => outer.get_ref().map(|inner| -> &(dyn StdError + 'static) { inner }),
            None => error.source(),
        };
    }
    None
}
