//! Which of a run's events the readout units have, and for which of them the run waits.
//!
//! A batch is assigned when every readout unit has its events. The sources of a unit may fall silent: a front end is
//! switched off, or its last datagrams are lost. Such a unit keeps back the events that the others have. No sockets, no
//! clock: the time is an argument.

use crate::config::{InputConfig, RunConfig};
use crate::core::Instant;
use std::collections::VecDeque;
use std::time::Duration;

/// Time of silence that is reported, if the run waits without limit.
const REPORTED: Duration = Duration::from_secs(10);

/// The events that the current readout units have.
#[derive(Debug)]
pub(super) struct Availability {
    units: Vec<UnitEvents>,
    /// A unit counts as silent after this time.
    limit: Duration,
    /// Whether the run goes on without silent units.
    goes_on: bool,
    changes: VecDeque<(usize, bool)>,
}

#[derive(Debug)]
struct UnitEvents {
    /// Their number, counted from the run's first; [`u64::MAX`] for an input that has all of them.
    events: u64,
    /// Fragments come from front ends.
    has_front_ends: bool,
    /// Since when all events of the unit are assigned and others have later ones.
    awaited_since: Option<Instant>,
    is_silent: bool,
}

impl Availability {
    /// Live inputs have no event before they say so.
    pub(super) fn new(config: &RunConfig) -> Availability {
        let unit = |input: &InputConfig| UnitEvents {
            events: if input.file().is_some() { u64::MAX } else { 0 },
            has_front_ends: matches!(input, InputConfig::Udp(_) | InputConfig::Ring(_)),
            awaited_since: None,
            is_silent: false,
        };
        Availability {
            units: config.readouts.iter().map(|readout| unit(&readout.input)).collect(),
            limit: config.source_timeout.unwrap_or(REPORTED),
            goes_on: config.source_timeout.is_some(),
            changes: VecDeque::new(),
        }
    }

    /// A unit has this number of events.
    pub(super) fn set(&mut self, role: usize, events: u64) {
        let unit = &mut self.units[role];
        if unit.events != events {
            (unit.events, unit.awaited_since) = (events, None);
        }
    }

    /// A unit joins the run after `first` events: its sources have sent others before.
    pub(super) fn join(&mut self, role: usize, first: u64) {
        if self.units[role].events != u64::MAX {
            self.set(role, first);
        }
    }

    /// Number of the run's events that can be assigned, of which `assigned` are. `is_present` tells which units are in the
    /// run.
    ///
    /// Units may start in any order: a unit whose sources have sent nothing yet is waited for without limit.
    pub(super) fn events(&mut self, is_present: impl Fn(usize) -> bool, assigned: u64, now: Instant) -> u64 {
        let live = self.units.iter().enumerate().filter(|(role, _)| is_present(*role));
        let live = live.map(|(_, unit)| unit.events).filter(|events| *events != u64::MAX);
        let latest = live.max().unwrap_or(0);
        let mut all = u64::MAX;
        for (role, unit) in self.units.iter_mut().enumerate() {
            let is_awaited = is_present(role)
                && unit.has_front_ends
                && (1..=assigned).contains(&unit.events)
                && unit.events < latest;
            unit.awaited_since = is_awaited.then(|| unit.awaited_since.unwrap_or(now));
            let is_silent = unit.awaited_since.is_some_and(|since| now >= since + self.limit);
            if is_silent != unit.is_silent {
                unit.is_silent = is_silent;
                self.changes.push_back((role, is_silent));
            }
            if is_present(role) {
                all = all.min(if is_silent && self.goes_on { latest } else { unit.events });
            }
        }
        all
    }

    /// The next unit that has fallen silent (`true`), or is not silent any more.
    pub(super) fn poll_change(&mut self) -> Option<(usize, bool)> {
        self.changes.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(2);

    fn at(seconds: f64) -> Instant {
        Instant::default() + Duration::from_secs_f64(seconds)
    }

    /// A unit with a file, one with a generator, and two with front ends.
    fn availability(goes_on: bool) -> Availability {
        let unit = |events, has_front_ends| UnitEvents {
            events,
            has_front_ends,
            awaited_since: None,
            is_silent: false,
        };
        let units = vec![unit(u64::MAX, false), unit(0, false), unit(0, true), unit(0, true)];
        Availability { units, limit: LIMIT, goes_on, changes: VecDeque::new() }
    }

    fn set(availability: &mut Availability, generator: u64, front_ends: [u64; 2]) {
        let events = [(1, generator), (2, front_ends[0]), (3, front_ends[1])];
        events.into_iter().for_each(|(role, events)| availability.set(role, events));
    }

    #[test]
    fn a_unit_whose_sources_fall_silent_is_not_waited_for() {
        let mut availability = availability(true);
        set(&mut availability, 50, [40, 10]);
        assert_eq!(availability.events(|_| true, 0, at(0.0)), 10);
        // As long as events of the unit itself wait for builder units, its sources keep nothing back.
        assert_eq!(availability.events(|_| true, 9, at(5.0)), 10);
        assert_eq!(availability.events(|_| true, 10, at(6.0)), 10);
        assert_eq!(availability.events(|_| true, 10, at(7.9)), 10);
        assert_eq!(availability.poll_change(), None);
        // The other front end is behind the generator, but keeps nothing back.
        assert_eq!(availability.events(|_| true, 10, at(8.0)), 40);
        assert_eq!((availability.poll_change(), availability.poll_change()), (Some((3, true)), None));
        // It catches up: it is waited for again.
        set(&mut availability, 60, [55, 20]);
        assert_eq!(availability.events(|_| true, 40, at(9.0)), 20);
        assert_eq!(availability.poll_change(), Some((3, false)));
        set(&mut availability, 60, [55, 60]);
        assert_eq!(availability.events(|_| true, 40, at(12.0)), 55);
        assert_eq!(availability.events(|_| true, 55, at(12.0)), 55);
        assert_eq!(availability.poll_change(), None);
    }

    #[test]
    fn the_last_events_are_assigned_although_nothing_comes_for_them() {
        let mut availability = availability(true);
        set(&mut availability, 100, [98, 99]);
        let mut assigned = 0;
        for tenth in 0..60 {
            assigned = availability.events(|_| true, assigned, at(f64::from(tenth) / 10.0));
        }
        assert_eq!(assigned, 100);
    }

    #[test]
    fn a_run_waits_without_limit_before_the_first_fragment_or_by_default() {
        let mut first = availability(true);
        set(&mut first, 50, [50, 0]);
        let mut default = availability(false);
        set(&mut default, 50, [50, 10]);
        for second in 0..100 {
            let now = at(f64::from(second));
            assert_eq!((first.events(|_| true, 0, now), default.events(|_| true, 10, now)), (0, 10));
        }
        // The operator is told which unit keeps the run back.
        assert_eq!((first.poll_change(), default.poll_change()), (None, Some((3, true))));
    }

    #[test]
    fn lost_units_count_for_nothing() {
        let mut availability = availability(true);
        set(&mut availability, 50, [40, 10]);
        assert_eq!(availability.events(|role| role != 3, 0, at(0.0)), 40);
        assert_eq!(availability.events(|role| role != 3, 40, at(1.0)), 40);
        assert_eq!(availability.events(|role| role != 3, 40, at(3.0)), 50);
        assert_eq!((availability.poll_change(), availability.poll_change()), (Some((2, true)), None));
        // A file has all events, and time does not pass in it.
        assert_eq!(availability.events(|role| role == 0, 40, at(9.0)), u64::MAX);
        // A unit that joins again has only later ones.
        availability.join(3, 48);
        availability.join(0, 48);
        assert_eq!(availability.events(|role| role == 0 || role == 3, 40, at(9.0)), 48);
    }
}
