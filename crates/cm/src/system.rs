//! The manager's interface to the outside: port names, links between processes, wake-ups.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Instant;

use millstream_link::Service;

use crate::message::Message;

/// A port name that this process holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClaimId(pub u64);

/// A link to an identifier of another process, or of this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LinkId(pub u64);

/// An event channel that the program opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChannelId(pub u64);

/// A port name: port space, host address or wildcard, port number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PortName {
    /// Port space.
    pub space: u16,
    /// Host address.
    pub ip: IpAddr,
    /// Port number.
    pub port: u16,
}

impl PortName {
    /// The name of this port on the wildcard address of the family.
    #[must_use]
    pub fn wildcard(self) -> Self {
        let ip = match self.ip {
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        Self { ip, ..self }
    }
}

impl PortName {
    /// The service at this address, for the processes on the port.
    #[must_use]
    pub fn service_at_address(self) -> Service {
        Service::new(self.service(), self.ip)
    }

    /// The service ID of the port (IBTA annex A11).
    #[must_use]
    pub fn service(self) -> u64 {
        u64::from(self.space) << 16 | u64::from(self.port)
    }
}

impl fmt::Display for PortName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}/{}/{}", self.space, self.port, self.ip)
    }
}

/// I/O of the connection manager. No function blocks.
pub trait System {
    /// Binds a port name.
    ///
    /// # Errors
    /// EADDRINUSE if a live process holds it.
    fn claim(&mut self, name: PortName) -> io::Result<ClaimId>;
    /// Accepts links to the port; each is reported to the manager.
    ///
    /// # Errors
    /// If the socket cannot listen.
    fn listen(&mut self, claim: ClaimId) -> io::Result<()>;
    /// Releases a port name.
    fn release(&mut self, claim: ClaimId);
    /// Whether a live process holds the name.
    fn is_claimed(&mut self, name: PortName) -> bool;
    /// Opens a link from the address `own` to the listener of a port, or of the port on the wildcard address of the
    /// same host. Errors of other hosts are reported later.
    ///
    /// # Errors
    /// ECONNREFUSED if there is no listener on this host; others if the path to the host cannot be used.
    fn connect(&mut self, own: IpAddr, name: PortName) -> io::Result<LinkId>;
    /// Sends a message. A failure means that the peer is ending, which a hang-up reports.
    fn send(&mut self, link: LinkId, message: &Message);
    /// Closes a link, which the peer sees.
    fn close(&mut self, link: LinkId);
    /// Signals the first event of a channel.
    fn ready(&mut self, channel: ChannelId);
    /// The local source address of packets to another host; `None` if there is no route, or it must not be
    /// used.
    fn source_address(&mut self, to: IpAddr) -> Option<IpAddr>;
    /// Path MTU code between a local address and `to`.
    fn path_mtu(&mut self, own: IpAddr, to: IpAddr) -> u8;
    /// Addresses of this host.
    fn addresses(&mut self) -> Vec<IpAddr>;
    /// GID table index of `gid` for RoCE v2.
    fn gid_index(&mut self, gid: &[u8; 16]) -> Option<u8>;
    /// Node GUID of the device.
    fn node_guid(&mut self) -> u64;
    /// An unpredictable number.
    fn random(&mut self) -> u32;
    /// The current time.
    fn now(&mut self) -> Instant;
}
