//! Handles of a queue pair. The receiving end of an XRC connection can be opened more than once.

use std::any::Any;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use millstream_quantity::Qpn;

use super::Qp;
use crate::context::Context;
use crate::errno::{Errno, Result};
use crate::event::ObjectHandle;
use crate::layout::qpn_prefix;
use crate::xrc::Xrcd;

/// The handles of a queue pair that programs hold.
#[derive(Debug)]
pub(super) struct QpHandles {
    /// The handle that the queue pair was created with.
    pub(super) own: Arc<ObjectHandle>,
    /// Further handles, see [`Qp::open`].
    others: Mutex<Vec<(Arc<Context>, Arc<ObjectHandle>)>>,
    /// Handles that are not closed.
    open: AtomicU32,
}

impl Default for QpHandles {
    fn default() -> Self {
        Self { own: Arc::default(), others: Mutex::default(), open: AtomicU32::new(1) }
    }
}

impl Qp {
    /// The handle that the queue pair was created with.
    #[must_use]
    pub fn handle(&self) -> &Arc<ObjectHandle> {
        &self.handles.own
    }

    /// Opens a further handle of an XRC target, with its own events.
    ///
    /// # Errors
    /// EINVAL if the domain has no such queue pair; EOPNOTSUPP for a queue pair of another process.
    ///
    /// # Panics
    /// Only if another thread panicked while it held the list of handles.
    pub fn open(domain: &Xrcd, qpn: Qpn) -> Result<(Arc<Self>, Arc<ObjectHandle>)> {
        let context = domain.context();
        if qpn_prefix(qpn) != context.adapter.id.qpn_prefix {
            return Err(Errno::NOTSUP);
        }
        let qp = context.adapter.qps.get(qpn).ok_or(Errno::INVAL)?;
        let qp: Arc<dyn Any + Send + Sync> = qp;
        let qp: Arc<Self> = qp.downcast().map_err(|_| Errno::INVAL)?;
        if !qp.recv.domain.as_ref().is_some_and(|own| own.is_same(domain)) {
            return Err(Errno::INVAL);
        }
        let handle = Arc::<ObjectHandle>::default();
        let mut others = qp.handles.others.lock().expect("no panic under this lock");
        if qp
            .handles
            .open
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| (n != 0).then_some(n + 1))
            .is_err()
        {
            return Err(Errno::INVAL);
        }
        others.push((context.clone(), handle.clone()));
        drop(others);
        Ok((qp, handle))
    }

    /// Closes a handle once its events are acknowledged. Closing the last one destroys the queue pair.
    ///
    /// # Panics
    /// Only if another thread panicked while it held the list of handles.
    pub fn close(&self, handle: &Arc<ObjectHandle>) {
        let is_last = self.handles.open.fetch_sub(1, Ordering::AcqRel) == 1;
        if is_last {
            self.destroy();
        }
        if Arc::ptr_eq(handle, &self.handles.own) {
            return self.pd.context.end_events(handle);
        }
        let found = {
            let mut others = self.handles.others.lock().expect("no panic under this lock");
            let at = others.iter().position(|(_, other)| Arc::ptr_eq(other, handle));
            at.map(|at| others.swap_remove(at))
        };
        if let Some((context, handle)) = found {
            context.end_events(&handle);
        }
    }

    pub(super) fn raise(&self, event: u32) {
        self.pd.context.raise(event, &self.handles.own);
        for (context, handle) in &*self.handles.others.lock().expect("no panic under this lock") {
            context.raise(event, handle);
        }
    }
}
