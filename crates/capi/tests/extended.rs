//! C programs on the built library: inline functions of `verbs.h` can only be called from C. Each program
//! checks itself and prints the line that failed.

mod support;

use std::{path::Path, process::Command};

use support::{compile, library_dir, output};

fn run(name: &str) {
    run_with(name, &[]);
}

fn run_with(name: &str, environment: &[(&str, &str)]) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c").join(name).with_extension("c");
    let dir = tempfile::tempdir().expect("temporary directory");
    let program = compile(&source, &dir.path().join(name));
    // Some of them poll until something comes.
    let mut limited = Command::new("timeout");
    let limited = limited.args(["--kill-after=1", "120"]).arg(program);
    let limited = limited.env("LD_LIBRARY_PATH", library_dir()).envs(environment.iter().copied());
    let shown = output(limited, "");
    assert_eq!(shown, "done\n");
}

#[test]
fn queue_pairs() {
    run("qp_ex");
}

#[test]
fn completion_queues() {
    run("cq_ex");
}

#[test]
fn queries() {
    run("queries");
}

#[test]
fn memory_objects() {
    run("memory");
}

#[test]
fn forks_while_other_threads_use_the_device() {
    run("fork");
    run_with("fork", &[("MILLSTREAM_DONTFORK", "1")]);
}

#[test]
fn objects_under_a_further_name() {
    run("import");
}

#[test]
fn cancelled_threads() {
    run("cancel");
    run_with("cancel", &[("MILLSTREAM_MOVE", "register")]);
}
