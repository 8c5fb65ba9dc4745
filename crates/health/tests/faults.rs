//! Every single and every pair of faults of 2×2×2, and large faults of 3×3×3: the verdict about each node is right, or Enclosed,
//! never Ok.

use std::collections::{BTreeSet, VecDeque};

use millstream_health::registers::{Condition, LinkState};
use millstream_health::verdict::{NeighbourView, Path};
use millstream_health::{FloodedReport, FloodingRelay, HostReport, NodeState, Reports};
use millstream_torus_core::{Dimensions, Direction, Link, NodeNumber};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    Host(NodeNumber),
    Adapter(NodeNumber),
    Service(NodeNumber),
    Link(Link),
}

struct World {
    torus: Dimensions,
    faults: BTreeSet<Fault>,
}

impl World {
    fn has(&self, fault: Fault) -> bool {
        self.faults.contains(&fault)
    }

    /// The neighbour whose frames arrive from this direction.
    fn heard(&self, node: NodeNumber, direction: Direction) -> Option<NodeNumber> {
        let other = self.torus.neighbour(node, direction)?;
        let link = self.torus.link(node, direction)?;
        let works = !self.has(Fault::Adapter(other)) && !self.has(Fault::Link(link));
        works.then_some(other)
    }

    fn page(&self, node: NodeNumber) -> HostReport {
        let failed = |is: bool| if is { Condition::Failed } else { Condition::Ok };
        let neighbours = Direction::ALL.map(|direction| {
            self.torus.neighbour(node, direction)?;
            Some(match self.heard(node, direction) {
                Some(other) => NeighbourView {
                    link: LinkState::Up,
                    host: failed(self.has(Fault::Host(other))),
                    service: !self.has(Fault::Service(other)),
                },
                None => NeighbourView { link: LinkState::Broken, host: Condition::Ok, service: true },
            })
        });
        HostReport { host: Condition::Ok, adapter: failed(self.has(Fault::Adapter(node))), neighbours }
    }

    /// The reports of all nodes, over the service network or by flooding.
    fn reports(&self) -> Reports {
        let mut reports = Reports::new(self.torus);
        for node in self.torus.all().filter(|&node| !self.has(Fault::Host(node))) {
            if !self.has(Fault::Service(node)) {
                reports.handle_report(node, self.page(node), Path::Service);
            } else if !self.has(Fault::Adapter(node)) && self.flood_reaches_a_service(node) {
                reports.handle_report(node, self.page(node), Path::Torus);
            }
        }
        reports
    }

    fn flood_reaches_a_service(&self, observer: NodeNumber) -> bool {
        let mut relays: Vec<_> = self.torus.all().map(|_| FloodingRelay::new(&self.torus)).collect();
        let first = FloodedReport { observer, sequence: 1, hops: 0, page: self.page(observer) };
        let mut arriving = VecDeque::from([(observer, first)]);
        let mut reached = false;
        while let Some((node, report)) = arriving.pop_front() {
            let Some(onward) = relays[node.index()].handle_report(&report) else { continue };
            reached |= !self.has(Fault::Host(node)) && !self.has(Fault::Service(node));
            for direction in Direction::ALL {
                // A frame leaves over the same links that are heard from the other end.
                let Some(other) = self.heard(node, direction) else { continue };
                arriving.push_back((other, onward.clone()));
            }
        }
        reached
    }

    /// What may be shown for a node.
    fn right(&self, node: NodeNumber, state: NodeState) -> bool {
        let (host, adapter) = (self.has(Fault::Host(node)), self.has(Fault::Adapter(node)));
        let service = self.has(Fault::Service(node));
        match state {
            NodeState::Enclosed => true,
            NodeState::Ok => !host && !adapter && !service && self.broken_link(node).is_none(),
            NodeState::HostFailed => host && !adapter,
            NodeState::AdapterFailed => adapter && !host && !service,
            // Without host or service network, a node with a dead adapter is silent for everybody.
            NodeState::NodeFailed => adapter && (host || service),
            NodeState::ServiceLost => service && !adapter && !host,
            NodeState::LinkFailed(direction) => {
                self.torus.link(node, direction).is_some_and(|link| self.has(Fault::Link(link)))
            }
            _ => false,
        }
    }

    /// A dead link of a node to a live adapter.
    fn broken_link(&self, node: NodeNumber) -> Option<Direction> {
        Direction::ALL.into_iter().find(|&direction| {
            let Some(other) = self.torus.neighbour(node, direction) else { return false };
            let link = self.torus.link(node, direction).expect("has a neighbour");
            self.has(Fault::Link(link)) && !self.has(Fault::Adapter(other))
        })
    }
}

fn components(torus: &Dimensions) -> Vec<Fault> {
    let nodes = torus.all().flat_map(|n| [Fault::Host(n), Fault::Adapter(n), Fault::Service(n)]);
    nodes.chain(torus.links().map(Fault::Link)).collect()
}

/// Checks all verdicts of a fault set; returns how many are Enclosed.
fn check(torus: Dimensions, faults: impl IntoIterator<Item = Fault>) -> usize {
    let world = World { torus, faults: faults.into_iter().collect() };
    let reports = world.reports();
    let mut enclosed = 0;
    for node in torus.all() {
        let state = reports.verdict(node);
        assert!(world.right(node, state), "{node}: {state:?} with {:?}", world.faults);
        enclosed += usize::from(state == NodeState::Enclosed);
    }
    enclosed
}

#[test]
fn every_single_fault_and_every_pair_is_seen() {
    let torus: Dimensions = "2x2x2".parse().unwrap();
    let all = components(&torus);
    assert_eq!(all.len(), 36);
    assert_eq!(check(torus, []), 0);
    let mut cases = 0;
    for (i, &first) in all.iter().enumerate() {
        assert_eq!(check(torus, [first]), 0, "{first:?}");
        for &second in &all[i + 1..] {
            assert_eq!(check(torus, [first, second]), 0, "{first:?}, {second:?}");
            cases += 1;
        }
    }
    assert_eq!(cases, 630);
}

#[test]
fn a_node_behind_dead_neighbours_is_enclosed_and_never_ok() {
    let torus: Dimensions = "3x3x3".parse().unwrap();
    let middle = NodeNumber(13);
    let around = Direction::ALL.map(|d| torus.neighbour(middle, d).unwrap());
    let dead = around.into_iter().flat_map(|node| [Fault::Host(node), Fault::Adapter(node)]);
    assert_eq!(check(torus, dead.chain([Fault::Service(middle)])), 1);
}

#[test]
fn all_services_but_one_are_lost_and_every_report_still_arrives() {
    let torus: Dimensions = "3x3x3".parse().unwrap();
    let lost: Vec<_> = torus.all().skip(1).map(Fault::Service).collect();
    let world = World { torus, faults: lost.into_iter().collect() };
    let reports = world.reports();
    assert_eq!(reports.verdict(NodeNumber(0)), NodeState::Ok);
    assert!(torus.all().skip(1).all(|node| reports.verdict(node) == NodeState::ServiceLost));
}

/// Faults of many components, with the number of nodes that are enclosed.
#[test]
fn large_faults_are_seen() {
    let torus: Dimensions = "3x3x3".parse().unwrap();
    let middle = NodeNumber(13);
    let around = Direction::ALL.map(|direction| torus.neighbour(middle, direction).unwrap());
    let dead = |node: NodeNumber| [Fault::Host(node), Fault::Adapter(node)];
    // The middle node's adapter, and the service network of all six neighbours.
    let services = around.map(Fault::Service);
    assert_eq!(check(torus, [Fault::Adapter(middle)].into_iter().chain(services)), 0);
    assert_eq!(check(torus, dead(middle).into_iter().chain(services)), 0);
    // Two neighbours in one ring.
    let ring = [around[0], middle];
    assert_eq!(check(torus, ring.into_iter().flat_map(dead)), 0);
    assert_eq!(check(torus, ring.map(Fault::Adapter)), 0);
    // A whole plane.
    let plane = || torus.all().take(9);
    assert_eq!(check(torus, plane().flat_map(dead)), 0);
    assert_eq!(check(torus, plane().map(Fault::Host)), 0);
    assert_eq!(check(torus, plane().map(Fault::Service)), 0);
    // All but one node: the word of one observer is not enough to call a node dead.
    let others = || torus.all().filter(|&node| node != middle);
    assert_eq!(check(torus, others().flat_map(dead)), 26);
    assert_eq!(check(torus, others().map(Fault::Service)), 0);
}
