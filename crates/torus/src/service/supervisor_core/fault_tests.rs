//! Faults of several components, and nodes that are avoided at the same time.

use millstream_health::registers::Condition;
use millstream_health::{PeerState, PeerWatch};
use millstream_torus_core::epoch::Participant;
use millstream_torus_core::{Axis, Link, Sign};

use super::tests::{page, settle_without};
use super::*;

const ALONG_X: Direction = Direction { axis: Axis::X, sign: Sign::Plus };

/// Nodes and host monitors of a torus, whose supervisor lives.
struct World {
    torus: Dimensions,
    core: SupervisorCore,
    nodes: Vec<Participant>,
    /// Node processes that have ended. They answer nothing.
    ended: BTreeSet<NodeNumber>,
    /// Nodes whose host monitors have ended.
    silent: BTreeSet<NodeNumber>,
    broken: BTreeSet<Link>,
    /// How adapters see their hosts.
    hosts: Vec<PeerWatch>,
    now: Instant,
}

impl World {
    fn new(torus: &str) -> World {
        let torus: Dimensions = torus.parse().unwrap();
        let mut core = SupervisorCore::new(torus, 0, Timers::default());
        torus.all().for_each(|node| core.handle_node(node, 1));
        core.act(1);
        let nodes = torus.all().map(Participant::new).collect();
        let (ended, silent, broken) = Default::default();
        let hosts = torus.all().map(|_| Timers::default().host_watch()).collect();
        let mut world = World { torus, core, nodes, ended, silent, broken, hosts, now: Instant::default() };
        world.pass(Duration::from_secs(1));
        assert!(world.is_well(), "{:?}", world.core.state());
        world
    }

    fn report(&self, node: NodeNumber) -> HostReport {
        let is_down = self.ended.contains(&node);
        let adapter = if is_down { Condition::Failed } else { Condition::Ok };
        let mut page = page(&self.torus, node, None, adapter);
        // What an adapter wrote last stays in its page.
        for direction in Direction::ALL.into_iter().filter(|_| !is_down) {
            let (link, other) = (self.torus.link(node, direction), self.torus.neighbour(node, direction));
            let Some(((view, link), other)) =
                page.neighbours[direction.index()].as_mut().zip(link).zip(other)
            else {
                continue;
            };
            if self.broken.contains(&link) || self.ended.contains(&other) {
                view.link = LinkState::Broken;
            } else if self.hosts[other.index()].state() == PeerState::Failed {
                view.host = Condition::Failed;
            }
        }
        page
    }

    fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.now = self.now + REPEAT;
            for (node, host) in self.torus.all().zip(&mut self.hosts) {
                // The register of a host whose monitor has ended stands still.
                let sequence = if self.silent.contains(&node) { 0 } else { self.now.as_nanos() / 1_000_000 };
                host.handle_read(sequence as u32, false);
            }
            for node in self.torus.all().filter(|node| !self.silent.contains(node)) {
                self.core.handle_report(node, self.report(node), self.now);
            }
            self.core.handle_time(self.now);
            settle_without(&mut self.core, &mut self.nodes, &self.ended);
        }
    }

    fn start_again(&mut self, node: NodeNumber) {
        assert!(self.ended.remove(&node));
        self.nodes[node.index()] = Participant::rejoining(node);
        self.hosts[node.index()] = Timers::default().host_watch();
        self.core.handle_node(node, self.now.as_nanos());
    }

    fn link(&self, node: u16) -> Link {
        self.torus.link(NodeNumber(node), ALONG_X).unwrap()
    }

    fn state(&self, node: u16) -> NodeState {
        self.core.states[usize::from(node)]
    }

    fn avoided(&self) -> Vec<u16> {
        assert!(self.core.state().settled, "{:?}", self.core.state());
        self.core.dead.nodes().map(|node| node.0).collect()
    }

    fn avoided_links(&self) -> Vec<Link> {
        self.core.dead.links().collect()
    }

    fn is_well(&self) -> bool {
        let state = self.core.state();
        let rows = state.nodes.iter().all(|row| row.state == NodeState::Ok && !row.avoided);
        let joined = |node: &Participant| node.has_joined() && node.current() == self.nodes[0].current();
        state.settled && rows && self.avoided_links().is_empty() && self.nodes.iter().all(joined)
    }
}

#[test]
fn a_torus_whose_nodes_were_all_avoided_returns() {
    for torus in ["1x1x1", "2x1x1", "3x1x1", "2x2x1"] {
        let mut world = World::new(torus);
        let nodes: Vec<_> = world.torus.all().collect();
        for &node in &nodes {
            world.ended.insert(node);
            world.pass(Duration::from_secs(1));
        }
        assert_eq!(world.avoided().len(), nodes.len(), "{torus}");
        // Their processes are there again, and their links connect one after the other.
        world.broken = world.torus.links().collect();
        nodes.iter().for_each(|&node| world.start_again(node));
        for link in world.broken.clone() {
            world.pass(Duration::from_secs(1));
            world.broken.remove(&link);
        }
        world.pass(Duration::from_secs(1));
        assert!(world.is_well(), "{torus}: {:?}", world.core.state());
    }
}

#[test]
fn a_node_comes_back_while_all_its_neighbours_are_avoided() {
    let mut world = World::new("3x1x1");
    let nodes = [NodeNumber(0), NodeNumber(1), NodeNumber(2)];
    for node in nodes {
        world.ended.insert(node);
        world.pass(Duration::from_secs(1));
    }
    for (node, avoided) in nodes.into_iter().zip([&[1, 2][..], &[2], &[]]) {
        world.start_again(node);
        world.pass(Duration::from_secs(1));
        assert_eq!(world.avoided(), avoided);
    }
    assert!(world.is_well(), "{:?}", world.core.state());
}

#[test]
fn a_node_comes_back_although_its_host_monitor_is_dead() {
    let mut world = World::new("4x1x1");
    world.ended.insert(NodeNumber(1));
    world.pass(Duration::from_secs(1));
    assert_eq!(world.avoided(), [1]);
    world.silent.insert(NodeNumber(1));
    world.pass(Duration::from_secs(1));
    assert_eq!((world.state(1), world.avoided()), (NodeState::NodeFailed, vec![1]));
    world.start_again(NodeNumber(1));
    world.pass(Duration::from_secs(1));
    assert_eq!((world.state(1), world.avoided()), (NodeState::Unknown, vec![1]), "its monitor may start");
    world.pass(Duration::from_secs(12));
    assert_eq!((world.state(1), world.avoided()), (NodeState::HostFailed, vec![]));
    world.silent.clear();
    world.pass(Duration::from_secs(1));
    assert!(world.is_well());
}

/// A cable is pulled while the node is down.
#[test]
fn a_node_comes_back_without_a_broken_link() {
    let mut world = World::new("4x1x1");
    let link = world.link(1);
    world.ended.insert(NodeNumber(1));
    world.pass(Duration::from_secs(1));
    world.broken.insert(link);
    world.start_again(NodeNumber(1));
    world.pass(Duration::from_secs(1));
    assert_eq!((world.avoided(), world.avoided_links()), (vec![1], vec![]), "its links have time to connect");
    world.pass(Duration::from_secs(10));
    assert_eq!((world.avoided(), world.avoided_links()), (vec![], vec![link]));
    assert_eq!(world.state(1), NodeState::LinkFailed(ALONG_X));
    world.broken.clear();
    world.pass(Duration::from_secs(1));
    assert!(world.is_well(), "{:?}", world.core.state());
}

#[test]
fn a_broken_link_is_avoided_although_a_host_monitor_at_its_end_is_dead() {
    let mut world = World::new("4x1x1");
    let (silent, link) = (NodeNumber(1), world.link(1));
    world.silent.insert(silent);
    world.pass(Duration::from_secs(1));
    assert_eq!((world.state(1), world.avoided_links()), (NodeState::HostFailed, vec![]));
    world.broken.insert(link);
    world.pass(Duration::from_secs(1));
    assert_eq!(
        (world.state(1), world.state(2)),
        (NodeState::HostFailed, NodeState::LinkFailed(ALONG_X.reversed()))
    );
    assert_eq!((world.avoided(), world.avoided_links()), (vec![], vec![link]));
    // It returns on the word of the end that reports.
    world.broken.clear();
    world.pass(Duration::from_secs(1));
    assert_eq!((world.avoided_links(), world.state(2)), (vec![], NodeState::Ok));
    world.silent.clear();
    world.pass(Duration::from_secs(1));
    assert!(world.is_well());
}

#[test]
fn a_link_that_heals_after_the_end_of_a_host_monitor_is_used_again() {
    let mut world = World::new("4x1x1");
    let link = world.link(1);
    world.broken.insert(link);
    world.pass(Duration::from_secs(1));
    world.silent.insert(NodeNumber(1));
    world.pass(Duration::from_secs(1));
    assert_eq!(world.avoided_links(), [link]);
    world.broken.clear();
    world.pass(Duration::from_secs(1));
    assert_eq!((world.avoided(), world.avoided_links()), (vec![], vec![]));
}

/// Each of two neighbours in a ring has one observer, which is not enough to call it dead.
#[test]
fn links_to_enclosed_nodes_are_avoided() {
    let mut world = World::new("8x1x1");
    let dead = [NodeNumber(1), NodeNumber(2)];
    world.ended.extend(dead);
    world.silent.extend(dead);
    world.pass(Duration::from_secs(1));
    assert_eq!([world.state(1), world.state(2)], [NodeState::Enclosed; 2]);
    assert_eq!(
        (world.state(0), world.state(3)),
        (NodeState::Ok, NodeState::Ok),
        "nobody knows whether a link failed"
    );
    assert_eq!(world.avoided_links(), [world.link(0), world.link(2)]);
    // The change of routes waits for answers of the enclosed nodes, which do not come.
    world.pass(Duration::from_secs(10));
    assert_eq!(world.avoided(), [1, 2]);
    for node in dead {
        world.silent.remove(&node);
        world.start_again(node);
        world.pass(Duration::from_secs(1));
    }
    assert!(world.is_well(), "{:?}", world.core.state());
}

/// A supervisor that is started again while the host monitor of node 1 is dead. Without the process of node 1, it may be that of
/// a host that is slow to start.
#[test]
fn a_dead_host_monitor_does_not_keep_a_supervisor_from_judging() {
    for (is_there, within) in [(true, Duration::from_millis(1100)), (false, START)] {
        let torus: Dimensions = "4x1x1".parse().unwrap();
        let mut core = SupervisorCore::new(torus, 0, Timers::default());
        let others = torus.all().filter(|&node| node != NodeNumber(1));
        others.for_each(|node| core.handle_node(node, 1));
        if is_there {
            core.handle_node(NodeNumber(1), 1);
        }
        let mut now = Instant::default();
        while !core.has_judged() {
            for node in torus.all().filter(|&node| node != NodeNumber(1)) {
                core.handle_report(node, page(&torus, node, None, Condition::Ok), now);
            }
            core.handle_time(now);
            now = now + Duration::from_millis(20);
        }
        let time = now.since(Instant::default());
        assert!((within / 2..=within + Duration::from_millis(100)).contains(&time), "{time:?}");
        assert_eq!(core.lost(), []);
    }
}
