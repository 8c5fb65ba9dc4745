//! Protection domains.

use std::sync::Arc;

use crate::context::Context;

/// A protection domain: queue pairs reach only memory of their own.
#[derive(Debug)]
pub struct Pd {
    pub(crate) context: Arc<Context>,
    pub(crate) id: u32,
}

impl Pd {
    /// Makes a protection domain.
    #[must_use]
    pub fn new(context: &Arc<Context>) -> Arc<Self> {
        Arc::new(Self { context: context.clone(), id: context.host.next_id() })
    }

    /// A number that no other domain of the process has.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.id
    }
}
