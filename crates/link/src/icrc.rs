//! Computing and checking the invariant CRC with a plain UDP socket.
//!
//! The ICRC covers the IP header, which a UDP socket does not report completely. Addresses, lengths and
//! protocol are known; type of service, time to live and checksums are masked. Only the IPv4 identification
//! is unknown: it is zero from senders like this one, and counts up from the kernel's rxe. A CRC is linear.
//! So the received ICRC differs from the one for identification zero by the contribution of the
//! identification, shifted by the bytes behind it. Shifting it back shows whether a 16-bit number matches
//! the difference. So, without privileges, 16 bits of the ICRC are checked for IPv4 packets with an unknown
//! identification, and all 32 for IPv6.
//!
//! InfiniBand Architecture Specification volume 1, 7.8.1; annex A17.3.3 for RoCEv2.

use std::cell::Cell;
use std::net::IpAddr;

use millstream_wire::icrc::{Flow, FlowCrc};
use millstream_wire::{ICRC_LEN, UDP_PORT, bth};

/// Shortest packet: base transport header and ICRC.
pub const MIN_PACKET: usize = bth::LEN + ICRC_LEN;

/// Ethernet's polynomial (IEEE 802.3, 3.2.9) in reflected form.
const POLYNOMIAL: u32 = 0xedb8_8320;

/// Bytes from the end of the IPv4 identification to the packet: flags, time to live, protocol, checksum,
/// addresses and the UDP header.
const BEHIND_IDENTIFICATION: usize = 14 + 8;

/// The flow to the RoCEv2 port; `None` if the address families differ.
#[must_use]
pub fn flow(source: IpAddr, source_port: u16, destination: IpAddr) -> Option<FlowCrc> {
    Some(Flow::new((source, source_port), (destination, UDP_PORT))?.crc())
}

/// Computes a packet's ICRC and stores it in the packet's last four bytes.
///
/// # Panics
/// If the packet is shorter than [`MIN_PACKET`].
pub fn seal(flow: &FlowCrc, identification: u16, packet: &mut [u8]) {
    assert!(packet.len() >= MIN_PACKET, "a packet of {} bytes", packet.len());
    let (body, icrc) = packet.split_at_mut(packet.len() - ICRC_LEN);
    icrc.copy_from_slice(&flow.icrc(body, identification));
}

/// The identification that matches a packet's ICRC, zero for IPv6; `None` if there is none. `guess` is tried
/// first.
#[must_use]
pub fn identification(flow: &FlowCrc, guess: u16, packet: &[u8]) -> Option<u16> {
    if packet.len() < MIN_PACKET {
        return None;
    }
    let (body, icrc) = packet.split_at(packet.len() - ICRC_LEN);
    let number = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().expect("an ICRC has four bytes"));
    let difference = number(icrc) ^ number(&flow.icrc(body, guess));
    match (flow.is_v4(), difference) {
        (false, difference) => (difference == 0).then_some(0),
        (true, 0) => Some(guess),
        (true, _) => {
            matching_change(difference, BEHIND_IDENTIFICATION + body.len()).map(|change| guess ^ change)
        }
    }
}

/// The value of a 16-bit field that matches the difference of two CRCs, when `behind` bytes follow the
/// field.
///
/// Polynomials over GF(2) modulo the CRC's: a field f contributes f·x^(8·behind)·x³². x has an inverse, so f
/// = difference · x^(−8·behind − 32), and such a field exists exactly if that has a degree below 16.
fn matching_change(difference: u32, behind: usize) -> Option<u16> {
    thread_local! {
        /// Result for the last length, which is mostly that of the next packet.
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

    fn v4() -> FlowCrc {
        flow([10, 0, 0, 1].into(), 50_000, [10, 0, 0, 2].into()).unwrap()
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
            seal(&v4(), id, &mut packet);
            prop_assert_eq!(identification(&v4(), guess, &packet), Some(id));
        }

        #[test]
        fn a_bit_error_matches_no_identification(id: u16, bit in 0usize..12 * 8, len in 16usize..2000) {
            let mut packet = vec![0x5a; len];
            seal(&v4(), id, &mut packet);
            // Switches may change the masked byte (BTH resv8a).
            prop_assume!(bit / 8 != 4);
            packet[bit / 8] ^= 1 << (bit % 8);
            let found = identification(&v4(), 0, &packet);
            prop_assert_eq!(found, None);
        }

        #[test]
        fn ipv6_packets_have_no_identification(body in proptest::collection::vec(any::<u8>(), 12..300), flip in 1u32..) {
            let flow = flow(IpAddr::from([1; 16]), 1, IpAddr::from([2; 16])).unwrap();
            let mut packet = body;
            packet.extend([0; 4]);
            seal(&flow, 0, &mut packet);
            prop_assert_eq!(identification(&flow, 0, &packet), Some(0));
            let at = packet.len() - 4;
            let came = u32::from_le_bytes(packet[at..].try_into().unwrap());
            packet[at..].copy_from_slice(&(came ^ flip).to_le_bytes());
            prop_assert_eq!(identification(&flow, 0, &packet), None);
        }
    }

    #[test]
    fn random_damage_passes_one_time_in_65536() {
        let mut packet = vec![7; 100];
        seal(&v4(), 0, &mut packet);
        let mut passed = 0;
        for i in 0..200_000u32 {
            let at = packet.len() - 4;
            let damage = i.wrapping_mul(2_654_435_761).rotate_left(7) | 1;
            let mut damaged = packet.clone();
            let came = u32::from_le_bytes(damaged[at..].try_into().unwrap());
            damaged[at..].copy_from_slice(&(came ^ damage).to_le_bytes());
            passed += u32::from(identification(&v4(), 0, &damaged).is_some());
        }
        assert!(passed < 15, "{passed} of 200,000");
    }
}
