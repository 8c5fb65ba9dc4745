//! A verbs program that only posts and polls: the device's cost without that of perftest or UCX.
//!
//! It reaches the device through the C interface of the loaded libibverbs, as every verbs program does. The
//! server registers the memory and, for SENDs, posts receives. The client keeps a window of work requests
//! outstanding, as `ucx_perftest` does. It builds the requests once, posts them again and again, and signals
//! one of `SIGNAL_INTERVAL`. [`ToolPair::raw_verbs`](crate::tools::ToolPair::raw_verbs) runs both sides.
//! The client prints a result row like perftest's.

use std::error::Error;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use millstream_rdma::connect::{ConnectedQueuePair, dial, listen};
use millstream_rdma::{
    Access, Completion, CompletionQueue, Deadline, Device, DeviceSelector, PreparedQueuePair, QueuePair,
    RcOptions, Region, RemoteMemory, device, loader,
};
use millstream_shm::Mapping;
use millstream_shm::process_vm::{self, Direction, IoVec};
use rdma_mummy_sys::{
    ibv_post_recv, ibv_post_send, ibv_recv_wr, ibv_send_flags, ibv_send_wr, ibv_sge, ibv_wr_opcode,
};

use crate::memcpy::{Pages, allocate};

type Failure = Box<dyn Error>;

/// The operation that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Bandwidth of RDMA WRITEs.
    Write,
    /// Bandwidth of RDMA READs.
    Read,
    /// Bandwidth of SENDs.
    Send,
    /// Half the round-trip time of 8-byte WRITEs. Completions are polled one signal interval at a time, as UCX does.
    Latency,
    /// As `Latency`, with each completion polled before the wait for the answer, as perftest does.
    LatencyCompleted,
    /// `process_vm_writev` into private memory of the other process, without the device.
    SystemWrite,
    /// `process_vm_readv` from private memory of the other process, without the device.
    SystemRead,
}

impl Operation {
    /// All operations with their names on the command line.
    const NAMES: [(&str, Self); 7] = [
        ("write", Self::Write),
        ("read", Self::Read),
        ("send", Self::Send),
        ("latency", Self::Latency),
        ("latency-completed", Self::LatencyCompleted),
        ("system-write", Self::SystemWrite),
        ("system-read", Self::SystemRead),
    ];

    fn system_call(self) -> Option<Direction> {
        match self {
            Self::SystemWrite => Some(Direction::Write),
            Self::SystemRead => Some(Direction::Read),
            _ => None,
        }
    }

    fn is_latency(self) -> bool {
        matches!(self, Self::Latency | Self::LatencyCompleted)
    }
}

impl FromStr for Operation {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = Self::NAMES.into_iter().find(|(name, _)| *name == text);
        let names = || Self::NAMES.map(|(name, _)| name).join(", ");
        known.map(|(_, operation)| operation).ok_or_else(|| format!("expected one of {}", names()))
    }
}

/// The options of one measurement.
#[derive(Clone, Copy, Debug)]
pub struct RawVerbsOptions {
    /// The operation.
    pub operation: Operation,
    /// Bytes per work request.
    pub size: u32,
    /// Work requests per `ibv_post_send` call.
    pub post_list: usize,
    /// Whether requests carry their data inline (`IBV_SEND_INLINE`).
    pub inline: bool,
    /// Whether the server registers private memory, so that (with `MILLSTREAM_MOVE=0`) a READ goes through the kernel.
    pub private: bool,
}

/// One of this many work requests is signalled.
const SIGNAL_INTERVAL: usize = 64;
/// The most signalled requests outstanding; the client then polls until one completes.
const WINDOW: usize = 4;
/// Receives that are posted.
const RECEIVES: usize = 512;
const TIME: Duration = Duration::from_millis(300);
const TIMEOUT: Duration = Duration::from_secs(30);

/// The verbs objects of one endpoint.
struct Endpoint {
    queue: CompletionQueue,
    memory: Region,
    pair: QueuePair,
    remote: RemoteMemory,
    stream: TcpStream,
}

impl Endpoint {
    fn new(
        stream: TcpStream,
        options: &RawVerbsOptions,
        server: bool,
        receives: usize,
    ) -> Result<Self, Failure> {
        let size = options.size;
        let device: Device = device::open(&DeviceSelector::from_environment())?;
        let queue = CompletionQueue::new(&device, (RECEIVES + WINDOW + 1) as u32)?;
        let len = (size as usize).max(4096);
        let memory = if server && options.private {
            if options.operation != Operation::Read {
                return Err("--private works with the operation `read` only".into());
            }
            Region::source(&device, vec![1u8; len].into_boxed_slice(), true)?
        } else {
            Region::landing(&device, c"millstream-bench", len, Access::REMOTE)?
        };
        memory.populate()?;
        let capacities = RcOptions {
            send_depth: (SIGNAL_INTERVAL * (WINDOW + 1)) as u32,
            recv_depth: RECEIVES as u32,
            ..RcOptions::default()
        };
        let prepared = PreparedQueuePair::new(&device, &queue, &queue, &capacities)?;
        let element = memory.sge(0, size)?;
        for _ in 0..receives {
            prepared.post_recv(&[element], millstream_rdma::WrId(0))?;
        }
        let mut stream = stream;
        let own = memory.remote().encode();
        let ConnectedQueuePair { pair, private_data: extra } =
            prepared.connect(&mut stream, &own, Deadline::after(TIMEOUT))?;
        let remote = RemoteMemory::decode(
            extra.as_slice().try_into().map_err(|_| "the peer sent no memory region in its private data")?,
        );
        Ok(Self { queue, memory, pair, remote, stream })
    }

    fn word(&self) -> &AtomicU64 {
        let base = self.memory.as_ptr().expect("memory of this process is mapped");
        // SAFETY: the region has at least a page and is page-aligned; peers store whole words.
        unsafe { AtomicU64::from_ptr(base.as_ptr().cast()) }
    }
}

/// The server: registers memory, and ends with the client.
///
/// # Errors
/// The first error of a connection or of a verbs call.
pub fn serve(port: u16, options: &RawVerbsOptions) -> Result<(), Failure> {
    loader::ensure(&DeviceSelector::from_environment())?;
    let listener = listen(&format!("127.0.0.1:{port}"))?;
    let (stream, _) = listener.accept(Deadline::after(TIMEOUT))?;
    if options.operation.system_call().is_some() {
        return expose(stream, options.size);
    }
    let receives = if options.operation == Operation::Send { RECEIVES } else { 0 };
    let endpoint = Endpoint::new(stream, options, true, receives)?;
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let end = || {
            // The client sends nothing; it closes the connection.
            let _ = (&endpoint.stream).read(&mut [0]);
            over.store(true, Ordering::Relaxed);
        };
        match options.operation {
            Operation::Write | Operation::Read | Operation::SystemWrite | Operation::SystemRead => {
                end();
                Ok(())
            }
            Operation::Send => {
                scope.spawn(end);
                receive(&endpoint, options.size, &over)
            }
            Operation::Latency | Operation::LatencyCompleted => {
                scope.spawn(end);
                echo(&endpoint, options, &over)
            }
        }
    })
}

/// Sends process id and address of private memory, and keeps the memory until the client closes the connection.
fn expose(mut stream: TcpStream, size: u32) -> Result<(), Failure> {
    let mut memory = vec![1u8; size as usize];
    stream.write_all(&std::process::id().to_be_bytes())?;
    stream.write_all(&(memory.as_mut_ptr() as u64).to_be_bytes())?;
    let _ = stream.read(&mut [0]);
    std::hint::black_box(&mut memory);
    Ok(())
}

/// Seconds per system call that copies `size` bytes between memory here and private memory of the peer.
fn system_calls(mut stream: TcpStream, size: u32, direction: Direction) -> Result<f64, Failure> {
    let (mut pid, mut addr) = ([0; 4], [0; 8]);
    stream.read_exact(&mut pid)?;
    stream.read_exact(&mut addr)?;
    // Local memory as in the figures with this baseline: READs arrive in huge pages, perftest writes from its
    // heap.
    let (mut heap, landing) = match direction {
        Direction::Read => (Vec::new(), Some(allocate(Pages::Huge, size as usize)?)),
        Direction::Write => (vec![2u8; size as usize], None),
    };
    let base = landing.as_ref().map_or(heap.as_mut_ptr(), Mapping::base);
    let here = IoVec { base: base as u64, len: u64::from(size) };
    let there = IoVec { base: u64::from_be_bytes(addr), len: u64::from(size) };
    let (mut done, start) = (0u32, Instant::now());
    let mut warm = None;
    loop {
        for _ in 0..(1u32 << 18).div_ceil(size) {
            // SAFETY: the local piece is ours alone.
            unsafe { process_vm::copy(u32::from_be_bytes(pid), &[here], there, direction)? };
            done += 1;
        }
        let now = start.elapsed();
        match warm {
            None if now > TIME / 3 => warm = Some((done, now)),
            Some((before, since)) if now > since + TIME => {
                std::hint::black_box((&mut heap, &landing));
                return Ok((now - since).as_secs_f64() / f64::from(done - before));
            }
            _ => {}
        }
    }
}

/// Posts a receive for each one consumed, until `over`.
fn receive(endpoint: &Endpoint, size: u32, over: &AtomicBool) -> Result<(), Failure> {
    let mut element = element(&endpoint.memory, size)?;
    // SAFETY: plain data, for which all zeros are valid; linked below.
    let mut requests: [ibv_recv_wr; SIGNAL_INTERVAL] = unsafe { std::mem::zeroed() };
    for request in &mut requests {
        (request.sg_list, request.num_sge) = (&raw mut element, 1);
    }
    let mut found = [Completion::EMPTY; SIGNAL_INTERVAL];
    while !over.load(Ordering::Relaxed) {
        let completions = endpoint.queue.poll(&mut found)?;
        completions.iter().try_for_each(Completion::check)?;
        let count = completions.len();
        if count == 0 {
            continue;
        }
        let first = requests.as_mut_ptr();
        for at in 0..count {
            // SAFETY: inside the list, which outlives the call.
            unsafe {
                (*first.add(at)).next = if at + 1 < count { first.add(at + 1) } else { std::ptr::null_mut() }
            };
        }
        let mut bad = std::ptr::null_mut();
        // SAFETY: a live queue pair, and a list of `count` complete requests.
        match unsafe { ibv_post_recv(endpoint.pair.as_raw().as_ptr(), first, &raw mut bad) } {
            0 => {}
            code => return Err(std::io::Error::from_raw_os_error(code).into()),
        }
    }
    Ok(())
}

/// Sends each received word back, until `over`.
fn echo(endpoint: &Endpoint, options: &RawVerbsOptions, over: &AtomicBool) -> Result<(), Failure> {
    let mut requests = SendRequests::new(endpoint, options)?;
    let mut seen = 0;
    while !over.load(Ordering::Relaxed) {
        let word = endpoint.word().load(Ordering::Acquire);
        if word != seen {
            seen = word;
            requests.data[0].store(word, Ordering::Relaxed);
            requests.post(endpoint)?;
        }
    }
    Ok(())
}

/// `SIGNAL_INTERVAL` send work requests, built once and linked into post lists.
struct SendRequests {
    requests: Box<[ibv_send_wr]>,
    _element: Box<ibv_sge>,
    /// The data of inline requests.
    data: Box<[AtomicU64; 8]>,
    post_list: usize,
    /// Whether each request is signalled, and its completion polled at once.
    signal_each: bool,
    /// The next request to post.
    next: usize,
    outstanding: usize,
}

impl SendRequests {
    fn new(endpoint: &Endpoint, options: &RawVerbsOptions) -> Result<Self, Failure> {
        if options.post_list == 0
            || options.post_list > SIGNAL_INTERVAL
            || !SIGNAL_INTERVAL.is_multiple_of(options.post_list)
        {
            return Err(format!(
                "--post-list {}: expected a power of two from 1 to {SIGNAL_INTERVAL}",
                options.post_list
            )
            .into());
        }
        let data = Box::new([const { AtomicU64::new(1) }; 8]);
        // Latency: the sent word must not lie where the answer arrives.
        let inline = options.inline || options.operation.is_latency();
        let signal_each = options.operation == Operation::LatencyCompleted;
        if options.operation.is_latency() && (options.post_list, options.size) != (1, 8) {
            return Err("latency is measured with --size 8 and --post-list 1 only".into());
        }
        if inline && options.size as usize > size_of_val(&*data) {
            return Err(format!("--inline with --size {}: at most 64 bytes fit", options.size).into());
        }
        let mut element = Box::new(element(&endpoint.memory, options.size)?);
        if inline {
            element.addr = data.as_ptr() as u64;
        }
        let to = endpoint.remote.at(0, u64::from(options.size))?;
        // SAFETY: plain data, for which all zeros are valid; filled below.
        let mut requests: Box<[ibv_send_wr]> =
            (0..SIGNAL_INTERVAL).map(|_| unsafe { std::mem::zeroed() }).collect();
        let first = requests.as_mut_ptr();
        for (at, request) in requests.iter_mut().enumerate() {
            (request.sg_list, request.num_sge) = (&raw mut *element, 1);
            request.opcode = match options.operation {
                Operation::Read => ibv_wr_opcode::IBV_WR_RDMA_READ,
                Operation::Send => ibv_wr_opcode::IBV_WR_SEND,
                _ => ibv_wr_opcode::IBV_WR_RDMA_WRITE,
            };
            request.wr.rdma.remote_addr = to.addr;
            request.wr.rdma.rkey = to.rkey.get();
            request.send_flags = if inline { ibv_send_flags::IBV_SEND_INLINE.0 } else { 0 };
            let signalled = signal_each || at + 1 == SIGNAL_INTERVAL;
            if signalled {
                request.send_flags |= ibv_send_flags::IBV_SEND_SIGNALED.0;
            }
            let last_of_list = (at + 1) % options.post_list == 0;
            request.next = if last_of_list { std::ptr::null_mut() } else { first.wrapping_add(at + 1) };
        }
        Ok(Self {
            requests,
            _element: element,
            data,
            post_list: options.post_list,
            signal_each,
            next: 0,
            outstanding: 0,
        })
    }

    /// Posts the next post list, and polls completions when the window is full.
    #[inline]
    fn post(&mut self, endpoint: &Endpoint) -> Result<(), Failure> {
        let mut bad = std::ptr::null_mut();
        let first = &raw mut self.requests[self.next];
        // SAFETY: a live queue pair, and a list of complete requests whose addresses are stable.
        match unsafe { ibv_post_send(endpoint.pair.as_raw().as_ptr(), first, &raw mut bad) } {
            0 => {}
            code => return Err(std::io::Error::from_raw_os_error(code).into()),
        }
        self.next += self.post_list;
        if self.signal_each {
            self.next %= SIGNAL_INTERVAL;
            self.outstanding = 1;
            while self.outstanding != 0 {
                self.complete(endpoint)?;
            }
        } else if self.next == SIGNAL_INTERVAL {
            self.next = 0;
            self.outstanding += 1;
            while self.outstanding == WINDOW {
                self.complete(endpoint)?;
            }
        }
        Ok(())
    }

    fn complete(&mut self, endpoint: &Endpoint) -> Result<(), Failure> {
        let mut found = [Completion::EMPTY; WINDOW];
        let completions = endpoint.queue.poll(&mut found)?;
        completions.iter().try_for_each(Completion::check)?;
        self.outstanding -= completions.len();
        Ok(())
    }
}

fn element(memory: &Region, size: u32) -> Result<ibv_sge, Failure> {
    let part = memory.sge(0, size)?;
    Ok(ibv_sge { addr: part.addr(), length: size, lkey: memory.lkey().get() })
}

/// The client: prints a row of bytes per request, requests, GB/s, million requests per second and µs per request.
///
/// # Errors
/// The first error of a connection or of a verbs call.
pub fn measure(host: &str, port: u16, options: &RawVerbsOptions) -> Result<(), Failure> {
    loader::ensure(&DeviceSelector::from_environment())?;
    let stream = dial(&format!("{host}:{port}"), Deadline::after(TIMEOUT))?;
    let each = if let Some(direction) = options.operation.system_call() {
        system_calls(stream, options.size, direction)?
    } else {
        let endpoint = Endpoint::new(stream, options, false, 0)?;
        let mut requests = SendRequests::new(&endpoint, options)?;
        if options.operation.is_latency() {
            latency(&endpoint, &mut requests)?
        } else {
            // Warm-up: the first requests resolve keys and map memory.
            rate(&endpoint, &mut requests, TIME / 3)?;
            rate(&endpoint, &mut requests, TIME)?
        }
    };
    let (bytes, count) = (f64::from(options.size), TIME.as_secs_f64() / each);
    println!("#bytes requests GB/s M/s us");
    println!("{bytes} {count:.0} {:.4} {:.4} {:.5}", bytes / each / 1e9, 1e-6 / each, each * 1e6);
    Ok(())
}

/// Seconds per request.
fn rate(endpoint: &Endpoint, requests: &mut SendRequests, time: Duration) -> Result<f64, Failure> {
    // Reading the clock costs as much as some requests.
    const CLOCK_INTERVAL: Duration = Duration::from_micros(20);
    let (mut done, mut burst) = (0, SIGNAL_INTERVAL);
    let mut last = Duration::ZERO;
    let start = Instant::now();
    while last < time {
        for _ in 0..burst / requests.post_list {
            requests.post(endpoint)?;
        }
        done += burst;
        let elapsed = start.elapsed();
        if elapsed - last < CLOCK_INTERVAL {
            burst *= 2;
        }
        last = elapsed;
    }
    while requests.outstanding != 0 {
        requests.complete(endpoint)?;
    }
    Ok(start.elapsed().as_secs_f64() / done as f64)
}

/// Seconds of half a round trip.
fn latency(endpoint: &Endpoint, requests: &mut SendRequests) -> Result<f64, Failure> {
    const WARM_UP: u64 = 10_000;
    let mut round = 0u64;
    let mut round_trip = |requests: &mut SendRequests| -> Result<(), Failure> {
        round += 1;
        requests.data[0].store(round, Ordering::Relaxed);
        requests.post(endpoint)?;
        // Polls for some seconds: reading a clock would add to the latency.
        for _ in 0..u32::MAX {
            if endpoint.word().load(Ordering::Acquire) == round {
                return Ok(());
            }
        }
        Err("the server did not answer within 2^32 polls".into())
    };
    for _ in 0..WARM_UP {
        round_trip(requests)?;
    }
    let start = Instant::now();
    let mut done = 0u64;
    while start.elapsed() < TIME {
        for _ in 0..1024 {
            round_trip(requests)?;
        }
        done += 1024;
    }
    Ok(start.elapsed().as_secs_f64() / done as f64 / 2.0)
}
