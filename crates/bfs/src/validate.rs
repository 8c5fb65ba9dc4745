//! The five rules of the Graph500 specification, checked on the edge list and a claimed result.
//!
//! No check is shared with the search: each node gathers the parents and levels of all vertices, and checks them against
//! its part of the *input* edges, not against the graph that the search used.

use std::fmt;

use millstream_application::mix;
use millstream_fabric::{Fabric, FabricError, Reduction};

use crate::column::Column;
use crate::kronecker::Edge;
use crate::network::Network;
use crate::traversal::NO_LEVEL;

/// A parent or level of a vertex outside of the tree.
pub const NOT_IN_TREE: u64 = u64::MAX;

/// A rule of the specification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// 1: the tree has no cycle and one root.
    Tree,
    /// 2: each tree edge joins vertices whose levels differ by one.
    TreeLevels,
    /// 3: each input edge joins vertices whose levels differ by at most one.
    EdgeLevels,
    /// 4: the tree spans the component: no input edge leaves it.
    Span,
    /// 5: each vertex and its parent are joined by an input edge.
    TreeEdges,
}

impl Rule {
    /// All rules.
    pub const ALL: [Rule; 5] = [Rule::Tree, Rule::TreeLevels, Rule::EdgeLevels, Rule::Span, Rule::TreeEdges];
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Rule::Tree => "rule 1 (the tree has no cycle and one root)",
            Rule::TreeLevels => "rule 2 (levels along a tree edge differ by one)",
            Rule::EdgeLevels => "rule 3 (levels along an input edge differ by at most one)",
            Rule::Span => "rule 4 (the tree spans the component)",
            Rule::TreeEdges => "rule 5 (tree edges are input edges)",
        })
    }
}

/// What validation found, on all nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Validation {
    /// Violations of each rule.
    pub violations: [u64; 5],
    /// Vertices in the tree.
    pub reached: u64,
    /// Input edges within the tree, duplicates and self-loops included: m of the specification.
    pub edges: u64,
    /// Of these, without self-loops, as the reference code counts.
    pub edges_without_loops: u64,
    /// A hash of all levels, independent of the number of nodes.
    pub levels_hash: u64,
    /// A hash of all parents, independent of the number of nodes.
    pub parents_hash: u64,
}

impl Validation {
    /// The first rule that is violated, and how often.
    #[must_use]
    pub fn failure(&self) -> Option<(Rule, u64)> {
        Rule::ALL.into_iter().zip(self.violations).find(|&(_, count)| count > 0)
    }
}

/// A claimed result: parents and levels of this node's vertices, where vertex v is at v div P of node v mod P.
/// [`NOT_IN_TREE`] means neither.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// Parents.
    pub parents: Vec<u64>,
    /// Levels.
    pub levels: Vec<u64>,
}

impl Claim {
    /// The claim of a search: [`Column::NONE`] and [`NO_LEVEL`] are outside of the tree.
    #[must_use]
    pub fn of<C: Column>(parents: &[C], levels: &[u32]) -> Claim {
        let parent = |&parent: &C| if parent == C::NONE { NOT_IN_TREE } else { parent.get() };
        let level = |&level: &u32| if level == NO_LEVEL { NOT_IN_TREE } else { level.into() };
        Claim { parents: parents.iter().map(parent).collect(), levels: levels.iter().map(level).collect() }
    }
}

/// Checks a claim against this node's part of the input edges. All nodes do so together.
///
/// # Errors
/// [`FabricError`] of the network.
pub fn validate<F: Fabric>(
    network: &mut Network<'_, F>,
    vertices: u64,
    root: u64,
    edges: &[Edge],
    claim: &Claim,
) -> Result<Validation, FabricError> {
    let nodes = network.fabric.dimensions().nodes() as u64;
    let here = network.fabric.here().index() as u64;
    let parents = gather(network, vertices, &claim.parents)?;
    let levels = gather(network, vertices, &claim.levels)?;
    let whole = Whole { root, parents: &parents, levels: &levels };
    let mut result = Validation::default();
    let rooted = whole.rooted();
    for vertex in (here..vertices).step_by(nodes as usize) {
        whole.check_vertex(vertex, &rooted, &mut result);
    }
    let mut confirmed = vec![Vec::new(); nodes as usize];
    for edge in edges {
        whole.check_edge(*edge, nodes, &mut confirmed, &mut result);
    }
    // A vertex may be confirmed by the edges of any node.
    let mut is_confirmed = vec![false; claim.parents.len()];
    for (message, from) in network.alltoallv(confirmed)?.iter().zip(network.fabric.dimensions().all()) {
        for bytes in message.chunks_exact(8) {
            let place = u64::from_le_bytes(std::array::from_fn(|i| bytes[i]));
            let confirmed = usize::try_from(place).ok().and_then(|place| is_confirmed.get_mut(place));
            *confirmed.ok_or(FabricError::Malformed { node: from })? = true;
        }
    }
    for (vertex, is_confirmed) in (here..).step_by(nodes as usize).zip(is_confirmed) {
        let is_child = parents[vertex as usize] != NOT_IN_TREE && vertex != root;
        result.violations[Rule::TreeEdges as usize] += u64::from(is_child && !is_confirmed);
    }
    total(network, result)
}

/// The result of all nodes.
fn total<F: Fabric>(network: &mut Network<'_, F>, own: Validation) -> Result<Validation, FabricError> {
    let mut values = own.violations.to_vec();
    values.extend([own.reached, own.edges, own.edges_without_loops]);
    values.extend([own.levels_hash, own.parents_hash]);
    let sums = network.allreduce(Reduction::Sum, &values)?;
    Ok(Validation {
        violations: std::array::from_fn(|rule| sums[rule]),
        reached: sums[5],
        edges: sums[6],
        edges_without_loops: sums[7],
        levels_hash: sums[8],
        parents_hash: sums[9],
    })
}

/// The values of all vertices, by vertex.
fn gather<F: Fabric>(
    network: &mut Network<'_, F>,
    vertices: u64,
    own: &[u64],
) -> Result<Vec<u64>, FabricError> {
    let bytes: Vec<u8> = own.iter().flat_map(|value| value.to_le_bytes()).collect();
    let parts = network.allgatherv(&bytes)?;
    let mut all = vec![NOT_IN_TREE; vertices as usize];
    for ((part, from), first) in parts.iter().zip(network.fabric.dimensions().all()).zip(0..) {
        let places = (first..vertices as usize).step_by(parts.len());
        if part.len() != 8 * places.len() {
            return Err(FabricError::Malformed { node: from });
        }
        for (vertex, bytes) in places.zip(part.chunks_exact(8)) {
            all[vertex] = u64::from_le_bytes(std::array::from_fn(|i| bytes[i]));
        }
    }
    Ok(all)
}

/// The claim of all nodes.
struct Whole<'a> {
    root: u64,
    parents: &'a [u64],
    levels: &'a [u64],
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Path {
    Unknown,
    /// Being followed.
    Open,
    ToRoot,
    Elsewhere,
}

impl Whole<'_> {
    fn parent(&self, vertex: u64) -> Option<u64> {
        self.parents.get(vertex as usize).copied().filter(|&parent| parent != NOT_IN_TREE)
    }

    /// Whether the parents of a vertex lead to the root, for all vertices.
    fn rooted(&self) -> Vec<bool> {
        let mut paths = vec![Path::Unknown; self.parents.len()];
        let mut open = Vec::new();
        for start in 0..self.parents.len() as u64 {
            let mut vertex = start;
            let end = loop {
                match paths.get(vertex as usize) {
                    Some(Path::Unknown) => {}
                    Some(Path::ToRoot) => break Path::ToRoot,
                    // Out of range, a cycle, or known to be wrong.
                    _ => break Path::Elsewhere,
                }
                paths[vertex as usize] = Path::Open;
                open.push(vertex);
                match self.parent(vertex) {
                    Some(parent) if parent == vertex && vertex == self.root => break Path::ToRoot,
                    Some(parent) => vertex = parent,
                    None => break Path::Elsewhere,
                }
            };
            for vertex in open.drain(..) {
                paths[vertex as usize] = end;
            }
        }
        paths.into_iter().map(|path| path == Path::ToRoot).collect()
    }

    /// Rules 1 and 2.
    fn check_vertex(&self, vertex: u64, rooted: &[bool], result: &mut Validation) {
        let level = self.levels[vertex as usize];
        let Some(parent) = self.parent(vertex) else {
            result.violations[Rule::Tree as usize] += u64::from(vertex == self.root);
            result.violations[Rule::TreeLevels as usize] += u64::from(level != NOT_IN_TREE);
            return;
        };
        result.reached += 1;
        result.levels_hash = result.levels_hash.wrapping_add(hash(vertex, level));
        result.parents_hash = result.parents_hash.wrapping_add(hash(vertex, parent));
        result.violations[Rule::Tree as usize] += u64::from(!rooted[vertex as usize]);
        let right = if vertex == self.root {
            level == 0
        } else {
            let above = self.levels.get(parent as usize).copied().unwrap_or(NOT_IN_TREE);
            above.checked_add(1) == Some(level)
        };
        result.violations[Rule::TreeLevels as usize] += u64::from(!right);
    }

    /// Rules 3, 4 and half of rule 5: notes a vertex whose parent is at the other end.
    fn check_edge(&self, edge: Edge, nodes: u64, confirmed: &mut [Vec<u8>], result: &mut Validation) {
        let (a, b) = edge.ends();
        let (parent_a, parent_b) = (self.parents[a as usize], self.parents[b as usize]);
        match (parent_a == NOT_IN_TREE, parent_b == NOT_IN_TREE) {
            (true, true) => return,
            (false, false) => {}
            _ => {
                result.violations[Rule::Span as usize] += 1;
                return;
            }
        }
        result.edges += 1;
        result.edges_without_loops += u64::from(a != b);
        let levels = (self.levels[a as usize], self.levels[b as usize]);
        result.violations[Rule::EdgeLevels as usize] += u64::from(levels.0.abs_diff(levels.1) > 1);
        for (child, parent, other) in [(a, parent_a, b), (b, parent_b, a)] {
            if parent == other && child != other {
                confirmed[(child % nodes) as usize].extend((child / nodes).to_le_bytes());
            }
        }
    }
}

/// A number that depends on all bits of a vertex and its level or parent.
fn hash(vertex: u64, value: u64) -> u64 {
    mix(vertex.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ value.wrapping_mul(0xC2B2_AE3D_27D4_EB4F))
}
