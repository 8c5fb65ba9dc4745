//! The inodes of channels, which any thread and signal handler may look up without a lock.

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};

/// Channels in one part of the table.
const PART_LEN: usize = 256;

/// A set of inodes. It grows by parts that are never freed, because a reader may be in any of them. Callers serialise changes.
#[derive(Debug)]
pub(super) struct ChannelTable {
    len: AtomicUsize,
    first: Part,
}

#[derive(Debug)]
struct Part {
    /// Inodes, zero in free places.
    places: [AtomicU64; PART_LEN],
    next: AtomicPtr<Self>,
}

impl Part {
    const fn new() -> Self {
        Self { places: [const { AtomicU64::new(0) }; PART_LEN], next: AtomicPtr::new(ptr::null_mut()) }
    }

    fn next(&self) -> Option<&'static Self> {
        // SAFETY: null, or a part that is never freed.
        unsafe { self.next.load(Ordering::Acquire).as_ref() }
    }
}

impl ChannelTable {
    pub(super) const fn new() -> Self {
        Self { len: AtomicUsize::new(0), first: Part::new() }
    }

    /// Whether the set is empty.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.len.load(Ordering::Relaxed) == 0
    }

    fn places(&self) -> impl Iterator<Item = &AtomicU64> {
        std::iter::successors(Some(&self.first), |part| part.next()).flat_map(|part| &part.places)
    }

    /// Whether the set has `inode`, which is not zero.
    pub(super) fn contains(&self, inode: u64) -> bool {
        self.places().any(|place| place.load(Ordering::Acquire) == inode)
    }

    /// Adds an inode, which is not zero.
    pub(super) fn insert(&self, inode: u64) {
        let free = |place: &&AtomicU64| place.load(Ordering::Relaxed) == 0;
        if let Some(place) = self.places().find(free) {
            place.store(inode, Ordering::Release);
        } else {
            let part = Box::new(Part::new());
            part.places[0].store(inode, Ordering::Relaxed);
            let mut last = &self.first;
            while let Some(next) = last.next() {
                last = next;
            }
            last.next.store(Box::into_raw(part), Ordering::Release);
        }
        self.len.fetch_add(1, Ordering::Relaxed);
    }

    /// Removes an inode, if the set has it.
    pub(super) fn remove(&self, inode: u64) {
        if let Some(place) = self.places().find(|place| place.load(Ordering::Relaxed) == inode) {
            place.store(0, Ordering::Release);
            self.len.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inodes_are_found_after_others_have_been_removed() {
        let table = ChannelTable::new();
        let all = 1..=3 * PART_LEN as u64;
        assert!(table.is_empty());
        all.clone().for_each(|inode| table.insert(inode));
        (1..=300).for_each(|inode| table.remove(inode));
        for inode in all.clone() {
            assert_eq!(table.contains(inode), inode > 300, "{inode}");
        }
        // Free places are used again: the table does not grow.
        (1..=300).for_each(|inode| table.insert(inode));
        assert_eq!(table.places().count(), 3 * PART_LEN);
        assert!(all.clone().all(|inode| table.contains(inode)));
        table.remove(1000);
        all.for_each(|inode| table.remove(inode));
        assert!(table.is_empty());
    }
}
