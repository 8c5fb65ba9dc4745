//! Sealed memfds and their mappings.
//!
//! A memfd is sparse: a page costs memory once it is touched. Its size is sealed before anybody
//! else sees it, because a peer that could shrink it would kill us with SIGBUS.

use std::ffi::c_void;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{self, Advice, MapFlags, ProtFlags};

use crate::os::{Doing, OsError};

/// Page size of the mappings [bytes].
pub(crate) const PAGE: usize = 4096;

/// Creates a memfd of `len` bytes, all zero, whose size can never change again.
pub(crate) fn sealed_memfd(name: &str, len: u64) -> Result<OwnedFd, OsError> {
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
        .doing("create a memfd")?;
    rustix::fs::ftruncate(&fd, len).doing("set the size of a memfd")?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&fd, seals).doing("seal the size of a memfd")?;
    Ok(fd)
}

/// True if the size of the memfd is sealed, so that mapping it is safe from SIGBUS.
pub(crate) fn is_sealed(fd: impl AsFd) -> bool {
    let wanted = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_get_seals(fd).is_ok_and(|seals| seals.contains(wanted))
}

/// A memfd mapped readable and writable, shared with every other process that maps it.
///
/// Nothing here hands out references to plain bytes: another process may write at any time. Bytes
/// are copied in and out; words that both sides watch are atomics.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is plain shared memory that is only reached through raw copies and atomics,
// which any thread may use; it is unmapped once, by its owner's drop.
unsafe impl Send for Mapping {}
// SAFETY: as above; no method gives out a reference to non-atomic memory.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `len` bytes of `fd`. The caller has made sure that `fd` is that long and
    /// sealed.
    pub(crate) fn new(fd: impl AsFd, len: usize) -> Result<Mapping, OsError> {
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing.
        let base = unsafe {
            mm::mmap(
                ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                fd,
                0,
            )
        }
        .doing("map card memory")?;
        let base = NonNull::new(base.cast::<u8>()).expect("mmap never returns page zero");
        Ok(Mapping { base, len })
    }

    /// Length [bytes].
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// First byte of the mapping.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// The 32-bit word at `offset`, which the program, not a peer, chose.
    ///
    /// # Panics
    /// If the word is misaligned or outside the mapping.
    pub(crate) fn word32(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4) && offset <= self.len - 4, "register offset");
        // SAFETY: aligned (the mapping starts on a page) and inside the mapping, which lives as
        // long as `self`; peers use atomic accesses for these words as well.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    /// The 64-bit word at `offset`, which the program, not a peer, chose.
    ///
    /// # Panics
    /// If the word is misaligned or outside the mapping.
    pub(crate) fn word64(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset <= self.len - 8, "register offset");
        // SAFETY: as for `word32`.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    /// Asks for huge pages; a hint that the system may ignore.
    pub(crate) fn advise_huge_pages(&self) {
        // SAFETY: the advice changes how the pages are backed, not what they hold.
        let _ = unsafe { mm::madvise(self.address(0), self.len, Advice::LinuxHugepage) };
    }

    /// Gives memory to the pages of `offset..offset + len` (widened to whole pages) and enters them
    /// in this process's page table, keeping what they hold.
    pub(crate) fn populate(&self, offset: usize, len: usize) -> Result<(), OsError> {
        assert!(offset <= self.len && len <= self.len - offset, "range checked by the caller");
        let first = offset / PAGE * PAGE;
        let last = (offset + len).next_multiple_of(PAGE).min(self.len);
        if len == 0 {
            return Ok(());
        }
        // SAFETY: the range is inside the mapping and whole pages; contents stay.
        let advised = unsafe { mm::madvise(self.address(first), last - first, Advice::LinuxPopulateWrite) };
        match advised {
            // Linux before 5.14 does not know the advice: touch each page instead.
            Err(Errno::INVAL) => {
                for page in (first..last).step_by(PAGE) {
                    self.word32(page).fetch_or(0, std::sync::atomic::Ordering::Relaxed);
                }
                Ok(())
            }
            other => other.doing("give memory to the pages of a card"),
        }
    }

    fn address(&self, offset: usize) -> *mut c_void {
        self.base.as_ptr().wrapping_add(offset).cast()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length and never handed out beyond our lifetime.
        let _ = unsafe { mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn two_mappings_of_a_memfd_show_the_same_words() {
        let fd = sealed_memfd("millstream-card-test", 2 * PAGE as u64).unwrap();
        let one = Mapping::new(&fd, 2 * PAGE).unwrap();
        let other = Mapping::new(&fd, 2 * PAGE).unwrap();
        one.word64(PAGE).store(0x1122_3344_5566_7788, Ordering::Relaxed);
        assert_eq!(other.word32(PAGE).load(Ordering::Relaxed), 0x5566_7788);
        assert_eq!(other.word32(PAGE + 4).load(Ordering::Relaxed), 0x1122_3344);
    }

    #[test]
    fn a_sealed_memfd_cannot_change_its_size() {
        let fd = sealed_memfd("millstream-card-test", PAGE as u64).unwrap();
        assert!(is_sealed(&fd));
        assert_eq!(rustix::fs::ftruncate(&fd, 0), Err(Errno::PERM));
        assert_eq!(rustix::fs::ftruncate(&fd, 1 << 20), Err(Errno::PERM));
    }

    #[test]
    fn populate_gives_memory_to_exactly_the_pages_asked_for() {
        let fd = sealed_memfd("millstream-card-test", 16 * PAGE as u64).unwrap();
        let mapping = Mapping::new(&fd, 16 * PAGE).unwrap();
        mapping.populate(PAGE + 100, PAGE).unwrap();
        let blocks = rustix::fs::fstat(&fd).unwrap().st_blocks as usize;
        assert_eq!(blocks * 512, 2 * PAGE);
    }
}
