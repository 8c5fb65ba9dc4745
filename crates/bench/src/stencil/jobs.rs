//! `millstream bench stencil`: the kernel beside C, numba and numpy; whole jobs, and the kernel as WebAssembly,
//! beside the bare kernel.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use super::{OneThread, Options, python_in, run as run_kernel};
use crate::memcpy::{Kind, memcpy};
use crate::{Figure, Table, median};
use millstream_card::region::kernel::{Banks, Loader as _, RegionKernel, Run, Unattended, Words};
use millstream_card::region::stencil::{BUILTIN, StencilArguments};
use millstream_card::{Memory, Span};
use millstream_offload::emulated::{CardProcess, start_cards};
use millstream_offload::grid::{Grid, Shape};
use millstream_offload::job;
use millstream_offload::plan::Plan;
use millstream_offload::recovery::Crew as _;
use millstream_offload::remote::{CardAddress, LeaseTerms, LeasedRow};
use millstream_offload::worker::Worker as _;
use millstream_rdma::device::{self, DeviceSelector};
use millstream_shm::thread;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Sweeps of a job; with so many, transfers can hide.
const ITERATIONS: u64 = 100;

/// What a whole job may take beyond the bare kernel's time [%].
const MOST_OVERHEAD: f64 = 10.0;

/// Sides of the grid that WebAssembly computes, and its sweeps: it makes each through memory.
const WASM_SIDE: u64 = 1024;
const WASM_SWEEPS: u64 = 100;

const TERMS: LeaseTerms = LeaseTerms { duration: Duration::from_secs(20), patience: Duration::from_secs(20) };

/// The example, as it stands in the repository, and what it needs beside it.
const EXAMPLE: [(&str, &str); 2] = [
    ("jacobi.rs", include_str!("../../../../examples/kernels/jacobi.rs")),
    ("millstream.rs", include_str!("../../../../examples/kernels/millstream.rs")),
];

/// All figures; `program` is `millstream`, which serves the cards.
///
/// # Errors
/// Whatever stands in the way, for people.
pub fn run(program: &Path, out: &Path, side: usize, rounds: usize, python: Option<&Path>) -> Outcome<Table> {
    let python = python.map(Path::to_owned).or_else(|| python_in(out));
    let folder = out.join("stencil");
    let options = Options { side, rounds, folder: folder.clone(), python };
    let (mut table, notes) = run_kernel(&options)?;
    notes.iter().for_each(|note| println!("{note}"));
    jobs(&mut table, program, side as u64, rounds)?;
    match compile(&folder) {
        Ok(image) => as_wasm(&mut table, &image, rounds)?,
        Err(why) => println!("WebAssembly: not run, {why}"),
    }
    Ok(table)
}

/// Whole jobs alone.
///
/// # Errors
/// Whatever stands in the way, for people.
pub fn run_jobs(program: &Path, side: u64, rounds: usize) -> Outcome<Table> {
    let title = format!("Whole stencil jobs, {side}x{side} points (medians of {rounds} interleaved rounds)");
    let mut table = Table::new(&title, "bare kernel, or what was asked for");
    jobs(&mut table, program, side, rounds)?;
    Ok(table)
}

/// The kernel by itself, on memory as cards have it.
struct Bare {
    memory: Memory,
    kernel: Box<dyn RegionKernel>,
    words: Words,
    points: f64,
}

impl Bare {
    fn new(
        kernel: Box<dyn RegionKernel>,
        side: u64,
        sweeps: u64,
        words: &dyn Fn(u64) -> Words,
    ) -> Outcome<Bare> {
        let plane = (side * side * 4).next_multiple_of(2 << 20);
        let memory = Memory::anonymous(2 * plane)?;
        memory.prefault(Span::new(0, 2 * plane))?;
        Ok(Bare { memory, kernel, words: words(plane), points: (side * side * sweeps) as f64 })
    }

    /// The built-in kernel, all rows and sweeps in one run.
    fn native(side: u64, sweeps: u64) -> Outcome<Bare> {
        let words = |plane| {
            let arguments = StencilArguments {
                double: false,
                rows: side,
                columns: side,
                pitch: side,
                source: 0,
                destination: plane,
                sweeps,
                ranges: [0..0, 0..0],
            };
            arguments.to_words()
        };
        Bare::new((BUILTIN.make)(), side, sweeps, &words)
    }

    fn points_per_second(&mut self) -> Outcome<f64> {
        let control = Unattended::default();
        let banks = Banks::new(&self.memory, self.memory.size(), 1);
        let start = Instant::now();
        self.kernel.run(&mut Run::new(banks, self.words, &control))?;
        Ok(self.points / start.elapsed().as_secs_f64())
    }
}

/// Which cores compute and which copy.
struct Cores {
    name: String,
    /// Of the cards, and of the bare kernel.
    compute: Vec<usize>,
    /// Of this process while it writes and reads.
    copy: Vec<usize>,
}

impl Cores {
    /// Every core does both: what a transfer takes from a core, the kernel does not get.
    fn shared() -> Outcome<Cores> {
        let all = thread::affinity()?;
        Ok(Cores { name: format!("{} cores compute and copy", all.len()), compute: all.clone(), copy: all })
    }

    /// One core copies and the others compute, so that transfers can hide, as they do behind a card that is a device.
    /// None if there is one core only.
    fn apart() -> Outcome<Option<Cores>> {
        let all = thread::affinity()?;
        let Some((&copy, compute)) = all.split_first().filter(|(_, others)| !others.is_empty()) else {
            return Ok(None);
        };
        let (count, plural) = (compute.len(), if compute.len() == 1 { "" } else { "s" });
        let verb = if count == 1 { "computes" } else { "compute" };
        let name = format!("{count} core{plural} {verb}, another one copies");
        Ok(Some(Cores { name, compute: compute.to_vec(), copy: vec![copy] }))
    }
}

/// Cards in processes of their own, and a grid here.
struct Whole {
    plan: Plan,
    grid: Grid,
    // Before the processes: a lease goes before its card.
    row: LeasedRow,
    _processes: Vec<CardProcess>,
}

impl Whole {
    fn new(program: &Path, side: u64, cards: usize, cores: &Cores) -> Outcome<Whole> {
        let shape = Shape { rows: side, columns: side, double: false };
        let device = device::open(&DeviceSelector::from_environment())?;
        let plan = Plan::new(shape, ITERATIONS, &vec![u64::MAX; cards], None)?;
        let processes = thread::with_affinity(&cores.compute, || start_cards(program, &plan))??;
        let places: Vec<_> = processes.iter().map(|card| CardAddress::from(card.address())).collect();
        let row = LeasedRow::take(&device, &places, &[], TERMS)?;
        let memories: Vec<_> = row.cards().iter().map(|worker| worker.memory_bytes()).collect();
        let plan = Plan::new(shape, ITERATIONS, &memories, None)?;
        let mut grid = Grid::zeros(shape, Some(&device))?;
        grid.generate(0);
        Ok(Whole { plan, grid, row, _processes: processes })
    }

    /// Seconds from the first byte written to the last one read.
    fn seconds(&mut self, cores: &Cores) -> Outcome<f64> {
        let never = AtomicBool::new(false);
        let (plan, grid, workers) = (&self.plan, &mut self.grid, self.row.workers());
        let report =
            thread::with_affinity(&cores.copy, || job::run(plan, grid, None, workers, &|_| {}, &never))??;
        Ok(report.wall_s)
    }
}

/// Whole jobs, from the first byte written to the last one read, beside the bare kernel; and what they take more than it.
fn jobs(table: &mut Table, program: &Path, side: u64, rounds: usize) -> Outcome<()> {
    jobs_on(table, program, side, rounds, &Cores::shared()?, &[1, 2])?;
    match Cores::apart()? {
        Some(cores) => jobs_on(table, program, side, rounds, &cores, &[1]),
        None => {
            println!("jobs with a core that only copies: not run, there is one core");
            Ok(())
        }
    }
}

fn jobs_on(
    table: &mut Table,
    program: &Path,
    side: u64,
    rounds: usize,
    cores: &Cores,
    cards: &[usize],
) -> Outcome<()> {
    let points = (side * side * ITERATIONS) as f64;
    let bare = || Bare::native(side, ITERATIONS);
    let mut bare = thread::with_affinity(&cores.compute, bare)??;
    let mut wholes =
        cards.iter().map(|&cards| Whole::new(program, side, cards, cores)).collect::<Outcome<Vec<_>>>()?;
    let (mut bares, mut copies) = (Vec::new(), Vec::new());
    let mut times = vec![Vec::new(); wholes.len()];
    let mut overheads = times.clone();
    // The first round warms up.
    for round in 0..=rounds {
        let alone = points / thread::with_affinity(&cores.compute, || bare.points_per_second())??;
        let jobs = wholes.iter_mut().map(|whole| whole.seconds(cores)).collect::<Outcome<Vec<_>>>()?;
        let copied = thread::with_affinity(&cores.copy, || copying(side))??;
        if round > 0 {
            bares.push(points / alone / 1e9);
            copies.push(100.0 * copied / (alone * cores.compute.len() as f64));
            for (index, job) in jobs.into_iter().enumerate() {
                times[index].push(points / job / 1e9);
                overheads[index].push(100.0 * (job / alone - 1.0));
            }
        }
    }
    let middle = |values: &[f64]| median(values).unwrap_or(0.0);
    let Cores { name, .. } = cores;
    for (index, &cards) in cards.iter().enumerate() {
        let plural = if cards == 1 { "" } else { "s" };
        let job = format!("whole job, {ITERATIONS} sweeps, {cards} card{plural}, {name}");
        let rate = middle(&times[index]);
        table.push(Figure::against(
            format!("{job}, beside the bare kernel"),
            rate,
            "G points/s",
            middle(&bares),
        ));
        let more = format!("the same: time beyond the bare kernel's, asked for {MOST_OVERHEAD} %");
        table.push(Figure::against(more, middle(&overheads[index]), "%", MOST_OVERHEAD));
    }
    if cores.copy == cores.compute {
        let name =
            "the same: time beyond the bare kernel's that copying the grid in and out takes from the cores";
        table.push(Figure::alone(name, middle(&copies), "%"));
    }
    Ok(())
}

/// Seconds that one core takes to copy the grid twice, as often as a job does.
fn copying(side: u64) -> Outcome<f64> {
    // As large as requests of a transfer are, in more memory than caches hold.
    const BLOCK: usize = 16 << 20;
    let bytes = 2 * 4 * side * side;
    Ok(bytes as f64 / 1e9 / memcpy(Kind::Landing, BLOCK, 8 * BLOCK, 8 * BLOCK, Duration::from_millis(60))?)
}

/// The example kernel beside the built-in one.
fn as_wasm(table: &mut Table, image: &[u8], rounds: usize) -> Outcome<()> {
    let kernel = millstream_wasm::Wasm.load(image)?.kernel;
    let words = |plane| {
        let mut words = Words::default();
        words[..5].copy_from_slice(&[WASM_SIDE, WASM_SIDE, 0, plane, WASM_SWEEPS]);
        words
    };
    let mut wasm = Bare::new(kernel, WASM_SIDE, WASM_SWEEPS, &words)?;
    let mut bare = Bare::native(WASM_SIDE, WASM_SWEEPS)?;
    let mut plain = OneThread::new(WASM_SIDE as usize, WASM_SWEEPS as usize)?;
    let mut rates = [Vec::new(), Vec::new(), Vec::new()];
    for round in 0..=rounds {
        let measured = [wasm.points_per_second()?, plain.points_per_second(), bare.points_per_second()?];
        if round > 0 {
            rates.iter_mut().zip(measured).for_each(|(rates, rate)| rates.push(rate));
        }
    }
    let [wasm, plain, bare] = rates.map(|rates| median(&rates).unwrap_or(0.0) / 1e9);
    let name = |beside| format!("WebAssembly, {WASM_SIDE}x{WASM_SIDE}, beside native {beside}");
    table.push(Figure::against(name("sweep by sweep on 1 thread"), wasm, "G points/s", plain));
    table.push(Figure::against(name("as it is"), wasm, "G points/s", bare));
    Ok(())
}

/// Compiles the example as its first lines say.
fn compile(folder: &Path) -> Result<Vec<u8>, String> {
    let write = |(name, text): (&str, &str)| std::fs::write(folder.join(name), text);
    EXAMPLE.into_iter().try_for_each(write).map_err(|error| error.to_string())?;
    let image: PathBuf = folder.join("jacobi.wasm");
    let output = Command::new("rustc")
        .args(["--edition", "2024", "--target", "wasm32-unknown-unknown", "-O", "-C", "panic=abort"])
        .args(["-C", "strip=debuginfo", "-C", "target-feature=+simd128", "--crate-type", "cdylib", "-o"])
        .arg(&image)
        .arg(folder.join("jacobi.rs"))
        .output()
        .map_err(|error| format!("rustc: {error}"))?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    std::fs::read(image).map_err(|error| error.to_string())
}
