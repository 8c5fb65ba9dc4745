//! "I am inside your memory": what an initiator says before every operation, and what the owner of the memory looks
//! for after it has withdrawn a key, a state or a queue pair.
//!
//! The initiator announces itself and then looks whether what it wants is still there; the owner takes it away and then
//! looks for announcements. Between the two steps of each lies a fence, asymmetric because the first side runs all
//! the time ([`barrier`]). So either the initiator finds the thing gone, or the owner finds the initiator inside.

use millstream_shm::barrier;
use millstream_shm::sync::atomic::{AtomicU32, Ordering};

/// The word in a queue pair's entry. Odd while an operation touches the owner's memory; rises by one at its start and
/// at its end, or by two where the next one follows at once.
#[derive(Debug, Default)]
#[repr(transparent)]
pub(crate) struct Announcement(AtomicU32);

impl Announcement {
    /// The initiator begins an operation, perhaps where another one ends. `last` is what it said last.
    #[inline(always)]
    pub(crate) fn begin(&self, last: &mut u32, asymmetric: bool) {
        *last = last.wrapping_add(1) | 1;
        self.0.store(*last, Ordering::Release);
        barrier::light(asymmetric);
    }

    /// The operation is over.
    #[inline(always)]
    pub(crate) fn end(&self, last: &mut u32) {
        *last = last.wrapping_add(1);
        self.0.store(*last, Ordering::Release);
    }

    /// Where a new initiator goes on counting.
    pub(crate) fn last(&self) -> u32 {
        self.0.load(Ordering::Relaxed) & !1
    }

    /// The owner, after a [`barrier::heavy`]: the operation that is under way, if there is one.
    pub(crate) fn under_way(&self) -> Option<u32> {
        let said = self.0.load(Ordering::SeqCst);
        (said & 1 == 1).then_some(said)
    }

    /// Whether that operation has ended.
    pub(crate) fn is_over(&self, operation: u32) -> bool {
        self.0.load(Ordering::Acquire) != operation
    }

    /// The owner: what a dead initiator has left does not count.
    pub(crate) fn clear(&self) {
        self.0.store(0, Ordering::Release);
    }
}
