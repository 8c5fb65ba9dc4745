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
mod software_trigger;

use libtest_mimic::{Arguments, Failed, Trial};
use millstream_evb::config::RunConfig;
use millstream_evb::core::{BuIndex, EventNumber};
use millstream_evb::process::child::Child;
use millstream_evb::process::{AcceptedEvent, Sink, SinkError};
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

/// Output directory whose sinks take 1 ms for each event and write it at once.
const EAGER_OUTPUT: &str = "eager";

/// The example's sink, slower in [`SLOW_OUTPUT`] and [`EAGER_OUTPUT`].
struct SlowSink {
    sink: Box<dyn Sink>,
    time: Duration,
    is_eager: bool,
}

impl Sink for SlowSink {
    fn store(&mut self, event: &AcceptedEvent<'_>) -> Result<(), SinkError> {
        std::thread::sleep(self.time);
        self.sink.store(event)?;
        if self.is_eager { self.sink.flush() } else { Ok(()) }
    }

    fn is_stored(&mut self, event: EventNumber) -> Result<bool, SinkError> {
        self.sink.is_stored(event)
    }

    fn flush(&mut self) -> Result<(), SinkError> {
        self.sink.flush()
    }

    fn finish(self: Box<Self>) -> Result<Option<String>, SinkError> {
        self.sink.finish()
    }
}

/// Makes the sink of a builder unit.
fn make_sink(config: &RunConfig, bu: BuIndex) -> Result<Option<Box<dyn Sink>>, SinkError> {
    let sink = example::list(config, bu)?;
    let is_in = |name| config.output.as_ref().is_some_and(|output| output.directory.ends_with(name));
    let (is_slow, is_eager) = (is_in(SLOW_OUTPUT), is_in(EAGER_OUTPUT));
    let time = Duration::from_millis(if is_slow { 30 } else { 1 });
    let slow = |sink| -> Box<dyn Sink> { Box::new(SlowSink { sink, time, is_eager }) };
    Ok(sink.map(|sink| if is_slow || is_eager { slow(sink) } else { sink }))
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
        .copied()
        .map(trial)
        .collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}
