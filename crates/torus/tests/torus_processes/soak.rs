//! A torus of 3×3×3 under random kills: nodes put, get and count at random nodes, and check every value.
//!
//! `make soak` runs it for `MILLSTREAM_SOAK_SECONDS`, five minutes by default.

use std::collections::BTreeMap;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use libtest_mimic::{Failed, Trial};
use millstream_fabric::{Fabric, FabricError, Notification, RegionId};
use millstream_health::NodeState;
use millstream_torus::TorusNode;
use millstream_torus::engine::OutsideAccess;
use millstream_torus::launch::{LaunchError, LaunchedTorus, Launcher};
use millstream_torus::seventh::directory;
use millstream_torus::traffic::TrafficCounters;
use millstream_torus_core::NodeNumber;
use rustix::process::Signal;

use super::{await_state, kill, launcher};

/// Bytes of a writer's part of a region: a count, then values.
const PART: usize = 1024;
const NAME: &str = "soak";
const SECONDS: &str = "MILLSTREAM_SOAK_SECONDS";
/// 27 nodes and their monitors share this host's processors.
const PERIODS: u64 = 10;

pub(crate) fn trials() -> Vec<Trial> {
    let run = || soak("3x3x3").map_err(|error| Failed::from(error.to_string()));
    vec![Trial::test("soak_3x3x3_with_random_kills", run).with_ignored_flag(true)]
}

/// A generator of numbers by seed (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ word >> 31
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}

fn seconds() -> u64 {
    std::env::var(SECONDS).ok().and_then(|text| text.parse().ok()).unwrap_or(300)
}

/// What a node's application knows of another one's region.
struct Target {
    region: RegionId,
    /// Own increments of the count there.
    count: u64,
}

/// Works with random nodes until its node process is gone, or standard input ends.
pub(super) fn run_application(node: &mut TorusNode) {
    let (torus, here) = (node.dimensions(), node.here());
    let mut random = Random(u64::from(std::process::id()) << 16 | u64::from(here.0));
    let own = node.register(PART * torus.nodes());
    node.publish(own, NAME, OutsideAccess::Read).expect("a valid name");
    let ended = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    std::thread::spawn({
        let ended = std::sync::Arc::clone(&ended);
        move || {
            let _ = std::io::Read::read(&mut std::io::stdin(), &mut [0]);
            ended.store(true, std::sync::atomic::Ordering::Relaxed);
        }
    });
    let mut targets: BTreeMap<NodeNumber, Target> = BTreeMap::new();
    let (mut checked, mut lost) = (0_u64, 0_u64);
    while !ended.load(std::sync::atomic::Ordering::Relaxed) {
        let to = NodeNumber(random.below(torus.nodes()) as u16);
        match step(node, to, &mut targets, &mut random) {
            Ok(true) => checked += 1,
            // Its application has not begun yet.
            Ok(false) => std::thread::sleep(Duration::from_millis(5)),
            Err(FabricError::NodeLost { node: lost }) if lost == here => break,
            Err(
                FabricError::NodeLost { .. }
                | FabricError::NoRoute { .. }
                | FabricError::Gone { .. }
                | FabricError::NoRegion { .. },
            ) => {
                lost += 1;
                targets.remove(&to);
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(error) => panic!("{here} to {to}: {error}"),
        }
    }
    println!("{checked} {lost}");
}

/// One put, get and count at a node, all of whose results are checked. False if the node has published nothing so far.
fn step(
    node: &mut TorusNode,
    to: NodeNumber,
    targets: &mut BTreeMap<NodeNumber, Target>,
    random: &mut Random,
) -> Result<bool, FabricError> {
    let part = (node.here().index() * PART) as u64;
    if let std::collections::btree_map::Entry::Vacant(place) = targets.entry(to) {
        let Some(found) = directory::find(node, to, NAME)? else { return Ok(false) };
        // An earlier application of this node may have counted there.
        let count = node.fetch_add(to, found.region, part, 0)?;
        place.insert(Target { region: found.region, count });
    }
    let Some(target) = targets.get_mut(&to) else { return Ok(false) };
    let length = 8 * (1 + random.below((PART - 8) / 8));
    let at = part + 8 + 8 * random.below((PART - 8 - length) / 8 + 1) as u64;
    let data: Vec<u8> = (0..length / 8).flat_map(|_| random.next().to_le_bytes()).collect();
    node.put(to, target.region, at, &data, Notification::None)?;
    node.flush(to)?;
    let mut found = vec![0; length];
    node.get(to, target.region, at, &mut found)?;
    assert!(found == data, "{} wrote {length} bytes to {to} at {at}, and reads others", node.here());
    let before = node.fetch_add(to, target.region, part, 1)?;
    assert_eq!(before, target.count, "{} counts at {to}", node.here());
    target.count += 1;
    Ok(true)
}

fn start(torus: &LaunchedTorus, node: NodeNumber) -> Child {
    Command::new(std::env::current_exe().expect("known"))
        .args(["application", "soak"])
        .env(millstream_torus::application::ENV_SOCKET, torus.socket(node).expect("exists"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("starts")
}

/// Steps that an application has checked, and those that met a lost node.
fn finish(mut application: Child) -> (u64, u64) {
    drop(application.stdin.take());
    let output = application.wait_with_output().expect("our child");
    assert!(output.status.success(), "an application ended with {}", output.status);
    let text = String::from_utf8(output.stdout).expect("numbers");
    let mut numbers = text.split_whitespace().map(|number| number.parse().expect("a number"));
    (numbers.next().expect("a count"), numbers.next().expect("a count"))
}

fn soak(dimensions: &str) -> Result<(), LaunchError> {
    let end = Instant::now() + Duration::from_secs(seconds());
    let mut torus = Launcher { supervisors: 2, period_factor: PERIODS, ..launcher(dimensions) }.launch()?;
    let is_well = |state: &millstream_torus::service::TorusState| {
        state.settled && state.nodes.iter().all(|row| row.state == NodeState::Ok && !row.avoided)
    };
    await_state(&torus, "all nodes are well", is_well);
    let nodes: Vec<_> = launcher(dimensions).dimensions.all().collect();
    let mut applications: Vec<Option<Child>> = nodes.iter().map(|&node| Some(start(&torus, node))).collect();
    let mut random = Random(seconds());
    let (mut kills, mut checked, mut met) = (0, 0, 0);
    let mut collect = |application: Option<Child>| {
        let (ok, lost) = finish(application.expect("started"));
        checked += ok;
        met += lost;
    };
    while Instant::now() < end {
        std::thread::sleep(Duration::from_millis(500 + random.next() % 3000));
        let mut victims = vec![nodes[random.below(nodes.len())]];
        let second = nodes[random.below(nodes.len())];
        if random.below(3) == 0 && second != victims[0] {
            victims.push(second);
        }
        for &victim in &victims {
            kill(torus.pid(victim).expect("exists"), Signal::KILL);
            kills += 1;
        }
        await_state(&torus, "the killed nodes are avoided", |state| {
            state.settled && victims.iter().all(|victim| state.nodes[victim.index()].avoided)
        });
        for &victim in &victims {
            collect(applications[victim.index()].take());
        }
        for &victim in &victims {
            torus.restart_node(victim)?;
        }
        await_state(&torus, "the killed nodes are back", is_well);
        for &victim in &victims {
            applications[victim.index()] = Some(start(&torus, victim));
        }
    }
    applications.into_iter().for_each(&mut collect);
    let counters = torus.finish()?;
    assert!(counters.iter().all(TrafficCounters::is_balanced), "{counters:?}");
    println!("{kills} kills, {checked} checked steps, {met} met a lost node");
    println!("{}", TrafficCounters::total(&counters));
    assert!(kills > 0 && checked > 1000);
    Ok(())
}
