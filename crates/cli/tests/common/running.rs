//! Processes that a test starts: none outlives it, and none is waited for without limit.
#![allow(dead_code, reason = "not every test program waits for the end")]

use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

/// Longest time that a process takes to end.
const LIMIT: Duration = Duration::from_secs(120);

/// A process that is killed when this value is dropped.
pub(crate) struct Running(pub(crate) Child);

impl Running {
    /// Waits for its end.
    #[track_caller]
    pub(crate) fn ended(&mut self) -> ExitStatus {
        let deadline = Instant::now() + LIMIT;
        loop {
            if let Some(status) = self.0.try_wait().expect("our own child") {
                return status;
            }
            assert!(Instant::now() < deadline, "process {} does not end", self.0.id());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
