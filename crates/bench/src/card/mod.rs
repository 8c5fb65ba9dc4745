//! `millstream bench card`: card processes, used by this process as a remote node.

pub mod cluster7;

use std::error::Error;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use millstream_card::Card;
use millstream_card::control::{KernelSource, RunRequest};
use millstream_card::{RemoteCard, RemoteError, RemoteOptions};
use millstream_card_abi::dma::{DmaDescriptor, DmaOperation};
use millstream_card_abi::{CardName, MemoryRange};
use millstream_rdma::device::{self, DeviceSelector};
use millstream_rdma::{Access, Device, Region};
use millstream_shm::thread;

use crate::memcpy::memcpy_between;
use crate::{Benchmark, Figure, NameFilter, Table, median};

/// This benchmark.
pub const BENCHMARK: Benchmark = Benchmark {
    name: "card",
    title: "Cards on the network",
    measures: "RDMA between a node and two emulated cards, and between the cards, by transfer size; the time from a doorbell \
               by RDMA to the interrupt message; the CPU time of an idle card with a lease; the cluster7 kernel on the \
               camera's sources.",
    baseline: "memcpy between the same mapped buffers on the same core; for times the target value; for the kernel a copy of \
               the same fragments into the cache",
    values: "medians over the rounds; the CPU time of the idle card is one measurement of 4 s, and the times from a \
             doorbell to the interrupt are of one series of runs",
    command: "make bench-card",
};

type Outcome<T> = Result<T, Box<dyn Error>>;

const MEMORY: u64 = 256 << 20;
pub(crate) const TIMEOUT: Duration = Duration::from_secs(20);
const SIZES: [usize; 5] = [4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20];

/// Bytes that each measurement of a throughput moves, approximately. One pass over the memory comes first as
/// a warm-up of the caches, as in [`memcpy`].
const MOVED: usize = 512 << 20;

/// Measures the figures that `only` selects; `program` is the path of `millstream`, which serves the cards.
///
/// # Errors
/// The first error of a card process, of a connection or of an operation.
pub fn run(program: &Path, rounds: usize, only: &[String]) -> Outcome<Table> {
    let only = NameFilter(only);
    let device = device::open(&DeviceSelector::from_environment())?;
    let mut table = Table::new(BENCHMARK, rounds);
    cluster7::measure(&mut table, rounds, only)?;
    eprintln!("two cards of {} MiB, prefaulted", MEMORY >> 20);
    // Cores of a shared machine differ: a transfer is compared with memcpy on the core that makes the transfer.
    let cores = thread::affinity()?;
    let (node, cards) = (&cores[..1], &cores[cores.len() - 1..]);
    let (first, second) = thread::with_affinity(cards, || {
        Outcome::Ok((CardServer::start(program, "20")?, CardServer::start(program, "20")?))
    })??;
    let (one, other) = (first.connect(&device)?, second.connect(&device)?);
    let mapped = [Card::open(&first.name, TIMEOUT)?, Card::open(&second.name, TIMEOUT)?];
    let places = (&one, &other, second.address.as_str());
    thread::with_affinity(node, || transfers(&mut table, &device, places, &mapped, cards, (rounds, only)))??;
    drop(mapped);
    drop(one);
    drop(other);
    drop(second);
    if only.selects(IDLE_CARD) {
        idle_card(&mut table, &device, &first)?;
    }
    drop(first);
    doorbell_to_interrupt(&mut table, program, &device, only)?;
    Ok(table)
}

/// Name of the figure of a card without work.
const IDLE_CARD: &str = "idle card with a lease, CPU time";

/// A card process; dropping this value ends it.
pub(crate) struct CardServer {
    process: Child,
    pub(crate) name: CardName,
    address: String,
}

impl CardServer {
    pub(crate) fn start(program: &Path, spin: &str) -> Outcome<CardServer> {
        CardServer::of(program, "emulated", spin)
    }

    /// Starts a card with a kind of memory.
    pub(crate) fn of(program: &Path, kind: &str, spin: &str) -> Outcome<CardServer> {
        let name = format!("bench-{}-{}", std::process::id(), next_number()).parse()?;
        let mut process = Command::new(program)
            .args(["card", "--json", "serve", &format!("{name}")])
            .args(["--memory", &MEMORY.to_string(), "--banks", "4", "--listen", "127.0.0.1:0", "--prefault"])
            .args(["--spin", spin, "--memory-kind", kind])
            .stdout(Stdio::piped())
            .stdin(Stdio::null())
            .spawn()?;
        let out = process.stdout.take().ok_or("the card process has no standard output")?;
        let mut line = String::new();
        BufReader::new(out).read_line(&mut line)?;
        let status: serde_json::Value = serde_json::from_str(&line)?;
        let address = status["address"].as_str().ok_or("the card process printed no address")?.to_owned();
        Ok(CardServer { process, name, address })
    }

    pub(crate) fn connect(&self, device: &Device) -> Outcome<RemoteCard> {
        let options = RemoteOptions { spin: Duration::from_millis(1), ..RemoteOptions::default() };
        let card = RemoteCard::connect(device, &self.address, options)?;
        card.acquire(Duration::from_secs(30), TIMEOUT)?;
        Ok(card)
    }
}

impl Drop for CardServer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn next_number() -> usize {
    static NEXT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
}

/// Writes, reads and card-to-card transfers by size. memcpy of the same blocks between the same buffers runs
/// in turn, because throughput near the size of a cache depends on the physical pages.
fn transfers(
    table: &mut Table,
    device: &Device,
    (one, other, address): (&RemoteCard, &RemoteCard, &str),
    mapped: &[Card; 2],
    cores_of_cards: &[usize],
    (rounds, only): (usize, NameFilter<'_>),
) -> Outcome<()> {
    let buffer = Region::landing(device, c"bench-card", 64 << 20, Access::LOCAL_WRITE)?;
    buffer.populate()?;
    one.connect_peer(0, address)?;
    let there = other.held().ok_or("no lease")?.memory;
    for size in SIZES {
        let name = if size < 1 << 20 { format!("{} KiB", size >> 10) } else { format!("{} MiB", size >> 20) };
        let names = [
            "node to card, WRITE",
            "card to node, READ",
            "card to card, queued",
            "card to card, one at a time",
        ]
        .map(|what| format!("{what} {name}"));
        let wanted = names.each_ref().map(|name| only.selects(name));
        if wanted == [false; 4] {
            continue;
        }
        // Transfers cycle through a window of at least 4 MiB, as memcpy does.
        let window = size.max(4 << 20);
        let places: Vec<u64> = (0..window / size).map(|place| (place * size) as u64).collect();
        let parts: Vec<(u64, MemoryRange)> =
            places.iter().map(|at| (*at, MemoryRange::new(*at, size as u64))).collect();
        let passes = MOVED / window;
        let copy = |at: &u64| DmaDescriptor {
            operation: DmaOperation::Write,
            peer: 0,
            local: MemoryRange::new(*at, size as u64),
            remote: there.addr + at,
            key: there.rkey.get(),
            notify: false,
        };
        let copies: Vec<_> = places.iter().map(copy).collect();
        // The copies of all passes in one queue: a window has only one copy of the largest size.
        let queue = copies.repeat(passes);
        let rate = |pass: &dyn Fn(usize) -> Result<(), RemoteError>| -> Outcome<f64> {
            pass(1)?;
            let started = Instant::now();
            pass(passes)?;
            Ok((passes * window) as f64 / started.elapsed().as_secs_f64() / 1e9)
        };
        let bases = mapped.each_ref().map(|card| card.memory().as_ptr());
        let local = buffer.as_ptr().expect("landing memory is mapped here").as_ptr();
        let memcpy = |from: *const u8, to: *mut u8| {
            // SAFETY: the buffer and the memories of both cards have at least a window of bytes each. The transfers that
            // also use them run in turn with this copy.
            unsafe { memcpy_between((from, window), (to, window), size, Duration::from_millis(40)) }
        };
        // Of each figure, and of its baseline.
        let mut rates: [(Vec<f64>, Vec<f64>); 4] = Default::default();
        // The first round is a warm-up.
        for round in 0..=rounds {
            let [to, from] = [memcpy(local, bases[0]), memcpy(bases[0], local)];
            let there = thread::with_affinity(cores_of_cards, || memcpy(bases[0], bases[1]))?;
            for (row, (rates, against)) in rates.iter_mut().enumerate() {
                if !wanted[row] {
                    continue;
                }
                let (rate, memcpy) = match row {
                    0 => (rate(&|times| (0..times).try_for_each(|_| one.write_many(&buffer, &parts)))?, to),
                    1 => (rate(&|times| (0..times).try_for_each(|_| one.read_many(&buffer, &parts)))?, from),
                    2 => (rate(&|times| one.run_dma(&queue[..times * copies.len()], TIMEOUT))?, there),
                    _ => {
                        let each = |times| queue[..times * copies.len()].chunks(1);
                        (rate(&|times| each(times).try_for_each(|copy| one.run_dma(copy, TIMEOUT)))?, there)
                    }
                };
                if round > 0 {
                    rates.push(rate);
                    against.push(memcpy);
                }
            }
        }
        for (name, (rates, against)) in names.iter().zip(&rates) {
            if let (Some(rate), Some(memcpy)) = (median(rates), median(against)) {
                table.push(Figure::with_baseline(name, rate, "GB/s", memcpy));
            }
        }
    }
    Ok(())
}

/// CPU time of a card without work, with a lease held and its heartbeats arriving.
fn idle_card(table: &mut Table, device: &Device, card: &CardServer) -> Outcome<()> {
    let options = RemoteOptions::default();
    let node = RemoteCard::connect(device, &card.address, options)?;
    node.acquire(Duration::from_secs(5), TIMEOUT)?;
    node.load(0, KernelSource::Builtin("null"))?;
    node.run(0, &RunRequest::new(&[]), TIMEOUT)?;
    std::thread::sleep(Duration::from_millis(200));
    let before = cpu_seconds(card.process.id())?;
    let started = Instant::now();
    std::thread::sleep(Duration::from_secs(4));
    let used = cpu_seconds(card.process.id())? - before;
    let percent = 100.0 * used / started.elapsed().as_secs_f64();
    table.push(Figure::with_baseline(IDLE_CARD, percent, "% of a core", 1.0));
    Ok(())
}

/// CPU time of a process (s), from the scheduler's statistics.
fn cpu_seconds(process: u32) -> Outcome<f64> {
    let mut total = 0.0;
    for task in std::fs::read_dir(format!("/proc/{process}/task"))? {
        let text = std::fs::read_to_string(task?.path().join("schedstat"))?;
        let nanos: f64 = text.split_whitespace().next().ok_or("no schedstat")?.parse()?;
        total += nanos / 1e9;
    }
    Ok(total)
}

/// After this time without a doorbell, a card that does not poll is asleep.
const UNTIL_ASLEEP: Duration = Duration::from_micros(200);

/// The time from a doorbell by RDMA through a null kernel to the interrupt message.
fn doorbell_to_interrupt(
    table: &mut Table,
    program: &Path,
    device: &Device,
    only: NameFilter<'_>,
) -> Outcome<()> {
    for (spin, name, target) in [("always", "polling", Some(5.0)), ("0", "sleeping", None)] {
        if !only.selects(&format!("doorbell to interrupt, {name} card")) {
            continue;
        }
        let card = CardServer::start(program, spin)?;
        let options = RemoteOptions { spin: Duration::from_secs(1), ..RemoteOptions::default() };
        let node = RemoteCard::connect(device, &card.address, options)?;
        node.acquire(Duration::from_secs(30), TIMEOUT)?;
        node.load(0, KernelSource::Builtin("null"))?;
        let start = RunRequest::new(&[1, 2, 3, 4]);
        let trips = if target.is_some() { 20_000 } else { 2000 };
        for _ in 0..trips / 10 {
            node.run(0, &start, TIMEOUT)?;
        }
        let mut times = Vec::with_capacity(trips);
        for _ in 0..trips {
            if target.is_none() {
                // A card without polling looks at its doorbells once more before it sleeps.
                std::thread::sleep(UNTIL_ASLEEP);
            }
            let started = Instant::now();
            node.run(0, &start, TIMEOUT)?;
            times.push(started.elapsed().as_secs_f64() * 1e6);
        }
        times.sort_by(f64::total_cmp);
        let middle = times[times.len() / 2];
        let figure = format!("doorbell to interrupt, {name} card, median");
        table.push(match target {
            Some(target) => Figure::with_baseline(figure, middle, "µs", target),
            None => Figure::without_baseline(figure, middle, "µs"),
        });
        let far = times[times.len() * 99 / 100];
        table.push(Figure::without_baseline(
            format!("doorbell to interrupt, {name} card, 99th percentile"),
            far,
            "µs",
        ));
    }
    Ok(())
}
