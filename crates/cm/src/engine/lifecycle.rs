//! The connection manager at the exit and at a fork of its process.

use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

use super::{PROCESS, ProcessState, process};

/// Timeout for replies to the last messages at exit. A lost message is sent three times within it.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);
/// Polling interval at exit.
const EXIT_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Registers the exit handler, which disconnects from other hosts: they see no hang-up.
pub(super) fn register_exit_handler() {
    static REGISTERED: Once = Once::new();
    REGISTERED.call_once(|| {
        // Without memory for the registration, other hosts detect the exit when their retries expire. SAFETY:
        // the handler may run at any time from now on: the library stays loaded.
        let _ = unsafe { libc::atexit(at_exit) };
    });
}

/// Closes all identifiers, as the kernel does at the exit of a process, and waits for the replies. Messages
/// and retransmissions come from the thread, which ends with the process.
extern "C" fn at_exit() {
    let deadline = Instant::now() + EXIT_TIMEOUT;
    let mut closed = false;
    while Instant::now() < deadline {
        // The exiting thread may have interrupted one that holds the lock, possibly itself.
        if let Ok(mut process) = PROCESS.try_lock() {
            let ProcessState { engine: Some(engine), channels } = &mut *process else { return };
            if engine.sockets.gsi.is_none() {
                return;
            }
            if !std::mem::replace(&mut closed, true) {
                for (_, _, channel) in channels.iter().filter(|(_, pid, _)| *pid == engine.pid) {
                    engine.manager.close(&mut engine.sockets, *channel);
                }
            }
            if !engine.sockets.gsi.as_ref().is_some_and(|gsi| gsi.remote.has_unanswered()) {
                return;
            }
        }
        std::thread::sleep(EXIT_POLL_INTERVAL);
    }
}

/// Holds the lock from before a fork until after it, in the forking thread.
static FORKING: Mutex<ForkGuard> = Mutex::new(ForkGuard(None));
struct ForkGuard(Option<MutexGuard<'static, ProcessState>>);
// SAFETY: the forking thread stores and removes the guard. The child's only thread is its copy.
unsafe impl Send for ForkGuard {}
static REGISTERED: Once = Once::new();

/// Registers the fork handlers. A child must not hold any socket: names would outlive the process that owns
/// them.
pub(super) fn register_fork_handlers() {
    REGISTERED.call_once(|| {
        // Without memory for the registration, children keep unused copies of the descriptors.
        // SAFETY: the handlers only take and release locks and close descriptors.
        let _ = unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(in_child)) };
    });
}

fn forking() -> MutexGuard<'static, ForkGuard> {
    FORKING.lock().unwrap_or_else(PoisonError::into_inner)
}

extern "C" fn before_fork() {
    let held = process();
    forking().0 = Some(held);
}

extern "C" fn after_fork() {
    let held = forking().0.take();
    drop(held);
}

extern "C" fn in_child() {
    let held = forking().0.take();
    if let Some(mut process) = held {
        // Closes the child's copies; the thread that polled them does not exist here. The port's thread does
        // not exist either, so its membership cannot be ended in the regular way.
        if let Some(gsi) = process.engine.take().and_then(|engine| engine.sockets.gsi) {
            std::mem::forget(gsi);
        }
    }
}
