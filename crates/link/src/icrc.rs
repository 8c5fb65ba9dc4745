//! The invariant CRC: what sealed a packet, and what can be checked of it on a plain UDP socket.
//!
//! The ICRC covers the IP header, of which a UDP socket does not show everything. Addresses, lengths and
//! protocol are known; the type of service, time to live and checksums are masked. What remains in IPv4 is
//! the identification: zero from senders like this one, counting from the Linux kernel's rxe. A CRC is linear, so the
//! difference between the ICRC that came and the one computed for identification zero *is* the remainder of
//! the identification alone, shifted by the bytes behind it. Shifting it back shows whether there is a
//! 16-bit number that explains the difference, and which. So of a packet with an unknown
//! identification 16 of the 32 bits are checked, without privilege; for IPv6 all 32.
//!
//! InfiniBand Architecture Specification volume 1, 7.8.1; annex A17.3.3 for RoCEv2.

use std::cell::Cell;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::ROCE_PORT;

/// Bytes of an ICRC.
pub const ICRC_LEN: usize = 4;

/// Fewest bytes of a packet: base transport header and ICRC.
pub const MIN_PACKET: usize = 12 + ICRC_LEN;

/// Ethernet's polynomial (IEEE 802.3, 3.2.9), the highest power first bit: the order in which a byte's bits are sent.
const POLYNOMIAL: u32 = 0xedb8_8320;

/// Bytes from the end of IPv4's identification to the packet: flags, time to live, protocol, checksum,
/// addresses and the UDP header.
const BEHIND_IDENTIFICATION: usize = 14 + 8;

/// "Don't fragment" in IPv4's flags (RFC 791, 3.1).
const DONT_FRAGMENT: u16 = 0x4000;

/// What the ICRC covers of a packet's IP and UDP headers besides the packet's length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cover {
    /// Source address.
    pub source: IpAddr,
    /// Destination address; of the same family.
    pub destination: IpAddr,
    /// Source port.
    pub source_port: u16,
}

impl Cover {
    /// Computes the ICRC of a packet (without its last four bytes) under an IPv4 identification, which IPv6
    /// does not have.
    #[must_use]
    pub fn icrc(&self, identification: u16, packet: &[u8]) -> u32 {
        self.icrc_with(identification, DONT_FRAGMENT, packet)
    }

    fn icrc_with(&self, identification: u16, flags: u16, packet: &[u8]) -> u32 {
        // The masked local route header, the IP header, the UDP header and the first five bytes of the BTH,
        // of which byte 4 (FECN, BECN, reserved) is masked.
        let mut head = [0xff; 8 + 40 + 8 + 5];
        let udp = packet.len() + ICRC_LEN + 8;
        let ip = match (self.source, self.destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                ipv4(&mut head[8..], udp, identification, flags, source, destination)
            }
            (source, destination) => ipv6(&mut head[8..], udp, mapped(source), mapped(destination)),
        };
        let at = 8 + ip;
        head[at..at + 2].copy_from_slice(&self.source_port.to_be_bytes());
        head[at + 2..at + 4].copy_from_slice(&ROCE_PORT.to_be_bytes());
        head[at + 4..at + 6].copy_from_slice(&(udp as u16).to_be_bytes());
        // The UDP checksum is masked.
        head[at + 8..at + 12].copy_from_slice(&packet[..4]);
        let mut crc = crc32fast::Hasher::new();
        crc.update(&head[..at + 13]);
        crc.update(&packet[5..]);
        crc.finalize()
    }

    /// Computes a packet's ICRC and stores it in the packet's last four bytes.
    ///
    /// # Panics
    /// If the packet is shorter than [`MIN_PACKET`].
    pub fn seal(&self, identification: u16, packet: &mut [u8]) {
        assert!(packet.len() >= MIN_PACKET, "a packet of {} bytes", packet.len());
        let (body, icrc) = packet.split_at_mut(packet.len() - ICRC_LEN);
        icrc.copy_from_slice(&self.icrc(identification, body).to_le_bytes());
    }

    /// Whether a packet's ICRC can be right. `guess` is the identification to try first; any other that
    /// explains the ICRC will do.
    #[must_use]
    pub fn check(&self, guess: u16, packet: &[u8]) -> bool {
        self.identification(guess, packet).is_some()
    }

    /// The identification under which a packet's ICRC is right; zero for IPv6. None if there is none.
    #[must_use]
    pub fn identification(&self, guess: u16, packet: &[u8]) -> Option<u16> {
        if packet.len() < MIN_PACKET {
            return None;
        }
        let (body, icrc) = packet.split_at(packet.len() - ICRC_LEN);
        let came = u32::from_le_bytes(icrc.try_into().expect("split at four bytes"));
        let difference = came ^ self.icrc(guess, body);
        if difference == 0 {
            return Some(if self.source.is_ipv4() { guess } else { 0 });
        }
        if !self.source.is_ipv4() {
            return None;
        }
        let explained = |difference| explain(difference, BEHIND_IDENTIFICATION + body.len());
        explained(difference).map(|change| guess ^ change).or_else(|| {
            // Rare: a sender that lets routers fragment.
            explained(came ^ self.icrc_with(guess, 0, body)).map(|change| guess ^ change)
        })
    }
}

/// Writes the header as the ICRC sees it; returns its length.
fn ipv4(
    to: &mut [u8],
    udp: usize,
    identification: u16,
    flags: u16,
    source: Ipv4Addr,
    destination: Ipv4Addr,
) -> usize {
    to[0] = 0x45;
    // Type of service, time to live and checksum stay masked.
    to[2..4].copy_from_slice(&((20 + udp) as u16).to_be_bytes());
    to[4..6].copy_from_slice(&identification.to_be_bytes());
    to[6..8].copy_from_slice(&flags.to_be_bytes());
    to[9] = libc::IPPROTO_UDP as u8;
    to[12..16].copy_from_slice(&source.octets());
    to[16..20].copy_from_slice(&destination.octets());
    20
}

fn ipv6(to: &mut [u8], udp: usize, source: Ipv6Addr, destination: Ipv6Addr) -> usize {
    // Version 6; traffic class, flow label and hop limit stay masked.
    to[0] = 0x6f;
    to[4..6].copy_from_slice(&(udp as u16).to_be_bytes());
    to[6] = libc::IPPROTO_UDP as u8;
    to[8..24].copy_from_slice(&source.octets());
    to[24..40].copy_from_slice(&destination.octets());
    40
}

fn mapped(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    }
}

/// The change of a 16-bit field that makes this difference of two CRCs, when `behind` bytes follow the field.
///
/// Polynomials over GF(2) modulo the CRC's: a field f contributes f·x^(8·behind)·x³². x has an inverse, so
/// f = difference · x^(−8·behind − 32), and there is such a field exactly if that is of degree below 16.
fn explain(difference: u32, behind: usize) -> Option<u16> {
    thread_local! {
        /// For the last length, which is mostly the next one's.
        static LAST: Cell<(usize, u32)> = const { Cell::new((usize::MAX, 0)) };
    }
    let power = LAST.with(|last| match last.get() {
        (known, power) if known == behind => power,
        _ => {
            let power = inverse_power(8 * behind as u32 + 32);
            last.set((behind, power));
            power
        }
    });
    let field = multiply(power, difference);
    // The coefficient of x^k is bit 31 − k: the first bit sent is the lowest of the upper half.
    (field & 0xffff == 0).then(|| ((field >> 16) as u16).swap_bytes())
}

/// The product of two polynomials modulo the CRC's.
fn multiply(a: u32, mut b: u32) -> u32 {
    let mut product = 0;
    for k in 0..32 {
        // Coefficient of x^k in `a`.
        product ^= b & 0u32.wrapping_sub(a >> (31 - k) & 1);
        b = times_x(b);
    }
    product
}

const fn times_x(a: u32) -> u32 {
    (a >> 1) ^ (POLYNOMIAL & 0u32.wrapping_sub(a & 1))
}

/// The inverse of x: the polynomial's constant term is one, so x · (P − 1)/x = −1 = 1.
const INVERSE_X: u32 = {
    // P without its constant term (bit 31) divided by x, with x^32 becoming x^31 (bit 0).
    (POLYNOMIAL << 1) | 1
};

/// x^(−n).
fn inverse_power(n: u32) -> u32 {
    let mut square = INVERSE_X;
    let mut power = 1 << 31;
    let mut n = n;
    while n != 0 {
        if n & 1 == 1 {
            power = multiply(power, square);
        }
        square = multiply(square, square);
        n >>= 1;
    }
    power
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn v4() -> Cover {
        Cover {
            source: IpAddr::from([10, 0, 0, 1]),
            destination: IpAddr::from([10, 0, 0, 2]),
            source_port: 50_000,
        }
    }

    #[test]
    fn x_has_an_inverse() {
        assert_eq!(times_x(INVERSE_X), 1 << 31);
        assert_eq!(multiply(inverse_power(77), (0..77).fold(1 << 31, |a, _| times_x(a))), 1 << 31);
    }

    proptest! {
        #[test]
        fn finds_the_identification(id: u16, guess: u16, body in proptest::collection::vec(any::<u8>(), 12..300)) {
            let mut packet = body;
            packet.extend([0; 4]);
            v4().seal(id, &mut packet);
            prop_assert_eq!(v4().identification(guess, &packet), Some(id));
        }

        #[test]
        fn one_wrong_bit_is_never_explained(id: u16, bit in 0usize..12 * 8, len in 16usize..2000) {
            let mut packet = vec![0x5a; len];
            v4().seal(id, &mut packet);
            // The masked byte may change on the way.
            prop_assume!(bit / 8 != 4);
            packet[bit / 8] ^= 1 << (bit % 8);
            let found = v4().identification(0, &packet);
            prop_assert_eq!(found, None);
        }

        #[test]
        fn ipv6_has_no_freedom(body in proptest::collection::vec(any::<u8>(), 12..300), flip in 1u32..) {
            let cover = Cover { source: IpAddr::from([1; 16]), destination: IpAddr::from([2; 16]), source_port: 1 };
            let mut packet = body;
            packet.extend([0; 4]);
            cover.seal(0, &mut packet);
            prop_assert!(cover.check(0, &packet));
            let at = packet.len() - 4;
            let came = u32::from_le_bytes(packet[at..].try_into().unwrap());
            packet[at..].copy_from_slice(&(came ^ flip).to_le_bytes());
            prop_assert!(!cover.check(0, &packet));
        }
    }

    #[test]
    fn random_damage_passes_one_time_in_thirty_thousand() {
        let mut packet = vec![7; 100];
        v4().seal(0, &mut packet);
        let mut passed = 0;
        for i in 0..200_000u32 {
            let at = packet.len() - 4;
            let damage = i.wrapping_mul(2_654_435_761).rotate_left(7) | 1;
            let mut damaged = packet.clone();
            let came = u32::from_le_bytes(damaged[at..].try_into().unwrap());
            damaged[at..].copy_from_slice(&(came ^ damage).to_le_bytes());
            passed += u32::from(v4().check(0, &damaged));
        }
        // With and without "don't fragment": 2 in 65,536.
        assert!(passed < 30, "{passed} of 200,000");
    }
}
