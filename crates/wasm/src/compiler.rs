//! Compiles modules, in this process or in one of its own with limits.
//!
//! The time and the memory that the compiler takes grow faster than a module: a few kilobytes can keep it busy for minutes. A
//! card compiles modules of others, so it does so in a process that the system ends at a limit.

use std::ffi::OsString;
use std::io::{self, Read as _, Write as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use rustix::process::{Resource, Rlimit, Signal};
use wasmtime::Engine;

use crate::kernel::config;
use crate::window::WindowAllocator;
use crate::{ImageError, MAX_IMAGE_BYTES};

/// Processor time that a module may take to compile (s).
pub const MAX_COMPILE_SECONDS: u64 = 20;

/// Memory that the compiler may take (bytes).
pub const MAX_COMPILER_BYTES: u64 = 2 << 30;

/// Largest compiled module (bytes).
const MAX_ARTIFACT_BYTES: u64 = 256 << 20;

/// Where modules are compiled.
#[derive(Clone, Debug, Default)]
pub enum Compiler {
    /// In this process, without limits: for modules of the process's own user.
    #[default]
    Here,
    /// In a process that calls [`compile_for_parent`].
    Process {
        /// The program.
        program: PathBuf,
        /// Its arguments.
        arguments: Vec<OsString>,
    },
}

impl Compiler {
    /// Compiles an image.
    pub(crate) fn compile(&self, image: &[u8], counts: bool) -> Result<Vec<u8>, ImageError> {
        match self {
            Compiler::Here => compile_here(image, counts).map_err(ImageError::Module),
            Compiler::Process { program, arguments } => {
                let mut command = Command::new(program);
                command.args(arguments);
                let failed = |cause| ImageError::Compiler { program: program.clone(), cause };
                compile_there(command, image, counts).map_err(failed)?
            }
        }
    }
}

fn compile_here(image: &[u8], counts: bool) -> Result<Vec<u8>, String> {
    // The allocator does not change the code.
    Engine::new(&config(WindowAllocator::with_host_bytes(0).into(), counts))
        .and_then(|engine| engine.precompile_module(image))
        .map_err(|error| beginning(&format!("{error:#}")).to_owned())
}

/// Longest message about a module (bytes): it may quote the module.
const MAX_MESSAGE: usize = 4096;

/// The first bytes of a message, up to a character.
fn beginning(message: &str) -> &str {
    let end = (0..=message.len().min(MAX_MESSAGE)).rev().find(|&at| message.is_char_boundary(at));
    &message[..end.unwrap_or(0)]
}

/// The first byte of the image that goes to the process: whether the code meters fuel.
const PLAIN: u8 = 0;
const COUNTS: u8 = 1;

fn compile_there(
    mut command: Command,
    image: &[u8],
    counts: bool,
) -> io::Result<Result<Vec<u8>, ImageError>> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn()?;
    let piped = |missing| io::Error::other(format!("no pipe to its {missing}"));
    let mut input = child.stdin.take().ok_or_else(|| piped("input"))?;
    let output = child.stdout.take().ok_or_else(|| piped("output"))?;
    let mut errors = child.stderr.take().ok_or_else(|| piped("messages"))?;
    // Beside its output: a process that waits for one pipe does not end the other.
    let messages = std::thread::Builder::new().name("compiler-messages".to_owned()).spawn(move || {
        let mut bytes = Vec::new();
        let _ = errors.by_ref().take(MAX_MESSAGE as u64).read_to_end(&mut bytes);
        let _ = io::copy(&mut errors, &mut io::sink());
        String::from_utf8_lossy(&bytes).into_owned()
    })?;
    // The process reads all of its input before it writes. One that has ended has said why.
    let _ = input.write_all(&[if counts { COUNTS } else { PLAIN }]).and_then(|()| input.write_all(image));
    drop(input);
    let mut artifact = Vec::new();
    let read = output.take(MAX_ARTIFACT_BYTES + 1).read_to_end(&mut artifact);
    let is_large = artifact.len() as u64 > MAX_ARTIFACT_BYTES;
    if is_large || read.is_err() {
        let _ = child.kill();
    }
    let status = child.wait()?;
    let words = messages.join().unwrap_or_default();
    read?;
    let words = words.trim();
    Ok(match status.code() {
        _ if is_large => Err(ImageError::TooCostly(image.len())),
        Some(0) => Ok(artifact),
        Some(REFUSED) => Err(ImageError::Module(words.to_owned())),
        Some(_) => return Err(io::Error::other(format!("{status}: {words}"))),
        None if ended_by_limit(status.signal()) => Err(ImageError::TooCostly(image.len())),
        None => return Err(io::Error::other(format!("{status}: {words}"))),
    })
}

/// The system ends a process at its limit of processor time; one without memory aborts. A stack that is exhausted is a fault.
fn ended_by_limit(signal: Option<i32>) -> bool {
    [Signal::KILL, Signal::XCPU, Signal::ABORT, Signal::SEGV]
        .iter()
        .any(|limit| signal == Some(limit.as_raw()))
}

/// Exit status of a compiler process that has refused a module.
const REFUSED: i32 = 3;

/// The whole work of a compiler process: reads the image of its parent, compiles it within the limits, and ends.
/// `seconds` of processor time and `bytes` of memory are the limits.
///
/// # Errors
/// The limits cannot be set, or the parent is gone.
pub fn compile_for_parent(seconds: u64, bytes: u64) -> io::Result<i32> {
    // Nobody waits for the code if the parent ends.
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    let limit = |resource, value: u64| {
        let highest = rustix::process::getrlimit(resource).maximum;
        let value = Some(highest.map_or(value, |highest| highest.min(value)));
        rustix::process::setrlimit(resource, Rlimit { current: value, maximum: value })
    };
    limit(Resource::Core, 0)?;
    limit(Resource::Cpu, seconds)?;
    limit(Resource::As, bytes)?;
    let mut image = Vec::new();
    io::stdin().take(1 + MAX_IMAGE_BYTES as u64).read_to_end(&mut image)?;
    let Some((mode, image)) = image.split_first() else {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "no image"));
    };
    match compile_here(image, *mode == COUNTS) {
        Ok(artifact) => io::stdout().write_all(&artifact).map(|()| 0),
        Err(words) => {
            eprintln!("{words}");
            Ok(REFUSED)
        }
    }
}
