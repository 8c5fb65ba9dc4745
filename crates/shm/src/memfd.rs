//! Anonymous shared memory and its mappings.

use std::ffi::CString;
use std::hint::black_box;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::PAGE;

/// Nobody can change the size.
const SIZE: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;

/// Nor add a seal, such as one that forbids to map the memory for writing.
const SIZE_AND_SEALS: libc::c_int = SIZE | libc::F_SEAL_SEAL;

/// A huge page of the processors that there are mappings for.
const HUGE_PAGE: usize = 2 << 20;

/// Makes huge pages at once, whatever the system does by itself (`linux/mman.h`).
const MADV_COLLAPSE: libc::c_int = 25;

/// Memory without a name: it lives as long as a descriptor or a mapping of it does.
#[derive(Debug)]
pub struct Memfd {
    fd: OwnedFd,
    len: usize,
}

impl Memfd {
    /// Creates `len` bytes of sparse memory. Its size is sealed, so that no holder of the
    /// descriptor can take pages away from under somebody else's mapping.
    ///
    /// # Errors
    /// What `memfd_create`, `ftruncate` or `fcntl` report; EFBIG for a size that no file can have.
    pub fn new(name: &str, len: usize) -> io::Result<Self> {
        let name = CString::new(name).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: the name is a C string that lives through the call.
        let raw = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
        if raw < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call above returned a new descriptor that nobody else owns.
        let fd = unsafe { OwnedFd::from_raw_fd(raw) };
        let size = libc::off_t::try_from(len).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
        // SAFETY: plain system calls on a descriptor that we own.
        unsafe {
            if libc::ftruncate(raw, size) != 0 {
                return Err(io::Error::last_os_error());
            }
            if libc::fcntl(raw, libc::F_ADD_SEALS, SIZE) != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(Self { fd, len })
    }

    /// As [`new`](Memfd::new), for memory that is handed out to be written: no holder of the
    /// descriptor can add a seal that forbids others to map it writable.
    ///
    /// # Errors
    /// As [`new`](Memfd::new).
    pub fn sealed(name: &str, len: usize) -> io::Result<Self> {
        let memory = Self::new(name, len)?;
        // SAFETY: a plain system call on a descriptor that we own.
        if unsafe { libc::fcntl(memory.fd.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_SEAL) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(memory)
    }

    /// Bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for an object of zero bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Maps the whole object, readable and writable.
    ///
    /// # Errors
    /// What `mmap` reports.
    pub fn map(&self) -> io::Result<Mapping> {
        Mapping::new(self.fd.as_fd(), 0, self.len, true)
    }

    /// Gives the pages of a range back to the system; they read as zero afterwards.
    pub fn punch(&self, offset: usize, len: usize) {
        // SAFETY: a plain system call. Failure only costs memory, so it is not reported.
        unsafe {
            libc::fallocate(
                self.fd.as_raw_fd(),
                libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
                offset as libc::off_t,
                len as libc::off_t,
            );
        }
    }

    /// The descriptor, given up.
    #[must_use]
    pub fn into_fd(self) -> OwnedFd {
        self.fd
    }
}

impl AsFd for Memfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A shared mapping of part of a file; unmapped when dropped.
///
/// System calls are made directly: communication libraries patch `mmap` and `munmap` to follow the
/// application's memory, and must not see (or lock against) the device's own mappings.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
    writable: bool,
}

// SAFETY: a mapping is an address range; whoever dereferences into it takes care of races.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

/// A range of addresses that nothing is mapped to yet; given back when dropped.
struct Reservation {
    base: usize,
    len: usize,
}

impl Reservation {
    fn new(len: usize) -> io::Result<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe { libc::syscall(libc::SYS_mmap, 0usize, len, libc::PROT_NONE, flags, -1, 0usize) };
        if base == -1 { Err(io::Error::last_os_error()) } else { Ok(Self { base: base as usize, len }) }
    }

    /// Gives back all but one part, which something else is mapped to by now.
    fn keep(mut self, part: Range<usize>) {
        let end = self.base + self.len;
        drop(Self { base: part.end, len: end - part.end });
        self.len = part.start - self.base;
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.len != 0 {
            // SAFETY: a range that is ours, and that nobody has a pointer into.
            unsafe { libc::syscall(libc::SYS_munmap, self.base, self.len) };
        }
    }
}

impl Mapping {
    /// Maps `len` bytes of `fd` from `offset`, which must be a multiple of the page size.
    ///
    /// # Errors
    /// What `mmap` reports; EINVAL for an empty range.
    pub fn new(fd: BorrowedFd<'_>, offset: usize, len: usize, writable: bool) -> io::Result<Self> {
        let prot = if writable { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
        let whole =
            if len < HUGE_PAGE { None } else { Some(Reservation::new(len.saturating_add(HUGE_PAGE))?) };
        let (at, flags) = match &whole {
            None => (0, libc::MAP_SHARED),
            Some(whole) => {
                let at = whole.base + (offset.wrapping_sub(whole.base) & (HUGE_PAGE - 1));
                (at, libc::MAP_SHARED | libc::MAP_FIXED)
            }
        };
        // SAFETY: a new mapping at an address of the kernel's choice, or inside the range that was
        // just reserved, touches no existing memory.
        let address = unsafe { libc::syscall(libc::SYS_mmap, at, len, prot, flags, fd.as_raw_fd(), offset) };
        if address == -1 {
            return Err(io::Error::last_os_error());
        }
        if let Some(whole) = whole {
            whole.keep(at..at + len.next_multiple_of(PAGE));
        }
        let base = NonNull::new(address as *mut u8).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, len, writable })
    }

    /// Takes charge of a range that was mapped by other means.
    pub(crate) fn from_raw(base: *mut u8, len: usize) -> Self {
        let base = NonNull::new(base).expect("the kernel maps nothing at address zero");
        Self { base, len, writable: true }
    }

    /// First byte of the mapping.
    #[inline]
    #[must_use]
    pub fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Bytes mapped.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for a mapping of zero bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether stores are allowed.
    #[must_use]
    pub fn writable(&self) -> bool {
        self.writable
    }

    /// Fills the page tables of the first `len` bytes now instead of by faults later, where the
    /// system can; see [`prefault`](Mapping::prefault) for pages that must be there.
    pub fn populate(&self, len: usize) {
        // A kernel without the advice answers EINVAL and the pages are filled by faults.
        let _ = self.advise(0, len.min(self.len), self.populating());
    }

    /// Gives memory to the pages of `len` bytes from `offset` on (widened to whole pages) and
    /// enters them in this process's page table, keeping what they hold.
    ///
    /// # Errors
    /// What `madvise` reports, ENOMEM above all.
    ///
    /// # Panics
    /// If the range is not inside the mapping.
    pub fn prefault(&self, offset: usize, len: usize) -> io::Result<()> {
        assert!(offset <= self.len && len <= self.len - offset, "range inside the mapping");
        if len == 0 {
            return Ok(());
        }
        let (first, end) = (offset & !(PAGE - 1), offset + len);
        self.collapse(first..end);
        match self.advise(first, end - first, self.populating()) {
            // Linux before 5.14 does not know the advice: touch each page instead.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                (first..end).step_by(PAGE).for_each(|page| self.touch(page));
                Ok(())
            }
            other => other,
        }
    }

    /// Puts huge pages behind as much of a part as the system agrees to: a processor then walks and
    /// fills 512 times fewer table entries, here and wherever else this memory is mapped.
    fn collapse(&self, part: Range<usize>) {
        let base = self.base.as_ptr() as usize;
        let first = (base + part.start).next_multiple_of(HUGE_PAGE) - base;
        let end = ((base + part.end) & !(HUGE_PAGE - 1)).saturating_sub(base);
        if first >= end {
            return;
        }
        // Only what has a page already is considered.
        (first..end).step_by(HUGE_PAGE).for_each(|page| self.touch(page));
        // Linux before 6.1 does not know the advice; no memory in one piece is no error either.
        let _ = self.advise(first, end - first, MADV_COLLAPSE);
    }

    /// Faults in the page at `page`, keeping what it holds.
    fn touch(&self, page: usize) {
        // SAFETY: a page has room for an aligned word, and peers see an atomic access.
        let word = unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(page).cast()) };
        // The compiler must not see that neither access has an effect, or it leaves them out.
        if self.writable {
            word.fetch_or(black_box(0), Ordering::Relaxed);
        } else {
            black_box(word.load(Ordering::Relaxed));
        }
    }

    /// Asks for huge pages: a hint that the system may ignore.
    pub fn advise_huge_pages(&self) {
        let _ = self.advise(0, self.len, libc::MADV_HUGEPAGE);
    }

    fn populating(&self) -> libc::c_int {
        if self.writable { libc::MADV_POPULATE_WRITE } else { libc::MADV_POPULATE_READ }
    }

    /// Gives one of the pieces of advice that change no contents. The caller keeps the range inside
    /// the mapping.
    fn advise(&self, offset: usize, len: usize, advice: libc::c_int) -> io::Result<()> {
        // SAFETY: the range is inside the mapping, whose contents stay as they are.
        let done = unsafe { libc::syscall(libc::SYS_madvise, self.base.as_ptr().add(offset), len, advice) };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// The 32-bit word at `offset`, for words that all sides access as atomics.
    ///
    /// # Panics
    /// If the word is misaligned, outside the mapping or not writable: the program, not a peer,
    /// chooses the offset.
    #[inline]
    #[must_use]
    pub fn word32(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: aligned and inside the mapping, which lives as long as `self`.
        unsafe { AtomicU32::from_ptr(self.place_of(offset, size_of::<u32>()).cast()) }
    }

    /// The 64-bit word at `offset`, for words that all sides access as atomics.
    ///
    /// # Panics
    /// As [`word32`](Mapping::word32).
    #[inline]
    #[must_use]
    pub fn word64(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: as for `word32`.
        unsafe { AtomicU64::from_ptr(self.place_of(offset, size_of::<u64>()).cast()) }
    }

    /// So many 64-bit words one after the other, the first one at `offset`.
    ///
    /// # Panics
    /// As [`word32`](Mapping::word32), for any of them.
    #[inline]
    #[must_use]
    pub fn words64(&self, offset: usize, count: usize) -> &[AtomicU64] {
        let first = self.place_of(offset, size_of::<u64>());
        assert!(count <= (self.len - offset) / size_of::<u64>(), "{count} words of 8 bytes at {offset:#x}");
        // SAFETY: aligned and inside the mapping, which lives as long as `self`.
        unsafe { std::slice::from_raw_parts(first.cast(), count) }
    }

    /// Address of an aligned word of `size` bytes in a writable mapping.
    #[inline]
    fn place_of(&self, offset: usize, size: usize) -> *mut u8 {
        let inside = offset.is_multiple_of(size) && size <= self.len && offset <= self.len - size;
        assert!(inside && self.writable, "an aligned word of {size} bytes at {offset:#x}");
        self.base.as_ptr().wrapping_add(offset)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `new` and nothing keeps pointers past our life.
        unsafe { libc::syscall(libc::SYS_munmap, self.base.as_ptr(), self.len) };
    }
}

/// Whether nobody can shrink the file behind `fd`, so that touching a mapping of it cannot fault. Pages of
/// the system's pool of huge pages can be taken out of the middle, and the pool may have no others.
#[must_use]
pub fn cannot_shrink(fd: BorrowedFd<'_>) -> bool {
    has_seals(fd, libc::F_SEAL_SHRINK) && !from_huge_page_pool(fd)
}

fn from_huge_page_pool(fd: BorrowedFd<'_>) -> bool {
    // SAFETY: statfs is plain data and the call fills it.
    unsafe {
        let mut stat: libc::statfs = std::mem::zeroed();
        libc::fstatfs(fd.as_raw_fd(), &raw mut stat) != 0 || stat.f_type == libc::HUGETLBFS_MAGIC
    }
}

/// Whether the file behind `fd` is sealed as by [`Memfd::sealed`]: nobody can change its size, or
/// add a seal.
#[must_use]
pub fn is_sealed(fd: BorrowedFd<'_>) -> bool {
    has_seals(fd, SIZE_AND_SEALS)
}

fn has_seals(fd: BorrowedFd<'_>, wanted: libc::c_int) -> bool {
    // SAFETY: a plain system call on a borrowed descriptor.
    let seals = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
    seals >= 0 && seals & wanted == wanted
}

impl Memfd {
    /// Whether every page has memory behind it, so that touching all of them costs none.
    #[must_use]
    pub fn is_filled(&self) -> bool {
        stat(self.fd.as_fd()).is_ok_and(|stat| stat.st_blocks as u64 * 512 >= self.len as u64)
    }

    /// Wraps a descriptor received from somebody else, taking its size from the system.
    ///
    /// # Errors
    /// What `fstat` reports, and InvalidData where the object may still shrink.
    pub fn from_peer(fd: OwnedFd) -> io::Result<Self> {
        if !cannot_shrink(fd.as_fd()) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "descriptor is not sealed against shrinking",
            ));
        }
        let len = file_len(fd.as_fd())?;
        Ok(Self { fd, len })
    }
}

/// Size of the file behind a descriptor, in bytes.
///
/// # Errors
/// What `fstat` reports.
pub fn file_len(fd: BorrowedFd<'_>) -> io::Result<usize> {
    let stat = stat(fd)?;
    usize::try_from(stat.st_size).map_err(|_| io::ErrorKind::InvalidData.into())
}

pub(crate) fn stat(fd: BorrowedFd<'_>) -> io::Result<libc::stat> {
    // SAFETY: stat is plain data and the call fills it.
    unsafe {
        let mut stat: libc::stat = std::mem::zeroed();
        if libc::fstat(fd.as_raw_fd(), &raw mut stat) != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(stat)
    }
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
    fn words_outside_misaligned_or_read_only_are_refused() {
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
    fn prefault_gives_memory_to_exactly_the_pages_asked_for() {
        let memory = Memfd::new("test", 16 * PAGE + 1).unwrap();
        let mapping = memory.map().unwrap();
        let pages = || stat(memory.as_fd()).unwrap().st_blocks as usize * 512 / PAGE;
        mapping.word32(PAGE).store(7, Ordering::Relaxed);
        mapping.prefault(PAGE, 0).unwrap();
        assert_eq!(pages(), 1);
        mapping.prefault(PAGE + 100, PAGE).unwrap();
        assert_eq!(pages(), 2);
        mapping.touch(3 * PAGE);
        assert_eq!(pages(), 3, "the way of older kernels");
        mapping.prefault(0, mapping.len()).unwrap();
        assert!(memory.is_filled());
        assert_eq!(mapping.word32(PAGE).load(Ordering::Relaxed), 7, "contents stay");
    }

    #[test]
    fn mappings_are_aligned_so_that_huge_pages_fit() {
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
    fn what_is_sealed_is_final() {
        let open = Memfd::new("test", 8192).unwrap();
        let sealed = Memfd::sealed("test", 8192).unwrap();
        assert!(cannot_shrink(open.as_fd()) && cannot_shrink(sealed.as_fd()));
        assert!(!is_sealed(open.as_fd()) && is_sealed(sealed.as_fd()));
        for (memory, seal_added) in [(open, 0), (sealed, -1)] {
            let file = File::from(memory.into_fd());
            for size in [0, 1 << 20] {
                let refused = file.set_len(size).unwrap_err();
                assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
            }
            // SAFETY: a plain system call.
            let added =
                unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_FUTURE_WRITE) };
            assert_eq!(added, seal_added);
        }
    }

    #[test]
    fn a_size_that_no_file_or_no_mapping_can_have_is_an_error() {
        let too_large = Memfd::new("test", usize::MAX).unwrap_err();
        assert_eq!(too_large.raw_os_error(), Some(libc::EFBIG));
        let empty = Memfd::new("test", 0).unwrap().map().unwrap_err();
        assert_eq!(empty.raw_os_error(), Some(libc::EINVAL));
    }

    #[test]
    fn memory_from_the_huge_page_pool_is_refused() {
        // SAFETY: a new descriptor that nobody else owns.
        let fd = unsafe {
            let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | libc::MFD_HUGETLB;
            let raw = libc::memfd_create(c"test".as_ptr(), flags);
            if raw < 0 {
                eprintln!("not run: this kernel has no pool of huge pages");
                return;
            }
            assert_eq!(libc::fcntl(raw, libc::F_ADD_SEALS, libc::F_SEAL_SHRINK), 0);
            OwnedFd::from_raw_fd(raw)
        };
        assert!(!cannot_shrink(fd.as_fd()));
        assert!(Memfd::from_peer(fd).is_err());
    }

    #[test]
    fn an_unsealed_file_is_refused() {
        let file = File::open("/proc/self/exe").unwrap();
        assert!(!is_sealed(file.as_fd()));
        assert!(Memfd::from_peer(file.into()).is_err());
    }
}
