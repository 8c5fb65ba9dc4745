//! Nodes that come back: a killed process that is started again, a stopped one that goes on, a link whose queue pair failed.

use libtest_mimic::{Failed, Trial};
use millstream_health::NodeState;
use millstream_torus::account::Account;
use millstream_torus::launch::{LaunchError, LaunchedTorus, Launcher};
use millstream_torus::service::TorusState;
use millstream_torus_core::NodeNumber;
use rustix::process::Signal;

use super::{application, await_state, kill, launcher};

pub(crate) fn trials() -> Vec<Trial> {
    let failed = |error: LaunchError| Failed::from(error.to_string());
    vec![
        Trial::test("a_restarted_node_comes_back", move || a_restarted_node_comes_back().map_err(failed)),
        Trial::test("a_stopped_node_comes_back", move || a_stopped_node_comes_back().map_err(failed)),
        Trial::test("no_fault_under_load_is_reported", move || no_fault_under_load().map_err(failed)),
    ]
}

fn is_well(state: &TorusState) -> bool {
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
    await_state(&torus, "node 5 is back", |state| is_well(state) && state.epoch == 2);
    conforms(&mut torus)?;
    let accounts = torus.finish()?;
    assert_eq!(accounts.len(), 8);
    assert!(accounts[5].delivered > 100, "the returned node took part: {:?}", accounts[5]);
    assert!(accounts.iter().all(Account::is_balanced), "{accounts:?}");
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

/// Monitors and supervisors beside the conformance suite: nobody is reported, and no route changes.
fn no_fault_under_load() -> Result<(), LaunchError> {
    let mut torus = Launcher { supervisors: 2, ..launcher("2x2x1") }.launch()?;
    await_state(&torus, "all nodes are well", is_well);
    for _ in 0..3 {
        conforms(&mut torus)?;
    }
    let state = torus.state().expect("an acting supervisor");
    assert_eq!(state.epoch, 0, "{:?}", state.changes);
    let faults = state.changes.iter().filter(|change| change.state != NodeState::Ok);
    assert_eq!(faults.count(), 0, "{:?}", state.changes);
    torus.finish().map(drop)
}
