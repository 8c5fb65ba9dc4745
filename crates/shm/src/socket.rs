//! UNIX sockets that carry file descriptors (`unix(7)`, `SCM_RIGHTS`).
//!
//! Addresses are abstract: they exist while a process holds them, belong to one network namespace, and leave no
//! file behind. They have no permissions, so the user of the peer must be checked. [`Connection::open`] and
//! [`Listener::accept`] do so; the variants `_any_user` leave it to the caller.
//!
//! A forked child keeps none of the sockets ([`CloseOnForkFd`]): a name is free, and peers see a hang-up, as soon as the process
//! itself has closed them or exited.

use std::collections::BTreeSet;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::fs::OFlags;
use rustix::io::retry_on_intr;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use rustix::time::Timespec;

use crate::fork::CloseOnForkFd;
use crate::poll_readable;

/// Longest wait of [`Connection::open`] for a listener whose queue is full.
pub const QUEUE_WAIT: Duration = Duration::from_millis(20);
const QUEUE_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Most descriptors of one message.
pub const MAX_FDS: usize = 4;

/// Size of the control message with [`MAX_FDS`] descriptors \[bytes\].
const CONTROL_BYTES: usize = rustix::cmsg_space!(ScmRights(MAX_FDS));

/// Credentials of the peer, as reported by the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// Process id in our PID namespace; zero if the process is not visible there.
    pub pid: u32,
    /// Effective user id.
    pub uid: u32,
}

/// The effective user id of this process.
#[must_use]
pub fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

fn address(name: &str) -> io::Result<SocketAddrUnix> {
    if name.is_empty() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(|_| io::ErrorKind::InvalidInput.into())
}

fn new_socket() -> io::Result<CloseOnForkFd> {
    let flags = SocketFlags::CLOEXEC;
    CloseOnForkFd::open(|| rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None))
}

/// Abstract addresses of this host that start with `prefix` and have a listener, in order; none if the kernel hides its
/// table.
///
/// The kernel lists its table in steps. A socket that is closed between two steps can hide one that stays, so the table is
/// read several times.
///
/// # Errors
/// EMFILE, ENFILE and ENOMEM.
pub fn listening_names(prefix: &str) -> io::Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for _ in 0..LISTINGS {
        // Foreign names may hold any bytes.
        let table = match std::fs::read("/proc/thread-self/net/unix") {
            Err(error) if Listener::pause(&error).is_some() => return Err(error),
            table => table.unwrap_or_default(),
        };
        let table = String::from_utf8_lossy(&table);
        names.extend(table.lines().filter_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let listens = u32::from_str_radix(fields.get(3)?, 16).is_ok_and(|flags| flags & ACCEPTING != 0);
            let name = fields.get(7)?.strip_prefix('@')?;
            (listens && name.starts_with(prefix)).then(|| name.to_owned())
        }));
    }
    Ok(names)
}

/// While other processes open and close sockets all the time, one listing in 5,000 lacks a certain name.
const LISTINGS: usize = 3;

/// `__SO_ACCEPTCON`: the flag of listening sockets in the kernel's table.
const ACCEPTING: u32 = 1 << 16;

/// A socket bound to an abstract address. Connections are refused until it listens.
#[derive(Debug)]
pub struct BoundSocket(CloseOnForkFd);

impl BoundSocket {
    /// Binds to the address `name`.
    ///
    /// # Errors
    /// Those of `bind`; EADDRINUSE if a live process holds the address.
    pub fn bind(name: &str) -> io::Result<Self> {
        let socket = new_socket()?;
        rustix::net::bind(&socket, &address(name)?)?;
        Ok(Self(socket))
    }

    /// Starts to accept connections.
    ///
    /// # Errors
    /// Those of `listen`.
    pub fn listen(self) -> io::Result<Listener> {
        self.listen_for(1024)
    }

    /// Starts to accept connections, of which `backlog` may wait.
    fn listen_for(self, backlog: i32) -> io::Result<Listener> {
        rustix::net::listen(&self.0, backlog)?;
        set_nonblocking(&self.0)?;
        Ok(Listener { socket: self.0, blocks: AtomicBool::new(true) })
    }
}

/// Accepts connections to an abstract address.
#[derive(Debug)]
pub struct Listener {
    /// Non-blocking: a connection is taken under a lock that forks take.
    socket: CloseOnForkFd,
    /// Whether [`accept`](Self::accept) waits for a connection.
    blocks: AtomicBool,
}

impl Listener {
    /// Binds to the address `name` and listens.
    ///
    /// # Errors
    /// Those of `bind` and `listen`; EADDRINUSE if a live process holds the address.
    pub fn bind(name: &str) -> io::Result<Self> {
        BoundSocket::bind(name)?.listen()
    }

    /// Accepts the next connection. Blocks unless the listener is non-blocking.
    ///
    /// # Errors
    /// Those of `accept4`; PermissionDenied if the peer is another user's process.
    pub fn accept(&self) -> io::Result<Connection> {
        self.accept_any_user()?.own_user_only()
    }

    /// Accepts the next connection of any user. The caller checks [`peer`](Connection::peer).
    ///
    /// # Errors
    /// Those of `accept4`.
    pub fn accept_any_user(&self) -> io::Result<Connection> {
        loop {
            let accept = || rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC);
            match CloseOnForkFd::open(accept) {
                Err(error)
                    if error.kind() == io::ErrorKind::WouldBlock && self.blocks.load(Ordering::Relaxed) =>
                {
                    poll_readable(&[self.as_fd()], None)?;
                }
                accepted => return Connection::over(accepted?),
            }
        }
    }

    /// The time for which no connection is to be accepted after an error of [`accept`](Self::accept): if descriptors or memory ran
    /// out, the connection stays pending, and would wake a waiting thread at once.
    #[must_use]
    pub fn pause(error: &io::Error) -> Option<Duration> {
        const PAUSE: Duration = Duration::from_millis(20);
        let ran_out =
            matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM));
        ran_out.then_some(PAUSE)
    }

    /// Makes later accepts fail with EAGAIN instead of blocking. Accepted connections still block.
    pub fn set_nonblocking(&self) {
        self.blocks.store(false, Ordering::Relaxed);
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// One end of a connection that keeps message boundaries (`SOCK_SEQPACKET`).
#[derive(Debug)]
pub struct Connection {
    socket: CloseOnForkFd,
    peer: Credentials,
}

impl Connection {
    /// Connects to the listener at the address `name`. The timeout bounds later sends and receives.
    ///
    /// Any process can fill the queue of a listener. So a full queue delays the call by [`QUEUE_WAIT`] at most.
    ///
    /// # Errors
    /// ECONNREFUSED without a listener; WouldBlock if its queue stays full; PermissionDenied if it is another user's
    /// process.
    pub fn open(name: &str, timeout: Duration) -> io::Result<Self> {
        Self::open_any_user(name, timeout)?.own_user_only()
    }

    /// Connects to a listener of any user. The caller checks [`peer`](Connection::peer).
    ///
    /// # Errors
    /// ECONNREFUSED without a listener; WouldBlock if its queue stays full.
    pub fn open_any_user(name: &str, timeout: Duration) -> io::Result<Self> {
        Self::connect(name, timeout, QUEUE_WAIT.min(timeout))
    }

    /// Connects like [`open`](Self::open), but does not wait for a full queue.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub fn open_at_once(name: &str, timeout: Duration) -> io::Result<Self> {
        Self::connect(name, timeout, Duration::ZERO)?.own_user_only()
    }

    fn connect(name: &str, timeout: Duration, queue_wait: Duration) -> io::Result<Self> {
        let socket = new_socket()?;
        let address = address(name)?;
        let flags = rustix::fs::fcntl_getfl(&socket)?;
        // A blocking call would wait for a full queue as long as the timeout.
        rustix::fs::fcntl_setfl(&socket, flags | OFlags::NONBLOCK)?;
        let deadline = Instant::now() + queue_wait;
        while let Err(error) = rustix::net::connect(&socket, &address) {
            if error == rustix::io::Errno::AGAIN && Instant::now() < deadline {
                std::thread::sleep(QUEUE_POLL_INTERVAL);
            } else if error != rustix::io::Errno::INTR {
                return Err(error.into());
            }
        }
        rustix::fs::fcntl_setfl(&socket, flags)?;
        set_timeouts(&socket, timeout)?;
        Self::over(socket)
    }

    fn over(socket: CloseOnForkFd) -> io::Result<Self> {
        let peer = credentials(socket.as_fd())?;
        Ok(Self { socket, peer })
    }

    fn own_user_only(self) -> io::Result<Self> {
        if self.peer.uid == own_uid() {
            return Ok(self);
        }
        let cause = format!("the peer process belongs to user {}", self.peer.uid);
        Err(io::Error::new(io::ErrorKind::PermissionDenied, cause))
    }

    /// Credentials of the peer when it connected or listened.
    #[must_use]
    pub fn peer(&self) -> Credentials {
        self.peer
    }

    /// Bounds every later send and receive.
    ///
    /// # Errors
    /// Those of `setsockopt`.
    pub fn set_timeout(&self, timeout: Duration) -> io::Result<()> {
        set_timeouts(&self.socket, timeout)
    }

    /// Makes later sends and receives fail with EAGAIN instead of blocking.
    ///
    /// # Errors
    /// Those of `fcntl`.
    pub fn set_nonblocking(&self) -> io::Result<()> {
        set_nonblocking(&self.socket)
    }

    /// Whether the peer closed its end or exited. Messages sent before may still be unread.
    #[must_use]
    pub fn is_hung_up(&self) -> bool {
        let mut polled = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut polled, Some(&now)) == Ok(1)
    }

    /// Sends one message with descriptors.
    ///
    /// # Errors
    /// Those of `sendmsg`; never raises SIGPIPE.
    ///
    /// # Panics
    /// If there are more than [`MAX_FDS`] descriptors.
    pub fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.send_with(bytes, fds, SendFlags::NOSIGNAL)
    }

    /// Sends one message if there is room for it.
    ///
    /// # Errors
    /// As [`send`](Self::send); WouldBlock if the peer does not read.
    pub fn try_send(&self, bytes: &[u8]) -> io::Result<()> {
        self.send_with(bytes, &[], SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
    }

    fn send_with(&self, bytes: &[u8], fds: &[BorrowedFd<'_>], flags: SendFlags) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)), "at most {MAX_FDS} descriptors");
        }
        // A process that is stopped and goes on gets EINTR, too, because the socket has a timeout.
        retry_on_intr(|| rustix::net::sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut control, flags))?;
        Ok(())
    }

    /// Receives one message with its descriptors. Zero bytes mean that the peer has closed its end.
    ///
    /// # Errors
    /// Those of `recvmsg`; EMFILE if a descriptor finds no free number; InvalidData for a message longer than `bytes` or with
    /// too many descriptors.
    pub fn receive(&self, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
        self.receive_with(bytes, RecvFlags::empty())
    }

    /// As [`receive`](Self::receive), for descriptors that a forked child does not keep. It waits for a message as long as
    /// `timeout`.
    ///
    /// # Errors
    /// As [`receive`](Self::receive); TimedOut.
    pub fn receive_close_on_fork(
        &self,
        bytes: &mut [u8],
        timeout: Duration,
    ) -> io::Result<(usize, Vec<CloseOnForkFd>)> {
        let deadline = Instant::now() + timeout;
        loop {
            let receive = || self.receive_with(bytes, RecvFlags::DONTWAIT);
            match CloseOnForkFd::open_several(MAX_FDS, receive) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                received => return received,
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if poll_readable(&[self.as_fd()], Some(left))? == [false] && left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
    }

    fn receive_with(&self, bytes: &mut [u8], flags: RecvFlags) -> io::Result<(usize, Vec<OwnedFd>)> {
        let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut data = [IoSliceMut::new(bytes)];
        let flags = flags | RecvFlags::CMSG_CLOEXEC;
        let message = retry_on_intr(|| rustix::net::recvmsg(&self.socket, &mut data, &mut control, flags))?;
        let rights = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        });
        let fds: Vec<OwnedFd> = rights.flatten().collect();
        // The kernel leaves out the descriptors for which this process has no number free.
        if message.flags.contains(ReturnFlags::CTRUNC) && fds.len() < MAX_FDS {
            return Err(io::Error::from_raw_os_error(libc::EMFILE));
        }
        if message.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
            let cause = "message longer than the protocol allows";
            return Err(io::Error::new(io::ErrorKind::InvalidData, cause));
        }
        Ok((message.bytes, fds))
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn set_nonblocking(socket: &CloseOnForkFd) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(socket)?;
    Ok(rustix::fs::fcntl_setfl(socket, flags | OFlags::NONBLOCK)?)
}

fn set_timeouts(socket: &CloseOnForkFd, timeout: Duration) -> io::Result<()> {
    // The kernel takes zero as no timeout.
    let timeout = (!timeout.is_zero()).then_some(timeout);
    set_socket_timeout(socket, Timeout::Recv, timeout)?;
    Ok(set_socket_timeout(socket, Timeout::Send, timeout)?)
}

fn credentials(socket: BorrowedFd<'_>) -> io::Result<Credentials> {
    let mut cred = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as u32;
    // rustix's socket_peercred() has no value for the process id 0 of a foreign PID namespace.
    // SAFETY: the kernel fills in the struct on the stack.
    let failed = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut cred).cast(),
            &raw mut len,
        )
    };
    if failed != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Credentials { pid: cred.pid as u32, uid: cred.uid })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Memfd;

    #[test]
    fn descriptors_arrive_and_hangup_is_noticed() {
        let name = format!("millstream-test-{}", crate::random_u64());
        let listener = Listener::bind(&name).unwrap();
        assert!(Listener::bind(&name).is_err(), "a held name is taken");
        let client = Connection::open(&name, Duration::from_secs(1)).unwrap();
        let server = listener.accept().unwrap();
        assert_eq!(server.peer().pid, std::process::id());
        let memory = Memfd::new("test", 4096).unwrap();
        client.send(b"hello", &[memory.as_fd()]).unwrap();
        let mut buffer = [0; 16];
        let (n, fds) = server.receive(&mut buffer).unwrap();
        assert_eq!((&buffer[..n], fds.len()), (&b"hello"[..], 1));
        assert_eq!(Memfd::from_peer(fds.into_iter().next().unwrap()).unwrap().len(), 4096);
        assert!(!server.is_hung_up());
        drop(client);
        assert!(server.is_hung_up());
        assert_eq!(server.receive(&mut buffer).unwrap().0, 0);
        assert!(server.send(b"lost", &[]).is_err());
    }

    #[test]
    fn connect_without_listener_is_refused() {
        let refused = Connection::open("millstream-test-nobody", Duration::from_secs(1)).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
    }

    #[test]
    fn nonblocking_and_timed_calls_return() {
        let name = format!("millstream-test-{}", crate::random_u64());
        let listener = Listener::bind(&name).unwrap();
        listener.set_nonblocking();
        assert_eq!(listener.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
        let client = Connection::open(&name, Duration::from_millis(20)).unwrap();
        assert_eq!(client.receive(&mut [0; 4]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        let server = listener.accept().unwrap();
        server.set_nonblocking().unwrap();
        assert_eq!(server.receive(&mut [0; 4]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        client.send(b"too long", &[]).unwrap();
        assert_eq!(server.receive(&mut [0; 4]).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn a_signal_does_not_end_a_wait() {
        use std::os::unix::thread::JoinHandleExt as _;
        extern "C" fn ignore(_: libc::c_int) {}
        let handler: extern "C" fn(libc::c_int) = ignore;
        // SAFETY: the handler does nothing, and no other test uses this signal.
        unsafe { libc::signal(libc::SIGUSR2, handler as libc::sighandler_t) };
        let name = format!("millstream-test-{}", crate::random_u64());
        let listener = Listener::bind(&name).unwrap();
        let client = Connection::open(&name, Duration::from_secs(60)).unwrap();
        let server = listener.accept().unwrap();
        let receiver = std::thread::spawn(move || client.receive(&mut [0; 16]).map(|(length, _)| length));
        for _ in 0..50 {
            // SAFETY: the thread has not been joined.
            unsafe { libc::pthread_kill(receiver.as_pthread_t(), libc::SIGUSR2) };
            std::thread::sleep(Duration::from_millis(1));
        }
        server.send(b"late", &[]).unwrap();
        assert_eq!(receiver.join().unwrap().unwrap(), 4);
    }

    #[test]
    fn a_full_queue_does_not_delay_a_client() {
        let name = format!("millstream-test-{}", crate::random_u64());
        let _listener = BoundSocket::bind(&name).unwrap().listen_for(0).unwrap();
        let timeout = Duration::from_secs(60);
        let _queued = Connection::open(&name, timeout).unwrap();
        // With a blocking connect, the call would return after a minute.
        let start = Instant::now();
        assert_eq!(Connection::open(&name, timeout).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        assert_eq!(Connection::open_at_once(&name, timeout).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        assert!(start.elapsed() < timeout / 2, "{:?}", start.elapsed());
    }

    #[test]
    fn a_forked_child_keeps_no_name_and_no_connection() {
        let name = format!("millstream-test-{}", crate::random_u64());
        let listener = Listener::bind(&name).unwrap();
        let client = Connection::open(&name, Duration::from_secs(60)).unwrap();
        let server = listener.accept().unwrap();
        let (reader, writer) = std::io::pipe().unwrap();
        client.send(b"end", &[writer.as_fd()]).unwrap();
        drop(writer);
        let (_, received) = server.receive_close_on_fork(&mut [0; 4], Duration::from_secs(60)).unwrap();
        // SAFETY: the child waits for its end.
        let child = unsafe { libc::fork() };
        if child == 0 {
            loop {
                // SAFETY: as above.
                unsafe { libc::pause() };
            }
        }
        assert!(child > 0);
        drop((listener, server, received));
        // The child has closed them when it runs.
        let deadline = Instant::now() + Duration::from_secs(20);
        let is_refused = || {
            let opened = Connection::open(&name, Duration::from_secs(1));
            opened.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
        };
        let has_ended = || poll_readable(&[reader.as_fd()], Some(Duration::ZERO)).unwrap() == [true];
        let mut all = [false; 3];
        while all != [true; 3] && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
            all = [is_refused(), client.is_hung_up(), has_ended()];
        }
        // SAFETY: our own child.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, std::ptr::null_mut(), 0);
        }
        assert_eq!(all, [true; 3], "nobody holds the other ends");
    }

    #[test]
    fn another_user_is_refused() {
        let name = format!("millstream-test-{}", crate::random_u64());
        let listener = Listener::bind(&name).unwrap();
        let mut connection = Connection::open(&name, Duration::from_secs(1)).unwrap();
        assert_eq!(listener.accept_any_user().unwrap().peer().uid, own_uid());
        // Only root could change its user.
        connection.peer.uid = own_uid() + 1;
        let refused = connection.own_user_only().unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
        assert!(refused.to_string().ends_with(&format!("user {}", own_uid() + 1)));
    }
}
