//! Round-robin arbitration over the inputs of each output.

use crate::port::INJECTION_PORTS;
use crate::route::VirtualChannel;
use crate::topology::{DIRECTIONS, Direction};

const RINGS: usize = DIRECTIONS * VirtualChannel::COUNT;
/// Inputs: one per receive ring, then one per port, output and virtual channel.
const INPUTS: usize = RINGS * (1 + INJECTION_PORTS);
const TRANSIT: u128 = (1 << RINGS) - 1;

/// An input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct InputIndex(pub(super) usize);

impl InputIndex {
    /// The receive ring, unless the input is an injection queue.
    pub(super) fn ring(self) -> Option<usize> {
        (self.0 < RINGS).then_some(self.0)
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct Arbiter {
    /// Per output and virtual channel: inputs whose head wants it, one bit each.
    requests: [[u128; VirtualChannel::COUNT]; DIRECTIONS],
    /// Per output: the input after the last granted one.
    next: [u32; DIRECTIONS],
}

impl Arbiter {
    pub(super) fn request(&mut self, output: Direction, vc: VirtualChannel, input: InputIndex) {
        self.requests[output.index()][vc.index()] |= 1 << input.0;
    }

    pub(super) fn clear(&mut self) {
        self.requests = Default::default();
    }

    /// Takes one request whose virtual channel has a credit. If a requesting ring is more than half full, transit goes
    /// before injection.
    pub(super) fn grant(
        &mut self,
        output: Direction,
        has_credit: impl Fn(VirtualChannel) -> bool,
        pressed: impl Fn(usize) -> bool,
        pick: Option<&mut dyn FnMut(u128) -> u32>,
    ) -> Option<(InputIndex, VirtualChannel)> {
        let requests = &mut self.requests[output.index()];
        let mut candidates = (0..VirtualChannel::COUNT)
            .filter(|&vc| requests[vc] != 0 && has_credit(VirtualChannel(vc as u8)))
            .fold(0, |all, vc| all | requests[vc]);
        if candidates & TRANSIT != 0
            && candidates & !TRANSIT != 0
            && (0..RINGS).any(|i| candidates >> i & 1 == 1 && pressed(i))
        {
            candidates &= TRANSIT;
        }
        if candidates == 0 {
            return None;
        }
        let next = &mut self.next[output.index()];
        let input = match pick {
            Some(pick) => pick(candidates),
            None => match candidates >> *next {
                0 => candidates.trailing_zeros(),
                behind => *next + behind.trailing_zeros(),
            },
        };
        *next = (input + 1) % INPUTS as u32;
        let bit = 1_u128.checked_shl(input)? & candidates;
        let vc = (0..VirtualChannel::COUNT).find(|&vc| requests[vc] & bit != 0)?;
        requests[vc] &= !bit;
        Some((InputIndex(input as usize), VirtualChannel(vc as u8)))
    }
}
