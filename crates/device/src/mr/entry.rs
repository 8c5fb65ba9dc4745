//! One place of the table of memory keys, as its owner shows it and its peers read it.
//!
//! An entry is changed like this: its name is taken away, the fields are written, the new name is given. Who reads it
//! looks at the name before and after. A name is the key and a count of the entry's lives, because a key may come back.

use std::ops::Range;

use millstream_shm::sync::atomic::{Ordering, fence};

use crate::layout::MrEntry;

/// What an entry shows: a region or a bound window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shown {
    pub(crate) access: u32,
    /// Zero for a window that belongs to a queue pair instead.
    pub(crate) pd: u32,
    /// As work requests name it.
    pub(crate) start: u64,
    /// Bytes.
    pub(crate) len: u64,
    /// Where `start` lies in the owner's address space.
    pub(crate) va: u64,
    /// Slot and generation of the file that peers can map; generation zero if there is none.
    pub(crate) file: (u32, u32),
    /// The part of it that lies in the file, as work requests name it.
    pub(crate) mapped: Range<u64>,
    /// Offset in the file of `mapped.start`.
    pub(crate) offset: u64,
    /// The queue pair that a window of type 2 belongs to, else zero.
    pub(crate) qpn: u32,
}

impl MrEntry {
    /// The owner writes an entry that has no name, and names it.
    pub(crate) fn show(&self, name: u64, shown: &Shown) {
        // Whoever sees a field of this life sees that the last one is over.
        fence(Ordering::Release);
        self.access.store(shown.access, Ordering::Relaxed);
        self.pd.store(shown.pd, Ordering::Relaxed);
        self.start.store(shown.start, Ordering::Relaxed);
        self.len.store(shown.len, Ordering::Relaxed);
        self.va.store(shown.va, Ordering::Relaxed);
        self.file.store(shown.file.0, Ordering::Relaxed);
        self.file_generation.store(shown.file.1, Ordering::Relaxed);
        self.map_start.store(shown.mapped.start, Ordering::Relaxed);
        self.map_end.store(shown.mapped.end, Ordering::Relaxed);
        self.file_offset.store(shown.offset, Ordering::Relaxed);
        self.qpn.store(shown.qpn, Ordering::Relaxed);
        self.name.store(name, Ordering::Release);
    }

    /// The owner takes the name away, before anything else in the entry changes.
    pub(crate) fn hide(&self) {
        self.name.store(0, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// The name under which it shows `key`, and what it shows: all of one life. None if it shows something else, or is
    /// being changed. Peers can write all of it, so the caller checks what it says.
    pub(crate) fn read(&self, key: u32) -> Option<(u64, Shown)> {
        let name = self.name.load(Ordering::Acquire);
        if key == 0 || name as u32 != key {
            return None;
        }
        let shown = Shown {
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
        // All of it was of one life, if the name is still the same.
        fence(Ordering::Acquire);
        (self.name.load(Ordering::Relaxed) == name).then_some((name, shown))
    }

    /// Whether it still has this name.
    #[inline(always)]
    pub(crate) fn has(&self, name: u64) -> bool {
        self.name.load(Ordering::Acquire) == name
    }

    /// Takes this name away, as a peer may do with a window; false if that was done already.
    pub(crate) fn end(&self, name: u64) -> bool {
        self.name.compare_exchange(name, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}
