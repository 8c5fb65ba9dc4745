//! Routers joined by links with random delays.

use std::collections::{BTreeMap, VecDeque};

use millstream_torus_core::header::Kind;
use millstream_torus_core::route::choice::choose_with_table;
use millstream_torus_core::route::{NodeTable, UpDown, VirtualChannel};
use millstream_torus_core::router::{Action, Counters, DropCause, Origin, Port, Routing, SlotRef};
use millstream_torus_core::{
    DeadSet, Dimensions, Direction, Epoch, Header, NodeNumber, Route, Router, RouterOptions, TorusRouting,
};

/// Small random numbers (xorshift).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 20) % limit as u64) as usize
    }

    pub(crate) fn shuffle<V>(&mut self, values: &mut [V]) {
        for i in (1..values.len()).rev() {
            values.swap(i, self.below(i + 1));
        }
    }
}

enum Frame {
    Packet { slot: u16, header: Header },
    Credit([u32; VirtualChannel::COUNT]),
}

/// A configuration of routes that is valid in the network.
pub(crate) struct Configuration {
    pub(crate) dead: DeadSet,
    pub(crate) graph: UpDown,
}

/// What a node does when a packet arrives.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Replies {
    /// Nothing.
    None,
    /// It answers from places of its own, so arrivals never wait.
    Reserved,
    /// Faulty: it keeps the packet's slot until the network accepts the answer.
    HoldSlot,
}

pub(crate) struct Network<R> {
    pub(crate) torus: Dimensions,
    pub(crate) routers: Vec<Router<u32, R>>,
    pub(crate) configurations: BTreeMap<Epoch, Configuration>,
    /// Frames from a node in a direction.
    wires: Vec<[VecDeque<Frame>; 6]>,
    advertised: Vec<[[u32; VirtualChannel::COUNT]; 6]>,
    /// Packets that each node will inject.
    backlog: Vec<VecDeque<Header>>,
    /// Answers that each node will inject, with the slot that they hold.
    answers: Vec<VecDeque<(Header, Option<SlotRef>)>>,
    pub(crate) delivered: Vec<u32>,
    pub(crate) answered: u32,
    pub(crate) slots: u16,
    replies: Replies,
    random: Random,
}

impl<R: Routing + Clone> Network<R> {
    pub(crate) fn new(
        torus: Dimensions,
        options: RouterOptions,
        replies: Replies,
        seed: u64,
        epochs: &[(Epoch, DeadSet)],
        routing: impl Fn(TorusRouting) -> R,
    ) -> Network<R> {
        let configurations: BTreeMap<_, _> = (epochs.iter())
            .map(|(epoch, dead)| {
                (*epoch, Configuration { dead: dead.clone(), graph: UpDown::new(&torus, dead) })
            })
            .collect();
        let routers = torus.all().map(|node| {
            let mut both = TorusRouting::new(torus, node);
            for (&epoch, configuration) in &configurations {
                both.install(epoch, NodeTable::new(&configuration.graph, node));
            }
            let mut router = Router::new(routing(both), options);
            for direction in Direction::ALL {
                router.set_link(direction, torus.neighbour(node, direction).is_some());
            }
            router
        });
        let nodes = torus.nodes();
        Network {
            torus,
            routers: routers.collect(),
            configurations,
            wires: (0..nodes).map(|_| Default::default()).collect(),
            advertised: vec![Default::default(); nodes],
            backlog: vec![VecDeque::new(); nodes],
            answers: vec![VecDeque::new(); nodes],
            delivered: Vec::new(),
            answered: 0,
            slots: options.slots,
            replies,
            random: Random::new(seed),
        }
    }

    /// Plans a packet on the route of an epoch. Returns whether one exists.
    pub(crate) fn plan(&mut self, from: NodeNumber, to: NodeNumber, epoch: Epoch) -> bool {
        let configuration = &self.configurations[&epoch];
        let table = configuration.graph.toward(to);
        let Some(route) = choose_with_table(&self.torus, &configuration.dead, from, to, &table) else {
            return false;
        };
        self.plan_route(from, to, epoch, route);
        true
    }

    pub(crate) fn plan_route(&mut self, from: NodeNumber, to: NodeNumber, epoch: Epoch, route: Route) {
        let mut header = Header::new(Kind::Put, from, to);
        header.epoch = epoch;
        header.operation = self.delivered.len() as u32;
        match route {
            Route::DimensionOrder { signs, .. } => header.signs = signs,
            Route::UpDown { .. } => header.vc = VirtualChannel::up_down(epoch),
        }
        self.delivered.push(0);
        self.backlog[from.index()].push_back(header);
    }

    /// Runs until nothing moves: with random scheduling if `adversarial`, else all nodes in turn. `inspect` sees the
    /// network after every pass. Returns the number of passes.
    pub(crate) fn run(&mut self, adversarial: bool, mut inspect: impl FnMut(&Network<R>)) -> u32 {
        for pass in 0.. {
            let mut moved = false;
            let skip = adversarial && pass % 8 != 7;
            let mut order: Vec<_> = (0..self.routers.len()).collect();
            if adversarial {
                self.random.shuffle(&mut order);
            }
            for &node in &order {
                moved |= self.inject(node);
            }
            for &node in &order {
                for direction in Direction::ALL {
                    // Some outputs pause; every eighth pass moves all that can move.
                    if skip && self.random.below(3) == 0 {
                        moved = true;
                        continue;
                    }
                    moved |= self.transmit(node, direction, adversarial);
                }
            }
            for &node in &order {
                for direction in Direction::ALL {
                    if skip && self.random.below(3) == 0 {
                        moved = true;
                        continue;
                    }
                    moved |= self.receive(node, direction);
                }
            }
            inspect(self);
            if !moved {
                return pass;
            }
            assert!(pass < 200_000, "the network neither rests nor finishes");
        }
        unreachable!("the loop has no end")
    }

    fn inject(&mut self, node: usize) -> bool {
        let mut moved = false;
        while let Some(&(header, slot)) = self.answers[node].front() {
            if self.routers[node].inject(Port::Local, header, header.operation).is_err() {
                break;
            }
            self.answers[node].pop_front();
            if let Some(slot) = slot {
                self.release(node, slot);
            }
            moved = true;
        }
        while let Some(&header) = self.backlog[node].front() {
            if self.routers[node].inject(Port::Local, header, header.operation).is_err() {
                break;
            }
            self.backlog[node].pop_front();
            moved = true;
        }
        self.actions(node);
        moved
    }

    fn transmit(&mut self, node: usize, direction: Direction, adversarial: bool) -> bool {
        let random = &mut self.random;
        let mut pick = |candidates: u128| {
            let inputs: Vec<u32> = (0..128).filter(|&i| candidates >> i & 1 == 1).collect();
            inputs[random.below(inputs.len())]
        };
        let pick: Option<&mut dyn FnMut(u128) -> u32> = if adversarial { Some(&mut pick) } else { None };
        let Some(sent) = self.routers[node].transmit_with(direction, pick) else { return false };
        let frame = Frame::Packet { slot: sent.slot, header: sent.header };
        self.wires[node][direction.index()].push_back(frame);
        if let Origin::Slot(slot) = sent.origin {
            self.release(node, slot);
        }
        self.actions(node);
        true
    }

    fn receive(&mut self, from: usize, direction: Direction) -> bool {
        let Some(to) = self.torus.neighbour(NodeNumber(from as u16), direction) else { return false };
        let Some(frame) = self.wires[from][direction.index()].pop_front() else { return false };
        let side = direction.reversed();
        match frame {
            Frame::Packet { slot, header } => {
                self.routers[to.index()].handle_packet(side, slot, header).expect("a packet has a credit");
            }
            Frame::Credit(freed) => {
                for (vc, &count) in freed.iter().enumerate() {
                    let vc = VirtualChannel(vc as u8);
                    self.routers[to.index()].handle_credit(side, vc, count).expect("true credits");
                }
            }
        }
        self.actions(to.index());
        true
    }

    fn release(&mut self, node: usize, slot: SlotRef) {
        self.routers[node].release(slot).expect("the slot is taken");
        self.return_credits(node, slot.side);
    }

    fn return_credits(&mut self, node: usize, side: Direction) {
        let freed = self.routers[node].freed(side);
        let advertised = self.advertised[node][side.index()];
        let due = (0..VirtualChannel::COUNT)
            .any(|vc| self.routers[node].credit_is_due(side, VirtualChannel(vc as u8), advertised[vc]));
        if due {
            self.advertised[node][side.index()] = freed;
            self.wires[node][side.index()].push_back(Frame::Credit(freed));
        }
    }

    fn actions(&mut self, node: usize) {
        while let Some(action) = self.routers[node].poll() {
            let (header, origin) = match action {
                Action::Deliver { header, origin } => (header, origin),
                Action::Drop { .. } => {
                    Direction::ALL.into_iter().for_each(|side| self.return_credits(node, side));
                    continue;
                }
            };
            let slot = match origin {
                Origin::Slot(slot) => Some(slot),
                Origin::Injected(_) => None,
            };
            if header.kind != Kind::Put {
                self.answered += 1;
            } else {
                self.delivered[header.operation as usize] += 1;
            }
            let mut held = None;
            if header.kind == Kind::Put && self.replies != Replies::None {
                let mut answer = Header::new(Kind::GetData, header.target, header.source);
                answer.epoch = header.epoch;
                answer.signs = millstream_torus_core::route::dimension_order::shortest(
                    &self.torus,
                    answer.source,
                    answer.target,
                );
                held = slot.filter(|_| self.replies == Replies::HoldSlot);
                self.answers[node].push_back((answer, held));
            }
            if let (Some(slot), None) = (slot, held) {
                self.release(node, slot);
            }
        }
    }

    pub(crate) fn totals(&self) -> Counters {
        let mut total = Counters::default();
        for counters in self.routers.iter().map(Router::counters) {
            total.injected += counters.injected;
            total.received += counters.received;
            total.transmitted += counters.transmitted;
            total.delivered += counters.delivered;
            for cause in DropCause::ALL {
                total.dropped[cause as usize] += counters.dropped[cause as usize];
            }
        }
        total
    }

    /// Conservation at any instant: of packets, and of slots per virtual channel and link.
    pub(crate) fn check_conservation(&self) {
        let total = self.totals();
        let packet = |frame: &&Frame| matches!(frame, Frame::Packet { .. });
        let flying: usize = self.wires.iter().flatten().map(|wire| wire.iter().filter(packet).count()).sum();
        let waiting: u64 = self.routers.iter().map(Router::waiting).sum();
        let inside = waiting + flying as u64;
        assert_eq!(total.injected, total.delivered + total.dropped_total() + inside);
        assert_eq!(total.transmitted, total.received + flying as u64);
        for node in self.torus.all() {
            for direction in Direction::ALL {
                let Some(other) = self.torus.neighbour(node, direction) else { continue };
                for vc in (0..VirtualChannel::COUNT).map(|vc| VirtualChannel(vc as u8)) {
                    let on_wire = self.wires[node.index()][direction.index()]
                        .iter()
                        .filter(|frame| matches!(frame, Frame::Packet { header, .. } if header.vc == vc))
                        .count();
                    let side = direction.reversed();
                    let far = &self.routers[other.index()];
                    let known = self.last_credit_known(node, direction, vc);
                    let returning = far.freed(side)[vc.index()].wrapping_sub(known);
                    let sum = usize::from(self.routers[node.index()].credits(direction, vc))
                        + on_wire
                        + usize::from(far.occupied(side, vc))
                        + returning as usize;
                    assert_eq!(sum, usize::from(self.slots), "{node} {direction} {vc:?}");
                }
            }
        }
    }

    /// The newest count of freed slots that a sender has taken in.
    fn last_credit_known(&self, node: NodeNumber, direction: Direction, vc: VirtualChannel) -> u32 {
        self.routers[node.index()].freed_by_neighbour(direction, vc)
    }
}
