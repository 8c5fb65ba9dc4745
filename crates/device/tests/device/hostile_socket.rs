//! Programs of the same user that send invalid messages to the device's socket. The device keeps working.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use millstream_device::qp::state::QpState;
use millstream_device::types::WC_OP_RDMA_WRITE;
use millstream_shm::socket::Connection;

use crate::support::wire::{
    self, ABANDONED, CHANNEL, CONTACT, FAULT, FILE, HELLO, LIMIT_REACHED, MEMBER, OVERRUN, REFUSED,
    REGION_BUSY, SHARED, ask, connect_to_owner, exchange_hello, message,
};
use crate::support::{Completion, End, Kind, Placement, QpConfig, connect, pair, pattern, wait_for};

/// Checks that the device behind this end answers hellos, and moves data to known and to new peers. Returns the new one.
fn still_works(victim: &mut End) -> End {
    exchange_hello(&connect_to_owner(victim.number()));
    victim.keep();
    let mut friend = End::new(Placement::SameProcess);
    connect(&mut friend, victim, &QpConfig::default());
    let (source, target) = (friend.hold(&pattern(1, 5000)), victim.register(Kind::Anonymous, 5000, 0));
    friend.write(1, &[source.all()], (target.addr, target.key));
    assert_eq!(friend.sent(1), [Completion::ok(1, WC_OP_RDMA_WRITE, 0)]);
    assert_eq!(victim.load(&target, 0, 5000), pattern(1, 5000));
    victim.deregister(&target);
    friend
}

/// Whether the device has closed the connection.
fn is_over(connection: &Connection) -> bool {
    let mut buffer = [0; 64];
    loop {
        match connection.receive(&mut buffer) {
            Ok((0, _)) | Err(_) => return true,
            Ok(_) => {}
        }
    }
}

#[test]
fn malformed_messages_close_their_connection_only() {
    let (_near, mut victim) = pair(Placement::OtherProcess, &QpConfig::default());
    let number = victim.number();
    let mut seeds = 0..;
    for len in [1, 3, 4, 20, 23, 25, 64, 1000, 60_000].into_iter().chain([24; 40]) {
        let connection = connect_to_owner(number);
        let nonsense = pattern(seeds.next().expect("endless"), len);
        // All words are random. A valid operation is a one-in-a-billion case.
        connection.send(&nonsense, &[]).expect("the device listens");
        assert!(is_over(&connection), "{len} bytes");
    }
    for op in [0, 9, REFUSED, u32::MAX] {
        let connection = connect_to_owner(number);
        connection.send(&message(op, &[]), &[]).expect("the device listens");
        assert!(is_over(&connection), "operation {op}");
    }
    let connection = connect_to_owner(number);
    connection.send(&message(HELLO, &[0xdead_beef]), &[]).expect("the device listens");
    assert!(is_over(&connection), "another version");
    still_works(&mut victim);
}

#[test]
fn unrequested_descriptors_are_closed() {
    let (_near, mut victim) = pair(Placement::OtherProcess, &QpConfig::default());
    let open = |victim: &mut End| {
        let folder = format!("/proc/{}/fd", victim.process().id());
        std::fs::read_dir(folder).expect("our child").count()
    };
    let connection = connect_to_owner(victim.number());
    let arena = exchange_hello(&connection);
    let before = open(&mut victim);
    for _ in 0..50 {
        connection.send(&message(CHANNEL, &[12345]), &[arena.as_fd(); 4]).expect("the device listens");
        let (n, _) = connection.receive(&mut [0; 64]).expect("the device answers");
        assert_ne!(n, 0);
    }
    // Other tests' processes connect to all devices for a moment, perhaps before.
    wait_for("no descriptor is left", || open(&mut victim) <= before);
}

#[test]
fn unknown_objects_are_refused() {
    let (_near, mut victim) = pair(Placement::OtherProcess, &QpConfig::default());
    victim.register(Kind::Anonymous, 1 << 16, 0);
    let connection = connect_to_owner(victim.number());
    for (op, request) in [
        (FILE, [0, 0]),
        (FILE, [0, 2]),
        (FILE, [1 << 16, 1]),
        (FILE, [u32::MAX, u32::MAX]),
        (CHANNEL, [0, 0]),
        (CHANNEL, [u32::MAX, 0]),
    ] {
        let (answer, fds) = ask(&connection, op, &request);
        assert_eq!((answer[0], fds.len()), (REFUSED, 0), "{op} {request:?}");
    }
    still_works(&mut victim);
}

#[test]
fn forged_reports_raise_no_impossible_events() {
    /// A revision of the entry of a new queue pair that no earlier connection had.
    const NOW: u32 = 1000;
    let (mut near, mut victim) = pair(Placement::OtherProcess, &QpConfig::default());
    let (theirs, ours) = (victim.number(), near.number());
    let connection = connect_to_owner(theirs);
    let tell = |op, words: &[u32]| connection.send(&message(op, words), &[]).expect("the device listens");
    // From a queue pair that is not the peer; for no queue pair; with events of other object types, whose
    // pointer a program would misinterpret.
    tell(FAULT, &[theirs, ours ^ 1, 3, NOW]);
    tell(FAULT, &[theirs ^ 1, ours, 3, NOW]);
    // From before the connection.
    tell(FAULT, &[theirs, ours, 3, 0]);
    for event in [0, 4, 8, 9, 15, 17, 1000, u32::MAX - 1] {
        tell(FAULT, &[theirs, ours, event, NOW]);
    }
    for qpn in [theirs, 0, u32::MAX] {
        tell(LIMIT_REACHED, &[qpn]);
        // No completion was lost, and there are no XRC shared receive queues.
        tell(OVERRUN, &[qpn]);
        tell(ABANDONED, &[qpn]);
        (0..5).for_each(|what| tell(SHARED, &[qpn, what]));
    }
    // No such regions.
    for key in [0, 1, u32::MAX] {
        tell(REGION_BUSY, &[key]);
    }
    // The sender is not the peer.
    tell(CONTACT, &[theirs, ours ^ 1, NOW]);
    tell(CONTACT, &[theirs ^ 1, ours, NOW]);
    // Announcements of processes that do not exist.
    for block in [0, 0xfff, 0x1000, u32::MAX] {
        assert_eq!(ask(&connection, MEMBER, &[block]).0[..2], [MEMBER, block]);
    }
    // The device reads in order: after this answer, all earlier messages are handled.
    ask(&connection, CHANNEL, &[0]);
    assert_eq!(victim.async_event(Duration::from_millis(50)), None);
    assert_eq!(victim.state(), QpState::Rts);
    // A plausible report is accepted, once.
    (0..1000).for_each(|_| tell(FAULT, &[theirs, ours, 3, NOW]));
    ask(&connection, CHANNEL, &[0]);
    assert_eq!(victim.async_event(Duration::from_secs(5)), Some(3));
    assert_eq!(victim.async_event(Duration::from_millis(50)), None);
    assert_eq!(victim.state(), QpState::Err);
    still_works(&mut victim);
    near.destroy();
}

#[test]
fn a_client_that_reads_no_answers_does_not_block_the_server() {
    let (_near, mut victim) = pair(Placement::OtherProcess, &QpConfig::default());
    let number = victim.number();
    let rude = connect_to_owner(number);
    rude.set_timeout(Duration::from_millis(100)).expect("our own socket");
    // Until both directions are full, or the device closes the connection.
    let question = message(CHANNEL, &[1]);
    while rude.send(&question, &[]).is_ok() {}
    let start = Instant::now();
    // Its end waits for the requests of other tests in this process.
    let _friend = still_works(&mut victim);
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    assert!(is_over(&rude), "the device hangs up on it");
}

/// Processor time that a process has used.
fn processor_time(id: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).expect("our child");
    let (_, rest) = stat.rsplit_once(") ").expect("a name in parentheses");
    let ticks = |i| rest.split(' ').nth(i).and_then(|t| t.parse::<u64>().ok()).expect("a number");
    Duration::from_millis((ticks(11) + ticks(12)) * 10)
}

#[test]
fn the_server_recovers_from_descriptor_exhaustion() {
    let (_near, mut victim) = pair(Placement::OtherProcess, &QpConfig::default());
    let (id, number) = (victim.process().id(), victim.number());
    let limit = libc::rlimit { rlim_cur: 60, rlim_max: 60 };
    // SAFETY: limits our own child; the struct is on the stack.
    let done =
        unsafe { libc::prlimit(id as i32, libc::RLIMIT_NOFILE, &raw const limit, std::ptr::null_mut()) };
    assert_eq!(done, 0);
    let mut crowd: Vec<_> = (0..200).map(|_| connect_to_owner(number)).collect();
    std::thread::sleep(Duration::from_millis(100));
    let before = processor_time(id);
    std::thread::sleep(Duration::from_millis(500));
    let burnt = processor_time(id) - before;
    assert!(burnt < Duration::from_millis(200), "{burnt:?} of 500 ms spent on nothing");
    // The accepted connections are served.
    exchange_hello(&crowd[0]);
    crowd.clear();
    still_works(&mut victim);
}

#[test]
fn another_user_is_refused() {
    // SAFETY: a plain system call.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("not run: becoming another user takes root");
        return;
    }
    let (_near, mut victim) = pair(Placement::OtherProcess, &QpConfig::default());
    let name = wire::socket_name(victim.number());
    let mut stranger = crate::support::Process::start("stranger");
    stranger.send_line(&name);
    assert_eq!(stranger.recv_line(), "hung up on");
    assert!(stranger.finish().success());
    still_works(&mut victim);
}

/// In another process: switches to another user and connects.
pub(crate) fn stranger() {
    let name = crate::support::recv_from_parent().expect("a name");
    // SAFETY: the C library switches all threads of this process to user 65534.
    assert_eq!(unsafe { libc::setuid(65534) }, 0);
    let timeout = Duration::from_secs(5);
    let refused = Connection::open(&name, timeout).expect_err("our side looks at the user, too");
    assert_eq!(refused.kind(), std::io::ErrorKind::PermissionDenied);
    // Without the client's own check.
    let connection = Connection::open_any_user(&name, timeout).expect("the socket itself is open to all");
    // The device may have closed the connection already.
    let _ = connection.send(&message(HELLO, &[0]), &[]);
    let end = if is_over(&connection) { "hung up on" } else { "answered" };
    crate::support::send_to_parent(end);
}
