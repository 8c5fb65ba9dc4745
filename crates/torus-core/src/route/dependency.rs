//! Dependencies between channels: a network whose dependencies have no cycle cannot deadlock.

use std::collections::{BTreeMap, BTreeSet};

use super::ChannelName;

/// The graph of dependencies: an edge leads from a channel to the next one of some route.
#[derive(Clone, Debug, Default)]
pub struct DependencyGraph {
    edges: BTreeMap<ChannelName, BTreeSet<ChannelName>>,
}

impl DependencyGraph {
    /// An empty graph.
    #[must_use]
    pub fn new() -> DependencyGraph {
        DependencyGraph::default()
    }

    /// Adds a route: a packet that holds one channel waits for the next one.
    pub fn add_route(&mut self, route: &[ChannelName]) {
        for pair in route.windows(2) {
            self.edges.entry(pair[0]).or_default().insert(pair[1]);
        }
    }

    /// Number of dependencies.
    #[must_use]
    pub fn dependencies(&self) -> usize {
        self.edges.values().map(BTreeSet::len).sum()
    }

    /// A cycle, if one exists: each channel depends on the next one, the last on the first.
    #[must_use]
    pub fn cycle(&self) -> Option<Vec<ChannelName>> {
        // Depth-first without recursion. `path` holds the channels that are being explored.
        let mut done = BTreeSet::new();
        for &root in self.edges.keys() {
            if done.contains(&root) {
                continue;
            }
            let mut path = vec![(root, self.successors(root))];
            let mut on_path = BTreeSet::from([root]);
            while let Some((channel, successors)) = path.last_mut() {
                let Some(next) = successors.pop() else {
                    on_path.remove(channel);
                    done.insert(*channel);
                    path.pop();
                    continue;
                };
                if on_path.contains(&next) {
                    return Some(
                        path.iter().map(|&(channel, _)| channel).skip_while(|&c| c != next).collect(),
                    );
                }
                if !done.contains(&next) {
                    on_path.insert(next);
                    path.push((next, self.successors(next)));
                }
            }
        }
        None
    }

    fn successors(&self, channel: ChannelName) -> Vec<ChannelName> {
        self.edges.get(&channel).map(|next| next.iter().copied().collect()).unwrap_or_default()
    }
}
