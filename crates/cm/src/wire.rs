//! What the core needs from the world: port names, links between processes, and wake-ups.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Instant;

use crate::message::Message;

/// A port name that this process holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClaimId(pub u64);

/// A link to one identifier of another process, or of this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LinkId(pub u64);

/// What a program opened: a queue of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChannelId(pub u64);

/// A port as processes find it: port space, host address (or its family's wildcard), port number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Name {
    /// Port space.
    pub space: u16,
    /// Host.
    pub ip: IpAddr,
    /// Port.
    pub port: u16,
}

impl Name {
    /// The same port on every address of the family.
    #[must_use]
    pub fn wildcard(self) -> Self {
        let ip = match self.ip {
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        Self { ip, ..self }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}/{}/{}", self.space, self.port, self.ip)
    }
}

/// The world, as the core sees it. Nothing here waits.
pub trait Wire {
    /// Takes a port name.
    ///
    /// # Errors
    /// EADDRINUSE if a live process holds it.
    fn claim(&mut self, name: Name) -> io::Result<ClaimId>;
    /// Lets others connect to it, and reports that they did.
    ///
    /// # Errors
    /// What the system reports.
    fn listen(&mut self, claim: ClaimId) -> io::Result<()>;
    /// Gives it back.
    fn release(&mut self, claim: ClaimId);
    /// Whether any live process holds the name.
    fn is_claimed(&mut self, name: Name) -> bool;
    /// Opens a link from the address `own` to the holder of the name, if it listens. On another host that shows
    /// later.
    ///
    /// # Errors
    /// ECONNREFUSED if nobody does.
    fn connect(&mut self, own: IpAddr, name: Name) -> io::Result<LinkId>;
    /// Sends a message; a peer that cannot be told is dying, which is reported elsewhere.
    fn send(&mut self, link: LinkId, message: &Message);
    /// Ends a link; the other side is told.
    fn close(&mut self, link: LinkId);
    /// An event was added to a channel that had none.
    fn ready(&mut self, channel: ChannelId);
    /// From which of this host's addresses packets for another host leave; None if there is no way there, or
    /// it is not to be used.
    fn way_out(&mut self, to: IpAddr) -> Option<IpAddr>;
    /// Code of the path MTU between an address of this host and `to`.
    fn path_mtu(&mut self, own: IpAddr, to: IpAddr) -> u8;
    /// This host's addresses.
    fn addresses(&mut self) -> Vec<IpAddr>;
    /// Where the device's GID table holds `gid` for RoCE v2.
    fn gid_index(&mut self, gid: &[u8; 16]) -> Option<u8>;
    /// The device's name in the world.
    fn node_guid(&mut self) -> u64;
    /// A number that nobody can guess.
    fn random(&mut self) -> u32;
    /// What the clock says.
    fn now(&mut self) -> Instant;
}
