//! Support code of the tests of the built library: its location, and compilation of C programs.

use std::{
    ffi::OsStr,
    path::{Path, PathBuf},
    process::Command,
};

/// The folder of the library that `make lib` has built.
pub(crate) fn library_dir() -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("lib");
    let library = dir.join("libibverbs.so.1");
    assert!(library.is_file(), "{} is missing: run `make lib`", library.display());
    dir
}

/// Runs `command` and returns its output. Panics with the output if it fails.
pub(crate) fn output(command: &mut Command, needs: &str) -> String {
    let done = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}; {needs}"));
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    let errors = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{command:?}: {}\n{text}{errors}{needs}", done.status);
    text + &errors
}

/// Compiles the C file `source` as `program` against the installed verbs headers and library.
pub(crate) fn compile(source: &Path, program: &Path) -> PathBuf {
    let mut cc = Command::new("cc");
    cc.args(["-Wall", "-Wextra", "-o"]).args([program, source]).arg(OsStr::new("-libverbs"));
    output(&mut cc, "apt-get install gcc libibverbs-dev");
    program.to_owned()
}
