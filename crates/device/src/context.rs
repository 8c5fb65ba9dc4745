//! An open device.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex};

use millstream_shm::EventFd;

use crate::errno::Result;
use crate::event::AsyncEvent;
use crate::host::Host;

/// An open device. Contexts of one process share its adapter and differ in their events.
#[derive(Debug)]
pub struct Context {
    pub(crate) host: &'static Host,
    events: Mutex<VecDeque<AsyncEvent>>,
    event_fd: EventFd,
}

impl Context {
    /// Opens the device.
    ///
    /// # Errors
    /// What creating shared memory, sockets or threads reports.
    pub fn open() -> Result<Arc<Self>> {
        Ok(Arc::new(Self { host: Host::get()?, events: Mutex::default(), event_fd: EventFd::new()? }))
    }

    pub(crate) fn raise(&self, event: AsyncEvent) {
        self.events.lock().expect("no panic under this lock").push_back(event);
        self.event_fd.signal();
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
            self.event_fd.take()?;
            // An event goes with the object that it was about.
            if let Some(event) = self.events.lock().expect("no panic under this lock").pop_front() {
                return Ok(event);
            }
        }
    }

    pub(crate) fn forget(&self, about: impl Fn(&AsyncEvent) -> bool) {
        self.events.lock().expect("no panic under this lock").retain(|event| !about(event));
    }
}

impl AsFd for Context {
    /// Readable while events wait.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event_fd.as_fd()
    }
}
