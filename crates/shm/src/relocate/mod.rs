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
//! - *fork*: `fork` gives the child private copies, or no such pages after [`hide_from_children`].
//! - What `madvise` has set for the range before the move does not hold for the moved pages, and is lost afterwards.
//! - Huge pages and NUMA placement of the moved pages are lost. Locked pages (`mlock`) do not move.

mod exchange;
mod fork;
mod policy;
mod progress;

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use millstream_lockfree::{SpinGuard, SpinLock};

pub use self::fork::hide_from_children;
use self::policy::MovePolicy;
use self::progress::Progress;
use crate::maps::FileNumber;
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
    memory: Arc<Memfd>,
    /// The range that is to be moved.
    range: Range<usize>,
    /// Bytes from its start that are shared. It grows while pages move, and shrinks while they move back.
    len: AtomicUsize,
    /// References by which the application uses the pages. Without any, the pages move back and are not shared again.
    users: AtomicUsize,
    /// The process that they are of: see [`fork::generation`].
    generation: u32,
}

impl MovedRange {
    /// The pages that are shared now.
    fn shared(&self) -> Range<usize> {
        self.range.start..self.range.start + self.len.load(Ordering::Relaxed)
    }

    /// Calls `each` for the parts of `range` at which the pages are still mapped, with their protection: the application may have
    /// unmapped some, or mapped something else there. It uses no heap.
    ///
    /// # Errors
    /// Those of reading the list of mappings.
    fn for_each_mapped(
        &self,
        range: Range<usize>,
        mut each: impl FnMut(Range<usize>, libc::c_int),
    ) -> io::Result<()> {
        let file = FileNumber::of(&*self.memory)?;
        maps::for_each_vma(range.clone(), |vma| {
            let offset = vma.range.start.checked_sub(self.range.start).map(|offset| offset as u64);
            if vma.shared && offset == Some(vma.offset) && vma.is_of(file) {
                each(vma.part_of(&range), vma.protection);
            }
        })
    }

    /// Whether the pages are still mapped in all of `range`, also if that cannot be found out.
    fn is_mapped(&self, range: &Range<usize>) -> bool {
        let mut len = 0;
        self.for_each_mapped(range.clone(), |part, _| len += part.len()).is_err() || len == range.len()
    }

    /// Whether the application has moved some of the pages in `range` to other addresses (`mremap`), also if that cannot be
    /// found out.
    fn is_mapped_elsewhere(&self, range: &Range<usize>) -> bool {
        let Ok(file) = FileNumber::of(&*self.memory) else { return true };
        let part = (range.start - self.range.start) as u64..(range.end - self.range.start) as u64;
        let mut found = false;
        let looked = maps::for_each_vma(0..usize::MAX, |vma| {
            found |=
                vma.is_of(file) && vma.offset < part.end && part.start < vma.offset + vma.range.len() as u64;
        });
        found || looked.is_err()
    }
}

/// All moved ranges. They do not overlap, but for pages that the application has unmapped. The lock is held while a piece
/// moves.
static MOVED_RANGES: SpinLock<Vec<Arc<MovedRange>>> = SpinLock::new(Vec::new());

/// Held by the thread that moves pages, in either direction.
static MOVING: SpinLock<()> = SpinLock::new(());

/// Bytes that move at once.
const PIECE: usize = 2 << 20;

/// The protection of memory that moves.
const READ_WRITE: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;

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

impl SharedPages {
    /// Identifies the memfd that the range lies in.
    #[must_use]
    pub fn id(&self) -> usize {
        Arc::as_ptr(&self.moved) as usize
    }

    /// The memfd, whose descriptor all users share.
    #[must_use]
    pub fn memory(&self) -> Arc<Memfd> {
        Arc::clone(&self.moved.memory)
    }

    /// Size of the memfd \[bytes\].
    #[must_use]
    pub fn file_len(&self) -> usize {
        self.moved.memory.len()
    }

    /// Whether all pages that were to move are shared. Otherwise a move ended in front of a page that the kernel used, and
    /// [`move_pages_while`] of the same range goes on there.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.moved.shared() == self.moved.range
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

/// Pages inside `range` that an earlier call moved and that are still mapped there. If only a part of the range was moved, the
/// result covers that part.
fn find_in(moved_ranges: &[Arc<MovedRange>], range: Range<usize>) -> Option<SharedPages> {
    let in_use = || moved_ranges.iter().filter(|moved| moved.users.load(Ordering::Relaxed) != 0);
    // If the pages are shared already, the result covers the range to the byte. Every registration then maps
    // a word alike, which atomic operations need.
    let around = |moved: &&Arc<MovedRange>| {
        let shared = moved.shared();
        shared.start <= range.start && range.end <= shared.end && moved.is_mapped(&range)
    };
    if let Some(moved) = in_use().find(around) {
        return Some(SharedPages::new(moved, range));
    }
    let inner = whole_pages(&range);
    let overlap = |moved: &Arc<MovedRange>| {
        let shared = moved.shared();
        let part = shared.start.max(inner.start)..shared.end.min(inner.end);
        (part.start < part.end && moved.is_mapped(&part)).then_some(part)
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
    let link = format!("/proc/thread-self/fd/{}", fd.as_raw_fd());
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

/// Whether no page inside `range` seems to exist: a sample of them is looked at. False if that cannot be found out.
#[must_use]
pub fn is_untouched(range: Range<usize>) -> bool {
    const SAMPLES: usize = 16;
    let inner = whole_pages(&range);
    if inner.start >= inner.end {
        return false;
    }
    let pages = inner.len() / PAGE;
    let count = pages.min(SAMPLES);
    (0..count).all(|n| {
        let page = inner.start + pages * n / count * PAGE;
        let mut state = 0u8;
        // SAFETY: reports one page into a local.
        let done = unsafe { libc::mincore(page as *mut libc::c_void, PAGE, &raw mut state) };
        done == 0 && state & 1 == 0
    })
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
/// the rule excludes. EBUSY for pages that the kernel uses. EMFILE if the files of moved pages take a quarter of the
/// descriptors that the process may have. Those of memory allocation and `userfaultfd`.
pub fn move_pages(range: Range<usize>) -> io::Result<SharedPages> {
    move_in_pieces(range, 1, || true)
}

/// Most moved ranges. Each has a descriptor, and the program needs most of its descriptors for itself.
fn most_ranges() -> usize {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a plain system call, and a structure on the stack.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } == 0;
    if known { usize::try_from(limit.rlim_cur / DESCRIPTOR_SHARE).unwrap_or(usize::MAX) } else { usize::MAX }
}

/// Moved ranges take one of this many descriptors at most.
const DESCRIPTOR_SHARE: u64 = 4;

/// The pause between two attempts to move a piece.
const BETWEEN_ATTEMPTS: Duration = Duration::from_millis(1);

/// Attempts to move a piece of which peers reach pages through the kernel.
const ATTEMPTS: u32 = 5;

/// As [`move_pages`], for pages that peers use through the kernel meanwhile: waits longer for pages that are pinned. It goes on
/// as long as `goes_on` answers true, which is asked before each attempt of each piece.
///
/// # Errors
/// As [`move_pages`]; ECANCELED if the first answer is false.
pub fn move_pages_while(range: Range<usize>, goes_on: impl Fn() -> bool) -> io::Result<SharedPages> {
    move_in_pieces(range, ATTEMPTS, goes_on)
}

fn move_in_pieces(range: Range<usize>, attempts: u32, goes_on: impl Fn() -> bool) -> io::Result<SharedPages> {
    let error = io::Error::from_raw_os_error;
    if range.is_empty() {
        return Err(error(libc::EINVAL));
    }
    let _moving = begin_moving();
    let inner = whole_pages(&range);
    let found = find_moved(range);
    if let Some(shared) = &found
        && (shared.is_whole() || shared.moved.range != inner)
    {
        return found.ok_or(error(libc::EINVAL));
    }
    if inner.start >= inner.end {
        return Err(error(libc::EINVAL));
    }
    if found.is_none() && MOVED_RANGES.lock().len() >= most_ranges() {
        return Err(error(libc::EMFILE));
    }
    let before = found.as_ref().map_or(0, |shared| shared.moved.shared().len());
    let rest = inner.start + before..inner.end;
    let (userfault, areas) = match prepare(&rest) {
        Ok(prepared) => prepared,
        // The memory has changed since the first part moved.
        Err(error) => return found.ok_or(error),
    };
    let moved = match &found {
        Some(shared) => shared.moved.clone(),
        None => {
            let moved = Arc::new(MovedRange {
                // Peers get the descriptor, and must not seal it against each other.
                memory: Arc::new(Memfd::sealed_close_on_fork(FILE_NAME, inner.len())?),
                range: inner.clone(),
                len: AtomicUsize::new(0),
                users: AtomicUsize::new(0),
                generation: fork::generation(),
            });
            let mut list = MOVED_RANGES.lock();
            list.push(moved.clone());
            fork::reserve_descriptors(&list);
            moved
        }
    };
    let mut progress = Progress::default();
    let pieces = areas.into_iter().flat_map(|area| {
        let end = area.end;
        area.step_by(PIECE).map(move |start| start..end.min(start + PIECE))
    });
    let move_all = || -> io::Result<()> {
        for piece in pieces {
            move_piece(&userfault, &moved, &piece, attempts, &goes_on, &mut progress)?;
        }
        Ok(())
    };
    let result = move_all();
    progress.log(&inner, before, moved.shared().len(), &result);
    let mut moved_ranges = MOVED_RANGES.lock();
    if let (true, Err(error)) = (moved.shared().is_empty(), result) {
        moved_ranges.retain(|other| !Arc::ptr_eq(other, &moved));
        fork::reserve_descriptors(&moved_ranges);
        return Err(error);
    }
    Ok(SharedPages::new(&moved, moved.shared()))
}

/// Checks that the pages of `range` may move, and opens the descriptor for their faults. With the parts of the range that belong to
/// one mapping each: pages of several mappings do not move at once. Pages that were moved back are a mapping of their own.
fn prepare(range: &Range<usize>) -> io::Result<(Userfault, Vec<Range<usize>>)> {
    let error = io::Error::from_raw_os_error;
    let userfault = match (MovePolicy::get(), Userfault::for_all_accesses()) {
        (MovePolicy::Never, _) => return Err(error(libc::EPERM)),
        (_, Ok(userfault)) => userfault,
        (MovePolicy::Always, Err(_)) => Userfault::for_user_mode()?,
        (_, Err(_)) if !thread::is_alone() => return Err(error(libc::EPERM)),
        (_, Err(_)) => Userfault::for_user_mode()?,
    };
    let areas = maps::vmas(range.clone())?;
    let on_the_stack = 0u8;
    // SAFETY: the address of this thread's errno, which system calls store to.
    let used = [(&raw const on_the_stack).addr(), unsafe { libc::__errno_location() }.addr()];
    let fits = |a: &maps::Vma| {
        a.protection == READ_WRITE && a.anonymous && !a.shared && !used.iter().any(|at| a.range.contains(at))
    };
    if !maps::covers(&areas, range) || !areas.iter().all(fits) {
        return Err(error(libc::EINVAL));
    }
    let part = |area: &maps::Vma| area.range.start.max(range.start)..area.range.end.min(range.end);
    Ok((userfault, areas.iter().map(part).collect()))
}

/// Moves the pages of `piece`, which follow those that were moved before. While a page is pinned, the piece goes back to
/// its place between two of the `attempts`, so that accesses go on.
fn move_piece(
    userfault: &Userfault,
    moved: &MovedRange,
    piece: &Range<usize>,
    attempts: u32,
    goes_on: impl Fn() -> bool,
    progress: &mut Progress,
) -> io::Result<()> {
    let offset = piece.start - moved.range.start;
    for attempt in 1.. {
        if !goes_on() {
            return Err(io::Error::from_raw_os_error(libc::ECANCELED));
        }
        let fresh = Mapping::new(moved.memory.as_fd(), offset, piece.len(), true)?;
        // Before the accesses wait. A large range may be mostly untouched.
        let _ = fresh.prefault(0, piece.len().min(crate::population_limit().saturating_sub(offset)));
        // A fork finds the piece at one of its places.
        let list = MOVED_RANGES.lock();
        if fork::is_hidden() {
            fresh.hide_from_children()?;
        }
        match exchange::to_shared(userfault, piece, fresh, progress) {
            Ok(()) => {
                moved.len.fetch_add(piece.len(), Ordering::Relaxed);
                break;
            }
            Err(error) => {
                drop(list);
                progress.put_back += 1;
                if attempt == attempts || error.raw_os_error() != Some(libc::EBUSY) {
                    return Err(error);
                }
            }
        }
        std::thread::sleep(BETWEEN_ATTEMPTS);
    }
    Ok(())
}

/// Moves pages back to private memory, from the last piece to the first. The range shrinks with each piece.
///
/// # Errors
/// Those of reading the list of mappings, of `userfaultfd` and of memory allocation. The rest of the pages stays shared.
fn move_back(moved: &MovedRange) -> io::Result<()> {
    let shared = moved.shared();
    let mut userfault = None;
    for start in shared.clone().step_by(PIECE).rev() {
        let piece = start..shared.end.min(start + PIECE);
        // Other memory that the application has mapped there stays.
        let mut parts = Vec::new();
        moved.for_each_mapped(piece.clone(), |part, protection| parts.push((part, protection)))?;
        let offset = piece.start - moved.range.start;
        let list = MOVED_RANGES.lock();
        for (part, protection) in &parts {
            let userfault = match &mut userfault {
                Some(opened) => opened,
                none => none.insert(Userfault::for_all_accesses().or_else(|_| Userfault::for_user_mode())?),
            };
            let offset = part.start - moved.range.start;
            exchange::to_private(userfault, part, moved.memory.as_fd(), offset, *protection)?;
        }
        moved.len.store(offset, Ordering::Relaxed);
        drop(list);
        // The file's memory is freed although peers may have it mapped.
        let is_whole = parts.iter().map(|(part, _)| part.len()).sum::<usize>() == piece.len();
        if is_whole || !moved.is_mapped_elsewhere(&piece) {
            moved.memory.punch_hole(offset, piece.len());
        }
    }
    Ok(())
}

/// Pages that a deregistration has left shared, tried once more by each later deregistration.
const LEFT_AT_ONCE: usize = 8;

/// Moves pages back, and removes them from the list if they are private again. Otherwise a fork still finds them there. The
/// caller holds [`MOVING`].
fn settle(moved: &Arc<MovedRange>) -> io::Result<()> {
    move_back(moved)?;
    let mut list = MOVED_RANGES.lock();
    list.retain(|other| !Arc::ptr_eq(other, moved));
    fork::reserve_descriptors(&list);
    Ok(())
}

/// Settles pages that earlier deregistrations have left shared, for instance because no descriptor was to be had. The caller
/// holds [`MOVING`].
fn settle_left() {
    let is_left = |moved: &Arc<MovedRange>| moved.users.load(Ordering::Relaxed) == 0;
    let mut left = Vec::new();
    {
        let mut list = MOVED_RANGES.lock();
        for _ in 0..LEFT_AT_ONCE.min(list.iter().filter(|moved| is_left(moved)).count()) {
            let Some(at) = list.iter().position(is_left) else { break };
            // All have their turn.
            let moved = list.remove(at);
            left.push(moved.clone());
            list.push(moved);
        }
    }
    for moved in &left {
        let _ = settle(moved);
    }
}

impl Drop for SharedPages {
    fn drop(&mut self) {
        if self.moved.generation != fork::generation() {
            // The pages are the parent's.
            return;
        }
        {
            let _list = MOVED_RANGES.lock();
            // New references are made only under the lock, and only while there are others.
            if self.moved.users.fetch_sub(1, Ordering::Relaxed) != 1 {
                return;
            }
        }
        let _moving = begin_moving();
        settle_left();
        if let Err(error) = settle(&self.moved) {
            // Correct, if slower to fork.
            tracing::warn!(
                "pages {:#x?} of a deregistered region stay shared memory: {error}",
                self.moved.shared()
            );
        }
    }
}

#[cfg(test)]
mod tests;
