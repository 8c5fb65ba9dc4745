//! The process's adapter, made at first use, together with the device's two threads.

use std::io;
use std::sync::Once;

use millstream_lockfree::SpinLock;
use millstream_shm::thread::spawn;

use crate::adapter::LocalAdapter;
use crate::errno::Result;
use crate::{progress, server};

static ADAPTER: SpinLock<Option<&'static LocalAdapter>> = SpinLock::new(None);
static EXIT_HANDLER: Once = Once::new();

// The child finds it free even if another thread opens the device.
millstream_shm::lock_at_fork!(Adapter, ADAPTER);

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
    let mut adapter = ADAPTER.lock();
    // Under the lock: a child must not find the registration begun by a thread that it does not have.
    EXIT_HANDLER.call_once(|| {
        // SAFETY: the handler may run at any time from now on: the library stays loaded. If it cannot be registered, peers may
        // repeat messages of this process's last moments.
        unsafe { libc::atexit(at_exit) };
    });
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
