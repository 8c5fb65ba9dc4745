//! The connection manager of this process, with its sockets and its thread.
//!
//! Commands run in the program's threads under one lock, which no thread holds while it waits. One thread
//! polls the sockets and the timers, so that connections progress while the program is busy.
//!
//! An event channel is one end of a socket pair. While events wait, it holds a byte, so that it polls like
//! the device file, also after `dup` or `fork`. Channels are identified by their inode, so descriptors need
//! not be tracked. The other end reports a hang-up when the program has closed all descriptors of the
//! channel.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

use millstream_device::gid::{self, GidKind};
use millstream_device::gsi;
use millstream_device::path::{self, PathKind, PathPreference};
use millstream_shm::socket::{BoundSocket, Connection, Listener, own_uid};
use millstream_shm::thread::spawn;
use millstream_shm::{EventFd, random_u64};
use millstream_wire::UDP_PORT;

use crate::address::Address;
use crate::command::Command;
use crate::hosts::Hosts;
use crate::manager::Manager;
use crate::message::{MAX_LEN, Message};
use crate::remote::Heard;
use crate::wire::{ChannelId, ClaimId, LinkId, Name, Wire};
use crate::{Errno, Result};

/// Timeout of a connection attempt to a listener with a full queue, such as that of a stopped process.
const CONNECT_PATIENCE: Duration = Duration::from_millis(100);

/// What a descriptor in the epoll set belongs to.
#[derive(Debug)]
enum Watched {
    /// A bound name, which is not polled.
    Name(BoundSocket),
    Listener(Listener),
    Link(Connection),
    Channel(OwnedFd),
}

/// The [`CmIo`] of this process.
#[derive(Debug)]
struct Sockets {
    uid: u32,
    epoll: OwnedFd,
    /// Wakes the thread when a deadline may have changed.
    wake: EventFd,
    watched: HashMap<u64, Watched>,
    /// Port names that this process holds, and those that it listens on, with their service names for other
    /// hosts.
    names: HashMap<u64, Name>,
    listening: HashMap<Name, (ClaimId, Option<Listener>)>,
    /// The process's share of queue pair 1, opened on first use.
    hosts: Option<Hosts>,
    next: u64,
}

/// Epoll tokens of the wake-up and of queue pair 1; other tokens follow.
const WAKE: u64 = 0;
const HOSTS: u64 = 1;

impl Sockets {
    fn new() -> io::Result<Self> {
        // SAFETY: creates a descriptor that nobody else owns.
        let epoll = unsafe {
            match libc::epoll_create1(libc::EPOLL_CLOEXEC) {
                -1 => return Err(io::Error::last_os_error()),
                fd => OwnedFd::from_raw_fd(fd),
            }
        };
        let sockets = Self {
            uid: own_uid(),
            epoll,
            wake: EventFd::latch()?,
            watched: HashMap::new(),
            names: HashMap::new(),
            listening: HashMap::new(),
            hosts: None,
            next: HOSTS + 1,
        };
        sockets.watch(WAKE, sockets.wake.as_fd(), libc::EPOLLIN)?;
        Ok(sockets)
    }

    fn watch(&self, token: u64, fd: BorrowedFd<'_>, events: i32) -> io::Result<()> {
        let mut event = libc::epoll_event { events: events.cast_unsigned(), u64: token };
        // SAFETY: two live descriptors and an event on the stack.
        let failed = unsafe {
            libc::epoll_ctl(self.epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, fd.as_raw_fd(), &raw mut event)
        };
        if failed == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    fn add(&mut self, watched: Watched) -> io::Result<u64> {
        let token = self.next;
        self.next += 1;
        self.put(token, watched)?;
        Ok(token)
    }

    fn put(&mut self, token: u64, watched: Watched) -> io::Result<()> {
        match &watched {
            Watched::Name(_) => {}
            Watched::Listener(listener) => self.watch(token, listener.as_fd(), libc::EPOLLIN)?,
            Watched::Link(link) => self.watch(token, link.as_fd(), libc::EPOLLIN)?,
            // Only the hang-up is of interest.
            Watched::Channel(end) => self.watch(token, end.as_fd(), libc::EPOLLRDHUP)?,
        }
        self.watched.insert(token, watched);
        Ok(())
    }

    /// Queue pair 1, opened on first use.
    fn hosts(&mut self) -> io::Result<&mut Hosts> {
        if self.hosts.is_none() {
            let hosts = Hosts::open()?;
            hosts.descriptors().into_iter().try_for_each(|fd| self.watch(HOSTS, fd, libc::EPOLLIN))?;
            self.hosts = Some(hosts);
        }
        self.hosts.as_mut().ok_or_else(|| io::ErrorKind::Other.into())
    }

    /// Queue pair 1, if the link leads to another host.
    fn hosts_of(&mut self, link: LinkId) -> Option<&mut Hosts> {
        self.hosts.as_mut().filter(|hosts| hosts.remote.has(link))
    }

    fn address(&self, name: Name) -> String {
        format!("millstream/{}/cm/{name}", self.uid)
    }
}

fn gid_of(ip: IpAddr) -> [u8; 16] {
    Address { ip, port: 0, scope: 0 }.gid()
}

/// The path to an address; wildcards are local.
fn path_to(ip: IpAddr) -> PathKind {
    let preference = path::preference().unwrap_or_default();
    if ip.is_unspecified() { PathKind::Shm } else { preference.path_to(&gid_of(ip)) }
}

impl Sockets {
    /// Advertises to other hosts' requests that this process listens, if they can reach the address.
    fn offer(&mut self, name: Name) -> io::Result<Option<Listener>> {
        let offered = match path::preference().unwrap_or_default() {
            PathPreference::Shm => false,
            PathPreference::Wire => true,
            PathPreference::Auto => !name.ip.is_loopback(),
        };
        if !offered {
            return Ok(None);
        }
        let block = self.hosts()?.block;
        let service = u64::from(name.space) << 16 | u64::from(name.port);
        // Only names of listening sockets are found.
        Listener::bind(&gsi::service_name(service, block)).map(Some)
    }

    /// The listener on a port of an address.
    fn listener(&self, name: Name) -> Option<ClaimId> {
        let found = self.listening.get(&name).or_else(|| self.listening.get(&name.wildcard()));
        found.map(|(claim, _)| *claim)
    }
}

impl Wire for Sockets {
    fn claim(&mut self, name: Name) -> io::Result<ClaimId> {
        let token = self.add(Watched::Name(BoundSocket::bind(&self.address(name))?))?;
        self.names.insert(token, name);
        Ok(ClaimId(token))
    }

    fn listen(&mut self, claim: ClaimId) -> io::Result<()> {
        match self.watched.remove(&claim.0) {
            Some(Watched::Name(bound)) => {
                let name = self.names.get(&claim.0).copied();
                // The service name comes first, so that a peer that sees the listener can connect by packets,
                // too. Failures are ignored: without the port there are no packets, and the service may be
                // advertised already.
                let service = name.and_then(|name| self.offer(name).unwrap_or(None));
                let listener = bound.listen()?;
                listener.set_nonblocking()?;
                self.put(claim.0, Watched::Listener(listener))?;
                if let Some(name) = name {
                    self.listening.insert(name, (claim, service));
                }
                Ok(())
            }
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn release(&mut self, claim: ClaimId) {
        self.watched.remove(&claim.0);
        if let Some(name) = self.names.remove(&claim.0) {
            self.listening.remove(&name);
        }
    }

    fn is_claimed(&mut self, name: Name) -> bool {
        // Binds the name for a moment: a name that is held without listening is not visible otherwise.
        let taken = BoundSocket::bind(&self.address(name));
        taken.is_err_and(|error| error.kind() == io::ErrorKind::AddrInUse)
    }

    fn connect(&mut self, own: IpAddr, name: Name) -> io::Result<LinkId> {
        if path_to(name.ip) == PathKind::Wire {
            let link = LinkId(self.next);
            self.next += 1;
            self.hosts()?.remote.connect(link, own, name);
            return Ok(link);
        }
        let link = Connection::open(&self.address(name), CONNECT_PATIENCE)?;
        link.set_nonblocking()?;
        self.add(Watched::Link(link)).map(LinkId)
    }

    fn send(&mut self, link: LinkId, message: &Message) {
        if let Some(hosts) = self.hosts_of(link) {
            hosts.remote.send(link, message, Instant::now());
            hosts.flush();
            return self.wake.signal();
        }
        if let Some(Watched::Link(link)) = self.watched.get(&link.0) {
            // Few messages travel on a link, so there is room; otherwise the peer is gone, and a hang-up
            // follows.
            let _ = link.send(&message.encode(), &[]);
        }
    }

    fn close(&mut self, link: LinkId) {
        if let Some(hosts) = self.hosts_of(link) {
            return hosts.remote.close(link, Instant::now());
        }
        self.watched.remove(&link.0);
    }

    fn ready(&mut self, channel: ChannelId) {
        if let Some(Watched::Channel(end)) = self.watched.get(&channel.0) {
            // SAFETY: writes one byte from a static. The socket is empty, so there is room.
            unsafe { libc::send(end.as_raw_fd(), [1u8].as_ptr().cast(), 1, libc::MSG_NOSIGNAL) };
        }
    }

    fn way_out(&mut self, to: IpAddr) -> Option<IpAddr> {
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
        let own = gid::table().into_iter().filter(|entry| entry.kind == GidKind::RoceV2);
        own.map(|entry| std::net::Ipv6Addr::from(entry.raw).to_canonical()).collect()
    }

    fn gid_index(&mut self, gid: &[u8; 16]) -> Option<u8> {
        let table = gid::table();
        let found = table.iter().position(|entry| entry.kind == GidKind::RoceV2 && entry.raw == *gid)?;
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

/// The connection manager and its sockets.
#[derive(Debug)]
struct Engine {
    pid: u32,
    manager: Manager,
    sockets: Sockets,
}

/// The connection manager of this process, and the channels of this process and its ancestors.
#[derive(Debug)]
struct Process {
    engine: Option<Engine>,
    /// Inode, process that owns the connection manager, channel.
    channels: Vec<(u64, u32, ChannelId)>,
}

static PROCESS: Mutex<Process> = Mutex::new(Process { engine: None, channels: Vec::new() });
/// Number of channels; while it is zero, intercepted calls take the fast path.
static CHANNELS: AtomicUsize = AtomicUsize::new(0);

fn process() -> MutexGuard<'static, Process> {
    PROCESS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Process {
    /// The connection manager, created on first use and again in a forked child.
    fn engine(&mut self) -> io::Result<&mut Engine> {
        if self.engine.is_none() {
            prepare_for_forks();
            prepare_for_the_end();
            let sockets = Sockets::new()?;
            let epoll = sockets.epoll.as_raw_fd();
            let engine = Engine { pid: std::process::id(), manager: Manager::default(), sockets };
            spawn("mill-cm", move || watch(epoll))?;
            self.engine = Some(engine);
        }
        self.engine.as_mut().ok_or_else(|| io::ErrorKind::Other.into())
    }
}

/// Whether any channel is open: a cheap test, almost always false.
#[must_use]
#[inline]
pub fn has_channels() -> bool {
    CHANNELS.load(Ordering::Relaxed) != 0
}

/// Opens a channel with `O_CLOEXEC` and `O_NONBLOCK` as in `flags`.
///
/// # Errors
/// If sockets or the thread cannot be created.
pub fn open(flags: i32) -> io::Result<OwnedFd> {
    let mut kind = libc::SOCK_STREAM;
    kind |= if flags & libc::O_CLOEXEC != 0 { libc::SOCK_CLOEXEC } else { 0 };
    kind |= if flags & libc::O_NONBLOCK != 0 { libc::SOCK_NONBLOCK } else { 0 };
    let mut ends = [-1; 2];
    // SAFETY: fills in two new descriptors, which nobody else owns.
    let (theirs, ours) = unsafe {
        if libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()) != 0 {
            return Err(io::Error::last_os_error());
        }
        libc::fcntl(ends[1], libc::F_SETFD, libc::FD_CLOEXEC);
        (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1]))
    };
    let inode = socket_inode(theirs.as_raw_fd()).ok_or(io::ErrorKind::Other)?;
    let mut process = process();
    let engine = process.engine()?;
    let pid = engine.pid;
    let channel = ChannelId(engine.sockets.add(Watched::Channel(ours))?);
    engine.manager.open(channel);
    process.channels.push((inode, pid, channel));
    CHANNELS.store(process.channels.len(), Ordering::Relaxed);
    Ok(theirs)
}

/// The inode of a descriptor, if it is a socket.
fn socket_inode(fd: RawFd) -> Option<u64> {
    // SAFETY: fills in a structure on the stack.
    unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        // By system call: `fstat` itself may be intercepted and call this function.
        let failed = libc::syscall(libc::SYS_fstat, fd, &raw mut stat);
        (failed == 0 && stat.st_mode & libc::S_IFMT == libc::S_IFSOCK).then_some(stat.st_ino)
    }
}

/// Whether `fd` is a channel.
#[must_use]
pub fn is_channel(fd: RawFd) -> bool {
    has_channels()
        && socket_inode(fd).is_some_and(|inode| process().channels.iter().any(|(other, ..)| *other == inode))
}

impl Process {
    /// The channel of `fd`, or EIO if another process owns it.
    fn channel(&self, fd: RawFd) -> Option<Result<ChannelId>> {
        let inode = socket_inode(fd)?;
        let (_, pid, channel) = self.channels.iter().find(|(other, ..)| *other == inode)?;
        let alive = self.engine.as_ref().is_some_and(|engine| engine.pid == *pid);
        // A forked child inherits channels, but not their connection manager.
        Some(if alive { Ok(*channel) } else { Err(Errno(libc::EIO)) })
    }
}

/// Result of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Done,
    /// GET_EVENT found no event.
    Empty,
}

/// Executes a command written to `fd`; `None` if that is not a channel.
///
/// Like a write to the device, the call is a thread cancellation point while it waits for an event; it holds
/// nothing then.
///
/// # Safety
/// The addresses in the command are valid.
pub unsafe fn write(fd: RawFd, written: &[u8]) -> Option<Result<usize>> {
    loop {
        // SAFETY: the caller vouches for the addresses.
        let outcome = without_cancellation(|| unsafe { once(fd, written) });
        match outcome? {
            Ok(Outcome::Done) => return Some(Ok(written.len())),
            Ok(Outcome::Empty) => {
                if let Err(error) = wait(fd) {
                    return Some(Err(error));
                }
            }
            Err(error) => return Some(Err(error)),
        }
    }
}

unsafe extern "C" {
    fn pthread_setcancelstate(state: i32, old: *mut i32) -> i32;
}

/// Runs code that must not be cancelled because it holds the lock.
fn without_cancellation<R>(run: impl FnOnce() -> R) -> R {
    const DISABLE: i32 = 1;
    let (mut before, mut unused) = (0, 0);
    // SAFETY: changes a state of this thread, and changes it back.
    unsafe { pthread_setcancelstate(DISABLE, &raw mut before) };
    let result = run();
    // SAFETY: as above.
    unsafe { pthread_setcancelstate(before, &raw mut unused) };
    result
}

unsafe extern "C-unwind" {
    fn recv(fd: i32, to: *mut libc::c_void, len: usize, flags: i32) -> isize;
}

/// Waits until the channel has an event; EAGAIN on a non-blocking channel.
fn wait(fd: RawFd) -> Result<()> {
    let mut byte = 0u8;
    // SAFETY: one byte on the stack.
    let n = unsafe { recv(fd, (&raw mut byte).cast(), 1, libc::MSG_PEEK) };
    if n < 0 { Err(io::Error::last_os_error().into()) } else { Ok(()) }
}

/// # Safety
/// As for [`write`].
unsafe fn once(fd: RawFd, written: &[u8]) -> Option<Result<Outcome>> {
    let mut process = process();
    let channel = match process.channel(fd)? {
        Ok(channel) => channel,
        Err(error) => return Some(Err(error)),
    };
    let command = match Command::parse(written) {
        Ok(command) => command,
        Err(error) => return Some(Err(error)),
    };
    let from = command.moves_from().and_then(|fd| Some((fd, process.channel(fd)?.ok()?)));
    let Engine { manager, sockets, .. } = process.engine.as_mut()?;
    // SAFETY: the caller vouches for the addresses.
    Some(unsafe {
        if command.is_get_event() {
            command.get_event(manager, channel).map(|more| {
                if more == Some(false) {
                    drain(fd);
                }
                if more.is_some() { Outcome::Done } else { Outcome::Empty }
            })
        } else {
            let before = manager.deadline();
            let channels = [(fd, channel)].into_iter().chain(from);
            let waiting: Vec<_> = channels.filter(|(_, channel)| manager.has_event(*channel)).collect();
            let done = command.run(manager, sockets, channel, from.map(|(_, channel)| channel));
            let nearer = manager.deadline().is_some_and(|new| before.is_none_or(|old| new < old));
            if nearer {
                sockets.wake.signal();
            }
            // The command may have removed the last events together with their identifier.
            for (fd, _) in waiting.into_iter().filter(|(_, channel)| !manager.has_event(*channel)) {
                drain(fd);
            }
            done.map(|()| Outcome::Done)
        }
    })
}

/// Takes the byte that signals waiting events.
fn drain(fd: RawFd) {
    let mut byte = 0u8;
    // SAFETY: one byte on the stack.
    unsafe { libc::recv(fd, (&raw mut byte).cast(), 1, libc::MSG_DONTWAIT) };
}

/// The thread: polls until the process ends.
fn watch(epoll: RawFd) {
    let mut timeout = -1;
    loop {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 64];
        // SAFETY: an array of the given length.
        let n = unsafe { libc::epoll_wait(epoll, events.as_mut_ptr(), events.len() as i32, timeout) };
        let interrupted = || io::Error::last_os_error().kind() == io::ErrorKind::Interrupted;
        if n < 0 && !interrupted() {
            // The program closed our descriptor, for example by closing all descriptors. Nothing works from
            // here on.
            return;
        }
        let mut process = process();
        let Some(engine) = process.engine.as_mut() else { return };
        let mut closed = Vec::new();
        for event in &events[..usize::try_from(n).unwrap_or(0)] {
            if let Some(channel) = engine.handle(event.u64) {
                closed.push(channel);
            }
        }
        timeout = engine.expire().map_or(-1, |time| {
            let left = time.saturating_duration_since(Instant::now());
            // Rounded up, so that the deadline has passed when the wait ends.
            i32::try_from(left.as_millis() + 1).unwrap_or(i32::MAX)
        });
        if !closed.is_empty() {
            process.channels.retain(|(_, _, channel)| !closed.contains(channel));
            CHANNELS.store(process.channels.len(), Ordering::Relaxed);
        }
    }
}

impl Engine {
    /// Handles an event of the descriptor with this token; returns a channel that was closed.
    fn handle(&mut self, token: u64) -> Option<ChannelId> {
        if token == WAKE {
            self.sockets.wake.clear();
            return None;
        }
        if token == HOSTS {
            self.receive_from_hosts();
            return None;
        }
        match self.sockets.watched.get(&token)? {
            Watched::Listener(listener) => {
                match listener.accept().and_then(|link| link.set_nonblocking().map(|()| link)) {
                    Ok(link) => {
                        if let Ok(id) = self.sockets.add(Watched::Link(link)) {
                            self.manager.accepted(ClaimId(token), LinkId(id));
                        }
                    }
                    Err(error) => rest_after(&error),
                }
            }
            Watched::Link(_) => self.receive(LinkId(token)),
            Watched::Name(_) => {}
            Watched::Channel(_) => {
                let channel = ChannelId(token);
                self.manager.close(&mut self.sockets, channel);
                self.sockets.watched.remove(&token);
                return Some(channel);
            }
        }
        None
    }

    /// Handles messages of other hosts' connection managers.
    fn receive_from_hosts(&mut self) {
        let heard = self.sockets.hosts.as_mut().map(Hosts::receive).unwrap_or_default();
        for heard in heard {
            match heard {
                Heard::Message(link, message) => self.manager.message(&mut self.sockets, link, message),
                Heard::Request(asked) => {
                    let claim = self.sockets.listener(asked.name);
                    let link = LinkId(self.sockets.next);
                    self.sockets.next += 1;
                    let Some(hosts) = &mut self.sockets.hosts else { return };
                    let Some(claim) = claim else {
                        hosts.remote.refuse(&asked);
                        continue;
                    };
                    hosts.remote.adopt(link, &asked);
                    self.manager.accepted(claim, link);
                    self.manager.message(&mut self.sockets, link, asked.message);
                }
            }
        }
        if let Some(hosts) = &mut self.sockets.hosts {
            hosts.flush();
        }
    }

    /// Handles expired timers; returns the next deadline.
    fn expire(&mut self) -> Option<Instant> {
        self.manager.expire(&mut self.sockets);
        let remote = self.sockets.hosts.as_mut().and_then(|hosts| {
            hosts.remote.expire(Instant::now());
            hosts.flush();
            hosts.remote.deadline()
        });
        [self.manager.deadline(), remote].into_iter().flatten().min()
    }

    /// Handles all messages of a link, and its end.
    fn receive(&mut self, id: LinkId) {
        let mut buffer = [0; MAX_LEN];
        loop {
            // The message may have closed the link.
            let Some(Watched::Link(link)) = self.sockets.watched.get(&id.0) else { return };
            match link.receive(&mut buffer) {
                Ok((0, _)) => return self.manager.hung_up(&mut self.sockets, id),
                Ok((n, _)) => match Message::decode(&buffer[..n]) {
                    Some(message) => self.manager.message(&mut self.sockets, id, message),
                    // Another version, or malformed.
                    None => return self.manager.hung_up(&mut self.sockets, id),
                },
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // The peer closed with unread data; what it sent before is still readable.
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::ConnectionReset | io::ErrorKind::Interrupted
                    ) => {}
                Err(_) => return self.manager.hung_up(&mut self.sockets, id),
            }
        }
    }
}

/// Timeout for replies to the last messages at exit. A lost message is sent three times within it.
const PARTING: Duration = Duration::from_secs(1);
/// Polling interval at exit.
const PARTING_STEP: Duration = Duration::from_millis(1);

/// Registers the exit handler, which disconnects from other hosts: they see no hang-up.
fn prepare_for_the_end() {
    static REGISTERED: Once = Once::new();
    REGISTERED.call_once(|| {
        // Without memory for the registration, others learn of the end by retries that run out.
        // SAFETY: the handler may run at any time from now on: the library stays loaded.
        let _ = unsafe { libc::atexit(at_exit) };
    });
}

/// Does what the kernel does when it closes the descriptors of a process, and waits for the replies. Messages
/// and retransmissions come from the thread, which ends with the process.
extern "C" fn at_exit() {
    let deadline = Instant::now() + PARTING;
    let mut said = false;
    while Instant::now() < deadline {
        // The exiting thread may have interrupted one that holds the lock, possibly itself.
        if let Ok(mut process) = PROCESS.try_lock() {
            let Process { engine: Some(engine), channels } = &mut *process else { return };
            if engine.sockets.hosts.is_none() {
                return;
            }
            if !std::mem::replace(&mut said, true) {
                for (_, _, channel) in channels.iter().filter(|(_, pid, _)| *pid == engine.pid) {
                    engine.manager.close(&mut engine.sockets, *channel);
                }
            }
            if !engine.sockets.hosts.as_ref().is_some_and(|hosts| hosts.remote.awaits_answers()) {
                return;
            }
        }
        std::thread::sleep(PARTING_STEP);
    }
}

/// Out of descriptors: the connection stays queued and would be reported again at once.
fn rest_after(error: &io::Error) {
    if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM)) {
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Holds the lock from before a fork until after it, in the forking thread.
static FORKING: Mutex<Forking> = Mutex::new(Forking(None));
struct Forking(Option<MutexGuard<'static, Process>>);
// SAFETY: put in and taken out by the same thread, the one that forks; its child's copy of that thread is the only
// thread of the child.
unsafe impl Send for Forking {}
static REGISTERED: Once = Once::new();

/// Registers the fork handlers. A child must not hold any socket: names would outlive the process that owns
/// them.
fn prepare_for_forks() {
    REGISTERED.call_once(|| {
        // Without memory for the registration, children keep copies of what they do not use.
        // SAFETY: the handlers only take and release locks and close descriptors.
        let _ = unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(in_child)) };
    });
}

fn forking() -> MutexGuard<'static, Forking> {
    FORKING.lock().unwrap_or_else(PoisonError::into_inner)
}

extern "C" fn before_fork() {
    let held = process();
    forking().0 = Some(held);
}

extern "C" fn after_fork() {
    let held = forking().0.take();
    drop(held);
}

extern "C" fn in_child() {
    let held = forking().0.take();
    if let Some(mut process) = held {
        // Closes the child's copies; the thread that polled them does not exist here. The port's thread does
        // not exist either, so its membership cannot be ended in the regular way.
        if let Some(hosts) = process.engine.take().and_then(|engine| engine.sockets.hosts) {
            std::mem::forget(hosts);
        }
    }
}
