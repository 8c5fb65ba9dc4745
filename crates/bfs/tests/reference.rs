//! Facts of the Graph500 reference code 3.0.0: edge lists by hash, roots, traversed edges.

mod common;

use std::ops::ControlFlow;

use common::on_all_nodes;
use millstream_bfs::kronecker::{Edge, Kronecker};
use millstream_bfs::{BfsOptions, run};

fn fnv1a(edges: impl Iterator<Item = Edge>) -> u64 {
    edges.flat_map(Edge::to_bytes).fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[test]
fn the_edge_list_equals_the_reference_bit_by_bit() {
    for (scale, seeds, hash) in [
        (6, (2, 3), 0x2d7f_e9d3_f6ee_e70e),
        (10, (2, 3), 0x2387_b690_68a5_9e11),
        (16, (2, 3), 0x2a13_816f_cf9b_4c5b),
        (12, (0x1234_5678_9abc_def0, 0xfedc_ba98_7654_3210), 0xde04_b412_e54d_e14b),
    ] {
        let graph = Kronecker::new(scale, 16, seeds);
        assert_eq!(fnv1a(graph.part(0..graph.edges())), hash, "scale {scale}");
    }
}

#[test]
fn a_part_of_the_list_equals_that_part_of_the_whole() {
    let graph = Kronecker::new(10, 16, (2, 3));
    let whole: Vec<Edge> = graph.part(0..graph.edges()).collect();
    assert_eq!((whole[0].ends(), whole[3].ends()), ((299, 797), (428, 328)));
    for range in [0..1, 5000..5100, 16_383..16_384] {
        let part: Vec<Edge> = graph.part(range.clone()).collect();
        assert_eq!(part, whole[range.start as usize..range.end as usize]);
    }
    // Beyond 2⁴⁰ edges, without the ones before.
    let large = Kronecker::new(38, 16, (2, 3));
    let (a, b) = large.part(1 << 41..(1 << 41) + 1).next().expect("exists").ends();
    assert!(a < large.vertices() && b < large.vertices() && a.max(b) >> 32 > 0, "{a} {b}");
}

#[test]
fn roots_and_traversed_edges_equal_the_reference() {
    let roots: [u64; 64] = [
        458, 214, 220, 966, 395, 9, 848, 777, 344, 236, 900, 440, 806, 712, 116, 163, 206, 131, 377, 96, 535,
        981, 140, 479, 267, 835, 182, 76, 269, 64, 373, 41, 641, 570, 580, 939, 745, 898, 197, 627, 710, 857,
        569, 670, 1017, 308, 97, 879, 680, 678, 35, 177, 531, 698, 555, 485, 816, 521, 332, 888, 209, 825,
        171, 149,
    ];
    let reports =
        on_all_nodes("2x1x1", |node| run(node, &BfsOptions::new(10), |_| ControlFlow::Continue(())));
    for report in reports {
        let report = report.expect("valid results");
        assert_eq!(report.roots.iter().map(|record| record.root).collect::<Vec<_>>(), roots);
        assert!(report.roots.iter().all(|record| record.edges_without_loops == 16_239));
    }
}
