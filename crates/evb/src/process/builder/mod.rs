//! Process of a builder unit: receives batches, runs the kernel on them, stores events.
//!
//! The loop is here; `batches` has the way of a batch from its last packet to its outcome, `connections` the data
//! connections, and `joining` those of readout units that join.
//! The processor reads packet headers and the kernel's results. It reads payload only of events that are stored, on a
//! thread of its own (`storage`).

mod batches;
mod checksums;
mod connections;
mod joining;
mod kernel;
mod landing;
mod reference;
mod slot_contents;
mod storage;
mod workers;

pub use checksums::SourceChecksums;
pub use reference::DecisionComparison;
pub use storage::{ReportClosing, StorageStatistics};
pub use workers::WorkerCounts;

use super::ProcessError;
use super::admission::{Admission, ReportRefused};
use super::clock::MonotonicClock;
use super::control::{Control, Received};
use super::error::IoContext;
use super::manager_link::{LinkEvent, ManagerLink};
use super::own::OwnConfig;
use super::sink::MakeSink;
use super::startup::{self, JoinedRun, ToManager};
use crate::config::RunConfig;
use crate::core::builder::{Builder, CompleteBatch};
use crate::core::recovery::Membership;
use crate::core::report::BuilderReport;
use crate::core::types::Immediate;
use crate::core::{BatchOutcome, BuIndex, Bytes, RuIndex, SlotIndex, Term, Unit};
use batches::UndecidedBatch;
use checksums::ChecksumChecker;
use connections::{DataEndpoint, accept_all, connection};
use joining::{Connecting, PendingPeer};
use kernel::CardKernel;
use landing::LandingMemory;
use millstream_card::Card;
use millstream_rdma::Qpn;
use millstream_rdma::connect::{Listener, RcOptions, listen};
use millstream_rdma::message::PreparedMessageChannel;
use millstream_rdma::wait::{CompletionWaiter, WaitOptions};
use millstream_rdma::{Completion, CompletionQueue, Deadline, Device, QueuePair, WaitFd, WrId};
use millstream_tls::Security;
use reference::ReferenceDecisions;
use serde::{Deserialize, Serialize};
use slot_contents::{HeaderReader, InvalidSlotData, SlotContents};
use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;
use storage::{Storage, WakeFd};
use workers::{WorkerFd, Workers};

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
    /// Counts of the software trigger.
    #[serde(default)]
    pub workers: WorkerCounts,
    /// Fragments compared with their checksums, by source.
    #[serde(default)]
    pub checksums: Vec<SourceChecksums>,
    /// Events in the sink; `None` before it is closed.
    #[serde(default)]
    pub stored: Option<u64>,
    /// Counts of the storage thread.
    pub storage: StorageStatistics,
    /// The first error.
    pub error: Option<String>,
}

/// Runs a builder unit from joining the manager to its report, then closes the sink.
///
/// Waits for the manager. Gives up if `parent_pipe` becomes readable or is closed. `report_refused` is called for each
/// connection that is refused, `report_closing` while the unit only waits for its sink at its end. The manager's configuration must agree with `own`, if there is one. Returns the report and the sink's result.
///
/// # Errors
/// The unit could not start, its RDMA device failed, or the sink could not be closed. All other ends have a report.
pub fn run(
    (manager, bu): (&str, BuIndex),
    own: Option<&OwnConfig>,
    security: &Security,
    make_sink: &MakeSink<'_>,
    (report_refused, report_closing): (ReportRefused, ReportClosing),
    parent_pipe: Option<BorrowedFd<'_>>,
) -> Result<(BuilderEnd, Option<String>), ProcessError> {
    let listener = listen(&startup::own_address(manager))?;
    let data = listener.address().to_string();
    let mut joined = startup::join(manager, Unit::Builder(bu), Some(data), own, security, parent_pipe)?;
    let Unit::Builder(bu) = joined.unit else { return Err(startup::unexpected_frame(Unit::Manager)) };
    let local = LocalResources::open(&joined.config, bu, make_sink, report_closing);
    let local = startup::report_prepared(&mut joined.channel, local)?;
    let admission = Admission::new(joined.security.clone(), report_refused);
    let (process, queues) = BuilderProcess::connect(local, &mut joined, bu, (&listener, admission))?;
    process.work(queues, ManagerLink::new(joined), &listener)
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
        report_closing: ReportClosing,
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
                let start = |sink| Storage::start(sink, output.max_events, place(), slots, report_closing);
                sink.map(start).transpose()?
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
    connected: bool,
}

struct BuilderProcess {
    index: BuIndex,
    clock: MonotonicClock,
    core: Builder,
    config: RunConfig,
    control: Control,
    device: Device,
    admission: Admission,
    connection: RcOptions,
    /// By readout unit at the start; `None` while the run goes on without one.
    peers: Vec<Option<QueuePair>>,
    /// By readout unit at the start.
    pending: Vec<Option<PendingPeer>>,
    connecting: Connecting,
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
        (listener, admission): (&Listener, Admission),
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
        let endpoint = DataEndpoint {
            device: device.clone(),
            queue: data_queue.clone(),
            options: connection,
            landing: landing.remote(),
        };
        let connected =
            accept_all((listener, &admission), channel, &mut waiter, &endpoint, expected, deadline)?;
        for (ru, pair) in connected {
            readout_of.insert(pair.qpn(), ru);
            peers[config.plan.readout_role(ru).index()] = Some(pair);
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
            control: Control::new(messages, Term::FIRST),
            device,
            admission,
            connection,
            readout_of,
            pending: (0..readouts).map(|_| None).collect(),
            connecting: Connecting::new()?,
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
        mut link: ManagerLink,
        listener: &Listener,
    ) -> Result<(BuilderEnd, Option<String>), ProcessError> {
        if !link.has_standby() {
            self.core.handle_standby_lost(self.clock.now());
        }
        let card = self.landing.card().cloned();
        let report = loop {
            let watched_card = card.as_ref().filter(|_| !self.card_lost);
            let ready = self.wait(&mut queues, &link, watched_card, listener)?;
            if ready.listener {
                self.accept_joining(listener, &queues.data);
            }
            if ready.connected {
                self.take_connected();
            }
            while ready.manager
                && let Some(event) = link.poll()
            {
                match event {
                    LinkEvent::Frame(_) => self.core.handle_malformed(),
                    LinkEvent::ManagerLost => self.core.handle_manager_lost(self.clock.now()),
                    LinkEvent::StandbyJoined => self.core.handle_standby_joined(self.clock.now()),
                    LinkEvent::StandbyLost => self.core.handle_standby_lost(self.clock.now()),
                    LinkEvent::NewTerm(membership) => self.follow(&membership, &mut link, &mut queues),
                }
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
        // The parent gets the report, too.
        link.send(&ToManager::Builder(Box::new(end.clone())));
        let Some(storage) = self.storage else { return Ok((end, None)) };
        let (result, stored, statistics) = storage.finish();
        // Counted once the sink is closed: a unit that is killed while it closes may have stored less.
        (end.statistics.stored, end.statistics.storage) = (Some(stored), statistics);
        Ok((end, result.map_err(ProcessError::Sink)?))
    }

    /// The standby manager takes over.
    fn follow(&mut self, membership: &Membership, link: &mut ManagerLink, queues: &mut WaitSet) {
        let Some(state) = self.core.handle_new_term(membership, self.clock.now()) else {
            return link.refuse("the run ends, or has changed");
        };
        let state = ToManager::BuilderState(Box::new(state));
        let options = super::control_options(&self.config);
        match link.follow(membership, &state, (&self.device, &queues.waiter, &options)) {
            Ok((control, queue)) => (self.control, queues.control) = (control, queue),
            Err(error) => {
                tracing::warn!(%error, "no connection to the manager of the new term");
                self.core.handle_manager_lost(self.clock.now());
            }
        }
    }

    /// Makes progress until a descriptor is ready or the run is over.
    fn wait(
        &mut self,
        queues: &mut WaitSet,
        link: &ManagerLink,
        card: Option<&Card>,
        listener: &Listener,
    ) -> Result<ReadyDescriptors, ProcessError> {
        let WaitSet { waiter, control, data } = queues;
        let (interrupt, liveness) = (card.map(Card::interrupt_fd), card.map(Card::liveness_fd));
        let wake = self.storage.as_ref().map(|storage| WakeFd(storage.wake_fd()));
        let connecting = self.connecting.wake_fd();
        let workers = self.workers.as_ref().map_or_else(Vec::new, Workers::sockets);
        let workers: Vec<WorkerFd> = workers.into_iter().map(WorkerFd).collect();
        let mut others = Vec::with_capacity(7 + workers.len());
        others.extend(interrupt.as_ref().map(WaitFd::readable));
        others.extend(liveness.as_ref().map(WaitFd::readable));
        others.extend(wake.as_ref().map(WaitFd::readable));
        let streams = link.descriptors();
        let of_manager = streams.len();
        others.extend(streams);
        others.push(WaitFd::readable(listener));
        others.push(WaitFd::readable(&*connecting));
        others.extend(workers.iter().map(WaitFd::readable));
        loop {
            let decision =
                self.workers.as_ref().and_then(Workers::timeout).map_or(Deadline::NEVER, Deadline::at);
            let deadline = self.clock.deadline(self.core.poll_timeout()).earlier(decision);
            waiter.wait(&[control, data], &mut others, deadline, || self.progress(data))?;
            // A core that has reported has no timeout.
            if others.iter().any(WaitFd::is_ready) || self.core.poll_timeout().is_none() {
                let (of_card, rest) = others.split_at(if card.is_some() { 2 } else { 0 });
                let (of_storage, rest) = rest.split_at(usize::from(wake.is_some()));
                let is_ready = |waits: &[WaitFd<'_>], at: usize| waits.get(at).is_some_and(WaitFd::is_ready);
                return Ok(ReadyDescriptors {
                    interrupt: is_ready(of_card, 0),
                    card_gone: is_ready(of_card, 1),
                    storage: is_ready(of_storage, 0),
                    manager: rest[..of_manager].iter().any(WaitFd::is_ready),
                    listener: is_ready(rest, of_manager),
                    connected: is_ready(rest, of_manager + 1),
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
                Received::Message(term, message) => self.core.handle_message(term, message, now),
                Received::Malformed => self.core.handle_malformed(),
                Received::Nothing => break,
            }
        }
        while let Some(slot) = self.core.poll_withdrawn() {
            self.contents[slot.index()].clear();
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

    fn take_arrivals(&mut self, queue: &CompletionQueue) -> Result<bool, ProcessError> {
        let mut any = false;
        let mut completions = self.completions;
        loop {
            let taken = queue.poll(&mut completions)?;
            for completion in taken {
                let Some(&ru) = self.readout_of.get(&completion.qpn()) else {
                    let immediate = completion.imm().filter(|_| completion.is_success());
                    self.connecting.keep(completion.qpn(), immediate);
                    continue;
                };
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
