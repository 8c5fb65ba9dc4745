//! Stores events on a thread of its own, straight from landing memory.
//!
//! ```text
//!  builder unit ── StorageJob: slot, contents, events, decisions ──► storage thread ── events ──► sink
//!       ▲                                                                 │
//!       └───────── StoredBatch, eventfd: the sink is flushed ─────────────┘
//! ```
//!
//! A batch keeps its slot until its events are in the sink and flushed. So the slots bound the queue, no event is
//! copied for it, and a batch that is done is stored. Batches that wait at the same time share a flush.

use super::landing::LandingMemory;
use super::slot_contents::{HeaderReader, InvalidSlotData, SlotContents};
use crate::core::plan::Batch;
use crate::core::types::EventNumber;
use crate::core::{Bytes, SlotIndex};
use crate::layout::SlotLayout;
use crate::process::ProcessError;
use crate::process::error::IoContext;
use crate::process::sink::{AcceptedBatch, AcceptedEvent, EventOfBatch, PacketPlace, Sink, SinkError};
use millstream_fragment::{Fragment, SourceId};
use rustix::event::{EventfdFlags, eventfd};
use serde::{Deserialize, Serialize};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Interval of flushes without events, for sinks that rotate files by time.
const IDLE_FLUSH: Duration = Duration::from_millis(500);
/// Interval of reports that events are being stored, or files closed, while the unit waits for that.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);
/// Payload after which batches are flushed though others wait.
const MAX_UNFLUSHED: Bytes = Bytes(64 << 20);

/// A processed batch with events to store.
#[derive(Debug)]
pub(super) struct StorageJob {
    pub(super) slot: SlotIndex,
    pub(super) batch: Batch,
    /// Whether a lost builder unit may have stored its events.
    pub(super) again: bool,
    pub(super) contents: SlotContents,
    /// The events to store, counted from the first of the batch.
    pub(super) events: Vec<u16>,
    /// Their decision maps, one after the other; empty without decisions.
    pub(super) decisions: Vec<u8>,
}

impl StorageJob {
    /// Length of a decision map.
    fn decision_bytes(&self) -> usize {
        self.decisions.len().checked_div(self.events.len()).unwrap_or(0)
    }
}

/// A batch whose events are in the sink.
#[derive(Debug)]
pub(super) struct StoredBatch {
    pub(super) slot: SlotIndex,
    pub(super) contents: SlotContents,
    events: u64,
    /// Those of them that were stored by a lost builder unit.
    duplicates: u64,
}

/// Called each second while a builder unit does nothing but wait for its sink at its end: it is alive.
pub type ReportClosing = fn();

/// Why events were not stored.
#[derive(Debug, thiserror::Error)]
pub(super) enum StorageError {
    /// A fragment lies outside of landing memory, or a packet has changed.
    #[error(transparent)]
    Data(#[from] InvalidSlotData),
    /// The sink failed.
    #[error("{0}")]
    Sink(SinkError),
}

/// Counts of the storage thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StorageStatistics {
    /// Batches with events to store.
    pub batches: u64,
    /// Payload stored.
    pub bytes: Bytes,
    /// Bytes of whole packets, with the rest of their blocks, that the storage device read from landing memory.
    #[serde(default)]
    pub direct_bytes: Bytes,
    /// Such bytes that a processor copied first. Single events are always copied; they count only as payload.
    #[serde(default)]
    pub copied_bytes: Bytes,
    /// Events that were not stored, because a builder unit that was lost had stored them.
    #[serde(default)]
    pub duplicates: u64,
    /// Flushes of the sink; batches that wait at the same time share one.
    pub flushes: u64,
    /// Time that the storage thread was busy.
    pub busy: Duration,
    /// Maximum number of batches that waited for storage.
    pub longest_queue: u16,
    /// Time that all slots waited for storage: back-pressure on the readout units.
    pub all_slots_waiting: Duration,
}

/// The builder unit's end of the storage thread.
pub(super) struct Storage {
    jobs: Sender<StorageJob>,
    results: Receiver<Result<StoredBatch, StorageError>>,
    /// Readable when there is a result.
    wake: Arc<OwnedFd>,
    thread: JoinHandle<(Result<Option<String>, SinkError>, StorageStatistics)>,
    slots: u16,
    waiting: u16,
    /// Since when all slots wait.
    full_since: Option<Instant>,
    failed: bool,
    /// Events that may still be stored.
    left: u64,
    stored: u64,
    statistics: StorageStatistics,
    report_closing: ReportClosing,
}

impl Storage {
    /// Starts the thread, which stores the first `max_events` events in `sink`.
    pub(super) fn start(
        sink: Box<dyn Sink>,
        max_events: u64,
        (landing, layout): (Arc<LandingMemory>, SlotLayout),
        slots: u16,
        report_closing: ReportClosing,
    ) -> Result<Storage, ProcessError> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let wake = Arc::new(wake.map_err(std::io::Error::from).context("create an eventfd")?);
        let (jobs, job_receiver) = mpsc::channel();
        let (result_sender, results) = mpsc::channel();
        let worker = StorageWorker {
            takes_batches: sink.takes_batches(),
            reader: HeaderReader::new(&layout),
            packets: Vec::new(),
            sink,
            landing,
            layout,
            results: result_sender,
            wake: Arc::clone(&wake),
            payload: Vec::new(),
            found: Vec::new(),
            statistics: StorageStatistics::default(),
            failed: false,
        };
        let thread = std::thread::Builder::new().name("storage".to_owned());
        let thread = thread.spawn(move || worker.run(&job_receiver)).context("start the storage thread")?;
        Ok(Storage {
            jobs,
            results,
            wake,
            thread,
            slots,
            waiting: 0,
            full_since: None,
            failed: false,
            left: max_events,
            stored: 0,
            statistics: StorageStatistics::default(),
            report_closing,
        })
    }

    /// Readable when [`poll`](Self::poll) has a result.
    pub(super) fn wake_fd(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.wake)
    }

    /// How many of `events` may still be stored. Without any, no fragment index is needed.
    pub(super) fn admit(&self, events: usize) -> usize {
        usize::try_from(self.left).map_or(events, |left| left.min(events))
    }

    /// Whether the maximum number is stored.
    pub(super) fn is_full(&self) -> bool {
        self.left == 0
    }

    /// Queues a batch. Its slot must not be granted before [`poll`](Self::poll) returns it.
    pub(super) fn submit(&mut self, job: StorageJob) {
        self.left -= job.events.len() as u64;
        self.statistics.batches += 1;
        self.waiting += 1;
        self.statistics.longest_queue = self.statistics.longest_queue.max(self.waiting);
        if self.waiting == self.slots {
            self.full_since = Some(Instant::now());
        }
        // A thread that panicked has no results, which `wait` notices.
        let _ = self.jobs.send(job);
    }

    /// Whether batches wait for storage.
    pub(super) fn is_busy(&self) -> bool {
        self.waiting > 0 && !self.failed
    }

    /// The next batch that is stored.
    pub(super) fn poll(&mut self) -> Option<Result<StoredBatch, StorageError>> {
        let result = self.results.try_recv().ok()?;
        Some(self.take(result))
    }

    /// Waits for the next batch that is stored; `None` if no batch waits.
    pub(super) fn wait(&mut self) -> Option<Result<StoredBatch, StorageError>> {
        if !self.is_busy() {
            return None;
        }
        let result = self.await_result();
        let result = result.unwrap_or_else(|| Err(StorageError::Sink("the storage thread ended".into())));
        Some(self.take(result))
    }

    /// The next result of the thread; `None` once it has ended.
    fn await_result(&self) -> Option<Result<StoredBatch, StorageError>> {
        loop {
            match self.results.recv_timeout(REPORT_INTERVAL) {
                Ok(result) => return Some(result),
                Err(RecvTimeoutError::Timeout) => (self.report_closing)(),
                Err(RecvTimeoutError::Disconnected) => return None,
            }
        }
    }

    /// Lets [`wake_fd`](Self::wake_fd) wait for the next result.
    pub(super) fn clear_wake(&self) {
        let _ = rustix::io::read(&*self.wake, &mut [0; 8]);
    }

    fn take(&mut self, result: Result<StoredBatch, StorageError>) -> Result<StoredBatch, StorageError> {
        match &result {
            Ok(stored) => {
                self.waiting -= 1;
                self.stored += stored.events - stored.duplicates;
                if let Some(since) = self.full_since.take() {
                    self.statistics.all_slots_waiting += since.elapsed();
                }
            }
            Err(_) => self.failed = true,
        }
        result
    }

    /// Closes the sink. Returns its result and the number of events stored. No batch waits any more, unless the storage has
    /// failed.
    pub(super) fn finish(mut self) -> (Result<Option<String>, SinkError>, u64, StorageStatistics) {
        (self.report_closing)();
        self.jobs = mpsc::channel().0;
        let mut rest = 0;
        while let Some(result) = self.await_result() {
            rest += result.map_or(0, |stored| stored.events - stored.duplicates);
        }
        let (result, worker) = self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let statistics = StorageStatistics {
            bytes: worker.bytes,
            direct_bytes: worker.direct_bytes,
            copied_bytes: worker.copied_bytes,
            duplicates: worker.duplicates,
            flushes: worker.flushes,
            busy: worker.busy,
            ..self.statistics
        };
        (result, self.stored + rest, statistics)
    }
}

/// The storage thread.
struct StorageWorker {
    sink: Box<dyn Sink>,
    takes_batches: bool,
    landing: Arc<LandingMemory>,
    layout: SlotLayout,
    reader: HeaderReader,
    /// Packets of the current batch, if the sink takes batches.
    packets: Vec<PacketPlace>,
    results: Sender<Result<StoredBatch, StorageError>>,
    wake: Arc<OwnedFd>,
    /// Payload of the current event.
    payload: Vec<u8>,
    /// Its fragments: source, offset in `payload`, length, checksum.
    found: Vec<(SourceId, usize, usize, u32)>,
    statistics: StorageStatistics,
    failed: bool,
}

impl StorageWorker {
    fn run(mut self, jobs: &Receiver<StorageJob>) -> (Result<Option<String>, SinkError>, StorageStatistics) {
        loop {
            let outcome = match jobs.recv_timeout(IDLE_FLUSH) {
                // After a failure, the run is about to stop: no further event is stored.
                _ if self.failed => match jobs.recv() {
                    Ok(_) => continue,
                    Err(_) => break,
                },
                Ok(first) => {
                    let begin = Instant::now();
                    let outcome = self.store_group(first, jobs);
                    self.statistics.busy += begin.elapsed();
                    outcome
                }
                Err(RecvTimeoutError::Timeout) => self.sink.flush().map_err(StorageError::Sink),
                Err(RecvTimeoutError::Disconnected) => break,
            };
            if let Err(error) = outcome {
                self.failed = true;
                self.report(Err(error));
            }
        }
        // The unit has reported the batches of the failure as unfinished, and others build them: their events must not get
        // into its files any more.
        let result = if self.failed { Ok(None) } else { self.sink.finish() };
        (result, self.statistics)
    }

    /// Stores a batch and those that wait behind it, flushes the sink, and reports them stored.
    fn store_group(&mut self, first: StorageJob, jobs: &Receiver<StorageJob>) -> Result<(), StorageError> {
        let begin = self.statistics.bytes;
        let mut stored = Vec::new();
        let mut next = Some(first);
        while let Some(job) = next {
            let before = self.statistics.duplicates;
            let events = job.events.len() as u64;
            let mut job = job;
            if job.again {
                self.remove_duplicates(&mut job)?;
            }
            if self.takes_batches && !job.events.is_empty() {
                self.store_batch(&job)?;
            } else {
                let map = job.decision_bytes();
                for (position, &event) in job.events.iter().enumerate() {
                    self.store(&job, event, &job.decisions[position * map..(position + 1) * map])?;
                }
            }
            let duplicates = self.statistics.duplicates - before;
            stored.push(StoredBatch { slot: job.slot, contents: job.contents, events, duplicates });
            let has_room = self.statistics.bytes.0 - begin.0 < MAX_UNFLUSHED.0;
            next = if has_room { jobs.try_recv().ok() } else { None };
        }
        self.sink.flush().map_err(StorageError::Sink)?;
        self.statistics.flushes += 1;
        stored.into_iter().for_each(|batch| self.report(Ok(batch)));
        Ok(())
    }

    /// Removes events that a lost builder unit has stored.
    fn remove_duplicates(&mut self, job: &mut StorageJob) -> Result<(), StorageError> {
        let map = job.decision_bytes();
        let number = |&event: &u16| EventNumber(job.batch.first_event.0 + u64::from(event));
        let numbers: Vec<EventNumber> = job.events.iter().map(number).collect();
        let stored = self.sink.are_stored(&numbers).map_err(StorageError::Sink)?;
        let (mut events, mut decisions) = (Vec::new(), Vec::new());
        for (position, &event) in job.events.iter().enumerate() {
            if stored.get(position).copied().unwrap_or(false) {
                self.statistics.duplicates += 1;
            } else {
                events.push(event);
                decisions.extend_from_slice(&job.decisions[position * map..(position + 1) * map]);
            }
        }
        (job.events, job.decisions) = (events, decisions);
        Ok(())
    }

    fn report(&self, result: Result<StoredBatch, StorageError>) {
        // The builder unit holds the other end until this thread has ended.
        let _ = self.results.send(result);
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
    }

    /// Stores a batch from where it is.
    fn store_batch(&mut self, job: &StorageJob) -> Result<(), StorageError> {
        let slot_offset = self.layout.slot_offset(job.slot);
        self.packets.clear();
        for area in &self.layout.packets {
            self.packets.push(self.reader.place(&self.landing, slot_offset, area)?);
        }
        let event = |&index: &u16| EventOfBatch {
            index,
            incomplete: !job.contents.is_complete(index.into()),
            fragments: job.contents.fragments(index.into()),
            payload: job.contents.payload(index.into()),
        };
        let events: Vec<_> = job.events.iter().map(event).collect();
        let batch = AcceptedBatch {
            id: job.batch.id,
            first_event: job.batch.first_event,
            n_events: job.batch.events,
            events: &events,
            decisions: &job.decisions,
            readout_lost: job.contents.lacks_readout_unit(),
            packets: &self.packets,
            memory: self.landing.mapping().map_err(InvalidSlotData::from)?,
        };
        let written = self.sink.store_batch(&batch).map_err(StorageError::Sink)?;
        self.statistics.direct_bytes.0 += written.direct.0;
        self.statistics.copied_bytes.0 += written.copied.0;
        self.statistics.bytes.0 += events.iter().map(|event| event.payload.0).sum::<u64>();
        Ok(())
    }

    fn store(&mut self, job: &StorageJob, event: u16, decisions: &[u8]) -> Result<(), StorageError> {
        let number = EventNumber(job.batch.first_event.0 + u64::from(event));
        let slot_offset = self.layout.slot_offset(job.slot);
        self.payload.clear();
        self.found.clear();
        for (position, area) in self.layout.packets.iter().enumerate() {
            let Some(entry) = job.contents.fragment(position, number.0) else { continue };
            let (start, len) = (self.payload.len(), entry.len as usize);
            self.payload.resize(start + len, 0);
            let at = slot_offset + area.offset + u64::from(entry.offset);
            self.landing.read(at, &mut self.payload[start..]).map_err(InvalidSlotData::from)?;
            self.found.push((SourceId(area.source), start, len, entry.crc));
        }
        self.found.sort_unstable_by_key(|(source, ..)| *source);
        let fragments: Vec<_> = self
            .found
            .iter()
            .map(|&(source, start, len, crc)| {
                let payload = &self.payload[start..start + len];
                (source, Fragment { event: number.0, payload, crc })
            })
            .collect();
        let event = AcceptedEvent {
            number,
            batch: job.batch.id,
            fragments: &fragments,
            decisions,
            readout_lost: job.contents.lacks_readout_unit(),
        };
        self.sink.store(&event).map_err(StorageError::Sink)?;
        self.statistics.bytes.0 += self.payload.len() as u64;
        Ok(())
    }
}

/// The descriptor that becomes readable when a batch is stored.
pub(super) struct WakeFd(pub(super) Arc<OwnedFd>);

impl AsFd for WakeFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
