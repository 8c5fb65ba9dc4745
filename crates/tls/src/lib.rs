//! Mutual TLS of control connections between the hosts of a site.
//!
//! A site has an authority (feature `authority`), which issues one certificate and key to each node. A program with
//! [`Keys`] accepts and makes control connections over TLS 1.3; both ends present their certificates. A program without
//! keys uses plain TCP. Read [`Security`] first.
//!
//! TLS covers the TCP streams over which queue pairs are connected, and the HTTP API of run control. It does not cover the RDMA traffic of the queue pairs.
#![forbid(unsafe_code)]

#[cfg(feature = "authority")]
pub mod authority;
mod error;
mod http;
mod keys;
#[cfg(feature = "authority")]
mod names;
mod record;
mod security;
mod stream;
mod subject;
mod verify;

pub use error::{KeysError, SecurityError};
pub use http::{HANDSHAKE, HttpsConnection};
pub use keys::{ENV_KEYS, KeyFiles, Keys};
pub use rustls::pki_types::CertificateDer;
pub use security::Security;
pub use stream::Stream;
pub use subject::subject;
