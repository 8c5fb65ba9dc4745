//! What the event builder's processes do with its core, in virtual time.
//!
//! A process takes all that has come, asks the core what follows, and sends it, as `millstream-evb`'s processes do.
//! The manager's turn takes time for each unit that it sends to; what comes meanwhile waits for its next turn, and what
//! it then has for a unit travels together.

use super::{BuilderLoad, EventBuilderError, Load, Outcome, Setup};
use crate::engine::{Picos, Random, Rate};
use millstream_evb_core::account::{Account, BatchTally, Verdict};
use millstream_evb_core::manager::{Manager, To, Transmit};
use millstream_evb_core::plan::Batch;
use millstream_evb_core::readout::{Readout, Taken};
use millstream_evb_core::report::{BuilderReport, ReadoutReport};
use millstream_evb_core::{
    BuIndex, Builder, Bytes, EventNumber, Immediate, Message, Nanos, Plan, RuIndex, SlotIndex, Unit,
};
use std::num::{NonZeroU16, NonZeroU32, NonZeroU64};
use std::rc::Rc;
use std::time::Duration;

/// A batch from one readout unit, on its way to a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Transfer {
    pub(super) from: u16,
    pub(super) to: u16,
    immediate: Immediate,
}

impl Transfer {
    /// As a number that travels in packets.
    pub(super) fn tag(self) -> u64 {
        u64::from(self.from) << 48 | u64::from(self.to) << 32 | u64::from(self.immediate.encode())
    }

    pub(super) fn of_tag(tag: u64) -> Transfer {
        let immediate = Immediate::decode(tag as u32);
        Transfer { from: (tag >> 48) as u16, to: (tag >> 32) as u16, immediate }
    }

    /// Whether it stays on its node.
    pub(super) fn is_local(self) -> bool {
        self.from == self.to
    }
}

/// Where a unit is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Manager,
    Node(u16),
}

/// What brings transfers and control messages from place to place, and time forward.
pub(super) trait Carrier {
    /// Virtual time.
    fn now(&self) -> Picos;
    /// Carries so many bytes; [`Units::arrived`] and then [`Units::completed`] hear of it.
    fn transfer(&mut self, transfer: Transfer, bytes: u32);
    /// Carries a pack of control messages, after a delay; [`Units::heard`] gets it.
    fn control(&mut self, from: Place, to: Place, after: Picos, bytes: u32, pack: u32);
    /// Calls [`Units::woken`] after a delay.
    fn wake(&mut self, after: Picos, what: Wake);
}

/// What a process waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wake {
    /// The manager is through with what it had to send, or is to begin.
    ManagerTurn,
    /// The events of one more batch have been taken.
    Taken,
    /// A builder unit's kernel is through with the batch in that slot.
    Built(u16, u16),
    /// A unit's deadline, perhaps.
    Deadline(Unit),
    /// Someone wants the run to end.
    Stop,
}

impl Wake {
    /// As a number that an engine's wake-up carries.
    pub(super) fn token(self) -> u64 {
        let (kind, a, b) = match self {
            Wake::ManagerTurn => (0u64, 0, 0),
            Wake::Taken => (1, 0, 0),
            Wake::Built(builder, slot) => (2, builder, slot),
            Wake::Deadline(Unit::Manager) => (3, 0, 0),
            Wake::Deadline(Unit::Readout(ru)) => (4, ru.0, 0),
            Wake::Deadline(Unit::Builder(bu)) => (5, bu.0, 0),
            Wake::Stop => (6, 0, 0),
        };
        kind << 32 | u64::from(a) << 16 | u64::from(b)
    }

    pub(super) fn of_token(token: u64) -> Wake {
        let (a, b) = ((token >> 16) as u16, token as u16);
        match token >> 32 {
            0 => Wake::ManagerTurn,
            1 => Wake::Taken,
            2 => Wake::Built(a, b),
            3 => Wake::Deadline(Unit::Manager),
            4 => Wake::Deadline(Unit::Readout(RuIndex(a))),
            5 => Wake::Deadline(Unit::Builder(BuIndex(a))),
            _ => Wake::Stop,
        }
    }
}

/// What a unit says to the manager.
enum Said {
    Message(Message),
    Readout(ReadoutReport),
    Builder(BuilderReport),
}

/// Control messages that travel together.
enum Pack {
    /// The manager's to all readout units.
    ToReadouts(Rc<[Message]>),
    /// The manager's to one builder unit.
    ToBuilder(Vec<Message>),
    /// To the manager.
    ToManager(Unit, Vec<Said>),
    /// Delivered.
    Empty,
}

/// What is known of a slot's batch, for those parts that processes do outside of the core: reading packets' headers,
/// and the kernel's verdict.
#[derive(Clone, Copy)]
struct Content {
    batch: Batch,
    arrived: u64,
}

#[derive(Clone, Copy, Default)]
struct Station {
    /// When the kernel is free.
    free: Picos,
    slots: u16,
    load: BuilderLoad,
    /// Bytes that came over its link.
    carried: u64,
}

/// All units of a run, with what their processes do.
pub(super) struct Units {
    plan: Plan,
    load: Load,
    seed: u64,
    /// Time of a post, and the link that a pack of control messages takes.
    post: Picos,
    link: Rate,
    control_bytes: u32,
    kernel: Vec<Rate>,
    takes: Rate,
    stop_at: Option<Picos>,
    /// Time between batches, if events are taken at a rate.
    interval: Option<f64>,
    taken: u64,
    manager: Manager,
    readouts: Vec<Readout>,
    builders: Vec<Builder>,
    /// Heard and not yet looked at.
    inbox: Vec<(Unit, Said)>,
    is_in_turn: bool,
    packs: Vec<Pack>,
    free_packs: Vec<u32>,
    contents: Vec<Content>,
    stations: Vec<Station>,
    /// Batches whose transfer has completed, by readout unit.
    sent: Vec<u64>,
    account: Option<Account>,
    // What the outcome is made of.
    first: Option<Picos>,
    last: Picos,
    transfers: u64,
    built: u64,
    travelled: u64,
    carried: u64,
    most_held: u64,
    delay_sum: f64,
    delay_most: Picos,
}

/// Long enough for any congestion: what is modelled is the network, not a site's patience.
const TIMEOUT: Duration = Duration::from_secs(600);

fn nanos(at: Picos) -> Nanos {
    Nanos(at.0 / 1000)
}

/// A batch's own random numbers, the same at every level of modelling.
fn draw(seed: u64, batch: u64, source: u64) -> u64 {
    Random::new(seed ^ batch.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ source.wrapping_mul(0xd1b5_4a32_d192_ed03))
        .bits()
}

impl Units {
    pub(super) fn new(setup: &Setup) -> Result<Units, EventBuilderError> {
        let least = |n: u16| NonZeroU16::new(n).unwrap_or(NonZeroU16::MIN);
        let Setup { load, configuration, node, .. } = setup;
        let n = usize::from(setup.nodes);
        let plan = Plan {
            first_event: EventNumber(0),
            events: NonZeroU64::new(load.events).unwrap_or(NonZeroU64::MIN),
            batch: least(load.batch),
            sources: vec![NonZeroU16::MIN; n],
            slots: vec![least(configuration.slots); n],
            window: least(configuration.window),
            under_way: NonZeroU32::new(configuration.under_way).unwrap_or(NonZeroU32::MIN),
            shape: configuration.shape,
            timeout: TIMEOUT,
            drain: TIMEOUT,
        };
        plan.check()?;
        let start = Nanos(0);
        let mut kernel = vec![setup.kernel; n];
        for slow in &setup.slow {
            kernel[usize::from(slow.builder)].0 /= slow.factor;
        }
        let nothing = Content {
            batch: Batch { id: Default::default(), first_event: EventNumber(0), events: 0 },
            arrived: 0,
        };
        Ok(Units {
            load: load.clone(),
            seed: setup.seed,
            post: node.adapter.post,
            link: node.rate,
            control_bytes: Message::SIZE as u32,
            kernel,
            takes: node.takes(),
            stop_at: setup.stop_at,
            interval: load.rate.map(|rate| f64::from(load.batch) / rate * 1e12),
            taken: 0,
            manager: Manager::new(plan.clone(), start),
            readouts: (0..setup.nodes).map(|i| Readout::new(RuIndex(i), plan.clone(), start)).collect(),
            builders: (0..setup.nodes).map(|i| Builder::new(BuIndex(i), plan.clone(), start)).collect(),
            inbox: Vec::new(),
            is_in_turn: false,
            packs: Vec::new(),
            free_packs: Vec::new(),
            contents: vec![nothing; plan.total_slots()],
            stations: vec![Station::default(); n],
            sent: vec![0; n],
            account: None,
            first: None,
            last: Picos::ZERO,
            transfers: 0,
            built: 0,
            travelled: 0,
            carried: 0,
            most_held: 0,
            delay_sum: 0.0,
            delay_most: Picos::ZERO,
            plan,
        })
    }

    /// The start of the run.
    pub(super) fn start(&mut self, carrier: &mut impl Carrier) {
        if self.interval.is_some() {
            self.first = Some(Picos::ZERO);
            self.manager.handle_taken(0);
            self.await_batch(carrier);
        }
        if let Some(at) = self.stop_at {
            carrier.wake(at, Wake::Stop);
        }
        for i in 0..self.readouts.len() as u16 {
            self.pump_builder(i, carrier);
            carrier.wake(TIMEOUT_PICOS, Wake::Deadline(Unit::Readout(RuIndex(i))));
            carrier.wake(TIMEOUT_PICOS, Wake::Deadline(Unit::Builder(BuIndex(i))));
        }
        self.await_deadline(Unit::Manager, self.manager.poll_timeout(), carrier);
    }

    /// Whether the manager has closed the account.
    pub(super) fn is_over(&self) -> bool {
        self.account.is_some()
    }

    fn content(&mut self, builder: BuIndex, slot: SlotIndex) -> &mut Content {
        &mut self.contents[builder.index() * usize::from(self.plan.slots[0].get()) + slot.index()]
    }

    /// The fragment of the batch that its source has not got: event within the batch, and source.
    fn flaw(&self, every: u64, batch: Batch, kind: u64) -> Option<(u16, u16)> {
        if every == 0 || batch.id.0 % every != every - 1 {
            return None;
        }
        let draw = draw(self.seed ^ kind, batch.id.0, u64::from(u16::MAX));
        let event = draw % u64::from(batch.events);
        let source = (draw >> 32) % self.readouts.len() as u64;
        Some((event as u16, source as u16))
    }

    fn fragments(&self, batch: Batch, source: u16) -> u32 {
        let is_short = self.flaw(self.load.missing_every, batch, MISSING).is_some_and(|(_, at)| at == source);
        u32::from(batch.events) - u32::from(is_short)
    }

    /// What the kernel says: it looks at every fragment.
    fn verdict(&self, batch: Batch) -> Verdict {
        let sources = self.readouts.len() as u32;
        let missing = self.flaw(self.load.missing_every, batch, MISSING);
        let corrupt = self.flaw(self.load.corrupt_every, batch, CORRUPT).filter(|at| Some(*at) != missing);
        let mut verdict = Verdict::default();
        let mut sound = batch.events;
        if missing.is_some() {
            // An event that lacks a fragment is incomplete, whatever its others are like.
            sound -= 1;
            verdict.missing = BatchTally { events: 1, fragments: sources - 1 };
        }
        if let Some((event, _)) = corrupt
            && missing.is_none_or(|(lacking, _)| lacking != event)
        {
            sound -= 1;
            verdict.corrupt = BatchTally { events: 1, fragments: sources };
        }
        verdict.built = BatchTally { events: sound, fragments: u32::from(sound) * sources };
        verdict
    }

    fn await_batch(&self, carrier: &mut impl Carrier) {
        if let Some(interval) = self.interval
            && self.taken < self.plan.batches().get()
        {
            let at = Picos((interval * (self.taken + 1) as f64).round() as u64);
            carrier.wake(at - carrier.now(), Wake::Taken);
        }
    }

    fn await_deadline(&self, unit: Unit, at: Option<Nanos>, carrier: &mut impl Carrier) {
        if let Some(at) = at {
            carrier.wake(Picos(at.0.saturating_mul(1000)) - carrier.now(), Wake::Deadline(unit));
        }
    }

    /// A time has come.
    pub(super) fn woken(&mut self, what: Wake, carrier: &mut impl Carrier) {
        let now = carrier.now();
        match what {
            Wake::ManagerTurn => {
                self.is_in_turn = false;
                self.manager_turn(carrier);
            }
            Wake::Taken => {
                self.taken += 1;
                self.manager.handle_taken(self.taken);
                let least = self.sent.iter().copied().min().unwrap_or(0);
                self.most_held = self.most_held.max(self.taken - least);
                self.await_batch(carrier);
                self.call_manager(carrier);
            }
            Wake::Built(builder, slot) => self.kernel_done(BuIndex(builder), SlotIndex(slot), carrier),
            Wake::Stop => {
                self.manager.handle_stop_request(nanos(now));
                self.call_manager(carrier);
            }
            Wake::Deadline(unit) => {
                let due = match unit {
                    Unit::Manager => self.manager.poll_timeout(),
                    Unit::Readout(ru) => self.readouts[ru.index()].poll_timeout(),
                    Unit::Builder(bu) => self.builders[bu.index()].poll_timeout(),
                };
                if due.is_some_and(|at| at > nanos(now)) {
                    return self.await_deadline(unit, due, carrier);
                }
                match unit {
                    Unit::Manager => {
                        self.manager.handle_timeout(nanos(now));
                        self.await_deadline(unit, self.manager.poll_timeout(), carrier);
                        self.call_manager(carrier);
                    }
                    Unit::Readout(ru) => {
                        self.readouts[ru.index()].handle_timeout(nanos(now));
                        self.pump_readout(ru.0, carrier);
                    }
                    Unit::Builder(bu) => {
                        self.builders[bu.index()].handle_timeout(nanos(now));
                        self.pump_builder(bu.0, carrier);
                    }
                }
            }
        }
    }

    /// A transfer is in its slot, and the builder unit has seen its immediate data.
    pub(super) fn arrived(&mut self, transfer: Transfer, carrier: &mut impl Carrier) {
        let Transfer { from, to, immediate } = transfer;
        let content = self.content(BuIndex(to), immediate.slot);
        let batch = content.batch;
        content.arrived += 1;
        let is_first = content.arrived == 1;
        let station = &mut self.stations[usize::from(to)];
        if is_first {
            station.slots += 1;
            station.load.most_slots = station.load.most_slots.max(station.slots);
        }
        let fragments = self.fragments(batch, from);
        // A refusal is counted by the core, which stops the run.
        let _ = self.builders[usize::from(to)].handle_arrival(
            RuIndex(from),
            immediate,
            fragments,
            nanos(carrier.now()),
        );
        self.pump_builder(to, carrier);
    }

    /// A transfer's completion has been polled.
    pub(super) fn completed(&mut self, transfer: Transfer, carrier: &mut impl Carrier) {
        let from = usize::from(transfer.from);
        self.sent[from] += 1;
        self.readouts[from].handle_completed(BuIndex(transfer.to), transfer.immediate.slot);
        self.pump_readout(transfer.from, carrier);
    }

    /// A pack of control messages has arrived.
    pub(super) fn heard(&mut self, to: Place, pack: u32, carrier: &mut impl Carrier) {
        let now = nanos(carrier.now());
        let content = std::mem::replace(&mut self.packs[pack as usize], Pack::Empty);
        self.free_packs.push(pack);
        match (content, to) {
            (Pack::ToReadouts(messages), Place::Node(node)) => {
                let unit = &mut self.readouts[usize::from(node)];
                messages.iter().for_each(|message| unit.handle_message(*message, now));
                self.pump_readout(node, carrier);
            }
            (Pack::ToBuilder(messages), Place::Node(node)) => {
                let unit = &mut self.builders[usize::from(node)];
                messages.iter().for_each(|message| unit.handle_message(*message, now));
                self.pump_builder(node, carrier);
            }
            (Pack::ToManager(unit, said), _) => {
                self.inbox.extend(said.into_iter().map(|said| (unit, said)));
                self.call_manager(carrier);
            }
            _ => {}
        }
    }

    fn call_manager(&mut self, carrier: &mut impl Carrier) {
        if !self.is_in_turn {
            self.manager_turn(carrier);
        }
    }

    /// What one pack keeps the manager from sending the next: its post, or its bytes on the manager's link.
    fn step(&self, bytes: u32) -> Picos {
        self.post.max(self.link.time(u64::from(bytes)))
    }

    fn pack(&mut self, pack: Pack) -> u32 {
        match self.free_packs.pop() {
            Some(free) => {
                self.packs[free as usize] = pack;
                free
            }
            None => {
                self.packs.push(pack);
                self.packs.len() as u32 - 1
            }
        }
    }

    /// The manager looks at all that it has heard, and sends what follows.
    fn manager_turn(&mut self, carrier: &mut impl Carrier) {
        let now = nanos(carrier.now());
        for (unit, said) in std::mem::take(&mut self.inbox) {
            match (unit, said) {
                (unit, Said::Message(message)) => self.manager.handle_message(unit, message, now),
                (Unit::Readout(ru), Said::Readout(report)) => {
                    self.manager.handle_readout_report(ru, report, now)
                }
                (Unit::Builder(bu), Said::Builder(report)) => {
                    self.manager.handle_builder_report(bu, report, now)
                }
                _ => {}
            }
        }
        let mut for_readouts = Vec::new();
        let mut for_builders: Vec<(u16, Message)> = Vec::new();
        while let Some(Transmit { to, message }) = self.manager.poll_transmit(now) {
            if let Message::Assign(assignment) = message {
                self.first.get_or_insert(carrier.now());
                *self.content(assignment.builder, assignment.slot) =
                    Content { batch: assignment.batch, arrived: 0 };
            }
            match to {
                To::Units => {
                    for_readouts.push(message);
                    for_builders.extend((0..self.builders.len() as u16).map(|bu| (bu, message)));
                }
                To::Builders => for_builders.extend((0..self.builders.len() as u16).map(|bu| (bu, message))),
                To::ReadoutsAnd(bu) => {
                    for_readouts.push(message);
                    for_builders.push((bu.0, message));
                }
            }
        }
        if let Some(account) = self.manager.poll_finished() {
            self.account = Some(account);
        }
        let mut busy = Picos::ZERO;
        if !for_readouts.is_empty() {
            let bytes = self.control_bytes * for_readouts.len() as u32;
            let messages: Rc<[Message]> = for_readouts.into();
            for node in 0..self.readouts.len() as u16 {
                busy += self.step(bytes);
                let pack = self.pack(Pack::ToReadouts(Rc::clone(&messages)));
                carrier.control(Place::Manager, Place::Node(node), busy, bytes, pack);
            }
        }
        // In order of builder units, and for each in order of time.
        for_builders.sort_by_key(|(bu, _)| *bu);
        for group in for_builders.chunk_by(|a, b| a.0 == b.0) {
            let messages: Vec<Message> = group.iter().map(|(_, message)| *message).collect();
            let bytes = self.control_bytes * messages.len() as u32;
            busy += self.step(bytes);
            let pack = self.pack(Pack::ToBuilder(messages));
            carrier.control(Place::Manager, Place::Node(group[0].0), busy, bytes, pack);
        }
        if busy > Picos::ZERO {
            self.is_in_turn = true;
            carrier.wake(busy, Wake::ManagerTurn);
        }
    }

    fn tell_manager(&mut self, unit: Unit, node: u16, said: Vec<Said>, carrier: &mut impl Carrier) {
        if !said.is_empty() {
            let bytes = self.control_bytes * said.len() as u32;
            let pack = self.pack(Pack::ToManager(unit, said));
            carrier.control(Place::Node(node), Place::Manager, self.post, bytes, pack);
        }
    }

    fn pump_readout(&mut self, node: u16, carrier: &mut impl Carrier) {
        while let Some(send) = self.readouts[usize::from(node)].poll_send() {
            let batch = send.assignment.batch;
            let to = send.assignment.builder.0;
            let transfer = Transfer { from: node, to, immediate: send.immediate };
            let fragments = self.fragments(batch, node);
            let payload = self.load.payload(batch.events, draw(self.seed, batch.id.0, u64::from(node)));
            let bytes = payload + self.load.index * u32::from(batch.events);
            let taken = Taken { fragments, bytes: Bytes(u64::from(payload)) };
            self.readouts[usize::from(node)].handle_posted(send, taken);
            self.transfers += 1;
            self.built += u64::from(payload);
            if !transfer.is_local() {
                self.travelled += u64::from(payload);
                self.carried += u64::from(bytes);
                self.stations[usize::from(to)].carried += u64::from(bytes);
            }
            carrier.transfer(transfer, bytes);
        }
        let unit = &mut self.readouts[usize::from(node)];
        let mut said: Vec<Said> = Vec::new();
        while let Some(message) = unit.poll_transmit() {
            said.push(Said::Message(message));
        }
        said.extend(unit.poll_report().map(Said::Readout));
        self.tell_manager(Unit::Readout(RuIndex(node)), node, said, carrier);
    }

    fn pump_builder(&mut self, node: u16, carrier: &mut impl Carrier) {
        let at = usize::from(node);
        let now = carrier.now();
        while let Some(process) = self.builders[at].poll_process() {
            // The kernel goes through one batch after the other.
            let bytes = f64::from(process.batch.events) * self.load.fragment * self.readouts.len() as f64;
            let station = &mut self.stations[at];
            station.free = station.free.max(now) + self.kernel[at].time(bytes as u64);
            carrier.wake(station.free - now, Wake::Built(node, process.slot.0));
        }
        let unit = &mut self.builders[at];
        let mut said: Vec<Said> = Vec::new();
        while let Some(message) = unit.poll_transmit() {
            said.push(Said::Message(message));
        }
        said.extend(unit.poll_report().map(Said::Builder));
        self.tell_manager(Unit::Builder(BuIndex(node)), node, said, carrier);
    }

    fn kernel_done(&mut self, builder: BuIndex, slot: SlotIndex, carrier: &mut impl Carrier) {
        let batch = self.content(builder, slot).batch;
        let verdict = self.verdict(batch);
        let unit = &mut self.builders[builder.index()];
        let done = unit.handle_processed(slot, verdict).and_then(|()| unit.handle_released(slot));
        debug_assert!(done.is_ok(), "the kernel's batch is the slot's: {done:?}");
        let station = &mut self.stations[builder.index()];
        station.slots -= 1;
        station.load.batches += 1;
        self.last = carrier.now();
        if let Some(interval) = self.interval {
            let taken = Picos((interval * (batch.id.0 + 1) as f64).round() as u64);
            let delay = self.last - taken;
            self.delay_sum += delay.seconds();
            self.delay_most = self.delay_most.max(delay);
        }
        self.pump_builder(builder.0, carrier);
    }

    /// What came of it, when the run is over.
    ///
    /// # Panics
    /// If the run is not over: the core ends every run.
    pub(super) fn outcome(&self, end: Picos, steps: u64) -> Outcome {
        let account = self.account.clone().expect("a run ends with an account");
        let span = self.last - self.first.unwrap_or(self.last);
        let batches: u64 = self.stations.iter().map(|station| station.load.batches).sum();
        let most = self.stations.iter().map(|station| station.carried).max().unwrap_or(0);
        let mean = if batches > 0 { self.delay_sum / batches as f64 } else { 0.0 };
        Outcome {
            account,
            span,
            end,
            transfers: self.transfers,
            built: self.built,
            travelled: self.travelled,
            carried: self.carried,
            builders: self.stations.iter().map(|station| station.load).collect(),
            most_held: self.most_held,
            delay: [Picos::from_seconds(mean), self.delay_most],
            busiest: if span > Picos::ZERO { most as f64 / span.seconds() / self.takes.0 } else { 0.0 },
            steps,
        }
    }
}

const TIMEOUT_PICOS: Picos = Picos(TIMEOUT.as_nanos() as u64 * 1000);
const MISSING: u64 = 0x6d69_7373;
const CORRUPT: u64 = 0x6372_7074;
