//! Verbs for applications: device selection, connections, registered memory, waiting, messages.
//!
//! The crate uses ordinary verbs, so programs run unchanged on RDMA adapters and on the soft device. Read
//! [`loader`] (selects `libibverbs.so.1`), [`device`] (device, port and GID) and [`memory`] (registered
//! memory) first. Then read [`connect`] (reliable connections), [`queue`] (work requests and completions),
//! [`wait`] (poll, then block) and [`message`] (small messages over one connection).
//!
//! Objects are created through the crate `sideway`. The data path calls the verbs directly, without allocation. Terms
//! are those of the InfiniBand Architecture Specification, volume 1: chapter 10 (queue pairs, completion queues, memory
//! regions) and chapter 11 (verbs).

pub mod connect;
pub mod deadline;
pub mod device;
mod error;
pub mod loader;
pub mod memory;
pub mod message;
pub mod queue;
pub mod wait;

pub use connect::{Listener, PreparedQueuePair, RcOptions};
pub use deadline::Deadline;
pub use device::{Device, DeviceSelector};
pub use error::VerbsError;
pub use memory::{Access, Region, RemoteAddress, RemoteMemory, Sge};
pub use millstream_quantity::{Lkey, Psn, Qpn, Rkey};
pub use queue::{Completion, CompletionQueue, QueuePair, Status, WrId};
pub use wait::{CompletionWaiter, WaitFd, WaitOutcome};
