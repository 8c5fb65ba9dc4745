//! The `millstream` program: flags, progress and reports; the work is done by the library crates.
//!
//! `args` holds the words of the command line; each other module is one command.

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

use std::process::ExitCode;

use clap::Parser as _;

use crate::args::{Arguments, Command};

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if prints_only(&arguments.command) {
        end_with_the_reader();
    }
    // A program to run gets its own device; everything else needs the chosen one from here on.
    let own = !matches!(
        arguments.command,
        Command::Run(_) | Command::Env(_) | Command::Site(_) | Command::Model(_)
    );
    if own
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
        Command::Site(command) => site::run(&command),
        Command::Model(command) => model::run(&command),
        Command::Bench(options) => bench::run(options),
    };
    result.unwrap_or_else(|error| failed(&*error))
}

/// Whether a command does nothing that must be finished once nobody reads what it prints.
fn prints_only(command: &Command) -> bool {
    matches!(command, Command::Devices(_) | Command::Env(_) | Command::Site(_) | Command::Model(_))
}

/// `millstream model calibrate | head` ends when `head` does, as other programs do; Rust's programs start with the signal
/// ignored. What talks to other processes keeps it so: a unit whose peer is gone has an account to close.
fn end_with_the_reader() {
    // SAFETY: no other thread runs yet, and the default action is no code of ours.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}

/// Says what went wrong, with its causes, where errors belong.
fn failed(error: &dyn std::error::Error) -> ExitCode {
    eprintln!("millstream: {error}");
    let mut cause = error.source();
    while let Some(error) = cause {
        eprintln!("  because: {error}");
        cause = error.source();
    }
    ExitCode::FAILURE
}
