//! Extended reliable connections: domains, and the shared receive queues in them (IBTA volume 1, annex A14).
//!
//! A sender names a shared receive queue with each request. Queue and queue pair belong to one domain but
//! possibly to two processes: a message that arrives at one process's queue pair goes to the queue, memory
//! and completions of the other. A domain has no state. It is a number, derived from the inode that processes
//! share it by. A process that has the domain open holds a socket name with that number.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use millstream_lockfree::{RobustLock, barrier};
use millstream_quantity::Qpn;
use millstream_shm::random_u64;
use millstream_shm::socket::{self, Listener};

use crate::adapter::LocalAdapter;
use crate::context::Context;
use crate::cq::Cq;
use crate::errno::{Errno, Result};
use crate::layout::{QPN_INDEX_BITS, XRC_TABLE, XrcEntry};
use crate::pd::Pd;
use crate::srq_wqes::SrqWqes;
use crate::tasks::Task;
use crate::xrc_srq_table::{XrcSrqOps, index};

/// An open XRC domain.
#[derive(Debug)]
pub struct Xrcd {
    id: u64,
    context: Arc<Context>,
    /// The protection domain and the completion queue of XRC target queue pairs, which the application does
    /// not supply.
    pd: Arc<Pd>,
    cq: Arc<Cq>,
    users: AtomicU32,
    /// The socket name that marks the domain as open.
    _name: Option<Listener>,
}

/// The `oflags` of `ibv_open_xrcd`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct XrcdOpenFlags {
    /// `O_CREAT`: create the domain if no process has it open.
    pub create: bool,
    /// `O_EXCL`: fail if a process has it open.
    pub exclusive: bool,
}

impl Xrcd {
    /// Creates a domain that no other process can open.
    ///
    /// # Errors
    /// ENOMEM when the arena is full.
    pub fn private(context: &Arc<Context>) -> Result<Arc<Self>> {
        // Even, because the numbers of domains with an inode are odd.
        Self::new(context, random_u64() << 1 | 1 << 63, None)
    }

    /// Opens the domain that belongs to a file.
    ///
    /// # Errors
    /// EAGAIN if no process has it open and `create` is not set; EINVAL if one has and `exclusive` is set;
    /// what binding a socket reports.
    pub fn of_inode(
        context: &Arc<Context>,
        device: u64,
        inode: u64,
        flags: XrcdOpenFlags,
    ) -> Result<Arc<Self>> {
        let id = mix(mix(device) ^ inode) | 1;
        let prefix = format!("millstream/{}/xrcd/{id:016x}/", socket::own_uid());
        let exists = !socket::listening_names(&prefix)?.is_empty();
        if exists && flags.exclusive {
            return Err(Errno::INVAL);
        }
        if !exists && !flags.create {
            return Err(Errno(libc::EAGAIN));
        }
        let name = Listener::bind(&format!("{prefix}{:016x}", random_u64()))?;
        Self::new(context, id, Some(name))
    }

    fn new(context: &Arc<Context>, id: u64, name: Option<Listener>) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            id,
            context: context.clone(),
            pd: Pd::new(context),
            cq: Cq::new(context, 1, None)?,
            users: AtomicU32::new(0),
            _name: name,
        }))
    }

    /// True while objects of this handle exist.
    #[must_use]
    pub fn in_use(&self) -> bool {
        self.users.load(Ordering::Acquire) != 0
    }

    /// The context that it was opened in.
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

/// The membership of a shared receive queue in an XRC domain.
#[derive(Debug)]
pub(crate) struct XrcMembership {
    number: u32,
    domain: Arc<Xrcd>,
    cq: Arc<Cq>,
    entry: &'static XrcEntry,
    adapter: &'static LocalAdapter,
}

impl XrcMembership {
    pub(crate) fn new(adapter: &'static LocalAdapter, domain: &Arc<Xrcd>, cq: &Arc<Cq>) -> Result<Self> {
        let number = adapter.id.qpn_prefix << QPN_INDEX_BITS | adapter.xrc_srqs.take_index()?;
        let offset = XRC_TABLE + index(number) as usize * size_of::<XrcEntry>();
        let entry = adapter.arena.get(offset);
        Ok(Self { number, domain: domain.clone(), cq: cq.clone(), entry, adapter })
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

    /// Registers the queue at `ring` with pollers, then publishes it to senders. The queue withdraws itself before its
    /// slots are freed. Until then it uses its domain and its completion queue.
    pub(crate) fn publish(&self, srq: Weak<dyn XrcSrqOps>, slots: &Arc<SrqWqes>, ring: u32, pd: u32) {
        self.domain.attach();
        self.cq.attach();
        let cq = self.cq.arena_offset();
        // SAFETY: the queue holds the slots until `withdraw` has removed them.
        unsafe { self.adapter.xrc_srqs.add(index(self.number), srq, Arc::as_ptr(slots), cq) };
        let entry = self.entry;
        entry.ring.store(ring, Ordering::Relaxed);
        entry.cq.store(cq, Ordering::Relaxed);
        entry.pd.store(pd, Ordering::Relaxed);
        entry.domain.store(self.domain.id, Ordering::Relaxed);
        entry.taken.store(0, Ordering::Relaxed);
        entry.waiters.iter().for_each(|waiter| waiter.store(0, Ordering::Relaxed));
        // Who sees the new generation sees the new fields.
        entry.generation.fetch_add(1, Ordering::Release);
        entry.number.store(self.number, Ordering::Release);
    }

    /// Withdraws the queue: after the return no sender uses it, and its pending completions are cancelled.
    pub(crate) fn withdraw(&self, number: u32) {
        self.entry.number.store(0, Ordering::SeqCst);
        barrier::heavy();
        drop(self.entry.delivery.lock(self.adapter.id.pid));
        self.cq.cancel_xrc_srq(number, || self.adapter.xrc_srqs.remove(index(number)));
        // Not in `drop`: the device's threads may still hold the queue for a moment.
        self.cq.detach();
        self.domain.detach();
    }

    /// Notifies waiting senders of any process. The progress thread does it, because connecting to one can take long.
    pub(crate) fn notify_senders(&self) {
        for waiter in &self.entry.waiters {
            let qpn = waiter.swap(0, Ordering::AcqRel);
            if qpn != 0 {
                self.adapter.tasks.add(Task::ReportRecvPosted { qpn: Qpn::new(qpn) });
            }
        }
    }

    /// Waits until no sender is inside an operation that began before the call; false if one stayed.
    pub(crate) fn wait_for_senders(&self) -> bool {
        self.entry.delivery.lock(self.adapter.id.pid).is_some()
    }

    /// Frees the locks of the queue whose holders are gone.
    pub(crate) fn recover_locks(&self) {
        self.entry.delivery.recover();
        self.cq.recover_lock();
    }

    /// Runs `take_back`, with the record of the request that an exited sender took, while no sender takes a request.
    pub(crate) fn take_abandoned<T>(&self, take_back: impl FnOnce(&AtomicU32) -> Option<T>) -> Option<T> {
        take_abandoned(&self.entry.delivery, self.adapter.id.pid, || take_back(&self.entry.taken))
    }
}

/// Runs `take_back`, for a request that an initiator took and did not complete, under the lock: while another initiator holds it,
/// the record is its own. The wait is short, because the next initiator reports the record again.
pub(crate) fn take_abandoned<T>(
    delivery: &RobustLock,
    me: u32,
    take_back: impl FnOnce() -> Option<T>,
) -> Option<T> {
    let _guard = delivery.lock_within(me, Duration::from_millis(100))?;
    take_back()
}

impl Drop for XrcMembership {
    fn drop(&mut self) {
        self.adapter.xrc_srqs.release_index(index(self.number));
    }
}
