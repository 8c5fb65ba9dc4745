//! Announcement of an operation in flight: an initiator accesses memory of the queue pair's owner.
//!
//! The initiator announces the operation, then checks that its target (key, state, queue pair) is still valid. The owner
//! withdraws the target, then looks for announced operations. Between the two steps of each side lies a fence. It is
//! asymmetric, because the initiator runs on every request ([`barrier`]). So either the initiator sees the withdrawal, or
//! the owner sees the operation.

use crate::barrier;
use crate::sync::atomic::{AtomicU32, Ordering};

/// The announcement word of a queue pair. It is odd while an operation is in flight. It rises by one at the
/// start and at the end of an operation. It rises by two between operations without a pause.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct InflightOp(AtomicU32);

impl InflightOp {
    /// Announces an operation of the initiator, perhaps directly after another one. `last` is the value that
    /// it stored last.
    #[inline(always)]
    pub fn begin(&self, last: &mut u32, asymmetric: bool) {
        *last = last.wrapping_add(1) | 1;
        self.0.store(*last, Ordering::Release);
        barrier::light(asymmetric);
    }

    /// Withdraws the initiator's announcement.
    #[inline(always)]
    pub fn end(&self, last: &mut u32) {
        *last = last.wrapping_add(1);
        self.0.store(*last, Ordering::Release);
    }

    /// The value from which a new initiator continues.
    pub fn last(&self) -> u32 {
        self.0.load(Ordering::Relaxed) & !1
    }

    /// The operation in flight, if there is one. The owner calls this after [`barrier::heavy`].
    pub fn current(&self) -> Option<u32> {
        let word = self.0.load(Ordering::SeqCst);
        (word & 1 == 1).then_some(word)
    }

    /// Whether that operation has ended.
    pub fn has_ended(&self, operation: u32) -> bool {
        self.0.load(Ordering::Acquire) != operation
    }

    /// Removes the announcement of an initiator that has exited.
    pub fn clear(&self) {
        self.0.store(0, Ordering::Release);
    }
}
