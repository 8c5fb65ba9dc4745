//! A torus that has lost all its supervisors: it goes on, and neighbours still learn of faults from each other.

use std::time::{Duration, Instant};

use libtest_mimic::{Failed, Trial};
use millstream_health::NodeState;
use millstream_health::registers::{Condition, LinkState};
use millstream_torus::health_page::HealthPage;
use millstream_torus::launch::{LaunchError, Launcher};
use millstream_torus_core::{Axis, Direction, NodeNumber, Sign};
use rustix::process::Signal;

use super::returning::health_page;
use super::{LONG, application, await_state, kill, launcher};

pub(crate) fn trials() -> Vec<Trial> {
    let failed = |error: LaunchError| Failed::from(error.to_string());
    vec![Trial::test("a_torus_without_supervisors_goes_on_and_knows_its_faults", move || {
        without_supervisors().map_err(failed)
    })]
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
