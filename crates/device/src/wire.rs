//! The process's place on the network: its UDP port, and who takes packets in.
//!
//! The port is opened when the first queue pair needs it. Packets are taken in by whoever polls a completion queue
//! of such a queue pair: nobody is quicker, and nobody else is in the way. The progress thread watches the port, too,
//! so that a process that sleeps, or watches its memory instead of its completions, still answers. When it is woken
//! a few times for packets that a poller has taken meanwhile, it goes off duty and only looks now and then; so it costs
//! pollers next to nothing. It is back when it finds something that nobody took, and at once when a queue is armed, which is what programs do before they sleep. Timers are
//! the thread's.

use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use millstream_link::{Inbox, Origin, Port};
use millstream_wire::gid;

use crate::errno::{Errno, Result};
use crate::gsi;
use crate::host::Host;
use crate::multicast;
use crate::qp::Qp;

/// Datagrams of one system call. With receive offload each may hold dozens of packets.
const DATAGRAMS: usize = 16;
/// System calls of one visit, so that a poller comes back to its completions.
const VISIT: usize = 4;
/// Packets that a queue pair takes at a time.
pub(crate) const BATCH: usize = 64;
/// How long the thread is off duty. It bounds how late an acknowledgement can be.
const OFF_DUTY: Duration = Duration::from_micros(250);
/// How often in a row it is woken in vain before that.
const IN_VAIN: u32 = 4;

/// See the module's description.
#[derive(Debug)]
pub(crate) struct Wire {
    opened: OnceLock<std::result::Result<Opened, Errno>>,
    /// How often a poller has taken packets in, and what the thread saw of that.
    polled: AtomicU32,
    seen: AtomicU32,
    /// A queue was armed: the thread takes over.
    handed: AtomicBool,
    /// How often in a row the thread was woken for nothing.
    in_vain: AtomicU32,
    /// The thread sees packets come.
    watching: AtomicBool,
    /// The thread sleeps no longer than [`OFF_DUTY`].
    looks: AtomicBool,
    /// Queue pairs that owe an acknowledgement, and whether there are any.
    owing: Mutex<Vec<Weak<Qp>>>,
    owes: AtomicBool,
    /// Queue pairs with timers.
    timed: Mutex<Vec<Weak<Qp>>>,
    start: Instant,
    /// When the next of them expires, nanoseconds since `start`.
    next: AtomicU64,
}

#[derive(Debug)]
struct Opened {
    port: Port,
    inbox: Mutex<Inbox>,
}

/// Who takes packets in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Who {
    /// A program that polls, and will again, or post.
    Poller,
    Thread,
}

/// A packet, and where it came from.
pub(crate) type Arrived<'a> = (Origin, &'a [u8]);

impl Default for Wire {
    fn default() -> Self {
        Self {
            opened: OnceLock::new(),
            polled: AtomicU32::new(0),
            seen: AtomicU32::new(0),
            handed: AtomicBool::new(false),
            in_vain: AtomicU32::new(0),
            watching: AtomicBool::new(false),
            looks: AtomicBool::new(false),
            owing: Mutex::default(),
            owes: AtomicBool::new(false),
            timed: Mutex::default(),
            start: Instant::now(),
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
            Ok(Opened { port, inbox: Mutex::new(Inbox::new(DATAGRAMS)) })
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
        self.polled.store(self.polled.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        self.pay();
        let Some(opened) = self.opened() else { return };
        if let Ok(mut inbox) = opened.inbox.try_lock() {
            take_in(host, &opened.port, &mut inbox, Who::Poller);
        }
    }

    /// A queue pair will acknowledge with the next request that it sends, or when somebody polls, or soon.
    pub(crate) fn owe(&self, host: &'static Host, qp: Weak<Qp>) {
        self.owing.lock().unwrap_or_else(PoisonError::into_inner).push(qp);
        self.owes.store(true, Ordering::SeqCst);
        // The packet does not end a sleep of the thread's if it is taken in before the thread has looked for it.
        if !self.looks.load(Ordering::SeqCst) {
            host.progress.wake();
        }
    }

    /// Sends the acknowledgements that wait for a request to go with. The program does something else than to post and
    /// to poll, and who waits for them shall not wait for that.
    pub(crate) fn pay(&self) {
        if self.owes.load(Ordering::Relaxed) && self.owes.swap(false, Ordering::AcqRel) {
            let owing = std::mem::take(&mut *self.owing.lock().unwrap_or_else(PoisonError::into_inner));
            owing.iter().filter_map(Weak::upgrade).for_each(|qp| qp.pay_on_wire());
        }
    }

    /// Nobody will poll for a while.
    pub(crate) fn hand_over(&self, host: &'static Host) {
        // What it owes nobody would send before the next packet comes: the thread may sleep.
        self.pay();
        self.handed.store(true, Ordering::SeqCst);
        if !self.watching.load(Ordering::SeqCst) {
            host.progress.wake();
        }
    }

    /// For the thread: the descriptor to watch, if it is its turn, and how long at most.
    pub(crate) fn turn(&self) -> (Option<RawFd>, Option<Duration>) {
        let Some(opened) = self.opened() else { return (None, None) };
        let polled = self.polled.load(Ordering::Relaxed);
        let calm = self.seen.swap(polled, Ordering::Relaxed) == polled;
        let handed = self.handed.swap(false, Ordering::SeqCst);
        let in_vain = self.in_vain.load(Ordering::Relaxed);
        let watch = calm || handed || in_vain < IN_VAIN;
        self.watching.store(watch, Ordering::SeqCst);
        let fd = watch.then(|| opened.port.as_fd().as_raw_fd());
        let timer = match self.next.load(Ordering::Relaxed) {
            u64::MAX => None,
            next => Some(Duration::from_nanos(next.saturating_sub(self.now()))),
        };
        // Whoever polled meanwhile may owe an acknowledgement by now, and not poll again. Who begins to owe one after
        // this looks whether the thread will.
        let look = !watch || !calm;
        self.looks.store(look, Ordering::SeqCst);
        let look = (look || self.owes.load(Ordering::SeqCst)).then_some(OFF_DUTY);
        (fd, [timer, look].into_iter().flatten().min())
    }

    /// For the thread: packets may have come, timers may have expired.
    pub(crate) fn attend(&self, host: &'static Host, readable: bool) {
        self.pay();
        if readable || !self.watching.load(Ordering::Relaxed) {
            let Some(opened) = self.opened() else { return };
            // Who is at it will be done soon, and may have overlooked what has come since.
            let mut inbox = opened.inbox.lock().unwrap_or_else(PoisonError::into_inner);
            if take_in(host, &opened.port, &mut inbox, Who::Thread) {
                self.in_vain.store(0, Ordering::Relaxed);
            } else if readable {
                self.in_vain.fetch_add(1, Ordering::Relaxed);
            }
        }
        if self.next.load(Ordering::Relaxed) <= self.now() {
            self.expire();
        }
    }

    /// Nanoseconds on this object's clock.
    pub(crate) fn now(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    /// A queue pair has timers from now on.
    pub(crate) fn add_timed(&self, qp: Weak<Qp>) {
        let mut timed = self.timed.lock().unwrap_or_else(PoisonError::into_inner);
        timed.retain(|qp| qp.strong_count() != 0);
        timed.push(qp);
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
        let next = timed.iter().filter_map(Weak::upgrade).filter_map(|qp| qp.expire_on_wire(now)).min();
        if let Some(next) = next {
            self.next.fetch_min(next, Ordering::AcqRel);
        }
    }
}

/// Takes in what has come; whether there was anything.
fn take_in(host: &'static Host, port: &Port, inbox: &mut Inbox, who: Who) -> bool {
    for visit in 0..VISIT {
        match port.receive(inbox) {
            Ok(0) | Err(_) => return visit != 0,
            Ok(_) => deliver(host, inbox, who),
        }
    }
    true
}

/// Gives packets to their queue pairs, as many at a time as follow each other.
fn deliver(host: &'static Host, inbox: &Inbox, who: Who) {
    let mut run: ArrayVec<Arrived<'_>, BATCH> = ArrayVec::new();
    let mut to = 0;
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
                    hand_out(host, member, &[(received.origin, packet)], who);
                }
                continue;
            }
            if qpn != to || run.is_full() {
                hand_out(host, to, &run, who);
                run.clear();
                to = qpn;
            }
            run.push((received.origin, packet));
        }
    }
    hand_out(host, to, &run, who);
}

fn hand_out(host: &'static Host, qpn: u32, packets: &[Arrived<'_>], who: Who) {
    if !packets.is_empty()
        && let Some(qp) = host.qp(qpn)
    {
        qp.arrived(packets, who);
    }
}
