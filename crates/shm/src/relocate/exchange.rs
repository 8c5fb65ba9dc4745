//! Replacing the pages of a range by pages with equal contents, while other threads run.
//!
//! Accesses of other threads wait in the kernel meanwhile ([`Userfault`]); no signal is involved. The replacing thread
//! uses no heap between the first and the last step, because the heap may be a part of the range, and takes no signal,
//! because the handler could access the range.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::FileExt;

use std::time::{Duration, Instant};

use super::progress::Progress;
use crate::userfault::{Faults, Userfault};
use crate::{Mapping, PAGE, mm};

/// How long a page that the kernel uses is waited for. A copy that is under way ends within a millisecond on a running
/// processor; a pin may stay. Accesses to the pages in front of it wait meanwhile.
const PIN_TIMEOUT: Duration = Duration::from_millis(2);

/// Maps `fresh`, shared memory as long as `range`, in place of private anonymous memory.
///
/// # Errors
/// EBUSY if the kernel uses a page: a pinned page would receive data after its replacement. EINVAL for a range of
/// several kinds of memory, or of locked memory. ENOENT if another thread has mapped something else there meanwhile. The
/// range is unchanged then.
pub(super) fn to_shared(
    userfault: &Userfault,
    range: &Range<usize>,
    fresh: Mapping,
    progress: &mut Progress,
) -> io::Result<()> {
    let aside = Mapping::anonymous(range.len())?;
    let pagemap = File::open("/proc/thread-self/pagemap")?;
    let _blocked = BlockedSignals::new();
    let aside_range = aside.base() as usize..aside.base() as usize + range.len();
    userfault.register(&aside_range, Faults::Missing)?;
    // No missing page waits yet, and no other descriptor can make the pages wait.
    userfault.register(range, Faults::WriteProtected)?;
    unshare_pages(range, &pagemap);
    // From here on, other threads' accesses to missing pages wait.
    let result = userfault.register(range, Faults::All).and_then(|()| {
        take_pages(userfault, range, aside_range.start, PIN_TIMEOUT, progress)
            .and_then(|()| userfault.unregister(&aside_range))
            .and_then(|()| copy_present(&aside_range, &pagemap, fresh.base()))
            .and_then(|()| userfault.check_registered(range, Faults::All))
            .and_then(|()| replace(range, fresh))
            // The pages that were moved so far go back. Their addresses are free, because every access waits.
            .inspect_err(|_| return_pages(userfault, &aside_range, range.start, &pagemap))
    });
    if result.is_err() {
        let _ = userfault.unregister(range);
    }
    userfault.wake(range);
    result
}

/// Gives this process pages of its own in place of those that a fork has shared, also of a child that has ended: the kernel
/// moves no page that another process may have mapped (EBUSY) before this one has stored to it. The handlers of
/// `fork` wait for the lock of the list, which the caller holds; only a raw `clone` shares the pages again.
fn unshare_pages(range: &Range<usize>, pagemap: &File) {
    let _ = present_pages(range, pagemap, |pages| {
        // SAFETY: as a store of the same contents to each page. No page is missing, so none is allocated. A failure shows
        // when the pages move.
        unsafe { libc::madvise(pages.start as *mut libc::c_void, pages.len(), libc::MADV_POPULATE_WRITE) };
    });
}

/// Maps private memory with the contents of `range`, a mapping of the file `memory` from `offset` on, in its place. It gets
/// the protection `protection`. The range itself is not accessed: the application may have protected it.
///
/// # Errors
/// Those of `mmap` and of the protection. ENOENT if another thread has mapped something else there meanwhile. The range is
/// unchanged then.
pub(super) fn to_private(
    userfault: &Userfault,
    range: &Range<usize>,
    memory: BorrowedFd<'_>,
    offset: usize,
    protection: libc::c_int,
) -> io::Result<()> {
    let fresh = Mapping::anonymous(range.len())?;
    let _blocked = BlockedSignals::new();
    let result = userfault.register(range, Faults::WriteProtected).and_then(|()| {
        userfault
            .write_protect(range)
            .and_then(|()| copy_data(memory, offset, &fresh))
            .and_then(|()| fresh.protect(protection))
            .and_then(|()| userfault.check_registered(range, Faults::WriteProtected))
            .and_then(|()| replace(range, fresh))
            .inspect_err(|_| _ = userfault.unregister(range))
    });
    userfault.wake(range);
    result
}

/// As [`to_private`], in a process whose only thread is the caller.
pub(super) fn to_private_alone(
    range: &Range<usize>,
    memory: BorrowedFd<'_>,
    offset: usize,
    protection: libc::c_int,
) -> io::Result<()> {
    let fresh = Mapping::anonymous(range.len())?;
    copy_data(memory, offset, &fresh)?;
    fresh.protect(protection)?;
    replace(range, fresh)
}

/// Makes `range` inaccessible.
///
/// # Safety
/// The caller needs its contents no more.
pub(super) unsafe fn forbid(range: &Range<usize>) -> io::Result<()> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: the caller vouches for the range.
    unsafe { mm::mmap(range.start, range.len(), libc::PROT_NONE, flags, -1, 0) }.map(|_| ())
}

/// Moves all pages of `range` to the addresses from `to` on.
///
/// # Errors
/// EBUSY if the kernel uses a page for longer than `patience`.
fn take_pages(
    userfault: &Userfault,
    range: &Range<usize>,
    to: usize,
    patience: Duration,
    progress: &mut Progress,
) -> io::Result<()> {
    let mut done = 0;
    let mut deadline = None;
    while done < range.len() {
        let (moved, result) = userfault.move_pages(&(range.start + done..range.end), to + done);
        done += moved;
        let Err(error) = result else { continue };
        match error.raw_os_error() {
            Some(libc::EBUSY) => progress.pinned += 1,
            // Another thread changes the address space or holds the page's lock. A huge page with a pinned part answers
            // alike.
            Some(libc::EAGAIN) => progress.locked += 1,
            _ => return Err(error),
        }
        if moved != 0 {
            deadline = None;
        }
        if Instant::now() > *deadline.get_or_insert_with(|| Instant::now() + patience) {
            return Err(io::Error::from_raw_os_error(libc::EBUSY));
        }
        // SAFETY: a plain system call.
        unsafe { libc::sched_yield() };
    }
    Ok(())
}

/// Time for pages to go back, whose contents are lost otherwise: a process may have no processor for a while.
const RETURN_TIMEOUT: Duration = Duration::from_secs(10);

/// Moves the pages of `range` back to the addresses from `to` on, as far as these are still registered. Nobody else knows
/// the pages, so the kernel uses none of them for long.
fn return_pages(userfault: &Userfault, range: &Range<usize>, to: usize, pagemap: &File) {
    let mut ignored = Progress::default();
    if take_pages(userfault, range, to, PIN_TIMEOUT, &mut ignored).is_ok() {
        return;
    }
    // A raw `clone` may have shared them.
    unshare_pages(range, pagemap);
    // Pages that went back already are holes now.
    for page in range.clone().step_by(PAGE) {
        let back = to + (page - range.start);
        let _ = take_pages(userfault, &(page..page + PAGE), back, RETURN_TIMEOUT, &mut ignored);
    }
}

/// Pages whose entries [`present_pages`] reads at once, onto the stack.
pub(super) const PAGEMAP_BATCH: usize = 512;

/// Calls `each` for the runs of pages of `range` that exist, as `/proc/thread-self/pagemap` shows them.
fn present_pages(range: &Range<usize>, pagemap: &File, mut each: impl FnMut(Range<usize>)) -> io::Result<()> {
    let mut entries = [0u8; PAGEMAP_BATCH * size_of::<u64>()];
    for batch in range.clone().step_by(PAGEMAP_BATCH * PAGE) {
        let pages = ((range.end - batch) / PAGE).min(PAGEMAP_BATCH);
        let entries = &mut entries[..pages * size_of::<u64>()];
        pagemap.read_exact_at(entries, (batch / PAGE * size_of::<u64>()) as u64)?;
        // Bits 63 and 62 of an entry: present, swapped.
        let exists = |entry: &[u8; 8]| u64::from_ne_bytes(*entry) >> 62 != 0;
        let mut at = batch;
        for run in entries.as_chunks::<8>().0.chunk_by(|a, b| exists(a) == exists(b)) {
            let end = at + run.len() * PAGE;
            if exists(&run[0]) {
                each(at..end);
            }
            at = end;
        }
    }
    Ok(())
}

/// Copies the pages of `range` that exist to the same offsets of `to`. No other thread knows the range.
fn copy_present(range: &Range<usize>, pagemap: &File, to: *mut u8) -> io::Result<()> {
    present_pages(range, pagemap, |pages| {
        // SAFETY: pages of the range; the new mapping is as long.
        unsafe {
            to.add(pages.start - range.start).copy_from_nonoverlapping(pages.start as *const u8, pages.len());
        }
    })
}

/// Copies what the file `memory` has from `offset` on, as far as it has data, to a new mapping.
fn copy_data(memory: BorrowedFd<'_>, offset: usize, to: &Mapping) -> io::Result<()> {
    let end = offset + to.len();
    let seek = |from: usize, whence| {
        // SAFETY: moves the offset of a descriptor, which nobody else uses.
        let at = unsafe { libc::lseek(memory.as_raw_fd(), from as libc::off_t, whence) };
        usize::try_from(at).map_err(|_| io::Error::last_os_error())
    };
    let mut at = offset;
    while at < end {
        let data = match seek(at, libc::SEEK_DATA) {
            Ok(data) if data < end => data,
            Ok(_) => break,
            Err(error) if error.raw_os_error() == Some(libc::ENXIO) => break,
            Err(error) => return Err(error),
        };
        at = seek(data, libc::SEEK_HOLE)?.min(end);
        read(memory, data..at, to.base().wrapping_add(data - offset))?;
    }
    Ok(())
}

/// Reads a range of a file that has it to `to`.
fn read(file: BorrowedFd<'_>, mut range: Range<usize>, mut to: *mut u8) -> io::Result<()> {
    while !range.is_empty() {
        // A direct system call: the C library's function is a thread cancellation point.
        // SAFETY: the caller's new mapping has room for the range, and nobody else knows it.
        let count = unsafe {
            libc::syscall(libc::SYS_pread64, file.as_raw_fd(), to, range.len(), range.start as libc::off_t)
        };
        match usize::try_from(count) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                range.start += count;
                to = to.wrapping_add(count);
            }
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
    Ok(())
}

/// Maps `fresh` in place of the range, in one step.
fn replace(range: &Range<usize>, fresh: Mapping) -> io::Result<()> {
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: the range is memory of this process, and gets a mapping of equal contents.
    let moved = unsafe {
        libc::syscall(libc::SYS_mremap, fresh.base(), range.len(), range.len(), flags, range.start)
    };
    if moved != range.start as i64 {
        return Err(io::Error::last_os_error());
    }
    // The mapping lives on at its new address.
    std::mem::forget(fresh);
    Ok(())
}

/// While it exists, this thread takes no signal.
struct BlockedSignals(libc::sigset_t);

impl BlockedSignals {
    fn new() -> Self {
        // SAFETY: signal sets are plain data; the mask of this thread is restored on drop.
        unsafe {
            let mut all: libc::sigset_t = std::mem::zeroed();
            let mut before: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&raw mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
            Self(before)
        }
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, std::ptr::null_mut()) };
    }
}
