//! The two messages that open a card: a request from the user, an answer with the card's memory.

use std::io;
use std::os::fd::OwnedFd;

use millstream_shm::socket::Connection;

use crate::layout::layout;
use crate::registers::{MAGIC, VERSION};

layout! {
    /// What a user sends first.
    pub(crate) struct Request[16] {
        0 magic: u64 = "as in the registers";
        8 version: u32 = "as in the registers";
        12 role: u32 = "0 user, 1 owner";
    }
}

layout! {
    /// What the card answers. An answer that is no refusal carries BAR0, memory and interrupt
    /// descriptor.
    pub(crate) struct Answer[32] {
        0 magic: u64 = "as in the registers";
        8 version: u32 = "as in the registers";
        12 refusal: u32 = "why the card refuses the connection, or 0";
        16 memory_bytes: u64 = "size of card memory [bytes]";
        24 node: u32 = "number of the user, to be written into the lease word";
        28 reserved: u32 = "zero";
    }
}

/// What a connection is to the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Uses the card.
    User = 0,
    /// Uses the card, and the card ends when this connection does.
    Owner = 1,
}

/// Why a card refuses a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Cards serve their own user only.
    #[error("card belongs to another user")]
    OtherUser,
    /// The other side speaks another version of the protocol.
    #[error("card speaks another version, this one is {VERSION}")]
    Version,
    /// The card is not owned by a connection, or by another one already.
    #[error("card cannot be owned by this connection")]
    NotForOwning,
    /// The card serves as many connections as it can.
    #[error("card has too many connections")]
    TooMany,
    /// Its memory is a device's.
    #[error("memory of this kind of card cannot be mapped by other processes; use the card over the network")]
    NotMappable,
}

impl Request {
    pub(crate) fn new(role: Role) -> Request {
        Request { magic: MAGIC, version: VERSION, role: role as u32 }
    }

    pub(crate) fn role(&self) -> Result<Role, Refusal> {
        if (self.magic, self.version) != (MAGIC, VERSION) {
            return Err(Refusal::Version);
        }
        match self.role {
            0 => Ok(Role::User),
            1 => Ok(Role::Owner),
            _ => Err(Refusal::Version),
        }
    }
}

impl Answer {
    /// The answer that gives a user the card's memory of `memory_bytes`, or refuses it.
    pub(crate) fn new(outcome: Result<u64, Refusal>) -> Answer {
        let (refusal, memory_bytes) = match outcome {
            Ok(memory_bytes) => (0, memory_bytes),
            Err(Refusal::OtherUser) => (1, 0),
            Err(Refusal::Version) => (2, 0),
            Err(Refusal::NotForOwning) => (3, 0),
            Err(Refusal::TooMany) => (4, 0),
            Err(Refusal::NotMappable) => (5, 0),
        };
        Answer { magic: MAGIC, version: VERSION, refusal, memory_bytes, node: 0, reserved: 0 }
    }

    pub(crate) fn outcome(&self) -> Result<u64, Refusal> {
        if (self.magic, self.version) != (MAGIC, VERSION) {
            return Err(Refusal::Version);
        }
        match self.refusal {
            0 => Ok(self.memory_bytes),
            1 => Err(Refusal::OtherUser),
            3 => Err(Refusal::NotForOwning),
            4 => Err(Refusal::TooMany),
            5 => Err(Refusal::NotMappable),
            _ => Err(Refusal::Version),
        }
    }
}

/// What a look for a message found.
#[derive(Debug)]
pub(crate) enum Received<const N: usize> {
    /// A whole message of exactly `N` bytes, and the descriptors that came with it.
    Message([u8; N], Vec<OwnedFd>),
    /// A message of another length, or one whose descriptors did not fit.
    Malformed,
    /// Nothing there yet.
    Nothing,
    /// The peer closed its end or died.
    Closed,
}

/// Receives one message of `N` bytes and its descriptors.
pub(crate) fn receive<const N: usize>(connection: &Connection) -> Received<N> {
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

    use millstream_shm::socket::Listener;

    use super::*;

    #[test]
    fn a_message_is_whole_malformed_missing_or_the_last() {
        let address = format!("millstream-card-test/{}/receive", std::process::id());
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

    #[test]
    fn requests_and_answers_come_back() {
        for role in [Role::User, Role::Owner] {
            assert_eq!(Request::new(role).role(), Ok(role));
        }
        for outcome in [
            Ok(1 << 33),
            Err(Refusal::OtherUser),
            Err(Refusal::Version),
            Err(Refusal::NotForOwning),
            Err(Refusal::TooMany),
            Err(Refusal::NotMappable),
        ] {
            assert_eq!(Answer::new(outcome).outcome(), outcome);
        }
    }

    #[test]
    fn strangers_are_refused() {
        for at in [0, 7, 8, 11, 12, 15] {
            let mut bytes = Request::new(Role::User).to_bytes();
            bytes[at] ^= 0x80;
            assert_eq!(Request::from_bytes(&bytes).role(), Err(Refusal::Version));
            let mut bytes = Answer::new(Ok(4096)).to_bytes();
            bytes[at] ^= 0x80;
            assert_eq!(Answer::from_bytes(&bytes).outcome(), Err(Refusal::Version));
        }
    }
}
