//! The end of a run: the processes that are left, and the summary from all reports.

use super::error_lines::ErrorLines;
use super::{ChildOutput, ChildProcess, LaunchedRun, ProcessFailure, RunEvent, RunProcess};
use crate::config::LandingTarget;
use crate::core::{BuIndex, ReportMerger, StopCause, Unit};
use crate::process::child::ChildMessage;
use crate::process::manager::ManagerEvent;
use std::collections::HashSet;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

impl LaunchedRun<'_, '_> {
    /// Ends the remaining processes and makes the summary of the run.
    pub(super) fn end(&mut self) {
        let mut exits = Vec::new();
        let units: HashSet<RunProcess> =
            self.running.keys().filter(|role| self.is_unit(role)).cloned().collect();
        for (role, running) in &mut self.running {
            // Cards and a standby manager end with their standard input; units had their time.
            running.parent_pipe = None;
            if units.contains(role) && running.ended.is_none() {
                running.kill();
                running.failure = Some(("did not end in time and was killed".to_owned(), true));
            }
        }
        for (role, running) in &mut self.running {
            if let Ok(status) = wait_or_kill(running) {
                exits.push((role.clone(), status));
            }
        }
        self.take_last_messages();
        let mut failures = Vec::new();
        for (role, status) in exits {
            let Some(running) = self.running.remove(&role) else { continue };
            let last = running.errors.map(ErrorLines::take).unwrap_or_default();
            if status.success() {
                continue;
            }
            let (reason, is_secondary) = running.failure.unwrap_or((last, false));
            let rank = (is_secondary, running.ended.unwrap_or(usize::MAX));
            failures.push((rank, ProcessFailure { process: role, status, reason, is_recovered: false }));
        }
        // Standard error has been read to its end.
        while let Ok(output) = self.outputs.try_recv() {
            if let ChildOutput::ErrorLine(process, line) = output {
                self.notify(&RunEvent::ErrorLine { process, line });
            }
        }
        failures.sort_by_key(|(rank, _)| *rank);
        self.outcome.failures = failures.into_iter().map(|(_, failure)| failure).collect();
        if self.started {
            self.merge_reports();
        }
        let recovered = self.outcome.summary.as_ref().map_or(&[][..], |summary| &summary.recovered);
        for failure in &mut self.outcome.failures {
            failure.is_recovered = match &failure.process {
                // The run did not need it, or another one took over from it.
                RunProcess::Standby(_) => failure.process != self.manager_process,
                // A restart that did not join is none of the run's units.
                RunProcess::Unit(unit) => {
                    recovered.contains(unit)
                        || self.attempts.contains_key(unit) && !self.joined.contains(unit)
                }
                RunProcess::Card(card) => (0..).zip(&self.config.builders).any(|(bu, builder)| {
                    matches!(&builder.landing, LandingTarget::Card(config) if config.name == *card)
                        && recovered.contains(&Unit::Builder(BuIndex(bu)))
                }),
            };
        }
    }

    /// Makes the summary of the run. Reports that came too late for the manager count as well.
    pub(super) fn merge_reports(&mut self) {
        let cause = self.cause.unwrap_or(StopCause::Lost(Unit::Manager));
        for bu in &self.superseded {
            self.reports.builders[bu.index()] = None;
        }
        let own = self.reports.builders.iter().map(|report| Some(report.as_ref()?.done));
        // The manager knows which batches a lost unit had done.
        let views = self.reports.manager.iter().flat_map(|manager| &manager.builders);
        let known: Vec<_> = views.map(|view| Some(view.done)).collect();
        self.outcome.totals =
            own.enumerate().map(|(bu, own)| own.or(known.get(bu).copied().flatten())).collect();
        self.outcome.readouts.clone_from(&self.reports.readouts);
        let merger = ReportMerger::of(self.config.plan.clone(), self.reports.clone());
        self.outcome.summary = Some(merger.summary(cause));
    }

    /// Handles the last messages of the children, which have all ended.
    pub(super) fn take_last_messages(&mut self) {
        while self.running.values().any(|running| running.ended.is_none()) {
            match self.outputs.recv_timeout(Duration::from_secs(1)) {
                // No further process is started.
                Ok(ChildOutput::Message(_, message))
                    if matches!(*message, ChildMessage::Manager(ManagerEvent::Listening { .. })) => {}
                Ok(ChildOutput::Message(role, message)) => {
                    let _ = self.take(&role, *message);
                }
                Ok(ChildOutput::Ended(role, pid)) => _ = self.record_end(&role, pid),
                Ok(ChildOutput::ErrorLine(process, line)) => {
                    self.notify(&RunEvent::ErrorLine { process, line });
                }
                Ok(ChildOutput::Command(_)) => {}
                Err(_) => return,
            }
        }
    }
}

/// Waits for a card to end after its standard input was closed; then kills it.
fn wait_or_kill(running: &mut ChildProcess) -> std::io::Result<ExitStatus> {
    let until = Instant::now() + Duration::from_secs(2);
    while !running.has_exited() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(2));
    }
    if running.ended.is_none() || !running.has_exited() {
        // Also what it has started.
        running.kill();
    }
    running.process.wait()
}
