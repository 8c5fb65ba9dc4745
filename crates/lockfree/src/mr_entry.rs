//! One entry of the table of memory keys, written by its owner and read by its peers.
//!
//! The owner changes an entry in three steps: it clears the tag, writes the fields, and stores the new tag. A
//! reader compares the tag before and after. The tag is the key and a generation, because a key may be
//! reused.

use std::ops::Range;

use crate::shared::Shared;
use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// One memory region or bound memory window as peers see it. All fields are the owner's, except that an
/// initiator may invalidate a window.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct MrEntry {
    /// Low half: the key. High half: the generation, which rises whenever the other fields change. Zero while the entry is
    /// free or being changed.
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
    _pad0: u32,
    _pad1: [u64; 6],
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
        self.tag.store(tag, Ordering::Release);
    }

    /// The owner clears the tag, before it changes any other field.
    pub fn withdraw(&self) {
        self.tag.store(0, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// The tag and the descriptor of `key`, all of one generation. None if the entry has another key, or is being
    /// changed. Peers can write every field, so the caller checks the values.
    pub fn read(&self, key: u32) -> Option<(u64, MrDescriptor)> {
        let tag = self.tag.load(Ordering::Acquire);
        if key == 0 || tag as u32 != key {
            return None;
        }
        let descriptor = MrDescriptor {
            access: self.access.load(Ordering::Relaxed),
            pd: self.pd.load(Ordering::Relaxed),
            start: self.start.load(Ordering::Relaxed),
            len: self.len.load(Ordering::Relaxed),
            va: self.va.load(Ordering::Relaxed),
            file: (self.file.load(Ordering::Relaxed), self.file_generation.load(Ordering::Relaxed)),
            mapped: self.map_start.load(Ordering::Relaxed)..self.map_end.load(Ordering::Relaxed),
            offset: self.file_offset.load(Ordering::Relaxed),
            qpn: self.qpn.load(Ordering::Relaxed),
        };
        // The fields are of one generation if the tag is unchanged.
        fence(Ordering::Acquire);
        (self.tag.load(Ordering::Relaxed) == tag).then_some((tag, descriptor))
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
