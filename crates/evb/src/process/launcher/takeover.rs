//! The launcher decides that the manager is lost, and orders the standby manager to take over.
//!
//! From then on, messages of the lost manager do not count. It is killed if it is still there after the time in which units
//! stop. Once the standby manager has taken over, a new one is started, as for a standby manager that is lost. `recovery.restarts`
//! bounds their number.

use super::{LaunchedRun, RunProcess};
use crate::core::Unit;
use crate::process::ProcessError;
use crate::process::child::Child;
use crate::process::commands::ManagerCommand;
use std::io::Write;
use std::time::{Duration, Instant};

impl LaunchedRun<'_, '_> {
    /// When a manager without a message counts as silent. It reports progress many times in its timeout.
    pub(super) fn silent_at(&self) -> Instant {
        let grace = if self.can_take_over() { Duration::ZERO } else { self.grace() };
        self.manager_alive + self.config.plan.timeout + grace
    }

    /// The standby manager that was started last, unless it is the manager.
    fn standby(&self) -> Option<RunProcess> {
        let last = self.outcome.standbys.checked_sub(1).map(RunProcess::Standby);
        last.filter(|standby| *standby != self.manager_process)
    }

    /// Starts a standby manager, which joins the manager.
    pub(super) fn spawn_standby(&mut self) -> Result<(), ProcessError> {
        let role = RunProcess::Standby(self.outcome.standbys);
        self.outcome.standbys += 1;
        self.spawn(role, &Child::Standby { manager: self.manager.clone() })
    }

    /// Starts another standby manager while the plan permits.
    pub(super) fn start_standby(&mut self) {
        self.standby_address = None;
        let recovery = &self.config.plan.recovery;
        let may_start = recovery.has_standby() && self.outcome.standbys <= recovery.restarts;
        if may_start
            && self.may_join()
            && !self.is_stopping
            && let Err(error) = self.spawn_standby()
        {
            tracing::warn!(%error, "the run goes on without a standby manager");
        }
    }

    /// A process ended: if it was a standby manager that had not taken over, another one is started.
    pub(super) fn replace_standby(&mut self, ended: &RunProcess) {
        if self.standby().as_ref() == Some(ended) {
            self.start_standby();
        }
    }

    /// The standby manager there takes no message: its process is killed, and its end is handled as any other.
    pub(super) fn end_standby(&mut self, address: &str) {
        if self.standby_address.as_deref() != Some(address) {
            return;
        }
        self.standby_address = None;
        if let Some(standby) = self.standby().and_then(|standby| self.running.get_mut(&standby))
            && standby.ended.is_none()
        {
            standby.kill();
            standby.failure = Some(("did not respond and was killed".to_owned(), true));
        }
    }

    /// Whether there is a standby manager that has joined, and has not taken over.
    fn can_take_over(&self) -> bool {
        let standby = self.standby().and_then(|standby| self.running.get(&standby));
        self.started
            && self.cause.is_none()
            && !self.is_stopping
            && self.standby_address.is_some()
            && standby.is_some_and(|standby| standby.ended.is_none() && standby.parent_pipe.is_some())
    }

    /// The manager ended or is silent: the standby manager takes over. False if it cannot.
    pub(super) fn take_over(&mut self) -> bool {
        if !self.can_take_over() {
            return false;
        }
        let kill_at = Instant::now() + self.grace();
        let Some(role) = self.standby() else { return false };
        // It has no stream to a unit that ended before it connected.
        let units = self.running.iter().filter(|(_, running)| running.ended.is_some());
        let ended = units.filter_map(|(role, _)| match role {
            RunProcess::Unit(unit) if *unit != Unit::Manager => Some(ManagerCommand::Ended(*unit).line()),
            _ => None,
        });
        let lines: String = ended.chain([ManagerCommand::TakeOver.line()]).collect();
        let Some(standby) = self.running.get_mut(&role) else { return false };
        let ordered = standby.parent_pipe.as_mut().map(|pipe| pipe.write_all(lines.as_bytes()));
        if !matches!(ordered, Some(Ok(()))) {
            return false;
        }
        tracing::warn!("the event manager is lost; the standby manager takes over");
        let lost = std::mem::replace(&mut self.manager_process, role);
        self.standby_address = None;
        // It says nothing before it has taken over.
        self.manager_alive = Instant::now() + self.config.plan.recovery.takeover_timeout;
        if let Some(lost) = self.running.get_mut(&lost) {
            lost.kill_at = Some(kill_at);
        }
        // They were joining the lost manager. The new one names the units that may join again.
        self.kill_joining();
        self.attempts.retain(|unit, _| self.joined.contains(unit));
        self.start_at.clear();
        true
    }
}
