//! Routes and the check of dependencies against independent programs: OpenSM's torus-2QoS in ibsim, and ibdmchk.
//!
//! `make test-opensm` runs it. It needs Debian's ibsim-utils, opensm and ibutils, no root and no adapter.
//!
//! Most cases have a ring of five, because rings of up to four can do without a credit loop even on one virtual lane.

mod credit_loops;
mod simulation;
mod tables;

use std::collections::BTreeMap;

use millstream_torus_core::route::choice::choose_with_table;
use millstream_torus_core::route::dependency::DependencyGraph;
use millstream_torus_core::route::{ChannelName, Route, UpDown, dimension_order};
use millstream_torus_core::{Axis, DeadSet, Dimensions, Direction, Epoch, Link, NodeNumber, VirtualChannel};

use credit_loops::Input;
use simulation::{Fabric, Outcome, Subnet, manage};
use tables::Tables;

const PROGRAMS: [&str; 5] = ["ibsim", "ibsim-run", "opensm", "saquery", "ibdmchk"];

fn require_programs() {
    let path = std::env::var_os("PATH").unwrap_or_default();
    for program in PROGRAMS {
        assert!(
            std::env::split_paths(&path).any(|folder| folder.join(program).is_file()),
            "{program} is missing; install Debian's ibsim-utils, opensm and ibutils"
        );
    }
}

fn torus(text: &str) -> Dimensions {
    text.parse().expect("valid dimensions")
}

fn dead(nodes: &[u16], links: &[(u16, Axis)]) -> DeadSet {
    let mut dead = DeadSet::new();
    nodes.iter().for_each(|&node| dead.kill_node(NodeNumber(node)));
    links.iter().for_each(|&(from, axis)| dead.kill_link(Link { from: NodeNumber(from), axis }));
    dead
}

/// The channels of our route, if there is one.
fn our_route(fabric: &Fabric, graph: &UpDown, from: NodeNumber, to: NodeNumber) -> Option<Vec<ChannelName>> {
    let table = graph.toward(to);
    match choose_with_table(fabric.torus, fabric.dead, from, to, &table)? {
        Route::DimensionOrder { signs, .. } => {
            dimension_order::channels(fabric.torus, fabric.dead, from, to, signs)
        }
        Route::UpDown { .. } => table.channels(graph, from, Epoch(0)),
    }
}

fn directions(route: &[ChannelName]) -> Vec<Direction> {
    route.iter().map(|channel| channel.direction).collect()
}

fn on_one_lane(route: &[ChannelName]) -> Vec<ChannelName> {
    route.iter().map(|&channel| ChannelName { vc: VirtualChannel(0), ..channel }).collect()
}

/// A cycle of dependencies. Both checkers must give the same answer.
fn has_cycle<'r>(
    name: &str,
    routes: impl IntoIterator<Item = &'r Vec<ChannelName>>,
    (subnet, fabric, input): (&Subnet, &Fabric<'_>, Input<'_>),
) -> bool {
    let mut graph = DependencyGraph::new();
    routes.into_iter().for_each(|route| graph.add_route(route));
    let cycle = graph.cycle();
    let judged = credit_loops::exist(subnet, fabric, input);
    assert_eq!(cycle.is_some(), judged, "{name}: ibdmchk disagrees with {cycle:?}");
    judged
}

/// OpenSM's routes of all pairs.
struct Routed<'f> {
    name: String,
    fabric: &'f Fabric<'f>,
    subnet: Subnet,
    tables: Tables,
    routes: BTreeMap<(NodeNumber, NodeNumber), Vec<ChannelName>>,
}

impl<'f> Routed<'f> {
    fn new(name: &str, fabric: &'f Fabric<'f>, engine: &str) -> Routed<'f> {
        require_programs();
        let subnet = match manage(name, fabric, engine) {
            Outcome::Routed(subnet) => subnet,
            Outcome::Refused(line) => panic!("{name}: {engine} refuses: {line}"),
        };
        Routed::read(name, fabric, subnet)
    }

    fn read(name: &str, fabric: &'f Fabric<'f>, subnet: Subnet) -> Routed<'f> {
        let tables = Tables::read(&subnet, fabric);
        let routes = (fabric.pairs().into_iter())
            .filter_map(|(from, to)| Some(((from, to), tables.route(fabric, from, to)?)))
            .collect();
        Routed { name: name.to_owned(), fabric, subnet, tables, routes }
    }

    /// Whether OpenSM's routes have a cycle with its virtual lanes, and with all packets on one.
    fn cycles(&self) -> (bool, bool) {
        let one: Vec<_> = self.routes.values().map(|route| on_one_lane(route)).collect();
        let case = |input| (&self.subnet, self.fabric, input);
        (
            has_cycle(&self.name, self.routes.values(), case(Input::OpenSm(&self.tables))),
            has_cycle(&self.name, &one, case(Input::OpenSmOnOneLane)),
        )
    }

    /// Compares the reachability of all pairs with our routes.
    fn compare(&self) -> Comparison {
        let graph = UpDown::new(self.fabric.torus, self.fabric.dead);
        let mut sum = Comparison::default();
        let mut ours = DependencyGraph::new();
        for (from, to) in self.fabric.pairs() {
            let theirs = self.routes.get(&(from, to));
            let our = our_route(self.fabric, &graph, from, to);
            assert_eq!(
                theirs.is_some(),
                our.is_some(),
                "{}: {from} to {to}: OpenSM {theirs:?}, ours {our:?}",
                self.name
            );
            let (Some(theirs), Some(our)) = (theirs, our) else { continue };
            sum.pairs += 1;
            sum.same_path += usize::from(directions(theirs) == directions(&our));
            sum.opensm_hops += theirs.len();
            sum.our_hops += our.len();
            ours.add_route(&our);
        }
        assert_eq!(sum.pairs, self.fabric.pairs().len(), "{}: every live pair is connected", self.name);
        assert_eq!(ours.cycle(), None, "{}: our routes", self.name);
        println!("{}: {sum:?}", self.name);
        sum
    }

    /// Whether our routes have a cycle, and with all packets on one virtual channel. Switches must be able to forward so.
    fn our_cycles(&self) -> (bool, bool) {
        let graph = UpDown::new(self.fabric.torus, self.fabric.dead);
        let route = |from, to| our_route(self.fabric, &graph, from, to).expect("connected");
        let tables = (self.tables.of_routes(self.fabric, route))
            .unwrap_or_else(|| panic!("{}: switches cannot forward as our routes do", self.name));
        let routes: Vec<_> = self.fabric.pairs().into_iter().map(|(from, to)| route(from, to)).collect();
        let one: Vec<_> = routes.iter().map(|route| on_one_lane(route)).collect();
        let case = |input| (&self.subnet, self.fabric, input);
        (
            has_cycle(&self.name, &routes, case(Input::Tables(&tables))),
            has_cycle(&self.name, &one, case(Input::TablesOnOneLane(&tables))),
        )
    }
}

/// The routes of both sides.
#[derive(Debug, Default)]
struct Comparison {
    pairs: usize,
    /// Pairs for which both take the same directions.
    same_path: usize,
    opensm_hops: usize,
    our_hops: usize,
}

/// Both take the shortest way in dimension order, which is unique in odd rings.
#[test]
#[ignore = "needs ibsim-utils, opensm and ibutils; make test-opensm"]
fn without_faults_both_take_the_same_paths() {
    let (torus, dead) = (torus("5x3x3"), DeadSet::new());
    let fabric = Fabric { torus: &torus, dead: &dead };
    let routed = Routed::new("no-fault", &fabric, "torus-2QoS");
    let sum = routed.compare();
    assert_eq!((sum.same_path, sum.our_hops), (sum.pairs, sum.opensm_hops));
    assert_eq!(routed.cycles(), (false, true));
    assert_eq!(routed.our_cycles(), (false, true));
}

/// Rings of four: halfway round, each side has a rule of its own.
#[test]
#[ignore = "needs ibsim-utils, opensm and ibutils; make test-opensm"]
fn even_rings_have_paths_of_the_same_length() {
    let (torus, dead) = (torus("4x4x4"), DeadSet::new());
    let fabric = Fabric { torus: &torus, dead: &dead };
    let routed = Routed::new("even-rings", &fabric, "torus-2QoS");
    let sum = routed.compare();
    assert_eq!(sum.our_hops, sum.opensm_hops);
    let cycles = routed.cycles();
    println!("even-rings: cycles with its lanes and with one: {cycles:?}");
    assert!(!cycles.0);
}

#[test]
#[ignore = "needs ibsim-utils, opensm and ibutils; make test-opensm"]
fn dead_links_leave_the_same_pairs() {
    let cases: [(&str, &[(u16, Axis)]); 3] = [
        ("dead-x-link", &[(17, Axis::X)]),
        ("dead-z-link", &[(17, Axis::Z)]),
        ("dead-links", &[(17, Axis::X), (21, Axis::X), (8, Axis::Y)]),
    ];
    for (name, links) in cases {
        let (torus, dead) = (torus("5x3x3"), dead(&[], links));
        let fabric = Fabric { torus: &torus, dead: &dead };
        let routed = Routed::new(name, &fabric, "torus-2QoS");
        routed.compare();
        assert_eq!(routed.cycles(), (false, true), "{name}");
        assert_eq!(routed.our_cycles(), (false, true), "{name}");
    }
}

/// torus-2QoS routes around one dead switch, and around several that follow each other in z.
#[test]
#[ignore = "needs ibsim-utils, opensm and ibutils; make test-opensm"]
fn dead_nodes_leave_the_same_pairs() {
    for (name, dimensions, nodes) in [("dead-node", "5x3x3", &[22][..]), ("dead-nodes", "3x3x5", &[22, 31])] {
        let (torus, dead) = (torus(dimensions), dead(nodes, &[]));
        let fabric = Fabric { torus: &torus, dead: &dead };
        let routed = Routed::new(name, &fabric, "torus-2QoS");
        routed.compare();
        assert_eq!(routed.cycles(), (false, true), "{name}");
    }
}

/// A ring that is broken twice, and dead switches that follow each other in x: torus-2QoS gives up, layer B does not.
#[test]
#[ignore = "needs ibsim-utils, opensm and ibutils; make test-opensm"]
fn what_torus_2qos_refuses_has_routes() {
    require_programs();
    let cases = [
        ("broken-twice", dead(&[], &[(15, Axis::X), (17, Axis::X)]), "disjoint failures in x ring"),
        ("dead-in-x", dead(&[22, 23], &[]), "missing switch topology"),
    ];
    for (name, dead, reason) in cases {
        let torus = torus("5x3x3");
        let fabric = Fabric { torus: &torus, dead: &dead };
        let Outcome::Refused(line) = manage(name, &fabric, "torus-2QoS") else {
            panic!("{name}: torus-2QoS does not refuse")
        };
        assert!(line.contains(reason), "{name}: {line}");
        let graph = UpDown::new(&torus, &dead);
        let mut ours = DependencyGraph::new();
        for (from, to) in fabric.pairs() {
            let route = our_route(&fabric, &graph, from, to);
            ours.add_route(&route.unwrap_or_else(|| panic!("{name}: no route from {from} to {to}")));
        }
        assert_eq!(ours.cycle(), None, "{name}");
    }
}

/// Up to five dead links and up to one dead node, from a fixed sequence.
#[test]
#[ignore = "needs ibsim-utils, opensm and ibutils; make test-opensm"]
fn several_faults_leave_the_same_pairs_where_torus_2qos_routes() {
    require_programs();
    let mut state = 1_u64;
    let mut draw = |bound: u16| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % u64::from(bound)) as u16
    };
    let torus = torus("5x3x3");
    let (mut routed, mut refused) = (0, 0);
    for case in 0..12 {
        let links: Vec<_> = (0..1 + draw(5)).map(|_| (draw(45), Axis::ALL[usize::from(draw(3))])).collect();
        let nodes: Vec<_> = (0..draw(2)).map(|_| draw(45)).collect();
        let dead = dead(&nodes, &links);
        let fabric = Fabric { torus: &torus, dead: &dead };
        let name = format!("several-{case}");
        match manage(&name, &fabric, "torus-2QoS") {
            Outcome::Refused(line) => {
                refused += 1;
                println!("{name}: nodes {nodes:?}, links {links:?}: {line}");
            }
            Outcome::Routed(subnet) => {
                routed += 1;
                println!("{name}: nodes {nodes:?}, links {links:?}");
                let case = Routed::read(&name, &fabric, subnet);
                case.compare();
                assert_eq!(case.cycles(), (false, true), "{name}");
            }
        }
    }
    assert!(routed >= 4, "torus-2QoS routes {routed} of {} cases", routed + refused);
}

/// Other engines, as cases for the checkers: dor is torus-2QoS without datelines, updn needs one lane, lash has layers.
#[test]
#[ignore = "needs ibsim-utils, opensm and ibutils; make test-opensm"]
fn both_checkers_agree_on_other_engines() {
    let (torus, dead) = (torus("5x3x3"), DeadSet::new());
    let fabric = Fabric { torus: &torus, dead: &dead };
    for (engine, cyclic) in
        [("dor", Some(true)), ("updn", Some(false)), ("lash", Some(false)), ("minhop", None)]
    {
        let cycles = Routed::new(engine, &fabric, engine).cycles();
        println!("{engine}: cycles with its lanes and with one: {cycles:?}");
        if let Some(cyclic) = cyclic {
            assert_eq!(cycles.0, cyclic, "{engine}");
        }
    }
}
