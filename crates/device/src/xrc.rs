//! Extended reliable connections: domains, and the shared receive queues in them (IBTA volume 1, annex A14).
//!
//! A sender names a shared receive queue with each request. Queue and queue pair belong to one domain but
//! perhaps to two processes: what arrives goes through the queue pair of the one to the queue, memory and
//! completions of the other. A domain has no state of its own. It is a number, made from the inode that
//! processes share it by, and whoever holds the domain holds a socket name with that number.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use millstream_lockfree::{RobustLock, barrier};
use millstream_shm::random_u64;
use millstream_shm::socket::{self, Listener};

use crate::caps::MAX_XRC_SRQ;
use crate::context::Context;
use crate::cq::Cq;
use crate::errno::{Errno, Result};
use crate::host::{Host, shuffled};
use crate::layout::{QPN_INDEX_BITS, XRC_TABLE, XrcEntry};
use crate::pd::Pd;
use crate::progress::Work;
use crate::srq::Srq;

/// An XRC domain, as one of those sees it who have opened it.
#[derive(Debug)]
pub struct Xrcd {
    id: u64,
    context: Arc<Context>,
    /// Receiving queue pairs belong to no protection domain and complete nowhere; theirs have these.
    pd: Arc<Pd>,
    cq: Arc<Cq>,
    users: AtomicU32,
    /// Says that somebody has it open.
    _name: Option<Listener>,
}

/// What to do about a domain that exists, or does not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Opening {
    /// `O_CREAT`: make it if nobody has it open.
    pub create: bool,
    /// `O_EXCL`: do not open one that somebody has open.
    pub exclusive: bool,
}

impl Xrcd {
    /// A domain that nobody shares.
    ///
    /// # Errors
    /// ENOMEM when the arena is full.
    pub fn private(context: &Arc<Context>) -> Result<Arc<Self>> {
        // Even: those of inodes are odd.
        Self::make(context, random_u64() << 1 | 1 << 63, None)
    }

    /// The domain that belongs to a file.
    ///
    /// # Errors
    /// EAGAIN if nobody has it open and it shall not be made, EINVAL if somebody has and it shall be
    /// ours alone; what binding a socket reports.
    pub fn of_inode(context: &Arc<Context>, device: u64, inode: u64, opening: Opening) -> Result<Arc<Self>> {
        let id = mix(mix(device) ^ inode) | 1;
        let prefix = format!("millstream/{}/xrcd/{id:016x}/", socket::own_uid());
        let exists = !socket::listening_names(&prefix).is_empty();
        if exists && opening.exclusive {
            return Err(Errno::INVAL);
        }
        if !exists && !opening.create {
            return Err(Errno(libc::EAGAIN));
        }
        let name = Listener::bind(&format!("{prefix}{:016x}", random_u64()))?;
        Self::make(context, id, Some(name))
    }

    fn make(context: &Arc<Context>, id: u64, name: Option<Listener>) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            id,
            context: context.clone(),
            pd: Pd::new(context),
            cq: Cq::new(context, 1, None)?,
            users: AtomicU32::new(0),
            _name: name,
        }))
    }

    /// True while objects that were made with this handle exist.
    #[must_use]
    pub fn in_use(&self) -> bool {
        self.users.load(Ordering::Acquire) != 0
    }

    /// Where it was opened.
    #[must_use]
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Whether both are the same domain.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        self.id == other.id
    }

    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    pub(crate) fn substitutes(&self) -> (&Arc<Pd>, &Arc<Cq>) {
        (&self.pd, &self.cq)
    }

    pub(crate) fn attach(&self) {
        self.users.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn detach(&self) {
        self.users.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A bijection without visible pattern (the finaliser of splitmix64).
fn mix(value: u64) -> u64 {
    let value = (value ^ value >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ value >> 31
}

/// How completions name a queue and the slot in it: the top bit, the low bits of the queue's number, the slot.
pub(crate) const fn tag(number: u32) -> u32 {
    1 << 31 | index(number) << 16
}

const fn index(number: u32) -> u32 {
    number % MAX_XRC_SRQ as u32
}

/// The slot in a completion's sequence number.
pub(crate) const fn slot(sequence: u32) -> u32 {
    sequence & 0xffff
}

/// Whether a completion's sequence number names this queue.
pub(crate) const fn is_of(sequence: u32, number: u32) -> bool {
    sequence >> 16 == tag(number) >> 16
}

/// What a shared receive queue has because it belongs to a domain.
#[derive(Debug)]
pub(crate) struct Membership {
    number: u32,
    domain: Arc<Xrcd>,
    cq: Arc<Cq>,
    entry: &'static XrcEntry,
    host: &'static Host,
}

impl Membership {
    pub(crate) fn new(host: &'static Host, domain: &Arc<Xrcd>, cq: &Arc<Cq>) -> Result<Self> {
        let number = host.block << QPN_INDEX_BITS | host.xrc.get().take_index()?;
        let offset = XRC_TABLE + index(number) as usize * size_of::<XrcEntry>();
        // SAFETY: inside the arena, which lives for ever; all fields are atomics.
        let entry = unsafe { host.arena.at(offset).cast::<XrcEntry>().as_ref() };
        domain.attach();
        cq.attach();
        Ok(Self { number, domain: domain.clone(), cq: cq.clone(), entry, host })
    }

    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    pub(crate) fn domain(&self) -> &Arc<Xrcd> {
        &self.domain
    }

    pub(crate) fn cq(&self) -> &Arc<Cq> {
        &self.cq
    }

    /// Makes the queue known to pollers, then to senders.
    pub(crate) fn publish(&self, srq: &Arc<Srq>) {
        self.host.xrc.get().add(index(self.number), srq, self.cq.arena_offset());
        let entry = self.entry;
        entry.ring.store(srq.arena_offset(), Ordering::Relaxed);
        entry.cq.store(self.cq.arena_offset(), Ordering::Relaxed);
        entry.pd.store(srq.protection_domain(), Ordering::Relaxed);
        entry.domain.store(self.domain.id, Ordering::Relaxed);
        entry.taken.store(0, Ordering::Relaxed);
        entry.waiters.iter().for_each(|waiter| waiter.store(0, Ordering::Relaxed));
        entry.number.store(self.number, Ordering::Release);
    }

    /// Ends it: when this returns, no sender is inside the queue, and its completions are gone.
    pub(crate) fn withdraw(&self, number: u32) {
        self.entry.number.store(0, Ordering::SeqCst);
        barrier::heavy();
        drop(self.entry.delivery.lock(self.host.pid));
        self.cq.forget_shared(number, || self.host.xrc.get().remove(index(number)));
    }

    /// Senders may be anywhere, and finding one can take long: that is left to the progress thread.
    pub(crate) fn wake_senders(&self) {
        for waiter in &self.entry.waiters {
            let qpn = waiter.swap(0, Ordering::AcqRel);
            if qpn != 0 {
                self.host.progress.add(Work::Wake { qpn });
            }
        }
    }

    /// The note of what a dead sender took; zero for none.
    pub(crate) fn take_abandoned(&self) -> u32 {
        take_abandoned(&self.entry.delivery, &self.entry.taken, self.host.pid)
    }
}

/// Takes the note of a request that an initiator took and did not complete; zero for none. Who holds the lease
/// is inside, and the note is its own: it is not waited for long, because whoever comes next says it again.
pub(crate) fn take_abandoned(delivery: &RobustLock, taken: &AtomicU32, me: u32) -> u32 {
    let lease = delivery.lock_within(me, Duration::from_millis(100));
    if lease.is_some() { taken.swap(0, Ordering::AcqRel) } else { 0 }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.host.xrc.get().give_back(index(self.number));
        self.cq.detach();
        self.domain.detach();
    }
}

/// The process's shared receive queues that belong to domains. Made when the first one is.
#[derive(Debug, Default)]
pub(crate) struct XrcTable(OnceLock<Queues>);

#[derive(Debug)]
pub(crate) struct Queues {
    /// By index; valid while registered, see [`Queues::remove`].
    registered: Box<[Registered]>,
    list: Mutex<HashMap<u32, Weak<Srq>>>,
    /// Free indices in random order; one that was given back rests as long as possible.
    free: Mutex<VecDeque<u32>>,
}

/// A queue as pollers find it.
#[derive(Debug, Default)]
struct Registered {
    srq: AtomicPtr<Srq>,
    /// Where its completion queue lies in the arena; zero before `srq` is set and after it is not.
    cq: AtomicU32,
}

impl XrcTable {
    fn get(&self) -> &Queues {
        self.0.get_or_init(|| Queues {
            registered: (0..MAX_XRC_SRQ).map(|_| Registered::default()).collect(),
            list: Mutex::default(),
            free: Mutex::new(shuffled(MAX_XRC_SRQ as u32)),
        })
    }

    /// The queue that a completion is for, for a poller that holds the lock of the completion queue at `cq`.
    /// The completion comes from shared memory, so nothing behind the pointer is looked at before it is
    /// known that the queue completes there.
    pub(crate) fn for_poller(&self, sequence: u32, cq: u32) -> Option<&Srq> {
        if sequence >> 31 == 0 {
            return None;
        }
        let registered = self.0.get()?.registered.get((sequence >> 16 & 0x7fff) as usize)?;
        if registered.cq.load(Ordering::Acquire) != cq {
            return None;
        }
        // SAFETY: registered, and as just seen its removal needs the lock that the caller holds.
        unsafe { registered.srq.load(Ordering::Acquire).as_ref() }
    }

    /// The queue with this number, for the threads.
    pub(crate) fn find(&self, number: u32) -> Option<Arc<Srq>> {
        let list = self.0.get()?.list.lock().expect("no panic under this lock");
        let srq = list.get(&index(number)).cloned();
        // Outside the lock: this may turn out to be the last reference.
        drop(list);
        srq?.upgrade().filter(|srq| srq.number() == number)
    }

    /// Waits until no sender is inside one of the queues whose operation began before; false if one stayed.
    pub(crate) fn wait_until_untouched(&self, me: u32) -> bool {
        let Some(queues) = self.0.get() else { return true };
        let list: Vec<_> = {
            let list = queues.list.lock().expect("no panic under this lock");
            list.values().filter_map(Weak::upgrade).collect()
        };
        list.iter().filter_map(|srq| srq.membership()).all(|m| m.entry.delivery.lock(me).is_some())
    }
}

impl Queues {
    fn take_index(&self) -> Result<u32> {
        self.free.lock().expect("no panic under this lock").pop_front().ok_or(Errno::NOMEM)
    }

    fn give_back(&self, index: u32) {
        self.free.lock().expect("no panic under this lock").push_back(index);
    }

    fn add(&self, index: u32, srq: &Arc<Srq>, cq: u32) {
        self.list.lock().expect("no panic under this lock").insert(index, Arc::downgrade(srq));
        let registered = &self.registered[index as usize];
        registered.srq.store(Arc::as_ptr(srq).cast_mut(), Ordering::Release);
        registered.cq.store(cq, Ordering::Release);
    }

    /// The caller holds the consumer lock of its completion queue, so that no poller is looking at it.
    fn remove(&self, index: u32) {
        let registered = &self.registered[index as usize];
        registered.cq.store(0, Ordering::Release);
        registered.srq.store(std::ptr::null_mut(), Ordering::Release);
        self.list.lock().expect("no panic under this lock").remove(&index);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequence_numbers_name_queue_and_slot() {
        for number in [0x12_3000, 0x12_3001, 0xff_efff] {
            for at in [0, 1, 0x7fff] {
                let sequence = tag(number) | at;
                assert_eq!(slot(sequence), at);
                assert!(is_of(sequence, number));
                assert!(!is_of(sequence, number ^ 1));
                assert!(!is_of(sequence & !(1 << 31), number), "that of a queue pair's own queue");
            }
        }
    }
}
