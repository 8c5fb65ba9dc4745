//! Network namespaces, which stand for hosts on one machine.

use std::io;
use std::path::Path;
use std::process::{Command, Stdio};

/// Runs `ip` with these words.
///
/// # Errors
/// The message of `ip`.
pub(crate) fn ip(words: &str) -> io::Result<()> {
    let output = Command::new("ip").args(words.split(' ')).output()?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(io::Error::other(format!("ip {words}: {text}")))
}

/// Creates a namespace.
///
/// # Errors
/// The message of `ip`; creating namespaces needs root.
pub(crate) fn add(name: &str) -> io::Result<()> {
    ip(&format!("netns add {name}")).map_err(|error| {
        io::Error::new(error.kind(), format!("cannot create a network namespace (needs root): {error}"))
    })
}

/// Deletes the namespaces of benchmarks that were interrupted.
pub(crate) fn delete_stale() {
    let Ok(output) = Command::new("ip").args(["netns", "list"]).output() else { return };
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let name = line.split(' ').next().unwrap_or_default();
        if process_of(name).is_some_and(|process| !Path::new("/proc").join(process.to_string()).exists()) {
            delete(name);
        }
    }
}

/// The process that has made a namespace: `millstream-PID-…` and `millstream-faults-PID-…`.
fn process_of(name: &str) -> Option<u32> {
    let name = name.strip_prefix("millstream-")?;
    name.strip_prefix("faults-").unwrap_or(name).split_once('-')?.0.parse().ok()
}

/// Deletes a namespace, if it is there.
pub(crate) fn delete(name: &str) {
    let _ = Command::new("ip").args(["netns", "delete", name]).stderr(Stdio::null()).status();
}

#[cfg(test)]
mod tests {
    #[test]
    fn only_namespaces_of_benchmarks_have_a_process() {
        for (name, process) in [
            ("millstream-17-a", Some(17)),
            ("millstream-faults-18-2", Some(18)),
            ("millstream-17", None),
            ("millstream-site-a", None),
            ("17-a", None),
        ] {
            assert_eq!(super::process_of(name), process, "{name}");
        }
    }
}
