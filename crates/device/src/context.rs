//! An open device.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, Weak};

use millstream_shm::EventFd;

use crate::adapter::LocalAdapter;
use crate::errno::Result;
use crate::event::{AsyncEvent, ObjectHandle};
use crate::startup;

/// An open device. The contexts of a process share its adapter; each has its own asynchronous events.
#[derive(Debug)]
pub struct Context {
    pub(crate) adapter: &'static LocalAdapter,
    events: Mutex<VecDeque<(u32, Arc<ObjectHandle>)>>,
    /// Its count is one while events are queued, else zero. Changed under the lock of `events`.
    event_fd: EventFd,
    /// Protection domains and device memory by id.
    objects: Mutex<HashMap<u32, Weak<dyn Any + Send + Sync>>>,
}

impl Context {
    /// Opens the device.
    ///
    /// # Errors
    /// What creating shared memory, sockets or threads reports.
    pub fn open() -> Result<Arc<Self>> {
        millstream_log::init();
        Ok(Arc::new(Self {
            adapter: startup::adapter()?,
            events: Mutex::default(),
            event_fd: EventFd::new()?,
            objects: Mutex::default(),
        }))
    }

    /// Makes an object findable by its id.
    pub(crate) fn add_object<T: Any + Send + Sync>(&self, id: u32, object: &Arc<T>) {
        let object: Weak<T> = Arc::downgrade(object);
        self.objects.lock().expect("no panic under this lock").insert(id, object);
    }

    /// The object with this id, if it is of this type.
    pub(crate) fn object<T: Any + Send + Sync>(&self, id: u32) -> Option<Arc<T>> {
        let object = self.objects.lock().expect("no panic under this lock").get(&id)?.upgrade()?;
        object.downcast().ok()
    }

    pub(crate) fn remove_object(&self, id: u32) {
        self.objects.lock().expect("no panic under this lock").remove(&id);
    }

    /// Queues an event about an object, unless the object was destroyed. An event that is queued already is not
    /// added again, so that a program that fetches no events does not fill memory.
    pub(crate) fn raise(&self, kind: u32, about: &Arc<ObjectHandle>) {
        let mut events = self.events.lock().expect("no panic under this lock");
        let queued = |(k, h): &(u32, Arc<ObjectHandle>)| *k == kind && Arc::ptr_eq(h, about);
        if about.has_ended() || events.iter().any(queued) {
            return;
        }
        events.push_back((kind, about.clone()));
        if events.len() == 1 {
            self.event_fd.signal();
        }
    }

    /// Waits for the next event, or fails with EAGAIN if the descriptor is non-blocking.
    ///
    /// # Errors
    /// EAGAIN; EINTR after a signal whose handler has no SA_RESTART.
    ///
    /// # Panics
    /// Only if another thread panicked while it held the queue.
    pub fn next_event(&self) -> io::Result<AsyncEvent> {
        loop {
            let mut events = self.events.lock().expect("no panic under this lock");
            if let Some((kind, handle)) = events.pop_front() {
                let event = AsyncEvent::fetched(kind, handle);
                if events.is_empty() {
                    self.clear();
                }
                return Ok(event);
            }
            drop(events);
            if self.event_fd.is_nonblocking()? {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            // The kernel restarts a read after a signal whose handler has SA_RESTART, which it does not do with a poll.
            self.event_fd.take()?;
            // The descriptor is readable as long as events are queued.
            if !self.events.lock().expect("no panic under this lock").is_empty() {
                self.event_fd.signal();
            }
        }
    }

    /// Drops an object's queued events, and waits until its fetched events are acknowledged.
    pub(crate) fn end_events(&self, about: &Arc<ObjectHandle>) {
        {
            let mut events = self.events.lock().expect("no panic under this lock");
            about.end();
            let was_queued = !events.is_empty();
            events.retain(|(_, handle)| !Arc::ptr_eq(handle, about));
            if was_queued && events.is_empty() {
                self.clear();
            }
        }
        about.wait_for_acknowledgements();
    }

    /// Makes the descriptor unreadable: no event is queued. The caller holds the lock.
    fn clear(&self) {
        // The program may have read the descriptor itself.
        let _ = self.event_fd.try_take();
    }
}

impl AsFd for Context {
    /// Readable while events are queued.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event_fd.as_fd()
    }
}
