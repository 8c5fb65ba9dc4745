//! Several members on one port of this host, over loopback.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use millstream_link::{JoinError, Link, Outgoing, PacketInfo, RxBuffers, Service, Udp};
use millstream_shm::socket::{BoundSocket, Connection, Listener, own_uid};
use millstream_shm::{poll_readable, random_u64};
use millstream_wire::cm::Message;
use millstream_wire::{Opcode, Pkey, Psn, Qkey, Qpn, Repr, bth, deth};

/// A port that no other test uses.
fn port() -> u16 {
    loop {
        let port = 10_000 + (random_u64() % 20_000) as u16;
        let in_use = |error: &std::io::Error| error.kind() == std::io::ErrorKind::AddrInUse;
        let bound = match UdpSocket::bind((Ipv6Addr::UNSPECIFIED, port)) {
            // The kernel may be without IPv6.
            Err(error) if !in_use(&error) => UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port)),
            bound => bound,
        };
        match bound {
            Ok(_) => return port,
            Err(error) => assert!(in_use(&error), "port {port}: {error}"),
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
fn groups_of_a_dead_member_are_left() {
    // The loopback interface.
    const INTERFACE: u32 = 1;
    let port = port();
    let _keeper = Udp::join_port(0x1, port).unwrap();
    let groups = ["239.192.7.1", "ff0e::7:1"].map(|text| text.parse::<IpAddr>().unwrap());
    let former = Udp::join_port(0x2, port).unwrap();
    groups.iter().for_each(|group| former.join_multicast(*group, INTERFACE).unwrap());
    drop(former);
    let heir = Udp::join_port(0x3, port).unwrap();
    // A group that the socket belonged to would be refused.
    groups.iter().for_each(|group| heir.join_multicast(*group, INTERFACE).unwrap());
}

#[test]
fn a_prefix_that_was_used_before_has_one_socket() {
    let port = port();
    let keeper = Udp::join_port(0x100, port).unwrap();
    let former = [0x2, 0x3].map(|qpn_prefix| Udp::join_port(qpn_prefix, port).unwrap());
    drop(former);
    // There are two free sockets, and the second was that of this prefix.
    let again = Udp::join_port(0x3, port).unwrap();
    send(&keeper, LOCALHOST, 64, &mut packet(0x3 << 12, 5, 64));
    assert_eq!(receive(&again, 1), [5]);
    assert_eq!(again.counts().forwarded_in, 0);
}

#[test]
fn members_that_come_and_go_with_few_prefixes_get_their_packets() {
    let port = port();
    let mut members = BTreeMap::from([(0, Udp::join_port(0x800, port).unwrap())]);
    let mut state = 1_u64;
    for turn in 0..200 {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let key = 1 + (state >> 60) as u16;
        if members.remove(&key).is_none() {
            members.insert(key, Udp::join_port(0x800 + key, port).unwrap());
        }
        for (key, member) in &members {
            send(&members[&0], LOCALHOST, 64, &mut packet(u32::from(0x800 + key) << 12, turn, 64));
            assert_eq!(receive(member, 1), [turn], "turn {turn}, prefix {:#x}", 0x800 + key);
            assert_eq!(member.counts().forwarded_in, 0, "turn {turn}, prefix {:#x}", 0x800 + key);
        }
    }
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
    // A stopped process accepts connections and does not answer.
    let _stopped =
        Listener::bind(&format!("millstream-link/{}/{other}/123.{:016x}", own_uid(), random_u64())).unwrap();
    let error = Udp::join_port(0x1, other).unwrap_err();
    assert!(matches!(&error, JoinError::Silent { pids, .. } if *pids == [std::process::id()]), "{error}");
    assert!(error.to_string().ends_with(&format!("process {}", std::process::id())), "{error}");
}

/// Environment variable with the port of a [`start`]ed process.
const PORT: &str = "MILLSTREAM_TEST_PORT";

/// Another process that runs an ignored test of this program, and its output by lines.
fn start(test: &str, port: u16) -> (Child, impl Iterator<Item = String>) {
    let mut process = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--ignored", "--nocapture"])
        .env(PORT, port.to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(process.stdout.take().unwrap()).lines().map(Result::unwrap);
    (process, lines)
}

#[test]
fn a_member_without_descriptors_gets_its_packets_and_knows_a_newcomer_later() {
    let port = port();
    let first = Udp::join_port(0x1, port).unwrap();
    let (mut limited, mut lines) = start("few_descriptors", port);
    let mut reaches =
        |line: &str| assert!(lines.any(|printed| printed == line), "the member ended before: {line}");
    reaches("no descriptor is left");
    // The other member shows the sockets.
    let newcomer = Udp::join_port(0x3, port).unwrap();
    send(&first, LOCALHOST, 64, &mut packet(0x3 << 12, 6, 64));
    assert_eq!(receive(&newcomer, 1), [6]);
    send(&newcomer, LOCALHOST, 64, &mut packet(0x2 << 12, 7, 64));
    reaches("received [7]");
    // It closes descriptors, and forwards to the newcomer.
    drop(limited.stdin.take());
    assert_eq!(receive(&newcomer, 1), [8]);
    assert!(limited.wait().unwrap().success());
}

#[test]
#[ignore = "the other process of the test before"]
fn few_descriptors() {
    let port = std::env::var(PORT).unwrap().parse().unwrap();
    let member = Udp::join_port(0x2, port).unwrap();
    // SAFETY: plain system calls; the limit is on the stack.
    unsafe {
        let mut limit = std::mem::zeroed();
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit), 0);
        limit.rlim_cur = 64.min(limit.rlim_max);
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit), 0);
    }
    let [socket, _] = member.descriptors();
    let fillers: Vec<_> = std::iter::from_fn(|| socket.try_clone_to_owned().ok()).collect();
    println!("\nno descriptor is left");
    println!("received {:?}", receive(&member, 1));
    std::io::stdin().read_line(&mut String::new()).unwrap();
    drop(fillers);
    let info = PacketInfo { source: LOCALHOST, source_port: 1, destination: LOCALHOST, interface: 1, tos: 0 };
    let deadline = Instant::now() + Duration::from_secs(30);
    while let Err(error) = member.forward(0x3, &info, &packet(0x3 << 12, 8, 64)) {
        assert!(Instant::now() < deadline, "{error}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The only other member waits for a processor while a process joins.
#[test]
fn a_member_that_answers_late_shares_the_port() {
    let port = port();
    let (mut late, mut lines) = start("late_member", port);
    assert!(lines.any(|line| line == "joined"));
    let pid = late.id() as i32;
    // SAFETY: our own child.
    let signal = move |signal| assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
    signal(libc::SIGSTOP);
    let goes_on = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(600));
        signal(libc::SIGCONT);
    });
    let newcomer = Udp::join_port(0x3, port).unwrap();
    goes_on.join().unwrap();
    send(&newcomer, LOCALHOST, 64, &mut packet(0x3 << 12, 5, 64));
    assert_eq!(receive(&newcomer, 1), [5]);
    drop(late.stdin.take());
    assert!(late.wait().unwrap().success());
}

#[test]
#[ignore = "the other process of the test before"]
fn late_member() {
    let port = std::env::var(PORT).unwrap().parse().unwrap();
    let _member = Udp::join_port(0x2, port).unwrap();
    println!("\njoined");
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

/// User ID of another user. Most systems have no such user.
const OTHER_USER: u32 = 65_532;

/// Runs `work` in a thread of another user, which ends when the result is dropped. `None`, with the reason on standard
/// error, if this process may not change its user.
fn as_other_user<T: Send + 'static>(
    test: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<(T, std::sync::mpsc::Sender<()>)> {
    let (result_sender, result) = std::sync::mpsc::channel();
    let (stop, stopped) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        // SAFETY: a plain system call. Unlike the C library's function it changes this thread only.
        if unsafe { libc::syscall(libc::SYS_setresuid, OTHER_USER, OTHER_USER, OTHER_USER) } == 0
            && result_sender.send(work()).is_ok()
        {
            let _ = stopped.recv();
        }
    });
    let result = result.recv().ok();
    if result.is_none() {
        eprintln!("{test} was not run: becoming another user takes root");
    }
    Some((result?, stop))
}

/// Sockets of another user with names of our user's group.
struct ForeignNames {
    _bound: Vec<BoundSocket>,
    _listening: Vec<Listener>,
    _queued: Vec<Connection>,
}

#[test]
fn names_held_by_another_user_do_not_delay_a_join() {
    let (port, own) = (port(), own_uid());
    let foreign = as_other_user("names_held_by_another_user_do_not_delay_a_join", move || {
        let name = |name: &str| format!("millstream-link/{own}/{port}/{name}");
        // The mutex: bound only, or with a full queue.
        let bound = ["join", "join.0", "join.1", "join.2"].map(|n| BoundSocket::bind(&name(n)).unwrap());
        let listening: Vec<_> = ["join.3", "join.4", "001", "001.0", "002.0", "003.0", "004.0", "005.0"]
            .map(|n| Listener::bind(&name(n)).unwrap())
            .into();
        let mut queued = Vec::new();
        for n in ["join.4", "002.0", "003.0", "004.0", "005.0"] {
            while let Ok(connection) = Connection::open_at_once(&name(n), Duration::from_secs(1)) {
                queued.push(connection);
            }
        }
        ForeignNames { _bound: bound.into(), _listening: listening, _queued: queued }
    });
    let Some(foreign) = foreign else { return };
    let start = Instant::now();
    let members = [0x1, 0x2, 0x6].map(|qpn_prefix| Udp::join_port(qpn_prefix, port).unwrap());
    // Before, the mutex alone was waited for ten seconds, and then the join failed.
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    for (member, qpn_prefix) in members.iter().zip([0x1, 0x2, 0x6]) {
        send(&members[0], LOCALHOST, 64, &mut packet(qpn_prefix << 12, 3, 64));
        assert_eq!(receive(member, 1), [3]);
    }
    // The first name of the mutex is free again: processes that join now use it.
    drop(foreign);
    let member = Udp::join_port(0x7, port).unwrap();
    send(&members[0], LOCALHOST, 64, &mut packet(0x7 << 12, 4, 64));
    assert_eq!(receive(&member, 1), [4]);
}

#[test]
fn all_names_of_the_mutex_taken_is_an_error_that_names_them() {
    let (port, own) = (port(), own_uid());
    let foreign = as_other_user("all_names_of_the_mutex_taken_is_an_error_that_names_them", move || {
        let name = |number| format!("millstream-link/{own}/{port}/join.{number}");
        (0..16).map(|number| Listener::bind(&name(number)).unwrap()).collect::<Vec<_>>()
    });
    let Some((names, foreign)) = foreign else { return };
    let error = Udp::join_port(0x1, port).unwrap_err();
    assert!(matches!(error, JoinError::NamesTaken { count: 16, .. }), "{error}");
    drop((names, foreign));
    Udp::join_port(0x1, port).unwrap();
}

/// A service ID resolution request, as a packet for queue pair 1.
fn request_for(service_id: u64) -> Vec<u8> {
    let request = Message::SidrReq { request_id: 0xabc0_0001, pkey: Pkey::DEFAULT, service_id, private: &[] };
    let datagram = request.emit(1);
    let deth = deth::Repr { qkey: Qkey::new(0x8001_0000), src_qp: Qpn::GSI };
    let header = bth::Repr::new(Opcode::UD_SEND_ONLY, Qpn::GSI, Psn::new(0));
    let repr = Repr { deth: Some(deth), ..Repr::new(header, &datagram) };
    let mut bytes = vec![0; repr.buffer_len()];
    repr.emit(&mut bytes);
    bytes
}

/// Number of packets for queue pair 1 that arrive until `count` of them have, or for a moment.
fn management_packets(at: &Udp, count: usize) -> usize {
    let mut inbox = RxBuffers::new(8);
    let mut found = 0;
    let deadline = Instant::now() + Duration::from_secs(if count == 0 { 0 } else { 5 });
    loop {
        at.receive(&mut inbox).unwrap();
        found += inbox.received().map(|received| received.packets().count()).sum::<usize>();
        let now = Instant::now();
        if found >= count || now > deadline {
            return found;
        }
        poll_readable(&at.descriptors(), Some(deadline - now)).unwrap();
    }
}

#[test]
fn requests_reach_the_member_that_provides_the_service() {
    const SERVICE: u64 = 0x0106_1c2a;
    let port = port();
    let members = [0x1, 0x2, 0x3].map(|qpn_prefix| Udp::join_port(qpn_prefix, port).unwrap());
    let own = own_uid();
    // Another user holds the names that requests and packets were once forwarded by.
    let foreign = as_other_user("a part of requests_reach_the_member_that_provides_the_service", move || {
        let inbox = SocketAddr::from_abstract_name(format!("millstream-link/{own}/{port}/002/in"));
        let socket = UnixDatagram::bind_addr(&inbox.unwrap()).unwrap();
        socket.set_nonblocking(true).unwrap();
        (Listener::bind(&format!("millstream/{own}/gsi/{SERVICE:x}/001")).unwrap(), socket)
    });
    let mut requests = 0;
    let mut send_requests = |count| {
        for _ in 0..count {
            send(&members[0], LOCALHOST, 4096, &mut request_for(SERVICE));
            requests += 1;
        }
    };
    let service = Service::new(SERVICE, LOCALHOST);
    // A process that listens on another address gets nothing.
    members[0].set_service(Service::new(SERVICE, [127, 0, 0, 2].into()), true);
    members[1].set_service(service, true);
    // Also a member that joins later knows the service.
    let late = Udp::join_port(0x4, port).unwrap();
    send_requests(50);
    assert_eq!(management_packets(&members[1], 50), 50);
    // After its exit, the other provider gets them.
    late.set_service(service, true);
    members[1].set_service(service, false);
    send_requests(50);
    assert_eq!(management_packets(&late, 50), 50);
    for member in &members {
        assert_eq!(management_packets(member, 0), 0);
    }
    if let Some(((_, socket), _)) = &foreign {
        assert!(socket.recv(&mut [0; 16]).is_err(), "another user got a packet");
    }
    // Without a provider, each process keeps what it receives, and rejects it.
    late.set_service(service, false);
    send_requests(20);
    let deadline = Instant::now() + Duration::from_secs(5);
    let mut found = 0;
    while found < 20 && Instant::now() < deadline {
        found += members.iter().chain([&late]).map(|member| management_packets(member, 0)).sum::<usize>();
    }
    assert_eq!(found, 20);
}

#[test]
fn a_flood_at_queue_pair_1_is_limited() {
    let port = port();
    let member = Udp::join_port(0x1, port).unwrap();
    let mut sent = 0u64;
    let deadline = Instant::now() + Duration::from_secs(20);
    // Until the limit has dropped some, at any speed of this machine.
    while member.counts().management_dropped == 0 && Instant::now() < deadline {
        let request = request_for(7);
        let mut batch: Vec<u8> = std::iter::repeat_n(request.as_slice(), 60).flatten().copied().collect();
        send(&member, LOCALHOST, request.len(), &mut batch);
        sent += 60;
        management_packets(&member, 0);
    }
    assert!(member.counts().management_dropped != 0, "{sent} requests: {}", member.counts());
    // Other packets are not affected.
    send(&member, LOCALHOST, 64, &mut packet(0x1 << 12, 8, 64));
    let deadline = Instant::now() + Duration::from_secs(5);
    while !receive(&member, 1).contains(&8) {
        assert!(Instant::now() < deadline, "the packet did not arrive");
    }
}

/// Children that live until the end of the test.
struct Children(Vec<libc::pid_t>);

impl Children {
    fn fork(&mut self) {
        // SAFETY: the child waits for its end.
        let child = unsafe { libc::fork() };
        if child == 0 {
            loop {
                // SAFETY: as above.
                unsafe { libc::pause() };
            }
        }
        assert!(child > 0);
        self.0.push(child);
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        for child in &self.0 {
            // SAFETY: our own child.
            unsafe {
                libc::kill(*child, libc::SIGKILL);
                libc::waitpid(*child, std::ptr::null_mut(), 0);
            }
        }
    }
}

/// Sockets on a UDP port of this host.
fn sockets_on(port: u16) -> usize {
    let end = format!(":{port:04X}");
    let tables =
        ["udp", "udp6"].map(|table| std::fs::read_to_string(format!("/proc/self/net/{table}")).unwrap());
    let bound =
        tables.iter().flat_map(|table| table.lines().filter_map(|line| line.split_whitespace().nth(1)));
    bound.filter(|address| address.ends_with(&end)).count()
}

#[test]
fn children_that_are_forked_during_a_join_hold_nothing_of_the_port() {
    let port = port();
    let mut children = Children(Vec::new());
    std::thread::scope(|scope| {
        let joining = scope.spawn(|| {
            // A child that has not run yet has the names of former members.
            for prefix in (0x70..0xc0).step_by(2) {
                let first = Udp::join_port(prefix, port).unwrap();
                // It receives the sockets of the first one, and its inbox.
                drop(Udp::join_port(prefix + 1, port).unwrap());
                drop(first);
            }
        });
        while !joining.is_finished() && children.0.len() < 150 {
            children.fork();
            std::thread::sleep(Duration::from_micros(200));
        }
    });
    assert!(!children.0.is_empty());
    // The last child has closed its copies when it runs.
    let prefix = format!("millstream-link/{}/{port}/", own_uid());
    let left = || (sockets_on(port), millstream_shm::socket::listening_names(&prefix).unwrap().len());
    let deadline = Instant::now() + Duration::from_secs(20);
    while left() != (0, 0) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(left(), (0, 0), "all members have left");
}
