//! `millstream bench scale`: the soft device's costs by the number of queue pairs and of processes.
//!
//! Each measuring process is `millstream bench scale-client`. It connects its queue pairs to this process, which registers
//! the memory that they write to. All clients measure at the same time.

mod registration;

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use millstream_rdma::connect::{Listener, dial, listen};
use millstream_rdma::queue::{Completion, Signal};
use millstream_rdma::{
    Access, CompletionQueue, Deadline, DeviceSelector, PreparedQueuePair, QueuePair, RcOptions, Region,
    RemoteMemory, WrId, device, loader,
};
use serde::{Deserialize, Serialize};

use crate::memcpy::{Pages, memcpy};
use crate::process_usage::{descriptors, resident_kib};
use crate::{Benchmark, Figure, Table, median};

/// This benchmark.
pub const BENCHMARK: Benchmark = Benchmark {
    name: "scale",
    title: "Soft device by queue pairs and processes",
    measures: "RC WRITEs round robin over all queue pairs of a process, for 1 to 512 queue pairs and for 1 to 16 processes: \
               bandwidth of 64 KiB (all processes together), time of an 8-byte WRITE, and the costs of memory registration \
               and of a queue pair. Then by the size of a region of private memory, whose pages move when peers have used it \
               (MILLSTREAM_MOVE=used, the default) or at registration (MILLSTREAM_MOVE=register): registration, the first and the \
               last pass of a peer's READs in two seconds, and deregistration.",
    baseline: "memcpy of 64 KiB by one thread for bandwidth, also for that of all processes together; memcpy of the whole region \
               for passes",
    values: "medians over the rounds",
    command: "make bench-scale",
};

const PAIRS: [usize; 4] = [1, 8, 64, 512];
const PROCESSES: [usize; 5] = [1, 2, 4, 8, 16];
const BLOCK: u32 = 65536;
/// Requests between two polls; each goes to the next queue pair.
const BURST: usize = 16;
/// The length of each measurement.
const TIME: Duration = Duration::from_millis(200);
const TIMEOUT: Duration = Duration::from_secs(60);

type Failure = Box<dyn Error>;

/// The results of one client, or of all clients of a case.
#[derive(Debug, Serialize, Deserialize)]
struct ClientResults {
    /// Creating and connecting a queue pair (µs).
    connect_us: f64,
    /// Resident memory per queue pair [KiB].
    memory_kib: f64,
    /// File descriptors per queue pair.
    descriptors: f64,
    /// Posting and completing an 8-byte WRITE (µs).
    write_us: f64,
    /// Allocating, registering and deregistering 64 KiB (µs).
    register_us: f64,
    /// Bandwidth of 64 KiB WRITEs (GB/s).
    bandwidth_gb_s: f64,
}

/// Measures both series in `rounds` interleaved rounds; `program` is the path of `millstream`.
///
/// # Errors
/// The first error of a process, a connection or a verbs call.
pub fn run(program: &Path, rounds: usize) -> Result<Table, Failure> {
    let mut table = Table::new(BENCHMARK, rounds);
    loader::ensure(&DeviceSelector::from_environment())?;
    let cases = PAIRS.map(|pairs| (1, pairs)).into_iter().chain(PROCESSES.map(|processes| (processes, 1)));
    let cases: Vec<_> = cases.collect();
    let mut baseline = Vec::new();
    let mut found: Vec<Vec<ClientResults>> = cases.iter().map(|_| Vec::new()).collect();
    for _ in 0..rounds {
        baseline.push(memcpy(Pages::Base, BLOCK as usize, BLOCK as usize, BLOCK as usize, TIME)?);
        for ((processes, pairs), found) in cases.iter().zip(&mut found) {
            found.push(run_case(program, *processes, *pairs)?);
        }
    }
    let baseline = median(&baseline).unwrap_or(0.0);
    for ((processes, pairs), found) in
        cases.iter().zip(&found).filter(|((processes, _), _)| *processes == 1).take(PAIRS.len())
    {
        rows(&mut table, &format!("{pairs} QPs"), *processes, found, baseline);
    }
    for ((processes, _), found) in cases.iter().zip(&found).skip(PAIRS.len()) {
        rows(&mut table, &format!("{processes} processes"), *processes, found, baseline);
    }
    registration::measure(&mut table, program, rounds)?;
    Ok(table)
}

pub use registration::{reader, registration};

fn rows(table: &mut Table, name: &str, processes: usize, found: &[ClientResults], baseline: f64) {
    let of = |figure: fn(&ClientResults) -> f64| {
        median(&found.iter().map(figure).collect::<Vec<_>>()).unwrap_or(0.0)
    };
    let all = if processes == 1 { "" } else { ", all processes" };
    table.push(Figure::with_baseline(
        format!("{name}: WRITE 64 KiB{all}"),
        of(|f| f.bandwidth_gb_s),
        "GB/s",
        baseline,
    ));
    table.push(Figure::without_baseline(format!("{name}: WRITE 8 B"), of(|f| f.write_us), "µs"));
    table.push(Figure::without_baseline(
        format!("{name}: register a 64 KiB MR"),
        of(|f| f.register_us),
        "µs",
    ));
    table.push(Figure::without_baseline(
        format!("{name}: create and connect a QP"),
        of(|f| f.connect_us),
        "µs",
    ));
    table.push(Figure::without_baseline(
        format!("{name}: resident memory per QP"),
        of(|f| f.memory_kib),
        "KiB",
    ));
    table.push(Figure::without_baseline(
        format!("{name}: file descriptors per QP"),
        of(|f| f.descriptors),
        "fds",
    ));
}

/// A measuring process; dropping this value ends it.
struct Client {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl Client {
    fn start(program: &Path, address: &str, pairs: usize) -> Result<Self, Failure> {
        Self::spawn(program, &["scale-client", address, &pairs.to_string()], &[])
    }

    fn spawn(program: &Path, arguments: &[&str], environment: &[(&str, &str)]) -> Result<Self, Failure> {
        let mut child = Command::new(program)
            .arg("bench")
            .args(arguments)
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take().ok_or("the client has no pipe")?);
        Ok(Self { child, stdin, stdout: BufReader::new(stdout) })
    }

    fn go(&mut self) -> Result<(), Failure> {
        let stdin = self.stdin.as_mut().ok_or("the client has no pipe")?;
        Ok(writeln!(stdin, "go")?)
    }

    fn line(&mut self) -> Result<String, Failure> {
        let mut line = String::new();
        if self.stdout.read_line(&mut line)? == 0 {
            return Err("a process of `bench scale` exited early; its error is above".into());
        }
        Ok(line.trim_end().to_owned())
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // The client exits when its standard input closes, unless something went wrong.
        self.stdin = None;
        if self.child.try_wait().is_ok_and(|ended| ended.is_none()) {
            let _ = self.child.kill();
        }
        let _ = self.child.wait();
    }
}

/// Runs `processes` clients with `pairs` queue pairs each. Returns means, and the sum of the bandwidths.
fn run_case(program: &Path, processes: usize, pairs: usize) -> Result<ClientResults, Failure> {
    let device = device::open(&DeviceSelector::from_environment())?;
    let queue = CompletionQueue::new(&device, 1024)?;
    let landing = Region::landing(&device, c"millstream-scale", BURST * BLOCK as usize, Access::REMOTE)?;
    landing.populate()?;
    let listener: Listener = listen("127.0.0.1:0")?;
    let address = listener.address().to_string();
    let mut clients = Vec::new();
    let mut connections = Vec::new();
    for _ in 0..processes {
        let mut client = Client::start(program, &address, pairs)?;
        let (mut stream, _) = listener.accept(Deadline::after(TIMEOUT))?;
        for _ in 0..pairs {
            let prepared = PreparedQueuePair::new(&device, &queue, &queue, &options())?;
            let memory = landing.remote().encode();
            connections.push(prepared.connect(&mut stream, &memory, Deadline::after(TIMEOUT))?.pair);
        }
        client.line()?;
        clients.push(client);
    }
    // Latency, then bandwidth; all clients start each at the same time.
    clients.iter_mut().try_for_each(Client::go)?;
    clients.iter_mut().try_for_each(|client| client.line().map(drop))?;
    clients.iter_mut().try_for_each(Client::go)?;
    let mut all = Vec::new();
    for client in &mut clients {
        all.push(serde_json::from_str::<ClientResults>(&client.line()?)?);
    }
    drop(clients);
    let mean = |figure: fn(&ClientResults) -> f64| all.iter().map(figure).sum::<f64>() / all.len() as f64;
    Ok(ClientResults {
        connect_us: mean(|f| f.connect_us),
        memory_kib: mean(|f| f.memory_kib),
        descriptors: mean(|f| f.descriptors),
        write_us: mean(|f| f.write_us),
        register_us: mean(|f| f.register_us),
        bandwidth_gb_s: all.iter().map(|f| f.bandwidth_gb_s).sum(),
    })
}

fn options() -> RcOptions {
    RcOptions { send_depth: 32, recv_depth: 16, ..RcOptions::default() }
}

/// The client process: connects, measures when told to on standard input, and prints its results as JSON.
///
/// # Errors
/// The first error of a connection or of a verbs call.
pub fn client(address: &str, pairs: usize) -> Result<(), Failure> {
    loader::ensure(&DeviceSelector::from_environment())?;
    let device = device::open(&DeviceSelector::from_environment())?;
    let queue = CompletionQueue::new(&device, 1024)?;
    let source = Region::landing(&device, c"millstream-scale", BLOCK as usize, Access::LOCAL_WRITE)?;
    source.populate()?;
    let mut stream = dial(address, Deadline::after(TIMEOUT))?;
    let this = std::process::id();
    let before = (resident_kib(this)?, descriptors(this)?);
    let start = Instant::now();
    let mut connections = Vec::new();
    let mut landing = None;
    for _ in 0..pairs {
        let prepared = PreparedQueuePair::new(&device, &queue, &queue, &options())?;
        let connected = prepared.connect(&mut stream, &[], Deadline::after(TIMEOUT))?;
        connections.push(connected.pair);
        let encoded = connected.private_data.as_slice().try_into().map_err(|_| "no memory to write to")?;
        landing = Some(RemoteMemory::decode(encoded));
    }
    let each = pairs as f64;
    let connect = start.elapsed().as_secs_f64() * 1e6 / each;
    let landing = landing.ok_or("no connection")?;
    // Warm-up: each queue pair resolves the key; the memory is mapped once.
    for pair in &connections {
        pair.post_write_inline(&[0; 8], landing.start(), Signal::Yes, WrId(0))?;
        complete(&queue, 1)?;
    }
    let memory = (resident_kib(this)? - before.0) / each;
    let descriptors = (descriptors(this)? - before.1) / each;
    print_and_wait("ready")?;
    let write = writes(&connections, |pair| {
        pair.post_write_inline(&[0; 8], landing.start(), Signal::Yes, WrId(0))?;
        complete(&queue, 1)
    })?;
    print_and_wait("go on")?;
    let mut burst = 0;
    let sge = source.sge(0, BLOCK)?;
    let bandwidth = writes(&connections, |pair| {
        let to = landing.at(u64::from(BLOCK) * (burst % BURST) as u64, u64::from(BLOCK))?;
        pair.post_write(&[sge], to, Signal::Yes, WrId(0))?;
        burst += 1;
        if burst % BURST == 0 { complete(&queue, BURST) } else { Ok(()) }
    })?;
    complete(&queue, burst % BURST)?;
    let start = Instant::now();
    const REPEATS: u32 = 50;
    for _ in 0..REPEATS {
        Region::landing(&device, c"millstream-scale", BLOCK as usize, Access::REMOTE)?;
    }
    let register = start.elapsed().as_secs_f64() * 1e6 / f64::from(REPEATS);
    let bandwidth = f64::from(BLOCK) / bandwidth / 1e3;
    // Other clients may still be measuring: do not tear down yet.
    print_and_wait(&serde_json::to_string(&ClientResults {
        connect_us: connect,
        memory_kib: memory,
        descriptors,
        write_us: write,
        register_us: register,
        bandwidth_gb_s: bandwidth,
    })?)
}

/// Prints a line, and waits for a line or the end of standard input.
fn print_and_wait(line: &str) -> Result<(), Failure> {
    println!("{line}");
    std::io::stdin().lock().read_line(&mut String::new())?;
    Ok(())
}

/// Calls `one` with each queue pair in turn for a while. Returns the time per call (µs).
fn writes(
    pairs: &[QueuePair],
    mut one: impl FnMut(&QueuePair) -> Result<(), Failure>,
) -> Result<f64, Failure> {
    let start = Instant::now();
    let mut done = 0u32;
    while start.elapsed() < TIME {
        for _ in 0..64 {
            one(&pairs[done as usize % pairs.len()])?;
            done += 1;
        }
    }
    Ok(start.elapsed().as_secs_f64() * 1e6 / f64::from(done))
}

fn complete(queue: &CompletionQueue, count: usize) -> Result<(), Failure> {
    let mut buffer = [Completion::EMPTY; BURST];
    let mut left = count;
    while left != 0 {
        let found = queue.poll(&mut buffer[..left])?;
        found.iter().try_for_each(Completion::check)?;
        left -= found.len();
    }
    Ok(())
}
