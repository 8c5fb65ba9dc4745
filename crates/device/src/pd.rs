//! Protection domains, thread domains, and the parent domains that join the two.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::context::Context;
use crate::errno::{Errno, Result};

/// A protection domain: queue pairs reach only memory of their own.
#[derive(Debug)]
pub struct Pd {
    pub(crate) context: Arc<Context>,
    pub(crate) id: u32,
    /// Objects of the domain that their owner has not destroyed. This is no reference count: the device's
    /// threads hold references temporarily.
    users: AtomicU32,
    /// The domains that a parent domain joins.
    parent_of: Option<ParentOf>,
}

#[derive(Debug)]
struct ParentOf {
    pd: Arc<Pd>,
    td: Option<Arc<Td>>,
}

/// A thread domain: the application promises that one thread at a time uses its objects. The device does not rely on
/// that, because its uncontended locks are nearly free.
#[derive(Debug, Default)]
pub struct Td {
    /// Parent domains that use it.
    users: AtomicU32,
}

impl Td {
    /// Makes a thread domain.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// True while parent domains use it.
    #[must_use]
    pub fn in_use(&self) -> bool {
        self.users.load(Ordering::Acquire) != 0
    }
}

impl Pd {
    /// Makes a protection domain.
    #[must_use]
    pub fn new(context: &Arc<Context>) -> Arc<Self> {
        context.adapter.port.flush_acks();
        let id = context.adapter.next_id();
        let pd = Arc::new(Self { context: context.clone(), id, users: AtomicU32::new(0), parent_of: None });
        context.add_object(id, &pd);
        pd
    }

    /// The protection domain with this id; None if the context has none.
    #[must_use]
    pub fn find(context: &Context, id: u32) -> Option<Arc<Self>> {
        context.object(id)
    }

    /// Makes a parent domain of `pd`. Their objects can use each other's memory.
    #[must_use]
    pub fn parent(pd: &Arc<Self>, td: Option<&Arc<Td>>) -> Arc<Self> {
        pd.attach();
        if let Some(td) = td {
            td.users.fetch_add(1, Ordering::AcqRel);
        }
        let parent_of = Some(ParentOf { pd: pd.clone(), td: td.cloned() });
        Arc::new(Self { context: pd.context.clone(), id: pd.id, users: AtomicU32::new(0), parent_of })
    }

    /// Whether it is a parent domain.
    #[must_use]
    pub fn is_parent(&self) -> bool {
        self.parent_of.is_some()
    }

    /// Deallocates the domain. A parent domain releases the domains that it joins.
    ///
    /// # Errors
    /// EBUSY while objects of it exist.
    pub fn deallocate(&self) -> Result<()> {
        if self.in_use() {
            return Err(Errno::BUSY);
        }
        if let Some(parts) = &self.parent_of {
            parts.pd.detach();
            if let Some(td) = &parts.td {
                td.users.fetch_sub(1, Ordering::AcqRel);
            }
        }
        Ok(())
    }

    /// True while objects of the domain exist.
    #[must_use]
    pub fn in_use(&self) -> bool {
        self.users.load(Ordering::Acquire) != 0
    }

    /// Counts an object of the domain.
    pub fn attach(&self) {
        self.users.fetch_add(1, Ordering::AcqRel);
    }

    /// Counts the destruction of an object of the domain.
    pub fn detach(&self) {
        self.users.fetch_sub(1, Ordering::AcqRel);
    }

    /// The id, unique in the process except for parent domains of this one.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.id
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // A parent domain has the id of its protection domain.
        if self.parent_of.is_none() {
            self.context.remove_object(self.id);
        }
    }
}
