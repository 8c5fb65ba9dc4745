//! Tori of processes on this host: the conformance suite, and applications and nodes that die.
//!
//! This program is also every process of the tori: `node …` runs a node process, `application NAME` an application,
//! `outside NAME` a host outside of the torus.

mod cards;
mod hosts;
mod loss;
mod returning;
mod seventh;
mod soak;
mod supervisors;

use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};
use millstream_fabric::{Collectives, Fabric, FabricError, Notification, OnCard, RegionId, conformance};
use millstream_health::NodeState;
use millstream_torus::TorusNode;
use millstream_torus::direct::DirectNode;
use millstream_torus::launch::{LaunchError, LaunchedTorus, Launcher, ProcessArguments, run_direct};
use millstream_torus::monitor;
use millstream_torus::node;
use millstream_torus::service::supervisor;
use millstream_torus::traffic::TrafficCounters;
use millstream_torus_core::NodeNumber;

/// Periods of monitors: many times the defaults, because other tests use the processors, too.
const PERIOD_FACTOR: u64 = 12;
/// Periods where nothing must be taken for a fault: a process may wait for a processor for a second.
const LONG_PERIODS: u64 = 15;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let arguments = ProcessArguments(&words);
    millstream_log::init();
    let result: Result<(), Box<dyn std::error::Error>> = match words.first().map(String::as_str) {
        Some("node") => arguments.node().map_err(Into::into).and_then(|options| Ok(node::run(&options)?)),
        Some("monitor") => {
            arguments.monitor().map_err(Into::into).and_then(|options| Ok(monitor::run(&options)?))
        }
        Some("supervise") => {
            arguments.supervisor().map_err(Into::into).and_then(|options| Ok(supervisor::run(&options)?))
        }
        Some("outside") => {
            seventh::run_outside(&words[1], &words[2..]);
            Ok(())
        }
        Some("application") => {
            run_application(&words[1]);
            Ok(())
        }
        _ => return libtest_mimic::run(&Arguments::from_args(), trials()).exit_code(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Each has a loopback address of its own: while a process is started again, none of another torus takes its port.
fn launcher(dimensions: &str) -> Launcher {
    static LAUNCHERS: AtomicU32 = AtomicU32::new(0);
    let [.., high, low] = std::process::id().to_be_bytes();
    let address = format!("127.{high}.{low}.{}:0", 2 + LAUNCHERS.fetch_add(1, Ordering::Relaxed) % 250);
    let launcher = Launcher::new(dimensions.parse().expect("valid"), std::env::current_exe().expect("known"));
    Launcher {
        device: Some("soft".to_owned()),
        period_factor: PERIOD_FACTOR,
        addresses: vec![address.clone(); launcher.dimensions.nodes()],
        supervisor_address: Some(address),
        ..launcher
    }
}

fn application(name: &str) -> Vec<OsString> {
    vec![std::env::current_exe().expect("known").into(), "application".into(), name.into()]
}

fn run_application(name: &str) {
    if let Some(name) = name.strip_prefix("direct-") {
        return run_on_mesh(name);
    }
    let mut node = TorusNode::from_environment().expect("a node process");
    if name == "conformance_on_card" {
        let mut node = OnCard::new(node, 0).expect("the node has a card");
        return conformance::checks().into_iter().for_each(|(_, check)| check(&mut node));
    }
    match name {
        "conformance" => {
            // The supervisors know of all applications of this run, not of those of an earlier one.
            let start = Instant::now();
            while let Some(lost) = node.lost_node() {
                assert!(start.elapsed() < LONG, "{lost} has no application");
                std::thread::sleep(Duration::from_millis(10));
            }
            let checks = conformance::checks::<TorusNode>();
            assert!(checks.len() >= 6);
            checks.into_iter().for_each(|(_, check)| check(&mut node));
        }
        "last_puts" => end_behind_puts(&mut node),
        "survive" => survive(&mut node),
        "poll" => poll_until_a_node_is_lost(&mut node),
        "soak" => soak::run_application(&mut node),
        name if name.starts_with("seventh-") => {
            seventh::run_application(name.trim_start_matches("seventh-"), &mut node);
        }
        "card_and_host" => cards::between_card_and_host_memory(&mut node),
        "lost_lease" => cards::use_a_card_until_its_lease_ends(&mut node),
        other => panic!("no application {other}"),
    }
}

fn run_on_mesh(name: &str) {
    let mut node = DirectNode::from_environment().expect("a mesh");
    match name {
        "conformance" => {
            let checks = conformance::checks::<DirectNode>();
            assert!(checks.len() >= 8);
            checks.into_iter().for_each(|(_, check)| check(&mut node));
        }
        "last_puts" => end_behind_puts(&mut node),
        "lost" => lose_a_node_of_a_mesh(&mut node),
        other => panic!("no application {other}"),
    }
}

/// All nodes but the first post puts to it and end at once; it receives all of them.
fn end_behind_puts(node: &mut impl Fabric) {
    const PUTS: u64 = 500;
    let nodes = node.dimensions().nodes() as u64;
    let region = node.register(nodes as usize * PUTS as usize * 8);
    let all = node.exchange(&region.0.to_le_bytes(), LONG).expect("all live");
    let (first, here) = (NodeNumber(0), node.here());
    let word = |of: u64, put: u64| (of << 32 | put) + 1;
    if here != first {
        let target = RegionId(u64::from_le_bytes(all[0][..].try_into().expect("8 bytes")));
        let of = here.index() as u64;
        for put in 0..PUTS {
            let (at, one) = ((of * PUTS + put) * 8, Notification::Counter { index: 3, add: 1 });
            node.put(first, target, at, &word(of, put).to_le_bytes(), one).expect("lives");
        }
        return;
    }
    node.wait_counter(3, (nodes - 1) * PUTS, first, LONG).expect("all puts arrive");
    let mut bytes = vec![0; (nodes * PUTS * 8) as usize];
    node.load(region, 0, &mut bytes).expect("own region");
    let expected = (1..nodes).flat_map(|of| (0..PUTS).flat_map(move |put| word(of, put).to_le_bytes()));
    assert!(bytes[PUTS as usize * 8..].iter().copied().eq(expected));
}

/// Node 1 writes to all others and ends; they see its last words, then its loss.
fn lose_a_node_of_a_mesh(node: &mut DirectNode) {
    let lost = NodeNumber(1);
    let region = node.register(16);
    let all = node.exchange(&region.0.to_le_bytes(), LONG).expect("all live");
    let region_of =
        |other: NodeNumber| RegionId(u64::from_le_bytes(all[other.index()][..].try_into().expect("8 bytes")));
    if node.here() == lost {
        for to in node.dimensions().all() {
            let one = Notification::Counter { index: 3, add: 1 };
            node.put(to, region_of(to), 0, b"farewell", one).expect("lives");
            node.flush(to).expect("lives");
        }
        return;
    }
    node.wait_counter(3, 1, lost, LONG).expect("arrived before the end");
    let mut words = [0; 8];
    node.load(region, 0, &mut words).expect("own region");
    assert_eq!(&words, b"farewell");
    let gone = FabricError::NodeLost { node: lost };
    assert_eq!(node.wait_counter(3, 2, lost, LONG), Err(gone));
    assert_eq!(node.lost_node(), Some(lost));
    assert_eq!(node.put(lost, region_of(lost), 0, &[1], Notification::None), Err(gone));
    assert_eq!(node.exchange(&[], LONG), Err(gone));
    // The others still reach each other.
    let other = NodeNumber(2 - node.here().0);
    // Behind the last words, which the other node may not have read yet.
    node.put(other, region_of(other), 8, &[1], Notification::Counter { index: 4, add: 1 }).expect("lives");
    node.wait_counter(4, 1, other, LONG).expect("lives");
    node.flush(other).expect("lives");
}

const LONG: Duration = Duration::from_secs(120);

/// Works with all nodes until one is lost, then with the others.
fn survive(node: &mut TorusNode) {
    let (torus, here) = (node.dimensions(), node.here());
    let region = node.register(8 * torus.nodes());
    let all = node.exchange(&region.0.to_le_bytes(), LONG).expect("all live");
    let region_of =
        |other: NodeNumber| RegionId(u64::from_le_bytes(all[other.index()][..].try_into().expect("8 bytes")));
    let mut collectives = Collectives::new(node, 8, LONG).expect("all live");
    let error = loop {
        if let Err(error) = collectives.barrier(node) {
            break error;
        }
    };
    let FabricError::NodeLost { node: lost } = error else { panic!("{error}") };
    if lost == here {
        // Its own node process was killed.
        return;
    }
    let one = Notification::Counter { index: 7, add: 1 };
    let error = node.put(lost, region_of(lost), 0, &[1], one).and_then(|()| node.flush(lost));
    assert_eq!(error, Err(FabricError::NodeLost { node: lost }));
    // Around the dead one: every survivor writes to every other.
    for to in torus.all().filter(|&to| to != lost) {
        let word = u64::from(here.0) + 100;
        node.put(to, region_of(to), 8 * here.index() as u64, &word.to_le_bytes(), one).expect("lives");
        node.flush(to).expect("lives");
    }
    node.wait_counter(7, torus.nodes() as u64 - 1, here, LONG).expect("all survivors write");
    for from in torus.all().filter(|&from| from != lost) {
        let mut word = [0; 8];
        node.load(region, 8 * from.index() as u64, &mut word).expect("own region");
        assert_eq!(u64::from_le_bytes(word), u64::from(from.0) + 100);
    }
}

/// Only looks whether there is an event, or a lost node, until there is one.
fn poll_until_a_node_is_lost(node: &mut TorusNode) {
    node.exchange(&[], LONG).expect("all live");
    let start = Instant::now();
    while node.lost_node().is_none() {
        assert!(start.elapsed() < LONG, "no node is lost");
        assert_eq!(node.poll_event(), None);
    }
    let lost = node.lost_node().expect("just seen");
    assert!(node.is_lost(lost));
    if lost == node.here() {
        // Its own node process was killed: it reaches nobody.
        assert!(node.dimensions().all().all(|other| node.is_lost(other)));
    }
}

fn kill(pid: u32, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(pid as i32).expect("a process");
    rustix::process::kill_process(pid, signal).expect("our own child");
}

/// Runs the surviving application, and calls `strike` once when all nodes are known to be well.
fn strike_while_running(
    torus: &mut LaunchedTorus,
    strike: impl FnMut(&LaunchedTorus),
) -> Result<Vec<(NodeNumber, std::process::ExitStatus)>, LaunchError> {
    strike_while("survive", torus, strike)
}

/// As [`strike_while_running`], with another application.
fn strike_while(
    name: &str,
    torus: &mut LaunchedTorus,
    mut strike: impl FnMut(&LaunchedTorus),
) -> Result<Vec<(NodeNumber, std::process::ExitStatus)>, LaunchError> {
    let (start, mut struck) = (Instant::now(), false);
    torus.run_surviving(&application(name), |torus| {
        let Some(state) = torus.state().filter(|_| !struck) else { return };
        let all_ok = state.settled
            && state.nodes.iter().all(|row| row.state == NodeState::Ok && row.application == Some(true));
        if all_ok {
            struck = true;
            strike(torus);
        }
        assert!(start.elapsed() < LONG, "the torus is not well: {state:?}");
    })
}

/// The state as the acting supervisor tells it. One that does not answer in time is asked again.
fn state(torus: &LaunchedTorus) -> millstream_torus::service::TorusState {
    let start = Instant::now();
    loop {
        if let Some(state) = torus.state() {
            return state;
        }
        assert!(start.elapsed() < LONG, "no supervisor answers");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn await_state(
    torus: &LaunchedTorus,
    what: &str,
    is: impl Fn(&millstream_torus::service::TorusState) -> bool,
) {
    let start = Instant::now();
    loop {
        let last = state(torus);
        if is(&last) {
            return;
        }
        assert!(start.elapsed() < LONG, "{what}: {last:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The node's process was killed, and has ended: its sockets and pipes close a little earlier.
fn await_end(torus: &mut LaunchedTorus, node: NodeNumber) {
    let start = Instant::now();
    while !torus.ended_nodes().contains(&node) {
        assert!(start.elapsed() < LONG, "the process of {node} does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A killed node process: routes change, the others go on, and the acting supervisor may die as well.
fn survivors_go_on(dimensions: &str, kill_supervisor: bool) -> Result<(), LaunchError> {
    let mut torus = Launcher { supervisors: 2, ..launcher(dimensions) }.launch()?;
    let dead = NodeNumber(1);
    let ended = strike_while_running(&mut torus, |torus| {
        if kill_supervisor {
            kill(torus.supervisor_pid(0).expect("started"), rustix::process::Signal::KILL);
        }
        kill(torus.pid(dead).expect("exists"), rustix::process::Signal::KILL);
    })?;
    assert!(ended.iter().all(|(_, status)| status.success()), "{ended:?}");
    await_state(&torus, "node 1 is avoided", |state| {
        state.settled
            && state.epoch > 0
            && state.nodes[1].avoided
            && state.nodes[1].state == NodeState::AdapterFailed
    });
    assert_eq!(torus.ended_nodes(), [dead]);
    let counters = torus.finish()?;
    assert!(counters.iter().all(TrafficCounters::is_balanced), "{counters:?}");
    Ok(())
}

/// A program that waits for nothing learns of the end of its own node process, too.
fn programs_that_poll_learn_of_the_loss() -> Result<(), LaunchError> {
    let mut torus = Launcher { supervisors: 1, ..launcher("3x1x1") }.launch()?;
    let ended = strike_while("poll", &mut torus, |torus| {
        kill(torus.pid(NodeNumber(1)).expect("exists"), rustix::process::Signal::KILL);
    })?;
    assert_eq!(ended.len(), 3, "{ended:?}");
    assert!(ended.iter().all(|(_, status)| status.success()), "{ended:?}");
    torus.finish()?;
    Ok(())
}

fn a_killed_application_is_lost_and_its_node_forwards() -> Result<(), LaunchError> {
    let mut torus = Launcher { supervisors: 1, period_factor: LONG_PERIODS, ..launcher("3x1x1") }.launch()?;
    let script = format!(
        "if test $MILLSTREAM_TORUS_RANK = 1; then exec timeout -s KILL 10 {0}; else exec {0}; fi",
        application("survive").join(std::ffi::OsStr::new(" ")).to_string_lossy()
    );
    let ended = torus.run_surviving(&["sh".into(), "-c".into(), script.into()], |_| {})?;
    let failed: Vec<_> =
        ended.iter().filter(|(_, status)| !status.success()).map(|(node, _)| node.0).collect();
    assert_eq!(failed, [1], "{ended:?}");
    await_state(&torus, "all nodes are well", |state| {
        state.epoch == 0 && state.nodes.iter().all(|row| row.state == NodeState::Ok && !row.avoided)
    });
    let total = TrafficCounters::total(&torus.finish()?);
    assert_eq!(total.dropped_total(), 0, "{total}");
    Ok(())
}

/// A killed or stopped host monitor: the neighbours report it, and no packet is lost.
fn a_silent_host_is_seen_by_its_neighbours() -> Result<(), LaunchError> {
    let torus = Launcher { supervisors: 2, period_factor: LONG_PERIODS, ..launcher("2x2x1") }.launch()?;
    let well = |state: &millstream_torus::service::TorusState| {
        state.nodes.iter().all(|row| row.state == NodeState::Ok)
    };
    await_state(&torus, "all nodes are well", well);
    let stopped = torus.monitor_pid(NodeNumber(2)).expect("started");
    kill(stopped, rustix::process::Signal::STOP);
    await_state(&torus, "host 2 failed", |state| state.nodes[2].state == NodeState::HostFailed);
    kill(stopped, rustix::process::Signal::CONT);
    await_state(&torus, "all nodes are well again", well);
    kill(torus.monitor_pid(NodeNumber(3)).expect("started"), rustix::process::Signal::KILL);
    await_state(&torus, "host 3 failed", |state| {
        state.nodes[3].state == NodeState::HostFailed && !state.nodes[3].avoided && state.epoch == 0
    });
    torus.finish().map(drop)
}

fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for dimensions in ["1x1x1", "2x1x1", "2x2x1", "2x2x2"] {
        let run = move || conforms(dimensions).map_err(|error| Failed::from(error.to_string()));
        trials.push(Trial::test(format!("a_torus_of_{dimensions}_passes_the_conformance_suite"), run));
    }
    for dimensions in ["1x1x1", "2x1x1", "3x1x1", "2x2x2"] {
        let run = move || mesh(dimensions, "direct-conformance");
        trials.push(Trial::test(format!("a_mesh_of_{dimensions}_passes_the_conformance_suite"), run));
    }
    let last_puts = || puts_before_the_end_arrive().map_err(|error| Failed::from(error.to_string()));
    trials.push(Trial::test("puts_before_the_end_of_an_application_arrive", last_puts));
    trials.push(Trial::test("puts_before_the_end_of_a_node_of_a_mesh_arrive", || {
        mesh("3x1x1", "direct-last_puts")
    }));
    trials.push(Trial::test("a_mesh_sees_a_lost_node_after_its_last_words", || mesh("3x1x1", "direct-lost")));
    let survive = |dimensions, supervisor| {
        move || survivors_go_on(dimensions, supervisor).map_err(|error| Failed::from(error.to_string()))
    };
    trials.push(Trial::test("survivors_of_a_killed_node_go_on", survive("2x2x2", false)));
    trials.push(Trial::test("survivors_go_on_when_the_supervisor_dies_too", survive("3x2x1", true)));
    let killed =
        || a_killed_application_is_lost_and_its_node_forwards().map_err(|e| Failed::from(e.to_string()));
    trials.push(Trial::test("a_killed_application_is_lost_and_its_node_forwards", killed));
    let polling = || programs_that_poll_learn_of_the_loss().map_err(|e| Failed::from(e.to_string()));
    trials.push(Trial::test("programs_that_poll_learn_of_the_loss", polling));
    let silent = || a_silent_host_is_seen_by_its_neighbours().map_err(|e| Failed::from(e.to_string()));
    trials.push(Trial::test("a_silent_host_is_seen_by_its_neighbours", silent));
    let example =
        || the_example_prints_what_its_readme_says().map_err(|error| Failed::from(error.to_string()));
    trials.push(Trial::test("the_example_prints_what_its_readme_says", example));
    trials.extend(cards::trials());
    trials.extend(hosts::trials());
    trials.extend(returning::trials());
    trials.extend(seventh::trials());
    trials.extend(loss::trials());
    trials.extend(soak::trials());
    trials.extend(supervisors::trials());
    let failing = || a_failing_application_fails_the_run().map_err(|error| Failed::from(error.to_string()));
    trials.push(Trial::test("a_failing_application_fails_the_run", failing));
    trials
}

fn the_example_prints_what_its_readme_says() -> Result<(), LaunchError> {
    let test = std::env::current_exe().expect("known");
    let program = test.ancestors().nth(2).expect("in target/debug/deps").join("examples/neighbours");
    assert!(program.is_file(), "{} is missing: run cargo build --examples", program.display());
    let folder = tempfile::tempdir().expect("a folder");
    let output = folder.path().join("output");
    let mut torus = launcher("2x2x2").launch()?;
    let script = format!("exec {} >> {}", program.display(), output.display());
    torus.run(&["sh".into(), "-c".into(), script.into()])?;
    torus.finish()?;
    let printed = std::fs::read_to_string(&output).expect("written");
    let readme = include_str!("../../../../examples/6-torus/README.md");
    assert!(readme.contains(&format!("    {printed}")), "{printed}");
    Ok(())
}

fn a_failing_application_fails_the_run() -> Result<(), LaunchError> {
    let mut torus = launcher("2x1x1").launch()?;
    let script = r#"test "$MILLSTREAM_TORUS_RANK" = 0 || exit 3; exec sleep 60"#;
    let error = torus.run(&["sh".into(), "-c".into(), script.into()]).expect_err("node 1's ends with 3");
    assert_eq!(error.to_string(), "the application of node 1 ended with exit status: 3");
    let missing = torus.run(&["/nowhere/program".into()]).expect_err("no such program");
    assert!(missing.to_string().contains("/nowhere/program"), "{missing}");
    torus.finish().map(drop)
}

fn puts_before_the_end_arrive() -> Result<(), LaunchError> {
    let mut torus = launcher("3x2x1").launch()?;
    for _ in 0..20 {
        torus.run(&application("last_puts"))?;
    }
    torus.finish().map(drop)
}

fn mesh(dimensions: &str, name: &str) -> Result<(), Failed> {
    let torus = dimensions.parse().expect("valid");
    run_direct(torus, Some("soft"), &application(name), &AtomicBool::new(false))
        .map_err(|error| Failed::from(error.to_string()))
}

fn conforms(dimensions: &str) -> Result<(), LaunchError> {
    let mut torus = launcher(dimensions).launch()?;
    torus.run(&application("conformance"))?;
    let total = TrafficCounters::total(&torus.finish()?);
    assert!(total.injected > 1000, "{total}");
    assert_eq!((total.dropped_total(), total.malformed, total.repeated), (0, 0, 0), "{total}");
    Ok(())
}
