//! Protection domains.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::context::Context;

/// A protection domain: queue pairs reach only memory of their own.
#[derive(Debug)]
pub struct Pd {
    pub(crate) context: Arc<Context>,
    pub(crate) id: u32,
    /// Objects that were made in it and not yet ended by their owner. Not the references to it: the
    /// device's own threads hold some for a moment.
    users: AtomicU32,
}

impl Pd {
    /// Makes a protection domain.
    #[must_use]
    pub fn new(context: &Arc<Context>) -> Arc<Self> {
        Arc::new(Self { context: context.clone(), id: context.host.next_id(), users: AtomicU32::new(0) })
    }

    /// True while objects of the domain exist.
    #[must_use]
    pub fn in_use(&self) -> bool {
        self.users.load(Ordering::Acquire) != 0
    }

    /// Notes an object of the domain.
    pub fn attach(&self) {
        self.users.fetch_add(1, Ordering::AcqRel);
    }

    /// Notes the end of an object of the domain.
    pub fn detach(&self) {
        self.users.fetch_sub(1, Ordering::AcqRel);
    }

    /// A number that no other domain of the process has.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.id
    }
}
