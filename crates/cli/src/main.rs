//! The `millstream` program: command line, progress and reports around the library crates.
//!
//! [`args`] defines the command line; each other module runs one command.
#![cfg_attr(not(test), deny(clippy::print_stderr))]

mod args;
#[cfg(feature = "bench")]
mod bench;
mod card;
mod demo;
mod devices;
mod evb;
mod features;
mod interrupt;
mod job;
#[cfg(feature = "manual")]
mod manual;
#[cfg(feature = "model")]
mod model;
mod output;
mod run;
mod site;
#[cfg(feature = "stencil")]
mod stencil;
mod stream;
#[cfg(feature = "torus")]
mod torus;

use std::process::ExitCode;

use millstream_rdma::DeviceSelector;
use millstream_report::eprint_line;

#[cfg(feature = "torus")]
use crate::args::SiteCommand;
use crate::args::{Command, EvbCommand};
use crate::card::args::CardCommand;
#[cfg(feature = "torus")]
use crate::torus::TorusCommand;

fn main() -> ExitCode {
    millstream_log::init();
    let arguments = features::parse();
    if only_prints(&arguments.command) {
        restore_default_sigpipe();
    }
    if uses_device(&arguments.command)
        && let Some(choice) = arguments.device.as_ref()
    {
        if let Err(error) = millstream_rdma::loader::ensure(choice) {
            return failed(&error);
        }
        // Units, cards and benchmarks are processes of their own, which inherit the choice.
        if DeviceSelector::from_environment() != *choice {
            return failed(&millstream_rdma::loader::reexec_with(choice));
        }
    }
    // After the exec above: what was raised there would be the limit that users' programs get back.
    if !matches!(arguments.command, Command::Run(_) | Command::Env(_)) {
        millstream_shm::descriptors::raise_limit();
    }
    let result: Result<ExitCode, Box<dyn std::error::Error>> = match arguments.command {
        Command::Demo(options) => demo::run(&options),
        Command::Evb(command) => evb::run(&command),
        Command::Card(options) => card::run(&options, arguments.device.as_ref()),
        Command::Devices(options) => devices::run(&options, arguments.device.as_ref()),
        Command::Run(options) => run::run(&options, arguments.device.as_ref()),
        Command::Env(options) => run::print_environment(&options, arguments.device.as_ref()),
        #[cfg(feature = "stencil")]
        Command::Stencil(options) => stencil::run(&options),
        Command::Stream(command) => stream::run(&command),
        #[cfg(feature = "torus")]
        Command::Torus(command) => torus::run(&command, arguments.device.as_ref()),
        Command::Site(command) => site::run(&command, arguments.device.as_ref()),
        #[cfg(feature = "model")]
        Command::Model(command) => model::run(&command),
        #[cfg(feature = "manual")]
        Command::Manual { out } => manual::write_pages(&out),
        #[cfg(feature = "manual")]
        Command::Completions { shell } => Ok(manual::print_completions(shell)),
        #[cfg(feature = "bench")]
        Command::Bench(options) => bench::run(options),
        Command::Relay(options) => job::relay(options),
        #[cfg(feature = "wasm")]
        Command::CompileModule => card::compile_module(),
    };
    result.unwrap_or_else(|error| failed(&*error))
}

/// Whether a command opens a device: `run` and `env` are for another program, `site` and `model` use none.
fn uses_device(command: &Command) -> bool {
    match command {
        #[cfg(feature = "torus")]
        Command::Site(SiteCommand::Up { .. } | SiteCommand::Check { live: true, .. }) => true,
        Command::Run(_) | Command::Env(_) | Command::Site(_) => false,
        #[cfg(feature = "model")]
        Command::Model(_) => false,
        #[cfg(feature = "wasm")]
        Command::CompileModule => false,
        #[cfg(feature = "manual")]
        Command::Manual { .. } | Command::Completions { .. } => false,
        _ => true,
    }
}

/// Whether a command only prints, so that it may end when its reader closes the pipe.
fn only_prints(command: &Command) -> bool {
    match command {
        #[cfg(feature = "torus")]
        Command::Site(SiteCommand::Up { .. }) => false,
        Command::Evb(EvbCommand::Check { .. }) => true,
        Command::Evb(EvbCommand::Files { recover, .. }) => !recover,
        #[cfg(feature = "control")]
        Command::Evb(EvbCommand::Ctl(_)) => true,
        Command::Card(options) => {
            matches!(options.command, CardCommand::List | CardCommand::Info(_) | CardCommand::Watch(_))
        }
        #[cfg(feature = "torus")]
        Command::Torus(TorusCommand::Watch(_) | TorusCommand::Simulate(_) | TorusCommand::Outside(_)) => true,
        Command::Devices(_) | Command::Env(_) | Command::Site(_) | Command::Stream(_) => true,
        #[cfg(feature = "model")]
        Command::Model(_) => true,
        #[cfg(feature = "manual")]
        Command::Completions { .. } => true,
        _ => false,
    }
}

/// Restores the default action of SIGPIPE, which Rust programs ignore: `millstream model calibrate | head` ends with `head`.
/// Commands with other processes keep ignoring it, because they must still report after a peer has gone.
fn restore_default_sigpipe() {
    // SAFETY: no other thread runs yet, and the default action runs no handler.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}

/// Prints an error with its causes to standard error.
fn failed(error: &dyn std::error::Error) -> ExitCode {
    eprint_line!("millstream: {error}");
    let mut cause = error.source();
    while let Some(error) = cause {
        eprint_line!("  because: {error}");
        cause = error.source();
    }
    ExitCode::FAILURE
}
