//! Asynchronous events of queue pairs, completion queues and shared receive queues (IBTA volume 1, 11.6.3).
//!
//! Events are queued in their context. The program acknowledges an event after it has fetched and handled it, and
//! destroying the object waits for that: until then the program may use the object through the event.

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

/// The peer's queue pair fails without an event: its completion reports the error.
pub(crate) const NO_EVENT: u32 = u32::MAX;

/// Whether a peer may report this event for one of our queue pairs. Other events belong to other types of
/// objects, and a program would misinterpret the queue pair's pointer.
pub(crate) fn may_be_reported(event: u32) -> bool {
    matches!(event, EVENT_QP_FATAL | EVENT_QP_REQ_ERR | EVENT_QP_ACCESS_ERR | NO_EVENT)
}

/// The program's handle of an object: its pointer, and the count of fetched events.
#[derive(Debug, Default)]
pub struct ObjectHandle {
    pointer: AtomicU64,
    events: Mutex<Events>,
    acknowledged: Condvar,
}

#[derive(Debug, Default)]
struct Events {
    /// Fetched and not yet acknowledged.
    held: u32,
    /// The object was destroyed: it has no more events.
    ended: bool,
}

impl ObjectHandle {
    /// The program's pointer to the object.
    #[must_use]
    pub fn pointer(&self) -> u64 {
        self.pointer.load(Ordering::Acquire)
    }

    /// Stores the program's pointer to the object.
    pub fn set_pointer(&self, pointer: u64) {
        self.pointer.store(pointer, Ordering::Release);
    }

    /// Acknowledges an event that was fetched.
    ///
    /// # Panics
    /// Only if another thread panicked while it held the counts.
    pub fn acknowledge(&self) {
        let mut events = self.events.lock().expect("no panic under this lock");
        // A program may acknowledge more events than it fetched.
        events.held = events.held.saturating_sub(1);
        self.acknowledged.notify_all();
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.events.lock().expect("no panic under this lock").ended
    }

    pub(crate) fn count_fetched(&self) {
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

/// A fetched event. Dropping it acknowledges it.
#[derive(Debug)]
pub struct AsyncEvent {
    kind: u32,
    handle: Arc<ObjectHandle>,
}

impl AsyncEvent {
    pub(crate) fn fetched(kind: u32, handle: Arc<ObjectHandle>) -> Self {
        handle.count_fetched();
        Self { kind, handle }
    }

    /// `IBV_EVENT_*`, which implies the type of the object.
    #[must_use]
    pub fn kind(&self) -> u32 {
        self.kind
    }

    /// The program's pointer to the object.
    #[must_use]
    pub fn pointer(&self) -> u64 {
        self.handle.pointer()
    }

    /// Leaves the acknowledgement to the program, by [`ObjectHandle::acknowledge`] of the object.
    pub fn leave_unacknowledged(self) {
        self.handle.count_fetched();
    }
}

impl Drop for AsyncEvent {
    fn drop(&mut self) {
        self.handle.acknowledge();
    }
}
