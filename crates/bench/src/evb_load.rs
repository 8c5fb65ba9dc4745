//! `millstream bench evb-load`: the event builder with many short fragments, and beside busy worker processes.

use std::error::Error;
use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use millstream_fragment::stream::StreamWriter;
use millstream_fragment::{Alignment, SourceId, SourceKind};
use millstream_report::RunReport;

use crate::memcpy::{Pages, memcpy};
use crate::{Benchmark, Figure, Table, event_run, median};

/// This benchmark.
pub const BENCHMARK: Benchmark = Benchmark {
    name: "evb-load",
    title: "Event builder under load",
    measures: "Fragments per second with 100 sources of 100 bytes, one readout unit and one builder unit, by events per batch; \
               and throughput with events of four 64 KiB fragments while worker processes of a software trigger compute for 200 µs of \
               processor time on every event, pinned to processors or not.",
    baseline: "for fragments, memcpy of blocks of 128 bytes; for the software trigger, what its workers could decide with a \
               processor each: one event in 200 µs",
    values: "medians over the rounds of a case, which follow each other; the run without workers comes before those \
             with workers, and the memcpy of 128 bytes is one measurement",
    command: "millstream bench evb-load",
};

/// Sources and length of the short fragments.
const SHORT: (u32, usize) = (100, 100);
const BATCHES: [u32; 3] = [1, 16, 64];
/// Sources and length of the fragments for the software trigger.
const LONG: (u32, usize) = (4, 64 << 10);
/// Events of each file.
const EVENTS: u64 = 256;
/// Processor time of a worker for each event (µs).
const BUSY_US: u32 = 200;

/// Measures the figures. `program` is the path of `millstream`, which runs the event builder.
///
/// # Errors
/// The first error of a file or of a run.
pub fn run(program: &Path, out: &Path, rounds: usize, seconds: f64) -> Result<Table, Box<dyn Error>> {
    let folder = out.join("evb-load");
    std::fs::create_dir_all(&folder)
        .map_err(|error| format!("cannot create {}: {error}", folder.display()))?;
    let folder = folder.canonicalize()?;
    write_input(&folder.join("short.mfs"), SHORT)?;
    write_input(&folder.join("long.mfs"), LONG)?;
    let case = Case { program, folder: &folder, rounds, seconds };
    let mut table = Table::new(BENCHMARK, rounds);

    let copies = memcpy(Pages::Huge, 128, 1 << 20, 16 << 20, Duration::from_millis(300))? * 1e9 / 128.0 / 1e6;
    for batch in BATCHES {
        let rate = case.median(&format!("short.mfs, batch {batch}"), batch, "short.mfs", "", |report| {
            report.fragments as f64 / 1e6
        })?;
        let name = format!("100 sources of 100 B, batch {batch}");
        table.push(Figure::with_baseline(name, rate, "M fragments/s", copies));
    }

    let rate = |report: &RunReport| report.payload_bytes.0 as f64 / 1e9;
    let alone = case.median("no worker", 8, "long.mfs", "", rate)?;
    table.push(Figure::without_baseline("software trigger, no worker", alone, "GB/s"));
    let decided_by_one = f64::from(LONG.0) * LONG.1 as f64 / (f64::from(BUSY_US) * 1e-6) / 1e9;
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    for workers in [1_u8, 2] {
        for pinned in [false, true] {
            let cpus: Vec<usize> =
                (0..workers.into()).map(|worker| (processors - 1).saturating_sub(worker)).collect();
            let cpus = if pinned { format!("cpus = {cpus:?}\n") } else { String::new() };
            let trigger = format!(
                "[builder.trigger]\nprogram = {program:?}\narguments = [\"evb\", \"unit\", \"worker\", \"{BUSY_US}\"]\n\
                 workers = {workers}\ntimeout_ms = 20000\n{cpus}"
            );
            let place = if pinned { "pinned" } else { "not pinned" };
            let name = format!("software trigger, {workers} busy, {place}");
            let beside = case.median(&name, 8, "long.mfs", &trigger, rate)?;
            table.push(Figure::with_baseline(name, beside, "GB/s", f64::from(workers) * decided_by_one));
        }
    }
    Ok(table)
}

fn write_input(path: &Path, (sources, len): (u32, usize)) -> Result<(), Box<dyn Error>> {
    let mut writer = StreamWriter::create(path, 0..EVENTS, Alignment::CACHE_LINE)?;
    for id in 0..sources {
        let mut source = writer.source(SourceId(id), SourceKind(1), "")?;
        let payload = vec![id as u8; len];
        for event in 0..EVENTS {
            source.push(event, &payload)?;
        }
    }
    writer.finish()?;
    Ok(())
}

struct Case<'a> {
    program: &'a Path,
    folder: &'a Path,
    rounds: usize,
    seconds: f64,
}

impl Case<'_> {
    /// The median of a quantity per second.
    fn median(
        &self,
        name: &str,
        batch: u32,
        input: &str,
        trigger: &str,
        quantity: impl Fn(&RunReport) -> f64,
    ) -> Result<f64, Box<dyn Error>> {
        // A short run yields the number of passes that fill the time.
        let probe = self.run(batch, input, trigger, 2)?;
        let rate = probe.events as f64 / probe.duration_s.0.max(1e-6);
        let replay = ((rate * self.seconds / EVENTS as f64) as u64).clamp(2, 1_000_000);
        let mut rates = Vec::new();
        for _ in 0..self.rounds {
            let report = self.run(batch, input, trigger, replay)?;
            rates.push(quantity(&report) / report.duration_s.0);
        }
        let rate = median(&rates).unwrap_or(0.0);
        eprintln!("{name}: {rate:.3}");
        Ok(rate)
    }

    fn run(&self, batch: u32, input: &str, trigger: &str, replay: u64) -> Result<RunReport, Box<dyn Error>> {
        let mut text = format!(
            "[run]\nname = \"load\"\nbatch = {batch}\nreplay = {replay}\ntimeout_ms = 20000\n\
             [[readout]]\nname = \"ru0\"\ninput = \"{input}\"\n\
             [[builder]]\nname = \"bu0\"\nlanding = \"host\"\nslots = 16\n"
        );
        let _ = write!(text, "{trigger}[check]\nchecksums = \"none\"\n");
        event_run::run(self.program, self.folder, &text)
    }
}
