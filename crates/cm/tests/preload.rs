//! The built library under C programs that use the connection manager's device directly (`channel.c`), following the
//! kernel's header, and the device's files (`files.c`). `make lib` builds the library; without it these tests fail.

use std::path::{Path, PathBuf};
use std::process::Command;

fn library() -> PathBuf {
    let library = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("lib/libmillstream_preload.so");
    assert!(library.is_file(), "{} is missing: run `make lib`", library.display());
    library
}

fn output(command: &mut Command) -> String {
    let done = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let said = String::from_utf8_lossy(&done.stdout).into_owned() + &String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{command:?}: {}\n{said}", done.status);
    said
}

/// Runs all tests of a C program under the library. Each prints nothing but the log output in `expected`.
fn run_tests(source: &str, expected: &[(&str, &str)]) {
    let folder = tempfile::tempdir().expect("a folder");
    let program = folder.path().join("program");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(source);
    output(Command::new("cc").args(["-O2", "-Wall", "-Wextra", "-pthread", "-o"]).args([&program, &source]));
    let listed = output(&mut Command::new(&program));
    let names: Vec<&str> = listed.lines().collect();
    assert!(names.len() >= 8, "{names:?}");
    for name in names {
        // A test that hangs is killed and fails.
        let mut test = Command::new("timeout");
        test.args(["--kill-after=1", "60"]).arg(&program).arg(name).env("LD_PRELOAD", library());
        let printed = output(&mut test);
        match expected.iter().find(|(test, _)| *test == name) {
            Some((_, text)) => assert_eq!(printed.matches(text).count(), 1, "{name}: {printed}"),
            None => assert_eq!(printed, "", "{name}"),
        }
    }
}

#[test]
fn device_follows_the_kernel_abi() {
    run_tests("channel.c", &[("children_start_afresh", "open them in the child process")]);
}

#[test]
fn files_behave_as_those_of_a_device() {
    run_tests("files.c", &[("devices_need_no_files", "no device in /sys/class/infiniband")]);
}

/// The library intercepts only the functions in its version script.
#[test]
fn exported_symbols_match_the_version_script() {
    let map = include_str!("../preload.map");
    let mut expected: Vec<&str> = map
        .lines()
        .filter_map(|line| line.strip_prefix("    ")?.strip_suffix(';'))
        .filter(|name| *name != "*")
        .collect();
    let mut nm = Command::new("nm");
    let table = output(nm.args(["--dynamic", "--defined-only"]).arg(library()));
    let mut found: Vec<&str> = table.lines().filter_map(|line| line.split_whitespace().nth(2)).collect();
    expected.sort_unstable();
    found.sort_unstable();
    assert!(expected.contains(&"open64"), "the map is read");
    assert_eq!(found, expected);
}
