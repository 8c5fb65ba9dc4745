//! `millstream bench evb`: the event builder's throughput by number of units, batch size and kernel.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use millstream_fragment::stream::{Stream, StreamWriter};
use millstream_fragment::unpack::unpack;
use millstream_fragment::{SourceId, SourceKind};
use millstream_report::RunReport;

use crate::{Benchmark, Figure, Table, event_run, median};

pub mod endurance;
mod monitored;

/// This benchmark.
pub const BENCHMARK: Benchmark = Benchmark {
    name: "evb",
    title: "Event builder",
    measures: "Payload that readout units write into the memory of the builder units' cards, by number of units, events per \
               batch, and with or without the cluster7 trigger kernel on the cards. The input is recorded camera data. \
               A source has one packet in each batch, with a header and a checksum: with one event a batch, packets bound \
               the rate. A run with the same bytes in one fragment an event shows what is left. Further figures are CPU time \
               per GB and peak memory of the units, and a run under run control whose metrics are read ten times a second.",
    baseline: "memcpy of one thread, however many units there are: blocks of one source's part of a batch, from a buffer as \
               large as an input file into one as large as all slots; for CPU time, the time of one such copy; for the run whose metrics are read, the same run without",
    values: "medians over the rounds; CPU time and peak memory are those of the last round",
    command: "make bench-evb",
};

/// Readout units and builder units.
const SHAPES: [(usize, usize); 3] = [(1, 1), (2, 2), (3, 2)];
const BATCHES: [u32; 5] = [1, 4, 16, 64, 256];
/// Units of which there are more than processors on a small machine, and events per batch, without a kernel.
const LARGE_SHAPES: [(usize, usize); 2] = [(4, 4), (8, 8)];
const LARGE_BATCHES: [u32; 2] = [16, 64];
/// Input file whose events have one fragment each.
const JOINED_INPUT: &str = "joined.mfs";
/// Events that all slots of a builder unit hold together, for large batches.
const EVENTS_IN_SLOTS: u32 = 512;

/// Measures the figures. `program` is the path of `millstream`, which runs the event builder; `packed` is the folder of the
/// packed camera data.
///
/// # Errors
/// The first error of a file or of a run.
pub fn run(
    program: &Path,
    packed: &Path,
    out: &Path,
    rounds: usize,
    seconds: f64,
) -> Result<Table, Box<dyn Error>> {
    let folder = prepare(packed, out)?;
    let mut table = Table::new(BENCHMARK, rounds);
    for kernel in [Kernel::Off, Kernel::On] {
        for (readouts, builders) in SHAPES {
            for batch in BATCHES {
                let case = Case { program, kernel, readouts, builders, batch, joined: false };
                add_figures(&mut table, &case, &folder, rounds, seconds)?;
            }
        }
    }
    for (readouts, builders) in LARGE_SHAPES {
        for batch in LARGE_BATCHES {
            let case = Case { program, kernel: Kernel::Off, readouts, builders, batch, joined: false };
            add_figures(&mut table, &case, &folder, rounds, seconds)?;
        }
    }
    let joined = Case { program, kernel: Kernel::Off, readouts: 1, builders: 1, batch: 1, joined: true };
    add_figures(&mut table, &joined, &folder, rounds, seconds)?;
    monitored::add_figure(&mut table, program, &folder, rounds, seconds)?;
    Ok(table)
}

/// Writes the input files of all shapes. Returns their folder.
fn prepare(packed: &Path, out: &Path) -> Result<PathBuf, Box<dyn Error>> {
    let folder = out.join("evb");
    std::fs::create_dir_all(&folder)
        .map_err(|error| format!("cannot create {}: {error}", folder.display()))?;
    let folder = folder.canonicalize()?;
    unpack(packed, &folder)?;
    let patches = packed.join("patches.csv");
    std::fs::copy(&patches, folder.join("patches.csv"))
        .map_err(|error| format!("cannot copy {}: {error}", patches.display()))?;

    for (readouts, _) in SHAPES.into_iter().chain(LARGE_SHAPES) {
        write_inputs(&folder, readouts)?;
    }
    write_joined_input(&folder)?;
    Ok(folder)
}

/// Distributes the camera's 30 sources over the readout units, one stream file a unit.
fn write_inputs(folder: &Path, readouts: usize) -> Result<(), Box<dyn Error>> {
    let streams = ["crate1.mfs", "crate2.mfs", "crate3.mfs"].map(|name| Stream::open(folder.join(name)));
    let streams = streams.into_iter().collect::<Result<Vec<_>, _>>()?;
    let sources: Vec<_> = streams.iter().flat_map(|stream| stream.sources()).collect();
    for (unit, part) in sources.chunks(sources.len().div_ceil(readouts)).enumerate() {
        let path = folder.join(input(readouts, unit));
        let mut writer = StreamWriter::create(&path, streams[0].events(), streams[0].alignment())?;
        for source in part {
            let mut to = writer.source(source.id(), source.kind(), source.name())?;
            for fragment in source.fragments() {
                to.push(fragment.event, fragment.payload)?;
            }
        }
        writer.finish()?;
    }
    Ok(())
}

/// Joins the fragments of an event to one of a single source.
fn write_joined_input(folder: &Path) -> Result<(), Box<dyn Error>> {
    let whole = Stream::open(folder.join(input(1, 0)))?;
    let mut events = BTreeMap::<_, Vec<u8>>::new();
    for fragment in whole.sources().flat_map(|source| source.fragments()) {
        events.entry(fragment.event).or_default().extend_from_slice(fragment.payload);
    }
    let mut writer = StreamWriter::create(folder.join(JOINED_INPUT), whole.events(), whole.alignment())?;
    // No camera's data: the sources' boundaries are gone.
    let mut to = writer.source(SourceId(0), SourceKind(0), "event")?;
    for (event, payload) in &events {
        to.push(*event, payload)?;
    }
    writer.finish()?;
    Ok(())
}

fn input(readouts: usize, unit: usize) -> String {
    format!("part{unit}of{readouts}.mfs")
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kernel {
    Off,
    On,
}

struct Case<'a> {
    program: &'a Path,
    kernel: Kernel,
    readouts: usize,
    builders: usize,
    batch: u32,
    /// Whether an event has one fragment.
    joined: bool,
}

fn add_figures(
    table: &mut Table,
    case: &Case<'_>,
    folder: &Path,
    rounds: usize,
    seconds: f64,
) -> Result<(), Box<dyn Error>> {
    let mut rates = Vec::new();
    let mut baselines = Vec::new();
    // A short run yields the number of passes that fill the time.
    let mut replay = 20;
    let probe = case.run(folder, replay)?;
    let rate = probe.events as f64 / probe.duration_s.0.max(1e-6);
    replay = ((rate * seconds / 32.0) as u64).clamp(20, 1_000_000);
    let mut last = probe;
    for _ in 0..rounds {
        last = case.run(folder, replay)?;
        rates.push(last.payload_bytes.0 as f64 / last.duration_s.0 / 1e9);
        let memcpy = last.memcpy_baseline.ok_or("the run measured no memcpy")?;
        baselines.push(memcpy.bytes_per_s.0 / 1e9);
    }
    let (rate, baseline) = (median(&rates).unwrap_or(0.0), median(&baselines).unwrap_or(0.0));
    let kernel = if case.kernel == Kernel::On { "cluster7" } else { "no kernel" };
    let shape = format!("{} readout → {} builder, batch {}", case.readouts, case.builders, case.batch);
    let fragments = if case.joined { ", one fragment an event" } else { "" };
    let name = format!("{shape}{fragments}, {kernel}");
    eprintln!("{name}: {rate:.2} GB/s, memcpy {baseline:.2} GB/s");
    table.push(Figure::with_baseline(name, rate, "GB/s", baseline));
    let peak = |what: &str| {
        let peaks = last.units.iter().filter(|unit| unit.name.starts_with(what));
        peaks.filter_map(|unit| unit.peak_memory_bytes).map(|bytes| bytes.0).max()
    };
    if [1, 16].contains(&case.batch) && case.kernel == Kernel::Off {
        // A unit that copies the payload once takes at least memcpy's time; one that does not copy takes far less.
        let copy = 1.0 / baseline;
        let gigabytes = last.payload_bytes.0 as f64 / 1e9;
        for what in ["readout", "builder", "card", "event manager"] {
            let units = last.units.iter().filter(|unit| unit.name.starts_with(what));
            let time: f64 = units.filter_map(|unit| unit.cpu_time_s).map(|time| time.0).sum();
            let name = format!("{shape}{fragments}, CPU time of {what} units");
            table.push(Figure::with_baseline(name, time / gigabytes, "s/GB", copy));
        }
    }
    if case.batch == 64 && case.kernel == Kernel::On {
        for what in ["readout", "builder", "card"] {
            if let Some(bytes) = peak(what) {
                let name = format!("{shape}, peak memory of a {what} unit");
                table.push(Figure::without_baseline(name, bytes as f64 / 1e6, "MB"));
            }
        }
    }
    Ok(())
}

impl Case<'_> {
    fn run(&self, folder: &Path, replay: u64) -> Result<RunReport, Box<dyn Error>> {
        event_run::run(self.program, folder, &self.configuration(replay))
    }

    fn configuration(&self, replay: u64) -> String {
        let Self { kernel, readouts, builders, batch, .. } = self;
        let slots = (EVENTS_IN_SLOTS / batch).clamp(4, 64);
        let mut text =
            format!("[run]\nname = \"bench\"\nbatch = {batch}\nreplay = {replay}\ntimeout_ms = 10000\n");
        for unit in 0..*readouts {
            let file = if self.joined { JOINED_INPUT.to_owned() } else { input(*readouts, unit) };
            let _ = write!(text, "\n[[readout]]\nname = \"ru{unit}\"\ninput = \"{file}\"\n");
        }
        let kernel = match kernel {
            Kernel::Off => "kernel = \"none\"".to_owned(),
            Kernel::On => "kernel = \"cluster7\"\npatches = \"patches.csv\"\nverify = false".to_owned(),
        };
        for unit in 0..*builders {
            let _ = write!(
                text,
                "\n[[builder]]\nname = \"bu{unit}\"\ncard = \"card{unit}\"\nslots = {slots}\n\n\
                 [[card]]\nname = \"card{unit}\"\nmemory = \"512MiB\"\n{kernel}\n"
            );
        }
        text
    }
}
