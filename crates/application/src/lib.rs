//! Parts that applications on a torus share.
//!
//! - [`counter_hash`] makes random numbers from a seed and a global index, so that data do not depend on the cut;
//! - [`NodeGroup`] is a node with operations of all nodes; [`run_on_threads`] runs an application on nodes of this process;
//! - [`Array`] has values in memory of its own or in a card's;
//! - [`allocate_on_card`] and [`attach`] give the kernel of a node's card its data;
//! - [`CardMessages`] carries messages from the card of one node to that of another;
//! - [`checkpoint`] writes one part a node and resumes on any shape;
//! - [`TimeSplit`] says what a node's time went into; [`time_table`] and [`picture`] show it;
//! - [`TorusApplication`] is an application that runs on any nodes.
#![deny(unsafe_code)]

mod array;
mod card_data;
mod card_messages;
pub mod checkpoint;
mod group;
mod hash;
pub mod picture;
mod text;
mod times;

pub use array::Array;
pub use card_data::{Place, allocate_on_card, attach};
pub use card_messages::{CardMessages, HEADER_BYTES};
pub use group::{NodeGroup, run_on_threads};
pub use hash::{counter_hash, mix};
pub use text::time_table;
pub use times::{NodeTimes, TimeSplit};

use millstream_fabric::FabricError;

/// Why an application ended early.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ApplicationError {
    /// An operation between nodes failed. A lost node is named.
    #[error("{0}")]
    Fabric(#[from] FabricError),
    /// A checkpoint cannot be written or read.
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::CheckpointError),
    /// The parameters are not possible.
    #[error("{0}")]
    Parameters(String),
    /// The run was told to end here, to show what its loss does.
    #[error("this node was told to fail at step {step}")]
    ToldToFail {
        /// The step.
        step: u64,
    },
    /// A node sent a message that it cannot have meant.
    #[error("malformed message of {bytes} bytes from another node")]
    Message {
        /// Its length.
        bytes: usize,
    },
}

/// A node that fails on purpose at a step, to show what its loss does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FailAt {
    /// The node.
    pub node: millstream_torus_core::NodeNumber,
    /// The step.
    pub step: u64,
}

/// An application that runs on any nodes.
pub trait TorusApplication: Sync {
    /// What it finds.
    type Report: Send;

    /// Runs one node's part. All nodes return the same report.
    ///
    /// # Errors
    /// [`ApplicationError`] of this node, or if another one is lost.
    fn run<F: millstream_fabric::Fabric>(&self, fabric: F) -> Result<Self::Report, ApplicationError>;

    /// Runs it on a torus of threads.
    ///
    /// # Errors
    /// The cause: the first error that is not the loss of another node.
    fn run_on_threads(
        &self,
        torus: millstream_torus_core::Dimensions,
    ) -> Result<Self::Report, ApplicationError> {
        let mut results = run_on_threads(torus, |node| self.run(node));
        let is_cause = |result: &Result<_, _>| matches!(result, Err(error) if !matches!(error, ApplicationError::Fabric(FabricError::NodeLost { .. })));
        let at = results.iter().position(is_cause).or_else(|| results.iter().position(Result::is_err));
        results.swap_remove(at.unwrap_or(0))
    }
}
