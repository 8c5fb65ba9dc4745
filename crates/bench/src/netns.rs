//! Network namespaces, which stand for hosts on one machine.

use std::io;
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

/// Deletes a namespace, if it is there.
pub(crate) fn delete(name: &str) {
    let _ = Command::new("ip").args(["netns", "delete", name]).stderr(Stdio::null()).status();
}
