//! Numbers with a width and a meaning.

use core::fmt;

/// A packet sequence number: 24 bits, counted in a circle (9.7.1).
///
/// There is no order among such numbers, only a distance: of two numbers, one is ahead of the other by
/// fewer than 2²³.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Psn(u32);

impl Psn {
    /// The low 24 bits.
    #[inline]
    #[must_use]
    pub const fn new(value: u32) -> Self {
        Self(value & 0xff_ffff)
    }

    /// As an integer.
    #[inline]
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The number `n` packets later.
    #[inline]
    #[must_use]
    pub const fn plus(self, n: u32) -> Self {
        Self::new(self.0.wrapping_add(n))
    }

    /// How far this number is ahead of `other`; negative if it is behind. Between −2²³ and 2²³ − 1.
    #[inline]
    #[must_use]
    pub const fn ahead_of(self, other: Self) -> i32 {
        // The difference's sign bit, moved to where integers have theirs.
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
        pub struct $name($int);

        impl $name {
            /// From an integer, cut to the number's width.
            #[inline]
            #[must_use]
            pub const fn new(value: $int) -> Self {
                Self(value & $mask)
            }

            /// As an integer.
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
    /// A message sequence number: 24 bits, how many messages a responder has completed (9.7.7.1).
    Msn(u32), mask 0xff_ffff
}
number! {
    /// The key that datagrams must show (9.6.1.4): 32 bits; with the highest one, only privileged
    /// programs may send it.
    Qkey(u32), mask u32::MAX
}
number! {
    /// The key that lets a peer use memory (9.4.1.1.3).
    Rkey(u32), mask u32::MAX
}
number! {
    /// A partition key: the partition's number, and above it whether the port is a full member.
    Pkey(u16), mask u16::MAX
}

impl Pkey {
    /// The partition that every port is a full member of; the only one on RoCE.
    pub const DEFAULT: Self = Self(0xffff);

    /// Whether two ports with these keys may talk (10.9.3): the same partition, and one a full member.
    #[inline]
    #[must_use]
    pub const fn matches(self, other: Self) -> bool {
        (self.0 ^ other.0) & 0x7fff == 0 && (self.0 | other.0) & 0x8000 != 0
    }
}

impl Qpn {
    /// The queue pair of the general services interface, which connection managers use.
    pub const GSI: Self = Self(1);
}

impl Msn {
    /// The next one.
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
    fn distances_wrap_at_24_bits() {
        let near_end = Psn::new(0xff_ffff);
        assert_eq!(near_end.plus(1), Psn::new(0));
        assert_eq!(Psn::new(0).ahead_of(near_end), 1);
        assert_eq!(near_end.ahead_of(Psn::new(0)), -1);
        assert_eq!(Psn::new(0x7f_ffff).ahead_of(Psn::new(0)), 0x7f_ffff);
        assert_eq!(Psn::new(0x80_0000).ahead_of(Psn::new(0)), -0x80_0000);
        assert_eq!(Psn::new(u32::MAX).get(), 0xff_ffff);
    }

    #[test]
    fn partitions() {
        assert!(Pkey::DEFAULT.matches(Pkey::new(0x7fff)));
        assert!(!Pkey::new(0x7fff).matches(Pkey::new(0x7fff)), "two limited members");
        assert!(!Pkey::DEFAULT.matches(Pkey::new(0x8001)));
    }
}
