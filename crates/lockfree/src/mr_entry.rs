//! One entry of the table of memory keys, written by its owner and read by its peers.
//!
//! The owner changes an entry in three steps: it clears the tag, writes the fields, and stores the new tag. A
//! reader compares the tag before and after. The tag is the key and a generation, because a key may be
//! reused.
//!
//! The pages of a region may become mappable while peers use it. The entry then gets a second description of the file,
//! beside the first one, and one exchange of the tag makes it valid ([`MrEntry::promote`]). So a reader always finds the
//! key, under the old tag or the new one.

use std::ops::Range;

use crate::shared::Shared;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// One memory region or bound memory window as peers see it. All fields are the owner's, except that an
/// initiator may invalidate a window.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct MrEntry {
    /// Low half: the key. High half: the generation, which rises whenever the other fields change, and the [`Stage`] in
    /// its two lowest bits. Zero while the entry is free or being changed.
    tag: AtomicU64,
    access: AtomicU32,
    pd: AtomicU32,
    file: AtomicU32,
    file_generation: AtomicU32,
    start: AtomicU64,
    len: AtomicU64,
    va: AtomicU64,
    map_start: AtomicU64,
    map_end: AtomicU64,
    file_offset: AtomicU64,
    qpn: AtomicU32,
    /// The file of a promoted entry.
    promoted_file: AtomicU32,
    promoted_generation: AtomicU32,
    _pad: u32,
    promoted_start: AtomicU64,
    promoted_end: AtomicU64,
    promoted_offset: AtomicU64,
    /// Time that copies through the kernel took beyond what mapped memory would have taken, as initiators estimate it \[ns\].
    kernel_time: AtomicU64,
    /// The [`kernel_time`](Self::kernel_time) from which on initiators tell the owner; zero: never.
    move_cost: AtomicU64,
}

/// The entry is free or has another key.
struct OtherKey;

/// How far the memory of an entry has become mappable since it was published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Stage {
    /// As published.
    Published = 0,
    /// Peers can map the file of [`MrEntry::promote`]. Some may still use the entry as it was published, so atomic
    /// operations also take the lock that those take.
    Promoted = 1,
    /// No peer uses the entry as it was published.
    Settled = 2,
}

impl Stage {
    const MASK: u64 = 3 << 32;

    /// The stage in a tag. Peers can write tags, so the fourth value counts as settled.
    #[must_use]
    pub fn of(tag: u64) -> Self {
        match (tag & Self::MASK) >> 32 {
            0 => Self::Published,
            1 => Self::Promoted,
            _ => Self::Settled,
        }
    }

    fn in_tag(self, tag: u64) -> u64 {
        tag & !Self::MASK | (self as u64) << 32
    }
}

/// The tag of a key's `generation`, for [`MrEntry::publish`].
#[must_use]
pub fn tag(generation: u32, key: u32) -> u64 {
    u64::from(generation << 2) << 32 | u64::from(key)
}

/// Whether two tags differ at most in their stage.
#[must_use]
pub fn is_same_generation(a: u64, b: u64) -> bool {
    (a ^ b) & !Stage::MASK == 0
}

/// A file that peers can map, and the part of a region that lies in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MappedFile {
    /// Slot and generation of the file.
    pub file: (u32, u32),
    /// The part of the region that lies in the file, as iova.
    pub mapped: Range<u64>,
    /// Offset in the file of `mapped.start`.
    pub offset: u64,
}

// SAFETY: atomics and padding.
unsafe impl Shared for MrEntry {}

#[cfg(not(loom))]
const _: () = assert!(size_of::<MrEntry>() == 128);

/// The contents of an entry: a region or a bound window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MrDescriptor {
    /// `IBV_ACCESS_*` and device-specific bits.
    pub access: u32,
    /// The protection domain; zero for a window that belongs to a queue pair instead.
    pub pd: u32,
    /// First address as work requests name it (iova).
    pub start: u64,
    /// Bytes.
    pub len: u64,
    /// Address of `start` in the owner's address space.
    pub va: u64,
    /// Slot and generation of the file that peers can map; generation zero if there is none.
    pub file: (u32, u32),
    /// The part of the region that lies in the file, as iova.
    pub mapped: Range<u64>,
    /// Offset in the file of `mapped.start`.
    pub offset: u64,
    /// The queue pair that a window of type 2 belongs to, else zero.
    pub qpn: u32,
    /// Whether atomic operations on mapped words must take the lock of those that go through the kernel.
    pub locks_atomics: bool,
}

impl MrEntry {
    /// Publishes a descriptor in an entry that has no tag.
    pub fn publish(&self, tag: u64, descriptor: &MrDescriptor) {
        // A reader that sees a field of this generation also sees that the last tag was cleared.
        fence(Ordering::Release);
        self.access.store(descriptor.access, Ordering::Relaxed);
        self.pd.store(descriptor.pd, Ordering::Relaxed);
        self.start.store(descriptor.start, Ordering::Relaxed);
        self.len.store(descriptor.len, Ordering::Relaxed);
        self.va.store(descriptor.va, Ordering::Relaxed);
        self.file.store(descriptor.file.0, Ordering::Relaxed);
        self.file_generation.store(descriptor.file.1, Ordering::Relaxed);
        self.map_start.store(descriptor.mapped.start, Ordering::Relaxed);
        self.map_end.store(descriptor.mapped.end, Ordering::Relaxed);
        self.file_offset.store(descriptor.offset, Ordering::Relaxed);
        self.qpn.store(descriptor.qpn, Ordering::Relaxed);
        self.kernel_time.store(0, Ordering::Relaxed);
        self.move_cost.store(0, Ordering::Relaxed);
        self.tag.store(tag, Ordering::Release);
    }

    /// Lets initiators tell the owner when copies through the kernel have cost this much \[ns\]; zero: never.
    pub fn set_move_cost(&self, nanoseconds: u64) {
        self.move_cost.store(nanoseconds, Ordering::Relaxed);
    }

    /// Whether initiators tell the owner at some cost.
    pub fn has_move_cost(&self) -> bool {
        self.move_cost.load(Ordering::Relaxed) != 0
    }

    /// Adds the estimated cost of a copy through the kernel \[ns\]. True if the initiator shall tell the owner: when the sum
    /// reaches the cost of moving the pages, and whenever it has doubled since.
    pub fn add_kernel_time(&self, nanoseconds: u64) -> bool {
        let cost = self.move_cost.load(Ordering::Relaxed);
        if cost == 0 {
            return false;
        }
        let before = self.kernel_time.fetch_add(nanoseconds, Ordering::Relaxed);
        let doublings = |time: u64| (time / cost).checked_ilog2();
        doublings(before.wrapping_add(nanoseconds)) > doublings(before)
    }

    /// Makes a file valid that peers can map from now on; the new tag. None if the entry has another tag, because a peer
    /// has invalidated a window, or was promoted before.
    pub fn promote(&self, tag: u64, mapped: &MappedFile) -> Option<u64> {
        if Stage::of(tag) != Stage::Published {
            return None;
        }
        // As in `publish`. No reader of this tag looks at these fields.
        fence(Ordering::Release);
        self.promoted_file.store(mapped.file.0, Ordering::Relaxed);
        self.promoted_generation.store(mapped.file.1, Ordering::Relaxed);
        self.promoted_start.store(mapped.mapped.start, Ordering::Relaxed);
        self.promoted_end.store(mapped.mapped.end, Ordering::Relaxed);
        self.promoted_offset.store(mapped.offset, Ordering::Relaxed);
        self.set_stage(tag, Stage::Promoted)
    }

    /// Ends the locking of atomic operations, once no initiator uses the entry as it was published; the new tag. None if
    /// the entry has another tag.
    pub fn settle(&self, tag: u64) -> Option<u64> {
        self.set_stage(tag, Stage::Settled)
    }

    fn set_stage(&self, tag: u64, stage: Stage) -> Option<u64> {
        let new = stage.in_tag(tag);
        self.tag.compare_exchange(tag, new, Ordering::AcqRel, Ordering::Relaxed).ok().map(|_| new)
    }

    /// The owner clears the tag, before it changes any other field.
    pub fn withdraw(&self) {
        self.tag.store(0, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// The tag and the descriptor of `key`, all of one generation and stage. None if the entry has another key, or is being
    /// changed. Peers can write every field, so the caller checks the values.
    pub fn read(&self, key: u32) -> Option<(u64, MrDescriptor)> {
        // The stage changes twice at most. More changes are those of reused keys, or of a peer that writes at random. The
        // model checker sees one change.
        const ATTEMPTS: usize = if cfg!(loom) { 2 } else { 4 };
        for _ in 0..ATTEMPTS {
            if let Some(found) = self.try_read(key).ok()? {
                return Some(found);
            }
        }
        None
    }

    /// One attempt to read the descriptor of `key`. None if the entry changes meanwhile; an error if it has another key.
    fn try_read(&self, key: u32) -> Result<Option<(u64, MrDescriptor)>, OtherKey> {
        let tag = self.tag.load(Ordering::Acquire);
        if key == 0 || tag as u32 != key {
            return Err(OtherKey);
        }
        let stage = Stage::of(tag);
        let (file, mapped, offset) = match stage {
            Stage::Published => {
                ((&self.file, &self.file_generation), (&self.map_start, &self.map_end), &self.file_offset)
            }
            Stage::Promoted | Stage::Settled => (
                (&self.promoted_file, &self.promoted_generation),
                (&self.promoted_start, &self.promoted_end),
                &self.promoted_offset,
            ),
        };
        let descriptor = MrDescriptor {
            access: self.access.load(Ordering::Relaxed),
            pd: self.pd.load(Ordering::Relaxed),
            start: self.start.load(Ordering::Relaxed),
            len: self.len.load(Ordering::Relaxed),
            va: self.va.load(Ordering::Relaxed),
            file: (file.0.load(Ordering::Relaxed), file.1.load(Ordering::Relaxed)),
            mapped: mapped.0.load(Ordering::Relaxed)..mapped.1.load(Ordering::Relaxed),
            offset: offset.load(Ordering::Relaxed),
            qpn: self.qpn.load(Ordering::Relaxed),
            locks_atomics: stage == Stage::Promoted,
        };
        // The fields are of one generation if the tag is unchanged.
        fence(Ordering::Acquire);
        Ok((self.tag.load(Ordering::Relaxed) == tag).then_some((tag, descriptor)))
    }

    /// Whether the entry still has this tag.
    #[inline(always)]
    pub fn has_tag(&self, tag: u64) -> bool {
        self.tag.load(Ordering::Acquire) == tag
    }

    /// Clears this tag, as a peer may do with a window; false if it was cleared before.
    pub fn invalidate(&self, tag: u64) -> bool {
        self.tag.compare_exchange(tag, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}
