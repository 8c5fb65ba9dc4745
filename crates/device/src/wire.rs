//! The process's place on the network: its UDP port, and who takes packets in.
//!
//! The port is opened when the first queue pair needs it. Packets are taken in by whoever polls a completion queue
//! of such a queue pair: nobody is quicker, and nobody else is in the way. The progress thread watches the port, too,
//! so that a process that sleeps, or watches its memory instead of its completions, still answers. But to be woken beside a
//! poller costs that one more than the packet: while a program polls, the thread is off duty, and looks now and then
//! whether that is still so. It is back when nobody polls any more; for a while when it finds packets that a program, which
//! does something else between its polls, has left; and at once when a queue is armed, which is what programs do before
//! they sleep. Timers are the thread's, or a poller's if it is there first.
//!
//! An acknowledgement of what came while a program polls goes with its next request, and by itself only if
//! none follows soon: in a ping-pong a packet less each way, and each side finds answer and acknowledgement together.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Duration;

use arrayvec::ArrayVec;
use millstream_link::{Inbox, Origin, Port};
use millstream_lockfree::BiasedLock;
use millstream_wire::gid;

use crate::clock;
use crate::errno::{Errno, Result};
use crate::gsi;
use crate::host::Host;
use crate::multicast;
use crate::qp::Qp;

/// Datagrams of one system call. With receive offload each may hold dozens of packets.
const DATAGRAMS: usize = 16;
/// System calls of the thread's that receive, before it looks after other things.
const VISIT: usize = 4;
/// Packets that a queue pair takes at a time.
pub(crate) const BATCH: usize = 64;
/// How often the thread looks while it is off duty, nanoseconds. It bounds how late packets are taken in that a program
/// leaves, and how late an acknowledgement can be.
const LOOK: u64 = 250_000;
/// Who did not poll for so long does something else, nanoseconds.
const PAUSE: u64 = 50_000;
/// Polls that follow each other so closely are a row, of which one is noted; in [`ticks`]: six to thirty microseconds.
const ROW: u64 = 32_768;
/// How long the thread waits for a poller that is taking packets in.
const HELD: Duration = Duration::from_micros(20);
/// How long the thread is on duty although a program polls, nanoseconds.
const DUTY: u64 = 10_000_000;

/// See the module's description.
#[derive(Debug)]
pub(crate) struct Wire {
    opened: OnceLock<std::result::Result<Opened, Errno>>,
    /// When a program last polled, nanoseconds; zero if it never did. Not each poll of a row is noted.
    polled: AtomicU64,
    /// The same in [`ticks`].
    noted: AtomicU64,
    /// Until when the thread is on duty although a program polls, nanoseconds.
    duty: AtomicU64,
    /// The thread sees packets come.
    watching: AtomicBool,
    /// The thread sleeps no longer than [`LOOK`].
    looks: AtomicBool,
    /// Queue pairs that owe an acknowledgement, and whether there are any.
    owing: BiasedLock<Vec<Weak<Qp>>>,
    owes: AtomicBool,
    /// Queue pairs with timers.
    timed: Mutex<Vec<Weak<Qp>>>,
    /// When the next of them expires, nanoseconds.
    next: AtomicU64,
}

#[derive(Debug)]
struct Opened {
    port: Port,
    /// A poller's own, as long as the thread has nothing to receive.
    incoming: BiasedLock<Incoming>,
}

#[derive(Debug)]
struct Incoming {
    inbox: Inbox,
    /// Whom the last packet was for: mostly whom the next one is for.
    last: Weak<Qp>,
}

/// A packet, and where it came from.
pub(crate) type Arrived<'a> = (Origin, &'a [u8]);

impl Default for Wire {
    fn default() -> Self {
        Self {
            opened: OnceLock::new(),
            polled: AtomicU64::new(0),
            noted: AtomicU64::new(0),
            duty: AtomicU64::new(0),
            watching: AtomicBool::new(false),
            looks: AtomicBool::new(false),
            owing: BiasedLock::default(),
            owes: AtomicBool::new(false),
            timed: Mutex::default(),
            next: AtomicU64::new(u64::MAX),
        }
    }
}

impl Wire {
    /// The process's port, opened now if it was not.
    ///
    /// # Errors
    /// What opening it reported; it is not tried again.
    pub(crate) fn open(&self, host: &'static Host) -> Result<&Port> {
        let mut new = false;
        let opened = self.opened.get_or_init(|| {
            new = true;
            let port = Port::join(host.block as u16).map_err(|error| {
                eprintln!("millstream: no packets to or from other hosts: {error}");
                Errno(libc::EADDRINUSE)
            })?;
            let incoming = Incoming { inbox: Inbox::new(DATAGRAMS), last: Weak::new() };
            Ok(Opened { port, incoming: BiasedLock::new(incoming) })
        });
        if let (true, Ok(opened)) = (new, opened) {
            host.multicast.port_opened(&opened.port);
        }
        host.progress.wake();
        opened.as_ref().map(|opened| &opened.port).map_err(|errno| *errno)
    }

    fn opened(&self) -> Option<&Opened> {
        self.opened.get()?.as_ref().ok()
    }

    /// The port, if it is open.
    pub(crate) fn port(&self) -> Option<&Port> {
        self.opened().map(|opened| &opened.port)
    }

    /// Takes packets in for an application that polls.
    pub(crate) fn poll(&self, host: &'static Host) {
        self.pay();
        let Some(opened) = self.opened() else { return };
        let mut found = false;
        if let Some(mut incoming) = opened.incoming.try_lock() {
            // Once: it will poll again, and sees its completions earlier.
            found = opened.port.receive(&mut incoming.inbox).is_ok_and(|received| received != 0);
            if found {
                let now = self.now();
                self.polled.store(now, Ordering::Relaxed);
                incoming.deliver(host, now);
            }
        } else {
            // The thread may have been interrupted at it, on this very core.
            std::thread::yield_now();
        }
        // To read the clock takes a fifth of the time of a poll that finds nothing.
        let ticks = ticks();
        if !found && ticks.wrapping_sub(self.noted.load(Ordering::Relaxed)) >= ROW {
            self.noted.store(ticks, Ordering::Relaxed);
            let now = self.now();
            self.polled.store(now, Ordering::Relaxed);
            // What somebody waits for has not come.
            if self.next.load(Ordering::Relaxed) <= now {
                self.expire();
            }
        }
    }

    /// How long nobody has polled, nanoseconds.
    fn pause(&self, now: u64) -> u64 {
        match self.polled.load(Ordering::Relaxed) {
            0 => u64::MAX,
            polled => now.saturating_sub(polled),
        }
    }

    /// Whether a program polled a moment ago: then an acknowledgement may wait for a request to go with.
    pub(crate) fn is_polled(&self, now: u64) -> bool {
        self.pause(now) < PAUSE
    }

    /// A queue pair will acknowledge with the next request that it sends, or when somebody polls, or soon.
    pub(crate) fn owe(&self, host: &'static Host, qp: Weak<Qp>) {
        self.owing.lock().push(qp);
        self.owes.store(true, Ordering::SeqCst);
        // The packet does not end a sleep of the thread's if it is taken in before the thread has looked for it.
        if !self.looks.load(Ordering::SeqCst) {
            host.progress.wake();
        }
    }

    /// It has acknowledged. Only who owed last, as almost always, is forgotten; for others nothing is left to do.
    pub(crate) fn paid(&self, qp: &Weak<Qp>) {
        let mut owing = self.owing.lock();
        owing.pop_if(|last| last.ptr_eq(qp));
        self.owes.store(!owing.is_empty(), Ordering::Release);
    }

    fn next_owing(&self) -> Option<Weak<Qp>> {
        let mut owing = self.owing.lock();
        let next = owing.pop();
        self.owes.store(!owing.is_empty(), Ordering::Release);
        next
    }

    /// Sends the acknowledgements that wait for a request to go with. The program does something else than to post and
    /// to poll, and who waits for them shall not wait for that.
    pub(crate) fn pay(&self) {
        if self.owes.load(Ordering::Relaxed) {
            while let Some(qp) = self.next_owing() {
                if let Some(qp) = qp.upgrade() {
                    qp.flush_ack();
                }
            }
        }
    }

    /// Nobody will poll for a while.
    pub(crate) fn hand_over(&self, host: &'static Host) {
        // What it owes nobody would send before the next packet comes: the thread may sleep.
        self.pay();
        self.duty.store(self.now() + DUTY, Ordering::SeqCst);
        if !self.watching.load(Ordering::SeqCst) {
            host.progress.wake();
        }
    }

    /// For the thread: the descriptors to watch, if it is on duty, and how long at most.
    pub(crate) fn turn(&self) -> ([Option<RawFd>; 2], Option<Duration>) {
        let Some(opened) = self.opened() else { return ([None; 2], None) };
        let now = self.now();
        let polled = self.pause(now) < LOOK;
        let on_duty = || !polled || self.duty.load(Ordering::SeqCst) > now;
        let mut watch = on_duty();
        self.watching.store(watch, Ordering::SeqCst);
        // Who arms a queue now sees that nobody watches; who did so before is seen here.
        if !watch && on_duty() {
            watch = true;
            self.watching.store(true, Ordering::SeqCst);
        }
        let fds = opened.port.descriptors().map(|fd| watch.then(|| fd.as_raw_fd()));
        // Who polls may owe an acknowledgement in a moment, and not poll again. Who begins to owe one after
        // this looks whether the thread will.
        self.looks.store(polled, Ordering::SeqCst);
        let look = (polled || self.owes.load(Ordering::SeqCst)).then_some(now + LOOK);
        let timer = Some(self.next.load(Ordering::Relaxed)).filter(|next| *next != u64::MAX);
        let next = look.into_iter().chain(timer).min();
        (fds, next.map(|next| Duration::from_nanos(next.saturating_sub(now))))
    }

    /// For the thread: packets may have come, timers may have expired.
    pub(crate) fn attend(&self, host: &'static Host, readable: bool) {
        let Some(opened) = self.opened() else { return };
        let now = self.now();
        let paused = !self.is_polled(now);
        if paused {
            // What comes now may still wait for a request.
            self.pay();
        }
        if readable {
            match opened.incoming.try_lock() {
                Some(mut incoming) => _ = incoming.take_in(host, &opened.port),
                // Who is at it may overlook what has come since, and may have been interrupted on this very core.
                None => std::thread::sleep(HELD),
            }
        } else if (paused || self.next.load(Ordering::Relaxed) <= now)
            && let Some(mut incoming) = opened.incoming.try_lock()
        {
            // The answer that a timer waits for may be here, on a machine where nobody had the processor.
            let found = incoming.take_in(host, &opened.port);
            if found && paused && !self.watching.load(Ordering::Relaxed) {
                self.duty.fetch_max(now + DUTY, Ordering::SeqCst);
            }
        }
        if self.next.load(Ordering::Relaxed) <= self.now() {
            self.expire();
        }
    }

    /// Nanoseconds on the clock of everything here.
    pub(crate) fn now(&self) -> u64 {
        clock::monotonic()
    }

    /// A queue pair has timers from now on.
    pub(crate) fn add_timed(&self, qp: Weak<Qp>) {
        let mut timed = self.timed.lock().unwrap_or_else(PoisonError::into_inner);
        timed.retain(|qp| qp.strong_count() != 0);
        timed.push(qp);
    }

    /// How many queue pairs have.
    pub(crate) fn timed(&self) -> usize {
        self.timed.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Something is to be done at `time`.
    #[inline]
    pub(crate) fn schedule(&self, host: &'static Host, time: u64) {
        if time < self.next.load(Ordering::Relaxed) {
            self.next.fetch_min(time, Ordering::AcqRel);
            // The thread's sleep was for longer.
            host.progress.wake();
        }
    }

    fn expire(&self) {
        self.next.store(u64::MAX, Ordering::Release);
        let timed = self.timed.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let now = self.now();
        let next = timed.iter().filter_map(Weak::upgrade).filter_map(|qp| qp.handle_timer(now)).min();
        if let Some(next) = next {
            self.next.fetch_min(next, Ordering::AcqRel);
        }
    }
}

/// A number that rises steadily, once to five times in a nanosecond, and takes a third of the time of a clock to read;
/// where there is none, one that rises by a [`ROW`] each time.
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
        TICKS.fetch_add(ROW, Ordering::Relaxed)
    }
}

impl Incoming {
    /// Takes in what has come; whether there was anything.
    fn take_in(&mut self, host: &'static Host, port: &Port) -> bool {
        for visit in 0..VISIT {
            match port.receive(&mut self.inbox) {
                Ok(0) | Err(_) => return visit != 0,
                Ok(_) => self.deliver(host, host.wire.now()),
            }
        }
        true
    }

    /// Gives packets to their queue pairs, as many at a time as follow each other. They came at `now`.
    fn deliver(&mut self, host: &'static Host, now: u64) {
        let Self { inbox, last } = self;
        let mut run: ArrayVec<Arrived<'_>, BATCH> = ArrayVec::new();
        let mut to = 0;
        // What was before takes its time.
        let mut now = Some(now);
        let mut hand_out = |qpn: u32, packets: &[Arrived<'_>]| {
            if packets.is_empty() {
                return;
            }
            let known = last.upgrade().filter(|qp| qp.qpn() == qpn);
            let found = known.or_else(|| host.qp(qpn).inspect(|qp| *last = Arc::downgrade(qp)));
            let Some(qp) = found else { return };
            qp.handle_packets(packets, now.take().unwrap_or_else(|| host.wire.now()));
        };
        for received in inbox.received() {
            let group = Some(gid(received.origin.destination).octets()).filter(multicast::is_group);
            for (_, packet) in received.packets() {
                let Some(qpn) = millstream_link::destination_qpn(packet) else { continue };
                // What is for a group is for everybody in it, and nothing else is (10.5.1).
                if group.is_some() != (qpn == multicast::EVERYBODY) {
                    continue;
                }
                if qpn == gsi::QPN {
                    if let Some(port) = host.wire.port() {
                        gsi::forward(port, &received.origin, packet);
                    }
                    continue;
                }
                if let Some(group) = &group {
                    for member in host.multicast.own_members(group) {
                        hand_out(member, &[(received.origin, packet)]);
                    }
                    continue;
                }
                if qpn != to || run.is_full() {
                    hand_out(to, &run);
                    run.clear();
                    to = qpn;
                }
                run.push((received.origin, packet));
            }
        }
        hand_out(to, &run);
    }
}
