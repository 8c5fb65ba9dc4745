//! The start of a mesh: nodes learn each other's addresses at a rendezvous, then each dials those below it.

use std::collections::HashMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use millstream_rdma::connect::{ConnectError, ConnectedQueuePair, Listener, listen};
use millstream_rdma::device::DeviceError;
use millstream_rdma::queue::QueueError;
use millstream_rdma::wait::{CompletionWaiter, WaitOptions};
use millstream_rdma::{Access, Deadline, Device, PreparedQueuePair, RcOptions, WrId};
use millstream_torus_core::{Dimensions, NodeNumber};
use serde::{Deserialize, Serialize};

use super::DirectOptions;
use super::message::MESSAGE_BYTES;
use super::node::{Node, Peer, RECEIVE, RECEIVES, SENDS};
use crate::memory::Memory;
use crate::proof::{self, Acceptor, Call, ProofError, Purpose, Strangers};

/// Time for a node to say who it is.
const HELLO: Duration = Duration::from_secs(5);
/// Time after which a line names a node for which others wait.
const PATIENCE: Duration = Duration::from_secs(90);
/// Longest line at a rendezvous: the addresses of all nodes.
const MAX_LINE: u64 = 4 << 20;

/// Why a mesh cannot be connected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MeshError {
    /// The environment lacks a variable, or it is malformed.
    #[error(
        "{name} is not set, or malformed: start this program with `millstream torus run --network direct -- PROGRAM`"
    )]
    Environment {
        /// The variable.
        name: &'static str,
    },
    /// The device cannot be opened.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A connection failed.
    #[error("{what}: {cause}")]
    Connect {
        /// Between whom.
        what: String,
        /// The cause.
        cause: ConnectError,
    },
    /// A peer is not the expected one.
    #[error("{who} {what}")]
    Refused {
        /// Its address.
        who: String,
        /// What is wrong.
        what: String,
    },
    /// The device refused a queue.
    #[error(transparent)]
    Queue(#[from] QueueError),
    /// A system call failed.
    #[error("mesh: {0}")]
    Io(#[from] io::Error),
}

/// What a node says at the rendezvous.
#[derive(Debug, Serialize, Deserialize)]
struct Arrival {
    dimensions: String,
    node: u16,
    address: String,
}

/// The place where all nodes of a run learn each other's addresses.
#[derive(Debug)]
pub struct Rendezvous {
    listener: Listener,
    torus: Dimensions,
    key: u64,
}

impl Rendezvous {
    /// Listens on this host.
    ///
    /// # Errors
    /// [`MeshError`] of the socket.
    pub fn listen(torus: Dimensions, key: u64) -> Result<Rendezvous, MeshError> {
        let failed = |cause| MeshError::Connect { what: "rendezvous of the mesh".to_owned(), cause };
        Ok(Rendezvous { listener: listen("127.0.0.1:0").map_err(failed)?, torus, key })
    }

    /// Its address.
    #[must_use]
    pub fn address(&self) -> String {
        self.listener.address().to_string()
    }

    /// Waits for all nodes, and gives them all addresses. A line names one that others have waited for too long.
    /// Connections without the key are ignored.
    ///
    /// # Errors
    /// [`MeshError`] if a node does not come in time.
    pub fn run(&self, deadline: Deadline) -> Result<(), MeshError> {
        let mut arrived: HashMap<u16, (TcpStream, String)> = HashMap::new();
        let mut patience = Deadline::after(PATIENCE);
        let acceptor = Acceptor { key: self.key, number: 0 };
        let mut nodes = Arrivals::new(&self.listener, acceptor, Purpose::Rendezvous);
        while arrived.len() < self.torus.nodes() {
            let missing = self.torus.all().find(|node| !arrived.contains_key(&node.0)).unwrap_or_default();
            let failed = |cause| MeshError::Connect { what: format!("waiting for {missing}"), cause };
            let stream = match nodes.next(deadline.earlier(patience)) {
                Err(_) if patience.passed() && !deadline.passed() => {
                    tracing::warn!("mesh: still waiting for {missing}");
                    patience = Deadline::NEVER;
                    continue;
                }
                next => next.map_err(failed)?,
            };
            // Others may have given up meanwhile.
            arrived.retain(|_, (stream, _)| is_open(stream));
            match self.receive_arrival(&stream) {
                Ok(arrival) => {
                    arrived.insert(arrival.node, (stream, arrival.address));
                }
                Err(cause) => refuse(&stream, &cause),
            }
        }
        let addresses: Vec<&str> = self.torus.all().map(|node| arrived[&node.0].1.as_str()).collect();
        let line = serde_json::to_string(&addresses).map_err(io::Error::from)? + "\n";
        for (stream, _) in arrived.values_mut() {
            stream.write_all(line.as_bytes())?;
        }
        Ok(())
    }

    fn receive_arrival(&self, stream: &TcpStream) -> io::Result<Arrival> {
        stream.set_read_timeout(Some(HELLO))?;
        let arrival: Arrival = read_line(stream)?.ok_or(io::ErrorKind::UnexpectedEof)?;
        let known = self.torus.contains(NodeNumber(arrival.node));
        let same = arrival.dimensions == self.torus.to_string() && known;
        if same { Ok(arrival) } else { Err(io::Error::other("it has another shape or number")) }
    }
}

/// Connections of nodes that know the key. Others keep nobody waiting.
struct Arrivals<'l> {
    listener: &'l Listener,
    acceptor: Acceptor,
    purpose: Purpose,
    strangers: Strangers,
    sender: Sender<TcpStream>,
    proved: Receiver<TcpStream>,
}

impl Arrivals<'_> {
    fn new(listener: &Listener, acceptor: Acceptor, purpose: Purpose) -> Arrivals<'_> {
        let (sender, proved) = mpsc::channel();
        Arrivals { listener, acceptor, purpose, strangers: Strangers::default(), sender, proved }
    }

    fn next(&mut self, deadline: Deadline) -> Result<TcpStream, ConnectError> {
        loop {
            if let Ok(stream) = self.proved.try_recv() {
                return Ok(stream);
            }
            self.strangers.wait_for_room();
            if let Some(stream) = proof::next(self.listener, deadline)? {
                let sender = self.sender.clone();
                self.strangers.accept(stream, self.acceptor, self.purpose.only(), move |(), stream| {
                    // Nobody waits for it after the deadline.
                    let _ = sender.send(stream);
                });
            }
        }
    }
}

/// Whether the other end, which has nothing more to say, still waits.
fn is_open(stream: &TcpStream) -> bool {
    let waits = |error: io::Error| error.kind() == io::ErrorKind::WouldBlock;
    stream.set_nonblocking(true).is_ok()
        && stream.peek(&mut [0]).is_err_and(waits)
        && stream.set_nonblocking(false).is_ok()
}

/// A node that knows the key, and breaks a rule.
fn refuse(stream: &TcpStream, cause: &io::Error) {
    tracing::warn!("{} is refused: {cause}", proof::peer_address(stream));
}

/// Connects to a node, or to the rendezvous.
fn connect_to(address: &str, what: String, call: Call, deadline: Deadline) -> Result<TcpStream, MeshError> {
    proof::connect(address, call, deadline, deadline).map_err(|error| match error {
        ProofError::Connect(cause) => MeshError::Connect { what, cause },
        ProofError::Proof(cause) if cause.kind() != io::ErrorKind::PermissionDenied => {
            MeshError::Connect { what, cause: ConnectError::stream(address, "waiting for its proof", cause) }
        }
        ProofError::Proof(cause) => MeshError::Refused {
            who: address.to_owned(),
            what: format!("did not prove the run's key: {cause}"),
        },
    })
}

/// `Ok(None)` at the end of the stream.
fn read_line<T: serde::de::DeserializeOwned>(stream: &TcpStream) -> io::Result<Option<T>> {
    let mut line = String::new();
    BufReader::new(stream.take(MAX_LINE)).read_line(&mut line)?;
    if line.is_empty() { Ok(None) } else { Ok(Some(serde_json::from_str(&line)?)) }
}

/// Learns the addresses of all nodes.
fn exchange_addresses(
    options: &DirectOptions,
    own: &str,
    deadline: Deadline,
) -> Result<Vec<String>, MeshError> {
    let what = "rendezvous of the mesh".to_owned();
    let call = Call { key: options.key, purpose: Purpose::Rendezvous, to: 0 };
    let mut stream = connect_to(&options.rendezvous, what, call, deadline)?;
    let arrival =
        Arrival { dimensions: options.dimensions.to_string(), node: options.node.0, address: own.to_owned() };
    let line = serde_json::to_string(&arrival).map_err(io::Error::from)? + "\n";
    stream.write_all(line.as_bytes())?;
    stream.set_read_timeout(deadline.remaining().map(|left| left.max(Duration::from_millis(1))))?;
    let refused = |what: &str| MeshError::Refused { who: options.rendezvous.clone(), what: what.to_owned() };
    let addresses: Vec<String> = match read_line(&stream) {
        Ok(addresses) => addresses
            .ok_or_else(|| refused("(the rendezvous of the mesh) has ended: not all nodes have come"))?,
        Err(cause) if matches!(cause.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
            return Err(refused("(the rendezvous of the mesh) still waits for other nodes"));
        }
        Err(cause) => return Err(cause.into()),
    };
    if addresses.len() == options.dimensions.nodes() {
        return Ok(addresses);
    }
    let what = format!("named {} nodes instead of {}", addresses.len(), options.dimensions.nodes());
    Err(MeshError::Refused { who: options.rendezvous.clone(), what })
}

/// Connects with all nodes.
pub(super) fn connect(
    options: &DirectOptions,
    device: &Device,
    deadline: Deadline,
) -> Result<Node, MeshError> {
    let torus = options.dimensions;
    if !torus.contains(options.node) {
        let what = format!("is not in a torus of {torus}");
        return Err(MeshError::Refused { who: options.node.to_string(), what });
    }
    let failed = |what: String| move |cause| MeshError::Connect { what, cause };
    let listener = listen("127.0.0.1:0").map_err(failed("listening for nodes".to_owned()))?;
    let addresses = exchange_addresses(options, &listener.address().to_string(), deadline)?;
    // The node polls before it waits.
    let wait = WaitOptions { spin: Duration::ZERO, ..WaitOptions::default() };
    let waiter = CompletionWaiter::new(device, wait)?;
    let others = torus.nodes() as u32 - 1;
    let queue = waiter.completion_queue((others * (SENDS + RECEIVES)).max(1))?;
    let mut node = Node::new(torus, options.node, device.clone(), queue, waiter)?;
    for lower in torus.all().take(options.node.index()) {
        let to = || format!("connecting {} with {lower}", options.node);
        let call = Call { key: options.key, purpose: Purpose::Mesh, to: lower.0 };
        let mut stream = connect_to(&addresses[lower.index()], to(), call, deadline)?;
        stream.write_all(&options.node.0.to_le_bytes())?;
        let peer = finish(&node, device, lower, stream, deadline).map_err(failed(to()));
        node.add(peer??);
    }
    let acceptor = Acceptor { key: options.key, number: options.node.0 };
    let mut nodes = Arrivals::new(&listener, acceptor, Purpose::Mesh);
    while node.peers_connected() < torus.nodes() - 1 {
        let mut stream = nodes.next(deadline).map_err(failed("waiting for nodes".to_owned()))?;
        match receive_hello(&mut stream, options).and_then(|higher| {
            if node.has_peer(higher) { Err(io::Error::other("it is connected already")) } else { Ok(higher) }
        }) {
            Ok(higher) => {
                let what = format!("connecting {} with {higher}", options.node);
                let peer = finish(&node, device, higher, stream, deadline).map_err(failed(what));
                node.add(peer??);
            }
            Err(cause) => refuse(&stream, &cause),
        }
    }
    Ok(node)
}

/// Reads which node dialled.
fn receive_hello(stream: &mut TcpStream, options: &DirectOptions) -> io::Result<NodeNumber> {
    let mut number = [0; 2];
    stream.set_read_timeout(Some(HELLO))?;
    stream.read_exact(&mut number)?;
    let node = NodeNumber(u16::from_le_bytes(number));
    let is_higher = node > options.node && options.dimensions.contains(node);
    if is_higher { Ok(node) } else { Err(io::Error::other(format!("{node} does not dial this one"))) }
}

/// Connects a queue pair over a stream.
fn finish(
    node: &Node,
    device: &Device,
    peer: NodeNumber,
    mut stream: TcpStream,
    deadline: Deadline,
) -> Result<Result<Peer, MeshError>, ConnectError> {
    let rc = RcOptions {
        send_depth: SENDS,
        recv_depth: RECEIVES,
        send_sges: 1,
        max_inline: 0,
        access: Access::REMOTE | Access::REMOTE_ATOMIC,
        ..RcOptions::default()
    };
    let prepare = || -> Result<_, MeshError> {
        let length = (RECEIVES + SENDS) as usize * MESSAGE_BYTES;
        let access = Some((device, Access::LOCAL_WRITE));
        let messages = Memory::allocate("millstream-direct-messages", length, access)?.0;
        let prepared = PreparedQueuePair::new(device, node.queue(), node.queue(), &rc)?;
        for slot in 0..RECEIVES {
            let sge = node.message_sge(&messages, slot)?;
            let posted =
                prepared.post_recv(&[sge], WrId(RECEIVE | u64::from(peer.0) << 32 | u64::from(slot)));
            posted.map_err(|error| io::Error::other(error.to_string()))?;
        }
        Ok((messages, prepared))
    };
    let (messages, prepared) = match prepare() {
        Ok(prepared) => prepared,
        Err(error) => return Ok(Err(error)),
    };
    let ConnectedQueuePair { pair, .. } = prepared.connect(&mut stream, &[], deadline)?;
    Ok(Ok(Peer::new(peer, pair, stream, messages)))
}
