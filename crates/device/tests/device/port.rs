//! Processes that share the UDP port: when one dies, the others keep working. Another user cannot share it.
//!
//! Each test runs in its own network namespace, which requires root. Without root the tests report that they
//! were skipped.

use std::fs::{self, File};
use std::time::Duration;

use millstream_device::types::WC_SUCCESS;

use crate::other_users::{OWNER, STRANGER, become_user};
use crate::support::{
    Command, CqKind, End, Kind, Placement, Process, QpConfig, Region, connect, own_network, pair, pattern,
    send_to_parent,
};

/// Runs a role on the wire in another process.
fn on_the_wire(role: &str) {
    let mut process = Process::start_with(role, |command| command.env("MILLSTREAM_PATH", "wire"));
    assert_eq!(process.recv_line_within(Duration::from_secs(60)), "done");
    assert!(process.finish().success(), "{role}");
}

/// Two ends, each in its own process.
fn elsewhere() -> [End; 2] {
    let config = QpConfig::default();
    let [mut a, mut b] = [(); 2].map(|()| End::new(Placement::OtherProcess));
    connect(&mut a, &mut b, &config);
    [a, b]
}

/// Bytes of one WRITE.
const LEN: usize = 1 << 18;

/// Posts WRITEs, runs `meanwhile` while they are in flight, and expects all of them to arrive.
fn write_during(a: &mut End, b: &mut End, seed: u64, regions: &[Region; 2], meanwhile: impl FnOnce()) {
    let (source, target) = (&regions[0], &regions[1]);
    a.store(source, 0, &pattern(seed, LEN));
    (0..16).for_each(|wr_id| a.write(wr_id, &[source.all()], (target.addr, target.key)));
    meanwhile();
    for (i, completion) in a.sent(16).into_iter().enumerate() {
        assert_eq!((completion.wr_id, completion.status), (i as u64, WC_SUCCESS), "seed {seed}");
    }
    assert!(b.load(target, 0, LEN) == pattern(seed, LEN), "seed {seed}");
    a.has_nothing(CqKind::Send);
}

#[test]
fn other_processes_keep_the_port_when_one_exits() {
    on_the_wire("port_survivors");
}

/// In another process.
pub(crate) fn survivors() {
    if own_network("other_processes_keep_the_port_when_one_exits") {
        let config = QpConfig::default();
        // The first process on the port also binds the socket that all of them read.
        let [mut first, mut second] = elsewhere();
        let (mut a, mut b) = pair(Placement::OtherProcess, &config);
        let [mut third, mut fourth] = elsewhere();
        let regions = [a.register(Kind::Anonymous, LEN, 0), b.register(Kind::Anonymous, LEN, 0)];
        write_during(&mut a, &mut b, 1, &regions, || first.process().kill());
        write_during(&mut a, &mut b, 2, &regions, || third.process().kill());
        // A stopped process keeps its socket slot, and does not delay the others.
        fourth.process().stop();
        write_during(&mut a, &mut b, 3, &regions, || {});
        // New processes take the socket slots of the dead ones, including the first slot.
        let newcomers = elsewhere();
        write_during(&mut a, &mut b, 4, &regions, || second.process().kill());
        fourth.process().signal(libc::SIGCONT);
        let [mut c, mut d] = newcomers;
        let theirs = [c.register(Kind::Anonymous, LEN, 0), d.register(Kind::Anonymous, LEN, 0)];
        write_during(&mut c, &mut d, 5, &theirs, || fourth.process().kill());
        write_during(&mut a, &mut b, 6, &regions, || {
            c.process().kill();
            d.process().kill();
        });
        // All remaining processes but this one.
        b.process().kill();
        let [mut c, mut d] = elsewhere();
        let theirs = [c.register(Kind::Anonymous, LEN, 0), d.register(Kind::Anonymous, LEN, 0)];
        write_during(&mut c, &mut d, 7, &theirs, || {});
    }
    send_to_parent("done");
}

#[test]
fn ordinary_users_have_the_port_one_at_a_time() {
    on_the_wire("port_users");
}

/// An end whose process becomes another user's.
fn of(role: &str, errors: &std::path::Path) -> End {
    let file = File::create(errors).expect("a file");
    End::OtherProcess(Box::new(Process::start_with(role, |command| command.stderr(file))))
}

/// In another process.
pub(crate) fn users() {
    if own_network("ordinary_users_have_the_port_one_at_a_time") {
        let folder = tempfile::tempdir().expect("a folder");
        let said = |name: &str| folder.path().join(name);
        let [mut a, mut b] = ["a", "b"].map(|name| of("owner", &said(name)));
        let config = QpConfig::default();
        connect(&mut a, &mut b, &config);
        let regions = [a.register(Kind::Anonymous, LEN, 0), b.register(Kind::Anonymous, LEN, 0)];
        write_during(&mut a, &mut b, 1, &regions, || {});
        // Another user's error names the user that has the port.
        let mut other = of("other_user", &said("other"));
        let number = other.open(&config);
        other.modify(millstream_device::qp::state::QpState::Init, &config);
        let refused = other.attempt(Command::Connect(number, config.clone()));
        assert_eq!(refused.err(), Some(libc::EADDRINUSE));
        let words = fs::read_to_string(said("other")).expect("what it said");
        let expected =
            format!("UDP port 4791 belongs to user {OWNER}, but this process runs as user {STRANGER}");
        assert!(words.contains(&expected), "{words}");
        write_during(&mut a, &mut b, 2, &regions, || {});
        // Afterwards the port is free for other users.
        a.process().kill();
        b.process().kill();
        let [mut c, mut d] = ["c", "d"].map(|name| of("other_user", &said(name)));
        connect(&mut c, &mut d, &config);
        let regions = [c.register(Kind::Anonymous, LEN, 0), d.register(Kind::Anonymous, LEN, 0)];
        write_during(&mut c, &mut d, 3, &regions, || {});
    }
    send_to_parent("done");
}

/// In another process: an end of another user.
pub(crate) fn other_user() {
    become_user(STRANGER);
    crate::support::serve();
}

#[test]
fn a_forked_child_keeps_no_place_on_the_port() {
    on_the_wire("port_parent");
}

/// In another process.
pub(crate) fn parent() {
    if own_network("a_forked_child_keeps_no_place_on_the_port") {
        let mut member = Process::start("port_forker");
        assert_eq!(member.recv_line(), "forked");
        let child: i32 = member.recv_line().parse().expect("a process id");
        member.kill();
        // A socket slot held by the child would keep new processes from starting.
        let [mut a, mut b] = elsewhere();
        let regions = [a.register(Kind::Anonymous, LEN, 0), b.register(Kind::Anonymous, LEN, 0)];
        write_during(&mut a, &mut b, 1, &regions, || {});
        // SAFETY: a plain system call; the child sleeps until then.
        assert_eq!(unsafe { libc::kill(child, libc::SIGKILL) }, 0, "it was there all the time");
    }
    send_to_parent("done");
}

/// In another process: has a child that outlives it.
pub(crate) fn forker() {
    let (mut a, _b) = pair(Placement::SameProcess, &QpConfig::default());
    a.has_nothing(CqKind::Send);
    // SAFETY: the child does nothing but sleep.
    let child = unsafe { libc::fork() };
    if child == 0 {
        loop {
            // SAFETY: a plain system call.
            unsafe { libc::pause() };
        }
    }
    send_to_parent("forked");
    send_to_parent(&child.to_string());
    std::thread::sleep(Duration::from_secs(60));
}
