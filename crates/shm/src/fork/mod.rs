//! What the libraries of this project do at a fork.
//!
//! A child has one thread. A lock that another thread held would stay held in it, and sockets of the parent would outlive the
//! parent. So a fork takes all locks of [`Level`], in this order, and each module says by [`at_fork!`](crate::at_fork) what it
//! does to its lock and in the child. A thread that holds one of the locks may take those of later levels only.
//!
//! The handlers are registered when the program or library is loaded, before the program registers its own. `fork` calls the last
//! registered ones first, so it takes these locks last: a program may call the device under a lock of its own that its handlers
//! take. `clone(2)` and `vfork(2)` bypass the handlers.

mod descriptors;

use std::hint::black_box;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

use millstream_lockfree::SpinLock;
use millstream_lockfree::cancellation::{self, CancelState};

pub use descriptors::CloseOnForkFd;

/// The locks that a fork takes, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// The connection manager.
    ConnectionManager,
    /// The opened devices of a C program.
    OpenDevices,
    /// The process's adapter.
    Adapter,
    /// The table of GIDs.
    GidTable,
    /// The end of [`get_or_init`].
    FirstUse,
    /// The list of [`CloseOnForkFd`].
    Descriptors,
    /// The list of the libraries' threads.
    Threads,
    /// The list of moved pages. Last, and first in the child: other data may lie in such pages.
    MovedPages,
}

const LEVELS: usize = Level::MovedPages as usize + 1;

/// What happens at one level. The functions call no function of the program.
#[derive(Debug)]
pub struct Handlers {
    /// Takes the lock.
    pub before: fn(),
    /// Releases it in the parent, also if there is no child.
    pub in_parent: fn(),
    /// Releases it in the child.
    pub in_child: fn(),
}

/// Registers [`Handlers`] at a [`Level`] when the program or library is loaded.
#[macro_export]
macro_rules! at_fork {
    ($level:ident, $handlers:expr) => {
        const _: () = {
            static HANDLERS: $crate::fork::Handlers = $handlers;
            extern "C" fn register() {
                $crate::fork::register($crate::fork::Level::$level, &HANDLERS);
            }
            #[used]
            #[cfg_attr(not(miri), unsafe(link_section = ".init_array"))]
            static AT_LOAD: extern "C" fn() = register;
        };
    };
}

/// Registers that a fork takes a [`SpinLock`], at a [`Level`], and releases it in the parent and in the child, there after a
/// change of its value if one is given.
#[macro_export]
macro_rules! lock_at_fork {
    ($level:ident, $lock:expr) => {
        $crate::lock_at_fork!($level, $lock, |_| ());
    };
    ($level:ident, $lock:expr, $change:expr) => {
        const _: () = {
            fn lock() {
                ::std::mem::forget($lock.lock());
            }
            fn unlock() {
                // SAFETY: `lock` took it in this thread, or in the thread that this one continues, and forgot the guard.
                unsafe { $lock.force_unlock() }
            }
            fn change() {
                // SAFETY: as above; the child has no other thread.
                $crate::fork::change($change, unsafe { &mut *$lock.as_ptr() });
                unlock();
            }
            $crate::at_fork!(
                $level,
                $crate::fork::Handlers { before: lock, in_parent: unlock, in_child: change }
            );
        };
    };
}

/// Changes a value. The types of a closure's argument follow from it.
#[doc(hidden)]
pub fn change<T>(change: impl FnOnce(&mut T), value: &mut T) {
    change(value);
}

static HANDLERS: [AtomicPtr<Handlers>; LEVELS] = [const { AtomicPtr::new(ptr::null_mut()) }; LEVELS];

/// Registers what happens at a level: see [`at_fork!`](crate::at_fork).
pub fn register(level: Level, handlers: &'static Handlers) {
    HANDLERS[level as usize].store(ptr::from_ref(handlers).cast_mut(), Ordering::Release);
}

static FIRST_USE: SpinLock<()> = SpinLock::new(());
lock_at_fork!(FirstUse, FIRST_USE);

/// As [`OnceLock::get_or_init`], but a child never waits for a thread of its parent that makes the value. Several threads may make
/// it; the first one counts.
pub fn get_or_init<T>(cell: &OnceLock<T>, make: impl FnOnce() -> T) -> &T {
    if let Some(value) = cell.get() {
        return value;
    }
    let made = make();
    let lock = FIRST_USE.lock();
    let unused = cell.set(made);
    drop(lock);
    drop(unused);
    cell.get().expect("it was set")
}

/// A fork in progress.
struct Fork {
    /// The handlers that were called before it. Another thread may be loading a library.
    called: [Option<&'static Handlers>; LEVELS],
    /// Whether the forking thread could be cancelled before.
    cancel_state: Option<CancelState>,
}

/// Held from before a fork until after it.
static FORK: SpinLock<Fork> = SpinLock::new(Fork { called: [None; LEVELS], cancel_state: None });

extern "C" fn before_fork() {
    let mut fork = FORK.lock();
    // `fork` is no cancellation point, but functions that the handlers call are. The thread would end with all locks.
    fork.cancel_state = Some(cancellation::disable());
    for (called, handlers) in fork.called.iter_mut().zip(&HANDLERS) {
        // SAFETY: null, or a static.
        *called = unsafe { handlers.load(Ordering::Acquire).as_ref() };
    }
    fork.called.iter().flatten().for_each(|handlers| (handlers.before)());
    std::mem::forget(fork);
}

/// Calls one of the handlers of each level, the last level first.
fn after_fork(handler: impl Fn(&Handlers) -> fn()) {
    // SAFETY: `before_fork` took the lock in this thread, or in the thread that this one continues, and forgot the guard.
    let fork = unsafe { &*FORK.as_ptr() };
    fork.called.iter().rev().flatten().for_each(|handlers| handler(handlers)());
    let state = fork.cancel_state;
    // SAFETY: as above.
    unsafe { FORK.force_unlock() };
    state.into_iter().for_each(cancellation::restore);
}

extern "C" fn in_parent() {
    after_fork(|handlers| handlers.in_parent);
}

extern "C" fn in_child() {
    after_fork(|handlers| handlers.in_child);
}

extern "C" fn at_load() {
    // An allocator may register handlers of its own at its first use. Its locks are taken after ours, under which memory is
    // allocated.
    drop(black_box(Box::new(0u8)));
    // SAFETY: the handlers stay loaded: no library of the project is unloaded. Without memory for the registration, forks stay
    // unprotected.
    unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
}

#[used]
#[cfg_attr(not(miri), unsafe(link_section = ".init_array"))]
static AT_LOAD: extern "C" fn() = at_load;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Forks, and waits for the child, whose exit status is `run`'s result.
    fn fork(run: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child ends itself.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let status = i32::from(!run());
            // SAFETY: as above.
            unsafe { libc::_exit(status) };
        }
        let mut status = 0;
        // SAFETY: our own child.
        child > 0 && unsafe { libc::waitpid(child, &raw mut status, 0) } == child && status == 0
    }

    static EARLIER: SpinLock<u32> = SpinLock::new(0);
    static LATER: SpinLock<u32> = SpinLock::new(0);
    crate::lock_at_fork!(ConnectionManager, EARLIER);
    crate::lock_at_fork!(Adapter, LATER);

    #[test]
    fn a_fork_takes_the_locks_in_order_and_the_child_finds_them_free() {
        std::thread::scope(|scope| {
            let earlier = EARLIER.lock();
            let forked = scope.spawn(|| fork(|| EARLIER.try_lock().is_some() && LATER.try_lock().is_some()));
            // It waits for the first lock, so the second one is free.
            for _ in 0..50 {
                drop(LATER.lock());
                assert!(!forked.is_finished(), "it waits");
                std::thread::sleep(Duration::from_millis(1));
            }
            drop(earlier);
            assert!(forked.join().unwrap(), "the child finds the locks free");
        });
    }

    #[test]
    fn a_cancelled_thread_forks() {
        extern "C" fn run(_: *mut libc::c_void) -> *mut libc::c_void {
            // SAFETY: the cancellation takes effect at the next cancellation point, at which the frames of this function and of the
            // C library are all that is left to unwind.
            unsafe {
                libc::pthread_cancel(libc::pthread_self());
                let child = libc::fork();
                if child == 0 {
                    libc::_exit(0);
                }
                let _ = cancellation::disable();
                libc::waitpid(child, ptr::null_mut(), 0);
            }
            ptr::null_mut()
        }
        // SAFETY: the thread is joined.
        unsafe {
            let mut thread = std::mem::zeroed();
            assert_eq!(libc::pthread_create(&raw mut thread, ptr::null(), run, ptr::null_mut()), 0);
            libc::pthread_join(thread, ptr::null_mut());
        }
        assert!(fork(|| true), "no lock is left held");
    }
}
