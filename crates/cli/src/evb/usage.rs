//! Resource usage of each process of a run: peak memory and CPU time.

use std::collections::HashMap;

use millstream_evb::process::launcher::{RunEvent, RunProcess};
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
        for (process, pid) in &self.pids {
            if let (Some(peak), Some(cpu)) = (high_water_mark(*pid), cpu_time(*pid)) {
                self.usages.insert(process.clone(), Usage { peak, cpu });
            }
        }
    }

    pub(crate) fn of(&self, process: &RunProcess) -> Option<Usage> {
        self.usages.get(process).copied()
    }
}

/// CPU time from fields 14 and 15 of `/proc/PID/stat`, in ticks of 10 ms.
fn cpu_time(process: u32) -> Option<Seconds> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name in the second field may contain spaces and brackets.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(Seconds((user + system) as f64 / 100.0))
}

/// Peak resident set from `VmHWM` of `/proc/PID/status`.
fn high_water_mark(process: u32) -> Option<Bytes> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(Bytes(kibibytes * 1024))
}

#[cfg(test)]
mod tests {
    #[test]
    fn usage_of_this_process_is_read() {
        assert!(super::high_water_mark(std::process::id()).is_some_and(|peak| peak.0 > 1 << 16));
        assert!(super::high_water_mark(u32::MAX).is_none());
        let busy = std::time::Instant::now();
        while super::cpu_time(std::process::id()).is_some_and(|time| time.0 < 0.02) {
            assert!(busy.elapsed().as_secs() < 60, "no processor time in a minute");
        }
    }
}
