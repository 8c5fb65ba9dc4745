//! Runs of real processes on the soft device, with and without failures.
//!
//! The program has its own `main`, because it is also every process of the runs that it launches.

#[path = "../../examples/event-builder.rs"]
#[allow(dead_code, reason = "its main is not used")]
mod example;
mod faults;
mod function;
mod input;
mod live;
mod recovery;
mod ring;
mod runs;
mod security;
mod software_trigger;
mod standby;

use libtest_mimic::{Arguments, Failed, Trial};
use millstream_evb::config::RunConfig;
use millstream_evb::core::{BatchId, BuIndex, EventNumber};
use millstream_evb::process::child::Child;
use millstream_evb::process::{AcceptedEvent, Sink, SinkError};
use rustix::process::{Signal, getpid, kill_process};
use std::error::Error;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

/// Runs one process of a run.
fn child(words: &[String]) -> Result<bool, Box<dyn Error>> {
    Ok(Child::from_arguments(words)?.run(&make_sink, &function::serve_card)?)
}

/// Output directory whose sinks take 30 ms for each event.
const SLOW_OUTPUT: &str = "slow";

/// Output directory in which builder unit 0 kills itself after it has stored a part of a batch.
const KILLED_OUTPUT: &str = "killed";

/// Output directory in which the sink of builder unit 0 takes 300 ms to write its events.
const LATE_OUTPUT: &str = "late";

/// Output directory in which the sink of builder unit 0 fails after it has stored a part of a batch.
const FAILING_OUTPUT: &str = "failing";

/// Output directory in which the sink of builder unit 0 takes longer to close than a launcher waits for a silent unit.
const SLOWLY_CLOSED_OUTPUT: &str = "slowly-closed";

/// What a sink does beside storing.
#[derive(Clone, Copy)]
enum Behaviour {
    /// It takes 30 ms for each event.
    Slow,
    /// From event 200 on, it kills its process before the second event of a batch.
    KillsItself,
    /// It takes 300 ms to write its events.
    Late,
    /// From event 200 on, it fails before the second event of a batch. It takes 1 s to close.
    Fails,
    /// It takes 15 s to close.
    ClosesSlowly,
}

/// The example's sink in [`SLOW_OUTPUT`], and that of builder unit 0 in the other directories.
struct FaultySink {
    sink: Box<dyn Sink>,
    behaviour: Behaviour,
    /// The batch of the last event.
    batch: Option<BatchId>,
}

impl Sink for FaultySink {
    fn store(&mut self, event: &AcceptedEvent<'_>) -> Result<(), SinkError> {
        match self.behaviour {
            Behaviour::Slow => std::thread::sleep(Duration::from_millis(30)),
            Behaviour::KillsItself if event.number.0 >= 200 && self.batch == Some(event.batch) => {
                self.sink.flush()?;
                kill_process(getpid(), Signal::KILL).expect("a process can kill itself");
            }
            Behaviour::Fails if event.number.0 >= 200 && self.batch == Some(event.batch) => {
                return Err("the disk of the test is full".into());
            }
            _ => {}
        }
        self.batch = Some(event.batch);
        self.sink.store(event)
    }

    fn are_stored(&mut self, events: &[EventNumber]) -> Result<Vec<bool>, SinkError> {
        self.sink.are_stored(events)
    }

    fn flush(&mut self) -> Result<(), SinkError> {
        if matches!(self.behaviour, Behaviour::Late) {
            std::thread::sleep(Duration::from_millis(300));
        }
        self.sink.flush()
    }

    fn finish(self: Box<Self>) -> Result<Option<String>, SinkError> {
        match self.behaviour {
            Behaviour::Fails => std::thread::sleep(Duration::from_secs(1)),
            Behaviour::ClosesSlowly => std::thread::sleep(Duration::from_secs(15)),
            _ => {}
        }
        self.sink.finish()
    }
}

/// Makes the sink of a builder unit.
fn make_sink(config: &RunConfig, bu: BuIndex) -> Result<Option<Box<dyn Sink>>, SinkError> {
    let sink = example::list(config, bu)?;
    let is_in = |name| config.output.as_ref().is_some_and(|output| output.directory.ends_with(name));
    let behaviour = if is_in(SLOW_OUTPUT) {
        Behaviour::Slow
    } else if is_in(KILLED_OUTPUT) && bu == BuIndex(0) {
        Behaviour::KillsItself
    } else if is_in(LATE_OUTPUT) && bu == BuIndex(0) {
        Behaviour::Late
    } else if is_in(FAILING_OUTPUT) && bu == BuIndex(0) {
        Behaviour::Fails
    } else if is_in(SLOWLY_CLOSED_OUTPUT) && bu == BuIndex(0) {
        Behaviour::ClosesSlowly
    } else {
        return Ok(sink);
    };
    Ok(sink.map(|sink| -> Box<dyn Sink> { Box::new(FaultySink { sink, behaviour, batch: None }) }))
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let process = match words.first().map(String::as_str) {
        Some("child") => Some(child(&words[1..])),
        Some("worker") => Some(software_trigger::work(&words[1..])),
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
    let trials = runs::TESTS
        .iter()
        .chain(software_trigger::TESTS)
        .chain(ring::TESTS)
        .chain(live::TESTS)
        .chain(faults::TESTS)
        .chain(recovery::TESTS)
        .chain(standby::TESTS)
        .chain(security::TESTS)
        .copied()
        .map(trial)
        .collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}
