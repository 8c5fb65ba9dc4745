//! Packet-level network of the event builder: adapters, PCIe, memory, links and a switch with credits.
//!
//! ```text
//!  units ─post─► adapter ─reads─► memory                    memory ◄─writes─ adapter ─► units
//!                   └── link ─► switch, one buffer per output ─► link ──┘
//! ```
//! Network packets have one MTU; the TLPs of a network packet travel over PCIe together. An adapter serves work requests in
//! posting order. A packet whose output buffer is full blocks its input link (head-of-line blocking).

use super::network::{ControlEndpoint, NetworkModel, TimerEvent, Transfer};
use super::units::Units;
use super::{RunResult, Scenario};
use crate::component::completer::{Completer, CompleterTiming, read_tag};
use crate::component::pcie::{self, COMPLETION, MEMORY_READ, MEMORY_WRITE, raw_rate};
use crate::engine::{
    BytesPerSecond, Channel, ChannelId, Context, Endpoint, EndpointId, Internal, Network, Packet, Pcie,
    Picos, PortId, Route, Simulation,
};
use std::collections::VecDeque;

// Kinds of network packets; the low two bits select the header overhead.
const MIDDLE: u16 = 4;
const FIRST: u16 = 5;
const ACK: u16 = 6;
const LAST: u16 = 1 << 8;

// Ports of an adapter.
const FROM_SOFTWARE: u16 = 0;
const FROM_MEMORY: u16 = 1;
const FROM_NETWORK: u16 = 2;
const PLACED: u16 = 3;

// Ports of the units.
const ARRIVED: u16 = 0;
const COMPLETED: u16 = 1;
const COPIED: u16 = 2;
/// First port of control messages: the manager's; the nodes' ports follow.
const CONTROL: u16 = 3;

/// Packets queued for the link above which payload fetches pause.
const TX_BACKLOG: usize = 8;
const START_TIMER: u64 = u64::MAX;

/// A packet whose payload is being fetched.
#[derive(Clone, Copy)]
struct TxPacket {
    transfer: Transfer,
    kind: u16,
    size: u32,
}

struct Nic {
    mtu: u32,
    read_window: u32,
    /// Interval of checks for room on the link.
    pause: Picos,
    /// Arrival of an acknowledgement to the polling of its completion.
    completion: Picos,
    poll: Picos,
    network: Vec<Option<Route<Network>>>,
    /// Acknowledgements have priority over data, so they have their own channel to the switch.
    acks: Vec<Option<Route<Network>>>,
    reading: Route<Pcie>,
    writing: Route<Pcie>,
    completions: Route<Pcie>,
    placed: Route<Pcie>,
    arrived: Route<Internal>,
    completed: Route<Internal>,
    /// Transfers whose payload is to be fetched: total bytes and bytes left.
    fetch_queue: VecDeque<(Transfer, u32, u32)>,
    fetch_bytes: u32,
    tx_pending: VecDeque<TxPacket>,
    /// Packets whose payload is being written to memory.
    rx_writing: VecDeque<Packet>,
    fetch_timer_set: bool,
}

impl Nic {
    fn route_to(&self, to: u16) -> Route<Network> {
        self.network[usize::from(to)].expect("local transfers bypass the adapter")
    }

    fn fetch_payload(&mut self, context: &mut Context<'_>) {
        while let Some(&(transfer, all, left)) = self.fetch_queue.front() {
            let size = left.min(self.mtu);
            if self.fetch_bytes > 0 && self.fetch_bytes + size > self.read_window {
                return;
            }
            if context.backlog(self.route_to(transfer.to)) > TX_BACKLOG {
                if !std::mem::replace(&mut self.fetch_timer_set, true) {
                    context.set_timer(self.pause, 0);
                }
                return;
            }
            let first = if left == all { FIRST } else { MIDDLE };
            let last = if left == size { LAST } else { 0 };
            self.tx_pending.push_back(TxPacket { transfer, kind: first | last, size });
            if left == size {
                self.fetch_queue.pop_front();
            } else if let Some((_, _, left)) = self.fetch_queue.front_mut() {
                *left -= size;
            }
            self.fetch_bytes += size;
            context.send(
                self.reading,
                Packet::new(MEMORY_READ, 0, read_tag(0, size)).with_reply(self.completions),
            );
        }
    }
}

impl Endpoint for Nic {
    fn receive(&mut self, port: u16, packet: Packet, context: &mut Context<'_>) {
        match port {
            FROM_SOFTWARE => {
                self.fetch_queue.push_back((Transfer::from_tag(packet.tag), packet.size, packet.size));
                self.fetch_payload(context);
            }
            FROM_MEMORY => {
                self.fetch_bytes -= packet.size;
                let Some(TxPacket { transfer, kind, size }) = self.tx_pending.pop_front() else { return };
                context.send(self.route_to(transfer.to), Packet::new(kind, size, transfer.tag()));
                self.fetch_payload(context);
            }
            FROM_NETWORK if packet.kind == ACK => {
                context.return_credits(&packet);
                context.send_after(self.completion, self.completed, Packet::new(0, 0, packet.tag));
            }
            FROM_NETWORK => {
                self.rx_writing.push_back(packet);
                context.send(self.writing, Packet::new(MEMORY_WRITE, packet.size, 0).with_reply(self.placed));
                // The responder acknowledges at arrival, before data is in memory (IBTA volume 1, 9.7.5.1).
                if packet.kind & LAST != 0 {
                    let from = usize::from(Transfer::from_tag(packet.tag).from);
                    let route = self.acks[from].expect("every remote sender has a reply route");
                    context.send(route, Packet::new(ACK, 0, packet.tag));
                }
            }
            PLACED => {
                let Some(packet) = self.rx_writing.pop_front() else { return };
                context.return_credits(&packet);
                if packet.kind & LAST != 0 {
                    context.send_after(self.poll, self.arrived, Packet::new(0, 0, packet.tag));
                }
            }
            _ => {}
        }
    }

    fn timer(&mut self, _token: u64, context: &mut Context<'_>) {
        self.fetch_timer_set = false;
        self.fetch_payload(context);
    }
}

/// Routes of the units.
struct Routes {
    /// To each node's adapter.
    post: Vec<Route<Internal>>,
    /// To the node's own builder unit.
    copy: Vec<Route<Internal>>,
    /// Control messages to and from the manager, by node; none for units on the manager's node.
    to_manager: Vec<Option<Route<Network>>>,
    from_manager: Vec<Option<Route<Network>>>,
    /// Control messages within a node: to the manager, then to each node.
    local_control: Vec<Route<Internal>>,
    post_time: Picos,
    /// Latency of a control message, without its links.
    control: Picos,
}

/// The units as an endpoint.
struct UnitsEndpoint {
    units: Units,
    routes: Routes,
}

struct PacketNetwork<'a, 'b> {
    context: &'a mut Context<'b>,
    routes: &'a Routes,
}

impl NetworkModel for PacketNetwork<'_, '_> {
    fn now(&self) -> Picos {
        self.context.now()
    }

    fn transfer(&mut self, transfer: Transfer, bytes: u32) {
        let from = usize::from(transfer.from);
        let packet = Packet::new(0, bytes, transfer.tag());
        if transfer.is_local() {
            self.context.send(self.routes.copy[from], packet);
        } else {
            self.context.send_after(self.routes.post_time, self.routes.post[from], packet);
        }
    }

    fn control(
        &mut self,
        from: ControlEndpoint,
        to: ControlEndpoint,
        after: Picos,
        bytes: u32,
        control_batch: u32,
    ) {
        let (route, receiver) = match (from, to) {
            (ControlEndpoint::Node(node), _) => (self.routes.to_manager[usize::from(node)], 0),
            (_, ControlEndpoint::Node(node)) => {
                (self.routes.from_manager[usize::from(node)], usize::from(node) + 1)
            }
            (ControlEndpoint::Manager, ControlEndpoint::Manager) => (None, 0),
        };
        let delay = after + self.routes.control;
        let packet = Packet::new(MIDDLE, bytes, u64::from(control_batch));
        match route {
            Some(route) => self.context.send_after(delay, route, packet),
            None => self.context.send_after(delay, self.routes.local_control[receiver], packet),
        }
    }

    fn set_timer(&mut self, after: Picos, event: TimerEvent) {
        self.context.set_timer(after, event.token());
    }
}

impl Endpoint for UnitsEndpoint {
    fn receive(&mut self, port: u16, packet: Packet, context: &mut Context<'_>) {
        let UnitsEndpoint { units, routes } = self;
        let mut network = PacketNetwork { context, routes };
        match port {
            ARRIVED => units.arrived(Transfer::from_tag(packet.tag), &mut network),
            COMPLETED => units.completed(Transfer::from_tag(packet.tag), &mut network),
            COPIED => {
                units.arrived(Transfer::from_tag(packet.tag), &mut network);
                units.completed(Transfer::from_tag(packet.tag), &mut network);
            }
            CONTROL => units.control_received(ControlEndpoint::Manager, packet.tag as u32, &mut network),
            node => units.control_received(
                ControlEndpoint::Node(node - CONTROL - 1),
                packet.tag as u32,
                &mut network,
            ),
        }
        if units.is_over() {
            context.stop();
        }
    }

    fn timer(&mut self, token: u64, context: &mut Context<'_>) {
        let UnitsEndpoint { units, routes } = self;
        let mut network = PacketNetwork { context, routes };
        match token {
            START_TIMER => units.start(&mut network),
            token => units.timer_expired(TimerEvent::from_token(token), &mut network),
        }
        if units.is_over() {
            context.stop();
        }
    }
}

/// The network: each node's uplink, and the switch's output to each node.
struct SwitchFabric {
    out: Vec<ChannelId<Network>>,
    acks: Vec<ChannelId<Network>>,
    into: Vec<ChannelId<Network>>,
}

impl SwitchFabric {
    /// `ports_used` counts the nodes and, with a switch, the manager.
    fn new(simulation: &mut Simulation, scenario: &Scenario, ports_used: usize) -> SwitchFabric {
        let node = &scenario.node;
        let link = |name: String| Channel { overhead: node.overhead, ..Channel::new(name, node.rate) };
        let rx = node.adapter.rx_latency;
        let behind = if node.switched { node.latency } else { node.latency + rx };
        let mut out = |name: &str| -> Vec<ChannelId<Network>> {
            (0..ports_used)
                .map(|i| simulation.add_channel(link(format!("{name} {i}")).latency(behind)))
                .collect()
        };
        let (out, acks) = (out("link out"), out("acknowledgements"));
        let into = if node.switched { ports_used } else { 0 };
        let into = (0..into).map(|i| {
            simulation.add_channel(link(format!("link in {i}")).latency(rx).capacity(node.switch_buffer))
        });
        SwitchFabric { out, acks, into: into.collect() }
    }

    /// A route over an uplink to a port.
    fn route(
        &self,
        simulation: &mut Simulation,
        first: ChannelId<Network>,
        to: usize,
        port: PortId<Network>,
    ) -> Route<Network> {
        let mut lines = vec![first];
        lines.extend(self.into.get(to));
        simulation.route(&lines, port)
    }

    /// Routes to the other nodes' adapters.
    fn to_others(
        &self,
        simulation: &mut Simulation,
        first: ChannelId<Network>,
        node: usize,
        ports: &[PortId<Network>],
    ) -> Vec<Option<Route<Network>>> {
        let ports = ports.iter().enumerate();
        ports.map(|(to, &port)| (to != node).then(|| self.route(simulation, first, to, port))).collect()
    }
}

/// Adds a node's adapter, PCIe link and memory.
fn adapter(
    simulation: &mut Simulation,
    scenario: &Scenario,
    (nic, node): (EndpointId, usize),
    units_endpoint: EndpointId,
    [network, acks]: [Vec<Option<Route<Network>>>; 2],
) {
    let node_model = &scenario.node;
    let raw = raw_rate(node_model.pcie.generation.0, node_model.pcie.lanes.0);
    let rate = BytesPerSecond(raw.0 * node_model.pcie_efficiency);
    let cuts = |size: u32| node_model.mtu.div_ceil(size);
    let [_, request, _, completion] = pcie::overhead(node_model.pcie.generation.0);
    let mut overhead = [0; 4];
    // Read requests have priority over queued writes, so they have their own channel. Their bytes count on the writes:
    // a node reads as much as it writes.
    overhead[usize::from(MEMORY_WRITE)] =
        request * (cuts(node_model.pcie.max_payload.0) + cuts(node_model.pcie.max_read_request.0));
    overhead[usize::from(MEMORY_READ)] = request * cuts(node_model.pcie.max_read_request.0);
    overhead[usize::from(COMPLETION)] = completion * cuts(node_model.pcie.max_payload.0);
    let channel = |direction: &str| {
        let channel = Channel { overhead, ..Channel::new(format!("pcie {direction} {node}"), rate) };
        channel.latency(node_model.pcie_latency).capacity(4 * u64::from(node_model.mtu))
    };
    let (upstream, downstream) =
        (simulation.add_channel(channel("upstream")), simulation.add_channel(channel("downstream")));
    let requests = simulation.add_channel(channel("requests"));
    let memory = Completer::new(CompleterTiming {
        max_completion: node_model.mtu,
        short_read_completion: node_model.mtu,
        ..node_model.memory
    });
    let memory = simulation.add_endpoint(memory);
    let (reads, writes) =
        (simulation.port(memory, 0), simulation.bounded_port(memory, 1, 16 * u64::from(node_model.mtu)));
    let (from_memory, placed) = (simulation.port(nic, FROM_MEMORY), simulation.port(nic, PLACED));
    let (arrived, completed) =
        (simulation.port(units_endpoint, ARRIVED), simulation.port(units_endpoint, COMPLETED));
    let code = Nic {
        mtu: node_model.mtu,
        read_window: node_model.adapter.dma_read_window.max(node_model.mtu),
        pause: node_model.rate.time(2 * u64::from(node_model.mtu)),
        completion: node_model.pcie_latency + node_model.memory.write_latency + node_model.adapter.poll_time,
        poll: node_model.adapter.poll_time,
        network,
        acks,
        reading: simulation.route(&[requests], reads),
        writing: simulation.route(&[upstream], writes),
        completions: simulation.route(&[downstream], from_memory),
        placed: simulation.route(&[], placed),
        arrived: simulation.route(&[], arrived),
        completed: simulation.route(&[], completed),
        fetch_queue: VecDeque::new(),
        fetch_bytes: 0,
        tx_pending: VecDeque::new(),
        rx_writing: VecDeque::new(),
        fetch_timer_set: false,
    };
    simulation.install(nic, code);
}

/// Runs the units over the packet-level network.
pub(super) fn run(scenario: &Scenario, units: Units) -> RunResult {
    let node_model = &scenario.node;
    let n = usize::from(scenario.nodes);
    let mut simulation = Simulation::new(scenario.seed);
    let units_endpoint = simulation.reserve_endpoint();
    // Without a switch the manager is on the first node.
    let (manager, ports_used) = if node_model.switched { (n, n + 1) } else { (0, n) };
    let fabric = SwitchFabric::new(&mut simulation, scenario, ports_used);
    let nics: Vec<EndpointId> = (0..n).map(|_| simulation.reserve_endpoint()).collect();
    let ports: Vec<PortId<Network>> = nics
        .iter()
        .map(|&nic| simulation.bounded_port(nic, FROM_NETWORK, node_model.adapter.rx_buffer))
        .collect();
    for (node, &nic) in nics.iter().enumerate() {
        let network = fabric.to_others(&mut simulation, fabric.out[node], node, &ports);
        let acks = fabric.to_others(&mut simulation, fabric.acks[node], node, &ports);
        adapter(&mut simulation, scenario, (nic, node), units_endpoint, [network, acks]);
    }
    let mut routes = Routes {
        post: Vec::new(),
        copy: Vec::new(),
        to_manager: Vec::new(),
        from_manager: Vec::new(),
        local_control: Vec::new(),
        post_time: node_model.adapter.post_time + node_model.pcie_latency,
        // The links add their own latency, and the adapter's receive latency.
        control: node_model.control_latency() - node_model.latency - node_model.adapter.rx_latency,
    };
    let copied = simulation.port(units_endpoint, COPIED);
    let control_received: Vec<PortId<Network>> =
        (0..=n as u16).map(|at| simulation.port(units_endpoint, CONTROL + at)).collect();
    for (node, &nic) in nics.iter().enumerate() {
        let queue = Channel::stage(format!("work queue {node}"), node_model.adapter.message_gap);
        let queue = simulation
            .add_channel(queue.latency(node_model.adapter.tx_latency + node_model.adapter.gather_latency));
        let port = simulation.port(nic, FROM_SOFTWARE);
        routes.post.push(simulation.route(&[queue], port));
        let copy = simulation.add_channel(Channel::new(format!("copy {node}"), node_model.copy));
        routes.copy.push(simulation.route(&[copy], copied));
        let is_remote = node != manager;
        let to =
            is_remote.then(|| fabric.route(&mut simulation, fabric.out[node], manager, control_received[0]));
        let from = is_remote
            .then(|| fabric.route(&mut simulation, fabric.out[manager], node, control_received[node + 1]));
        routes.to_manager.push(to);
        routes.from_manager.push(from);
    }
    for at in 0..=n as u16 {
        let port = simulation.port(units_endpoint, CONTROL + at);
        routes.local_control.push(simulation.route(&[], port));
    }
    simulation.install(units_endpoint, UnitsEndpoint { units, routes });
    simulation.set_timer(units_endpoint, Picos::ZERO, START_TIMER);
    simulation.run(Picos(u64::MAX));
    let steps = simulation.events();
    let end = simulation.now();
    simulation.get::<UnitsEndpoint>(units_endpoint).units.outcome(end, steps)
}
