//! Programs in C and Python that compute the stencil on request: one request line, one answer line.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use super::StencilError;

/// The C loops, compiled for this processor.
const C_SOURCE: &str = include_str!("stencil.c");
/// The numpy and numba loops.
const PYTHON_SOURCE: &str = include_str!("stencil.py");

/// A running program; dropping this value ends it.
#[derive(Debug)]
pub(super) struct PeerProgram {
    name: &'static str,
    child: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl PeerProgram {
    /// Compiles the C program into `folder` and starts it with so many threads.
    pub(super) fn c(folder: &Path, side: usize, threads: usize) -> Result<PeerProgram, StencilError> {
        let source = write(folder, "stencil.c", C_SOURCE)?;
        let program = folder.join("stencil");
        // Without contraction: fused operations would round differently.
        let flags = ["-O3", "-march=native", "-fopenmp", "-ffp-contract=off", "-o"];
        let output = Command::new("gcc").args(flags).arg(&program).arg(&source).output();
        let output = output.map_err(|cause| StencilError::Start { program: "gcc".into(), cause })?;
        if !output.status.success() {
            return Err(StencilError::Compile(String::from_utf8_lossy(&output.stderr).into_owned()));
        }
        let mut command = Command::new(&program);
        // Pin each OpenMP thread to its core.
        command.env("OMP_PROC_BIND", "true").env("OMP_NUM_THREADS", threads.to_string());
        PeerProgram::start("C", command, side)
    }

    /// Starts the Python program. Also returns the methods that it offers; none if the interpreter lacks numpy.
    pub(super) fn python(
        interpreter: &Path,
        folder: &Path,
        side: usize,
    ) -> Result<(PeerProgram, Vec<String>), StencilError> {
        let mut command = Command::new(interpreter);
        command.arg(write(folder, "stencil.py", PYTHON_SOURCE)?);
        let mut program = PeerProgram::start("python", command, side)?;
        let methods = program.answer()?.split_whitespace().map(str::to_owned).collect();
        Ok((program, methods))
    }

    fn start(name: &'static str, mut command: Command, side: usize) -> Result<PeerProgram, StencilError> {
        let side = side.to_string();
        command.args([&side, &side]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let program = command.get_program().into();
        let mut child = command.spawn().map_err(|cause| StencilError::Start { program, cause })?;
        let requests = child.stdin.take().expect("the stream is piped");
        let answers = BufReader::new(child.stdout.take().expect("the stream is piped"));
        Ok(PeerProgram { name, child, requests, answers })
    }

    /// Runs `sweeps` sweeps. Returns their time.
    pub(super) fn run(&mut self, method: &str, sweeps: usize) -> Result<Duration, StencilError> {
        let answer = self.request(&format!("{method} {sweeps}"))?;
        let seconds = answer.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        seconds.ok_or(StencilError::Answer { program: self.name, answer })
    }

    /// The checksum over the bits of a small grid's result.
    pub(super) fn check(
        &mut self,
        method: &str,
        rows: usize,
        columns: usize,
        sweeps: usize,
    ) -> Result<u64, StencilError> {
        let answer = self.request(&format!("check {method} {rows} {columns} {sweeps}"))?;
        answer.parse().map_err(|_| StencilError::Answer { program: self.name, answer })
    }

    fn request(&mut self, line: &str) -> Result<String, StencilError> {
        // If the program has exited, the answer is empty.
        let _ = writeln!(self.requests, "{line}").and_then(|()| self.requests.flush());
        self.answer()
    }

    fn answer(&mut self) -> Result<String, StencilError> {
        let mut line = String::new();
        match self.answers.read_line(&mut line) {
            Ok(n) if n > 0 => Ok(line.trim().to_owned()),
            _ => Err(StencilError::Answer { program: self.name, answer: line }),
        }
    }
}

impl Drop for PeerProgram {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn write(folder: &Path, name: &str, text: &str) -> Result<PathBuf, StencilError> {
    let path = folder.join(name);
    let written = std::fs::create_dir_all(folder).and_then(|()| std::fs::write(&path, text));
    written.map_err(|cause| StencilError::Write { path: path.clone(), cause })?;
    Ok(path)
}
