//! The event builder's throughput by shape, batch size and kernel, beside a plain copy.

use std::error::Error;
use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::{Figure, Table, median};
use millstream_fragment::stream::{Stream, StreamWriter};
use millstream_fragment::unpack::unpack;
use millstream_report::{RunReport, save};

/// Readout units and builder units.
const SHAPES: [(usize, usize); 3] = [(1, 1), (2, 2), (3, 2)];
const BATCHES: [u32; 5] = [1, 4, 16, 64, 256];
/// Slots of a builder unit: at large batches as many as hold this many events.
const EVENTS_IN_SLOTS: u32 = 512;

/// The figures. `program` is `millstream`, which runs the event builder; `packed` has the camera's data.
///
/// # Errors
/// Whatever stands in the way, for people.
pub fn run(
    program: &Path,
    packed: &Path,
    out: &Path,
    rounds: usize,
    seconds: f64,
) -> Result<Table, Box<dyn Error>> {
    let folder = out.join("evb");
    std::fs::create_dir_all(&folder)
        .map_err(|error| format!("cannot create {}: {error}", folder.display()))?;
    let folder = folder.canonicalize()?;
    unpack(packed, &folder)?;
    let patches = packed.join("patches.csv");
    std::fs::copy(&patches, folder.join("patches.csv"))
        .map_err(|error| format!("cannot copy {}: {error}", patches.display()))?;

    for (readouts, _) in SHAPES {
        deal(&folder, readouts)?;
    }
    let title = "event builder, payload landed in card memory (medians; baseline: memcpy of blocks of one \
                 source's part of a batch, from memory as large as an input into memory as large as the slots)";
    let mut table = Table::new(title, "memcpy");
    for kernel in [Kernel::Off, Kernel::On] {
        for (readouts, builders) in SHAPES {
            for batch in BATCHES {
                let case = Case { program, kernel, readouts, builders, batch };
                table_rows(&mut table, &case, &folder, rounds, seconds)?;
            }
        }
    }
    Ok(table)
}

/// Deals the camera's 30 sources out to so many readout units, each with a stream file of its own.
fn deal(folder: &Path, readouts: usize) -> Result<(), Box<dyn Error>> {
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
}

fn table_rows(
    table: &mut Table,
    case: &Case<'_>,
    folder: &Path,
    rounds: usize,
    seconds: f64,
) -> Result<(), Box<dyn Error>> {
    let mut rates = Vec::new();
    let mut baselines = Vec::new();
    // A short run tells how many passes fill the time.
    let mut replay = 20;
    let probe = case.run(folder, replay)?;
    let rate = probe.events as f64 / probe.duration_s.0.max(1e-6);
    replay = ((rate * seconds / 32.0) as u64).clamp(20, 1_000_000);
    let mut last = probe;
    for _ in 0..rounds {
        last = case.run(folder, replay)?;
        rates.push(last.payload_bytes.0 as f64 / last.duration_s.0 / 1e9);
        baselines.extend(last.memcpy.map(|memcpy| memcpy.bytes_per_s.0 / 1e9));
    }
    let (rate, baseline) = (median(&rates).unwrap_or(0.0), median(&baselines).unwrap_or(0.0));
    let kernel = if case.kernel == Kernel::On { "cluster7" } else { "no kernel" };
    let name = format!("{}→{} batch {:3} {kernel}", case.readouts, case.builders, case.batch);
    eprintln!("{name}: {rate:.2} GB/s, memcpy {baseline:.2} GB/s");
    table.push(Figure::against(name, rate, "GB/s", baseline));
    let peak = |what: &str| {
        let peaks = last.units.iter().filter(|unit| unit.name.starts_with(what));
        peaks.filter_map(|unit| unit.peak_memory_bytes).map(|bytes| bytes.0).max()
    };
    if case.batch == 16 && case.kernel == Kernel::Off {
        // One copy costs one memcpy's time; whoever does not copy takes far less.
        let copy = 1.0 / baseline;
        let gigabytes = last.payload_bytes.0 as f64 / 1e9;
        for what in ["readout", "builder", "card", "event manager"] {
            let units = last.units.iter().filter(|unit| unit.name.starts_with(what));
            let time: f64 = units.filter_map(|unit| unit.cpu_s).map(|time| time.0).sum();
            let name = format!(
                "{}→{} batch {:3} processor time of {what}s",
                case.readouts, case.builders, case.batch
            );
            table.push(Figure::against(name, time / gigabytes, "s/GB", copy));
        }
    }
    if case.batch == 64 && case.kernel == Kernel::On {
        for what in ["readout", "builder", "card"] {
            if let Some(bytes) = peak(what) {
                let name = format!(
                    "{}→{} batch {:3} peak memory of a {what}",
                    case.readouts, case.builders, case.batch
                );
                table.push(Figure::alone(name, bytes as f64 / 1e6, "MB"));
            }
        }
    }
    Ok(())
}

impl Case<'_> {
    fn run(&self, folder: &Path, replay: u64) -> Result<RunReport, Box<dyn Error>> {
        let path = folder.join("bench.toml");
        save(&path, &self.configuration(replay))?;
        let json = folder.join("bench.json");
        let output = Command::new(self.program)
            .args(["evb", "run", "--json"])
            .args([&json, &path])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .output()?;
        // A run that failed has a report, too, unless it could not begin.
        let text = std::fs::read(&json).map_err(|_| String::from_utf8_lossy(&output.stderr).into_owned())?;
        std::fs::remove_file(&json)?;
        let report: RunReport = serde_json::from_slice(&text)?;
        match report.derived() {
            derived if derived.success => Ok(report),
            derived => Err(format!("a run failed: {}", derived.problems.join("; ")).into()),
        }
    }

    fn configuration(&self, replay: u64) -> String {
        let Self { kernel, readouts, builders, batch, .. } = self;
        let slots = (EVENTS_IN_SLOTS / batch).clamp(4, 64);
        let mut text =
            format!("[run]\nname = \"bench\"\nbatch = {batch}\nreplay = {replay}\ntimeout_ms = 10000\n");
        for unit in 0..*readouts {
            let file = input(*readouts, unit);
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
