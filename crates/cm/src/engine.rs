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
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
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
use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::net::{self, AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

use crate::address::Address;
use crate::command::Command;
use crate::gsi::GsiPort;
use crate::io::{ChannelId, ClaimId, CmIo, LinkId, PortName};
use crate::manager::Manager;
use crate::message::{MAX_LEN, Message};
use crate::remote::CmEvent;
use crate::{Errno, Result};

/// Timeout of a connection attempt to a listener with a full queue, such as that of a stopped process.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(100);

/// The object behind a descriptor in the epoll set.
#[derive(Debug)]
enum EpollSource {
    /// A bound name, which is not polled.
    PortName(BoundSocket),
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
    watched: HashMap<u64, EpollSource>,
    /// Port names that this process holds, and those that it listens on, with their service names for other
    /// hosts.
    names: HashMap<u64, PortName>,
    listening: HashMap<PortName, (ClaimId, Option<Listener>)>,
    /// The process's share of queue pair 1, opened on first use.
    gsi: Option<GsiPort>,
    next: u64,
}

/// Epoll tokens of the wake-up and of queue pair 1; other tokens follow.
const WAKE: u64 = 0;
const GSI: u64 = 1;

impl Sockets {
    fn new() -> io::Result<Self> {
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

    fn add(&mut self, watched: EpollSource) -> io::Result<u64> {
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
            let hosts = GsiPort::open()?;
            hosts.descriptors().into_iter().try_for_each(|fd| self.watch(GSI, fd, EventFlags::IN))?;
            self.gsi = Some(hosts);
        }
        self.gsi.as_mut().ok_or_else(|| io::ErrorKind::Other.into())
    }

    /// Queue pair 1, if the link leads to another host.
    fn gsi_of(&mut self, link: LinkId) -> Option<&mut GsiPort> {
        self.gsi.as_mut().filter(|hosts| hosts.remote.has(link))
    }

    fn address(&self, name: PortName) -> String {
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
    fn advertise(&mut self, name: PortName) -> io::Result<Option<Listener>> {
        let advertised = match path::preference().unwrap_or_default() {
            PathPreference::Shm => false,
            PathPreference::Wire => true,
            PathPreference::Auto => !name.ip.is_loopback(),
        };
        if !advertised {
            return Ok(None);
        }
        let block = self.open_gsi()?.block;
        let service = u64::from(name.space) << 16 | u64::from(name.port);
        // Peers find only names of listening sockets.
        Listener::bind(&gsi::service_name(service, block)).map(Some)
    }

    /// The listener on a port of an address.
    fn listener(&self, name: PortName) -> Option<ClaimId> {
        let found = self.listening.get(&name).or_else(|| self.listening.get(&name.wildcard()));
        found.map(|(claim, _)| *claim)
    }
}

impl CmIo for Sockets {
    fn claim(&mut self, name: PortName) -> io::Result<ClaimId> {
        let token = self.add(EpollSource::PortName(BoundSocket::bind(&self.address(name))?))?;
        self.names.insert(token, name);
        Ok(ClaimId(token))
    }

    fn listen(&mut self, claim: ClaimId) -> io::Result<()> {
        match self.watched.remove(&claim.0) {
            Some(EpollSource::PortName(bound)) => {
                let name = self.names.get(&claim.0).copied();
                // The service name comes first, so that a peer that finds the listener can connect by
                // packets, too. Failures are ignored: without the port there are no packets, and the service
                // may be advertised already.
                let service = name.and_then(|name| self.advertise(name).unwrap_or(None));
                let listener = bound.listen()?;
                listener.set_nonblocking()?;
                self.put(claim.0, EpollSource::Listener(listener))?;
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

    fn is_claimed(&mut self, name: PortName) -> bool {
        // Binds the name briefly, because a name that is held without listening is not visible.
        let taken = BoundSocket::bind(&self.address(name));
        taken.is_err_and(|error| error.kind() == io::ErrorKind::AddrInUse)
    }

    fn connect(&mut self, own: IpAddr, name: PortName) -> io::Result<LinkId> {
        if path_to(name.ip) == PathKind::Wire {
            let link = LinkId(self.next);
            self.next += 1;
            self.open_gsi()?.remote.connect(link, own, name);
            return Ok(link);
        }
        let link = Connection::open(&self.address(name), CONNECT_TIMEOUT)?;
        link.set_nonblocking()?;
        self.add(EpollSource::Link(link)).map(LinkId)
    }

    fn send(&mut self, link: LinkId, message: &Message) {
        if let Some(hosts) = self.gsi_of(link) {
            hosts.remote.send(link, message, Instant::now());
            hosts.flush();
            return self.wake.signal();
        }
        if let Some(EpollSource::Link(link)) = self.watched.get(&link.0) {
            // A link carries few messages, so there is room. Otherwise the peer has exited, and a hang-up
            // follows.
            let _ = link.send(&message.encode(), &[]);
        }
    }

    fn close(&mut self, link: LinkId) {
        if let Some(hosts) = self.gsi_of(link) {
            return hosts.remote.close(link, Instant::now());
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
struct ProcessState {
    engine: Option<Engine>,
    /// Inode, process that owns the connection manager, channel.
    channels: Vec<(u64, u32, ChannelId)>,
}

static PROCESS: Mutex<ProcessState> = Mutex::new(ProcessState { engine: None, channels: Vec::new() });
/// Number of channels; while it is zero, intercepted calls take the fast path.
static CHANNELS: AtomicUsize = AtomicUsize::new(0);

fn process() -> MutexGuard<'static, ProcessState> {
    PROCESS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ProcessState {
    /// The connection manager, created on first use and again in a forked child.
    fn engine(&mut self) -> io::Result<&mut Engine> {
        if self.engine.is_none() {
            register_fork_handlers();
            register_exit_handler();
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
    millstream_log::init();
    let mut kind = SocketFlags::empty();
    kind.set(SocketFlags::CLOEXEC, flags & libc::O_CLOEXEC != 0);
    kind.set(SocketFlags::NONBLOCK, flags & libc::O_NONBLOCK != 0);
    let (theirs, ours) = net::socketpair(AddressFamily::UNIX, SocketType::STREAM, kind, None)?;
    fcntl_setfd(&ours, FdFlags::CLOEXEC)?;
    let inode = socket_inode(theirs.as_raw_fd()).ok_or(io::ErrorKind::Other)?;
    let mut process = process();
    let engine = process.engine()?;
    let pid = engine.pid;
    let channel = ChannelId(engine.sockets.add(EpollSource::Channel(ours))?);
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
        // A direct system call, because an intercepted `fstat` would call this function. rustix requires an open
        // descriptor, and the program may pass any number.
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

impl ProcessState {
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
enum CommandStatus {
    Done,
    /// GET_EVENT found no event.
    NoEvent,
}

/// Executes a command written to `fd`; `None` if that is not a channel.
///
/// Like a write to the device, the call is a thread cancellation point while it waits for an event. It holds
/// no lock then.
///
/// # Safety
/// The addresses in the command are valid.
pub unsafe fn write(fd: RawFd, written: &[u8]) -> Option<Result<usize>> {
    loop {
        // SAFETY: the caller vouches for the addresses.
        let outcome = without_cancellation(|| unsafe { try_write(fd, written) });
        match outcome? {
            Ok(CommandStatus::Done) => return Some(Ok(written.len())),
            Ok(CommandStatus::NoEvent) => {
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

// The C library's function is a thread cancellation point, where the stack may unwind; a system call by rustix is none.
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
unsafe fn try_write(fd: RawFd, written: &[u8]) -> Option<Result<CommandStatus>> {
    let mut process = process();
    let channel = match process.channel(fd)? {
        Ok(channel) => channel,
        Err(error) => return Some(Err(error)),
    };
    let command = match Command::parse(written) {
        Ok(command) => command,
        Err(error) => return Some(Err(error)),
    };
    let from = command.source_channel().and_then(|fd| Some((fd, process.channel(fd)?.ok()?)));
    let Engine { manager, sockets, .. } = process.engine.as_mut()?;
    // SAFETY: the caller vouches for the addresses.
    Some(unsafe {
        if command.is_get_event() {
            command.get_event(manager, channel).map(|more| {
                if more == Some(false) {
                    drain(fd);
                }
                if more.is_some() { CommandStatus::Done } else { CommandStatus::NoEvent }
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
            done.map(|()| CommandStatus::Done)
        }
    })
}

/// Takes the byte that signals waiting events.
fn drain(fd: RawFd) {
    // SAFETY: the program's descriptor, which was found to be a channel under the lock.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let _ = net::recv(fd, &mut [0u8; 1], RecvFlags::DONTWAIT);
}

/// The body of the thread: polls until the process exits.
fn watch(epoll: RawFd) {
    let mut timeout = None;
    let mut events = Vec::with_capacity(64);
    loop {
        events.clear();
        // SAFETY: the engine owns the descriptor until the process ends.
        let epoll = unsafe { BorrowedFd::borrow_raw(epoll) };
        match epoll::wait(epoll, spare_capacity(&mut events), timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            // The program has closed our descriptor, for example with all descriptors. The connection manager
            // cannot continue.
            Err(_) => return,
        }
        let mut process = process();
        let Some(engine) = process.engine.as_mut() else { return };
        let mut closed = Vec::new();
        for event in &events {
            if let Some(channel) = engine.handle(event.data.u64()) {
                closed.push(channel);
            }
        }
        timeout = engine.expire().map(|time| {
            let left = time.saturating_duration_since(Instant::now());
            // Rounded up, so that the deadline has passed when the wait ends.
            let millis = left.as_millis() as i64 + 1;
            Timespec { tv_sec: millis / 1000, tv_nsec: millis % 1000 * 1_000_000 }
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
        if token == GSI {
            self.receive_from_gsi();
            return None;
        }
        match self.sockets.watched.get(&token)? {
            EpollSource::Listener(listener) => {
                match listener.accept().and_then(|link| link.set_nonblocking().map(|()| link)) {
                    Ok(link) => {
                        if let Ok(id) = self.sockets.add(EpollSource::Link(link)) {
                            self.manager.accepted(ClaimId(token), LinkId(id));
                        }
                    }
                    Err(error) => back_off(&error),
                }
            }
            EpollSource::Link(_) => self.receive(LinkId(token)),
            EpollSource::PortName(_) => {}
            EpollSource::Channel(_) => {
                let channel = ChannelId(token);
                self.manager.close(&mut self.sockets, channel);
                self.sockets.watched.remove(&token);
                return Some(channel);
            }
        }
        None
    }

    /// Handles messages of other hosts' connection managers.
    fn receive_from_gsi(&mut self) {
        let heard = self.sockets.gsi.as_mut().map(GsiPort::receive).unwrap_or_default();
        for heard in heard {
            match heard {
                CmEvent::Message(link, message) => self.manager.message(&mut self.sockets, link, message),
                CmEvent::Request(request) => {
                    let claim = self.sockets.listener(request.name);
                    let link = LinkId(self.sockets.next);
                    self.sockets.next += 1;
                    let Some(hosts) = &mut self.sockets.gsi else { return };
                    let Some(claim) = claim else {
                        hosts.remote.reject(&request);
                        continue;
                    };
                    hosts.remote.adopt(link, &request);
                    self.manager.accepted(claim, link);
                    self.manager.message(&mut self.sockets, link, request.message);
                }
            }
        }
        if let Some(hosts) = &mut self.sockets.gsi {
            hosts.flush();
        }
    }

    /// Handles expired timers; returns the next deadline.
    fn expire(&mut self) -> Option<Instant> {
        self.manager.expire(&mut self.sockets);
        let remote = self.sockets.gsi.as_mut().and_then(|hosts| {
            hosts.remote.expire(Instant::now());
            hosts.flush();
            hosts.remote.deadline()
        });
        [self.manager.deadline(), remote].into_iter().flatten().min()
    }

    /// Handles all messages of a link, and its hang-up.
    fn receive(&mut self, id: LinkId) {
        let mut buffer = [0; MAX_LEN];
        loop {
            // The message may have closed the link.
            let Some(EpollSource::Link(link)) = self.sockets.watched.get(&id.0) else { return };
            match link.receive(&mut buffer) {
                Ok((0, _)) => return self.manager.hang_up(&mut self.sockets, id),
                Ok((n, _)) => match Message::decode(&buffer[..n]) {
                    Some(message) => self.manager.message(&mut self.sockets, id, message),
                    // Another version, or malformed.
                    None => return self.manager.hang_up(&mut self.sockets, id),
                },
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // The peer closed with unread data; what it sent before is still readable.
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::ConnectionReset | io::ErrorKind::Interrupted
                    ) => {}
                Err(_) => return self.manager.hang_up(&mut self.sockets, id),
            }
        }
    }
}

/// Timeout for replies to the last messages at exit. A lost message is sent three times within it.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);
/// Polling interval at exit.
const EXIT_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Registers the exit handler, which disconnects from other hosts: they see no hang-up.
fn register_exit_handler() {
    static REGISTERED: Once = Once::new();
    REGISTERED.call_once(|| {
        // Without memory for the registration, other hosts detect the exit when their retries expire. SAFETY:
        // the handler may run at any time from now on: the library stays loaded.
        let _ = unsafe { libc::atexit(at_exit) };
    });
}

/// Closes all identifiers, as the kernel does at the exit of a process, and waits for the replies. Messages
/// and retransmissions come from the thread, which ends with the process.
extern "C" fn at_exit() {
    let deadline = Instant::now() + EXIT_TIMEOUT;
    let mut said = false;
    while Instant::now() < deadline {
        // The exiting thread may have interrupted one that holds the lock, possibly itself.
        if let Ok(mut process) = PROCESS.try_lock() {
            let ProcessState { engine: Some(engine), channels } = &mut *process else { return };
            if engine.sockets.gsi.is_none() {
                return;
            }
            if !std::mem::replace(&mut said, true) {
                for (_, _, channel) in channels.iter().filter(|(_, pid, _)| *pid == engine.pid) {
                    engine.manager.close(&mut engine.sockets, *channel);
                }
            }
            if !engine.sockets.gsi.as_ref().is_some_and(|hosts| hosts.remote.has_unanswered()) {
                return;
            }
        }
        std::thread::sleep(EXIT_POLL_INTERVAL);
    }
}

/// Out of descriptors: the connection stays queued and would be reported again at once.
fn back_off(error: &io::Error) {
    if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM)) {
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Holds the lock from before a fork until after it, in the forking thread.
static FORKING: Mutex<ForkGuard> = Mutex::new(ForkGuard(None));
struct ForkGuard(Option<MutexGuard<'static, ProcessState>>);
// SAFETY: the forking thread stores and removes the guard. The child's only thread is its copy.
unsafe impl Send for ForkGuard {}
static REGISTERED: Once = Once::new();

/// Registers the fork handlers. A child must not hold any socket: names would outlive the process that owns
/// them.
fn register_fork_handlers() {
    REGISTERED.call_once(|| {
        // Without memory for the registration, children keep unused copies of the descriptors.
        // SAFETY: the handlers only take and release locks and close descriptors.
        let _ = unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(in_child)) };
    });
}

fn forking() -> MutexGuard<'static, ForkGuard> {
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
        if let Some(hosts) = process.engine.take().and_then(|engine| engine.sockets.gsi) {
            std::mem::forget(hosts);
        }
    }
}
