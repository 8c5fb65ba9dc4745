//! `millstream run` and `millstream env`: other people's programs on the soft device.

use std::error::Error;
use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::ExitCode;

use millstream_rdma::loader;

use crate::args::RunOptions;

pub(crate) fn run(options: &RunOptions) -> Result<ExitCode, Box<dyn Error>> {
    let (program, arguments) = options.program.split_first().ok_or("no program given")?;
    let mut command = std::process::Command::new(program);
    command.args(arguments).env("LD_LIBRARY_PATH", library_path(library_dir()?));
    // Only returns if the program cannot be started.
    let cause = command.exec();
    Err(format!("cannot start {}: {cause}", program.display()).into())
}

pub(crate) fn print_environment() -> Result<ExitCode, Box<dyn Error>> {
    let path = library_path(library_dir()?);
    let path = path.to_str().ok_or("the library's path is not text")?;
    println!("export LD_LIBRARY_PATH='{}'", path.replace('\'', "'\\''"));
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn library_dir() -> Result<PathBuf, Box<dyn Error>> {
    loader::library_dir().ok_or_else(|| {
        let tried: Vec<_> = loader::search_path().iter().map(|p| p.display().to_string()).collect();
        format!(
            "the soft device's libibverbs.so.1 was not found (`make lib` builds it) in {}",
            tried.join(", ")
        )
        .into()
    })
}

/// Our folder before whatever the caller had.
fn library_path(ours: PathBuf) -> OsString {
    let mut path = ours.into_os_string();
    if let Some(theirs) = std::env::var_os("LD_LIBRARY_PATH").filter(|theirs| !theirs.is_empty()) {
        path.push(":");
        path.push(theirs);
    }
    path
}
