//! Counts over all runs of this process.

use crate::logbook::RunResult;
use crate::status::RunProgress;
use millstream_report::{FragmentOutcome, RunReport};
use serde_json::Value as Json;

/// Counts over all runs of this process, for metrics.
#[derive(Clone, Copy, Debug, Default)]
pub struct Totals {
    /// Runs by result: complete, stopped, failed.
    pub runs: [u64; 3],
    /// Events built in runs that have ended.
    pub events_built: u64,
    /// Events accepted in runs that have ended.
    pub events_accepted: u64,
    /// Events incomplete in runs that have ended.
    pub events_incomplete: u64,
    /// Events discarded in runs that have ended.
    pub events_discarded: u64,
    /// Faults.
    pub faults: u64,
}

impl Totals {
    /// Adds a run that has ended. Its counts were already shown with its last progress, so they are at least that large.
    pub(crate) fn add(&mut self, result: RunResult, progress: &RunProgress, report: Option<&RunReport>) {
        match result {
            RunResult::Complete => self.runs[0] += 1,
            RunResult::Stopped => self.runs[1] += 1,
            RunResult::Failed | RunResult::Lost => self.runs[2] += 1,
        }
        self.events_built += progress.events_built.max(report.map_or(0, |report| report.events));
        self.events_accepted +=
            progress.events_accepted.max(report.map_or(0, |report| report.accepted_events));
        let events = |outcome| -> u64 {
            report.map_or(0, |report| report.fragment_accounting.of(outcome).map(|count| count.events).sum())
        };
        self.events_incomplete += progress.events_incomplete.max(events(FragmentOutcome::Incomplete));
        self.events_discarded += progress.events_corrupt.max(events(FragmentOutcome::Discarded));
    }
}

/// The account of a run for the log book.
pub(crate) fn account(report: &RunReport) -> Json {
    let accounting = &report.fragment_accounting;
    serde_json::json!({
        "duration_s": report.duration_s,
        "events_built": report.events,
        "events_accepted": report.accepted_events,
        "events_stored": report.stored_events,
        "fragments_read": accounting.fragments_read,
        "outcomes": accounting.outcomes,
        "consistent": accounting.is_consistent(),
    })
}
