//! Changes of routes: two phases from one supervisor to all live nodes.
//!
//! ```text
//!   Coordinator ── PREPARE(e + 1, attempt, dead set) ──► Participant    tables of e and e + 1 are valid, e − 1 ends
//!               ◄─ PREPARED(e + 1, attempt) ────────────
//!               ── COMMIT(e + 1, attempt) ─────────────►                pairs move to e + 1
//!               ◄─ DRAINED(e) ──────────────────────────                no pair has packets of e on their way
//! ```
//! Every live node has taken in PREPARE(e + 2) before any packet of e + 2 exists, and thereby dropped packets of e. So
//! packets of at most two successive epochs are in the network. Messages may be lost, repeated and reordered; both sides
//! repeat them. A node that cannot follow an order answers BEHIND; the next plan has it as returning.

mod coordinator;
mod participant;

pub use coordinator::Coordinator;
pub use participant::{Effect, Participant};

use std::collections::BTreeSet;

use crate::Epoch;
use crate::faults::DeadSet;
use crate::topology::NodeNumber;

/// A supervisor's term. A node ignores orders of a lower ballot than the highest that it has seen, so a supervisor that
/// was replaced cannot commit anything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Ballot {
    /// Grows with takeovers.
    pub term: u64,
    /// The supervisor's node.
    pub supervisor: u16,
}

/// A try to prepare an epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Attempt {
    /// The supervisor's term.
    pub ballot: Ballot,
    /// Tries of this supervisor so far.
    pub number: u32,
}

/// What an epoch's routes avoid.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Plan {
    /// Dead nodes and links.
    pub dead: DeadSet,
    /// Nodes that were dead, or whose processes began anew, since they last took part: their pairs begin anew.
    pub returning: BTreeSet<NodeNumber>,
}

/// From a supervisor to a node.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Order {
    /// The supervisor's term.
    pub ballot: Ballot,
    /// What the node does.
    pub step: Step,
}

/// A step of a change.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Step {
    /// Tell the state: a supervisor takes over.
    Query,
    /// Compute tables and answer.
    Prepare {
        /// The next epoch.
        epoch: Epoch,
        /// The try.
        attempt: Attempt,
        /// What its routes avoid.
        plan: Plan,
    },
    /// Use the prepared routes.
    Commit {
        /// The epoch.
        epoch: Epoch,
        /// The try that all nodes answered.
        attempt: Attempt,
    },
}

/// From a node to a supervisor.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Answer {
    /// The term that is answered.
    pub ballot: Ballot,
    /// The answer.
    pub report: Report,
}

/// A node's state.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Report {
    /// The tables are ready.
    Prepared {
        /// The epoch.
        epoch: Epoch,
        /// The try.
        attempt: Attempt,
    },
    /// No packet of the epoch waits for its acknowledgement.
    Drained {
        /// The epoch.
        epoch: Epoch,
    },
    /// The committed epoch, its try and its plan.
    Committed {
        /// The node's epoch.
        epoch: Epoch,
        /// The try that was committed.
        attempt: Attempt,
        /// What its routes avoid.
        plan: Plan,
        /// Whether it takes part: from the start, or since an epoch has it as returning.
        has_joined: bool,
    },
    /// The order is for nodes that have prepared or committed what this one has not: it began anew, or missed an epoch.
    Behind {
        /// The epoch of the order.
        epoch: Epoch,
        /// Its try.
        attempt: Attempt,
    },
}
