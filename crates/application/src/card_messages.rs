//! Messages between the cards of a node and of fixed peers, for kernels that write and read them in card memory.
//!
//! ```text
//!   outgoing messages, one a peer │ incoming messages, two in turn a peer
//! ```
//! A node writes an incoming message of a peer again only after a message of that peer, which the peer sends after its kernel
//! has read the previous one. So two places are enough.

use std::time::{Duration, Instant};

use millstream_fabric::{
    FIRST_COLLECTIVE_COUNTER, Fabric, FabricError, FirstError, LossWatch, Notification, RegionId, Span,
};
use millstream_torus_core::NodeNumber;

use crate::card_data::allocate_on_card;
use crate::{ApplicationError, TimeSplit};

/// Bytes of the word that a message with a header begins with.
pub const HEADER_BYTES: usize = 8;

/// Where the messages of a peer go.
#[derive(Debug)]
struct CardPeer {
    node: NodeNumber,
    /// The peer's incoming messages.
    region: RegionId,
    /// Place of this node among the peer's peers.
    place: usize,
    /// Value of the counter before the first exchange.
    counted: u64,
}

/// The messages of a node's card with those of its peers. All nodes create it together; if a node has a peer, the peer has
/// that node. After an exchange that failed, all later ones fail with its error.
#[derive(Debug)]
pub struct CardMessages {
    peers: Vec<CardPeer>,
    /// Counter of the first peer, here and at all nodes.
    first_counter: u16,
    outgoing: RegionId,
    outgoing_at: u64,
    incoming_at: u64,
    /// Size of a message's place (bytes).
    slot: u64,
    exchanges: u64,
    timeout: Duration,
    here: NodeNumber,
    losses: LossWatch,
    failure: FirstError,
}

impl CardMessages {
    /// Prepares messages of up to `longest` bytes with `peers`. Nodes may give different lengths. This node may be a peer of
    /// itself: its message is read where it was written. Messages use one counter a peer, from `first_counter` on, which is
    /// the same at all nodes.
    ///
    /// # Errors
    /// No room on the card, or [`ApplicationError::Fabric`], with [`FabricError::NoCounter`] if the counters do not suffice.
    pub fn new<F: Fabric>(
        fabric: &mut F,
        peers: &[NodeNumber],
        longest: usize,
        first_counter: u16,
        timeout: Duration,
    ) -> Result<CardMessages, ApplicationError> {
        let end = usize::from(first_counter) + peers.len();
        if end > usize::from(FIRST_COLLECTIVE_COUNTER) {
            return Err(FabricError::NoCounter { index: u16::try_from(end).unwrap_or(u16::MAX) }.into());
        }
        // All nodes have places of one size, so that each knows where those of its peers are.
        let mut slot = 0;
        for (bytes, node) in
            fabric.exchange(&(longest as u64).to_le_bytes(), timeout)?.iter().zip(fabric.dimensions().all())
        {
            let length = bytes.as_slice().try_into().map_err(|_| FabricError::Malformed { node })?;
            slot = slot.max(u64::from_le_bytes(length).next_multiple_of(64));
        }
        let bytes = peers.len() as u64 * slot;
        let (outgoing, outgoing_at) = allocate_on_card(fabric, bytes as usize, "messages")?;
        let (incoming, incoming_at) = allocate_on_card(fabric, 2 * bytes as usize, "messages")?;
        let counted: Vec<u64> =
            (first_counter..).take(peers.len()).map(|i| fabric.counter(i)).collect::<Result<_, _>>()?;
        let losses = LossWatch::new(fabric, peers.iter().copied());
        let mut description = incoming.0.to_le_bytes().to_vec();
        description.extend(peers.iter().flat_map(|peer| peer.0.to_le_bytes()));
        let all = fabric.exchange(&description, timeout)?;
        let here = fabric.here();
        let connect = |(&node, counted): (&NodeNumber, u64)| {
            let malformed = FabricError::Malformed { node };
            let (region, nodes) =
                all.get(node.index()).and_then(|bytes| bytes.split_first_chunk::<8>()).ok_or(malformed)?;
            let place = nodes.as_chunks().0.iter().position(|&peer| u16::from_le_bytes(peer) == here.0);
            let region = RegionId(u64::from_le_bytes(*region));
            Ok(CardPeer { node, region, place: place.ok_or(malformed)?, counted })
        };
        let peers = peers.iter().zip(counted).map(connect).collect::<Result<_, FabricError>>()?;
        Ok(CardMessages {
            peers,
            first_counter,
            outgoing,
            outgoing_at,
            incoming_at,
            slot,
            exchanges: 0,
            timeout,
            here,
            losses,
            failure: FirstError::default(),
        })
    }

    /// Room of a message (bytes).
    #[must_use]
    pub fn room(&self) -> u64 {
        self.slot
    }

    /// Where the kernel writes the message to peer `i` in card memory.
    #[must_use]
    pub fn outgoing_at(&self, i: usize) -> u64 {
        self.outgoing_at + i as u64 * self.slot
    }

    /// Where the kernel reads the message of peer `i`, in exchanges of a parity.
    #[must_use]
    pub fn incoming_at(&self, i: usize, parity: usize) -> u64 {
        if self.peers.get(i).is_some_and(|peer| peer.node == self.here) {
            return self.outgoing_at(i);
        }
        self.incoming_at + (2 * i as u64 + parity as u64) * self.slot
    }

    /// The region of outgoing messages, and where that to peer `i` begins in it.
    #[must_use]
    pub fn outgoing(&self, i: usize) -> (RegionId, u64) {
        (self.outgoing, i as u64 * self.slot)
    }

    /// Waits until the previous messages have left their places, so that the kernel may write the next ones.
    ///
    /// # Errors
    /// [`FabricError`] of a put.
    pub fn begin<F: Fabric>(&self, fabric: &mut F) -> Result<(), FabricError> {
        self.others().try_for_each(|(_, peer)| fabric.flush(peer.node))
    }

    fn others(&self) -> impl Iterator<Item = (usize, &CardPeer)> {
        self.peers.iter().enumerate().filter(|(_, peer)| peer.node != self.here)
    }

    /// As [`exchange`](Self::exchange), of messages that begin with a word: `length` tells their length from it.
    ///
    /// # Errors
    /// As [`exchange`](Self::exchange).
    pub fn exchange_with_headers<F: Fabric>(
        &mut self,
        fabric: &mut F,
        length: impl Fn(u64) -> usize,
        times: &mut TimeSplit,
    ) -> Result<usize, FabricError> {
        let mut lengths = Vec::with_capacity(self.peers.len());
        for peer in 0..self.peers.len() {
            let (region, offset) = self.outgoing(peer);
            let mut header = [0; HEADER_BYTES];
            fabric.load(region, offset, &mut header)?;
            lengths.push(length(u64::from_le_bytes(header)));
        }
        self.exchange(fabric, &lengths, times)
    }

    /// Sends the messages that the kernel wrote, and waits for those of all peers. Returns the parity of the exchange.
    ///
    /// # Errors
    /// [`FabricError`] of this exchange, or of an earlier one; a lost node is named.
    pub fn exchange<F: Fabric>(
        &mut self,
        fabric: &mut F,
        lengths: &[usize],
        times: &mut TimeSplit,
    ) -> Result<usize, FabricError> {
        self.failure.check()?;
        let exchanged = self.put_and_wait(fabric, lengths, times);
        self.failure.keep(exchanged)
    }

    fn put_and_wait<F: Fabric>(
        &mut self,
        fabric: &mut F,
        lengths: &[usize],
        times: &mut TimeSplit,
    ) -> Result<usize, FabricError> {
        let begin = Instant::now();
        self.exchanges += 1;
        let parity = self.exchanges % 2;
        for (i, peer) in self.others() {
            let length = lengths.get(i).copied().unwrap_or(0);
            let (region, offset) = self.outgoing(i);
            let span = Span { region, offset, length };
            let to = (2 * peer.place as u64 + parity) * self.slot;
            self.losses.check(fabric, peer.node)?;
            // A peer has no more peers than counters, or it would have refused them.
            let one = Notification::Counter { index: self.first_counter + peer.place as u16, add: 1 };
            fabric.put_region(peer.node, peer.region, to, span, one)?;
            times.messages += 1;
            times.bytes += length as u64;
        }
        times.communicate += begin.elapsed();
        let begin = Instant::now();
        for (i, peer) in self.others() {
            let value = peer.counted + self.exchanges;
            let counter = self.first_counter + i as u16;
            self.losses.wait_counter(fabric, counter, value, peer.node, self.timeout)?;
        }
        times.wait += begin.elapsed();
        Ok(parity as usize)
    }
}

#[cfg(test)]
mod tests {
    use millstream_fabric::LocalNode;
    use millstream_fabric::unreliable::UnreliableNode;

    use super::*;

    const LONG: Duration = Duration::from_secs(30);
    const SLOT: u64 = 64;

    /// The messages of two nodes, in host memory.
    fn messages(nodes: &mut [LocalNode]) -> [CardMessages; 2] {
        let outgoing: Vec<_> = nodes.iter_mut().map(|node| node.register(SLOT as usize)).collect();
        let incoming: Vec<_> = nodes.iter_mut().map(|node| node.register(2 * SLOT as usize)).collect();
        [0, 1].map(|here| CardMessages {
            peers: vec![CardPeer {
                node: NodeNumber(1 - here),
                region: incoming[1 - usize::from(here)],
                place: 0,
                counted: 0,
            }],
            first_counter: 0,
            outgoing: outgoing[usize::from(here)],
            outgoing_at: 0,
            incoming_at: 0,
            slot: SLOT,
            exchanges: 0,
            timeout: LONG,
            here: NodeNumber(here),
            losses: LossWatch::new(&mut nodes[usize::from(here)], [NodeNumber(1 - here)]),
            failure: FirstError::default(),
        })
    }

    #[test]
    fn an_exchange_that_timed_out_fails_all_later_ones() {
        let mut nodes = LocalNode::all("2x1x1".parse().unwrap());
        let [mut first, mut second] = messages(&mut nodes);
        let times = &mut TimeSplit::default();
        let timed_out = Err(FabricError::TimedOut { waited: Duration::ZERO });
        first.timeout = Duration::ZERO;
        assert_eq!(first.exchange(&mut nodes[0], &[8], times), timed_out);
        assert_eq!(second.exchange(&mut nodes[1], &[8], times), Ok(1));
        // A retry would send a second message into the same exchange.
        first.timeout = LONG;
        assert_eq!(first.exchange(&mut nodes[0], &[8], times), timed_out);
    }
    /// The peer is away for a moment, and does not know that it was.
    #[test]
    fn a_lost_message_ends_the_wait_for_its_peer() {
        let mut nodes = LocalNode::all("2x1x1".parse().unwrap());
        let [mut first, _second] = messages(&mut nodes);
        let mut node = UnreliableNode::new(nodes.remove(0));
        let times = &mut TimeSplit::default();
        let lost = Err(FabricError::NodeLost { node: NodeNumber(1) });
        node.lose_next(NodeNumber(1));
        assert_eq!(first.exchange(&mut node, &[8], times), lost);
        assert_eq!(first.exchange(&mut node, &[8], times), lost);
    }
}
