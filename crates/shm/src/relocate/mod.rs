//! Moves private pages into shared memory in place, and back to private memory afterwards.
//!
//! A peer copies at memory speed only into memory that it can map. Applications register private memory from
//! `malloc` or `mmap`. [`move_pages`] moves such pages into a memfd, which is then mapped at the original address.
//! Dropping the last [`SharedPages`] moves them back to private memory: trimmed pages read as zero again, and a later
//! fork copies on write.
//!
//! The rule: only **whole pages inside the registered range** move, and only if the whole range is anonymous
//! read-write memory. If an application registers its own buffer, such pages hold no allocator header and no
//! neighbouring object. Partial pages at the ends do not move. [`crate::process_vm`] copies to and from
//! memory that the rule excludes.
//!
//! Pages move in pieces of 2 MiB, so an access waits for one piece at most, and a move takes little memory. A move
//! that meets pages that cannot move ends in front of them.
//!
//! # No access is lost
//!
//! While pages move, every access to them must wait: loads and stores of other threads, system calls of other threads
//! (`read(2)` into the pages), and copies that peers make through the kernel. `userfaultfd(2)` makes them wait in the
//! kernel (`exchange`). Signals are not involved, because a program may replace any signal handler. Pages that the
//! kernel has pinned for direct or fixed-buffer I/O are detected, and the range stays private.
//!
//! An unprivileged process can only let accesses in user mode wait; a system call that accesses a moving page fails with
//! EFAULT. Such a process moves pages only while the application has a single thread, which is then in
//! [`move_pages`]. So pages move
//!
//! - in a process that may open a full userfaultfd: CAP_SYS_PTRACE, access to `/dev/userfaultfd`, or
//!   `vm.unprivileged_userfaultfd=1`;
//! - in any process whose only other threads are the device's;
//! - with `MILLSTREAM_MOVE=always`, in every process.
//!
//! They never move with `MILLSTREAM_MOVE=0`, nor before Linux 6.8, which cannot detect pinned pages.
//!
//! # Limits
//!
//! - The way back at deregistration does not detect pinned pages. Direct I/O into a buffer must end before the buffer is
//!   deregistered, and fixed buffers that were registered with io_uring after the move must be unregistered.
//! - If the application unmaps a part of the range during the move, and another thread maps new memory there, the new memory
//!   is detected until a microsecond before the pages are replaced.
//! - In an unprivileged process that started threads after the move, a system call of another thread that stores
//!   into the buffer during its deregistration fails with EFAULT.
//! - Registration caches, such as that of UCX, register whole pages with neighbouring objects. They also keep freed memory
//!   registered. So the moving thread uses no heap during the move, and its stack never moves.
//! - *fork*: `fork` gives the child private copies.
//! - Huge pages and NUMA placement of the moved pages are lost. Locked pages (`mlock`) do not move.

mod exchange;
mod fork;

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use millstream_lockfree::{SpinGuard, SpinLock};

use crate::userfault::Userfault;
use crate::{Mapping, Memfd, PAGE, maps, round_up, thread};

/// A range of this process's memory that peers can map.
#[derive(Debug)]
pub struct SharedPages {
    moved: Arc<MovedRange>,
    /// The part of the request that the mapping covers, as addresses.
    pub range: Range<usize>,
    /// Offset in the memfd of `range.start` \[bytes\].
    pub offset: usize,
}

/// Pages that were moved into a memfd. All fields but the memory change under the lock of the list.
#[derive(Debug)]
struct MovedRange {
    memory: Memfd,
    /// The range that is to be moved.
    range: Range<usize>,
    /// Bytes from its start that are shared. It grows while pages move, and shrinks while they move back.
    len: AtomicUsize,
    /// References by which the application uses the pages. Without any, the pages move back and are not shared again.
    users: AtomicUsize,
}

impl MovedRange {
    /// The pages that are shared now.
    fn shared(&self) -> Range<usize> {
        self.range.start..self.range.start + self.len.load(Ordering::Relaxed)
    }
}

/// All moved ranges. They do not overlap. The lock is held while a piece moves.
static MOVED_RANGES: SpinLock<Vec<Arc<MovedRange>>> = SpinLock::new(Vec::new());

/// Held by the thread that moves pages, in either direction.
static MOVING: SpinLock<()> = SpinLock::new(());

/// Bytes that move at once.
const PIECE: usize = 2 << 20;

/// Waits until no other thread moves pages, which can take seconds.
fn begin_moving() -> SpinGuard<'static, ()> {
    loop {
        if let Some(guard) = MOVING.try_lock() {
            return guard;
        }
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Name of the files that pages move to.
const FILE_NAME: &str = "millstream-moved";

/// When pages may move (`MILLSTREAM_MOVE`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MovePolicy {
    /// `0`: never.
    Never,
    /// `used`: when peers have used the region much, if no access can be lost.
    OnceUsed,
    /// The default, and `register`: likewise, but at registration.
    AtRegistration,
    /// `always`: at registration, also when system calls of other threads can fail with EFAULT.
    Always,
}

impl MovePolicy {
    /// The policy of this process. A forked child keeps it.
    fn get() -> Self {
        static POLICY: OnceLock<MovePolicy> = OnceLock::new();
        *POLICY.get_or_init(|| match std::env::var("MILLSTREAM_MOVE").as_deref() {
            Ok("0") => Self::Never,
            Ok("always") => Self::Always,
            Ok("used") => Self::OnceUsed,
            _ => Self::AtRegistration,
        })
    }
}

impl SharedPages {
    /// Identifies the memfd that the range lies in.
    #[must_use]
    pub fn id(&self) -> usize {
        Arc::as_ptr(&self.moved) as usize
    }

    /// Size of the memfd \[bytes\].
    #[must_use]
    pub fn file_len(&self) -> usize {
        self.moved.memory.len()
    }

    /// Whether this is the last reference to the pages, so that dropping it gives the application fresh ones.
    #[must_use]
    pub fn is_last(&self) -> bool {
        self.moved.users.load(Ordering::Relaxed) == 1
    }

    /// The caller holds the lock of the list.
    fn new(moved: &Arc<MovedRange>, range: Range<usize>) -> Self {
        moved.users.fetch_add(1, Ordering::Relaxed);
        let offset = range.start - moved.range.start;
        Self { moved: moved.clone(), range, offset }
    }
}

impl AsFd for SharedPages {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.moved.memory.as_fd()
    }
}

/// Pages inside `range` that an earlier call moved. If only a part of the range was moved, the result covers that part.
fn find_in(moved_ranges: &[Arc<MovedRange>], range: Range<usize>) -> Option<SharedPages> {
    let in_use = || moved_ranges.iter().filter(|moved| moved.users.load(Ordering::Relaxed) != 0);
    // If the pages are shared already, the result covers the range to the byte. Every registration then maps
    // a word alike, which atomic operations need.
    let around = |moved: &&Arc<MovedRange>| {
        let shared = moved.shared();
        shared.start <= range.start && range.end <= shared.end
    };
    if let Some(moved) = in_use().find(around) {
        return Some(SharedPages::new(moved, range));
    }
    let inner = whole_pages(&range);
    let overlap = |moved: &Arc<MovedRange>| {
        let shared = moved.shared();
        let part = shared.start.max(inner.start)..shared.end.min(inner.end);
        (part.start < part.end).then_some(part)
    };
    let (moved, part) = in_use().filter_map(|m| Some((m, overlap(m)?))).max_by_key(|(_, part)| part.len())?;
    Some(SharedPages::new(moved, part))
}

/// Pages inside `range` that were moved already, without moving any.
#[must_use]
pub fn find_moved(range: Range<usize>) -> Option<SharedPages> {
    if range.is_empty() {
        return None;
    }
    find_in(&MOVED_RANGES.lock(), range)
}

/// Whether [`move_pages`] moves pages in this process while it has several threads.
#[must_use]
pub fn is_available() -> bool {
    match MovePolicy::get() {
        MovePolicy::Never => false,
        MovePolicy::AtRegistration | MovePolicy::OnceUsed => Userfault::for_all_accesses().is_ok(),
        MovePolicy::Always => true,
    }
}

/// Whether pages ever move in this process (not with `MILLSTREAM_MOVE=0`).
#[must_use]
pub fn is_enabled() -> bool {
    MovePolicy::get() != MovePolicy::Never
}

/// Whether a descriptor is the file of moved pages, of this process or of another one. Such pages move back to private
/// memory when nobody holds their [`SharedPages`], so the file alone does not stay the memory of an address.
#[must_use]
pub fn is_moved_file(fd: BorrowedFd<'_>) -> bool {
    let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
    // Without /proc no file behind an address is found either.
    std::fs::read_link(link).is_ok_and(|target| {
        target
            .to_str()
            .and_then(|name| name.strip_prefix("/memfd:"))
            .is_some_and(|name| name.strip_suffix(" (deleted)").unwrap_or(name) == FILE_NAME)
    })
}

/// Whether pages move when they are registered (`MILLSTREAM_MOVE=register` or `always`).
#[must_use]
pub fn moves_at_registration() -> bool {
    matches!(MovePolicy::get(), MovePolicy::AtRegistration | MovePolicy::Always)
}

/// The whole pages inside a range; empty or reversed if there is none.
fn whole_pages(range: &Range<usize>) -> Range<usize> {
    round_up(range.start, PAGE)..range.end & !(PAGE - 1)
}

/// Makes the whole pages inside `range` shared, if the rule above allows it. Pages that an earlier call moved
/// are shared again. If some pages cannot move, the result covers the pages in front of them. The caller makes sure that no
/// thread unmaps the range meanwhile.
///
/// # Errors
/// EPERM if an access of another thread could be lost, or with `MILLSTREAM_MOVE=0`. EINVAL for memory that
/// the rule excludes. EBUSY for pages that the kernel uses. Those of memory allocation and `userfaultfd`.
pub fn move_pages(range: Range<usize>) -> io::Result<SharedPages> {
    move_pages_while(range, || true)
}

/// As [`move_pages`], as long as `goes_on` answers true, which is asked before each piece.
///
/// # Errors
/// As [`move_pages`]; ECANCELED if the first answer is false.
pub fn move_pages_while(range: Range<usize>, goes_on: impl Fn() -> bool) -> io::Result<SharedPages> {
    let error = io::Error::from_raw_os_error;
    fork::install_handlers();
    if range.is_empty() {
        return Err(error(libc::EINVAL));
    }
    let _moving = begin_moving();
    if let Some(shared) = find_moved(range.clone()) {
        return Ok(shared);
    }
    let inner = whole_pages(&range);
    if inner.start >= inner.end {
        return Err(error(libc::EINVAL));
    }
    let userfault = match (MovePolicy::get(), Userfault::for_all_accesses()) {
        (MovePolicy::Never, _) => return Err(error(libc::EPERM)),
        (_, Ok(userfault)) => userfault,
        (MovePolicy::Always, Err(_)) => Userfault::for_user_mode()?,
        (_, Err(_)) if !thread::is_alone() => return Err(error(libc::EPERM)),
        (_, Err(_)) => Userfault::for_user_mode()?,
    };
    let areas = maps::vmas(inner.clone())?;
    let on_the_stack = 0u8;
    // SAFETY: the address of this thread's errno, which system calls store to.
    let used = [(&raw const on_the_stack).addr(), unsafe { libc::__errno_location() }.addr()];
    let fits =
        |a: &maps::Vma| a.writable && a.anonymous && !a.shared && !used.iter().any(|at| a.range.contains(at));
    if !maps::covers(&areas, &inner) || !areas.iter().all(fits) {
        return Err(error(libc::EINVAL));
    }
    // Peers get the descriptor, and must not seal it against each other.
    let memory = Memfd::sealed(FILE_NAME, inner.len())?;
    let moved = Arc::new(MovedRange {
        memory,
        range: inner.clone(),
        len: AtomicUsize::new(0),
        users: AtomicUsize::new(0),
    });
    MOVED_RANGES.lock().push(moved.clone());
    let mut result = Ok(());
    for start in inner.clone().step_by(PIECE) {
        result = if goes_on() {
            move_piece(&userfault, &moved, start..inner.end.min(start + PIECE))
        } else {
            Err(error(libc::ECANCELED))
        };
        if result.is_err() {
            break;
        }
    }
    let mut moved_ranges = MOVED_RANGES.lock();
    if let (true, Err(error)) = (moved.shared().is_empty(), result) {
        moved_ranges.retain(|other| !Arc::ptr_eq(other, &moved));
        return Err(error);
    }
    Ok(SharedPages::new(&moved, moved.shared()))
}

/// Moves the pages of `piece`, which follow those that were moved before.
fn move_piece(userfault: &Userfault, moved: &MovedRange, piece: Range<usize>) -> io::Result<()> {
    let offset = piece.start - moved.range.start;
    let fresh = Mapping::new(moved.memory.as_fd(), offset, piece.len(), true)?;
    // Before the accesses wait. A large range may be mostly untouched.
    let _ = fresh.prefault(0, piece.len().min(crate::population_limit().saturating_sub(offset)));
    // A fork finds the piece at one of its places.
    let _list = MOVED_RANGES.lock();
    exchange::to_shared(userfault, &piece, fresh)?;
    moved.len.fetch_add(piece.len(), Ordering::Relaxed);
    Ok(())
}

/// Moves pages back to private memory, from the last piece to the first.
fn move_back(moved: &MovedRange) {
    let Ok(userfault) = Userfault::for_all_accesses().or_else(|_| Userfault::for_user_mode()) else {
        return;
    };
    let Ok(me) = rustix::fs::fstat(&moved.memory) else { return };
    let (start, len) = (moved.range.start, moved.shared().len());
    for offset in (0..len).step_by(PIECE).rev() {
        let piece = start + offset..start + len.min(offset + PIECE);
        // The application may have unmapped or replaced some pages; only pages of the memfd move.
        let areas = maps::vmas(piece.clone()).unwrap_or_default();
        let list = MOVED_RANGES.lock();
        let mut result = Ok(());
        for area in areas.iter().filter(|area| area.inode == me.st_ino && area.shared) {
            let part = area.range.start.max(piece.start)..area.range.end.min(piece.end);
            let offset = area.offset as usize + (part.start - area.range.start);
            let done = exchange::to_private(&userfault, &part, moved.memory.as_fd(), offset);
            result = result.and(done);
        }
        moved.len.store(offset, Ordering::Relaxed);
        drop(list);
        match result {
            Ok(()) => moved.memory.punch_hole(offset, piece.len()),
            // Correct, if slower to fork.
            Err(error) => tracing::warn!(
                "pages {:#x}..{:#x} of a deregistered region stay shared memory: {error}",
                piece.start,
                piece.end
            ),
        }
    }
}

impl Drop for SharedPages {
    fn drop(&mut self) {
        {
            let _list = MOVED_RANGES.lock();
            // New references are made only under the lock, and only while there are others.
            if self.moved.users.fetch_sub(1, Ordering::Relaxed) != 1 {
                return;
            }
        }
        let _moving = begin_moving();
        move_back(&self.moved);
        MOVED_RANGES.lock().retain(|moved| !Arc::ptr_eq(moved, &self.moved));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Mapping;
    use std::io::{Read, Write};
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    fn pages(n: usize) -> Mapping {
        exchange::anonymous(n * PAGE).unwrap()
    }

    /// False, with a printed reason, where this process may not move pages.
    fn is_tested() -> bool {
        let tested = is_available();
        if !tested {
            println!("skipped: pages do not move here; run as root, or set vm.unprivileged_userfaultfd=1");
        }
        tested
    }

    #[test]
    fn contents_survive_and_are_shared() {
        if !is_tested() {
            return;
        }
        let memory = pages(4);
        let base = memory.base() as usize;
        // SAFETY: within the four pages, here and below.
        unsafe { memory.base().add(5000).write(42) };
        let shared = move_pages(base + 100..base + 4 * PAGE - 100).unwrap();
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
        if !is_tested() {
            return;
        }
        let memory = pages(4);
        let base = memory.base() as usize;
        let a = move_pages(base..base + 4 * PAGE).unwrap();
        let b = move_pages(base + PAGE..base + 2 * PAGE).unwrap();
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
        if !is_tested() {
            return;
        }
        let memory = pages(3);
        let base = memory.base() as usize;
        assert!(move_pages(base + 8..base + 16).is_err(), "not for a part of a page");
        let whole = move_pages(base..base + 3 * PAGE).unwrap();
        assert!(whole.is_last());
        let part = move_pages(base + PAGE + 8..base + PAGE + 16).unwrap();
        assert_eq!((part.range.clone(), part.offset), (base + PAGE + 8..base + PAGE + 16, PAGE + 8));
        assert!(!whole.is_last() && move_pages(base..base).is_err());
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
        let text = move_pages as *const () as usize;
        assert!(move_pages(text & !(PAGE - 1)..(text & !(PAGE - 1)) + PAGE).is_err());
        let small = [0u8; 64];
        assert!(move_pages(small.as_ptr() as usize..small.as_ptr() as usize + 64).is_err());
    }

    #[test]
    fn no_store_is_lost_while_pages_move() {
        if !is_tested() {
            return;
        }
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
            let shared = move_pages(base..base + 64 * PAGE).unwrap();
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
        if !is_tested() {
            return;
        }
        let memory = pages(2);
        let base = memory.base();
        // SAFETY: inside the two pages; the child only stores, waits and exits.
        unsafe {
            base.write(1);
            let _shared = move_pages(base as usize..base as usize + 2 * PAGE).unwrap();
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
    fn moved_pages_are_allocated_and_keep_their_contents() {
        if !is_tested() {
            return;
        }
        const PAGES: usize = 3 * exchange::PAGEMAP_BATCH + 7;
        let memory = pages(PAGES);
        let written = [0, exchange::PAGEMAP_BATCH - 1, exchange::PAGEMAP_BATCH, PAGES - 1];
        for page in written {
            // SAFETY: within the pages, here and below.
            unsafe { memory.base().add(page * PAGE + 9).write_volatile(page as u8 | 1) };
        }
        let base = memory.base() as usize;
        let shared = move_pages(base..base + PAGES * PAGE).unwrap();
        assert!(shared.moved.memory.is_fully_allocated());
        let check = |turn: &str| {
            for page in 0..PAGES {
                let expected = if written.contains(&page) { page as u8 | 1 } else { 0 };
                // SAFETY: as above.
                let found = unsafe { memory.base().add(page * PAGE + 9).read_volatile() };
                assert_eq!(found, expected, "page {page}, {turn}");
            }
        };
        check("shared");
        drop(shared);
        check("private again");
    }

    #[test]
    fn locked_pages_stay() {
        let memory = pages(2);
        let base = memory.base() as usize;
        // SAFETY: this test's pages.
        if unsafe { libc::mlock(memory.base().cast(), 2 * PAGE) } == 0 {
            assert!(move_pages(base..base + 2 * PAGE).is_err());
        }
        // SAFETY: as above.
        unsafe { memory.base().add(PAGE).write_volatile(3) };
    }

    #[test]
    fn pages_that_the_kernel_has_pinned_stay() {
        if !is_tested() {
            return;
        }
        use std::os::fd::FromRawFd;
        /// `IORING_REGISTER_BUFFERS` (linux/io_uring.h).
        const REGISTER_BUFFERS: u32 = 0;
        let memory = pages(8);
        let base = memory.base() as usize;
        for page in 0..8 {
            // SAFETY: within the pages, here and below.
            unsafe { memory.base().add(page * PAGE).write_volatile(page as u8 + 1) };
        }
        // The parameters of a ring, all zero.
        let mut parameters = [0u64; 15];
        // SAFETY: makes a new descriptor; the parameters take 120 bytes.
        let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 4, parameters.as_mut_ptr()) };
        if ring < 0 {
            println!("skipped: io_uring is not available: {}", io::Error::last_os_error());
            return;
        }
        // SAFETY: a new descriptor.
        let ring = unsafe { std::os::fd::OwnedFd::from_raw_fd(ring as i32) };
        let fixed = libc::iovec { iov_base: memory.base().wrapping_add(5 * PAGE).cast(), iov_len: PAGE };
        let fd = std::os::fd::AsRawFd::as_raw_fd(&ring);
        // SAFETY: one buffer, a page of this test.
        let registered =
            unsafe { libc::syscall(libc::SYS_io_uring_register, fd, REGISTER_BUFFERS, &raw const fixed, 1) };
        assert_eq!(registered, 0, "{}", io::Error::last_os_error());
        let refused = move_pages(base..base + 8 * PAGE).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EBUSY));
        for page in 0..8 {
            // SAFETY: as above.
            assert_eq!(unsafe { memory.base().add(page * PAGE).read_volatile() }, page as u8 + 1);
        }
        drop(ring);
        // The kernel unpins the pages soon after the ring's end.
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while move_pages(base..base + 8 * PAGE).is_err() {
            assert!(std::time::Instant::now() < deadline, "the pages stay pinned");
            std::thread::yield_now();
        }
    }

    #[test]
    fn system_calls_wait_while_pages_move() {
        if !is_tested() {
            return;
        }
        let memory = Arc::new(pages(64));
        let stop = Arc::new(AtomicBool::new(false));
        let (mut reader, writer) = std::io::pipe().unwrap();
        let reading = {
            let (memory, stop) = (memory.clone(), stop.clone());
            std::thread::spawn(move || {
                let mut reads = 0u32;
                while !stop.load(Ordering::Relaxed) {
                    (&writer).write_all(&[reads as u8; 8]).unwrap();
                    let at = memory.base().wrapping_add(reads as usize % 64 * PAGE);
                    // SAFETY: eight bytes of a page of the mapping.
                    let into = unsafe { std::slice::from_raw_parts_mut(at, 8) };
                    reader.read_exact(into).expect("no read fails");
                    // SAFETY: as above.
                    assert_eq!(unsafe { at.add(7).read_volatile() }, reads as u8);
                    reads += 1;
                }
                reads
            })
        };
        let base = memory.base() as usize;
        for _ in 0..200 {
            drop(move_pages(base..base + 64 * PAGE).unwrap());
        }
        stop.store(true, Ordering::Relaxed);
        assert!(reading.join().unwrap() > 0);
    }

    #[test]
    fn no_signal_handler_is_installed() {
        if !is_tested() {
            return;
        }
        let handler = || {
            // SAFETY: reads the disposition of a signal.
            unsafe {
                let mut action: libc::sigaction = std::mem::zeroed();
                libc::sigaction(libc::SIGSEGV, std::ptr::null(), &raw mut action);
                action.sa_sigaction
            }
        };
        let before = handler();
        let memory = pages(2);
        let base = memory.base() as usize;
        let _shared = move_pages(base..base + 2 * PAGE).unwrap();
        assert_eq!(handler(), before);
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
        if !is_tested() {
            return;
        }
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
                assert!(move_pages(start..end).is_ok());
            }
            assert!([before, after, last].iter().flatten().all(|byte| *byte == 7));
        });
    }

    #[test]
    fn a_stack_that_is_in_use_stays() {
        ends(|| {
            let block = [7u8; 8 * PAGE];
            let start = block.as_ptr().addr();
            assert!(move_pages(start..start + block.len()).is_err());
            assert!(block.iter().all(|byte| *byte == 7));
        });
    }
}
