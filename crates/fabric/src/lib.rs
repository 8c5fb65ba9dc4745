//! One-sided communication between the nodes of a torus.
//!
//! [`Fabric`] is the interface: regions, put, get, atomic operations, notifications. [`local`] implements it for threads
//! of one process. [`collective`] has operations of all nodes, [`all_to_all`] messages of any length between all nodes and
//! [`neighbourhood`] messages with fixed peers, all written once over put. [`on_card`] puts a program's memory on the node's card. [`check`] has the checks that
//! implementations share, [`conformance`] tests an implementation, and [`unreliable`] loses puts for tests.
#![forbid(unsafe_code)]

pub mod all_to_all;
pub mod check;
pub mod collective;
pub mod conformance;
mod failure;
pub mod local;
pub mod neighbourhood;
pub mod on_card;
pub mod unreliable;
mod wait;

use std::time::Duration;

pub use all_to_all::AllToAll;
pub use collective::{Collectives, Reduction};
pub use failure::FirstError;
pub use local::LocalNode;
pub use millstream_torus_core::header::Notification;
use millstream_torus_core::{Dimensions, NodeNumber};
pub use neighbourhood::{ExchangeStatistics, Neighbourhood};
pub use on_card::OnCard;
pub use wait::LossWatch;

/// Counters of a node for [`Notification::Counter`].
pub const COUNTERS: u16 = 256;
/// Counters from here on belong to [`Collectives`].
pub const FIRST_COLLECTIVE_COUNTER: u16 = COUNTERS - 3;
/// Events that wait at a node.
pub const EVENT_LIMIT: usize = 4096;

/// Arguments of a kernel of a card, or its results.
pub type KernelWords = [u64; 16];

/// A region of a node: 64 random bits, so that others cannot guess it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionId(pub u64);

/// A part of a region of this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The region.
    pub region: RegionId,
    /// Start (bytes).
    pub offset: u64,
    /// Length (bytes).
    pub length: usize,
}

/// Notification with a tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The initiator.
    pub source: NodeNumber,
    /// The tag.
    pub tag: u32,
    /// The region that was written.
    pub region: RegionId,
    /// Offset of the data (bytes).
    pub offset: u64,
    /// Length of the data (bytes).
    pub length: u64,
}

/// Puts to a node that were lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LostPuts {
    /// Their number.
    pub count: u64,
    /// Why the last one was: [`FabricError::NodeLost`] or [`FabricError::NoRoute`].
    pub cause: FabricError,
}

/// Why an operation failed. It harms no other operation, but one in which all nodes take part ends these: see [`FirstError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FabricError {
    /// The region does not exist at that node, or it ended.
    #[error("{node} has no region {region:#018x}")]
    NoRegion {
        /// The node.
        node: NodeNumber,
        /// The region.
        region: u64,
    },
    /// The range exceeds the region.
    #[error("bytes {offset} to {offset} + {length} exceed the region of {size} bytes")]
    Bounds {
        /// Start of the range (bytes).
        offset: u64,
        /// Its length (bytes).
        length: u64,
        /// Size of the region (bytes).
        size: u64,
    },
    /// An atomic operation needs an offset that is a multiple of 8.
    #[error("offset {offset} of an atomic operation is not a multiple of 8")]
    Unaligned {
        /// The offset (bytes).
        offset: u64,
    },
    /// The counter does not exist.
    #[error("counter {index} does not exist: a node has {COUNTERS}")]
    NoCounter {
        /// The counter.
        index: u16,
    },
    /// The region's memory is gone: its application ended, or the lease of its card did.
    #[error("region {region:#018x} of {node} is gone: its application or its card's lease ended")]
    Gone {
        /// The node.
        node: NodeNumber,
        /// The region.
        region: u64,
    },
    /// The region does not allow the access.
    #[error("region {region:#018x} of {node} does not allow this access")]
    Access {
        /// The node.
        node: NodeNumber,
        /// The region.
        region: u64,
    },
    /// The node may live, but no live path leads there.
    #[error("no live path leads to {node}")]
    NoRoute {
        /// The node.
        node: NodeNumber,
    },
    /// The node or its application is lost.
    #[error("{node} is lost")]
    NodeLost {
        /// The node.
        node: NodeNumber,
    },
    /// The node has no card, or the range is not in the memory of its card.
    #[error("bytes {offset} to {offset} + {length} are not memory of a card of {node}")]
    NoCard {
        /// The node.
        node: NodeNumber,
        /// Start of the range (bytes).
        offset: u64,
        /// Its length (bytes).
        length: u64,
    },
    /// The node's card does not have the kernel.
    #[error("the card of {node} has no kernel {kernel:?}: serve it with a program that has this kernel")]
    NoKernel {
        /// The node.
        node: NodeNumber,
        /// The kernel.
        kernel: &'static str,
    },
    /// A kernel of the node's card failed.
    #[error("kernel {kernel:?} on the card of {node}: {cause} ({detail:#x})")]
    KernelFailed {
        /// The node.
        node: NodeNumber,
        /// The kernel.
        kernel: &'static str,
        /// The card's cause.
        cause: &'static str,
        /// The offending value.
        detail: u64,
    },
    /// The lease of the node's card ended, or the card did.
    #[error("the lease of the card of {node} ended")]
    CardLost {
        /// The node.
        node: NodeNumber,
    },
    /// A node sent a message of another form than this operation's.
    #[error("{node} sent a malformed message: do all nodes call the same operation?")]
    Malformed {
        /// The node.
        node: NodeNumber,
    },
    /// Counters, events and operations of all nodes are for nodes.
    #[error(
        "this host is outside of the torus: it has no counters, and takes part in no operation of all nodes"
    )]
    NotANode,
    /// The deadline passed.
    #[error("no result after {waited:?}")]
    TimedOut {
        /// The time waited.
        waited: Duration,
    },
}

/// One node's access to all nodes.
///
/// Puts to one node take effect in the order of posting. A notification is seen after its data are visible. Puts also arrive
/// if their program ends behind them without a flush.
pub trait Fabric {
    /// Shape of the torus.
    fn dimensions(&self) -> Dimensions;

    /// This node.
    fn here(&self) -> NodeNumber;

    /// Registers `size` zero bytes of this node.
    fn register(&mut self, size: usize) -> RegionId;

    /// Registers a part of the memory of this node's card. The region is [`FabricError::Gone`] when the card's lease ends.
    ///
    /// # Errors
    /// [`FabricError::NoCard`].
    fn register_card(&mut self, offset: u64, size: usize) -> Result<RegionId, FabricError> {
        Err(FabricError::NoCard { node: self.here(), offset, length: size as u64 })
    }

    /// Where a region of this node begins in the memory of the node's card (bytes). None if it is host memory.
    fn card_offset(&self, region: RegionId) -> Option<u64> {
        let _ = region;
        None
    }

    /// Runs a kernel on the node's card to its end. Returns its result words.
    ///
    /// # Errors
    /// [`FabricError::NoCard`], [`FabricError::NoKernel`], [`FabricError::KernelFailed`] or [`FabricError::CardLost`].
    fn run_kernel(
        &mut self,
        kernel: &'static str,
        arguments: &KernelWords,
    ) -> Result<KernelWords, FabricError> {
        let _ = (kernel, arguments);
        Err(FabricError::NoCard { node: self.here(), offset: 0, length: 0 })
    }

    /// Ends a region of this node. Operations on it fail from here on.
    ///
    /// # Errors
    /// [`FabricError::NoRegion`].
    fn deregister(&mut self, region: RegionId) -> Result<(), FabricError>;

    /// Copies from a region of this node.
    ///
    /// # Errors
    /// [`FabricError::NoRegion`] or [`FabricError::Bounds`].
    fn load(&self, region: RegionId, offset: u64, into: &mut [u8]) -> Result<(), FabricError>;

    /// Copies to a region of this node.
    ///
    /// # Errors
    /// [`FabricError::NoRegion`] or [`FabricError::Bounds`].
    fn store(&self, region: RegionId, offset: u64, data: &[u8]) -> Result<(), FabricError>;

    /// Writes to a region of a node. The data may be reused when this returns.
    ///
    /// # Errors
    /// [`FabricError`] if the operation is refused here; otherwise [`Fabric::flush`] reports its failure.
    fn put(
        &mut self,
        to: NodeNumber,
        region: RegionId,
        offset: u64,
        data: &[u8],
        notification: Notification,
    ) -> Result<(), FabricError>;

    /// As [`Fabric::put`], from a region of this node. The source must not change before [`Fabric::flush`].
    ///
    /// # Errors
    /// As [`Fabric::put`], also of the source.
    fn put_region(
        &mut self,
        to: NodeNumber,
        region: RegionId,
        offset: u64,
        source: Span,
        notification: Notification,
    ) -> Result<(), FabricError> {
        check_span(self, source)?;
        let mut data = vec![0; source.length];
        self.load(source.region, source.offset, &mut data)?;
        self.put(to, region, offset, &data, notification)
    }

    /// Reads from a region of a node.
    ///
    /// # Errors
    /// [`FabricError`] of the operation.
    fn get(
        &mut self,
        from: NodeNumber,
        region: RegionId,
        offset: u64,
        into: &mut [u8],
    ) -> Result<(), FabricError>;

    /// As [`Fabric::get`], into a region of this node.
    ///
    /// # Errors
    /// As [`Fabric::get`], also of the target.
    fn get_region(
        &mut self,
        from: NodeNumber,
        region: RegionId,
        offset: u64,
        into: Span,
    ) -> Result<(), FabricError> {
        check_span(self, into)?;
        let mut data = vec![0; into.length];
        self.get(from, region, offset, &mut data)?;
        self.store(into.region, into.offset, &data)
    }

    /// Adds to a little-endian word of 8 bytes, and returns its previous value.
    ///
    /// # Errors
    /// [`FabricError`] of the operation.
    fn fetch_add(
        &mut self,
        at: NodeNumber,
        region: RegionId,
        offset: u64,
        add: u64,
    ) -> Result<u64, FabricError>;

    /// Replaces a little-endian word of 8 bytes if it equals `expected`, and returns its previous value.
    ///
    /// # Errors
    /// [`FabricError`] of the operation.
    fn compare_swap(
        &mut self,
        at: NodeNumber,
        region: RegionId,
        offset: u64,
        expected: u64,
        new: u64,
    ) -> Result<u64, FabricError>;

    /// Waits until all puts to a node are visible there.
    ///
    /// # Errors
    /// The first failure of a put since the last flush.
    fn flush(&mut self, to: NodeNumber) -> Result<(), FabricError>;

    /// Puts to a node so far that failed behind their posting, because the node was lost or no path led there. It may have
    /// executed them, and may be back. Those under way are not waited for; [`Fabric::flush`] reports the first one, too. None
    /// if there are none, or if nodes that were lost do not come back.
    fn lost_puts(&mut self, to: NodeNumber) -> Option<LostPuts> {
        let _ = to;
        None
    }

    /// The last region of a node of which a put found, behind its posting, that it does not exist any more, as far as
    /// [`Fabric::lost_puts`] and other calls have seen. [`Fabric::flush`] reports the first such put, too. None if puts to such
    /// regions fail at once.
    fn ended_region(&self, of: NodeNumber) -> Option<RegionId> {
        let _ = of;
        None
    }

    /// Value of a counter of this node.
    ///
    /// # Errors
    /// [`FabricError::NoCounter`].
    fn counter(&self, index: u16) -> Result<u64, FabricError>;

    /// Waits until a counter of this node is at least `value`. `from` is the node that raises it.
    ///
    /// # Errors
    /// [`FabricError::NodeLost`] if that node is lost before, [`FabricError::TimedOut`] at the deadline.
    fn wait_counter(
        &mut self,
        index: u16,
        value: u64,
        from: NodeNumber,
        timeout: Duration,
    ) -> Result<(), FabricError>;

    /// Whether a node or its application is known to be lost. Its last notifications were seen before.
    fn is_lost(&self, node: NodeNumber) -> bool;

    /// A node that is known to be lost.
    fn lost_node(&self) -> Option<NodeNumber>;

    /// The next event.
    fn poll_event(&mut self) -> Option<Event>;

    /// Events that found the queue full.
    fn lost_events(&self) -> u64;

    /// Gives every node the bytes of all nodes, by number. For setup: the handles of regions are exchanged this way.
    ///
    /// # Errors
    /// [`FabricError::NodeLost`] or [`FabricError::TimedOut`]. Later exchanges of this node fail with the same error.
    fn exchange(&mut self, bytes: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>, FabricError>;
}

/// Checks a part of a region of this node, before memory of its length is allocated.
fn check_span<F: Fabric + ?Sized>(fabric: &F, span: Span) -> Result<(), FabricError> {
    let Span { region, offset, length } = span;
    let length = length as u64;
    let Some(last) = length.checked_sub(1) else { return Ok(()) };
    fabric.load(region, offset.saturating_add(last), &mut [0]).map_err(|error| match error {
        FabricError::Bounds { size, .. } => FabricError::Bounds { offset, length, size },
        other => other,
    })
}
