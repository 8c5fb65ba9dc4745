//! Packets of Linux's rxe from a capture: parsed, ICRC checked, and emitted to the same bytes.
//! `captures/README.md` describes the capture.

use std::collections::BTreeSet;

use millstream_wire::{Packet, Repr, UDP_PORT, icrc};

/// The opcodes in the capture: no middle packets of long messages.
const OPCODES: &str = "RC_ACKNOWLEDGE RC_ATOMIC_ACKNOWLEDGE RC_COMPARE_SWAP RC_FETCH_ADD RC_READ_REQUEST \
    RC_READ_RESPONSE_FIRST RC_READ_RESPONSE_LAST RC_READ_RESPONSE_ONLY RC_SEND_FIRST RC_SEND_LAST RC_SEND_ONLY \
    RC_WRITE_FIRST RC_WRITE_LAST RC_WRITE_ONLY UC_SEND_FIRST UC_SEND_LAST UC_WRITE_FIRST UC_WRITE_LAST UD_SEND_ONLY \
    UD_SEND_ONLY_IMM";

/// The frames of a capture: a file header of 24 bytes, record headers of 16 with the length at 8.
fn frames(capture: &[u8]) -> impl Iterator<Item = &[u8]> {
    assert_eq!(capture[..4], 0xa1b2_c3d4_u32.to_le_bytes(), "a little-endian pcap with microseconds");
    let mut rest = &capture[24..];
    std::iter::from_fn(move || {
        let len = rest.get(8..12)?;
        let len = u32::from_le_bytes(len.try_into().unwrap()) as usize;
        let frame = &rest[16..16 + len];
        rest = &rest[16 + len..];
        Some(frame)
    })
}

/// IP and UDP headers of an Ethernet frame, and the UDP payload.
fn split(frame: &[u8]) -> (&[u8], &[u8]) {
    let ip = &frame[14..];
    let ip_len = if ip[0] >> 4 == 4 { usize::from(ip[0] & 15) * 4 } else { 40 };
    let udp = &ip[ip_len..];
    assert_eq!(udp[2..4], UDP_PORT.to_be_bytes());
    let udp_len = usize::from(u16::from_be_bytes([udp[4], udp[5]]));
    (&ip[..ip_len + 8], &udp[8..udp_len])
}

#[test]
fn rxe_packets_round_trip() {
    let mut seen = BTreeSet::new();
    let mut versions = [0; 2];
    for (index, frame) in frames(include_bytes!("captures/rxe-6.12.pcap")).enumerate() {
        let (headers, datagram) = split(frame);
        let packet = Packet::new_checked(datagram).unwrap_or_else(|error| panic!("packet {index}: {error}"));
        let icrc = icrc::digest_headers(headers).unwrap().finish(packet.covered());
        assert_eq!(icrc, packet.icrc(), "packet {index}");
        let repr = Repr::parse(&packet).unwrap_or_else(|error| panic!("packet {index}: {error}"));
        let mut again = vec![0; datagram.len()];
        repr.emit(&mut again);
        assert_eq!(again[..packet.covered().len()], *packet.covered(), "packet {index}: {repr:?}");
        seen.insert(format!("{:?}", packet.opcode()));
        versions[usize::from(headers[0] >> 4 == 6)] += 1;
    }
    assert!(versions.iter().all(|count| *count > 20), "packets over IPv4 and IPv6: {versions:?}");
    assert_eq!(seen.into_iter().collect::<Vec<_>>().join(" "), OPCODES);
}
