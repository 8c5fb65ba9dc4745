//! Reports of monitors without a service network, flooded over the links.

use std::collections::BTreeMap;

use millstream_torus_core::{Dimensions, NodeNumber};

use crate::verdict::HostReport;

/// A report that passes over several hops.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FloodedReport {
    /// The node whose monitor reports.
    pub observer: NodeNumber,
    /// The report's number at its observer.
    pub sequence: u32,
    /// Hops so far.
    pub hops: u32,
    /// The report.
    pub page: HostReport,
}

/// An adapter's part in the flood: it forwards each report once.
#[derive(Clone, Debug)]
pub struct FloodingRelay {
    hop_limit: u32,
    newest: BTreeMap<NodeNumber, u32>,
    refused: u64,
}

impl FloodingRelay {
    /// A relay of this torus: the hop limit is its number of nodes, because faults lengthen paths.
    #[must_use]
    pub fn new(torus: &Dimensions) -> FloodingRelay {
        FloodingRelay { hop_limit: torus.nodes() as u32, newest: BTreeMap::new(), refused: 0 }
    }

    /// Reports that were old, repeated, or had too many hops.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refused
    }

    /// A report arrived, or is sent here. Returns what to send on all live links and to pass to the own host monitor.
    pub fn handle_report(&mut self, report: &FloodedReport) -> Option<FloodedReport> {
        // Sequences wrap: a distance below half of the range is newer.
        let newer = (self.newest.get(&report.observer))
            .is_none_or(|&known| (1..=u32::MAX / 2).contains(&report.sequence.wrapping_sub(known)));
        if !newer || report.hops >= self.hop_limit {
            self.refused += 1;
            return None;
        }
        self.newest.insert(report.observer, report.sequence);
        Some(FloodedReport { hops: report.hops + 1, ..report.clone() })
    }
}
