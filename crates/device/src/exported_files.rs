//! Files of this process that peers may map, by slot and generation.

use std::fmt::Debug;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Mutex;
use std::sync::atomic::Ordering;

use millstream_shm::Arena;

use crate::caps::MAX_MR;
use crate::layout::{FILE_TABLE, FileEntry};

/// Names one file in one generation of its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileId {
    pub(crate) slot: u32,
    /// Never zero.
    pub(crate) generation: u32,
}

/// The table of exported files.
#[derive(Debug, Default)]
pub(crate) struct ExportedFiles(Mutex<Slots>);

/// A descriptor, or a reference to one with other users.
pub(crate) trait Descriptor: AsFd + Debug + Send + Sync {}

impl<T: AsFd + Debug + Send + Sync> Descriptor for T {}

#[derive(Debug, Default)]
struct Slots {
    files: Vec<Option<(u32, Box<dyn Descriptor>)>>,
    /// Last generation of each slot. Private, because peers can write the shared copy.
    generations: Vec<u32>,
    free: Vec<u32>,
}

fn entry(arena: &Arena, slot: u32) -> &FileEntry {
    arena.get(FILE_TABLE + slot as usize * size_of::<FileEntry>())
}

impl ExportedFiles {
    /// Exports a file of `len` bytes; None when the table is full.
    pub(crate) fn add(&self, arena: &Arena, fd: Box<dyn Descriptor>, len: usize) -> Option<FileId> {
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

    /// Withdraws a file. A peer that has it mapped keeps its pages, which are no longer used.
    pub(crate) fn remove(&self, arena: &Arena, id: FileId) {
        let mut slots = self.0.lock().expect("no panic under this lock");
        let next = id.generation.wrapping_add(1);
        slots.generations[id.slot as usize] = next;
        entry(arena, id.slot).generation.store(next, Ordering::Release);
        slots.files[id.slot as usize] = None;
        slots.free.push(id.slot);
    }

    /// Runs `work` with the file's descriptor; None if the file was withdrawn.
    pub(crate) fn with<R>(&self, id: FileId, work: impl FnOnce(BorrowedFd<'_>) -> R) -> Option<R> {
        let slots = self.0.lock().expect("no panic under this lock");
        let (generation, fd) = slots.files.get(id.slot as usize)?.as_ref()?;
        (*generation == id.generation).then(|| work(fd.as_fd()))
    }
}
