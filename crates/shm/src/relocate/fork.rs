//! Moved pages and `fork(2)`: the child gets private copies, with the contents at the fork.
//!
//! The forking thread continues only after the child has made its copies. Concurrent stores of other threads and of
//! peers may be in the copies or not. A raw `clone` bypasses these handlers.

use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, Ordering};

use super::{MOVED_RANGES, MOVING, PIECE, exchange};

static INSTALL: Once = Once::new();

/// Installs the handlers, once.
pub(super) fn install_handlers() {
    INSTALL.call_once(|| {
        // SAFETY: the handlers use atomics, the lock below and system calls.
        unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork_parent), Some(after_fork_child)) };
    });
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
    let registry = MOVED_RANGES.lock();
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
    unsafe { MOVED_RANGES.force_unlock() };
}

/// Takes pages from a child that got no copies: its stores would change the parent's memory. A child that only executes another
/// program does not notice.
fn forbid(pages: &Range<usize>) {
    const TEXT: &[u8] =
        b"millstream: no memory for a forked child's copies of registered pages, so it cannot access them\n";
    // SAFETY: pages of a region that moved, which no code of this library uses; writes a constant.
    unsafe {
        libc::write(libc::STDERR_FILENO, TEXT.as_ptr().cast(), TEXT.len());
        if exchange::forbid(pages).is_err() {
            libc::_exit(1);
        }
    }
}

extern "C" fn after_fork_child() {
    // SAFETY: taken in `before_fork`; the child has this one thread. A thread of the parent that was moving pages was
    // between two pieces.
    unsafe {
        MOVED_RANGES.force_unlock();
        MOVING.force_unlock();
    }
    let [reader, writer] = &COPIED;
    // Reading the list of mappings takes a descriptor.
    close(reader);
    let mut moved_ranges = MOVED_RANGES.lock();
    for moved in &*moved_ranges {
        // The child has one thread. A piece needs few addresses beside its own.
        let copy = |part: Range<usize>| {
            for start in part.clone().step_by(PIECE) {
                let piece = start..part.end.min(start + PIECE);
                let offset = piece.start - moved.range.start;
                if exchange::to_private_alone(&piece, moved.memory.as_fd(), offset).is_err() {
                    forbid(&piece);
                }
            }
        };
        // The application may have unmapped pages of a region, or mapped something else there. Without the list of mappings,
        // that is not known.
        if moved.for_each_mapped(moved.shared(), copy).is_err() {
            copy(moved.shared());
        }
    }
    // The list changes once all pages are the child's own, because it may lie in moved pages.
    for moved in moved_ranges.drain(..) {
        // The child must not undo the parent's moves, also when it deregisters a region.
        moved.len.store(0, Ordering::Relaxed);
        std::mem::forget(moved);
    }
    drop(moved_ranges);
    let fd = writer.load(Ordering::Relaxed);
    if fd >= 0 {
        // SAFETY: sends one byte of a constant. The parent may have exited.
        unsafe { libc::send(fd, c"".as_ptr().cast(), 1, libc::MSG_NOSIGNAL) };
    }
    close(writer);
}
