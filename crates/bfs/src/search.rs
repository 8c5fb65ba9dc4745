//! Kernel 2: a level-synchronous search that changes its direction.
//!
//! *Top-down*, the owners of the frontier send (child, parent) to the owners of the children, each child once. *Bottom-up*,
//! all nodes learn the frontier as a bitmap, and each unvisited vertex looks for a neighbour in it. Beamer, Asanović and
//! Patterson, "Direction-optimizing breadth-first search" (SC 2012) tell when to change. The sums that decide are those of
//! all nodes, so levels and directions do not depend on the number of nodes. Nothing is kept from one search to the next.

use std::time::{Duration, Instant};

use millstream_fabric::{Fabric, FabricError, Reduction};
use serde::{Deserialize, Serialize};

use crate::bitmap::Bitmap;
use crate::column::Column;
use crate::graph::Graph;
use crate::job::BfsError;
use crate::network::Network;

/// Level of a vertex that was not reached.
pub const NO_LEVEL: u32 = u32::MAX;

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

/// The memory of searches on one node, and the result of the last one.
#[derive(Debug)]
pub struct Search<'g, C> {
    graph: &'g Graph<C>,
    thresholds: Thresholds,
    /// Own vertices that have a parent, by place.
    visited: Bitmap,
    /// Vertices of other nodes that this node has sent to their owners, by index.
    sent: Bitmap,
    /// The frontier of all nodes by index, while the search goes bottom-up.
    frontier_of_all: Bitmap,
    next: Bitmap,
    /// The frontier of this node, while the search goes top-down.
    frontier: Vec<C>,
    /// Parents of this node's vertices, by place; [`Column::NONE`] outside of the tree.
    pub parents: Vec<C>,
    /// Levels of this node's vertices, by place; [`NO_LEVEL`] outside of the tree.
    pub levels: Vec<u32>,
}

/// New vertices of a level, and the length of their rows.
#[derive(Clone, Copy, Debug, Default)]
struct Found {
    vertices: u64,
    entries: u64,
}

impl<'g, C: Column> Search<'g, C> {
    /// Allocates the memory of searches.
    #[must_use]
    pub fn new(graph: &'g Graph<C>, thresholds: Thresholds) -> Search<'g, C> {
        let (own, all) = (graph.distribution.own_count(), graph.distribution.indices());
        Search {
            graph,
            thresholds,
            visited: Bitmap::new(own),
            sent: Bitmap::new(all),
            frontier_of_all: Bitmap::new(all),
            next: Bitmap::new(own),
            frontier: Vec::new(),
            parents: vec![C::NONE; own as usize],
            levels: vec![NO_LEVEL; own as usize],
        }
    }

    /// Searches from a root. All nodes do so together.
    ///
    /// # Errors
    /// [`BfsError`] of the network.
    pub fn run<F: Fabric>(
        &mut self,
        network: &mut Network<'_, F>,
        root: u64,
    ) -> Result<SearchStatistics, BfsError> {
        network.barrier()?;
        let (start, before) = (Instant::now(), network.statistics());
        let mut statistics = SearchStatistics { levels: vec![1], ..SearchStatistics::default() };
        let mut found = self.start(network, root)?;
        let mut unexplored = self.graph.entries();
        let mut direction = Direction::TopDown;
        let mut last_frontier = 0;
        while found.vertices > 0 {
            let next = self.direction(direction, found, last_frontier, unexplored);
            self.convert(direction, next);
            direction = next;
            last_frontier = found.vertices;
            let level = statistics.levels.len() as u32;
            let here = match direction {
                Direction::TopDown => {
                    unexplored = unexplored.saturating_sub(found.entries);
                    self.top_down(network, level)?
                }
                Direction::BottomUp => self.bottom_up(network, level)?,
            };
            let sums = network.allreduce(Reduction::Sum, &[here.vertices, here.entries])?;
            found = Found { vertices: sums[0], entries: sums[1] };
            if found.vertices > 0 {
                statistics.levels.push(found.vertices);
                statistics.directions.push(direction);
            }
        }
        statistics.elapsed = start.elapsed();
        let after = network.statistics();
        statistics.communicate = after.communicate - before.communicate;
        statistics.wait = after.wait - before.wait;
        Ok(statistics)
    }

    /// Forgets the last search and makes the root the frontier.
    fn start<F: Fabric>(&mut self, network: &mut Network<'_, F>, root: u64) -> Result<Found, BfsError> {
        self.parents.fill(C::NONE);
        self.levels.fill(NO_LEVEL);
        self.visited.clear();
        self.sent.clear();
        self.next.clear();
        self.frontier.clear();
        let mut entries = 0;
        if let Some(place) = self.graph.distribution.own_place(root) {
            self.visited.insert(place);
            self.parents[place as usize] = C::new(root);
            self.levels[place as usize] = 0;
            self.frontier.push(C::new(place));
            entries = self.graph.degree(place);
        }
        let entries = network.allreduce(Reduction::Sum, &[entries])?[0];
        Ok(Found { vertices: 1, entries })
    }

    fn direction(&self, now: Direction, found: Found, last_frontier: u64, unexplored: u64) -> Direction {
        let Thresholds { alpha, beta } = self.thresholds;
        match now {
            Direction::TopDown if found.entries > unexplored / alpha.max(1) => Direction::BottomUp,
            Direction::TopDown => Direction::TopDown,
            Direction::BottomUp
                if found.vertices < last_frontier
                    && found.vertices <= self.graph.distribution.vertices() / beta.max(1) =>
            {
                Direction::TopDown
            }
            Direction::BottomUp => Direction::BottomUp,
        }
    }

    /// Brings this node's frontier into the form for a direction.
    fn convert(&mut self, from: Direction, to: Direction) {
        match (from, to) {
            (Direction::TopDown, Direction::BottomUp) => {
                self.next.clear();
                for place in self.frontier.drain(..) {
                    self.next.insert(place.get());
                }
            }
            (Direction::BottomUp, Direction::TopDown) => {
                self.frontier.clear();
                self.frontier.extend(self.next.iter().map(C::new));
            }
            _ => {}
        }
    }

    fn top_down<F: Fabric>(&mut self, network: &mut Network<'_, F>, level: u32) -> Result<Found, BfsError> {
        let distribution = self.graph.distribution;
        let (nodes, here) = (distribution.nodes(), distribution.here());
        let mut messages = vec![Vec::new(); nodes];
        let frontier = std::mem::take(&mut self.frontier);
        for &place in &frontier {
            let parent = C::new(distribution.vertex(distribution.index_at(here, place.get())));
            for &neighbour in self.graph.row(place.get()) {
                let index = neighbour.get();
                let owner = distribution.owner(index);
                if owner == here {
                    self.claim(distribution.place(index), parent, level);
                } else if self.sent.insert(index) {
                    C::new(distribution.place(index)).append(&mut messages[owner]);
                    parent.append(&mut messages[owner]);
                }
            }
        }
        if nodes > 1 {
            let received = network.alltoallv(messages)?;
            for (message, from) in received.iter().zip(network.fabric.dimensions().all()) {
                self.claim_all(message, level).ok_or(FabricError::Malformed { node: from })?;
            }
        }
        let entries = self.frontier.iter().map(|place| self.graph.degree(place.get())).sum();
        Ok(Found { vertices: self.frontier.len() as u64, entries })
    }

    /// Gives a vertex of this node its parent, unless it has one.
    fn claim(&mut self, place: u64, parent: C, level: u32) {
        if self.visited.insert(place) {
            self.parents[place as usize] = parent;
            self.levels[place as usize] = level;
            self.frontier.push(C::new(place));
        }
    }

    /// Takes the children of a message; `None` if it is malformed.
    fn claim_all(&mut self, message: &[u8], level: u32) -> Option<()> {
        let pairs = message.chunks_exact(2 * C::BYTES);
        pairs.remainder().is_empty().then_some(())?;
        for pair in pairs {
            let (place, parent) = (C::read(pair).get(), C::read(&pair[C::BYTES..]));
            (place < self.graph.distribution.own_count()).then_some(())?;
            self.claim(place, parent, level);
        }
        Some(())
    }

    fn bottom_up<F: Fabric>(&mut self, network: &mut Network<'_, F>, level: u32) -> Result<Found, BfsError> {
        self.share_frontier(network)?;
        let (graph, distribution) = (self.graph, self.graph.distribution);
        let mut found = Found::default();
        let own = distribution.own_count();
        for word in 0..self.visited.words().len() {
            let first = word as u64 * 64;
            let mut unvisited = !self.visited.words()[word];
            if own - first < 64 {
                unvisited &= (1 << (own - first)) - 1;
            }
            let mut new = 0;
            while unvisited != 0 {
                let bit = unvisited.trailing_zeros();
                unvisited &= unvisited - 1;
                let place = first + u64::from(bit);
                let row = graph.row(place);
                let parent = row.iter().find(|index| self.frontier_of_all.contains(index.get()));
                if let Some(index) = parent {
                    self.parents[place as usize] = C::new(distribution.vertex(index.get()));
                    self.levels[place as usize] = level;
                    new |= 1 << bit;
                    found.vertices += 1;
                    found.entries += row.len() as u64;
                }
            }
            self.visited.words_mut()[word] |= new;
            self.next.words_mut()[word] = new;
        }
        Ok(found)
    }

    /// Gives all nodes the frontier of all nodes.
    fn share_frontier<F: Fabric>(&mut self, network: &mut Network<'_, F>) -> Result<(), BfsError> {
        let distribution = self.graph.distribution;
        if distribution.nodes() == 1 {
            // Indices equal places; `frontier_of_all` may have further words.
            let words = self.next.words();
            self.frontier_of_all.words_mut()[..words.len()].copy_from_slice(words);
            return Ok(());
        }
        let frontiers = network.allgatherv(&self.next.to_message())?;
        self.frontier_of_all.clear();
        for (node, from) in network.fabric.dimensions().all().enumerate() {
            let (first, limit) = (distribution.index_at(node, 0), distribution.count(node));
            if !self.frontier_of_all.add_message(&frontiers[node], first, limit) {
                return Err(FabricError::Malformed { node: from }.into());
            }
        }
        Ok(())
    }
}
