//! Builds events from the program's own data: `build-events DIRECTORY`. See README.md.

use millstream_evb::config::{ConfigFile, RunConfig};
use millstream_evb::core::BuIndex;
use millstream_evb::process::card::CardProcess;
use millstream_evb::process::child::Child;
use millstream_evb::process::{Launcher, Sink, SinkError};
use millstream_fragment::stream::StreamWriter;
use millstream_fragment::{Alignment, SourceId, SourceKind};
use std::error::Error;
use std::path::Path;
use std::process::ExitCode;

const EVENTS: u64 = 1000;
const BOARDS: u32 = 4;
const SAMPLES: u64 = 256;
/// Crate, board and event of a missing fragment.
const MISSED: (u32, u32, u64) = (1, 2, 500);

const CONFIGURATION: &str = r#"
[run]
name = "example"
batch = 16               # events per packet

[[readout]]
name = "crate0"
input = "crate0.mfs"

[[readout]]
name = "crate1"
input = "crate1.mfs"

[[builder]]
name = "bu0"
landing = "host"
slots = 4

[[builder]]
name = "bu1"
landing = "host"
slots = 4
"#;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let result = match arguments.first().map(String::as_str) {
        // The launcher starts this program again for each process of the run.
        Some("child") => Child::from_arguments(&arguments[1..])
            .and_then(|child| child.run(&no_sink, &no_card))
            .map_err(Box::<dyn Error>::from),
        Some(directory) => build(Path::new(directory)),
        None => Err("usage: build-events DIRECTORY".into()),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("build-events: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The configuration has no cards.
fn no_card(_: &CardProcess) -> Result<(), Box<dyn Error>> {
    Err("this program serves no cards".into())
}

/// Writes the inputs and the configuration, and runs the event builder on them.
fn build(directory: &Path) -> Result<bool, Box<dyn Error>> {
    std::fs::create_dir_all(directory)?;
    for crate_number in 0..2 {
        write_crate(&directory.join(format!("crate{crate_number}.mfs")), crate_number)?;
    }
    let configuration = directory.join("run.toml");
    std::fs::write(&configuration, CONFIGURATION)?;

    let config = ConfigFile::load(&configuration)?.check()?;
    let launcher = Launcher { program: std::env::current_exe()?, arguments: vec!["child".into()] };
    let outcome = launcher.run(&config, &mut |_| {})?;
    if let Some(summary) = &outcome.summary {
        println!("{summary}");
    }
    for failure in &outcome.failures {
        eprintln!("{:?}: {}: {}", failure.process, failure.status, failure.reason);
    }
    Ok(outcome.is_success())
}

/// Writes the stream file of one crate: a source for each board, a fragment for each event.
fn write_crate(path: &Path, crate_number: u32) -> Result<(), Box<dyn Error>> {
    let mut stream = StreamWriter::create(path, 0..EVENTS, Alignment::CACHE_LINE)?;
    for board in 0..BOARDS {
        let id = SourceId(crate_number << 8 | board);
        let mut source = stream.source(id, SourceKind(1), &format!("board {board}"))?;
        for event in (0..EVENTS).filter(|event| (crate_number, board, *event) != MISSED) {
            source.push(event, &waveform(id, event))?;
        }
    }
    Ok(stream.finish()?)
}

/// The payload of one fragment: a pulse over a baseline, 16 bits a sample.
fn waveform(source: SourceId, event: u64) -> Vec<u8> {
    let start = (event * 7 + u64::from(source.0)) % SAMPLES;
    let sample = |at: u64| if at < start { 200 } else { 200 + 800 / (at - start + 1) as u16 };
    (0..SAMPLES).flat_map(|at| sample(at).to_le_bytes()).collect()
}

/// Accepted events are not stored.
fn no_sink(_: &RunConfig, _: BuIndex) -> Result<Option<Box<dyn Sink>>, SinkError> {
    Ok(None)
}
