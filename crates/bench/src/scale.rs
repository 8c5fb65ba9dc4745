//! What the device costs as it grows: more connections, more processes.
//!
//! The measured side are processes of their own: this program again, as `bench scale-client`. Each connects
//! its queue pairs to this process, which only lends its memory, and measures when all are ready.

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use crate::memcpy::{Kind, memcpy};
use crate::{Figure, Table, median};
use millstream_rdma::connect::{Listener, dial, listen};
use millstream_rdma::queue::{Completion, Signal};
use millstream_rdma::{
    Access, CompletionQueue, Deadline, DeviceSelector, PreparedQueuePair, QueuePair, RcOptions, Region,
    RemoteMemory, WrId, device, loader,
};
use serde::{Deserialize, Serialize};

const PAIRS: [usize; 4] = [1, 8, 64, 512];
const PROCESSES: [usize; 5] = [1, 2, 4, 8, 16];
const BLOCK: u32 = 65536;
/// A request of each burst goes to the next queue pair.
const BURST: usize = 16;
/// How long each measurement takes.
const TIME: Duration = Duration::from_millis(200);
const PATIENCE: Duration = Duration::from_secs(60);

type Failure = Box<dyn Error>;

/// What one process found.
#[derive(Debug, Serialize, Deserialize)]
struct Found {
    /// Making and connecting a queue pair, µs.
    connect: f64,
    /// Memory of this process that is there because of a queue pair, KiB.
    memory: f64,
    /// Descriptors, likewise.
    descriptors: f64,
    /// An 8-byte WRITE, posted and completed, µs.
    write: f64,
    /// Making, registering and deregistering 64 KiB, µs.
    register: f64,
    /// WRITEs of 64 KiB, GB/s.
    bandwidth: f64,
}

/// The figures of both series, medians of `rounds` interleaved rounds; `program` is `millstream`.
///
/// # Errors
/// Whatever stands in the way, for people.
pub fn run(program: &Path, rounds: usize) -> Result<Table, Failure> {
    let mut table = Table::new(
        "cost as it grows: RC WRITEs to one process, round robin over all queue pairs (medians)",
        "memcpy",
    );
    loader::ensure(&DeviceSelector::from_environment())?;
    let cases = PAIRS.map(|pairs| (1, pairs)).into_iter().chain(PROCESSES.map(|processes| (processes, 1)));
    let cases: Vec<_> = cases.collect();
    let mut baseline = Vec::new();
    let mut found: Vec<Vec<Found>> = cases.iter().map(|_| Vec::new()).collect();
    for _ in 0..rounds {
        baseline.push(memcpy(Kind::Ordinary, BLOCK as usize, BLOCK as usize, BLOCK as usize, TIME)?);
        for ((processes, pairs), found) in cases.iter().zip(&mut found) {
            found.push(case(program, *processes, *pairs)?);
        }
    }
    let baseline = median(&baseline).unwrap_or(0.0);
    for ((processes, pairs), found) in
        cases.iter().zip(&found).filter(|((processes, _), _)| *processes == 1).take(PAIRS.len())
    {
        rows(&mut table, &format!("{pairs} QP"), *processes, found, baseline);
    }
    for ((processes, _), found) in cases.iter().zip(&found).skip(PAIRS.len()) {
        rows(&mut table, &format!("{processes} processes"), *processes, found, baseline);
    }
    Ok(table)
}

fn rows(table: &mut Table, name: &str, processes: usize, found: &[Found], baseline: f64) {
    let of = |figure: fn(&Found) -> f64| median(&found.iter().map(figure).collect::<Vec<_>>()).unwrap_or(0.0);
    let all = if processes == 1 { "" } else { ", all" };
    table.push(Figure::against(format!("{name}: write 64 KiB{all}"), of(|f| f.bandwidth), "GB/s", baseline));
    table.push(Figure::alone(format!("{name}: write 8 B"), of(|f| f.write), "µs"));
    table.push(Figure::alone(format!("{name}: register 64 KiB"), of(|f| f.register), "µs"));
    table.push(Figure::alone(format!("{name}: connect a QP"), of(|f| f.connect), "µs"));
    table.push(Figure::alone(format!("{name}: memory of a QP"), of(|f| f.memory), "KiB"));
    table.push(Figure::alone(format!("{name}: descriptors of a QP"), of(|f| f.descriptors), ""));
}

/// A process that measures; ended when dropped.
struct Client {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl Client {
    fn start(program: &Path, address: &str, pairs: usize) -> Result<Self, Failure> {
        let mut child = Command::new(program)
            .args(["bench", "scale-client", address, &pairs.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take().ok_or("no pipe")?);
        Ok(Self { child, stdin, stdout: BufReader::new(stdout) })
    }

    fn go(&mut self) -> Result<(), Failure> {
        let stdin = self.stdin.as_mut().ok_or("no pipe")?;
        Ok(writeln!(stdin, "go")?)
    }

    fn line(&mut self) -> Result<String, Failure> {
        let mut line = String::new();
        if self.stdout.read_line(&mut line)? == 0 {
            return Err("a measuring process has ended early; what it said is above".into());
        }
        Ok(line.trim_end().to_owned())
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // It ends by itself when its input does, unless something went wrong.
        self.stdin = None;
        if self.child.try_wait().is_ok_and(|ended| ended.is_none()) {
            let _ = self.child.kill();
        }
        let _ = self.child.wait();
    }
}

/// Processes with so many queue pairs each, all connected to this one; means, and the sum of bandwidths.
fn case(program: &Path, processes: usize, pairs: usize) -> Result<Found, Failure> {
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
        let (mut stream, _) = listener.accept(Deadline::after(PATIENCE))?;
        for _ in 0..pairs {
            let prepared = PreparedQueuePair::new(&device, &queue, &queue, &options())?;
            let memory = landing.remote().encode();
            connections.push(prepared.connect(&mut stream, &memory, Deadline::after(PATIENCE))?.pair);
        }
        client.line()?;
        clients.push(client);
    }
    // Latency, then bandwidth: all begin at the same time.
    clients.iter_mut().try_for_each(Client::go)?;
    clients.iter_mut().try_for_each(|client| client.line().map(drop))?;
    clients.iter_mut().try_for_each(Client::go)?;
    let mut all = Vec::new();
    for client in &mut clients {
        all.push(serde_json::from_str::<Found>(&client.line()?)?);
    }
    drop(clients);
    let mean = |figure: fn(&Found) -> f64| all.iter().map(figure).sum::<f64>() / all.len() as f64;
    Ok(Found {
        connect: mean(|f| f.connect),
        memory: mean(|f| f.memory),
        descriptors: mean(|f| f.descriptors),
        write: mean(|f| f.write),
        register: mean(|f| f.register),
        bandwidth: all.iter().map(|f| f.bandwidth).sum(),
    })
}

fn options() -> RcOptions {
    RcOptions { send_depth: 32, recv_depth: 16, ..RcOptions::default() }
}

/// In a process of its own: connects, says so, waits for the word, measures, and says what it found.
///
/// # Errors
/// Whatever stands in the way, for people.
pub fn client(address: &str, pairs: usize) -> Result<(), Failure> {
    loader::ensure(&DeviceSelector::from_environment())?;
    let device = device::open(&DeviceSelector::from_environment())?;
    let queue = CompletionQueue::new(&device, 1024)?;
    let source = Region::landing(&device, c"millstream-scale", BLOCK as usize, Access::LOCAL_WRITE)?;
    source.populate()?;
    let mut stream = dial(address, Deadline::after(PATIENCE))?;
    let (memory, descriptors) = (resident_kib()?, descriptors()?);
    let start = Instant::now();
    let mut connections = Vec::new();
    let mut landing = None;
    for _ in 0..pairs {
        let prepared = PreparedQueuePair::new(&device, &queue, &queue, &options())?;
        let connected = prepared.connect(&mut stream, &[], Deadline::after(PATIENCE))?;
        connections.push(connected.pair);
        let encoded = connected.private_data.as_slice().try_into().map_err(|_| "no memory to write to")?;
        landing = Some(RemoteMemory::decode(encoded));
    }
    let each = pairs as f64;
    let connect = start.elapsed().as_secs_f64() * 1e6 / each;
    let landing = landing.ok_or("no connection")?;
    // All of them look the memory up, and map it once.
    for pair in &connections {
        pair.post_write_inline(&[0; 8], landing.start(), Signal::Yes, WrId(0))?;
        complete(&queue, 1)?;
    }
    let memory = (resident_kib()? - memory) / each;
    let descriptors = (self::descriptors()? - descriptors) / each;
    meet("ready")?;
    let write = writes(&connections, |pair| {
        pair.post_write_inline(&[0; 8], landing.start(), Signal::Yes, WrId(0))?;
        complete(&queue, 1)
    })?;
    meet("go on")?;
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
    const TURNS: u32 = 50;
    for _ in 0..TURNS {
        Region::landing(&device, c"millstream-scale", BLOCK as usize, Access::REMOTE)?;
    }
    let register = start.elapsed().as_secs_f64() * 1e6 / f64::from(TURNS);
    let bandwidth = f64::from(BLOCK) / bandwidth / 1e3;
    // The others may still be measuring; what ends now would be in their way.
    meet(&serde_json::to_string(&Found { connect, memory, descriptors, write, register, bandwidth })?)
}

/// Says something, and waits for the word to go on, or the end.
fn meet(saying: &str) -> Result<(), Failure> {
    println!("{saying}");
    std::io::stdin().lock().read_line(&mut String::new())?;
    Ok(())
}

/// Does something with each queue pair in turn for a while; µs each.
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

fn resident_kib() -> Result<f64, Failure> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).ok_or("no VmRSS")?;
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}

fn descriptors() -> Result<f64, Failure> {
    Ok(std::fs::read_dir("/proc/self/fd")?.count() as f64)
}
