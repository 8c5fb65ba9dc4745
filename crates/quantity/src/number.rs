//! Numbers of the RDMA transport, each cut to its width (IBTA volume 1, chapter 9).

use core::fmt;

/// A packet sequence number: 24 bits, modulo 2²⁴ (9.7.1).
///
/// PSNs have a distance but no order: the distance between two PSNs is less than 2²³ in one direction.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Psn(u32);

impl Psn {
    /// Truncates an integer to 24 bits.
    #[inline]
    #[must_use]
    pub const fn new(value: u32) -> Self {
        Self(value & 0xff_ffff)
    }

    /// The PSN as an integer.
    #[inline]
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The PSN `n` packets later.
    #[inline]
    #[must_use]
    pub const fn plus(self, n: u32) -> Self {
        Self::new(self.0.wrapping_add(n))
    }

    /// The distance from `other` to this PSN, from −2²³ to 2²³ − 1; negative if this PSN is behind.
    #[inline]
    #[must_use]
    pub const fn ahead_of(self, other: Self) -> i32 {
        // Shifts bit 23, the sign of the difference, to bit 31 and back.
        ((self.0.wrapping_sub(other.0) << 8) as i32) >> 8
    }
}

impl fmt::Debug for Psn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Psn({})", self.0)
    }
}

macro_rules! number {
    ($(#[$meta:meta])* $name:ident($int:ty), mask $mask:expr) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(transparent)]
        pub struct $name($int);

        impl $name {
            /// Truncates an integer to the width of the number.
            #[inline]
            #[must_use]
            pub const fn new(value: $int) -> Self {
                Self(value & $mask)
            }

            /// The number as an integer.
            #[inline]
            #[must_use]
            pub const fn get(self) -> $int {
                self.0
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:#x})"), self.0)
            }
        }
    };
}

number! {
    /// A queue pair number: 24 bits.
    Qpn(u32), mask 0xff_ffff
}
number! {
    /// The number of a shared receive queue of an XRC domain: 24 bits (annex A14).
    Srqn(u32), mask 0xff_ffff
}
number! {
    /// A message sequence number: 24 bits, the count of messages that a responder has completed (9.7.7.1).
    Msn(u32), mask 0xff_ffff
}
number! {
    /// A Q_Key, which a datagram must carry (9.6.1.4). Only privileged programs may send one with bit 31 set.
    Qkey(u32), mask u32::MAX
}
number! {
    /// The local key of a memory region, for the scatter/gather elements of this process's work requests.
    Lkey(u32), mask u32::MAX
}
number! {
    /// The remote key of a memory region or window, given to peers that may access it (9.4.1.1.3).
    Rkey(u32), mask u32::MAX
}
number! {
    /// A partition key: bit 15 marks a full member, the other bits are the partition number.
    Pkey(u16), mask u16::MAX
}

impl Pkey {
    /// The default partition with full membership; the only one on RoCE.
    pub const DEFAULT: Self = Self(0xffff);

    /// Whether two ports may communicate (10.9.3): same partition, at least one full member.
    #[inline]
    #[must_use]
    pub const fn matches(self, other: Self) -> bool {
        (self.0 ^ other.0) & 0x7fff == 0 && (self.0 | other.0) & 0x8000 != 0
    }
}

impl Qpn {
    /// Queue pair 1, the general services interface, which connection managers use.
    pub const GSI: Self = Self(1);
}

impl fmt::Display for Qpn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#08x}", self.0)
    }
}

impl Msn {
    /// The MSN of the next message.
    #[inline]
    #[must_use]
    pub const fn next(self) -> Self {
        Self::new(self.0.wrapping_add(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn psn_distances_wrap_at_24_bits() {
        let near_end = Psn::new(0xff_ffff);
        assert_eq!(near_end.plus(1), Psn::new(0));
        assert_eq!(Psn::new(0).ahead_of(near_end), 1);
        assert_eq!(near_end.ahead_of(Psn::new(0)), -1);
        assert_eq!(Psn::new(0x7f_ffff).ahead_of(Psn::new(0)), 0x7f_ffff);
        assert_eq!(Psn::new(0x80_0000).ahead_of(Psn::new(0)), -0x80_0000);
        assert_eq!(Psn::new(u32::MAX).get(), 0xff_ffff);
    }

    #[test]
    fn pkeys_match_with_one_full_member() {
        assert!(Pkey::DEFAULT.matches(Pkey::new(0x7fff)));
        assert!(!Pkey::new(0x7fff).matches(Pkey::new(0x7fff)), "two limited members");
        assert!(!Pkey::DEFAULT.matches(Pkey::new(0x8001)));
    }
}
