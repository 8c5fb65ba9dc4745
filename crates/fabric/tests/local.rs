//! The conformance suite on threads of one process.

use std::time::Duration;

use millstream_fabric::{Collectives, Fabric, FabricError, LocalNode, Neighbourhood, Reduction, conformance};
use millstream_torus_core::NodeNumber;

fn on_all_nodes(dimensions: &str, run: impl Fn(LocalNode) + Sync) {
    let torus = dimensions.parse().expect("valid dimensions");
    std::thread::scope(|scope| {
        for node in LocalNode::all(torus) {
            scope.spawn(|| run(node));
        }
    });
}

#[test]
fn local_passes_the_conformance_suite() {
    for dimensions in ["1x1x1", "2x1x1", "2x2x2", "3x2x1"] {
        on_all_nodes(dimensions, |mut node| {
            let checks = conformance::checks::<LocalNode>();
            assert_eq!(checks.len(), 9);
            checks.into_iter().for_each(|(_, check)| check(&mut node));
        });
    }
}

#[test]
fn a_lost_node_ends_waits_and_operations() {
    let lost = FabricError::NodeLost { node: NodeNumber(1) };
    on_all_nodes("2x1x1", |mut node| {
        let mut collectives = Collectives::new(&mut node, 1, Duration::from_secs(30)).unwrap();
        if node.here() == NodeNumber(1) {
            return;
        }
        assert_eq!(collectives.barrier(&mut node), Err(lost));
        assert_eq!(node.flush(NodeNumber(1)), Err(lost));
        assert_eq!(node.exchange(&[], Duration::from_secs(30)), Err(lost));
        assert_eq!(Neighbourhood::new(&mut node, &[], 8, Duration::from_secs(30)).map(drop), Err(lost));
    });
}

#[test]
fn a_lost_peer_ends_an_exchange_of_messages() {
    on_all_nodes("2x1x1", |mut node| {
        let other = NodeNumber(1 - node.here().0);
        let mut neighbourhood = Neighbourhood::new(&mut node, &[other], 8, Duration::from_secs(30)).unwrap();
        if node.here() == NodeNumber(1) {
            return;
        }
        let result = neighbourhood.exchange(&mut node, vec![vec![1; 20]]);
        assert_eq!(result, Err(FabricError::NodeLost { node: other }));
    });
}

#[test]
fn a_wait_ends_at_its_deadline() {
    on_all_nodes("1x1x1", |mut node| {
        let waited = Duration::from_millis(20);
        let result = node.wait_counter(0, 1, NodeNumber(0), waited);
        assert_eq!(result, Err(FabricError::TimedOut { waited }));
    });
}

const NO_TIME: Duration = Duration::ZERO;

/// The nodes of a torus of two, on one thread.
fn pair() -> [LocalNode; 2] {
    LocalNode::all("2x1x1".parse().expect("valid")).try_into().expect("two nodes")
}

/// Calls on both nodes at once what all nodes call.
fn together<R: Send>(
    [first, second]: &mut [LocalNode; 2],
    call: impl Fn(&mut LocalNode) -> R + Sync,
) -> [R; 2] {
    std::thread::scope(|scope| {
        let other = scope.spawn(|| call(second));
        [call(first), other.join().expect("no panic")]
    })
}

/// The second node takes no part in time: its turn comes when the first one has given up.
#[test]
fn a_collective_operation_that_timed_out_fails_all_later_ones() {
    let mut nodes = pair();
    let [mut first, mut second] =
        together(&mut nodes, |node| Collectives::new(node, 8, Duration::from_secs(30)).unwrap());
    let timed_out = Err(FabricError::TimedOut { waited: NO_TIME });
    first.set_timeout(NO_TIME);
    assert_eq!(first.allreduce(&mut nodes[0], Reduction::Sum, &[1]), timed_out);
    // The block of the first node has arrived.
    assert_eq!(second.allreduce(&mut nodes[1], Reduction::Sum, &[2]), Ok(vec![3]));
    // The block of the second node has arrived, too; but a retry would count the first one's block again.
    first.set_timeout(Duration::from_secs(30));
    assert_eq!(first.allreduce(&mut nodes[0], Reduction::Sum, &[1]), timed_out);
    assert_eq!(first.barrier(&mut nodes[0]), timed_out.map(drop));
}

#[test]
fn an_exchange_that_timed_out_fails_all_later_ones() {
    let mut nodes = pair();
    let timed_out = Err(FabricError::TimedOut { waited: NO_TIME });
    assert_eq!(nodes[0].exchange(b"a", NO_TIME), timed_out);
    assert_eq!(nodes[1].exchange(b"b", Duration::from_secs(30)), Ok(vec![b"a".to_vec(), b"b".to_vec()]));
    assert_eq!(nodes[0].exchange(b"c", Duration::from_secs(30)), timed_out);
}
