//! The process's UDP port for RoCE v2, and the division of its work among threads.
//!
//! The first queue pair that needs the port opens it. Three parties share the work:
//!
//! - An application that polls a completion queue of such a queue pair receives packets itself, with the lowest latency.
//! - The progress thread receives them while no application polls. A wake-up beside a poller would delay the
//!   poller by more than a packet. So while an application polls, the thread does not watch the port, and
//!   checks at intervals. It watches again when polling stops, and for a while when it finds packets that a
//!   busy application left. It watches at once when a completion queue is armed, because the application then
//!   sleeps.
//!   While the thread watches and packets arrive at short intervals, it polls for them before it sleeps.
//! - The thread and pollers both execute expired timers.
//!
//! While an application polls, an acknowledgement waits for the next request and is sent alone only if none
//! follows soon. In a ping-pong this saves a packet each way, and each side gets answer and acknowledgement together.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use millstream_link::{Port, RxBuffers};
use millstream_lockfree::BiasedLock;
use millstream_lockfree::timer::{Deadline, NextExpiry};
use millstream_quantity::Qpn;
use millstream_shm::polling::Polling;
use millstream_wire::gid;

use crate::clock;
use crate::errno::{Errno, Result};
use crate::gsi;
use crate::multicast::{self, MulticastTable};
use crate::qp_table::{Packet, QpOps, QpTable};
use crate::tasks::TaskQueue;

/// Datagrams of one system call. With receive offload each may hold dozens of packets.
const DATAGRAMS: usize = 16;
/// Most receiving system calls of the thread in a row.
const MAX_RECEIVES: usize = 4;
/// Looks of the thread in a row, before it sees to its other work: about 50 µs.
const MAX_LOOKS: usize = 64;
/// Most packets that a queue pair gets at a time.
pub(crate) const BATCH: usize = 64;
/// Shortest time between two attempts to open the port.
const REOPEN_INTERVAL: Duration = Duration::from_secs(1);
/// Interval of the thread's checks while it does not watch the port, nanoseconds. This bounds the delay of
/// packets that a busy application leaves, and of acknowledgements.
const CHECK_INTERVAL: u64 = 250_000;
/// An application that has not polled for this long is busy or asleep, nanoseconds.
const POLL_TIMEOUT: u64 = 50_000;
/// Shortest time between two recorded polls, in [`ticks`]: six to thirty microseconds.
const POLL_RECORD_TICKS: u64 = 32_768;
/// The thread's wait for a poller that is receiving.
const POLLER_WAIT: Duration = Duration::from_micros(20);
/// Longest wait for another thread that is receiving.
const RECEIVER_WAIT: Duration = Duration::from_millis(200);
/// Longest wait for other threads at the exit of the process.
const EXIT_TIMEOUT: Duration = Duration::from_millis(200);
/// Time for which the thread watches the port although an application polls, nanoseconds.
const WATCH_PERIOD: u64 = 10_000_000;

/// The result of [`RocePort::busy_poll`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BusyPoll {
    /// The thread has not looked: it may sleep.
    Over,
    /// There was no packet yet.
    Nothing,
    /// Packets were received.
    Received,
}

/// The process's RoCE v2 port.
#[derive(Debug)]
pub(crate) struct RocePort {
    qpn_prefix: u32,
    qps: QpTable,
    multicast: &'static MulticastTable,
    tasks: &'static TaskQueue,
    opened: OnceLock<OpenPort>,
    /// The last failure to open the port. Held while a thread opens it.
    failure: Mutex<Option<(Instant, Errno)>>,
    /// Time of an application's last poll, nanoseconds; zero if never. Not every poll is recorded.
    last_poll: AtomicU64,
    /// Time of the last recorded poll in [`ticks`].
    last_poll_ticks: AtomicU64,
    /// End of the time for which the thread watches the port although an application polls, nanoseconds.
    watch_until: AtomicU64,
    /// The thread watches the port.
    watching: AtomicBool,
    /// The thread sleeps no longer than [`CHECK_INTERVAL`].
    checking: AtomicBool,
    /// Queue pairs with a delayed acknowledgement, and whether there are any.
    delayed_acks: BiasedLock<Vec<Weak<dyn QpOps>>>,
    has_delayed_acks: AtomicBool,
    /// The thread sends delayed acknowledgements, which it removes from the list first.
    flushing: AtomicBool,
    /// Queue pairs with timers.
    timed: Mutex<Vec<Weak<dyn QpOps>>>,
    next_expiry: NextExpiry,
}

#[derive(Debug)]
struct OpenPort {
    port: Port,
    /// Biased to a poller, as long as the thread has nothing to receive.
    receiver: BiasedLock<Receiver>,
}

#[derive(Debug)]
struct Receiver {
    inbox: RxBuffers,
    /// The queue pair of the last packet, which mostly gets the next one, too.
    last: Option<Weak<dyn QpOps>>,
}

impl RocePort {
    pub(crate) fn new(
        qpn_prefix: u32,
        qps: QpTable,
        multicast: &'static MulticastTable,
        tasks: &'static TaskQueue,
    ) -> Self {
        Self {
            qpn_prefix,
            qps,
            multicast,
            tasks,
            opened: OnceLock::new(),
            failure: Mutex::default(),
            last_poll: AtomicU64::new(0),
            last_poll_ticks: AtomicU64::new(0),
            watch_until: AtomicU64::new(0),
            watching: AtomicBool::new(false),
            checking: AtomicBool::new(false),
            delayed_acks: BiasedLock::default(),
            has_delayed_acks: AtomicBool::new(false),
            flushing: AtomicBool::new(false),
            timed: Mutex::default(),
            next_expiry: NextExpiry::default(),
        }
    }

    /// The port, opened at the first call.
    ///
    /// # Errors
    /// EADDRINUSE if it cannot be opened; the cause is on standard error. Another attempt is made no earlier than
    /// [`REOPEN_INTERVAL`] later.
    pub(crate) fn open(&self) -> Result<&Port> {
        if let Some(opened) = self.opened.get() {
            return Ok(&opened.port);
        }
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        // Another thread may have opened it meanwhile.
        if let Some(opened) = self.opened.get() {
            return Ok(&opened.port);
        }
        if let Some((time, errno)) = *failure
            && time.elapsed() < REOPEN_INTERVAL
        {
            return Err(errno);
        }
        let port = Port::join(self.qpn_prefix as u16).map_err(|error| {
            tracing::warn!("cannot open the RoCE v2 port, so other hosts are unreachable: {error}");
            let errno = Errno(libc::EADDRINUSE);
            *failure = Some((Instant::now(), errno));
            errno
        })?;
        let receiver = Receiver { inbox: RxBuffers::new(DATAGRAMS), last: None };
        let opened = self.opened.get_or_init(|| OpenPort { port, receiver: BiasedLock::new(receiver) });
        drop(failure);
        self.multicast.port_opened(&opened.port);
        self.tasks.wake();
        Ok(&opened.port)
    }

    fn opened(&self) -> Option<&OpenPort> {
        self.opened.get()
    }

    /// The port, if it is open.
    pub(crate) fn port(&self) -> Option<&Port> {
        self.opened().map(|opened| &opened.port)
    }

    /// Receives packets for an application that polls.
    pub(crate) fn poll(&self) {
        self.flush_acks();
        let Some(opened) = self.opened() else { return };
        let mut found = false;
        if let Some(mut receiver) = opened.receiver.try_lock() {
            // One system call: the application polls again, and sees its completions earlier.
            found = opened.port.receive(&mut receiver.inbox).is_ok_and(|received| received != 0);
            if found {
                let now = self.now();
                self.last_poll.store(now, Ordering::Relaxed);
                receiver.deliver(self, now);
            }
        } else {
            // The thread may have been preempted on this core while it received.
            std::thread::yield_now();
        }
        // Reading the clock is a large part of a poll that finds nothing.
        let ticks = ticks();
        if !found && ticks.wrapping_sub(self.last_poll_ticks.load(Ordering::Relaxed)) >= POLL_RECORD_TICKS {
            self.last_poll_ticks.store(ticks, Ordering::Relaxed);
            let now = self.now();
            self.last_poll.store(now, Ordering::Relaxed);
            if self.next_expiry.has_come(now) {
                self.expire_timers();
            }
        }
    }

    /// Handles the packets that have arrived. An adapter would have done so already, whatever the application did meanwhile.
    pub(crate) fn handle_arrived(&self) {
        let Some(opened) = self.opened() else { return };
        let start = Instant::now();
        // Another thread may be at it, and its packets count, too. If this call interrupted it, it does not end.
        while start.elapsed() < RECEIVER_WAIT {
            if let Some(mut receiver) = opened.receiver.try_lock() {
                receiver.receive(self, &opened.port);
                return;
            }
            std::thread::yield_now();
        }
    }

    /// Time since an application last polled, nanoseconds.
    fn since_last_poll(&self, now: u64) -> u64 {
        match self.last_poll.load(Ordering::Relaxed) {
            0 => u64::MAX,
            polled => now.saturating_sub(polled),
        }
    }

    /// Whether an application has polled recently: then an acknowledgement may wait for a request.
    pub(crate) fn is_polled(&self, now: u64) -> bool {
        self.since_last_poll(now) < POLL_TIMEOUT
    }

    /// A queue pair delays an acknowledgement until its next request, the next poll, or the thread's next check.
    pub(crate) fn delay_ack(&self, qp: Weak<dyn QpOps>) {
        self.delayed_acks.lock().push(qp);
        self.has_delayed_acks.store(true, Ordering::SeqCst);
        // The thread may sleep without a limit: the packet was received before the thread saw the port readable.
        if !self.checking.load(Ordering::SeqCst) {
            self.tasks.wake();
        }
    }

    /// A queue pair has acknowledged. It is removed if it was the last one added, as almost always. An older entry
    /// stays, and finds nothing to acknowledge.
    pub(crate) fn ack_sent(&self, is_same: impl FnOnce(&Weak<dyn QpOps>) -> bool) {
        let mut delayed = self.delayed_acks.lock();
        delayed.pop_if(|last| is_same(last));
        self.has_delayed_acks.store(!delayed.is_empty(), Ordering::Release);
    }

    fn next_delayed_ack(&self) -> Option<Weak<dyn QpOps>> {
        let mut delayed = self.delayed_acks.lock();
        let next = delayed.pop();
        self.has_delayed_acks.store(!delayed.is_empty(), Ordering::Release);
        next
    }

    /// Sends all delayed acknowledgements. Called when the application makes a call other than post and poll,
    /// so that peers do not wait for its end.
    pub(crate) fn flush_acks(&self) {
        if self.has_delayed_acks.load(Ordering::Relaxed) {
            while let Some(qp) = self.next_delayed_ack() {
                if let Some(qp) = qp.upgrade() {
                    qp.flush_acks();
                }
            }
        }
    }

    /// Sends the acknowledgements of what the program may have received, before the process exits. No lock is waited for
    /// without end: the exiting thread may have interrupted the holder, also itself.
    pub(crate) fn flush_acks_at_exit(&self) {
        let Some(opened) = self.opened() else { return };
        let deadline = Instant::now() + EXIT_TIMEOUT;
        // The holder may have delivered a message, and acknowledges it before it releases the lock.
        let _receiver = until(deadline, || opened.receiver.try_lock());
        while let Some(qp) = until(deadline, || self.delayed_acks.try_lock()).and_then(|mut list| list.pop())
        {
            if let Some(qp) = qp.upgrade() {
                until(deadline, || qp.try_flush_acks().then_some(()));
            }
        }
        until(deadline, || (!self.flushing.load(Ordering::SeqCst)).then_some(()));
    }

    /// Makes the thread watch the port: the application will not poll for a while.
    pub(crate) fn watch(&self) {
        // Without this, delayed acknowledgements would wait for the next packet: the thread may sleep.
        self.flush_acks();
        self.watch_until.store(self.now() + WATCH_PERIOD, Ordering::SeqCst);
        if !self.watching.load(Ordering::SeqCst) {
            self.tasks.wake();
        }
    }

    /// For the thread: the descriptors to watch, if it watches the port, and the longest sleep.
    pub(crate) fn poll_set(&self) -> ([Option<RawFd>; 3], Option<Duration>) {
        let Some(opened) = self.opened() else { return ([None; 3], None) };
        let now = self.now();
        let polled = self.since_last_poll(now) < CHECK_INTERVAL;
        let must_watch = || !polled || self.watch_until.load(Ordering::SeqCst) > now;
        let mut watch = must_watch();
        self.watching.store(watch, Ordering::SeqCst);
        // A thread that arms a queue from now on sees that the port is not watched. An earlier one is seen
        // here.
        if !watch && must_watch() {
            watch = true;
            self.watching.store(true, Ordering::SeqCst);
        }
        let fds = opened.port.descriptors().map(|fd| fd.filter(|_| watch).map(|fd| fd.as_raw_fd()));
        // A poller may delay an acknowledgement at any time, and not poll again. After this store it sees
        // that the thread will check.
        self.checking.store(polled, Ordering::SeqCst);
        let check = (polled || self.has_delayed_acks.load(Ordering::SeqCst)).then_some(now + CHECK_INTERVAL);
        let next = check.into_iter().chain(self.next_expiry.get()).min();
        (fds, next.map(|next| Duration::from_nanos(next.saturating_sub(now))))
    }

    /// For the thread, before it sleeps: looks for packets some times in a row, if it watches the port, as long as it polls
    /// and no application does.
    pub(crate) fn busy_poll(&self, polling: &mut Polling) -> BusyPoll {
        let Some(opened) = self.opened().filter(|_| self.watching.load(Ordering::Relaxed)) else {
            return BusyPoll::Over;
        };
        let last_poll = self.last_poll.load(Ordering::Relaxed);
        let mut result = BusyPoll::Over;
        for _ in 0..MAX_LOOKS {
            if !polling.pause() || self.last_poll.load(Ordering::Relaxed) != last_poll {
                break;
            }
            result = BusyPoll::Nothing;
            if opened.receiver.try_lock().is_some_and(|mut receiver| receiver.receive(self, &opened.port)) {
                return BusyPoll::Received;
            }
            if self.next_expiry.has_come(self.now()) {
                break;
            }
        }
        result
    }

    /// For the thread: receives packets and expires timers. `readable`: a watched descriptor is readable. True if it has
    /// received packets.
    pub(crate) fn service(&self, readable: bool) -> bool {
        let Some(opened) = self.opened() else { return false };
        let mut found = false;
        let now = self.now();
        let unpolled = !self.is_polled(now);
        if unpolled {
            // Before the next packets, whose acknowledgements may still wait for a request.
            self.flushing.store(true, Ordering::SeqCst);
            self.flush_acks();
            self.flushing.store(false, Ordering::SeqCst);
        }
        if readable {
            match opened.receiver.try_lock() {
                Some(mut receiver) => found = receiver.receive(self, &opened.port),
                // The poller may miss packets that have just arrived, or be preempted on this core.
                None => std::thread::sleep(POLLER_WAIT),
            }
        } else if (unpolled || self.next_expiry.has_come(now))
            && let Some(mut receiver) = opened.receiver.try_lock()
        {
            // On a busy machine the packet that a timer waits for may have arrived already.
            found = receiver.receive(self, &opened.port);
            if found && unpolled && !self.watching.load(Ordering::Relaxed) {
                self.watch_until.fetch_max(now + WATCH_PERIOD, Ordering::SeqCst);
            }
        }
        if self.next_expiry.has_come(self.now()) {
            self.expire_timers();
        }
        found
    }

    /// Nanoseconds on the clock of all times here.
    pub(crate) fn now(&self) -> u64 {
        clock::monotonic()
    }

    /// Adds a queue pair with timers. One that connects again stays once.
    pub(crate) fn add_timed(&self, qp: Weak<dyn QpOps>) {
        let mut timed = self.timed.lock().unwrap_or_else(PoisonError::into_inner);
        timed.retain(|other| other.strong_count() != 0 && !std::ptr::addr_eq(other.as_ptr(), qp.as_ptr()));
        timed.push(qp);
    }

    /// Number of queue pairs with timers.
    pub(crate) fn timed(&self) -> usize {
        self.timed.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Sets the timer of a queue pair.
    #[inline]
    pub(crate) fn set_timer(&self, timer: &Deadline, time: u64) {
        if timer.set(time, &self.next_expiry) {
            // The thread sleeps for longer.
            self.tasks.wake();
        }
    }

    fn expire_timers(&self) {
        self.next_expiry.begin();
        let timed = self.timed.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let now = self.now();
        let next = timed.iter().filter_map(Weak::upgrade).filter_map(|qp| qp.expire_timers(now)).min();
        // The thread may have gone to sleep meanwhile, without a timer.
        if next.is_some_and(|next| self.next_expiry.include(next)) {
            self.tasks.wake();
        }
    }
}

/// The result of an attempt that succeeds before the deadline.
fn until<T>(deadline: Instant, mut attempt: impl FnMut() -> Option<T>) -> Option<T> {
    loop {
        let result = attempt();
        if result.is_some() || Instant::now() >= deadline {
            return result;
        }
        std::thread::yield_now();
    }
}

/// A counter that rises steadily, once to five times a nanosecond, and is cheaper to read than a clock. Without such a
/// counter it rises by [`POLL_RECORD_TICKS`] with each call.
#[inline]
fn ticks() -> u64 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: every x86-64 processor has the instruction.
    unsafe {
        std::arch::x86_64::_rdtsc()
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    {
        static TICKS: AtomicU64 = AtomicU64::new(0);
        TICKS.fetch_add(POLL_RECORD_TICKS, Ordering::Relaxed)
    }
}

impl Receiver {
    /// Receives the packets that have arrived; false if there are none.
    fn receive(&mut self, from: &RocePort, port: &Port) -> bool {
        for turn in 0..MAX_RECEIVES {
            match port.receive(&mut self.inbox) {
                Ok(0) | Err(_) => return turn != 0,
                Ok(_) => self.deliver(from, from.now()),
            }
        }
        true
    }

    /// Delivers packets to their queue pairs, in runs for the same queue pair. They arrived at `now`.
    fn deliver(&mut self, from: &RocePort, now: u64) {
        let Self { inbox, last } = self;
        let mut run: ArrayVec<Packet<'_>, BATCH> = ArrayVec::new();
        let mut run_qpn = Qpn::default();
        // Later runs read the clock, because earlier ones take time.
        let mut now = Some(now);
        let mut deliver_run = |qpn: Qpn, packets: &[Packet<'_>]| {
            if packets.is_empty() {
                return;
            }
            let known = last.as_ref().and_then(Weak::upgrade).filter(|qp| qp.qpn() == qpn);
            let found = known.or_else(|| from.qps.get(qpn).inspect(|qp| *last = Some(Arc::downgrade(qp))));
            let Some(qp) = found else { return };
            qp.packets_arrived(packets, now.take().unwrap_or_else(|| from.now()));
        };
        for received in inbox.received() {
            let group = Some(gid(received.info.destination).octets()).filter(multicast::is_group);
            for (_, packet) in received.packets() {
                let Some(qpn) = millstream_link::destination_qpn(packet) else { continue };
                // The multicast queue pair number belongs to group addresses, and no other number does (10.5.1).
                if group.is_some() != (qpn == multicast::MULTICAST_QPN) {
                    continue;
                }
                if qpn == gsi::QPN {
                    if let Some(port) = from.port() {
                        gsi::handle_unclaimed(port, &received.info, packet);
                    }
                    continue;
                }
                if let Some(group) = &group {
                    for member in from.multicast.own_members(group) {
                        deliver_run(member, &[(received.info, packet)]);
                    }
                    continue;
                }
                if qpn != run_qpn || run.is_full() {
                    deliver_run(run_qpn, &run);
                    run.clear();
                    run_qpn = qpn;
                }
                run.push((received.info, packet));
            }
        }
        deliver_run(run_qpn, &run);
    }
}

#[cfg(test)]
mod tests;
