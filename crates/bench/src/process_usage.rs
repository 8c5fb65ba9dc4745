//! What a process uses, from `/proc`.

use std::fs;
use std::io;

/// Resident memory (KiB).
pub(crate) fn resident_kib(process: u32) -> io::Result<f64> {
    let status = fs::read_to_string(format!("/proc/{process}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let value = line.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok());
    // A process that has ended and was not waited for has no such line.
    value.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("no VmRSS of process {process}")))
}

/// Processor time of all live threads so far (s).
pub(crate) fn processor_seconds(process: u32) -> io::Result<f64> {
    let mut seconds = 0.0;
    for task in fs::read_dir(format!("/proc/{process}/task"))? {
        seconds += run_time(&fs::read_to_string(task?.path().join("schedstat"))?);
    }
    Ok(seconds)
}

/// Processor time in the `schedstat` of a thread (s).
pub(crate) fn run_time(schedstat: &str) -> f64 {
    schedstat.split(' ').next().and_then(|time| time.parse::<f64>().ok()).unwrap_or_default() * 1e-9
}

/// Children of all live threads.
pub(crate) fn children(process: u32) -> Vec<u32> {
    let mut children = Vec::new();
    for thread in fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten() {
        // A thread that has ended has no children.
        let list = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
        children.extend(list.split_whitespace().filter_map(|word| word.parse::<u32>().ok()));
    }
    children
}

/// Open descriptors.
pub(crate) fn descriptors(process: u32) -> io::Result<f64> {
    Ok(fs::read_dir(format!("/proc/{process}/fd"))?.count() as f64)
}
