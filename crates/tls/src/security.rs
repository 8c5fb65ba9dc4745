//! How a program makes control connections: with its keys over TLS, or without over TCP.

use std::io;
use std::net::{IpAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;

use millstream_rdma::Deadline;
use millstream_rdma::connect::{ConnectError, ConnectErrorKind, dial, wait_readable};
use rustls::pki_types::ServerName;
use rustls::sign::SingleCertAndKey;
use rustls::version::TLS13;
use rustls::{ClientConfig, ClientConnection, Connection, Error, ServerConfig, ServerConnection};

use crate::error::{KeysError, SecurityError};
use crate::keys::{KeyFiles, Keys};
use crate::stream::{Stream, Tls};
use crate::verify::{ConnectedPeer, DialledPeer, Presented};

const DOING: &str = "making the TLS connection";

/// Keys of a program, or none.
#[derive(Clone, Debug, Default)]
pub struct Security {
    keys: Option<Arc<Keys>>,
    nodes: Vec<ServerName<'static>>,
}

impl Security {
    /// No keys: plain TCP.
    pub const NONE: Security = Security { keys: None, nodes: Vec::new() };

    /// With keys: peers must have a certificate of the same authority.
    #[must_use]
    pub fn new(keys: Keys) -> Security {
        Security { keys: Some(Arc::new(keys)), nodes: Vec::new() }
    }

    /// With the keys that the environment names ([`ENV_KEYS`](crate::ENV_KEYS)), or without.
    ///
    /// # Errors
    /// [`KeysError`] if the keys cannot be used.
    pub fn from_environment() -> Result<Security, KeysError> {
        Security::from_files(KeyFiles::from_environment()?.as_ref())
    }

    /// With the keys of these files, or without.
    ///
    /// # Errors
    /// [`KeysError`] if the keys cannot be used.
    pub fn from_files(files: Option<&KeyFiles>) -> Result<Security, KeysError> {
        Ok(files.map(Keys::load).transpose()?.map_or(Security::NONE, Security::new))
    }

    /// Accepts connections of these nodes only; of all nodes of the site if there are none.
    ///
    /// # Errors
    /// [`KeysError::Node`] for a name that no certificate can have; [`KeysError::LocalNode`] for one that all have;
    /// [`KeysError::Missing`] for nodes without keys.
    pub fn for_nodes(mut self, nodes: &[String]) -> Result<Security, KeysError> {
        let name = |node: &String| match ServerName::try_from(node.clone()) {
            Err(_) => Err(KeysError::Node { name: node.clone() }),
            Ok(name) if is_local(&name) => Err(KeysError::LocalNode { name: node.clone() }),
            Ok(name) => Ok(name),
        };
        if !nodes.is_empty() && !self.is_on() {
            return Err(KeysError::Missing);
        }
        self.nodes = nodes.iter().map(name).collect::<Result<_, _>>()?;
        Ok(self)
    }

    /// Whether connections use TLS.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.keys.is_some()
    }

    /// The keys.
    #[must_use]
    pub fn keys(&self) -> Option<&Keys> {
        self.keys.as_deref()
    }

    pub(crate) fn nodes(&self) -> &[ServerName<'static>] {
        &self.nodes
    }

    /// Connects to `address`, `host:port`, as [`dial`] does. If the host is a name, the peer's certificate must be of
    /// that node.
    ///
    /// # Errors
    /// [`ConnectError`] with the peer's address.
    pub fn dial(&self, address: &str, deadline: Deadline) -> Result<Stream, ConnectError> {
        let tcp = dial(address, deadline)?;
        self.connect(tcp, address, deadline)
    }

    /// Makes a control stream of a TCP stream to `address`, `host:port`.
    ///
    /// # Errors
    /// [`ConnectError`] with the peer's address.
    pub fn connect(&self, tcp: TcpStream, address: &str, deadline: Deadline) -> Result<Stream, ConnectError> {
        let Some(keys) = &self.keys else { return Ok(Stream::plain(tcp)) };
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let tls = ServerName::try_from(host.to_owned())
            .map_err(|_| Error::General(format!("{host:?} is not a host name")))
            .and_then(|name| client(keys, name));
        let tls = tls.map_err(|error| refused(address, &SecurityError::Protocol(error.to_string())))?;
        handshake(Stream::tls(tcp, tls), address, deadline)
    }

    /// Makes a control stream of an accepted TCP stream; waits for the handshake.
    ///
    /// # Errors
    /// [`ConnectError`] with the peer's address.
    pub fn accept(&self, tcp: TcpStream, deadline: Deadline) -> Result<Stream, ConnectError> {
        let peer = tcp.peer_addr().map_or_else(|_| "(unconnected)".to_owned(), |peer| peer.to_string());
        let stream = self.accept_later(tcp).map_err(|error| refused(&peer, &error))?;
        handshake(stream, &peer, deadline)
    }

    /// Makes a control stream of an accepted TCP stream without waiting. Reads and writes continue the handshake.
    ///
    /// # Errors
    /// [`SecurityError::Protocol`] if the keys cannot be used.
    pub fn accept_later(&self, tcp: TcpStream) -> Result<Stream, SecurityError> {
        let Some(keys) = &self.keys else { return Ok(Stream::plain(tcp)) };
        let tls = server(keys, &self.nodes);
        let tls = tls.map_err(|error| SecurityError::Protocol(error.to_string()))?;
        Ok(Stream::tls(tcp, tls))
    }
}

/// Whether a name is of the host that uses it. The authority adds such names to all certificates.
fn is_local(name: &ServerName<'_>) -> bool {
    match name {
        ServerName::DnsName(name) => name.as_ref().trim_end_matches('.').eq_ignore_ascii_case("localhost"),
        ServerName::IpAddress(address) => IpAddr::from(*address).is_loopback(),
        _ => false,
    }
}

fn refused(peer: &str, reason: &SecurityError) -> ConnectError {
    ConnectError { peer: peer.to_owned(), kind: ConnectErrorKind::Security { reason: reason.to_string() } }
}

/// Each connection has its own configuration, whose verifier remembers the certificate that was presented.
fn client(keys: &Keys, name: ServerName<'static>) -> Result<Tls, Error> {
    let presented = Presented::default();
    let verifier = DialledPeer {
        authority: keys.authority.clone(),
        provider: keys.provider.clone(),
        presented: presented.clone(),
    };
    let mut config = ClientConfig::builder_with_provider(keys.provider.clone())
        .with_protocol_versions(&[&TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_client_cert_resolver(Arc::new(SingleCertAndKey::from(keys.certified.clone())));
    config.resumption = rustls::client::Resumption::disabled();
    let connection = Connection::Client(ClientConnection::new(Arc::new(config), name)?);
    Ok(Tls::new(connection, presented, keys.subject().to_owned()))
}

fn server(keys: &Keys, nodes: &[ServerName<'static>]) -> Result<Tls, Error> {
    let (config, presented) = server_config(keys, nodes)?;
    let connection = Connection::Server(ServerConnection::new(Arc::new(config))?);
    Ok(Tls::new(connection, presented, keys.subject().to_owned()))
}

pub(crate) fn server_config(
    keys: &Keys,
    nodes: &[ServerName<'static>],
) -> Result<(ServerConfig, Presented), Error> {
    let presented = Presented::default();
    let verifier =
        ConnectedPeer::new(keys.authority.clone(), keys.provider.clone(), presented.clone(), nodes.to_vec())?;
    let mut config = ServerConfig::builder_with_provider(keys.provider.clone())
        .with_protocol_versions(&[&TLS13])?
        .with_client_cert_verifier(Arc::new(verifier))
        .with_cert_resolver(Arc::new(SingleCertAndKey::from(keys.certified.clone())));
    // The descriptor of a stream without messages must not become readable.
    config.send_tls13_tickets = 0;
    Ok((config, presented))
}

/// Waits for the end of the handshake. The stream's timeouts are removed.
fn handshake(mut stream: Stream, peer: &str, deadline: Deadline) -> Result<Stream, ConnectError> {
    match bounded(&mut stream, deadline) {
        Ok(()) => Ok(stream),
        Err(cause) => Err(match SecurityError::of(&cause) {
            Some(error) => refused(peer, error),
            None => ConnectError::stream(peer, DOING, cause),
        }),
    }
}

fn bounded(stream: &mut Stream, deadline: Deadline) -> io::Result<()> {
    stream.set_nonblocking(true)?;
    loop {
        match stream.handshake() {
            Ok(()) => break,
            Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => {
                // What a handshake sends fits into the buffer of a new socket.
                wait_readable(stream.as_fd(), deadline)?;
            }
            Err(cause) => return Err(cause),
        }
    }
    stream.set_nonblocking(false)
}
