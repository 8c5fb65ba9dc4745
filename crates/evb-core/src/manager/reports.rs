//! The final reports of the units, and the account that the manager makes of them.

use super::{Manager, Slot};
use crate::merge::ReportMerger;
use crate::report::{BuilderView, ManagerReport, RunReports, UnfinishedBatch};
use crate::summary::RunSummary;
use crate::types::{BuIndex, SlotIndex};

/// The final report of a unit.
#[derive(Debug)]
pub(super) enum PendingReport<Report> {
    /// The unit is a restart that has not joined.
    Vacant,
    Awaited,
    Received(Report),
    /// The unit died or did not report in time.
    Lost,
}

impl<Report> PendingReport<Report> {
    pub(super) fn is_awaited(&self) -> bool {
        matches!(self, PendingReport::Awaited)
    }

    /// Whether the unit is not there, and has not reported.
    pub(super) fn is_lost(&self) -> bool {
        matches!(self, PendingReport::Lost | PendingReport::Vacant)
    }

    /// Stores a report. A report after the bound is exact all the same, so the unit no longer counts as lost.
    pub(super) fn receive(&mut self, report: Report) {
        *self = PendingReport::Received(report);
    }

    pub(super) fn is_received(&self) -> bool {
        matches!(self, PendingReport::Received(_))
    }

    /// The report, if it was received.
    pub(super) fn received(&self) -> Option<&Report> {
        match self {
            PendingReport::Received(report) => Some(report),
            PendingReport::Vacant | PendingReport::Awaited | PendingReport::Lost => None,
        }
    }

    /// Marks the unit lost, unless it has reported or never joined.
    pub(super) fn mark_lost(&mut self) -> bool {
        if matches!(self, PendingReport::Received(_) | PendingReport::Vacant) {
            return false;
        }
        *self = PendingReport::Lost;
        true
    }
}

impl Manager {
    /// The reports that the manager has: its own, and those of the units.
    pub fn reports(&self) -> RunReports {
        RunReports {
            manager: Some(self.report()),
            readouts: self.readouts.iter().map(|report| report.received().cloned()).collect(),
            builders: self.builders.iter().map(|unit| unit.report.received().cloned()).collect(),
        }
    }

    /// The manager's state of the builder units, for the merge.
    fn report(&self) -> ManagerReport {
        let views = (0..self.builders.len()).map(|bu| self.view(BuIndex(bu as u16)));
        let (recovered, joined) = (self.recovered.clone(), self.joined.clone());
        ManagerReport { cause: self.cause, builders: views.collect(), recovered, joined }
    }

    /// The manager's record of a builder unit.
    pub(super) fn view(&self, bu: BuIndex) -> BuilderView {
        let (unit, slots) = (&self.builders[bu.index()], self.plan.slots[bu.index()]);
        let unfinished =
            (0..slots.get()).filter_map(|slot| match self.slots[unit.base + usize::from(slot)] {
                (generation, Slot::Assigned(batch)) => {
                    Some(UnfinishedBatch { slot: SlotIndex(slot), generation, batch, again: false })
                }
                (generation, Slot::Moved { batch, again }) => {
                    Some(UnfinishedBatch { slot: SlotIndex(slot), generation, batch, again })
                }
                _ => None,
            });
        BuilderView {
            events_assigned: unit.events_assigned,
            done: unit.done,
            arrived: unit.arrived.clone(),
            unfinished: unfinished.collect(),
        }
    }

    pub(super) fn close(&self) -> RunSummary {
        ReportMerger::of(self.plan.clone(), self.reports()).summary(self.cause)
    }
}
