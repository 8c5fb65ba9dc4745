//! Work requests and completions.
//!
//! The data path adds no allocation and no lock; it makes one indirect call per posted work request or list.
//! Methods take `&self`, because verbs are thread-safe. Two threads that poll one completion queue get
//! disjoint completions.

mod completion;
mod list;
mod pair;
mod request;

pub(crate) use completion::in_range;
pub use completion::{Completion, CompletionQueue, Opcode, PollError, QueueError, Status, WorkError};
pub use list::{List, ListFull, RecvList, Segment, SendList};
pub use pair::{PostError, QueuePair};
pub use request::{Signal, WrId};
