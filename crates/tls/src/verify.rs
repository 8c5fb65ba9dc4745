//! Verification of the peer's certificate: the site's authority, the validity, the name that was dialled.

use std::sync::{Arc, OnceLock};

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{verify_server_cert_signed_by_trust_anchor, verify_server_name};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, RootCertStore, SignatureScheme,
};

use crate::subject::subject;

/// The subject of the certificate that the peer presented, also if it is refused.
pub(crate) type Presented = Arc<OnceLock<String>>;

/// Verifies the certificate of a peer that was dialled. A host name must be in the certificate; an address stands for
/// any node of the site.
#[derive(Debug)]
pub(crate) struct DialledPeer {
    pub(crate) authority: Arc<RootCertStore>,
    pub(crate) provider: Arc<CryptoProvider>,
    pub(crate) presented: Presented,
}

impl ServerCertVerifier for DialledPeer {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let _ = self.presented.set(subject(certificate));
        let parsed = ParsedCertificate::try_from(certificate)?;
        let algorithms = self.provider.signature_verification_algorithms.all;
        verify_server_cert_signed_by_trust_anchor(&parsed, &self.authority, intermediates, now, algorithms)?;
        if matches!(name, ServerName::DnsName(_)) {
            verify_server_name(&parsed, name)?;
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Verifies the certificate of a peer that has connected.
#[derive(Debug)]
pub(crate) struct ConnectedPeer {
    inner: Arc<dyn ClientCertVerifier>,
    presented: Presented,
    /// Nodes that may connect; empty for all of the site.
    nodes: Vec<ServerName<'static>>,
}

impl ConnectedPeer {
    pub(crate) fn new(
        authority: Arc<RootCertStore>,
        provider: Arc<CryptoProvider>,
        presented: Presented,
        nodes: Vec<ServerName<'static>>,
    ) -> Result<ConnectedPeer, Error> {
        let inner = WebPkiClientVerifier::builder_with_provider(authority, provider).build();
        let inner = inner.map_err(|error| Error::General(error.to_string()))?;
        Ok(ConnectedPeer { inner, presented, nodes })
    }
}

impl ClientCertVerifier for ConnectedPeer {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.inner.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let _ = self.presented.set(subject(certificate));
        let verified = self.inner.verify_client_cert(certificate, intermediates, now)?;
        let parsed = ParsedCertificate::try_from(certificate)?;
        let is_listed = self.nodes.iter().any(|node| verify_server_name(&parsed, node).is_ok());
        if !self.nodes.is_empty() && !is_listed {
            return Err(CertificateError::ApplicationVerificationFailure.into());
        }
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}
