//! The device by a program that only posts and polls, so that its cost can be told from that of the tools.
//!
//! An ordinary verbs program: everything goes through the C interface of whichever libibverbs is loaded.
//! One process lends its memory and, for SENDs, posts receives; the other keeps a window of requests
//! outstanding, as `ucx_perftest` does. The requests are made once and posted again and again, one of every
//! [`BATCH`] signalled. The two are run by [`Pair::lean`](crate::tools::Pair::lean), and print a row of results
//! like perftest's.

use std::error::Error;
use std::io::{Read, Write};
use std::net::TcpStream;
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

use crate::memcpy::{Kind, memory};

type Failure = Box<dyn Error>;

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// RDMA WRITEs, as many as go.
    Write,
    /// RDMA READs, as many as go.
    Read,
    /// SENDs, as many as go.
    Send,
    /// Eight bytes written to and fro: half the time of a round. Completions are taken as above: what a put of UCX
    /// does, too.
    Latency,
    /// The same, and the completion of every request is taken before the answer is waited for, as perftest does.
    LatencyCompleted,
    /// No device: the kernel's copy (`process_vm_writev`) into private memory of the other process.
    SystemWrite,
    /// The same out of it (`process_vm_readv`).
    SystemRead,
}

impl Operation {
    /// All, by name.
    pub const NAMES: [(&str, Self); 7] = [
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

/// One measurement.
#[derive(Clone, Copy, Debug)]
pub struct Loop {
    /// What.
    pub operation: Operation,
    /// Bytes of a request.
    pub size: u32,
    /// Requests of one call.
    pub list: usize,
    /// Whether the data is copied while it is posted.
    pub inline: bool,
    /// Whether the memory that is lent is private, so that a READ goes through the kernel
    /// (with `MILLSTREAM_MOVE=0`).
    pub private: bool,
}

/// One of so many requests is signalled.
const BATCH: usize = 64;
/// Signalled requests outstanding, at most: when there are as many, one is waited for.
const WINDOW: usize = 4;
/// Receives that wait.
const RECEIVES: usize = 512;
const TIME: Duration = Duration::from_millis(300);
const PATIENCE: Duration = Duration::from_secs(30);

/// What a side works with.
struct Side {
    queue: CompletionQueue,
    memory: Region,
    pair: QueuePair,
    remote: RemoteMemory,
    stream: TcpStream,
}

impl Side {
    fn new(stream: TcpStream, what: &Loop, lends: bool, receives: usize) -> Result<Self, Failure> {
        let size = what.size;
        let device: Device = device::open(&DeviceSelector::from_environment())?;
        let queue = CompletionQueue::new(&device, (RECEIVES + WINDOW + 1) as u32)?;
        let len = (size as usize).max(4096);
        let memory = if lends && what.private {
            if what.operation != Operation::Read {
                return Err("private memory is lent to READs only".into());
            }
            Region::source(&device, vec![1u8; len].into_boxed_slice(), true)?
        } else {
            Region::landing(&device, c"millstream-bench", len, Access::REMOTE)?
        };
        memory.populate()?;
        let options = RcOptions {
            send_depth: (BATCH * (WINDOW + 1)) as u32,
            recv_depth: RECEIVES as u32,
            ..RcOptions::default()
        };
        let prepared = PreparedQueuePair::new(&device, &queue, &queue, &options)?;
        let element = memory.sge(0, size)?;
        for _ in 0..receives {
            prepared.post_recv(&[element], millstream_rdma::WrId(0))?;
        }
        let mut stream = stream;
        let own = memory.remote().encode();
        let ConnectedQueuePair { pair, private_data: extra } =
            prepared.connect(&mut stream, &own, Deadline::after(PATIENCE))?;
        let remote = RemoteMemory::decode(extra.as_slice().try_into().map_err(|_| "no memory was named")?);
        Ok(Self { queue, memory, pair, remote, stream })
    }

    fn word(&self) -> &AtomicU64 {
        let base = self.memory.as_ptr().expect("landing memory has an address");
        // SAFETY: at least a page, aligned to one; peers store whole words.
        unsafe { AtomicU64::from_ptr(base.as_ptr().cast()) }
    }
}

/// The side that lends its memory; ends with the other.
///
/// # Errors
/// Whatever stands in the way, for people.
pub fn serve(port: u16, what: &Loop) -> Result<(), Failure> {
    loader::ensure(&DeviceSelector::from_environment())?;
    let listener = listen(&format!("127.0.0.1:{port}"))?;
    let (stream, _) = listener.accept(Deadline::after(PATIENCE))?;
    if what.operation.system_call().is_some() {
        return lend(stream, what.size);
    }
    let receives = if what.operation == Operation::Send { RECEIVES } else { 0 };
    let side = Side::new(stream, what, true, receives)?;
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let end = || {
            // The other side says nothing and hangs up.
            let _ = (&side.stream).read(&mut [0]);
            over.store(true, Ordering::Relaxed);
        };
        match what.operation {
            Operation::Write | Operation::Read | Operation::SystemWrite | Operation::SystemRead => {
                end();
                Ok(())
            }
            Operation::Send => {
                scope.spawn(end);
                receive(&side, what.size, &over)
            }
            Operation::Latency | Operation::LatencyCompleted => {
                scope.spawn(end);
                echo(&side, what, &over)
            }
        }
    })
}

/// Says where private memory of this process is, until the other side hangs up.
fn lend(mut stream: TcpStream, size: u32) -> Result<(), Failure> {
    let mut memory = vec![1u8; size as usize];
    stream.write_all(&std::process::id().to_be_bytes())?;
    stream.write_all(&(memory.as_mut_ptr() as u64).to_be_bytes())?;
    let _ = stream.read(&mut [0]);
    std::hint::black_box(&mut memory);
    Ok(())
}

/// Seconds a system call takes that copies `size` bytes between memory here and private memory there.
fn system_calls(mut stream: TcpStream, size: u32, direction: Direction) -> Result<f64, Failure> {
    let (mut pid, mut addr) = ([0; 4], [0; 8]);
    stream.read_exact(&mut pid)?;
    stream.read_exact(&mut addr)?;
    // Of the kind that what is held against this has here: READs land in landing memory, perftest writes from its heap.
    let (mut heap, landing) = match direction {
        Direction::Read => (Vec::new(), Some(memory(Kind::Landing, size as usize)?)),
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

/// Posts as many receives as were used up, until it is over.
fn receive(side: &Side, size: u32, over: &AtomicBool) -> Result<(), Failure> {
    let mut element = element(&side.memory, size)?;
    // SAFETY: a list of plain data, in which all zeros are valid; linked below.
    let mut requests: [ibv_recv_wr; BATCH] = unsafe { std::mem::zeroed() };
    for request in &mut requests {
        (request.sg_list, request.num_sge) = (&raw mut element, 1);
    }
    let mut found = [Completion::EMPTY; BATCH];
    while !over.load(Ordering::Relaxed) {
        let completions = side.queue.poll(&mut found)?;
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
        match unsafe { ibv_post_recv(side.pair.as_raw().as_ptr(), first, &raw mut bad) } {
            0 => {}
            code => return Err(std::io::Error::from_raw_os_error(code).into()),
        }
    }
    Ok(())
}

/// Sends every word back that comes, until it is over.
fn echo(side: &Side, what: &Loop, over: &AtomicBool) -> Result<(), Failure> {
    let mut requests = Requests::new(side, what)?;
    let mut seen = 0;
    while !over.load(Ordering::Relaxed) {
        let word = side.word().load(Ordering::Acquire);
        if word != seen {
            seen = word;
            requests.data[0].store(word, Ordering::Relaxed);
            requests.post(side)?;
        }
    }
    Ok(())
}

/// Requests that are made once: [`BATCH`] or the size of a list, whichever is more.
struct Requests {
    requests: Box<[ibv_send_wr]>,
    _element: Box<ibv_sge>,
    /// What inline requests carry.
    data: Box<[AtomicU64; 8]>,
    list: usize,
    /// Whether each of them is signalled, and its completion taken at once.
    each: bool,
    /// The next to be posted.
    at: usize,
    outstanding: usize,
}

impl Requests {
    fn new(side: &Side, what: &Loop) -> Result<Self, Failure> {
        if what.list == 0 || what.list > BATCH || !BATCH.is_multiple_of(what.list) {
            return Err(format!("a list has 1, 2, 4 ... {BATCH} requests, not {}", what.list).into());
        }
        let data = Box::new([const { AtomicU64::new(1) }; 8]);
        // The word that is sent is not the one that is waited for.
        let inline = what.inline || what.operation.is_latency();
        let each = what.operation == Operation::LatencyCompleted;
        if what.operation.is_latency() && (what.list, what.size) != (1, 8) {
            return Err("latency is that of single requests of 8 bytes".into());
        }
        if inline && what.size as usize > size_of_val(&*data) {
            return Err(format!("{} bytes are too many for inline data", what.size).into());
        }
        let mut element = Box::new(element(&side.memory, what.size)?);
        if inline {
            element.addr = data.as_ptr() as u64;
        }
        let to = side.remote.at(0, u64::from(what.size))?;
        // SAFETY: a list of plain data, in which all zeros are valid; filled below.
        let mut requests: Box<[ibv_send_wr]> = (0..BATCH).map(|_| unsafe { std::mem::zeroed() }).collect();
        let first = requests.as_mut_ptr();
        for (at, request) in requests.iter_mut().enumerate() {
            (request.sg_list, request.num_sge) = (&raw mut *element, 1);
            request.opcode = match what.operation {
                Operation::Read => ibv_wr_opcode::IBV_WR_RDMA_READ,
                Operation::Send => ibv_wr_opcode::IBV_WR_SEND,
                _ => ibv_wr_opcode::IBV_WR_RDMA_WRITE,
            };
            request.wr.rdma.remote_addr = to.addr;
            request.wr.rdma.rkey = to.rkey.get();
            request.send_flags = if inline { ibv_send_flags::IBV_SEND_INLINE.0 } else { 0 };
            let signalled = each || at + 1 == BATCH;
            if signalled {
                request.send_flags |= ibv_send_flags::IBV_SEND_SIGNALED.0;
            }
            let last_of_list = (at + 1) % what.list == 0;
            request.next = if last_of_list { std::ptr::null_mut() } else { first.wrapping_add(at + 1) };
        }
        Ok(Self { requests, _element: element, data, list: what.list, each, at: 0, outstanding: 0 })
    }

    /// Posts the next list, and takes completions when the window is full.
    #[inline]
    fn post(&mut self, side: &Side) -> Result<(), Failure> {
        let mut bad = std::ptr::null_mut();
        let first = &raw mut self.requests[self.at];
        // SAFETY: a live queue pair, and a list of complete requests that stay where they are.
        match unsafe { ibv_post_send(side.pair.as_raw().as_ptr(), first, &raw mut bad) } {
            0 => {}
            code => return Err(std::io::Error::from_raw_os_error(code).into()),
        }
        self.at += self.list;
        if self.each {
            self.at %= BATCH;
            self.outstanding = 1;
            while self.outstanding != 0 {
                self.complete(side)?;
            }
        } else if self.at == BATCH {
            self.at = 0;
            self.outstanding += 1;
            while self.outstanding == WINDOW {
                self.complete(side)?;
            }
        }
        Ok(())
    }

    fn complete(&mut self, side: &Side) -> Result<(), Failure> {
        let mut found = [Completion::EMPTY; WINDOW];
        let completions = side.queue.poll(&mut found)?;
        completions.iter().try_for_each(Completion::check)?;
        self.outstanding -= completions.len();
        Ok(())
    }
}

fn element(memory: &Region, size: u32) -> Result<ibv_sge, Failure> {
    let part = memory.sge(0, size)?;
    Ok(ibv_sge { addr: part.addr(), length: size, lkey: memory.lkey().get() })
}

/// The side that measures; prints bytes, requests, GB/s, millions of requests a second, and µs a request.
///
/// # Errors
/// Whatever stands in the way, for people.
pub fn measure(host: &str, port: u16, what: &Loop) -> Result<(), Failure> {
    loader::ensure(&DeviceSelector::from_environment())?;
    let stream = dial(&format!("{host}:{port}"), Deadline::after(PATIENCE))?;
    let each = if let Some(direction) = what.operation.system_call() {
        system_calls(stream, what.size, direction)?
    } else {
        let side = Side::new(stream, what, false, 0)?;
        let mut requests = Requests::new(&side, what)?;
        if what.operation.is_latency() {
            latency(&side, &mut requests)?
        } else {
            // The first ones look everything up.
            rate(&side, &mut requests, TIME / 3)?;
            rate(&side, &mut requests, TIME)?
        }
    };
    let (bytes, count) = (f64::from(what.size), TIME.as_secs_f64() / each);
    println!("#bytes requests GB/s M/s us");
    println!("{bytes} {count:.0} {:.4} {:.4} {:.5}", bytes / each / 1e9, 1e-6 / each, each * 1e6);
    Ok(())
}

/// Seconds a request.
fn rate(side: &Side, requests: &mut Requests, time: Duration) -> Result<f64, Failure> {
    // A look at the clock costs as much as some requests, so there is one every so many microseconds.
    const BETWEEN_LOOKS: Duration = Duration::from_micros(20);
    let (mut done, mut burst) = (0, BATCH);
    let mut last = Duration::ZERO;
    let start = Instant::now();
    while last < time {
        for _ in 0..burst / requests.list {
            requests.post(side)?;
        }
        done += burst;
        let elapsed = start.elapsed();
        if elapsed - last < BETWEEN_LOOKS {
            burst *= 2;
        }
        last = elapsed;
    }
    while requests.outstanding != 0 {
        requests.complete(side)?;
    }
    Ok(start.elapsed().as_secs_f64() / done as f64)
}

/// Seconds one way.
fn latency(side: &Side, requests: &mut Requests) -> Result<f64, Failure> {
    const WARM_UP: u64 = 10_000;
    let mut round = 0u64;
    let mut turn = |requests: &mut Requests| -> Result<(), Failure> {
        round += 1;
        requests.data[0].store(round, Ordering::Relaxed);
        requests.post(side)?;
        // Some seconds' worth of looks: a clock would be measured, too.
        for _ in 0..u32::MAX {
            if side.word().load(Ordering::Acquire) == round {
                return Ok(());
            }
        }
        Err("the other side does not answer".into())
    };
    for _ in 0..WARM_UP {
        turn(requests)?;
    }
    let start = Instant::now();
    let mut done = 0u64;
    while start.elapsed() < TIME {
        for _ in 0..1024 {
            turn(requests)?;
        }
        done += 1024;
    }
    Ok(start.elapsed().as_secs_f64() / done as f64 / 2.0)
}
