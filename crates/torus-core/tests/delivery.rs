//! Whole nodes with faults: order and exactly-once delivery per pair while links and nodes die and return, routes
//! change in every phase, supervisors are replaced, and messages are lost, repeated and reordered.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use millstream_quantity::Instant;
use millstream_torus_core::epoch::{Answer, Ballot, Coordinator, Effect, Order, Participant};
use millstream_torus_core::header::{Acknowledgement, Kind};
use millstream_torus_core::pair::Acceptance;
use millstream_torus_core::route::{NodeTable, UpDown, VirtualChannel};
use millstream_torus_core::router::{Action, DropCause, Origin, Port, SlotRef};
use millstream_torus_core::{
    Axis, DeadSet, Dimensions, Direction, Epoch, Header, Link, NodeNumber, PairReceiver, Route, Router,
    RouterOptions, Sign, Sources, TorusRouting, Unreachable,
};
use proptest::prelude::*;

const WINDOW: usize = 6;
const TIMEOUT: Duration = Duration::from_nanos(400);
/// Steps after which old routes are given up.
const DRAIN_LIMIT: u64 = 250;

struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 20) % limit
    }
}

enum Frame {
    Packet { slot: u16, header: Header },
    Credit([u32; VirtualChannel::COUNT]),
}

#[derive(Clone)]
enum Service {
    Order(Order),
    Answer(Answer),
}

struct Node {
    router: Router<()>,
    sources: Sources<u32>,
    receivers: BTreeMap<NodeNumber, PairReceiver>,
    participant: Participant,
    acknowledgements: VecDeque<NodeNumber>,
    activated: u64,
    outgoing: Option<Header>,
}

impl Node {
    fn new(torus: &Dimensions, here: NodeNumber) -> Node {
        let table = NodeTable::new(&UpDown::new(torus, &DeadSet::new()), here);
        let mut routing = TorusRouting::new(*torus, here);
        routing.install(Epoch(0), table.clone());
        Node {
            router: Router::new(routing, RouterOptions { slots: 2, injection: 2 }),
            sources: Sources::new(*torus, here, table, WINDOW, TIMEOUT),
            receivers: BTreeMap::new(),
            participant: Participant::new(here),
            acknowledgements: VecDeque::new(),
            activated: 0,
            outgoing: None,
        }
    }
}

/// What a target executed from one source, by the life of both.
type Executed = BTreeMap<(NodeNumber, u32, NodeNumber, u32), Vec<u32>>;

struct World {
    torus: Dimensions,
    nodes: Vec<Node>,
    /// Lives of each node: grows when it dies.
    lives: Vec<u32>,
    dead: DeadSet,
    wires: Vec<[VecDeque<Frame>; 6]>,
    advertised: Vec<[[u32; VirtualChannel::COUNT]; 6]>,
    /// Messages of the service network: time, node, whether the supervisor is the receiver.
    service: Vec<(u64, NodeNumber, bool, Service)>,
    coordinator: Coordinator,
    term: u64,
    executed: Executed,
    /// Life of the source of each packet.
    source_lives: BTreeMap<u32, u32>,
    lost: Vec<Unreachable>,
    /// Packets whose sources learned that their targets were lost.
    lost_packets: BTreeSet<u32>,
    now: u64,
    random: Random,
    /// Probability of loss and of repetition of a service message in percent.
    trouble: u64,
}

impl World {
    fn new(torus: Dimensions, seed: u64, trouble: u64) -> World {
        let nodes: Vec<_> = torus.all().map(|node| Node::new(&torus, node)).collect();
        let count = nodes.len();
        let ballot = Ballot { term: 1, supervisor: 0 };
        let mut world = World {
            torus,
            nodes,
            lives: vec![0; count],
            dead: DeadSet::new(),
            wires: (0..count).map(|_| Default::default()).collect(),
            advertised: vec![Default::default(); count],
            service: Vec::new(),
            coordinator: Coordinator::take_over(torus, ballot, DeadSet::new()),
            term: 1,
            executed: BTreeMap::new(),
            source_lives: BTreeMap::new(),
            lost: Vec::new(),
            lost_packets: BTreeSet::new(),
            now: 0,
            random: Random(seed | 1),
            trouble,
        };
        world.mend_links();
        world
    }

    fn kill_link(&mut self, link: Link) {
        let plus = Direction::new(link.axis, Sign::Plus);
        let Some(other) = self.torus.neighbour(link.from, plus) else { return };
        self.dead.kill_link(link);
        self.cut(link.from, plus);
        self.cut(other, plus.reversed());
    }

    /// Takes one end of a link down; frames on the wire from there vanish.
    fn cut(&mut self, node: NodeNumber, direction: Direction) {
        self.wires[node.index()][direction.index()].clear();
        self.nodes[node.index()].router.set_link(direction, false);
    }

    fn kill_node(&mut self, node: NodeNumber) {
        if !self.dead.node_lives(node) {
            return;
        }
        for direction in Direction::ALL {
            if let Some(other) = self.torus.neighbour(node, direction) {
                self.cut(node, direction);
                self.cut(other, direction.reversed());
            }
        }
        self.dead.kill_node(node);
        self.lives[node.index()] += 1;
        self.nodes[node.index()] =
            Node { participant: Participant::rejoining(node), ..Node::new(&self.torus, node) };
        self.service.retain(|&(_, to, to_supervisor, _)| to_supervisor || to != node);
    }

    /// A node begins anew, perhaps before anybody has missed it. The supervisor may not learn so.
    fn revive_node(&mut self, node: NodeNumber) {
        if !self.dead.node_lives(node) {
            self.dead.revive_node(node);
            if self.random.below(2) == 0 {
                self.coordinator.handle_restart(node);
            }
        }
    }

    /// The supervisor learns which nodes have begun anew and do not take part yet.
    fn tell_restarts(&mut self) {
        for node in self.torus.all().filter(|node| !self.nodes[node.index()].participant.has_joined()) {
            self.coordinator.handle_restart(node);
        }
    }

    /// Packets of a pair whose source did not learn that the target was lost, or that were executed nevertheless.
    fn due(&self, posted: &[u32], executed: &[u32]) -> Vec<u32> {
        let is_due = |packet: &&u32| !self.lost_packets.contains(packet) || executed.contains(packet);
        posted.iter().filter(is_due).copied().collect()
    }

    /// Brings up every link whose ends live and have released all slots of it.
    fn mend_links(&mut self) {
        for node in self.torus.all() {
            for axis in Axis::ALL {
                let plus = Direction::new(axis, Sign::Plus);
                let Some(other) = self.dead.live_neighbour(&self.torus, node, plus) else { continue };
                if self.nodes[node.index()].router.link_is_up(plus) {
                    continue;
                }
                let near = self.nodes[node.index()].router.reset_link(plus);
                let far = self.nodes[other.index()].router.reset_link(plus.reversed());
                if near.is_ok() && far.is_ok() {
                    self.advertised[node.index()][plus.index()] = Default::default();
                    self.advertised[other.index()][plus.reversed().index()] = Default::default();
                    self.nodes[node.index()].router.set_link(plus, true);
                    self.nodes[other.index()].router.set_link(plus.reversed(), true);
                }
            }
        }
    }

    /// The supervisor learns what is dead.
    fn detect(&mut self) {
        self.coordinator.request(self.dead.clone());
    }

    fn push(&mut self, from: NodeNumber, to: NodeNumber, packet: u32) -> Result<(), Unreachable> {
        self.source_lives.insert(packet, self.lives[from.index()]);
        self.nodes[from.index()].sources.push(to, packet, Instant::from_nanos(self.now))
    }

    fn replace_supervisor(&mut self) {
        self.term += 1;
        let ballot = Ballot { term: self.term, supervisor: (self.term % 3) as u16 };
        self.coordinator = Coordinator::take_over(self.torus, ballot, self.dead.clone());
    }

    fn send(&mut self, node: NodeNumber, to_supervisor: bool, message: &Service) {
        let copies = 1 + u64::from(self.random.below(100) < self.trouble);
        for _ in 0..copies {
            if self.random.below(100) >= self.trouble {
                let at = self.now + 1 + self.random.below(20);
                self.service.push((at, node, to_supervisor, message.clone()));
            }
        }
    }

    fn step(&mut self) {
        self.now += 1;
        self.mend_links();
        if self.now.is_multiple_of(60) {
            self.coordinator.repeat();
        }
        while let Some((node, order)) = self.coordinator.poll() {
            self.send(node, false, &Service::Order(order));
        }
        let (due, later) = std::mem::take(&mut self.service).into_iter().partition(|m| m.0 <= self.now);
        self.service = later;
        let due: Vec<_> = due;
        for (_, node, _, message) in due {
            match message {
                Service::Answer(answer) => self.coordinator.handle_answer(node, &answer),
                Service::Order(order) if self.dead.node_lives(node) => self.handle_order(node, &order),
                Service::Order(_) => {}
            }
        }
        for node in self.torus.all().filter(|&node| self.dead.node_lives(node)).collect::<Vec<_>>() {
            self.run_node(node);
        }
        for node in self.torus.all() {
            for direction in Direction::ALL {
                if self.random.below(4) != 0 {
                    self.receive(node, direction);
                }
            }
        }
    }

    fn handle_order(&mut self, here: NodeNumber, order: &Order) {
        let (torus, now) = (self.torus, Instant::from_nanos(self.now));
        let node = &mut self.nodes[here.index()];
        let mut answers = Vec::new();
        for effect in node.participant.handle_order(order) {
            match effect {
                Effect::Install { epoch, plan } => {
                    if plan.returning.contains(&here) {
                        node.receivers.clear();
                    }
                    node.receivers.retain(|source, _| !plan.returning.contains(source));
                    let table = NodeTable::new(&UpDown::new(&torus, &plan.dead), here);
                    node.router.routing_mut().install(epoch, table);
                    node.router.reroute();
                }
                Effect::Retire { epoch } => {
                    node.sources.give_up_old_routes(now);
                    node.router.routing_mut().retire(epoch);
                    node.router.reroute();
                }
                Effect::Activate { epoch, plan } => {
                    let table = node.router.routing().table(epoch).expect("installed").clone();
                    node.sources.activate(epoch, plan.dead, plan.returning, table, now);
                    node.activated = self.now;
                }
                Effect::Answer(answer) => answers.push(answer),
            }
        }
        for answer in answers {
            self.send(here, true, &Service::Answer(answer));
        }
    }

    fn run_node(&mut self, here: NodeNumber) {
        let now = Instant::from_nanos(self.now);
        let node = &mut self.nodes[here.index()];
        if self.now >= node.activated + DRAIN_LIMIT {
            node.sources.give_up_old_routes(now);
        }
        if node.sources.poll_timeout().is_some_and(|at| at <= now) {
            node.sources.handle_timeout(now);
        }
        while let Some((lost, packet)) = node.sources.poll_lost() {
            self.lost.push(lost);
            self.lost_packets.insert(packet);
        }
        let drained = if node.sources.is_drained() { node.participant.handle_drained() } else { None };
        if let Some(answer) = drained {
            self.send(here, true, &Service::Answer(answer));
        }
        self.acknowledge(here);
        loop {
            let node = &mut self.nodes[here.index()];
            let header = node.outgoing.take().or_else(|| {
                node.sources.poll().map(|out| {
                    let mut header = Header::new(Kind::Put, here, out.target);
                    header.operation = out.packet;
                    (header.generation, header.sequence) = (out.generation, out.sequence);
                    routed(header, out.epoch, out.route)
                })
            });
            let Some(header) = header else { break };
            if node.router.inject(Port::Local, header, ()).is_err() {
                node.outgoing = Some(header);
                break;
            }
            self.actions(here);
        }
        for direction in Direction::ALL {
            if self.random.below(3) == 0 {
                continue;
            }
            if let Some(sent) = self.nodes[here.index()].router.transmit(direction) {
                let frame = Frame::Packet { slot: sent.slot, header: sent.header };
                self.wires[here.index()][direction.index()].push_back(frame);
                if let Origin::Slot(slot) = sent.origin {
                    self.release(here, slot);
                }
            }
            self.actions(here);
        }
    }

    fn acknowledge(&mut self, here: NodeNumber) {
        let node = &mut self.nodes[here.index()];
        for _ in 0..node.acknowledgements.len() {
            let Some(to) = node.acknowledgements.pop_front() else { break };
            let Some(receiver) = node.receivers.get_mut(&to).filter(|receiver| receiver.unreported() > 0)
            else {
                continue;
            };
            // Without a route the source repeats later.
            let Ok(route) = node.sources.route(to) else { continue };
            let mut header = Header::new(Kind::Acknowledge, here, to);
            let (generation, next) = receiver.acknowledge();
            header.acknowledgement = Some(Acknowledgement { generation, next, refusals: 0 });
            let header = routed(header, node.sources.epoch(), route);
            // A full queue loses it; the next one covers it.
            let _ = node.router.inject(Port::Local, header, ());
        }
        self.actions(here);
    }

    fn receive(&mut self, from: NodeNumber, direction: Direction) {
        let Some(to) = self.torus.neighbour(from, direction) else { return };
        let Some(frame) = self.wires[from.index()][direction.index()].pop_front() else { return };
        let side = direction.reversed();
        let router = &mut self.nodes[to.index()].router;
        match frame {
            Frame::Packet { slot, header } => router.handle_packet(side, slot, header).expect("has a credit"),
            Frame::Credit(freed) => {
                for (vc, &count) in freed.iter().enumerate() {
                    router.handle_credit(side, VirtualChannel(vc as u8), count).expect("true credits");
                }
            }
        }
        self.actions(to);
    }

    fn release(&mut self, node: NodeNumber, slot: SlotRef) {
        self.nodes[node.index()].router.release(slot).expect("taken");
        self.credits(node, slot.side);
    }

    fn credits(&mut self, node: NodeNumber, side: Direction) {
        let router = &self.nodes[node.index()].router;
        let freed = router.freed(side);
        if router.link_is_up(side) && self.advertised[node.index()][side.index()] != freed {
            self.advertised[node.index()][side.index()] = freed;
            self.wires[node.index()][side.index()].push_back(Frame::Credit(freed));
        }
    }

    fn actions(&mut self, here: NodeNumber) {
        while let Some(action) = self.nodes[here.index()].router.poll() {
            let (header, origin) = match action {
                Action::Deliver { header, origin } => (header, origin),
                Action::Drop { .. } => {
                    Direction::ALL.into_iter().for_each(|side| self.credits(here, side));
                    continue;
                }
            };
            self.deliver(here, &header);
            if let Origin::Slot(slot) = origin {
                self.release(here, slot);
            }
        }
    }

    fn deliver(&mut self, here: NodeNumber, header: &Header) {
        let node = &mut self.nodes[here.index()];
        if let Some(ack) = header.acknowledgement {
            node.sources.handle_acknowledgement(
                header.source,
                ack.generation,
                ack.next,
                Instant::from_nanos(self.now),
            );
            return;
        }
        // It neither executes nor acknowledges before the sources have begun their pairs anew.
        if !node.participant.has_joined() {
            return;
        }
        let receiver = node.receivers.entry(header.source).or_default();
        let acceptance = receiver.handle_packet(header.generation, header.sequence);
        node.acknowledgements.push_back(header.source);
        if acceptance == Acceptance::Execute {
            // A packet may arrive after its source has died.
            let key = (header.source, self.source_lives[&header.operation], here, self.lives[here.index()]);
            self.executed.entry(key).or_default().push(header.operation);
        }
    }

    fn inside(&self) -> i64 {
        let packet = |frame: &&Frame| matches!(frame, Frame::Packet { .. });
        let flying: usize = self.wires.iter().flatten().map(|wire| wire.iter().filter(packet).count()).sum();
        flying as i64 + self.nodes.iter().map(|node| node.router.waiting() as i64).sum::<i64>()
    }

    fn is_idle(&self) -> bool {
        let live = |node: &NodeNumber| self.dead.node_lives(*node);
        self.coordinator.is_settled()
            && self.torus.all().filter(live).all(|node| {
                let node = &self.nodes[node.index()];
                node.sources.is_idle() && node.sources.is_drained() && node.outgoing.is_none()
            })
            && self.inside() == 0
    }
}

fn routed(mut header: Header, epoch: Epoch, route: Route) -> Header {
    header.epoch = epoch;
    match route {
        Route::DimensionOrder { signs, .. } => header.signs = signs,
        Route::UpDown { .. } => header.vc = VirtualChannel::up_down(epoch),
    }
    header
}

#[derive(Clone, Debug)]
enum Event {
    KillLink(u16, usize),
    ReviveLink(u16, usize),
    KillNode(u16),
    ReviveNode(u16),
    Detect,
    ReplaceSupervisor,
    Put(u16, u16, u8),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        2 => (any::<u16>(), 0..3_usize).prop_map(|(node, axis)| Event::KillLink(node, axis)),
        2 => (any::<u16>(), 0..3_usize).prop_map(|(node, axis)| Event::ReviveLink(node, axis)),
        1 => any::<u16>().prop_map(Event::KillNode),
        1 => any::<u16>().prop_map(Event::ReviveNode),
        3 => Just(Event::Detect),
        1 => Just(Event::ReplaceSupervisor),
        12 => (any::<u16>(), any::<u16>(), 1..12_u8).prop_map(|(from, to, count)| Event::Put(from, to, count)),
    ]
}

fn check(torus: Dimensions, seed: u64, trouble: u64, events: &[(Event, u64)]) {
    let mut world = World::new(torus, seed, trouble);
    let number = |raw: u16| NodeNumber(raw % torus.nodes() as u16);
    let mut next = 0;
    // What each source of this life posted to each target of this life.
    let mut posted: Executed = BTreeMap::new();
    for (event, pause) in events {
        match *event {
            Event::KillLink(node, axis) | Event::ReviveLink(node, axis) => {
                let direction = Direction::new(Axis::ALL[axis], Sign::Plus);
                if let Some(link) = torus.link(number(node), direction) {
                    match event {
                        Event::KillLink(..) => world.kill_link(link),
                        _ => world.dead.revive_link(link),
                    }
                }
            }
            Event::KillNode(node) => world.kill_node(number(node)),
            Event::ReviveNode(node) => world.revive_node(number(node)),
            Event::Detect => world.detect(),
            Event::ReplaceSupervisor => world.replace_supervisor(),
            Event::Put(from, to, count) => {
                let (from, to) = (number(from), number(to));
                if from != to
                    && world.nodes[from.index()].participant.has_joined()
                    && world.dead.node_lives(to)
                {
                    for _ in 0..count {
                        if world.push(from, to, next).is_ok() {
                            let key = (from, world.lives[from.index()], to, world.lives[to.index()]);
                            posted.entry(key).or_default().push(next);
                        }
                        next += 1;
                    }
                }
            }
        }
        for _ in 0..*pause {
            world.step();
        }
    }
    // All links return, then all nodes: pairs behind a partition wait for a path. The network comes to rest.
    world.trouble = 0;
    let links: Vec<_> = world.dead.links().collect();
    links.into_iter().for_each(|link| world.dead.revive_link(link));
    run_until(&mut world, |world| world.coordinator.is_settled());
    let nodes: Vec<_> = world.dead.nodes().collect();
    nodes.into_iter().for_each(|node| world.dead.revive_node(node));
    world.tell_restarts();
    run_until(&mut world, World::is_idle);
    assert!(world.is_idle(), "the network does not come to rest: {:?}", world.coordinator);

    for (&(from, from_life, to, to_life), executed) in &world.executed {
        let key = (from, from_life, to, to_life);
        let wanted = posted.get(&key).unwrap_or_else(|| panic!("{from} to {to}: executed without a post"));
        let wanted = world.due(wanted, executed);
        // A prefix: in order, each once, nothing left out.
        assert!(wanted.starts_with(executed), "{from} to {to}: posted {wanted:?}, executed {executed:?}");
    }
    for (&(from, from_life, to, to_life), wanted) in &posted {
        let both_live = world.lives[from.index()] == from_life
            && world.lives[to.index()] == to_life
            && world.dead.node_lives(from)
            && world.dead.node_lives(to);
        if both_live {
            let executed = world.executed.get(&(from, from_life, to, to_life)).cloned().unwrap_or_default();
            assert_eq!(executed, world.due(wanted, &executed), "{from} to {to}");
        }
    }
    check_conservation(&world);
    check_tables(&world);
}

fn run_until(world: &mut World, done: impl Fn(&World) -> bool) {
    world.detect();
    let limit = world.now + 60_000;
    while !done(world) && world.now < limit {
        world.step();
    }
}

/// All that entered a node left it, was delivered, or was dropped with a cause.
fn check_conservation(world: &World) {
    let balance: i64 = (world.nodes.iter())
        .map(|node| {
            let c = node.router.counters();
            (c.injected + c.received) as i64 - (c.delivered + c.dropped_total() + c.transmitted) as i64
        })
        .sum();
    assert_eq!(balance, 0, "packets inside nodes at rest");
}

/// All live nodes use the same epoch and equal tables.
fn check_tables(world: &World) {
    let epoch = world.coordinator.current();
    let graph = UpDown::new(&world.torus, &world.dead);
    for node in world.torus.all().filter(|&node| world.dead.node_lives(node)) {
        let state = &world.nodes[node.index()];
        assert_eq!((state.participant.current(), state.sources.epoch()), (epoch, epoch), "{node}");
        let table = state.router.routing().table(epoch);
        assert_eq!(table, Some(&NodeTable::new(&graph, node)), "{node}");
    }
}

fn dimensions() -> impl Strategy<Value = Dimensions> {
    prop_oneof![Just("2x2x2"), Just("3x2x1"), Just("5x1x1"), Just("3x3x2"), Just("4x2x2")]
        .prop_map(|text| text.parse().expect("valid"))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn pairs_keep_order_and_execute_once(
        torus in dimensions(),
        seed: u64,
        trouble in 0..30_u64,
        events in proptest::collection::vec((event(), 0..120_u64), 1..40),
    ) {
        check(torus, seed, trouble, &events);
    }
}

/// Nodes activate an epoch one after another, and a returned node may send to one that has only prepared it.
#[test]
fn packets_of_a_returned_node_are_executed_once() {
    let torus: Dimensions = "3x2x1".parse().unwrap();
    for seed in 0..200 {
        let mut world = World::new(torus, seed, 20);
        world.kill_node(NodeNumber(1));
        run_until(&mut world, |world| world.coordinator.is_settled());
        world.dead.revive_node(NodeNumber(1));
        run_until(&mut world, |world| world.nodes[1].participant.has_joined());
        for target in [0, 2, 3, 4, 5] {
            world.push(NodeNumber(1), NodeNumber(target), u32::from(target)).unwrap();
        }
        run_until(&mut world, World::is_idle);
        for target in [0, 2, 3, 4, 5] {
            let executed = world.executed.get(&(NodeNumber(1), 1, NodeNumber(target), 0));
            assert_eq!(executed, Some(&vec![u32::from(target)]), "seed {seed}, node {target}");
        }
    }
}

/// All nodes die at once: the supervisor goes on without answers, and the nodes return.
#[test]
fn a_network_returns_after_all_its_nodes_died() {
    let torus: Dimensions = "5x1x1".parse().unwrap();
    let mut world = World::new(torus, 2, 0);
    world.kill_node(NodeNumber(4));
    run_until(&mut world, |world| world.coordinator.is_settled());
    torus.all().for_each(|node| world.kill_node(node));
    run_until(&mut world, |world| world.coordinator.is_settled());
    torus.all().for_each(|node| world.dead.revive_node(node));
    run_until(&mut world, World::is_idle);
    assert!(world.is_idle(), "{:?}", world.coordinator);
    check_tables(&world);
}

#[test]
fn a_dead_link_moves_pairs_and_repeats_lost_packets() {
    let torus: Dimensions = "5x1x1".parse().unwrap();
    let mut world = World::new(torus, 3, 0);
    for i in 0..40 {
        world.push(NodeNumber(0), NodeNumber(2), i).unwrap();
    }
    (0..12).for_each(|_| world.step());
    world.kill_link(Link { from: NodeNumber(1), axis: Axis::X });
    (0..20).for_each(|_| world.step());
    let dropped = world.nodes[1].router.counters().dropped[DropCause::DeadLink as usize];
    world.detect();
    while !world.is_idle() {
        world.step();
        assert!(world.now < 10_000);
    }
    assert!(dropped > 0);
    assert!(world.nodes[0].sources.repeated_and_foreign().0 > 0);
    let executed = &world.executed[&(NodeNumber(0), 0, NodeNumber(2), 0)];
    assert_eq!(*executed, (0..40).collect::<Vec<_>>());
}

#[test]
fn a_lost_node_ends_operations_and_returns_as_a_new_one() {
    let torus: Dimensions = "3x3x1".parse().unwrap();
    let mut world = World::new(torus, 9, 0);
    let (a, b) = (NodeNumber(0), NodeNumber(4));
    let settle = |world: &mut World| {
        let limit = world.now + 10_000;
        while !world.is_idle() {
            world.step();
            assert!(world.now < limit);
        }
    };
    settle(&mut world);
    world.kill_node(b);
    world.push(a, b, 1).unwrap();
    world.detect();
    settle(&mut world);
    assert_eq!(world.lost, [Unreachable::NodeLost { node: b }]);
    assert_eq!(world.push(a, b, 2), Err(Unreachable::NodeLost { node: b }));
    world.dead.revive_node(b);
    world.detect();
    settle(&mut world);
    world.push(a, b, 7).unwrap();
    world.push(b, a, 8).unwrap();
    settle(&mut world);
    assert_eq!(world.executed[&(a, 0, b, 1)], [7]);
    assert_eq!(world.executed[&(b, 1, a, 0)], [8]);
    assert_eq!(world.coordinator.current(), Epoch(2));
}
