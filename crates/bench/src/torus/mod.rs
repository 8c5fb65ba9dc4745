//! `millstream bench torus`: the torus beside a full mesh, a bare WRITE, memcpy, and its own promises.
//!
//! Each round launches 2x2x2 nodes twice, as a torus and as a mesh, with [`client`] as the application. The mesh's client also
//! measures a bare WRITE with immediate data between the same two processes.

mod bare;
mod chain;
pub mod client;
mod monitoring;
mod outside;
mod predicted;
mod simulated;

use std::collections::BTreeMap;
use std::error::Error;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use millstream_torus::engine::EngineOptions;
use millstream_torus::launch::{Launcher, run_direct};
use millstream_torus_core::Dimensions;

use crate::memcpy::{Pages, memcpy};
use crate::{Benchmark, Figure, Table, median};
use chain::Chain;

/// This benchmark.
pub const BENCHMARK: Benchmark = Benchmark {
    name: "torus",
    title: "The torus",
    measures: "Puts and gets over 1, 2 and 3 hops of a 2x2x2 torus of processes, sums and messages of all nodes, and the same \
               over a full mesh (`direct`); packets through a chain of threads that only copy; a host outside of the torus through the seventh port of node 0; the model's prediction of the same torus from measurements over one hop; packets, bytes and processor time of an idle torus with and without monitoring; 1,000 simulated deaths of a \
               host against the bound of their detection; all nodes of larger tori on one thread.",
    baseline: "for 8 bytes a bare WRITE with immediate data: polled for the mesh, with its wake-up for the torus, where each \
               packet wakes a process; for large sizes memcpy divided by the number of \
               copies; for a host outside a node that does the same; for operations of all nodes the mesh, and the model; for monitoring the run without it, and processes that only wake up as often; for detection the bound",
    values: "medians over the rounds for puts, gets and operations of all nodes, also of the host outside; one \
             measurement for memcpy, the chains of threads, monitoring and the tori on one thread",
    command: "make bench-torus",
};

/// Nodes at 1, 2 and 3 hops from node 0 of 2x2x2.
pub(crate) const TARGETS: [(u16, u32); 3] = [(1, 1), (3, 2), (7, 3)];
/// Sizes of puts and gets (bytes).
pub(crate) const SIZES: [usize; 5] = [8, 4096, 65_536, 1 << 20, 4 << 20];
/// Sizes from here on are reported as bandwidth.
const LARGE: usize = 65_536;

/// Names of operations of all nodes.
const SUM: &str = "sum of 8 B, all nodes";
const ALL_TO_ALL: &str = "4 KiB from each node to each node";
/// Size of a message of [`ALL_TO_ALL`].
const ALL_TO_ALL_BYTES: usize = 4096;

type Outcome<T> = Result<T, Box<dyn Error>>;
/// Measured values by name.
type Values = BTreeMap<String, Vec<f64>>;

/// What to run.
#[derive(Clone, Debug)]
pub struct Options {
    /// The `millstream` program.
    pub program: PathBuf,
    /// Device, as in `MILLSTREAM_DEVICE`.
    pub device: Option<String>,
    /// Folder for the clients' results.
    pub folder: PathBuf,
    /// Rounds.
    pub rounds: usize,
}

/// Measures everything. Returns notes for the reader, too.
///
/// # Errors
/// The first error of a process.
pub fn run(options: &Options) -> Outcome<(Table, Vec<String>)> {
    std::fs::create_dir_all(&options.folder)?;
    let torus: Dimensions = "2x2x2".parse()?;
    let (mut routed, mut direct) = (Values::new(), Values::new());
    for _ in 0..options.rounds {
        let file = options.folder.join("torus-client.json");
        let mut launched = launcher(options, torus, 0).launch()?;
        launched.run(&client_command(&options.program, &file))?;
        launched.finish()?;
        collect(&file, &mut routed)?;
        let command = client_command(&options.program, &file);
        run_direct(torus, options.device.as_deref(), &command, &AtomicBool::new(false))?;
        collect(&file, &mut direct)?;
    }
    let mut table = Table::new(BENCHMARK, options.rounds);
    links(&mut table, &routed, &direct)?;
    for name in [SUM, ALL_TO_ALL] {
        let baseline = value(&direct, name)?;
        table.push(Figure::with_baseline(
            format!("{name}, torus; baseline direct"),
            value(&routed, name)?,
            "µs",
            baseline,
        ));
    }
    let copy = memcpy(Pages::Huge, 1 << 20, 1 << 20, 1 << 20, Duration::from_millis(200))?;
    let notes = predicted::compare(&mut table, options, torus, &routed, copy)?;
    outside::measure(&mut table, options, &routed)?;
    monitoring::measure(&mut table, options)?;
    simulated::detection(&mut table);
    simulated::sizes(&mut table, options)?;
    Ok((table, notes))
}

fn launcher(options: &Options, dimensions: Dimensions, supervisors: usize) -> Launcher {
    Launcher {
        arguments: vec!["torus".into()],
        device: options.device.clone(),
        supervisors,
        ..Launcher::new(dimensions, &options.program)
    }
}

fn client_command(program: &Path, file: &Path) -> Vec<OsString> {
    vec![program.into(), "bench".into(), "torus-client".into(), "--results".into(), file.into()]
}

/// Adds the values of a client's file.
fn collect(file: &Path, values: &mut Values) -> Outcome<()> {
    let measured: BTreeMap<String, f64> = serde_json::from_str(&std::fs::read_to_string(file)?)?;
    std::fs::remove_file(file)?;
    measured.into_iter().for_each(|(name, value)| values.entry(name).or_default().push(value));
    Ok(())
}

fn value(values: &Values, name: &str) -> Outcome<f64> {
    let measured = values.get(name).and_then(|values| median(values));
    measured.ok_or_else(|| format!("the client did not measure {name:?}").into())
}

/// Puts and gets.
fn links(table: &mut Table, routed: &Values, direct: &Values) -> Outcome<()> {
    let [polled, woken] = [bare::POLLED, bare::WITH_WAKE_UP].map(|name| value(direct, name));
    let (polled, woken) = (polled?, woken?);
    table.push(Figure::without_baseline(bare::POLLED, polled, "µs"));
    table.push(Figure::without_baseline(bare::WITH_WAKE_UP, woken, "µs"));
    let mut first = 0.0;
    for size in SIZES {
        let text = size_name(size);
        // The puts write the same range again and again, so the copies do, too.
        let block = size.max(64);
        let copy = memcpy(Pages::Huge, block, block, block, Duration::from_millis(200))?;
        for operation in ["put", "get"] {
            let name = client::name(operation, size, 1);
            let mesh = value(direct, &name)?;
            let unit = if size >= LARGE { "GB/s" } else { "µs" };
            let label = format!("{operation} {text}, direct");
            table.push(match (operation, size) {
                ("put", 8) => Figure::with_baseline(label, mesh, unit, polled),
                (_, LARGE..) => Figure::with_baseline(label, mesh, unit, copy),
                _ => Figure::without_baseline(label, mesh, unit),
            });
            for (_, hops) in TARGETS {
                let measured = value(routed, &client::name(operation, size, hops))?;
                let label =
                    format!("{operation} {text}, torus, {hops} {}", if hops == 1 { "hop" } else { "hops" });
                table.push(match (operation, size) {
                    ("put", 8) => Figure::with_baseline(label, measured, unit, woken),
                    (_, LARGE..) => Figure::with_baseline(label, measured, unit, copy / f64::from(hops + 1)),
                    _ => Figure::with_baseline(label, measured, unit, mesh),
                });
                if (operation, size, hops) == ("put", 8, 1) {
                    first = measured;
                }
            }
        }
    }
    copies_between_cores(table)?;
    let third = value(routed, &client::name("put", 8, 3))?;
    table.push(Figure::with_baseline(
        "a further hop of a put of 8 B; baseline the first",
        (third - first) / 2.0,
        "µs",
        first,
    ));
    Ok(())
}

/// What copies from core to core reach, against the copies of one core: the torus' packets make these, too.
fn copies_between_cores(table: &mut Table) -> Outcome<()> {
    let engine = EngineOptions::of_processes();
    for size in SIZES.into_iter().filter(|&size| size >= LARGE) {
        let copy = memcpy(Pages::Huge, size, size, size, Duration::from_millis(200))?;
        for (_, hops) in TARGETS {
            let copies = hops as usize + 1;
            let chain = Chain { copies, packet: engine.packet as usize, slots: engine.slots.into(), size };
            let rate = chain.throughput(Duration::from_millis(400))?;
            let label = format!("{} through {copies} threads, no torus", size_name(size));
            table.push(Figure::with_baseline(label, rate, "GB/s", copy / copies as f64));
        }
    }
    Ok(())
}

fn size_name(size: usize) -> String {
    match size {
        0..1024 => format!("{size} B"),
        1024..1_048_576 => format!("{} KiB", size >> 10),
        _ => format!("{} MiB", size >> 20),
    }
}
