//! Message rings over puts: every node has a ring of slots for each other node in one region, its inbox.
//!
//! ```text
//!   inbox:  ring of node 0: slots │ ring of node 1 │ … │ freed, hello, endpoints: a word for each node
//! ```
//! A message is a put into the next slot that raises the target's counter of this node's number. The target writes back
//! how many slots it has freed. So nothing waits in the network, and nothing is lost.
//!
//! A node that opens its endpoint anew has another inbox, and finds rings with messages of its earlier endpoint. It counts its
//! endpoints at each target. Behind an earlier one it says its inbox, and waits until the target has emptied the ring.

use std::time::{Duration, Instant};

use millstream_fabric::{FIRST_COLLECTIVE_COUNTER, Fabric, FabricError, Notification, RegionId};
use millstream_torus_core::NodeNumber;

use crate::header::{HEADER_BYTES, Header};

/// Bytes of data in a slot.
pub const PAYLOAD: usize = 16 << 10;
const SLOT: usize = HEADER_BYTES + PAYLOAD;
/// Slots of a ring.
pub const SLOTS: u64 = 16;

/// Address of an endpoint: a node, and the inbox there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    /// The node.
    pub node: NodeNumber,
    /// Its inbox.
    pub inbox: RegionId,
}

const MAGIC: u32 = u32::from_le_bytes(*b"mill");

impl Address {
    /// Length as bytes.
    pub const BYTES: usize = 16;

    /// As bytes.
    #[must_use]
    pub fn encode(self) -> [u8; Address::BYTES] {
        let mut bytes = [0; Address::BYTES];
        bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4..6].copy_from_slice(&self.node.0.to_le_bytes());
        bytes[8..].copy_from_slice(&self.inbox.0.to_le_bytes());
        bytes
    }

    /// From bytes; `None` if they are no address of this provider.
    #[must_use]
    pub fn decode(bytes: &[u8; Address::BYTES]) -> Option<Address> {
        let [a, b, c, d, low, high, _, _, inbox @ ..] = *bytes;
        let node = NodeNumber(u16::from_le_bytes([low, high]));
        (u32::from_le_bytes([a, b, c, d]) == MAGIC)
            .then_some(Address { node, inbox: RegionId(u64::from_le_bytes(inbox)) })
    }
}

/// A node that opens its endpoint anew, or whose next program has just begun, is taken for lost for a moment.
const GRACE: Duration = Duration::from_secs(2);

/// State of the two rings between this node and another.
#[derive(Clone, Copy, Debug, Default)]
struct Peer {
    /// Its inbox, once it is known.
    inbox: Option<RegionId>,
    /// It has another inbox since [`Rings::take_reopened`].
    reopened: bool,
    /// Since when it has been seen as lost.
    lost_since: Option<Instant>,
    /// This endpoint is counted at the inbox.
    is_open: bool,
    sent: u64,
    /// Inbox of the endpoint that fills the ring here.
    source: Option<RegionId>,
    received: u64,
    /// Freed slots that the peer knows of. None if it waits for the ring.
    returned: Option<u64>,
}

/// Words of an inbox for each node.
#[derive(Clone, Copy)]
enum Word {
    /// 1 + the slots that the node has freed in the ring of the inbox's owner; 0 as long as the owner must wait.
    Freed,
    /// The inbox of an endpoint of the node that waits for the ring.
    Hello,
    /// Number of endpoints of the node that used the ring.
    Endpoints,
}

const WORDS: usize = 3;

/// The rings of a node.
#[derive(Debug)]
pub struct Rings<F> {
    fabric: F,
    inbox: RegionId,
    peers: Vec<Peer>,
    /// Values of the counters before the first message.
    counted: Vec<u64>,
    grace: Duration,
    scratch: Vec<u8>,
}

/// Why a node cannot have rings.
#[derive(Debug, thiserror::Error)]
#[error(
    "a torus of {nodes} nodes is too large: each of at most {} nodes needs a counter",
    FIRST_COLLECTIVE_COUNTER
)]
pub struct TooManyNodes {
    nodes: usize,
}

impl<F: Fabric> Rings<F> {
    /// Registers the inbox.
    ///
    /// # Errors
    /// [`TooManyNodes`].
    pub fn new(mut fabric: F) -> Result<Rings<F>, TooManyNodes> {
        let nodes = fabric.dimensions().nodes();
        if nodes > usize::from(FIRST_COLLECTIVE_COUNTER) {
            return Err(TooManyNodes { nodes });
        }
        let inbox = fabric.register(nodes * (SLOTS as usize * SLOT + 8 * WORDS));
        // All of these counters exist.
        let counted = (0..nodes).map(|node| fabric.counter(node as u16).unwrap_or(0)).collect();
        let peers = vec![Peer { returned: Some(0), ..Peer::default() }; nodes];
        Ok(Rings { fabric, inbox, peers, counted, grace: GRACE, scratch: Vec::with_capacity(SLOT) })
    }

    /// This endpoint's address.
    pub fn address(&self) -> Address {
        Address { node: self.fabric.here(), inbox: self.inbox }
    }

    /// The fabric.
    pub fn fabric(&mut self) -> &mut F {
        &mut self.fabric
    }

    /// Number of nodes.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.peers.len()
    }

    fn slot(&self, node: NodeNumber, number: u64) -> u64 {
        ((node.index() as u64 * SLOTS) + number % SLOTS) * SLOT as u64
    }

    fn word(&self, word: Word, node: NodeNumber) -> u64 {
        let nodes = self.peers.len() as u64;
        nodes * SLOTS * SLOT as u64 + 8 * (word as u64 * nodes + node.index() as u64)
    }

    fn load_word(&self, word: Word, node: NodeNumber) -> u64 {
        let mut bytes = [0; 8];
        // The word is in the inbox.
        let _ = self.fabric.load(self.inbox, self.word(word, node), &mut bytes);
        u64::from_le_bytes(bytes)
    }

    /// Whether messages to a node go to this address.
    #[must_use]
    pub fn knows(&self, address: Address) -> bool {
        self.peers.get(address.node.index()).is_some_and(|peer| peer.inbox == Some(address.inbox))
    }

    /// Learns where messages to a node go. False if the address is that of an endpoint that has ended, and another one is known.
    pub fn connect(&mut self, address: Address) -> bool {
        let Address { node, inbox } = address;
        let Some(known) = self.peers.get(node.index()).map(|peer| peer.inbox) else { return false };
        if known == Some(inbox) {
            return true;
        }
        if known.is_some() {
            let found = self.fabric.get(node, inbox, 0, &mut [0]);
            if matches!(found, Err(FabricError::NoRegion { .. } | FabricError::Gone { .. })) {
                return false;
            }
        }
        // The word is in the inbox.
        let _ = self.fabric.store(self.inbox, self.word(Word::Freed, node), &[0; 8]);
        let peer = &mut self.peers[node.index()];
        (peer.inbox, peer.reopened, peer.lost_since) = (Some(inbox), known.is_some(), None);
        (peer.is_open, peer.sent) = (false, 0);
        true
    }

    /// Counts this endpoint at the inbox of a node. Behind an earlier one it must wait.
    fn open(&mut self, node: NodeNumber, inbox: RegionId) -> Result<(), FabricError> {
        let here = self.fabric.here();
        if self.fabric.fetch_add(node, inbox, self.word(Word::Endpoints, here), 1)? == 0 {
            // The word is in the inbox.
            let _ = self.fabric.store(self.inbox, self.word(Word::Freed, node), &1_u64.to_le_bytes());
        } else {
            let (hello, own) = (self.word(Word::Hello, here), self.inbox.0.to_le_bytes());
            self.fabric.put(node, inbox, hello, &own, Notification::None)?;
        }
        self.peers[node.index()].is_open = true;
        Ok(())
    }

    /// Whether a node has another endpoint since the last call.
    pub fn take_reopened(&mut self, node: NodeNumber) -> bool {
        self.peers.get_mut(node.index()).is_some_and(|peer| std::mem::take(&mut peer.reopened))
    }

    /// Whether a node is lost, and does not come back at once.
    pub fn is_lost(&mut self, node: NodeNumber) -> bool {
        let is_lost = self.fabric.is_lost(node);
        let Some(peer) = self.peers.get_mut(node.index()) else { return true };
        if !is_lost {
            peer.lost_since = None;
            return false;
        }
        peer.lost_since.get_or_insert_with(Instant::now).elapsed() >= self.grace
    }

    /// Messages of a node so far.
    fn arrived(&self, node: NodeNumber) -> u64 {
        let counted = self.counted[node.index()];
        // The counter exists.
        self.fabric.counter(node.0).unwrap_or(counted).wrapping_sub(counted)
    }

    /// Whether a node seems lost.
    #[must_use]
    pub fn seems_lost(&self, node: NodeNumber) -> bool {
        self.fabric.is_lost(node)
    }

    /// Whether a slot at a node is free. A node that seems lost has none.
    ///
    /// # Errors
    /// [`FabricError`] if its endpoint has ended.
    pub fn is_ready(&mut self, node: NodeNumber) -> Result<bool, FabricError> {
        let Some(peer) = self.peers.get(node.index()).copied() else { return Ok(false) };
        let Some(inbox) = peer.inbox.filter(|_| !self.seems_lost(node)) else { return Ok(false) };
        if !peer.is_open {
            self.open(node, inbox)?;
        }
        let freed = self.load_word(Word::Freed, node).checked_sub(1);
        Ok(freed.is_some_and(|freed| peer.sent.wrapping_sub(freed) < SLOTS))
    }

    /// Sends one slot, which [`Rings::is_ready`] says is free. `fill` appends the data.
    ///
    /// # Errors
    /// [`FabricError`] if the node is lost.
    pub fn send(
        &mut self,
        node: NodeNumber,
        mut header: Header,
        fill: impl FnOnce(&mut Vec<u8>),
    ) -> Result<(), FabricError> {
        let lost = FabricError::NodeLost { node };
        let peer = self.peers.get(node.index()).ok_or(lost)?;
        let (inbox, sent) = (peer.inbox.ok_or(lost)?, peer.sent);
        header.inbox = self.inbox.0;
        let mut slot = std::mem::take(&mut self.scratch);
        slot.clear();
        slot.extend(header.encode());
        fill(&mut slot);
        let here = self.fabric.here();
        let arrived = Notification::Counter { index: here.0, add: 1 };
        let offset = self.slot(here, sent);
        let result = self.fabric.put(node, inbox, offset, &slot, arrived);
        self.scratch = slot;
        result?;
        self.peers[node.index()].sent += 1;
        Ok(())
    }

    /// The header of the next message of a node, which [`Rings::load`] reads and [`Rings::free`] frees.
    pub fn peek(&mut self, node: NodeNumber) -> Option<Header> {
        loop {
            let Peer { source, received, .. } = *self.peers.get(node.index())?;
            // In this order: what the endpoint before has sent is counted by then.
            let hello = RegionId(self.load_word(Word::Hello, node));
            if self.arrived(node) == received {
                if hello != RegionId(0) && source != Some(hello) {
                    self.accept(Address { node, inbox: hello });
                }
                self.return_slots(node);
                return None;
            }
            let mut bytes = [0; HEADER_BYTES];
            self.fabric.load(self.inbox, self.slot(node, received), &mut bytes).ok()?;
            if let Some(header) = Header::decode(&bytes, PAYLOAD) {
                let inbox = RegionId(header.inbox);
                self.peers[node.index()].source.get_or_insert(inbox);
                if source.is_none_or(|source| source == inbox) && self.connect(Address { node, inbox }) {
                    return Some(header);
                }
            }
            // No node of this provider sends such a header, or its endpoint has ended: the slot is skipped.
            self.free(node);
        }
    }

    /// The ring of a node is empty, and another endpoint of it waits for that.
    fn accept(&mut self, address: Address) {
        let peer = &mut self.peers[address.node.index()];
        (peer.source, peer.returned) = (Some(address.inbox), None);
        self.counted[address.node.index()] += std::mem::take(&mut peer.received);
        self.connect(address);
    }

    /// Copies data of the message that [`Rings::peek`] found.
    ///
    /// # Errors
    /// [`FabricError::Bounds`] beyond the slot.
    pub fn load(&self, node: NodeNumber, at: usize, into: &mut [u8]) -> Result<(), FabricError> {
        let received = self.peers.get(node.index()).map_or(0, |peer| peer.received);
        let offset = self.slot(node, received) + (HEADER_BYTES + at) as u64;
        self.fabric.load(self.inbox, offset, into)
    }

    /// Frees the slot of the message that [`Rings::peek`] found, and returns slots to its node when half of the ring is free.
    pub fn free(&mut self, node: NodeNumber) {
        let Some(peer) = self.peers.get_mut(node.index()) else { return };
        peer.received += 1;
        self.return_slots(node);
    }

    fn return_slots(&mut self, node: NodeNumber) {
        let word = self.word(Word::Freed, self.fabric.here());
        let peer = &mut self.peers[node.index()];
        let is_due = peer.returned.is_none_or(|returned| peer.received - returned >= SLOTS / 2);
        let Some(inbox) = peer.source.filter(|_| is_due && peer.source == peer.inbox) else { return };
        let freed = (1 + peer.received).to_le_bytes();
        // A node that has just come back may still seem lost: its slots are returned later.
        if self.fabric.put(node, inbox, word, &freed, Notification::None).is_ok() {
            peer.returned = Some(peer.received);
        }
    }

    /// Nodes that are lost do not come back.
    #[cfg(test)]
    pub fn without_grace(self) -> Rings<F> {
        Rings { grace: Duration::ZERO, ..self }
    }

    /// Ends the inbox.
    #[cfg(test)]
    pub fn close(mut self) -> F {
        self.fabric.deregister(self.inbox).expect("its own");
        self.fabric
    }

    /// Waits until all messages are in place at their targets.
    pub fn flush(&mut self) {
        for node in 0..self.peers.len() {
            if self.peers[node].sent > 0 {
                // What a lost node did not receive was reported before.
                let _ = self.fabric.flush(NodeNumber(node as u16));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use millstream_fabric::LocalNode;

    use super::*;
    use crate::header::Kind;

    fn pair() -> [Rings<LocalNode>; 2] {
        let nodes: [LocalNode; 2] = LocalNode::all("2x1x1".parse().unwrap()).try_into().expect("two nodes");
        nodes.map(|node| Rings::new(node).expect("few nodes"))
    }

    /// Closes the endpoint of a node, and opens another one.
    fn reopened(rings: Rings<LocalNode>) -> Rings<LocalNode> {
        Rings::new(rings.close()).expect("few nodes")
    }

    /// Whether a message could be sent.
    fn try_to_send(from: &mut Rings<LocalNode>, to: Address, tag: u64) -> bool {
        let is_ready = from.connect(to) && from.is_ready(to.node).expect("it has not ended");
        if is_ready {
            from.send(to.node, Header { tag, ..Header::new(Kind::Tagged) }, |_| {}).expect("lives");
        }
        is_ready
    }

    fn send(from: &mut Rings<LocalNode>, to: Address, tag: u64) {
        assert!(try_to_send(from, to, tag), "{tag}");
    }

    /// Tags of all messages of a node that are here.
    fn tags(at: &mut Rings<LocalNode>, from: NodeNumber) -> Vec<u64> {
        let next = || {
            let tag = at.peek(from)?.tag;
            at.free(from);
            Some(tag)
        };
        std::iter::from_fn(next).collect()
    }

    #[test]
    fn a_node_that_reopens_its_endpoint_sends_and_receives_all_messages() {
        let (node, other_node) = (NodeNumber(0), NodeNumber(1));
        for (read, unread) in
            (0..2 * SLOTS).flat_map(|read| (0..=SLOTS / 2).map(move |unread| (read, unread)))
        {
            let [mut here, mut other] = pair();
            for tag in 0..read {
                send(&mut other, here.address(), tag);
                assert_eq!(tags(&mut here, other_node), [tag]);
            }
            (read..read + unread).for_each(|tag| send(&mut other, here.address(), tag));
            let earlier = other.address();
            // An endpoint that only says hello is replaced by the next one.
            let mut silent = reopened(other);
            let _ = try_to_send(&mut silent, here.address(), 99);
            let has_sent = read + unread == 0;
            let mut other = reopened(silent);
            let first = 100;
            assert!(
                !try_to_send(&mut other, here.address(), first),
                "{read}, {unread}: behind another endpoint"
            );
            let mut expected: Vec<u64> = (read..read + unread).collect();
            expected.extend(has_sent.then_some(99));
            assert_eq!(tags(&mut here, other_node), expected, "{read}, {unread}");
            for tag in first..first + 3 * SLOTS {
                send(&mut other, here.address(), tag);
                assert_eq!(tags(&mut here, other_node), [tag], "{read}, {unread}");
                assert_eq!(
                    here.take_reopened(other_node),
                    tag == first && read + unread + u64::from(has_sent) > 0
                );
                send(&mut here, other.address(), tag);
                assert_eq!(tags(&mut other, node), [tag], "{read}, {unread}");
            }
            assert!(!here.connect(earlier), "it has ended");
        }
    }

    #[test]
    fn an_endpoint_that_is_known_by_its_address_first_loses_no_message() {
        for before in 0..2 * SLOTS {
            let [mut here, mut other] = pair();
            for tag in 0..before {
                send(&mut other, here.address(), tag);
                assert_eq!(tags(&mut here, NodeNumber(1)), [tag]);
            }
            let mut other = reopened(other);
            // Its first message comes before or after its address is used here.
            let has_sent = try_to_send(&mut other, here.address(), 7);
            assert_eq!(has_sent, before == 0);
            send(&mut here, other.address(), 8);
            assert_eq!(tags(&mut other, NodeNumber(0)), [8]);
            assert_eq!(tags(&mut here, NodeNumber(1)), if has_sent { vec![7] } else { vec![] });
            for tag in 10..10 + 2 * SLOTS {
                send(&mut other, here.address(), tag);
                assert_eq!(tags(&mut here, NodeNumber(1)), [tag]);
            }
        }
    }
}
