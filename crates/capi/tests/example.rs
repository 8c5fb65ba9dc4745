//! Compiles `examples/1-verbs-c` against the installed verbs headers, and runs it on the built library.

mod support;

use std::path::Path;
use std::process::Command;

use support::{compile, library_dir, output};

#[test]
fn the_verbs_example_in_c_writes_with_immediate_data() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/1-verbs-c/main.c");
    let folder = tempfile::tempdir().expect("temporary directory");
    let program = compile(&source, &folder.path().join("verbs"));
    // A program that hangs is killed and fails the test.
    let mut run = Command::new("timeout");
    run.args(["--kill-after=1", "60"]).arg(program).env("LD_LIBRARY_PATH", library_dir());
    let expected = "responder: 16 bytes arrived, immediate data 42: \"hello over RDMA\"\n";
    assert_eq!(output(&mut run, ""), expected);
}
