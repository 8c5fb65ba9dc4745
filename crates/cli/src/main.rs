//! The `millstream` program: command line, progress and reports around the library crates.
//!
//! [`args`] defines the command line; each other module runs one command.

mod args;
mod bench;
mod card;
mod demo;
mod devices;
mod evb;
mod interrupt;
mod model;
mod run;
mod site;
mod stencil;
mod stream;
mod torus;

use std::process::ExitCode;

use clap::Parser as _;

use crate::args::{Arguments, Command};

fn main() -> ExitCode {
    millstream_log::init();
    let arguments = Arguments::parse();
    if only_prints(&arguments.command) {
        restore_default_sigpipe();
    }
    // `run` and `env` choose the device for another program; `site` and `model` use none.
    let uses_device = !matches!(
        arguments.command,
        Command::Run(_) | Command::Env(_) | Command::Site(_) | Command::Model(_)
    );
    if uses_device
        && let Some(choice) = arguments.device.as_ref()
        && let Err(error) = millstream_rdma::loader::ensure(choice)
    {
        return failed(&error);
    }
    let result: Result<ExitCode, Box<dyn std::error::Error>> = match arguments.command {
        Command::Demo(options) => demo::run(&options),
        Command::Evb(command) => evb::run(&command),
        Command::Card(options) => card::run(&options, arguments.device.as_ref()),
        Command::Devices(options) => devices::run(&options, arguments.device.as_ref()),
        Command::Run(options) => run::run(&options),
        Command::Env(options) => run::print_environment(&options),
        Command::Stencil(options) => stencil::run(&options),
        Command::Stream(command) => stream::run(&command),
        Command::Torus(command) => torus::run(&command, arguments.device.as_ref()),
        Command::Site(command) => site::run(&command),
        Command::Model(command) => model::run(&command),
        Command::Bench(options) => bench::run(options),
    };
    result.unwrap_or_else(|error| failed(&*error))
}

/// Whether a command only prints, so that it may end when its reader closes the pipe.
fn only_prints(command: &Command) -> bool {
    matches!(command, Command::Devices(_) | Command::Env(_) | Command::Site(_) | Command::Model(_))
}

/// Restores the default action of SIGPIPE, which Rust programs ignore: `millstream model calibrate | head` ends with `head`.
/// Commands with other processes keep ignoring it, because they must still report after a peer has gone.
fn restore_default_sigpipe() {
    // SAFETY: no other thread runs yet, and the default action runs no handler.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}

/// Prints an error with its causes to standard error.
fn failed(error: &dyn std::error::Error) -> ExitCode {
    eprintln!("millstream: {error}");
    let mut cause = error.source();
    while let Some(error) = cause {
        eprintln!("  because: {error}");
        cause = error.source();
    }
    ExitCode::FAILURE
}
