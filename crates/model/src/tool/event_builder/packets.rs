//! Transfers packet by packet: adapters, PCIe, memory, links and a switch with credits, on the engine.
//!
//! ```text
//!  units ─post─► adapter ─reads─► memory                    memory ◄─writes─ adapter ─► units
//!                   └── link ─► switch, one buffer for each output ─► link ──┘
//! ```
//! Network packets have the MTU; the TLPs of one network packet travel over PCIe together. An adapter serves its work
//! requests in the order of their posting. A packet that finds the buffer of its output full waits on its link in, and
//! all behind it wait, too.

use super::units::{Carrier, Place, Transfer, Units, Wake};
use super::{Outcome, Setup};
use crate::engine::{
    Context, Endpoint, EndpointId, Internal, Line, LineId, Network, Packet, Pcie, Picos, PortId, Rate, Route,
    Simulation,
};
use crate::part::memory::{Memory, Timing, read_tag};
use crate::part::pcie::{COMPLETION, COMPLETION_OVERHEAD, READ, REQUEST_OVERHEAD, WRITE, raw_rate};
use crate::tool::verbs::HEADERS;
use std::collections::VecDeque;

// Kinds of network packets; the low two bits choose the overhead: the first of a WRITE has a RETH of 16 B more, an
// acknowledgement an AETH of 4 B (row I04).
const MIDDLE: u16 = 4;
const FIRST: u16 = 5;
const ACK: u16 = 6;
const LAST: u16 = 1 << 8;
const OVERHEAD: [u32; 4] = [HEADERS, HEADERS + 16, HEADERS + 4, HEADERS];

// Ports of an adapter.
const FROM_SOFTWARE: u16 = 0;
const FROM_MEMORY: u16 = 1;
const FROM_NETWORK: u16 = 2;
const IN_PLACE: u16 = 3;

// Ports of the units.
const ARRIVED: u16 = 0;
const COMPLETED: u16 = 1;
const COPIED: u16 = 2;
/// And from here on, those of control messages by receiver: the manager, then the nodes.
const CONTROL: u16 = 3;

/// Packets before the link above which no more payload is asked for.
const AHEAD: usize = 8;
const START: u64 = u64::MAX;

/// A packet whose payload has been asked for.
#[derive(Clone, Copy)]
struct Forming {
    transfer: Transfer,
    kind: u16,
    size: u32,
}

struct Nic {
    mtu: u32,
    read_window: u32,
    /// Time after which it looks again whether its link has room.
    pause: Picos,
    /// From an acknowledgement to the readout unit's knowing.
    completion: Picos,
    poll: Picos,
    network: Vec<Option<Route<Network>>>,
    /// Acknowledgements go before data, so they have a way of their own to the switch.
    answers: Vec<Option<Route<Network>>>,
    reading: Route<Pcie>,
    writing: Route<Pcie>,
    completions: Route<Pcie>,
    in_place: Route<Pcie>,
    arrived: Route<Internal>,
    completed: Route<Internal>,
    /// Transfers whose payload is still to be asked for: bytes of it, and bytes left.
    asking: VecDeque<(Transfer, u32, u32)>,
    asked: u32,
    forming: VecDeque<Forming>,
    /// Packets whose payload is on its way to memory.
    landing: VecDeque<Packet>,
    asks_again: bool,
}

impl Nic {
    fn way(&self, to: u16) -> Route<Network> {
        self.network[usize::from(to)].expect("what stays on its node does not come to the adapter")
    }

    fn ask(&mut self, context: &mut Context<'_>) {
        while let Some(&(transfer, all, left)) = self.asking.front() {
            let size = left.min(self.mtu);
            if self.asked > 0 && self.asked + size > self.read_window {
                return;
            }
            if context.backlog(self.way(transfer.to)) > AHEAD {
                if !std::mem::replace(&mut self.asks_again, true) {
                    context.wake_after(self.pause, 0);
                }
                return;
            }
            let first = if left == all { FIRST } else { MIDDLE };
            let last = if left == size { LAST } else { 0 };
            self.forming.push_back(Forming { transfer, kind: first | last, size });
            if left == size {
                self.asking.pop_front();
            } else if let Some((_, _, left)) = self.asking.front_mut() {
                *left -= size;
            }
            self.asked += size;
            context.send(self.reading, Packet::new(READ, 0, read_tag(0, size)).answered_by(self.completions));
        }
    }
}

impl Endpoint for Nic {
    fn receive(&mut self, port: u16, packet: Packet, context: &mut Context<'_>) {
        match port {
            FROM_SOFTWARE => {
                self.asking.push_back((Transfer::of_tag(packet.tag), packet.size, packet.size));
                self.ask(context);
            }
            FROM_MEMORY => {
                self.asked -= packet.size;
                let Some(Forming { transfer, kind, size }) = self.forming.pop_front() else { return };
                context.send(self.way(transfer.to), Packet::new(kind, size, transfer.tag()));
                self.ask(context);
            }
            FROM_NETWORK if packet.kind == ACK => {
                context.release(&packet);
                context.send_after(self.completion, self.completed, Packet::new(0, 0, packet.tag));
            }
            FROM_NETWORK => {
                self.landing.push_back(packet);
                context.send(self.writing, Packet::new(WRITE, packet.size, 0).answered_by(self.in_place));
                // Acknowledged when it has arrived, not when it is in place (IBTA volume 1, 9.7.5.1).
                if packet.kind & LAST != 0 {
                    let from = usize::from(Transfer::of_tag(packet.tag).from);
                    let way = self.answers[from].expect("what has come over the network has a way back");
                    context.send(way, Packet::new(ACK, 0, packet.tag));
                }
            }
            IN_PLACE => {
                let Some(packet) = self.landing.pop_front() else { return };
                context.release(&packet);
                if packet.kind & LAST != 0 {
                    context.send_after(self.poll, self.arrived, Packet::new(0, 0, packet.tag));
                }
            }
            _ => {}
        }
    }

    fn wake(&mut self, _token: u64, context: &mut Context<'_>) {
        self.asks_again = false;
        self.ask(context);
    }
}

/// Ways of the units' own.
struct Ways {
    /// To each node's adapter.
    post: Vec<Route<Internal>>,
    /// To the node's own builder unit.
    copy: Vec<Route<Internal>>,
    /// Control messages to the manager and from it, by node; none between the manager and a unit of its node.
    to_manager: Vec<Option<Route<Network>>>,
    from_manager: Vec<Option<Route<Network>>>,
    /// Control messages within a node: to the manager, then to each node.
    within: Vec<Route<Internal>>,
    post_time: Picos,
    /// Of a control message, beside its way over links.
    control: Picos,
}

/// The units as an endpoint.
struct Hub {
    units: Units,
    ways: Ways,
}

struct Wires<'a, 'b> {
    context: &'a mut Context<'b>,
    ways: &'a Ways,
}

impl Carrier for Wires<'_, '_> {
    fn now(&self) -> Picos {
        self.context.now()
    }

    fn transfer(&mut self, transfer: Transfer, bytes: u32) {
        let from = usize::from(transfer.from);
        let packet = Packet::new(0, bytes, transfer.tag());
        if transfer.is_local() {
            self.context.send(self.ways.copy[from], packet);
        } else {
            self.context.send_after(self.ways.post_time, self.ways.post[from], packet);
        }
    }

    fn control(&mut self, from: Place, to: Place, after: Picos, bytes: u32, pack: u32) {
        let (way, receiver) = match (from, to) {
            (Place::Node(node), _) => (self.ways.to_manager[usize::from(node)], 0),
            (_, Place::Node(node)) => (self.ways.from_manager[usize::from(node)], usize::from(node) + 1),
            (Place::Manager, Place::Manager) => (None, 0),
        };
        let delay = after + self.ways.control;
        let packet = Packet::new(MIDDLE, bytes, u64::from(pack));
        match way {
            Some(route) => self.context.send_after(delay, route, packet),
            None => self.context.send_after(delay, self.ways.within[receiver], packet),
        }
    }

    fn wake(&mut self, after: Picos, what: Wake) {
        self.context.wake_after(after, what.token());
    }
}

impl Endpoint for Hub {
    fn receive(&mut self, port: u16, packet: Packet, context: &mut Context<'_>) {
        let Hub { units, ways } = self;
        let mut wires = Wires { context, ways };
        match port {
            ARRIVED => units.arrived(Transfer::of_tag(packet.tag), &mut wires),
            COMPLETED => units.completed(Transfer::of_tag(packet.tag), &mut wires),
            COPIED => {
                units.arrived(Transfer::of_tag(packet.tag), &mut wires);
                units.completed(Transfer::of_tag(packet.tag), &mut wires);
            }
            CONTROL => units.heard(Place::Manager, packet.tag as u32, &mut wires),
            node => units.heard(Place::Node(node - CONTROL - 1), packet.tag as u32, &mut wires),
        }
        if units.is_over() {
            context.stop();
        }
    }

    fn wake(&mut self, token: u64, context: &mut Context<'_>) {
        let Hub { units, ways } = self;
        let mut wires = Wires { context, ways };
        match token {
            START => units.start(&mut wires),
            token => units.woken(Wake::of_token(token), &mut wires),
        }
        if units.is_over() {
            context.stop();
        }
    }
}

/// The network: each node's link out, and the switch's output to each.
struct Fabric {
    out: Vec<LineId<Network>>,
    answers: Vec<LineId<Network>>,
    into: Vec<LineId<Network>>,
}

impl Fabric {
    /// `stations` are the nodes, and behind a switch the manager's place.
    fn new(simulation: &mut Simulation, setup: &Setup, stations: usize) -> Fabric {
        let node = &setup.node;
        let link = |name: String| Line { overhead: OVERHEAD, ..Line::new(name, node.rate) };
        let rx = node.adapter.rx_latency;
        let behind = if node.switched { node.latency } else { node.latency + rx };
        let mut out = |name: &str| -> Vec<LineId<Network>> {
            (0..stations).map(|i| simulation.line(link(format!("{name} {i}")).latency(behind))).collect()
        };
        let (out, answers) = (out("link out"), out("acknowledgements"));
        let into = if node.switched { stations } else { 0 };
        let into = (0..into)
            .map(|i| simulation.line(link(format!("link in {i}")).latency(rx).capacity(node.switch_buffer)));
        Fabric { out, answers, into: into.collect() }
    }

    /// A way from a first line to a port at that place.
    fn route(
        &self,
        simulation: &mut Simulation,
        first: LineId<Network>,
        to: usize,
        port: PortId<Network>,
    ) -> Route<Network> {
        let mut lines = vec![first];
        lines.extend(self.into.get(to));
        simulation.route(&lines, port)
    }

    /// Ways to the other nodes' adapters.
    fn to_others(
        &self,
        simulation: &mut Simulation,
        first: LineId<Network>,
        node: usize,
        ports: &[PortId<Network>],
    ) -> Vec<Option<Route<Network>>> {
        let ports = ports.iter().enumerate();
        ports.map(|(to, &port)| (to != node).then(|| self.route(simulation, first, to, port))).collect()
    }
}

/// A node's adapter, PCIe link and memory.
fn adapter(
    simulation: &mut Simulation,
    setup: &Setup,
    (nic, node): (EndpointId, usize),
    hub: EndpointId,
    [network, answers]: [Vec<Option<Route<Network>>>; 2],
) {
    let of = &setup.node;
    let raw = raw_rate(of.pcie.generation.0, of.pcie.lanes.0);
    let rate = Rate(raw.0 * of.pcie_efficiency);
    let cuts = |size: u32| of.mtu.div_ceil(size);
    let mut overhead = [0; 4];
    // Requests for payload go before writes that wait, so they have a line of their own; what they take from the writes'
    // direction is on the writes, as a node reads as much as it writes.
    overhead[usize::from(WRITE)] =
        REQUEST_OVERHEAD * (cuts(of.pcie.max_payload.0) + cuts(of.pcie.max_read_request.0));
    overhead[usize::from(READ)] = REQUEST_OVERHEAD * cuts(of.pcie.max_read_request.0);
    overhead[usize::from(COMPLETION)] = COMPLETION_OVERHEAD * cuts(of.pcie.max_payload.0);
    let line = |way: &str| {
        let line = Line { overhead, ..Line::new(format!("pcie {way} {node}"), rate) };
        line.latency(of.pcie_latency).capacity(4 * u64::from(of.mtu))
    };
    let (up, down) = (simulation.line(line("up")), simulation.line(line("down")));
    let requests = simulation.line(line("requests"));
    let memory = Memory::new(Timing { completion: of.mtu, short_completion: of.mtu, ..of.memory });
    let memory = simulation.endpoint(memory);
    let (reads, writes) =
        (simulation.port(memory, 0), simulation.bounded_port(memory, 1, 16 * u64::from(of.mtu)));
    let (from_memory, in_place) = (simulation.port(nic, FROM_MEMORY), simulation.port(nic, IN_PLACE));
    let (arrived, completed) = (simulation.port(hub, ARRIVED), simulation.port(hub, COMPLETED));
    let code = Nic {
        mtu: of.mtu,
        read_window: of.adapter.read_window.max(of.mtu),
        pause: of.rate.time(2 * u64::from(of.mtu)),
        completion: of.pcie_latency + of.memory.write_latency + of.adapter.poll,
        poll: of.adapter.poll,
        network,
        answers,
        reading: simulation.route(&[requests], reads),
        writing: simulation.route(&[up], writes),
        completions: simulation.route(&[down], from_memory),
        in_place: simulation.route(&[], in_place),
        arrived: simulation.route(&[], arrived),
        completed: simulation.route(&[], completed),
        asking: VecDeque::new(),
        asked: 0,
        forming: VecDeque::new(),
        landing: VecDeque::new(),
        asks_again: false,
    };
    simulation.install(nic, code);
}

/// Runs the units over such a network.
pub(super) fn run(setup: &Setup, units: Units) -> Outcome {
    let of = &setup.node;
    let n = usize::from(setup.nodes);
    let mut simulation = Simulation::new(setup.seed);
    let hub = simulation.reserve();
    // Without a switch the manager is on the first node.
    let (manager, stations) = if of.switched { (n, n + 1) } else { (0, n) };
    let fabric = Fabric::new(&mut simulation, setup, stations);
    let nics: Vec<EndpointId> = (0..n).map(|_| simulation.reserve()).collect();
    let ports: Vec<PortId<Network>> =
        nics.iter().map(|&nic| simulation.bounded_port(nic, FROM_NETWORK, of.adapter.buffer)).collect();
    for (node, &nic) in nics.iter().enumerate() {
        let network = fabric.to_others(&mut simulation, fabric.out[node], node, &ports);
        let answers = fabric.to_others(&mut simulation, fabric.answers[node], node, &ports);
        adapter(&mut simulation, setup, (nic, node), hub, [network, answers]);
    }
    let mut ways = Ways {
        post: Vec::new(),
        copy: Vec::new(),
        to_manager: Vec::new(),
        from_manager: Vec::new(),
        within: Vec::new(),
        post_time: of.adapter.post + of.pcie_latency,
        // Over links it has their latencies, and the adapter's for what it receives.
        control: of.control() - of.latency - of.adapter.rx_latency,
    };
    let copied = simulation.port(hub, COPIED);
    let heard: Vec<PortId<Network>> = (0..=n as u16).map(|at| simulation.port(hub, CONTROL + at)).collect();
    for (node, &nic) in nics.iter().enumerate() {
        let queue = Line::step(format!("work queue {node}"), of.adapter.message_gap);
        let queue = simulation.line(queue.latency(of.adapter.tx_latency + of.adapter.gather_latency));
        let port = simulation.port(nic, FROM_SOFTWARE);
        ways.post.push(simulation.route(&[queue], port));
        let copy = simulation.line(Line::new(format!("copy {node}"), of.copy));
        ways.copy.push(simulation.route(&[copy], copied));
        let is_apart = node != manager;
        let to = is_apart.then(|| fabric.route(&mut simulation, fabric.out[node], manager, heard[0]));
        let from =
            is_apart.then(|| fabric.route(&mut simulation, fabric.out[manager], node, heard[node + 1]));
        ways.to_manager.push(to);
        ways.from_manager.push(from);
    }
    for at in 0..=n as u16 {
        let port = simulation.port(hub, CONTROL + at);
        ways.within.push(simulation.route(&[], port));
    }
    simulation.install(hub, Hub { units, ways });
    simulation.wake(hub, Picos::ZERO, START);
    simulation.run(Picos(u64::MAX));
    let steps = simulation.events();
    let end = simulation.now();
    simulation.get::<Hub>(hub).units.outcome(end, steps)
}
