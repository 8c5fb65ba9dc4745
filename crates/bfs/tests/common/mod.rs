//! Nodes that are threads, for all tests.

use millstream_fabric::{Fabric, LocalNode};

/// Runs a function on all nodes; returns the results by node.
pub(crate) fn on_all_nodes<R: Send>(dimensions: &str, run: impl Fn(&mut LocalNode) -> R + Sync) -> Vec<R> {
    let torus = dimensions.parse().expect("valid dimensions");
    std::thread::scope(|scope| {
        let run = &run;
        let start = |mut node: LocalNode| scope.spawn(move || (node.here(), run(&mut node)));
        let threads: Vec<_> = LocalNode::all(torus).into_iter().map(start).collect();
        let mut results: Vec<_> = threads.into_iter().map(|t| t.join().expect("no panic")).collect();
        results.sort_by_key(|&(node, _)| node);
        results.into_iter().map(|(_, result)| result).collect()
    })
}
