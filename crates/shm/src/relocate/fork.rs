//! Moved pages and `fork(2)`: the child gets private copies, with the contents at the fork, or none of the pages after
//! [`hide_from_children`].
//!
//! The forking thread continues only after the child has made its copies. Concurrent stores of other threads and of
//! peers may be in the copies or not. A raw `clone` bypasses these handlers.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, IntoRawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};

use rustix::event::EventfdFlags;

use super::{MOVED_RANGES, MOVING, MovedRange, PIECE, READ_WRITE, exchange};
use crate::mm;

crate::at_fork!(MovedPages, crate::fork::Handlers { before: before_fork, in_parent, in_child });

/// Whether children get no moved pages. Changes under the lock of the list.
static HIDDEN: AtomicBool = AtomicBool::new(false);

/// From now on a forked child gets none of the moved pages (`MADV_DONTFORK`), so that it needs neither time nor memory for
/// copies. An access of the child is a segmentation fault.
///
/// # Errors
/// Those of reading the list of mappings and of `madvise`.
pub fn hide_from_children() -> io::Result<()> {
    // No fork and no move comes between.
    let list = MOVED_RANGES.lock();
    for moved in &*list {
        let mut done = Ok(());
        moved.for_each_mapped(moved.shared(), |part, _| {
            // SAFETY: the contents stay.
            let advised = unsafe { mm::madvise(part.start, part.len(), libc::MADV_DONTFORK) };
            if done.is_ok() {
                done = advised;
            }
        })?;
        done?;
    }
    HIDDEN.store(true, Ordering::Relaxed);
    reserve_descriptors(&list);
    Ok(())
}

/// Whether children get no moved pages. The caller holds the lock of the list.
pub(super) fn is_hidden() -> bool {
    HIDDEN.load(Ordering::Relaxed)
}

/// Number of forks that lead to this process.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// Number of forks that lead to this process: pages of another one are the parent's.
pub(super) fn generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

/// The socket pair by which a child reports that it has copied the pages; negative for none. Guarded by the
/// registry's lock, which is held across a fork.
static COPIED: [AtomicI32; 2] = [AtomicI32::new(-1), AtomicI32::new(-1)];

/// Descriptors that give way to that pair where all numbers are taken. Guarded alike.
static RESERVED: [AtomicI32; 2] = [AtomicI32::new(-1), AtomicI32::new(-1)];

/// Reserves two descriptors for the next fork if a child will make copies. The caller holds the lock of the list.
pub(super) fn reserve_descriptors(list: &[Arc<MovedRange>]) {
    for place in &RESERVED {
        if !copies(list) {
            close(place);
        } else if place.load(Ordering::Relaxed) < 0
            && let Ok(fd) = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)
        {
            place.store(fd.into_raw_fd(), Ordering::Relaxed);
        }
    }
}

fn close(place: &AtomicI32) {
    let fd = place.swap(-1, Ordering::Relaxed);
    if fd >= 0 {
        // A direct system call: the C library's function is a thread cancellation point.
        // SAFETY: opened here, and used only here.
        unsafe { libc::syscall(libc::SYS_close, fd) };
    }
}

fn open_pair() -> bool {
    let mut ends = [-1; 2];
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
    // SAFETY: fills in two descriptors.
    let opened = unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()) } == 0;
    if opened {
        COPIED.iter().zip(ends).for_each(|(end, fd)| end.store(fd, Ordering::Relaxed));
    }
    opened
}

/// Whether a child makes copies.
fn copies(list: &[Arc<MovedRange>]) -> bool {
    !list.is_empty() && !is_hidden()
}

fn before_fork() {
    // No move may be in progress, and the child must find a consistent list.
    let list = MOVED_RANGES.lock();
    if copies(&list) && !open_pair() {
        RESERVED.iter().for_each(close);
        open_pair();
    }
    std::mem::forget(list);
}

fn in_parent() {
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
    // SAFETY: taken in `before_fork` by this thread, which has forgotten the guard.
    unsafe {
        reserve_descriptors(&*MOVED_RANGES.as_ptr());
        MOVED_RANGES.force_unlock();
    }
}

/// Takes pages from a child that got no copies: its stores would change the parent's memory. A child that only executes another
/// program does not notice.
fn forbid(pages: &Range<usize>, reason: &str) {
    // SAFETY: pages of a region that moved, which no code of this library uses; writes a text.
    unsafe {
        libc::write(libc::STDERR_FILENO, reason.as_ptr().cast(), reason.len());
        if exchange::forbid(pages).is_err() {
            libc::_exit(1);
        }
    }
}

const NO_MEMORY: &str =
    "millstream: no memory for a forked child's copies of registered pages, so it cannot access them\n";
const NO_DESCRIPTOR: &str =
    "millstream: no descriptor for a forked child's copies of registered pages, so it cannot access them\n";

/// Gives the child copies of a range's pages. If the parent does not wait for the copies, the child cannot get them.
fn copy_range(moved: &MovedRange, parent_waits: bool) {
    // The child has one thread. A piece needs few addresses beside its own.
    let copy = |part: Range<usize>, protection| {
        for start in part.clone().step_by(PIECE) {
            let piece = start..part.end.min(start + PIECE);
            let offset = piece.start - moved.range.start;
            if !parent_waits {
                forbid(&piece, NO_DESCRIPTOR);
            } else if exchange::to_private_alone(&piece, moved.memory.as_fd(), offset, protection).is_err() {
                forbid(&piece, NO_MEMORY);
            }
        }
    };
    // The application may have unmapped pages of a region, or mapped something else there. Without the list of mappings,
    // that is not known.
    if moved.for_each_mapped(moved.shared(), copy).is_err() {
        copy(moved.shared(), READ_WRITE);
    }
}

fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    let [reader, writer] = &COPIED;
    // Reading the list of mappings takes a descriptor.
    RESERVED.iter().for_each(close);
    close(reader);
    // SAFETY: taken in `before_fork` by the thread that this one continues, which has forgotten the guard.
    let list = unsafe { &mut *MOVED_RANGES.as_ptr() };
    let fd = writer.load(Ordering::Relaxed);
    if copies(list) {
        list.iter().for_each(|moved| copy_range(moved, fd >= 0));
    }
    // The child must not undo the parent's moves. Nothing in the list is accessed: it may lie in hidden pages.
    std::mem::forget(std::mem::take(list));
    if fd >= 0 {
        // SAFETY: sends one byte of a constant. The parent may have exited.
        unsafe { libc::send(fd, c"".as_ptr().cast(), 1, libc::MSG_NOSIGNAL) };
    }
    close(writer);
    // SAFETY: as above. A thread of the parent that was moving pages was between two pieces.
    unsafe {
        MOVED_RANGES.force_unlock();
        MOVING.force_unlock();
    }
}
