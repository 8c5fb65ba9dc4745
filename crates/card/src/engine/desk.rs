//! What the rest of the card wants of the rings, and what it is told.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// Shared by the engine and the warden.
#[derive(Debug, Default)]
pub(crate) struct RingDesk {
    /// No command may begin, and the one that runs is to end: a lease has ended, or the card does.
    closed: AtomicBool,
    /// A command runs.
    busy: AtomicBool,
    /// On which of the card's memories.
    generation: AtomicU32,
}

impl RingDesk {
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }

    pub(crate) fn open(&self) {
        self.closed.store(false, Ordering::SeqCst);
    }

    /// Tells a kernel to end.
    pub(super) fn closed(&self) -> &AtomicBool {
        &self.closed
    }

    /// Whether a command uses this memory of the card.
    pub(crate) fn is_busy_on(&self, generation: u32) -> bool {
        self.busy.load(Ordering::SeqCst) && self.generation.load(Ordering::SeqCst) == generation
    }

    /// Commands from here on use this memory of the card.
    pub(super) fn set_generation(&self, generation: u32) {
        self.generation.store(generation, Ordering::SeqCst);
    }

    /// Whether a command may begin; if so, [`RingDesk::end`] follows.
    pub(super) fn begin(&self) -> bool {
        self.busy.store(true, Ordering::SeqCst);
        // Either this sees that the rings are closed, or who closed them sees that a command runs.
        let begins = !self.closed.load(Ordering::SeqCst);
        if !begins {
            self.end();
        }
        begins
    }

    pub(super) fn end(&self) {
        self.busy.store(false, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_begins_while_the_rings_are_open_and_counts_on_its_own_memory() {
        let desk = RingDesk::default();
        assert!(desk.begin() && desk.is_busy_on(0) && !desk.is_busy_on(1));
        desk.close();
        assert!(desk.is_busy_on(0), "it has not ended yet");
        desk.end();
        assert!(!desk.is_busy_on(0) && !desk.begin() && !desk.is_busy_on(0));
        desk.open();
        desk.set_generation(1);
        assert!(desk.begin() && desk.is_busy_on(1) && !desk.is_busy_on(0));
    }
}
