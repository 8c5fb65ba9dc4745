//! Nodes that come back: a killed process that is started again, a stopped one that goes on. What is no fault.

use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use libtest_mimic::{Failed, Trial};
use millstream_fabric::{Fabric as _, Notification};
use millstream_health::NodeState;
use millstream_health::registers::{AdapterWatchdog, HostWatchdog, RemoteFault};
use millstream_shm::socket::Connection;
use millstream_torus::TorusNode;
use millstream_torus::health_page::HealthPage;
use millstream_torus::launch::{LaunchError, LaunchedTorus, Launcher};
use millstream_torus::service::TorusState;
use millstream_torus::traffic::TrafficCounters;
use millstream_torus_core::{Direction, NodeNumber};
use rustix::process::Signal;

use super::{LONG, LONG_PERIODS, PERIOD_FACTOR, application, await_end, await_state, kill, launcher, state};

pub(crate) fn trials() -> Vec<Trial> {
    let failed = |error: LaunchError| Failed::from(error.to_string());
    vec![
        Trial::test("a_restarted_node_comes_back", move || a_restarted_node_comes_back().map_err(failed)),
        Trial::test("a_node_that_is_restarted_at_once_comes_back", move || {
            a_node_that_is_restarted_at_once_comes_back().map_err(failed)
        }),
        Trial::test("a_node_comes_back_although_its_host_monitor_is_dead", move || {
            a_node_without_a_host_monitor().map_err(failed)
        }),
        Trial::test("nodes_that_were_all_killed_come_back", move || {
            nodes_that_were_all_killed_come_back().map_err(failed)
        }),
        Trial::test("a_stopped_node_comes_back", move || a_stopped_node_comes_back().map_err(failed)),
        Trial::test("an_application_attaches_right_behind_another", move || {
            an_application_attaches_right_behind_another().map_err(failed)
        }),
        Trial::test("silent_clients_do_not_stop_a_node", move || silent_clients().map_err(failed)),
        Trial::test("garbage_in_a_health_page_changes_no_route", move || {
            garbage_in_a_health_page().map_err(failed)
        }),
        Trial::test("no_fault_under_load_is_reported", move || no_fault_under_load().map_err(failed)),
        Trial::test("a_machine_that_stands_still_is_no_fault", move || {
            a_machine_that_stands_still().map_err(failed)
        }),
        Trial::test("a_clock_that_is_set_back_and_forth_changes_nothing", move || {
            a_clock_that_jumps().map_err(|error| Failed::from(error.to_string()))
        }),
    ]
}

pub(crate) fn is_well(state: &TorusState) -> bool {
    state.settled && state.nodes.iter().all(|row| row.state == NodeState::Ok && !row.avoided)
}

/// All nodes take part in the conformance suite, with new applications.
fn conforms(torus: &mut LaunchedTorus) -> Result<(), LaunchError> {
    torus.run(&application("conformance"))
}

fn a_restarted_node_comes_back() -> Result<(), LaunchError> {
    let mut torus = Launcher { supervisors: 1, ..launcher("2x2x2") }.launch()?;
    await_state(&torus, "all nodes are well", is_well);
    conforms(&mut torus)?;
    let node = NodeNumber(5);
    kill(torus.pid(node).expect("exists"), Signal::KILL);
    await_state(&torus, "node 5 is avoided", |state| state.settled && state.nodes[5].avoided);
    torus.restart_node(node)?;
    await_state(&torus, "node 5 is back", is_well);
    conforms(&mut torus)?;
    let counters = torus.finish()?;
    assert_eq!(counters.len(), 8);
    assert!(counters[5].delivered > 100, "the returned node took part: {:?}", counters[5]);
    assert!(counters.iter().all(TrafficCounters::is_balanced), "{counters:?}");
    Ok(())
}

/// The new process sees no host monitor at all.
fn a_node_without_a_host_monitor() -> Result<(), LaunchError> {
    let mut torus = Launcher { supervisors: 1, ..launcher("3x1x1") }.launch()?;
    await_state(&torus, "all nodes are well", is_well);
    let node = NodeNumber(1);
    kill(torus.pid(node).expect("exists"), Signal::KILL);
    await_state(&torus, "node 1 is avoided", |state| state.settled && state.nodes[1].avoided);
    kill(torus.monitor_pid(node).expect("started"), Signal::KILL);
    torus.restart_node(node)?;
    await_state(&torus, "node 1 is back", |state| {
        state.settled && !state.nodes[1].avoided && state.nodes[1].state == NodeState::HostFailed
    });
    conforms(&mut torus)?;
    torus.finish().map(drop)
}

/// Nobody misses the earlier process, but pairs with the later one begin anew.
fn a_node_that_is_restarted_at_once_comes_back() -> Result<(), LaunchError> {
    let mut torus = Launcher { supervisors: 2, ..launcher("2x2x1") }.launch()?;
    await_state(&torus, "all nodes are well", is_well);
    for epoch in 0..3 {
        conforms(&mut torus)?;
        let node = NodeNumber(2);
        kill(torus.pid(node).expect("exists"), Signal::KILL);
        await_end(&mut torus, node);
        torus.restart_node(node)?;
        await_state(&torus, "node 2 is back", |state| state.epoch > epoch && is_well(state));
    }
    conforms(&mut torus)?;
    torus.finish().map(drop)
}

/// No node is left that sees the links of another one.
fn nodes_that_were_all_killed_come_back() -> Result<(), LaunchError> {
    for dimensions in ["1x1x1", "2x1x1"] {
        let mut torus = Launcher { supervisors: 1, ..launcher(dimensions) }.launch()?;
        await_state(&torus, "all nodes are well", is_well);
        let nodes: Vec<_> = torus.dimensions().all().collect();
        for &node in &nodes {
            kill(torus.pid(node).expect("exists"), Signal::KILL);
            await_end(&mut torus, node);
            await_state(&torus, "the node is avoided", |state| {
                state.settled && state.nodes[node.index()].avoided
            });
        }
        for node in nodes {
            torus.restart_node(node)?;
        }
        await_state(&torus, "all nodes are back", is_well);
        conforms(&mut torus)?;
        torus.finish().map(drop)?;
    }
    Ok(())
}

fn a_stopped_node_comes_back() -> Result<(), LaunchError> {
    let mut torus = Launcher { supervisors: 2, ..launcher("2x2x1") }.launch()?;
    await_state(&torus, "all nodes are well", is_well);
    let stopped = torus.pid(NodeNumber(2)).expect("exists");
    kill(stopped, Signal::STOP);
    await_state(&torus, "node 2 is avoided", |state| {
        state.settled && state.nodes[2].avoided && state.nodes[2].state == NodeState::AdapterFailed
    });
    kill(stopped, Signal::CONT);
    await_state(&torus, "node 2 is back", is_well);
    conforms(&mut torus)?;
    torus.finish().map(drop)
}

/// The node learns of the end of one and of the coming of the other at the same time.
fn an_application_attaches_right_behind_another() -> Result<(), LaunchError> {
    let torus = launcher("1x1x1").launch()?;
    let (socket, pid) =
        (torus.socket(NodeNumber(0)).expect("exists"), torus.pid(NodeNumber(0)).expect("exists"));
    let mut earlier = TorusNode::attach(socket).expect("attaches");
    let taken = TorusNode::attach(socket).expect_err("one is attached").to_string();
    assert!(taken.contains(&format!("process {} is attached to node 0", std::process::id())), "{taken}");
    // What is still in the rings when it ends is done.
    let region = earlier.register(8);
    earlier.put(NodeNumber(0), region, 0, b"farewell", Notification::None).expect("lives");
    kill(pid, Signal::STOP);
    await_stop(pid);
    drop(earlier);
    let later = std::thread::scope(|scope| {
        let attaching = scope.spawn(|| TorusNode::attach(socket));
        std::thread::sleep(Duration::from_millis(100));
        kill(pid, Signal::CONT);
        attaching.join().expect("no panic")
    });
    assert_eq!(later.map_err(|error| error.to_string()).expect("attaches").here(), NodeNumber(0));
    torus.finish().map(drop)
}

/// Processes of the same user connect to a node's socket and say nothing, or not a request: no link breaks meanwhile.
fn silent_clients() -> Result<(), LaunchError> {
    let mut torus = Launcher { supervisors: 2, period_factor: LONG_PERIODS, ..launcher("2x2x1") }.launch()?;
    await_state(&torus, "all nodes are well", is_well);
    let socket = torus.socket(NodeNumber(0)).expect("exists");
    let connect = |_| Connection::open(socket, LONG).expect("a node process");
    let silent: Vec<_> = (0..10).map(connect).collect();
    let wrong = connect(10);
    wrong.send(b"good day", &[]).expect("sent");
    let start = Instant::now();
    while !silent.iter().chain([&wrong]).all(Connection::is_hung_up) {
        assert!(start.elapsed() < LONG, "silent clients stay connected");
        std::thread::sleep(Duration::from_millis(10));
    }
    // More of them than a node keeps do not keep applications out.
    let silent: Vec<_> = (0..100).map(connect).collect();
    conforms(&mut torus)?;
    drop(silent);
    let state = state(&torus);
    let faults = state.changes.iter().filter(|change| change.state != NodeState::Ok);
    assert_eq!((state.epoch, faults.count()), (0, 0), "{:?}", state.changes);
    torus.finish().map(drop)
}

fn await_stop(pid: u32) {
    let state = || std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("a process");
    while !state().contains(") T ") {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Another process of the same user writes any values into the registers of node 1 while all nodes work.
fn garbage_in_a_health_page() -> Result<(), LaunchError> {
    let mut torus = Launcher { supervisors: 1, period_factor: LONG_PERIODS, ..launcher("2x2x1") }.launch()?;
    await_state(&torus, "all nodes are well", is_well);
    let page = health_page(torus.socket(NodeNumber(1)).expect("exists"));
    let stop = Arc::new(AtomicBool::new(false));
    let writer = std::thread::spawn({
        let stop = Arc::clone(&stop);
        move || {
            let mut random = 1_u64;
            while !stop.load(Ordering::Relaxed) {
                random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                page.set_host(HostWatchdog(random));
                page.set_adapter(AdapterWatchdog(random.rotate_left(17)));
                let direction = Direction::ALL[(random >> 40) as usize % 6];
                page.set_remote(direction, RemoteFault(random.rotate_left(31)));
                std::thread::sleep(Duration::from_micros(200));
            }
        }
    });
    for _ in 0..2 {
        conforms(&mut torus)?;
    }
    let state = state(&torus);
    stop.store(true, Ordering::Relaxed);
    writer.join().expect("no panic");
    // One observer's word: whatever it says of itself and its neighbours, no route changes, and nobody else is blamed.
    assert_eq!(state.epoch, 0, "{:?}", state.changes);
    let others = state.changes.iter().filter(|change| change.node != NodeNumber(1));
    let blamed: Vec<_> = others
        .filter(|change| matches!(change.state, NodeState::NodeFailed | NodeState::AdapterFailed))
        .collect();
    assert_eq!(blamed.len(), 0, "{blamed:?}");
    await_state(&torus, "all nodes are well again", is_well);
    torus.finish().map(drop)
}

/// Attaches as the host monitor does.
pub(crate) fn health_page(socket: &str) -> HealthPage {
    let connection = Connection::open(socket, Duration::from_secs(10)).expect("a node process");
    connection.send(b"\"Monitor\"", &[]).expect("sent");
    let mut reply = [0; 64];
    let (length, descriptors) = connection.receive(&mut reply).expect("an answer");
    assert_eq!(&reply[..length], b"\"Health\"");
    HealthPage::open(descriptors.into_iter().next().expect("a page")).expect("mapped")
}

/// Monitors and supervisors beside the conformance suite: nobody is reported, and no route changes.
fn no_fault_under_load() -> Result<(), LaunchError> {
    let mut torus = Launcher { supervisors: 2, period_factor: LONG_PERIODS, ..launcher("2x2x1") }.launch()?;
    await_state(&torus, "all nodes are well", is_well);
    for _ in 0..3 {
        conforms(&mut torus)?;
    }
    let state = state(&torus);
    assert_eq!(state.epoch, 0, "{:?}", state.changes);
    let faults = state.changes.iter().filter(|change| change.state != NodeState::Ok);
    assert_eq!(faults.count(), 0, "{:?}", state.changes);
    torus.finish().map(drop)
}

/// All processes stop together for longer than every bound, and go on.
fn a_machine_that_stands_still() -> Result<(), LaunchError> {
    let mut torus = Launcher { supervisors: 2, ..launcher("2x2x1") }.launch()?;
    await_state(&torus, "all nodes are well", is_well);
    let nodes: Vec<_> = (0..4).map(NodeNumber).collect();
    let pids: Vec<_> = (nodes.iter().flat_map(|&node| [torus.pid(node), torus.monitor_pid(node)]))
        .chain((0..2).map(|index| torus.supervisor_pid(index)))
        .map(|pid| pid.expect("started"))
        .collect();
    pids.iter().for_each(|&pid| kill(pid, Signal::STOP));
    std::thread::sleep(Duration::from_millis(400 * PERIOD_FACTOR));
    pids.iter().for_each(|&pid| kill(pid, Signal::CONT));
    conforms(&mut torus)?;
    await_state(&torus, "all nodes are well", is_well);
    let state = state(&torus);
    assert_eq!((state.supervisor, state.epoch), (0, 0), "{:?}", state.changes);
    let faults = state.changes.iter().filter(|change| change.state != NodeState::Ok);
    assert_eq!(faults.count(), 0, "{:?}", state.changes);
    torus.finish().map(drop)
}

/// Each look at the clock that can be set is an hour before or after the previous one.
const JUMPING_CLOCK: &str = r"
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *time) {
    static unsigned looks;
    long result = syscall(SYS_clock_gettime, clock, time);
    if (result == 0 && clock == CLOCK_REALTIME)
        time->tv_sec += __atomic_fetch_add(&looks, 1, __ATOMIC_RELAXED) % 2 ? 3600 : -3600;
    return result;
}
";

/// The clock of all processes is set back and forth: nobody is reported, a killed node is avoided and comes back, and a
/// supervisor whose clock is behind takes over.
fn a_clock_that_jumps() -> Result<(), Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    let (source, library) = (folder.path().join("clock.c"), folder.path().join("clock.so"));
    std::fs::write(&source, JUMPING_CLOCK)?;
    let compiled =
        Command::new("cc").args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(&source).status()?;
    assert!(compiled.success(), "cc: {compiled}");
    let usual = launcher("2x2x1");
    let script = folder.path().join("with-clock");
    let (library, program) = (library.display(), usual.program.display());
    std::fs::write(&script, format!("#!/bin/sh\nexec env LD_PRELOAD={library} {program} \"$@\"\n"))?;
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755))?;
    let mut torus =
        Launcher { program: script, supervisors: 2, period_factor: LONG_PERIODS, ..usual }.launch()?;
    await_state(&torus, "all nodes are well", is_well);
    conforms(&mut torus)?;
    let state = state(&torus);
    assert!(
        state.epoch == 0 && state.changes.iter().all(|change| change.state == NodeState::Ok),
        "{state:?}"
    );
    kill(torus.supervisor_pid(0).expect("exists"), Signal::KILL);
    await_state(&torus, "supervisor 1 acts", |state| state.supervisor == 1 && is_well(state));
    let node = NodeNumber(3);
    kill(torus.pid(node).expect("exists"), Signal::KILL);
    await_state(&torus, "node 3 is avoided", |state| state.settled && state.nodes[3].avoided);
    torus.restart_node(node)?;
    await_state(&torus, "node 3 is back", is_well);
    conforms(&mut torus)?;
    torus.finish()?;
    Ok(())
}
