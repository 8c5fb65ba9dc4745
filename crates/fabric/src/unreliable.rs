//! A node of threads that loses puts, as a torus does when it avoids a node that comes back: for tests.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use millstream_torus_core::{Dimensions, NodeNumber};

use crate::{Event, Fabric, FabricError, LocalNode, LostPuts, Notification, RegionId};

/// A put under way.
#[derive(Debug)]
struct Put {
    region: RegionId,
    offset: u64,
    data: Vec<u8>,
    notification: Notification,
}

/// Puts to one node.
#[derive(Debug, Default)]
struct Pair {
    under_way: VecDeque<Put>,
    /// Those known to be lost. The target may still execute the first ones, before any later one.
    lost: VecDeque<Put>,
}

/// A node whose puts wait until the test executes or loses them.
#[derive(Debug)]
pub struct UnreliableNode {
    node: LocalNode,
    pairs: BTreeMap<NodeNumber, Pair>,
    lost_puts: BTreeMap<NodeNumber, LostPuts>,
    away: BTreeSet<NodeNumber>,
    losing: BTreeSet<NodeNumber>,
}

impl UnreliableNode {
    /// Takes a node. All of its puts wait.
    #[must_use]
    pub fn new(node: LocalNode) -> UnreliableNode {
        let (pairs, lost_puts, away, losing) = Default::default();
        UnreliableNode { node, pairs, lost_puts, away, losing }
    }

    /// Executes the first puts to a node.
    pub fn execute(&mut self, to: NodeNumber, count: usize) {
        let pair = self.pairs.entry(to).or_default();
        for _ in 0..count {
            let Some(put) = pair.under_way.pop_front() else { return };
            // The pair has begun anew.
            pair.lost.clear();
            // A refused one is seen by a flush only, which nobody calls.
            let _ = self.node.put(to, put.region, put.offset, &put.data, put.notification);
        }
    }

    /// The target executes the first of the lost puts, and a part of the next one.
    pub fn execute_lost(&mut self, to: NodeNumber, count: usize, part: usize) {
        let pair = self.pairs.entry(to).or_default();
        for _ in 0..count {
            let Some(put) = pair.lost.pop_front() else { return };
            let _ = self.node.put(to, put.region, put.offset, &put.data, put.notification);
        }
        if let Some(put) = pair.lost.pop_front() {
            let part = &put.data[..part.min(put.data.len())];
            let _ = self.node.put(to, put.region, put.offset, part, Notification::None);
        }
        pair.lost.clear();
    }

    /// All puts under way to a node are lost.
    pub fn lose(&mut self, to: NodeNumber) {
        let pair = self.pairs.entry(to).or_default();
        let new = pair.under_way.len() as u64;
        if pair.lost.is_empty() {
            std::mem::swap(&mut pair.lost, &mut pair.under_way);
        }
        pair.under_way.clear();
        if new > 0 {
            self.count_lost(to, new);
        }
    }

    /// The first put under way to a node is lost, those behind it are not: its loss becomes known after they were put.
    pub fn lose_first(&mut self, to: NodeNumber) {
        let pair = self.pairs.entry(to).or_default();
        if pair.under_way.pop_front().is_some() {
            self.count_lost(to, 1);
        }
    }

    fn count_lost(&mut self, to: NodeNumber, new: u64) {
        let count = self.lost_puts.get(&to).map_or(0, |lost| lost.count) + new;
        self.lost_puts.insert(to, LostPuts { count, cause: FabricError::NodeLost { node: to } });
    }

    /// The next put to a node will be lost.
    pub fn lose_next(&mut self, to: NodeNumber) {
        self.losing.insert(to);
    }

    /// A node is avoided, or is back.
    pub fn set_away(&mut self, node: NodeNumber, away: bool) {
        if away {
            self.away.insert(node);
            self.lose(node);
        } else {
            self.away.remove(&node);
        }
    }

    fn check(&self, node: NodeNumber) -> Result<(), FabricError> {
        if self.away.contains(&node) { Err(FabricError::NodeLost { node }) } else { Ok(()) }
    }
}

impl Fabric for UnreliableNode {
    fn dimensions(&self) -> Dimensions {
        self.node.dimensions()
    }

    fn here(&self) -> NodeNumber {
        self.node.here()
    }

    fn register(&mut self, size: usize) -> RegionId {
        self.node.register(size)
    }

    fn deregister(&mut self, region: RegionId) -> Result<(), FabricError> {
        self.node.deregister(region)
    }

    fn load(&self, region: RegionId, offset: u64, into: &mut [u8]) -> Result<(), FabricError> {
        self.node.load(region, offset, into)
    }

    fn store(&self, region: RegionId, offset: u64, data: &[u8]) -> Result<(), FabricError> {
        self.node.store(region, offset, data)
    }

    fn put(
        &mut self,
        to: NodeNumber,
        region: RegionId,
        offset: u64,
        data: &[u8],
        notification: Notification,
    ) -> Result<(), FabricError> {
        self.check(to)?;
        let put = Put { region, offset, data: data.to_vec(), notification };
        self.pairs.entry(to).or_default().under_way.push_back(put);
        if self.losing.remove(&to) {
            self.lose(to);
        }
        Ok(())
    }

    fn get(
        &mut self,
        from: NodeNumber,
        region: RegionId,
        offset: u64,
        into: &mut [u8],
    ) -> Result<(), FabricError> {
        self.flush(from)?;
        self.node.get(from, region, offset, into)
    }

    fn fetch_add(
        &mut self,
        at: NodeNumber,
        region: RegionId,
        offset: u64,
        add: u64,
    ) -> Result<u64, FabricError> {
        self.flush(at)?;
        self.node.fetch_add(at, region, offset, add)
    }

    fn compare_swap(
        &mut self,
        at: NodeNumber,
        region: RegionId,
        offset: u64,
        expected: u64,
        new: u64,
    ) -> Result<u64, FabricError> {
        self.flush(at)?;
        self.node.compare_swap(at, region, offset, expected, new)
    }

    fn flush(&mut self, to: NodeNumber) -> Result<(), FabricError> {
        self.check(to)?;
        self.execute(to, usize::MAX);
        Ok(())
    }

    fn lost_puts(&mut self, to: NodeNumber) -> Option<LostPuts> {
        self.lost_puts.get(&to).copied()
    }

    fn counter(&self, index: u16) -> Result<u64, FabricError> {
        self.node.counter(index)
    }

    fn wait_counter(
        &mut self,
        index: u16,
        value: u64,
        from: NodeNumber,
        timeout: Duration,
    ) -> Result<(), FabricError> {
        self.node.wait_counter(index, value, from, timeout)
    }

    fn is_lost(&self, node: NodeNumber) -> bool {
        self.away.contains(&node) || self.node.is_lost(node)
    }

    fn lost_node(&self) -> Option<NodeNumber> {
        self.away.first().copied().or_else(|| self.node.lost_node())
    }

    fn poll_event(&mut self) -> Option<Event> {
        self.node.poll_event()
    }

    fn lost_events(&self) -> u64 {
        self.node.lost_events()
    }

    fn exchange(&mut self, bytes: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>, FabricError> {
        self.node.exchange(bytes, timeout)
    }
}
