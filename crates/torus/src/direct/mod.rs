//! The fabric over a full mesh of reliable connections, where a switch joins all nodes.
//!
//! ```text
//!   put     RDMA WRITE into the region itself; a counter is the immediate data of the last one, an event a message behind it
//!   get     RDMA READ          fetch_add, compare_swap   RDMA atomics
//! ```
//! A node has a queue pair for each other node, and no node process. Nodes tell each other their regions, so a node checks
//! key and bounds before it posts: a wrong operation never reaches a queue pair, which it would break for all. A region
//! that ends stays registered until all nodes have confirmed that they forgot it.
//!
//! Messages are taken whenever the node calls the fabric. Puts, gets and atomic operations of others need no call.

mod fabric;
mod mesh;
mod message;
mod node;

use std::cell::RefCell;
use std::time::Duration;

pub use mesh::{MeshError, Rendezvous};
use millstream_rdma::device::{self, DeviceSelector};
use millstream_rdma::{Deadline, Device};
use millstream_torus_core::{Dimensions, NodeNumber};

use crate::application::{ENV_DIMENSIONS, ENV_RANK};
use crate::key;

/// Environment variable with the address where the nodes of a mesh meet.
pub const ENV_RENDEZVOUS: &str = "MILLSTREAM_DIRECT_RENDEZVOUS";
/// Environment variable with the key of the run, 16 hexadecimal digits.
pub const ENV_KEY: &str = "MILLSTREAM_DIRECT_KEY";

/// How long nodes wait for each other at the start.
const START: Duration = Duration::from_secs(90);
/// How long a node at its end waits for the last puts.
const END: Duration = Duration::from_secs(10);

/// A node of a mesh.
#[derive(Debug)]
pub struct DirectNode {
    /// Messages are also taken by calls that only look.
    inner: RefCell<node::Node>,
}

/// Where a node belongs.
#[derive(Clone, Debug)]
pub struct DirectOptions {
    /// Shape; it names neighbours only.
    pub dimensions: Dimensions,
    /// This node.
    pub node: NodeNumber,
    /// Key of the run: only nodes with the same key connect.
    pub key: u64,
    /// Where the nodes meet.
    pub rendezvous: String,
}

impl DirectNode {
    /// Connects this process with all other nodes of the run that the environment names.
    ///
    /// # Errors
    /// [`MeshError`].
    pub fn from_environment() -> Result<DirectNode, MeshError> {
        let value = |name: &'static str| std::env::var(name).map_err(|_| MeshError::Environment { name });
        let wrong = |name: &'static str| move |_| MeshError::Environment { name };
        let options = DirectOptions {
            rendezvous: value(ENV_RENDEZVOUS)?,
            dimensions: value(ENV_DIMENSIONS)?
                .parse()
                .map_err(|_| MeshError::Environment { name: ENV_DIMENSIONS })?,
            node: NodeNumber(value(ENV_RANK)?.parse().map_err(wrong(ENV_RANK))?),
            key: key::parse(&value(ENV_KEY)?).ok_or(MeshError::Environment { name: ENV_KEY })?,
        };
        let device = device::open(&DeviceSelector::from_environment())?;
        DirectNode::connect(&options, &device)
    }

    /// Connects with all other nodes, which call this as well.
    ///
    /// # Errors
    /// [`MeshError`].
    pub fn connect(options: &DirectOptions, device: &Device) -> Result<DirectNode, MeshError> {
        let inner = mesh::connect(options, device, Deadline::after(START))?;
        Ok(DirectNode { inner: RefCell::new(inner) })
    }
}

impl Drop for DirectNode {
    /// Puts under way arrive before the queue pairs end.
    fn drop(&mut self) {
        let nodes = self.inner.get_mut();
        let all: Vec<_> = nodes.torus.all().collect();
        // A node that takes nothing, or is lost, must not hold this process.
        let _ =
            nodes.wait(Deadline::after(END), |node| all.iter().all(|&to| node.is_idle(to)).then_some(Ok(())));
    }
}
