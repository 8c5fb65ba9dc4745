//! The process's adapter: its arena, its identity, and the tables that objects register themselves in.
//!
//! This module is independent of the types of queue pairs, completion queues and shared receive queues.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use millstream_lockfree::{CancelGuard, OwnerId, barrier};
use millstream_quantity::Qpn;
use millstream_shm::socket::Listener;
use millstream_shm::{Arena, random_u64};

use crate::channel_table::{ChannelTable, TIMER_CHANNEL};
use crate::event_sources::EventSources;
use crate::exported_files::ExportedFiles;
use crate::ipc;
use crate::layout::{ARENA_LEN, HEAP, Header, MAGIC, QP_TABLE, QpEntry, qpn_index};
use crate::move_queue::MoveQueue;
use crate::mr_table::MrTable;
use crate::multicast::MulticastTable;
use crate::path;
use crate::peer::{LocalId, Peer};
use crate::peer_table::PeerTable;
use crate::qp_table::{QpOps, QpTable};
use crate::roce_port::RocePort;
use crate::tasks::TaskQueue;
use crate::xrc_srq_table::XrcSrqTable;

/// The part of the device that exists once per process and is shared by all its contexts. It is never freed:
/// other processes may read its arena until this one exits.
#[derive(Debug)]
pub(crate) struct LocalAdapter {
    pub(crate) arena: &'static Arena,
    pub(crate) id: LocalId,
    pub(crate) files: ExportedFiles,
    pub(crate) mrs: MrTable,
    /// Bytes of device memory that the process has allocated.
    pub(crate) device_memory: AtomicU64,
    pub(crate) tasks: &'static TaskQueue,
    pub(crate) channels: &'static ChannelTable,
    pub(crate) event_sources: EventSources,
    pub(crate) peers: &'static PeerTable,
    pub(crate) qps: QpTable,
    pub(crate) xrc_srqs: XrcSrqTable,
    pub(crate) multicast: &'static MulticastTable,
    pub(crate) port: RocePort,
    /// Regions whose pages peers shall be able to map.
    pub(crate) moves: MoveQueue,
    next_id: AtomicU32,
}

impl LocalAdapter {
    /// Makes the adapter, and the socket on which peers connect.
    ///
    /// # Errors
    /// What creating shared memory and sockets reports.
    pub(crate) fn new() -> io::Result<(&'static Self, Listener)> {
        let asymmetric = barrier::register();
        let arena: &'static Arena = leak(Arena::new("millstream-arena", ARENA_LEN, HEAP)?);
        let (qpn_prefix, listener) = claim_qpn_prefix()?;
        let id = LocalId { pid: std::process::id(), qpn_prefix, asymmetric, wire: path::is_wire() };
        let tasks: &'static TaskQueue = leak(TaskQueue::new()?);
        let channels: &'static ChannelTable = leak(ChannelTable::default());
        channels.insert(TIMER_CHANNEL, tasks.waker());
        let peers: &'static PeerTable = leak(PeerTable::new(id, tasks));
        let multicast: &'static MulticastTable = leak(MulticastTable::new(qpn_prefix, arena, peers));
        let qps = QpTable::leak(qpn_prefix);
        let adapter: &'static Self = leak(Self {
            arena,
            id,
            files: ExportedFiles::default(),
            mrs: MrTable::new(arena),
            device_memory: AtomicU64::new(0),
            tasks,
            channels,
            event_sources: EventSources::default(),
            peers,
            qps,
            xrc_srqs: XrcSrqTable::default(),
            multicast,
            port: RocePort::new(qpn_prefix, qps, multicast, tasks),
            moves: MoveQueue::default(),
            next_id: AtomicU32::new(TIMER_CHANNEL + 1),
        });
        adapter.write_magic();
        peers.add_local(Peer::local(id, arena.mapping().clone(), channels, tasks, &adapter.mrs));
        Ok((adapter, listener))
    }

    /// This process as the owner of locks that are not taken for a queue pair.
    pub(crate) fn owner_id(&self) -> OwnerId {
        OwnerId { pid: self.id.pid, number: 0 }
    }

    /// Marks the arena with the version of its layout.
    pub(crate) fn write_magic(&self) {
        self.arena.get::<Header>(0).magic.store(MAGIC, Ordering::Release);
    }

    /// Frees the locks of this process's memory whose holders are gone.
    pub(crate) fn recover_locks(&self) {
        self.arena.get::<Header>(0).atomics.recover();
    }

    /// The process that owns `qpn`, connecting to it if need be.
    ///
    /// # Errors
    /// As [`Peer::connect`].
    pub(crate) fn peer_of(&self, qpn: Qpn) -> io::Result<Arc<Peer>> {
        self.peers.owner_of(qpn)
    }

    /// A number for an object that peers may name.
    pub(crate) fn next_id(&self) -> u32 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// The shared entry of one of our own queue pairs.
    pub(crate) fn qp_entry(&self, qpn: Qpn) -> &'static QpEntry {
        self.arena.get(QP_TABLE + qpn_index(qpn) * size_of::<QpEntry>())
    }

    /// Waits for all operations that began before the call: those of peers in our memory, and those of our own
    /// threads.
    ///
    /// # Errors
    /// An operation that took longer than [`ipc::TIMEOUT`] (a stopped process).
    pub(crate) fn quiesce(&self) -> Result<(), Unfinished> {
        barrier::heavy();
        let qps = self.qps.all();
        let deadline = Instant::now() + ipc::TIMEOUT;
        if !qps.iter().all(|qp| qp.wait_for_own_requests(deadline)) {
            return Err(Unfinished::OwnRequest);
        }
        if self.wait_for_peers(&qps) { Ok(()) } else { Err(Unfinished::PeerOperation) }
    }

    /// Waits for the operations of peers that began before the call. The caller may hold a send queue.
    pub(crate) fn quiesce_peers(&self) -> bool {
        barrier::heavy();
        self.wait_for_peers(&self.qps.all())
    }

    fn wait_for_peers(&self, qps: &[Arc<dyn QpOps>]) -> bool {
        let deadline = Instant::now() + ipc::TIMEOUT;
        qps.iter().all(|qp| qp.wait_for_inflight_op(deadline)) && self.xrc_srqs.wait_for_senders()
    }
}

impl AsFd for LocalAdapter {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.arena.as_fd()
    }
}

fn leak<T>(value: T) -> &'static T {
    Box::leak(Box::new(value))
}

/// An operation that did not end in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unfinished {
    /// A send request of this process, whose peer is stopped while it moves its memory.
    OwnRequest,
    /// An operation of a peer in this process's memory: the peer is stopped.
    PeerOperation,
}

/// Claims a free queue pair number prefix by binding the socket name that belongs to it.
fn claim_qpn_prefix() -> io::Result<(u32, Listener)> {
    let mut last = io::ErrorKind::AddrInUse.into();
    for _ in 0..256 {
        // Excludes the special queue pairs 0 and 1 and the multicast number 0xffffff.
        let qpn_prefix = 1 + (random_u64() % 0xffe) as u32;
        match Listener::bind(&ipc::socket_name(qpn_prefix)) {
            Ok(listener) => return Ok((qpn_prefix, listener)),
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
            _ => {
                // The caller may hold locks, and a sleep is a cancellation point.
                let _uncancelled = CancelGuard::new();
                std::thread::sleep(Duration::from_micros(100));
            }
        }
    }
    false
}
