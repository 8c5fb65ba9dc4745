//! What Millstream's verbs programs share: device choice, connections, landing memory, waiting.
//!
//! Everything here is ordinary verbs, so a program written against it runs unchanged on an RDMA adapter and
//! on the soft device. Read in this order: [`loader`] (which `libibverbs.so.1` is used), [`device`] (which
//! device, port and address), [`memory`] (what peers may read and write), [`connect`] (two parties, one
//! reliable connection), [`queue`] (posting work and reading completions), [`wait`] (spin, then block),
//! [`message`] (many small messages over one connection).
//!
//! The objects are created through the crate `sideway`; the data path calls the verbs function table
//! directly, because a work request must cost nanoseconds and no allocation. The terms are those of the
//! InfiniBand Architecture Specification volume 1 (chapter 10 for queue pairs, completion queues and memory
//! regions, chapter 11 for the verbs).

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
pub use memory::{Access, Region, RemoteAddress, RemoteMemory, Sge};
pub use millstream_quantity::{Lkey, Psn, Qpn, Rkey};
pub use queue::{Completion, CompletionQueue, QueuePair, Status, WrId};
pub use wait::{WaitFd, WaitOutcome, Waiter};
