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
    /// Objects that were made in it and not yet ended by their owner. Not the references to it: the
    /// device's own threads hold some for a moment.
    users: AtomicU32,
    /// What a parent domain stands for.
    parts: Option<Parts>,
}

#[derive(Debug)]
struct Parts {
    pd: Arc<Pd>,
    td: Option<Arc<Td>>,
}

/// A thread domain: a promise that one thread at a time uses the objects made in it. The device's locks
/// cost a single uncontended instruction then, so nothing is made of the promise.
#[derive(Debug, Default)]
pub struct Td {
    /// Parent domains made of it.
    users: AtomicU32,
}

impl Td {
    /// Makes a thread domain.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// True while parent domains are made of it.
    #[must_use]
    pub fn in_use(&self) -> bool {
        self.users.load(Ordering::Acquire) != 0
    }
}

impl Pd {
    /// Makes a protection domain.
    #[must_use]
    pub fn new(context: &Arc<Context>) -> Arc<Self> {
        context.host.wire.pay();
        let id = context.host.next_id();
        let pd = Arc::new(Self { context: context.clone(), id, users: AtomicU32::new(0), parts: None });
        context.pds.lock().expect("no panic under this lock").insert(id, Arc::downgrade(&pd));
        pd
    }

    /// The protection domain that has this number; None if the context has none.
    ///
    /// # Panics
    /// Only if another thread panicked while it looked.
    #[must_use]
    pub fn find(context: &Context, id: u32) -> Option<Arc<Self>> {
        context.pds.lock().expect("no panic under this lock").get(&id)?.upgrade()
    }

    /// Makes a parent domain: another name of `pd`, whose objects can use each other's memory.
    #[must_use]
    pub fn parent(pd: &Arc<Self>, td: Option<&Arc<Td>>) -> Arc<Self> {
        pd.attach();
        if let Some(td) = td {
            td.users.fetch_add(1, Ordering::AcqRel);
        }
        let parts = Some(Parts { pd: pd.clone(), td: td.cloned() });
        Arc::new(Self { context: pd.context.clone(), id: pd.id, users: AtomicU32::new(0), parts })
    }

    /// Whether it is a parent domain.
    #[must_use]
    pub fn is_parent(&self) -> bool {
        self.parts.is_some()
    }

    /// Ends the domain's life, once. Its parts, if it is a parent domain, are free then.
    ///
    /// # Errors
    /// EBUSY while objects of it exist.
    pub fn deallocate(&self) -> Result<()> {
        if self.in_use() {
            return Err(Errno::BUSY);
        }
        if let Some(parts) = &self.parts {
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

    /// Notes an object of the domain.
    pub fn attach(&self) {
        self.users.fetch_add(1, Ordering::AcqRel);
    }

    /// Notes the end of an object of the domain.
    pub fn detach(&self) {
        self.users.fetch_sub(1, Ordering::AcqRel);
    }

    /// A number that no other domain of the process has, except parent domains of this one.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.id
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // A parent domain has the number of the domain that it stands for.
        if self.parts.is_none() {
            self.context.pds.lock().expect("no panic under this lock").remove(&self.id);
        }
    }
}
