//! The thread that makes progress for an application that is not polling: retries of parked
//! requests, faults that peers report, peers' deaths.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use millstream_shm::EventFd;

use crate::cq::Cq;
use crate::errno::{Errno, Result};
use crate::greeting::{Message, Op};
use crate::host::Host;
use crate::peer::Peer;
use crate::qp::Qp;

/// Something to do, from the server thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// A peer's operation broke the rules of our queue pair `qpn`.
    Fault { qpn: u32, from: u32, event: u32 },
    /// A completion of our queue pair `qpn` was lost.
    Fatal { qpn: u32 },
    /// What our queue pair `qpn` waits for may have happened.
    Retry { qpn: u32 },
    /// The shared receive queue of our queue pair `qpn` fell below its limit.
    LimitReached { qpn: u32 },
    /// The first request of a peer found our queue pair `qpn` in RTR.
    Contact { qpn: u32, from: u32 },
    /// A datagram for our queue pair `qpn` found its completion queue full.
    Overrun { qpn: u32 },
    /// The sender of a datagram for our queue pair `qpn` died when it had taken a request.
    Abandoned { qpn: u32 },
    /// A queue pair of somebody waits for what we have posted.
    Wake { qpn: u32 },
    /// Something happened to our XRC shared receive queue `number`, see [`crate::greeting::shared`].
    Shared { number: u32, what: u32 },
}

impl Work {
    /// What a message asks for; None for those that are answered instead.
    pub(crate) fn of(message: &Message) -> Option<Self> {
        let [a, b, c, ..] = message.words;
        Some(match message.op {
            Op::Fault => Self::Fault { qpn: a, from: b, event: c },
            Op::Refilled => Self::Retry { qpn: a },
            Op::LimitReached => Self::LimitReached { qpn: a },
            Op::Contact => Self::Contact { qpn: a, from: b },
            Op::Overrun => Self::Overrun { qpn: a },
            Op::Abandoned => Self::Abandoned { qpn: a },
            Op::Shared => Self::Shared { number: a, what: b },
            Op::Hello | Op::File | Op::Channel | Op::Member | Op::Signal | Op::Refused => return None,
        })
    }
}

/// How late the thread's waits may end: the kernel's 50 µs are as long as what it waits for on the wire.
const TIMER_SLACK: Duration = Duration::from_micros(1);

#[derive(Debug)]
pub(crate) struct Progress {
    wake: Arc<EventFd>,
    timer: OwnedFd,
    start: Instant,
    /// When the timer fires, nanoseconds since `start`; zero if it is not set.
    armed: AtomicU64,
    work: Mutex<Vec<Work>>,
    parked: Mutex<Vec<Weak<Qp>>>,
    watched: Mutex<Vec<Arc<Peer>>>,
    /// Completion queues whose events are moderated.
    moderated: Mutex<Vec<Weak<Cq>>>,
}

impl Progress {
    pub(crate) fn new() -> std::io::Result<Self> {
        // SAFETY: creates a descriptor that nobody else owns.
        let timer =
            unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, libc::TFD_CLOEXEC | libc::TFD_NONBLOCK) };
        if timer < 0 {
            return Err(std::io::Error::last_os_error());
        }
        Ok(Self {
            wake: Arc::new(EventFd::new()?),
            // SAFETY: as above.
            timer: unsafe { OwnedFd::from_raw_fd(timer) },
            start: Instant::now(),
            armed: AtomicU64::new(0),
            work: Mutex::default(),
            parked: Mutex::default(),
            watched: Mutex::default(),
            moderated: Mutex::default(),
        })
    }

    /// Adds something to do. Twice is once: a peer that repeats itself does not fill our memory.
    pub(crate) fn add(&self, work: Work) {
        let mut list = self.work.lock().expect("no panic under this lock");
        if !list.contains(&work) {
            list.push(work);
            self.wake.signal();
        }
    }

    /// Looks after everything once.
    pub(crate) fn wake(&self) {
        self.wake.signal();
    }

    /// What wakes the thread, for peers to signal.
    pub(crate) fn waker(&self) -> Arc<EventFd> {
        self.wake.clone()
    }

    /// Takes charge of a completion queue whose events are moderated.
    pub(crate) fn moderate(&self, cq: Weak<Cq>) {
        self.moderated.lock().expect("no panic under this lock").push(cq);
    }

    /// Notices the end of `peer`.
    pub(crate) fn watch(&self, peer: Arc<Peer>) {
        self.watched.lock().expect("no panic under this lock").push(peer);
        self.wake.signal();
    }

    /// Takes charge of a queue pair with parked requests, looking after it in `delay` at the latest.
    pub(crate) fn park(&self, qp: Weak<Qp>, delay: Duration) {
        self.parked.lock().expect("no panic under this lock").push(qp);
        self.arm(delay);
    }

    fn arm(&self, delay: Duration) {
        let now = self.start.elapsed();
        let at = (now + delay).as_nanos() as u64;
        let armed = self.armed.load(Ordering::Acquire);
        if armed != 0 && armed <= at {
            return;
        }
        self.armed.store(at, Ordering::Release);
        let value = libc::timespec {
            tv_sec: delay.as_secs() as i64,
            tv_nsec: i64::from(delay.subsec_nanos().max(1)),
        };
        let spec =
            libc::itimerspec { it_interval: libc::timespec { tv_sec: 0, tv_nsec: 0 }, it_value: value };
        // SAFETY: the timer is ours and the specification is on the stack.
        unsafe { libc::timerfd_settime(self.timer.as_raw_fd(), 0, &raw const spec, std::ptr::null_mut()) };
    }

    pub(crate) fn run(&self, host: &'static Host) {
        // SAFETY: no memory is involved.
        unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, TIMER_SLACK.as_nanos() as libc::c_ulong) };
        loop {
            let watched = self.watched.lock().expect("no panic under this lock").clone();
            let ([port, detour], patience) = host.wire.turn();
            let [port, detour] = [port, detour].map(|fd| fd.unwrap_or(-1));
            let own = [self.wake.as_fd().as_raw_fd(), self.timer.as_raw_fd(), port, detour];
            let mut fds: Vec<_> = own.map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 }).into();
            fds.extend(watched.iter().flat_map(|peer| peer.liveness()));
            let patience = patience.map(|time| libc::timespec {
                tv_sec: time.as_secs() as i64,
                tv_nsec: i64::from(time.subsec_nanos()),
            });
            let patience = patience.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
            // SAFETY: an array of pollfd of the given length, and a time on the stack or none.
            unsafe { libc::ppoll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, patience, std::ptr::null()) };
            if fds[0].revents != 0 {
                let _ = self.wake.take();
            }
            if fds[1].revents != 0 {
                let mut expirations = [0u8; 8];
                // SAFETY: eight bytes on the stack. Nothing to read is fine.
                unsafe { libc::read(self.timer.as_raw_fd(), expirations.as_mut_ptr().cast(), 8) };
                self.armed.store(0, Ordering::Release);
            }
            host.wire.attend(host, fds[2].revents != 0 || fds[3].revents != 0);
            for (peer, signs) in watched.iter().zip(fds[4..].chunks(2)) {
                if signs.iter().any(|sign| sign.revents != 0) {
                    self.bury(host, peer);
                }
            }
            self.retry(host);
            self.end_moderation();
            // Not in the head of the loop: the list would be locked until its end, and who adds to it may hold
            // the send queue that a piece of work needs.
            let list = std::mem::take(&mut *self.work.lock().expect("no panic under this lock"));
            for work in list {
                match work {
                    Work::Fault { qpn, from, event } => {
                        if let Some(qp) = host.qp(qpn) {
                            qp.fault_from_peer(from, event);
                        }
                    }
                    Work::Fatal { qpn } => {
                        if let Some(qp) = host.qp(qpn) {
                            qp.fail_fatally();
                        }
                    }
                    Work::LimitReached { qpn } => {
                        if let Some(srq) = host.qp(qpn).as_ref().and_then(|qp| qp.srq()) {
                            srq.limit_reached();
                        }
                    }
                    Work::Contact { qpn, from } => {
                        if let Some(qp) = host.qp(qpn) {
                            qp.contacted(from);
                        }
                    }
                    Work::Overrun { qpn } => {
                        if let Some(qp) = host.qp(qpn) {
                            qp.completion_lost();
                        }
                    }
                    Work::Abandoned { qpn } => {
                        if let Some(qp) = host.qp(qpn) {
                            qp.take_back_abandoned();
                        }
                    }
                    Work::Wake { qpn } => {
                        if let Ok(peer) = host.peer_of(qpn) {
                            peer.tell(host, Message::new(Op::Refilled, [qpn]));
                        }
                    }
                    Work::Shared { number, what } => {
                        if let Some(srq) = host.xrc.find(number) {
                            srq.happened(what);
                        }
                    }
                    Work::Retry { qpn } => {
                        if let Some(qp) = host.qp(qpn) {
                            qp.retry_now();
                        }
                    }
                }
            }
        }
    }

    fn retry(&self, _host: &'static Host) {
        let parked = std::mem::take(&mut *self.parked.lock().expect("no panic under this lock"));
        for qp in parked {
            // Whoever is still parked goes back on the list.
            if let Some(delay) = qp.upgrade().and_then(|qp| qp.retry()) {
                self.park(qp, delay);
            }
        }
    }

    fn end_moderation(&self) {
        let queues: Vec<_> = {
            let mut list = self.moderated.lock().expect("no panic under this lock");
            list.retain(|cq| cq.strong_count() != 0);
            list.iter().filter_map(Weak::upgrade).collect()
        };
        for delay in queues.iter().filter_map(|cq| cq.end_moderation()) {
            self.arm(delay);
        }
    }

    fn bury(&self, host: &'static Host, peer: &Arc<Peer>) {
        peer.mark_dead();
        host.forget_peer(peer);
        self.watched.lock().expect("no panic under this lock").retain(|p| !Arc::ptr_eq(p, peer));
        for qp in host.all_qps() {
            qp.peer_died(peer);
        }
    }
}

/// How long a sleeping application's parked request waits between tries, after `waited` so far.
pub(crate) fn retry_delay(waited: Duration) -> Duration {
    (waited / 4).clamp(Duration::from_micros(50), Duration::from_millis(10))
}

/// The timer of an RNR NAK, from its code (IBTA volume 1, table 45).
///
/// # Errors
/// EINVAL for a code of more than five bits.
pub(crate) fn rnr_timer(code: u8) -> Result<Duration> {
    const HUNDREDTHS_OF_MS: [u32; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
        3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    let value = HUNDREDTHS_OF_MS.get(usize::from(code)).ok_or(Errno::INVAL)?;
    Ok(Duration::from_micros(u64::from(*value) * 10))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timers_follow_the_tables() {
        assert_eq!(rnr_timer(0).unwrap(), Duration::from_micros(655_360));
        assert_eq!(rnr_timer(12).unwrap(), Duration::from_micros(640));
        assert_eq!(rnr_timer(31).unwrap(), Duration::from_micros(491_520));
        assert!(rnr_timer(32).is_err());
    }
}
