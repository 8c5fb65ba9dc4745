//! Moderation: one completion event for several completions.
//!
//! While it is in force, a queue that is armed is signalled when a number of completions has been added, or a
//! time after the first of them, whichever comes first. The number is counted by those who add completions;
//! the time is kept by the owner's progress thread, which the first completion wakes.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use millstream_lockfree::cq_ring::ARM_NONE;

use crate::cq::Cq;

/// The owner's side of it.
#[derive(Debug, Default)]
pub(crate) struct Moderation {
    /// How long the first completion may wait for others; zero while events are not moderated.
    period: Duration,
    /// When the first completion since the queue was armed was seen.
    since: Option<Instant>,
    /// Whether the progress thread knows the queue.
    watched: bool,
}

impl Cq {
    /// One event for `count` completions, or for as many as have come `period` after the first. A count
    /// of less than two, or no time to wait, is an event for each.
    ///
    /// # Panics
    /// Only if another thread panicked while it held the settings.
    pub fn moderate(self: &Arc<Self>, count: u16, period: Duration) {
        let host = self.context.host;
        let in_force = count > 1 && !period.is_zero();
        let mut moderation = self.moderation.lock().expect("no panic under this lock");
        moderation.period = if in_force { period } else { Duration::ZERO };
        if in_force && !std::mem::replace(&mut moderation.watched, true) {
            host.progress.moderate(Arc::downgrade(self));
        }
        self.ring.moderation.store(if in_force { count.into() } else { 0 }, Ordering::SeqCst);
        drop(moderation);
        // Those that wait by the old rule are judged by the new one.
        host.progress.wake();
    }

    /// The queue is armed anew: the count begins.
    #[cold]
    pub(crate) fn begin_moderation(&self) {
        let mut moderation = self.moderation.lock().expect("no panic under this lock");
        moderation.since = None;
        self.ring.pending.store(0, Ordering::Release);
    }

    /// Signals the queue if the time of the completions that wait is over; says when to come back if not.
    pub(crate) fn end_moderation(&self) -> Option<Duration> {
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
        if ring.disarm()
            && let Some(channel) = self.channel()
        {
            channel.signal();
        }
        None
    }
}
