//! The arena: what a process shows to its peers.
//!
//! ```text
//! 0         Header
//! QP_TABLE  4,096 × QpEntry       index = low 12 bits of the queue pair number
//! MR_TABLE  65,536 × MrEntry      index = high 16 bits of the key
//! FILES     65,536 × FileEntry    memory that peers may map
//! XRC_TABLE 4,096 × XrcEntry      index = low 12 bits of the number of an XRC shared receive queue
//! MULTICAST 1,024 × MulticastEntry  queue pairs in groups
//! HEAP      receive queues and completion queues
//! ```
//!
//! The memory is sparse: a table costs what is used of it. Fields say who writes them: the owner
//! (the process whose arena it is) or the initiator (its peer). Nobody trusts a value that the
//! other side can write: it is copied first and checked afterwards.

use std::sync::atomic::{AtomicU32, AtomicU64};

use millstream_lockfree::inflight_op::InflightOp;
use millstream_lockfree::mr_entry::MrEntry;
use millstream_lockfree::{BiasedRobustLock, RobustLock};

use crate::caps::{MAX_MR, MAX_MULTICAST, MAX_QP, MAX_XRC_SRQ};

/// Marks an arena; changes with every change of this layout.
pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"MILLARN7");
/// Bytes of address space that an arena takes.
pub(crate) const ARENA_LEN: usize = 1 << 30;
pub(crate) const QP_TABLE: usize = 4096;
pub(crate) const MR_TABLE: usize = QP_TABLE + MAX_QP * size_of::<QpEntry>();
pub(crate) const FILES: usize = MR_TABLE + MAX_MR * size_of::<MrEntry>();
pub(crate) const XRC_TABLE: usize = FILES + MAX_MR * size_of::<FileEntry>();
pub(crate) const MULTICAST_TABLE: usize = XRC_TABLE + MAX_XRC_SRQ * size_of::<XrcEntry>();
pub(crate) const HEAP: usize = MULTICAST_TABLE + MAX_MULTICAST * size_of::<MulticastEntry>();

/// Low bits of a queue pair number: place in the owner's table. High bits: the owner.
pub(crate) const QPN_INDEX_BITS: u32 = 12;

#[repr(C)]
pub(crate) struct Header {
    pub(crate) magic: AtomicU64,
    /// Held by whoever changes memory that not all initiators can map by an atomic operation.
    pub(crate) atomics: RobustLock,
    /// Places of the multicast table that were ever used.
    pub(crate) multicast_len: AtomicU32,
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
    /// Rises with every life of the entry.
    pub(crate) life: AtomicU32,
    /// Transport, see [`crate::qp::QpType`].
    pub(crate) kind: AtomicU32,
    /// Datagrams must bring this key.
    pub(crate) qkey: AtomicU32,
    /// Offset of the shared receive queue, in units of 64 bytes; zero if the queue pair has its own.
    pub(crate) srq: AtomicU32,
    /// Rises after every change of what initiators look at before each request: number, life, state, peer and
    /// access.
    pub(crate) revision: AtomicU32,
    _pad0: u32,
    // Initiator.
    /// Says whether an operation touches the owner's memory.
    pub(crate) inflight: InflightOp,
    /// Held by the one of many initiators that delivers a datagram.
    pub(crate) delivery: RobustLock,
    /// The shared receive request that the initiator has taken and not yet completed ([`taken`]). Who finds
    /// a note where it is alone to write one finds that of a dead initiator, and leaves it to the owner.
    pub(crate) srq_taken: AtomicU32,
    _pad1: [u32; 13],
    // Owner.
    /// Receive requests ever posted.
    pub(crate) rq_tail: AtomicU32,
    _pad2: [u32; 15],
    // Initiator.
    /// Receive requests ever used up.
    pub(crate) rq_head: AtomicU32,
    _pad3: [u32; 15],
    // Initiator, rarely; the owner looks with every receive that it posts.
    /// Set while the initiator sleeps because the receive queue was empty.
    pub(crate) rnr_wait: AtomicU32,
    _pad4: u32,
    // Owner.
    /// The XRC domain of a receiving XRC queue pair, else zero.
    pub(crate) domain: AtomicU64,
    _pad5: [u32; 12],
}

/// A file that peers may ask for.
#[repr(C)]
pub(crate) struct FileEntry {
    /// Rises when the slot is filled and when it is emptied; odd while filled.
    pub(crate) generation: AtomicU32,
    _pad: u32,
    /// Bytes.
    pub(crate) len: AtomicU64,
}

/// One shared receive queue of an XRC domain, as the senders that name it see it.
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
    /// Requests to it reach memory of this protection domain.
    pub(crate) pd: AtomicU32,
    /// Requests come through queue pairs of this XRC domain.
    pub(crate) domain: AtomicU64,
    // Initiators.
    /// Held by the one of many initiators that carries a request out.
    pub(crate) delivery: RobustLock,
    /// The request that the initiator has taken and not yet completed, as in [`QpEntry::srq_taken`].
    pub(crate) taken: AtomicU32,
    /// Queue pairs that sleep because the queue was empty; zero where there is none.
    pub(crate) waiters: [AtomicU32; 6],
    _pad: [u32; 2],
}

/// A queue pair in a multicast group. All fields are the owner's.
#[derive(Debug)]
#[repr(C, align(32))]
pub(crate) struct MulticastEntry {
    /// The group's address, as two numbers.
    pub(crate) group: [AtomicU64; 2],
    /// The queue pair, zero while the entry is free. Published last.
    pub(crate) qpn: AtomicU32,
    _pad: [u32; 3],
}

/// Start of a receive slot; `rq_sges` elements of type `Sge` follow.
#[repr(C)]
pub(crate) struct RecvSlot {
    pub(crate) n_sge: AtomicU32,
    _pad: [u32; 3],
}

/// A shared receive queue. `mask + 1` slot numbers follow, in the order of posting, then the slots.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct SrqRing {
    // Initiators, under the lease.
    pub(crate) lock: BiasedRobustLock,
    /// Receive requests ever taken.
    pub(crate) head: AtomicU32,
    /// An event is due when fewer requests than this are left; zero for none. Reset by who raises it. Here because the
    /// owner seldom looks at it, and who takes a request always does.
    pub(crate) limit: AtomicU32,
    _pad0: [u32; 6],
    // Owner.
    /// Receive requests ever posted.
    pub(crate) tail: AtomicU32,
    pub(crate) mask: AtomicU32,
    /// Elements in a slot.
    pub(crate) sges: AtomicU32,
    pub(crate) pd: AtomicU32,
    /// Set by an initiator that found the queue empty and sleeps. Here because the owner looks at it with each request that
    /// it posts.
    pub(crate) rnr_wait: AtomicU32,
    _pad1: [u32; 11],
}

/// How a request that was taken from a shared receive queue is noted: when it was posted, which tells it from
/// a later one in the same slot, and one more than the slot. Zero where there is none.
pub(crate) mod taken {
    /// The note of the request that was the `at`th to be posted.
    pub(crate) const fn note(at: u32, slot: u32) -> u32 {
        at << 16 | (slot.wrapping_add(1) & 0xffff)
    }

    /// Its slot, and the low half of when it was posted.
    pub(crate) const fn read(note: u32) -> Option<(u32, u16)> {
        match (note & 0xffff).checked_sub(1) {
            Some(slot) => Some((slot, (note >> 16) as u16)),
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

const _: () = {
    assert!(size_of::<QpEntry>() == 320);
    assert!(size_of::<XrcEntry>() == 64);
    assert!(size_of::<MulticastEntry>() == 32);
    assert!(HEAP < 1 << 24);
    // One more than a slot fits half a note.
    assert!(crate::caps::MAX_QP_WR < 1 << 16);
};
