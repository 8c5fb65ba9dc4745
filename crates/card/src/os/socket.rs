//! Local sockets that carry file descriptors and name their peer's user.
//!
//! Addresses are in the abstract namespace: they vanish with their process, so that a killed card
//! leaves nothing behind. Anybody on the machine can reach an abstract address, hence both sides
//! ask the system who the other is before they believe a byte.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use crate::os::{Doing, OsError};

/// Most file descriptors that one message carries.
const MAX_FDS: usize = 4;

fn new_socket(flags: SocketFlags) -> Result<OwnedFd, OsError> {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC | flags, None)
        .doing("open a local socket")
}

/// Listens at an abstract address. `None`: somebody else does already.
pub(crate) fn listen(address: &str) -> Result<Option<OwnedFd>, OsError> {
    let socket = new_socket(SocketFlags::NONBLOCK)?;
    let name = SocketAddrUnix::new_abstract_name(address.as_bytes()).doing("name a socket")?;
    match rustix::net::bind(&socket, &name) {
        Err(Errno::ADDRINUSE) => return Ok(None),
        other => other.doing("bind the card's socket")?,
    }
    rustix::net::listen(&socket, 16).doing("listen on the card's socket")?;
    Ok(Some(socket))
}

/// Takes one waiting connection, if there is one.
pub(crate) fn accept(listener: &OwnedFd) -> Result<Option<OwnedFd>, OsError> {
    match rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
        Ok(socket) => Ok(Some(socket)),
        // The peer may have given up between the poll and the accept.
        Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => Ok(None),
        Err(error) => Err(error).doing("accept a connection"),
    }
}

/// Connects to an abstract address. `None`: nobody listens there.
pub(crate) fn connect(address: &str) -> Result<Option<OwnedFd>, OsError> {
    let socket = new_socket(SocketFlags::empty())?;
    let name = SocketAddrUnix::new_abstract_name(address.as_bytes()).doing("name a socket")?;
    match rustix::net::connect(&socket, &name) {
        Ok(()) => Ok(Some(socket)),
        Err(Errno::CONNREFUSED | Errno::NOENT) => Ok(None),
        Err(error) => Err(error).doing("connect to the card's socket"),
    }
}

/// User id of the process at the other end, as the system recorded it when the connection was made.
pub(crate) fn peer_uid(socket: &OwnedFd) -> Result<u32, OsError> {
    let credentials = rustix::net::sockopt::socket_peercred(socket).doing("ask who the peer is")?;
    Ok(credentials.uid.as_raw())
}

/// User id that this process acts as.
pub(crate) fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Sends one message with file descriptors. False: the peer is gone or does not read.
pub(crate) fn send(socket: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
    debug_assert!(fds.len() <= MAX_FDS);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return false;
    }
    let sent = rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL);
    sent == Ok(bytes.len())
}

/// What a receive found.
#[derive(Debug)]
pub(crate) enum Received<const N: usize> {
    /// A whole message of exactly `N` bytes.
    Message([u8; N], Vec<OwnedFd>),
    /// A message of another length, or one whose file descriptors did not fit.
    Malformed,
    /// Nothing there yet.
    Nothing,
    /// The peer closed its end or died.
    Closed,
}

/// Receives one message of `N` bytes and its file descriptors.
pub(crate) fn receive<const N: usize>(socket: &OwnedFd) -> Received<N> {
    let mut bytes = [0u8; N];
    let mut extra = [0u8; 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::net::recvmsg(
        socket,
        // The extra byte tells a longer message from one that fits.
        &mut [IoSliceMut::new(&mut bytes), IoSliceMut::new(&mut extra)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    );
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    match received {
        Err(Errno::AGAIN | Errno::INTR) => Received::Nothing,
        Err(_) => Received::Closed,
        Ok(message) if message.bytes == 0 => Received::Closed,
        Ok(message) if message.flags.contains(ReturnFlags::CTRUNC) => Received::Malformed,
        Ok(message) if message.bytes == N => Received::Message(bytes, fds),
        Ok(_) => Received::Malformed,
    }
}

/// Waits until one of `fds` is readable or hung up; returns for each whether it is.
pub(crate) fn poll_readable(fds: &[BorrowedFd<'_>], timeout: Option<Duration>) -> Result<Vec<bool>, OsError> {
    let mut polled: Vec<_> = fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    // A timeout that does not fit is longer than any process lives.
    let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
    match rustix::event::poll(&mut polled, timeout.as_ref()) {
        Ok(_) => Ok(polled.iter().map(|fd| !fd.revents().is_empty()).collect()),
        Err(Errno::INTR) => Ok(vec![false; fds.len()]),
        Err(error) => Err(error).doing("wait for a socket"),
    }
}

/// True if the peer of this socket has closed its end or died.
pub(crate) fn is_hung_up(socket: impl AsFd) -> bool {
    let mut polled = [PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::RDHUP)];
    let now = Timespec::default();
    rustix::event::poll(&mut polled, Some(&now)).is_ok() && !polled[0].revents().is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(test: &str) -> String {
        format!("millstream-card-test/{}/{test}", std::process::id())
    }

    #[test]
    fn a_message_carries_bytes_and_descriptors() {
        let address = address("carry");
        assert!(connect(&address).unwrap().is_none(), "nobody listens yet");
        let listener = listen(&address).unwrap().unwrap();
        assert!(listen(&address).unwrap().is_none(), "the name is taken");
        let client = connect(&address).unwrap().unwrap();
        let server = accept(&listener).unwrap().unwrap();
        assert_eq!(peer_uid(&server).unwrap(), own_uid());
        assert!(matches!(receive::<4>(&server), Received::Nothing));

        assert!(send(&client, b"take", &[listener.as_fd(), client.as_fd()]));
        let Received::Message(bytes, fds) = receive::<4>(&server) else {
            panic!("expected a message");
        };
        assert_eq!((&bytes, fds.len()), (b"take", 2));

        assert!(send(&client, b"too long", &[]));
        assert!(matches!(receive::<4>(&server), Received::Malformed));
        assert!(!is_hung_up(&server));
        drop((client, fds));
        assert!(is_hung_up(&server));
        assert!(matches!(receive::<4>(&server), Received::Closed));
        assert!(!send(&server, b"lost", &[]));
    }
}
