//! Asynchronous events: what happens to an object outside any work request (IBTA volume 1, 11.6.3).
//!
//! Events wait in their context. Who fetches one acknowledges it later, and the end of the object waits
//! for that: until then the program may be looking at the object through the event.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};

/// `IBV_EVENT_CQ_ERR`
pub(crate) const EVENT_CQ_ERR: u32 = 0;
/// `IBV_EVENT_QP_FATAL`
pub(crate) const EVENT_QP_FATAL: u32 = 1;
/// `IBV_EVENT_QP_REQ_ERR`
pub(crate) const EVENT_QP_REQ_ERR: u32 = 2;
/// `IBV_EVENT_QP_ACCESS_ERR`
pub(crate) const EVENT_QP_ACCESS_ERR: u32 = 3;
/// `IBV_EVENT_COMM_EST`
pub(crate) const EVENT_COMM_EST: u32 = 4;
/// `IBV_EVENT_SQ_DRAINED`
pub(crate) const EVENT_SQ_DRAINED: u32 = 5;

/// `IBV_EVENT_SRQ_LIMIT_REACHED`
pub(crate) const EVENT_SRQ_LIMIT_REACHED: u32 = 15;
/// `IBV_EVENT_QP_LAST_WQE_REACHED`
pub(crate) const EVENT_QP_LAST_WQE_REACHED: u32 = 16;

/// The peer's queue pair fails without an event; its completion tells the story.
pub(crate) const NO_EVENT: u32 = u32::MAX;

/// Whether a peer can have caused this event in a queue pair of ours. Others belong to other kinds of
/// objects, which programs would take the queue pair for.
pub(crate) fn may_be_reported(event: u32) -> bool {
    matches!(event, EVENT_QP_FATAL | EVENT_QP_REQ_ERR | EVENT_QP_ACCESS_ERR | NO_EVENT)
}

/// An object as its program knows it: the program's pointer, and the events about it that were fetched.
#[derive(Debug, Default)]
pub struct Handle {
    pointer: AtomicU64,
    events: Mutex<Events>,
    acknowledged: Condvar,
}

#[derive(Debug, Default)]
struct Events {
    /// Fetched and not yet acknowledged.
    held: u32,
    /// The object has ended: nothing more is said about it.
    ended: bool,
}

impl Handle {
    /// The program's pointer to the object.
    #[must_use]
    pub fn pointer(&self) -> u64 {
        self.pointer.load(Ordering::Acquire)
    }

    /// Notes the program's pointer to the object.
    pub fn set_pointer(&self, pointer: u64) {
        self.pointer.store(pointer, Ordering::Release);
    }

    /// Acknowledges an event that was fetched.
    ///
    /// # Panics
    /// Only if another thread panicked while it held the counts.
    pub fn acknowledge(&self) {
        let mut events = self.events.lock().expect("no panic under this lock");
        // A program may acknowledge more than it got.
        events.held = events.held.saturating_sub(1);
        self.acknowledged.notify_all();
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.events.lock().expect("no panic under this lock").ended
    }

    pub(crate) fn hand_out(&self) {
        self.events.lock().expect("no panic under this lock").held += 1;
    }

    pub(crate) fn end(&self) {
        self.events.lock().expect("no panic under this lock").ended = true;
    }

    pub(crate) fn wait_for_acknowledgements(&self) {
        let mut events = self.events.lock().expect("no panic under this lock");
        while events.held != 0 {
            events = self.acknowledged.wait(events).expect("no panic under this lock");
        }
    }
}

/// Something that happened, fetched from its context. Acknowledged when dropped.
#[derive(Debug)]
pub struct AsyncEvent {
    kind: u32,
    handle: Arc<Handle>,
}

impl AsyncEvent {
    pub(crate) fn fetched(kind: u32, handle: Arc<Handle>) -> Self {
        handle.hand_out();
        Self { kind, handle }
    }

    /// `IBV_EVENT_*`; says what kind of object the event is about.
    #[must_use]
    pub fn kind(&self) -> u32 {
        self.kind
    }

    /// The program's pointer to the object.
    #[must_use]
    pub fn pointer(&self) -> u64 {
        self.handle.pointer()
    }

    /// Leaves the event for the program to acknowledge, by [`Handle::acknowledge`] of the object.
    pub fn leave_unacknowledged(self) {
        self.handle.hand_out();
    }
}

impl Drop for AsyncEvent {
    fn drop(&mut self) {
        self.handle.acknowledge();
    }
}
