//! An allocator of ranges of card memory. Its lists are in this process, because peers can write card memory.

use std::collections::BTreeMap;

use millstream_card_abi::MemoryRange;

/// Smallest alignment of an allocation (bytes): a cache line.
pub(crate) const MIN_ALIGNMENT: u64 = 64;

/// Why a range cannot be allocated or freed.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum HeapError {
    #[error("an allocation of 0 bytes")]
    Empty,
    #[error("alignment {0} is not a power of two")]
    Alignment(u64),
    #[error("no free range of {bytes} bytes; {free} bytes are free, the largest range has {largest}")]
    Full { bytes: u64, free: u64, largest: u64 },
    #[error("{0} are not free, or outside card memory")]
    Taken(MemoryRange),
    #[error("offset {0:#x} is not the start of an allocation")]
    NotAllocated(u64),
}

/// Free and allocated ranges of card memory, by offset. Free ranges never touch each other.
#[derive(Debug)]
pub(crate) struct Heap {
    free: BTreeMap<u64, u64>,
    taken: BTreeMap<u64, u64>,
}

impl Heap {
    pub(crate) fn new(bytes: u64) -> Heap {
        Heap { free: BTreeMap::from([(0, bytes)]), taken: BTreeMap::new() }
    }

    /// Allocates from the first free range that is large enough. Alignment 0: [`MIN_ALIGNMENT`].
    pub(crate) fn allocate(&mut self, bytes: u64, alignment: u64) -> Result<u64, HeapError> {
        if alignment != 0 && !alignment.is_power_of_two() {
            return Err(HeapError::Alignment(alignment));
        }
        let alignment = alignment.max(MIN_ALIGNMENT);
        if bytes == 0 {
            return Err(HeapError::Empty);
        }
        let found = self.free.iter().find_map(|(&start, &len)| {
            let offset = start.checked_next_multiple_of(alignment)?;
            let padding = offset - start;
            (padding <= len && bytes <= len - padding).then_some(offset)
        });
        let Some(offset) = found else {
            let largest = self.free.values().copied().max().unwrap_or(0);
            return Err(HeapError::Full { bytes, free: self.free_bytes(), largest });
        };
        self.take(offset, bytes)
    }

    /// Allocates the range at `offset`.
    pub(crate) fn take(&mut self, offset: u64, bytes: u64) -> Result<u64, HeapError> {
        if bytes == 0 {
            return Err(HeapError::Empty);
        }
        let wanted = MemoryRange::new(offset, bytes);
        let around = self.free.range(..=offset).next_back().map(|(&start, &len)| (start, len));
        let (start, len) = around.ok_or(HeapError::Taken(wanted))?;
        if !MemoryRange::new(offset - start, bytes).fits(len) {
            return Err(HeapError::Taken(wanted));
        }
        self.free.remove(&start);
        let (before, end) = (offset - start, offset + bytes);
        if before > 0 {
            self.free.insert(start, before);
        }
        if start + len > end {
            self.free.insert(end, start + len - end);
        }
        self.taken.insert(offset, bytes);
        Ok(offset)
    }

    /// Frees the allocation that starts at `offset`.
    pub(crate) fn release(&mut self, offset: u64) -> Result<(), HeapError> {
        let bytes = self.taken.remove(&offset).ok_or(HeapError::NotAllocated(offset))?;
        let (mut start, mut len) = (offset, bytes);
        if let Some(after) = self.free.remove(&(offset + bytes)) {
            len += after;
        }
        if let Some((&before, &before_len)) = self.free.range(..offset).next_back()
            && before + before_len == offset
        {
            (start, len) = (before, before_len + len);
        }
        self.free.insert(start, len);
        Ok(())
    }

    pub(crate) fn free_bytes(&self) -> u64 {
        self.free.values().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BYTES: u64 = 1 << 16;

    #[derive(Clone, Debug)]
    enum Step {
        Allocate(u64, u32),
        Take(u64, u64),
        Release(usize),
        ReleaseWrong(u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            (1..9000u64, 0..14u32).prop_map(|(bytes, shift)| Step::Allocate(bytes, shift)),
            (0..BYTES + 100, prop_oneof![0..5000u64, Just(u64::MAX)]).prop_map(|(at, n)| Step::Take(at, n)),
            (0..20usize).prop_map(Step::Release),
            (0..BYTES).prop_map(Step::ReleaseWrong),
        ];
        prop::collection::vec(step, 0..80)
    }

    proptest! {
        #[test]
        fn allocations_are_disjoint_and_everything_comes_back(steps in steps()) {
            let mut heap = Heap::new(BYTES);
            let mut live: Vec<MemoryRange> = Vec::new();
            for step in steps {
                let new = match step {
                    Step::Allocate(bytes, shift) => heap.allocate(bytes, 1 << shift).ok().map(|offset| {
                        assert_eq!(offset % MIN_ALIGNMENT.max(1 << shift), 0);
                        MemoryRange::new(offset, bytes)
                    }),
                    Step::Take(offset, bytes) => {
                        let wanted = MemoryRange::new(offset, bytes);
                        let taken = heap.take(offset, bytes);
                        let possible = bytes > 0 && wanted.fits(BYTES) && live.iter().all(|other| !other.overlaps(wanted));
                        prop_assert_eq!(taken.is_ok(), possible);
                        taken.ok().map(|_| wanted)
                    }
                    Step::Release(index) if !live.is_empty() => {
                        let range = live.swap_remove(index % live.len());
                        prop_assert_eq!(heap.release(range.offset), Ok(()));
                        None
                    }
                    Step::Release(_) => None,
                    Step::ReleaseWrong(offset) => {
                        if live.iter().all(|range| range.offset != offset) {
                            prop_assert_eq!(heap.release(offset), Err(HeapError::NotAllocated(offset)));
                        }
                        None
                    }
                };
                if let Some(new) = new {
                    prop_assert!(new.fits(BYTES) && live.iter().all(|other| !other.overlaps(new)));
                    live.push(new);
                }
                prop_assert_eq!(heap.free_bytes() + live.iter().map(|range| range.len).sum::<u64>(), BYTES);
            }
            for range in live.drain(..) {
                heap.release(range.offset).unwrap();
            }
            // Free ranges have merged.
            prop_assert_eq!(heap.allocate(BYTES, 0), Ok(0));
        }
    }

    #[test]
    fn errors_name_the_value() {
        let mut heap = Heap::new(1024);
        assert_eq!(heap.allocate(0, 0), Err(HeapError::Empty));
        assert_eq!(heap.allocate(8, 96), Err(HeapError::Alignment(96)));
        assert_eq!(heap.allocate(1000, 0), Ok(0));
        let full = HeapError::Full { bytes: 64, free: 24, largest: 24 };
        assert_eq!(heap.allocate(64, 0), Err(full));
        assert_eq!(heap.allocate(1, 1 << 63), Err(HeapError::Full { bytes: 1, free: 24, largest: 24 }));
    }
}
