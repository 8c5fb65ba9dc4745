//! Messages between an application and its node process, beside the rings.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use millstream_shm::socket::Connection;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

const VERSION: &str = concat!("millstream-torus ", env!("CARGO_PKG_VERSION"));
const MAX_MESSAGE: usize = 4096;

/// From the application.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum AttachRequest {
    /// The first message.
    Attach { version: String },
    /// The first and only message of a host monitor.
    Monitor,
    /// Registers the memory behind the descriptor that comes with it.
    Register { length: u64 },
    /// Registers a part of the node's card.
    RegisterCard { offset: u64, length: u64 },
    /// Asks which card the node has, to run kernels on it.
    Card,
    /// Ends a region.
    Deregister { region: u64 },
    /// Lets hosts outside of the torus read a region, or write it, too.
    Publish { region: u64, name: String, writable: bool },
}

impl AttachRequest {
    pub(crate) fn attach() -> AttachRequest {
        AttachRequest::Attach { version: VERSION.to_owned() }
    }

    /// Whether a program of this version sent the message.
    pub(crate) fn is_attach(&self) -> bool {
        *self == AttachRequest::attach()
    }
}

/// From the node process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum AttachReply {
    /// With descriptors of the control memory, the mailbox and the event that wakes the node process.
    Attached { dimensions: String, node: u32, mailbox: u64 },
    /// With the descriptor of the health page.
    Health,
    /// A region was registered, or ended. With the descriptor of the card's memory if it is a part of that.
    Region { region: u64 },
    /// The card whose lease the node process holds, and the epoch of the lease.
    Card { name: String, epoch: u32 },
    /// The node has no card, or the range exceeds the card's memory.
    NoCard,
    /// The request was refused.
    Failed { reason: String },
}

pub(crate) fn send(
    connection: &Connection,
    message: &impl Serialize,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    connection.send(&serde_json::to_vec(message)?, descriptors)
}

pub(crate) fn receive<T: DeserializeOwned>(connection: &Connection) -> io::Result<(T, Vec<OwnedFd>)> {
    let mut bytes = [0; MAX_MESSAGE];
    let (length, descriptors) = connection.receive(&mut bytes)?;
    if length == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok((serde_json::from_slice(&bytes[..length])?, descriptors))
}
