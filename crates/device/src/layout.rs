//! The arena: the memory that a process shares with its peers.
//!
//! ```text
//! 0         Header
//! QP_TABLE  4,096 × QpEntry       index = low 12 bits of the queue pair number
//! MR_TABLE  65,536 × MrEntry      index = high 16 bits of the key
//! FILE_TABLE 65,536 × FileEntry   files that peers may map
//! XRC_TABLE 4,096 × XrcEntry      index = low 12 bits of the number of an XRC shared receive queue
//! MULTICAST_TABLE 1,024 × MulticastEntry  queue pairs in multicast groups
//! HEAP      receive queues and completion queues
//! ```
//!
//! The memory is sparse: unused parts of a table take no pages. Comments name the writer of a field: the owner
//! (the process whose arena it is) or the initiator (its peer). A value that the other side can write is
//! copied first and checked afterwards.

use std::sync::atomic::{AtomicU32, AtomicU64};

use millstream_lockfree::inflight_op::InflightOp;
use millstream_lockfree::mr_entry::MrEntry;
use millstream_lockfree::srq_limit::SrqLimitWord;
use millstream_lockfree::{BiasedRobustLock, RobustLock, Shared};
use millstream_quantity::Qpn;

use crate::caps::{MAX_MR, MAX_MULTICAST, MAX_QP, MAX_XRC_SRQ};

/// Marks an arena; changes with every change of this layout.
pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"MILLARNB");
/// Bytes of an arena's address space.
pub(crate) const ARENA_LEN: usize = 1 << 30;
pub(crate) const QP_TABLE: usize = 4096;
pub(crate) const MR_TABLE: usize = QP_TABLE + MAX_QP * size_of::<QpEntry>();
pub(crate) const FILE_TABLE: usize = MR_TABLE + MAX_MR * size_of::<MrEntry>();
pub(crate) const XRC_TABLE: usize = FILE_TABLE + MAX_MR * size_of::<FileEntry>();
pub(crate) const MULTICAST_TABLE: usize = XRC_TABLE + MAX_XRC_SRQ * size_of::<XrcEntry>();
pub(crate) const HEAP: usize = MULTICAST_TABLE + MAX_MULTICAST * size_of::<MulticastEntry>();

/// Low bits of a queue pair number: the index in the owner's table. The high bits are the owner's prefix.
pub(crate) const QPN_INDEX_BITS: u32 = 12;

/// The number of the queue pair in slot `index` of the process with this prefix.
pub(crate) const fn qpn(prefix: u32, index: u32) -> Qpn {
    Qpn::new(prefix << QPN_INDEX_BITS | index)
}

/// The prefix of the process that owns a queue pair.
pub(crate) const fn qpn_prefix(qpn: Qpn) -> u32 {
    qpn.get() >> QPN_INDEX_BITS
}

/// The slot of a queue pair in the table of its process.
#[inline]
pub(crate) const fn qpn_index(qpn: Qpn) -> usize {
    qpn.get() as usize % MAX_QP
}

#[repr(C)]
pub(crate) struct Header {
    pub(crate) magic: AtomicU64,
    /// Serialises atomic operations on memory that some initiators cannot map.
    pub(crate) atomics: RobustLock,
    /// Entries of the multicast table that were ever used.
    pub(crate) multicast_len: AtomicU32,
}

/// The value of [`QpEntry::initiator`] that joins a connection of the entry to one of its initiator. Zero joins none.
pub(crate) fn initiator_claim(connection: u32, initiator: u32) -> u32 {
    (connection % 0xffff + 1) << 16 | initiator & 0xffff
}

/// Whether two values of [`QpEntry::initiator`] are of the same connection of the entry.
pub(crate) fn is_same_claimed(a: u32, b: u32) -> bool {
    a >> 16 == b >> 16
}

/// Queue pair states as their owner publishes them, in the order of `enum ibv_qp_state`.
pub(crate) mod qp_state {
    pub(crate) const RESET: u32 = 0;
    pub(crate) const INIT: u32 = 1;
    pub(crate) const RTR: u32 = 2;
    pub(crate) const RTS: u32 = 3;
    pub(crate) const SQD: u32 = 4;
    pub(crate) const SQE: u32 = 5;
}

/// One queue pair as its peer sees it.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct QpEntry {
    // Owner.
    /// Number, zero while the entry is free. Published last, when everything else is complete.
    pub(crate) qpn: AtomicU32,
    pub(crate) state: AtomicU32,
    pub(crate) dest_qpn: AtomicU32,
    /// Remote access allowed by `qp_access_flags`.
    pub(crate) access: AtomicU32,
    pub(crate) pd: AtomicU32,
    /// Offset of the receive queue in the arena, in units of 64 bytes.
    pub(crate) rq: AtomicU32,
    /// Slots of the receive queue less one; a power of two less one.
    pub(crate) rq_mask: AtomicU32,
    /// Elements in a receive slot.
    pub(crate) rq_sges: AtomicU32,
    /// Offset of the receive completion queue, in units of 64 bytes.
    pub(crate) recv_cq: AtomicU32,
    /// Encoded as in AETH, table 45.
    pub(crate) min_rnr_timer: AtomicU32,
    /// Rises with every reuse of the entry.
    pub(crate) generation: AtomicU32,
    /// Transport service, see [`crate::qp::QpType`].
    pub(crate) kind: AtomicU32,
    /// The Q_Key that datagrams must carry.
    pub(crate) qkey: AtomicU32,
    /// Offset of the shared receive queue, in units of 64 bytes; zero if the queue pair has its own.
    pub(crate) srq: AtomicU32,
    /// Rises after every change of the fields that initiators check before each request: number, generation, state, peer
    /// and access.
    pub(crate) revision: AtomicU32,
    /// The revision at the last reset, which identifies the connection.
    pub(crate) connection: AtomicU32,
    // Initiator.
    /// Announces the peer's operation in the owner's memory.
    pub(crate) inflight: InflightOp,
    /// Held by the initiator that delivers a datagram.
    pub(crate) delivery: RobustLock,
    /// The shared receive request that the initiator has taken and not yet completed ([`taken_request`]); for datagrams, also
    /// that of the queue pair's own queue. An initiator that finds another one's record leaves it to the owner: that initiator
    /// has exited.
    pub(crate) srq_taken: AtomicU32,
    /// The initiator's connection that this connection has, once a request has come ([`initiator_claim`]).
    pub(crate) initiator: AtomicU32,
    _pad1: [u32; 12],
    // Owner.
    /// Receive requests ever posted.
    pub(crate) rq_tail: AtomicU32,
    _pad2: [u32; 15],
    // Initiator.
    /// Receive requests ever consumed.
    pub(crate) rq_head: AtomicU32,
    /// The value of `rq_tail` that an initiator read last. The owner's cache line is read only when the queue seems empty.
    pub(crate) rq_seen_tail: AtomicU32,
    _pad3: [u32; 14],
    // Initiator, rarely; the owner reads it with every receive that it posts.
    /// Set while the initiator sleeps because the receive queue was empty.
    pub(crate) rnr_wait: AtomicU32,
    _pad4: u32,
    // Owner.
    /// The XRC domain of a receiving XRC queue pair, else zero.
    pub(crate) domain: AtomicU64,
    _pad5: [u32; 12],
}

/// A file that peers may request.
#[repr(C)]
pub(crate) struct FileEntry {
    /// Rises when the slot is filled and when it is emptied; odd while filled.
    pub(crate) generation: AtomicU32,
    _pad: u32,
    /// Bytes.
    pub(crate) len: AtomicU64,
}

/// One shared receive queue of an XRC domain, as senders see it.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct XrcEntry {
    // Owner.
    /// Number, zero while the entry is free. Published last, when everything else is complete.
    pub(crate) number: AtomicU32,
    /// Offset of the queue, in units of 64 bytes.
    pub(crate) ring: AtomicU32,
    /// Offset of its completion queue, in units of 64 bytes.
    pub(crate) cq: AtomicU32,
    /// The protection domain of the memory that its requests name.
    pub(crate) pd: AtomicU32,
    /// The XRC domain of the queue pairs that it serves.
    pub(crate) domain: AtomicU64,
    // Initiators.
    /// Held by the initiator that executes a request.
    pub(crate) delivery: RobustLock,
    /// The request that the initiator has taken and not yet completed, as in [`QpEntry::srq_taken`].
    pub(crate) taken: AtomicU32,
    /// Sending queue pairs that wait because the queue was empty; zero where there is none.
    pub(crate) waiters: [AtomicU32; 6],
    // Owner.
    /// Rises when the entry is published: numbers are used again.
    pub(crate) generation: AtomicU32,
    _pad: u32,
}

/// The membership of a queue pair in a multicast group. All fields are the owner's.
#[derive(Debug)]
#[repr(C, align(32))]
pub(crate) struct MulticastEntry {
    /// The group's GID, as two numbers.
    pub(crate) group: [AtomicU64; 2],
    /// The queue pair, zero while the entry is free. Published last.
    pub(crate) qpn: AtomicU32,
    _pad: [u32; 3],
}

/// The header of a receive slot; `rq_sges` elements of type `Sge` follow.
#[repr(C)]
pub(crate) struct RecvSlot {
    pub(crate) n_sge: AtomicU32,
    _pad: [u32; 3],
}

/// A shared receive queue. `mask + 1` slot numbers follow, in the order of posting, then the slots.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct SrqRing {
    // Initiators, under the lock.
    pub(crate) lock: BiasedRobustLock,
    /// Receive requests ever taken.
    pub(crate) head: AtomicU32,
    /// A limit event is due when fewer requests than this are left; zero for none. The initiator that reports it clears
    /// the field. It lies here because initiators read it with every request, and the owner seldom does.
    pub(crate) limit: SrqLimitWord,
    /// The value of `tail` that an initiator read last, as in [`QpEntry::rq_seen_tail`].
    pub(crate) seen_tail: AtomicU32,
    _pad0: [u32; 5],
    // Owner.
    /// Receive requests ever posted.
    pub(crate) tail: AtomicU32,
    pub(crate) mask: AtomicU32,
    /// Elements in a slot.
    pub(crate) sges: AtomicU32,
    pub(crate) pd: AtomicU32,
    /// Set by an initiator that found the queue empty and waits. It lies here because the owner reads it with every
    /// request that it posts.
    pub(crate) rnr_wait: AtomicU32,
    _pad1: [u32; 11],
}

/// The record of a request that was taken from a shared receive queue. It has the number under which the
/// request was posted, and the slot plus one. The number distinguishes the request from a later one in the
/// slot. Zero stands for no record.
pub(crate) mod taken_request {
    /// The record of the request that was the `at`th to be posted.
    pub(crate) const fn encode(at: u32, slot: u32) -> u32 {
        at << 16 | (slot.wrapping_add(1) & 0xffff)
    }

    /// Its slot, and the low half of the number under which it was posted.
    pub(crate) const fn decode(record: u32) -> Option<(u32, u16)> {
        match (record & 0xffff).checked_sub(1) {
            Some(slot) => Some((slot, (record >> 16) as u16)),
            None => None,
        }
    }
}

/// Offset of the slots behind a shared receive queue's header, and bytes in all.
pub(crate) const fn srq_len(slots: usize, sges: u32) -> (usize, usize) {
    let order = millstream_shm::round_up(slots * 4, 64);
    let at = size_of::<SrqRing>() + order;
    (at, at + slots * recv_slot_len(sges))
}

/// Bytes of one receive slot.
pub(crate) const fn recv_slot_len(sges: u32) -> usize {
    size_of::<RecvSlot>() + sges as usize * 16
}

// SAFETY: atomics, padding and locks made of atomics.
unsafe impl Shared for Header {}
// SAFETY: atomics, padding and locks made of atomics.
unsafe impl Shared for QpEntry {}
// SAFETY: atomics, padding and locks made of atomics.
unsafe impl Shared for FileEntry {}
// SAFETY: atomics, padding and locks made of atomics.
unsafe impl Shared for XrcEntry {}
// SAFETY: atomics, padding and locks made of atomics.
unsafe impl Shared for MulticastEntry {}
// SAFETY: atomics, padding and locks made of atomics.
unsafe impl Shared for SrqRing {}

const _: () = {
    assert!(size_of::<QpEntry>() == 320);
    assert!(size_of::<XrcEntry>() == 64);
    assert!(size_of::<MulticastEntry>() == 32);
    assert!(HEAP < 1 << 24);
    // A slot plus one fits half a record.
    assert!(crate::caps::MAX_QP_WR < 1 << 16);
};
