//! Processes of a run of the event builder.

use std::process::{Child, Command};

/// The child processes of a process.
pub(crate) fn children(of: u32) -> Vec<u32> {
    let path = format!("/proc/{of}/task/{of}/children");
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace().map(|pid| pid.parse().expect("a process number")).collect()
}

/// Kills the first builder unit of a run.
pub(crate) fn kill_builder(run: &Child) {
    let is_builder = |process: &u32| {
        let words = std::fs::read_to_string(format!("/proc/{process}/cmdline")).unwrap_or_default();
        words.contains("builder\x000\0")
    };
    let builder = children(run.id()).into_iter().find(is_builder).expect("the builder unit runs");
    assert!(Command::new("kill").args(["-KILL", &builder.to_string()]).status().unwrap().success());
}
