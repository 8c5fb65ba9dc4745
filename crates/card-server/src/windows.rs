//! The windows of a lease: the memory regions for which its holder has keys.
//!
//! They are deregistered on a thread of their own. The device waits for a process of this host that was stopped in the
//! middle of a transfer; the controller does not.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use millstream_card_abi::registers::CONTROL_WINDOW;
use millstream_rdma::memory::MemoryError;
use millstream_rdma::{Access, Device, Region};
use millstream_shm::EventFd;

use crate::hardware::Hardware;

/// Time between two attempts to deregister windows. An attempt itself may take longer.
const RETRY_PERIOD: Duration = Duration::from_millis(100);

/// The memory regions for which the holder of a lease has keys. Dropping this value ends the keys, but does not wait for
/// stopped processes.
pub(crate) struct Windows {
    control: Region,
    bar2: Region,
    memory: Region,
}

impl Windows {
    pub(crate) fn open(device: &Device, hardware: &Hardware) -> io::Result<Windows> {
        let refused = |error: MemoryError| match error {
            MemoryError::Register { cause, .. } => cause,
            other => io::Error::other(other),
        };
        let rights = Access::REMOTE | Access::REMOTE_ATOMIC;
        let (start, len) = (CONTROL_WINDOW.start as u64, CONTROL_WINDOW.len());
        let control = hardware.bar0.register_part(device, start, len, Access::REMOTE).map_err(refused)?;
        let bar2 = hardware.bar2.backing().register(device, rights).map_err(refused)?;
        let memory = hardware.memory().backing().register(device, rights).map_err(refused)?;
        Ok(Windows { control, bar2, memory })
    }

    /// The values of the message to the new holder.
    pub(crate) fn values(&self, left: u64) -> [u64; 4] {
        let keys = u64::from(self.control.rkey().get()) | u64::from(self.bar2.rkey().get()) << 32;
        [left, keys, self.memory.rkey().get().into(), self.memory.remote().addr]
    }
}

/// The controller's end of [`WindowCloser`].
pub(crate) struct WindowControl {
    close: Sender<Windows>,
    closed: Receiver<()>,
    /// When windows were handed over that are not closed yet.
    closing_since: Option<Instant>,
}

/// Deregisters windows; runs on a thread of its own.
pub(crate) struct WindowCloser {
    close: Receiver<Windows>,
    closed: Sender<()>,
    stop: Arc<AtomicBool>,
    wake: Arc<EventFd>,
}

impl WindowControl {
    /// `wake` is signalled when windows are closed. The thread ends with this value, or after `stop`.
    pub(crate) fn new(stop: Arc<AtomicBool>, wake: Arc<EventFd>) -> (WindowControl, WindowCloser) {
        let ((close, to_close), (report, closed)) = (channel(), channel());
        let control = WindowControl { close, closed, closing_since: None };
        (control, WindowCloser { close: to_close, closed: report, stop, wake })
    }

    /// Begins to deregister the windows.
    pub(crate) fn close(&mut self, windows: Windows) {
        self.closing_since = Some(Instant::now());
        // Without the thread they never count as closed.
        let _ = self.close.send(windows);
    }

    /// Time since the windows are being deregistered; none when they are: no access of the former holder arrives any more.
    pub(crate) fn closing_for(&mut self) -> Option<Duration> {
        if self.closing_since.is_some() && self.closed.try_recv().is_ok() {
            self.closing_since = None;
        }
        self.closing_since.map(|since| since.elapsed())
    }
}

impl WindowCloser {
    /// Serves until the controller or the card ends.
    pub(crate) fn serve(&self) {
        while let Ok(Windows { control, bar2, memory }) = self.close.recv() {
            let mut regions = vec![memory, control, bar2];
            loop {
                // One attempt for each region ends its key, also if a process is still in it.
                regions = regions
                    .into_iter()
                    .filter_map(|region| region.deregister().err())
                    .inspect(
                        |refused| tracing::debug!(error = %refused, "a window of an ended lease is in use"),
                    )
                    .map(|refused| refused.region)
                    .collect();
                if regions.is_empty() {
                    break;
                }
                if self.stop.load(Ordering::Relaxed) {
                    return;
                }
                std::thread::sleep(RETRY_PERIOD);
            }
            if self.closed.send(()).is_err() {
                return;
            }
            self.wake.signal();
        }
    }
}
