//! An event builder in virtual time: the state machines of the core, and a simulated environment.
//!
//! A process that ended, and that the run went on without, is started again while the plan permits. Events become available
//! over time if the scenario has a rate.
//!
//! Control messages keep their order per pair of units and have random delays. Packets land at any time between posting
//! and arrival. Kernels take random times. Units die or stall at any step. The oracle knows which fragments exist and
//! which are corrupt. The monitor checks rules that span units. A standby manager takes over if the plan has one, and another one
//! is started while the plan permits.

pub mod monitor;
pub mod oracle;
mod standby;

use millstream_evb::core::manager::{Manager, Receivers, Transmit};
use millstream_evb::core::message::Assignment;
use millstream_evb::core::readout::{BatchPayload, Readout};
use millstream_evb::core::report::{BuilderReport, ReadoutReport};
use millstream_evb::core::{
    BuIndex, Builder, Bytes, Immediate, Instant, Message, Plan, ReportMerger, RuIndex, RunSummary, SlotIndex,
    StopCause, Term, Unit,
};
use monitor::SlotMonitor;
use oracle::{Oracle, Random};
use standby::{Standby, StandbyEvent};
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::Duration;

/// A failure of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The unit dies; the others detect it after a delay.
    Death,
    /// The unit stops; the others are not notified.
    Stall,
    /// A readout unit's writes to this builder unit fail.
    Cut(BuIndex),
    /// The unit stops for this time and then continues.
    Pause(Duration),
    /// The standby manager dies.
    StandbyDeath,
}

/// A failure at a step of the simulation.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    /// The step.
    pub step: u64,
    /// The unit.
    pub unit: Unit,
    /// The failure.
    pub failure: Failure,
}

/// A deliberate violation, to check that it is detected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Misbehavior {
    /// Nothing.
    None,
    /// Builder units grant each slot's next generation along with the present one.
    GrantEarly,
    /// Every grant arrives twice.
    GrantTwice,
    /// A slot is assigned to two batches at once.
    AssignTwice,
    /// Every tenth batch's immediate data arrives twice.
    ArriveTwice,
    /// Outcomes lack one fragment.
    OutcomeLacksFragment,
    /// Readout units report one fragment more than they sent.
    ReadoutOvercounts,
    /// Readout units report one fragment less than they read.
    ReadoutUndercounts,
    /// Every tenth `Done` is lost.
    DoneLost,
    /// Builder units report batches done early.
    DoneEarly,
}

/// Parameters of a simulated run.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The plan.
    pub plan: Plan,
    /// Seed of the random numbers.
    pub seed: u64,
    /// Fragments missing at their source, per 1000.
    pub missing: u16,
    /// Corrupt fragments, per 1000.
    pub corrupt: u16,
    /// Failures of units.
    pub faults: Vec<Fault>,
    /// Mean time between two events; without it all are there from the start.
    pub interval: Option<Duration>,
    /// Longest time for which a batch waits for storage; without it none is stored.
    pub storage: Option<Duration>,
    /// Deliberate violation.
    pub misbehavior: Misbehavior,
}

/// Result of a simulated run.
#[derive(Debug)]
pub struct Outcome {
    /// The run summary: the manager's, or the launcher's if the manager failed.
    pub summary: RunSummary,
    /// Fragments and batches that the simulator counted.
    pub oracle: Oracle,
    /// Violations that the monitor detected.
    pub violations: Vec<String>,
    /// Virtual time of the first failure, if there was one before the end.
    pub fault_at: Option<Instant>,
    /// Virtual time of the end.
    pub end: Instant,
    /// Number of steps.
    pub steps: u64,
    /// How many standby managers took over.
    pub takeovers: u32,
    /// Whether a standby manager refused the run, because events were in no known batch or a unit is needed.
    pub is_refused: bool,
}

#[derive(Debug)]
enum SimEvent {
    Control {
        from: Unit,
        to: Unit,
        /// Of the manager that sends or receives it.
        term: Term,
        message: Message,
    },
    Standby(StandbyEvent),
    ReadoutReport(RuIndex, ReadoutReport),
    BuilderReport(BuIndex, BuilderReport),
    Land {
        ru: RuIndex,
        to: Assignment,
    },
    Arrive {
        ru: RuIndex,
        bu: BuIndex,
        immediate: Immediate,
        fragments: u32,
    },
    Complete {
        ru: RuIndex,
        bu: BuIndex,
        slot: SlotIndex,
    },
    Unreachable {
        ru: RuIndex,
        bu: BuIndex,
    },
    Process {
        bu: BuIndex,
        slot: SlotIndex,
    },
    Stored {
        bu: BuIndex,
        slot: SlotIndex,
    },
    Notice {
        to: Unit,
        lost: Unit,
        /// Of the manager at that time.
        term: Term,
    },
    /// The launcher ends the process of a unit that the run goes on without.
    Kill(Unit),
    /// A new process is ready to join with that index.
    Join(Unit),
    /// More events are there.
    Available,
    Wake(Unit),
}

struct Timed(Instant, u64, SimEvent);

impl PartialEq for Timed {
    fn eq(&self, other: &Self) -> bool {
        self.1 == other.1
    }
}
impl Eq for Timed {}
impl PartialOrd for Timed {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Timed {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (other.0, other.1).cmp(&(self.0, self.1))
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Health {
    /// A restart that has not joined.
    Vacant,
    Alive,
    Stalled,
    Dead,
}

struct Sim {
    scenario: Scenario,
    now: Instant,
    order: u64,
    queue: BinaryHeap<Timed>,
    /// Last delivery on each ordered connection: control messages, or data.
    last: BTreeMap<(Unit, Unit, bool), Instant>,
    random: Random,
    manager: Manager,
    standby: Standby,
    readouts: Vec<Readout>,
    builders: Vec<Builder>,
    health: BTreeMap<Unit, Health>,
    wakes: BTreeMap<Unit, Instant>,
    paused: BTreeMap<Unit, Instant>,
    cut: BTreeSet<(RuIndex, BuIndex)>,
    oracle: Oracle,
    monitor: SlotMonitor,
    launcher_merger: ReportMerger,
    launcher_cause: StopCause,
    summary: Option<RunSummary>,
    fault_at: Option<Instant>,
    reports_in_flight: u32,
    counter: u64,
    /// Events that are there.
    available: u64,
    /// Batches that wait for storage.
    storing: BTreeSet<(BuIndex, SlotIndex)>,
    /// Units that the run went on without, and whose processes have not been started again.
    departed: BTreeSet<Unit>,
}

/// Runs the scenario to its end.
///
/// # Panics
/// The run does not end.
pub fn run(scenario: Scenario) -> Outcome {
    let plan = &scenario.plan;
    plan.check().expect("the scenario's plan is possible");
    let now = Instant::from_nanos(0);
    let units: Vec<Unit> = std::iter::once(Unit::Manager)
        .chain((0..plan.readout_members()).map(|i| Unit::Readout(RuIndex(i as u16))))
        .chain((0..plan.builders()).map(|i| Unit::Builder(BuIndex(i as u16))))
        .collect();
    let mut sim = Sim {
        now,
        order: 0,
        queue: BinaryHeap::new(),
        last: BTreeMap::new(),
        random: Random::new(scenario.seed),
        manager: Manager::new(plan.clone(), now),
        standby: Standby::new(&units),
        readouts: (0..plan.readout_members())
            .map(|i| Readout::new(RuIndex(i as u16), plan.clone(), now))
            .collect(),
        builders: (0..plan.builders()).map(|i| Builder::new(BuIndex(i as u16), plan.clone(), now)).collect(),
        health: units
            .iter()
            .map(|&unit| (unit, if plan.is_restart(unit) { Health::Vacant } else { Health::Alive }))
            .collect(),
        wakes: BTreeMap::new(),
        paused: BTreeMap::new(),
        cut: BTreeSet::new(),
        oracle: Oracle::new(&scenario),
        monitor: SlotMonitor::new(plan),
        launcher_merger: ReportMerger::new(plan.clone()),
        launcher_cause: StopCause::Lost(Unit::Manager),
        summary: None,
        fault_at: None,
        reports_in_flight: 0,
        counter: 0,
        available: 0,
        storing: BTreeSet::new(),
        departed: BTreeSet::new(),
        scenario,
    };
    if sim.scenario.interval.is_some() {
        sim.manager.handle_available(0, now);
        sim.at(now, SimEvent::Available);
    }
    let initial: Vec<Unit> = units.into_iter().filter(|&unit| sim.is_alive(unit)).collect();
    initial.into_iter().for_each(|unit| sim.pump(unit));
    let mut steps = 0;
    while !sim.is_over() {
        sim.fail_at(steps);
        let Some(Timed(at, _, event)) = sim.queue.pop() else {
            panic!("no event is left, and the run is not over: {:?}", sim.scenario);
        };
        sim.now = at;
        sim.dispatch(event);
        steps += 1;
        assert!(steps < 3_000_000, "the run does not end: {:?}", sim.scenario);
    }
    let summary = match sim.summary {
        Some(summary) => summary,
        None => sim.launcher_merger.summary(sim.launcher_cause),
    };
    let violations = sim.monitor.violations;
    Outcome {
        summary,
        oracle: sim.oracle,
        violations,
        fault_at: sim.fault_at,
        end: sim.now,
        steps,
        takeovers: sim.standby.takeovers(),
        is_refused: sim.standby.is_refused(),
    }
}

impl Sim {
    fn is(&self, unit: Unit, health: Health) -> bool {
        self.health[&unit] == health
    }

    fn is_alive(&self, unit: Unit) -> bool {
        self.is(unit, Health::Alive)
    }

    /// The manager has built the run summary, or it failed and all reports have arrived.
    fn is_over(&self) -> bool {
        if self.is_alive(Unit::Manager) {
            return self.summary.is_some();
        }
        let waiting = |unit| self.is_alive(unit) && self.wakes.contains_key(&unit);
        self.reports_in_flight == 0 && !self.health.keys().any(|&unit| waiting(unit))
    }

    fn fail_at(&mut self, step: u64) {
        for fault in self.scenario.faults.clone() {
            if fault.step != step || !self.is_alive(fault.unit) {
                continue;
            }
            self.fault_at.get_or_insert(self.now);
            if let Failure::Pause(time) = fault.failure {
                let is_paused = self.paused.get(&fault.unit).is_some_and(|&until| self.now < until);
                if !is_paused {
                    self.paused.insert(fault.unit, self.now + time);
                    self.watch_manager(fault.unit);
                }
                continue;
            }
            match (fault.failure, fault.unit) {
                (Failure::Stall, unit) => {
                    self.health.insert(unit, Health::Stalled);
                    self.watch_manager(unit);
                    continue;
                }
                (Failure::StandbyDeath, _) => {
                    self.lose_standby();
                    continue;
                }
                (Failure::Cut(bu), Unit::Readout(ru)) => {
                    self.cut.insert((ru, bu));
                    self.after(0, 500_000, SimEvent::Unreachable { ru, bu });
                    continue;
                }
                _ => {}
            }
            self.kill(fault.unit);
        }
    }

    /// The process of the unit ends.
    fn kill(&mut self, unit: Unit) {
        let before = self.health.insert(unit, Health::Dead);
        if before == Some(Health::Vacant) {
            self.health.insert(unit, Health::Vacant);
        } else if before != Some(Health::Dead) {
            let term = self.standby.term();
            for to in self.health.keys().copied().collect::<Vec<_>>() {
                // The manager and the units watch each other; builder units may watch readout units.
                let watches = to == Unit::Manager
                    || unit == Unit::Manager
                    || matches!((to, unit), (Unit::Builder(_), Unit::Readout(_))) && self.random.one_in(2);
                if watches && to != unit {
                    self.after(0, 500_000, SimEvent::Notice { to, lost: unit, term });
                }
            }
            if let Unit::Builder(bu) = unit {
                for ru in 0..self.readouts.len() {
                    if self.random.one_in(2) {
                        let ru = RuIndex(ru as u16);
                        self.after(0, 2_000_000, SimEvent::Unreachable { ru, bu });
                    }
                }
            }
            self.start_again(unit);
            self.close_stream_to_standby(unit);
            if unit == Unit::Manager {
                self.after(0, 2_000_000, SimEvent::Standby(StandbyEvent::Promote));
            }
        }
    }

    /// Starts the process of a unit again, once it has ended and the run has gone on without it. It connects to its peers
    /// in a random time, in which the run may change.
    fn start_again(&mut self, unit: Unit) {
        if self.is(unit, Health::Dead)
            && self.departed.remove(&unit)
            && self.is_alive(Unit::Manager)
            && let Some(next) = self.manager.join_candidate(unit)
        {
            self.after(50_000, 2_000_000, SimEvent::Join(next));
        }
    }

    /// A new process has connected to the units of the run.
    fn join(&mut self, unit: Unit) {
        if !self.is_alive(Unit::Manager) {
            return;
        }
        let (plan, now) = (self.scenario.plan.clone(), self.now);
        let Some(membership) = self.manager.handle_joined(unit) else { return };
        match unit {
            Unit::Manager => {}
            Unit::Readout(ru) => self.readouts[ru.index()] = Readout::join(ru, plan, &membership, now),
            Unit::Builder(bu) => self.builders[bu.index()] = Builder::join(bu, plan, &membership, now),
        }
        self.health.insert(unit, Health::Alive);
        if !self.standby.joined(unit, membership.term) {
            match unit {
                Unit::Manager => {}
                Unit::Readout(ru) => self.readouts[ru.index()].handle_standby_lost(now),
                Unit::Builder(bu) => self.builders[bu.index()].handle_standby_lost(now),
            }
        }
        self.pump(unit);
        self.pump(Unit::Manager);
    }

    /// Some events are there.
    fn more_events(&mut self) {
        let Some(interval) = self.scenario.interval else { return };
        let run = self.scenario.plan.events.get();
        self.available = (self.available + self.random.below(20)).min(run);
        if self.is_alive(Unit::Manager) {
            self.manager.handle_available(self.available, self.now);
            self.pump(Unit::Manager);
        }
        if self.available < run {
            let most = 20 * interval.as_nanos() as u64;
            self.after(most / 2, most, SimEvent::Available);
        }
    }

    fn at(&mut self, at: Instant, event: SimEvent) {
        self.order += 1;
        self.queue.push(Timed(at, self.order, event));
    }

    /// Between `least` and `most` nanoseconds; rarely eight times that.
    fn delay(&mut self, least: u64, most: u64) -> u64 {
        let delay = least + self.random.below(most - least + 1);
        if self.random.one_in(50) { delay * 8 } else { delay }
    }

    fn after(&mut self, least: u64, most: u64, event: SimEvent) {
        let at = self.now + Duration::from_nanos(self.delay(least, most));
        self.at(at, event);
    }

    /// Arrival time on an ordered connection of something sent now.
    fn in_order(&mut self, from: Unit, to: Unit, data: bool, most: u64) -> Instant {
        let at = self.now + Duration::from_nanos(self.delay(100, most));
        let last = self.last.entry((from, to, data)).or_default();
        *last = at.max(*last + Duration::from_nanos(1));
        *last
    }

    fn send(&mut self, from: Unit, to: Unit, message: Message) {
        let term = match from {
            Unit::Manager => self.manager.term(),
            unit => self.standby.term_of(unit),
        };
        self.send_in_term(term, from, to, message);
    }

    fn send_in_term(&mut self, term: Term, from: Unit, to: Unit, message: Message) {
        let at = self.in_order(from, to, false, 300_000);
        self.at(at, SimEvent::Control { from, to, term, message });
    }

    fn dispatch(&mut self, event: SimEvent) {
        let unit = match &event {
            SimEvent::Standby(
                StandbyEvent::Promote
                | StandbyEvent::GiveUp
                | StandbyEvent::Start
                | StandbyEvent::WakeDeposed(_)
                | StandbyEvent::Ended(_)
                | StandbyEvent::Deadline(_),
            )
            | SimEvent::Standby(StandbyEvent::Readout(..) | StandbyEvent::Builder(..)) => {
                return self.handle_standby(event);
            }
            SimEvent::Control { from, to: Unit::Manager, term, message } if *term != self.standby.term() => {
                // Its connection to the former manager.
                return self.reach_deposed(*from, *term, *message);
            }
            SimEvent::Standby(
                StandbyEvent::NewTerm(to, _) | StandbyEvent::Named(to, _) | StandbyEvent::Closed(to, _),
            ) => *to,
            SimEvent::Control { to, .. } | SimEvent::Notice { to, .. } => *to,
            SimEvent::ReadoutReport(..) | SimEvent::BuilderReport(..) => Unit::Manager,
            SimEvent::Kill(unit) => return self.kill(*unit),
            SimEvent::Join(unit) => return self.join(*unit),
            SimEvent::Available if self.is_paused() => {
                let until = self.paused[&Unit::Manager];
                return self.at(until, event);
            }
            SimEvent::Available => return self.more_events(),
            SimEvent::Land { ru, to } => {
                // The adapter writes data as long as the memory and the connection exist.
                let is_open =
                    !self.builders[to.builder.index()].is_excluded(*ru) || self.is_pending(*ru, to.builder);
                if is_open && !self.is(Unit::Builder(to.builder), Health::Dead) {
                    self.monitor.land(*ru, to);
                }
                return;
            }
            SimEvent::Arrive { ru, bu, .. } | SimEvent::Complete { ru, bu, .. }
                if self.cut.contains(&(*ru, *bu)) =>
            {
                return;
            }
            SimEvent::Arrive { bu, .. } | SimEvent::Process { bu, .. } | SimEvent::Stored { bu, .. } => {
                Unit::Builder(*bu)
            }
            SimEvent::Complete { ru, .. } | SimEvent::Unreachable { ru, .. } => Unit::Readout(*ru),
            SimEvent::Wake(unit) => *unit,
        };
        if let Some(&until) = self.paused.get(&unit)
            && self.now < until
        {
            // A process handles its messages before its timers.
            let after = u64::from(matches!(event, SimEvent::Wake(_)));
            return self.at(until + Duration::from_nanos(after), event);
        }
        self.deliver_to_launcher(&event);
        if self.is_alive(unit) {
            self.handle(unit, event);
            self.pump(unit);
        }
    }

    /// Reports also reach the launcher, which needs them if the manager fails.
    fn deliver_to_launcher(&mut self, event: &SimEvent) {
        match event {
            SimEvent::ReadoutReport(ru, report) => self.launcher_merger.add_readout(*ru, report.clone()),
            SimEvent::BuilderReport(bu, report) => self.launcher_merger.add_builder(*bu, report.clone()),
            _ => return,
        }
        self.reports_in_flight -= 1;
    }

    fn handle(&mut self, unit: Unit, event: SimEvent) {
        let now = self.now;
        match event {
            SimEvent::Standby(_) => self.handle_standby(event),
            SimEvent::Control { from, message, term, .. } => match unit {
                Unit::Manager => {
                    self.monitor.reaches_manager(&message);
                    self.manager.handle_message(from, message, now);
                }
                Unit::Readout(ru) => self.readouts[ru.index()].handle_message(term, message, now),
                Unit::Builder(bu) => self.builders[bu.index()].handle_message(term, message, now),
            },
            SimEvent::ReadoutReport(ru, report) => self.manager.handle_readout_report(ru, report, now),
            SimEvent::BuilderReport(bu, report) => self.manager.handle_builder_report(bu, report, now),
            SimEvent::Arrive { ru, bu, .. } if self.is_pending(ru, bu) => {
                // The process keeps what arrives before the manager's message that the unit has joined.
                self.at(now + Duration::from_micros(10), event);
            }
            SimEvent::Arrive { ru, bu, immediate, fragments } => {
                let builder = &mut self.builders[bu.index()];
                // The builder unit counts and reports a violation of the protocol.
                if let Ok(arrival) = builder.begin_arrival(ru, immediate) {
                    let _ = builder.complete_arrival(arrival, fragments, now);
                }
            }
            SimEvent::Complete { ru, bu, slot } => {
                self.monitor.complete(ru, bu);
                self.readouts[ru.index()].handle_completed(bu, slot);
            }
            SimEvent::Unreachable { ru, bu } => self.readouts[ru.index()].handle_unreachable(bu),
            SimEvent::Process { bu, slot } => self.process(bu, slot),
            SimEvent::Stored { bu, slot } => self.stored(bu, slot),
            SimEvent::Notice { lost, term, .. } => match (unit, lost) {
                (Unit::Manager, lost) if self.standby.is_noticed(lost) => self.manager.handle_lost(lost, now),
                (Unit::Manager, _) => {}
                // The end of its stream to the former manager.
                (unit, Unit::Manager) if term != self.standby.term_of(unit) => {}
                (unit, Unit::Manager) => {
                    // The manager's messages are in the stream before its end.
                    self.connect(unit);
                    match unit {
                        Unit::Manager => {}
                        Unit::Readout(ru) => self.readouts[ru.index()].handle_manager_lost(now),
                        Unit::Builder(bu) => self.builders[bu.index()].handle_manager_lost(now),
                    }
                }
                (Unit::Builder(bu), Unit::Readout(ru)) => self.builders[bu.index()].handle_readout_lost(ru),
                _ => {}
            },
            SimEvent::Wake(_) => {
                if self.wakes.get(&unit).is_some_and(|&at| at <= now) {
                    self.wakes.remove(&unit);
                    match unit {
                        Unit::Manager => self.manager.handle_timeout(now),
                        Unit::Readout(ru) => self.readouts[ru.index()].handle_timeout(now),
                        Unit::Builder(bu) => {
                            self.drain_storage(bu);
                            self.builders[bu.index()].handle_timeout(now);
                        }
                    }
                }
            }
            SimEvent::Land { .. } | SimEvent::Kill(_) | SimEvent::Join(_) | SimEvent::Available => {}
        }
    }

    /// Whether a readout unit has connected to the builder unit, which does not know yet that it has joined.
    fn is_pending(&self, ru: RuIndex, bu: BuIndex) -> bool {
        let role = self.scenario.plan.readout_role(ru);
        self.builders[bu.index()].readout_member(role).index < ru
    }

    /// Whether the manager is paused.
    fn is_paused(&self) -> bool {
        self.paused.get(&Unit::Manager).is_some_and(|&until| self.now < until)
    }

    /// The kernel is done with a batch, which waits for storage if the scenario has one. Storage stalls now and then.
    fn process(&mut self, bu: BuIndex, slot: SlotIndex) {
        let Some(longest) = self.scenario.storage else { return self.done(bu, slot) };
        self.builders[bu.index()].handle_storing(slot, self.now);
        self.storing.insert((bu, slot));
        let longest = longest.as_nanos() as u64;
        let stalls = self.random.one_in(8);
        let time = self.random.below(if stalls { longest } else { longest / 100 });
        self.at(self.now + Duration::from_nanos(time), SimEvent::Stored { bu, slot });
    }

    /// The accepted events of a batch are stored.
    fn stored(&mut self, bu: BuIndex, slot: SlotIndex) {
        if self.storing.remove(&(bu, slot)) {
            self.done(bu, slot);
        }
    }

    /// A builder unit that drains waits for storage, however long that takes.
    fn drain_storage(&mut self, bu: BuIndex) {
        if self.builders[bu.index()].is_draining() {
            let waiting: Vec<_> = self.storing.iter().copied().filter(|(of, _)| *of == bu).collect();
            waiting.into_iter().for_each(|(bu, slot)| self.stored(bu, slot));
        }
    }

    /// The kernel is done with a batch, and its accepted events are stored.
    fn done(&mut self, bu: BuIndex, slot: SlotIndex) {
        let assignment = self.monitor.finish(bu, slot);
        let absent = self.absent(bu, slot);
        let mut outcome = self.oracle.outcome_without(&assignment.batch, &absent);
        self.oracle.processed(&assignment.batch, assignment.again);
        if self.scenario.misbehavior == Misbehavior::OutcomeLacksFragment {
            outcome.built.fragments = outcome.built.fragments.saturating_sub(1);
        }
        self.builders[bu.index()].handle_processed(slot, outcome).expect("the slot was being processed");
    }

    /// The readout units whose packets are missing in a slot because they are lost.
    fn absent(&self, bu: BuIndex, slot: SlotIndex) -> Vec<bool> {
        let readouts = (0..self.scenario.plan.readouts()).map(|ru| RuIndex(ru as u16));
        readouts.map(|ru| self.builders[bu.index()].is_absent(slot, ru)).collect()
    }

    /// Takes all output of a unit and schedules its next timeout.
    fn pump(&mut self, unit: Unit) {
        let timeout = match unit {
            Unit::Manager => self.pump_manager(),
            Unit::Readout(ru) => self.pump_readout(ru),
            Unit::Builder(bu) => self.pump_builder(bu),
        };
        match timeout {
            Some(at) if self.wakes.get(&unit) != Some(&at) => {
                self.wakes.insert(unit, at);
                self.at(at.max(self.now), SimEvent::Wake(unit));
            }
            Some(_) => {}
            None => drop(self.wakes.remove(&unit)),
        }
    }

    fn pump_manager(&mut self) -> Option<Instant> {
        self.replicate();
        while let Some(Transmit { to, message }) = self.manager.poll_transmit(self.now) {
            self.transmit(to, message);
            if let (Message::Assign(mut assignment), Misbehavior::AssignTwice) =
                (message, self.scenario.misbehavior)
            {
                assignment.batch.id.0 += 1;
                self.transmit(to, Message::Assign(assignment));
            }
        }
        while let Some(unit) = self.manager.poll_excluded() {
            let grace = 5 * self.scenario.plan.drain_timeout;
            self.at(self.now + grace, SimEvent::Kill(unit));
        }
        while let Some(unit) = self.manager.poll_departed() {
            self.departed.insert(unit);
            self.start_again(unit);
        }
        if let Some(summary) = self.manager.poll_finished() {
            let progress = self.manager.progress();
            let events = self.scenario.plan.events.get();
            let is_complete = progress.done.batches == progress.assigned && progress.done.events() == events;
            if summary.cause == StopCause::EndOfRun && !is_complete {
                self.monitor.violations.push(format!("all of {events} events are done: {progress:?}"));
            }
            self.summary = Some(summary);
        }
        self.manager.poll_timeout()
    }

    /// The standby manager gets what has changed before the units are told.
    fn replicate(&mut self) {
        if let Some(update) = self.manager.poll_replica() {
            self.standby.update(update);
        }
    }

    fn transmit(&mut self, to: Receivers, message: Message) {
        if let Message::Assign(assignment) = &message {
            self.monitor.assign(assignment);
        }
        for unit in self.health.keys().copied().collect::<Vec<_>>() {
            if to.includes(unit) && !self.is(unit, Health::Vacant) {
                self.send(Unit::Manager, unit, message);
            }
        }
    }

    fn pump_readout(&mut self, ru: RuIndex) -> Option<Instant> {
        let unit = Unit::Readout(ru);
        while let Some(send) = self.readouts[ru.index()].poll_send() {
            let assignment = send.assignment;
            let immediate = send.immediate;
            let sent = self.oracle.present(ru, &assignment.batch);
            self.oracle.sent(ru, sent);
            let excess = u32::from(self.scenario.misbehavior == Misbehavior::ReadoutOvercounts);
            let payload = BatchPayload { fragments: sent + excess, bytes: Bytes(u64::from(sent) * 100) };
            self.readouts[ru.index()].handle_posted(send, payload);
            self.post(ru, assignment, immediate, sent);
        }
        while let Some(message) = self.readouts[ru.index()].poll_transmit() {
            self.send(unit, Unit::Manager, message);
        }
        if let Some(mut report) = self.readouts[ru.index()].poll_report() {
            if self.scenario.misbehavior == Misbehavior::ReadoutUndercounts {
                report.fragments_read = report.fragments_read.saturating_sub(1);
            }
            self.reports_in_flight += 1;
            self.after(0, 500_000, SimEvent::ReadoutReport(ru, report));
        }
        self.readouts[ru.index()].poll_timeout()
    }

    /// Packets in flight: they land, then the immediate data arrives, then the sender's work request completes.
    fn post(&mut self, ru: RuIndex, to: Assignment, immediate: Immediate, fragments: u32) {
        let (bu, slot) = (to.builder, to.slot);
        self.monitor.post(ru, bu);
        if self.is(Unit::Builder(bu), Health::Dead) || self.cut.contains(&(ru, bu)) {
            self.after(0, 500_000, SimEvent::Unreachable { ru, bu });
            return;
        }
        let arrival = self.in_order(Unit::Readout(ru), Unit::Builder(bu), true, 200_000);
        let landing =
            self.now + Duration::from_nanos(self.random.below(arrival.since(self.now).as_nanos() as u64 + 1));
        self.at(landing, SimEvent::Land { ru, to });
        self.at(arrival, SimEvent::Arrive { ru, bu, immediate, fragments });
        self.counter += 1;
        if self.scenario.misbehavior == Misbehavior::ArriveTwice && self.counter.is_multiple_of(10) {
            self.at(arrival + Duration::from_nanos(1000), SimEvent::Arrive { ru, bu, immediate, fragments });
        }
        // The sender may poll its completion long after the arrival.
        let wait = Duration::from_nanos(self.delay(0, 100_000));
        let polled = self.last.entry((Unit::Builder(bu), Unit::Readout(ru), true)).or_default();
        *polled = (arrival + wait).max(*polled + Duration::from_nanos(1));
        let completion = *polled;
        self.at(completion, SimEvent::Complete { ru, bu, slot });
    }

    fn pump_builder(&mut self, bu: BuIndex) -> Option<Instant> {
        let unit = Unit::Builder(bu);
        while let Some(complete) = self.builders[bu.index()].poll_complete_batch() {
            let absent = self.absent(bu, complete.slot);
            self.monitor.process(bu, complete.slot, &complete.batch, &absent);
            self.after(1000, 500_000, SimEvent::Process { bu, slot: complete.slot });
        }
        while let Some(message) = self.builders[bu.index()].poll_transmit() {
            self.control_of_builder(unit, message);
        }
        if let Some(report) = self.builders[bu.index()].poll_report() {
            self.reports_in_flight += 1;
            self.after(0, 500_000, SimEvent::BuilderReport(bu, report));
        }
        self.builders[bu.index()].poll_timeout()
    }

    fn control_of_builder(&mut self, unit: Unit, message: Message) {
        self.counter += 1;
        match (message, self.scenario.misbehavior) {
            (Message::Done { .. }, Misbehavior::DoneLost) if self.counter.is_multiple_of(10) => return,
            (Message::Grant { .. }, Misbehavior::GrantTwice) => self.send(unit, Unit::Manager, message),
            (Message::Grant { builder, slot, generation }, Misbehavior::GrantEarly) => {
                let early = Message::Grant { builder, slot, generation: generation.next() };
                self.send(unit, Unit::Manager, message);
                return self.send(unit, Unit::Manager, early);
            }
            (Message::Done { builder, slot, generation, batch, outcome }, Misbehavior::DoneEarly) => {
                let early = Message::Done { builder, slot, generation: generation.next(), batch, outcome };
                self.send(unit, Unit::Manager, message);
                return self.send(unit, Unit::Manager, early);
            }
            _ => {}
        }
        self.send(unit, Unit::Manager, message);
    }
}
