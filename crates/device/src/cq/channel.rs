//! Completion channels (`ibv_comp_channel`).

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use millstream_shm::EventFd;

use super::Cq;
use crate::context::Context;
use crate::errno::Result;
use crate::event_sources::EventSource;

/// A descriptor that is readable while completion queues have events.
#[derive(Debug)]
pub struct Channel {
    pub(crate) context: Arc<Context>,
    pub(crate) id: u32,
    event: Arc<EventFd>,
    /// In the order in which their events are looked for.
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
        let channel = Arc::new(Self { context: context.clone(), id, event, queues: Mutex::default() });
        let source: Weak<Self> = Arc::downgrade(&channel);
        context.adapter.event_sources.add(id, source);
        Ok(channel)
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
            let mut queues = self.queues.lock().expect("no panic under this lock");
            let taken = queues.iter().enumerate().find_map(|(at, cq)| {
                let cq = cq.upgrade().filter(|cq| cq.take_event())?;
                Some((at, cq))
            });
            if let Some((at, cq)) = taken {
                // It goes last, so that a busy queue does not hide the events of others.
                queues[at..].rotate_left(1);
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

/// Steps of a producer that is still running take less than this, usually.
const GRACE: Duration = Duration::from_millis(2);

/// Events of a channel's queues that an exited producer did not finish to signal.
#[derive(Debug, PartialEq, Eq)]
struct UnfinishedEvents {
    /// Some queue lacks an event that was claimed.
    uncounted: bool,
    /// Events of all queues less the descriptor's count.
    unsignalled: u64,
}

impl Channel {
    fn unfinished_events(&self, queues: &[Arc<Cq>]) -> Option<UnfinishedEvents> {
        let counted: u64 = queues.iter().map(|cq| u64::from(cq.unfetched_events())).sum();
        let unsignalled = counted.saturating_sub(self.event.count());
        let uncounted = queues.iter().any(|cq| cq.lacks_event());
        (uncounted || unsignalled != 0).then_some(UnfinishedEvents { uncounted, unsignalled })
    }
}

impl EventSource for Channel {
    /// A producer publishes a completion, claims the event, counts it, and signals the descriptor. This finishes what an
    /// exited producer began.
    fn restore_events(&self) {
        let queues: Vec<Arc<Cq>> = {
            let queues = self.queues.lock().expect("no panic under this lock");
            queues.iter().filter_map(Weak::upgrade).collect()
        };
        queues.iter().for_each(|cq| cq.signal_unseen());
        // Another producer may be between two steps. It finishes soon.
        let deadline = Instant::now() + GRACE;
        while self.unfinished_events(&queues).is_some() {
            if Instant::now() > deadline {
                queues.iter().filter(|cq| cq.lacks_event()).for_each(|cq| cq.count_event());
                let missing = self.unfinished_events(&queues).map_or(0, |unfinished| unfinished.unsignalled);
                return (0..missing).for_each(|_| self.event.signal());
            }
            std::thread::sleep(Duration::from_micros(100));
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
        self.context.adapter.event_sources.remove(self.id);
        self.context.adapter.channels.remove(self.id);
    }
}
