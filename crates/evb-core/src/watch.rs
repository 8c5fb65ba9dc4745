//! A unit's view of the manager: the term that it follows, and how long it waits for the next one.
//!
//! A unit follows one term at a time and ignores messages of any other. If the manager ends or is silent, and there is a
//! standby manager, the unit keeps its work and waits for the next term. Without one, or when the wait is over, it stops.

use super::plan::Plan;
use super::types::{Instant, Term};
use std::time::Duration;

/// The manager as a unit sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ManagerWatch {
    term: Term,
    /// When the manager counts as lost, or when the wait for the next one is over.
    until: Instant,
    is_waiting: bool,
    has_standby: bool,
    timeout: Duration,
    takeover_timeout: Duration,
}

impl ManagerWatch {
    /// Follows that term.
    pub(crate) fn new(plan: &Plan, term: Term, now: Instant) -> ManagerWatch {
        ManagerWatch {
            term,
            until: now + plan.timeout,
            is_waiting: false,
            has_standby: plan.recovery.has_standby(),
            timeout: plan.timeout,
            takeover_timeout: plan.recovery.takeover_timeout,
        }
    }

    /// Whether a message of that term counts. It shows that the manager is there.
    pub(crate) fn heard(&mut self, term: Term, now: Instant) -> bool {
        if term != self.term {
            return false;
        }
        (self.until, self.is_waiting) = (now + self.timeout, false);
        true
    }

    /// The manager ended. Returns whether the unit has to stop.
    pub(crate) fn manager_lost(&mut self, now: Instant) -> bool {
        if self.has_standby && !self.is_waiting {
            (self.until, self.is_waiting) = (now + self.takeover_timeout, true);
        }
        !self.has_standby
    }

    /// The standby manager ended. Returns whether the unit has to stop.
    pub(crate) fn standby_lost(&mut self) -> bool {
        self.has_standby = false;
        self.is_waiting
    }

    /// The manager has named a new standby manager: both are there.
    pub(crate) fn standby_joined(&mut self, now: Instant) {
        self.has_standby = true;
        (self.until, self.is_waiting) = (now + self.timeout, false);
    }

    /// The time may be over. Returns whether the unit has to stop.
    pub(crate) fn handle_timeout(&mut self, now: Instant) -> bool {
        if self.until > now {
            return false;
        }
        self.is_waiting || self.manager_lost(now)
    }

    /// Follows a later term, and waits for its manager, which sends nothing until it has the state of all units.
    pub(crate) fn begin_term(&mut self, term: Term, now: Instant) -> bool {
        if term <= self.term {
            return false;
        }
        self.term = term;
        self.has_standby = false;
        (self.until, self.is_waiting) = (now + self.takeover_timeout.max(self.timeout), true);
        true
    }

    /// The term that the unit follows.
    pub(crate) fn term(&self) -> Term {
        self.term
    }

    /// Whether the unit waits for a manager: it sends nothing and excludes nobody.
    pub(crate) fn is_waiting(&self) -> bool {
        self.is_waiting
    }

    /// When [`handle_timeout`](Self::handle_timeout) has to be called.
    pub(crate) fn due(&self) -> Instant {
        self.until
    }
}

#[cfg(test)]
mod tests {
    use super::super::plan::small;
    use super::*;

    const NOW: Instant = Instant::from_nanos(1_000);
    const NEXT: Term = Term(2);

    fn watch(takeover_ms: u64) -> ManagerWatch {
        let mut plan = small(&[2], &[1], 10, 4);
        plan.recovery.takeover_timeout = Duration::from_millis(takeover_ms);
        ManagerWatch::new(&plan, Term::FIRST, NOW)
    }

    #[test]
    fn without_a_standby_a_lost_manager_stops_the_unit() {
        let mut watch = watch(0);
        assert!(!watch.handle_timeout(NOW) && watch.handle_timeout(watch.due()) && watch.manager_lost(NOW));
    }

    #[test]
    fn a_unit_waits_for_the_next_term_and_no_longer() {
        let mut watch = watch(400);
        let silent = watch.due();
        assert!(!watch.handle_timeout(silent) && watch.is_waiting());
        // The end of the stream does not prolong the wait.
        assert!(!watch.manager_lost(silent + Duration::from_millis(1)));
        assert_eq!(watch.due(), silent + Duration::from_millis(400));
        assert!(watch.handle_timeout(watch.due()));
        assert!(watch.begin_term(NEXT, silent) && watch.is_waiting());
        assert!(watch.heard(NEXT, silent) && !watch.is_waiting());
        // Its manager has no standby.
        assert!(watch.manager_lost(silent));
    }

    #[test]
    fn with_a_new_standby_a_unit_waits_for_a_further_term() {
        let mut watch = watch(400);
        assert!(!watch.manager_lost(NOW) && watch.begin_term(NEXT, NOW));
        watch.standby_joined(NOW);
        assert!(!watch.is_waiting() && watch.due() == NOW + Duration::from_millis(100));
        assert!(!watch.manager_lost(NOW) && watch.is_waiting());
        assert_eq!(watch.due(), NOW + Duration::from_millis(400));
        assert!(watch.begin_term(NEXT.next(), NOW) && watch.heard(NEXT.next(), NOW));
        assert!(watch.manager_lost(NOW));
    }

    #[test]
    fn messages_of_another_term_do_not_count() {
        let mut watch = watch(400);
        assert!(watch.heard(Term::FIRST, NOW) && !watch.heard(NEXT, NOW));
        assert!(watch.begin_term(NEXT, NOW) && !watch.begin_term(Term::FIRST, NOW));
        assert!(!watch.begin_term(NEXT, NOW));
        let due = watch.due();
        assert!(!watch.heard(Term::FIRST, NOW + Duration::from_secs(1)) && watch.due() == due);
    }

    #[test]
    fn a_manager_that_is_late_goes_on() {
        let mut watch = watch(400);
        assert!(!watch.handle_timeout(watch.due()));
        let late = NOW + Duration::from_millis(200);
        assert!(watch.heard(Term::FIRST, late) && !watch.is_waiting());
        assert_eq!(watch.due(), late + Duration::from_millis(100));
    }

    #[test]
    fn without_its_standby_a_waiting_unit_stops() {
        let mut waiting = watch(400);
        assert!(!waiting.manager_lost(NOW) && waiting.standby_lost());
        let mut following = watch(400);
        assert!(!following.standby_lost() && following.manager_lost(NOW));
    }
}
