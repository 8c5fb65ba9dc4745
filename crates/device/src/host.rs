//! The process's one adapter: its arena, its number, its peers and its two threads.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Once, Weak};
use std::time::{Duration, Instant};

use millstream_lockfree::{OwnerId, SpinLock, barrier};
use millstream_shm::socket::Listener;
use millstream_shm::thread::spawn;
use millstream_shm::{Arena, EventFd, random_u64};

use crate::caps::MAX_QP;
use crate::dm::Allocated;
use crate::errno::{Errno, Result};
use crate::files::Files;
use crate::greeting;
use crate::layout::{ARENA_LEN, HEAP, Header, MAGIC, QP_TABLE, QPN_INDEX_BITS, QpEntry};
use crate::mr::MrTable;
use crate::multicast::Multicast;
use crate::peer::Peer;
use crate::progress::Progress;
use crate::qp::Qp;
use crate::wire::Wire;
use crate::xrc::XrcTable;

/// Everything that the process has once, however many contexts it opens. Never freed: other
/// processes may be looking at it until this one ends.
#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) arena: Arena,
    /// Owner of locks in shared memory.
    pub(crate) pid: u32,
    /// High bits of every queue pair number of this process.
    pub(crate) block: u32,
    /// Whether fences may be left to the rare side.
    pub(crate) asymmetric: bool,
    pub(crate) files: Files,
    pub(crate) mrs: MrTable,
    pub(crate) device_memory: Allocated,
    pub(crate) progress: Progress,
    /// Shared receive queues of XRC domains.
    pub(crate) xrc: XrcTable,
    pub(crate) multicast: Multicast,
    /// The way to other hosts.
    pub(crate) wire: Wire,
    /// By index; valid while registered, see [`Host::remove_qp`].
    qps: Box<[Registered]>,
    qp_list: Mutex<HashMap<u32, Weak<Qp>>>,
    /// Low bits of queue pair numbers that are free, in random order. One that was given back rests
    /// as long as possible: its former peers may not have noticed.
    free_qpns: Mutex<VecDeque<u32>>,
    channels: Mutex<HashMap<u32, Arc<EventFd>>>,
    next_id: AtomicU32,
    peers: Mutex<HashMap<u32, Arc<Peer>>>,
}

/// A queue pair as pollers find it.
#[derive(Debug, Default)]
struct Registered {
    qp: AtomicPtr<Qp>,
    /// Where its receive completion queue lies in the arena; zero before `qp` is set and after it is not.
    recv_cq: AtomicU32,
}

/// The channel that wakes the progress thread.
pub(crate) const TIMER_CHANNEL: u32 = 1;

static HOST: SpinLock<Option<&'static Host>> = SpinLock::new(None);
static FORKS: Once = Once::new();

/// A child that is forked while another thread opens the device must find the lock free.
extern "C" fn before_fork() {
    std::mem::forget(HOST.lock());
}

extern "C" fn after_fork() {
    // SAFETY: taken in `before_fork` by this thread, or by its parent's.
    unsafe { HOST.force_unlock() };
}

impl Host {
    /// The process's adapter, made at first use. A forked child makes its own.
    pub(crate) fn get() -> Result<&'static Self> {
        FORKS.call_once(|| {
            // SAFETY: handlers that touch one lock only. Without room for them a child takes its chances.
            unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(after_fork)) };
        });
        let mut host = HOST.lock();
        match *host {
            Some(h) if h.pid == std::process::id() => Ok(h),
            _ => {
                let new = Self::start()?;
                *host = Some(new);
                Ok(new)
            }
        }
    }

    fn start() -> io::Result<&'static Self> {
        let asymmetric = barrier::register();
        let arena = Arena::new("millstream-arena", ARENA_LEN, HEAP)?;
        let (block, listener) = claim_block()?;
        let host = Box::leak(Box::new(Self {
            arena,
            pid: std::process::id(),
            block,
            asymmetric,
            files: Files::default(),
            mrs: MrTable::default(),
            device_memory: Allocated::default(),
            progress: Progress::new()?,
            xrc: XrcTable::default(),
            multicast: Multicast::default(),
            wire: Wire::default(),
            qps: (0..MAX_QP).map(|_| Registered::default()).collect(),
            qp_list: Mutex::default(),
            free_qpns: Mutex::new(shuffled(MAX_QP as u32)),
            channels: Mutex::default(),
            next_id: AtomicU32::new(TIMER_CHANNEL + 1),
            peers: Mutex::default(),
        }));
        let host: &'static Self = host;
        host.mark_arena();
        host.add_channel(TIMER_CHANNEL, host.progress.waker());
        host.peers.lock().expect("new").insert(block, Arc::new(Peer::myself(host)));
        spawn("mill-server", move || crate::server::run(host, &listener))?;
        spawn("mill-progress", move || host.progress.run(host))?;
        Ok(host)
    }

    /// This process, where it takes leases for more than one queue pair.
    pub(crate) fn party(&self) -> OwnerId {
        OwnerId { pid: self.pid, number: 0 }
    }

    /// Says what the arena is.
    pub(crate) fn mark_arena(&self) {
        // SAFETY: the arena starts with its header, and all zeroes is a valid one.
        unsafe { self.arena.at(0).cast::<Header>().as_ref() }.magic.store(MAGIC, Ordering::Release);
    }

    /// The process that owns `qpn`, connecting to it if need be.
    pub(crate) fn peer_of(&'static self, qpn: u32) -> io::Result<Arc<Peer>> {
        let block = qpn >> QPN_INDEX_BITS;
        let mut peers = self.peers.lock().expect("no panic under this lock");
        if let Some(peer) = peers.get(&block)
            && peer.alive()
        {
            return Ok(peer.clone());
        }
        let peer = Arc::new(Peer::connect(self, block)?);
        peers.insert(block, peer.clone());
        drop(peers);
        self.progress.watch(peer.clone());
        Ok(peer)
    }

    /// Lets go of a dead process; queue pairs that were connected to it let go when they are reset.
    pub(crate) fn forget_peer(&self, peer: &Arc<Peer>) {
        self.peers.lock().expect("no panic under this lock").retain(|_, known| !Arc::ptr_eq(known, peer));
    }

    /// A number for an object that peers may name.
    pub(crate) fn next_id(&self) -> u32 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn add_channel(&self, id: u32, event: Arc<EventFd>) {
        self.channels.lock().expect("no panic under this lock").insert(id, event);
    }

    pub(crate) fn remove_channel(&self, id: u32) {
        self.channels.lock().expect("no panic under this lock").remove(&id);
    }

    pub(crate) fn channel(&self, id: u32) -> Option<Arc<EventFd>> {
        self.channels.lock().expect("no panic under this lock").get(&id).cloned()
    }

    /// Takes a free queue pair number; [`Host::remove_qp`] gives it back.
    pub(crate) fn take_qpn(&self) -> Result<u32> {
        let index = self.free_qpns.lock().expect("no panic under this lock").pop_front();
        index.map(|index| self.block << QPN_INDEX_BITS | index).ok_or(Errno::NOMEM)
    }

    pub(crate) fn header(&'static self) -> &'static Header {
        // SAFETY: the arena starts with its header, which is made of atomics, and lives for ever.
        unsafe { self.arena.at(0).cast::<Header>().as_ref() }
    }

    /// The shared entry of one of our own queue pairs.
    pub(crate) fn qp_entry(&'static self, qpn: u32) -> &'static QpEntry {
        let index = qpn as usize % MAX_QP;
        // SAFETY: inside the arena, which lives for ever; all fields are atomics.
        unsafe { self.arena.at(QP_TABLE + index * size_of::<QpEntry>()).cast::<QpEntry>().as_ref() }
    }

    /// Makes a queue pair findable.
    pub(crate) fn add_qp(&self, qp: &Arc<Qp>) {
        let index = qp.qpn() % MAX_QP as u32;
        self.qp_list.lock().expect("no panic under this lock").insert(index, Arc::downgrade(qp));
        let registered = &self.qps[index as usize];
        registered.qp.store(Arc::as_ptr(qp).cast_mut(), Ordering::Release);
        registered.recv_cq.store(qp.recv_cq_offset(), Ordering::Release);
    }

    /// Forgets a queue pair. The caller holds the consumer locks of both its completion queues, so
    /// that no poller is looking at it.
    pub(crate) fn remove_qp(&self, qpn: u32) {
        let index = qpn % MAX_QP as u32;
        let registered = &self.qps[index as usize];
        registered.recv_cq.store(0, Ordering::Release);
        registered.qp.store(std::ptr::null_mut(), Ordering::Release);
        self.qp_list.lock().expect("no panic under this lock").remove(&index);
        self.free_qpns.lock().expect("no panic under this lock").push_back(index);
    }

    /// The queue pair `qpn`, for a poller that holds the lock of the completion queue for its sends.
    #[inline]
    pub(crate) fn sender_for_poller(&self, qpn: u32) -> Option<&Qp> {
        let pointer = self.qps[qpn as usize % MAX_QP].qp.load(Ordering::Acquire);
        // SAFETY: registered pointers are valid; removal needs the lock that the caller holds.
        let qp = unsafe { pointer.as_ref() }?;
        (qp.qpn() == qpn).then_some(qp)
    }

    /// The queue pair `qpn`, for a poller that holds the lock of the completion queue at `recv_cq`.
    /// The number comes from shared memory: it may be that of a queue pair that completes elsewhere
    /// and can be removed at any moment, so nothing behind the pointer is looked at before that is known.
    #[inline]
    pub(crate) fn receiver_for_poller(&self, qpn: u32, recv_cq: u32) -> Option<&Qp> {
        let registered = &self.qps[qpn as usize % MAX_QP];
        if registered.recv_cq.load(Ordering::Acquire) != recv_cq {
            return None;
        }
        // SAFETY: registered, and as just seen its removal needs the lock that the caller holds.
        let qp = unsafe { registered.qp.load(Ordering::Acquire).as_ref() }?;
        (qp.qpn() == qpn).then_some(qp)
    }

    /// The queue pair `qpn`, for the threads.
    pub(crate) fn qp(&self, qpn: u32) -> Option<Arc<Qp>> {
        let index = qpn % MAX_QP as u32;
        let qp = self.qp_list.lock().expect("no panic under this lock").get(&index).cloned();
        // Outside the lock: this may turn out to be the last reference.
        qp?.upgrade().filter(|qp| qp.qpn() == qpn)
    }

    pub(crate) fn all_qps(&self) -> Vec<Arc<Qp>> {
        let list = self.qp_list.lock().expect("no panic under this lock");
        list.values().filter_map(Weak::upgrade).collect()
    }

    /// Waits until nobody is inside an operation that began before the call: no peer in our memory, and
    /// none of our own threads. False if a peer stayed inside for [`greeting::PATIENCE`] (a stopped
    /// process).
    pub(crate) fn quiesce(&'static self) -> bool {
        barrier::heavy();
        let qps = self.all_qps();
        qps.iter().for_each(|qp| qp.wait_for_own_requests());
        self.wait_for_peers(&qps)
    }

    /// The same for operations of peers only; the caller may hold a send queue.
    pub(crate) fn quiesce_peers(&'static self) -> bool {
        barrier::heavy();
        self.wait_for_peers(&self.all_qps())
    }

    fn wait_for_peers(&self, qps: &[Arc<Qp>]) -> bool {
        let deadline = Instant::now() + greeting::PATIENCE;
        qps.iter().all(|qp| qp.wait_until_untouched(deadline)) && self.xrc.wait_until_untouched(self.pid)
    }
}

impl AsFd for Host {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.arena.as_fd()
    }
}

/// The numbers below `n` in random order (Fisher and Yates).
pub(crate) fn shuffled(n: u32) -> VecDeque<u32> {
    let mut numbers: VecDeque<u32> = (0..n).collect();
    for i in (1..n as usize).rev() {
        numbers.swap(i, random_u64() as usize % (i + 1));
    }
    numbers
}

/// Takes a free number by taking the socket name that goes with it.
fn claim_block() -> io::Result<(u32, Listener)> {
    let mut last = io::ErrorKind::AddrInUse.into();
    for _ in 0..256 {
        // Neither the special queue pairs 0 and 1 nor the multicast number 0xffffff.
        let block = 1 + (random_u64() % 0xffe) as u32;
        match Listener::bind(&greeting::name(block)) {
            Ok(listener) => return Ok((block, listener)),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Spins briefly, then sleeps in small steps, until `done` or the deadline.
pub(crate) fn wait_until(deadline: Instant, mut done: impl FnMut() -> bool) -> bool {
    for turn in 0u32.. {
        if done() {
            return true;
        }
        match turn {
            0..1000 => std::hint::spin_loop(),
            1000..2000 => std::thread::yield_now(),
            _ if Instant::now() > deadline => return false,
            _ => std::thread::sleep(Duration::from_micros(100)),
        }
    }
    false
}
