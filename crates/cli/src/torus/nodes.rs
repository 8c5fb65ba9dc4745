//! Applications on the nodes of a torus: one process of `torus run`, or a thread for each node.

use std::error::Error;

use millstream_fabric::{Fabric, LocalNode, OnCard};
use millstream_torus::application::ENV_SOCKET;
use millstream_torus::direct::ENV_RENDEZVOUS;
use millstream_torus::{DirectNode, TorusNode};
use millstream_torus_core::{Dimensions, NodeNumber};

use super::application::{NO_CARD, NodeMemory};

/// An application that runs on every node.
pub(super) trait NodeProgram: Sync {
    type Output: Send;

    /// Refuses nodes on which it cannot run as its options say.
    fn check(&self, torus: Dimensions) -> Result<(), String>;

    fn run<F: Fabric>(&self, node: &mut F) -> Self::Output;
}

/// Results of a program, by node.
type Outputs<P> = Result<Vec<(NodeNumber, <P as NodeProgram>::Output)>, Box<dyn Error>>;

/// Runs a program on this process's node if `torus run` started it, else on a thread for each node of `dimensions`.
/// Returns the results of this process, by node.
pub(super) fn run<P: NodeProgram>(
    program: &P,
    dimensions: Option<Dimensions>,
    memory: NodeMemory,
) -> Outputs<P> {
    if std::env::var_os(ENV_SOCKET).is_some() {
        let node = TorusNode::from_environment()?;
        if memory.has_card() {
            let node = OnCard::new(node, 0).map_err(|error| format!("{error}; {NO_CARD}"))?;
            return on_this_node(program, node, dimensions);
        }
        return on_this_node(program, node, dimensions);
    }
    if memory.has_card() {
        return Err(NO_CARD.into());
    }
    if std::env::var_os(ENV_RENDEZVOUS).is_some() {
        return on_this_node(program, DirectNode::from_environment()?, dimensions);
    }
    let torus = match dimensions {
        Some(torus) => torus,
        None => Dimensions::new([1; 3])?,
    };
    program.check(torus)?;
    Ok(std::thread::scope(|scope| {
        let start = |mut node: LocalNode| (node.here(), scope.spawn(move || program.run(&mut node)));
        let threads: Vec<_> = LocalNode::all(torus).into_iter().map(start).collect();
        let join = |(node, thread): (_, std::thread::ScopedJoinHandle<'_, P::Output>)| match thread.join() {
            Ok(output) => (node, output),
            Err(panic) => std::panic::resume_unwind(panic),
        };
        threads.into_iter().map(join).collect()
    }))
}

/// Runs a program on the node of this process.
fn on_this_node<P: NodeProgram>(
    program: &P,
    mut node: impl Fabric,
    dimensions: Option<Dimensions>,
) -> Outputs<P> {
    let torus = node.dimensions();
    if dimensions.is_some_and(|wanted| wanted != torus) {
        return Err(format!("--dimensions differ from those of `torus run`, {torus}: leave them out").into());
    }
    program.check(torus)?;
    let output = program.run(&mut node);
    Ok(vec![(node.here(), output)])
}
