//! Runs of real processes on the soft device, with and without failures.
//!
//! The program has its own `main`, because it is also every process of the runs that it launches.

#[path = "../../examples/event-builder.rs"]
#[allow(dead_code, reason = "its main is not used")]
mod example;
mod faults;
mod input;
mod runs;

use libtest_mimic::{Arguments, Failed, Trial};
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let process = match words.first().map(String::as_str) {
        Some("child") => Some(example::child(&words[1..])),
        Some("launch") => Some(example::run(Path::new(&words[1]))),
        _ => None,
    };
    if let Some(done) = process {
        return match done {
            Ok(true) => ExitCode::SUCCESS,
            Ok(false) => ExitCode::FAILURE,
            Err(error) => {
                eprintln!("{error}");
                ExitCode::FAILURE
            }
        };
    }
    let mut arguments = Arguments::from_args();
    // A run has more processes than most machines have processors.
    arguments.test_threads = Some(1);
    let trial = |(name, test): (&'static str, fn())| {
        Trial::test(name, move || -> Result<(), Failed> {
            test();
            Ok(())
        })
    };
    let trials = runs::TESTS.iter().chain(faults::TESTS).copied().map(trial).collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}
