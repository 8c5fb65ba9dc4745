//! Allocator for the shared objects of one process, in a memfd that its peers map whole.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use millstream_lockfree::Shared;

use crate::{Mapping, Memfd, PAGE, round_up};

/// An allocation of an [`Arena`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArenaBlock {
    /// Offset in the arena \[bytes\].
    pub offset: usize,
    /// Length \[bytes\], a multiple of the cache line.
    pub len: usize,
}

/// A sparse memfd with an allocator. The allocator's state is private, so peers that write to the arena
/// cannot corrupt it.
#[derive(Debug)]
pub struct Arena {
    memory: Memfd,
    mapping: Arc<Mapping>,
    /// Free ranges, offset to length. Adjacent ranges are always merged.
    free: Mutex<BTreeMap<usize, usize>>,
}

/// Alignment of blocks: a cache line.
const LINE: usize = 64;

impl Arena {
    /// Creates an arena of `len` bytes. The allocator leaves the first `reserved` bytes to the caller.
    ///
    /// # Errors
    /// Those of creating or mapping the memory.
    pub fn new(name: &str, len: usize, reserved: usize) -> io::Result<Self> {
        // Peers get the descriptor and must not seal it against each other.
        let memory = Memfd::sealed(name, len)?;
        let mapping = Arc::new(memory.map()?);
        let start = round_up(reserved, PAGE);
        Ok(Self { memory, mapping, free: Mutex::new(BTreeMap::from([(start, len - start)])) })
    }

    /// The whole arena.
    #[must_use]
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// The value at `offset`.
    ///
    /// # Panics
    /// If the value leaves the arena or is not aligned: offsets come from this arena's own records.
    #[inline]
    #[must_use]
    pub fn get<T: Shared>(&self, offset: usize) -> &T {
        self.mapping.get(offset).expect("an offset of this arena's own records")
    }

    /// Address of the byte at `offset`.
    ///
    /// # Panics
    /// If the offset is outside the arena. Offsets must not come from peers.
    #[must_use]
    pub fn at(&self, offset: usize) -> NonNull<u8> {
        assert!(offset < self.mapping.len());
        // SAFETY: inside the mapping, as just checked.
        unsafe { NonNull::new_unchecked(self.mapping.base().add(offset)) }
    }

    /// Allocates `len` zeroed bytes; None if no free range is large enough. Free memory is always zero, so a
    /// large block takes no memory until it is touched.
    ///
    /// # Panics
    /// Only if another thread panicked inside the allocator.
    pub fn alloc(&self, len: usize) -> Option<ArenaBlock> {
        let len = round_up(len.max(1), LINE);
        let mut free = self.free.lock().expect("the allocator does not panic");
        let (offset, room) = free.iter().find(|(_, room)| **room >= len).map(|(o, r)| (*o, *r))?;
        free.remove(&offset);
        if room > len {
            free.insert(offset + len, room - len);
        }
        Some(ArenaBlock { offset, len })
    }

    /// Frees a block and deallocates its whole pages.
    ///
    /// # Panics
    /// Only if another thread panicked inside the allocator.
    pub fn release(&self, block: ArenaBlock) {
        let first = round_up(block.offset, PAGE);
        let last = (block.offset + block.len) & !(PAGE - 1);
        if last > first {
            self.memory.punch_hole(first, last - first);
        }
        let end = block.offset + block.len;
        for (from, to) in [(block.offset, first.min(end)), (last.max(block.offset).max(first.min(end)), end)]
        {
            // SAFETY: inside the block, which is no longer used.
            unsafe { self.at(from.min(end - 1)).as_ptr().write_bytes(0, to.saturating_sub(from)) };
        }
        let mut free = self.free.lock().expect("the allocator does not panic");
        let (mut offset, mut len) = (block.offset, block.len);
        if let Some((before, room)) = free.range(..offset).next_back().map(|(o, r)| (*o, *r))
            && before + room == offset
        {
            free.remove(&before);
            (offset, len) = (before, room + len);
        }
        if let Some(room) = free.remove(&(offset + len)) {
            len += room;
        }
        free.insert(offset, len);
    }
}

impl AsFd for Arena {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_disjoint_and_reusable() {
        let arena = Arena::new("test", 1 << 20, 4096).unwrap();
        let blocks: Vec<_> = (1..50).map(|n| arena.alloc(n * 100).unwrap()).collect();
        for (i, a) in blocks.iter().enumerate() {
            assert!(a.offset >= 4096 && a.offset % LINE == 0);
            for b in &blocks[i + 1..] {
                assert!(a.offset + a.len <= b.offset || b.offset + b.len <= a.offset);
            }
        }
        assert!(arena.alloc(1 << 20).is_none());
        for block in blocks.iter().step_by(2).chain(blocks.iter().skip(1).step_by(2)) {
            arena.release(*block);
        }
        assert_eq!(arena.alloc((1 << 20) - 4096).unwrap().offset, 4096);
    }

    #[test]
    fn blocks_are_zeroed() {
        let arena = Arena::new("test", 1 << 20, 0).unwrap();
        let block = arena.alloc(100).unwrap();
        // SAFETY: a block of 100 bytes without another user.
        unsafe { arena.at(block.offset).as_ptr().write_bytes(0xff, 100) };
        arena.release(block);
        let again = arena.alloc(100).unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { arena.at(again.offset).as_ptr().add(99).read() }, 0);
    }
}
