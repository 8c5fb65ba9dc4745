//! Descriptors that a forked child must not keep.
//!
//! The kernel's `SO_REUSEPORT` group exists as long as any descriptor of it, in any process. A forked child
//! would keep the sockets of all processes open after their exit. The kernel would still steer packets to
//! them. So these descriptors refer to `/dev/null` in a child. Their numbers stay in use, because copies of
//! the parent's objects hold them. `clone(2)` without the C library bypasses this. All these descriptors
//! close on `execve`.

use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Once;

use millstream_lockfree::SpinLock;
use rustix::fs::{Mode, OFlags};
use rustix::io::{DupFlags, dup3};

/// All descriptors of this kind in the process.
static CLOSE_ON_FORK: SpinLock<Vec<RawFd>> = SpinLock::new(Vec::new());
static FORKS: Once = Once::new();

/// Registers the fork handlers, once. A fork takes locks in the reverse order of the registrations. So a caller that joins a
/// port under a lock of its own, which a fork takes as well, calls this before it registers its handlers.
pub fn register_fork_handlers() {
    FORKS.call_once(|| {
        // SAFETY: the handlers use one lock and make system calls. If they cannot be registered, a child
        // keeps the descriptors.
        unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
    });
}

/// A descriptor that a forked child does not keep.
#[derive(Debug)]
pub(crate) struct CloseOnForkFd(OwnedFd);

impl From<OwnedFd> for CloseOnForkFd {
    fn from(fd: OwnedFd) -> Self {
        register_fork_handlers();
        CLOSE_ON_FORK.lock().push(fd.as_raw_fd());
        Self(fd)
    }
}

impl Drop for CloseOnForkFd {
    fn drop(&mut self) {
        let number = self.0.as_raw_fd();
        // Before it is closed: the number may be reused at once.
        CLOSE_ON_FORK.lock().retain(|fd| *fd != number);
    }
}

impl AsFd for CloseOnForkFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for CloseOnForkFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// The child must find the lock free and the list consistent.
extern "C" fn before_fork() {
    std::mem::forget(CLOSE_ON_FORK.lock());
}

extern "C" fn in_parent() {
    // SAFETY: taken in `before_fork` by this thread.
    unsafe { CLOSE_ON_FORK.force_unlock() };
}

extern "C" fn in_child() {
    // SAFETY: taken in `before_fork` by the thread that this one continues.
    unsafe { CLOSE_ON_FORK.force_unlock() };
    let mut close_on_fork = CLOSE_ON_FORK.lock();
    // Plain system calls, which a child may make.
    let null = rustix::fs::open(c"/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
    for number in close_on_fork.iter() {
        // SAFETY: the descriptors in the list are open. Their owners close them.
        let mut fd = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(*number) });
        let replaced = null.as_ref().is_ok_and(|null| dup3(null, &mut fd, DupFlags::CLOEXEC).is_ok());
        if !replaced {
            // SAFETY: nobody in the child uses the parent's socket.
            unsafe { rustix::io::close(*number) };
        }
    }
    // Keeps its allocation: nothing is freed in the child.
    close_on_fork.clear();
}
