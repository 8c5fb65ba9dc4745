//! The standby manager and those that follow it, and former managers that continue.

use super::{Health, Sim, SimEvent};
use millstream_evb::core::manager::{Manager, Transmit};
use millstream_evb::core::recovery::Membership;
use millstream_evb::core::takeover::{BuilderState, ManagerReplica, ReadoutState, ReplicaUpdate, UnitStates};
use millstream_evb::core::{BuIndex, Instant, Message, RuIndex, Term, Unit};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// What happens to the standby manager, or because of it.
#[derive(Debug)]
pub enum StandbyEvent {
    /// The launcher noticed that the manager is lost.
    Promote,
    /// The new term reaches a unit.
    NewTerm(Unit, Membership),
    /// The state of a readout unit reaches the standby manager.
    Readout(RuIndex, ReadoutState),
    /// The state of a builder unit reaches the standby manager.
    Builder(BuIndex, BuilderState),
    /// The standby manager notices the end of a unit.
    Ended(Unit),
    /// The standby manager has waited long enough for the units.
    Deadline(Term),
    /// A unit refuses the new term.
    GiveUp,
    /// A new standby manager is ready to join.
    Start,
    /// The manager's message that names the standby manager with that number reaches a unit.
    Named(Unit, u16),
    /// A unit notices the end of the standby manager with that number.
    Closed(Unit, u16),
    /// The manager of that term continues.
    WakeDeposed(Term),
}

/// What the last standby manager does.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// It has ended, is the manager, or has not joined.
    Absent,
    /// It has joined and can take over.
    Ready,
    /// It collects the states of the units.
    TakingOver,
}

/// A unit's stream to a standby manager.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Link {
    /// The number of the standby manager.
    number: u16,
    /// Whether the unit has handled the manager's message that names it.
    is_made: bool,
    /// Whether it is the unit's manager.
    is_followed: bool,
}

/// A manager whose run another one has taken over.
struct Deposed {
    manager: Manager,
    is_awake: bool,
}

/// The standby manager's side.
pub struct Standby {
    /// The number of the last standby manager.
    number: u16,
    state: State,
    /// Its copy of the manager.
    replica: Option<ManagerReplica>,
    links: BTreeMap<Unit, Link>,
    /// The term that each unit follows.
    terms: BTreeMap<Unit, Term>,
    states: UnitStates,
    /// The term of the present manager, or of the takeover in progress.
    term: Term,
    /// The units whose states the takeover in progress needs.
    waits_for: BTreeSet<Unit>,
    takeovers: u32,
    is_refused: bool,
    deposed: BTreeMap<Term, Deposed>,
    /// Lost units that the present manager knows.
    noticed: BTreeSet<Unit>,
    /// Since when the manager is stopped.
    silent_since: Option<Instant>,
}

impl Standby {
    /// A standby manager at the start of a run.
    pub fn new(units: &[Unit]) -> Standby {
        let link = Link { number: 0, is_made: true, is_followed: false };
        Standby {
            number: 0,
            state: State::Ready,
            replica: None,
            links: units.iter().map(|&unit| (unit, link)).collect(),
            terms: units.iter().map(|&unit| (unit, Term::FIRST)).collect(),
            states: UnitStates::default(),
            term: Term::FIRST,
            waits_for: BTreeSet::new(),
            takeovers: 0,
            is_refused: false,
            deposed: BTreeMap::new(),
            noticed: BTreeSet::new(),
            silent_since: None,
        }
    }

    /// What the manager sends, if there is a standby manager.
    pub fn update(&mut self, update: ReplicaUpdate) {
        if self.state != State::Ready {
            return;
        }
        match update {
            ReplicaUpdate::Whole(replica) => self.replica = Some(*replica),
            ReplicaUpdate::Done(done) => {
                let replica = self.replica.as_mut().expect("the manager sends a copy first");
                done.iter().for_each(|batch| replica.add_done(batch));
            }
        }
    }

    /// The term that a unit follows.
    pub fn term_of(&self, unit: Unit) -> Term {
        self.terms[&unit]
    }

    /// The term of the present manager.
    pub fn term(&self) -> Term {
        self.term
    }

    /// How many standby managers took over.
    pub fn takeovers(&self) -> u32 {
        self.takeovers
    }

    /// Whether one refused the run.
    pub fn is_refused(&self) -> bool {
        self.is_refused
    }

    /// A unit joined the run. Returns whether it is connected to a standby manager.
    pub fn joined(&mut self, unit: Unit, term: Term) -> bool {
        self.terms.insert(unit, term);
        self.links.insert(unit, Link { number: self.number, is_made: true, is_followed: false });
        self.state == State::Ready
    }

    /// The present manager notices the end of a unit. False if it knows already.
    pub fn is_noticed(&mut self, unit: Unit) -> bool {
        self.noticed.insert(unit)
    }

    /// Whether a manager has taken over the run of that term.
    fn is_replaced(&self, term: Term) -> bool {
        term.0 <= self.takeovers
    }
}

impl Sim {
    fn has_standby(&self) -> bool {
        self.scenario.plan.recovery.has_standby()
    }

    /// The manager is stopped: the launcher notices that it is silent.
    pub(super) fn watch_manager(&mut self, unit: Unit) {
        if unit == Unit::Manager && self.has_standby() {
            self.standby.silent_since = Some(self.now);
            let late = Duration::from_nanos(self.random.below(2_000_000));
            let at = self.now + self.scenario.plan.timeout + late;
            self.at(at, SimEvent::Standby(StandbyEvent::Promote));
        }
    }

    /// A message of a unit that follows another term than that of the present manager.
    pub(super) fn reach_deposed(&mut self, from: Unit, term: Term, message: Message) {
        if let Some(Deposed { manager, is_awake: true }) = self.standby.deposed.get_mut(&term) {
            manager.handle_message(from, message, self.now);
            if !self.standby.is_replaced(term) {
                self.monitor.reaches_manager(&message);
            }
            self.pump_deposed(term);
        }
    }

    /// The former manager does not know that it is one.
    fn pump_deposed(&mut self, term: Term) {
        let Some(mut deposed) = self.standby.deposed.remove(&term) else { return };
        let units: Vec<Unit> = self.health.keys().copied().collect();
        while let Some(Transmit { to, message }) = deposed.manager.poll_transmit(self.now) {
            // Units that the new term has not reached take it.
            if let Message::Assign(assignment) = &message
                && !self.standby.is_replaced(term)
            {
                self.monitor.assign(assignment);
            }
            for &unit in units.iter().filter(|unit| to.includes(**unit)) {
                self.send_in_term(term, Unit::Manager, unit, message);
            }
        }
        self.standby.deposed.insert(term, deposed);
    }

    pub(super) fn handle_standby(&mut self, event: SimEvent) {
        let SimEvent::Standby(event) = event else { return };
        match event {
            StandbyEvent::Promote => self.promote(),
            StandbyEvent::NewTerm(to, membership) => self.begin_term(to, &membership),
            StandbyEvent::Readout(ru, state) => {
                self.standby.states.readouts.insert(ru, state);
                self.take_over_if_complete(Unit::Readout(ru));
            }
            StandbyEvent::Builder(bu, state) => {
                self.standby.states.builders.insert(bu, state);
                self.take_over_if_complete(Unit::Builder(bu));
            }
            StandbyEvent::Ended(unit) => self.take_over_if_complete(unit),
            StandbyEvent::Deadline(term) if term == self.standby.term => self.take_over_without_the_rest(),
            StandbyEvent::Deadline(_) => {}
            StandbyEvent::GiveUp => self.give_up(),
            StandbyEvent::Start => self.join_standby(),
            StandbyEvent::Named(to, number) if self.standby.links[&to].number == number => self.connect(to),
            StandbyEvent::Named(..) => {}
            StandbyEvent::Closed(to, number) => self.close(to, number),
            StandbyEvent::WakeDeposed(term) => self.wake_deposed(term),
        }
    }

    /// The launcher starts another standby manager, which joins after a random time.
    fn start_standby(&mut self) {
        if self.standby.number < self.scenario.plan.recovery.restarts {
            self.after(50_000, 2_000_000, SimEvent::Standby(StandbyEvent::Start));
        }
    }

    /// A standby manager joins the run: it gets a copy, and the manager names it to the units.
    fn join_standby(&mut self) {
        if let Some(&until) = self.paused.get(&Unit::Manager)
            && self.now < until
        {
            return self.at(until, SimEvent::Standby(StandbyEvent::Start));
        }
        if !self.is(Unit::Manager, Health::Alive) || !self.manager.admits_standby() {
            return;
        }
        self.standby.number += 1;
        self.standby.state = State::Ready;
        self.manager.handle_standby_joined();
        self.replicate();
        let number = self.standby.number;
        for unit in self.health.keys().copied().collect::<Vec<_>>() {
            if unit != Unit::Manager && !self.is(unit, Health::Vacant) && !self.manager.is_recovered(unit) {
                self.standby.links.insert(unit, Link { number, is_made: false, is_followed: false });
                self.after(0, 500_000, SimEvent::Standby(StandbyEvent::Named(unit, number)));
            }
        }
        self.pump(Unit::Manager);
    }

    /// A unit connects to the standby manager that the manager has named, if it has not done so.
    pub(super) fn connect(&mut self, unit: Unit) {
        let is_there = self.standby.state != State::Absent;
        let number = self.standby.number;
        let Some(link) = self.standby.links.get_mut(&unit).filter(|link| !link.is_made) else { return };
        link.is_made = true;
        let is_there = is_there && link.number == number;
        let now = self.now;
        match unit {
            Unit::Readout(ru) if is_there => self.readouts[ru.index()].handle_standby_joined(now),
            Unit::Builder(bu) if is_there => self.builders[bu.index()].handle_standby_joined(now),
            Unit::Readout(ru) => self.readouts[ru.index()].handle_standby_lost(now),
            Unit::Builder(bu) => self.builders[bu.index()].handle_standby_lost(now),
            Unit::Manager => {}
        }
    }

    /// The stream of a unit to a standby manager ends.
    fn close(&mut self, unit: Unit, number: u16) {
        let link = self.standby.links[&unit];
        let now = self.now;
        match unit {
            _ if link.number != number || !link.is_made => {}
            Unit::Readout(ru) if link.is_followed => self.readouts[ru.index()].handle_manager_lost(now),
            Unit::Builder(bu) if link.is_followed => self.builders[bu.index()].handle_manager_lost(now),
            Unit::Readout(ru) => self.readouts[ru.index()].handle_standby_lost(now),
            Unit::Builder(bu) => self.builders[bu.index()].handle_standby_lost(now),
            Unit::Manager => {}
        }
    }

    /// The standby manager ends. Another one is started, unless it was taking over.
    pub(super) fn lose_standby(&mut self) {
        match self.standby.state {
            State::Absent => {}
            State::TakingOver => self.give_up(),
            State::Ready => {
                (self.standby.state, self.standby.replica) = (State::Absent, None);
                self.close_all();
                self.start_standby();
            }
        }
    }

    fn close_all(&mut self) {
        let number = self.standby.number;
        for unit in self.health.keys().copied().collect::<Vec<_>>() {
            self.after(0, 500_000, SimEvent::Standby(StandbyEvent::Closed(unit, number)));
        }
    }

    /// The launcher lets the standby manager take over.
    fn promote(&mut self) {
        let silent_at = self.standby.silent_since.map(|since| since + self.scenario.plan.timeout);
        let is_silent = silent_at.is_some_and(|at| at <= self.now);
        let is_gone = self.is(Unit::Manager, Health::Dead)
            || is_silent && (self.is_paused() || self.is(Unit::Manager, Health::Stalled));
        if !self.has_standby() || !is_gone || self.standby.state != State::Ready || self.summary.is_some() {
            return;
        }
        let placeholder = Manager::new(self.scenario.plan.clone(), self.now);
        let former = std::mem::replace(&mut self.manager, placeholder);
        if self.health.insert(Unit::Manager, Health::Dead) != Some(Health::Dead) {
            let deposed = Deposed { manager: former, is_awake: false };
            self.standby.deposed.insert(self.standby.term, deposed);
        }
        if let Some(until) = self.paused.remove(&Unit::Manager) {
            self.at(until, SimEvent::Standby(StandbyEvent::WakeDeposed(self.standby.term)));
        }
        self.wakes.remove(&Unit::Manager);
        (self.standby.state, self.standby.silent_since) = (State::TakingOver, None);
        self.standby.term = self.standby.term.next();
        self.standby.states = UnitStates::default();
        let replica = self.standby.replica.clone().expect("the manager sends a copy first");
        let units = replica.units(self.builders.len());
        for &unit in &units {
            let membership = Membership { term: self.standby.term, ..replica.membership.clone() };
            self.after(0, 1_000_000, SimEvent::Standby(StandbyEvent::NewTerm(unit, membership)));
            if self.is(unit, Health::Dead) {
                self.after(0, 1_000_000, SimEvent::Standby(StandbyEvent::Ended(unit)));
            }
        }
        self.standby.waits_for = units.into_iter().collect();
        // The other half is for the units, which wait for the manager of the new term.
        let until = self.now + self.scenario.plan.recovery.takeover_timeout / 2;
        self.at(until, SimEvent::Standby(StandbyEvent::Deadline(self.standby.term)));
    }

    /// A unit ends during a takeover.
    pub(super) fn close_stream_to_standby(&mut self, unit: Unit) {
        if self.standby.state == State::TakingOver {
            self.after(0, 1_000_000, SimEvent::Standby(StandbyEvent::Ended(unit)));
        }
    }

    /// The new term reaches a unit, which has connected to the standby manager before.
    fn begin_term(&mut self, unit: Unit, membership: &Membership) {
        self.connect(unit);
        let now = self.now;
        let answer = match unit {
            Unit::Manager => None,
            Unit::Readout(ru) => {
                let state = self.readouts[ru.index()].handle_new_term(membership, now);
                state.map(|state| StandbyEvent::Readout(ru, state))
            }
            Unit::Builder(bu) => {
                let state = self.builders[bu.index()].handle_new_term(membership, now);
                state.map(|state| StandbyEvent::Builder(bu, state))
            }
        };
        if answer.is_some() {
            self.standby.terms.insert(unit, membership.term);
            self.standby.links.entry(unit).and_modify(|link| link.is_followed = true);
        }
        self.after(0, 1_000_000, SimEvent::Standby(answer.unwrap_or(StandbyEvent::GiveUp)));
    }

    fn take_over_if_complete(&mut self, from: Unit) {
        self.standby.waits_for.remove(&from);
        if self.standby.waits_for.is_empty() {
            self.take_over_without_the_rest();
        }
    }

    /// The units that have not sent their state are lost with the manager.
    fn take_over_without_the_rest(&mut self) {
        if self.standby.state != State::TakingOver {
            return;
        }
        let replica = self.standby.replica.clone().expect("the takeover began with it");
        let plan = self.scenario.plan.clone();
        match Manager::resume(plan, &replica, &self.standby.states, self.standby.term, self.now) {
            Err(_) => {
                self.standby.is_refused = true;
                self.give_up();
            }
            Ok(manager) => {
                self.manager = manager;
                (self.standby.state, self.standby.replica) = (State::Absent, None);
                self.standby.takeovers += 1;
                self.health.insert(Unit::Manager, Health::Alive);
                self.standby.states.builders.keys().for_each(|&bu| self.monitor.take_over(bu));
                if self.scenario.interval.is_some() {
                    self.manager.handle_available(self.available, self.now);
                }
                self.standby.noticed = replica.recovered.iter().copied().collect();
                let excluding: Vec<Unit> =
                    replica.excluding.iter().map(|&builder| Unit::Builder(builder)).collect();
                self.standby.noticed.retain(|unit| !excluding.contains(unit));
                for unit in replica.units(self.builders.len()).into_iter().chain(excluding) {
                    if self.is(unit, Health::Dead) && self.standby.is_noticed(unit) {
                        self.manager.handle_lost(unit, self.now);
                    }
                }
                self.start_standby();
                self.pump(Unit::Manager);
            }
        }
    }

    /// The standby manager ends during the takeover.
    fn give_up(&mut self) {
        if self.standby.state == State::TakingOver {
            self.standby.state = State::Absent;
            self.close_all();
        }
    }

    /// The former manager goes on where it was, and then notices that the units have closed their streams.
    fn wake_deposed(&mut self, term: Term) {
        let Some(deposed) = self.standby.deposed.get_mut(&term) else { return };
        deposed.is_awake = true;
        self.pump_deposed(term);
        let Some(deposed) = self.standby.deposed.get_mut(&term) else { return };
        deposed.manager.handle_timeout(self.now);
        for unit in self.health.keys().copied().collect::<Vec<_>>() {
            deposed.manager.handle_lost(unit, self.now);
        }
        self.pump_deposed(term);
    }
}
