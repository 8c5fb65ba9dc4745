//! The same result on every number and arrangement of nodes.

mod common;

use std::collections::VecDeque;
use std::ops::ControlFlow;

use common::on_all_nodes;
use millstream_bfs::job::Width;
use millstream_bfs::kronecker::Kronecker;
use millstream_bfs::search::{Direction, Thresholds};
use millstream_bfs::{BfsError, BfsOptions, BfsReport, run};

fn report(dimensions: &str, options: &BfsOptions) -> BfsReport {
    let mut reports = on_all_nodes(dimensions, |node| run(node, options, |_| ControlFlow::Continue(())));
    reports.pop().expect("a node").expect("valid results")
}

/// Sizes of levels by a plain queue.
fn plain_levels(options: &BfsOptions, root: u64) -> Vec<u64> {
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
    sizes
}

#[test]
fn levels_do_not_depend_on_the_nodes() {
    let options = BfsOptions { roots: 5, ..BfsOptions::new(12) };
    let one = report("1x1x1", &options);
    for record in &one.roots {
        assert_eq!(record.levels, plain_levels(&options, record.root), "root {}", record.root);
        assert!(record.directions.contains(&Direction::BottomUp), "{record:?}");
        assert!(record.directions.contains(&Direction::TopDown), "{record:?}");
    }
    let results = |report: &BfsReport| -> Vec<_> {
        let of = |record: &millstream_bfs::RootRecord| {
            let levels = (record.levels.clone(), record.levels_hash.clone(), record.directions.clone());
            (record.root, record.edges, levels)
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
