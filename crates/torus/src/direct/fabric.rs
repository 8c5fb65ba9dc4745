//! [`Fabric`] over a mesh.

use std::cell::RefMut;
use std::time::Duration;

use millstream_fabric::{Event, Fabric, FabricError, Notification, RegionId, Span, check};
use millstream_rdma::queue::Signal;
use millstream_rdma::{Deadline, QueuePair, RemoteAddress, Sge, WrId};
use millstream_torus_core::{Dimensions, NodeNumber};

use super::DirectNode;
use super::message::{EXCHANGE_BYTES, Message};
use super::node::{AtEnd, Node};
use crate::memory::Memory;

/// Most bytes of one transfer through the staging memory.
const CHUNK: usize = 512 << 10;
/// Most bytes of one transfer.
const REGION_CHUNK: usize = 1 << 30;

impl Node {
    fn own(&self, region: RegionId) -> Result<&Memory, FabricError> {
        check::region(self.regions.get(&region), self.here, region)
    }

    fn own_range(&self, region: RegionId, offset: u64, length: usize) -> Result<&Memory, FabricError> {
        let memory = self.own(region)?;
        check::range(offset, length as u64, memory.size())?;
        Ok(memory)
    }

    /// Address of a range of another node's region, when there is room for a request to the node. Asks the
    /// node if it did not tell the region yet. The request has to be posted before messages are taken again:
    /// the answer to one tells the node that the region is used no more.
    fn address(
        &mut self,
        node: NodeNumber,
        region: RegionId,
        offset: u64,
        length: u64,
    ) -> Result<RemoteAddress, FabricError> {
        let lost = FabricError::NodeLost { node };
        let known = |node: NodeNumber, state: &Node| {
            state.peer(node).and_then(|peer| peer.regions.get(&region).copied())
        };
        let memory = loop {
            self.make_room(node)?;
            if let Some(memory) = known(node, self) {
                break memory;
            }
            self.send(node, &Message::Lookup { id: region })?;
            self.wait(Deadline::NEVER, |state| match known(node, state) {
                Some(_) => Some(Ok(())),
                None => (!state.is_alive(node)).then_some(Err(lost)),
            })?;
        };
        let memory = check::region(memory, node, region)?;
        memory.at(offset, length).map_err(|_| FabricError::Bounds { offset, length, size: memory.len })
    }

    fn check_target(&self, to: NodeNumber, notification: Notification) -> Result<(), FabricError> {
        check::notification(notification)?;
        if self.is_alive(to) { Ok(()) } else { Err(FabricError::NodeLost { node: to }) }
    }

    /// A put to this node itself.
    fn put_here(
        &mut self,
        region: RegionId,
        offset: u64,
        data: &[u8],
        notification: Notification,
    ) -> Result<(), FabricError> {
        let memory = self.own_range(region, offset, data.len())?;
        // The range was checked just now.
        let _ = memory.store(offset, data);
        let length = data.len() as u64;
        match notification {
            Notification::None => {}
            Notification::Counter { index, add } => self.counters[usize::from(index)] += u64::from(add),
            Notification::Event { tag } => {
                self.add_event(Event { source: self.here, tag, region, offset, length });
            }
        }
        Ok(())
    }

    /// Posts one WRITE to an address that was looked up just now, with the counter of the notification as
    /// immediate data.
    fn write(
        &mut self,
        node: NodeNumber,
        at_end: AtEnd,
        from: Sge,
        to: RemoteAddress,
        notification: Notification,
    ) -> Result<(), FabricError> {
        // A request without bytes has no element.
        let element = [from];
        let from = if from.len() == 0 { &element[..0] } else { &element[..] };
        // Nobody waits for it alone: `flush` waits for all.
        self.transfer(node, at_end, |pair, id| {
            let posted = match notification {
                Notification::Counter { index, add } => {
                    let value = u32::from(index) << 16 | u32::from(add);
                    pair.post_write_imm(from, to, value, Signal::Yes, id)
                }
                _ => pair.post_write(from, to, Signal::Yes, id),
            };
            posted.is_ok()
        })?;
        if let Some(peer) = self.peer_mut(node) {
            peer.unflushed = true;
        }
        Ok(())
    }

    /// A place in the staging memory, after earlier transfers have freed some.
    fn stage(&mut self, length: usize) -> Result<u64, FabricError> {
        self.wait(Deadline::NEVER, |state| state.staging.allocate(length as u64).map(Ok))
    }

    fn staging_sge(&self, at: u64, length: u32) -> Option<Sge> {
        self.staging_memory.region()?.sge(at, length).ok()
    }

    fn put(
        &mut self,
        to: NodeNumber,
        region: RegionId,
        offset: u64,
        data: &[u8],
        notification: Notification,
    ) -> Result<(), FabricError> {
        self.check_target(to, notification)?;
        if to == self.here {
            return self.put_here(region, offset, data, notification);
        }
        // The whole put is refused, or none of it.
        self.address(to, region, offset, data.len() as u64)?;
        let (mut at, mut rest) = (offset, data);
        loop {
            let (part, more) = rest.split_at(rest.len().min(CHUNK));
            let staged = self.stage(part.len())?;
            let _ = self.staging_memory.store(staged, part);
            let lost = FabricError::NodeLost { node: to };
            let with = if more.is_empty() { notification } else { Notification::None };
            let posted = self.staging_sge(staged, part.len() as u32).ok_or(lost).and_then(|from| {
                let address = self.address(to, region, at, part.len() as u64)?;
                self.write(to, AtEnd::Free(staged), from, address, with)
            });
            if posted.is_err() {
                self.staging.free(staged);
            }
            posted?;
            if more.is_empty() {
                return self.announce(to, region, offset, data.len() as u64, notification);
            }
            at += part.len() as u64;
            rest = more;
        }
    }

    /// Sends the event of a put behind it.
    fn announce(
        &mut self,
        to: NodeNumber,
        region: RegionId,
        offset: u64,
        length: u64,
        notification: Notification,
    ) -> Result<(), FabricError> {
        match notification {
            Notification::Event { tag } => self.send(to, &Message::Event { tag, region, offset, length }),
            _ => Ok(()),
        }
    }

    fn put_region(
        &mut self,
        to: NodeNumber,
        region: RegionId,
        offset: u64,
        source: Span,
        notification: Notification,
    ) -> Result<(), FabricError> {
        self.check_target(to, notification)?;
        self.own_range(source.region, source.offset, source.length)?;
        self.address(to, region, offset, source.length as u64)?;
        let mut done = 0;
        loop {
            let length = (source.length - done).min(REGION_CHUNK);
            let is_last = done + length == source.length;
            let lost = FabricError::NodeLost { node: to };
            let registration = self.own(source.region)?.region().ok_or(lost)?;
            let from = registration.sge(source.offset + done as u64, length as u32).map_err(|_| lost)?;
            let address = self.address(to, region, offset + done as u64, length as u64)?;
            let with = if is_last { notification } else { Notification::None };
            self.write(to, AtEnd::Nothing, from, address, with)?;
            done += length;
            if is_last {
                return self.announce(to, region, offset, source.length as u64, notification);
            }
        }
    }

    /// Posts a transfer from another node's region into the staging memory and waits for it.
    fn fetch(
        &mut self,
        node: NodeNumber,
        region: RegionId,
        offset: u64,
        length: usize,
        post: impl FnOnce(&QueuePair, Sge, RemoteAddress, WrId) -> bool,
    ) -> Result<Vec<u8>, FabricError> {
        let lost = FabricError::NodeLost { node };
        let at = self.stage(length)?;
        let result = self.staging_sge(at, length as u32).ok_or(lost).and_then(|into| {
            let address = self.address(node, region, offset, length as u64)?;
            self.transfer(node, AtEnd::Report, |pair, id| post(pair, into, address, id))
        });
        // The device writes to the place until the completion, so it is not freed before.
        let result = result.and_then(|number| {
            self.wait(Deadline::NEVER, |state| state.finished.remove(&number).then_some(Ok(())))
        });
        let mut bytes = vec![0; length];
        let _ = self.staging_memory.load(at, &mut bytes);
        self.staging.free(at);
        result?;
        // A completion in error is that of a lost peer: key and bounds were checked.
        if self.peer(node).is_some_and(|peer| peer.failed) { Err(lost) } else { Ok(bytes) }
    }

    fn get(
        &mut self,
        from: NodeNumber,
        region: RegionId,
        offset: u64,
        into: &mut [u8],
    ) -> Result<(), FabricError> {
        self.check_target(from, Notification::None)?;
        if from == self.here {
            let _ = self.own_range(region, offset, into.len())?.load(offset, into);
            return Ok(());
        }
        self.address(from, region, offset, into.len() as u64)?;
        let mut at = offset;
        for part in into.chunks_mut(CHUNK) {
            let bytes = self.fetch(from, region, at, part.len(), |pair, to, address, id| {
                pair.post_read(&[to], address, Signal::Yes, id).is_ok()
            })?;
            part.copy_from_slice(&bytes);
            at += part.len() as u64;
        }
        Ok(())
    }

    fn atomic(
        &mut self,
        at: NodeNumber,
        region: RegionId,
        offset: u64,
        here: impl Fn(u64) -> u64,
        post: impl FnOnce(&QueuePair, Sge, RemoteAddress, WrId) -> bool,
    ) -> Result<u64, FabricError> {
        self.check_target(at, Notification::None)?;
        check::word(offset)?;
        if at == self.here {
            let bounds = FabricError::Bounds { offset, length: 8, size: self.own(region)?.size() };
            return self.own_range(region, offset, 8)?.update(offset, here).map_err(|_| bounds);
        }
        let bytes = self.fetch(at, region, offset, 8, post)?;
        Ok(u64::from_ne_bytes(std::array::from_fn(|i| bytes[i])))
    }

    fn exchange(&mut self, bytes: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>, FabricError> {
        self.exchange_failure.check()?;
        let all = self.exchange_round(bytes, timeout);
        self.exchange_failure.keep(all)
    }

    fn exchange_round(&mut self, bytes: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>, FabricError> {
        let round = self.round;
        self.round += 1;
        let total = bytes.len() as u64;
        for to in self.others() {
            let mut rest = bytes;
            loop {
                let (part, more) = rest.split_at(rest.len().min(EXCHANGE_BYTES));
                self.send(to, &Message::Exchange { round, total, part: part.to_vec() })?;
                rest = more;
                if rest.is_empty() {
                    break;
                }
            }
        }
        let others = self.others();
        let arrived = |state: &Node, node: NodeNumber| {
            let incoming = state.peer(node).and_then(|peer| peer.exchanges.get(&round));
            incoming.is_some_and(|incoming| incoming.bytes.len() as u64 >= incoming.total)
        };
        let waited = self.wait(Deadline::after(timeout), |state| {
            let missing = others.iter().copied().find(|&node| !arrived(state, node));
            let lost = others.iter().copied().find(|&node| !arrived(state, node) && !state.is_alive(node));
            match (missing, lost) {
                (None, _) => Some(Ok(())),
                (_, Some(node)) => Some(Err(FabricError::NodeLost { node })),
                _ => None,
            }
        });
        timed(waited, timeout)?;
        let torus = self.torus;
        let of = |node: NodeNumber| match self.peer_mut(node) {
            Some(peer) => peer.exchanges.remove(&round).unwrap_or_default().bytes,
            None => bytes.to_vec(),
        };
        Ok(torus.all().map(of).collect())
    }
}

/// Names the whole timeout.
fn timed<R>(result: Result<R, FabricError>, timeout: Duration) -> Result<R, FabricError> {
    result.map_err(|error| match error {
        FabricError::TimedOut { .. } => FabricError::TimedOut { waited: timeout },
        other => other,
    })
}

impl DirectNode {
    /// The state, after all messages were taken.
    fn current(&self) -> RefMut<'_, Node> {
        let mut node = self.inner.borrow_mut();
        node.progress();
        node
    }
}

impl Fabric for DirectNode {
    fn dimensions(&self) -> Dimensions {
        self.inner.borrow().torus
    }

    fn here(&self) -> NodeNumber {
        self.inner.borrow().here
    }

    fn register(&mut self, size: usize) -> RegionId {
        let node = self.inner.get_mut();
        node.register(size).unwrap_or_else(|error| {
            tracing::error!("{}: cannot register {size} bytes: {error}", node.here);
            // No region has this number, so each use fails.
            RegionId(0)
        })
    }

    fn deregister(&mut self, region: RegionId) -> Result<(), FabricError> {
        self.inner.get_mut().deregister(region)
    }

    fn load(&self, region: RegionId, offset: u64, into: &mut [u8]) -> Result<(), FabricError> {
        let node = self.inner.borrow();
        // The range is checked first.
        let _ = node.own_range(region, offset, into.len())?.load(offset, into);
        Ok(())
    }

    fn store(&self, region: RegionId, offset: u64, data: &[u8]) -> Result<(), FabricError> {
        let node = self.inner.borrow();
        let _ = node.own_range(region, offset, data.len())?.store(offset, data);
        Ok(())
    }

    fn put(
        &mut self,
        to: NodeNumber,
        region: RegionId,
        offset: u64,
        data: &[u8],
        notification: Notification,
    ) -> Result<(), FabricError> {
        self.inner.get_mut().put(to, region, offset, data, notification)
    }

    fn put_region(
        &mut self,
        to: NodeNumber,
        region: RegionId,
        offset: u64,
        source: Span,
        notification: Notification,
    ) -> Result<(), FabricError> {
        if to != self.here() {
            return self.inner.get_mut().put_region(to, region, offset, source, notification);
        }
        let mut data = vec![0; source.length];
        self.load(source.region, source.offset, &mut data)?;
        self.put(to, region, offset, &data, notification)
    }

    fn get(
        &mut self,
        from: NodeNumber,
        region: RegionId,
        offset: u64,
        into: &mut [u8],
    ) -> Result<(), FabricError> {
        self.inner.get_mut().get(from, region, offset, into)
    }

    fn fetch_add(
        &mut self,
        at: NodeNumber,
        region: RegionId,
        offset: u64,
        add: u64,
    ) -> Result<u64, FabricError> {
        let here = |old: u64| old.wrapping_add(add);
        self.inner.get_mut().atomic(at, region, offset, here, |pair, to, word, id| {
            pair.post_fetch_add(to, word, add, id).is_ok()
        })
    }

    fn compare_swap(
        &mut self,
        at: NodeNumber,
        region: RegionId,
        offset: u64,
        expected: u64,
        new: u64,
    ) -> Result<u64, FabricError> {
        let here = |old: u64| if old == expected { new } else { old };
        self.inner.get_mut().atomic(at, region, offset, here, |pair, to, word, id| {
            pair.post_compare_swap(to, word, (expected, new), id).is_ok()
        })
    }

    fn flush(&mut self, to: NodeNumber) -> Result<(), FabricError> {
        let lost = FabricError::NodeLost { node: to };
        let node = self.inner.get_mut();
        if !node.torus.contains(to) {
            return Err(lost);
        }
        node.wait(Deadline::NEVER, |state| state.is_idle(to).then_some(Ok(())))?;
        let alive = node.is_alive(to);
        // This node's own puts are visible at once.
        let Some(peer) = node.peer_mut(to) else { return Ok(()) };
        let unflushed = std::mem::take(&mut peer.unflushed);
        // Without a failure, the puts arrived before the node was lost.
        if !peer.failed && (unflushed || alive) { Ok(()) } else { Err(lost) }
    }

    fn counter(&self, index: u16) -> Result<u64, FabricError> {
        check::counter(index)?;
        Ok(self.current().counters[usize::from(index)])
    }

    fn wait_counter(
        &mut self,
        index: u16,
        value: u64,
        from: NodeNumber,
        timeout: Duration,
    ) -> Result<(), FabricError> {
        self.counter(index)?;
        let waited = self.inner.get_mut().wait(Deadline::after(timeout), |state| {
            if state.counters[usize::from(index)] >= value {
                return Some(Ok(()));
            }
            (!state.is_alive(from)).then_some(Err(FabricError::NodeLost { node: from }))
        });
        timed(waited, timeout)
    }

    fn is_lost(&self, node: NodeNumber) -> bool {
        let mut inner = self.inner.borrow_mut();
        inner.look_for_lost();
        !inner.is_alive(node)
    }

    fn lost_node(&self) -> Option<NodeNumber> {
        let mut node = self.inner.borrow_mut();
        node.look_for_lost();
        node.torus.all().find(|&other| !node.is_alive(other))
    }

    fn poll_event(&mut self) -> Option<Event> {
        let node = self.inner.get_mut();
        node.progress();
        node.events.pop_front()
    }

    fn lost_events(&self) -> u64 {
        self.current().lost_events
    }

    fn exchange(&mut self, bytes: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>, FabricError> {
        self.inner.get_mut().exchange(bytes, timeout)
    }
}
