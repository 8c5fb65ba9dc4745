//! Worker processes of the software trigger: starts them, gives them batches, takes decisions.
//!
//! A worker has at most `credits` batches. A batch keeps its slot until it is decided, so the slots bound the queue. The
//! batches of a worker that ends or does not answer in time go to the others, each at most once more; the run stops if no
//! worker is left, or if a batch has ended two.

use crate::config::WorkersConfig;
use crate::core::SlotIndex;
use crate::core::plan::Batch;
use crate::layout::SlotLayout;
use crate::process::ProcessError;
use crate::process::error::IoContext;
use millstream_software_trigger::protocol::{Area, EventSet, Hello, Job, Reply, receive, send};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_setaffinity};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Workers that one batch may end.
const MAX_ATTEMPTS: u32 = 2;
/// Length of the longest reply, with a byte more.
const REPLY_BUFFER: usize = 8 + 4096 / 8 + 1;
/// Time for workers to end after their socket.
const END_TIMEOUT: Duration = Duration::from_secs(1);

/// Counts of the software trigger of a builder unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerCounts {
    /// Batches decided.
    pub batches: u64,
    /// Events decided.
    pub events: u64,
    /// Events accepted.
    pub accepted: u64,
    /// Workers that ended or did not answer.
    pub lost: u64,
    /// Maximum number of batches that waited for a worker.
    pub longest_queue: u16,
    /// Time in which all workers had all their credits in use: back-pressure on the readout units.
    pub all_credits_used: Duration,
}

/// A batch that waits for decisions.
#[derive(Debug)]
pub(super) struct WorkerJob {
    pub(super) slot: SlotIndex,
    pub(super) batch: Batch,
    /// The events to decide on, counted from the first of the batch.
    pub(super) candidates: Vec<u16>,
}

/// A batch that is decided.
#[derive(Debug)]
pub(super) struct DecidedBatch {
    pub(super) slot: SlotIndex,
    /// The accepted candidates.
    pub(super) accepted: Vec<u16>,
}

/// Why no worker decides.
#[derive(Debug, thiserror::Error)]
#[error("software trigger: {0}")]
pub(super) struct WorkersFailed(String);

/// A batch at a worker.
struct OpenJob {
    id: u64,
    job: WorkerJob,
    attempts: u32,
    until: Instant,
}

struct Worker {
    index: usize,
    process: Child,
    socket: Arc<OwnedFd>,
    timeout: Duration,
    open: VecDeque<OpenJob>,
}

/// The workers of a builder unit.
pub(super) struct Workers {
    credits: usize,
    timeout: Duration,
    workers: Vec<Worker>,
    waiting: VecDeque<(WorkerJob, u32)>,
    next: u64,
    full_since: Option<Instant>,
    counts: WorkerCounts,
    /// Why workers were lost, for the error when none is left.
    reasons: Vec<String>,
}

impl Workers {
    /// Starts the workers, which map landing memory through `memory`.
    pub(super) fn start(
        config: &WorkersConfig,
        layout: &SlotLayout,
        memory: BorrowedFd<'_>,
        memory_bytes: u64,
    ) -> Result<Workers, ProcessError> {
        let area = |area: &crate::layout::PacketArea| Area {
            source: area.source,
            kind: area.kind,
            offset: area.offset,
            capacity: area.capacity,
            header_len: area.header_len,
        };
        let areas: Vec<Area> = layout.packets.iter().map(area).collect();
        let memory = read_only(memory).context("open landing memory for the software trigger")?;
        let mut workers = Vec::new();
        for index in 0..usize::from(config.workers.get()) {
            let hello = Hello {
                // At most the 1024 of the configuration.
                worker: index as u32,
                slot_bytes: layout.slot_bytes.0,
                memory_bytes,
                areas: areas.clone(),
            };
            workers.push(Worker::start(config, index, &hello, memory.as_fd())?);
        }
        Ok(Workers {
            credits: config.credits.get().into(),
            timeout: config.timeout,
            workers,
            waiting: VecDeque::new(),
            next: 0,
            full_since: None,
            counts: WorkerCounts::default(),
            reasons: Vec::new(),
        })
    }

    /// The sockets, readable when there is a decision or a worker has ended.
    pub(super) fn sockets(&self) -> Vec<Arc<OwnedFd>> {
        self.workers.iter().map(|worker| Arc::clone(&worker.socket)).collect()
    }

    /// When [`poll`](Self::poll) has to be called next.
    pub(super) fn timeout(&self) -> Option<Instant> {
        self.workers.iter().filter_map(|worker| Some(worker.open.front()?.until)).min()
    }

    pub(super) fn counts(&self) -> WorkerCounts {
        self.counts
    }

    /// Queues a batch. Its slot must not be granted before [`poll`](Self::poll) returns it.
    pub(super) fn submit(&mut self, job: WorkerJob) {
        self.waiting.push_back((job, 0));
        let queued = u16::try_from(self.waiting.len()).unwrap_or(u16::MAX);
        self.counts.longest_queue = self.counts.longest_queue.max(queued);
        self.dispatch();
    }

    /// The next batch that is decided.
    pub(super) fn poll(&mut self) -> Result<Option<DecidedBatch>, WorkersFailed> {
        let now = Instant::now();
        let mut at = 0;
        while at < self.workers.len() {
            match self.workers[at].poll(now) {
                Ok(None) => at += 1,
                Ok(Some(decided)) => {
                    self.counts.batches += 1;
                    self.counts.events += decided.1;
                    self.counts.accepted += decided.0.accepted.len() as u64;
                    self.dispatch();
                    return Ok(Some(decided.0));
                }
                Err(reason) => self.lose(at, reason)?,
            }
        }
        Ok(None)
    }

    /// Gives waiting batches to the workers with the fewest.
    fn dispatch(&mut self) {
        let now = Instant::now();
        while !self.waiting.is_empty() {
            let least = self.workers.iter_mut().min_by_key(|worker| worker.open.len());
            let Some(worker) = least.filter(|worker| worker.open.len() < self.credits) else { break };
            let Some((job, attempts)) = self.waiting.pop_front() else { break };
            self.next += 1;
            worker.give(OpenJob { id: self.next, job, attempts: attempts + 1, until: now + self.timeout });
        }
        let is_full = self.workers.iter().all(|worker| worker.open.len() >= self.credits);
        match (is_full, self.full_since) {
            (true, None) => self.full_since = Some(now),
            (false, Some(since)) => {
                self.counts.all_credits_used += now - since;
                self.full_since = None;
            }
            _ => {}
        }
    }

    /// Hands the batches of a worker that ended to the others.
    fn lose(&mut self, at: usize, reason: String) -> Result<(), WorkersFailed> {
        let mut worker = self.workers.remove(at);
        self.counts.lost += 1;
        tracing::warn!("worker {} of the software trigger is lost: {reason}", worker.index);
        self.reasons.push(format!("worker {}: {reason}", worker.index));
        let open = std::mem::take(&mut worker.open);
        end_all(vec![worker]);
        for (position, open) in open.into_iter().enumerate().rev() {
            // Only the first was being decided.
            let attempts = if position == 0 { open.attempts } else { open.attempts - 1 };
            if attempts >= MAX_ATTEMPTS {
                let reasons = self.reasons.join("; ");
                return Err(WorkersFailed(format!(
                    "{} ended {attempts} workers: {reasons}",
                    open.job.batch.id
                )));
            }
            self.waiting.push_front((open.job, attempts));
        }
        if self.workers.is_empty() {
            return Err(WorkersFailed(format!("no worker is left: {}", self.reasons.join("; "))));
        }
        self.dispatch();
        Ok(())
    }

    /// Ends all workers.
    pub(super) fn finish(mut self) -> WorkerCounts {
        end_all(std::mem::take(&mut self.workers));
        self.counts
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        end_all(std::mem::take(&mut self.workers));
    }
}

/// Ends processes: by the ends of their sockets, then by force.
fn end_all(mut workers: Vec<Worker>) {
    for worker in &workers {
        let _ = rustix::net::shutdown(&worker.socket, rustix::net::Shutdown::Both);
    }
    let until = Instant::now() + END_TIMEOUT;
    while !workers.is_empty() && Instant::now() < until {
        workers.retain_mut(|worker| matches!(worker.process.try_wait(), Ok(None)));
        std::thread::sleep(Duration::from_millis(1));
    }
    for worker in &mut workers {
        let _ = worker.process.kill();
        let _ = worker.process.wait();
    }
}

impl Worker {
    fn start(
        config: &WorkersConfig,
        index: usize,
        hello: &Hello,
        memory: BorrowedFd<'_>,
    ) -> Result<Worker, ProcessError> {
        let flags = SocketFlags::CLOEXEC;
        let (own, others) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .map_err(io::Error::from)
            .context("create a socket to a software trigger")?;
        let mut command = Command::new(&config.program);
        command.args(&config.arguments).stdin(Stdio::from(others)).stdout(Stdio::null());
        let process = command
            .spawn()
            .map_err(|cause| ProcessError::SoftwareTrigger { program: config.program.clone(), cause })?;
        millstream_shm::descriptors::restore_limit_of(&process);
        if !config.cpus.is_empty() {
            let mut set = CpuSet::new();
            set.set(config.cpus[index % config.cpus.len()]);
            sched_setaffinity(pid(&process), &set)
                .map_err(io::Error::from)
                .context("pin a software trigger to builder.trigger.cpus")?;
        }
        send(&own, &hello.encode(), Some(memory)).context("start a software trigger")?;
        rustix::io::ioctl_fionbio(&own, true).map_err(io::Error::from).context("start a software trigger")?;
        Ok(Worker { index, process, socket: Arc::new(own), timeout: config.timeout, open: VecDeque::new() })
    }

    fn give(&mut self, open: OpenJob) {
        let events = u32::from(open.job.batch.events);
        let mut candidates = EventSet::of(events);
        open.job.candidates.iter().for_each(|&event| candidates.insert(event.into()));
        let job = Job {
            id: open.id,
            first_event: open.job.batch.first_event.0,
            events,
            slot: open.job.slot.0.into(),
            candidates,
        };
        // A worker that has ended is found when its socket is read. The socket has room for the credits.
        let _ = send(&self.socket, &job.encode(), None);
        self.open.push_back(open);
    }

    /// The next decision, with the number of its candidates; or why the worker is lost.
    fn poll(&mut self, now: Instant) -> Result<Option<(DecidedBatch, u64)>, String> {
        let mut buffer = [0; REPLY_BUFFER];
        let len = match receive(&self.socket, &mut buffer) {
            Ok((0, _)) => return Err(self.ended()),
            Ok((len, _)) => len,
            Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => {
                return match self.open.front() {
                    Some(open) if open.until <= now => Err(format!(
                        "did not decide on {} in time (builder.trigger.timeout_ms)",
                        open.job.batch.id
                    )),
                    _ => Ok(None),
                };
            }
            Err(cause) => return Err(format!("its socket failed: {cause}")),
        };
        let reply = Reply::decode(&buffer[..len]).map_err(|error| error.to_string())?;
        let is_next =
            |open: &OpenJob| open.id == reply.id && reply.accepted.fits(open.job.batch.events.into());
        // Otherwise its batches stay here, for the others.
        if !self.open.front().is_some_and(is_next) {
            return Err(format!(
                "sent a decision for job {}, which is not its next one, or has another number of events",
                reply.id
            ));
        }
        let Some(open) = self.open.pop_front() else { return Ok(None) };
        if let Some(next) = self.open.front_mut() {
            // It starts with the next batch now.
            next.until = now + self.timeout;
        }
        let events = open.job.candidates.len() as u64;
        let accepted = open.job.candidates.into_iter().filter(|&event| reply.accepted.contains(event.into()));
        Ok(Some((DecidedBatch { slot: open.job.slot, accepted: accepted.collect() }, events)))
    }

    /// How the process ended, now that its socket has.
    fn ended(&mut self) -> String {
        let until = Instant::now() + Duration::from_millis(500);
        loop {
            match self.process.try_wait() {
                Ok(Some(status)) => return format!("ended: {status}"),
                Ok(None) if Instant::now() < until => std::thread::sleep(Duration::from_millis(1)),
                _ => return "closed its socket".to_owned(),
            }
        }
    }
}

fn pid(process: &Child) -> Option<Pid> {
    i32::try_from(process.id()).ok().and_then(Pid::from_raw)
}

/// The same file, opened read-only: a worker cannot map it writable.
fn read_only(memory: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    use std::os::fd::AsRawFd as _;
    let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
    Ok(std::fs::File::open(path)?.into())
}

/// A socket of a worker, to be waited for.
pub(super) struct WorkerFd(pub(super) Arc<OwnedFd>);

impl AsFd for WorkerFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
