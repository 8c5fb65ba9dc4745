//! The process's adapter, made at first use, together with the device's two threads.

use std::io;
use std::sync::Once;

use millstream_lockfree::SpinLock;
use millstream_shm::thread::spawn;

use crate::adapter::LocalAdapter;
use crate::errno::Result;
use crate::{progress, server};

static ADAPTER: SpinLock<Option<&'static LocalAdapter>> = SpinLock::new(None);
static HANDLERS: Once = Once::new();

/// Takes the lock, so that the child of a fork finds it free even if another thread opens the device.
extern "C" fn before_fork() {
    std::mem::forget(ADAPTER.lock());
}

extern "C" fn after_fork() {
    // SAFETY: taken in `before_fork` by this thread, or by its parent's.
    unsafe { ADAPTER.force_unlock() };
}

/// Acknowledges what the program has received: the device's threads end with the process.
extern "C" fn at_exit() {
    // The exiting thread may have interrupted the holder of the lock.
    let adapter = ADAPTER.try_lock().and_then(|adapter| *adapter);
    // A forked child has the handler of its parent.
    if let Some(adapter) = adapter.filter(|adapter| adapter.id.pid == std::process::id()) {
        adapter.port.flush_acks_at_exit();
    }
}

/// The process's adapter, made at first use. A forked child makes its own.
///
/// # Errors
/// What creating shared memory, sockets or threads reports.
pub(crate) fn adapter() -> Result<&'static LocalAdapter> {
    HANDLERS.call_once(|| {
        // SAFETY: the handlers touch one lock only. If they cannot be registered, forks stay unprotected.
        unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(after_fork)) };
        // SAFETY: the handler may run at any time from now on: the library stays loaded. If it cannot be registered, peers may
        // repeat messages of this process's last moments.
        unsafe { libc::atexit(at_exit) };
    });
    let mut adapter = ADAPTER.lock();
    match *adapter {
        Some(adapter) if adapter.id.pid == std::process::id() => Ok(adapter),
        _ => {
            let new = start()?;
            *adapter = Some(new);
            Ok(new)
        }
    }
}

fn start() -> io::Result<&'static LocalAdapter> {
    // Peers copy to and from memory that cannot be mapped. Where Yama confines tracing to descendants (`kernel.yama.ptrace_scope`
    // is 1), a process has to permit it; without Yama the call is refused. The kernel still compares the users.
    // SAFETY: a plain system call.
    unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::PR_SET_PTRACER_ANY, 0, 0, 0) };
    let (adapter, listener) = LocalAdapter::new()?;
    spawn("mill-server", move || server::run(adapter, &listener))?;
    spawn("mill-progress", move || progress::run(adapter))?;
    Ok(adapter)
}
