//! Connections to all neighbours: a node dials in positive directions and accepts in negative ones.

use std::io;
use std::net::TcpStream;
use std::sync::{Arc, mpsc};

use millstream_rdma::connect::{ConnectError, ConnectedQueuePair, Listener};
use millstream_rdma::queue::QueueError;
use millstream_rdma::{
    Access, CompletionQueue, Deadline, Device, PreparedQueuePair, RcOptions, RemoteMemory, WrId,
};
use millstream_torus_core::{Dimensions, Direction, NodeNumber, Sign};

use super::handshake::{Identity, LocalEnd, Mismatch};
use super::{KEEPALIVES, PLACES, RECEIVE, VerbsLinks, link_bits};
use crate::engine::EngineOptions;
use crate::proof::{self, Acceptor, Call, ProofError, Purpose, Strangers};

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
    /// The other end and this one do not know the same key, or it is another node.
    #[error("link {direction} to {node} at {address}: {cause}")]
    Key {
        /// The direction.
        direction: Direction,
        /// The expected neighbour.
        node: NodeNumber,
        /// Its address.
        address: String,
        /// The cause.
        cause: io::Error,
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
        let call = Call { key: self.key, purpose: Purpose::Link(direction), to: node.0 };
        let proved = proof::connect(address, call, deadline, deadline);
        let stream = proved.map_err(|error| match error {
            ProofError::Connect(cause) => failed(cause),
            ProofError::Proof(cause) if cause.kind() == io::ErrorKind::PermissionDenied => {
                LinkError::Key { direction, node, address: address.to_owned(), cause }
            }
            ProofError::Proof(cause) => failed(ConnectError::stream(address, "waiting for its proof", cause)),
        })?;
        self.finish(direction, stream, incarnation, deadline)
    }

    /// Accepts a connection, and gives it to `then` with its link, as this node sees it, if its other end knows the run's
    /// key.
    pub(crate) fn accept(
        &self,
        strangers: &Strangers,
        stream: TcpStream,
        then: impl FnOnce(Direction, TcpStream) + Send + 'static,
    ) {
        let (torus, here) = (self.torus, self.here);
        // The end that sees the link in positive direction dials.
        let admits = |purpose| match purpose {
            Purpose::Link(theirs) if theirs.sign == Sign::Plus => Some(theirs),
            _ => None,
        };
        let acceptor = Acceptor { key: self.key, number: here.0 };
        strangers.accept(stream, acceptor, admits, move |theirs, stream| {
            let link = theirs.reversed();
            match torus.neighbour(here, link) {
                Some(_) => then(link, stream),
                None => {
                    tracing::warn!("{here}: a node of this torus dials link {link}, which does not exist")
                }
            }
        });
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
    let link = Arc::new(LinkConnector::new(links, parts)?);
    let strangers = Strangers::default();
    let ((proved, accepted), (done, results)) = (mpsc::channel(), mpsc::channel());
    let deadline = parts.deadline;
    for &(direction, node) in neighbours.iter().filter(|(direction, _)| direction.sign == Sign::Plus) {
        let address = parts.peers.get(node.index()).cloned().unwrap_or_default();
        begin(&link, &done, move |link| link.dial(direction, &address, 0, deadline))?;
    }
    let mut waiting: Vec<_> =
        neighbours.iter().copied().filter(|(direction, _)| direction.sign == Sign::Minus).collect();
    let mut connected = Vec::new();
    while connected.len() < neighbours.len() {
        if let Some(&(direction, node)) = waiting.first() {
            strangers.wait_for_room();
            let next = proof::next(parts.listener, deadline);
            if let Some(stream) = next.map_err(|cause| LinkError::Missing { direction, node, cause })? {
                let proved = proved.clone();
                link.accept(&strangers, stream, move |direction, stream| {
                    let _ = proved.send((direction, stream));
                });
            }
        } else {
            // Each thread gives up at the deadline.
            connected.extend(results.recv().ok().transpose()?);
        }
        while let Ok((direction, stream)) = accepted.try_recv() {
            // Nobody knows the key but the neighbours: this one dials for the second time.
            let Some(at) = waiting.iter().position(|&(other, _)| other == direction) else { continue };
            waiting.remove(at);
            begin(&link, &done, move |link| link.finish(direction, stream, 0, deadline))?;
        }
        while let Ok(result) = results.try_recv() {
            connected.push(result?);
        }
    }
    let mut streams = Vec::new();
    for (direction, pair, slots, credits, stream) in connected {
        links.connected(direction, 0, pair.pair, slots, credits);
        streams.push((direction, stream));
    }
    Ok(streams)
}

/// Connects a link on a thread of its own.
fn begin(
    link: &Arc<LinkConnector>,
    done: &mpsc::Sender<Result<Connected, LinkError>>,
    work: impl FnOnce(&LinkConnector) -> Result<Connected, LinkError> + Send + 'static,
) -> io::Result<()> {
    let (link, done) = (Arc::clone(link), done.clone());
    let connect = move || {
        // Nobody waits for it after an error of another link.
        let _ = done.send(work(&link));
    };
    std::thread::Builder::new().spawn(connect).map(drop)
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
        let local = LocalEnd { torus: self.torus, here: self.here, options: self.options };
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
        let address = proof::peer_address(&stream);
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
