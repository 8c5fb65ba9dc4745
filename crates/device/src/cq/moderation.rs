//! Event moderation: one completion event for several completions (`ibv_modify_cq`).
//!
//! A moderated queue is signalled after a number of completions, or at the latest a period after the first of
//! them. Producers count the completions. The owner's progress thread measures the period; the first
//! completion wakes it.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use millstream_lockfree::cq_ring::ARM_NONE;

use super::Cq;
use crate::tasks::ModeratedEvents;

/// The owner's side of moderation.
#[derive(Debug, Default)]
pub(super) struct Moderation {
    /// Longest delay of the first completion's event; zero while events are not moderated.
    period: Duration,
    /// The time at which the progress thread saw the first completion since the queue was armed.
    since: Option<Instant>,
    /// Whether the queue was added to the progress thread's list.
    registered: bool,
}

impl Cq {
    /// Moderates events: one for `count` completions, or `period` after the first. A count
    /// of less than two, or a period of zero, turns moderation off.
    ///
    /// # Panics
    /// Only if another thread panicked while it held the settings.
    pub fn moderate(self: &Arc<Self>, count: u16, period: Duration) {
        let tasks = self.context.adapter.tasks;
        let in_force = count > 1 && !period.is_zero();
        let mut moderation = self.moderation.lock().expect("no panic under this lock");
        moderation.period = if in_force { period } else { Duration::ZERO };
        if in_force && !std::mem::replace(&mut moderation.registered, true) {
            let this: Weak<Self> = Arc::downgrade(self);
            tasks.add_moderated(this);
        }
        self.ring.moderation.store(if in_force { count.into() } else { 0 }, Ordering::SeqCst);
        drop(moderation);
        // The new rule applies to pending completions, too.
        tasks.wake();
    }

    /// Restarts the count when the queue is armed.
    #[cold]
    pub(super) fn begin_moderation(&self) {
        let mut moderation = self.moderation.lock().expect("no panic under this lock");
        moderation.since = None;
        self.ring.pending.store(0, Ordering::Release);
    }
}

impl ModeratedEvents for Cq {
    fn end_moderation(&self) -> Option<Duration> {
        let mut moderation = self.moderation.lock().expect("no panic under this lock");
        let ring = self.ring;
        if ring.pending.load(Ordering::Acquire) == 0 || ring.armed.load(Ordering::Acquire) == ARM_NONE {
            moderation.since = None;
            return None;
        }
        let since = *moderation.since.get_or_insert_with(Instant::now);
        let left = moderation.period.saturating_sub(since.elapsed());
        if !left.is_zero() {
            return Some(left);
        }
        moderation.since = None;
        if ring.disarm(|_| ())
            && let Some(channel) = self.channel()
        {
            channel.signal();
        }
        None
    }
}
