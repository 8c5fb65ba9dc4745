//! ICRCs compared with zlib and with captured packets.

use millstream_wire::icrc::{Flow, digest_headers};
use millstream_wire::{Opcode, Packet};

fn flow(source: &str, destination: &str, port: u16) -> Flow {
    Flow::new((source.parse().unwrap(), port), (destination.parse().unwrap(), 4791)).unwrap()
}

fn hex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

#[test]
fn over_ipv4() {
    let flow = flow("10.0.0.1", "10.0.0.2", 49152);
    let send = hex("0430ffff000000118012345668656c6c6f000000");
    assert_eq!(flow.icrc(&send, 0), [0xb2, 0x22, 0xdc, 0xe0]);
    assert_eq!(flow.icrc(&send, 0x1234), [0x23, 0x8b, 0xf8, 0x99], "with an identification");
}

#[test]
fn over_ipv6() {
    let flow = flow("fe80::1", "2001:db8::42", 0xc001);
    let ack = hex("1140ffff00abcdef00ffffff1f000007");
    assert_eq!(flow.icrc(&ack, 0), [0x50, 0x06, 0xc0, 0xa3]);
}

#[test]
fn over_a_long_packet() {
    let mut write = hex("0a00ffff000000178000000500007f0011223344deadbeef000003e8");
    write.extend((0..1000_u32).map(|i| (i * 7) as u8));
    assert_eq!(flow("192.168.7.1", "192.168.7.200", 55555).icrc(&write, 0), [0x50, 0x13, 0x52, 0x02]);
}

#[test]
fn icrc_ignores_congestion_bits_only() {
    let flow = flow("10.0.0.1", "10.0.0.2", 49152);
    let mut packet = hex("0430ffff000000118012345668656c6c6f000000b222dce0");
    assert!(flow.verify(&Packet::new_checked(&packet).unwrap(), 0));
    packet[4] = 0xc0;
    assert!(flow.verify(&Packet::new_checked(&packet).unwrap(), 0), "congestion marks");
    for at in (0..packet.len()).filter(|at| *at != 4) {
        packet[at] ^= 0x40;
        if let Ok(changed) = Packet::new_checked(&packet) {
            assert!(!flow.verify(&changed, 0), "byte {at}");
        }
        packet[at] ^= 0x40;
    }
}

#[test]
fn icrc_of_received_headers() {
    let send = hex("0430ffff000000118012345668656c6c6f000000");
    // Type of service, time to live and checksums as modified by a network.
    let headers =
        hex("450200341234400039116666 0a000001 0a000002 c00012b700201234".replace(' ', "").as_str());
    assert_eq!(digest_headers(&headers).unwrap().finish(&send), [0x23, 0x8b, 0xf8, 0x99]);
    let ack = hex("1140ffff00abcdef00ffffff1f000007");
    let mut headers = hex("6a1234560000113f");
    headers[5] = 28;
    headers.extend("fe80::1".parse::<std::net::Ipv6Addr>().unwrap().octets());
    headers.extend("2001:db8::42".parse::<std::net::Ipv6Addr>().unwrap().octets());
    headers.extend(hex("c00112b7001c1234"));
    assert_eq!(digest_headers(&headers).unwrap().finish(&ack), [0x50, 0x06, 0xc0, 0xa3]);
    for len in 0..headers.len() {
        assert!(digest_headers(&headers[..len]).is_none(), "{len} bytes");
    }
}

#[test]
fn address_families_must_match() {
    let (v4, v6) = ("10.0.0.1".parse().unwrap(), "fe80::1".parse().unwrap());
    assert!(Flow::new((v4, 1), (v6, 2)).is_none());
    let mapped = "::ffff:10.0.0.1".parse().unwrap();
    assert_eq!(Flow::new((mapped, 1), (v4, 2)), Flow::new((v4, 1), (v4, 2)), "a mapped address is IPv4");
}

/// A CNP of a ConnectX-4 Lx (from Scapy's tests), with its IPv4 header.
#[test]
fn icrc_of_a_hardware_cnp() {
    let headers =
        hex("45c2003c718c400040119161 0a001101 0a001201 000012b700280000".replace(' ', "").as_str());
    let packet =
        hex("8100ffff400001180000000000000000000000000000000000000000 82fd002a".replace(' ', "").as_str());
    let packet = Packet::new_checked(&packet).unwrap();
    assert_eq!(packet.opcode(), Opcode::CNP);
    assert!(packet.bth().becn() && !packet.bth().fecn());
    assert_eq!(digest_headers(&headers).unwrap().finish(packet.covered()), packet.icrc());
    let flow = flow("10.0.17.1", "10.0.18.1", 0);
    assert!(flow.verify(&packet, 0x718c));
}

/// A packet captured by Scapy's authors.
#[test]
fn icrc_of_a_captured_uc_packet() {
    let packet = hex("2460ffff000000d300cf1710463081 8be28935d90e9a95505401be885e500000 78f353f3"
        .replace(' ', "")
        .as_str());
    let packet = Packet::new_checked(&packet).unwrap();
    assert_eq!((packet.opcode(), packet.bth().pad()), (Opcode::UC_SEND_ONLY, 2));
    assert!(flow("192.168.0.7", "192.168.0.7", 49152).verify(&packet, 1144));
}

/// Lengths and identifications are added to a flow's CRC rather than computed over.
#[test]
fn flow_crc_matches_full_headers() {
    let packet = hex("0430ffff000000118012345668656c6c6f000000");
    let numbers = [0_u16, 1, 24, 0x80, 0xff, 0x100, 0x1234, 0x8000, 0xfeff];
    for len in numbers {
        for identification in numbers {
            let mut headers = hex("45000000000040004011000000000000000000000000000000000000");
            headers[2..4].copy_from_slice(&(len + 28).to_be_bytes());
            headers[4..6].copy_from_slice(&identification.to_be_bytes());
            headers[12..16].copy_from_slice(&[10, 0, 0, 1]);
            headers[16..20].copy_from_slice(&[10, 0, 0, 2]);
            headers[20..24].copy_from_slice(&[0xc0, 0x00, 0x12, 0xb7]);
            headers[24..26].copy_from_slice(&(len + 8).to_be_bytes());
            let begun = flow("10.0.0.1", "10.0.0.2", 49152).crc().begin(len, identification);
            let expected = digest_headers(&headers).unwrap();
            assert_eq!(begun, expected, "{len} bytes, {identification}");
            assert_eq!(begun.finish(&packet), expected.finish(&packet));
        }
        let mut headers = hex("60000000000011400000000000000000000000000000000000");
        headers.resize(48, 0);
        headers[4..6].copy_from_slice(&(len + 8).to_be_bytes());
        headers[8..24].copy_from_slice(&"fe80::1".parse::<std::net::Ipv6Addr>().unwrap().octets());
        headers[24..40].copy_from_slice(&"fe80::2".parse::<std::net::Ipv6Addr>().unwrap().octets());
        headers[40..44].copy_from_slice(&[0xc0, 0x00, 0x12, 0xb7]);
        headers[44..46].copy_from_slice(&(len + 8).to_be_bytes());
        let begun = flow("fe80::1", "fe80::2", 49152).crc().begin(len, 7);
        assert_eq!(begun, digest_headers(&headers).unwrap(), "{len} bytes over IPv6");
    }
}

#[test]
fn icrc_ignores_the_variant_byte() {
    let flow = flow("10.0.0.1", "10.0.0.2", 49152);
    let mut send = hex("0430ffff000000118012345668656c6c6f000000");
    for value in 0..=255 {
        send[4] = value;
        assert_eq!(flow.icrc(&send, 0), [0xb2, 0x22, 0xdc, 0xe0], "{value:#x}");
    }
}
