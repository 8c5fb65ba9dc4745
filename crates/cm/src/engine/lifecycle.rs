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
        // Commands take these locks under that of the process, and a fork takes the last registered one first.
        millstream_link::register_fork_handlers();
        millstream_device::gid_table::register_fork_handlers();
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

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::sync::mpsc;

    use super::*;
    use crate::gsi::GsiPort;
    use millstream_device::gid_table::GidTable;

    /// Names the process in which the test runs.
    const HERE: &str = "MILLSTREAM_TEST_FORK";
    const TIMEOUT: Duration = Duration::from_secs(10);

    /// The fork waits for the lock of a command. If it held a lock that commands take, neither would go on.
    #[test]
    fn a_fork_does_not_block_commands_that_it_waits_for() {
        if std::env::var_os(HERE).is_none() {
            // The handlers of this process may be registered already, in any order.
            let name = "engine::lifecycle::tests::a_fork_does_not_block_commands_that_it_waits_for";
            let mut test = Command::new(std::env::current_exe().expect("a test program has a path"));
            let output =
                test.args(["--exact", name]).env(HERE, "").output().expect("this program starts again");
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
            return;
        }
        let mut command = process();
        command.engine().expect("sockets");
        // Their handlers are registered, as by an earlier command.
        let use_locks = || {
            let _ = GidTable::current();
            drop(GsiPort::open());
        };
        use_locks();
        std::thread::scope(|scope| {
            let fork = scope.spawn(|| {
                // SAFETY: the child ends at once.
                let child = unsafe { libc::fork() };
                if child == 0 {
                    // SAFETY: as above.
                    unsafe { libc::_exit(0) };
                }
                // SAFETY: our own child.
                assert_eq!(unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) }, child);
            });
            std::thread::sleep(Duration::from_millis(100));
            assert!(!fork.is_finished(), "it waits for the command");
            let (done, finished) = mpsc::channel();
            scope.spawn(move || {
                use_locks();
                done.send(()).expect("the test waits");
            });
            let finished = finished.recv_timeout(TIMEOUT);
            // Ends a deadlock.
            drop(command);
            finished.expect("the command goes on");
        });
    }
}
