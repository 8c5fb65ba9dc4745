//! Moves private pages into shared memory in place, and back to private memory afterwards.
//!
//! A peer copies at memory speed only into memory that it can map. Applications register private memory from
//! `malloc` or `mmap`. [`share`] moves such pages into a memfd, which is then mapped at the original address.
//! Dropping [`Shared`] moves them back to private memory: trimmed pages read as zero again, and a later fork
//! copies on write.
//!
//! The rule: only **whole pages inside the registered range** move, and only if the whole range is anonymous
//! read-write memory. If an application registers its own buffer, such pages hold no allocator header and no
//! neighbouring object. Partial pages at the ends do not move. [`crate::process_vm`] copies to and from
//! memory that the rule excludes.
//!
//! Hazards and countermeasures:
//! - *A thread stores to the pages while they move.* They are read-only during the move. The store faults,
//!   and a SIGSEGV handler makes the thread wait and retry. The handler is installed at the first move and
//!   passes every other fault to the handler before it.
//! - *The kernel stores to the pages while they move* (`read(2)` by another thread). The system call fails
//!   with EFAULT. A program that reads into a buffer while it registers or deregisters the buffer must set
//!   `MILLSTREAM_MOVE=0`.
//! - *The range holds more than the application's buffer.* Registration caches, such as that of UCX, register
//!   whole pages with neighbouring objects. They also keep freed memory registered. So the moving thread uses
//!   no heap during the move, and its stack never moves.
//! - *fork*: the child would share the pages. Fork handlers give the child private copies. The forking thread
//!   continues only after that, so that the child has the contents at the fork. Concurrent stores of other
//!   threads and peers may be in the copy or not. A raw `clone` bypasses the handlers.
//! - *Page attributes*: mlock, huge pages and NUMA placement of the moved pages are lost.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::sync::{Arc, Once};

use millstream_lockfree::SpinLock;

use crate::{Mapping, Memfd, PAGE, maps, round_up};

/// A range of this process's memory that peers can map.
#[derive(Debug)]
pub struct Shared {
    moved: Arc<Moved>,
    /// The part of the request that the mapping covers, as addresses.
    pub range: Range<usize>,
    /// Offset in the memfd of `range.start`, bytes.
    pub offset: usize,
}

impl Shared {
    /// Identifies the memfd that the range lies in.
    #[must_use]
    pub fn id(&self) -> usize {
        Arc::as_ptr(&self.moved) as usize
    }
}

impl Shared {
    /// Whether this is the last reference to the pages, so that dropping it gives the application fresh ones.
    #[must_use]
    pub fn is_last(&self) -> bool {
        // This reference and the registry's.
        Arc::strong_count(&self.moved) <= 2
    }
}

impl AsFd for Shared {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.moved.memory.as_fd()
    }
}

#[derive(Debug)]
struct Moved {
    memory: Memfd,
    range: Range<usize>,
}

static REGISTRY: SpinLock<Vec<Arc<Moved>>> = SpinLock::new(Vec::new());

/// Makes the whole pages inside `range` shared, if the rule above allows it. Pages that an earlier call moved
/// are shared again. If only a part of the range was moved, the result covers that part.
#[must_use]
pub fn share(range: Range<usize>) -> Option<Shared> {
    let inner = round_up(range.start, PAGE)..range.end & !(PAGE - 1);
    if range.is_empty() || !enabled() {
        return None;
    }
    install();
    let mut registry = REGISTRY.lock();
    // If the pages are shared already, the result covers the range to the byte. Every registration then maps
    // a word alike, which atomic operations need.
    let around = |moved: &&Arc<Moved>| moved.range.start <= range.start && range.end <= moved.range.end;
    if let Some(moved) = registry.iter().find(around) {
        let offset = range.start - moved.range.start;
        return Some(Shared { moved: moved.clone(), range, offset });
    }
    if inner.start >= inner.end {
        return None;
    }
    let overlap = |moved: &Arc<Moved>| {
        let part = moved.range.start.max(inner.start)..moved.range.end.min(inner.end);
        (part.start < part.end).then_some(part)
    };
    if let Some((moved, part)) =
        registry.iter().filter_map(|m| Some((m, overlap(m)?))).max_by_key(|(_, part)| part.len())
    {
        let offset = part.start - moved.range.start;
        return Some(Shared { moved: moved.clone(), range: part, offset });
    }
    let areas = maps::vmas(inner.clone()).ok()?;
    let on_the_stack = 0u8;
    let stack = (&raw const on_the_stack).addr();
    let fits = |a: &maps::Vma| a.writable && a.anonymous && !a.shared && !a.range.contains(&stack);
    if !maps::covers(&areas, &inner) || !areas.iter().all(fits) {
        return None;
    }
    // Peers get the descriptor, and must not seal it against each other.
    let memory = Memfd::sealed("millstream-moved", inner.len()).ok()?;
    let fresh = memory.map().ok()?;
    replace(&inner, fresh, Contents::Written).ok()?;
    let moved = Arc::new(Moved { memory, range: inner.clone() });
    registry.push(moved.clone());
    Some(Shared { moved, range: inner, offset: 0 })
}

fn enabled() -> bool {
    std::env::var_os("MILLSTREAM_MOVE").is_none_or(|v| v != "0")
}

impl Drop for Shared {
    fn drop(&mut self) {
        let mut registry = REGISTRY.lock();
        // Two references, this one and the registry's: no other one shares these pages. New references are
        // made only under the lock.
        if Arc::strong_count(&self.moved) > 2 {
            return;
        }
        registry.retain(|moved| !Arc::ptr_eq(moved, &self.moved));
        // The application may have unmapped or replaced some pages; only pages of the memfd move.
        let Ok(me) = rustix::fs::fstat(&self.moved.memory) else { return };
        for area in maps::vmas(self.moved.range.clone()).unwrap_or_default() {
            if area.inode != me.st_ino || !area.shared {
                continue;
            }
            let part = area.range.start.max(self.moved.range.start)..area.range.end.min(self.moved.range.end);
            // On failure the pages stay shared: correct, if slower to fork.
            let _ = private(part.len()).and_then(|fresh| replace(&part, fresh, Contents::All));
        }
    }
}

/// A private anonymous mapping, to be moved over another one.
fn private(len: usize) -> io::Result<Mapping> {
    let fd = -1;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let address = unsafe {
        libc::syscall(libc::SYS_mmap, 0usize, len, libc::PROT_READ | libc::PROT_WRITE, flags, fd, 0)
    };
    if address == -1 {
        return Err(io::Error::last_os_error());
    }
    Ok(Mapping::from_raw(address as *mut u8, len))
}

/// Which pages of a range [`replace`] copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Contents {
    /// Every page.
    All,
    /// Only pages that were ever written. Moving a large untouched buffer then allocates no pages.
    Written,
}

/// Pages whose entries [`copy_written`] reads at once.
const PAGEMAP_BATCH: usize = 512;

/// Copies the pages of `range` that were ever written to the same offsets of `to`, as `/proc/self/pagemap` (opened as
/// `pagemap`) shows them. The entries are kept on the stack, because the heap may be a part of the range.
///
/// # Safety
/// The range is readable and no thread stores to it; `to` has room for it.
unsafe fn copy_written(range: &Range<usize>, pagemap: Option<&File>, to: *mut u8) {
    let mut entries = [0u8; PAGEMAP_BATCH * size_of::<u64>()];
    for batch in range.clone().step_by(PAGEMAP_BATCH * PAGE) {
        let pages = ((range.end - batch) / PAGE).min(PAGEMAP_BATCH);
        let entries = &mut entries[..pages * size_of::<u64>()];
        let at = (batch / PAGE * size_of::<u64>()) as u64;
        let known = pagemap.is_some_and(|pagemap| pagemap.read_exact_at(entries, at).is_ok());
        for (page, entry) in (batch..range.end).step_by(PAGE).zip(entries.as_chunks::<8>().0) {
            // Bits 63 and 62 of an entry: present, swapped.
            if !known || u64::from_ne_bytes(*entry) >> 62 != 0 {
                // SAFETY: the caller vouches for both ranges.
                unsafe { to.add(page - range.start).copy_from_nonoverlapping(page as *const u8, PAGE) };
            }
        }
    }
}

/// Copies the `contents` of `range` into `fresh` and maps `fresh` in place of the range. Called under the
/// registry's lock. It must not use the heap between the first and the last system call: the thread would wait for its
/// own move.
fn replace(range: &Range<usize>, fresh: Mapping, contents: Contents) -> io::Result<()> {
    let pagemap = match contents {
        Contents::All => None,
        Contents::Written => File::open("/proc/self/pagemap").ok(),
    };
    MOVING_END.store(range.end, Ordering::Relaxed);
    MOVING_START.store(range.start, Ordering::SeqCst);
    // SAFETY: the range is mapped memory of this process; it stays readable and its contents do
    // not change. The last call replaces it in one step with a mapping of equal contents.
    let result = unsafe {
        let protect = |prot: i32| libc::syscall(libc::SYS_mprotect, range.start, range.len(), prot);
        if protect(libc::PROT_READ) == 0 {
            // After the protection: a page that a thread writes for the first time before it counts as written.
            copy_written(range, pagemap.as_ref(), fresh.base());
            let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            let moved =
                libc::syscall(libc::SYS_mremap, fresh.base(), range.len(), range.len(), flags, range.start);
            if moved == range.start as i64 {
                // The mapping lives on at its new address.
                std::mem::forget(fresh);
                Ok(())
            } else {
                let error = io::Error::last_os_error();
                protect(libc::PROT_READ | libc::PROT_WRITE);
                Err(error)
            }
        } else {
            let error = io::Error::last_os_error();
            protect(libc::PROT_READ | libc::PROT_WRITE);
            Err(error)
        }
    };
    LAST_START.store(range.start, Ordering::Relaxed);
    LAST_END.store(range.end, Ordering::Relaxed);
    RETRIES.store(0, Ordering::Relaxed);
    MOVING_START.store(0, Ordering::SeqCst);
    result
}

// The range that is being moved, with start zero if none, and the range that was moved last.
static MOVING_START: AtomicUsize = AtomicUsize::new(0);
static MOVING_END: AtomicUsize = AtomicUsize::new(0);
static LAST_START: AtomicUsize = AtomicUsize::new(0);
static LAST_END: AtomicUsize = AtomicUsize::new(0);
/// Faults in the last range after its move. A thread that faulted during the move may enter the handler late.
/// More than a few are real faults of the program.
static RETRIES: AtomicUsize = AtomicUsize::new(0);
const MAX_RETRIES: usize = 4096;

static PREVIOUS: SpinLock<Option<libc::sigaction>> = SpinLock::new(None);
static INSTALL: Once = Once::new();

fn install() {
    INSTALL.call_once(|| {
        // SAFETY: installs a handler that only uses atomics and system calls, and fork handlers.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_fault as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
            let mut previous: libc::sigaction = std::mem::zeroed();
            libc::sigaction(libc::SIGSEGV, &raw const action, &raw mut previous);
            *PREVIOUS.lock() = Some(previous);
            libc::pthread_atfork(Some(before_fork), Some(after_fork_parent), Some(after_fork_child));
        }
    });
}

extern "C" fn on_fault(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo.
    let address = unsafe { (*info).si_addr() } as usize;
    loop {
        let start = MOVING_START.load(Ordering::SeqCst);
        if start == 0 || address < start || address >= MOVING_END.load(Ordering::Relaxed) {
            break;
        }
        // SAFETY: a plain system call.
        unsafe { libc::sched_yield() };
        if MOVING_START.load(Ordering::SeqCst) == 0 {
            return;
        }
    }
    let last = LAST_START.load(Ordering::Relaxed)..LAST_END.load(Ordering::Relaxed);
    if last.contains(&address) && RETRIES.fetch_add(1, Ordering::Relaxed) < MAX_RETRIES {
        return;
    }
    let previous = PREVIOUS.try_lock().and_then(|p| *p);
    // SAFETY: calls the handler before ours with the kernel's arguments, or restores the default: the fault
    // then recurs and ends the process.
    unsafe {
        match previous {
            Some(p) if p.sa_sigaction != libc::SIG_DFL && p.sa_sigaction != libc::SIG_IGN => {
                if p.sa_flags & libc::SA_SIGINFO != 0 {
                    let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) =
                        std::mem::transmute(p.sa_sigaction);
                    handler(signal, info, context);
                } else {
                    let handler: extern "C" fn(i32) = std::mem::transmute(p.sa_sigaction);
                    handler(signal);
                }
            }
            _ => {
                let mut default: libc::sigaction = std::mem::zeroed();
                default.sa_sigaction = libc::SIG_DFL;
                libc::sigaction(libc::SIGSEGV, &raw const default, std::ptr::null_mut());
            }
        }
    }
}

/// The socket pair by which a child reports that it has copied the pages; negative for none. Guarded by the
/// registry's lock, which is held across a fork.
static COPIED: [AtomicI32; 2] = [AtomicI32::new(-1), AtomicI32::new(-1)];

fn close(end: &AtomicI32) {
    let fd = end.swap(-1, Ordering::Relaxed);
    if fd >= 0 {
        // SAFETY: opened in `before_fork` and used only here.
        unsafe { libc::close(fd) };
    }
}

extern "C" fn before_fork() {
    // No move may be in progress, and the child must find a consistent list.
    let registry = REGISTRY.lock();
    if !registry.is_empty() {
        let mut ends = [-1; 2];
        let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
        // SAFETY: fills in two descriptors. Without them the parent does not wait.
        if unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()) } == 0 {
            COPIED.iter().zip(ends).for_each(|(end, fd)| end.store(fd, Ordering::Relaxed));
        }
    }
    std::mem::forget(registry);
}

extern "C" fn after_fork_parent() {
    let [reader, writer] = &COPIED;
    close(writer);
    let fd = reader.load(Ordering::Relaxed);
    if fd >= 0 {
        let mut byte = 0u8;
        // SAFETY: reads one byte into a local.
        let mut read = || unsafe { libc::read(fd, (&raw mut byte).cast(), 1) };
        // The exit of the child, or a failed fork, ends the wait as well.
        while read() < 0 && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted {}
    }
    close(reader);
    // SAFETY: taken in `before_fork` by this thread.
    unsafe { REGISTRY.force_unlock() };
}

extern "C" fn after_fork_child() {
    // SAFETY: taken in `before_fork`; the child has this one thread.
    unsafe { REGISTRY.force_unlock() };
    for moved in REGISTRY.lock().drain(..) {
        if let Ok(fresh) = private(moved.range.len()) {
            let _ = replace(&moved.range, fresh, Contents::All);
        }
        // The child must not undo the parent's moves.
        std::mem::forget(moved);
    }
    let [reader, writer] = &COPIED;
    let fd = writer.load(Ordering::Relaxed);
    if fd >= 0 {
        // SAFETY: sends one byte of a constant. The parent may have exited.
        unsafe { libc::send(fd, c"".as_ptr().cast(), 1, libc::MSG_NOSIGNAL) };
    }
    close(reader);
    close(writer);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicU64};

    fn pages(n: usize) -> Mapping {
        private(n * PAGE).unwrap()
    }

    #[test]
    fn contents_survive_and_are_shared() {
        let memory = pages(4);
        let base = memory.base() as usize;
        // SAFETY: within the four pages, here and below.
        unsafe { memory.base().add(5000).write(42) };
        let shared = share(base + 100..base + 4 * PAGE - 100).unwrap();
        assert_eq!(shared.range, base + PAGE..base + 3 * PAGE);
        let view = Mapping::new(shared.as_fd(), 0, 2 * PAGE, true).unwrap();
        // SAFETY: as above.
        unsafe {
            assert_eq!(view.base().add(5000 - PAGE).read_volatile(), 42);
            view.base().add(1).write_volatile(9);
            assert_eq!(memory.base().add(PAGE + 1).read_volatile(), 9);
            drop(shared);
            assert_eq!(memory.base().add(PAGE + 1).read_volatile(), 9);
            view.base().add(1).write_volatile(10);
            assert_eq!(memory.base().add(PAGE + 1).read_volatile(), 9, "private again");
        }
    }

    #[test]
    fn shared_twice_moves_once() {
        let memory = pages(4);
        let base = memory.base() as usize;
        let a = share(base..base + 4 * PAGE).unwrap();
        let b = share(base + PAGE..base + 2 * PAGE).unwrap();
        assert_eq!((a.id(), b.offset), (b.id(), PAGE));
        drop(a);
        // SAFETY: inside the four pages.
        unsafe { memory.base().add(PAGE).write_volatile(3) };
        let view = Mapping::new(b.as_fd(), 0, 4 * PAGE, true).unwrap();
        // SAFETY: inside the view.
        assert_eq!(unsafe { view.base().add(PAGE).read_volatile() }, 3);
    }

    #[test]
    fn a_part_of_a_shared_page_is_shared() {
        let memory = pages(3);
        let base = memory.base() as usize;
        assert!(share(base + 8..base + 16).is_none(), "not for a part of a page");
        let whole = share(base..base + 3 * PAGE).unwrap();
        assert!(whole.is_last());
        let part = share(base + PAGE + 8..base + PAGE + 16).unwrap();
        assert_eq!((part.range.clone(), part.offset), (base + PAGE + 8..base + PAGE + 16, PAGE + 8));
        assert!(!whole.is_last() && share(base..base).is_none());
        let view = Mapping::new(whole.as_fd(), 0, 3 * PAGE, true).unwrap();
        drop(whole);
        assert!(part.is_last());
        // SAFETY: inside the three pages and their view.
        unsafe {
            view.base().add(PAGE + 9).write_volatile(5);
            assert_eq!(memory.base().add(PAGE + 9).read_volatile(), 5);
        }
    }

    #[test]
    fn what_is_not_plain_memory_stays() {
        let text = share as *const () as usize;
        assert!(share(text & !(PAGE - 1)..(text & !(PAGE - 1)) + PAGE).is_none());
        let small = [0u8; 64];
        assert!(share(small.as_ptr() as usize..small.as_ptr() as usize + 64).is_none());
    }

    #[test]
    fn no_store_is_lost_while_pages_move() {
        let memory = Arc::new(pages(64));
        let stop = Arc::new(AtomicBool::new(false));
        let written = Arc::new(AtomicU64::new(0));
        let writer = {
            let (memory, stop, written) = (memory.clone(), stop.clone(), written.clone());
            std::thread::spawn(move || {
                let mut n = 0u64;
                while !stop.load(Ordering::Relaxed) {
                    n += 1;
                    for page in 0..64 {
                        // SAFETY: the first eight bytes of each page of the mapping.
                        unsafe { memory.base().add(page * PAGE).cast::<u64>().write_volatile(n) };
                    }
                }
                written.store(n, Ordering::SeqCst);
            })
        };
        let base = memory.base() as usize;
        for _ in 0..200 {
            let shared = share(base..base + 64 * PAGE).unwrap();
            std::thread::yield_now();
            drop(shared);
        }
        stop.store(true, Ordering::Relaxed);
        writer.join().unwrap();
        for page in 0..64 {
            // SAFETY: as above.
            let value = unsafe { memory.base().add(page * PAGE).cast::<u64>().read_volatile() };
            assert_eq!(value, written.load(Ordering::SeqCst), "page {page}");
        }
    }

    #[test]
    fn a_forked_child_has_its_own_copy() {
        let memory = pages(2);
        let base = memory.base();
        // SAFETY: inside the two pages; the child only stores, waits and exits.
        unsafe {
            base.write(1);
            let _shared = share(base as usize..base as usize + 2 * PAGE).unwrap();
            let child = libc::fork();
            if child == 0 {
                libc::usleep(20_000);
                let seen = base.read_volatile();
                base.write_volatile(3);
                libc::_exit(i32::from(seen != 1));
            }
            base.write_volatile(2);
            let mut status = 0;
            libc::waitpid(child, &raw mut status, 0);
            assert_eq!(status, 0, "the child sees the contents as they were at the fork");
            assert_eq!(base.read_volatile(), 2, "the child's store stays in the child");
        }
    }

    #[test]
    fn pages_that_were_never_written_take_no_memory() {
        const PAGES: usize = 3 * PAGEMAP_BATCH + 7;
        let memory = pages(PAGES);
        let written = [0, PAGEMAP_BATCH - 1, PAGEMAP_BATCH, PAGES - 1];
        for page in written {
            // SAFETY: within the pages, here and below.
            unsafe { memory.base().add(page * PAGE + 9).write_volatile(page as u8 | 1) };
        }
        let base = memory.base() as usize;
        let shared = share(base..base + PAGES * PAGE).unwrap();
        let allocated = rustix::fs::fstat(&shared.moved.memory).unwrap().st_blocks as usize * 512 / PAGE;
        assert_eq!(allocated, written.len());
        for page in written {
            // SAFETY: as above.
            assert_eq!(unsafe { memory.base().add(page * PAGE + 9).read_volatile() }, page as u8 | 1);
        }
    }

    /// Runs a test in another thread, and fails if it does not end in time.
    fn ends(test: impl FnOnce() + Send + 'static) {
        let (end, ended) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            test();
            end.send(()).unwrap();
        });
        ended.recv_timeout(std::time::Duration::from_secs(60)).expect("the move ends");
    }

    #[test]
    fn pages_of_the_heap_move_with_what_moving_them_uses() {
        ends(|| {
            // Freed chunks of these sizes are what the allocator returns next.
            let around = || vec![7u8; 16 * PAGE];
            let (before, inside, after) = (around(), (1..400).map(|n| vec![0u8; n]), around());
            let inside: Vec<Vec<u8>> = inside.collect();
            let last = around();
            let starts = [&before, &after, &last].map(|block| block.as_ptr().addr());
            let start = *starts.iter().min().unwrap();
            let end = *starts.iter().max().unwrap() + 16 * PAGE;
            drop(inside);
            for _ in 0..20 {
                assert!(share(start..end).is_some());
            }
            assert!([before, after, last].iter().flatten().all(|byte| *byte == 7));
        });
    }

    #[test]
    fn a_stack_that_is_in_use_stays() {
        ends(|| {
            let block = [7u8; 8 * PAGE];
            let start = block.as_ptr().addr();
            assert!(share(start..start + block.len()).is_none());
            assert!(block.iter().all(|byte| *byte == 7));
        });
    }
}
