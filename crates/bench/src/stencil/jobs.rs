//! `millstream bench stencil-jobs`: whole stencil jobs on emulated cards, against the kernel alone.

use std::error::Error;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use millstream_offload::card::StencilCard as _;
use millstream_offload::emulated::{CardProcess, start_cards};
use millstream_offload::grid::{Grid, Shape};
use millstream_offload::job;
use millstream_offload::leased::{CardAddress, LeaseTerms, LeasedCards};
use millstream_offload::plan::Plan;
use millstream_offload::recovery::CardGroup as _;
use millstream_rdma::device::{self, DeviceSelector};
use millstream_shm::thread;

use super::region_kernel::BareKernel;
use crate::memcpy::{Pages, memcpy};
use crate::{Benchmark, Figure, Table, median};

/// This benchmark.
pub const BENCHMARK: Benchmark = Benchmark {
    name: "stencil-jobs",
    title: "Stencil jobs",
    measures: "Whole jobs of 100 sweeps on one and two emulated cards, from the first byte written to the last byte read, and \
               their overhead over the kernel alone. In one set-up all cores compute and copy; in the other one core only \
               copies, as the host of a real card does. The share of the overhead that copying the grid in and out must take \
               is a figure too.",
    baseline: "the kernel alone on the same grid and cores; for the overhead the target value",
    values: "medians over the rounds",
    command: "make bench-card",
};

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Sweeps of a job: enough for transfers to overlap with computation.
const ITERATIONS: u64 = 100;

/// Target value of the overhead [%].
const MOST_OVERHEAD: f64 = 10.0;

const TERMS: LeaseTerms =
    LeaseTerms { duration: Duration::from_secs(20), acquire_timeout: Duration::from_secs(20) };

/// Measures whole jobs on a grid of `side` × `side` points. `program` is the path of `millstream`, which serves the cards.
///
/// # Errors
/// The first error of a card or of a job.
pub fn run(program: &Path, side: u64, rounds: usize) -> Outcome<Table> {
    let mut table = Table::new(BENCHMARK, rounds);
    measure(&mut table, program, side, &CoreAssignment::shared()?, &[1, 2])?;
    match CoreAssignment::separate()? {
        Some(cores) => measure(&mut table, program, side, &cores, &[1])?,
        None => table.not_measured("jobs with a core that only copies", "there is one core"),
    }
    Ok(table)
}

/// Which cores compute and which copy.
struct CoreAssignment {
    name: String,
    /// Cores of the cards, and of the kernel alone.
    compute: Vec<usize>,
    /// Cores of this process while it writes and reads.
    copy: Vec<usize>,
}

impl CoreAssignment {
    /// All cores compute and copy, so that copies take time from the kernel.
    fn shared() -> Outcome<CoreAssignment> {
        let all = thread::affinity()?;
        let name = format!("{} cores compute and copy", all.len());
        Ok(CoreAssignment { name, compute: all.clone(), copy: all })
    }

    /// One core copies and the others compute, so that copies overlap with the kernel, as with a real card. `None` if there
    /// is only one core.
    fn separate() -> Outcome<Option<CoreAssignment>> {
        let all = thread::affinity()?;
        let Some((&copy, compute)) = all.split_first().filter(|(_, others)| !others.is_empty()) else {
            return Ok(None);
        };
        let plural = if compute.len() == 1 { " computes" } else { "s compute" };
        let name = format!("{} core{plural}, another one copies", compute.len());
        Ok(Some(CoreAssignment { name, compute: compute.to_vec(), copy: vec![copy] }))
    }
}

/// A grid, and leased cards in separate processes.
struct PreparedJob {
    plan: Plan,
    grid: Grid,
    // Before the processes: a lease is released before its card ends.
    cards: LeasedCards,
    _processes: Vec<CardProcess>,
}

impl PreparedJob {
    fn new(program: &Path, side: u64, cards: usize, cores: &CoreAssignment) -> Outcome<PreparedJob> {
        let shape = Shape { rows: side, columns: side, double: false };
        let device = device::open(&DeviceSelector::from_environment())?;
        let plan = Plan::new(shape, ITERATIONS, &vec![u64::MAX; cards], None)?;
        let processes = thread::with_affinity(&cores.compute, || start_cards(program, &plan))??;
        let places: Vec<_> = processes.iter().map(|card| CardAddress::from(card.address())).collect();
        let cards = LeasedCards::acquire(&device, &places, &[], TERMS)?;
        let memories: Vec<_> = cards.cards().iter().map(|card| card.memory_bytes()).collect();
        let plan = Plan::new(shape, ITERATIONS, &memories, None)?;
        let mut grid = Grid::zeros(shape, Some(&device))?;
        grid.generate(0);
        Ok(PreparedJob { plan, grid, cards, _processes: processes })
    }

    /// Runs the job once. Returns its time (s), from the first byte written to the last byte read.
    fn seconds(&mut self, cores: &CoreAssignment) -> Outcome<f64> {
        let never = AtomicBool::new(false);
        let (plan, grid, cards) = (&self.plan, &mut self.grid, self.cards.cards_mut());
        let report =
            thread::with_affinity(&cores.copy, || job::run(plan, grid, None, cards, &|_| {}, &never))??;
        Ok(report.wall_s)
    }
}

/// Jobs on each number of cards in turn with the kernel alone.
fn measure(
    table: &mut Table,
    program: &Path,
    side: u64,
    cores: &CoreAssignment,
    cards: &[usize],
) -> Outcome<()> {
    let points = (side * side * ITERATIONS) as f64;
    let mut kernel = thread::with_affinity(&cores.compute, || BareKernel::native(side, ITERATIONS))??;
    let prepared = cards.iter().map(|&cards| PreparedJob::new(program, side, cards, cores));
    let mut prepared = prepared.collect::<Outcome<Vec<_>>>()?;
    let (mut kernel_rates, mut copy_shares) = (Vec::new(), Vec::new());
    let mut job_rates = vec![Vec::new(); prepared.len()];
    let mut overheads = job_rates.clone();
    // The first round is a warm-up.
    for round in 0..=table.rounds() {
        let alone = points / thread::with_affinity(&cores.compute, || kernel.points_per_second())??;
        let jobs = prepared.iter_mut().map(|job| job.seconds(cores)).collect::<Outcome<Vec<_>>>()?;
        let copied = thread::with_affinity(&cores.copy, || copy_seconds(side))??;
        if round > 0 {
            kernel_rates.push(points / alone / 1e9);
            copy_shares.push(100.0 * copied / (alone * cores.compute.len() as f64));
            for (index, job) in jobs.into_iter().enumerate() {
                job_rates[index].push(points / job / 1e9);
                overheads[index].push(100.0 * (job / alone - 1.0));
            }
        }
    }
    let middle = |values: &[f64]| median(values).unwrap_or(0.0);
    let name = &cores.name;
    for (index, &cards) in cards.iter().enumerate() {
        let plural = if cards == 1 { "" } else { "s" };
        let job = format!("{side}×{side}, {ITERATIONS} sweeps, {cards} card{plural}, {name}");
        let (rate, kernel) = (middle(&job_rates[index]), middle(&kernel_rates));
        table.push(Figure::with_baseline(format!("{job}, vs kernel alone"), rate, "G points/s", kernel));
        let overhead = format!("{job}, overhead, vs target");
        table.push(Figure::with_baseline(overhead, middle(&overheads[index]), "%", MOST_OVERHEAD));
    }
    if cores.copy == cores.compute {
        let name =
            format!("{side}×{side}, {ITERATIONS} sweeps, {name}, overhead of copying the grid in and out");
        table.push(Figure::without_baseline(name, middle(&copy_shares), "%"));
    }
    Ok(())
}

/// Seconds in which one core copies the grid twice, as a job does.
fn copy_seconds(side: u64) -> Outcome<f64> {
    // Blocks as large as the requests of a transfer, in buffers larger than the caches.
    const BLOCK: usize = 16 << 20;
    let bytes = 2 * 4 * side * side;
    let rate = memcpy(Pages::Huge, BLOCK, 8 * BLOCK, 8 * BLOCK, Duration::from_millis(60))?;
    Ok(bytes as f64 / 1e9 / rate)
}
