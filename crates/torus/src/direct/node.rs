//! The state of a node of a mesh: its peers, regions, counters and events.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::io;
use std::net::TcpStream;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millstream_fabric::{COUNTERS, EVENT_LIMIT, Event, FabricError, FirstError, RegionId};
use millstream_rdma::queue::Signal;
use millstream_rdma::wait::WaitError;
use millstream_rdma::{
    Access, Completion, CompletionQueue, CompletionWaiter, Deadline, Device, QueuePair, RemoteMemory, Sge,
    WaitFd, WrId,
};
use millstream_shm::polling::{DEFAULT_POLLING, Polling};
use millstream_torus_core::{Dimensions, NodeNumber};

use super::message::{MESSAGE_BYTES, Message};
use crate::control::STAGING;
use crate::memory::Memory;
use crate::staging::Staging;

/// Work requests of a queue pair whose completion has not been seen.
pub(super) const SENDS: u32 = 128;
/// Receives of a queue pair: messages and counters that wait for this node's next call.
pub(super) const RECEIVES: u32 = 256;

/// Work request ids: what kind, which peer (16 bits from bit 32), and 32 bits of detail.
pub(super) const RECEIVE: u64 = 1 << 60;
const MESSAGE: u64 = 2 << 60;
const AWAITED: u64 = 3 << 60;
const STAGED: u64 = 4 << 60;
const PLAIN: u64 = 5 << 60;
const KIND: u64 = 15 << 60;

/// Longest sleep without a look at lost peers.
const CHECK_EVERY: Duration = Duration::from_millis(50);

/// What the end of a transfer does.
#[derive(Clone, Copy, Debug)]
pub(super) enum AtEnd {
    /// A caller waits for its number in [`Node::finished`].
    Report,
    /// It frees a place of the staging memory.
    Free(u64),
    /// Nothing but the count of outstanding requests.
    Nothing,
}

/// Another node.
#[derive(Debug)]
pub(super) struct Peer {
    node: NodeNumber,
    pair: QueuePair,
    stream: Arc<TcpStream>,
    /// Receives, then sends, one slot each.
    messages: Memory,
    free_sends: Vec<u32>,
    outstanding: u32,
    /// Regions of the peer, as far as they are known; `None` for what the peer says does not exist.
    pub(super) regions: HashMap<RegionId, Option<RemoteMemory>>,
    pub(super) alive: bool,
    /// Whether a request failed.
    pub(super) failed: bool,
    /// Puts since the last flush.
    pub(super) unflushed: bool,
    /// The peer's bytes of exchanges, by round.
    pub(super) exchanges: BTreeMap<u32, Incoming>,
}

/// Bytes of an exchange, as far as they have arrived.
#[derive(Debug, Default)]
pub(super) struct Incoming {
    pub(super) total: u64,
    pub(super) bytes: Vec<u8>,
}

impl Peer {
    pub(super) fn new(node: NodeNumber, pair: QueuePair, stream: TcpStream, messages: Memory) -> Peer {
        Peer {
            node,
            pair,
            stream: Arc::new(stream),
            messages,
            free_sends: (0..SENDS).collect(),
            outstanding: 0,
            regions: HashMap::new(),
            alive: true,
            failed: false,
            unflushed: false,
            exchanges: BTreeMap::new(),
        }
    }
}

/// A node of a mesh.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) torus: Dimensions,
    pub(super) here: NodeNumber,
    // Queue pairs before their completion queue, and that before its waiter.
    peers: Vec<Option<Peer>>,
    queue: CompletionQueue,
    waiter: Option<CompletionWaiter>,
    /// Completions that were taken and not handled yet. Answers wait for room and take further ones meanwhile, which come
    /// behind these.
    taken: VecDeque<Completion>,
    pub(super) regions: BTreeMap<RegionId, Memory>,
    /// Regions that ended, with the nodes that may still write to them.
    retired: Vec<(RegionId, Memory, BTreeSet<NodeNumber>)>,
    pub(super) staging: Staging,
    pub(super) staging_memory: Memory,
    pub(super) counters: Vec<u64>,
    pub(super) events: VecDeque<Event>,
    pub(super) lost_events: u64,
    /// Transfers that a caller waits for.
    pub(super) finished: BTreeSet<u32>,
    next_transfer: u32,
    pub(super) round: u32,
    pub(super) exchange_failure: FirstError,
    polling: Polling,
    broken: bool,
    device: Device,
}

impl Node {
    pub(super) fn new(
        torus: Dimensions,
        here: NodeNumber,
        device: Device,
        queue: CompletionQueue,
        waiter: CompletionWaiter,
    ) -> io::Result<Node> {
        let access = Some((&device, Access::LOCAL_WRITE));
        let staging_memory = Memory::allocate("millstream-direct-staging", STAGING as usize, access)?.0;
        Ok(Node {
            torus,
            here,
            peers: torus.all().map(|_| None).collect(),
            queue,
            waiter: Some(waiter),
            taken: VecDeque::new(),
            regions: BTreeMap::new(),
            retired: Vec::new(),
            staging: Staging::new(),
            staging_memory,
            counters: vec![0; COUNTERS.into()],
            events: VecDeque::new(),
            lost_events: 0,
            finished: BTreeSet::new(),
            next_transfer: 0,
            round: 0,
            exchange_failure: FirstError::default(),
            polling: Polling::new(DEFAULT_POLLING),
            broken: false,
            device,
        })
    }

    pub(super) fn queue(&self) -> &CompletionQueue {
        &self.queue
    }

    pub(super) fn add(&mut self, peer: Peer) {
        let place = peer.node.index();
        self.peers[place] = Some(peer);
    }

    pub(super) fn peers_connected(&self) -> usize {
        self.peers.iter().flatten().count()
    }

    pub(super) fn has_peer(&self, node: NodeNumber) -> bool {
        self.peer(node).is_some()
    }

    pub(super) fn peer(&self, node: NodeNumber) -> Option<&Peer> {
        self.peers.get(node.index()).and_then(Option::as_ref)
    }

    pub(super) fn peer_mut(&mut self, node: NodeNumber) -> Option<&mut Peer> {
        self.peers.get_mut(node.index()).and_then(Option::as_mut)
    }

    /// Other nodes.
    pub(super) fn others(&self) -> Vec<NodeNumber> {
        self.peers.iter().flatten().map(|peer| peer.node).collect()
    }

    /// Whether a node exists and is not known to be lost.
    pub(super) fn is_alive(&self, node: NodeNumber) -> bool {
        !self.broken && (node == self.here || self.peer(node).is_some_and(|peer| peer.alive))
    }

    /// A slot of a peer's message memory.
    pub(super) fn message_sge(&self, messages: &Memory, slot: u32) -> io::Result<Sge> {
        slot_sge(messages, slot, MESSAGE_BYTES as u32)
    }

    /// Registers zero bytes and tells all nodes.
    pub(super) fn register(&mut self, size: usize) -> io::Result<RegionId> {
        let access = Access::REMOTE | Access::REMOTE_ATOMIC;
        let memory =
            Memory::allocate("millstream-direct-region", size.max(1), Some((&self.device, access)))?.0;
        let id = RegionId(millstream_shm::random_u64());
        let remote = memory.region().map(|region| region.remote()).ok_or(io::ErrorKind::Unsupported)?;
        // An empty region is registered as one byte; others must not see it.
        let remote = remote.slice(0, size as u64).map_err(io::Error::other)?;
        self.regions.insert(id, memory);
        for node in self.others() {
            // A lost node needs no region.
            let _ = self.send(node, &Message::Region { id, memory: remote });
        }
        Ok(id)
    }

    /// Ends a region: its memory stays registered until no node writes to it any more.
    pub(super) fn deregister(&mut self, id: RegionId) -> Result<(), FabricError> {
        let lost = FabricError::NoRegion { node: self.here, region: id.0 };
        let memory = self.regions.remove(&id).ok_or(lost)?;
        let mut writers = BTreeSet::new();
        for node in self.others() {
            if self.send(node, &Message::NoRegion { id, confirm: true }).is_ok() {
                writers.insert(node);
            }
        }
        if !writers.is_empty() {
            self.retired.push((id, memory, writers));
        }
        Ok(())
    }

    /// Makes sure that a further request to a node can be posted.
    pub(super) fn make_room(&mut self, node: NodeNumber) -> Result<(), FabricError> {
        self.wait(Deadline::NEVER, |state| {
            let full = state.peer(node).is_some_and(|peer| peer.outstanding >= SENDS);
            if !state.is_alive(node) {
                return Some(Err(FabricError::NodeLost { node }));
            }
            (!full).then_some(Ok(()))
        })
    }

    /// Sends a message.
    pub(super) fn send(&mut self, node: NodeNumber, message: &Message) -> Result<(), FabricError> {
        self.make_room(node)?;
        let lost = FabricError::NodeLost { node };
        let peer = self.peer_mut(node).ok_or(lost)?;
        // As many slots as requests.
        let slot = peer.free_sends.pop().ok_or(lost)?;
        let bytes = message.encode();
        let at = u64::from(RECEIVES + slot) * MESSAGE_BYTES as u64;
        let sge = slot_sge(&peer.messages, RECEIVES + slot, bytes.len() as u32).map_err(|_| lost)?;
        peer.messages.store(at, &bytes).map_err(|_| lost)?;
        let id = WrId(MESSAGE | u64::from(node.0) << 32 | u64::from(slot));
        let posted = peer.pair.post_send(&[sge], Signal::Yes, id);
        self.posted(node, posted.is_ok())
    }

    /// Posts a transfer. Returns its number. There has to be room for it: see [`Node::make_room`].
    pub(super) fn transfer(
        &mut self,
        node: NodeNumber,
        at_end: AtEnd,
        post: impl FnOnce(&QueuePair, WrId) -> bool,
    ) -> Result<u32, FabricError> {
        let number = self.next_transfer;
        self.next_transfer = number.wrapping_add(1);
        let (kind, detail) = match at_end {
            AtEnd::Report => (AWAITED, number),
            // Staging memory has less than 2³² bytes.
            AtEnd::Free(place) => (STAGED, place as u32),
            AtEnd::Nothing => (PLAIN, 0),
        };
        let id = WrId(kind | u64::from(node.0) << 32 | u64::from(detail));
        let posted = self.peer(node).is_some_and(|peer| post(&peer.pair, id));
        self.posted(node, posted)?;
        Ok(number)
    }

    fn posted(&mut self, node: NodeNumber, posted: bool) -> Result<(), FabricError> {
        match self.peer_mut(node) {
            Some(peer) if posted => {
                peer.outstanding += 1;
                Ok(())
            }
            Some(peer) => {
                peer.alive = false;
                Err(FabricError::NodeLost { node })
            }
            None => Err(FabricError::NodeLost { node }),
        }
    }

    /// Whether no request to a node is outstanding.
    pub(super) fn is_idle(&self, node: NodeNumber) -> bool {
        self.peer(node).is_none_or(|peer| peer.outstanding == 0)
    }

    /// Takes all completions. Returns whether there were any.
    pub(super) fn progress(&mut self) -> bool {
        let mut buffer = [Completion::EMPTY; 32];
        let mut moved = false;
        loop {
            let taken = match self.queue.poll(&mut buffer) {
                Ok(taken) => taken.len(),
                Err(error) => {
                    tracing::error!("{}: {error}", self.here);
                    self.broken = true;
                    return true;
                }
            };
            self.taken.extend(&buffer[..taken]);
            moved |= self.handle_taken();
            if taken < buffer.len() {
                return moved;
            }
        }
    }

    /// Handles completions in the order of their arrival. Returns whether there were any.
    fn handle_taken(&mut self) -> bool {
        let mut moved = false;
        while let Some(completion) = self.taken.pop_front() {
            self.complete(&completion);
            moved = true;
        }
        moved
    }

    fn complete(&mut self, completion: &Completion) {
        let id = completion.wr_id().0;
        let (kind, detail) = (id & KIND, id as u32);
        let node = NodeNumber((id >> 32) as u16);
        let ok = completion.is_success();
        let Some(peer) = self.peer_mut(node) else { return };
        if !ok {
            peer.alive = false;
            peer.failed |= kind != RECEIVE;
        }
        if kind != RECEIVE {
            peer.outstanding = peer.outstanding.saturating_sub(1);
        }
        match kind {
            RECEIVE if ok => self.received(node, detail, completion),
            MESSAGE => peer.free_sends.push(detail),
            STAGED => self.staging.free(detail.into()),
            AWAITED => {
                self.finished.insert(detail);
            }
            _ => {}
        }
    }

    /// Handles a message or a counter, and posts the receive again.
    fn received(&mut self, node: NodeNumber, slot: u32, completion: &Completion) {
        let Some(peer) = self.peer_mut(node) else { return };
        let mut message = None;
        let mut count = None;
        match completion.imm() {
            Some(value) => count = Some(value),
            None => {
                let mut bytes = vec![0; (completion.len() as usize).min(MESSAGE_BYTES)];
                let _ = peer.messages.load(u64::from(slot) * MESSAGE_BYTES as u64, &mut bytes);
                message = Some(Message::decode(&bytes));
            }
        }
        let id = WrId(RECEIVE | u64::from(node.0) << 32 | u64::from(slot));
        let again = slot_sge(&peer.messages, slot, MESSAGE_BYTES as u32)
            .is_ok_and(|sge| peer.pair.post_recv(&[sge], id).is_ok());
        if !again || message == Some(None) {
            peer.alive = false;
            tracing::error!(
                "{}: {node} sent a malformed message, or its receive cannot be posted",
                self.here
            );
            return;
        }
        if let Some(counter) =
            count.and_then(|value| self.counters.get_mut((value >> 16) as usize).map(|c| (c, value)))
        {
            *counter.0 += u64::from(counter.1 & 0xFFFF);
        }
        if let Some(Some(message)) = message {
            self.handle(node, message);
        }
    }

    fn handle(&mut self, node: NodeNumber, message: Message) {
        match message {
            Message::Region { id, memory } => self.record_region(node, id, Some(memory)),
            Message::NoRegion { id, confirm } => {
                self.record_region(node, id, None);
                if confirm {
                    let _ = self.send(node, &Message::Forgotten { id });
                }
            }
            Message::Forgotten { id } => {
                for (_, _, writers) in self.retired.iter_mut().filter(|(retired, ..)| *retired == id) {
                    writers.remove(&node);
                }
                self.retired.retain(|(.., writers)| !writers.is_empty());
            }
            Message::Lookup { id } => {
                let remote = self.regions.get(&id).and_then(Memory::region).map(|region| region.remote());
                let answer = match remote {
                    Some(memory) => Message::Region { id, memory },
                    None => Message::NoRegion { id, confirm: false },
                };
                let _ = self.send(node, &answer);
            }
            Message::Event { tag, region, offset, length } => {
                self.add_event(Event { source: node, tag, region, offset, length });
            }
            Message::Exchange { round, total, part } => {
                if let Some(peer) = self.peer_mut(node) {
                    let incoming = peer.exchanges.entry(round).or_default();
                    incoming.total = total;
                    incoming.bytes.extend(part);
                }
            }
        }
    }

    fn record_region(&mut self, node: NodeNumber, id: RegionId, memory: Option<RemoteMemory>) {
        if let Some(peer) = self.peer_mut(node) {
            peer.regions.insert(id, memory);
        }
    }

    pub(super) fn add_event(&mut self, event: Event) {
        if self.events.len() >= EVENT_LIMIT {
            self.lost_events += 1;
        } else {
            self.events.push_back(event);
        }
    }

    /// Looks which connections have closed. Their completions are taken first: what a lost node sent before counts.
    pub(super) fn look_for_lost(&mut self) {
        let alive: Vec<_> = self.peers.iter().flatten().filter(|peer| peer.alive).collect();
        let streams: Vec<_> = alive.iter().map(|peer| peer.stream.as_fd()).collect();
        // Nothing comes over the streams but their end.
        let ended = millstream_shm::poll_readable(&streams, Some(Duration::ZERO)).unwrap_or_default();
        let closed = alive.iter().zip(ended).filter(|&(_, ended)| ended).map(|(peer, _)| peer.node);
        let closed: Vec<_> = closed.collect();
        if closed.is_empty() {
            return;
        }
        self.progress();
        for node in closed {
            if let Some(peer) = self.peer_mut(node) {
                peer.alive = false;
            }
            for (_, _, writers) in &mut self.retired {
                writers.remove(&node);
            }
        }
        self.retired.retain(|(.., writers)| !writers.is_empty());
    }

    /// Waits until `check` has a result, or for `None` at the deadline.
    pub(super) fn wait<R>(
        &mut self,
        deadline: Deadline,
        mut check: impl FnMut(&mut Node) -> Option<Result<R, FabricError>>,
    ) -> Result<R, FabricError> {
        let start = Instant::now();
        let mut looked = start;
        self.polling.begin();
        loop {
            self.progress();
            if let Some(result) = check(self) {
                return result;
            }
            if self.broken {
                return Err(FabricError::NodeLost { node: self.here });
            }
            if deadline.passed() {
                return Err(FabricError::TimedOut { waited: start.elapsed() });
            }
            if self.polling.pause() {
                continue;
            }
            self.sleep(deadline.earlier(Deadline::after(CHECK_EVERY)));
            if looked.elapsed() >= CHECK_EVERY {
                looked = Instant::now();
                self.look_for_lost();
            }
        }
    }

    /// Blocks until there is a completion, a connection closes, or the deadline.
    fn sleep(&mut self, deadline: Deadline) {
        let Some(mut waiter) = self.waiter.take() else { return };
        let streams: Vec<_> = self
            .peers
            .iter()
            .flatten()
            .filter(|peer| peer.alive)
            .map(|peer| Arc::clone(&peer.stream))
            .collect();
        let mut descriptors: Vec<_> = streams.iter().map(|stream| WaitFd::readable(&**stream)).collect();
        let mut buffer = [Completion::EMPTY; 32];
        let mut taken = Vec::new();
        let queue = &self.queue;
        let waited = waiter.wait(&[queue], &mut descriptors, deadline, || -> Result<bool, WaitError> {
            // A failure of the queue is seen again by `progress`.
            taken.extend_from_slice(queue.poll(&mut buffer).unwrap_or_default());
            Ok(!taken.is_empty())
        });
        let is_closed = descriptors.iter().any(WaitFd::is_ready);
        drop(descriptors);
        self.waiter = Some(waiter);
        self.taken.extend(taken);
        self.handle_taken();
        if let Err(error) = waited {
            tracing::error!("{}: {error}", self.here);
            self.broken = true;
        }
        if is_closed {
            self.look_for_lost();
        }
    }
}

fn slot_sge(messages: &Memory, slot: u32, length: u32) -> io::Result<Sge> {
    let region = messages.region().ok_or(io::ErrorKind::Unsupported)?;
    region.sge(u64::from(slot) * MESSAGE_BYTES as u64, length).map_err(io::Error::other)
}
