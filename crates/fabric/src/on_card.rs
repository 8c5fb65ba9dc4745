//! Card memory for programs that do not name it: every region is a part of the node's card, and so are the sources of puts
//! and the targets of gets.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use millstream_torus_core::{Dimensions, NodeNumber};

use crate::{Event, Fabric, FabricError, KernelWords, LostPuts, Notification, RegionId, Span, check};

/// Regions begin with a page.
const PAGE: u64 = 4096;
/// Memory for the data of puts, and as much for those of gets.
const STAGING: usize = 4 << 20;
/// Most bytes of one operation.
const CHUNK: usize = STAGING / 2;

/// A node whose regions are memory of its card.
#[derive(Debug)]
pub struct OnCard<F> {
    inner: F,
    /// Where the first region may begin.
    first: u64,
    /// Parts of the card that are in use: start and size.
    parts: BTreeMap<u64, (RegionId, u64)>,
    outgoing: RegionId,
    incoming: RegionId,
    /// Bytes of `outgoing` whose puts may be under way, and their targets.
    used: usize,
    targets: BTreeSet<NodeNumber>,
    /// Failures that a flush for room in `outgoing` met.
    failures: BTreeMap<NodeNumber, FabricError>,
    /// The first region since the last exchange for which the card had no room.
    refused: Option<FabricError>,
}

impl<F: Fabric> OnCard<F> {
    /// A node that uses the memory of its card from `first` on.
    ///
    /// # Errors
    /// [`FabricError::NoCard`] if the node has no card, or a smaller one than two staging areas.
    pub fn new(inner: F, first: u64) -> Result<OnCard<F>, FabricError> {
        let none = RegionId(0);
        let mut node = OnCard {
            inner,
            first: first.next_multiple_of(PAGE),
            parts: BTreeMap::new(),
            outgoing: none,
            incoming: none,
            used: 0,
            targets: BTreeSet::new(),
            failures: BTreeMap::new(),
            refused: None,
        };
        node.outgoing = node.allocate(STAGING)?;
        node.incoming = node.allocate(STAGING)?;
        Ok(node)
    }

    /// The node.
    pub fn into_inner(self) -> F {
        self.inner
    }

    /// Registers the first free part of the card's memory.
    fn allocate(&mut self, size: usize) -> Result<RegionId, FabricError> {
        let length = (size.max(1) as u64).next_multiple_of(PAGE);
        let mut start = self.first;
        for (&used, &(_, used_length)) in &self.parts {
            if used - start >= length {
                break;
            }
            start = used + used_length;
        }
        let region = self.inner.register_card(start, size.max(1))?;
        self.parts.insert(start, (region, length));
        Ok(region)
    }

    /// Makes room for the data of a put.
    fn reserve(&mut self, length: usize) -> u64 {
        if self.used + length > STAGING {
            for node in std::mem::take(&mut self.targets) {
                if let Err(error) = self.inner.flush(node) {
                    self.failures.entry(node).or_insert(error);
                }
            }
            self.used = 0;
        }
        let at = self.used as u64;
        self.used += length.next_multiple_of(64);
        at
    }
}

impl<F: Fabric> Fabric for OnCard<F> {
    fn dimensions(&self) -> Dimensions {
        self.inner.dimensions()
    }

    fn here(&self) -> NodeNumber {
        self.inner.here()
    }

    /// As [`Fabric::register`], in the card's memory, which keeps what an earlier region had there until it is cleared here. If
    /// the card has no room, the next [`Fabric::exchange`] of this node fails, so that no node puts into such a region.
    fn register(&mut self, size: usize) -> RegionId {
        let region = match self.allocate(size) {
            Ok(region) => region,
            Err(error) => {
                self.refused.get_or_insert(error);
                // No region has number 0, so each use fails.
                return RegionId(0);
            }
        };
        let zeros = vec![0; CHUNK.min(size)];
        let mut at = 0;
        while at < size {
            let part = CHUNK.min(size - at);
            if self.inner.store(region, at as u64, &zeros[..part]).is_err() {
                break;
            }
            at += part;
        }
        region
    }

    fn register_card(&mut self, offset: u64, size: usize) -> Result<RegionId, FabricError> {
        // The card's memory is given out by this.
        Err(FabricError::NoCard { node: self.here(), offset, length: size as u64 })
    }

    fn card_offset(&self, region: RegionId) -> Option<u64> {
        self.inner.card_offset(region)
    }

    fn run_kernel(
        &mut self,
        kernel: &'static str,
        arguments: &KernelWords,
    ) -> Result<KernelWords, FabricError> {
        self.inner.run_kernel(kernel, arguments)
    }

    fn deregister(&mut self, region: RegionId) -> Result<(), FabricError> {
        self.parts.retain(|_, (other, _)| *other != region);
        self.inner.deregister(region)
    }

    fn load(&self, region: RegionId, offset: u64, into: &mut [u8]) -> Result<(), FabricError> {
        self.inner.load(region, offset, into)
    }

    fn store(&self, region: RegionId, offset: u64, data: &[u8]) -> Result<(), FabricError> {
        self.inner.store(region, offset, data)
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
        let (mut rest, mut offset) = (data, offset);
        loop {
            let (part, more) = rest.split_at(rest.len().min(CHUNK));
            let at = self.reserve(part.len());
            self.inner.store(self.outgoing, at, part)?;
            let source = Span { region: self.outgoing, offset: at, length: part.len() };
            let notification = if more.is_empty() { notification } else { Notification::None };
            self.inner.put_region(to, region, offset, source, notification)?;
            self.targets.insert(to);
            if more.is_empty() {
                return Ok(());
            }
            offset = offset.wrapping_add(part.len() as u64);
            rest = more;
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
        self.inner.put_region(to, region, offset, source, notification)
    }

    fn get(
        &mut self,
        from: NodeNumber,
        region: RegionId,
        offset: u64,
        into: &mut [u8],
    ) -> Result<(), FabricError> {
        let mut offset = offset;
        for part in into.chunks_mut(CHUNK) {
            let target = Span { region: self.incoming, offset: 0, length: part.len() };
            self.inner.get_region(from, region, offset, target)?;
            self.inner.load(self.incoming, 0, part)?;
            offset = offset.wrapping_add(part.len() as u64);
        }
        Ok(())
    }

    fn get_region(
        &mut self,
        from: NodeNumber,
        region: RegionId,
        offset: u64,
        into: Span,
    ) -> Result<(), FabricError> {
        self.inner.get_region(from, region, offset, into)
    }

    fn fetch_add(
        &mut self,
        at: NodeNumber,
        region: RegionId,
        offset: u64,
        add: u64,
    ) -> Result<u64, FabricError> {
        self.inner.fetch_add(at, region, offset, add)
    }

    fn compare_swap(
        &mut self,
        at: NodeNumber,
        region: RegionId,
        offset: u64,
        expected: u64,
        new: u64,
    ) -> Result<u64, FabricError> {
        self.inner.compare_swap(at, region, offset, expected, new)
    }

    fn flush(&mut self, to: NodeNumber) -> Result<(), FabricError> {
        let flushed = self.inner.flush(to);
        self.targets.remove(&to);
        if self.targets.is_empty() {
            self.used = 0;
        }
        self.failures.remove(&to).map_or(flushed, Err)
    }

    fn lost_puts(&mut self, to: NodeNumber) -> Option<LostPuts> {
        self.inner.lost_puts(to)
    }

    fn ended_region(&self, of: NodeNumber) -> Option<RegionId> {
        self.inner.ended_region(of)
    }

    fn counter(&self, index: u16) -> Result<u64, FabricError> {
        self.inner.counter(index)
    }

    fn wait_counter(
        &mut self,
        index: u16,
        value: u64,
        from: NodeNumber,
        timeout: Duration,
    ) -> Result<(), FabricError> {
        self.inner.wait_counter(index, value, from, timeout)
    }

    fn is_lost(&self, node: NodeNumber) -> bool {
        self.inner.is_lost(node)
    }

    fn lost_node(&self) -> Option<NodeNumber> {
        self.inner.lost_node()
    }

    fn poll_event(&mut self) -> Option<Event> {
        self.inner.poll_event()
    }

    fn lost_events(&self) -> u64 {
        self.inner.lost_events()
    }

    fn exchange(&mut self, bytes: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>, FabricError> {
        match self.refused.take() {
            Some(error) => Err(error),
            None => self.inner.exchange(bytes, timeout),
        }
    }
}
