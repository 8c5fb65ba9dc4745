//! Reports of monitors without a service network, flooded over the links.

use std::collections::BTreeMap;

use millstream_torus_core::{Dimensions, NodeNumber};

use crate::verdict::Page;

/// A report that passes over several hops.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct News {
    /// The node whose monitor reports.
    pub observer: NodeNumber,
    /// The report's number at its observer.
    pub sequence: u32,
    /// Hops so far.
    pub hops: u32,
    /// The report.
    pub page: Page,
}

/// An adapter's part in the flood: it forwards each report once.
#[derive(Clone, Debug)]
pub struct NewsRelay {
    hop_limit: u32,
    newest: BTreeMap<NodeNumber, u32>,
    refused: u64,
}

impl NewsRelay {
    /// A relay of this torus: the hop limit is its number of nodes, because faults lengthen paths.
    #[must_use]
    pub fn new(torus: &Dimensions) -> NewsRelay {
        NewsRelay { hop_limit: torus.nodes() as u32, newest: BTreeMap::new(), refused: 0 }
    }

    /// Reports that were old, repeated, or had too many hops.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refused
    }

    /// A report arrived, or is sent here. Returns what to send on all live links and to pass to the own host monitor.
    pub fn handle_news(&mut self, news: &News) -> Option<News> {
        // Sequences wrap: a distance below half of the range is newer.
        let newer = (self.newest.get(&news.observer))
            .is_none_or(|&known| (1..=u32::MAX / 2).contains(&news.sequence.wrapping_sub(known)));
        if !newer || news.hops >= self.hop_limit {
            self.refused += 1;
            return None;
        }
        self.newest.insert(news.observer, news.sequence);
        Some(News { hops: news.hops + 1, ..news.clone() })
    }
}
