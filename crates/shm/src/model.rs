//! What the model checker has in place of the kernel: threads with names, processes that end.

use std::hash::{DefaultHasher, Hash, Hasher};

use crate::sync::atomic::{AtomicBool, Ordering};

/// Processes are numbered below this.
const PROCESSES: usize = 8;

loom::lazy_static! {
    static ref ENDED: [AtomicBool; PROCESSES] = std::array::from_fn(|_| AtomicBool::new(false));
}

/// Ends a process: what it has done is there for all to see, and it does nothing more.
pub fn end_process(pid: u32) {
    ENDED[pid as usize].store(true, Ordering::Release);
}

/// Whether a process has ended.
#[must_use]
pub fn process_is_gone(pid: u32) -> bool {
    ENDED[pid as usize].load(Ordering::Acquire)
}

/// A number that no other thread of the model has, as an address would be.
pub(crate) fn this_thread() -> usize {
    let mut hasher = DefaultHasher::new();
    loom::thread::current().id().hash(&mut hasher);
    hasher.finish() as usize | 1 << 63
}
