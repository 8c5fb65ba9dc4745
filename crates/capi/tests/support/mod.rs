//! What the tests of the built library share: where it is, and C programs that are linked against verbs.

use std::{
    ffi::OsStr,
    path::{Path, PathBuf},
    process::Command,
};

/// The folder of the library that `make lib` left in the build directory of this test.
pub(crate) fn library_dir() -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("lib");
    let library = dir.join("libibverbs.so.1");
    assert!(library.is_file(), "{} is missing: run `make lib`", library.display());
    dir
}

/// Runs `command` and returns what it printed; anything but success is a failure that shows all of it.
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
