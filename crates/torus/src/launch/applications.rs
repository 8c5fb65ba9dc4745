//! The applications of a run. Dropping them ends those that still run.

use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use millstream_torus_core::NodeNumber;

use super::{Ended, LaunchError};

/// Interval of looks at the applications.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

#[derive(Debug, Default)]
pub(super) struct Applications {
    running: Vec<(NodeNumber, Child)>,
}

impl Applications {
    pub(super) fn start(&mut self, node: NodeNumber, mut command: Command) -> Result<(), LaunchError> {
        let program = command.get_program().to_owned();
        millstream_shm::descriptors::restore_limit(&mut command);
        let child = command.spawn().map_err(|cause| LaunchError::Start { program, cause })?;
        self.running.push((node, child));
        Ok(())
    }

    pub(super) fn is_running(&self) -> bool {
        !self.running.is_empty()
    }

    /// An application that has ended; waits a little if there is none. Fails once `end` is true.
    pub(super) fn poll_ended(&mut self, end: &AtomicBool) -> Result<Option<Ended>, LaunchError> {
        if end.load(Ordering::Relaxed) {
            return Err(LaunchError::Ended);
        }
        for at in 0..self.running.len() {
            let (node, child) = &mut self.running[at];
            let failed = |cause| LaunchError::Start { program: "an application".into(), cause };
            if let Some(status) = child.try_wait().map_err(failed)? {
                let ended = (*node, status);
                self.running.swap_remove(at);
                return Ok(Some(ended));
            }
        }
        std::thread::sleep(POLL_INTERVAL);
        Ok(None)
    }
}

impl Drop for Applications {
    fn drop(&mut self) {
        for (_, child) in &mut self.running {
            // It may have ended by itself.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
