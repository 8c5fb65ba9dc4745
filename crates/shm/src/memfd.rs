//! Anonymous shared memory (`memfd_create(2)`) and its mappings.

use std::fmt;
use std::hint::black_box;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};

use crate::fork::CloseOnForkFd;
use crate::{PAGE, mm, write_combining};

/// Seals against changes of the size.
const SIZE_SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// Seals against changes of the size and against further seals, such as one that forbids writable mappings.
const ALL_SEALS: SealFlags = SIZE_SEALS.union(SealFlags::SEAL);

/// Bytes of a huge page (one entry of the page middle directory).
const HUGE_PAGE: usize = 2 << 20;

/// Collapses pages into huge pages synchronously (`linux/mman.h`).
const MADV_COLLAPSE: libc::c_int = 25;

/// Anonymous shared memory: it lives as long as a descriptor or a mapping of it.
#[derive(Debug)]
pub struct Memfd {
    fd: Fd,
    len: usize,
}

#[derive(Debug)]
enum Fd {
    /// A forked child has it, too.
    Inherited(OwnedFd),
    CloseOnFork(CloseOnForkFd),
}

impl AsFd for Fd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Inherited(fd) => fd.as_fd(),
            Self::CloseOnFork(fd) => fd.as_fd(),
        }
    }
}

impl Memfd {
    /// Creates `len` bytes of sparse memory with a sealed size: no holder of the descriptor can remove pages
    /// that others have mapped.
    ///
    /// # Errors
    /// Those of `memfd_create`, `ftruncate` and `fcntl`; EFBIG for a size that no file can have.
    pub fn new(name: &str, len: usize) -> io::Result<Self> {
        Self::over(Fd::Inherited(create(name)?), len)
    }

    fn over(fd: Fd, len: usize) -> io::Result<Self> {
        let size = i64::try_from(len).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
        rustix::fs::ftruncate(&fd, size.cast_unsigned())?;
        rustix::fs::fcntl_add_seals(&fd, SIZE_SEALS)?;
        Ok(Self { fd, len })
    }

    /// Creates memory whose seals are final, for descriptors that are given to peers: no holder can add a
    /// seal that forbids the others to map it writable.
    ///
    /// # Errors
    /// As [`new`](Memfd::new).
    pub fn sealed(name: &str, len: usize) -> io::Result<Self> {
        Self::new(name, len)?.finally_sealed()
    }

    /// As [`sealed`](Memfd::sealed); a forked child does not keep the descriptor.
    ///
    /// # Errors
    /// As [`sealed`](Memfd::sealed).
    pub(crate) fn sealed_close_on_fork(name: &str, len: usize) -> io::Result<Self> {
        Self::over(Fd::CloseOnFork(CloseOnForkFd::open(|| create(name))?), len)?.finally_sealed()
    }

    fn finally_sealed(self) -> io::Result<Self> {
        rustix::fs::fcntl_add_seals(&self.fd, SealFlags::SEAL)?;
        Ok(self)
    }

    /// Wraps a descriptor received from a peer.
    ///
    /// # Errors
    /// Those of `fstat`; InvalidData if the file can shrink.
    pub fn from_peer(fd: OwnedFd) -> io::Result<Self> {
        if !cannot_shrink(fd.as_fd()) {
            let cause = "the descriptor received from the peer is not sealed against shrinking";
            return Err(io::Error::new(io::ErrorKind::InvalidData, cause));
        }
        let len = file_len(fd.as_fd())?;
        Ok(Self { fd: Fd::Inherited(fd), len })
    }

    /// Size \[bytes\].
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the size is zero.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether every page is allocated, so that touching pages takes no further memory.
    #[must_use]
    pub fn is_fully_allocated(&self) -> bool {
        rustix::fs::fstat(&self.fd).is_ok_and(|stat| stat.st_blocks as u64 * 512 >= self.len as u64)
    }

    /// Maps the whole object, readable and writable.
    ///
    /// # Errors
    /// Those of `mmap`.
    pub fn map(&self) -> io::Result<Mapping> {
        Mapping::new(self.fd.as_fd(), 0, self.len, true)
    }

    /// Deallocates the pages of a range, which reads as zero afterwards.
    pub fn punch_hole(&self, offset: usize, len: usize) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        // A failure only costs memory.
        let _ = rustix::fs::fallocate(&self.fd, flags, offset as u64, len as u64);
    }

    /// The descriptor.
    #[must_use]
    pub fn into_fd(self) -> OwnedFd {
        match self.fd {
            Fd::Inherited(fd) => fd,
            Fd::CloseOnFork(fd) => fd.into_inner(),
        }
    }
}

fn create(name: &str) -> rustix::io::Result<OwnedFd> {
    rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
}

impl AsFd for Memfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// What keeps memory mapped that a driver has mapped into this process: see [`Mapping::of_driver`].
pub trait DriverMapping: fmt::Debug + Send + Sync {}

/// A shared mapping of part of a file, or of memory that a driver has mapped; unmapped when dropped.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
    writable: bool,
    /// Unmaps the memory when dropped, in place of `munmap`.
    driver: Option<Box<dyn DriverMapping>>,
}

// SAFETY: a mapping is an address range; code that dereferences into it handles races.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

/// A reserved range of addresses; released when dropped.
struct AddressRange {
    base: usize,
    len: usize,
}

impl AddressRange {
    fn reserve(len: usize) -> io::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { mm::mmap(0, len, libc::PROT_NONE, flags, -1, 0)? };
        Ok(Self { base, len })
    }

    /// Releases everything except `part`, which holds another mapping by now.
    fn release_around(mut self, part: Range<usize>) {
        let end = self.base + self.len;
        drop(Self { base: part.end, len: end - part.end });
        self.len = part.start - self.base;
    }
}

impl Drop for AddressRange {
    fn drop(&mut self) {
        if self.len != 0 {
            // SAFETY: a reserved range; no pointer refers to it.
            unsafe { mm::munmap(self.base, self.len) };
        }
    }
}

impl Mapping {
    /// Maps `len` bytes of `fd` from `offset`, a multiple of the page size.
    ///
    /// Large mappings are aligned to huge pages.
    ///
    /// # Errors
    /// Those of `mmap`; EINVAL for an empty range.
    pub fn new(fd: BorrowedFd<'_>, offset: usize, len: usize, writable: bool) -> io::Result<Self> {
        let protection = if writable { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
        let reserved = match len {
            ..HUGE_PAGE => None,
            _ => Some(AddressRange::reserve(len.saturating_add(HUGE_PAGE))?),
        };
        let (address, flags) = match &reserved {
            None => (0, libc::MAP_SHARED),
            Some(range) => {
                let aligned = range.base + (offset.wrapping_sub(range.base) & (HUGE_PAGE - 1));
                (aligned, libc::MAP_SHARED | libc::MAP_FIXED)
            }
        };
        // SAFETY: an address of the kernel's choice, or inside the range reserved above.
        let mapped = unsafe { mm::mmap(address, len, protection, flags, fd.as_raw_fd(), offset)? };
        if let Some(range) = reserved {
            range.release_around(mapped..mapped + len.next_multiple_of(PAGE));
        }
        let base = NonNull::new(mapped as *mut u8).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, len, writable, driver: None })
    }

    /// A private anonymous mapping.
    pub(crate) fn anonymous(len: usize) -> io::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { mm::mmap(0, len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)? };
        Ok(Self::from_raw(base as *mut u8, len))
    }

    /// Takes ownership of an existing writable mapping.
    pub(crate) fn from_raw(base: *mut u8, len: usize) -> Self {
        let base = NonNull::new(base).expect("the kernel maps nothing at address zero");
        Self { base, len, writable: true, driver: None }
    }

    /// Memory that a driver has mapped into this process: of a GPU, for example. Dropping `driver` unmaps it.
    ///
    /// # Safety
    /// `base` is the address of `len` bytes that can be loaded and stored until `driver` is dropped.
    ///
    /// # Panics
    /// If `base` is null.
    #[must_use]
    pub unsafe fn of_driver(base: *mut u8, len: usize, driver: Box<dyn DriverMapping>) -> Self {
        let base = NonNull::new(base).expect("no driver maps memory at address zero");
        Self { base, len, writable: true, driver: Some(driver) }
    }

    /// Whether a driver has mapped the memory, which is then write-combining: a load is a round trip over
    /// PCIe, and the kernel cannot pin its pages.
    #[inline]
    #[must_use]
    pub fn is_write_combining(&self) -> bool {
        self.driver.is_some()
    }

    /// Copies bytes out of the mapping. A concurrent write can tear them. Returns false if they leave the mapping.
    #[inline]
    #[must_use]
    pub fn copy_to_slice(&self, offset: usize, to: &mut [u8]) -> bool {
        if self.len.checked_sub(offset).is_none_or(|room| room < to.len()) {
            return false;
        }
        // SAFETY: the range is inside the mapping, which consists of whole lines; `to` is private memory.
        unsafe {
            let from = self.base.as_ptr().add(offset);
            if self.is_write_combining() {
                write_combining::load(from, to);
            } else {
                std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len());
            }
        }
        true
    }

    /// First byte of the mapping.
    #[inline]
    #[must_use]
    pub fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Size \[bytes\].
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the size is zero.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether stores are allowed.
    #[must_use]
    pub fn writable(&self) -> bool {
        self.writable
    }

    /// Fills the page tables of the first `len` bytes if the kernel can. Best effort; see
    /// [`prefault`](Mapping::prefault) for pages that must be allocated.
    pub fn populate(&self, len: usize) {
        // Fails with EINVAL before Linux 5.14: pages are then filled by faults.
        let _ = self.advise(0, len.min(self.len), self.populate_advice());
    }

    /// Allocates and maps the pages of a range (widened to whole pages), keeping their contents.
    ///
    /// # Errors
    /// Those of `madvise`, mostly ENOMEM.
    ///
    /// # Panics
    /// If the range is not inside the mapping.
    pub fn prefault(&self, offset: usize, len: usize) -> io::Result<()> {
        assert!(offset <= self.len && len <= self.len - offset, "range inside the mapping");
        // A driver has mapped all of its memory.
        if len == 0 || self.driver.is_some() {
            return Ok(());
        }
        let (first, end) = (offset & !(PAGE - 1), offset + len);
        self.collapse(first..end);
        match self.advise(first, end - first, self.populate_advice()) {
            // Linux before 5.14 lacks the advice: touch each page instead.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                (first..end).step_by(PAGE).for_each(|page| self.touch(page));
                Ok(())
            }
            other => other,
        }
    }

    /// Collapses a part into huge pages where the kernel can: 512 times fewer page table entries, in every
    /// mapping of this memory.
    fn collapse(&self, part: Range<usize>) {
        let base = self.base.as_ptr() as usize;
        let first = (base + part.start).next_multiple_of(HUGE_PAGE) - base;
        let end = ((base + part.end) & !(HUGE_PAGE - 1)).saturating_sub(base);
        if first >= end {
            return;
        }
        // The kernel skips huge pages without any allocated page.
        (first..end).step_by(HUGE_PAGE).for_each(|page| self.touch(page));
        // Fails before Linux 6.1 and where no contiguous memory is free: both leave small pages.
        let _ = self.advise(first, end - first, MADV_COLLAPSE);
    }

    /// Faults in the page at `page`, keeping its contents.
    fn touch(&self, page: usize) {
        // SAFETY: a page has room for an aligned word, and peers see an atomic access.
        let word = unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(page).cast()) };
        // `black_box` keeps the compiler from removing the accesses, which have no effect.
        if self.writable {
            word.fetch_or(black_box(0), Ordering::Relaxed);
        } else {
            black_box(word.load(Ordering::Relaxed));
        }
    }

    /// Asks for transparent huge pages, as a hint.
    pub fn advise_huge_pages(&self) {
        let _ = self.advise(0, self.len, libc::MADV_HUGEPAGE);
    }

    /// Keeps the mapping from children of a fork.
    pub(crate) fn hide_from_children(&self) -> io::Result<()> {
        self.advise(0, self.len, libc::MADV_DONTFORK)
    }

    /// Sets the protection. A mapping that cannot be written is the application's from then on.
    pub(crate) fn protect(&self, protection: libc::c_int) -> io::Result<()> {
        // SAFETY: the caller stores to the mapping no more unless it can be written.
        unsafe { mm::mprotect(self.base.as_ptr() as usize, self.len, protection) }
    }

    fn populate_advice(&self) -> libc::c_int {
        if self.writable { libc::MADV_POPULATE_WRITE } else { libc::MADV_POPULATE_READ }
    }

    /// Calls `madvise` with advice that keeps the contents. The range is inside the mapping.
    fn advise(&self, offset: usize, len: usize, advice: libc::c_int) -> io::Result<()> {
        // SAFETY: the contents stay as they are.
        unsafe { mm::madvise(self.base.as_ptr() as usize + offset, len, advice) }
    }

    /// The 32-bit word at `offset`, which every process accesses as an atomic.
    ///
    /// # Panics
    /// If the word is misaligned, outside the mapping or read-only. Offsets must not come from peers.
    #[inline]
    #[must_use]
    pub fn word32(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: aligned and inside the mapping, which lives as long as `self`.
        unsafe { AtomicU32::from_ptr(self.word_address(offset, size_of::<u32>()).cast()) }
    }

    /// The 64-bit word at `offset`, which every process accesses as an atomic.
    ///
    /// # Panics
    /// As [`word32`](Mapping::word32).
    #[inline]
    #[must_use]
    pub fn word64(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: as for `word32`.
        unsafe { AtomicU64::from_ptr(self.word_address(offset, size_of::<u64>()).cast()) }
    }

    /// `count` consecutive 64-bit words from `offset`, which every process accesses as atomics.
    ///
    /// # Panics
    /// As [`word32`](Mapping::word32), for any of them.
    #[inline]
    #[must_use]
    pub fn words64(&self, offset: usize, count: usize) -> &[AtomicU64] {
        let first = self.word_address(offset, size_of::<u64>());
        assert!(count <= (self.len - offset) / size_of::<u64>(), "{count} words of 8 bytes at {offset:#x}");
        // SAFETY: aligned and inside the mapping, which lives as long as `self`.
        unsafe { std::slice::from_raw_parts(first.cast(), count) }
    }

    /// Address of an aligned word of `size` bytes in a writable mapping.
    #[inline]
    fn word_address(&self, offset: usize, size: usize) -> *mut u8 {
        let inside = offset.is_multiple_of(size) && size <= self.len && offset <= self.len - size;
        assert!(inside && self.writable, "an aligned word of {size} bytes at {offset:#x}");
        self.base.as_ptr().wrapping_add(offset)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.driver.is_some() {
            return;
        }
        // SAFETY: our mapping; no borrow outlives `self`.
        unsafe { mm::munmap(self.base.as_ptr() as usize, self.len) };
    }
}

/// Whether the file behind `fd` cannot shrink, so that accesses to a mapping of it cannot fault.
///
/// False for memory of the huge page pool: its pages can be taken from the middle, and an access faults when
/// the pool is empty.
#[must_use]
pub fn cannot_shrink(fd: BorrowedFd<'_>) -> bool {
    has_seals(fd, SealFlags::SHRINK) && !is_hugetlb(fd)
}

/// Whether the file behind `fd` is a file of sysfs, such as a BAR of a PCIe device. Nobody can change its size. An access
/// to a mapping of it faults only after the device was removed.
#[must_use]
pub fn is_sysfs(fd: BorrowedFd<'_>) -> bool {
    rustix::fs::fstatfs(fd).is_ok_and(|stat| stat.f_type == libc::SYSFS_MAGIC)
}

fn is_hugetlb(fd: BorrowedFd<'_>) -> bool {
    rustix::fs::fstatfs(fd).map_or(true, |stat| stat.f_type == libc::HUGETLBFS_MAGIC)
}

/// Whether the file behind `fd` has the seals of [`Memfd::sealed`]: its size and its seals are final.
#[must_use]
pub fn is_sealed(fd: BorrowedFd<'_>) -> bool {
    has_seals(fd, ALL_SEALS)
}

fn has_seals(fd: BorrowedFd<'_>, wanted: SealFlags) -> bool {
    rustix::fs::fcntl_get_seals(fd).is_ok_and(|seals| seals.contains(wanted))
}

/// Size of the file behind a descriptor \[bytes\].
///
/// # Errors
/// Those of `fstat`.
pub fn file_len(fd: BorrowedFd<'_>) -> io::Result<usize> {
    let stat = rustix::fs::fstat(fd)?;
    usize::try_from(stat.st_size).map_err(|_| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::unix::fs::FileExt;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    #[test]
    fn two_mappings_and_the_descriptor_show_the_same_bytes() {
        let memory = Memfd::new("test", 10_000).unwrap();
        let (a, b) = (memory.map().unwrap(), memory.map().unwrap());
        a.word64(4096).store(0x1122_3344_5566_7788, Ordering::Relaxed);
        assert_eq!(b.word32(4096).load(Ordering::Relaxed), 0x5566_7788);
        assert_eq!(b.word32(4100).load(Ordering::Relaxed), 0x1122_3344);
        // SAFETY: the last byte of the mapping.
        unsafe { a.base().add(9_999).write(0x5a) };
        let file = File::from(memory.into_fd());
        let mut end = [0xff; 3];
        assert_eq!(file.read_at(&mut end, 9_998).unwrap(), 2);
        assert_eq!(end, [0, 0x5a, 0xff]);
    }

    #[test]
    fn words_outside_misaligned_or_read_only_panic() {
        let memory = Memfd::new("test", PAGE).unwrap();
        let mapping = memory.map().unwrap();
        let read_only = Mapping::new(memory.as_fd(), 0, PAGE, false).unwrap();
        for offset in [0, 4, PAGE - 4] {
            assert_eq!(mapping.word32(offset).load(Ordering::Relaxed), 0);
        }
        for offset in [0, 8, PAGE - 8] {
            assert_eq!(mapping.word64(offset).load(Ordering::Relaxed), 0);
        }
        let refused = |access: &dyn Fn()| catch_unwind(AssertUnwindSafe(access)).is_err();
        for offset in [2, PAGE - 2, PAGE, usize::MAX - 3] {
            assert!(refused(&|| _ = mapping.word32(offset)), "{offset}");
        }
        for offset in [4, PAGE - 4, PAGE, usize::MAX - 7] {
            assert!(refused(&|| _ = mapping.word64(offset)), "{offset}");
        }
        assert!(refused(&|| _ = read_only.word32(0)));
    }

    #[test]
    fn prefault_allocates_exactly_the_pages_of_the_range() {
        let memory = Memfd::new("test", 16 * PAGE + 1).unwrap();
        let mapping = memory.map().unwrap();
        let pages = || rustix::fs::fstat(&memory).unwrap().st_blocks as usize * 512 / PAGE;
        mapping.word32(PAGE).store(7, Ordering::Relaxed);
        mapping.prefault(PAGE, 0).unwrap();
        assert_eq!(pages(), 1);
        mapping.prefault(PAGE + 100, PAGE).unwrap();
        assert_eq!(pages(), 2);
        mapping.touch(3 * PAGE);
        assert_eq!(pages(), 3, "the fallback for older kernels");
        mapping.prefault(0, mapping.len()).unwrap();
        assert!(memory.is_fully_allocated());
        assert_eq!(mapping.word32(PAGE).load(Ordering::Relaxed), 7, "contents stay");
    }

    #[test]
    fn mappings_are_aligned_to_huge_pages() {
        let memory = Memfd::new("test", 3 * HUGE_PAGE).unwrap();
        for offset in [0, PAGE, HUGE_PAGE - PAGE, HUGE_PAGE] {
            let mapping = Mapping::new(memory.as_fd(), offset, memory.len() - offset, true).unwrap();
            assert_eq!(mapping.base() as usize % HUGE_PAGE, offset % HUGE_PAGE);
            mapping.word32(0).store(offset as u32 + 1, Ordering::Relaxed);
            mapping.prefault(0, mapping.len()).unwrap();
            mapping.touch(mapping.len() - PAGE);
            assert_eq!(mapping.word32(0).load(Ordering::Relaxed), offset as u32 + 1, "contents stay");
        }
        let end = Mapping::new(memory.as_fd(), 0, usize::MAX - PAGE, true).unwrap_err();
        assert_eq!(end.raw_os_error(), Some(libc::ENOMEM));
    }

    #[test]
    fn seals_are_final() {
        let open = Memfd::new("test", 8192).unwrap();
        let sealed = Memfd::sealed("test", 8192).unwrap();
        assert!(cannot_shrink(open.as_fd()) && cannot_shrink(sealed.as_fd()));
        assert!(!is_sealed(open.as_fd()) && is_sealed(sealed.as_fd()));
        for (memory, can_add_seal) in [(open, true), (sealed, false)] {
            let file = File::from(memory.into_fd());
            for size in [0, 1 << 20] {
                let refused = file.set_len(size).unwrap_err();
                assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
            }
            let added = rustix::fs::fcntl_add_seals(&file, SealFlags::FUTURE_WRITE);
            assert_eq!(added.is_ok(), can_add_seal);
        }
    }

    #[test]
    fn impossible_sizes_are_refused() {
        let too_large = Memfd::new("test", usize::MAX).unwrap_err();
        assert_eq!(too_large.raw_os_error(), Some(libc::EFBIG));
        let empty = Memfd::new("test", 0).unwrap().map().unwrap_err();
        assert_eq!(empty.raw_os_error(), Some(libc::EINVAL));
    }

    #[test]
    fn huge_page_pool_is_refused() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
        let Ok(fd) = rustix::fs::memfd_create("test", flags) else {
            eprintln!("skipped: this kernel has no huge page pool");
            return;
        };
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
        assert!(!cannot_shrink(fd.as_fd()));
        assert!(Memfd::from_peer(fd).is_err());
    }

    #[test]
    fn files_of_sysfs_are_told_from_others() {
        let other = File::open("/proc/self/exe").unwrap();
        assert!(!is_sysfs(other.as_fd()));
        assert!(!is_sysfs(Memfd::sealed("test", PAGE).unwrap().as_fd()));
        match File::open("/sys/kernel") {
            Ok(file) => assert!(is_sysfs(file.as_fd())),
            Err(error) => eprintln!("skipped: no sysfs: {error}"),
        }
    }

    #[test]
    fn unsealed_file_is_refused() {
        let file = File::open("/proc/self/exe").unwrap();
        assert!(!is_sealed(file.as_fd()));
        assert!(Memfd::from_peer(file.into()).is_err());
    }
}
