//! Resource usage of each process of a run: peak memory and CPU time.

use std::collections::HashMap;

use millstream_evb::process::launcher::{RunEvent, RunProcess};
use millstream_evb::process::usage::{cpu_time, peak_memory};
use millstream_report::{Bytes, Seconds};

/// Usage read from `/proc` at each event of the run.
#[derive(Debug, Default)]
pub(crate) struct Usages {
    pids: HashMap<RunProcess, u32>,
    usages: HashMap<RunProcess, Usage>,
}

/// Usage of one process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Usage {
    /// Peak resident set, with shared pages.
    pub(crate) peak: Bytes,
    /// User and system CPU time.
    pub(crate) cpu: Seconds,
}

impl Usages {
    pub(crate) fn watch(&mut self, event: &RunEvent) {
        if let RunEvent::Spawned { process, pid } = event {
            self.pids.insert(process.clone(), *pid);
        }
        if matches!(event, RunEvent::ErrorLine { .. }) {
            // There may be many.
            return;
        }
        for (process, pid) in &self.pids {
            if let (Some(peak), Some(cpu)) = (peak_memory(*pid), cpu_time(*pid)) {
                self.usages.insert(process.clone(), Usage { peak, cpu });
            }
        }
    }

    pub(crate) fn of(&self, process: &RunProcess) -> Option<Usage> {
        self.usages.get(process).copied()
    }
}
