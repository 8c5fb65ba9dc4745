//! Layer A: dimension order with a dateline in every ring.

use super::{ChannelName, VirtualChannel};
use crate::faults::DeadSet;
use crate::topology::{Axis, Dimensions, Direction, NodeNumber, Sign};

/// The source's choice of one sense per axis; three bits of the header, set for [`Sign::Minus`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Signs(u8);

impl Signs {
    /// All combinations.
    pub const ALL: [Signs; 8] =
        [Signs(0), Signs(1), Signs(2), Signs(3), Signs(4), Signs(5), Signs(6), Signs(7)];

    /// From the header's bits; bits beyond the three are refused.
    #[must_use]
    pub fn from_bits(bits: u8) -> Option<Signs> {
        (bits < 8).then_some(Signs(bits))
    }

    /// The header's bits.
    #[must_use]
    pub fn bits(self) -> u8 {
        self.0
    }

    /// The sense on an axis.
    #[must_use]
    pub fn on(self, axis: Axis) -> Sign {
        if self.0 & (1 << axis.index()) == 0 { Sign::Plus } else { Sign::Minus }
    }

    fn set_minus(&mut self, axis: Axis) {
        self.0 |= 1 << axis.index();
    }
}

/// The shortest directions. Halfway round a ring, even places go in positive and odd ones in negative direction, which
/// balances both.
#[must_use]
pub fn shortest(torus: &Dimensions, from: NodeNumber, to: NodeNumber) -> Signs {
    let (a, b) = (torus.coordinates(from), torus.coordinates(to));
    let mut signs = Signs::default();
    for axis in Axis::ALL {
        let size = u32::from(torus.size(axis));
        let (here, there) = (u32::from(a.on(axis)), u32::from(b.on(axis)));
        let up = (there + size - here) % size;
        if 2 * up > size || (2 * up == size && here % 2 == 1) {
            signs.set_minus(axis);
        }
    }
    signs
}

/// The next step of a packet of layer A.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The packet is at its target.
    Arrived,
    /// The packet leaves on this channel.
    Forward(Direction, VirtualChannel),
    /// No source makes such a packet: a turn against the order of dimensions, a turn back, or a second crossing of a
    /// dateline.
    Illegal,
}

/// How a packet came to a node: the direction in which it travelled, and its virtual channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// The direction of travel.
    pub travelling: Direction,
    /// The virtual channel that it occupies.
    pub vc: VirtualChannel,
}

/// The next step from `here` to `to`. A transit node needs both coordinates only, no table and no knowledge of faults.
/// A packet begins each axis on virtual channel 0 and is on channel 1 from the hop that crosses the dateline.
#[must_use]
pub fn next(
    torus: &Dimensions,
    here: NodeNumber,
    to: NodeNumber,
    signs: Signs,
    arrival: Option<Arrival>,
) -> Step {
    let (a, b) = (torus.coordinates(here), torus.coordinates(to));
    let Some(axis) = Axis::ALL.into_iter().find(|&axis| a.on(axis) != b.on(axis)) else {
        return Step::Arrived;
    };
    let direction = Direction::new(axis, signs.on(axis));
    if torus.neighbour(here, direction).is_none() {
        return Step::Illegal;
    }
    let mut vc = VirtualChannel::BEFORE_DATELINE;
    if let Some(arrival) = arrival {
        if arrival.travelling.axis > axis || arrival.travelling == direction.reversed() {
            return Step::Illegal;
        }
        if arrival.travelling == direction {
            vc = arrival.vc;
        }
    }
    if torus.crosses_dateline(a.on(axis), direction) {
        if vc == VirtualChannel::BEHIND_DATELINE {
            return Step::Illegal;
        }
        vc = VirtualChannel::BEHIND_DATELINE;
    }
    Step::Forward(direction, vc)
}

/// Hops of a route, or `None` if a ring of two has no link in the chosen sense.
#[must_use]
pub fn hops(torus: &Dimensions, from: NodeNumber, to: NodeNumber, signs: Signs) -> Option<u32> {
    let (a, b) = (torus.coordinates(from), torus.coordinates(to));
    let mut total = 0;
    for axis in Axis::ALL {
        let size = u32::from(torus.size(axis));
        let (here, there) = (u32::from(a.on(axis)), u32::from(b.on(axis)));
        if here == there {
            continue;
        }
        if size == 2 && (here == 0) != (signs.on(axis) == Sign::Plus) {
            return None;
        }
        total += match signs.on(axis) {
            Sign::Plus => (there + size - here) % size,
            Sign::Minus => (here + size - there) % size,
        };
    }
    Some(total)
}

/// Channels of the route in order, or `None` if it needs a link that is dead or does not exist.
#[must_use]
pub fn channels(
    torus: &Dimensions,
    dead: &DeadSet,
    from: NodeNumber,
    to: NodeNumber,
    signs: Signs,
) -> Option<Vec<ChannelName>> {
    let mut route = Vec::new();
    follow(torus, dead, from, to, signs, |channel| route.push(channel))?;
    Some(route)
}

/// Whether all links of the route live.
#[must_use]
pub fn is_live(torus: &Dimensions, dead: &DeadSet, from: NodeNumber, to: NodeNumber, signs: Signs) -> bool {
    follow(torus, dead, from, to, signs, |_| {}).is_some()
}

fn follow(
    torus: &Dimensions,
    dead: &DeadSet,
    from: NodeNumber,
    to: NodeNumber,
    signs: Signs,
    mut visit: impl FnMut(ChannelName),
) -> Option<()> {
    let (mut here, mut arrival) = (from, None);
    loop {
        match next(torus, here, to, signs, arrival) {
            Step::Arrived => return Some(()),
            Step::Illegal => return None,
            Step::Forward(direction, vc) => {
                let neighbour = dead.live_neighbour(torus, here, direction)?;
                visit(ChannelName { node: here, direction, vc });
                here = neighbour;
                arrival = Some(Arrival { travelling: direction, vc });
            }
        }
    }
}
