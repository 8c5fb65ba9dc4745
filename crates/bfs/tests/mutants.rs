//! Wrong results, each of which must fail by its rule and, where that is possible, by no other.

mod common;

use common::on_all_nodes;
use millstream_bfs::kronecker::{Edge, Kronecker};
use millstream_bfs::network::Network;
use millstream_bfs::validate::{Claim, NOT_IN_TREE, Rule, Validation, validate};

const VERTICES: u64 = 1 << 8;
const ROOT: u64 = 3;

/// A result for all vertices.
#[derive(Clone)]
struct Tree {
    parents: Vec<u64>,
    levels: Vec<u64>,
}

fn edges() -> Vec<Edge> {
    // Of the generator, and a component of its own; sparse, so that levels are many.
    let graph = Kronecker::new(8, 1, (2, 3));
    let in_half = |edge: &Edge| edge.ends().0 < VERTICES - 8 && edge.ends().1 < VERTICES - 8;
    let mut edges: Vec<_> = graph.part(0..graph.edges()).filter(in_half).collect();
    edges.extend((VERTICES - 8..VERTICES - 1).map(|vertex| Edge::new(vertex, vertex + 1)));
    // Two ways from the root, so that depth-first and breadth-first search differ.
    edges.extend([Edge::new(ROOT, 10), Edge::new(10, 11), Edge::new(11, 12), Edge::new(12, ROOT)]);
    edges
}

fn neighbours(vertex: u64) -> Vec<u64> {
    let ends = edges().into_iter().map(Edge::ends);
    ends.filter_map(|(a, b)| if a == vertex { Some(b) } else { (b == vertex).then_some(a) }).collect()
}

/// A right tree; taking vertices from the end of the list makes it a depth-first one.
fn tree(breadth_first: bool) -> Tree {
    let mut tree =
        Tree { parents: vec![NOT_IN_TREE; VERTICES as usize], levels: vec![NOT_IN_TREE; VERTICES as usize] };
    let mut open = std::collections::VecDeque::from([(ROOT, ROOT, 0)]);
    while let Some((vertex, parent, level)) = if breadth_first { open.pop_front() } else { open.pop_back() } {
        if tree.parents[vertex as usize] == NOT_IN_TREE {
            tree.parents[vertex as usize] = parent;
            tree.levels[vertex as usize] = level;
            open.extend(neighbours(vertex).into_iter().map(|next| (next, vertex, level + 1)));
        }
    }
    tree
}

fn check_on(dimensions: &str, tree: &Tree) -> Validation {
    let edges = edges();
    let results = on_all_nodes(dimensions, |node| {
        let mut network = Network::new(node, std::time::Duration::from_secs(30)).expect("all live");
        let (here, nodes) =
            (millstream_fabric::Fabric::here(network.fabric).index(), dimensions_nodes(dimensions));
        let own = |values: &[u64]| values.iter().copied().skip(here).step_by(nodes).collect::<Vec<_>>();
        let claim = Claim { parents: own(&tree.parents), levels: own(&tree.levels) };
        let part: Vec<_> = edges.iter().copied().skip(here).step_by(nodes).collect();
        validate(&mut network, VERTICES, ROOT, &part, &claim).expect("all live")
    });
    assert!(results.iter().all(|result| *result == results[0]));
    results[0]
}

fn dimensions_nodes(dimensions: &str) -> usize {
    dimensions.split('x').map(|size| size.parse::<usize>().expect("a number")).product()
}

/// The violated rules, the same on one node and on several.
fn check(tree: &Tree) -> Vec<Rule> {
    let one = check_on("1x1x1", tree);
    assert_eq!(check_on("2x2x1", tree), one);
    let violated = Rule::ALL.into_iter().zip(one.violations);
    violated.filter(|&(_, count)| count > 0).map(|(rule, _)| rule).collect()
}

/// A vertex without children that is at least three levels below the root.
fn leaf(tree: &Tree) -> u64 {
    (0..VERTICES)
        .find(|&vertex| {
            let level = tree.levels[vertex as usize];
            (3..NOT_IN_TREE).contains(&level) && !tree.parents.contains(&vertex)
        })
        .expect("a deep leaf")
}

#[test]
fn a_right_tree_passes() {
    let tree = tree(true);
    assert_eq!(check(&tree), []);
    let result = check_on("3x1x1", &tree);
    let inside = |edge: &Edge| tree.parents[edge.ends().0 as usize] != NOT_IN_TREE;
    assert_eq!(result.edges, edges().iter().filter(|edge| inside(edge)).count() as u64);
    assert!(result.reached > 50 && result.reached < VERTICES - 8, "{result:?}");
}

#[test]
fn a_cycle_fails_by_rule_1() {
    let mut wrong = tree(true);
    let child = leaf(&wrong);
    let parent = wrong.parents[child as usize];
    wrong.parents[parent as usize] = child;
    assert_eq!(check(&wrong)[0], Rule::Tree);
}

#[test]
fn a_foreign_root_fails_by_rule_1() {
    // A component of its own, with a right tree of its own.
    let mut wrong = tree(true);
    for (level, vertex) in (VERTICES - 8..VERTICES).enumerate() {
        wrong.parents[vertex as usize] = if level == 0 { vertex } else { vertex - 1 };
        wrong.levels[vertex as usize] = level as u64;
    }
    // All eight are not below the root; only the one with a parent of its own breaks further rules.
    let violations = check_on("2x1x1", &wrong).violations;
    assert_eq!(violations, [8, 1, 0, 0, 1]);
    assert_eq!(check(&wrong)[0], Rule::Tree);
}

#[test]
fn an_empty_tree_fails_by_rule_1_alone() {
    let nothing = vec![NOT_IN_TREE; VERTICES as usize];
    let wrong = Tree { parents: nothing.clone(), levels: nothing };
    assert_eq!(check(&wrong), [Rule::Tree]);
    assert_eq!(check_on("2x1x1", &wrong).violations[0], 1, "the root");
}

#[test]
fn a_wrong_level_fails_by_rule_2() {
    let mut wrong = tree(true);
    let vertex = leaf(&wrong);
    wrong.levels[vertex as usize] += 1;
    assert_eq!(check(&wrong)[0], Rule::TreeLevels);
    let mut wrong = tree(true);
    wrong.levels[VERTICES as usize - 1] = 4;
    assert_eq!(check(&wrong), [Rule::TreeLevels], "a level outside of the tree");
}

#[test]
fn a_tree_that_is_not_breadth_first_fails_by_rule_3_alone() {
    assert_eq!(check(&tree(false)), [Rule::EdgeLevels]);
}

#[test]
fn a_missing_vertex_fails_by_rule_4_alone() {
    let mut wrong = tree(true);
    let vertex = leaf(&wrong) as usize;
    (wrong.parents[vertex], wrong.levels[vertex]) = (NOT_IN_TREE, NOT_IN_TREE);
    assert_eq!(check(&wrong), [Rule::Span]);
}

#[test]
fn a_foreign_edge_fails_by_rule_5_alone() {
    let mut wrong = tree(true);
    let vertex = leaf(&wrong);
    let above = wrong.levels[vertex as usize] - 1;
    let near = neighbours(vertex);
    let stranger =
        (0..VERTICES).find(|other| wrong.levels[*other as usize] == above && !near.contains(other));
    wrong.parents[vertex as usize] = stranger.expect("another vertex of that level");
    assert_eq!(check(&wrong), [Rule::TreeEdges]);
}

#[test]
fn senseless_values_are_violations_not_failures() {
    let mut wrong = tree(true);
    let vertex = leaf(&wrong) as usize;
    wrong.parents[vertex] = VERTICES + 17;
    wrong.levels[vertex] = NOT_IN_TREE - 1;
    assert_eq!(check(&wrong)[0], Rule::Tree);
    let mut wrong = tree(true);
    wrong.parents[ROOT as usize] = NOT_IN_TREE;
    assert_eq!(check(&wrong)[0], Rule::Tree);
}
