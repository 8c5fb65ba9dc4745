//! What a node does with a packet: deliver, forward, drop.

use crate::Epoch;
use crate::header::{Header, Kind};
use crate::route::dimension_order::{self, Arrival, Signs, Step};
use crate::route::{NodeTable, VirtualChannel};
use crate::topology::{Axis, Dimensions, Direction, NodeNumber, Sign};

/// A decision about one packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// The packet is for this node.
    Deliver,
    /// The packet leaves on this virtual channel.
    Forward(Direction, VirtualChannel),
    /// The packet is dropped.
    Drop(DropCause),
}

/// Why a packet was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(usize)]
pub enum DropCause {
    /// Its next link is dead.
    DeadLink,
    /// Its epoch is not valid here.
    StaleEpoch,
    /// The tables have no route.
    NoRoute,
    /// Too many hops.
    HopLimit,
    /// No source makes such a packet: an illegal turn, a wrong virtual channel, or a node that does not exist.
    Malformed,
    /// The claimed source's route does not lead through this link.
    OffRoute,
}

impl DropCause {
    /// Number of causes.
    pub const COUNT: usize = 6;
    /// All causes.
    pub const ALL: [DropCause; DropCause::COUNT] = [
        DropCause::DeadLink,
        DropCause::StaleEpoch,
        DropCause::NoRoute,
        DropCause::HopLimit,
        DropCause::Malformed,
        DropCause::OffRoute,
    ];

    /// Name of its counter.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            DropCause::DeadLink => "dropped_dead_link",
            DropCause::StaleEpoch => "dropped_stale_epoch",
            DropCause::NoRoute => "dropped_no_route",
            DropCause::HopLimit => "dropped_hop_limit",
            DropCause::Malformed => "dropped_malformed",
            DropCause::OffRoute => "dropped_off_route",
        }
    }
}

/// Decides about packets at one node. Tests put faulty ones in place of [`TorusRouting`].
pub trait Routing {
    /// The decision about a packet that came from a neighbour, or was injected here.
    fn decide(&self, header: &Header, arrival: Option<Arrival>) -> Decision;
}

/// Both layers at one node, with the tables of up to two epochs.
#[derive(Clone, Debug)]
pub struct TorusRouting {
    torus: Dimensions,
    here: NodeNumber,
    /// By parity of the epoch.
    tables: [Option<(Epoch, NodeTable)>; 2],
}

impl TorusRouting {
    /// Routing without tables: only diagnosis passes.
    #[must_use]
    pub fn new(torus: Dimensions, here: NodeNumber) -> TorusRouting {
        TorusRouting { torus, here, tables: [None, None] }
    }

    /// Makes an epoch valid here. It replaces the epoch before the previous one, whose packets are dropped.
    pub fn install(&mut self, epoch: Epoch, table: NodeTable) {
        self.tables[(epoch.0 & 1) as usize] = Some((epoch, table));
    }

    /// Ends an epoch: its packets are dropped.
    pub fn retire(&mut self, epoch: Epoch) {
        let place = &mut self.tables[(epoch.0 & 1) as usize];
        if place.as_ref().is_some_and(|&(installed, _)| installed == epoch) {
            *place = None;
        }
    }

    /// The table of a valid epoch.
    #[must_use]
    pub fn table(&self, epoch: Epoch) -> Option<&NodeTable> {
        let (installed, table) = self.tables[(epoch.0 & 1) as usize].as_ref()?;
        (*installed == epoch).then_some(table)
    }

    /// Whether a route of layer A from `source` to `target` passes here in this direction.
    fn passes(&self, source: NodeNumber, target: NodeNumber, signs: Signs, travelling: Direction) -> bool {
        let [from, to, here] = [source, target, self.here].map(|node| self.torus.coordinates(node));
        Axis::ALL.into_iter().all(|axis| {
            if axis != travelling.axis {
                let expected = if axis < travelling.axis { to } else { from };
                return here.on(axis) == expected.on(axis);
            }
            let size = u32::from(self.torus.size(axis));
            let distance = |place: u16| match travelling.sign {
                Sign::Plus => (u32::from(place) + size - u32::from(from.on(axis))) % size,
                Sign::Minus => (u32::from(from.on(axis)) + size - u32::from(place)) % size,
            };
            signs.on(axis) == travelling.sign
                && (1..=distance(to.on(axis))).contains(&distance(here.on(axis)))
        })
    }

    fn layer_a(&self, header: &Header, arrival: Option<Arrival>) -> Decision {
        if arrival.is_some_and(|a| !self.passes(header.source, header.target, header.signs, a.travelling)) {
            return Decision::Drop(DropCause::OffRoute);
        }
        match dimension_order::next(&self.torus, self.here, header.target, header.signs, arrival) {
            Step::Arrived => Decision::Deliver,
            Step::Illegal => Decision::Drop(DropCause::Malformed),
            Step::Forward(..) if u32::from(header.hops) >= self.torus.max_hops() => {
                Decision::Drop(DropCause::HopLimit)
            }
            Step::Forward(direction, vc) => Decision::Forward(direction, vc),
        }
    }

    fn layer_b(&self, header: &Header, table: &NodeTable, arrival: Option<Arrival>) -> Decision {
        let vc = VirtualChannel::up_down(header.epoch);
        if header.vc != vc {
            return Decision::Drop(DropCause::Malformed);
        }
        if header.target == self.here {
            return Decision::Deliver;
        }
        match table.next(header.target, arrival.map(|arrival| arrival.travelling)) {
            None => Decision::Drop(DropCause::NoRoute),
            Some(_) if u32::from(header.hops) >= table.max_hops() => Decision::Drop(DropCause::HopLimit),
            Some(direction) => Decision::Forward(direction, vc),
        }
    }
}

impl Routing for TorusRouting {
    fn decide(&self, header: &Header, arrival: Option<Arrival>) -> Decision {
        if (header.kind == Kind::Diagnosis) != (header.vc == VirtualChannel::DIAGNOSIS) {
            return Decision::Drop(DropCause::Malformed);
        }
        if header.kind == Kind::Diagnosis {
            return Decision::Deliver;
        }
        if !self.torus.contains(header.source) || !self.torus.contains(header.target) {
            return Decision::Drop(DropCause::Malformed);
        }
        let Some(table) = self.table(header.epoch) else {
            return Decision::Drop(DropCause::StaleEpoch);
        };
        if header.vc == VirtualChannel::BEFORE_DATELINE || header.vc == VirtualChannel::BEHIND_DATELINE {
            self.layer_a(header, arrival)
        } else {
            self.layer_b(header, table, arrival)
        }
    }
}
