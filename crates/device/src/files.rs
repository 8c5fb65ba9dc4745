//! Memory of this process that peers may map, by slot and generation.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::Ordering;

use millstream_shm::Arena;

use crate::caps::MAX_MR;
use crate::layout::{FILES, FileEntry};

/// Names one file in one life of its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileId {
    pub(crate) slot: u32,
    /// Never zero.
    pub(crate) generation: u32,
}

#[derive(Debug, Default)]
pub(crate) struct Files(Mutex<Slots>);

#[derive(Debug, Default)]
struct Slots {
    files: Vec<Option<(u32, OwnedFd)>>,
    /// Last generation of each slot: not read back from where peers can write.
    generations: Vec<u32>,
    free: Vec<u32>,
}

pub(crate) fn entry(arena: &Arena, slot: u32) -> &FileEntry {
    let offset = FILES + slot as usize * size_of::<FileEntry>();
    // SAFETY: inside the arena, which is zero or valid there; all fields are atomics.
    unsafe { arena.at(offset).cast::<FileEntry>().as_ref() }
}

impl Files {
    /// Offers a file of `len` bytes; None when the table is full.
    pub(crate) fn add(&self, arena: &Arena, fd: OwnedFd, len: usize) -> Option<FileId> {
        let mut slots = self.0.lock().expect("no panic under this lock");
        let slot = match slots.free.pop() {
            Some(slot) => slot,
            None if slots.files.len() < MAX_MR => {
                slots.files.push(None);
                slots.generations.push(0);
                slots.files.len() as u32 - 1
            }
            None => return None,
        };
        let shared = entry(arena, slot);
        shared.len.store(len as u64, Ordering::Relaxed);
        let generation = slots.generations[slot as usize].wrapping_add(1) | 1;
        slots.generations[slot as usize] = generation;
        shared.generation.store(generation, Ordering::Release);
        slots.files[slot as usize] = Some((generation, fd));
        Some(FileId { slot, generation })
    }

    /// Withdraws a file. Who mapped it keeps its pages, which are nobody's any more.
    pub(crate) fn remove(&self, arena: &Arena, id: FileId) {
        let mut slots = self.0.lock().expect("no panic under this lock");
        let over = id.generation.wrapping_add(1);
        slots.generations[id.slot as usize] = over;
        entry(arena, id.slot).generation.store(over, Ordering::Release);
        slots.files[id.slot as usize] = None;
        slots.free.push(id.slot);
    }

    /// Lends the descriptor for an answer to a peer.
    pub(crate) fn with<R>(
        &self,
        id: FileId,
        give: impl FnOnce(std::os::fd::BorrowedFd<'_>) -> R,
    ) -> Option<R> {
        let slots = self.0.lock().expect("no panic under this lock");
        let (generation, fd) = slots.files.get(id.slot as usize)?.as_ref()?;
        (*generation == id.generation).then(|| give(fd.as_fd()))
    }
}
