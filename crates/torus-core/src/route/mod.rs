//! Routes: layer A (dimension order), layer B (up*/down*), and the choice of a source.
//!
//! | layer | virtual channels | transit nodes need | survives |
//! |---|---|---|---|
//! | A | 0 and 1 (behind the dateline) | coordinates only | faults that leave a combination of directions |
//! | B | 2 (even epochs), 3 (odd epochs) | a table of the live graph | every fault that leaves a path |
//!
//! A packet never changes its layer. So the channels (link, direction, virtual channel) depend on each other without
//! cycle (W. J. Dally, C. L. Seitz, "Deadlock-Free Message Routing in Multiprocessor Interconnection Networks", 1987);
//! [`dependency`] checks it.

pub mod choice;
pub mod dependency;
pub mod dimension_order;
pub mod up_down;

pub use choice::{Route, choose};
pub use dimension_order::Signs;
pub use up_down::{NodeTable, Phase, UpDown};

use crate::topology::{Direction, NodeNumber};

/// A virtual channel of a link: a ring of receive slots of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VirtualChannel(pub u8);

impl VirtualChannel {
    /// Number of virtual channels of a link.
    pub const COUNT: usize = 5;
    /// Layer A, before the dateline.
    pub const BEFORE_DATELINE: VirtualChannel = VirtualChannel(0);
    /// Layer A, from the dateline on.
    pub const BEHIND_DATELINE: VirtualChannel = VirtualChannel(1);
    /// Diagnosis.
    pub const DIAGNOSIS: VirtualChannel = VirtualChannel(4);

    /// Layer B of an epoch: two successive epochs have different channels.
    #[must_use]
    pub fn up_down(epoch: crate::Epoch) -> VirtualChannel {
        VirtualChannel(2 + (epoch.0 & 1) as u8)
    }

    /// As an array index.
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// A buffer resource of the network: the receive slots of one virtual channel at the far end of one link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChannelName {
    /// The sending node.
    pub node: NodeNumber,
    /// The direction in which it sends.
    pub direction: Direction,
    /// The virtual channel.
    pub vc: VirtualChannel,
}
