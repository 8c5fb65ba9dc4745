//! Posting work requests and reading completions.
//!
//! The data path: no allocation, no lock of its own, one indirect call per posted request (or per list of
//! them). All methods take `&self`, because the verbs are thread-safe; two threads that poll one completion
//! queue see disjoint completions.

mod completion;
mod list;
mod pair;
mod request;

pub(crate) use completion::in_range;
pub use completion::{Completion, CompletionQueue, Opcode, PollError, QueueError, Status, WorkError};
pub use list::{List, ListFull, RecvList, Segment, SendList};
pub use pair::{PostError, QueuePair};
pub use request::{Signal, WrId};
