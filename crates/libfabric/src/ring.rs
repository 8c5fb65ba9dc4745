//! Message rings over puts: every node has a ring of slots for each other node in one region, its inbox.
//!
//! ```text
//!   inbox:  ring of node 0: slots │ ring of node 1 │ … │ freed slots: a word for each node
//! ```
//! A message is a put into the next slot that raises the target's counter of this node's number. The target writes back
//! how many slots it has freed. So nothing waits in the network, and nothing is lost.

use millstream_fabric::{FIRST_COLLECTIVE_COUNTER, Fabric, FabricError, Notification, RegionId};
use millstream_torus_core::NodeNumber;

use crate::header::{HEADER_BYTES, Header};

/// Bytes of data in a slot.
pub const PAYLOAD: usize = 16 << 10;
const SLOT: usize = HEADER_BYTES + PAYLOAD;
/// Slots of a ring.
const SLOTS: u64 = 16;

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

/// State of the two rings between this node and another.
#[derive(Clone, Copy, Debug)]
struct Peer {
    /// Its inbox, once it is known.
    inbox: Option<RegionId>,
    sent: u64,
    received: u64,
    /// Freed slots that the peer knows of.
    returned: u64,
}

/// The rings of a node.
#[derive(Debug)]
pub struct Rings<F> {
    fabric: F,
    inbox: RegionId,
    peers: Vec<Peer>,
    /// Values of the counters before the first message.
    counted: Vec<u64>,
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
        let inbox = fabric.register(nodes * (SLOTS as usize * SLOT + 8));
        // All of these counters exist.
        let counted = (0..nodes).map(|node| fabric.counter(node as u16).unwrap_or(0)).collect();
        let peers = vec![Peer { inbox: None, sent: 0, received: 0, returned: 0 }; nodes];
        Ok(Rings { fabric, inbox, peers, counted, scratch: Vec::with_capacity(SLOT) })
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

    fn freed_word(&self, node: NodeNumber) -> u64 {
        (self.peers.len() as u64 * SLOTS) * SLOT as u64 + 8 * node.index() as u64
    }

    /// Learns where messages to a node go. Another inbox than before begins anew.
    pub fn add_peer(&mut self, address: Address) {
        let word = self.freed_word(address.node);
        let Some(peer) = self.peers.get_mut(address.node.index()) else { return };
        if peer.inbox != Some(address.inbox) {
            if peer.inbox.is_some() {
                // The word is in the inbox.
                let _ = self.fabric.store(self.inbox, word, &[0; 8]);
            }
            let received = if peer.inbox.is_none() { peer.received } else { 0 };
            *peer = Peer { inbox: Some(address.inbox), sent: 0, received, returned: 0 };
        }
    }

    /// Whether a slot at a node is free.
    pub fn is_ready(&self, node: NodeNumber) -> bool {
        let Some(peer) = self.peers.get(node.index()) else { return false };
        let mut word = [0; 8];
        // The word is in the inbox.
        let _ = self.fabric.load(self.inbox, self.freed_word(node), &mut word);
        peer.inbox.is_some() && peer.sent.wrapping_sub(u64::from_le_bytes(word)) < SLOTS
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
            let peer = self.peers.get(node.index())?;
            let arrived = self.fabric.counter(node.0).ok()?.wrapping_sub(self.counted[node.index()]);
            if arrived == peer.received {
                return None;
            }
            let mut bytes = [0; HEADER_BYTES];
            self.fabric.load(self.inbox, self.slot(node, peer.received), &mut bytes).ok()?;
            if let Some(header) = Header::decode(&bytes, PAYLOAD) {
                if peer.inbox.is_none() {
                    self.add_peer(Address { node, inbox: RegionId(header.inbox) });
                }
                return Some(header);
            }
            // No node of this provider sends such a header: the slot is skipped.
            self.free(node);
        }
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
        let word = self.freed_word(self.fabric.here());
        let Some(peer) = self.peers.get_mut(node.index()) else { return };
        peer.received += 1;
        let Some(inbox) = peer.inbox.filter(|_| peer.received - peer.returned >= SLOTS / 2) else { return };
        peer.returned = peer.received;
        // A node that is lost needs no slots.
        let _ = self.fabric.put(node, inbox, word, &peer.received.to_le_bytes(), Notification::None);
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
