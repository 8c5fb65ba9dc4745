//! [`Fabric`] for an application process.

use std::time::Duration;

use millstream_fabric::{
    Event, Fabric, FabricError, KernelWords, LostPuts, Notification, RegionId, Span, check,
};
use millstream_torus_core::{Dimensions, NodeNumber};

use super::{Awaited, REGION_CHUNK, TorusNode};
use crate::attach::{AttachReply, AttachRequest, receive, send};
use crate::control::{Command, CommandKind};
use crate::initiator::{Initiator, NEVER};
use crate::outstanding::Pending;

impl Fabric for TorusNode {
    fn dimensions(&self) -> Dimensions {
        self.torus
    }

    fn here(&self) -> NodeNumber {
        self.here
    }

    fn register(&mut self, size: usize) -> RegionId {
        match self.register_memory(size) {
            Ok(region) => region,
            Err(error) => {
                tracing::error!("{}: cannot register {size} bytes: {error}", self.here);
                // No region has this number, so each use fails.
                RegionId(0)
            }
        }
    }

    fn register_card(&mut self, offset: u64, size: usize) -> Result<RegionId, FabricError> {
        let none = FabricError::NoCard { node: self.here, offset, length: size as u64 };
        match self.register_card_memory(offset, size) {
            Ok(region) => region.ok_or(none),
            Err(error) => {
                tracing::error!("{}: cannot register {size} bytes of the card: {error}", self.here);
                Err(FabricError::NodeLost { node: self.here })
            }
        }
    }

    fn card_offset(&self, region: RegionId) -> Option<u64> {
        self.card_regions.get(&region).copied()
    }

    fn run_kernel(
        &mut self,
        kernel: &'static str,
        arguments: &KernelWords,
    ) -> Result<KernelWords, FabricError> {
        self.run_on_card(kernel, arguments)
    }

    fn deregister(&mut self, region: RegionId) -> Result<(), FabricError> {
        check::region(self.regions.remove(&region), self.here, region)?;
        self.card_regions.remove(&region);
        let lost = FabricError::NodeLost { node: self.here };
        let request = AttachRequest::Deregister { region: region.0 };
        send(&self.connection, &request, &[]).map_err(|_| lost)?;
        receive::<AttachReply>(&self.connection).map_err(|_| lost)?;
        Ok(())
    }

    fn load(&self, region: RegionId, offset: u64, into: &mut [u8]) -> Result<(), FabricError> {
        let memory = self.own_range(region, offset, into.len())?;
        // The range was checked just now.
        let _ = memory.load(offset, into);
        Ok(())
    }

    fn store(&self, region: RegionId, offset: u64, data: &[u8]) -> Result<(), FabricError> {
        let memory = self.own_range(region, offset, data.len())?;
        // The range was checked just now.
        let _ = memory.store(offset, data);
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
        self.check_put(to, notification)?;
        self.put_bytes(to, region, offset, data, notification)
    }

    fn put_region(
        &mut self,
        to: NodeNumber,
        region: RegionId,
        offset: u64,
        source: Span,
        notification: Notification,
    ) -> Result<(), FabricError> {
        self.check_put(to, notification)?;
        self.own_range(source.region, source.offset, source.length)?;
        let mut done = 0;
        loop {
            let length = (source.length - done).min(REGION_CHUNK);
            let is_last = done + length == source.length;
            let notification = if is_last { notification } else { Notification::None };
            let at = source.offset + done as u64;
            let kind = CommandKind::Put { local: source.region, at, length: length as u32, notification };
            let offset = offset.wrapping_add(done as u64);
            let length = length as u64;
            let pending = Pending { target: to, region, offset, length, staged: None, awaited: false };
            self.post(Command { kind, target: to, cookie: 0, region, offset }, pending)?;
            if is_last {
                return Ok(());
            }
            done += length as usize;
        }
    }

    fn get(
        &mut self,
        from: NodeNumber,
        region: RegionId,
        offset: u64,
        into: &mut [u8],
    ) -> Result<(), FabricError> {
        self.check_put(from, Notification::None)?;
        self.get_bytes(from, region, offset, into)
    }

    fn get_region(
        &mut self,
        from: NodeNumber,
        region: RegionId,
        offset: u64,
        into: Span,
    ) -> Result<(), FabricError> {
        self.check_put(from, Notification::None)?;
        self.own_range(into.region, into.offset, into.length)?;
        let mut cookies = Vec::new();
        let mut done = 0;
        while done < into.length {
            let length = (into.length - done).min(REGION_CHUNK) as u32;
            let (at, offset) = (into.offset + done as u64, offset.wrapping_add(done as u64));
            let kind = CommandKind::Get { local: into.region, at, length };
            let length = u64::from(length);
            let pending = Pending { target: from, region, offset, length, staged: None, awaited: true };
            cookies.push(self.post(Command { kind, target: from, cookie: 0, region, offset }, pending)?);
            done += length as usize;
        }
        // All results are taken, also those behind a failure.
        let results: Vec<_> = cookies.into_iter().map(|cookie| self.result(cookie)).collect();
        results.into_iter().try_for_each(|result| result.map(drop))
    }

    fn fetch_add(
        &mut self,
        at: NodeNumber,
        region: RegionId,
        offset: u64,
        add: u64,
    ) -> Result<u64, FabricError> {
        self.atomic(at, region, offset, CommandKind::FetchAdd(add))
    }

    fn compare_swap(
        &mut self,
        at: NodeNumber,
        region: RegionId,
        offset: u64,
        expected: u64,
        new: u64,
    ) -> Result<u64, FabricError> {
        self.atomic(at, region, offset, CommandKind::CompareSwap(expected, new))
    }

    fn flush(&mut self, to: NodeNumber) -> Result<(), FabricError> {
        if !self.torus.contains(to) {
            return Err(FabricError::NodeLost { node: to });
        }
        self.wait_for(Awaited::AllTo(to), NEVER, |node| node.outstanding.is_idle(to).then_some(Ok(())))?;
        let flushed = self.outstanding.flushed(to)?;
        // Puts that arrived before the node was lost are no failure.
        if flushed || !self.control.is_lost(to) { Ok(()) } else { Err(FabricError::NodeLost { node: to }) }
    }

    fn lost_puts(&mut self, to: NodeNumber) -> Option<LostPuts> {
        self.look();
        self.drain();
        self.outstanding.lost_puts(to)
    }

    fn ended_region(&self, of: NodeNumber) -> Option<RegionId> {
        self.outstanding.ended_region(of)
    }

    fn counter(&self, index: u16) -> Result<u64, FabricError> {
        check::counter(index)?;
        Ok(self.control.counter(index))
    }

    fn wait_counter(
        &mut self,
        index: u16,
        value: u64,
        from: NodeNumber,
        timeout: Duration,
    ) -> Result<(), FabricError> {
        self.counter(index)?;
        let exists = self.torus.contains(from);
        self.wait_for_counter(index, value, timeout, |node| {
            (!exists || node.control.is_lost(from)).then_some(from)
        })
    }

    fn is_lost(&self, node: NodeNumber) -> bool {
        self.broken || !self.torus.contains(node) || self.control.is_lost(node)
    }

    fn lost_node(&self) -> Option<NodeNumber> {
        if self.broken {
            return Some(self.here);
        }
        self.torus.all().find(|&node| self.control.is_lost(node))
    }

    fn poll_event(&mut self) -> Option<Event> {
        self.look();
        match self.control.take_event() {
            Ok(event) => event,
            Err(error) => {
                self.give_up(error);
                None
            }
        }
    }

    fn lost_events(&self) -> u64 {
        self.control.lost_events()
    }

    fn exchange(&mut self, bytes: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>, FabricError> {
        crate::exchange::run(self, bytes, timeout)
    }
}
