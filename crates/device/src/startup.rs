//! The process's adapter, made at first use, together with the device's two threads.

use std::io;
use std::sync::Once;

use millstream_lockfree::SpinLock;
use millstream_shm::thread::spawn;

use crate::adapter::LocalAdapter;
use crate::errno::Result;
use crate::{progress, server};

static ADAPTER: SpinLock<Option<&'static LocalAdapter>> = SpinLock::new(None);
static FORK_HANDLERS: Once = Once::new();

/// Takes the lock, so that the child of a fork finds it free even if another thread opens the device.
extern "C" fn before_fork() {
    std::mem::forget(ADAPTER.lock());
}

extern "C" fn after_fork() {
    // SAFETY: taken in `before_fork` by this thread, or by its parent's.
    unsafe { ADAPTER.force_unlock() };
}

/// The process's adapter, made at first use. A forked child makes its own.
///
/// # Errors
/// What creating shared memory, sockets or threads reports.
pub(crate) fn adapter() -> Result<&'static LocalAdapter> {
    FORK_HANDLERS.call_once(|| {
        // SAFETY: the handlers touch one lock only. If they cannot be registered, forks stay unprotected.
        unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(after_fork)) };
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
    let (adapter, listener) = LocalAdapter::new()?;
    spawn("mill-server", move || server::run(adapter, &listener))?;
    spawn("mill-progress", move || progress::run(adapter))?;
    Ok(adapter)
}
