//! Resource usage of the processes of a run, from `/proc`.

use millstream_quantity::{Bytes, Seconds};

/// User and system time, from fields 14 and 15 of `/proc/PID/stat`, in ticks of 10 ms.
pub fn cpu_time(process: u32) -> Option<Seconds> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name in the second field may contain spaces and brackets.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(Seconds((user + system) as f64 / 100.0))
}

/// Peak resident memory with shared pages, from `VmHWM` of `/proc/PID/status`.
pub fn peak_memory(process: u32) -> Option<Bytes> {
    memory(process, "VmHWM:")
}

/// Resident memory with shared pages, from `VmRSS` of `/proc/PID/status`.
pub fn resident_memory(process: u32) -> Option<Bytes> {
    memory(process, "VmRSS:")
}

fn memory(process: u32, field: &str) -> Option<Bytes> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(field))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(Bytes(kibibytes * 1024))
}

#[cfg(test)]
mod tests {
    #[test]
    fn usage_of_this_process_is_read() {
        let this = std::process::id();
        assert!(super::peak_memory(this).is_some_and(|peak| peak.0 > 1 << 16));
        assert!(super::resident_memory(this) <= super::peak_memory(this));
        assert!(super::peak_memory(u32::MAX).is_none() && super::cpu_time(u32::MAX).is_none());
        let busy = std::time::Instant::now();
        while super::cpu_time(this).is_some_and(|time| time.0 < 0.02) {
            assert!(busy.elapsed().as_secs() < 60, "no processor time in a minute");
        }
    }
}
