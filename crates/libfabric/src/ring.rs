//! Message rings over puts: every node has a ring of slots for each other node in one region, its inbox.
//!
//! ```text
//!   inbox:  ring of node 0: slots │ ring of node 1 │ … │ freed, hello, restart, endpoints: a word for each node
//!   slot:   header │ data │ its number in the ring
//! ```
//! A message is a put into the next slot that raises the target's counter of this node's number. The target writes back
//! how many slots it has freed. So nothing waits in the network. Until then the source keeps the slot: it puts it
//! again if its put was lost.
//!
//! A node that opens its endpoint anew has another inbox, and finds rings with messages of its earlier endpoint. It counts its
//! endpoints at each target. Behind an earlier one it says its inbox, and waits until the target has emptied the ring.

mod restart;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use millstream_fabric::{FIRST_COLLECTIVE_COUNTER, Fabric, FabricError, Notification, RegionId};
use millstream_torus_core::NodeNumber;

use crate::header::{HEADER_BYTES, Header};
use restart::Recovery;

/// Bytes of data in a slot.
pub const PAYLOAD: usize = 16 << 10;
/// A slot's number behind its data. A put is executed in order, so all of it has arrived if that is there.
const NUMBER_BYTES: usize = 8;
const SLOT: usize = HEADER_BYTES + PAYLOAD + NUMBER_BYTES;
/// Slots of a ring.
pub const SLOTS: u64 = 16;
/// A word in a target's inbox, and not a slot, raises the counter by so much: more than all slots that are not yet received.
const MARK: u16 = 1 << 15;
/// Bits of the word [`Word::Freed`] for slots. The others are for the restart that it answers.
const FREED_BITS: u32 = 48;

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
/// See [`Rings::pause`].
const PAUSE: Duration = Duration::from_millis(10);

/// State of the two rings between this node and another.
#[derive(Clone, Debug, Default)]
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
    /// Slots of those sent that are put. Fewer while they are put again.
    posted: u64,
    /// The last slots sent, which are not known to be freed.
    unfreed: VecDeque<Vec<u8>>,
    /// Lost puts that are known.
    lost_puts: u64,
    recovery: Recovery,
    /// No path led there when the last put was lost.
    unreachable: bool,
    /// The endpoint with the inbox has ended.
    has_ended: bool,
    /// It has since [`Rings::take_ended`].
    ended: bool,
    /// Number of the last restart.
    restart: u16,
    /// Inbox of the endpoint that fills the ring here.
    source: Option<RegionId>,
    received: u64,
    /// The part of the counter that is evaluated.
    counted: u64,
    /// The peer's restart that was answered last.
    answered: u16,
    /// Freed slots that the peer knows of. None if it must be told.
    returned: Option<u64>,
}

impl Peer {
    /// Nothing has been sent to its endpoint yet.
    fn begin(&mut self) {
        self.unfreed.clear();
        (self.is_open, self.sent, self.posted) = (false, 0, 0);
        (self.recovery, self.unreachable) = (Recovery::None, false);
        (self.has_ended, self.ended) = (false, false);
    }
}

/// Words of an inbox for each node.
#[derive(Clone, Copy)]
enum Word {
    /// 1 + the slots that the node has freed in the ring of the inbox's owner; 0 as long as the owner must wait. Above
    /// [`FREED_BITS`], the owner's restart that it answers.
    Freed,
    /// The inbox of an endpoint of the node that waits for the ring. The counter has a [`MARK`] for it.
    Hello,
    /// The last restart of an endpoint of the node: see [`restart`]. The counter has a [`MARK`] for it.
    Restart,
    /// Number of endpoints of the node that used the ring.
    Endpoints,
}

const WORDS: usize = 4;

/// The rings of a node.
#[derive(Debug)]
pub struct Rings<F> {
    fabric: F,
    inbox: RegionId,
    peers: Vec<Peer>,
    grace: Duration,
    /// Time from a lost put to the restart, so that an unreachable node gets few of them.
    pause: Duration,
    /// Buffers of slots that were freed.
    spare: Vec<Vec<u8>>,
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
        let counted = (0..nodes).map(|node| fabric.counter(node as u16).unwrap_or(0));
        let peers = counted.map(|counted| Peer { counted, returned: Some(0), ..Peer::default() }).collect();
        Ok(Rings { fabric, inbox, peers, grace: GRACE, pause: PAUSE, spare: Vec::new() })
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

    /// Learns where messages to a node go. False if the address is that of an endpoint that is known to have ended.
    pub fn connect(&mut self, address: Address) -> bool {
        self.is_ended(address) != Some(true) && self.adopt(address)
    }

    /// Whether the endpoint of a node has ended, if messages to the node go to this address.
    fn is_ended(&self, address: Address) -> Option<bool> {
        let peer = self.peers.get(address.node.index())?;
        (peer.inbox == Some(address.inbox)).then_some(peer.has_ended)
    }

    /// Whether an endpoint has ended since the last call.
    pub fn take_ended(&mut self, node: NodeNumber) -> bool {
        self.peers.get_mut(node.index()).is_some_and(|peer| std::mem::take(&mut peer.ended))
    }

    /// As [`Rings::connect`], also for an endpoint that has ended: its last messages are received.
    fn adopt(&mut self, address: Address) -> bool {
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
        peer.begin();
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
            let mark = Notification::Counter { index: here.0, add: MARK };
            self.fabric.put(node, inbox, hello, &own, mark)?;
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

    /// Slots and words of a node that have arrived and are not evaluated.
    fn arrived(&self, node: NodeNumber) -> (u64, u64) {
        let counted = self.peers[node.index()].counted;
        // The counter exists.
        let new = self.fabric.counter(node.0).unwrap_or(counted).wrapping_sub(counted);
        (new % u64::from(MARK), new / u64::from(MARK))
    }

    /// Whether a node seems lost.
    #[must_use]
    pub fn seems_lost(&self, node: NodeNumber) -> bool {
        self.fabric.is_lost(node)
    }

    /// Slots at a node that it has freed, if it has given the ring to this endpoint. Their bytes are no longer kept.
    fn freed(&mut self, node: NodeNumber) -> Option<u64> {
        let word = self.load_word(Word::Freed, node) % (1 << FREED_BITS);
        let freed = word.checked_sub(1)?;
        let peer = &mut self.peers[node.index()];
        let kept = peer.sent.checked_sub(freed)?;
        while peer.unfreed.len() as u64 > kept {
            let slot = peer.unfreed.pop_front().filter(|_| self.spare.len() < SLOTS as usize);
            self.spare.extend(slot);
        }
        Some(freed)
    }

    /// Whether a slot at a node is free. A node that seems lost has none.
    ///
    /// # Errors
    /// [`FabricError`] if its endpoint has ended, or no path leads there.
    pub fn is_ready(&mut self, node: NodeNumber) -> Result<bool, FabricError> {
        let Some(peer) = self.peers.get(node.index()) else { return Ok(false) };
        let (inbox, is_open) = (peer.inbox.filter(|_| !self.seems_lost(node)), peer.is_open);
        let Some(inbox) = inbox else { return Ok(false) };
        if !is_open {
            self.open(node, inbox)?;
        }
        self.recover(node);
        let peer = &self.peers[node.index()];
        if peer.unreachable {
            return Err(FabricError::NoRoute { node });
        }
        let (is_sound, sent) = (peer.is_sound(), peer.sent);
        Ok(is_sound && self.freed(node).is_some_and(|freed| sent - freed < SLOTS))
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
        let (inbox, number) = (peer.inbox.ok_or(lost)?, peer.sent);
        header.inbox = self.inbox.0;
        let mut slot = self.spare.pop().unwrap_or_default();
        slot.clear();
        slot.extend(header.encode());
        fill(&mut slot);
        slot.extend(number_in(self.inbox, number));
        let result = self.put_slot(node, inbox, number, &slot);
        if result.is_err() {
            self.spare.push(slot);
            return result;
        }
        let peer = &mut self.peers[node.index()];
        peer.unfreed.push_back(slot);
        (peer.sent, peer.posted) = (number + 1, number + 1);
        Ok(())
    }

    fn put_slot(
        &mut self,
        node: NodeNumber,
        inbox: RegionId,
        number: u64,
        slot: &[u8],
    ) -> Result<(), FabricError> {
        let here = self.fabric.here();
        let arrived = Notification::Counter { index: here.0, add: 1 };
        self.fabric.put(node, inbox, self.slot(here, number), slot, arrived)
    }

    /// The header of the next message of a node, which [`Rings::load`] reads and [`Rings::free`] frees.
    pub fn peek(&mut self, node: NodeNumber) -> Option<Header> {
        self.peers.get(node.index())?;
        loop {
            let (slots, words) = self.arrived(node);
            if slots == 0 {
                if words > 0 {
                    self.peers[node.index()].counted += words * u64::from(MARK);
                    self.read_words(node);
                }
                self.return_slots(node);
                return None;
            }
            let Some(header) = self.next_slot(node) else {
                // The next slot was lost, and what is behind it is put again with it.
                self.peers[node.index()].counted += slots;
                continue;
            };
            let inbox = RegionId(header.inbox);
            self.peers[node.index()].source.get_or_insert(inbox);
            if self.adopt(Address { node, inbox }) {
                return Some(header);
            }
            // Its endpoint has ended: the slot is skipped.
            self.free(node);
        }
    }

    /// The header of the next slot in the ring of a node, if all of the slot is there.
    fn next_slot(&self, node: NodeNumber) -> Option<Header> {
        let Peer { source, received, .. } = self.peers[node.index()];
        let (mut bytes, mut number) = ([0; HEADER_BYTES], [0; NUMBER_BYTES]);
        let at = self.slot(node, received);
        self.fabric.load(self.inbox, at, &mut bytes).ok()?;
        let header = Header::decode(&bytes, PAYLOAD)?;
        let inbox = RegionId(header.inbox);
        let end = at + HEADER_BYTES as u64 + u64::from(header.length);
        self.fabric.load(self.inbox, end, &mut number).ok()?;
        let is_next = number == number_in(inbox, received) && source.is_none_or(|source| source == inbox);
        is_next.then_some(header)
    }

    /// A node has put words, behind all of its slots that have arrived: another endpoint of it waits for the ring, or it
    /// begins anew behind the slots that were received.
    fn read_words(&mut self, node: NodeNumber) {
        let hello = RegionId(self.load_word(Word::Hello, node));
        if hello != RegionId(0) && self.peers[node.index()].source != Some(hello) {
            self.accept(Address { node, inbox: hello });
        }
        self.answer_restart(node);
    }

    /// The ring of a node is empty, and another endpoint of it waits for that.
    fn accept(&mut self, address: Address) {
        let peer = &mut self.peers[address.node.index()];
        (peer.source, peer.received, peer.returned, peer.answered) = (Some(address.inbox), 0, None, 0);
        self.adopt(address);
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
        peer.counted += 1;
        self.return_slots(node);
    }

    fn return_slots(&mut self, node: NodeNumber) {
        let word = self.word(Word::Freed, self.fabric.here());
        let peer = &mut self.peers[node.index()];
        let is_due = peer.returned.is_none_or(|returned| peer.received - returned >= SLOTS / 2);
        let Some(inbox) = peer.source.filter(|_| is_due && peer.source == peer.inbox) else { return };
        let freed = (u64::from(peer.answered) << FREED_BITS | (1 + peer.received)).to_le_bytes();
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

    /// Lost puts are put again at once.
    #[cfg(test)]
    pub fn without_pause(self) -> Rings<F> {
        Rings { pause: Duration::ZERO, ..self }
    }

    /// Ends the inbox.
    #[cfg(test)]
    pub fn close(mut self) -> F {
        self.fabric.deregister(self.inbox).expect("its own");
        self.fabric
    }

    /// Waits until the puts of all messages have ended. Returns whether all messages are in place at their targets.
    pub fn flush(&mut self) -> bool {
        for node in 0..self.peers.len() {
            if self.peers[node].sent > 0 {
                // What was lost is put again.
                let _ = self.fabric.flush(NodeNumber(node as u16));
            }
        }
        self.look_for_lost_puts();
        (0..self.peers.len()).all(|node| self.peers[node].is_sound() || self.is_lost(NodeNumber(node as u16)))
    }
}

/// The bytes behind the data of a slot: it is the one of this number in the ring of an endpoint.
fn number_in(inbox: RegionId, number: u64) -> [u8; NUMBER_BYTES] {
    inbox.0.wrapping_add(number).to_le_bytes()
}
