//! The event builder's processes in simulated time.
//!
//! A process takes all input, passes it to the core and sends the core's output, as the processes of `millstream-evb` do.
//! One manager turn takes time per unit that it sends to. Input during a turn waits for the next one, and the messages of a
//! turn to one unit are sent together.

use super::network::{ControlEndpoint, NetworkModel, TimerEvent, Transfer};
use super::{BuilderStats, EventBuilderError, ReadoutLoad, RunResult, Scenario, Storage, StorageUse};
use crate::engine::{BytesPerSecond, Picos, Random};
use millstream_evb_core::manager::{Manager, Receivers, Transmit};
use millstream_evb_core::plan::Batch;
use millstream_evb_core::readout::{BatchPayload, Readout};
use millstream_evb_core::report::{BuilderReport, ReadoutReport};
use millstream_evb_core::summary::{BatchCounts, BatchOutcome, RunSummary};
use millstream_evb_core::{
    BuIndex, Builder, Bytes, EventNumber, Instant, Message, Plan, RecoveryPolicy, RuIndex, SlotIndex, Term,
    Unit,
};
use std::num::{NonZeroU16, NonZeroU32, NonZeroU64};
use std::rc::Rc;
use std::time::Duration;

/// A message of a unit to the manager.
enum ManagerInput {
    Message(Message),
    Readout(ReadoutReport),
    Builder(BuilderReport),
}

/// Control messages that are sent together.
enum ControlBatch {
    /// From the manager to all readout units.
    ToReadouts(Rc<[Message]>),
    /// From the manager to one builder unit.
    ToBuilder(Vec<Message>),
    /// From a unit to the manager.
    ToManager(Unit, Vec<ManagerInput>),
    /// Delivered.
    Empty,
}

/// The batch of a slot, for the work of processes outside the core: packet headers and the kernel's outcome.
#[derive(Clone, Copy)]
struct SlotState {
    batch: Batch,
    arrived: u64,
}

#[derive(Clone, Copy, Default)]
struct BuilderState {
    /// Time at which the kernel is free.
    free: Picos,
    /// Time at which the disks are free, and how long they have written.
    disks_free: Picos,
    disks_busy: Picos,
    slots: u16,
    stats: BuilderStats,
    /// Bytes received over the network.
    network_bytes: u64,
}

/// All units of a run with their processes.
pub(super) struct Units {
    plan: Plan,
    load: ReadoutLoad,
    seed: u64,
    /// Time of a post, and the rate of the link for control messages.
    post: Picos,
    link: BytesPerSecond,
    control_bytes: u32,
    kernel: Vec<BytesPerSecond>,
    storage: Option<Storage>,
    stored: f64,
    rx_rate: BytesPerSecond,
    stop_at: Option<Picos>,
    /// Time between batches in picoseconds, unless saturated.
    interval: Option<f64>,
    taken: u64,
    manager: Manager,
    readouts: Vec<Readout>,
    builders: Vec<Builder>,
    /// Messages received and not yet processed.
    inbox: Vec<(Unit, ManagerInput)>,
    manager_busy: bool,
    control_batches: Vec<ControlBatch>,
    free_control_batches: Vec<u32>,
    slot_states: Vec<SlotState>,
    builder_states: Vec<BuilderState>,
    /// Batches with completed transfers, by readout unit.
    sent: Vec<u64>,
    summary: Option<RunSummary>,
    // Counters of the result.
    first: Option<Picos>,
    last: Picos,
    transfers: u64,
    built: u64,
    network_payload: u64,
    network_bytes: u64,
    max_buffered_batches: u64,
    latency_sum: f64,
    latency_max: Picos,
}

/// Long enough for any congestion: the model covers the network, not timeouts.
const TIMEOUT: Duration = Duration::from_secs(600);

fn nanos(at: Picos) -> Instant {
    Instant::from_nanos(at.0 / 1000)
}

/// Random numbers of a batch, the same at both levels of detail.
fn draw(seed: u64, batch: u64, source: u64) -> u64 {
    Random::new(seed ^ batch.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ source.wrapping_mul(0xd1b5_4a32_d192_ed03))
        .next_u64()
}

impl Units {
    pub(super) fn new(scenario: &Scenario) -> Result<Units, EventBuilderError> {
        let least = |n: u16| NonZeroU16::new(n).unwrap_or(NonZeroU16::MIN);
        let Scenario { load, configuration, node, .. } = scenario;
        let n = usize::from(scenario.nodes);
        let plan = Plan {
            first_event: EventNumber(0),
            events: NonZeroU64::new(load.events).unwrap_or(NonZeroU64::MIN),
            batch: least(load.batch),
            batch_timeout: None,
            sources: vec![NonZeroU16::MIN; n],
            slots: vec![least(configuration.slots); n],
            window: least(configuration.window),
            max_in_flight: NonZeroU32::new(configuration.in_flight).unwrap_or(NonZeroU32::MIN),
            traffic_shaping: configuration.traffic_shaping,
            timeout: TIMEOUT,
            drain_timeout: TIMEOUT,
            recovery: RecoveryPolicy::default(),
        };
        plan.check()?;
        let start = Instant::from_nanos(0);
        let mut kernel = vec![scenario.kernel; n];
        for slow in &scenario.slow_builders {
            kernel[usize::from(slow.builder)].0 /= slow.factor;
        }
        let empty = SlotState {
            batch: Batch { id: Default::default(), first_event: EventNumber(0), events: 0 },
            arrived: 0,
        };
        Ok(Units {
            load: load.clone(),
            seed: scenario.seed,
            post: node.adapter.post_time,
            link: node.rate,
            control_bytes: Message::SIZE as u32,
            kernel,
            storage: scenario.storage.clone(),
            stored: 0.0,
            rx_rate: node.rx_payload_rate(),
            stop_at: scenario.stop_at,
            interval: load.rate.map(|rate| f64::from(load.batch) / rate * 1e12),
            taken: 0,
            manager: Manager::new(plan.clone(), start),
            readouts: (0..scenario.nodes).map(|i| Readout::new(RuIndex(i), plan.clone(), start)).collect(),
            builders: (0..scenario.nodes).map(|i| Builder::new(BuIndex(i), plan.clone(), start)).collect(),
            inbox: Vec::new(),
            manager_busy: false,
            control_batches: Vec::new(),
            free_control_batches: Vec::new(),
            slot_states: vec![empty; plan.total_slots()],
            builder_states: vec![BuilderState::default(); n],
            sent: vec![0; n],
            summary: None,
            first: None,
            last: Picos::ZERO,
            transfers: 0,
            built: 0,
            network_payload: 0,
            network_bytes: 0,
            max_buffered_batches: 0,
            latency_sum: 0.0,
            latency_max: Picos::ZERO,
            plan,
        })
    }

    /// Starts the run.
    pub(super) fn start(&mut self, network: &mut impl NetworkModel) {
        if self.interval.is_some() {
            self.first = Some(Picos::ZERO);
            self.manager.handle_available(0, Instant::from_nanos(0));
            self.schedule_next_batch(network);
        }
        if let Some(at) = self.stop_at {
            network.set_timer(at, TimerEvent::Stop);
        }
        for i in 0..self.readouts.len() as u16 {
            self.pump_builder(i, network);
            network.set_timer(TIMEOUT_PICOS, TimerEvent::Deadline(Unit::Readout(RuIndex(i))));
            network.set_timer(TIMEOUT_PICOS, TimerEvent::Deadline(Unit::Builder(BuIndex(i))));
        }
        self.schedule_deadline(Unit::Manager, self.manager.poll_timeout(), network);
    }

    /// Whether the manager has closed the run summary.
    pub(super) fn is_over(&self) -> bool {
        self.summary.is_some()
    }

    fn slot_place(&self, builder: BuIndex, slot: SlotIndex) -> usize {
        builder.index() * usize::from(self.plan.slots[0].get()) + slot.index()
    }

    fn slot_state(&mut self, builder: BuIndex, slot: SlotIndex) -> &mut SlotState {
        let place = self.slot_place(builder, slot);
        &mut self.slot_states[place]
    }

    /// Event and source of the fragment with an injected fault.
    fn injected_fault(&self, every: u64, batch: Batch, kind: u64) -> Option<(u16, u16)> {
        if every == 0 || batch.id.0 % every != every - 1 {
            return None;
        }
        let draw = draw(self.seed ^ kind, batch.id.0, u64::from(u16::MAX));
        let event = draw % u64::from(batch.events);
        let source = (draw >> 32) % self.readouts.len() as u64;
        Some((event as u16, source as u16))
    }

    fn fragments(&self, batch: Batch, source: u16) -> u32 {
        let is_short =
            self.injected_fault(self.load.missing_every, batch, MISSING).is_some_and(|(_, at)| at == source);
        u32::from(batch.events) - u32::from(is_short)
    }

    /// Outcome of the kernel, which checks every fragment.
    fn batch_outcome(&self, batch: Batch) -> BatchOutcome {
        let sources = self.readouts.len() as u32;
        let missing = self.injected_fault(self.load.missing_every, batch, MISSING);
        let corrupt =
            self.injected_fault(self.load.corrupt_every, batch, CORRUPT).filter(|at| Some(*at) != missing);
        let mut outcome = BatchOutcome::default();
        let mut intact = batch.events;
        if missing.is_some() {
            // An event that lacks a fragment is incomplete, even if another fragment is corrupt.
            intact -= 1;
            outcome.missing = BatchCounts { events: 1, fragments: sources - 1 };
        }
        if let Some((event, _)) = corrupt
            && missing.is_none_or(|(lacking, _)| lacking != event)
        {
            intact -= 1;
            outcome.corrupt = BatchCounts { events: 1, fragments: sources };
        }
        outcome.built = BatchCounts { events: intact, fragments: u32::from(intact) * sources };
        outcome
    }

    fn schedule_next_batch(&self, network: &mut impl NetworkModel) {
        if let Some(interval) = self.interval
            && self.taken < self.plan.batches().get()
        {
            let at = Picos((interval * (self.taken + 1) as f64).round() as u64);
            network.set_timer(at - network.now(), TimerEvent::Taken);
        }
    }

    fn schedule_deadline(&self, unit: Unit, at: Option<Instant>, network: &mut impl NetworkModel) {
        if let Some(at) = at {
            network.set_timer(
                Picos(at.as_nanos().saturating_mul(1000)) - network.now(),
                TimerEvent::Deadline(unit),
            );
        }
    }

    /// A timer has expired.
    pub(super) fn timer_expired(&mut self, what: TimerEvent, network: &mut impl NetworkModel) {
        let now = network.now();
        match what {
            TimerEvent::ManagerTurn => {
                self.manager_busy = false;
                self.run_manager_turn(network);
            }
            TimerEvent::Taken => {
                self.taken += 1;
                self.manager.handle_available(self.taken * u64::from(self.load.batch), nanos(now));
                let least = self.sent.iter().copied().min().unwrap_or(0);
                self.max_buffered_batches = self.max_buffered_batches.max(self.taken - least);
                self.schedule_next_batch(network);
                self.wake_manager(network);
            }
            TimerEvent::Built(builder, slot) => self.kernel_done(BuIndex(builder), SlotIndex(slot), network),
            TimerEvent::Stored(builder, slot) => self.batch_done(BuIndex(builder), SlotIndex(slot), network),
            TimerEvent::Stop => {
                self.manager.handle_stop_request(nanos(now));
                self.wake_manager(network);
            }
            TimerEvent::Deadline(unit) => {
                let due = match unit {
                    Unit::Manager => self.manager.poll_timeout(),
                    Unit::Readout(ru) => self.readouts[ru.index()].poll_timeout(),
                    Unit::Builder(bu) => self.builders[bu.index()].poll_timeout(),
                };
                if due.is_some_and(|at| at > nanos(now)) {
                    return self.schedule_deadline(unit, due, network);
                }
                match unit {
                    Unit::Manager => {
                        self.manager.handle_timeout(nanos(now));
                        self.schedule_deadline(unit, self.manager.poll_timeout(), network);
                        self.wake_manager(network);
                    }
                    Unit::Readout(ru) => {
                        self.readouts[ru.index()].handle_timeout(nanos(now));
                        self.pump_readout(ru.0, network);
                    }
                    Unit::Builder(bu) => {
                        self.builders[bu.index()].handle_timeout(nanos(now));
                        self.pump_builder(bu.0, network);
                    }
                }
            }
        }
    }

    /// A transfer is in its slot, and the builder unit has polled its immediate data.
    pub(super) fn arrived(&mut self, transfer: Transfer, network: &mut impl NetworkModel) {
        let Transfer { from, to, immediate } = transfer;
        let slot_state = self.slot_state(BuIndex(to), immediate.slot);
        let batch = slot_state.batch;
        slot_state.arrived += 1;
        let is_first = slot_state.arrived == 1;
        let state = &mut self.builder_states[usize::from(to)];
        if is_first {
            state.slots += 1;
            state.stats.max_slots_used = state.stats.max_slots_used.max(state.slots);
        }
        let fragments = self.fragments(batch, from);
        // The core counts and reports a violation of the protocol.
        let builder = &mut self.builders[usize::from(to)];
        if let Ok(arrival) = builder.begin_arrival(RuIndex(from), immediate) {
            let _ = builder.complete_arrival(arrival, fragments, nanos(network.now()));
        }
        self.pump_builder(to, network);
    }

    /// The readout unit has polled a transfer's completion.
    pub(super) fn completed(&mut self, transfer: Transfer, network: &mut impl NetworkModel) {
        let from = usize::from(transfer.from);
        self.sent[from] += 1;
        self.readouts[from].handle_completed(BuIndex(transfer.to), transfer.immediate.slot);
        self.pump_readout(transfer.from, network);
    }

    /// A batch of control messages has arrived.
    pub(super) fn control_received(
        &mut self,
        to: ControlEndpoint,
        control_batch: u32,
        network: &mut impl NetworkModel,
    ) {
        let now = nanos(network.now());
        let slot_state =
            std::mem::replace(&mut self.control_batches[control_batch as usize], ControlBatch::Empty);
        self.free_control_batches.push(control_batch);
        match (slot_state, to) {
            (ControlBatch::ToReadouts(messages), ControlEndpoint::Node(node)) => {
                let unit = &mut self.readouts[usize::from(node)];
                messages.iter().for_each(|message| unit.handle_message(Term::FIRST, *message, now));
                self.pump_readout(node, network);
            }
            (ControlBatch::ToBuilder(messages), ControlEndpoint::Node(node)) => {
                let unit = &mut self.builders[usize::from(node)];
                messages.iter().for_each(|message| unit.handle_message(Term::FIRST, *message, now));
                self.pump_builder(node, network);
            }
            (ControlBatch::ToManager(unit, inputs), _) => {
                self.inbox.extend(inputs.into_iter().map(|inputs| (unit, inputs)));
                self.wake_manager(network);
            }
            _ => {}
        }
    }

    fn wake_manager(&mut self, network: &mut impl NetworkModel) {
        if !self.manager_busy {
            self.run_manager_turn(network);
        }
    }

    /// Time before the manager can send the next batch: its post, or its bytes on the link.
    fn control_send_time(&self, bytes: u32) -> Picos {
        self.post.max(self.link.time(u64::from(bytes)))
    }

    fn store_control_batch(&mut self, control_batch: ControlBatch) -> u32 {
        match self.free_control_batches.pop() {
            Some(free) => {
                self.control_batches[free as usize] = control_batch;
                free
            }
            None => {
                self.control_batches.push(control_batch);
                self.control_batches.len() as u32 - 1
            }
        }
    }

    /// The manager processes its input and sends its output.
    fn run_manager_turn(&mut self, network: &mut impl NetworkModel) {
        let now = nanos(network.now());
        for (unit, inputs) in std::mem::take(&mut self.inbox) {
            match (unit, inputs) {
                (unit, ManagerInput::Message(message)) => self.manager.handle_message(unit, message, now),
                (Unit::Readout(ru), ManagerInput::Readout(report)) => {
                    self.manager.handle_readout_report(ru, report, now)
                }
                (Unit::Builder(bu), ManagerInput::Builder(report)) => {
                    self.manager.handle_builder_report(bu, report, now)
                }
                _ => {}
            }
        }
        let mut for_readouts = Vec::new();
        let mut for_builders: Vec<(u16, Message)> = Vec::new();
        while let Some(Transmit { to, message }) = self.manager.poll_transmit(now) {
            if let Message::Assign(assignment) = message {
                self.first.get_or_insert(network.now());
                *self.slot_state(assignment.builder, assignment.slot) =
                    SlotState { batch: assignment.batch, arrived: 0 };
            }
            // Without recovery no message goes to a single readout unit.
            if to.includes(Unit::Readout(RuIndex(0))) {
                for_readouts.push(message);
            }
            match to {
                Receivers::ReadoutsAnd(bu) => for_builders.push((bu.0, message)),
                _ => {
                    let builders =
                        (0..self.builders.len() as u16).filter(|&bu| to.includes(Unit::Builder(BuIndex(bu))));
                    for_builders.extend(builders.map(|bu| (bu, message)));
                }
            }
        }
        if let Some(summary) = self.manager.poll_finished() {
            self.summary = Some(summary);
        }
        let mut busy = Picos::ZERO;
        if !for_readouts.is_empty() {
            let bytes = self.control_bytes * for_readouts.len() as u32;
            let messages: Rc<[Message]> = for_readouts.into();
            for node in 0..self.readouts.len() as u16 {
                busy += self.control_send_time(bytes);
                let control_batch = self.store_control_batch(ControlBatch::ToReadouts(Rc::clone(&messages)));
                network.control(
                    ControlEndpoint::Manager,
                    ControlEndpoint::Node(node),
                    busy,
                    bytes,
                    control_batch,
                );
            }
        }
        // By builder unit, and in order of time for each.
        for_builders.sort_by_key(|(bu, _)| *bu);
        for group in for_builders.chunk_by(|a, b| a.0 == b.0) {
            let messages: Vec<Message> = group.iter().map(|(_, message)| *message).collect();
            let bytes = self.control_bytes * messages.len() as u32;
            busy += self.control_send_time(bytes);
            let control_batch = self.store_control_batch(ControlBatch::ToBuilder(messages));
            network.control(
                ControlEndpoint::Manager,
                ControlEndpoint::Node(group[0].0),
                busy,
                bytes,
                control_batch,
            );
        }
        if busy > Picos::ZERO {
            self.manager_busy = true;
            network.set_timer(busy, TimerEvent::ManagerTurn);
        }
    }

    fn send_to_manager(
        &mut self,
        unit: Unit,
        node: u16,
        inputs: Vec<ManagerInput>,
        network: &mut impl NetworkModel,
    ) {
        if !inputs.is_empty() {
            let bytes = self.control_bytes * inputs.len() as u32;
            let control_batch = self.store_control_batch(ControlBatch::ToManager(unit, inputs));
            network.control(
                ControlEndpoint::Node(node),
                ControlEndpoint::Manager,
                self.post,
                bytes,
                control_batch,
            );
        }
    }

    fn pump_readout(&mut self, node: u16, network: &mut impl NetworkModel) {
        while let Some(send) = self.readouts[usize::from(node)].poll_send() {
            let batch = send.assignment.batch;
            let to = send.assignment.builder.0;
            let transfer = Transfer { from: node, to, immediate: send.immediate };
            let fragments = self.fragments(batch, node);
            let payload = self.load.payload(batch.events, draw(self.seed, batch.id.0, u64::from(node)));
            let bytes = payload + self.load.index * u32::from(batch.events);
            let taken = BatchPayload { fragments, bytes: Bytes(u64::from(payload)) };
            self.readouts[usize::from(node)].handle_posted(send, taken);
            self.transfers += 1;
            self.built += u64::from(payload);
            if !transfer.is_local() {
                self.network_payload += u64::from(payload);
                self.network_bytes += u64::from(bytes);
                self.builder_states[usize::from(to)].network_bytes += u64::from(bytes);
            }
            network.transfer(transfer, bytes);
        }
        let unit = &mut self.readouts[usize::from(node)];
        let mut inputs: Vec<ManagerInput> = Vec::new();
        while let Some(message) = unit.poll_transmit() {
            inputs.push(ManagerInput::Message(message));
        }
        inputs.extend(unit.poll_report().map(ManagerInput::Readout));
        self.send_to_manager(Unit::Readout(RuIndex(node)), node, inputs, network);
    }

    fn pump_builder(&mut self, node: u16, network: &mut impl NetworkModel) {
        let at = usize::from(node);
        let now = network.now();
        while let Some(process) = self.builders[at].poll_complete_batch() {
            // The kernel processes one batch after the other.
            let bytes = f64::from(process.batch.events) * self.load.fragment * self.readouts.len() as f64;
            let state = &mut self.builder_states[at];
            state.free = state.free.max(now) + self.kernel[at].time(bytes as u64);
            network.set_timer(state.free - now, TimerEvent::Built(node, process.slot.0));
        }
        let unit = &mut self.builders[at];
        let mut inputs: Vec<ManagerInput> = Vec::new();
        while let Some(message) = unit.poll_transmit() {
            inputs.push(ManagerInput::Message(message));
        }
        inputs.extend(unit.poll_report().map(ManagerInput::Builder));
        self.send_to_manager(Unit::Builder(BuIndex(node)), node, inputs, network);
    }

    /// The kernel has processed a batch: its accepted events are stored, behind those of the batches before it.
    fn kernel_done(&mut self, builder: BuIndex, slot: SlotIndex, network: &mut impl NetworkModel) {
        let Some(storage) = &self.storage else { return self.batch_done(builder, slot, network) };
        let events = f64::from(self.slot_states[self.slot_place(builder, slot)].batch.events);
        let built = events * (self.load.fragment + f64::from(self.load.index)) * self.readouts.len() as f64;
        let (time, now) = (storage.time(built), network.now());
        self.stored += storage.stored(built);
        self.builders[builder.index()].handle_storing(slot, nanos(now));
        let state = &mut self.builder_states[builder.index()];
        state.disks_free = state.disks_free.max(now) + time;
        state.disks_busy += time;
        network.set_timer(state.disks_free - now, TimerEvent::Stored(builder.0, slot.0));
    }

    /// A batch is built and stored.
    fn batch_done(&mut self, builder: BuIndex, slot: SlotIndex, network: &mut impl NetworkModel) {
        let batch = self.slot_state(builder, slot).batch;
        let mut outcome = self.batch_outcome(batch);
        if let Some(storage) = &self.storage {
            outcome.accepted = storage.stored(f64::from(outcome.built.events)).round() as u16;
        }
        let unit = &mut self.builders[builder.index()];
        let done = unit.handle_processed(slot, outcome);
        debug_assert!(done.is_ok(), "the slot holds the processed batch: {done:?}");
        let state = &mut self.builder_states[builder.index()];
        state.slots -= 1;
        state.stats.batches += 1;
        self.last = network.now();
        if let Some(interval) = self.interval {
            let taken = Picos((interval * (batch.id.0 + 1) as f64).round() as u64);
            let build_latency = self.last - taken;
            self.latency_sum += build_latency.seconds();
            self.latency_max = self.latency_max.max(build_latency);
        }
        self.pump_builder(builder.0, network);
    }

    /// The result of a finished run.
    ///
    /// # Panics
    /// If the run is not finished: the core ends every run.
    pub(super) fn outcome(&self, end: Picos, steps: u64) -> RunResult {
        let summary = self.summary.clone().expect("every finished run has a run summary");
        let span = self.last - self.first.unwrap_or(self.last);
        let batches: u64 = self.builder_states.iter().map(|state| state.stats.batches).sum();
        let most = self.builder_states.iter().map(|state| state.network_bytes).max().unwrap_or(0);
        let mean = if batches > 0 { self.latency_sum / batches as f64 } else { 0.0 };
        let busiest = self.builder_states.iter().map(|state| state.disks_busy).max().unwrap_or_default();
        let busy = if span > Picos::ZERO { busiest.seconds() / span.seconds() } else { 0.0 };
        RunResult {
            storage: self.storage.as_ref().map(|_| StorageUse { bytes: self.stored, busy }),
            summary,
            span,
            end,
            transfers: self.transfers,
            built: self.built,
            network_payload: self.network_payload,
            network_bytes: self.network_bytes,
            builders: self.builder_states.iter().map(|state| state.stats).collect(),
            max_buffered_batches: self.max_buffered_batches,
            build_latency: [Picos::from_seconds(mean), self.latency_max],
            peak_link_utilization: if span > Picos::ZERO {
                most as f64 / span.seconds() / self.rx_rate.0
            } else {
                0.0
            },
            steps,
        }
    }
}

const TIMEOUT_PICOS: Picos = Picos(TIMEOUT.as_nanos() as u64 * 1000);
const MISSING: u64 = 0x6d69_7373;
const CORRUPT: u64 = 0x6372_7074;
