//! Lines of JSON between a node process and its launcher, on standard input and output.

use serde::{Deserialize, Serialize};

use crate::traffic::TrafficCounters;

/// From the node process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeMessage {
    /// It accepts neighbours and applications.
    Listening {
        /// Address for neighbours.
        address: String,
        /// Abstract socket for applications.
        socket: String,
        /// Address of the seventh port for outside hosts.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        seventh: Option<String>,
    },
    /// All links are up.
    Ready,
    /// The counters, on request.
    Counters(TrafficCounters),
    /// The process cannot go on.
    Failed {
        /// The error.
        reason: String,
    },
}

/// To the node process. The end of its standard input ends it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeCommand {
    /// Connect to the neighbours among all nodes, by number.
    Peers(Vec<String>),
    /// Report the counters.
    Counters,
    /// All nodes end now: a neighbour's end is no fault.
    Finish,
}
