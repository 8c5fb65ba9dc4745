//! A benchmark run on all nodes: generate, build, then search and validate root by root.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use millstream_application::ApplicationError;
use millstream_fabric::{Fabric, FabricError, Reduction};
use serde::{Deserialize, Serialize};

use crate::card::CardSearch;
use crate::checkpoint::{Checkpoint, CheckpointError, Parameters};
use crate::column::{Column, U48};
use crate::distribution::Distribution;
use crate::graph::Graph;
use crate::host::HostSearch;
use crate::kronecker::{Edge, Kronecker, MAX_SCALE};
use crate::network::Network;
use crate::report::{BfsReport, RootRecord};
use crate::roots;
use crate::search::{SearchPlan, SearchStatistics, SearchSteps, Thresholds};
use crate::validate::{Claim, Rule, validate};

/// Seeds of the Graph500 reference code.
pub const SEEDS: (u64, u64) = (2, 3);
/// Edges per vertex of Graph500.
pub const EDGE_FACTOR: u64 = 16;
/// Roots of Graph500.
pub const ROOTS: usize = 64;

/// Width of stored vertex numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Width {
    /// 32 bits.
    #[default]
    Bits32,
    /// 48 bits, as the rules of Graph500 require.
    Bits48,
}

impl Width {
    /// Number of bits.
    #[must_use]
    pub fn bits(self) -> u32 {
        match self {
            Width::Bits32 => 32,
            Width::Bits48 => 48,
        }
    }
}

/// A run.
#[derive(Clone, Debug)]
pub struct BfsOptions {
    /// Logarithm of the number of vertices.
    pub scale: u32,
    /// Edges per vertex.
    pub edge_factor: u64,
    /// Seeds of the generator.
    pub seeds: (u64, u64),
    /// Number of searches.
    pub roots: usize,
    /// Width of stored vertex numbers.
    pub width: Width,
    /// When a search changes its direction.
    pub thresholds: Thresholds,
    /// File that keeps the roots that are done; used by node 0.
    pub checkpoint: Option<PathBuf>,
    /// How long a node may wait for others.
    pub timeout: Duration,
    /// Whether the kernel of the nodes' cards searches, where the graph is.
    pub on_card: bool,
}

impl BfsOptions {
    /// A run by the rules of Graph500, but for the width of vertex numbers.
    #[must_use]
    pub fn new(scale: u32) -> BfsOptions {
        BfsOptions {
            scale,
            edge_factor: EDGE_FACTOR,
            seeds: SEEDS,
            roots: ROOTS,
            width: Width::default(),
            thresholds: Thresholds::default(),
            checkpoint: None,
            timeout: Duration::from_secs(600),
            on_card: false,
        }
    }

    fn parameters(&self) -> Parameters {
        Parameters {
            scale: self.scale,
            edge_factor: self.edge_factor,
            seeds: self.seeds,
            width_bits: self.width.bits(),
            thresholds: self.thresholds,
        }
    }
}

/// Why a run ended without a result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BfsError {
    /// An operation between the nodes failed.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// The scale is out of range.
    #[error("scale {scale}: the scale is 1 to {MAX_SCALE}")]
    Scale {
        /// The scale.
        scale: u32,
    },
    /// The node's card cannot hold the graph.
    #[error(transparent)]
    Card(ApplicationError),
    /// Vertex numbers need more bits.
    #[error("{vertices} vertices on these nodes need more than {bits} bits each: choose 48 bits")]
    Columns {
        /// Vertices.
        vertices: u64,
        /// Bits of a stored number.
        bits: usize,
    },
    /// A node has too little memory.
    #[error(
        "a node cannot allocate {bytes} bytes for its edges: use more nodes on more hosts, or a smaller scale"
    )]
    Memory {
        /// Bytes that it asked for.
        bytes: u64,
    },
    /// The checkpoint cannot be used.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Node 0 gave up.
    #[error("node 0: {reason}")]
    FirstNode {
        /// Its error.
        reason: String,
    },
    /// A result breaks a rule.
    #[error("the result of root {root} violates {rule}, {count} times")]
    Invalid {
        /// The root.
        root: u64,
        /// The rule.
        rule: Rule,
        /// Number of violations.
        count: u64,
    },
    /// No vertex has an edge to another one.
    #[error("the graph has no edge between two vertices, so there is nothing to search")]
    NoRoots,
    /// The caller ended the run.
    #[error("interrupted after {done} roots")]
    Interrupted {
        /// Roots that are done.
        done: usize,
    },
}

impl From<ApplicationError> for BfsError {
    fn from(error: ApplicationError) -> BfsError {
        match error {
            ApplicationError::Fabric(error) => BfsError::Fabric(error),
            other => BfsError::Card(other),
        }
    }
}

/// Runs the benchmark. All nodes call it together, with the same options. `progress` is called after each root, at all nodes.
///
/// # Errors
/// [`BfsError`]. After [`FabricError::NodeLost`], a further run with the same checkpoint goes on, on any nodes.
pub fn run<F: Fabric>(
    fabric: &mut F,
    options: &BfsOptions,
    progress: impl FnMut(&RootRecord) -> ControlFlow<()>,
) -> Result<BfsReport, BfsError> {
    if !(1..=MAX_SCALE).contains(&options.scale) {
        return Err(BfsError::Scale { scale: options.scale });
    }
    match options.width {
        Width::Bits32 => run_with::<F, u32>(fabric, options, progress),
        Width::Bits48 => run_with::<F, U48>(fabric, options, progress),
    }
}

fn run_with<F: Fabric, C: Column>(
    fabric: &mut F,
    options: &BfsOptions,
    mut progress: impl FnMut(&RootRecord) -> ControlFlow<()>,
) -> Result<BfsReport, BfsError> {
    let (torus, here) = (fabric.dimensions(), fabric.here().index());
    let kronecker = Kronecker::new(options.scale, options.edge_factor, options.seeds);
    let distribution = Distribution::new(kronecker.vertices(), torus.nodes(), here);
    Graph::<C>::check_width(&distribution)?;
    let mut network = Network::new(fabric, options.timeout)?;
    let (mut checkpoint, done) = resume(&mut network, options)?;
    let generation = Instant::now();
    let edges = own_edges(&mut network, &kronecker)?;
    let generation = longest(&mut network, generation.elapsed())?;
    let construction = Instant::now();
    let graph = Graph::<C>::build(&mut network, distribution, &edges)?;
    let construction = longest(&mut network, construction.elapsed())?;
    let roots = roots::draw(&mut network, &graph, options.seeds, options.roots)?;
    let mut report = BfsReport {
        scale: options.scale,
        edge_factor: options.edge_factor,
        seeds: options.seeds,
        width_bits: options.width.bits(),
        dimensions: torus.to_string(),
        nodes: torus.nodes(),
        distinct_edges: graph.entries() / 2,
        generation_seconds: generation.as_secs_f64(),
        construction_seconds: construction.as_secs_f64(),
        thresholds: options.thresholds,
        kept: 0,
        roots: Vec::new(),
    };
    let plan = SearchPlan {
        vertices: distribution.vertices(),
        entries: graph.entries(),
        thresholds: options.thresholds,
    };
    let mut steps: Box<dyn SearchSteps<F>> = if options.on_card {
        Box::new(CardSearch::new(&mut network, &graph, options.timeout)?)
    } else {
        Box::new(HostSearch::new(graph))
    };
    for root in roots {
        if let Some(record) = done.iter().find(|record| record.root == root) {
            report.roots.push(record.clone());
            report.kept += 1;
            continue;
        }
        let statistics = plan.search(&mut network, &mut *steps, root)?;
        let claim = steps.claim(&mut network)?;
        let record = check(&mut network, &kronecker, &edges, &claim, root, &statistics)?;
        if let Some(checkpoint) = &mut checkpoint {
            checkpoint.keep(&record)?;
        }
        let flow = progress(&record);
        report.roots.push(record);
        if flow.is_break() {
            return Err(BfsError::Interrupted { done: report.roots.len() });
        }
    }
    // No node leaves while another one may still read from it.
    network.barrier()?;
    if report.roots.is_empty() { Err(BfsError::NoRoots) } else { Ok(report) }
}

/// Opens the checkpoint at node 0, and gives all nodes the roots that are done.
fn resume<F: Fabric>(
    network: &mut Network<'_, F>,
    options: &BfsOptions,
) -> Result<(Option<Checkpoint>, Vec<RootRecord>), BfsError> {
    let mut checkpoint = None;
    let mut opened: Result<Vec<RootRecord>, BfsError> = Ok(Vec::new());
    let is_first = network.fabric.here().index() == 0;
    if let Some(path) = options.checkpoint.as_ref().filter(|_| is_first) {
        opened = match Checkpoint::open(path, &options.parameters()) {
            Ok((open, done)) => {
                checkpoint = Some(open);
                Ok(done)
            }
            Err(error) => Err(error.into()),
        };
    }
    let message: Result<&Vec<RootRecord>, String> = opened.as_ref().map_err(ToString::to_string);
    let bytes = if is_first { serde_json::to_vec(&message).unwrap_or_default() } else { Vec::new() };
    let first = network.allgatherv(&bytes)?.swap_remove(0);
    if is_first {
        return opened.map(|done| (checkpoint, done));
    }
    match serde_json::from_slice::<Result<Vec<RootRecord>, String>>(&first) {
        Ok(Ok(done)) => Ok((None, done)),
        Ok(Err(reason)) => Err(BfsError::FirstNode { reason }),
        Err(error) => Err(BfsError::FirstNode { reason: error.to_string() }),
    }
}

/// This node's part of the edge list.
fn own_edges<F: Fabric>(network: &mut Network<'_, F>, kronecker: &Kronecker) -> Result<Vec<Edge>, BfsError> {
    let (nodes, here) = (network.fabric.dimensions().nodes(), network.fabric.here().index());
    let bound = |node: usize| (u128::from(kronecker.edges()) * node as u128 / nodes as u128) as u64;
    let part = bound(here)..bound(here + 1);
    let mut edges = network.reserve((part.end - part.start) as usize)?;
    edges.extend(kronecker.part(part));
    Ok(edges)
}

/// The longest duration of all nodes.
fn longest<F: Fabric>(network: &mut Network<'_, F>, own: Duration) -> Result<Duration, FabricError> {
    let nanoseconds = network.allreduce(Reduction::Max, &[own.as_nanos() as u64])?;
    Ok(Duration::from_nanos(nanoseconds[0]))
}

/// Validates a result and makes the record of its root.
fn check<F: Fabric>(
    network: &mut Network<'_, F>,
    kronecker: &Kronecker,
    edges: &[Edge],
    claim: &Claim,
    root: u64,
    statistics: &SearchStatistics,
) -> Result<RootRecord, BfsError> {
    let elapsed = longest(network, statistics.elapsed)?;
    let nodes = network.fabric.dimensions().nodes() as f64;
    let times = [statistics.communicate, statistics.wait].map(|time| time.as_nanos() as u64);
    let sums = network.allreduce(Reduction::Sum, &times)?;
    let mean = |sum: u64| sum as f64 * 1e-9 / nodes;
    let (communicate, wait) = (mean(sums[0]), mean(sums[1]));
    let validation = validate(network, kronecker.vertices(), root, edges, claim)?;
    if let Some((rule, count)) = validation.failure() {
        return Err(BfsError::Invalid { root, rule, count });
    }
    let seconds = elapsed.as_secs_f64();
    Ok(RootRecord {
        root,
        seconds,
        compute_seconds: (seconds - communicate - wait).max(0.0),
        communicate_seconds: communicate,
        wait_seconds: wait,
        reached: validation.reached,
        edges: validation.edges,
        edges_without_loops: validation.edges_without_loops,
        levels: statistics.levels.clone(),
        directions: statistics.directions.clone(),
        levels_hash: format!("{:016x}", validation.levels_hash),
        parents_hash: format!("{:016x}", validation.parents_hash),
        nodes: network.fabric.dimensions().to_string(),
    })
}
