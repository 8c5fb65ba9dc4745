//! Mapped files that another process may truncate: an access behind the new end raises SIGBUS, whose default action ends
//! the process without a reason.
//!
//! A [`TruncationWatch`] keeps the process alive. The signal handler maps zeros in place of the missing page and notes the
//! truncation; the owner asks [`TruncationWatch::is_truncated`] and ends with an error that names the file. Accesses of the
//! kernel to such pages fail with EFAULT and raise no signal.

use std::ffi::{c_int, c_void};
use std::io;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

use crate::PAGE;

/// Most ranges that are watched at a time.
const MAX_WATCHES: usize = 64;

/// A watched range. Signal handlers read it, so it holds atomics only.
struct Range {
    /// First byte; zero: free; one: being changed.
    start: AtomicUsize,
    len: AtomicUsize,
    truncated: AtomicBool,
}

static RANGES: [Range; MAX_WATCHES] = [const {
    Range { start: AtomicUsize::new(0), len: AtomicUsize::new(0), truncated: AtomicBool::new(false) }
}; MAX_WATCHES];

static INSTALL: Once = Once::new();

/// The disposition of SIGBUS before [`TruncationWatch::of`], in memory that is never freed.
static PREVIOUS: AtomicPtr<libc::sigaction> = AtomicPtr::new(std::ptr::null_mut());

/// Watches a mapped file for as long as it lives.
#[derive(Debug)]
pub struct TruncationWatch {
    index: usize,
}

impl TruncationWatch {
    /// Watches a mapping of a file. The bytes must stay mapped while the watch lives.
    ///
    /// # Errors
    /// Too many ranges are watched.
    pub fn of(bytes: &'static [u8]) -> io::Result<TruncationWatch> {
        INSTALL.call_once(install);
        for (index, range) in RANGES.iter().enumerate() {
            let taken = range.start.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed);
            if taken.is_ok() {
                range.truncated.store(false, Ordering::Relaxed);
                range.len.store(bytes.len(), Ordering::Relaxed);
                range.start.store(bytes.as_ptr().addr(), Ordering::Release);
                return Ok(TruncationWatch { index });
            }
        }
        Err(io::Error::other(format!("{MAX_WATCHES} files are watched already")))
    }

    /// Whether an access found a page behind the file's end. Zeros are in its place.
    pub fn is_truncated(&self) -> bool {
        RANGES[self.index].truncated.load(Ordering::Acquire)
    }
}

impl Drop for TruncationWatch {
    fn drop(&mut self) {
        RANGES[self.index].start.store(0, Ordering::Release);
    }
}

/// Installs the handler. Failure leaves the default action.
fn install() {
    // SAFETY: `sigaction` is plain data; the handler has the signature that SA_SIGINFO requires.
    unsafe {
        let mut previous: Box<libc::sigaction> = Box::new(std::mem::zeroed());
        if libc::sigaction(libc::SIGBUS, std::ptr::null(), &raw mut *previous) != 0 {
            return;
        }
        PREVIOUS.store(Box::into_raw(previous), Ordering::Release);
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handle as extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigemptyset(&raw mut action.sa_mask);
        libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut());
    }
}

/// Maps a page of zeros where a watched file has ended. Any other fault meets the previous disposition: it is restored,
/// and the access raises the signal again.
extern "C" fn handle(signal: c_int, info: *mut libc::siginfo_t, _context: *mut c_void) {
    // SAFETY: the system passes a valid description of the fault.
    let address = unsafe { (*info).si_addr() }.addr();
    let watched = RANGES.iter().find(|range| {
        let start = range.start.load(Ordering::Acquire);
        start > 1 && address.wrapping_sub(start) < range.len.load(Ordering::Relaxed).next_multiple_of(PAGE)
    });
    if let Some(range) = watched {
        let page = address / PAGE * PAGE;
        // SAFETY: `mmap` is a plain system call here, so it may be called in a handler. The page belongs to the watched
        // mapping, whose owner keeps it; nothing else is at this address.
        let mapped = unsafe {
            libc::mmap(
                std::ptr::without_provenance_mut(page),
                PAGE,
                libc::PROT_READ,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
                -1,
                0,
            )
        };
        if mapped != libc::MAP_FAILED {
            range.truncated.store(true, Ordering::Release);
            return;
        }
    }
    // SAFETY: `sigaction` may be called in a handler; the previous disposition is never freed.
    unsafe { libc::sigaction(signal, PREVIOUS.load(Ordering::Acquire), std::ptr::null_mut()) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;
    use std::os::fd::AsFd as _;

    #[test]
    fn a_truncated_file_reads_as_zeros_and_is_noticed() {
        let path = std::env::temp_dir().join(format!("millstream-truncated-{}", std::process::id()));
        let mut file =
            std::fs::OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        file.write_all(&[7; 4 * PAGE]).unwrap();
        // SAFETY: a new mapping of a file; it stays mapped for the rest of the process.
        let bytes: &'static [u8] = unsafe {
            let flags = rustix::mm::MapFlags::SHARED;
            let read = rustix::mm::ProtFlags::READ;
            let at = rustix::mm::mmap(std::ptr::null_mut(), 4 * PAGE, read, flags, file.as_fd(), 0).unwrap();
            std::slice::from_raw_parts(at.cast(), 4 * PAGE)
        };
        let watch = TruncationWatch::of(bytes).unwrap();
        assert_eq!((bytes[3 * PAGE], watch.is_truncated()), (7, false));
        file.set_len(PAGE as u64).unwrap();
        // SAFETY: the byte is mapped; the read must not be taken from the one above.
        let byte = unsafe { bytes.as_ptr().add(3 * PAGE).read_volatile() };
        assert_eq!((byte, bytes[0], watch.is_truncated()), (0, 7, true));
    }
}
