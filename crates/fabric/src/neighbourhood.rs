//! Messages between a node and a fixed set of peers, written once over put: halos, spikes, all to all.
//!
//! ```text
//!   buffer of a peer (one of two in turn):  length of the message 8 B │ round 8 B │ data, up to `capacity` bytes
//! ```
//! A message that exceeds the capacity goes in several rounds. Both nodes of a pair know both lengths after the first round,
//! hence the number of rounds. A node writes a buffer again only after a message of that peer, which the peer sends after it
//! has copied the buffer's previous content. So two buffers are enough, and no credit is needed. The round shows if the counter
//! was raised by a later put, because the one before was lost and the peer did not know it yet.

use std::time::{Duration, Instant};

use millstream_torus_core::NodeNumber;

use crate::{FIRST_COLLECTIVE_COUNTER, Fabric, FabricError, FirstError, LossWatch, Notification, RegionId};

const HEADER: usize = 16;

/// Largest number of peers: each has a counter.
pub const MAX_PEERS: usize = FIRST_COLLECTIVE_COUNTER as usize;

/// What the exchanges of a node took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExchangeStatistics {
    /// Time in puts and copies.
    pub communicate: Duration,
    /// Time in waits for peers.
    pub wait: Duration,
    /// Puts.
    pub messages: u64,
    /// Bytes put, with headers.
    pub bytes: u64,
}

#[derive(Debug)]
struct Peer {
    node: NodeNumber,
    /// Where this node's messages go at the peer.
    region: RegionId,
    offset: u64,
    /// Rounds so far.
    rounds: u64,
    /// The counter's value before the first round.
    counted: u64,
    outgoing: Vec<u8>,
    incoming: Vec<u8>,
}

/// Buffers and counters of one node for messages with its peers.
///
/// If a node has a peer, the peer has that node. All nodes create it together. After an exchange that failed, all later ones
/// fail with its error.
#[derive(Debug)]
pub struct Neighbourhood {
    region: RegionId,
    peers: Vec<Peer>,
    capacity: usize,
    first_counter: u16,
    timeout: Duration,
    statistics: ExchangeStatistics,
    losses: LossWatch,
    failure: FirstError,
}

impl Neighbourhood {
    /// Prepares messages with `peers`; up to `capacity` bytes travel at once. All nodes give the same capacity. It uses the
    /// counters from 0 on, one a peer.
    ///
    /// # Errors
    /// [`FabricError::NoCounter`] for more than [`MAX_PEERS`] peers; [`FabricError::NodeLost`] if a peer does not have this
    /// node as a peer.
    pub fn new<F: Fabric>(
        fabric: &mut F,
        peers: &[NodeNumber],
        capacity: usize,
        timeout: Duration,
    ) -> Result<Neighbourhood, FabricError> {
        Neighbourhood::with_counters(fabric, peers, capacity, 0, timeout)
    }

    /// As [`Neighbourhood::new`], with counters from `first_counter` on, one a peer, so that a node has several
    /// neighbourhoods at once. All nodes give the same counter.
    ///
    /// # Errors
    /// As [`Neighbourhood::new`]; [`FabricError::NoCounter`] if the counters do not suffice.
    pub fn with_counters<F: Fabric>(
        fabric: &mut F,
        peers: &[NodeNumber],
        capacity: usize,
        first_counter: u16,
        timeout: Duration,
    ) -> Result<Neighbourhood, FabricError> {
        if usize::from(first_counter) + peers.len() > MAX_PEERS {
            return Err(FabricError::NoCounter { index: FIRST_COLLECTIVE_COUNTER });
        }
        let capacity = capacity.max(1);
        let region = fabric.register(2 * peers.len() * (HEADER + capacity));
        let counted: Vec<u64> =
            (0..peers.len()).map(|i| fabric.counter(first_counter + i as u16)).collect::<Result<_, _>>()?;
        let losses = LossWatch::new(fabric, peers.iter().copied());
        // From this exchange on, peers put.
        let mut description = region.0.to_le_bytes().to_vec();
        description.extend(peers.iter().flat_map(|peer| peer.0.to_le_bytes()));
        let all = fabric.exchange(&description, timeout)?;
        let here = fabric.here();
        let mut list = Vec::with_capacity(peers.len());
        for (&node, counted) in peers.iter().zip(counted) {
            let lost = FabricError::NodeLost { node };
            let (id, its_peers) =
                all.get(node.index()).and_then(|bytes| bytes.split_first_chunk()).ok_or(lost)?;
            let place =
                its_peers.chunks_exact(2).position(|peer| peer == here.0.to_le_bytes()).ok_or(lost)?;
            list.push(Peer {
                node,
                region: RegionId(u64::from_le_bytes(*id)),
                offset: place as u64,
                rounds: 0,
                counted,
                outgoing: Vec::new(),
                incoming: Vec::new(),
            });
        }
        Ok(Neighbourhood {
            region,
            peers: list,
            capacity,
            first_counter,
            timeout,
            statistics: ExchangeStatistics::default(),
            losses,
            failure: FirstError::default(),
        })
    }

    /// The peers, in the order of [`Neighbourhood::new`].
    pub fn peers(&self) -> impl ExactSizeIterator<Item = NodeNumber> + '_ {
        self.peers.iter().map(|peer| peer.node)
    }

    /// What the exchanges took so far.
    #[must_use]
    pub fn statistics(&self) -> ExchangeStatistics {
        self.statistics
    }

    /// Starts an exchange: sends one message to each peer, in their order; an empty one also counts.
    ///
    /// # Errors
    /// [`FabricError`] of the puts, or of an earlier exchange.
    pub fn start<F: Fabric>(&mut self, fabric: &mut F, messages: Vec<Vec<u8>>) -> Result<(), FabricError> {
        debug_assert_eq!(messages.len(), self.peers.len(), "one message a peer");
        self.failure.check()?;
        for (i, message) in messages.into_iter().enumerate().take(self.peers.len()) {
            self.peers[i].outgoing = message;
            let put = self.put(fabric, i, 0);
            self.failure.keep(put)?;
        }
        Ok(())
    }

    /// Ends an exchange: the messages of the peers, in their order.
    ///
    /// # Errors
    /// [`FabricError::NodeLost`] or [`FabricError::TimedOut`] of this exchange, or of an earlier one.
    pub fn finish<F: Fabric>(&mut self, fabric: &mut F) -> Result<Vec<Vec<u8>>, FabricError> {
        self.failure.check()?;
        let received = self.receive_all(fabric);
        self.failure.keep(received)
    }

    fn receive_all<F: Fabric>(&mut self, fabric: &mut F) -> Result<Vec<Vec<u8>>, FabricError> {
        let mut open: Vec<usize> = (0..self.peers.len()).collect();
        for round in 0.. {
            let mut further = Vec::new();
            for &i in &open {
                let length = self.receive(fabric, i, round)?;
                let longest = length.max(self.peers[i].outgoing.len());
                if (round + 1) * self.capacity < longest {
                    self.put(fabric, i, round + 1)?;
                    further.push(i);
                }
            }
            open = further;
            if open.is_empty() {
                break;
            }
        }
        Ok(self.peers.iter_mut().map(|peer| std::mem::take(&mut peer.incoming)).collect())
    }

    /// [`Neighbourhood::start`] and [`Neighbourhood::finish`].
    ///
    /// # Errors
    /// As these.
    pub fn exchange<F: Fabric>(
        &mut self,
        fabric: &mut F,
        messages: Vec<Vec<u8>>,
    ) -> Result<Vec<Vec<u8>>, FabricError> {
        self.start(fabric, messages)?;
        self.finish(fabric)
    }

    /// Size of one buffer (bytes).
    fn slot(&self) -> u64 {
        (HEADER + self.capacity) as u64
    }

    /// Sends one round of the message to a peer.
    fn put<F: Fabric>(&mut self, fabric: &mut F, i: usize, round: usize) -> Result<(), FabricError> {
        let begin = Instant::now();
        let slot = self.slot();
        let peer = &mut self.peers[i];
        peer.rounds += 1;
        if peer.node != fabric.here() {
            self.losses.check(fabric, peer.node)?;
            let message = &peer.outgoing;
            let from = (round * self.capacity).min(message.len());
            let part = &message[from..message.len().min(from + self.capacity)];
            let mut data = Vec::with_capacity(HEADER + part.len());
            data.extend_from_slice(&(message.len() as u64).to_le_bytes());
            data.extend_from_slice(&peer.rounds.to_le_bytes());
            data.extend_from_slice(part);
            let offset = (2 * peer.offset + peer.rounds % 2) * slot;
            // The place in the peer's list is below `MAX_PEERS`.
            let index = self.first_counter + peer.offset as u16;
            let one = Notification::Counter { index, add: 1 };
            fabric.put(peer.node, peer.region, offset, &data, one)?;
            self.statistics.messages += 1;
            self.statistics.bytes += data.len() as u64;
        }
        self.statistics.communicate += begin.elapsed();
        Ok(())
    }

    /// Waits for one round of a peer's message. Returns the length of the whole message.
    fn receive<F: Fabric>(&mut self, fabric: &mut F, i: usize, round: usize) -> Result<usize, FabricError> {
        let slot = self.slot();
        let peer = &mut self.peers[i];
        if peer.node == fabric.here() {
            // A message to this node itself needs no buffer.
            peer.incoming = std::mem::take(&mut peer.outgoing);
            return Ok(0);
        }
        let begin = Instant::now();
        let (counter, value) = (self.first_counter + i as u16, peer.counted + peer.rounds);
        self.losses.wait_counter(fabric, counter, value, peer.node, self.timeout)?;
        let arrived = Instant::now();
        let offset = (2 * i as u64 + peer.rounds % 2) * slot;
        let mut header = [0; HEADER];
        fabric.load(self.region, offset, &mut header)?;
        let (words, _) = header.as_chunks();
        let [length, put_in] = [words[0], words[1]].map(u64::from_le_bytes);
        if put_in != peer.rounds {
            return Err(FabricError::NodeLost { node: peer.node });
        }
        let from = (round * self.capacity) as u64;
        // At most the capacity, so it fits into memory; the whole length is the peer's claim.
        let part = length.saturating_sub(from).min(self.capacity as u64) as usize;
        let start = peer.incoming.len();
        peer.incoming.resize(start + part, 0);
        fabric.load(self.region, offset + HEADER as u64, &mut peer.incoming[start..])?;
        self.statistics.wait += arrived - begin;
        self.statistics.communicate += arrived.elapsed();
        usize::try_from(length).map_err(|_| FabricError::Bounds { offset: from, length, size: slot })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LocalNode;
    use crate::unreliable::UnreliableNode;

    const LONG: Duration = Duration::from_secs(30);

    #[test]
    fn an_exchange_that_timed_out_fails_all_later_ones() {
        let nodes = LocalNode::all("2x1x1".parse().unwrap());
        let members: Vec<_> = std::thread::scope(|scope| {
            let start = |mut node: LocalNode| {
                let other = NodeNumber(1 - node.here().0);
                scope.spawn(move || (Neighbourhood::new(&mut node, &[other], 8, LONG).unwrap(), node))
            };
            let started: Vec<_> = nodes.into_iter().map(start).collect();
            started.into_iter().map(|node| node.join().expect("no panic")).collect()
        });
        let [(mut first, mut node), (mut second, mut other)] = members.try_into().expect("two nodes");
        let timed_out = Err(FabricError::TimedOut { waited: Duration::ZERO });
        first.timeout = Duration::ZERO;
        assert_eq!(first.exchange(&mut node, vec![vec![1]]), timed_out);
        assert_eq!(second.exchange(&mut other, vec![vec![2]]), Ok(vec![vec![1]]));
        // A retry would send a second message into the same exchange.
        first.timeout = LONG;
        assert_eq!(first.exchange(&mut node, vec![vec![3]]), timed_out);
    }

    /// Each node's part of a neighbourhood of two.
    fn two_unreliable_nodes() -> [(Neighbourhood, UnreliableNode); 2] {
        let nodes = LocalNode::all("2x1x1".parse().unwrap());
        let members: Vec<_> = std::thread::scope(|scope| {
            let start = |node: LocalNode| {
                let other = NodeNumber(1 - node.here().0);
                let mut node = UnreliableNode::new(node);
                scope.spawn(move || (Neighbourhood::new(&mut node, &[other], 8, LONG).unwrap(), node))
            };
            let started: Vec<_> = nodes.into_iter().map(start).collect();
            started.into_iter().map(|node| node.join().expect("no panic")).collect()
        });
        members.try_into().expect("two nodes")
    }

    /// The peer is away for a moment, and does not know that it was.
    #[test]
    fn a_lost_message_ends_the_wait_for_its_peer() {
        let [(mut first, mut node), _second] = two_unreliable_nodes();
        let lost = Err(FabricError::NodeLost { node: NodeNumber(1) });
        first.start(&mut node, vec![vec![1]]).unwrap();
        node.lose(NodeNumber(1));
        assert_eq!(first.finish(&mut node), lost);
        assert_eq!(first.exchange(&mut node, vec![vec![2]]), lost);
    }

    #[test]
    fn no_message_is_taken_for_a_lost_one() {
        let [(mut first, mut node), (mut second, mut other)] = two_unreliable_nodes();
        second.start(&mut other, vec![vec![7]]).unwrap();
        other.execute(NodeNumber(0), 1);
        first.start(&mut node, vec![vec![1]]).unwrap();
        node.lose(NodeNumber(1));
        assert_eq!(first.finish(&mut node), Ok(vec![vec![7]]));
        assert_eq!(first.start(&mut node, vec![vec![2]]), Err(FabricError::NodeLost { node: NodeNumber(1) }));
        node.execute(NodeNumber(1), usize::MAX);
        assert_eq!(other.counter(0), Ok(0));
    }

    /// The second message is put before the loss of the first one is known.
    #[test]
    fn a_later_message_is_not_taken_for_a_lost_one() {
        let [(mut first, mut node), (mut second, mut other)] = two_unreliable_nodes();
        second.start(&mut other, vec![vec![7]]).unwrap();
        other.execute(NodeNumber(0), 1);
        assert_eq!(first.exchange(&mut node, vec![vec![1]]), Ok(vec![vec![7]]));
        first.start(&mut node, vec![vec![2]]).unwrap();
        node.lose_first(NodeNumber(1));
        node.execute(NodeNumber(1), 1);
        assert_eq!(second.finish(&mut other), Err(FabricError::NodeLost { node: NodeNumber(0) }));
    }
}
