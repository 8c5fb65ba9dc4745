//! `millstream bench gpu`: a card of GPU memory beside an emulated card, both reached by packets.

use std::error::Error;
use std::path::Path;
use std::time::Instant;

use millstream_card::control::{KernelSource, RunRequest};
use millstream_card::{Card, RemoteCard, RemoteError};
use millstream_card_abi::MemoryRange;
use millstream_fragment::unpack::unpack;
use millstream_gpu::{CUDA, Gpu};
use millstream_rdma::device::{self, DeviceSelector};
use millstream_rdma::loader::{self, ENV_DEVICE, ENV_PATH};
use millstream_rdma::{Access, Region};

use crate::card::{CardServer, TIMEOUT};
use crate::{Benchmark, Figure, Table, event_run, median};

/// This benchmark.
pub const BENCHMARK: Benchmark = Benchmark {
    name: "gpu",
    title: "Cards of GPU memory",
    measures: "A card of GPU memory: WRITE and READ of 1 MiB by RoCEv2 packets on one host, loads and stores of a local client \
               through its mapping, the time from a doorbell to the interrupt, and the event builder with the camera's \
               trigger and checksums on two cards of the GPU.",
    baseline: "the same with emulated cards, in the same run; their kernels run on the host's processor",
    values: "medians over the rounds",
    command: "millstream bench gpu",
};

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Bytes of a transfer, and of the buffers.
const SIZE: usize = 1 << 20;
const WINDOW: usize = 32 << 20;

/// What is measured of a kind of card.
#[derive(Default)]
struct Measured {
    write: Vec<f64>,
    read: Vec<f64>,
    store: Vec<f64>,
    load: Vec<f64>,
    doorbell: Vec<f64>,
    built: Vec<f64>,
    events: Vec<f64>,
}

/// Measures cards of `kind`: `cuda:N`. `program` is the path of `millstream`; `packed` has the camera's data; `out` has room for
/// it.
///
/// # Errors
/// The first error of a card, of a connection or of a run.
pub fn run(program: &Path, packed: &Path, out: &Path, kind: &str, rounds: usize) -> Outcome<Table> {
    if std::env::var(ENV_PATH).is_ok_and(|path| path == "wire") {
        return measure(program, packed, out, kind, rounds);
    }
    Err(loader::restart(&[(ENV_PATH, "wire"), (ENV_DEVICE, "soft")]).into())
}

fn measure(program: &Path, packed: &Path, out: &Path, kind: &str, rounds: usize) -> Outcome<Table> {
    let folder = out.join("gpu");
    unpack(packed, &folder.join("data"))?;
    std::fs::copy(packed.join("patches.csv"), folder.join("data/patches.csv"))?;
    let folder = folder.canonicalize()?;
    let mut measured: [Measured; 2] = Default::default();
    // The first round is a warm-up.
    for round in 0..=rounds {
        let mut discarded = Measured::default();
        for (kind, measured) in [kind, "emulated"].into_iter().zip(&mut measured) {
            let measured = if round == 0 { &mut discarded } else { measured };
            transfers(program, kind, measured)?;
            events(program, &folder, kind, measured)?;
            if let (Some(write), Some(built)) = (measured.write.last(), measured.built.last()) {
                eprintln!("round {round}, {kind}: WRITE {write:.2} GB/s, events {built:.2} GB/s");
            }
        }
    }
    let [gpu, emulated] = &measured;
    let mut table = Table::new(BENCHMARK, rounds);
    // The description of a machine does not name its GPU.
    let device = name_of(kind)?;
    let mut push = |name: &str, unit, values: fn(&Measured) -> &[f64]| {
        if let (Some(value), Some(baseline)) = (median(values(gpu)), median(values(emulated))) {
            table.push(Figure::with_baseline(format!("{device}, {name}"), value, unit, baseline));
        }
    };
    push("WRITE of 1 MiB", "GB/s", |measured| &measured.write);
    push("READ of 1 MiB", "GB/s", |measured| &measured.read);
    push("stores of a local client", "GB/s", |measured| &measured.store);
    push("loads of a local client", "GB/s", |measured| &measured.load);
    push("doorbell to interrupt, median", "µs", |measured| &measured.doorbell);
    push("event builder with trigger and checksums", "GB/s", |measured| &measured.built);
    push("event builder with trigger and checksums, events", "events/s", |measured| &measured.events);
    Ok(table)
}

/// Name of the GPU of a kind of memory; the kind, if it is no GPU's.
fn name_of(kind: &str) -> Outcome<String> {
    match kind.strip_prefix("cuda:") {
        Some(index) => Ok(Gpu::open(CUDA, index.parse()?)?.name().to_owned()),
        None => Ok(kind.to_owned()),
    }
}

/// RDMA from this process, and its own loads and stores.
fn transfers(program: &Path, kind: &str, measured: &mut Measured) -> Outcome<()> {
    let device = device::open(&DeviceSelector::from_environment())?;
    let server = CardServer::of(program, kind, "always")?;
    let card = server.connect(&device)?;
    let buffer = Region::landing(&device, c"bench-gpu", WINDOW, Access::LOCAL_WRITE)?;
    buffer.populate()?;
    let place = |at: usize| (at as u64, MemoryRange::new(at as u64, SIZE as u64));
    let parts: Vec<_> = (0..WINDOW).step_by(SIZE).map(place).collect();
    let rate = |pass: &dyn Fn() -> Result<(), RemoteError>| -> Outcome<f64> {
        pass()?;
        let started = Instant::now();
        (0..4).try_for_each(|_| pass())?;
        Ok((4 * WINDOW) as f64 / started.elapsed().as_secs_f64() / 1e9)
    };
    measured.write.push(rate(&|| card.write_many(&buffer, &parts))?);
    measured.read.push(rate(&|| card.read_many(&buffer, &parts))?);
    measured.doorbell.push(doorbell(&card)?);
    let local = Card::open(&server.name, TIMEOUT)?;
    let mut bytes = vec![7; WINDOW];
    let copy = |copy: &mut dyn FnMut() -> Outcome<()>| -> Outcome<f64> {
        copy()?;
        let started = Instant::now();
        copy()?;
        Ok(WINDOW as f64 / started.elapsed().as_secs_f64() / 1e9)
    };
    measured.store.push(copy(&mut || Ok(local.memory().write(0, &bytes)?))?);
    measured.load.push(copy(&mut || Ok(local.memory().read(0, &mut bytes)?))?);
    Ok(())
}

/// Median time from a doorbell to the interrupt of a kernel without work \[µs\].
fn doorbell(card: &RemoteCard) -> Outcome<f64> {
    card.load(0, KernelSource::Builtin("null"))?;
    let mut times = Vec::new();
    for _ in 0..1000 {
        let started = Instant::now();
        card.run(0, &RunRequest::new(&[]), TIMEOUT)?;
        times.push(started.elapsed().as_secs_f64() * 1e6);
    }
    median(&times).ok_or_else(|| "no round".into())
}

/// The event builder: three readout units, two builder units with a card each.
fn events(program: &Path, folder: &Path, kind: &str, measured: &mut Measured) -> Outcome<()> {
    let mut text = "[run]\nname = \"gpu\"\nbatch = 32\nreplay = 1000\n".to_owned();
    for number in 1..=3 {
        text += &format!("[[readout]]\nname = \"crate{number}\"\ninput = \"data/crate{number}.mfs\"\n");
    }
    for unit in 0..2 {
        text += &format!(
            "[[builder]]\nname = \"bu{unit}\"\ncard = \"card{unit}\"\nslots = 8\n\
             [[card]]\nname = \"card{unit}\"\nkind = \"{kind}\"\nmemory = \"128MiB\"\nkernel = \"cluster7\"\n\
             patches = \"data/patches.csv\"\nthreshold = 336\nverify = true\n"
        );
    }
    let report = event_run::run(program, folder, &text)?;
    measured.built.push(report.payload_bytes.0 as f64 / 1e9 / report.duration_s.0);
    measured.events.push(report.events as f64 / report.duration_s.0);
    Ok(())
}
