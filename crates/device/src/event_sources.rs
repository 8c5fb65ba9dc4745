//! Objects whose events peers signal: completion channels and shared receive queues.
//!
//! A peer publishes, claims the event, and signals it. A peer that exits in between leaves an event that nobody signals.
//! So the owner restores such events when a peer has exited.

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, Weak};

/// An object whose events peers signal.
pub(crate) trait EventSource: Debug + Send + Sync {
    /// Signals events that an exited peer owed.
    fn restore_events(&self);
}

/// The sources of events of this process, by number.
#[derive(Debug, Default)]
pub(crate) struct EventSources(Mutex<HashMap<u32, Weak<dyn EventSource>>>);

impl EventSources {
    pub(crate) fn add(&self, number: u32, source: Weak<dyn EventSource>) {
        self.0.lock().expect("no panic under this lock").insert(number, source);
    }

    pub(crate) fn remove(&self, number: u32) {
        self.0.lock().expect("no panic under this lock").remove(&number);
    }

    /// Signals events that an exited peer owed.
    pub(crate) fn restore_all(&self) {
        let sources: Vec<Arc<_>> = {
            let sources = self.0.lock().expect("no panic under this lock");
            sources.values().filter_map(Weak::upgrade).collect()
        };
        sources.iter().for_each(|source| source.restore_events());
    }
}
