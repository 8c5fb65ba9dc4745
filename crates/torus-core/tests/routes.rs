//! Routes: acyclic dependencies, reachability, hop bounds, and the expected numbers of known faults.

use std::collections::BTreeMap;

use millstream_torus_core::route::choice::choose_with_table;
use millstream_torus_core::route::dependency::DependencyGraph;
use millstream_torus_core::route::dimension_order::{self, Signs};
use millstream_torus_core::route::{ChannelName, NodeTable, Route, UpDown, VirtualChannel};
use millstream_torus_core::{Axis, DeadSet, Dimensions, Direction, Epoch, Link, NodeNumber, Sign};
use proptest::prelude::*;

fn torus(text: &str) -> Dimensions {
    text.parse().expect("valid dimensions")
}

/// Live nodes that can reach each other have the same number here.
fn components(torus: &Dimensions, dead: &DeadSet) -> Vec<Option<usize>> {
    let mut component = vec![None; torus.nodes()];
    for root in torus.all().filter(|&node| dead.node_lives(node)) {
        let mut stack = vec![root];
        while let Some(node) = stack.pop() {
            if component[node.index()].is_none() {
                component[node.index()] = Some(root.index());
                stack.extend(Direction::ALL.into_iter().filter_map(|d| dead.live_neighbour(torus, node, d)));
            }
        }
    }
    component
}

/// The routes of all pairs.
struct Routes {
    layer_a: usize,
    layer_b: usize,
    /// Number of pairs by additional hops over the shortest route without faults.
    longer: BTreeMap<u32, usize>,
    max_hops: u32,
    a: DependencyGraph,
    b: Vec<Vec<ChannelName>>,
}

/// Computes all routes, and checks that each uses only live links, ends at its target within its bound, and exists
/// exactly for the pairs of one component.
fn all_routes(torus: &Dimensions, dead: &DeadSet, epoch: Epoch) -> Routes {
    let graph = UpDown::new(torus, dead);
    let component = components(torus, dead);
    let mut routes = Routes {
        layer_a: 0,
        layer_b: 0,
        longer: BTreeMap::new(),
        max_hops: 0,
        a: DependencyGraph::new(),
        b: Vec::new(),
    };
    for to in torus.all().filter(|&to| dead.node_lives(to)) {
        let table = graph.toward(to);
        for from in torus.all().filter(|&from| from != to && dead.node_lives(from)) {
            let route = choose_with_table(torus, dead, from, to, &table);
            let connected = component[from.index()] == component[to.index()];
            assert_eq!(route.is_some(), connected, "{from} to {to} in {torus} with {dead:?}");
            let Some(route) = route else { continue };
            let (channels, bound) = match route {
                Route::DimensionOrder { signs, .. } => {
                    routes.layer_a += 1;
                    let channels = dimension_order::channels(torus, dead, from, to, signs).expect("live");
                    routes.a.add_route(&channels);
                    (channels, torus.max_hops())
                }
                Route::UpDown { .. } => {
                    routes.layer_b += 1;
                    let channels = table.channels(&graph, from, epoch).expect("a route exists");
                    (channels, graph.max_hops())
                }
            };
            follow(torus, dead, from, to, &channels);
            assert_eq!(channels.len() as u32, route.hops());
            assert!(route.hops() <= bound, "{} hops exceed the bound of {bound}", route.hops());
            routes.max_hops = routes.max_hops.max(route.hops());
            let shortest = dimension_order::shortest(torus, from, to);
            let least = dimension_order::hops(torus, from, to, shortest).expect("exists without faults");
            *routes.longer.entry(route.hops() - least).or_default() += 1;
        }
        for from in torus.all() {
            routes.b.extend(table.channels(&graph, from, epoch));
        }
    }
    routes
}

fn follow(torus: &Dimensions, dead: &DeadSet, from: NodeNumber, to: NodeNumber, channels: &[ChannelName]) {
    let mut here = from;
    for channel in channels {
        assert_eq!(channel.node, here);
        here = dead.live_neighbour(torus, here, channel.direction).expect("a live link");
    }
    assert_eq!(here, to);
}

/// All routes of layer A: every combination of directions of every pair.
fn union_of_layer_a(torus: &Dimensions, dead: &DeadSet) -> DependencyGraph {
    let mut graph = DependencyGraph::new();
    for from in torus.all().filter(|&node| dead.node_lives(node)) {
        for to in torus.all().filter(|&node| dead.node_lives(node)) {
            for signs in Signs::ALL {
                if let Some(route) = dimension_order::channels(torus, dead, from, to, signs) {
                    graph.add_route(&route);
                }
            }
        }
    }
    graph
}

fn graph_of<'r>(routes: impl IntoIterator<Item = &'r Vec<ChannelName>>) -> DependencyGraph {
    let mut graph = DependencyGraph::new();
    routes.into_iter().for_each(|route| graph.add_route(route));
    graph
}

fn dead_link(from: u16, axis: Axis) -> DeadSet {
    let mut dead = DeadSet::new();
    dead.kill_link(Link { from: NodeNumber(from), axis });
    dead
}

#[test]
fn any_dead_link_of_4x4x4_keeps_all_pairs_in_layer_a() {
    let torus = torus("4x4x4");
    for link in torus.links() {
        let mut dead = DeadSet::new();
        dead.kill_link(link);
        let routes = all_routes(&torus, &dead, Epoch(0));
        assert_eq!((routes.layer_a, routes.layer_b), (4032, 0), "{link:?}");
        assert_eq!(routes.longer, BTreeMap::from([(0, 4000), (2, 32)]), "{link:?}");
    }
}

/// At most 6 hops; 7 if the dead node was the root or is a neighbour of it.
#[test]
fn any_dead_node_of_4x4x4_leaves_81_pairs_to_layer_b() {
    let torus = torus("4x4x4");
    for node in torus.all() {
        let mut dead = DeadSet::new();
        dead.kill_node(node);
        let routes = all_routes(&torus, &dead, Epoch(0));
        assert_eq!((routes.layer_a, routes.layer_b), (3825, 81), "{node}");
        let near_root = node == NodeNumber(0)
            || Direction::ALL.into_iter().any(|d| torus.neighbour(node, d) == Some(NodeNumber(0)));
        assert_eq!(routes.max_hops, if near_root { 7 } else { 6 }, "{node}");
    }
}

#[test]
fn any_dead_link_of_2x2x2_leaves_8_pairs_to_layer_b() {
    let torus = torus("2x2x2");
    let mut longest = Vec::new();
    for link in torus.links() {
        let mut dead = DeadSet::new();
        dead.kill_link(link);
        let routes = all_routes(&torus, &dead, Epoch(0));
        assert_eq!((routes.layer_a, routes.layer_b), (48, 8), "{link:?}");
        longest.push(routes.max_hops);
    }
    assert!(longest.iter().all(|hops| [3, 4].contains(hops)), "{longest:?}");
}

#[test]
fn the_union_of_all_directions_is_acyclic() {
    for text in ["8x1x1", "5x4x3", "4x4x4", "7x2x3"] {
        let torus = torus(text);
        let graph = union_of_layer_a(&torus, &DeadSet::new());
        assert!(graph.dependencies() > 0);
        assert_eq!(graph.cycle(), None, "{text}");
    }
}

/// Negative control of the checker: a ring of five on one virtual channel has a cycle, rings of up to four have none
/// with the rule for half a ring.
#[test]
fn one_virtual_channel_has_a_cycle_in_rings_of_five_only() {
    for (text, cyclic) in
        [("3x1x1", false), ("4x1x1", false), ("4x4x4", false), ("5x1x1", true), ("2x6x1", true)]
    {
        let torus = torus(text);
        let mut graph = DependencyGraph::new();
        for from in torus.all() {
            for to in torus.all() {
                let signs = dimension_order::shortest(&torus, from, to);
                let route =
                    dimension_order::channels(&torus, &DeadSet::new(), from, to, signs).expect("live");
                let one: Vec<_> = route
                    .into_iter()
                    .map(|channel| ChannelName { vc: VirtualChannel::BEFORE_DATELINE, ..channel })
                    .collect();
                graph.add_route(&one);
            }
        }
        assert_eq!(graph.cycle().is_some(), cyclic, "{text}");
        if let Some(cycle) = graph.cycle() {
            assert!(cycle.len() >= 5, "{cycle:?}");
        }
    }
}

/// Negative control: successive tables of layer B on one virtual channel form a cycle when the root died; on two they
/// do not.
#[test]
fn successive_layers_b_need_a_virtual_channel_each() {
    let torus = torus("4x4x4");
    for seed in 0..12_u16 {
        let mut old_dead = DeadSet::new();
        for i in 0..3 {
            old_dead.kill_node(NodeNumber((7 + seed * 5 + i * 17) % 63 + 1));
        }
        let mut new_dead = old_dead.clone();
        new_dead.kill_node(NodeNumber(0));
        let old = all_routes(&torus, &old_dead, Epoch(4)).b;
        let new = all_routes(&torus, &new_dead, Epoch(5)).b;
        assert_eq!(graph_of(old.iter().chain(&new)).cycle(), None, "seed {seed}");
        let same_channel = all_routes(&torus, &new_dead, Epoch(6)).b;
        assert!(graph_of(old.iter().chain(&same_channel)).cycle().is_some(), "seed {seed}");
    }
}

#[test]
fn a_packet_that_no_source_makes_is_illegal() {
    use dimension_order::{Arrival, Step, next};
    let torus = torus("5x5x1");
    let arrival =
        |axis, sign, vc| Some(Arrival { travelling: Direction::new(axis, sign), vc: VirtualChannel(vc) });
    let plus = Signs::default();
    // From place (4, 0) to place (1, 0), in positive direction across the dateline.
    let (here, to) = (NodeNumber(4), NodeNumber(1));
    let forward = |vc| Step::Forward(Direction::new(Axis::X, Sign::Plus), VirtualChannel(vc));
    assert_eq!(next(&torus, here, to, plus, None), forward(1));
    assert_eq!(next(&torus, here, to, plus, arrival(Axis::X, Sign::Plus, 0)), forward(1));
    for wrong in
        [arrival(Axis::X, Sign::Plus, 1), arrival(Axis::X, Sign::Minus, 0), arrival(Axis::Y, Sign::Plus, 0)]
    {
        assert_eq!(next(&torus, here, to, plus, wrong), Step::Illegal, "{wrong:?}");
    }
}

#[test]
fn the_table_of_a_node_agrees_with_the_routes() {
    let torus = torus("3x3x2");
    let mut dead = dead_link(0, Axis::X);
    dead.kill_node(NodeNumber(7));
    let graph = UpDown::new(&torus, &dead);
    let tables: Vec<_> = torus.all().map(|node| NodeTable::new(&graph, node)).collect();
    for to in torus.all().filter(|&to| dead.node_lives(to)) {
        for from in torus.all().filter(|&from| from != to && dead.node_lives(from)) {
            let expected = graph.toward(to).channels(&graph, from, Epoch(0)).expect("connected");
            let (mut here, mut travelling, mut directions) = (from, None, Vec::new());
            while here != to {
                let direction = tables[here.index()].next(to, travelling).expect("a next hop");
                directions.push(direction);
                here = dead.live_neighbour(&torus, here, direction).expect("live");
                travelling = Some(direction);
            }
            assert_eq!(directions, expected.iter().map(|c| c.direction).collect::<Vec<_>>());
            assert_eq!(tables[from.index()].hops(to), Some(directions.len() as u32));
        }
    }
}

fn faults() -> impl Strategy<Value = (Vec<u16>, Vec<(u16, usize)>)> {
    (
        proptest::collection::vec(any::<u16>(), 0..5),
        proptest::collection::vec((any::<u16>(), 0..3_usize), 0..9),
    )
}

fn dead_set(torus: &Dimensions, (nodes, links): &(Vec<u16>, Vec<(u16, usize)>)) -> DeadSet {
    let mut dead = DeadSet::new();
    let number = |raw: u16| NodeNumber(raw % torus.nodes() as u16);
    nodes.iter().for_each(|&raw| dead.kill_node(number(raw)));
    for &(raw, axis) in links {
        let plus = Direction::new(Axis::ALL[axis], Sign::Plus);
        torus.link(number(raw), plus).into_iter().for_each(|link| dead.kill_link(link));
    }
    dead
}

/// Dimensions of at most about a hundred nodes, so that a case takes milliseconds.
fn dimensions() -> impl Strategy<Value = Dimensions> {
    (1..=8_u16, 1..=8_u16, 1..=8_u16)
        .prop_filter("at most 128 nodes", |(x, y, z)| x * y * z <= 128)
        .prop_map(|(x, y, z)| Dimensions::new([x, y, z]).expect("small"))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// All routes of random tori and faults: `all_routes` checks reachability, live links and hop bounds.
    #[test]
    fn routes_exist_within_components_and_never_depend_in_a_cycle(
        torus in dimensions(),
        old in faults(),
        new in faults(),
        epoch in 0..100_u32,
    ) {
        let (old, new) = (dead_set(&torus, &old), dead_set(&torus, &new));
        let epoch = Epoch(epoch);
        let before = all_routes(&torus, &old, epoch);
        let after = all_routes(&torus, &new, epoch.next());
        prop_assert_eq!(before.a.cycle(), None);
        // Layer A holds all choices of all epochs at once; layer B two successive epochs.
        prop_assert_eq!(union_of_layer_a(&torus, &DeadSet::new()).cycle(), None);
        prop_assert_eq!(graph_of(before.b.iter().chain(&after.b)).cycle(), None);
    }
}
