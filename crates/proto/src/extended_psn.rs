//! Packet sequence numbers extended to 64 bits.

use millstream_wire::Psn;

/// Position of a packet in one direction of a connection. The low 24 bits are the PSN; unlike PSNs, sequence
/// numbers are ordered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ExtendedPsn(u64);

impl ExtendedPsn {
    /// The first packet of a connection. It starts at 2²⁴, so that earlier positions exist.
    pub(crate) const fn first(psn: Psn) -> Self {
        Self((1 << 24) + psn.get() as u64)
    }

    /// The position nearest to `self` with this PSN: at most 2²³ before it, less than 2²³ after it (9.7.1).
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

    /// Packets from `earlier`, which is not after `self`, to `self`.
    #[inline]
    pub(crate) const fn since(self, earlier: Self) -> u32 {
        (self.0 - earlier.0) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_position_wraps_around() {
        let at = ExtendedPsn::first(Psn::new(0xff_fffe));
        assert_eq!(at.nearest(Psn::new(1)), at.plus(3));
        assert_eq!(at.plus(3).nearest(Psn::new(0xff_fffe)), at);
        let zero = ExtendedPsn::first(Psn::new(0));
        assert_eq!(zero.nearest(Psn::new(0xff_ffff)), zero.before());
        assert_eq!(zero.nearest(Psn::new(0x80_0000)).plus(0x80_0000), zero, "half a turn is behind");
    }

    #[test]
    fn distance_counts_the_packets_between_two_positions() {
        let at = ExtendedPsn::first(Psn::new(0xff_fffe));
        assert_eq!(at.since(at), 0);
        assert_eq!(at.plus(3).since(at), 3);
    }
}
