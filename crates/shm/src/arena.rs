//! One process's shared objects, in one memfd that its peers map whole.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Mutex;

use crate::{Mapping, Memfd, PAGE, round_up};

/// A part of an arena, given out by [`Arena::alloc`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Bytes from the start of the arena.
    pub offset: usize,
    /// Bytes, a multiple of the cache line.
    pub len: usize,
}

/// A sparse memfd with an allocator whose own records are private: a peer that scribbles over the
/// arena cannot mislead it.
#[derive(Debug)]
pub struct Arena {
    memory: Memfd,
    mapping: Mapping,
    /// Free ranges by offset: offset to length. Neighbours are always merged.
    free: Mutex<BTreeMap<usize, usize>>,
}

/// Every block starts on a cache line of its own.
const LINE: usize = 64;

impl Arena {
    /// Creates an arena of `len` bytes whose first `reserved` bytes are the caller's to lay out.
    ///
    /// # Errors
    /// What creating or mapping the memory reports.
    pub fn new(name: &str, len: usize, reserved: usize) -> io::Result<Self> {
        // Peers get the descriptor: none of them can seal it against the others.
        let memory = Memfd::sealed(name, len)?;
        let mapping = memory.map()?;
        let start = round_up(reserved, PAGE);
        Ok(Self { memory, mapping, free: Mutex::new(BTreeMap::from([(start, len - start)])) })
    }

    /// Address of the byte at `offset`.
    ///
    /// # Panics
    /// If the offset lies outside: offsets come from this arena's own records.
    #[must_use]
    pub fn at(&self, offset: usize) -> NonNull<u8> {
        assert!(offset < self.mapping.len());
        // SAFETY: inside the mapping, as just checked.
        unsafe { NonNull::new_unchecked(self.mapping.base().add(offset)) }
    }

    /// Takes `len` zeroed bytes; None when no free range is large enough. Free memory is always
    /// zero, so a large block costs nothing until it is touched.
    ///
    /// # Panics
    /// Only if another thread panicked inside the allocator.
    pub fn alloc(&self, len: usize) -> Option<Block> {
        let len = round_up(len.max(1), LINE);
        let mut free = self.free.lock().expect("the allocator does not panic");
        let (offset, room) = free.iter().find(|(_, room)| **room >= len).map(|(o, r)| (*o, *r))?;
        free.remove(&offset);
        if room > len {
            free.insert(offset + len, room - len);
        }
        Some(Block { offset, len })
    }

    /// Takes a block back; its whole pages go back to the system.
    ///
    /// # Panics
    /// Only if another thread panicked inside the allocator.
    pub fn release(&self, block: Block) {
        let first = round_up(block.offset, PAGE);
        let last = (block.offset + block.len) & !(PAGE - 1);
        if last > first {
            self.memory.punch(first, last - first);
        }
        let end = block.offset + block.len;
        for (from, to) in [(block.offset, first.min(end)), (last.max(block.offset).max(first.min(end)), end)]
        {
            // SAFETY: inside the block, which nobody uses any more.
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
    fn blocks_do_not_overlap_and_come_back() {
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
        // SAFETY: a block of 100 bytes that nobody else uses.
        unsafe { arena.at(block.offset).as_ptr().write_bytes(0xff, 100) };
        arena.release(block);
        let again = arena.alloc(100).unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { arena.at(again.offset).as_ptr().add(99).read() }, 0);
    }
}
