//! Messages of fixed length over a [`Connection`].

use std::io;
use std::os::fd::OwnedFd;

use crate::socket::Connection;

/// Result of [`receive`].
#[derive(Debug)]
pub enum Received<const N: usize> {
    /// A message of exactly `N` bytes, and its descriptors.
    Message([u8; N], Vec<OwnedFd>),
    /// A message of another length, or with more descriptors than fit.
    Malformed,
    /// No message has arrived.
    Nothing,
    /// The peer closed its end or died.
    Closed,
}

/// Receives one message of `N` bytes with its descriptors.
pub fn receive<const N: usize>(connection: &Connection) -> Received<N> {
    let mut bytes = [0; N];
    match connection.receive(&mut bytes) {
        Ok((0, _)) => Received::Closed,
        Ok((len, fds)) if len == N => Received::Message(bytes, fds),
        Ok(_) => Received::Malformed,
        Err(error) => match error.kind() {
            io::ErrorKind::InvalidData => Received::Malformed,
            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Received::Nothing,
            _ => Received::Closed,
        },
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::time::Duration;

    use super::*;
    use crate::socket::Listener;

    #[test]
    fn a_message_is_complete_malformed_missing_or_the_end() {
        let address = format!("millstream-shm-test/{}/receive", std::process::id());
        let listener = Listener::bind(&address).unwrap();
        let client = Connection::open(&address, Duration::from_secs(1)).unwrap();
        let server = listener.accept().unwrap();
        server.set_nonblocking().unwrap();
        assert!(matches!(receive::<4>(&server), Received::Nothing));
        client.send(b"take", &[listener.as_fd(), client.as_fd()]).unwrap();
        let Received::Message(bytes, fds) = receive::<4>(&server) else {
            panic!("expected a message");
        };
        assert_eq!((&bytes, fds.len()), (b"take", 2));
        for other_length in [&b"too long"[..], b"no"] {
            client.send(other_length, &[]).unwrap();
            assert!(matches!(receive::<4>(&server), Received::Malformed));
        }
        drop((client, fds));
        assert!(matches!(receive::<4>(&server), Received::Closed));
    }
}
