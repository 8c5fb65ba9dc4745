//! Names the Cargo profile and the commit of the sources, for the headers of results.

use std::path::Path;
use std::process::Command;

fn main() {
    // target/PROFILE/build/PACKAGE/out
    let out = std::env::var_os("OUT_DIR").unwrap_or_default();
    if let Some(profile) = Path::new(&out).ancestors().nth(3).and_then(|folder| folder.file_name()) {
        println!("cargo::rustc-env=MILLSTREAM_BENCH_PROFILE={}", profile.to_string_lossy());
    }
    println!("cargo::rerun-if-changed=build.rs");
    // The log changes with every commit and checkout.
    if let Some(log) = git(&["rev-parse", "--path-format=absolute", "--git-path", "logs/HEAD"])
        && Path::new(&log).exists()
    {
        println!("cargo::rerun-if-changed={log}");
    }
    if let Some(commit) = git(&["describe", "--always", "--abbrev=10", "--exclude=*"]) {
        println!("cargo::rustc-env=MILLSTREAM_BENCH_COMMIT={commit}");
    }
}

/// What git prints; `None` without git or outside of a repository.
fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
