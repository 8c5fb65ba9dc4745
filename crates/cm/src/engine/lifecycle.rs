//! The connection manager at the exit and at a fork of its process.

use std::sync::{MutexGuard, Once};
use std::time::{Duration, Instant};

use millstream_lockfree::SpinLock;
use millstream_shm::at_fork;
use millstream_shm::fork::Handlers;

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
static HELD: SpinLock<ForkGuard> = SpinLock::new(ForkGuard(None));
struct ForkGuard(Option<MutexGuard<'static, ProcessState>>);
// SAFETY: the forking thread stores and removes the guard. The child's only thread is its copy.
unsafe impl Send for ForkGuard {}

// A child must not hold any socket: names would outlive the process that owns them.
at_fork!(ConnectionManager, Handlers { before: before_fork, in_parent, in_child });

fn before_fork() {
    let held = process();
    HELD.lock().0 = Some(held);
}

fn in_parent() {
    let held = HELD.lock().0.take();
    drop(held);
}

fn in_child() {
    let held = HELD.lock().0.take();
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
            // No other test has the lock or forks there.
            let name = "engine::lifecycle::tests::a_fork_does_not_block_commands_that_it_waits_for";
            let mut test = Command::new(std::env::current_exe().expect("a test program has a path"));
            let output =
                test.args(["--exact", name]).env(HERE, "").output().expect("this program starts again");
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
            return;
        }
        let mut command = process();
        command.engine().expect("sockets");
        let use_locks = || {
            let _ = GidTable::current();
            drop(GsiPort::open());
        };
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
