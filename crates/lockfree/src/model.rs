//! The model checker's replacements for the kernel: thread identities, and processes that exit.

use std::hash::{DefaultHasher, Hash, Hasher};

use crate::sync::atomic::{AtomicBool, Ordering};

/// Process ids are below this.
const PROCESSES: usize = 8;

loom::lazy_static! {
    static ref EXITED: [AtomicBool; PROCESSES] = std::array::from_fn(|_| AtomicBool::new(false));
}

/// Marks a process as exited. Its stores so far are visible to all, and it makes no more.
pub fn exit_process(pid: u32) {
    EXITED[pid as usize].store(true, Ordering::Release);
}

/// Whether a process has exited.
#[must_use]
pub fn has_exited(pid: u32) -> bool {
    EXITED[pid as usize].load(Ordering::Acquire)
}

/// Processes of the model execute no other program.
#[must_use]
pub(crate) fn has_unmapped(_pid: u32, _address: usize) -> bool {
    false
}

/// A number unique to this thread of the model, as the address of an aligned block would be.
pub(crate) fn this_thread() -> usize {
    let mut hasher = DefaultHasher::new();
    loom::thread::current().id().hash(&mut hasher);
    hasher.finish() as usize & !0xf | 1 << 63
}
