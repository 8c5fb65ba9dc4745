//! Local sockets that carry descriptors.
//!
//! Addresses are abstract (they start with a zero byte): they exist as long as a process holds
//! them, belong to one network namespace as a host does, and leave no file behind. They have no
//! permissions, so the user of the other end must be checked: [`Connection::open`] and
//! [`Listener::accept`] do it, after their counterparts for `anyone` the caller does.

use std::io;
use std::mem::{offset_of, size_of};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use crate::poll;

/// Descriptors in one message, at most.
pub const MAX_FDS: usize = 4;

/// Who is at the other end, as the kernel knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// Process id in our own namespace; zero if it is not visible from here.
    pub pid: u32,
    /// Effective user.
    pub uid: u32,
}

/// The user that this process acts as.
#[must_use]
pub fn own_uid() -> u32 {
    // SAFETY: a plain system call that cannot fail.
    unsafe { libc::geteuid() }
}

fn address(name: &str) -> io::Result<(libc::sockaddr_un, libc::socklen_t)> {
    // SAFETY: sockaddr_un is plain data.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    if name.is_empty() || name.len() >= address.sun_path.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in address.sun_path[1..].iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    let len = offset_of!(libc::sockaddr_un, sun_path) + 1 + name.len();
    Ok((address, len as libc::socklen_t))
}

fn new_socket() -> io::Result<OwnedFd> {
    // SAFETY: creates a descriptor that nobody else owns.
    let fd = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: as above.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Abstract names of this host that somebody listens under now and that start with `prefix`; none where the
/// kernel does not tell.
#[must_use]
pub fn names_with(prefix: &str) -> Vec<String> {
    // Names may hold any bytes; ours are text.
    let table = std::fs::read("/proc/thread-self/net/unix").unwrap_or_default();
    let table = String::from_utf8_lossy(&table);
    table
        .lines()
        .filter_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let listens = u32::from_str_radix(fields.get(3)?, 16).is_ok_and(|flags| flags & ACCEPTS != 0);
            let name = fields.get(7)?.strip_prefix('@')?;
            (listens && name.starts_with(prefix)).then(|| name.to_owned())
        })
        .collect()
}

/// `__SO_ACCEPTCON`: the flag of listening sockets in the kernel's table.
const ACCEPTS: u32 = 1 << 16;

/// An abstract name that is held. Who connects to it is refused until it listens.
#[derive(Debug)]
pub struct Bound(OwnedFd);

impl Bound {
    /// Takes the name; EADDRINUSE if a live process holds it.
    ///
    /// # Errors
    /// What `bind` reports.
    pub fn bind(name: &str) -> io::Result<Self> {
        let socket = new_socket()?;
        let (address, len) = address(name)?;
        // SAFETY: the address is valid for `len` bytes.
        if unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), len) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self(socket))
    }

    /// Accepts connections from now on.
    ///
    /// # Errors
    /// What `listen` reports.
    pub fn listen(self) -> io::Result<Listener> {
        // SAFETY: a plain system call on a descriptor that we own.
        if unsafe { libc::listen(self.0.as_raw_fd(), 1024) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Listener(self.0))
    }
}

/// Accepts connections under an abstract name.
#[derive(Debug)]
pub struct Listener(OwnedFd);

impl Listener {
    /// Takes the name and listens; EADDRINUSE if a live process holds it.
    ///
    /// # Errors
    /// What `bind` and `listen` report.
    pub fn bind(name: &str) -> io::Result<Self> {
        Bound::bind(name)?.listen()
    }

    /// Waits for the next connection, unless the listener was made non-blocking.
    ///
    /// # Errors
    /// What `accept4` reports; PermissionDenied if it is another user's process.
    pub fn accept(&self) -> io::Result<Connection> {
        self.accept_anyone()?.own_user_only()
    }

    /// As [`accept`](Listener::accept), for a caller who has something to tell another user.
    ///
    /// # Errors
    /// What `accept4` reports.
    pub fn accept_anyone(&self) -> io::Result<Connection> {
        // SAFETY: no address is asked for.
        let fd = unsafe {
            libc::accept4(self.0.as_raw_fd(), std::ptr::null_mut(), std::ptr::null_mut(), libc::SOCK_CLOEXEC)
        };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor.
        Connection::over(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Makes later accepts answer EAGAIN instead of waiting. Connections are not affected.
    ///
    /// # Errors
    /// What `fcntl` reports.
    pub fn set_nonblocking(&self) -> io::Result<()> {
        set_nonblocking(&self.0)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// One end of a connection; messages keep their boundaries.
#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
    peer: Credentials,
}

impl Connection {
    /// Connects to the process that holds `name`. The timeout also bounds later sends and receives.
    ///
    /// # Errors
    /// ECONNREFUSED if nobody does; PermissionDenied if it is another user's process.
    pub fn open(name: &str, timeout: Duration) -> io::Result<Self> {
        Self::open_anyone(name, timeout)?.own_user_only()
    }

    /// As [`open`](Connection::open), for a caller who looks at [`peer`](Connection::peer) itself.
    ///
    /// # Errors
    /// ECONNREFUSED if nobody holds the name.
    pub fn open_anyone(name: &str, timeout: Duration) -> io::Result<Self> {
        let socket = new_socket()?;
        let (address, len) = address(name)?;
        set_timeouts(&socket, timeout)?;
        // SAFETY: the address is valid for `len` bytes.
        if unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), len) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Self::over(socket)
    }

    fn over(socket: OwnedFd) -> io::Result<Self> {
        let peer = credentials(socket.as_fd())?;
        Ok(Self { socket, peer })
    }

    fn own_user_only(self) -> io::Result<Self> {
        if self.peer.uid == own_uid() {
            return Ok(self);
        }
        Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!("the process at the other end belongs to user {}", self.peer.uid),
        ))
    }

    /// The process at the other end.
    #[must_use]
    pub fn peer(&self) -> Credentials {
        self.peer
    }

    /// Bounds every later send and receive.
    ///
    /// # Errors
    /// What `setsockopt` reports.
    pub fn set_timeout(&self, timeout: Duration) -> io::Result<()> {
        set_timeouts(&self.socket, timeout)
    }

    /// Makes later sends and receives answer EAGAIN instead of waiting.
    ///
    /// # Errors
    /// What `fcntl` reports.
    pub fn set_nonblocking(&self) -> io::Result<()> {
        set_nonblocking(&self.socket)
    }

    /// Whether the other end was closed, or its last holder died. Messages that it sent before may
    /// still be there.
    #[must_use]
    pub fn is_hung_up(&self) -> bool {
        let mut polled = [libc::pollfd { fd: self.socket.as_raw_fd(), events: libc::POLLRDHUP, revents: 0 }];
        poll(&mut polled, Some(Duration::ZERO)).is_ok_and(|ready| ready == 1)
    }

    /// Sends one message with descriptors.
    ///
    /// # Errors
    /// What `sendmsg` reports; never raises SIGPIPE.
    pub fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut data = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        let mut control = Control([0; 64]);
        // SAFETY: the message refers to `bytes` and `control`, which outlive the call; the control
        // buffer holds MAX_FDS descriptors.
        let sent = unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            message.msg_iov = &raw mut data;
            message.msg_iovlen = 1;
            if !fds.is_empty() {
                assert!(fds.len() <= MAX_FDS);
                let len = size_of_val(fds) as u32;
                message.msg_control = control.0.as_mut_ptr().cast();
                message.msg_controllen = libc::CMSG_SPACE(len) as usize;
                let header = libc::CMSG_FIRSTHDR(&raw const message);
                (*header).cmsg_level = libc::SOL_SOCKET;
                (*header).cmsg_type = libc::SCM_RIGHTS;
                (*header).cmsg_len = libc::CMSG_LEN(len) as usize;
                let to = libc::CMSG_DATA(header).cast::<i32>();
                for (i, fd) in fds.iter().enumerate() {
                    to.add(i).write_unaligned(fd.as_raw_fd());
                }
            }
            libc::sendmsg(self.socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL)
        };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Receives one message; zero bytes mean that the other end is gone.
    ///
    /// # Errors
    /// What `recvmsg` reports; InvalidData for a message that does not fit.
    pub fn receive(&self, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
        let mut data = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        let mut control = Control([0; 64]);
        let mut fds = Vec::new();
        // SAFETY: the message refers to `bytes` and `control`, which outlive the call; descriptors
        // in it are new and owned by us.
        unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            message.msg_iov = &raw mut data;
            message.msg_iovlen = 1;
            message.msg_control = control.0.as_mut_ptr().cast();
            message.msg_controllen = size_of::<Control>();
            let n = libc::recvmsg(self.socket.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC);
            if n < 0 {
                return Err(io::Error::last_os_error());
            }
            let mut header = libc::CMSG_FIRSTHDR(&raw const message);
            while !header.is_null() {
                if (*header).cmsg_level == libc::SOL_SOCKET && (*header).cmsg_type == libc::SCM_RIGHTS {
                    let count = ((*header).cmsg_len - libc::CMSG_LEN(0) as usize) / size_of::<i32>();
                    let from = libc::CMSG_DATA(header).cast::<i32>();
                    for i in 0..count {
                        fds.push(OwnedFd::from_raw_fd(from.add(i).read_unaligned()));
                    }
                }
                header = libc::CMSG_NXTHDR(&raw const message, header);
            }
            if message.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0 {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "message longer than the protocol allows",
                ));
            }
            Ok((n as usize, fds))
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Room for one control message with MAX_FDS descriptors, aligned as the kernel wants it.
#[repr(C, align(8))]
struct Control([u8; 64]);

fn set_nonblocking(socket: &OwnedFd) -> io::Result<()> {
    // SAFETY: plain system calls on a descriptor that we own.
    let set = unsafe {
        let flags = libc::fcntl(socket.as_raw_fd(), libc::F_GETFL);
        flags >= 0 && libc::fcntl(socket.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) == 0
    };
    if set { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn set_timeouts(socket: &OwnedFd, timeout: Duration) -> io::Result<()> {
    let time =
        libc::timeval { tv_sec: timeout.as_secs() as i64, tv_usec: i64::from(timeout.subsec_micros()) };
    for option in [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO] {
        // SAFETY: the option value is a timeval on the stack.
        let failed = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                option,
                (&raw const time).cast(),
                size_of::<libc::timeval>() as u32,
            )
        };
        if failed != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

fn credentials(socket: BorrowedFd<'_>) -> io::Result<Credentials> {
    let mut cred = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as u32;
    // SAFETY: the kernel fills the struct on the stack.
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
    fn carries_descriptors_and_notices_the_end() {
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
    fn nobody_there() {
        let refused = Connection::open("millstream-test-nobody", Duration::from_secs(1)).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
    }

    #[test]
    fn nothing_there_yet() {
        let name = format!("millstream-test-{}", crate::random_u64());
        let listener = Listener::bind(&name).unwrap();
        listener.set_nonblocking().unwrap();
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
    fn another_user_is_refused() {
        let name = format!("millstream-test-{}", crate::random_u64());
        let listener = Listener::bind(&name).unwrap();
        let mut connection = Connection::open(&name, Duration::from_secs(1)).unwrap();
        assert_eq!(listener.accept_anyone().unwrap().peer().uid, own_uid());
        // Only root could become somebody else.
        connection.peer.uid = own_uid() + 1;
        let refused = connection.own_user_only().unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
        assert!(refused.to_string().ends_with(&format!("user {}", own_uid() + 1)));
    }
}
