//! Packet sequence numbers without the circle.

use millstream_wire::Psn;

/// Where a packet stands in all that a queue pair ever sends in one direction. Its low 24 bits are the PSN;
/// unlike PSNs, such numbers have an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Sequence(u64);

impl Sequence {
    /// Where a connection begins. One turn ahead of zero, so that there is something before it.
    pub(crate) const fn first(psn: Psn) -> Self {
        Self((1 << 24) + psn.get() as u64)
    }

    /// The number next to `self` that has this PSN: at most 2²³ before it, and fewer than that after it (9.7.1).
    #[inline]
    pub(crate) const fn nearest(self, psn: Psn) -> Self {
        Self(self.0.wrapping_add_signed(psn.ahead_of(self.psn()) as i64))
    }

    #[inline]
    pub(crate) const fn psn(self) -> Psn {
        Psn::new(self.0 as u32)
    }

    #[inline]
    pub(crate) const fn plus(self, packets: u32) -> Self {
        Self(self.0 + packets as u64)
    }

    #[inline]
    pub(crate) const fn before(self) -> Self {
        Self(self.0 - 1)
    }

    /// Packets from `earlier`, which is not after it, to here.
    #[inline]
    pub(crate) const fn since(self, earlier: Self) -> u32 {
        (self.0 - earlier.0) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_is_found_across_the_end_of_the_circle() {
        let at = Sequence::first(Psn::new(0xff_fffe));
        assert_eq!(at.nearest(Psn::new(1)), at.plus(3));
        assert_eq!(at.plus(3).nearest(Psn::new(0xff_fffe)), at);
        let zero = Sequence::first(Psn::new(0));
        assert_eq!(zero.nearest(Psn::new(0xff_ffff)), zero.before());
        assert_eq!(zero.nearest(Psn::new(0x80_0000)).plus(0x80_0000), zero, "half a turn is behind");
    }
}
