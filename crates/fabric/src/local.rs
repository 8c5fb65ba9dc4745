//! Nodes that are threads of one process.

use std::collections::{BTreeMap, VecDeque};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use millstream_torus_core::{Dimensions, NodeNumber};

use crate::{EVENT_LIMIT, Event, Fabric, FabricError, FirstError, Notification, RegionId, check};

#[derive(Debug, Default)]
struct Inbox {
    regions: BTreeMap<RegionId, Vec<u8>>,
    counters: BTreeMap<u16, u64>,
    events: VecDeque<Event>,
    lost_events: u64,
}

/// Rounds of [`Fabric::exchange`]: contributions by node, of the round that is open.
#[derive(Debug, Default)]
struct Exchange {
    round: u64,
    given: BTreeMap<NodeNumber, Vec<u8>>,
    complete: Vec<Vec<u8>>,
}

/// What waiters look at, under one lock.
#[derive(Debug)]
struct State {
    alive: Vec<bool>,
    exchange: Exchange,
}

impl State {
    /// Whether a node of this number exists and has not been dropped.
    fn is_alive(&self, node: NodeNumber) -> bool {
        self.alive.get(node.index()).is_some_and(|&alive| alive)
    }
}

#[derive(Debug)]
struct World {
    torus: Dimensions,
    inboxes: Vec<Mutex<Inbox>>,
    state: Mutex<State>,
    changed: Condvar,
}

/// A node of a torus within this process. Dropping it makes it lost for the others.
#[derive(Debug)]
pub struct LocalNode {
    here: NodeNumber,
    world: Arc<World>,
    /// Of exchanges.
    failure: FirstError,
}

/// A panicking thread leaves no half-made change: each change is one assignment or one copy.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl LocalNode {
    /// All nodes of a torus, by number. Give each to its thread.
    #[must_use]
    pub fn all(torus: Dimensions) -> Vec<LocalNode> {
        let world = Arc::new(World {
            torus,
            inboxes: torus.all().map(|_| Mutex::default()).collect(),
            state: Mutex::new(State { alive: vec![true; torus.nodes()], exchange: Exchange::default() }),
            changed: Condvar::new(),
        });
        let node = |here| LocalNode { here, world: Arc::clone(&world), failure: FirstError::default() };
        torus.all().map(node).collect()
    }

    /// Uses the memory of a node's region.
    fn with<R>(
        &self,
        node: NodeNumber,
        region: RegionId,
        offset: u64,
        length: usize,
        use_bytes: impl FnOnce(&mut [u8]) -> R,
    ) -> Result<R, FabricError> {
        let world = &self.world;
        let lost = FabricError::NodeLost { node };
        if !lock(&world.state).is_alive(node) {
            return Err(lost);
        }
        let mut inbox = lock(&world.inboxes[node.index()]);
        let memory = check::region(inbox.regions.get_mut(&region), node, region)?;
        check::range(offset, length as u64, memory.len() as u64)?;
        let start = offset as usize;
        Ok(use_bytes(&mut memory[start..start + length]))
    }

    fn atomic(
        &self,
        at: NodeNumber,
        region: RegionId,
        offset: u64,
        change: impl FnOnce(u64) -> u64,
    ) -> Result<u64, FabricError> {
        check::word(offset)?;
        self.with(at, region, offset, 8, |bytes| {
            let mut word = [0; 8];
            word.copy_from_slice(bytes);
            let old = u64::from_le_bytes(word);
            bytes.copy_from_slice(&change(old).to_le_bytes());
            old
        })
    }

    fn notify(&self, to: NodeNumber, event: impl FnOnce(u32) -> Event, notification: Notification) {
        let mut inbox = lock(&self.world.inboxes[to.index()]);
        match notification {
            Notification::None => return,
            Notification::Counter { index, add } => {
                *inbox.counters.entry(index).or_default() += u64::from(add);
            }
            Notification::Event { .. } if inbox.events.len() >= EVENT_LIMIT => inbox.lost_events += 1,
            Notification::Event { tag } => inbox.events.push_back(event(tag)),
        }
        drop(inbox);
        // Waiters check under this lock, so none misses the change.
        drop(lock(&self.world.state));
        self.world.changed.notify_all();
    }

    /// Waits until `check` has a result.
    fn wait<R>(
        &self,
        timeout: Duration,
        mut check: impl FnMut(&mut State) -> Option<Result<R, FabricError>>,
    ) -> Result<R, FabricError> {
        let start = Instant::now();
        let mut state = lock(&self.world.state);
        loop {
            if let Some(result) = check(&mut state) {
                return result;
            }
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Err(FabricError::TimedOut { waited: timeout });
            }
            let waited = self.world.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for LocalNode {
    fn drop(&mut self) {
        lock(&self.world.state).alive[self.here.index()] = false;
        self.world.changed.notify_all();
    }
}

impl Fabric for LocalNode {
    fn dimensions(&self) -> Dimensions {
        self.world.torus
    }

    fn here(&self) -> NodeNumber {
        self.here
    }

    fn register(&mut self, size: usize) -> RegionId {
        // The hash keys of the standard library come from the operating system.
        let region = RegionId(RandomState::new().build_hasher().finish());
        lock(&self.world.inboxes[self.here.index()]).regions.insert(region, vec![0; size]);
        region
    }

    fn deregister(&mut self, region: RegionId) -> Result<(), FabricError> {
        let node = self.here;
        let removed = lock(&self.world.inboxes[node.index()]).regions.remove(&region);
        removed.map(drop).ok_or(FabricError::NoRegion { node, region: region.0 })
    }

    fn load(&self, region: RegionId, offset: u64, into: &mut [u8]) -> Result<(), FabricError> {
        self.with(self.here, region, offset, into.len(), |bytes| into.copy_from_slice(bytes))
    }

    fn store(&self, region: RegionId, offset: u64, data: &[u8]) -> Result<(), FabricError> {
        self.with(self.here, region, offset, data.len(), |bytes| bytes.copy_from_slice(data))
    }

    fn put(
        &mut self,
        to: NodeNumber,
        region: RegionId,
        offset: u64,
        data: &[u8],
        notification: Notification,
    ) -> Result<(), FabricError> {
        check::notification(notification)?;
        self.with(to, region, offset, data.len(), |bytes| bytes.copy_from_slice(data))?;
        let event = |tag| Event { source: self.here, tag, region, offset, length: data.len() as u64 };
        self.notify(to, event, notification);
        Ok(())
    }

    fn get(
        &mut self,
        from: NodeNumber,
        region: RegionId,
        offset: u64,
        into: &mut [u8],
    ) -> Result<(), FabricError> {
        self.with(from, region, offset, into.len(), |bytes| into.copy_from_slice(bytes))
    }

    fn fetch_add(
        &mut self,
        at: NodeNumber,
        region: RegionId,
        offset: u64,
        add: u64,
    ) -> Result<u64, FabricError> {
        self.atomic(at, region, offset, |old| old.wrapping_add(add))
    }

    fn compare_swap(
        &mut self,
        at: NodeNumber,
        region: RegionId,
        offset: u64,
        expected: u64,
        new: u64,
    ) -> Result<u64, FabricError> {
        self.atomic(at, region, offset, |old| if old == expected { new } else { old })
    }

    fn flush(&mut self, to: NodeNumber) -> Result<(), FabricError> {
        // A put is visible when it returns.
        let alive = lock(&self.world.state).is_alive(to);
        if alive { Ok(()) } else { Err(FabricError::NodeLost { node: to }) }
    }

    fn counter(&self, index: u16) -> Result<u64, FabricError> {
        check::counter(index)?;
        let inbox = lock(&self.world.inboxes[self.here.index()]);
        Ok(inbox.counters.get(&index).copied().unwrap_or(0))
    }

    fn wait_counter(
        &mut self,
        index: u16,
        value: u64,
        from: NodeNumber,
        timeout: Duration,
    ) -> Result<(), FabricError> {
        self.wait(timeout, |state| match self.counter(index) {
            Err(error) => Some(Err(error)),
            Ok(now) if now >= value => Some(Ok(())),
            // The lock is held: a node that is lost here raised its counters before they were read.
            Ok(_) if !state.is_alive(from) => Some(Err(FabricError::NodeLost { node: from })),
            Ok(_) => None,
        })
    }

    fn is_lost(&self, node: NodeNumber) -> bool {
        !lock(&self.world.state).is_alive(node)
    }

    fn lost_node(&self) -> Option<NodeNumber> {
        let state = lock(&self.world.state);
        self.world.torus.all().find(|&node| !state.is_alive(node))
    }

    fn poll_event(&mut self) -> Option<Event> {
        lock(&self.world.inboxes[self.here.index()]).events.pop_front()
    }

    fn lost_events(&self) -> u64 {
        lock(&self.world.inboxes[self.here.index()]).lost_events
    }

    fn exchange(&mut self, bytes: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>, FabricError> {
        self.failure.check()?;
        let mut mine = Some(bytes.to_vec());
        let mut joined = 0;
        let (here, nodes) = (self.here, self.world.torus.nodes());
        let result = self.wait(timeout, |state| {
            let exchange = &mut state.exchange;
            if let Some(bytes) = mine.take() {
                joined = exchange.round;
                exchange.given.insert(here, bytes);
                if exchange.given.len() == nodes {
                    exchange.complete = std::mem::take(&mut exchange.given).into_values().collect();
                    exchange.round += 1;
                }
            }
            // The next round completes only after this node has joined it, so `complete` stays until then.
            if exchange.round > joined {
                return Some(Ok(exchange.complete.clone()));
            }
            let missing = (self.world.torus.all())
                .find(|&node| !state.is_alive(node) && !state.exchange.given.contains_key(&node));
            missing.map(|node| Err(FabricError::NodeLost { node }))
        });
        self.world.changed.notify_all();
        self.failure.keep(result)
    }
}
