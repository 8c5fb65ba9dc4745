//! Work for the progress thread: tasks, pending requests, moderated completion queues, and its timer.

use std::fmt::Debug;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use millstream_quantity::Qpn;
use millstream_shm::{EventFd, timer};

use crate::ipc::{Message, Op};

/// A task of the progress thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Task {
    /// A peer's request broke a rule of our queue pair `qpn`, whose entry then had this revision.
    QpError { qpn: Qpn, from: Qpn, event: u32, revision: u32 },
    /// Our queue pair `qpn` lost a completion.
    QpFatal { qpn: Qpn },
    /// The event that our queue pair `qpn` waits for may have happened.
    Retry { qpn: Qpn },
    /// The shared receive queue of our queue pair `qpn` fell below its limit.
    SrqLimit { qpn: Qpn },
    /// A peer's first request found our queue pair `qpn` in RTR, and its entry at this revision.
    CommEst { qpn: Qpn, from: Qpn, revision: u32 },
    /// A datagram for our queue pair `qpn` found its completion queue full.
    CqOverrun { qpn: Qpn },
    /// The sender of a datagram for our queue pair `qpn` exited with a receive request taken.
    RecvAbandoned { qpn: Qpn },
    /// A queue pair of any process waits for a receive that we have posted.
    ReportRecvPosted { qpn: Qpn },
    /// A process that may have signalled our events has disconnected.
    RestoreEvents,
    /// Copies through the kernel to or from our region or window `key` have cost as much as moving its pages.
    ShareRegion { key: u32 },
    /// Our XRC shared receive queue `number` has an event ([`crate::ipc::srq_event`]).
    XrcSrqEvent { number: u32, event: u32 },
}

impl Task {
    /// The task that a message reports; None for requests and answers.
    pub(crate) fn of(message: &Message) -> Option<Self> {
        let [a, b, c, d, ..] = message.words;
        Some(match message.op {
            Op::QpError => Self::QpError { qpn: Qpn::new(a), from: Qpn::new(b), event: c, revision: d },
            Op::RecvPosted => Self::Retry { qpn: Qpn::new(a) },
            Op::SrqLimit => Self::SrqLimit { qpn: Qpn::new(a) },
            Op::CommEst => Self::CommEst { qpn: Qpn::new(a), from: Qpn::new(b), revision: c },
            Op::CqOverrun => Self::CqOverrun { qpn: Qpn::new(a) },
            Op::RecvAbandoned => Self::RecvAbandoned { qpn: Qpn::new(a) },
            Op::RegionBusy => Self::ShareRegion { key: a },
            Op::XrcSrqEvent => Self::XrcSrqEvent { number: a, event: b },
            Op::Hello | Op::File | Op::Channel | Op::MulticastMember | Op::Signal | Op::Refused => {
                return None;
            }
        })
    }

    /// Whether both are the same task, of any revision.
    fn repeats(self, other: Self) -> bool {
        let any_revision = |task| match task {
            Self::QpError { qpn, from, event, .. } => Self::QpError { qpn, from, event, revision: 0 },
            Self::CommEst { qpn, from, .. } => Self::CommEst { qpn, from, revision: 0 },
            task => task,
        };
        any_revision(self) == any_revision(other)
    }
}

/// A send queue with pending requests.
pub(crate) trait PendingRequests: Debug + Send + Sync {
    /// Retries the requests for the progress thread. Some: requests are still pending, to be retried after this time.
    fn retry(&self) -> Option<Duration>;

    /// Retries the requests for an application that polls; true if requests are still pending.
    fn retry_for_poller(&self) -> bool;
}

/// A completion queue with moderated events.
pub(crate) trait ModeratedEvents: Debug + Send + Sync {
    /// Signals the queue if its moderation period is over. Some: the time that is left of the period.
    fn end_moderation(&self) -> Option<Duration>;
}

/// The work of the progress thread. Other threads add to it.
#[derive(Debug)]
pub(crate) struct TaskQueue {
    wake: Arc<EventFd>,
    timer: OwnedFd,
    start: Instant,
    /// Expiry of the timer, nanoseconds since `start`; zero if it is not set.
    expiry: AtomicU64,
    tasks: Mutex<Vec<Task>>,
    pending: Mutex<Vec<Weak<dyn PendingRequests>>>,
    moderated: Mutex<Vec<Weak<dyn ModeratedEvents>>>,
}

impl TaskQueue {
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self {
            wake: Arc::new(EventFd::new()?),
            timer: timer::create()?,
            start: Instant::now(),
            expiry: AtomicU64::new(0),
            tasks: Mutex::default(),
            pending: Mutex::default(),
            moderated: Mutex::default(),
        })
    }

    /// Adds a task. It replaces the same task that waits already, so that a peer's repetitions do not fill our memory.
    pub(crate) fn add(&self, task: Task) {
        let mut tasks = self.tasks.lock().expect("no panic under this lock");
        if let Some(waiting) = tasks.iter_mut().find(|waiting| waiting.repeats(task)) {
            *waiting = task;
            return;
        }
        tasks.push(task);
        self.wake.signal();
    }

    /// Takes all tasks.
    pub(crate) fn take(&self) -> Vec<Task> {
        std::mem::take(&mut *self.tasks.lock().expect("no panic under this lock"))
    }

    /// Wakes the progress thread.
    pub(crate) fn wake(&self) {
        self.wake.signal();
    }

    /// The descriptor that wakes the thread, for peers to signal.
    pub(crate) fn waker(&self) -> Arc<EventFd> {
        self.wake.clone()
    }

    /// The descriptors that are readable when the thread must run: the wake-up and the timer.
    pub(crate) fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        [self.wake.as_fd(), self.timer.as_fd()]
    }

    /// Consumes a wake-up.
    pub(crate) fn take_wake(&self) {
        let _ = self.wake.take();
    }

    /// Consumes an expiry of the timer.
    pub(crate) fn take_expiry(&self) {
        let mut expirations = [0u8; 8];
        // SAFETY: eight bytes on the stack. An empty timer is fine.
        unsafe { libc::read(self.timer.as_raw_fd(), expirations.as_mut_ptr().cast(), 8) };
        self.expiry.store(0, Ordering::Release);
    }

    /// Adds a completion queue whose events are moderated.
    pub(crate) fn add_moderated(&self, cq: Weak<dyn ModeratedEvents>) {
        self.moderated.lock().expect("no panic under this lock").push(cq);
    }

    /// Adds a send queue with pending requests. The thread retries them in `delay` at the latest.
    pub(crate) fn add_pending(&self, qp: Weak<dyn PendingRequests>, delay: Duration) {
        self.pending.lock().expect("no panic under this lock").push(qp);
        self.set_timer(delay);
    }

    /// Retries all pending requests.
    pub(crate) fn retry_pending(&self) {
        let pending = std::mem::take(&mut *self.pending.lock().expect("no panic under this lock"));
        for qp in pending {
            if let Some(delay) = qp.upgrade().and_then(|qp| qp.retry()) {
                self.add_pending(qp, delay);
            }
        }
    }

    /// Signals the completion queues whose moderation period is over.
    pub(crate) fn end_moderation(&self) {
        let queues: Vec<_> = {
            let mut list = self.moderated.lock().expect("no panic under this lock");
            list.retain(|cq| cq.strong_count() != 0);
            list.iter().filter_map(Weak::upgrade).collect()
        };
        for delay in queues.iter().filter_map(|cq| cq.end_moderation()) {
            self.set_timer(delay);
        }
    }

    fn set_timer(&self, delay: Duration) {
        let now = self.start.elapsed();
        let at = (now + delay).as_nanos() as u64;
        let expiry = self.expiry.load(Ordering::Acquire);
        if expiry != 0 && expiry <= at {
            return;
        }
        self.expiry.store(at, Ordering::Release);
        // It fails only for what is no timer.
        let _ = timer::set(self.timer.as_fd(), Some(delay));
    }
}
