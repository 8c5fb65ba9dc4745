//! A torus that has lost its supervisors: it goes on, and neighbours still learn of faults from each other. Supervisors that are
//! started again act again.

use std::time::{Duration, Instant};

use libtest_mimic::{Failed, Trial};
use millstream_fabric::Fabric as _;
use millstream_health::NodeState;
use millstream_health::registers::{Condition, LinkState};
use millstream_torus::TorusNode;
use millstream_torus::health_page::HealthPage;
use millstream_torus::launch::{LaunchError, LaunchedTorus, Launcher};
use millstream_torus_core::{Axis, Direction, NodeNumber, Sign};
use rustix::process::{Pid, Resource, Rlimit, Signal};

use super::returning::{health_page, is_well};
use super::{LONG, PERIOD_FACTOR, application, await_end, await_state, kill, launcher};

pub(crate) fn trials() -> Vec<Trial> {
    let failed = |error: LaunchError| Failed::from(error.to_string());
    vec![
        Trial::test("a_torus_without_supervisors_goes_on_and_knows_its_faults", move || {
            without_supervisors().map_err(failed)
        }),
        Trial::test("a_supervisor_that_is_started_again_acts_again", move || started_again().map_err(failed)),
        Trial::test("a_supervisor_without_descriptors_accepts_again", move || {
            without_descriptors().map_err(failed)
        }),
        Trial::test("lost_nodes_stay_known_when_supervisors_change", move || {
            lost_nodes_stay_known().map_err(failed)
        }),
    ]
}

fn await_page(page: &HealthPage, what: &str, is: impl Fn(&HealthPage) -> bool) {
    let start = Instant::now();
    while !is(page) {
        assert!(start.elapsed() < LONG, "{what}: {page:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn without_supervisors() -> Result<(), LaunchError> {
    let mut torus = Launcher { supervisors: 2, ..launcher("2x2x1") }.launch()?;
    await_state(&torus, "all nodes are well", |state| {
        state.settled && state.nodes.iter().all(|row| row.state == NodeState::Ok)
    });
    let page = health_page(torus.socket(NodeNumber(0)).expect("exists"));
    for index in 0..2 {
        kill(torus.supervisor_pid(index).expect("started"), Signal::KILL);
    }
    assert!(torus.state().is_none(), "no supervisor answers");
    torus.run(&application("conformance"))?;
    // The host monitor of node 1 dies: its neighbour across the link learns so from its frames.
    let to_1 = Direction { axis: Axis::X, sign: Sign::Plus };
    let host = |page: &HealthPage| Condition::from_code(page.remote(to_1).host());
    await_page(&page, "host 1 is well", |page| host(page) == Condition::Ok);
    kill(torus.monitor_pid(NodeNumber(1)).expect("started"), Signal::KILL);
    await_page(&page, "host 1 failed", |page| host(page) == Condition::Failed);
    torus.run(&application("conformance"))?;
    // The process of node 1 dies: the link is broken for its neighbour.
    kill(torus.pid(NodeNumber(1)).expect("exists"), Signal::KILL);
    await_page(&page, "the link to node 1 is broken", |page| {
        LinkState::from_code(page.remote(to_1).link()) == LinkState::Broken
    });
    Ok(())
}

fn end_supervisor(torus: &mut LaunchedTorus, index: usize) {
    kill(torus.supervisor_pid(index).expect("started"), Signal::KILL);
    let start = Instant::now();
    while !torus.ended_supervisors().contains(&index) {
        assert!(start.elapsed() < LONG, "supervisor {index} does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// What happened while a supervisor was away is known to it: a node that died stays avoided, and comes back through it.
fn started_again() -> Result<(), LaunchError> {
    let mut torus = Launcher { supervisors: 2, ..launcher("2x2x1") }.launch()?;
    await_state(&torus, "all nodes are well", is_well);
    end_supervisor(&mut torus, 0);
    await_state(&torus, "supervisor 1 acts", |state| state.supervisor == 1 && is_well(state));
    let node = NodeNumber(3);
    kill(torus.pid(node).expect("exists"), Signal::KILL);
    await_end(&mut torus, node);
    await_state(&torus, "node 3 is avoided", |state| state.settled && state.nodes[3].avoided);
    torus.restart_supervisor(0)?;
    await_state(&torus, "supervisor 0 acts and avoids node 3", |state| {
        state.supervisor == 0 && state.settled && state.nodes[3].avoided
    });
    torus.restart_node(node)?;
    await_state(&torus, "node 3 is back", |state| state.supervisor == 0 && is_well(state));
    (0..2).for_each(|index| end_supervisor(&mut torus, index));
    torus.restart_supervisor(0)?;
    torus.restart_supervisor(1)?;
    await_state(&torus, "supervisor 0 acts again", |state| state.supervisor == 0 && is_well(state));
    assert_eq!(torus.ended_supervisors(), Vec::<usize>::new());
    torus.run(&application("conformance"))?;
    torus.finish().map(drop)
}

fn without_descriptors() -> Result<(), LaunchError> {
    let torus = Launcher { supervisors: 1, ..launcher("1x1x1") }.launch()?;
    await_state(&torus, "all nodes are well", is_well);
    let pid = Pid::from_raw(torus.supervisor_pid(0).expect("started") as i32);
    let limit = |current| {
        let maximum = rustix::process::getrlimit(Resource::Nofile).maximum;
        let earlier = rustix::process::prlimit(pid, Resource::Nofile, Rlimit { current, maximum });
        earlier.expect("our own child").current
    };
    let before = limit(Some(3));
    assert!(torus.state().is_none(), "there is no descriptor for a watcher");
    limit(before);
    await_state(&torus, "the supervisor answers", is_well);
    torus.finish().map(drop)
}

/// A node dies when supervisor 0 hangs: supervisor 1 names it. Then each supervisor in turn is started again, or goes on.
fn lost_nodes_stay_known() -> Result<(), LaunchError> {
    let mut torus = Launcher { supervisors: 2, ..launcher("3x1x1") }.launch()?;
    await_state(&torus, "all nodes are well", is_well);
    let application = TorusNode::attach(torus.socket(NodeNumber(0)).expect("exists")).expect("attaches");
    let dead = NodeNumber(1);
    kill(torus.pid(dead).expect("exists"), Signal::KILL);
    // Supervisor 1 knows of the death before it misses supervisor 0, which does not learn of it.
    std::thread::sleep(Duration::from_millis(100 * PERIOD_FACTOR));
    let first = torus.supervisor_pid(0).expect("started");
    kill(first, Signal::STOP);
    let start = Instant::now();
    while application.lost_node() != Some(dead) {
        assert!(start.elapsed() < LONG, "{dead} is not known to be lost");
        std::thread::sleep(Duration::from_millis(10));
    }
    kill(first, Signal::CONT);
    await_state(&torus, "supervisor 0 acts", |state| {
        state.supervisor == 0 && state.acting && state.settled && state.nodes[1].avoided
    });
    end_supervisor(&mut torus, 1);
    torus.restart_supervisor(1)?;
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(700 * PERIOD_FACTOR) {
        assert_eq!(application.lost_node(), Some(dead));
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(application);
    torus.finish().map(drop)
}
