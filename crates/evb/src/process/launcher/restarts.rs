//! Units that the run went on without: their processes are ended, and started again while the plan permits.

use super::{LaunchedRun, RunProcess};
use crate::config::LandingTarget;
use crate::core::Unit;
use crate::process::ProcessError;
use crate::process::child::Child;
use std::time::{Duration, Instant};

/// Number of times that a restart is started until it has joined.
const MAX_JOIN_ATTEMPTS: u32 = 3;
/// Time between them.
const JOIN_INTERVAL: Duration = Duration::from_millis(300);

impl LaunchedRun<'_, '_> {
    /// Whether the manager lets units join.
    pub(super) fn may_join(&self) -> bool {
        let manager = self.running.get(&self.manager_process);
        self.started && self.cause.is_none() && manager.is_some_and(|manager| manager.ended.is_none())
    }

    /// Starts a unit again that the run went on without, once its process has ended.
    pub(super) fn restart(&mut self, unit: Unit) {
        let process = self.running.get(&RunProcess::Unit(unit));
        let has_ended = process.is_some_and(|process| process.ended.is_some());
        if !has_ended || !self.may_join() || !self.departed.remove(&unit) {
            return;
        }
        let plan = &self.config.plan;
        let next = match unit {
            Unit::Manager => None,
            Unit::Readout(ru) => plan.next_readout(ru).map(Unit::Readout),
            Unit::Builder(bu) => plan.next_builder(bu).map(Unit::Builder),
        };
        // Both managers may have named it.
        let next = next.filter(|next| !self.attempts.contains_key(next));
        if let Some(next) = next {
            self.start_restart(next);
        }
    }

    /// Starts the process of a restart. One that cannot be started, for want of memory or processes, counts as one that could not
    /// join: the run goes on without it.
    fn start_restart(&mut self, unit: Unit) {
        *self.attempts.entry(unit).or_default() += 1;
        if let Err(error) = self.spawn_restart(unit) {
            tracing::warn!(%unit, %error, "a unit is not started again");
            self.retry_join(unit);
        }
    }

    /// A builder unit gets a new card process: the one before may hang.
    fn spawn_restart(&mut self, unit: Unit) -> Result<(), ProcessError> {
        let (plan, manager) = (&self.config.plan, self.manager.clone());
        let child = match unit {
            Unit::Manager => return Ok(()),
            Unit::Readout(ru) => Child::Readout { index: plan.readout_role(ru), manager },
            Unit::Builder(bu) => {
                if let LandingTarget::Card(config) = &self.config.builders[bu.index()].landing {
                    if let Some(card) = self.running.get_mut(&RunProcess::Card(config.name.clone())) {
                        card.kill();
                        let _ = card.process.wait();
                    }
                    self.spawn_card(config)?;
                }
                Child::Builder { index: plan.builder_role(bu), manager }
            }
        };
        self.spawn(RunProcess::Unit(unit), &child)
    }

    /// A restart that ended before it joined is started again, as the run may have changed while it joined.
    pub(super) fn retry_join(&mut self, unit: Unit) {
        let attempts = self.attempts.get(&unit).copied().unwrap_or(0);
        if (1..MAX_JOIN_ATTEMPTS).contains(&attempts) && !self.joined.contains(&unit) && self.may_join() {
            self.start_at.push((Instant::now() + JOIN_INTERVAL, unit));
        }
    }

    /// Starts restarts whose time has come.
    pub(super) fn start_due(&mut self) {
        let now = Instant::now();
        let due: Vec<_> = self.start_at.extract_if(.., |(at, _)| *at <= now).collect();
        for (_, unit) in due {
            if self.may_join() {
                self.start_restart(unit);
            }
        }
    }

    /// Kills restarts that have not joined: the manager has ended.
    pub(super) fn kill_joining(&mut self) {
        for (role, running) in &mut self.running {
            if let RunProcess::Unit(unit) = role
                && self.attempts.contains_key(unit)
                && !self.joined.contains(unit)
            {
                running.kill();
            }
        }
    }

    /// Kills the processes of excluded units whose time is up.
    pub(super) fn kill_excluded(&mut self) {
        let now = Instant::now();
        for running in self.running.values_mut() {
            if running.ended.is_none() && running.kill_at.is_some_and(|at| at <= now) {
                running.kill_at = None;
                running.kill();
                let why = "did not respond; the run went on without it, and it was killed";
                running.failure = Some((why.to_owned(), true));
            }
        }
    }
}
