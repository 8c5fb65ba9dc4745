//! Completion channels (`ibv_comp_channel`).

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, Weak};

use millstream_shm::EventFd;

use super::Cq;
use crate::context::Context;
use crate::errno::Result;

/// A descriptor that is readable while completion queues have events.
#[derive(Debug)]
pub struct Channel {
    pub(crate) context: Arc<Context>,
    pub(crate) id: u32,
    event: Arc<EventFd>,
    queues: Mutex<Vec<Weak<Cq>>>,
}

impl Channel {
    /// Makes a channel.
    ///
    /// # Errors
    /// What creating the descriptor reports.
    pub fn new(context: &Arc<Context>) -> Result<Arc<Self>> {
        let event = Arc::new(EventFd::new()?);
        let id = context.adapter.next_id();
        context.adapter.channels.insert(id, event.clone());
        Ok(Arc::new(Self { context: context.clone(), id, event, queues: Mutex::default() }))
    }

    pub(crate) fn add(&self, cq: &Arc<Cq>) {
        self.queues.lock().expect("no panic under this lock").push(Arc::downgrade(cq));
    }

    /// Removes a queue and its events.
    pub(crate) fn remove(&self, cq: &Cq) {
        self.queues
            .lock()
            .expect("no panic under this lock")
            .retain(|other| other.as_ptr() != std::ptr::from_ref(cq));
        // Otherwise the descriptor would stay readable without an event.
        (0..cq.cancel_events()).take_while(|_| self.event.try_take()).for_each(drop);
    }

    /// True while completion queues use the channel.
    ///
    /// # Panics
    /// Only if another thread panicked while it held the list.
    #[must_use]
    pub fn in_use(&self) -> bool {
        self.queues.lock().expect("no panic under this lock").iter().any(|cq| cq.strong_count() != 0)
    }

    pub(crate) fn signal(&self) {
        self.event.signal();
    }

    /// Waits for an event, and returns its completion queue.
    ///
    /// # Errors
    /// EAGAIN if the descriptor was made non-blocking, EINTR.
    ///
    /// # Panics
    /// Only if another thread panicked while it held the list.
    pub fn next_event(&self) -> io::Result<Arc<Cq>> {
        loop {
            self.event.take()?;
            let queues = self.queues.lock().expect("no panic under this lock");
            if let Some(cq) = queues.iter().filter_map(Weak::upgrade).find(|cq| cq.take_event()) {
                return Ok(cq);
            }
            // The event of a destroyed queue, or one that a peer forged. A non-blocking caller is not kept until all of these
            // are consumed.
            drop(queues);
            if self.event.is_nonblocking()? {
                return Err(io::ErrorKind::WouldBlock.into());
            }
        }
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        self.context.adapter.channels.remove(self.id);
    }
}
