//! Torus network: dimension-order routing, credits, all-to-all.
//!
//! ```text
//!   node ─► x ring, shorter direction ─► y ring ─► z ring ─► node
//! ```
//! Each direction of a link is a channel; the receiver's buffer precedes it. A packet enters a ring only if room
//! for a second packet stays free there (bubble flow control), which prevents deadlock.

use crate::engine::{
    BytesPerSecond, Channel, ChannelId, Context, Endpoint, Network, Packet, Picos, Route, Simulation,
};

/// A torus.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Torus {
    /// Nodes per dimension.
    pub dimensions: Vec<u32>,
    /// Rate of one link direction.
    pub rate: BytesPerSecond,
    /// Largest payload of a packet.
    pub packet_size: u32,
    /// Receive buffer of a channel in bytes.
    pub buffer: u64,
    /// Latency from a node's output to the next node's output.
    pub hop_latency: Picos,
    /// Latency from memory to the first output plus from the last input to memory.
    pub end_latency: Picos,
}

impl Torus {
    /// Number of nodes.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.dimensions.iter().map(|&d| d as usize).product()
    }

    /// Coordinates of a node.
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

    /// Hops of the route between two nodes: dimension by dimension in the shorter direction. At half the ring's length,
    /// even coordinates go in positive and odd ones in negative direction, which balances both.
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

    /// Bisection bandwidth of the longest dimension, both directions: the limit of an all-to-all.
    #[must_use]
    pub fn bisection(&self) -> BytesPerSecond {
        let longest = self.dimensions.iter().copied().max().unwrap_or(1) as usize;
        // A cut crosses a ring at two links of two directions each; a ring of two nodes has one link.
        let cuts = if longest > 2 { 2 } else { 1 };
        BytesPerSecond((self.nodes() / longest * cuts * 2) as f64 * self.rate.0)
    }
}

/// One link of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TorusHop {
    /// The node whose output it is.
    pub node: usize,
    /// The dimension.
    pub dimension: usize,
    /// Whether the coordinate increases.
    pub positive: bool,
    /// Whether the packet enters this ring here.
    pub enters_ring: bool,
}

struct Node {
    /// Routes to the other nodes, in sending order.
    routes: Vec<Route<Network>>,
    /// Packets left for each other node.
    left: Vec<u32>,
    packet_size: u32,
    next: usize,
    received: u64,
    expected: u64,
    end: Picos,
}

impl Node {
    /// Sends to all peers round-robin, so that no output idles while packets for it are left.
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

/// Result of an all-to-all.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AllToAll {
    /// Time of the last arrival.
    pub time: Picos,
    /// Payload of all messages per time.
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

/// All-to-all: every node sends a message of this size to every other.
#[must_use]
pub fn all_to_all(torus: &Torus, message: u64) -> AllToAll {
    let nodes = torus.nodes();
    let packets = message.div_ceil(u64::from(torus.packet_size)).max(1) as u32;
    let mut simulation = Simulation::new(13);
    let lines = outputs(&mut simulation, torus);
    let ids: Vec<_> = (0..nodes).map(|_| simulation.reserve_endpoint()).collect();
    let ports: Vec<_> = ids.iter().map(|&id| simulation.port(id, 0)).collect();
    for (from, &id) in ids.iter().enumerate() {
        // Node i starts with node i + 1, so no node is the first target of all.
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

/// Latency of one small packet.
#[must_use]
pub fn small_packet_latency(torus: &Torus, from: usize, to: usize) -> Picos {
    let hops = torus.hops(from, to).len() as u64;
    torus.end_latency + (torus.hop_latency + torus.rate.time(64)) * hops
}
