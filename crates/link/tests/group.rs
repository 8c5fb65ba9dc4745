//! Several members on one port of this host, over loopback.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::time::{Duration, Instant};

use millstream_link::{JoinError, Link, Outgoing, RxBuffers, Udp};
use millstream_shm::{poll_readable, random_u64};

/// A port that no other test uses.
fn port() -> u16 {
    loop {
        let port = 10_000 + (random_u64() % 20_000) as u16;
        if UdpSocket::bind((Ipv6Addr::UNSPECIFIED, port)).is_ok() {
            return port;
        }
    }
}

const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// A packet of `len` bytes for a queue pair, with a number behind the base transport header.
fn packet(qpn: u32, number: u32, len: usize) -> Vec<u8> {
    let mut packet = vec![0x11; len];
    packet[4..8].copy_from_slice(&qpn.to_be_bytes());
    packet[12..16].copy_from_slice(&number.to_be_bytes());
    packet
}

fn number(packet: &[u8]) -> u32 {
    u32::from_be_bytes(packet[12..16].try_into().unwrap())
}

fn send(from: &Udp, to: IpAddr, segment: usize, bytes: &mut [u8]) {
    let batch = Outgoing { source: to, destination: to, interface: 0, tos: 2, segment, bytes };
    assert_eq!(from.send(&mut [batch]).unwrap(), 1);
}

/// The numbers of the packets that arrive, up to `count` of them or for a second.
fn receive(at: &Udp, count: usize) -> Vec<u32> {
    let mut inbox = RxBuffers::new(8);
    let mut numbers = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(if count == 0 { 0 } else { 5 });
    loop {
        at.receive(&mut inbox).unwrap();
        numbers
            .extend(inbox.received().flat_map(|r| r.packets().map(|(_, p)| number(p)).collect::<Vec<_>>()));
        let now = Instant::now();
        if numbers.len() >= count || now > deadline {
            return numbers;
        }
        poll_readable(&at.descriptors(), Some(deadline - now)).unwrap();
    }
}

#[test]
fn each_member_gets_its_packets() {
    let port = port();
    let blocks = [0x111, 0xabc, 0x001, 0xffe, 0x800];
    let members = blocks.map(|qpn_prefix| Udp::join_port(qpn_prefix, port).unwrap());
    for to in [LOCALHOST, Ipv6Addr::LOCALHOST.into()] {
        for (i, qpn_prefix) in blocks.iter().enumerate() {
            for sender in &members {
                let mut bytes = packet(u32::from(*qpn_prefix) << 12 | 5, i as u32, 64);
                send(sender, to, 64, &mut bytes);
            }
        }
        for (i, member) in members.iter().enumerate() {
            assert_eq!(receive(member, 5), [i as u32; 5]);
            assert_eq!(receive(member, 0), [], "nothing else");
            let counts = member.counts();
            assert_eq!(
                (counts.forwarded_out, counts.forwarded_in),
                (0, 0),
                "steered by the kernel: {counts}"
            );
        }
    }
}

#[test]
fn batch_arrives_in_order_with_its_origin() {
    let port = port();
    let [a, b] = [0x10, 0x20].map(|qpn_prefix| Udp::join_port(qpn_prefix, port).unwrap());
    let mut bytes: Vec<u8> = (0..40).flat_map(|i| packet(0x20 << 12, i, 1040)).collect();
    bytes.truncate(39 * 1040 + 100);
    send(&a, LOCALHOST, 1040, &mut bytes);
    let mut inbox = RxBuffers::new(64);
    poll_readable(&b.descriptors(), Some(Duration::from_secs(5))).unwrap();
    b.receive(&mut inbox).unwrap();
    let mut numbers = Vec::new();
    for received in inbox.received() {
        assert_eq!((received.info.source, received.info.destination), (LOCALHOST, LOCALHOST));
        assert_eq!((received.info.source_port, received.info.tos), (a.source_port(), 2));
        numbers.extend(received.packets().map(|(_, packet)| (number(packet), packet.len())));
    }
    let expected: Vec<_> = (0..40).map(|i| (i, if i < 39 { 1040 } else { 100 })).collect();
    assert_eq!(numbers, expected);
    assert_eq!(a.counts().sent, 40);
    assert_eq!(b.counts().received, 40);
}

#[test]
fn socket_of_a_dead_member_is_taken_over() {
    let port = port();
    let first = Udp::join_port(0x1, port).unwrap();
    let second = Udp::join_port(0x2, port).unwrap();
    let third = Udp::join_port(0x3, port).unwrap();
    drop(second);
    // Closing its socket would have moved the index of the third.
    send(&first, LOCALHOST, 64, &mut packet(0x3 << 12, 7, 64));
    assert_eq!(receive(&third, 1), [7]);
    // This packet is lost; it does not reach the process that joins.
    send(&first, LOCALHOST, 64, &mut packet(0x2 << 12, 8, 64));
    let fourth = Udp::join_port(0x4, port).unwrap();
    assert_eq!(receive(&fourth, 0), []);
    drop(first);
    for (qpn, member) in [(0x4 << 12, &fourth), (0x3 << 12, &third)] {
        send(&third, LOCALHOST, 64, &mut packet(qpn, 9, 64));
        assert_eq!(receive(member, 1), [9]);
        assert_eq!(member.counts().forwarded_in, 0);
    }
    drop((third, fourth));
    // After the last member's exit, a new group starts.
    let fifth = Udp::join_port(0x5, port).unwrap();
    send(&fifth, LOCALHOST, 64, &mut packet(0x5 << 12, 10, 64));
    assert_eq!(receive(&fifth, 1), [10]);
}

#[test]
fn unknown_prefixes_go_to_the_shared_socket() {
    let port = port();
    let members = [0x1, 0x2, 0x3].map(|qpn_prefix| Udp::join_port(qpn_prefix, port).unwrap());
    for i in 0..9 {
        send(&members[0], LOCALHOST, 64, &mut packet(1, i, 64));
    }
    let deadline = Instant::now() + Duration::from_secs(5);
    let mut numbers = Vec::new();
    while numbers.len() < 9 && Instant::now() < deadline {
        members.iter().for_each(|member| numbers.extend(receive(member, 0)));
    }
    numbers.sort_unstable();
    assert_eq!(numbers, (0..9).collect::<Vec<_>>(), "queue pair 1: each datagram once");
    // For a process that does not exist, and for no process.
    send(&members[0], LOCALHOST, 64, &mut packet(0x77 << 12, 0, 64));
    let mut stub = [0; 7];
    send(&members[0], LOCALHOST, 64, &mut stub);
    let dropped = || members.iter().map(|m| m.counts()).map(|c| (c.unknown_destination, c.truncated));
    while dropped().fold((0, 0), |sum, c| (sum.0 + c.0, sum.1 + c.1)) != (1, 1) {
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn misdirected_packets_are_forwarded() {
    let port = port();
    let [a, b] = [0x1, 0x2].map(|qpn_prefix| Udp::join_port(qpn_prefix, port).unwrap());
    let info = millstream_link::PacketInfo {
        source: [10, 1, 2, 3].into(),
        source_port: 50_000,
        destination: LOCALHOST,
        interface: 3,
        tos: 1,
    };
    a.forward(0x2, &info, &packet(1, 5, 64)).unwrap();
    let nobody = a.forward(0x9, &info, &packet(1, 5, 64)).unwrap_err();
    assert_eq!(nobody.kind(), std::io::ErrorKind::ConnectionRefused);
    assert_eq!(receive(&b, 1), [5]);
    assert_eq!(
        (b.counts().forwarded_in, a.counts().forwarded_out, a.counts().unknown_destination),
        (1, 1, 1)
    );
}

#[test]
fn concurrent_joins_and_leaves() {
    let port = port();
    let anchor = Udp::join_port(0xf00, port).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..8u16 {
            scope.spawn(move || {
                for turn in 0..10u16 {
                    let qpn_prefix = 1 + thread * 100 + turn;
                    let member = Udp::join_port(qpn_prefix, port).unwrap();
                    send(
                        &member,
                        LOCALHOST,
                        64,
                        &mut packet(u32::from(qpn_prefix) << 12, qpn_prefix.into(), 64),
                    );
                    assert_eq!(receive(&member, 1), [u32::from(qpn_prefix)]);
                }
            });
        }
    });
    send(&anchor, LOCALHOST, 64, &mut packet(0xf00 << 12, 1, 64));
    assert_eq!(receive(&anchor, 1), [1]);
    assert_eq!(anchor.counts().forwarded_in, 0);
}

#[test]
fn join_errors_name_the_conflict() {
    let port = port();
    let _member = Udp::join_port(0x1, port).unwrap();
    assert!(matches!(Udp::join_port(0x1, port), Err(JoinError::PrefixInUse { qpn_prefix: 0x1 })));

    let other = self::port();
    let _socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, other)).unwrap();
    let error = Udp::join_port(0x1, other).unwrap_err();
    assert!(matches!(error, JoinError::ForeignSockets { found: 1, known: 0, .. }), "{error}");
}
