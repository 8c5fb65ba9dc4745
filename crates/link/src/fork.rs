//! Descriptors that a forked child does not get.
//!
//! The kernel's group of sockets on the port lives as long as any descriptor of it, wherever. A child that was forked
//! and goes on as something else would hold the places of all processes beyond their ends, and packets that nobody
//! reads would go there. So a child finds nothing behind the numbers of these descriptors (/dev/null, to be exact, so that
//! the numbers are not used again while leftovers of the parent's objects know them). `clone(2)` without the C library
//! escapes this; descriptors close when another program is executed, in any case.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Once;

use millstream_lockfree::SpinLock;

/// All of this process.
static OURS: SpinLock<Vec<RawFd>> = SpinLock::new(Vec::new());
static FORKS: Once = Once::new();

/// See the module's description.
#[derive(Debug)]
pub(crate) struct Ours(OwnedFd);

impl From<OwnedFd> for Ours {
    fn from(fd: OwnedFd) -> Self {
        FORKS.call_once(|| {
            // SAFETY: the handlers touch one lock and make system calls. Without room for them a child keeps what it has.
            unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
        });
        OURS.lock().push(fd.as_raw_fd());
        Self(fd)
    }
}

impl Drop for Ours {
    fn drop(&mut self) {
        let number = self.0.as_raw_fd();
        // Before it is closed: the number may be another one's at once.
        OURS.lock().retain(|fd| *fd != number);
    }
}

impl AsFd for Ours {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Ours {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// The child must find the lock free, and the list whole.
extern "C" fn before_fork() {
    std::mem::forget(OURS.lock());
}

extern "C" fn in_parent() {
    // SAFETY: taken in `before_fork` by this thread.
    unsafe { OURS.force_unlock() };
}

extern "C" fn in_child() {
    // SAFETY: taken in `before_fork` by the thread that this one continues.
    unsafe { OURS.force_unlock() };
    let mut ours = OURS.lock();
    // SAFETY: plain system calls, which a child may make; the list has descriptors that nobody has closed.
    unsafe {
        let nothing = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
        for fd in ours.iter() {
            if nothing < 0 || libc::dup3(nothing, *fd, libc::O_CLOEXEC) < 0 {
                libc::close(*fd);
            }
        }
        if nothing >= 0 {
            libc::close(nothing);
        }
    }
    // Keeps its memory: nothing is freed here.
    ours.clear();
}
