//! Connections to all neighbours: a node dials in positive directions and accepts in negative ones.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use millstream_rdma::connect::{ConnectError, ConnectedQueuePair, Listener, dial};
use millstream_rdma::queue::QueueError;
use millstream_rdma::{
    Access, CompletionQueue, Deadline, Device, PreparedQueuePair, RcOptions, RemoteMemory, WrId,
};
use millstream_torus_core::{Dimensions, Direction, NodeNumber, Sign};

use super::handshake::{Identity, LocalEnd, Mismatch};
use super::{KEEPALIVES, PLACES, RECEIVE, VerbsLinks, link_bits};
use crate::engine::EngineOptions;

/// First bytes of a link's stream; the direction as the dialling node sees it follows.
const MAGIC: [u8; 7] = *b"mtorus1";

/// Why links cannot be connected.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The connection failed.
    #[error("link {direction} to {node}: {cause}")]
    Connect {
        /// The direction.
        direction: Direction,
        /// The neighbour.
        node: NodeNumber,
        /// The cause.
        cause: ConnectError,
    },
    /// The neighbour belongs to another torus, or is another node.
    #[error("link {direction} to {node} at {address}: {cause}")]
    Refused {
        /// The direction.
        direction: Direction,
        /// The expected neighbour.
        node: NodeNumber,
        /// Its address.
        address: String,
        /// The difference.
        cause: Mismatch,
    },
    /// The peer is not a node of a torus.
    #[error("{address} connected, but is not a node of a torus: {cause}")]
    NotANode {
        /// Its address.
        address: String,
        /// The cause.
        cause: String,
    },
    /// The neighbours did not connect in time.
    #[error("no connection from the neighbour in direction {direction}, {node}: {cause}")]
    Missing {
        /// The direction.
        direction: Direction,
        /// The neighbour.
        node: NodeNumber,
        /// The cause.
        cause: ConnectError,
    },
    /// The device refused a queue pair.
    #[error(transparent)]
    Queue(#[from] QueueError),
    /// A system call failed.
    #[error("links: {0}")]
    Io(#[from] io::Error),
}

/// What the links of a node need.
#[derive(Debug)]
pub struct Links<'a> {
    /// The device.
    pub device: &'a Device,
    /// The completion queue of all links.
    pub queue: &'a CompletionQueue,
    /// Shape of the torus.
    pub torus: Dimensions,
    /// This node.
    pub here: NodeNumber,
    /// The run's key.
    pub key: u64,
    /// Sizes.
    pub options: EngineOptions,
    /// Accepts neighbours.
    pub listener: &'a Listener,
    /// Addresses of all nodes by number.
    pub peers: &'a [String],
    /// When to give up.
    pub deadline: Deadline,
}

/// Connects links, the first time and after a loss.
#[derive(Clone, Debug)]
pub(crate) struct LinkConnector {
    pub(crate) device: Device,
    pub(crate) queue: CompletionQueue,
    pub(crate) torus: Dimensions,
    pub(crate) here: NodeNumber,
    pub(crate) key: u64,
    pub(crate) options: EngineOptions,
    slots: RemoteMemory,
    credits: RemoteMemory,
}

impl LinkConnector {
    pub(crate) fn new(links: &VerbsLinks, parts: &Links<'_>) -> Result<LinkConnector, LinkError> {
        let (slots, credits) = remote(links)?;
        Ok(LinkConnector {
            device: parts.device.clone(),
            queue: parts.queue.clone(),
            torus: parts.torus,
            here: parts.here,
            key: parts.key,
            options: parts.options,
            slots,
            credits,
        })
    }

    /// Connects to the neighbour in a positive direction.
    pub(crate) fn dial(
        &self,
        direction: Direction,
        address: &str,
        incarnation: u8,
        deadline: Deadline,
    ) -> Result<Connected, LinkError> {
        let node = self.torus.neighbour(self.here, direction).unwrap_or_default();
        let failed = |cause| LinkError::Connect { direction, node, cause };
        let mut stream = dial(address, deadline).map_err(failed)?;
        stream.write_all(&MAGIC)?;
        stream.write_all(&[direction.index() as u8])?;
        self.finish(direction, stream, incarnation, deadline)
    }

    /// The link that a neighbour wants to connect, as this node sees it.
    pub(crate) fn receive_hello(&self, stream: &mut TcpStream) -> io::Result<Direction> {
        let mine = receive_hello(stream)?.reversed();
        match self.torus.neighbour(self.here, mine) {
            Some(_) => Ok(mine),
            None => Err(io::Error::new(io::ErrorKind::InvalidData, format!("there is no link {mine}"))),
        }
    }
}

/// A stream that stays open while both ends live.
pub(crate) type LinkStream = (Direction, TcpStream);

/// Connects all links. Returns the streams over which they were set up.
///
/// # Errors
/// [`LinkError`].
pub(crate) fn connect_all(links: &mut VerbsLinks, parts: &Links<'_>) -> Result<Vec<LinkStream>, LinkError> {
    let neighbours: Vec<_> = (Direction::ALL.into_iter())
        .filter_map(|direction| Some((direction, parts.torus.neighbour(parts.here, direction)?)))
        .collect();
    let link = &LinkConnector::new(links, parts)?;
    let mut connected = Vec::new();
    std::thread::scope(|scope| -> Result<(), LinkError> {
        let mut threads = Vec::new();
        for &(direction, node) in neighbours.iter().filter(|(direction, _)| direction.sign == Sign::Plus) {
            let work = move || -> Result<_, LinkError> {
                let address = parts.peers.get(node.index()).map_or("", String::as_str);
                link.dial(direction, address, 0, parts.deadline)
            };
            threads.push(scope.spawn(work));
        }
        let mut waiting: Vec<_> =
            neighbours.iter().copied().filter(|(direction, _)| direction.sign == Sign::Minus).collect();
        while let Some(&(direction, node)) = waiting.first() {
            let missing = |cause| LinkError::Missing { direction, node, cause };
            let (mut stream, address) = parts.listener.accept(parts.deadline).map_err(missing)?;
            match receive_hello(&mut stream) {
                Ok(theirs) => {
                    let mine = theirs.reversed();
                    let Some(at) = waiting.iter().position(|&(direction, _)| direction == mine) else {
                        let cause = format!("there is no link {mine} to connect");
                        return Err(LinkError::NotANode { address: address.to_string(), cause });
                    };
                    let (direction, _) = waiting.remove(at);
                    threads.push(scope.spawn(move || link.finish(direction, stream, 0, parts.deadline)));
                }
                // A stranger must not keep the neighbours out.
                Err(cause) => tracing::warn!("{address} is not a node of a torus: {cause}"),
            }
        }
        for thread in threads {
            match thread.join() {
                Ok(done) => connected.push(done?),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        Ok(())
    })?;
    let mut streams = Vec::new();
    for (direction, pair, slots, credits, stream) in connected {
        links.connected(direction, 0, pair.pair, slots, credits);
        streams.push((direction, stream));
    }
    Ok(streams)
}

impl VerbsLinks {
    /// Takes a connection that [`LinkConnector`] made into use. Returns its stream.
    pub(crate) fn take(&mut self, connected: Connected, incarnation: u8) -> LinkStream {
        let (direction, pair, slots, credits, stream) = connected;
        self.connected(direction, incarnation, pair.pair, slots, credits);
        (direction, stream)
    }
}

fn remote(links: &VerbsLinks) -> Result<(RemoteMemory, RemoteMemory), LinkError> {
    let of = |memory: &crate::memory::Memory| {
        memory.region().map(|region| region.remote()).ok_or(io::ErrorKind::Unsupported)
    };
    Ok((of(&links.slots).map_err(io::Error::from)?, of(&links.credits).map_err(io::Error::from)?))
}

/// Reads which link a neighbour wants to connect.
fn receive_hello(stream: &mut TcpStream) -> io::Result<Direction> {
    let mut hello = [0; 8];
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    stream.read_exact(&mut hello)?;
    let direction = Direction::from_index(hello[7].into()).filter(|direction| direction.sign == Sign::Plus);
    direction
        .filter(|_| hello[..7] == MAGIC)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("it sent {hello:02x?}")))
}

pub(crate) type Connected = (Direction, ConnectedQueuePair, RemoteMemory, RemoteMemory, TcpStream);

impl LinkConnector {
    /// Connects over a stream whose direction both ends know.
    pub(crate) fn finish(
        &self,
        direction: Direction,
        mut stream: TcpStream,
        incarnation: u8,
        deadline: Deadline,
    ) -> Result<Connected, LinkError> {
        let node = self.torus.neighbour(self.here, direction).unwrap_or_default();
        let local = LocalEnd { torus: self.torus, here: self.here, key: self.key, options: self.options };
        let receives = VerbsLinks::receives(&self.options);
        let options = RcOptions {
            send_depth: u32::from(PLACES + KEEPALIVES),
            recv_depth: receives,
            send_sges: 2,
            // A keep-alive.
            max_inline: 8,
            access: Access::REMOTE_WRITE,
            ..RcOptions::default()
        };
        let prepared = PreparedQueuePair::new(&self.device, &self.queue, &self.queue, &options)?;
        for _ in 0..receives {
            let posted = prepared.post_recv(&[], WrId(RECEIVE | link_bits(direction, incarnation)));
            posted.map_err(|error| io::Error::other(error.to_string()))?;
        }
        let mine = serde_json::to_vec(&Identity::new(&local, direction, self.slots, self.credits))
            .map_err(io::Error::from)?;
        let address = stream.peer_addr().map_or_else(|_| "(unconnected)".to_owned(), |peer| peer.to_string());
        let failed = |cause| LinkError::Connect { direction, node, cause };
        let connected = prepared.connect(&mut stream, &mine, deadline).map_err(failed)?;
        let theirs: Identity = serde_json::from_slice(&connected.private_data)
            .map_err(|cause| LinkError::NotANode { address: address.clone(), cause: cause.to_string() })?;
        let (slots, credits) = theirs.check(&local, direction).map_err(|cause| LinkError::Refused {
            direction,
            node,
            address,
            cause,
        })?;
        Ok((direction, connected, slots, credits, stream))
    }
}
