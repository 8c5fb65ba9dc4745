//! Processes of a run of the event builder.

use std::process::Child;

use rustix::process::{Pid, Signal, kill_process};

/// The child processes of a process.
pub(crate) fn children(of: u32) -> Vec<u32> {
    let path = format!("/proc/{of}/task/{of}/children");
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace().map(|pid| pid.parse().expect("a process number")).collect()
}

/// The first builder unit of a run.
pub(crate) fn builder(run: &Child) -> u32 {
    let is_builder = |process: &u32| {
        let words = std::fs::read_to_string(format!("/proc/{process}/cmdline")).unwrap_or_default();
        words.contains("builder\x000\0")
    };
    children(run.id()).into_iter().find(is_builder).expect("the builder unit runs")
}

/// Sends a signal.
pub(crate) fn signal(process: u32, signal: Signal) {
    let process = Pid::from_raw(process as i32).expect("a process number");
    kill_process(process, signal).expect("the process is there");
}
