//! Layer B: up*/down* routes on the graph of live nodes and links.
//!
//! Levels are distances from the lowest live node of each component. Of a link's two ends, the one with the smaller
//! (level, number) is "up". A legal route goes up zero or more times, then down zero or more times. All nodes compute
//! the same tables from dimensions and dead set alone.

use std::collections::VecDeque;

use super::{ChannelName, VirtualChannel};
use crate::Epoch;
use crate::faults::DeadSet;
use crate::topology::{DIRECTIONS, Dimensions, Direction, NodeNumber};

/// Whether a packet may still go up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// It has gone up only, or not at all.
    Up,
    /// It has gone down once.
    Down,
}

const UNREACHABLE: u32 = u32::MAX;

/// Levels of the live graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpDown {
    torus: Dimensions,
    /// Live neighbours of each node by direction.
    neighbours: Vec<[Option<NodeNumber>; DIRECTIONS]>,
    /// Distance from the component's root; [`UNREACHABLE`] for a dead node.
    levels: Vec<u32>,
}

impl UpDown {
    /// Levels for a dead set.
    #[must_use]
    pub fn new(torus: &Dimensions, dead: &DeadSet) -> UpDown {
        let neighbours: Vec<_> = (torus.all())
            .map(|node| Direction::ALL.map(|direction| dead.live_neighbour(torus, node, direction)))
            .collect();
        let mut levels = vec![UNREACHABLE; torus.nodes()];
        for root in torus.all().filter(|&node| dead.node_lives(node)) {
            if levels[root.index()] != UNREACHABLE {
                continue;
            }
            levels[root.index()] = 0;
            let mut queue = VecDeque::from([root]);
            while let Some(node) = queue.pop_front() {
                for other in neighbours[node.index()].iter().flatten() {
                    if levels[other.index()] == UNREACHABLE {
                        levels[other.index()] = levels[node.index()] + 1;
                        queue.push_back(*other);
                    }
                }
            }
        }
        UpDown { torus: *torus, neighbours, levels }
    }

    /// Distance of a live node from its component's root.
    #[must_use]
    pub fn level(&self, node: NodeNumber) -> Option<u32> {
        self.levels.get(node.index()).copied().filter(|&level| level != UNREACHABLE)
    }

    /// Whether the link from a node in this direction leads up; `None` if it is not live.
    #[must_use]
    pub fn leads_up(&self, node: NodeNumber, direction: Direction) -> Option<bool> {
        let other = self.neighbours.get(node.index())?[direction.index()]?;
        let rank = |node: NodeNumber| (self.levels[node.index()], node);
        Some(rank(other) < rank(node))
    }

    /// The phase of a packet that came to `node` while travelling in this direction.
    #[must_use]
    pub fn phase_after(&self, node: NodeNumber, travelling: Direction) -> Option<Phase> {
        // The way back leads up exactly if the way here led down.
        let back = self.leads_up(node, travelling.reversed())?;
        Some(if back { Phase::Down } else { Phase::Up })
    }

    /// Twice the depth: hops that no route exceeds.
    #[must_use]
    pub fn max_hops(&self) -> u32 {
        2 * self.levels.iter().copied().filter(|&level| level != UNREACHABLE).max().unwrap_or(0)
    }

    /// The shortest legal routes to one target; of equal ones, the lowest direction.
    #[must_use]
    pub fn toward(&self, target: NodeNumber) -> TargetTable {
        let nodes = self.torus.nodes();
        let mut hops = vec![[UNREACHABLE; 2]; nodes];
        let mut queue = VecDeque::new();
        if self.level(target).is_some() {
            hops[target.index()] = [0; 2];
            queue.extend([(target, Phase::Up), (target, Phase::Down)]);
        }
        // Breadth-first backwards over states (node, phase). A packet that reaches a state by a down link left any
        // phase; by an up link it left phase Up.
        while let Some((node, phase)) = queue.pop_front() {
            let next = hops[node.index()][phase as usize] + 1;
            for direction in Direction::ALL {
                let Some(before) = self.neighbours[node.index()][direction.index()] else { continue };
                let came_down = self.leads_up(node, direction) == Some(true);
                let left: &[Phase] = match (phase, came_down) {
                    (Phase::Down, true) => &[Phase::Up, Phase::Down],
                    (Phase::Up, false) => &[Phase::Up],
                    _ => &[],
                };
                for &state in left {
                    let known = &mut hops[before.index()][state as usize];
                    if *known == UNREACHABLE {
                        *known = next;
                        queue.push_back((before, state));
                    }
                }
            }
        }
        let next = (self.torus.all())
            .map(|node| [Phase::Up, Phase::Down].map(|phase| self.first_hop(node, phase, &hops)))
            .collect();
        TargetTable { target, hops, next }
    }

    /// Hops of the shortest legal continuations from a node in a phase to all nodes.
    fn distances(&self, from: NodeNumber, phase: Phase) -> Vec<u32> {
        let mut hops = vec![[UNREACHABLE; 2]; self.torus.nodes()];
        hops[from.index()][phase as usize] = 0;
        let mut queue = VecDeque::from([(from, phase)]);
        while let Some((node, phase)) = queue.pop_front() {
            let next = hops[node.index()][phase as usize] + 1;
            for direction in Direction::ALL {
                let Some(other) = self.neighbours[node.index()][direction.index()] else { continue };
                let after = match (phase, self.leads_up(node, direction)) {
                    (Phase::Up, Some(true)) => Phase::Up,
                    (_, Some(false)) => Phase::Down,
                    _ => continue,
                };
                let known = &mut hops[other.index()][after as usize];
                if *known == UNREACHABLE {
                    *known = next;
                    queue.push_back((other, after));
                }
            }
        }
        hops.into_iter().map(|[up, down]| up.min(down)).collect()
    }

    fn first_hop(&self, node: NodeNumber, phase: Phase, hops: &[[u32; 2]]) -> Option<Direction> {
        let here = hops[node.index()][phase as usize];
        if here == UNREACHABLE || here == 0 {
            return None;
        }
        Direction::ALL.into_iter().find(|&direction| {
            let Some(other) = self.neighbours[node.index()][direction.index()] else { return false };
            let after = match (phase, self.leads_up(node, direction)) {
                (Phase::Up, Some(true)) => Phase::Up,
                (_, Some(false)) => Phase::Down,
                _ => return false,
            };
            hops[other.index()][after as usize] == here - 1
        })
    }
}

/// Routes of all nodes to one target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetTable {
    target: NodeNumber,
    hops: Vec<[u32; 2]>,
    next: Vec<[Option<Direction>; 2]>,
}

impl TargetTable {
    /// Hops from a node, if it reaches the target.
    #[must_use]
    pub fn hops(&self, from: NodeNumber) -> Option<u32> {
        self.hops.get(from.index()).map(|hops| hops[Phase::Up as usize]).filter(|&hops| hops != UNREACHABLE)
    }

    /// The next direction from a node in a phase; `None` at the target and where no legal route exists.
    #[must_use]
    pub fn next(&self, from: NodeNumber, phase: Phase) -> Option<Direction> {
        self.next.get(from.index())?[phase as usize]
    }

    /// Channels of the route from a node in order, if it reaches the target.
    #[must_use]
    pub fn channels(&self, graph: &UpDown, from: NodeNumber, epoch: Epoch) -> Option<Vec<ChannelName>> {
        self.hops(from)?;
        let vc = VirtualChannel::up_down(epoch);
        let (mut here, mut phase) = (from, Phase::Up);
        let mut route = Vec::new();
        while here != self.target {
            let direction = self.next(here, phase)?;
            route.push(ChannelName { node: here, direction, vc });
            if graph.leads_up(here, direction) == Some(false) {
                phase = Phase::Down;
            }
            here = graph.neighbours[here.index()][direction.index()]?;
        }
        Some(route)
    }
}

/// One node's table of layer B: the next direction for each target and phase.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeTable {
    next: Vec<[Option<Direction>; 2]>,
    hops: Vec<u32>,
    /// Phase of a packet that came while travelling in a direction.
    arrivals: [Option<Phase>; DIRECTIONS],
    max_hops: u32,
}

impl NodeTable {
    /// The table of one node: one search from each of its live neighbours.
    #[must_use]
    pub fn new(graph: &UpDown, node: NodeNumber) -> NodeTable {
        let nodes = graph.torus.nodes();
        let mut next = vec![[None; 2]; nodes];
        let mut hops = vec![[UNREACHABLE; 2]; nodes];
        for direction in Direction::ALL {
            let Some(other) = graph.neighbours[node.index()][direction.index()] else { continue };
            let leads_up = graph.leads_up(node, direction) == Some(true);
            let phases: &[Phase] = if leads_up { &[Phase::Up] } else { &[Phase::Up, Phase::Down] };
            let after = if leads_up { Phase::Up } else { Phase::Down };
            for (target, distance) in graph.distances(other, after).into_iter().enumerate() {
                for &phase in phases {
                    // A later direction replaces an earlier one only if it is shorter.
                    if distance != UNREACHABLE && distance + 1 < hops[target][phase as usize] {
                        hops[target][phase as usize] = distance + 1;
                        next[target][phase as usize] = Some(direction);
                    }
                }
            }
        }
        next[node.index()] = [None; 2];
        let mut hops: Vec<u32> = hops.into_iter().map(|hops| hops[Phase::Up as usize]).collect();
        hops[node.index()] = if graph.level(node).is_some() { 0 } else { UNREACHABLE };
        let arrivals = Direction::ALL.map(|travelling| graph.phase_after(node, travelling));
        NodeTable { next, hops, arrivals, max_hops: graph.max_hops() }
    }

    /// The next direction to a target for a packet that came while travelling in this direction, or was injected here.
    #[must_use]
    pub fn next(&self, target: NodeNumber, travelling: Option<Direction>) -> Option<Direction> {
        let phase = match travelling {
            None => Phase::Up,
            Some(direction) => self.arrivals[direction.index()]?,
        };
        self.next.get(target.index())?[phase as usize]
    }

    /// Hops to a target, if a live path exists.
    #[must_use]
    pub fn hops(&self, target: NodeNumber) -> Option<u32> {
        self.hops.get(target.index()).copied().filter(|&hops| hops != UNREACHABLE)
    }

    /// Hops that no route exceeds.
    #[must_use]
    pub fn max_hops(&self) -> u32 {
        self.max_hops
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::{Axis, Link};

    /// All tables of a node agree with the tables by target, ties included.
    fn check(torus: &Dimensions, dead: &DeadSet) {
        let graph = UpDown::new(torus, dead);
        let targets: Vec<_> = torus.all().map(|target| graph.toward(target)).collect();
        for node in torus.all() {
            let table = NodeTable::new(&graph, node);
            for (target, by_target) in torus.all().zip(&targets) {
                assert_eq!(table.hops(target), by_target.hops(node), "{node} to {target} of {torus}");
                for phase in [Phase::Up, Phase::Down] {
                    let found = table.next[target.index()][phase as usize];
                    assert_eq!(
                        found,
                        by_target.next(node, phase),
                        "{node} to {target} of {torus}, {phase:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn tables_by_node_equal_tables_by_target() {
        for text in ["1x1x1", "2x2x2", "5x3x1", "4x3x2"] {
            let torus: Dimensions = text.parse().unwrap();
            let mut dead = DeadSet::new();
            check(&torus, &dead);
            for node in torus.all().filter(|node| node.0 % 5 == 1) {
                dead.kill_link(Link { from: node, axis: Axis::ALL[usize::from(node.0) % 3] });
                check(&torus, &dead);
            }
            dead.kill_node(NodeNumber(0));
            check(&torus, &dead);
        }
    }
}
