//! Runs example 3 and checks its output.

use std::path::PathBuf;
use std::process::Command;

/// The example's program, which `cargo test` builds into the directory beside this test's.
fn program() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let program = test.parent().and_then(|deps| deps.parent()).unwrap().join("examples/build-events");
    assert!(program.is_file(), "{} is missing: run cargo build --examples", program.display());
    program
}

#[test]
fn the_example_builds_all_events_but_one() {
    let directory = tempfile::tempdir().unwrap();
    let output = Command::new(program()).arg(directory.path()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let readme = include_str!("../../../examples/3-build-events/README.md");
    for line in text.lines() {
        assert!(readme.contains(line.trim()), "not in the README: {line}");
    }
    assert!(text.contains("conservation law: holds"), "{text}");
}
