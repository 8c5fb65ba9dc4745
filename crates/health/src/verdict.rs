//! A supervisor's verdict about each node, from the newest reports.

use std::collections::BTreeMap;

use millstream_torus_core::topology::DIRECTIONS;
use millstream_torus_core::{Dimensions, Direction, NodeNumber};

use crate::registers::{Condition, LinkState};

/// What an adapter knows of the neighbour in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct NeighbourView {
    /// The link, as seen here.
    pub link: LinkState,
    /// The neighbour's host.
    pub host: Condition,
    /// Whether the neighbour's service network is reachable.
    pub service: bool,
}

/// A host monitor's report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct HostReport {
    /// The host.
    pub host: Condition,
    /// The own adapter, as the host sees it.
    pub adapter: Condition,
    /// Neighbours by direction; not valid if the adapter failed.
    pub neighbours: [Option<NeighbourView>; DIRECTIONS],
}

/// How a report came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// Over the service network.
    Service,
    /// Flooded over the torus.
    Torus,
}

/// State of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum NodeState {
    /// Not enough is known yet.
    Unknown,
    /// No fault.
    Ok,
    /// A sensor is over its threshold.
    Sick,
    /// The host failed; the adapter still forwards.
    HostFailed,
    /// The adapter failed; the host lives.
    AdapterFailed,
    /// The service network does not reach the node: a neighbour says so, or its reports come over the torus.
    ServiceLost,
    /// The whole node failed.
    NodeFailed,
    /// One link of the node is broken.
    LinkFailed(Direction),
    /// Too few neighbours are left to observe the node.
    Enclosed,
    /// The node announced its end.
    Left,
}

/// The newest report of each node whose reports are not overdue.
#[derive(Clone, Debug)]
pub struct Reports {
    torus: Dimensions,
    newest: BTreeMap<NodeNumber, (HostReport, Path)>,
}

impl Reports {
    /// No reports.
    #[must_use]
    pub fn new(torus: Dimensions) -> Reports {
        Reports { torus, newest: BTreeMap::new() }
    }

    /// A report arrived.
    pub fn handle_report(&mut self, from: NodeNumber, page: HostReport, path: Path) {
        if self.torus.contains(from) {
            self.newest.insert(from, (page, path));
        }
    }

    /// The reports of a node are overdue.
    pub fn handle_silence(&mut self, node: NodeNumber) {
        self.newest.remove(&node);
    }

    /// The verdict about a node.
    #[must_use]
    pub fn verdict(&self, node: NodeNumber) -> NodeState {
        match self.newest.get(&node) {
            Some((page, path)) => self.reporting(node, page, *path),
            None => self.silent(node),
        }
    }

    /// A link as one of its ends sees it; `None` if that end does not report, or its adapter failed.
    #[must_use]
    pub fn link(&self, node: NodeNumber, direction: Direction) -> Option<LinkState> {
        let (page, _) = self.newest.get(&node)?;
        let view = page.neighbours[direction.index()].filter(|_| page.adapter != Condition::Failed);
        view.map(|view| view.link)
    }

    /// Whether a link is broken and no adapter is to blame: both ends report so, or one end does while the
    /// other does not report and another neighbour still hears it. A node may have several such links; its
    /// verdict names the first.
    #[must_use]
    pub fn is_broken(&self, node: NodeNumber, direction: Direction) -> bool {
        let Some(other) = self.torus.neighbour(node, direction) else { return false };
        let seen_broken = |node, direction| self.link(node, direction) == Some(LinkState::Broken);
        match (seen_broken(node, direction), seen_broken(other, direction.reversed())) {
            (true, true) => true,
            (true, false) => self.is_only_heard(other),
            (false, true) => self.is_only_heard(node),
            (false, false) => false,
        }
    }

    /// Whether a node does not report, and a neighbour that does hears it.
    fn is_only_heard(&self, node: NodeNumber) -> bool {
        !self.newest.contains_key(&node)
            && Direction::ALL.into_iter().any(|direction| {
                let other = self.torus.neighbour(node, direction);
                let link = other.and_then(|other| self.link(other, direction.reversed()));
                link == Some(LinkState::Up)
            })
    }

    fn reporting(&self, node: NodeNumber, page: &HostReport, path: Path) -> NodeState {
        match (page.host, page.adapter) {
            (Condition::Stopping, _) => return NodeState::Left,
            (_, Condition::Failed) => return NodeState::AdapterFailed,
            _ => {}
        }
        if path == Path::Torus {
            return NodeState::ServiceLost;
        }
        let broken = Direction::ALL.into_iter().find(|&direction| self.is_broken(node, direction));
        match broken {
            Some(direction) => NodeState::LinkFailed(direction),
            None if [page.host, page.adapter].contains(&Condition::Sick) => NodeState::Sick,
            None => NodeState::Ok,
        }
    }

    fn silent(&self, node: NodeNumber) -> NodeState {
        let mut links = 0;
        let mut views = Vec::new();
        for direction in Direction::ALL {
            let Some(other) = self.torus.neighbour(node, direction) else { continue };
            links += 1;
            let Some((page, _)) = self.newest.get(&other) else { continue };
            if page.adapter != Condition::Failed {
                views.extend(page.neighbours[direction.reversed().index()]);
            }
        }
        let mut heard = views.iter().filter(|view| view.link == LinkState::Up);
        if let Some(view) = heard.clone().find(|view| view.host != Condition::Ok) {
            return match view.host {
                Condition::Stopping => NodeState::Left,
                Condition::Failed => NodeState::HostFailed,
                _ => NodeState::Sick,
            };
        }
        if let Some(view) = heard.next() {
            return if view.service { NodeState::Unknown } else { NodeState::ServiceLost };
        }
        // No node is called dead on the word of one observer, unless it has one neighbour only.
        let broken = views.iter().filter(|view| view.link == LinkState::Broken).count();
        if views.is_empty() || broken < links.min(2) {
            return NodeState::Enclosed;
        }
        NodeState::NodeFailed
    }
}
