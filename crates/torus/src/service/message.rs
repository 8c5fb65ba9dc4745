//! Messages of the service network.

use millstream_health::{HostReport, NodeState};
use millstream_torus_core::NodeNumber;
use millstream_torus_core::epoch::{Answer, Ballot, Order};
use serde::{Deserialize, Serialize};

/// To a supervisor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToSupervisor {
    /// The first line of everybody.
    Hello {
        /// Who this is.
        who: Who,
    },
    /// What a host monitor sees.
    Report {
        /// Its node.
        node: NodeNumber,
        /// The page.
        page: HostReport,
    },
    /// A node process answers an order.
    Answer(Answer),
    /// An application came to a node, or is gone.
    Application {
        /// The node.
        node: NodeNumber,
        /// Whether it is there.
        attached: bool,
    },
}

/// What is connected to a supervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Who {
    /// The process of a node. It gets orders, and learns which nodes are lost.
    Node {
        /// The node.
        node: NodeNumber,
        /// A random number of the process: another one means that it was started again.
        incarnation: u64,
    },
    /// A host monitor. It only reports.
    Monitor,
    /// A watcher, or another supervisor. It gets states.
    Watcher,
}

/// From a supervisor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FromSupervisor {
    /// A change of routes.
    Order(Order),
    /// Which nodes are lost.
    Lost(LostNodes),
    /// The state of the torus; also the supervisor's heartbeat.
    State(TorusState),
}

/// All nodes that are dead or whose application is gone, as the acting supervisor knows them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostNodes {
    /// The supervisor's term.
    pub ballot: Ballot,
    /// The nodes, by number.
    pub nodes: Vec<NodeNumber>,
}

impl LostNodes {
    /// Takes another list, unless a supervisor sent it that was replaced meanwhile. Whether it was taken.
    pub fn replace(&mut self, newer: LostNodes) -> bool {
        let taken = newer.ballot >= self.ballot;
        if taken {
            *self = newer;
        }
        taken
    }
}

/// The state of the torus, as a supervisor sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TorusState {
    /// Dimensions, as `2x2x2`.
    pub dimensions: String,
    /// The supervisor.
    pub supervisor: u16,
    /// Whether it acts.
    pub acting: bool,
    /// The epoch that it committed.
    pub epoch: u32,
    /// Whether all live nodes use it.
    pub settled: bool,
    /// The nodes, by number.
    pub nodes: Vec<NodeRow>,
    /// Changes of nodes so far, newest last.
    pub changes: Vec<Change>,
}

/// A node in the state of the torus.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeRow {
    /// The node.
    pub node: NodeNumber,
    /// Its state.
    pub state: NodeState,
    /// Whether routes avoid it.
    pub avoided: bool,
    /// Whether its application is there; `None` before the first one.
    pub application: Option<bool>,
}

/// A change of a node's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// Milliseconds since the supervisor began, without its pauses.
    pub at: u64,
    /// The node.
    pub node: NodeNumber,
    /// Its new state.
    pub state: NodeState,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_a_replaced_supervisor_is_not_taken() {
        let list = |term, node| {
            let ballot = Ballot { term, supervisor: 0 };
            LostNodes { ballot, nodes: vec![NodeNumber(node)] }
        };
        let mut known = LostNodes::default();
        for (newer, taken) in
            [(list(2, 1), true), (list(1, 2), false), (list(2, 3), true), (list(3, 4), true)]
        {
            assert_eq!((known.replace(newer.clone()), known == newer), (taken, taken), "{newer:?}");
        }
    }
}
