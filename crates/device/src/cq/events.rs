//! Completion events: arming the queue, signalling its channel, fetching and acknowledging events.

use std::sync::atomic::{Ordering, fence};

use millstream_lockfree::CancelGuard;
use millstream_lockfree::cq_ring::{ARM_ANY, ARM_NONE, ARM_SOLICITED};

use super::Cq;
use super::consumer::Position;

/// Completion events that the application fetched and acknowledged.
#[derive(Debug, Default)]
pub(super) struct EventCounts {
    pub(super) delivered: u32,
    pub(super) acknowledged: u32,
}

impl Cq {
    /// Requests an event for the next completion, or for the next solicited one or error. Completions since the last event
    /// that wait to be polled count: the event is signalled at once. Adapters keep the position of the last event, too. A
    /// program may arm the queue before it polls, and count on one event for each completion.
    ///
    /// # Panics
    /// Only if another thread panicked while it held the settings of event moderation.
    pub fn arm(&self, solicited_only: bool) {
        let requested = if solicited_only { ARM_SOLICITED } else { ARM_ANY };
        let moderated = self.ring.moderation.load(Ordering::Relaxed) > 1;
        if moderated {
            self.begin_moderation();
        }
        // A request for any completion is not weakened by a later one for solicited ones.
        if !(solicited_only && self.ring.armed.load(Ordering::Relaxed) == ARM_ANY)
            && self.ring.armed.swap(requested, Ordering::AcqRel) == ARM_NONE
        {
            self.requested.fetch_add(1, Ordering::Relaxed);
        }
        // A producer publishes, then reads `armed`. The consumer stores `armed`, then looks for completions.
        fence(Ordering::SeqCst);
        if self.channel.is_some() {
            self.signal_waiting(solicited_only, moderated);
        }
        if self.network_qps.load(Ordering::Relaxed) != 0 {
            // An application that sleeps receives no packets.
            let _uncancelled = CancelGuard::new();
            self.context.adapter.port.watch();
        }
    }

    /// Signals an armed queue for completions since the last event that wait to be polled.
    fn signal_waiting(&self, solicited_only: bool, moderated: bool) {
        let Some(found) = self.find_unnotified(solicited_only) else { return };
        if moderated {
            // The moderation period starts with them.
            self.ring.pending.fetch_add(1, Ordering::AcqRel);
            self.context.adapter.tasks.wake();
        } else if self.ring.disarm(|ring| match found {
            Position::Shared(position) => ring.notified.store(position, Ordering::Relaxed),
            Position::Own(position) => ring.notified_own.store(position, Ordering::Relaxed),
        }) {
            self.signal(self.ring.channel.load(Ordering::Relaxed));
        }
    }

    /// Signals the queue if it is armed and completions wait, because a producer exited before it looked. A moderated
    /// queue without counted completions starts its period instead.
    pub(super) fn signal_unseen(&self) {
        let armed = self.ring.armed.load(Ordering::Acquire);
        let moderated = self.ring.moderation.load(Ordering::Relaxed) > 1;
        if armed == ARM_NONE || (moderated && self.ring.pending.load(Ordering::Acquire) != 0) {
            return;
        }
        self.signal_waiting(armed == ARM_SOLICITED, moderated);
    }

    /// Whether a producer claimed an event and has not counted it.
    pub(super) fn lacks_event(&self) -> bool {
        let requested = self.requested.load(Ordering::Acquire);
        let delivered = self.events.lock().expect("no panic under this lock").delivered;
        let armed = u32::from(self.ring.armed.load(Ordering::Acquire) != ARM_NONE);
        let counted = self.ring.events.load(Ordering::Acquire).wrapping_add(armed);
        requested.wrapping_sub(delivered).wrapping_sub(counted) as i32 > 0
    }

    /// Counts an event that a producer claimed and did not count. The caller signals the channel.
    pub(super) fn count_event(&self) {
        self.ring.events.fetch_add(1, Ordering::AcqRel);
    }

    /// Events that were counted and not fetched. Peers can write this word, too. Each entry causes at most one event.
    pub(super) fn unfetched_events(&self) -> u32 {
        self.ring.events.load(Ordering::Acquire).min(2 * self.capacity())
    }

    /// Signals the queue if it is armed for such a completion of our own, the `position`-th.
    pub(super) fn notify(&self, solicited: bool, position: u32) {
        self.signal(self.ring.channel_to_signal(solicited, |ring| {
            ring.notified_own.store(position, Ordering::Relaxed);
        }));
    }

    pub(super) fn signal(&self, number: u32) {
        match &self.channel {
            _ if number == 0 => {}
            Some(channel) if number == channel.id => channel.signal(),
            _ => self.context.adapter.tasks.wake(),
        }
    }

    /// Takes back the events that were signalled and not fetched, and returns their number.
    pub(crate) fn cancel_events(&self) -> u32 {
        self.ring.events.swap(0, Ordering::AcqRel).min(2 * self.capacity())
    }

    pub(crate) fn take_event(&self) -> bool {
        let taken =
            self.ring.events.fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| n.checked_sub(1)).is_ok();
        if taken {
            self.events.lock().expect("no panic under this lock").delivered += 1;
        }
        taken
    }

    /// Acknowledges events that were fetched from the channel.
    ///
    /// # Panics
    /// Only if another thread panicked while it held the event counts.
    pub fn acknowledge(&self, events: u32) {
        let mut counts = self.events.lock().expect("no panic under this lock");
        counts.acknowledged = counts.acknowledged.wrapping_add(events);
        self.acknowledged.notify_all();
    }
}
