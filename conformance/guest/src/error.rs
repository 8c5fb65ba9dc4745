//! Errors of this program.

use std::io;
use std::path::PathBuf;
use std::process::Command;

/// Errors of building images and running guests.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("{program}: {cause}")]
    Start { program: String, cause: io::Error },
    #[error("{command}: {stderr}")]
    Command { command: String, stderr: String },
    #[error("{path}: {cause}")]
    File { path: PathBuf, cause: io::Error },
    #[error("apt knows no package {0}: run apt-get update")]
    NoPackage(String),
    #[error("the kernel {version} has no module {module}")]
    NoModule { version: String, module: String },
    #[error("{file} needs {library}, which is not in the guest's packages")]
    NoLibrary { file: PathBuf, library: String },
    #[error("guest {guest} {what}; its console:\n{console}")]
    Guest { guest: u8, what: String, console: String },
    #[error("guest {guest} at {address}: {cause}")]
    Reach { guest: u8, address: String, cause: io::Error },
    #[error("guest {0} closed the connection before the program ended")]
    ConnectionLost(u8),
}

impl Error {
    pub(crate) fn file(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |cause| Self::File { path, cause }
    }
}

/// Runs a command and returns its standard output. An error has its standard error.
pub(crate) fn output(command: &mut Command) -> Result<String, Error> {
    let output = command.output().map_err(|cause| Error::Start {
        program: command.get_program().to_string_lossy().into_owned(),
        cause,
    })?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let words: Vec<_> = words.map(|word| word.to_string_lossy()).collect();
    let stderr = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(Error::Command { command: words.join(" "), stderr: format!("{} {stderr}", output.status) })
}
