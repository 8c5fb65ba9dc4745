//! [`Fabric`] for a host outside of the torus. It is an initiator: it has no counters and events, and takes part in no
//! operation of all nodes.

use std::time::Duration;

use millstream_fabric::{Event, Fabric, FabricError, LostPuts, Notification, RegionId, check};
use millstream_torus_core::{Dimensions, NodeNumber};

use super::host::OutsideHost;
use crate::control::CommandKind;
use crate::initiator::{Initiator, NEVER};
use crate::memory::Memory;

impl OutsideHost {
    fn check_target(&self, to: NodeNumber, notification: Notification) -> Result<(), FabricError> {
        check::notification(notification)?;
        if self.torus.contains(to) { Ok(()) } else { Err(FabricError::NodeLost { node: to }) }
    }

    fn own(&self, region: RegionId, offset: u64, length: usize) -> Result<&Memory, FabricError> {
        let memory = check::region(self.regions.get(&region), self.gateway, region)?;
        check::range(offset, length as u64, memory.size())?;
        Ok(memory)
    }
}

impl Fabric for OutsideHost {
    fn dimensions(&self) -> Dimensions {
        self.torus
    }

    /// The gateway.
    fn here(&self) -> NodeNumber {
        self.gateway
    }

    /// Memory of this host, for operations between regions. No node reaches it.
    fn register(&mut self, size: usize) -> RegionId {
        match self.register_memory(size) {
            Ok(region) => region,
            Err(error) => {
                tracing::error!("cannot register {size} bytes: {error}");
                // No region has this number, so each use fails.
                RegionId(0)
            }
        }
    }

    fn deregister(&mut self, region: RegionId) -> Result<(), FabricError> {
        check::region(self.regions.remove(&region), self.gateway, region).map(drop)
    }

    fn load(&self, region: RegionId, offset: u64, into: &mut [u8]) -> Result<(), FabricError> {
        let memory = self.own(region, offset, into.len())?;
        // The range was checked just now.
        let _ = memory.load(offset, into);
        Ok(())
    }

    fn store(&self, region: RegionId, offset: u64, data: &[u8]) -> Result<(), FabricError> {
        let memory = self.own(region, offset, data.len())?;
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
        self.check_target(to, notification)?;
        self.put_bytes(to, region, offset, data, notification)
    }

    fn get(
        &mut self,
        from: NodeNumber,
        region: RegionId,
        offset: u64,
        into: &mut [u8],
    ) -> Result<(), FabricError> {
        self.check_target(from, Notification::None)?;
        self.get_bytes(from, region, offset, into)
    }

    fn fetch_add(
        &mut self,
        at: NodeNumber,
        region: RegionId,
        offset: u64,
        add: u64,
    ) -> Result<u64, FabricError> {
        self.check_target(at, Notification::None)?;
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
        self.check_target(at, Notification::None)?;
        self.atomic(at, region, offset, CommandKind::CompareSwap(expected, new))
    }

    fn flush(&mut self, to: NodeNumber) -> Result<(), FabricError> {
        self.check_target(to, Notification::None)?;
        self.wait(NEVER, |host| host.outstanding.is_idle(to).then_some(Ok(())))?;
        self.outstanding.flushed(to).map(drop)
    }

    fn lost_puts(&mut self, to: NodeNumber) -> Option<LostPuts> {
        self.progress();
        self.outstanding.lost_puts(to)
    }

    /// [`FabricError::NotANode`].
    fn counter(&self, _: u16) -> Result<u64, FabricError> {
        Err(FabricError::NotANode)
    }

    /// [`FabricError::NotANode`].
    fn wait_counter(&mut self, _: u16, _: u64, _: NodeNumber, _: Duration) -> Result<(), FabricError> {
        Err(FabricError::NotANode)
    }

    /// All nodes, once the gateway is lost. The loss of another node shows in operations to it.
    fn is_lost(&self, _: NodeNumber) -> bool {
        OutsideHost::is_lost(self)
    }

    /// The gateway, once it is lost. The loss of another node shows in operations to it.
    fn lost_node(&self) -> Option<NodeNumber> {
        self.is_lost().then_some(self.gateway)
    }

    fn poll_event(&mut self) -> Option<Event> {
        None
    }

    fn lost_events(&self) -> u64 {
        0
    }

    /// [`FabricError::NotANode`].
    fn exchange(&mut self, _: &[u8], _: Duration) -> Result<Vec<Vec<u8>>, FabricError> {
        Err(FabricError::NotANode)
    }
}
