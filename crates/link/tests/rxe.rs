//! ICRC checks of packets from Linux's rxe without their IP headers.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use millstream_link::icrc;

/// The frames of a capture: a file header of 24 bytes, record headers of 16 with the length at 8.
fn frames(mut capture: &[u8]) -> Vec<&[u8]> {
    capture = &capture[24..];
    let mut frames = Vec::new();
    while let Some(len) = capture.get(8..12) {
        let end = 16 + u32::from_le_bytes(len.try_into().unwrap()) as usize;
        frames.push(&capture[16..end]);
        capture = &capture[end..];
    }
    frames
}

#[test]
fn identification_of_rxe_is_found() {
    let capture = include_bytes!("../../wire/tests/captures/rxe-6.12.pcap");
    let mut counted = 0;
    for frame in frames(capture) {
        let ip = &frame[14..];
        let address = |at: usize, len: usize| -> IpAddr {
            match len {
                4 => Ipv4Addr::from(<[u8; 4]>::try_from(&ip[at..at + 4]).unwrap()).into(),
                _ => Ipv6Addr::from(<[u8; 16]>::try_from(&ip[at..at + 16]).unwrap()).into(),
            }
        };
        let (source, destination, header, true_identification) = match ip[0] >> 4 {
            4 => (address(12, 4), address(16, 4), 20, u16::from_be_bytes([ip[4], ip[5]])),
            _ => (address(8, 16), address(24, 16), 40, 0),
        };
        let udp = &ip[header..];
        let port = u16::from_be_bytes([udp[0], udp[1]]);
        let flow = icrc::flow(source, port, destination).unwrap();
        let packet = &udp[8..usize::from(u16::from_be_bytes([udp[4], udp[5]]))];
        assert_eq!(icrc::identification(&flow, 0, packet), Some(true_identification));
        counted += u32::from(true_identification != 0);

        let mut damaged = packet.to_vec();
        damaged[packet.len() / 2] ^= 0x10;
        assert_eq!(icrc::identification(&flow, 0, &damaged), None);
    }
    assert!(counted > 20, "{counted} packets with an identification");
}
