//! Process of a builder unit: receives batches, runs the kernel on them, stores events.
//!
//! The processor reads packet headers and the kernel's results. It reads payload only of events that are stored, on a
//! thread of its own (`storage`).

mod checksums;
mod kernel;
mod landing;
mod reference;
mod slot_contents;
mod storage;
mod workers;

pub use checksums::SourceChecksums;
pub use reference::DecisionComparison;
pub use storage::StorageStatistics;
pub use workers::WorkerCounts;

use super::ProcessError;
use super::clock::MonotonicClock;
use super::control::{Control, Received};
use super::error::IoContext;
use super::sink::MakeSink;
use super::startup::{self, Channel, FromManager, JoinedRun, ToManager, TryReceive};
use crate::config::{Candidates, RunConfig, StoredEvents};
use crate::core::builder::{Builder, CompleteBatch};
use crate::core::plan::Batch;
use crate::core::recovery::OnReadoutLoss;
use crate::core::report::BuilderReport;
use crate::core::types::Immediate;
use crate::core::{BatchOutcome, BuIndex, Bytes, RuIndex, SlotIndex, Unit};
use checksums::ChecksumChecker;
use kernel::{CardKernel, KernelCompletion};
use landing::LandingMemory;
use millstream_card::Card;
use millstream_card_abi::events::EventSummary;
use millstream_rdma::Qpn;
use millstream_rdma::connect::{Listener, RcOptions, listen};
use millstream_rdma::message::PreparedMessageChannel;
use millstream_rdma::wait::{CompletionWaiter, WaitOptions};
use millstream_rdma::{
    Access, Completion, CompletionQueue, Deadline, Device, PreparedQueuePair, QueuePair, WaitFd, WrId,
};
use reference::ReferenceDecisions;
use serde::{Deserialize, Serialize};
use slot_contents::{HeaderReader, InvalidSlotData, SlotContents};
use std::collections::HashMap;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;
use storage::{Storage, StorageError, StorageJob, StoredBatch, WakeFd};
use workers::{DecidedBatch, WorkerFd, WorkerJob, Workers};

/// Longest time to connect to a readout unit that joins the run. No batch is processed meanwhile.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Completions per poll.
const POLL: usize = 64;

/// End of a builder unit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuilderEnd {
    /// Its report for the run summary.
    pub report: BuilderReport,
    /// Its statistics.
    pub statistics: BuilderStatistics,
}

/// Statistics of a builder unit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuilderStatistics {
    /// Comparison of the kernel's decisions with the reference.
    pub comparison: DecisionComparison,
    /// Payload of the events built, without padding.
    pub payload_built: Bytes,
    /// Number of decision bits set.
    pub decisions_set: u64,
    /// Time that the card was busy.
    pub card_busy: Duration,
    /// Events that the output selects, also beyond the maximum to store.
    #[serde(default)]
    pub selected: u64,
    /// Counts of the software trigger.
    #[serde(default)]
    pub workers: WorkerCounts,
    /// Fragments compared with their checksums, by source.
    #[serde(default)]
    pub checksums: Vec<SourceChecksums>,
    /// Events in the sink, once it is closed.
    pub stored: u64,
    /// Counts of the storage thread.
    pub storage: StorageStatistics,
    /// The first error.
    pub error: Option<String>,
}

/// Runs a builder unit from joining the manager to its report, then closes the sink.
///
/// Waits for the manager. Gives up if `parent_pipe` becomes readable or is closed. Returns the report and the sink's
/// result.
///
/// # Errors
/// The unit could not start, its RDMA device failed, or the sink could not be closed. All other ends have a report.
pub fn run(
    manager: &str,
    bu: BuIndex,
    make_sink: &MakeSink<'_>,
    parent_pipe: Option<BorrowedFd<'_>>,
) -> Result<(BuilderEnd, Option<String>), ProcessError> {
    let listener = listen(&own_address(manager))?;
    let data = listener.address().to_string();
    let mut joined = startup::join(manager, Unit::Builder(bu), Some(data), parent_pipe)?;
    let Unit::Builder(bu) = joined.unit else { return Err(startup::unexpected_frame(Unit::Manager)) };
    let local = LocalResources::open(&joined.config, bu, make_sink);
    let local = startup::report_prepared(&mut joined.channel, local)?;
    let (process, queues) = BuilderProcess::connect(local, &mut joined, bu, &listener)?;
    process.work(queues, joined.channel, &listener)
}

/// Resources on the host of the unit.
struct LocalResources {
    device: Device,
    landing: Arc<LandingMemory>,
    kernel: Option<CardKernel>,
    reference: Option<ReferenceDecisions>,
    storage: Option<Storage>,
    workers: Option<Workers>,
}

impl LocalResources {
    /// Opens the card, registers landing memory, and makes the sink.
    fn open(
        config: &RunConfig,
        bu: BuIndex,
        make_sink: &MakeSink<'_>,
    ) -> Result<LocalResources, ProcessError> {
        let device = super::open_device(config)?;
        let landing = Arc::new(LandingMemory::open(config, bu, &device)?);
        let kernel = match landing.card() {
            Some(card) => CardKernel::open(config, bu, card)?,
            None => None,
        };
        let reference = ReferenceDecisions::open(config)?;
        let storage = match &config.output {
            Some(output) => {
                let sink = make_sink(config, bu).map_err(ProcessError::Sink)?;
                let place = || (Arc::clone(&landing), config.layout.clone());
                let slots = config.plan.slots[bu.index()].get();
                sink.map(|sink| Storage::start(sink, output.max_events, place(), slots)).transpose()?
            }
            None => None,
        };
        let workers = match &config.builders[bu.index()].trigger {
            Some(trigger) => {
                let bytes = config.layout.slot_offset(SlotIndex(config.plan.slots[bu.index()].get()));
                Some(Workers::start(trigger, &config.layout, landing.descriptor()?, bytes)?)
            }
            None => None,
        };
        Ok(LocalResources { device, landing, kernel, reference, storage, workers })
    }
}

/// Address for data connections: the interface that leads to the manager, any port.
fn own_address(manager: &str) -> String {
    let loopback = manager.parse::<SocketAddr>().is_ok_and(|address| address.ip().is_loopback());
    if loopback { "127.0.0.1:0".to_owned() } else { own_interface(manager) }
}

/// The local address of the route to the manager.
fn own_interface(manager: &str) -> String {
    let probe = std::net::UdpSocket::bind("0.0.0.0:0");
    let local = probe.and_then(|probe| {
        // Connecting a datagram socket sends nothing; it selects the route.
        probe.connect(manager)?;
        probe.local_addr()
    });
    local.map_or_else(|_| "127.0.0.1:0".to_owned(), |address| SocketAddr::new(address.ip(), 0).to_string())
}

/// Completion queues to wait for.
struct WaitSet {
    waiter: CompletionWaiter,
    control: CompletionQueue,
    data: CompletionQueue,
}

/// Descriptors that ended a wait.
struct ReadyDescriptors {
    manager: bool,
    interrupt: bool,
    card_gone: bool,
    storage: bool,
    listener: bool,
}

/// The connection of a readout unit that is about to join the run.
struct PendingPeer {
    index: RuIndex,
    pair: QueuePair,
    /// Arrivals from before the manager's message that it has joined.
    arrivals: Vec<Immediate>,
}

/// A processed batch that waits for the software trigger.
struct UndecidedBatch {
    complete: CompleteBatch,
    outcome: BatchOutcome,
    /// The candidates that are delivered: built, or lacking only lost readout units.
    delivered: Vec<u16>,
    /// Decision maps of the candidates, by event.
    decisions: Vec<(u16, Vec<u8>)>,
}

struct BuilderProcess {
    index: BuIndex,
    clock: MonotonicClock,
    core: Builder,
    config: RunConfig,
    control: Control,
    device: Device,
    connection: RcOptions,
    /// By readout unit at the start; `None` while the run goes on without one.
    peers: Vec<Option<QueuePair>>,
    /// By readout unit at the start.
    pending: Vec<Option<PendingPeer>>,
    /// The readout unit of each queue pair.
    readout_of: HashMap<Qpn, RuIndex>,
    landing: Arc<LandingMemory>,
    kernel: Option<CardKernel>,
    card_lost: bool,
    /// Contents, by slot.
    contents: Vec<SlotContents>,
    /// The batch in the kernel, by slot.
    in_kernel: Vec<Option<CompleteBatch>>,
    reader: HeaderReader,
    checksums: ChecksumChecker,
    /// Corrupt fragments by event of the processed batch, if no kernel counts them.
    corrupt: Vec<u32>,
    reference: Option<ReferenceDecisions>,
    storage: Option<Storage>,
    workers: Option<Workers>,
    /// Batches that wait for the software trigger, by slot.
    in_workers: Vec<Option<UndecidedBatch>>,
    /// Outcomes of batches that wait for storage, by slot.
    in_storage: Vec<Option<BatchOutcome>>,
    statistics: BuilderStatistics,
    completions: [Completion; POLL],
}

impl BuilderProcess {
    /// Connects to the manager and the readout units, and waits for the start of the run.
    fn connect(
        local: LocalResources,
        joined: &mut JoinedRun,
        bu: BuIndex,
        listener: &Listener,
    ) -> Result<(BuilderProcess, WaitSet), ProcessError> {
        let JoinedRun { channel, config, deadline, readouts: expected, .. } = joined;
        let deadline = *deadline;
        let LocalResources { device, landing, kernel, reference, storage, workers } = local;
        let mut waiter =
            CompletionWaiter::new(&device, WaitOptions { spin: config.spin, ..WaitOptions::default() })?;
        let options = super::control_options(config);
        let control_queue = waiter.completion_queue(options.completions())?;
        let messages = PreparedMessageChannel::new(&device, &control_queue, &options)?;
        let (messages, _) =
            messages.connect(channel.stream().context("use the manager's TCP stream")?, &[], deadline)?;

        let slots = config.plan.slots[bu.index()].get();
        let readouts = config.plan.readouts();
        let connection = connection(slots, super::connection_options(config));
        // A readout unit that joins connects before the connection of its predecessor is closed.
        let connections = readouts as u32 * (1 + u32::from(config.plan.recovery.restarts > 0));
        let depth = (connection.send_depth + connection.recv_depth).saturating_mul(connections);
        let data_queue = waiter.completion_queue(depth.min(device.limits().completions))?;
        let mut peers: Vec<Option<QueuePair>> = (0..readouts).map(|_| None).collect();
        let mut readout_of = HashMap::new();
        for _ in 0..expected.len() {
            let (ru, pair) = accept(
                listener,
                channel,
                &mut waiter,
                (&device, &data_queue, &connection),
                &landing,
                deadline,
            )?;
            let place = peers.get_mut(config.plan.readout_role(ru).index());
            let place = place.filter(|place| place.is_none() && expected.contains(&ru));
            let unit = Unit::Readout(ru);
            readout_of.insert(pair.qpn(), ru);
            *place.ok_or_else(|| startup::unexpected_frame(unit))? = Some(pair);
        }
        let membership = startup::await_start(channel, deadline)?;
        let clock = MonotonicClock::start();
        let plan = config.plan.clone();
        let process = BuilderProcess {
            index: bu,
            clock,
            core: match &membership {
                Some(membership) => Builder::join(bu, plan, membership, clock.now()),
                None => Builder::new(bu, plan, clock.now()),
            },
            control: Control::new(messages),
            device,
            connection,
            readout_of,
            pending: (0..readouts).map(|_| None).collect(),
            peers,
            landing,
            kernel,
            card_lost: false,
            contents: (0..slots).map(|_| SlotContents::default()).collect(),
            in_kernel: vec![None; slots.into()],
            reader: HeaderReader::new(&config.layout),
            checksums: ChecksumChecker::new(
                config.checksums,
                config.verifies_checksums(bu.index()),
                &config.layout,
            ),
            corrupt: Vec::new(),
            reference,
            storage,
            workers,
            in_workers: (0..slots).map(|_| None).collect(),
            in_storage: vec![None; slots.into()],
            statistics: BuilderStatistics::default(),
            completions: [Completion::EMPTY; POLL],
            config: config.clone(),
        };
        Ok((process, WaitSet { waiter, control: control_queue, data: data_queue }))
    }

    /// The run, up to the report, and closing the sink.
    fn work(
        mut self,
        mut queues: WaitSet,
        mut channel: Channel,
        listener: &Listener,
    ) -> Result<(BuilderEnd, Option<String>), ProcessError> {
        let mut manager_alive = true;
        let card = self.landing.card().cloned();
        let report = loop {
            let watched_card = card.as_ref().filter(|_| !self.card_lost);
            let ready = self.wait(&mut queues, manager_alive.then_some(&channel), watched_card, listener)?;
            if ready.listener {
                self.accept_joining(listener, &queues.data);
            }
            if ready.manager && matches!(channel.try_receive::<FromManager>(), TryReceive::Closed) {
                manager_alive = false;
                self.core.handle_manager_lost(self.clock.now());
            }
            if ready.card_gone {
                self.lose_card("the card's process ended".to_owned());
            } else if ready.interrupt
                && let Some(kernel) = &mut self.kernel
            {
                kernel.acknowledge();
            }
            if ready.storage
                && let Some(storage) = &self.storage
            {
                storage.clear_wake();
            }
            if let Some(report) = self.core.poll_report() {
                break report;
            }
        };
        if let Some(reference) = &self.reference {
            self.statistics.comparison = reference.comparison;
        }
        self.statistics.checksums = self.checksums.counts();
        if let Some(workers) = self.workers.take() {
            self.statistics.workers = workers.finish();
        }
        let mut end = BuilderEnd { report, statistics: self.statistics };
        // Errors are ignored: the parent gets the report, too.
        let _ = channel.send(&ToManager::Builder(Box::new(end.clone())));
        let Some(storage) = self.storage else { return Ok((end, None)) };
        let (result, stored, statistics) = storage.finish();
        // Counted once the sink is closed: a unit that is killed while it closes may have stored less.
        (end.statistics.stored, end.statistics.storage) = (stored, statistics);
        Ok((end, result.map_err(ProcessError::Sink)?))
    }

    /// Makes progress until a descriptor is ready or the run is over.
    fn wait(
        &mut self,
        queues: &mut WaitSet,
        manager: Option<&Channel>,
        card: Option<&Card>,
        listener: &Listener,
    ) -> Result<ReadyDescriptors, ProcessError> {
        let WaitSet { waiter, control, data } = queues;
        let (interrupt, liveness) = (card.map(Card::interrupt_fd), card.map(Card::liveness_fd));
        let wake = self.storage.as_ref().map(|storage| WakeFd(storage.wake_fd()));
        let workers = self.workers.as_ref().map_or_else(Vec::new, Workers::sockets);
        let workers: Vec<WorkerFd> = workers.into_iter().map(WorkerFd).collect();
        let mut others = Vec::with_capacity(5 + workers.len());
        others.extend(interrupt.as_ref().map(WaitFd::readable));
        others.extend(liveness.as_ref().map(WaitFd::readable));
        others.extend(wake.as_ref().map(WaitFd::readable));
        others.extend(manager.map(WaitFd::readable));
        others.push(WaitFd::readable(listener));
        others.extend(workers.iter().map(WaitFd::readable));
        loop {
            let decision =
                self.workers.as_ref().and_then(Workers::timeout).map_or(Deadline::NEVER, Deadline::at);
            let deadline = self.clock.deadline(self.core.poll_timeout()).earlier(decision);
            waiter.wait(&[control, data], &mut others, deadline, || self.progress(data))?;
            // A core that has reported has no timeout.
            if others.iter().any(WaitFd::is_ready) || self.core.poll_timeout().is_none() {
                let (of_card, rest) = others.split_at(if card.is_some() { 2 } else { 0 });
                let (of_storage, of_manager) = rest.split_at(usize::from(wake.is_some()));
                let is_ready = |waits: &[WaitFd<'_>], at: usize| waits.get(at).is_some_and(WaitFd::is_ready);
                return Ok(ReadyDescriptors {
                    interrupt: is_ready(of_card, 0),
                    card_gone: is_ready(of_card, 1),
                    storage: is_ready(of_storage, 0),
                    manager: manager.is_some() && is_ready(of_manager, 0),
                    listener: is_ready(of_manager, usize::from(manager.is_some())),
                });
            }
        }
    }

    /// Handles messages, arrivals and kernel completions. Returns whether there was any.
    fn progress(&mut self, queue: &CompletionQueue) -> Result<bool, ProcessError> {
        let mut any = self.control.progress();
        let now = self.clock.now();
        // Before the messages: what has arrived from a readout unit counts, though it is lost.
        any |= self.take_arrivals(queue)?;
        loop {
            match self.control.receive() {
                Received::Message(message) => self.core.handle_message(message, now),
                Received::Malformed => self.core.handle_malformed(),
                Received::Nothing => break,
            }
        }
        self.close_excluded();
        self.open_joined();
        while let Some(complete) = self.core.poll_complete_batch() {
            any = true;
            self.process(complete);
        }
        any |= self.take_kernel_completions();
        any |= self.take_decided();
        any |= self.take_stored();
        if self.core.poll_timeout().is_some_and(|at| at <= now) {
            if self.core.is_draining() {
                self.drain_storage();
            }
            self.core.handle_timeout(now);
        }
        while let Some(message) = self.core.poll_transmit() {
            self.control.send(message);
        }
        self.control.flush();
        Ok(any)
    }

    /// Closes the connections of readout units that the run goes on without: they cannot write into slots any more.
    fn close_excluded(&mut self) {
        for (role, place) in (0..).map(RuIndex).zip(&mut self.peers) {
            if self.core.readout_member(role).is_lost
                && let Some(pair) = place.take()
            {
                self.readout_of.remove(&pair.qpn());
            }
        }
    }

    /// Accepts the connection of a readout unit that is about to join. Nobody else is a reason to stop.
    fn accept_joining(&mut self, listener: &Listener, queue: &CompletionQueue) {
        let Ok((stream, address)) = listener.accept(Deadline::after(Duration::ZERO)) else { return };
        let deadline = Deadline::after(CONNECT_TIMEOUT.min(self.config.plan.timeout / 4));
        let queues = (&self.device, queue, &self.connection);
        let (index, pair) = match connect_readout((stream, address), queues, &self.landing, deadline) {
            Ok(connected) => connected,
            Err(error) => {
                return tracing::warn!(%address, %error, "no connection to a readout unit that joins");
            }
        };
        let plan = &self.config.plan;
        let role = plan.readout_role(index);
        let is_present = !self.core.readout_member(role).is_lost;
        if is_present || !plan.is_restart(Unit::Readout(index)) || index.index() >= plan.readout_members() {
            return tracing::warn!(%address, %index, "connection dropped: no readout unit that may join");
        }
        self.readout_of.insert(pair.qpn(), index);
        if let Some(before) =
            self.pending[role.index()].replace(PendingPeer { index, pair, arrivals: Vec::new() })
        {
            self.readout_of.remove(&before.pair.qpn());
        }
    }

    /// Takes the connections of readout units that have joined into use.
    fn open_joined(&mut self) {
        for role in 0..self.pending.len() {
            let member = self.core.readout_member(RuIndex(role as u16));
            let has_joined = |pending: &PendingPeer| !member.is_lost && pending.index == member.index;
            if self.pending[role].as_ref().is_some_and(has_joined)
                && let Some(PendingPeer { index, pair, arrivals }) = self.pending[role].take()
            {
                self.peers[role] = Some(pair);
                arrivals.into_iter().for_each(|immediate| self.arrive(index, immediate));
            }
        }
    }

    fn take_arrivals(&mut self, queue: &CompletionQueue) -> Result<bool, ProcessError> {
        let mut any = false;
        let mut completions = self.completions;
        loop {
            let taken = queue.poll(&mut completions)?;
            for completion in taken {
                let Some(&ru) = self.readout_of.get(&completion.qpn()) else { continue };
                let role = self.config.plan.readout_role(ru).index();
                let pending = self.pending[role].as_mut().filter(|pending| pending.index == ru);
                match (completion.imm().filter(|_| completion.is_success()), pending) {
                    (Some(imm), Some(pending)) => {
                        pending.pair.post_recv(&[], WrId(0))?;
                        pending.arrivals.push(Immediate::decode(imm));
                    }
                    (Some(imm), None) => {
                        if let Some(pair) = &self.peers[role] {
                            pair.post_recv(&[], WrId(0))?;
                        }
                        self.arrive(ru, Immediate::decode(imm));
                    }
                    // The connection failed: the readout unit ended before it joined.
                    (None, Some(_)) => self.pending[role] = None,
                    (None, None) => self.core.handle_readout_lost(ru),
                }
            }
            any |= !taken.is_empty();
            if taken.len() < POLL {
                return Ok(any);
            }
        }
    }

    /// Immediate data arrived: parses the readout unit's packets in the slot.
    fn arrive(&mut self, ru: RuIndex, immediate: Immediate) {
        // The core counts and reports a violation of the protocol.
        let Ok(arrival) = self.core.begin_arrival(ru, immediate) else { return };
        let slot = arrival.slot();
        let layout = &self.config.layout;
        let index = self.storage.as_ref().is_some_and(|storage| !storage.is_full());
        let contents = &mut self.contents[slot.index()];
        let slot_offset = layout.slot_offset(slot);
        let checksums = &mut self.checksums;
        let role = self.config.plan.readout_role(ru);
        match contents.add(&mut self.reader, &self.landing, slot_offset, (layout, role), index, checksums) {
            Ok(fragments) => {
                let _ = self.core.complete_arrival(arrival, fragments, self.clock.now());
            }
            Err(error) => self.invalid_data(&error),
        }
    }

    /// Submits a complete batch to the kernel; without a kernel, finishes it.
    fn process(&mut self, complete: CompleteBatch) {
        let CompleteBatch { slot, batch, .. } = complete;
        if let Err(error) = self.fill_absent(slot, &batch) {
            return self.invalid_data(&error);
        }
        let contents = &self.contents[slot.index()];
        if !contents.is_of(&batch) {
            return self.invalid_data(&InvalidSlotData::WrongBatch { slot, batch: batch.id });
        }
        let sources = self.config.layout.packets.len();
        match &mut self.kernel {
            None => {
                self.corrupt.clear();
                if self.checksums.selects(&batch) {
                    let places = (&*self.landing, &self.config.layout, &mut self.reader);
                    match self.checksums.check(places, slot, &batch, |_| true) {
                        Ok(corrupt) => self.corrupt.extend(corrupt),
                        Err(error) => return self.invalid_data(&error),
                    }
                }
                let outcome = contents.outcome(&batch, &self.corrupt);
                self.complete_batch(&complete, outcome);
            }
            Some(kernel) => match kernel.submit(slot, &batch, sources) {
                Ok(()) => self.in_kernel[slot.index()] = Some(complete),
                Err(error) => self.lose_card(error.to_string()),
            },
        }
    }

    /// Puts empty packets into the slot where those of lost readout units are missing.
    fn fill_absent(&mut self, slot: SlotIndex, batch: &Batch) -> Result<(), InvalidSlotData> {
        let layout = &self.config.layout;
        let contents = &mut self.contents[slot.index()];
        for ru in (0..self.config.plan.readouts()).map(|ru| RuIndex(ru as u16)) {
            if self.core.is_absent(slot, ru) {
                let slot_offset = layout.slot_offset(slot);
                let checksums = &mut self.checksums;
                let area = (layout, ru);
                contents.add_absent(&mut self.reader, &self.landing, slot_offset, area, batch, checksums)?;
            }
        }
        Ok(())
    }

    /// Takes the kernel's completions. Returns whether there was one.
    fn take_kernel_completions(&mut self) -> bool {
        let mut any = false;
        while !self.card_lost
            && let Some(kernel) = &mut self.kernel
        {
            match kernel.poll() {
                Ok(Some(completion)) => {
                    any = true;
                    self.kernel_completed(&completion);
                }
                Ok(None) => break,
                Err(error) => self.lose_card(error.to_string()),
            }
        }
        any
    }

    fn kernel_completed(&mut self, completion: &KernelCompletion) {
        let work = self.in_kernel.get_mut(completion.slot.index()).and_then(Option::take);
        let (Some(kernel), Some(complete)) = (&mut self.kernel, work) else {
            return self.invalid_data(&InvalidSlotData::Kernel(format!(
                "completion for {}, which has no batch in the kernel",
                completion.slot
            )));
        };
        let CompleteBatch { slot, batch, .. } = complete;
        let contents = &self.contents[slot.index()];
        let delivers = self.config.plan.recovery.readout == OnReadoutLoss::Deliver;
        let outcome = match kernel.outcome(completion, &batch, contents, delivers) {
            Ok(outcome) => outcome,
            Err(error) => return self.invalid_data(&error),
        };
        if outcome.corrupt.events > 0 {
            let places = (&*self.landing, &self.config.layout, &mut self.reader);
            let is_corrupt = |event| kernel.summary(event).corrupt > 0;
            if let Err(error) = self.checksums.check(places, slot, &batch, is_corrupt) {
                return self.invalid_data(&error);
            }
        }
        self.statistics.card_busy += completion.busy;
        self.statistics.decisions_set += completion.decisions_set;
        if let Some(reference) = &mut self.reference {
            kernel.compare(reference, &batch, contents);
        }
        self.complete_batch(&complete, outcome);
    }

    /// Counts the payload of a processed batch, and stores its events before it frees its slot.
    fn complete_batch(&mut self, complete: &CompleteBatch, mut outcome: BatchOutcome) {
        let CompleteBatch { slot, batch, .. } = *complete;
        if self.config.output.as_ref().is_some_and(|output| output.events != StoredEvents::Accepted) {
            let delivered = (0..batch.events).filter(|&event| self.is_delivered(slot, event.into()));
            outcome.accepted = delivered.count() as u16;
        }
        let contents = &self.contents[slot.index()];
        let built = (0..batch.events.into()).filter(|&event| self.is_built(slot, event));
        let payload: u64 = built.map(|event| contents.payload(event).0).sum();
        self.statistics.payload_built.0 += payload;
        if self.workers.is_some() {
            return self.submit_to_workers(complete, outcome);
        }
        let events = self.config.output.as_ref().map(|output| output.events);
        let wanted = |event: &u16| events.is_some_and(|events| self.is_wanted(events, slot, (*event).into()));
        let events: Vec<u16> = (0..batch.events).filter(wanted).collect();
        let decisions = events.iter().flat_map(|&event| self.kernel_decisions(event)).copied().collect();
        self.store_or_finish(complete, outcome, events, decisions);
    }

    /// Gives the batch to the software trigger.
    fn submit_to_workers(&mut self, complete: &CompleteBatch, mut outcome: BatchOutcome) {
        let CompleteBatch { slot, batch, .. } = *complete;
        let candidates: Vec<u16> =
            (0..batch.events).filter(|&event| self.is_candidate(slot, event.into())).collect();
        // Counted again from its decisions.
        outcome.accepted = 0;
        if candidates.is_empty() {
            return self.store_or_finish(complete, outcome, Vec::new(), Vec::new());
        }
        let delivered =
            candidates.iter().copied().filter(|&event| self.is_delivered(slot, event.into())).collect();
        let decisions =
            candidates.iter().map(|&event| (event, self.kernel_decisions(event).to_vec())).collect();
        self.in_workers[slot.index()] =
            Some(UndecidedBatch { complete: *complete, outcome, delivered, decisions });
        self.core.handle_storing(slot);
        if let Some(workers) = &mut self.workers {
            workers.submit(WorkerJob { slot, batch, candidates });
        }
    }

    /// Whether the software trigger decides on an event of the processed batch in the slot.
    fn is_candidate(&self, slot: SlotIndex, event: usize) -> bool {
        let trigger = self.config.builders[self.index.index()].trigger.as_ref();
        match trigger.map(|trigger| trigger.candidates) {
            Some(Candidates::All) => true,
            Some(Candidates::Accepted) if self.kernel.as_ref().is_some_and(CardKernel::decides) => {
                self.is_wanted(StoredEvents::Accepted, slot, event)
            }
            _ => self.is_delivered(slot, event),
        }
    }

    /// Takes decisions of the software trigger. Returns whether there was one.
    fn take_decided(&mut self) -> bool {
        let mut any = false;
        while let Some(workers) = &mut self.workers {
            match workers.poll() {
                Ok(Some(DecidedBatch { slot, accepted })) => {
                    any = true;
                    self.decided(slot, accepted);
                }
                Ok(None) => break,
                Err(error) => {
                    self.statistics.error.get_or_insert_with(|| error.to_string());
                    self.core.handle_output_failed();
                    self.statistics.workers = workers.counts();
                    self.workers = None;
                }
            }
        }
        any
    }

    fn decided(&mut self, slot: SlotIndex, accepted: Vec<u16>) {
        let Some(undecided) = self.in_workers[slot.index()].take() else { return };
        let UndecidedBatch { complete, mut outcome, delivered, decisions } = undecided;
        let accepted_and_delivered = accepted.iter().filter(|event| delivered.contains(event)).count();
        // At most the events of a batch.
        outcome.accepted = accepted_and_delivered as u16;
        let maps = decisions.into_iter().filter(|(event, _)| accepted.contains(event));
        let maps = maps.flat_map(|(_, map)| map).collect();
        self.store_or_finish(&complete, outcome, accepted, maps);
    }

    /// Stores events of a processed batch, or finishes it if there are none to store.
    fn store_or_finish(
        &mut self,
        complete: &CompleteBatch,
        outcome: BatchOutcome,
        events: Vec<u16>,
        decisions: Vec<u8>,
    ) {
        let slot = complete.slot;
        self.statistics.selected += events.len() as u64;
        if !self.submit_to_storage(complete, outcome, events, decisions) {
            self.finish_batch(slot, outcome);
        }
    }

    /// The kernel's decision map of an event of the processed batch; empty without a trigger kernel.
    fn kernel_decisions(&self, event: u16) -> &[u8] {
        self.kernel.as_ref().map_or(&[], |kernel| kernel.decisions(event.into()))
    }

    /// Whether an event of the processed batch in the slot is complete and intact.
    fn is_built(&self, slot: SlotIndex, event: usize) -> bool {
        self.contents[slot.index()].is_complete(event) && !self.is_corrupt(event)
    }

    /// Whether an event of the processed batch in the slot is built, or lacks only the sources of lost readout units and is
    /// delivered all the same.
    fn is_delivered(&self, slot: SlotIndex, event: usize) -> bool {
        let delivers = self.config.plan.recovery.readout == OnReadoutLoss::Deliver;
        let is_present = self.contents[slot.index()].is_complete_but_lost(event);
        self.is_built(slot, event) || delivers && is_present && !self.is_corrupt(event)
    }

    /// Whether an event of the processed batch has a corrupt fragment.
    fn is_corrupt(&self, event: usize) -> bool {
        match &self.kernel {
            Some(kernel) => kernel.summary(event).corrupt > 0,
            None => self.corrupt.get(event).is_some_and(|&fragments| fragments > 0),
        }
    }

    /// The kernel's summary of an event of the processed batch; zero without a kernel.
    fn kernel_summary(&self, event: usize) -> EventSummary {
        self.kernel.as_ref().map(|kernel| kernel.summary(event)).unwrap_or_default()
    }

    /// Whether the run stores an event of the processed batch in the slot.
    fn is_wanted(&self, wanted: StoredEvents, slot: SlotIndex, event: usize) -> bool {
        match wanted {
            StoredEvents::Accepted => {
                let incomplete = self.kernel.as_ref().is_some_and(CardKernel::accepts_incomplete);
                self.kernel_summary(event).accepted != 0 && (incomplete || self.is_delivered(slot, event))
            }
            StoredEvents::Built => self.is_delivered(slot, event),
            StoredEvents::All => {
                let discards = self.config.plan.recovery.readout == OnReadoutLoss::Discard;
                !discards || !self.contents[slot.index()].lacks_readout_unit()
            }
        }
    }

    /// Queues events of a processed batch for storage, with their decision maps. False if none is to be stored.
    fn submit_to_storage(
        &mut self,
        complete: &CompleteBatch,
        outcome: BatchOutcome,
        mut events: Vec<u16>,
        mut decisions: Vec<u8>,
    ) -> bool {
        let CompleteBatch { slot, batch, again } = *complete;
        let Some(storage) = &self.storage else { return false };
        let map = decisions.len().checked_div(events.len()).unwrap_or(0);
        events.truncate(storage.admit(events.len()));
        decisions.truncate(events.len() * map);
        if events.is_empty() {
            return false;
        }
        let contents = std::mem::take(&mut self.contents[slot.index()]);
        self.in_storage[slot.index()] = Some(outcome);
        self.core.handle_storing(slot);
        if let Some(storage) = &mut self.storage {
            storage.submit(StorageJob { slot, batch, again, contents, events, decisions });
        }
        true
    }

    /// Finishes batches that were stored. Returns whether there was one.
    fn take_stored(&mut self) -> bool {
        let mut any = false;
        while let Some(result) = self.storage.as_mut().and_then(Storage::poll) {
            any = true;
            self.finish_stored(result);
        }
        any
    }

    /// Waits until no batch waits for storage.
    fn drain_storage(&mut self) {
        while let Some(result) = self.storage.as_mut().and_then(Storage::wait) {
            self.finish_stored(result);
        }
    }

    fn finish_stored(&mut self, result: Result<StoredBatch, StorageError>) {
        match result {
            Ok(StoredBatch { slot, contents, .. }) => {
                self.contents[slot.index()] = contents;
                if let Some(outcome) = self.in_storage[slot.index()].take() {
                    self.finish_batch(slot, outcome);
                }
            }
            Err(StorageError::Data(error)) => self.invalid_data(&error.into()),
            Err(StorageError::Sink(error)) => {
                self.statistics.error.get_or_insert_with(|| error.to_string());
                self.core.handle_output_failed();
            }
        }
    }

    fn finish_batch(&mut self, slot: SlotIndex, outcome: BatchOutcome) {
        self.contents[slot.index()].clear();
        if let Err(error) = self.core.handle_processed(slot, outcome) {
            self.invalid_data(&InvalidSlotData::Kernel(error.to_string()));
        }
    }

    fn invalid_data(&mut self, error: &InvalidSlotData) {
        self.statistics.error.get_or_insert_with(|| error.to_string());
        self.core.handle_invalid_data();
    }

    fn lose_card(&mut self, why: String) {
        self.card_lost = true;
        self.statistics.error.get_or_insert(why);
        self.core.handle_card_lost();
    }
}

/// Each readout unit has at most one immediate data in flight per slot.
fn connection(slots: u16, options: RcOptions) -> RcOptions {
    RcOptions {
        send_depth: 1,
        recv_depth: u32::from(slots) + 1,
        send_sges: 1,
        max_inline: 0,
        access: Access::REMOTE_WRITE,
        ..options
    }
}

/// Accepts the connection of a readout unit; fails if the manager's stream ends first.
fn accept(
    listener: &Listener,
    manager: &mut Channel,
    waiter: &mut CompletionWaiter,
    (device, queue, options): (&Device, &CompletionQueue, &RcOptions),
    landing: &LandingMemory,
    deadline: Deadline,
) -> Result<(RuIndex, QueuePair), ProcessError> {
    let mut others = [WaitFd::readable(listener), WaitFd::readable(manager)];
    waiter.wait::<ProcessError>(&[], &mut others, deadline, || Ok(false))?;
    let manager_speaks = others[1].is_ready();
    if manager_speaks && matches!(manager.try_receive::<FromManager>(), TryReceive::Closed) {
        return Err(ProcessError::Startup {
            unit: Unit::Manager,
            what: "ended before the run started".to_owned(),
        });
    }
    connect_readout(listener.accept(deadline)?, (device, queue, options), landing, deadline)
}

/// Makes the data connection to a readout unit that has connected.
fn connect_readout(
    (mut stream, address): (TcpStream, SocketAddr),
    (device, queue, options): (&Device, &CompletionQueue, &RcOptions),
    landing: &LandingMemory,
    deadline: Deadline,
) -> Result<(RuIndex, QueuePair), ProcessError> {
    let prepared = PreparedQueuePair::new(device, queue, queue, options)?;
    for _ in 0..options.recv_depth {
        prepared.post_recv(&[], WrId(0))?;
    }
    let connected = prepared.connect(&mut stream, &landing.remote().encode(), deadline)?;
    match <[u8; 2]>::try_from(connected.private_data.as_slice()) {
        Ok(index) => Ok((RuIndex(u16::from_be_bytes(index)), connected.pair)),
        Err(_) => Err(ProcessError::UnknownPeer {
            peer: address.to_string(),
            what: format!("sent {} bytes of private data, expected its index", connected.private_data.len()),
        }),
    }
}
