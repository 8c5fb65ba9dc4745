//! A WRITE with immediate data, without any fabric: the baseline of small puts.

use std::error::Error;
use std::time::{Duration, Instant};

use millstream_fabric::Fabric;
use millstream_rdma::connect::{dial, listen};
use millstream_rdma::queue::Signal;
use millstream_rdma::wait::{WaitError, WaitOptions};
use millstream_rdma::{
    Access, Completion, CompletionQueue, CompletionWaiter, Deadline, DeviceSelector, PreparedQueuePair,
    QueuePair, RcOptions, Region, RemoteMemory, WrId, device,
};
use millstream_torus_core::NodeNumber;

use crate::median;

const TIMEOUT: Duration = Duration::from_secs(60);
const COUNT: u32 = 500;
const REPETITIONS: usize = 5;
const RECEIVES: u32 = 64;

/// What the client measures, and how long a waiting node polls: the mesh polls before it blocks, and each packet of the torus
/// wakes a process.
pub(super) const BARE: [(&str, Duration); 2] =
    [(POLLED, Duration::from_micros(20)), (WITH_WAKE_UP, Duration::ZERO)];
pub(super) const POLLED: &str = "bare WRITE with immediate data, polled, 8 B";
pub(super) const WITH_WAKE_UP: &str = "bare WRITE with immediate data and its wake-up, 8 B";

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Time from a post until the program of the other node goes on (µs), measured between nodes 0 and 1; `None` at the others.
/// A node that waits polls for `spin`, then blocks.
pub(super) fn write_with_immediate<F: Fabric>(fabric: &mut F, spin: Duration) -> Outcome<Option<f64>> {
    let here = fabric.here();
    let deadline = Deadline::after(TIMEOUT);
    let listener = listen("127.0.0.1:0")?;
    let addresses = fabric.exchange(listener.address().to_string().as_bytes(), TIMEOUT)?;
    let mut stream = match here {
        NodeNumber(0) => listener.accept(deadline)?.0,
        NodeNumber(1) => dial(std::str::from_utf8(&addresses[0])?, deadline)?,
        _ => return Ok(None),
    };
    let device = device::open(&DeviceSelector::from_environment())?;
    let waiter = CompletionWaiter::new(&device, WaitOptions { spin, ..WaitOptions::default() })?;
    let queue = waiter.completion_queue(2 * RECEIVES)?;
    let memory = Region::landing(&device, c"millstream-bench-bare", 4096, Access::REMOTE_WRITE)?;
    let options = RcOptions { send_depth: RECEIVES, recv_depth: RECEIVES, ..RcOptions::default() };
    let prepared = PreparedQueuePair::new(&device, &queue, &queue, &options)?;
    for _ in 0..RECEIVES {
        prepared.post_recv(&[], WrId(1))?;
    }
    let connected = prepared.connect(&mut stream, &memory.remote().encode(), deadline)?;
    let remote = RemoteMemory::decode(&connected.private_data[..].try_into()?);
    let mut end = End { pair: connected.pair, queue, waiter, memory, remote };
    let mut times = Vec::new();
    for _ in 0..REPETITIONS {
        let start = Instant::now();
        for _ in 0..COUNT {
            if here == NodeNumber(0) {
                end.write()?;
            }
            end.await_write()?;
            if here != NodeNumber(0) {
                end.write()?;
            }
        }
        times.push(start.elapsed().as_secs_f64() * 1e6 / f64::from(2 * COUNT));
    }
    Ok(median(&times))
}

/// One end. The queue pair is dropped first.
struct End {
    pair: QueuePair,
    queue: CompletionQueue,
    waiter: CompletionWaiter,
    memory: Region,
    remote: RemoteMemory,
}

impl End {
    fn write(&mut self) -> Outcome<()> {
        let from = [self.memory.sge(0, 8)?];
        Ok(self.pair.post_write_imm(&from, self.remote.at(8, 8)?, 1, Signal::Yes, WrId(2))?)
    }

    fn await_write(&mut self) -> Outcome<()> {
        let (pair, queue) = (&self.pair, &self.queue);
        let mut buffer = [Completion::EMPTY; 16];
        let mut arrived = 0;
        while arrived == 0 {
            self.waiter.wait(
                &[queue],
                &mut [],
                Deadline::after(TIMEOUT),
                || -> Result<bool, WaitError> {
                    let taken = queue.poll(&mut buffer).unwrap_or_default();
                    arrived += taken.iter().filter(|completion| completion.wr_id() == WrId(1)).count();
                    Ok(arrived > 0)
                },
            )?;
        }
        for _ in 0..arrived {
            pair.post_recv(&[], WrId(1))?;
        }
        Ok(())
    }
}
