//! `millstream bench card`: cards in processes of their own, used by this one as a node.

pub mod cluster7;

use std::error::Error;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::memcpy::memcpy_between;
use crate::{Figure, Only, Table, median};
use millstream_card::net::control::{KernelSource, Start};
use millstream_card::net::{RemoteCard, RemoteError, RemoteOptions};
use millstream_card::region::copy::{Copy, CopyOperation};
use millstream_card::{Card, CardName, Span};
use millstream_rdma::device::{self, DeviceSelector};
use millstream_rdma::{Access, Device, Region};
use millstream_shm::thread;

type Outcome<T> = Result<T, Box<dyn Error>>;

const MEMORY: u64 = 256 << 20;
const PATIENCE: Duration = Duration::from_secs(20);
const SIZES: [usize; 5] = [4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20];

/// Each measurement of a throughput moves about so much, after a pass over its places that brings into the caches what
/// they can hold: as [`memcpy`] does.
const MOVED: usize = 512 << 20;

/// The figures; `program` is `millstream`, which serves the cards.
///
/// # Errors
/// Whatever stands in the way, for people.
pub fn run(program: &Path, rounds: usize, only: &[String]) -> Outcome<Table> {
    let only = Only(only);
    let device = device::open(&DeviceSelector::from_environment())?;
    let mut table =
        Table::new("Cards on the network", "memcpy between mapped buffers, or what was asked for");
    eprintln!("two cards of {} MiB, prefaulted", MEMORY >> 20);
    // Cores of a shared machine differ: a copy is held against memcpy on the core that makes it.
    let cores = thread::affinity()?;
    let (node, cards) = (&cores[..1], &cores[cores.len() - 1..]);
    let (first, second) = thread::with_affinity(cards, || {
        Outcome::Ok((Served::start(program, "20")?, Served::start(program, "20")?))
    })??;
    let (one, other) = (first.connect(&device)?, second.connect(&device)?);
    let mapped = [Card::open(&first.name, PATIENCE)?, Card::open(&second.name, PATIENCE)?];
    let places = (&one, &other, second.address.as_str());
    thread::with_affinity(node, || memory(&mut table, &device, places, &mapped, cards, (rounds, only)))??;
    drop(mapped);
    drop(one);
    drop(other);
    drop(second);
    if only.wants(WAITING) {
        idle(&mut table, &device, &first)?;
    }
    drop(first);
    round_trip(&mut table, program, &device, only)?;
    Ok(table)
}

const WAITING: &str = "waiting card";

/// A card process, which ends with this.
struct Served {
    process: Child,
    name: CardName,
    address: String,
}

impl Served {
    fn start(program: &Path, spin: &str) -> Outcome<Served> {
        let name = format!("bench-{}-{}", std::process::id(), next()).parse()?;
        let mut process = Command::new(program)
            .args(["card", "--json", "serve", &format!("{name}")])
            .args(["--memory", &MEMORY.to_string(), "--banks", "4", "--listen", "127.0.0.1:0", "--prefault"])
            .args(["--spin", spin])
            .stdout(Stdio::piped())
            .stdin(Stdio::null())
            .spawn()?;
        let out = process.stdout.take().ok_or("the card has no standard output")?;
        let mut line = String::new();
        BufReader::new(out).read_line(&mut line)?;
        let said: serde_json::Value = serde_json::from_str(&line)?;
        let address = said["address"].as_str().ok_or("the card did not say its address")?.to_owned();
        Ok(Served { process, name, address })
    }

    fn connect(&self, device: &Device) -> Outcome<RemoteCard> {
        let options = RemoteOptions { spin: Duration::from_millis(1), ..RemoteOptions::default() };
        let card = RemoteCard::connect(device, &self.address, options)?;
        card.acquire(Duration::from_secs(30), PATIENCE)?;
        Ok(card)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn next() -> usize {
    static NEXT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
}

/// Write, read, card to card, by size, in turns with memcpy of the same blocks between the same places: how quick copies of
/// about a cache's size are depends on where their pages lie.
fn memory(
    table: &mut Table,
    device: &Device,
    (one, other, address): (&RemoteCard, &RemoteCard, &str),
    mapped: &[Card; 2],
    cores_of_cards: &[usize],
    (rounds, only): (usize, Only<'_>),
) -> Outcome<()> {
    let buffer = Region::landing(device, c"bench-card", 64 << 20, Access::LOCAL_WRITE)?;
    buffer.populate()?;
    one.connect_peer(0, address)?;
    let there = other.held().ok_or("no lease")?.memory;
    for size in SIZES {
        let name = if size < 1 << 20 { format!("{} KiB", size >> 10) } else { format!("{} MiB", size >> 20) };
        let names = ["write", "read", "card to card", "card to card, one at a time"]
            .map(|what| format!("{what} {name}"));
        let wanted = names.each_ref().map(|name| only.wants(name));
        if wanted == [false; 4] {
            continue;
        }
        // The same places again and again where a cache holds them, as memcpy has it.
        let window = size.max(4 << 20);
        let places: Vec<u64> = (0..window / size).map(|place| (place * size) as u64).collect();
        let parts: Vec<(u64, Span)> = places.iter().map(|at| (*at, Span::new(*at, size as u64))).collect();
        let passes = MOVED / window;
        let copy = |at: &u64| Copy {
            operation: CopyOperation::Write,
            peer: 0,
            local: Span::new(*at, size as u64),
            remote: there.addr + at,
            key: there.rkey.get(),
            notify: false,
        };
        let copies: Vec<_> = places.iter().map(copy).collect();
        // The copies of all passes, to be queued: else a large one would be one at a time.
        let queue = copies.repeat(passes);
        let rate = |pass: &dyn Fn(usize) -> Result<(), RemoteError>| -> Outcome<f64> {
            pass(1)?;
            let started = Instant::now();
            pass(passes)?;
            Ok((passes * window) as f64 / started.elapsed().as_secs_f64() / 1e9)
        };
        let bases = mapped.each_ref().map(|card| card.memory().as_ptr().expect("emulated memory is mapped"));
        let local = buffer.as_ptr().expect("landing memory is mapped here").as_ptr();
        let memcpy = |from: *const u8, to: *mut u8| {
            // SAFETY: the buffer and the memories of both cards, of which each has a window and more. They are those that
            // the transfers use, in turn with this.
            unsafe { memcpy_between((from, window), (to, window), size, Duration::from_millis(40)) }
        };
        // Of each row and of what it is held against.
        let mut rates: [(Vec<f64>, Vec<f64>); 4] = Default::default();
        // The first round warms up.
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
                    2 => (rate(&|times| one.copy(&queue[..times * copies.len()], PATIENCE))?, there),
                    _ => {
                        let each = |times| queue[..times * copies.len()].chunks(1);
                        (rate(&|times| each(times).try_for_each(|copy| one.copy(copy, PATIENCE)))?, there)
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
                table.push(Figure::against(name, rate, "GB/s", memcpy));
            }
        }
    }
    Ok(())
}

/// Processor time of a card that waits, with a lease held and its heartbeats coming.
fn idle(table: &mut Table, device: &Device, card: &Served) -> Outcome<()> {
    let options = RemoteOptions::default();
    let node = RemoteCard::connect(device, &card.address, options)?;
    node.acquire(Duration::from_secs(5), PATIENCE)?;
    node.load(0, KernelSource::Named("null"))?;
    node.run(0, &Start::new(&[]), PATIENCE)?;
    std::thread::sleep(Duration::from_millis(200));
    let before = processor_time(card.process.id())?;
    let started = Instant::now();
    std::thread::sleep(Duration::from_secs(4));
    let used = processor_time(card.process.id())? - before;
    let percent = 100.0 * used / started.elapsed().as_secs_f64();
    table.push(Figure::against(WAITING, percent, "% of a core", 1.0));
    Ok(())
}

/// Seconds of processor time that a process has used, from the scheduler's account in nanoseconds.
fn processor_time(process: u32) -> Outcome<f64> {
    let mut total = 0.0;
    for task in std::fs::read_dir(format!("/proc/{process}/task"))? {
        let text = std::fs::read_to_string(task?.path().join("schedstat"))?;
        let nanos: f64 = text.split_whitespace().next().ok_or("no schedstat")?.parse()?;
        total += nanos / 1e9;
    }
    Ok(total)
}

/// Doorbell by RDMA, kernel, interrupt by message.
fn round_trip(table: &mut Table, program: &Path, device: &Device, only: Only<'_>) -> Outcome<()> {
    for (spin, name, asked) in [("always", "spinning", Some(5.0)), ("0", "sleeping", None)] {
        if !only.wants(&format!("doorbell to interrupt, {name} card")) {
            continue;
        }
        let card = Served::start(program, spin)?;
        let options = RemoteOptions { spin: Duration::from_secs(1), ..RemoteOptions::default() };
        let node = RemoteCard::connect(device, &card.address, options)?;
        node.acquire(Duration::from_secs(30), PATIENCE)?;
        node.load(0, KernelSource::Named("null"))?;
        let start = Start::new(&[1, 2, 3, 4]);
        let trips = if asked.is_some() { 20_000 } else { 2000 };
        for _ in 0..trips / 10 {
            node.run(0, &start, PATIENCE)?;
        }
        let mut times = Vec::with_capacity(trips);
        for _ in 0..trips {
            let started = Instant::now();
            node.run(0, &start, PATIENCE)?;
            times.push(started.elapsed().as_secs_f64() * 1e6);
        }
        times.sort_by(f64::total_cmp);
        let middle = times[times.len() / 2];
        table.push(match asked {
            Some(asked) => {
                Figure::against(format!("doorbell to interrupt, {name} card"), middle, "µs", asked)
            }
            None => Figure::alone(format!("doorbell to interrupt, {name} card"), middle, "µs"),
        });
        let far = times[times.len() * 99 / 100];
        table.push(Figure::alone(format!("99 % of them, {name} card"), far, "µs"));
    }
    Ok(())
}
