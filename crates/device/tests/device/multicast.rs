//! Multicast groups: every member on the host gets a copy, in every process and whenever it joined.

use std::sync::Arc;
use std::time::{Duration, Instant};

use millstream_device::qp::state::{QpAttr, QpState, attr};
use millstream_device::qp::{Qp, QpType, RecvSource};
use millstream_device::send_wr::{SendWr, UdDestination};
use millstream_device::types::{WC_FLAG_GRH, WC_SUCCESS, WR_SEND, Wc};
use millstream_device::{Cq, Errno, MAX_MULTICAST, Mr};
use millstream_quantity::{Qkey, Qpn};

use crate::other_users;
use crate::support::{
    Adapter, Process, QpConfig, attributes, element, is_empty, next, own_network, pattern, recv_from_parent,
    run_role, send_to_parent, wait_for,
};

const QKEY: u32 = 0x1234;

/// Environment variable with the id of this run's first process, from which group addresses derive.
const RUN: &str = "MILLSTREAM_TEST_RUN";

/// Whether the run uses packets only: over the loopback interface by IPv4, which every host has.
fn by_packets() -> bool {
    std::env::var("MILLSTREAM_PATH").is_ok_and(|path| path == "wire")
}

/// A group address of this run. Other runs on the host use other addresses.
fn group(last: u8) -> [u8; 16] {
    let run = std::env::var(RUN).map_or_else(|_| std::process::id(), |run| run.parse().expect("a number"));
    let mut gid = [0; 16];
    if by_packets() {
        gid[10..].copy_from_slice(&[0xff, 0xff, 239, (run >> 8) as u8, run as u8, last]);
        return gid;
    }
    (gid[0], gid[1], gid[15]) = (0xff, 0x0e, last);
    gid[4..8].copy_from_slice(&run.to_be_bytes());
    gid
}

/// The destination of datagrams for a group, with the global route header that receivers see.
fn to(group: [u8; 16], qkey: u32) -> Option<UdDestination> {
    let mut grh = [0; 40];
    if group[0] == 0 {
        grh[20] = 0x45;
        grh[32..36].copy_from_slice(&[127, 0, 0, 1]);
        grh[36..].copy_from_slice(&group[12..]);
    } else {
        grh[0] = 0x60;
        grh[24..].copy_from_slice(&group);
    }
    Some(UdDestination { on_this_host: false, qpn: Qpn::new(0xff_ffff), qkey: Qkey::new(qkey), grh })
}

/// A datagram queue pair in RTS, with memory for receives.
struct Member {
    qp: Arc<Qp>,
    cq: Arc<Cq>,
    memory: Vec<u8>,
    mr: Mr,
}

impl Member {
    fn new(adapter: &Adapter, qkey: u32) -> Self {
        let cq = adapter.cq();
        let qp = adapter.qp_with(&cq, QpType::Ud, RecvSource::Own).expect("a queue pair");
        for (state, needs) in [
            (QpState::Init, attr::PKEY_INDEX | attr::PORT | attr::QKEY),
            (QpState::Rtr, 0),
            (QpState::Rts, attr::SQ_PSN),
        ] {
            let all = QpAttr { qkey: Qkey::new(qkey), ..attributes(&QpConfig::default(), state, 0) };
            qp.modify(&all, attr::STATE | needs).expect("the usual way");
        }
        let mut memory = vec![0; 256];
        let mr = adapter.register(&mut memory);
        Self { qp, cq, memory, mr }
    }

    fn of(adapter: &Adapter, group: [u8; 16]) -> Self {
        let member = Self::new(adapter, QKEY);
        member.qp.attach(group).expect("a group");
        member.post();
        member
    }

    fn post(&self) {
        self.qp.post_recv(7, &[element(&self.memory, &self.mr)]).expect("room");
    }

    fn send(&self, to: Option<UdDestination>) {
        self.qp.post_send(&SendWr { opcode: WR_SEND, to, ..SendWr::default() }).expect("room");
        assert_eq!(next(&self.cq).status, WC_SUCCESS);
    }

    fn has_nothing(&self, what: &str) {
        assert!(is_empty(&self.cq), "{what}");
    }
}

#[test]
fn every_member_gets_a_copy_and_nobody_else() {
    let adapter = Adapter::open();
    let members = [(); 3].map(|()| Member::of(&adapter, group(1)));
    let stranger = Member::of(&adapter, group(2));
    let outsider = Member::new(&adapter, QKEY);
    outsider.post();
    let other_key = Member::new(&adapter, QKEY + 1);
    other_key.qp.attach(group(1)).expect("a group");
    other_key.post();
    let sender = Member::new(&adapter, QKEY);
    let mut data = pattern(1, 100);
    let source = adapter.register(&mut data);
    for round in 0..3 {
        let sges = [element(&data, &source)];
        let wr = SendWr { opcode: WR_SEND, sges: &sges, to: to(group(1), QKEY), ..SendWr::default() };
        sender.qp.post_send(&wr).expect("room");
        assert_eq!(next(&sender.cq).status, WC_SUCCESS);
        for member in &members {
            let wc = next(&member.cq);
            assert_eq!((wc.wr_id, wc.status, wc.byte_len), (7, WC_SUCCESS, 140), "round {round}");
            assert_eq!((wc.src_qp, wc.wc_flags & WC_FLAG_GRH), (sender.qp.qpn().get(), WC_FLAG_GRH));
            let written = if by_packets() { 36..40 } else { 24..40 };
            assert_eq!(member.memory[written], group(1)[if by_packets() { 12 } else { 0 }..]);
            assert_eq!(member.memory[40..140], data);
            member.post();
        }
    }
    for (who, member) in [("another group", &stranger), ("none", &outsider), ("another key", &other_key)] {
        member.has_nothing(who);
    }
    // A member's number with the group's address, and the multicast number with a member's address: both are
    // dropped.
    sender.send(to(group(1), QKEY).map(|to| UdDestination { qpn: members[0].qp.qpn(), ..to }));
    sender.send(to(group(1), QKEY).map(|to| UdDestination { grh: [0x60; 40], ..to }));
    // The highest bit selects the sender's own Q_Key.
    sender.send(to(group(2), 1 << 31));
    assert_eq!(next(&stranger.cq).status, WC_SUCCESS);
    members.iter().for_each(|member| member.has_nothing("no message of the group"));
}

#[test]
fn multicast_loopback_can_be_blocked() {
    let adapter = Adapter::open();
    let [one, other] = [(); 2].map(|()| Member::of(&adapter, group(3)));
    one.qp.post_send(&SendWr { opcode: WR_SEND, to: to(group(3), QKEY), ..SendWr::default() }).expect("room");
    let mut own = [next(&one.cq), next(&one.cq)].map(|wc| wc.byte_len);
    own.sort_unstable();
    assert_eq!(own, [0, 40], "the send request and the copy");
    assert_eq!(next(&other.cq).byte_len, 40);
    one.post();
    other.post();
    one.qp.block_loopback();
    one.send(to(group(3), QKEY));
    assert_eq!(next(&other.cq).byte_len, 40);
    one.has_nothing("its own copy");
}

#[test]
fn queue_pairs_come_and_go() {
    let adapter = Adapter::open();
    let sender = Member::new(&adapter, QKEY);
    let member = Member::of(&adapter, group(4));
    assert_eq!(member.qp.attach(group(4)), Ok(()), "twice is once");
    assert!(member.qp.is_attached());
    sender.send(to(group(4), QKEY));
    assert_eq!(next(&member.cq).status, WC_SUCCESS);
    member.post();
    member.has_nothing("a second copy");
    assert_eq!(member.qp.detach(group(5)), Err(Errno::INVAL));
    assert_eq!(member.qp.detach(group(4)), Ok(()));
    assert_eq!(member.qp.detach(group(4)), Err(Errno::INVAL));
    assert!(!member.qp.is_attached());
    sender.send(to(group(4), QKEY));
    member.has_nothing("it has left");
    // IPv4 groups are mapped into IPv6.
    let mut v4 = [0; 16];
    v4[10..].copy_from_slice(&[0xff, 0xff, 239, 1, 2, 3]);
    assert_eq!(member.qp.attach(v4), Ok(()));
    sender.send(to(v4, QKEY));
    assert_eq!(next(&member.cq).status, WC_SUCCESS);
    v4[12] = 192;
    assert_eq!(member.qp.attach(v4), Err(Errno::INVAL), "no group");
    assert_eq!(adapter.qp(&member.cq).expect("a queue pair").attach(group(4)), Err(Errno::INVAL), "RC");
    member.post();
    member.qp.destroy();
    sender.send(to(group(4), QKEY));
}

#[test]
fn the_table_is_bounded() {
    run_role("joiner");
}

/// In another process: fills the process's table.
pub(crate) fn joiner() {
    let adapter = Adapter::open();
    let member = Member::new(&adapter, QKEY);
    let group_of = |i: usize| {
        let mut gid = group(0);
        gid[12..14].copy_from_slice(&(i as u16 + 1).to_be_bytes());
        gid
    };
    (0..MAX_MULTICAST).for_each(|i| assert_eq!(member.qp.attach(group_of(i)), Ok(())));
    assert_eq!(member.qp.attach(group_of(MAX_MULTICAST)), Err(Errno::NOMEM));
    assert_eq!(member.qp.detach(group_of(17)), Ok(()));
    assert_eq!(member.qp.attach(group_of(MAX_MULTICAST)), Ok(()));
    member.post();
    member
        .qp
        .post_send(&SendWr { opcode: WR_SEND, to: to(group_of(MAX_MULTICAST), QKEY), ..SendWr::default() })
        .expect("room");
    (0..2).for_each(|_| assert_eq!(next(&member.cq).status, WC_SUCCESS));
    member.qp.destroy();
    let next_one = Member::new(&adapter, QKEY);
    (0..MAX_MULTICAST).for_each(|i| assert_eq!(next_one.qp.attach(group_of(i)), Ok(())));
}

/// Another process with a queue pair in the group.
fn start_listener() -> Process {
    let run = std::process::id().to_string();
    let mut process = Process::start_with("mcast_listener", |command| command.env(RUN, run));
    assert_eq!(process.recv_line(), "ready");
    process
}

/// Environment variable of a process that becomes another user at first.
const AS_OWNER: &str = "MILLSTREAM_TEST_AS_OWNER";

/// The other process: reports the datagrams that arrive.
pub(crate) fn listener() {
    if std::env::var_os(AS_OWNER).is_some() {
        other_users::become_user(other_users::OWNER);
    }
    let adapter = Adapter::open();
    let member = Member::of(&adapter, group(6));
    send_to_parent("ready");
    while let Some(line) = recv_from_parent() {
        match line.as_str() {
            "leave" => {
                member.qp.detach(group(6)).expect("it is in it");
                send_to_parent("gone");
            }
            "count" => {
                let count = member.cq.poll(&mut [Wc::default()]).expect("no overflow");
                (0..count).for_each(|_| member.post());
                send_to_parent(&count.to_string());
            }
            _ => {
                let len = next(&member.cq).byte_len;
                // Posted before the report: the sender may send the next datagram at once.
                member.post();
                send_to_parent(&len.to_string());
            }
        }
    }
}

fn hears(listener: &mut Process) {
    listener.send_line("listen");
    assert_eq!(listener.recv_line(), "40");
}

/// Datagrams that the listener has received since the last count, one at most.
fn count(listener: &mut Process) -> String {
    listener.send_line("count");
    listener.recv_line()
}

/// Sends until the listener hears: a process that does not answer at once is found later.
fn send_until_heard(sender: &Member, listener: &mut Process) {
    wait_for("the listener hears", || {
        sender.send(to(group(6), QKEY));
        count(listener) != "0"
    });
}

/// Whether the listener hears the next datagram.
fn hears_the_next(sender: &Member, listener: &mut Process) -> bool {
    sender.send(to(group(6), QKEY));
    let until = Instant::now() + Duration::from_secs(1);
    while Instant::now() < until {
        if count(listener) != "0" {
            return true;
        }
    }
    false
}

#[test]
fn members_of_other_processes_get_copies_too() {
    let adapter = Adapter::open();
    let sender = Member::new(&adapter, QKEY);
    let mut early = start_listener();
    send_until_heard(&sender, &mut early);
    // They join after the sender has searched for members, and are found at once if all processes answer in time.
    assert!((0..5).any(|_| hears_the_next(&sender, &mut start_listener())), "none is found at once");
    let (mut late, mut killed) = (start_listener(), start_listener());
    let local = Member::of(&adapter, group(6));
    for process in [&mut early, &mut late, &mut killed] {
        send_until_heard(&sender, process);
    }
    assert_eq!(next(&local.cq).byte_len, 40);
    killed.kill();
    early.send_line("leave");
    assert_eq!(early.recv_line(), "gone");
    wait_for("the datagrams sent before are counted", || count(&mut early) == "0");
    for _ in 0..10 {
        local.post();
        sender.send(to(group(6), QKEY));
        hears(&mut late);
        assert_eq!(next(&local.cq).byte_len, 40);
    }
    // The member that left has only the datagrams sent before.
    assert_eq!(count(&mut early), "0");
}

/// The member that attaches connects to the processes that may send, and does not wait for long.
#[test]
fn a_sender_that_answers_late_finds_the_member() {
    if by_packets() {
        // Members get packets.
        return;
    }
    let mut sender = start_sender(false);
    // It searches for members.
    times(&mut sender);
    sender.stop();
    let mut listener = start_listener();
    sender.signal(libc::SIGCONT);
    wait_for("the listener hears", || {
        times(&mut sender);
        count(&mut listener) != "0"
    });
}

/// A process that has not searched for members yet.
fn start_sender(owner: bool) -> Process {
    let run = std::env::var(RUN).unwrap_or_else(|_| std::process::id().to_string());
    Process::start_with("mcast_sender", |command| {
        if owner {
            command.env(AS_OWNER, "1");
        }
        command.env(RUN, run)
    })
}

/// In another process: attaches a queue pair and sends; reports how long each took \[ms\]. Later lines send again.
pub(crate) fn sender() {
    if std::env::var_os(AS_OWNER).is_some() {
        other_users::become_user(other_users::OWNER);
    }
    let adapter = Adapter::open();
    let sender = Member::new(&adapter, QKEY);
    while recv_from_parent().is_some() {
        let start = Instant::now();
        sender.send(to(group(6), QKEY));
        let sent = start.elapsed();
        let start = Instant::now();
        if !sender.qp.is_attached() {
            sender.qp.attach(group(7)).expect("a group");
        }
        send_to_parent(&format!("{} {}", sent.as_millis(), start.elapsed().as_millis()));
    }
}

/// Makes the sender send once; the times it took.
fn times(sender: &mut Process) -> [u64; 2] {
    sender.send_line("send");
    let line = sender.recv_line();
    let (sent, attached) = line.split_once(' ').expect("two times");
    [sent, attached].map(|time| time.parse().expect("milliseconds"))
}

/// Far below the time for each stopped process together.
const SOON_MS: u64 = 900;

#[test]
fn stopped_processes_delay_no_multicast_datagram() {
    if by_packets() {
        // Each process gets its own packets.
        return;
    }
    let mut stopped = [(); 4].map(|()| start_listener());
    let mut live = start_listener();
    stopped.iter().for_each(Process::stop);
    let mut sender = start_sender(false);
    let [sent, attached] = times(&mut sender);
    assert!(sent < SOON_MS && attached < SOON_MS, "{sent} ms, {attached} ms");
    hears(&mut live);
    // They are found when they continue.
    stopped.iter().for_each(|process| process.signal(libc::SIGCONT));
    for process in &mut stopped {
        wait_for("the member that was stopped", || {
            times(&mut sender);
            count(process) != "0"
        });
    }
}

#[test]
fn full_queues_of_another_user_delay_no_multicast_datagram() {
    if by_packets() || !other_users::is_root("full_queues_of_another_user_delay_no_multicast_datagram") {
        return;
    }
    let mut squatter = Process::start("full_queues");
    assert_eq!(squatter.recv_line(), "full");
    let run = std::process::id().to_string();
    let mut member =
        Process::start_with("mcast_listener", |command| command.env(RUN, run).env(AS_OWNER, "1"));
    assert_eq!(member.recv_line(), "ready");
    let mut sender = start_sender(true);
    // 300 queues, 20 ms each, would take six seconds.
    let [sent, attached] = times(&mut sender);
    assert!(sent < SOON_MS && attached < SOON_MS, "{sent} ms, {attached} ms");
    hears(&mut member);
}

#[test]
fn a_sender_that_had_no_descriptor_finds_the_members_later() {
    if by_packets() {
        // Members get packets.
        return;
    }
    let mut listener = start_listener();
    let run = std::env::var(RUN).unwrap_or_else(|_| std::process::id().to_string());
    let mut sender = Process::start_with("mcast_short_of_descriptors", |command| command.env(RUN, run));
    assert_eq!(sender.recv_line(), "sent");
    wait_for("the member hears", || {
        sender.send_line("send");
        assert_eq!(sender.recv_line(), "sent");
        count(&mut listener) != "0"
    });
}

/// In another process: sends to a group for the first time while all descriptors are in use, and then again for each line.
pub(crate) fn short_of_descriptors() {
    let adapter = Adapter::open();
    let sender = Member::new(&adapter, QKEY);
    let limit = libc::rlimit { rlim_cur: 200, rlim_max: 200 };
    // SAFETY: a plain system call.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
    let mut taken = Vec::new();
    while let Ok(file) = std::fs::File::open("/dev/null") {
        taken.push(file);
    }
    sender.send(to(group(6), QKEY));
    drop(taken);
    send_to_parent("sent");
    while recv_from_parent().is_some() {
        sender.send(to(group(6), QKEY));
        send_to_parent("sent");
    }
}

#[test]
fn groups_are_joined_on_interfaces_that_come_later() {
    let mut process =
        Process::start_with("mcast_late_interface", |command| command.env("MILLSTREAM_PATH", "wire"));
    assert_eq!(process.recv_line(), "done");
}

/// Executes `ip` with these arguments; false, with its error, if it fails.
fn ip(arguments: &str) -> bool {
    let output = std::process::Command::new("ip").args(arguments.split(' ')).output();
    let output = output.expect("ip runs (Debian package iproute2)");
    eprint!("{}", String::from_utf8_lossy(&output.stderr));
    output.status.success()
}

/// In another process: adds an interface while a queue pair is in a group, and detaches the queue pair.
pub(crate) fn late_interface() {
    let name = "groups_are_joined_on_interfaces_that_come_later";
    if own_network(name) {
        let adapter = Adapter::open();
        let member = Member::of(&adapter, group(8));
        if ip("link add later type veth peer name other") && ip("addr add 10.77.0.1/24 dev later") {
            assert!(ip("link set later up") && ip("link set other up"));
            let wanted = u32::from_ne_bytes(*group(8).last_chunk().expect("four bytes"));
            let joined = || {
                let table =
                    std::fs::read_to_string("/proc/thread-self/net/igmp").expect("the kernel's table");
                // Indented lines of groups follow the interface's line.
                let later = table.split_once("\tlater").map_or("", |(_, rest)| rest);
                let groups = later.lines().skip(1).take_while(|line| line.starts_with('\t'));
                groups.filter(|line| line.trim_start().starts_with(&format!("{wanted:08X}"))).count()
            };
            wait_for("the group on the new interface", || joined() == 1);
            member.qp.detach(group(8)).expect("it is in it");
            assert_eq!(joined(), 0);
        } else {
            eprintln!("{name} was not run: no interface could be added");
        }
    }
    send_to_parent("done");
}
