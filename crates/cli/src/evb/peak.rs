//! The most memory that each process of a run had.

use std::collections::HashMap;

use millstream_evb::process::launcher::{Happening, Part};
use millstream_report::Bytes;

/// Read from `/proc` with every sign of progress; the kernel keeps the maximum.
#[derive(Debug, Default)]
pub(crate) struct Peaks {
    processes: HashMap<Part, u32>,
    peaks: HashMap<Part, Bytes>,
}

impl Peaks {
    pub(crate) fn watch(&mut self, happening: &Happening) {
        if let Happening::Spawned { part, process } = happening {
            self.processes.insert(part.clone(), *process);
        }
        for (part, process) in &self.processes {
            if let Some(peak) = high_water_mark(*process) {
                self.peaks.insert(part.clone(), peak);
            }
        }
    }

    pub(crate) fn of(&self, part: &Part) -> Option<Bytes> {
        self.peaks.get(part).copied()
    }
}

/// `VmHWM`: resident pages at their highest, shared ones included.
fn high_water_mark(process: u32) -> Option<Bytes> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(Bytes(kibibytes * 1024))
}

#[cfg(test)]
mod tests {
    #[test]
    fn this_process_has_a_peak() {
        assert!(super::high_water_mark(std::process::id()).is_some_and(|peak| peak.0 > 1 << 16));
        assert!(super::high_water_mark(u32::MAX).is_none());
    }
}
