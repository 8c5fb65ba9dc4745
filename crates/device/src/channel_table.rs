//! The process's completion channels, by the number that peers use.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use millstream_shm::EventFd;

/// The channel that wakes the progress thread.
pub(crate) const TIMER_CHANNEL: u32 = 1;

/// The descriptors behind channel numbers.
#[derive(Debug, Default)]
pub(crate) struct ChannelTable(Mutex<HashMap<u32, Arc<EventFd>>>);

impl ChannelTable {
    pub(crate) fn insert(&self, id: u32, event: Arc<EventFd>) {
        self.0.lock().expect("no panic under this lock").insert(id, event);
    }

    pub(crate) fn remove(&self, id: u32) {
        self.0.lock().expect("no panic under this lock").remove(&id);
    }

    pub(crate) fn get(&self, id: u32) -> Option<Arc<EventFd>> {
        self.0.lock().expect("no panic under this lock").get(&id).cloned()
    }

    /// Signals a channel, if there is one with this number.
    pub(crate) fn signal(&self, id: u32) {
        if let Some(event) = self.get(id) {
            event.signal();
        }
    }
}
