//! What is dead: nodes and links.

use std::collections::BTreeSet;

use crate::topology::{Dimensions, Direction, Link, NodeNumber};

/// Dead nodes and links of a torus. A dead node's links are dead with it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct DeadSet {
    nodes: BTreeSet<NodeNumber>,
    links: BTreeSet<Link>,
}

impl DeadSet {
    /// Nothing is dead.
    #[must_use]
    pub fn new() -> DeadSet {
        DeadSet::default()
    }

    /// Adds a node.
    pub fn kill_node(&mut self, node: NodeNumber) {
        self.nodes.insert(node);
    }

    /// Adds a link.
    pub fn kill_link(&mut self, link: Link) {
        self.links.insert(link);
    }

    /// Removes a node. Its links stay dead if they were added themselves.
    pub fn revive_node(&mut self, node: NodeNumber) {
        self.nodes.remove(&node);
    }

    /// Removes a link.
    pub fn revive_link(&mut self, link: Link) {
        self.links.remove(&link);
    }

    /// Whether nothing is dead.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty() && self.links.is_empty()
    }

    /// The dead nodes in order.
    pub fn nodes(&self) -> impl Iterator<Item = NodeNumber> + '_ {
        self.nodes.iter().copied()
    }

    /// The dead links in order.
    pub fn links(&self) -> impl Iterator<Item = Link> + '_ {
        self.links.iter().copied()
    }

    /// Whether a node lives.
    #[must_use]
    pub fn node_lives(&self, node: NodeNumber) -> bool {
        !self.nodes.contains(&node)
    }

    /// The live node behind the live link in this direction.
    #[must_use]
    pub fn live_neighbour(
        &self,
        torus: &Dimensions,
        node: NodeNumber,
        direction: Direction,
    ) -> Option<NodeNumber> {
        let other = torus.neighbour(node, direction)?;
        let link = torus.link(node, direction)?;
        let lives = self.node_lives(node) && self.node_lives(other) && !self.links.contains(&link);
        lives.then_some(other)
    }
}
