//! Kernel 2: a level-synchronous search that changes its direction.
//!
//! *Top-down*, the owners of the frontier send (child, parent) to the owners of the children, each child once. *Bottom-up*,
//! all nodes learn the frontier as a bitmap, and each unvisited vertex looks for a neighbour in it. Beamer, Asanović and
//! Patterson, "Direction-optimizing breadth-first search" (SC 2012) tell when to change. The sums that decide are those of
//! all nodes, so levels and directions do not depend on the number of nodes. Nothing is kept from one search to the next.
//! [`host`](crate::host) makes the steps in host memory, [`card`](crate::card) on the cards of the nodes.

use std::time::{Duration, Instant};

use millstream_fabric::{ExchangeStatistics, Fabric, Reduction};
use serde::{Deserialize, Serialize};

use crate::job::BfsError;
use crate::network::Network;
use crate::traversal::Found;
use crate::validate::Claim;

/// When the search changes its direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Thresholds {
    /// Bottom-up if the frontier's edges exceed 1/alpha of the unexplored ones.
    pub alpha: u64,
    /// Top-down again if the frontier shrinks and is below 1/beta of the vertices.
    pub beta: u64,
}

impl Default for Thresholds {
    fn default() -> Thresholds {
        Thresholds { alpha: 15, beta: 18 }
    }
}

/// How a level was searched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Direction {
    /// From the frontier to its neighbours.
    TopDown,
    /// From the unvisited vertices to the frontier.
    BottomUp,
}

/// What one search took on this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SearchStatistics {
    /// From the start to the last parent.
    pub elapsed: Duration,
    /// Of that, in puts and copies.
    pub communicate: Duration,
    /// Of that, in waits for other nodes.
    pub wait: Duration,
    /// Vertices of each level, on all nodes.
    pub levels: Vec<u64>,
    /// Direction in which each level after the first was found.
    pub directions: Vec<Direction>,
}

/// The steps of a search on this node. All nodes make them together.
pub trait SearchSteps<F: Fabric> {
    /// Forgets the last search and makes the root the frontier. Returns the length of the root's row if this node owns it.
    ///
    /// # Errors
    /// [`BfsError`].
    fn start(&mut self, network: &mut Network<'_, F>, root: u64) -> Result<u64, BfsError>;

    /// Finds a level from the frontier. Returns what is new here.
    ///
    /// # Errors
    /// [`BfsError`].
    fn top_down(&mut self, network: &mut Network<'_, F>, level: u32) -> Result<Found, BfsError>;

    /// Finds a level from the unvisited vertices. Returns what is new here.
    ///
    /// # Errors
    /// [`BfsError`].
    fn bottom_up(&mut self, network: &mut Network<'_, F>, level: u32) -> Result<Found, BfsError>;

    /// The result of the last search on this node.
    ///
    /// # Errors
    /// [`BfsError`].
    fn claim(&mut self, network: &mut Network<'_, F>) -> Result<Claim, BfsError>;

    /// What exchanges past the network's operations took so far.
    fn statistics(&self) -> ExchangeStatistics {
        ExchangeStatistics::default()
    }
}

/// A graph to search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SearchPlan {
    /// Vertices of all nodes.
    pub vertices: u64,
    /// Entries of all nodes' rows.
    pub entries: u64,
    /// When the search changes its direction.
    pub thresholds: Thresholds,
}

impl SearchPlan {
    /// Searches from a root. All nodes do so together.
    ///
    /// # Errors
    /// [`BfsError`] of the network or of a card.
    pub fn search<F: Fabric>(
        &self,
        network: &mut Network<'_, F>,
        steps: &mut dyn SearchSteps<F>,
        root: u64,
    ) -> Result<SearchStatistics, BfsError> {
        network.barrier()?;
        let (start, before) = (Instant::now(), [network.statistics(), steps.statistics()]);
        let mut statistics = SearchStatistics { levels: vec![1], ..SearchStatistics::default() };
        let own = steps.start(network, root)?;
        let entries = network.allreduce(Reduction::Sum, &[own])?[0];
        let mut found = Found { vertices: 1, entries };
        let mut unexplored = self.entries;
        let mut direction = Direction::TopDown;
        let mut last_frontier = 0;
        while found.vertices > 0 {
            direction = self.direction(direction, found, last_frontier, unexplored);
            last_frontier = found.vertices;
            let level = statistics.levels.len() as u32;
            let here = match direction {
                Direction::TopDown => {
                    unexplored = unexplored.saturating_sub(found.entries);
                    steps.top_down(network, level)?
                }
                Direction::BottomUp => steps.bottom_up(network, level)?,
            };
            let sums = network.allreduce(Reduction::Sum, &[here.vertices, here.entries])?;
            found = Found { vertices: sums[0], entries: sums[1] };
            if found.vertices > 0 {
                statistics.levels.push(found.vertices);
                statistics.directions.push(direction);
            }
        }
        statistics.elapsed = start.elapsed();
        for (after, before) in [network.statistics(), steps.statistics()].into_iter().zip(before) {
            statistics.communicate += after.communicate - before.communicate;
            statistics.wait += after.wait - before.wait;
        }
        Ok(statistics)
    }

    fn direction(&self, now: Direction, found: Found, last_frontier: u64, unexplored: u64) -> Direction {
        let Thresholds { alpha, beta } = self.thresholds;
        match now {
            Direction::TopDown if found.entries > unexplored / alpha.max(1) => Direction::BottomUp,
            Direction::TopDown => Direction::TopDown,
            Direction::BottomUp
                if found.vertices < last_frontier && found.vertices <= self.vertices / beta.max(1) =>
            {
                Direction::TopDown
            }
            Direction::BottomUp => Direction::BottomUp,
        }
    }
}
