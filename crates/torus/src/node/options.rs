//! What a node process is, and why it cannot go on.

use std::io;
use std::time::Duration;

use millstream_card_abi::CardName;
use millstream_health::Timers;
use millstream_rdma::connect::ConnectError;
use millstream_rdma::device::{DeviceError, DeviceSelector};
use millstream_rdma::queue::{PollError, QueueError};
use millstream_rdma::wait::WaitError;
use millstream_torus_core::{Dimensions, NodeNumber};

use crate::engine::EngineOptions;
use crate::verbs::LinkError;

/// What a node process is.
#[derive(Clone, Debug)]
pub struct NodeOptions {
    /// Shape of the torus.
    pub dimensions: Dimensions,
    /// This node.
    pub node: NodeNumber,
    /// The run's key: nodes and applications of different runs do not meet.
    pub key: u64,
    /// Address for neighbours, for example `127.0.0.1:0`.
    pub listen: String,
    /// Addresses of all nodes by number, if they are known; else they come on standard input.
    pub peers: Option<Vec<String>>,
    /// The node was part of this run before: links are connected one by one, and an application is attached once the
    /// supervisors have taken the node back.
    pub rejoin: bool,
    /// The device.
    pub device: DeviceSelector,
    /// Sizes and times.
    pub engine: EngineOptions,
    /// How long to poll for further packets before the process sleeps.
    pub spin: Duration,
    /// Addresses of the supervisors.
    pub supervisors: Vec<String>,
    /// The card whose memory applications may register.
    pub card: Option<CardName>,
    /// Hosts outside of the torus may read and write the card's memory, without a program of this node.
    pub publish_card: bool,
    /// The seventh port, for hosts outside of the torus.
    pub seventh: Option<SeventhOptions>,
    /// Periods of the adapter monitor; without them it does not watch.
    pub timers: Option<Timers>,
}

/// The seventh port of a node.
#[derive(Clone, Debug)]
pub struct SeventhOptions {
    /// Address for outside hosts, for example `0.0.0.0:7600`.
    pub listen: String,
    /// Only hosts with this key are admitted.
    pub key: u64,
}

/// Why a node process cannot go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NodeError {
    /// The number exceeds the torus.
    #[error("node {node} does not exist: a torus of {dimensions} has nodes 0 to {}", .dimensions.nodes() - 1)]
    NoSuchNode {
        /// The number.
        node: u16,
        /// The dimensions.
        dimensions: Dimensions,
    },
    /// The list of addresses has another length.
    #[error("{given} addresses for a torus of {dimensions}, which has {} nodes", .dimensions.nodes())]
    Peers {
        /// Number of addresses.
        given: usize,
        /// The dimensions.
        dimensions: Dimensions,
    },
    /// The launcher sent something else than a command. The line is not shown: it may be a key.
    #[error("standard input: a line is not a command: {cause}")]
    Command {
        /// The cause.
        cause: serde_json::Error,
    },
    /// The device cannot be opened.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The device refused a queue.
    #[error(transparent)]
    Queue(#[from] QueueError),
    /// The address cannot be used.
    #[error(transparent)]
    Listen(#[from] ConnectError),
    /// The links cannot be connected.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// Completions cannot be waited for.
    #[error(transparent)]
    Wait(#[from] WaitError),
    /// Completions cannot be polled.
    #[error(transparent)]
    Poll(#[from] PollError),
    /// The card cannot be used.
    #[error("card {name}: {cause}")]
    Card {
        /// The card.
        name: CardName,
        /// The cause.
        cause: io::Error,
    },
    /// A system call failed.
    #[error("{what}: {cause}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// The cause.
        cause: io::Error,
    },
}

pub(super) fn context(what: &'static str) -> impl FnOnce(io::Error) -> NodeError {
    move |cause| NodeError::Io { what, cause }
}
