//! TCP streams with a deadline for every operation.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::Duration;

use rustix::net::sockopt;

use super::error::{ConnectError, ConnectErrorKind};
use crate::deadline::Deadline;

/// TCP keepalive, to detect a peer that is cut off: idle time before the first probe, interval, number of probes.
const SILENCE: Duration = Duration::from_secs(3);
const ASK_EVERY: Duration = Duration::from_secs(1);
const UNANSWERED: u32 = 3;

/// Interval of connection attempts while the peer does not listen or its host is unreachable.
const RETRY: Duration = Duration::from_millis(20);
/// Time in which the kernel resolves the address of a host on the same network, or gives up; it takes 3 s.
pub const ADDRESS_RESOLUTION: Duration = Duration::from_secs(5);
/// Shortest timeout of a connection attempt; `connect_timeout` refuses zero.
const SHORTEST: Duration = Duration::from_millis(1);
/// Timeout in place of "no deadline", which `connect_timeout` does not support.
const VERY_LONG: Duration = Duration::from_secs(365 * 24 * 3600);

/// A listening TCP socket.
#[derive(Debug)]
pub struct Listener {
    listener: TcpListener,
    address: SocketAddr,
}

/// A stream over which a queue pair is connected. Its timeouts bound each read and write.
pub trait ControlStream: Read + Write {
    /// The peer's address.
    ///
    /// # Errors
    /// The stream is not connected.
    fn peer_addr(&self) -> io::Result<SocketAddr>;

    /// Bounds each read; `None` waits without limit.
    ///
    /// # Errors
    /// The timeout is zero.
    fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()>;

    /// Bounds each write; `None` waits without limit.
    ///
    /// # Errors
    /// The timeout is zero.
    fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()>;
}

impl ControlStream for TcpStream {
    fn peer_addr(&self) -> io::Result<SocketAddr> {
        TcpStream::peer_addr(self)
    }

    fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        TcpStream::set_read_timeout(self, timeout)
    }

    fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        TcpStream::set_write_timeout(self, timeout)
    }
}

/// Listens on `address`, for example `127.0.0.1:0` or `[::]:7471`. Port 0 selects any free port.
///
/// # Errors
/// [`ConnectError`] if the address is invalid, in use, or not of this host.
pub fn listen(address: &str) -> Result<Listener, ConnectError> {
    let failed = |cause| ConnectError::new(address, ConnectErrorKind::Listen { cause });
    let listener = TcpListener::bind(&resolve(address)?[..]).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    Ok(Listener { listener, address })
}

impl Listener {
    /// The bound address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Accepts the next connection.
    ///
    /// # Errors
    /// [`ConnectError`] if no peer connects before the deadline.
    pub fn accept(&self, deadline: Deadline) -> Result<(TcpStream, SocketAddr), ConnectError> {
        const DOING: &str = "waiting for a connection";
        let failed = |cause| ConnectError::stream(self.address, DOING, cause);
        loop {
            match self.listener.accept() {
                Ok((stream, peer)) => {
                    stream.set_nonblocking(false).map_err(failed)?;
                    set_up(&stream).map_err(failed)?;
                    return Ok((stream, peer));
                }
                Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => {
                    wait_readable(self.as_fd(), deadline).map_err(failed)?;
                }
                // The peer closed the connection before it was accepted.
                Err(cause) if cause.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(cause) if cause.kind() == io::ErrorKind::Interrupted => {}
                Err(cause) => return Err(failed(cause)),
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

/// Connects to `address`, for example `node7:7471`. A name may have several addresses. Retries while one of them answers that
/// no socket listens there, and for 5 s while a host is unreachable (`EHOSTUNREACH`): the kernel says so of a host on the same network
/// that does not answer address resolution, also for a moment after its link has returned. `ENETUNREACH` is an error at once.
///
/// # Errors
/// [`ConnectError`] if the address is invalid or cannot be reached before the deadline.
pub fn dial(address: &str, deadline: Deadline) -> Result<TcpStream, ConnectError> {
    dial_one_of(address, &resolve(address)?, deadline)
}

fn dial_one_of(
    address: &str,
    addresses: &[SocketAddr],
    deadline: Deadline,
) -> Result<TcpStream, ConnectError> {
    const LISTENS: &str = "waiting for it to listen";
    const ROUTE: &str = "waiting for a route to its host";
    let mut doing = LISTENS;
    let mut resolved = None;
    loop {
        if deadline.passed() {
            return Err(ConnectError::new(address, ConnectErrorKind::TimedOut { doing }));
        }
        let causes = match connect_each(addresses, deadline) {
            Ok(stream) => {
                set_up(&stream).map_err(|cause| ConnectError::stream(address, "setting it up", cause))?;
                return Ok(stream);
            }
            Err(causes) => causes,
        };
        let has = |kind| causes.iter().any(|cause| cause.kind() == kind);
        if has(io::ErrorKind::ConnectionRefused) {
            doing = LISTENS;
        } else if has(io::ErrorKind::TimedOut) {
            continue;
        } else if has(io::ErrorKind::HostUnreachable)
            && !resolved.get_or_insert_with(|| Deadline::after(ADDRESS_RESOLUTION)).passed()
        {
            doing = ROUTE;
        } else {
            // This host has no route to the network of an address, for example.
            return Err(ConnectError::stream(address, doing, last_of(causes)));
        }
        std::thread::sleep(deadline.remaining().unwrap_or(RETRY).min(RETRY));
    }
}

/// Connects to a peer that listens, for example at `node7:7471`: one attempt at each address of the name.
///
/// # Errors
/// The address is invalid, or that of the last attempt.
pub fn connect(address: &str, deadline: Deadline) -> io::Result<TcpStream> {
    let addresses: Vec<_> = address.to_socket_addrs()?.collect();
    connect_each(&addresses, deadline).map_err(last_of)
}

/// One attempt at each address. One that does not answer leaves the others their time.
fn connect_each(addresses: &[SocketAddr], deadline: Deadline) -> Result<TcpStream, Vec<io::Error>> {
    let mut causes = Vec::new();
    for (index, each) in addresses.iter().enumerate() {
        let share = deadline.remaining().unwrap_or(VERY_LONG) / (addresses.len() - index) as u32;
        match TcpStream::connect_timeout(each, share.max(SHORTEST)) {
            Ok(stream) => return Ok(stream),
            Err(cause) => causes.push(cause),
        }
    }
    Err(causes)
}

fn last_of(causes: Vec<io::Error>) -> io::Error {
    causes.into_iter().next_back().unwrap_or_else(no_address)
}

fn no_address() -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, "the host name has no address")
}

fn set_up(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, SILENCE)?;
    sockopt::set_tcp_keepintvl(stream, ASK_EVERY)?;
    sockopt::set_tcp_keepcnt(stream, UNANSWERED)?;
    Ok(())
}

/// Lets the stream fail with `ETIMEDOUT` when nothing has come from the peer's kernel for `timeout`, instead of after 3 to 6 s as
/// streams do from their start. A peer that is cut off for less costs nothing. The kernel counts idle time in seconds, so the stream may
/// fail up to 2 s later.
///
/// # Errors
/// Errors of the system.
pub fn set_peer_timeout(stream: &TcpStream, timeout: Duration) -> io::Result<()> {
    let idle = Duration::from_secs((timeout.as_secs() / 2).max(1));
    sockopt::set_tcp_keepidle(stream, idle)?;
    // Once it is set, it bounds the time without an answer to probes and to data, and the number of probes has no effect.
    let millis = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX).max(1);
    Ok(sockopt::set_tcp_user_timeout(stream, millis)?)
}

fn resolve(address: &str) -> Result<Vec<SocketAddr>, ConnectError> {
    let failed = |cause| ConnectError::new(address, ConnectErrorKind::Address { cause });
    let addresses: Vec<SocketAddr> = address.to_socket_addrs().map_err(failed)?.collect();
    match addresses.is_empty() {
        true => Err(failed(no_address())),
        false => Ok(addresses),
    }
}

/// Waits until the descriptor is readable, or a signal arrived. A timeout is an error.
///
/// # Errors
/// [`io::ErrorKind::TimedOut`] at the deadline; errors of the system.
pub fn wait_readable(descriptor: BorrowedFd<'_>, deadline: Deadline) -> io::Result<()> {
    let mut polled = [libc::pollfd { fd: descriptor.as_raw_fd(), events: libc::POLLIN, revents: 0 }];
    match millstream_shm::poll(&mut polled, deadline.remaining()) {
        Ok(0) => Err(io::ErrorKind::TimedOut.into()),
        Err(cause) if cause.kind() != io::ErrorKind::Interrupted => Err(cause),
        _ => Ok(()),
    }
}

/// Reads exactly `buffer` before the deadline. Changes the stream's read timeout.
pub(super) fn read_exact(
    stream: &mut impl ControlStream,
    mut buffer: &mut [u8],
    deadline: Deadline,
) -> io::Result<()> {
    while !buffer.is_empty() {
        stream.set_read_timeout(time_left(deadline)?)?;
        match stream.read(buffer) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => buffer = &mut buffer[read..],
            Err(cause) if cause.kind() == io::ErrorKind::Interrupted => {}
            Err(cause) => return Err(cause),
        }
    }
    Ok(())
}

/// Writes all of `buffer` before the deadline. Changes the stream's write timeout.
pub(super) fn write_all(
    stream: &mut impl ControlStream,
    mut buffer: &[u8],
    deadline: Deadline,
) -> io::Result<()> {
    while !buffer.is_empty() {
        stream.set_write_timeout(time_left(deadline)?)?;
        match stream.write(buffer) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => buffer = &buffer[written..],
            Err(cause) if cause.kind() == io::ErrorKind::Interrupted => {}
            Err(cause) => return Err(cause),
        }
    }
    Ok(())
}

/// `None` for no limit. A timeout of zero cannot be set; it means that the deadline passed.
fn time_left(deadline: Deadline) -> io::Result<Option<Duration>> {
    match deadline.remaining() {
        Some(Duration::ZERO) => Err(io::ErrorKind::TimedOut.into()),
        left => Ok(left),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_timeout_replaces_the_number_of_probes() {
        let listener = listen("127.0.0.1:0").unwrap();
        let stream = dial(&listener.address().to_string(), Deadline::after(Duration::from_secs(10))).unwrap();
        let options = |stream: &TcpStream| {
            (sockopt::tcp_keepidle(stream).unwrap(), sockopt::tcp_user_timeout(stream).unwrap())
        };
        assert_eq!(options(&stream), (Duration::from_secs(3), 0));
        for (timeout, idle) in [(20_000, 10), (3_500, 1), (200, 1)] {
            set_peer_timeout(&stream, Duration::from_millis(timeout)).unwrap();
            assert_eq!(options(&stream), (Duration::from_secs(idle), timeout as u32));
        }
    }

    #[test]
    fn accept_and_dial_connect() {
        let listener = listen("127.0.0.1:0").unwrap();
        let address = listener.address();
        let dialled =
            std::thread::spawn(move || dial(&address.to_string(), Deadline::after(Duration::from_secs(10))));
        let (mut server, peer) = listener.accept(Deadline::after(Duration::from_secs(10))).unwrap();
        let mut client = dialled.join().unwrap().unwrap();
        assert_eq!(client.local_addr().unwrap(), peer);
        let deadline = Deadline::after(Duration::from_secs(10));
        write_all(&mut client, b"hello", deadline).unwrap();
        let mut text = [0; 5];
        read_exact(&mut server, &mut text, deadline).unwrap();
        assert_eq!(&text, b"hello");
        drop(client);
        assert_eq!(
            read_exact(&mut server, &mut text, deadline).unwrap_err().kind(),
            io::ErrorKind::UnexpectedEof
        );
    }

    #[test]
    fn dial_waits_for_a_listener_at_one_of_several_addresses() {
        // An address on which no other test listens.
        let free = listen("127.0.0.2:0").unwrap().address();
        // No stream reaches the broadcast address.
        let unreachable = SocketAddr::from(([255; 4], 1));
        let dialled = std::thread::spawn(move || {
            dial_one_of("node7", &[free, unreachable], Deadline::after(Duration::from_secs(10)))
        });
        std::thread::sleep(Duration::from_millis(50));
        let listener = listen(&free.to_string()).unwrap();
        dialled.join().unwrap().unwrap();
        drop(listener);
        let error = dial_one_of("node7", &[unreachable], Deadline::after(Duration::from_secs(10)));
        let error = error.unwrap_err().to_string();
        assert!(error.contains("unreachable"), "{error}");
    }

    #[test]
    fn dial_waits_for_a_route_to_a_host() {
        std::thread::spawn(dial_without_a_route_at_first).join().unwrap();
    }

    /// On a thread of its own, which enters a network namespace.
    fn dial_without_a_route_at_first() {
        // SAFETY: changes the network namespace of this thread only.
        if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
            return println!("not run: network namespaces need root: {}", io::Error::last_os_error());
        }
        let ip = |words: &str| {
            let done = std::process::Command::new("ip").args(words.split(' ')).status().unwrap();
            assert!(done.success(), "ip {words}");
        };
        ip("link set lo up");
        ip("route add unreachable 10.79.9.9/32");
        let listener = listen("0.0.0.0:0").unwrap();
        let address = format!("10.79.9.9:{}", listener.address().port());
        let error = dial(&address, Deadline::after(Duration::from_millis(500))).unwrap_err();
        assert!(matches!(error.kind, ConnectErrorKind::TimedOut { .. }), "{error}");
        assert!(error.to_string().ends_with("waiting for a route to its host"), "{error}");
        std::thread::scope(|scope| {
            let dialled = scope.spawn(|| dial(&address, Deadline::after(Duration::from_secs(10))));
            std::thread::sleep(Duration::from_millis(50));
            assert!(!dialled.is_finished());
            ip("address add 10.79.9.9/32 dev lo");
            listener.accept(Deadline::after(Duration::from_secs(10))).unwrap();
            dialled.join().unwrap().unwrap();
        });
    }

    #[test]
    fn dial_waits_for_a_listener_until_its_deadline() {
        // An address on which no other test listens.
        let free = listen("127.0.0.3:0").unwrap().address().to_string();
        let error = dial(&free, Deadline::after(Duration::from_millis(60))).unwrap_err();
        assert!(matches!(error.kind, ConnectErrorKind::TimedOut { .. }), "{error}");
        assert!(error.to_string().contains(&free));
        let later = free.clone();
        let dialled = std::thread::spawn(move || dial(&later, Deadline::after(Duration::from_secs(10))));
        std::thread::sleep(Duration::from_millis(50));
        let listener = listen(&free).unwrap();
        listener.accept(Deadline::after(Duration::from_secs(10))).unwrap();
        dialled.join().unwrap().unwrap();
    }

    #[test]
    fn accept_and_read_end_at_their_deadlines() {
        let listener = listen("127.0.0.1:0").unwrap();
        let soon = Deadline::after(Duration::from_millis(30));
        let error = listener.accept(soon).unwrap_err();
        assert!(matches!(error.kind, ConnectErrorKind::TimedOut { .. }), "{error}");
        let mut client =
            dial(&listener.address().to_string(), Deadline::after(Duration::from_secs(10))).unwrap();
        let error =
            read_exact(&mut client, &mut [0], Deadline::after(Duration::from_millis(30))).unwrap_err();
        assert!(matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut));
    }

    #[test]
    fn invalid_listen_addresses_are_named() {
        let taken = listen("127.0.0.1:0").unwrap();
        let address = taken.address().to_string();
        let error = listen(&address).unwrap_err();
        assert!(
            matches!(&error.kind, ConnectErrorKind::Listen { cause } if cause.kind() == io::ErrorKind::AddrInUse)
        );
        assert!(error.to_string().contains(&address));
        assert!(matches!(listen("no port").unwrap_err().kind, ConnectErrorKind::Address { .. }));
    }
}
