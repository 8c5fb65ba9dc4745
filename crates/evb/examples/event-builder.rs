//! A complete event builder from the library: `event-builder run CONFIG.toml`.
//!
//! The program starts itself for each process of the run. Accepted events are counted; with an output directory, each
//! builder unit lists them in a text file.

use millstream_card_server::{CardConfig, serve};
use millstream_evb::config::{ConfigFile, RunConfig};
use millstream_evb::core::{BuIndex, EventNumber};
use millstream_evb::process::card::CardProcess;
use millstream_evb::process::child::Child;
use millstream_evb::process::launcher::RunEvent;
use millstream_evb::process::{AcceptedEvent, Launcher, Sink, SinkError};
use std::collections::HashSet;
use std::error::Error;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let done = match words.first().map(String::as_str) {
        Some("run") if words.len() == 2 => run(Path::new(&words[1])),
        Some("child") => child(&words[1..]),
        _ => Err("usage: event-builder run CONFIG.toml".into()),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("event-builder: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Launches a run and prints its summary.
pub(crate) fn run(config: &Path) -> Result<bool, Box<dyn Error>> {
    let config = ConfigFile::load(config)?.check()?;
    let launcher = Launcher { program: std::env::current_exe()?, arguments: vec!["child".into()] };
    let outcome = launcher.run(&config, &mut |event| {
        if let RunEvent::Spawned { process, pid } = event {
            eprintln!("process {pid}: {process:?}");
        }
    })?;
    if let Some(summary) = &outcome.summary {
        println!("{summary}");
        if let Some(elapsed) = outcome.elapsed {
            let gigabytes = summary.read.bytes.0 as f64 / 1e9;
            println!("{gigabytes:.3} GB in {elapsed:.3?}: {:.2} GB/s", gigabytes / elapsed.as_secs_f64());
        }
    }
    for (bu, statistics) in outcome.builders.iter().enumerate() {
        println!("builder {bu}: {statistics:?}");
    }
    for failure in &outcome.failures {
        println!("{:?}: {}: {}", failure.process, failure.status, failure.reason);
    }
    Ok(outcome.is_success())
}

/// Runs one process of a run.
pub(crate) fn child(words: &[String]) -> Result<bool, Box<dyn Error>> {
    Ok(Child::from_arguments(words)?.run(&list, &serve_card)?)
}

/// Serves a card of the run in this process.
pub(crate) fn serve_card(card: &CardProcess) -> Result<(), Box<dyn Error>> {
    let mut config = CardConfig::for_launcher(card.name.clone(), card.memory.0, card.spin)?;
    config.memory_kind = card.kind.parse()?;
    // With `config.loaders`, the card runs kernels of users, such as WebAssembly modules (crate `millstream-wasm`).
    serve(config)?;
    Ok(())
}

/// A text file with number, size and decisions of accepted events.
struct List {
    path: PathBuf,
    file: File,
    /// Lines that are not flushed. They are not written if the list is dropped.
    lines: Vec<u8>,
}

/// Makes the sink of a builder unit.
pub(crate) fn list(config: &RunConfig, bu: BuIndex) -> Result<Option<Box<dyn Sink>>, SinkError> {
    let Some(output) = &config.output else { return Ok(None) };
    std::fs::create_dir_all(&output.directory)?;
    let path = output.directory.join(format!("{}.txt", config.builders[bu.index()].name));
    let file = File::create(&path)?;
    Ok(Some(Box::new(List { path, file, lines: Vec::new() })))
}

impl Sink for List {
    fn store(&mut self, event: &AcceptedEvent<'_>) -> Result<(), SinkError> {
        let intact = event.fragments.iter().filter(|(_, fragment)| fragment.is_intact()).count();
        let bytes: usize = event.fragments.iter().map(|(_, fragment)| fragment.payload.len()).sum();
        let set: u32 = event.decisions.iter().map(|byte| byte.count_ones()).sum();
        writeln!(self.lines, "{} {intact} {bytes} {set}", event.number.0)?;
        Ok(())
    }

    fn are_stored(&mut self, events: &[EventNumber]) -> Result<Vec<bool>, SinkError> {
        // The lists of all units; a unit that was killed may have left an incomplete last line.
        let mut stored = HashSet::new();
        for entry in std::fs::read_dir(self.path.parent().ok_or("the list is in no directory")?)? {
            let list = std::fs::read_to_string(entry?.path())?;
            let lines = list.split_inclusive('\n').filter(|line| line.ends_with('\n'));
            stored.extend(lines.filter_map(|line| line.split(' ').next()?.parse::<u64>().ok()));
        }
        Ok(events.iter().map(|event| stored.contains(&event.0)).collect())
    }

    fn flush(&mut self) -> Result<(), SinkError> {
        self.file.write_all(&self.lines)?;
        self.lines.clear();
        Ok(())
    }

    fn finish(mut self: Box<Self>) -> Result<Option<String>, SinkError> {
        self.flush()?;
        Ok(Some(self.path.display().to_string()))
    }
}
