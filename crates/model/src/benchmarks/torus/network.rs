//! Routers of `torus-core` in virtual time.
//!
//! ```text
//!   backlog ─► injection queue ─► router ─► output (busy for a packet's bytes) ─ hop latency ─► slot of the neighbour
//!                                   ▲                                                              │
//!                                   └──────────── credits, when a slot's packet has left ◄─────────┘
//! ```
//! Adapters cut through. With shared cores, a node's process stores and forwards: it executes one step at a time (a hop or a
//! delivery), on any free core.

use std::collections::VecDeque;

use millstream_torus_core::route::{NodeTable, VirtualChannel};
use millstream_torus_core::router::{Action, Origin, Port, SlotRef};
use millstream_torus_core::topology::DIRECTIONS;
use millstream_torus_core::{Dimensions, Direction, Header, NodeNumber, Router, RouterOptions, TorusRouting};

use super::Torus;
use super::routes::{EPOCH, Routes};
use crate::engine::{EventQueue, Picos};

/// Virtual channels of dimension order, which share a channel's buffer.
const CHANNELS_IN_USE: u64 = 2;
/// Packets that wait at an output for each virtual channel.
const INJECTION: usize = 2;

/// Something that happens at a node.
#[derive(Clone, Copy, Debug)]
enum Event {
    /// A packet has left an output, for a slot of the neighbour. `None`: its head is there already.
    Left { direction: Direction, from: Option<SlotRef>, to: Option<(u16, Header)> },
    /// A packet, or its head, is in a slot.
    Arrived { side: Direction, slot: u16, header: Header },
    /// The neighbour has freed slots.
    Credits { direction: Direction, freed: [u32; VirtualChannel::COUNT] },
    /// The payload is in memory.
    Delivered { from: Option<SlotRef> },
}

struct Node {
    router: Router<()>,
    /// Packets left for each target.
    backlog: VecDeque<(Header, u32)>,
    busy: [bool; DIRECTIONS],
    told: [[u32; VirtualChannel::COUNT]; DIRECTIONS],
    /// Steps that wait for a core: their time, and what happens at their end.
    steps: VecDeque<(Picos, Event)>,
    /// Whether it waits for a core, or has one.
    at_work: bool,
}

/// What a run found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Outcome {
    /// Time of the last delivery.
    pub(super) time: Picos,
    pub(super) delivered: u64,
    pub(super) events: u64,
}

/// Nodes and their links.
pub(super) struct Network<'t> {
    model: &'t Torus,
    torus: Dimensions,
    routes: Routes<'t>,
    /// Payload of each packet (bytes).
    size: u32,
    nodes: Vec<Node>,
    /// Events with their nodes, and whether they end a step on a core.
    events: EventQueue<(usize, Event, bool)>,
    now: Picos,
    /// Nodes that wait for a core.
    waiting: VecDeque<usize>,
    idle_cores: u32,
    outcome: Outcome,
}

impl<'t> Network<'t> {
    pub(super) fn new(model: &'t Torus, torus: Dimensions, size: u32) -> Network<'t> {
        // Routes up and down around failed links have a virtual channel of their own.
        let channels = CHANNELS_IN_USE + u64::from(!model.dead.is_empty());
        let slots = (model.buffer / u64::from(model.packet_size.max(1)) / channels).clamp(1, 1024);
        let options = RouterOptions { slots: slots as u16, injection: INJECTION };
        let routes = Routes::new(torus, &model.dead);
        let node = |node: NodeNumber| {
            let mut routing = TorusRouting::new(torus, node);
            routing.install(EPOCH, NodeTable::new(&routes.graph, node));
            let mut router = Router::new(routing, options);
            for direction in Direction::ALL {
                router.set_link(direction, model.dead.live_neighbour(&torus, node, direction).is_some());
            }
            Node {
                router,
                backlog: VecDeque::new(),
                busy: [false; DIRECTIONS],
                told: Default::default(),
                steps: VecDeque::new(),
                at_work: false,
            }
        };
        Network {
            model,
            torus,
            size,
            nodes: torus.all().map(node).collect(),
            routes,
            events: EventQueue::new(),
            now: Picos::ZERO,
            waiting: VecDeque::new(),
            idle_cores: model.cores.map_or(0, |cores| cores.cores),
            outcome: Outcome { time: Picos::ZERO, delivered: 0, events: 0 },
        }
    }

    /// Gives a node packets for another one. False if failed links separate them.
    pub(super) fn plan(&mut self, from: usize, to: usize, packets: u32) -> bool {
        let header = self.routes.header(NodeNumber(from as u16), NodeNumber(to as u16));
        if let Some(mut header) = header {
            header.length = self.size;
            self.nodes[from].backlog.push_back((header, packets));
        }
        header.is_some()
    }

    /// Runs until nothing moves.
    pub(super) fn run(mut self) -> Outcome {
        (0..self.nodes.len()).for_each(|node| self.go_on(node));
        while let Some((time, (node, event, ends_step))) = self.events.pop() {
            self.now = time;
            self.outcome.events += 1;
            self.handle(node, event);
            if ends_step {
                self.idle_cores += 1;
                self.nodes[node].at_work = false;
                self.offer_step(node);
            }
            self.go_on(node);
            self.use_cores();
        }
        self.outcome
    }

    fn after(&mut self, delay: Picos, node: usize, event: Event, ends_step: bool) {
        self.events.push(self.now + delay, (node, event, ends_step));
    }

    /// Something that takes time of the node: of a core, or of what the adapter has for it.
    fn step(&mut self, node: usize, adapter: Picos, event: Event) {
        let Some(cores) = self.model.cores else {
            self.after(adapter, node, event, false);
            return;
        };
        self.nodes[node].steps.push_back((cores.time(self.size), event));
        self.offer_step(node);
        self.use_cores();
    }

    fn offer_step(&mut self, node: usize) {
        let state = &mut self.nodes[node];
        if !state.at_work && !state.steps.is_empty() {
            state.at_work = true;
            self.waiting.push_back(node);
        }
    }

    fn use_cores(&mut self) {
        while self.idle_cores > 0
            && let Some(node) = self.waiting.pop_front()
            && let Some((time, event)) = self.nodes[node].steps.pop_front()
        {
            self.idle_cores -= 1;
            self.after(time, node, event, true);
        }
    }

    fn handle(&mut self, node: usize, event: Event) {
        match event {
            Event::Left { direction, from, to } => {
                self.nodes[node].busy[direction.index()] = false;
                if let Some(from) = from {
                    self.release(node, from);
                }
                if let Some((slot, header)) = to {
                    self.arrive(node, direction, slot, header);
                }
            }
            Event::Arrived { side, slot, header } => {
                let taken = self.nodes[node].router.handle_packet(side, slot, header);
                debug_assert!(taken.is_ok(), "{taken:?}");
            }
            Event::Credits { direction, freed } => {
                for (vc, freed) in freed.into_iter().enumerate() {
                    let vc = VirtualChannel(vc as u8);
                    let taken = self.nodes[node].router.handle_credit(direction, vc, freed);
                    debug_assert!(taken.is_ok(), "{taken:?}");
                }
            }
            Event::Delivered { from } => {
                if let Some(from) = from {
                    self.release(node, from);
                }
                self.outcome.delivered += 1;
                self.outcome.time = self.now;
            }
        }
    }

    /// A packet of a node is at its neighbour after the latency of a hop.
    fn arrive(&mut self, from: usize, direction: Direction, slot: u16, header: Header) {
        let Some(to) = self.torus.neighbour(NodeNumber(from as u16), direction) else { return };
        let arrived = Event::Arrived { side: direction.reversed(), slot, header };
        self.after(self.model.hop_latency, to.index(), arrived, false);
    }

    fn release(&mut self, node: usize, slot: SlotRef) {
        let released = self.nodes[node].router.release(slot);
        debug_assert!(released.is_ok(), "{released:?}");
    }

    /// Moves what can move at a node.
    fn go_on(&mut self, node: usize) {
        self.inject(node);
        while let Some(action) = self.nodes[node].router.poll() {
            let Action::Deliver { origin, .. } = action else { continue };
            let from = match origin {
                Origin::Slot(slot) => Some(slot),
                Origin::Injected(()) => None,
            };
            self.step(node, self.model.rate.time(u64::from(self.size)), Event::Delivered { from });
        }
        for direction in Direction::ALL {
            if self.nodes[node].busy[direction.index()] {
                continue;
            }
            let Some(sent) = self.nodes[node].router.transmit(direction) else { continue };
            self.nodes[node].busy[direction.index()] = true;
            let from = match sent.origin {
                Origin::Slot(slot) => Some(slot),
                Origin::Injected(()) => None,
            };
            let mut to = Some((sent.slot, sent.header));
            if self.model.cores.is_none() {
                // Adapters cut through: all links have one rate, so the bytes follow their head.
                self.arrive(node, direction, sent.slot, sent.header);
                to = None;
            }
            let left = Event::Left { direction, from, to };
            self.step(node, self.model.rate.time(u64::from(self.size)), left);
        }
        self.return_credits(node);
    }

    /// Keeps the injection queues full, by turns of the targets, so that no output idles while packets for it are left.
    fn inject(&mut self, node: usize) {
        let mut refused = 0;
        while refused < self.nodes[node].backlog.len()
            && let Some((header, left)) = self.nodes[node].backlog.pop_front()
        {
            let state = &mut self.nodes[node];
            let taken = state.router.inject(Port::Local, header, ()).is_ok();
            let left = left - u32::from(taken);
            refused = if taken { 0 } else { refused + 1 };
            if left > 0 {
                state.backlog.push_back((header, left));
            }
        }
    }

    fn return_credits(&mut self, node: usize) {
        for side in Direction::ALL {
            let Some(to) = self.torus.neighbour(NodeNumber(node as u16), side) else { continue };
            let state = &mut self.nodes[node];
            let told = state.told[side.index()];
            let freed = state.router.freed(side);
            // A link's adapter tells of each slot; a process, of half a ring.
            let due = match self.model.cores {
                None => freed != told,
                Some(_) => (0..VirtualChannel::COUNT)
                    .any(|vc| state.router.credit_is_due(side, VirtualChannel(vc as u8), told[vc])),
            };
            if due {
                state.told[side.index()] = freed;
                let credits = Event::Credits { direction: side.reversed(), freed };
                self.after(self.model.hop_latency, to.index(), credits, false);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{SharedCores, Torus, all_to_all, stream};
    use crate::engine::{BytesPerSecond, Picos};
    use millstream_torus_core::DeadSet;

    fn torus(dimensions: &[u32], cores: Option<SharedCores>) -> Torus {
        Torus {
            dimensions: dimensions.to_vec(),
            rate: BytesPerSecond::gigabytes(2.0),
            packet_size: 4096,
            buffer: 16 * 4096,
            hop_latency: Picos::from_nanos(200.0),
            end_latency: Picos::from_nanos(1000.0),
            cores,
            dead: DeadSet::new(),
        }
    }

    #[test]
    fn a_stream_over_links_has_their_rate_whatever_the_hops() {
        let torus = torus(&[4, 4], None);
        for to in [1, 5, 10] {
            let rate = stream(&torus, 0, to, 16 << 20).as_gigabytes();
            assert!((1.9..=2.0).contains(&rate), "{to}: {rate}");
        }
    }

    #[test]
    fn a_stream_between_processes_has_the_cores_share_of_each_copy() {
        let packet = Picos::from_nanos(548.0);
        let cores = SharedCores { cores: 2, packet, copy: BytesPerSecond::gigabytes(8.0) };
        // 512 ns to copy a packet: 1060 ns a step. Two steps keep both cores busy.
        let expected = 4096.0 / 1060.0;
        let torus = torus(&[2, 2, 2], Some(cores));
        for (to, steps) in [(1, 2.0), (3, 3.0), (7, 4.0)] {
            let rate = stream(&torus, 0, to, 16 << 20).as_gigabytes();
            let limit = expected * 2.0 / steps;
            assert!(rate <= 1.001 * limit && rate >= 0.8 * limit, "{to}: {rate}, limit {limit}");
        }
    }

    #[test]
    fn cores_bound_an_all_to_all_of_processes() {
        let cores =
            SharedCores { cores: 2, packet: Picos::from_nanos(1000.0), copy: BytesPerSecond::gigabytes(8.0) };
        let torus = torus(&[2, 2, 2], Some(cores));
        // 56 pairs with 96 hops; each packet takes a step at each hop and one at its end.
        let steps = 8.0 * (96.0 + 56.0);
        let least = steps * 1512.0 / 2.0;
        let time = all_to_all(&torus, 8 * 4096).time.nanos() - torus.end_latency.nanos();
        assert!(time >= least && time <= 1.1 * least, "{time} ns, at least {least}");
    }

    #[test]
    fn rings_with_a_dateline_do_not_lock_up() {
        let torus = Torus { buffer: 2 * 4096, ..torus(&[8, 5], None) };
        let result = all_to_all(&torus, 4 * 4096);
        assert!(result.rate.0 > 0.0);
        assert_eq!(result, all_to_all(&torus, 4 * 4096));
    }
}
