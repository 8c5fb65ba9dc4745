//! The loop of a worker.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use millstream_fragment::mfp::{Entry, Header, MfpError};
use millstream_shm::Mapping;

use crate::event::{Event, EventFragment};
use crate::protocol::{Area, EventSet, Hello, Job, MAX_MESSAGE, Malformed, Reply, receive, send};

/// Why a worker ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// Standard input is no socket, or failed.
    #[error(
        "cannot {operation}: {cause}; a software trigger is started by a builder unit (docs/event-builder.md)"
    )]
    Socket {
        /// The operation.
        operation: &'static str,
        /// The cause.
        cause: io::Error,
    },
    /// The builder unit sent a message of another version.
    #[error("{0} from the builder unit: both must have the same version")]
    Malformed(#[from] Malformed),
    /// A packet in landing memory is invalid.
    #[error("packet of source {source_id:#x} in slot {slot}: {error}")]
    Packet {
        /// The source.
        source_id: u32,
        /// The slot.
        slot: u32,
        /// The first invalid field.
        error: MfpError,
    },
    /// A slot is outside of landing memory.
    #[error("slot {0} is outside of landing memory")]
    Slot(u32),
}

/// What a worker has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerStatistics {
    /// Jobs.
    pub jobs: u64,
    /// Events decided.
    pub events: u64,
    /// Events accepted.
    pub accepted: u64,
    /// Time in the user's function and in reading headers.
    pub busy: Duration,
}

/// Decides on the events of the builder unit that started this process: standard input is the socket to it. Returns when
/// the run has ended.
///
/// # Errors
/// [`WorkerError`].
pub fn serve(decide: impl FnMut(&Event<'_>) -> bool) -> Result<WorkerStatistics, WorkerError> {
    // The end of the socket ends a worker that waits; this ends one that decides.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    serve_on(io::stdin().as_fd(), decide)
}

/// Decides on events as [`serve`] does, over another socket.
///
/// # Errors
/// [`WorkerError`].
pub fn serve_on(
    socket: BorrowedFd<'_>,
    mut decide: impl FnMut(&Event<'_>) -> bool,
) -> Result<WorkerStatistics, WorkerError> {
    let failed = |operation| move |cause| WorkerError::Socket { operation, cause };
    let mut buffer = vec![0; MAX_MESSAGE];
    let (len, descriptor) = receive(socket, &mut buffer).map_err(failed("receive from the builder unit"))?;
    let hello = Hello::decode(&buffer[..len])?;
    let descriptor = descriptor.ok_or(Malformed("hello without descriptor"))?;
    let len = usize::try_from(hello.memory_bytes).map_err(|_| Malformed("hello"))?;
    let memory = Mapping::new(descriptor.as_fd(), 0, len, false).map_err(failed("map landing memory"))?;
    let mut worker = Worker { memory, hello, headers: Vec::new(), statistics: WorkerStatistics::default() };
    loop {
        let (len, _) = receive(socket, &mut buffer).map_err(failed("receive from the builder unit"))?;
        if len == 0 {
            return Ok(worker.statistics);
        }
        let job = Job::decode(&buffer[..len])?;
        let begin = Instant::now();
        let accepted = worker.decide(&job, &mut decide)?;
        worker.statistics.busy += begin.elapsed();
        match send(socket, &Reply { id: job.id, accepted }.encode(), None) {
            // The run has ended.
            Err(cause) if cause.kind() == io::ErrorKind::BrokenPipe => return Ok(worker.statistics),
            sent => sent.map_err(failed("send to the builder unit"))?,
        }
    }
}

struct Worker {
    memory: Mapping,
    hello: Hello,
    /// Entries of each packet of the current job.
    headers: Vec<Vec<Entry>>,
    statistics: WorkerStatistics,
}

impl Worker {
    fn decide(
        &mut self,
        job: &Job,
        decide: &mut impl FnMut(&Event<'_>) -> bool,
    ) -> Result<EventSet, WorkerError> {
        let start = u64::from(job.slot) * self.hello.slot_bytes;
        let end = start.checked_add(self.hello.slot_bytes);
        if end.is_none_or(|end| end > self.memory.len() as u64) {
            return Err(WorkerError::Slot(job.slot));
        }
        self.headers.resize(self.hello.areas.len(), Vec::new());
        for (area, entries) in self.hello.areas.iter().zip(&mut self.headers) {
            read_header(&self.memory, start, area, job, entries)?;
        }
        let mut accepted = EventSet::of(job.events);
        let mut next = vec![0; self.hello.areas.len()];
        let mut fragments = Vec::with_capacity(self.hello.areas.len());
        for event in 0..job.events {
            let number = job.first_event + u64::from(event);
            fragments.clear();
            for ((area, entries), next) in self.hello.areas.iter().zip(&self.headers).zip(&mut next) {
                let found = entries.get(*next).filter(|entry| entry.event == number);
                *next += usize::from(found.is_some());
                let found = found.map(|entry| (*entry, payload(&self.memory, start, area, entry)));
                fragments.push(EventFragment::new(area.source, area.kind, found));
            }
            if job.candidates.contains(event) {
                self.statistics.events += 1;
                if decide(&Event::new(number, &fragments)) {
                    self.statistics.accepted += 1;
                    accepted.insert(event);
                }
            }
        }
        self.statistics.jobs += 1;
        Ok(accepted)
    }
}

/// Copies and checks the header of a packet. Its entries are in ascending order of events.
fn read_header(
    memory: &Mapping,
    slot: u64,
    area: &Area,
    job: &Job,
    entries: &mut Vec<Entry>,
) -> Result<(), WorkerError> {
    let bytes = bytes(memory, slot + area.offset, area.header_len).to_vec();
    let wrong = |error| WorkerError::Packet { source_id: area.source, slot: job.slot, error };
    let header = Header::new_checked(&bytes[..], area.capacity.into()).map_err(wrong)?;
    entries.clear();
    if header.source().0 != area.source || header.first_event() != job.first_event {
        return Err(WorkerError::Malformed(Malformed("packet of another batch")));
    }
    entries.extend(header.entries());
    Ok(())
}

/// The payload of a fragment. The header's check bounds it to the area.
fn payload<'m>(memory: &'m Mapping, slot: u64, area: &Area, entry: &Entry) -> &'m [u8] {
    bytes(memory, slot + area.offset + u64::from(entry.offset), entry.len)
}

/// Bytes of landing memory.
fn bytes(memory: &Mapping, offset: u64, len: u32) -> &[u8] {
    let end = offset + u64::from(len);
    assert!(end <= memory.len() as u64, "areas and fragments were checked to be in landing memory");
    // SAFETY: the range is mapped, and the file is sealed against shrinking. Its slot is not granted while a job is open, so
    // no unit of the run writes to it; a process that does so can only change the decision.
    unsafe { std::slice::from_raw_parts(memory.base().add(offset as usize), len as usize) }
}
