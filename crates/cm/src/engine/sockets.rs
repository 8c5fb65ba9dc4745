//! The sockets of the connection manager: port names, links to processes of this host, queue pair 1 to other hosts,
//! event channels. All are in one epoll set.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use millstream_device::gid::{self, GidKind};
use millstream_device::gid_table::GidTable;
use millstream_device::path::{self, PathKind, PathPreference};
use millstream_shm::socket::{BoundSocket, Connection, Listener, own_uid};
use millstream_shm::{EventFd, random_u64};
use millstream_wire::UDP_PORT;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::net::{self, SendFlags};

use crate::address::Address;
use crate::gsi::GsiPort;
use crate::message::Message;
use crate::system::{ChannelId, ClaimId, LinkId, PortName, System};

/// Timeout of a connection attempt to a listener with a full queue, such as that of a stopped process.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(100);

/// The object behind a descriptor in the epoll set.
#[derive(Debug)]
pub(super) enum EpollSource {
    /// A bound name, which is not polled.
    PortName(BoundSocket),
    Listener(Listener),
    Link(Connection),
    Channel(OwnedFd),
}

/// The [`System`] of this process.
#[derive(Debug)]
pub(super) struct Sockets {
    uid: u32,
    pub(super) epoll: OwnedFd,
    /// Wakes the thread when a deadline may have changed.
    pub(super) wake: EventFd,
    pub(super) watched: HashMap<u64, EpollSource>,
    /// Port names that this process holds, and those that it listens on.
    names: HashMap<u64, PortName>,
    listening: HashMap<PortName, ClaimId>,
    /// The process's share of queue pair 1, opened on first use.
    pub(super) gsi: Option<GsiPort>,
    pub(super) next: u64,
}

/// Epoll tokens of the wake-up and of queue pair 1; other tokens follow.
pub(super) const WAKE: u64 = 0;
pub(super) const GSI: u64 = 1;

impl Sockets {
    pub(super) fn new() -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let sockets = Self {
            uid: own_uid(),
            epoll,
            wake: EventFd::latch()?,
            watched: HashMap::new(),
            names: HashMap::new(),
            listening: HashMap::new(),
            gsi: None,
            next: GSI + 1,
        };
        sockets.watch(WAKE, sockets.wake.as_fd(), EventFlags::IN)?;
        Ok(sockets)
    }

    fn watch(&self, token: u64, fd: BorrowedFd<'_>, events: EventFlags) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, EventData::new_u64(token), events)?)
    }

    pub(super) fn add(&mut self, watched: EpollSource) -> io::Result<u64> {
        let token = self.next;
        self.next += 1;
        self.put(token, watched)?;
        Ok(token)
    }

    fn put(&mut self, token: u64, watched: EpollSource) -> io::Result<()> {
        match &watched {
            EpollSource::PortName(_) => {}
            EpollSource::Listener(listener) => self.watch(token, listener.as_fd(), EventFlags::IN)?,
            EpollSource::Link(link) => self.watch(token, link.as_fd(), EventFlags::IN)?,
            // Only the hang-up is of interest.
            EpollSource::Channel(end) => self.watch(token, end.as_fd(), EventFlags::RDHUP)?,
        }
        self.watched.insert(token, watched);
        Ok(())
    }

    /// Queue pair 1, opened on first use.
    fn open_gsi(&mut self) -> io::Result<&mut GsiPort> {
        if self.gsi.is_none() {
            let gsi = GsiPort::open()?;
            gsi.descriptors().try_for_each(|fd| self.watch(GSI, fd, EventFlags::IN))?;
            self.gsi = Some(gsi);
        }
        self.gsi.as_mut().ok_or_else(|| io::ErrorKind::Other.into())
    }

    /// Queue pair 1, if the link leads to another host.
    fn gsi_of(&mut self, link: LinkId) -> Option<&mut GsiPort> {
        self.gsi.as_mut().filter(|gsi| gsi.remote.has(link))
    }

    fn address(&self, name: PortName) -> String {
        format!("millstream/{}/cm/{name}", self.uid)
    }
}

fn gid_of(ip: IpAddr) -> [u8; 16] {
    Address { ip, port: 0, scope: 0 }.gid()
}

fn path_to(ip: IpAddr) -> PathKind {
    path::preference().unwrap_or_default().path_to(&gid_of(ip))
}

impl Sockets {
    /// Tells the processes on the port that this one listens, if other hosts can reach the address.
    fn advertise(&mut self, name: PortName) -> io::Result<()> {
        let reachable = match path::preference().unwrap_or_default() {
            PathPreference::Shm => false,
            PathPreference::Wire => true,
            PathPreference::Auto => !name.ip.is_loopback(),
        };
        if reachable {
            self.open_gsi()?.set_service(name.service_at_address(), true);
        }
        Ok(())
    }

    fn withdraw(&mut self, name: PortName) {
        if let Some(gsi) = &self.gsi {
            gsi.set_service(name.service_at_address(), false);
        }
    }

    /// The listener on a port of an address.
    pub(super) fn listener(&self, name: PortName) -> Option<ClaimId> {
        let found = self.listening.get(&name).or_else(|| self.listening.get(&name.wildcard()));
        found.copied()
    }
}

impl System for Sockets {
    fn claim(&mut self, name: PortName) -> io::Result<ClaimId> {
        let token = self.add(EpollSource::PortName(BoundSocket::bind(&self.address(name))?))?;
        self.names.insert(token, name);
        Ok(ClaimId(token))
    }

    fn listen(&mut self, claim: ClaimId) -> io::Result<()> {
        match self.watched.remove(&claim.0) {
            Some(EpollSource::PortName(bound)) => {
                let name = self.names.get(&claim.0).copied();
                if let Some(name) = name {
                    // Before a peer can find the listener, because it may connect by packets. A failure is ignored:
                    // without the port there are no packets.
                    let _ = self.advertise(name);
                }
                let listener = bound.listen()?;
                listener.set_nonblocking();
                self.put(claim.0, EpollSource::Listener(listener))?;
                if let Some(name) = name {
                    self.listening.insert(name, claim);
                }
                Ok(())
            }
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn release(&mut self, claim: ClaimId) {
        self.watched.remove(&claim.0);
        if let Some(name) = self.names.remove(&claim.0)
            && self.listening.remove(&name).is_some()
        {
            self.withdraw(name);
        }
    }

    fn is_claimed(&mut self, name: PortName) -> bool {
        // Binds the name briefly, because a name that is held without listening is not visible.
        let taken = BoundSocket::bind(&self.address(name));
        taken.is_err_and(|error| error.kind() == io::ErrorKind::AddrInUse)
    }

    fn connect(&mut self, own: IpAddr, name: PortName) -> io::Result<LinkId> {
        match path_to(name.ip) {
            PathKind::Wire => {
                let link = LinkId(self.next);
                self.next += 1;
                self.open_gsi()?.remote.connect(link, own, name);
                return Ok(link);
            }
            PathKind::Unreachable => return Err(io::Error::from_raw_os_error(libc::EHOSTUNREACH)),
            PathKind::Shm => {}
        }
        let open = |name| Connection::open(&self.address(name), CONNECT_TIMEOUT);
        let link = open(name).or_else(|error| {
            let is_refusal = |error: &io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
            open(name.wildcard()).map_err(|second| if is_refusal(&second) { error } else { second })
        })?;
        link.set_nonblocking()?;
        self.add(EpollSource::Link(link)).map(LinkId)
    }

    fn send(&mut self, link: LinkId, message: &Message) {
        if let Some(gsi) = self.gsi_of(link) {
            gsi.remote.send(link, message, Instant::now());
            gsi.flush();
            return self.wake.signal();
        }
        if let Some(EpollSource::Link(link)) = self.watched.get(&link.0) {
            // A link carries few messages, so there is room. Otherwise the peer has exited, and a hang-up
            // follows.
            let _ = link.send(&message.encode(), &[]);
        }
    }

    fn close(&mut self, link: LinkId) {
        if let Some(gsi) = self.gsi_of(link) {
            return gsi.remote.close(link, Instant::now());
        }
        self.watched.remove(&link.0);
    }

    fn ready(&mut self, channel: ChannelId) {
        if let Some(EpollSource::Channel(end)) = self.watched.get(&channel.0) {
            // The socket is empty, so there is room.
            let _ = net::send(end, &[1], SendFlags::NOSIGNAL);
        }
    }

    fn source_address(&mut self, to: IpAddr) -> Option<IpAddr> {
        if path_to(to) != PathKind::Wire {
            return None;
        }
        let any: IpAddr =
            if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        // Nothing is sent: the kernel chooses the source address.
        let socket = UdpSocket::bind((any, 0)).ok()?;
        socket.connect((to, UDP_PORT)).ok()?;
        socket.local_addr().ok().map(|address| address.ip())
    }

    fn path_mtu(&mut self, own: IpAddr, to: IpAddr) -> u8 {
        if path_to(to) != PathKind::Wire {
            return gid::MTU_4096;
        }
        let interface = gid::interface_of(&gid_of(own)).and_then(gid::interface_mtu);
        interface.and_then(gid::path_mtu).unwrap_or(gid::MTU_4096)
    }

    fn addresses(&mut self) -> Vec<IpAddr> {
        let table = GidTable::current();
        let own = table.entries().filter(|(_, entry)| entry.kind == GidKind::RoceV2);
        own.map(|(_, entry)| std::net::Ipv6Addr::from(entry.raw).to_canonical()).collect()
    }

    fn gid_index(&mut self, gid: &[u8; 16]) -> Option<u8> {
        let found =
            GidTable::current().index_of(|entry| entry.kind == GidKind::RoceV2 && entry.raw == *gid)?;
        u8::try_from(found).ok()
    }

    fn node_guid(&mut self) -> u64 {
        gid::node_guid()
    }

    fn random(&mut self) -> u32 {
        random_u64() as u32
    }

    fn now(&mut self) -> Instant {
        Instant::now()
    }
}
