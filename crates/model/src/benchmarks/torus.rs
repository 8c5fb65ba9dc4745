//! A torus of adapters: dimension-order routing, credits, and all-to-all.
//!
//! ```text
//!   node ─► x ring, the shorter way ─► y ring ─► z ring ─► node
//! ```
//! Each direction of each link is a line; its buffer is the receiver's channel memory, which credits stand
//! for. A packet enters a ring only if a second packet's room stays free there (bubble flow control), so
//! that rings cannot fill up with packets that wait for each other.

use crate::engine::{
    BytesPerSecond, Channel, ChannelId, Context, Endpoint, Network, Packet, Picos, Route, Simulation,
};

/// A torus.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Torus {
    /// Nodes along each dimension.
    pub dimensions: Vec<u32>,
    /// One direction of a link.
    pub rate: BytesPerSecond,
    /// Largest payload of a packet.
    pub packet_size: u32,
    /// Channel memory.
    pub buffer: u64,
    /// From one node's output to the next one's.
    pub hop_latency: Picos,
    /// From memory to the first output, and from the last input to memory.
    pub end_latency: Picos,
}

impl Torus {
    /// How many nodes.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.dimensions.iter().map(|&d| d as usize).product()
    }

    /// A node's place along each dimension.
    fn coordinates(&self, node: usize) -> Vec<u32> {
        let mut rest = node;
        self.dimensions
            .iter()
            .map(|&d| {
                let here = rest % d as usize;
                rest /= d as usize;
                here as u32
            })
            .collect()
    }

    /// The steps from a node to another: dimension by dimension, each the shorter way; halfway round, nodes
    /// at even places go up and those at odd ones down, so that both directions carry as much.
    #[must_use]
    pub fn hops(&self, from: usize, to: usize) -> Vec<TorusHop> {
        let (a, b) = (self.coordinates(from), self.coordinates(to));
        let mut hops = Vec::new();
        let mut node = from;
        let mut stride = 1;
        for (d, &length) in self.dimensions.iter().enumerate() {
            let up = (b[d] + length - a[d]) % length;
            let forward = 2 * up < length || (2 * up == length && a[d] % 2 == 0);
            let count = if forward { up } else { length - up };
            let mut place = a[d];
            for i in 0..count {
                hops.push(TorusHop { node, dimension: d, positive: forward, enters_ring: i == 0 });
                let next = if forward { (place + 1) % length } else { (place + length - 1) % length };
                node = node + next as usize * stride - place as usize * stride;
                place = next;
            }
            stride *= length as usize;
        }
        hops
    }

    /// Links across the middle of the longest dimension, both directions: what limits all-to-all.
    #[must_use]
    pub fn bisection(&self) -> BytesPerSecond {
        let longest = self.dimensions.iter().copied().max().unwrap_or(1) as usize;
        // A ring is cut in two places, each with a link of two directions; a ring of two has one link.
        let cuts = if longest > 2 { 2 } else { 1 };
        BytesPerSecond((self.nodes() / longest * cuts * 2) as f64 * self.rate.0)
    }
}

/// One link of a way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TorusHop {
    /// The node whose output it is.
    pub node: usize,
    /// The dimension.
    pub dimension: usize,
    /// Towards higher places.
    pub positive: bool,
    /// Whether the packet comes from outside this ring.
    pub enters_ring: bool,
}

struct Node {
    /// To each other node, in the order in which it sends.
    routes: Vec<Route<Network>>,
    /// Packets left for each.
    left: Vec<u32>,
    packet_size: u32,
    next: usize,
    received: u64,
    expected: u64,
    end: Picos,
}

impl Node {
    /// Deals packets to all peers in turn: no output is left idle while another has a queue.
    fn fill(&mut self, context: &mut Context<'_>) {
        let mut blocked = 0;
        while blocked < self.routes.len() {
            let i = self.next % self.routes.len();
            self.next += 1;
            if self.left[i] == 0 || context.backlog(self.routes[i]) > 2 {
                blocked += 1;
                continue;
            }
            blocked = 0;
            self.left[i] -= 1;
            context.send(self.routes[i], Packet::new(0, self.packet_size, 0));
        }
        if self.left.iter().any(|&left| left > 0) {
            context.set_timer(Picos(500_000), 0);
        }
    }
}

impl Endpoint for Node {
    fn receive(&mut self, _port: u16, packet: Packet, context: &mut Context<'_>) {
        context.return_credits(&packet);
        self.received += 1;
        if self.received == self.expected {
            self.end = context.now();
        }
    }

    fn timer(&mut self, _token: u64, context: &mut Context<'_>) {
        self.fill(context);
    }
}

/// What an all-to-all took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AllToAll {
    /// Until the last packet was in place.
    pub time: Picos,
    /// Payload of all messages by that time.
    pub rate: BytesPerSecond,
    /// Events of the simulation.
    pub events: u64,
}

fn outputs(simulation: &mut Simulation, torus: &Torus) -> Vec<ChannelId<Network>> {
    let rings = torus.dimensions.len();
    (0..torus.nodes() * rings * 2)
        .map(|i| {
            let line =
                Channel::new(format!("node {} output {}", i / (rings * 2), i % (rings * 2)), torus.rate);
            simulation.add_channel(line.latency(torus.hop_latency).capacity(torus.buffer))
        })
        .collect()
}

fn route_channels(
    torus: &Torus,
    lines: &[ChannelId<Network>],
    from: usize,
    to: usize,
) -> Vec<(ChannelId<Network>, u32)> {
    let rings = torus.dimensions.len();
    (torus.hops(from, to).into_iter())
        .map(|hop| {
            let line = lines[(hop.node * rings + hop.dimension) * 2 + usize::from(hop.positive)];
            (line, if hop.enters_ring { torus.packet_size } else { 0 })
        })
        .collect()
}

/// Every node sends a message of that size to every other.
#[must_use]
pub fn all_to_all(torus: &Torus, message: u64) -> AllToAll {
    let nodes = torus.nodes();
    let packets = message.div_ceil(u64::from(torus.packet_size)).max(1) as u32;
    let mut simulation = Simulation::new(13);
    let lines = outputs(&mut simulation, torus);
    let ids: Vec<_> = (0..nodes).map(|_| simulation.reserve_endpoint()).collect();
    let ports: Vec<_> = ids.iter().map(|&id| simulation.port(id, 0)).collect();
    for (from, &id) in ids.iter().enumerate() {
        // Node i starts with node i + 1: no node is everybody's first.
        let peers = (1..nodes).map(|k| (from + k) % nodes);
        let routes: Vec<_> = peers
            .map(|to| simulation.bubble_route(&route_channels(torus, &lines, from, to), ports[to]))
            .collect();
        let node = Node {
            left: vec![packets; routes.len()],
            routes,
            packet_size: torus.packet_size.min(message.max(1) as u32),
            next: 0,
            received: 0,
            expected: u64::from(packets) * (nodes as u64 - 1),
            end: Picos::ZERO,
        };
        simulation.install(id, node);
        simulation.set_timer(id, Picos::ZERO, 0);
    }
    simulation.run(Picos(u64::MAX));
    let time = ids.iter().map(|&id| simulation.get::<Node>(id).end).max().unwrap_or_default();
    let all: u64 = ids.iter().map(|&id| simulation.get::<Node>(id).received).sum();
    assert_eq!(all, u64::from(packets) * (nodes * (nodes - 1)) as u64, "every packet arrives");
    let bytes = message as f64 * (nodes * (nodes - 1)) as f64;
    AllToAll { time, rate: BytesPerSecond(bytes / time.seconds().max(1e-12)), events: simulation.events() }
}

/// One small packet's time from a node to another.
#[must_use]
pub fn small_packet_latency(torus: &Torus, from: usize, to: usize) -> Picos {
    let hops = torus.hops(from, to).len() as u64;
    torus.end_latency + (torus.hop_latency + torus.rate.time(64)) * hops
}
