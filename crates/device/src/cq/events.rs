//! Completion events: arming the queue, signalling its channel, fetching and acknowledging events.

use std::sync::atomic::{Ordering, fence};

use millstream_lockfree::cq_ring::{ARM_ANY, ARM_SOLICITED};

use super::Cq;

/// Completion events that the application fetched and acknowledged.
#[derive(Debug, Default)]
pub(super) struct EventCounts {
    pub(super) delivered: u32,
    pub(super) acknowledged: u32,
}

impl Cq {
    /// Requests an event for the next completion, or for the next solicited one or error.
    pub fn arm(&self, solicited_only: bool) {
        let armed = if solicited_only { ARM_SOLICITED } else { ARM_ANY };
        if self.ring.moderation.load(Ordering::Relaxed) > 1 {
            self.begin_moderation();
        }
        // A request for any completion is not weakened by a later one for solicited ones.
        if !(solicited_only && self.ring.armed.load(Ordering::Relaxed) == ARM_ANY) {
            self.ring.armed.store(armed, Ordering::Relaxed);
        }
        // A producer publishes, then reads `armed`. The consumer stores `armed`, then polls once more.
        fence(Ordering::SeqCst);
        if self.network_qps.load(Ordering::Relaxed) != 0 {
            // An application that sleeps receives no packets.
            self.context.adapter.port.watch();
        }
    }

    pub(super) fn notify(&self, solicited: bool) {
        self.signal(self.ring.channel_to_signal(solicited));
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
        // Peers can write this word, too. Each entry causes at most one event.
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
