//! `millstream bench evb-storage`: what a builder unit stores a second, as whole batches and as events.

use std::error::Error;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use millstream_fragment::stream::StreamWriter;
use millstream_fragment::{Alignment, SourceId, SourceKind};

use crate::{Benchmark, Figure, Table, event_run, median};

/// This benchmark.
pub const BENCHMARK: Benchmark = Benchmark {
    name: "evb-storage",
    title: "Storage of events",
    measures: "Payload that one builder unit stores a second, all events, as whole batches past the page cache (`format = \
               \"batches\"`) and as events in HDF5 (`sync = \"batch\"`), from slots on the host and on a card; and the processor \
               time of the builder unit. A batch has 16 events of 4 fragments of 64 KiB.",
    baseline: "for batches, `dd oflag=direct` of as many bytes in blocks of a batch, to the same directory; for HDF5, the same \
               with `conv=fdatasync` through the page cache; for processor time, that of the same run with HDF5",
    values: "medians over the rounds",
    command: "millstream bench evb-storage",
};

/// Events of the input, sources, and length of a fragment.
const EVENTS: u64 = 256;
const SOURCES: u32 = 4;
const FRAGMENT: usize = 64 << 10;
const BATCH: u64 = 16;
/// Payload of a batch.
const BATCH_BYTES: u64 = BATCH * SOURCES as u64 * FRAGMENT as u64;

/// Measures the figures. `program` is the path of `millstream`; `out` is on the storage device, with room for `megabytes`.
///
/// # Errors
/// The first error of a file or of a run.
pub fn run(program: &Path, out: &Path, rounds: usize, megabytes: u64) -> Result<Table, Box<dyn Error>> {
    let folder = out.join("evb-storage");
    std::fs::create_dir_all(&folder)
        .map_err(|error| format!("cannot create {}: {error}", folder.display()))?;
    let folder = folder.canonicalize()?;
    write_input(&folder.join("input.mfs"))?;
    let replay = (megabytes * 1_000_000).div_ceil(EVENTS / BATCH * BATCH_BYTES).max(1);
    let case = Case { program, folder: &folder, replay };
    let mut table = Table::new(BENCHMARK, rounds);
    for place in ["host", "card"] {
        let mut measured: [Vec<f64>; 6] = Default::default();
        for _ in 0..rounds {
            let batches = case.run(place, "format = \"batches\"\n")?;
            let direct = case.dd("oflag=direct")?;
            let events = case.run(place, "format = \"hdf5\"\nsync = \"batch\"\n")?;
            let cached = case.dd("conv=fdatasync")?;
            let figures = [batches.rate, direct, events.rate, cached, batches.cpu, events.cpu];
            measured.iter_mut().zip(figures).for_each(|(values, value)| values.push(value));
        }
        let [batches, direct, events, cached, cpu, events_cpu] =
            measured.map(|values| median(&values).unwrap_or(0.0));
        eprintln!(
            "{place}: batches {batches:.2} GB/s, dd {direct:.2} GB/s, HDF5 {events:.2} GB/s, dd {cached:.2} GB/s"
        );
        table.push(Figure::with_baseline(format!("batches from {place} memory"), batches, "GB/s", direct));
        table.push(Figure::with_baseline(format!("HDF5 from {place} memory"), events, "GB/s", cached));
        let name = format!("batches from {place} memory, processor time of the builder unit");
        table.push(Figure::with_baseline(name, cpu, "s/GB", events_cpu));
    }
    Ok(table)
}

fn write_input(path: &Path) -> Result<(), Box<dyn Error>> {
    let mut writer = StreamWriter::create(path, 0..EVENTS, Alignment::CACHE_LINE)?;
    for id in 0..SOURCES {
        // Of no detector: bytes of any length.
        let mut source = writer.source(SourceId(id), SourceKind(0), "")?;
        for event in 0..EVENTS {
            let payload: Vec<u8> = (0..FRAGMENT as u64).map(|at| (at * 7 + event) as u8).collect();
            source.push(event, &payload)?;
        }
    }
    writer.finish()?;
    Ok(())
}

struct Case<'a> {
    program: &'a Path,
    folder: &'a Path,
    replay: u64,
}

struct Stored {
    /// Payload \[GB/s\].
    rate: f64,
    /// Processor time of the builder unit \[s/GB\].
    cpu: f64,
}

impl Case<'_> {
    /// A run that stores all events; its files are removed.
    fn run(&self, place: &str, format: &str) -> Result<Stored, Box<dyn Error>> {
        let landing = match place {
            "card" => {
                "card = \"card0\"\nslots = 8\n[[card]]\nname = \"card0\"\nmemory = \"128MiB\"\nkernel = \"none\"\n"
            }
            _ => "landing = \"host\"\nslots = 8\n",
        };
        let text = format!(
            "[run]\nname = \"storage\"\nbatch = {BATCH}\nreplay = {}\ntimeout_ms = 60000\n\
             [[readout]]\nname = \"ru0\"\ninput = \"input.mfs\"\n[[builder]]\nname = \"bu0\"\n{landing}\
             [output]\ndirectory = \"stored\"\nevents = \"built\"\nmax_events = 1000000000\n{format}\
             [check]\nchecksums = \"none\"\n",
            self.replay
        );
        let report = event_run::run(self.program, self.folder, &text);
        let removed = std::fs::remove_dir_all(self.folder.join("stored"));
        let report = report?;
        removed?;
        let gigabytes = report.payload_bytes.0 as f64 / 1e9;
        let builders = report.units.iter().filter(|unit| unit.name.starts_with("builder"));
        let cpu: f64 = builders.filter_map(|unit| unit.cpu_time_s).map(|time| time.0).sum();
        Ok(Stored { rate: gigabytes / report.duration_s.0, cpu: cpu / gigabytes })
    }

    /// Rate of `dd` with as many bytes, in blocks of a batch \[GB/s\].
    fn dd(&self, option: &str) -> Result<f64, Box<dyn Error>> {
        let path = self.folder.join("dd.bin");
        let count = self.replay * (EVENTS / BATCH);
        let begin = Instant::now();
        let output = Command::new("dd")
            .arg("if=/dev/zero")
            .arg(format!("of={}", path.display()))
            .args([format!("bs={BATCH_BYTES}"), format!("count={count}"), option.to_owned()])
            .output()?;
        let elapsed = begin.elapsed().as_secs_f64();
        let _ = std::fs::remove_file(&path);
        if !output.status.success() {
            return Err(format!("dd {option}: {}", String::from_utf8_lossy(&output.stderr).trim()).into());
        }
        Ok((count * BATCH_BYTES) as f64 / 1e9 / elapsed)
    }
}
