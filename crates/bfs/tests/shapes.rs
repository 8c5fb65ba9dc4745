//! The same result on every number and arrangement of nodes.

mod common;

use std::collections::VecDeque;
use std::ops::ControlFlow;

use common::on_all_nodes;
use millstream_bfs::distribution::Distribution;
use millstream_bfs::graph::Graph;
use millstream_bfs::host::HostSearch;
use millstream_bfs::job::Width;
use millstream_bfs::kronecker::Kronecker;
use millstream_bfs::network::Network;
use millstream_bfs::search::{Direction, SearchPlan, SearchSteps, Thresholds};
use millstream_bfs::validate::NOT_IN_TREE;
use millstream_bfs::{BfsError, BfsOptions, BfsReport, run};
use millstream_fabric::Fabric;

fn report(dimensions: &str, options: &BfsOptions) -> BfsReport {
    let mut reports = on_all_nodes(dimensions, |node| run(node, options, |_| ControlFlow::Continue(())));
    reports.pop().expect("a node").expect("valid results")
}

/// Sizes of levels by a plain queue, and the lowest parent of each vertex: none outside of the tree, the root its own.
fn plain_search(options: &BfsOptions, root: u64) -> (Vec<u64>, Vec<Option<u64>>) {
    let graph = Kronecker::new(options.scale, options.edge_factor, options.seeds);
    let mut neighbours = vec![Vec::new(); graph.vertices() as usize];
    for edge in graph.part(0..graph.edges()) {
        let (a, b) = edge.ends();
        neighbours[a as usize].push(b);
        neighbours[b as usize].push(a);
    }
    let mut level_of = vec![None; neighbours.len()];
    level_of[root as usize] = Some(0);
    let (mut queue, mut sizes) = (VecDeque::from([(root, 0)]), Vec::new());
    while let Some((vertex, level)) = queue.pop_front() {
        sizes.resize(level + 1, 0);
        sizes[level] += 1;
        for &next in &neighbours[vertex as usize] {
            if level_of[next as usize].is_none() {
                level_of[next as usize] = Some(level + 1);
                queue.push_back((next, level + 1));
            }
        }
    }
    let parent = |vertex: usize| {
        let level: usize = level_of[vertex]?;
        let above = |&&other: &&u64| level_of[other as usize].is_some_and(|other| other + 1 == level);
        neighbours[vertex].iter().filter(above).min().copied().or(Some(root))
    };
    (sizes, (0..neighbours.len()).map(parent).collect())
}

/// The claim of a search on one node, by vertex.
fn parents(dimensions: &str, options: &BfsOptions, root: u64) -> Vec<Option<u64>> {
    let graph = Kronecker::new(options.scale, options.edge_factor, options.seeds);
    let claims = on_all_nodes(dimensions, |node| {
        let (nodes, here) = (node.dimensions().nodes(), node.here().index());
        let edges: Vec<_> = graph.part(0..graph.edges()).skip(here).step_by(nodes).collect();
        let mut network = Network::new(node, options.timeout).unwrap();
        let distribution = Distribution::new(graph.vertices(), nodes, here);
        let built = Graph::<u32>::build(&mut network, distribution, &edges).unwrap();
        let (vertices, entries) = (graph.vertices(), built.entries());
        let plan = SearchPlan { vertices, entries, thresholds: options.thresholds };
        let mut steps = HostSearch::new(built);
        plan.search(&mut network, &mut steps, root).unwrap();
        let claim = steps.claim(&mut network).unwrap();
        network.barrier().unwrap();
        claim
    });
    let of = |vertex: u64| claims[vertex as usize % claims.len()].parents[vertex as usize / claims.len()];
    (0..graph.vertices()).map(|vertex| (of(vertex) != NOT_IN_TREE).then(|| of(vertex))).collect()
}

#[test]
fn a_parent_is_the_lowest_neighbour_of_the_previous_level() {
    for (alpha, beta) in [(15, 18), (1, 1), (u64::MAX, u64::MAX)] {
        let thresholds = Thresholds { alpha, beta };
        let options = BfsOptions { edge_factor: 6, thresholds, ..BfsOptions::new(9) };
        let root = report("1x1x1", &BfsOptions { roots: 1, ..options.clone() }).roots[0].root;
        let expected = plain_search(&options, root).1;
        assert!(expected.iter().flatten().count() > 100 && expected.contains(&None));
        for dimensions in ["1x1x1", "3x1x1", "2x2x1"] {
            assert_eq!(parents(dimensions, &options, root), expected, "{dimensions}, alpha {alpha}");
        }
    }
}

#[test]
fn levels_and_parents_do_not_depend_on_the_nodes() {
    let options = BfsOptions { roots: 5, ..BfsOptions::new(12) };
    let one = report("1x1x1", &options);
    for record in &one.roots {
        assert_eq!(record.levels, plain_search(&options, record.root).0, "root {}", record.root);
        assert!(record.directions.contains(&Direction::BottomUp), "{record:?}");
        assert!(record.directions.contains(&Direction::TopDown), "{record:?}");
    }
    let results = |report: &BfsReport| -> Vec<_> {
        let of = |record: &millstream_bfs::RootRecord| {
            let hashes = (record.levels_hash.clone(), record.parents_hash.clone());
            (record.root, record.edges, record.levels.clone(), record.directions.clone(), hashes)
        };
        report.roots.iter().map(of).collect()
    };
    for dimensions in ["2x1x1", "2x2x1", "4x1x1", "2x2x2", "3x1x1", "3x2x1"] {
        assert_eq!(results(&report(dimensions, &options)), results(&one), "{dimensions}");
    }
    let wide = BfsOptions { width: Width::Bits48, ..options };
    for dimensions in ["1x1x1", "2x2x1"] {
        assert_eq!(results(&report(dimensions, &wide)), results(&one), "48 bits, {dimensions}");
    }
}

#[test]
fn one_direction_alone_finds_the_same() {
    let options = BfsOptions { roots: 3, edge_factor: 4, ..BfsOptions::new(9) };
    let both = report("2x1x1", &options);
    for (alpha, beta) in [(1, 1), (u64::MAX, u64::MAX)] {
        let one_way = BfsOptions { thresholds: Thresholds { alpha, beta }, ..options.clone() };
        for (a, b) in report("2x2x1", &one_way).roots.iter().zip(&both.roots) {
            assert_eq!((a.root, &a.levels, &a.levels_hash), (b.root, &b.levels, &b.levels_hash));
            assert_eq!(a.parents_hash, b.parents_hash);
        }
    }
}

#[test]
fn tiny_graphs_on_many_nodes() {
    // Fewer vertices than nodes, fewer roots than wanted.
    let options = BfsOptions { edge_factor: 2, ..BfsOptions::new(2) };
    let report = report("3x2x1", &options);
    assert!((1..=4).contains(&report.roots.len()), "{}", report.roots.len());
}

#[test]
fn impossible_options_are_refused() {
    for scale in [0, 48] {
        let refused = on_all_nodes("1x1x1", |node| {
            run(node, &BfsOptions::new(scale), |_| ControlFlow::Continue(())).map(drop)
        });
        assert!(matches!(refused[0], Err(BfsError::Scale { .. })), "{refused:?}");
    }
}

#[test]
fn a_graph_that_does_not_fit_is_refused_at_all_nodes_before_its_edges_are_made() {
    let refused = |options: &BfsOptions| {
        let ends = on_all_nodes("2x1x1", |node| run(node, options, |_| ControlFlow::Continue(())).map(drop));
        ends.into_iter().map(|end| end.expect_err("refused")).collect::<Vec<_>>()
    };
    let narrow = BfsOptions { width: Width::Bits32, ..BfsOptions::new(33) };
    let ends = refused(&narrow);
    assert!(ends.iter().all(|end| matches!(end, BfsError::Columns { bits: 32, .. })), "{ends:?}");
    // 2^57 edges of 12 bytes on two nodes.
    let large = BfsOptions { width: Width::Bits48, edge_factor: 1024, ..BfsOptions::new(47) };
    let ends = refused(&large);
    assert!(
        ends.iter().all(|end| matches!(end, BfsError::Memory { bytes } if *bytes == 12 << 56)),
        "{ends:?}"
    );
}
