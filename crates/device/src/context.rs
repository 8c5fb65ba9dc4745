//! An open device.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::{Arc, Mutex, Weak};

use millstream_shm::{EventFd, poll};

use crate::dm::Dm;
use crate::errno::Result;
use crate::event::{AsyncEvent, Handle};
use crate::host::Host;
use crate::pd::Pd;

/// An open device. Contexts of one process share its adapter and differ in their events.
#[derive(Debug)]
pub struct Context {
    pub(crate) host: &'static Host,
    events: Mutex<VecDeque<(u32, Arc<Handle>)>>,
    /// Its count is one while events wait, and zero otherwise. Changed under the lock of `events`.
    event_fd: EventFd,
    /// What can be found by its number.
    pub(crate) pds: Mutex<HashMap<u32, Weak<Pd>>>,
    pub(crate) dms: Mutex<HashMap<u32, Weak<Dm>>>,
}

impl Context {
    /// Opens the device.
    ///
    /// # Errors
    /// What creating shared memory, sockets or threads reports.
    pub fn open() -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            host: Host::get()?,
            events: Mutex::default(),
            event_fd: EventFd::new()?,
            pds: Mutex::default(),
            dms: Mutex::default(),
        }))
    }

    /// Reports something about an object, unless it has ended. A program that fetches no events gets each
    /// once for as long as it waits, so that they need no more memory than the objects.
    pub(crate) fn raise(&self, kind: u32, about: &Arc<Handle>) {
        let mut events = self.events.lock().expect("no panic under this lock");
        let waits = |(k, h): &(u32, Arc<Handle>)| *k == kind && Arc::ptr_eq(h, about);
        if about.has_ended() || events.iter().any(waits) {
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
    /// EAGAIN, EINTR.
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
            let fd = self.event_fd.as_fd().as_raw_fd();
            poll(&mut [libc::pollfd { fd, events: libc::POLLIN, revents: 0 }], None)?;
        }
    }

    /// Ends an object's events: those that wait are dropped, those that were fetched are waited for until
    /// they are acknowledged.
    pub(crate) fn end_events(&self, about: &Arc<Handle>) {
        {
            let mut events = self.events.lock().expect("no panic under this lock");
            about.end();
            let waited = !events.is_empty();
            events.retain(|(_, handle)| !Arc::ptr_eq(handle, about));
            if waited && events.is_empty() {
                self.clear();
            }
        }
        about.wait_for_acknowledgements();
    }

    /// No event waits any more. The caller holds the lock.
    fn clear(&self) {
        // A program that reads the descriptor itself may have been here before.
        let _ = self.event_fd.try_take();
    }
}

impl AsFd for Context {
    /// Readable while events wait.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event_fd.as_fd()
    }
}
