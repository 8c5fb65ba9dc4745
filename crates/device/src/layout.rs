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

use millstream_shm::sync::atomic::{AtomicU32, AtomicU64};
use millstream_shm::{LeaseLock, OwnLease};

use crate::announce::Announcement;
use crate::caps::{MAX_MR, MAX_MULTICAST, MAX_QP, MAX_XRC_SRQ};
use crate::cqe::Place;

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
    pub(crate) atomics: LeaseLock,
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
    pub(crate) busy: Announcement,
    /// Held by the one of many initiators that delivers a datagram.
    pub(crate) delivery: LeaseLock,
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

/// One memory region or bound memory window as peers see it. All fields are the owner's, except that an
/// initiator may end a window's life.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct MrEntry {
    /// Low half: the key. High half: rises whenever the other fields change, because the same key may
    /// come back. Zero while the entry is free or being changed.
    pub(crate) name: AtomicU64,
    pub(crate) access: AtomicU32,
    /// Zero for a window that belongs to a queue pair instead.
    pub(crate) pd: AtomicU32,
    /// Where peers can map the region: slot and generation in the file table; generation zero if not.
    pub(crate) file: AtomicU32,
    pub(crate) file_generation: AtomicU32,
    /// First address of the region as work requests name it (iova).
    pub(crate) start: AtomicU64,
    /// Bytes.
    pub(crate) len: AtomicU64,
    /// Where `start` lies in the owner's address space.
    pub(crate) va: AtomicU64,
    /// The part of the region that can be mapped, as iova.
    pub(crate) map_start: AtomicU64,
    pub(crate) map_end: AtomicU64,
    /// Offset in the file of `map_start`.
    pub(crate) file_offset: AtomicU64,
    /// The queue pair that a window of type 2 belongs to, else zero.
    pub(crate) qpn: AtomicU32,
    _pad0: u32,
    _pad1: [u64; 6],
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
    pub(crate) delivery: LeaseLock,
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
    pub(crate) lock: OwnLease,
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

/// The header of a completion queue's shared half: completions that peers produce.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct CqRing {
    // Producers, under the lease.
    pub(crate) lock: OwnLease,
    /// Completions ever produced.
    pub(crate) tail: AtomicU32,
    /// A value of `head` that some producer saw: the consumer's own line is only looked at when the
    /// queue seems full.
    pub(crate) seen_head: AtomicU32,
    /// What the consumer waits for: [`ARM_NONE`], [`ARM_ANY`] or [`ARM_SOLICITED`].
    pub(crate) armed: AtomicU32,
    /// Events signalled and not yet fetched.
    pub(crate) events: AtomicU32,
    /// Completions that the consumer waits for and has not been told of, if events are moderated.
    pub(crate) pending: AtomicU32,
    /// Set by a producer that found the queue full.
    pub(crate) overrun: AtomicU32,
    // Owner.
    /// Rises, under the lease, whenever the entries have moved.
    pub(crate) generation: AtomicU32,
    /// The completion channel, zero for none.
    pub(crate) channel: AtomicU32,
    // Consumer.
    /// Completions ever consumed.
    pub(crate) head: AtomicU32,
    _pad0: [u32; 15],
    // Owner, under the lease; looked at when the generation has changed.
    /// Offset of the entries in the arena, in units of 64 bytes.
    pub(crate) entries: AtomicU32,
    /// Entries less one; a power of two less one.
    pub(crate) mask: AtomicU32,
    /// Whether the time of each completion is kept, behind the entries.
    pub(crate) timed: AtomicU32,
    // Owner; looked at by those who signal.
    /// Completions for one event; not more than one: events are not moderated.
    pub(crate) moderation: AtomicU32,
    /// The channel to signal when the first of them has come.
    pub(crate) timer: AtomicU32,
    _pad1: [u32; 11],
}

pub(crate) const ARM_NONE: u32 = 0;
pub(crate) const ARM_ANY: u32 = 1;
pub(crate) const ARM_SOLICITED: u32 = 2;

/// Bytes of a completion queue's entries, with their times if these are kept.
pub(crate) const fn cq_entries_len(entries: usize, timed: bool) -> usize {
    entries * (size_of::<Place>() + if timed { size_of::<AtomicU64>() } else { 0 })
}

// The model checker's atomics are larger.
#[cfg(not(loom))]
const _: () = {
    assert!(size_of::<QpEntry>() == 320);
    assert!(size_of::<MrEntry>() == 128);
    assert!(size_of::<XrcEntry>() == 64);
    assert!(size_of::<MulticastEntry>() == 32);
    assert!(size_of::<CqRing>() == 192);
    assert!(std::mem::offset_of!(CqRing, head) == 64);
    assert!(size_of::<Place>() == 32);
    assert!(HEAP < 1 << 24);
    // One more than a slot fits half a note.
    assert!(crate::caps::MAX_QP_WR < 1 << 16);
};
