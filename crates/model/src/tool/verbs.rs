//! Two hosts with one adapter each, and what perftest measures between them: `ib_write_bw`, `ib_read_bw`,
//! `ib_send_bw`, and the latency of each. A side's memory is its host's, or a card's that the adapter
//! reaches through the root complex or a PCIe switch.
//!
//! ```text
//!  program ─post─► adapter ─reads─► memory            memory ◄─writes─ adapter ─completion─► program
//!                     └──── packets of one MTU, credits ────►──────────┘
//! ```
//! Definitions are perftest's (rows B04 to B07): bandwidth is the payload of all but the first messages by
//! the time between their completions at the client, latency half a round trip, of READ a whole one.

use crate::engine::{
    Context, Endpoint, EndpointId, Internal, Line, LineId, LineReport, Network, Packet, Pcie, Picos, Rate,
    Route, Simulation,
};
use crate::part::memory::{Memory, Timing, read_tag};
use crate::part::pcie::{self, READ, WRITE};
use millstream_site::schema::PcieLink;
use std::collections::VecDeque;

/// What is behind an adapter.
#[derive(Clone, Debug)]
pub enum Target {
    /// Its host's memory.
    Host,
    /// A card's.
    Card(Card),
}

/// A card that an adapter reaches as a peer.
#[derive(Clone, Debug)]
pub struct Card {
    /// Its link.
    pub pcie: PcieLink,
    /// Its memory's answers.
    pub timing: Timing,
    /// Payload of writes that it works on at once.
    pub write_window: u64,
    /// What is between the two links.
    pub via: Via,
}

/// What is between two devices of one PCIe tree.
#[derive(Clone, Copy, Debug)]
pub enum Via {
    /// A root complex, with what it forwards from root port to root port.
    RootComplex {
        /// Writes.
        write: Rate,
        /// Completions.
        read: Rate,
        /// One way.
        latency: Picos,
    },
    /// A switch.
    Switch {
        /// One way.
        latency: Picos,
    },
}

/// One side.
#[derive(Clone, Debug)]
pub struct Side {
    /// The adapter's link.
    pub pcie: PcieLink,
    /// What it reads from and writes to.
    pub target: Target,
    /// The host's memory and root complex.
    pub host: Timing,
}

/// The adapters and their software.
#[derive(Clone, Copy, Debug)]
pub struct Adapter {
    /// Software per work request.
    pub post: Picos,
    /// Software per completion.
    pub poll: Picos,
    /// Doorbell to packet, without fetching payload.
    pub tx_latency: Picos,
    /// Packet whole to PCIe write.
    pub rx_latency: Picos,
    /// What fetching payload adds beside the PCIe read.
    pub gather_latency: Picos,
    /// Per message.
    pub message_gap: Picos,
    /// Payload asked for ahead.
    pub read_window: u32,
    /// RDMA reads in flight.
    pub outstanding_reads: u32,
    /// Received payload waiting for PCIe.
    pub buffer: u64,
    /// Messages up to here travel in the work request.
    pub inline: u32,
}

/// The whole arrangement.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Client and server.
    pub sides: [Side; 2],
    /// The adapters.
    pub adapter: Adapter,
    /// Each direction of the link, after encoding and flow control.
    pub rate: Rate,
    /// Largest payload of a packet.
    pub mtu: u32,
    /// Cable, serialisers and switches.
    pub latency: Picos,
    /// What PCIe links leave.
    pub pcie_efficiency: f64,
    /// One way over a PCIe link.
    pub pcie_latency: Picos,
}

/// Which verb.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// RDMA WRITE.
    Write,
    /// RDMA READ.
    Read,
    /// SEND.
    Send,
}

/// A measured bandwidth.
#[derive(Clone, Debug)]
pub struct Bandwidth {
    /// Payload a second, both directions together if both were asked for.
    pub rate: Rate,
    /// What every line did.
    pub lines: Vec<LineReport>,
}

// Kinds of network packets; the low two bits choose the overhead.
const MIDDLE: u16 = 4;
const FIRST: u16 = 5;
const ACK: u16 = 6;
const REQUEST: u16 = 9;

/// Headers of a packet: LRH 8, BTH 12, ICRC 4, VCRC 2 (row I03); RETH 16 and AETH 4 more (row I04).
pub const HEADERS: u32 = 26;
const OVERHEAD: [u32; 4] = [HEADERS, HEADERS + 16, HEADERS + 4, HEADERS];

// Ports of an adapter.
const FROM_SOFTWARE: u16 = 0;
const FROM_MEMORY: u16 = 1;
const FROM_NETWORK: u16 = 2;
const IN_PLACE: u16 = 3;

// Tags on the network: the message's length, and flags above.
const LAST: u64 = 1 << 32;
const RESPONSE: u64 = 1 << 33;

// Kinds of what programs hear.
const COMPLETED: u16 = 0;
const RECEIVED: u16 = 1;

struct Forming {
    missing: u32,
    kind: u16,
    size: u32,
    tag: u64,
}

/// An adapter.
struct Nic {
    adapter: Adapter,
    verb: Verb,
    mtu: u32,
    payload: u32,
    request: u32,
    network: Route<Network>,
    reading: Route<Pcie>,
    writing: Route<Pcie>,
    completions: Route<Pcie>,
    in_place: Route<Pcie>,
    completed: Route<Internal>,
    received: Route<Internal>,
    /// Messages whose payload is still to be asked for: bytes left.
    asking: VecDeque<u32>,
    gathering: VecDeque<u64>,
    asked: u32,
    forming: VecDeque<Forming>,
    /// Packets whose payload is on its way to memory.
    landing: VecDeque<Packet>,
    reads: u32,
    reads_waiting: VecDeque<u32>,
    asks_again: bool,
}

const GATHER: u64 = 0;
const ASK: u64 = 1;
/// Payload on the way to the link above which no more is asked for.
const AHEAD: u32 = 32 << 10;

impl Nic {
    /// Cuts a message into packets.
    fn form(&mut self, size: u32, response: bool) {
        let mut left = size;
        let flags = if response { RESPONSE } else { 0 };
        loop {
            let bytes = left.min(self.mtu);
            let first = left == size && self.verb == Verb::Write;
            left -= bytes;
            let tag = u64::from(size) | flags | if left == 0 { LAST } else { 0 };
            let kind = if first { FIRST } else { MIDDLE };
            self.forming.push_back(Forming { missing: bytes, kind, size: bytes, tag });
            if left == 0 {
                return;
            }
        }
    }

    fn ask(&mut self, context: &mut Context<'_>) {
        while let Some(left) = self.asking.front_mut() {
            let length = (*left).min(self.request);
            if self.asked > 0 && self.asked + length > self.adapter.read_window {
                return;
            }
            if context.backlog(self.network) > (AHEAD / self.mtu).max(8) as usize {
                if !std::mem::replace(&mut self.asks_again, true) {
                    context.wake_after(Picos(50_000), ASK);
                }
                return;
            }
            *left -= length;
            if *left == 0 {
                self.asking.pop_front();
            }
            self.asked += length;
            context
                .send(self.reading, Packet::new(READ, 0, read_tag(0, length)).answered_by(self.completions));
        }
    }

    fn put_out(&mut self, context: &mut Context<'_>) {
        while self.forming.front().is_some_and(|packet| packet.missing == 0) {
            if let Some(packet) = self.forming.pop_front() {
                context.send(self.network, Packet::new(packet.kind, packet.size, packet.tag));
            }
        }
    }

    fn start(&mut self, size: u32, response: bool, context: &mut Context<'_>) {
        self.form(size, response);
        if size <= self.adapter.inline && !response {
            self.forming.back_mut().expect("a message has a packet").missing = 0;
            self.put_out(context);
        } else {
            self.asking.push_back(size);
            self.ask(context);
        }
    }

    fn request_read(&mut self, context: &mut Context<'_>) {
        while self.reads < self.adapter.outstanding_reads {
            let Some(size) = self.reads_waiting.pop_front() else { return };
            self.reads += 1;
            context.send(self.network, Packet::new(REQUEST, 0, u64::from(size)));
        }
    }

    /// A packet's payload is in memory.
    fn landed(&mut self, context: &mut Context<'_>) {
        let Some(packet) = self.landing.pop_front() else { return };
        context.release(&packet);
        if packet.tag & LAST == 0 {
            return;
        }
        if packet.tag & RESPONSE != 0 {
            self.reads -= 1;
            context.send(self.completed, Packet::new(COMPLETED, 0, 0));
            self.request_read(context);
        } else {
            context.send(self.received, Packet::new(RECEIVED, 0, 0));
        }
    }
}

impl Endpoint for Nic {
    fn receive(&mut self, port: u16, packet: Packet, context: &mut Context<'_>) {
        match port {
            FROM_SOFTWARE if self.verb == Verb::Read => {
                self.reads_waiting.push_back(packet.tag as u32);
                self.request_read(context);
            }
            FROM_SOFTWARE => {
                let size = packet.tag as u32;
                if size <= self.adapter.inline {
                    self.start(size, false, context);
                } else {
                    self.gathering.push_back(u64::from(size));
                    context.wake_after(self.adapter.gather_latency, GATHER);
                }
            }
            FROM_MEMORY => {
                self.asked -= packet.size;
                let mut left = packet.size;
                for forming in &mut self.forming {
                    let taken = left.min(forming.missing);
                    forming.missing -= taken;
                    left -= taken;
                    if left == 0 {
                        break;
                    }
                }
                self.put_out(context);
                self.ask(context);
            }
            FROM_NETWORK => match packet.kind {
                ACK => {
                    context.release(&packet);
                    context.send(self.completed, Packet::new(COMPLETED, 0, 0));
                }
                REQUEST => {
                    context.release(&packet);
                    self.gathering.push_back(packet.tag | RESPONSE);
                    context.wake_after(self.adapter.gather_latency, GATHER);
                }
                _ => {
                    self.landing.push_back(packet);
                    let mut left = packet.size;
                    while left > 0 {
                        let size = left.min(self.payload);
                        left -= size;
                        let write = Packet::new(WRITE, size, 0);
                        let write = if left == 0 { write.answered_by(self.in_place) } else { write };
                        context.send(self.writing, write);
                    }
                    // Acknowledged when it has arrived, not when it is in place (IBTA volume 1, 9.7.5.1).
                    if packet.tag & LAST != 0 && packet.tag & RESPONSE == 0 {
                        context.send(self.network, Packet::new(ACK, 0, 0));
                    }
                }
            },
            IN_PLACE => self.landed(context),
            _ => {}
        }
    }

    fn wake(&mut self, token: u64, context: &mut Context<'_>) {
        if token == ASK {
            self.asks_again = false;
            self.ask(context);
        } else if let Some(job) = self.gathering.pop_front() {
            self.start(job as u32, job & RESPONSE != 0, context);
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    /// Keeps the queue full.
    Stream,
    /// Waits for the other, then answers.
    PingPong,
    /// One at a time.
    Single,
    /// Only receives.
    Silent,
}

struct Program {
    role: Role,
    size: u32,
    depth: u32,
    messages: u32,
    post: Route<Internal>,
    posted: u32,
    done: u32,
    begin: Picos,
    end: Picos,
    starts: bool,
}

impl Program {
    fn post(&mut self, context: &mut Context<'_>) {
        self.posted += 1;
        context.send(self.post, Packet::new(0, 0, u64::from(self.size)));
    }

    fn count(&mut self, context: &mut Context<'_>) {
        self.done += 1;
        if self.done == self.messages / 4 {
            self.begin = context.now();
        }
        if self.done == self.messages {
            self.end = context.now();
            if self.starts {
                context.stop();
            }
        }
    }

    /// Messages between `begin` and `end`.
    fn counted(&self) -> u32 {
        self.messages - self.messages / 4
    }
}

impl Endpoint for Program {
    fn receive(&mut self, _port: u16, packet: Packet, context: &mut Context<'_>) {
        match (self.role, packet.kind) {
            (Role::Stream, COMPLETED) => {
                self.count(context);
                // It goes on after its own end so that the other direction meets traffic to its end.
                self.post(context);
            }
            (Role::PingPong, RECEIVED) => {
                self.count(context);
                self.post(context);
            }
            (Role::Single, COMPLETED) => {
                self.count(context);
                self.post(context);
            }
            _ => {}
        }
    }

    fn wake(&mut self, _token: u64, context: &mut Context<'_>) {
        let first = match self.role {
            Role::Stream => self.depth,
            Role::PingPong | Role::Single => u32::from(self.starts),
            Role::Silent => 0,
        };
        (0..first).for_each(|_| self.post(context));
    }
}

struct Built {
    simulation: Simulation,
    programs: [EndpointId; 2],
}

/// Lines between an adapter and its memory: towards it, and back.
struct Way {
    there: Vec<LineId<Pcie>>,
    back: Vec<LineId<Pcie>>,
}

fn way(simulation: &mut Simulation, name: &str, side: &Side, setup: &Setup) -> Way {
    let (efficiency, latency) = (setup.pcie_efficiency, setup.pcie_latency);
    let nic = pcie::link(simulation, &format!("{name} adapter pcie"), &side.pcie, efficiency, latency, 4096);
    let Target::Card(card) = &side.target else { return Way { there: vec![nic.up], back: vec![nic.down] } };
    let far = pcie::link(simulation, &format!("{name} card pcie"), &card.pcie, efficiency, latency, 4096);
    let between = |simulation: &mut Simulation, what: &str, rate: Rate, latency: Picos| {
        simulation.line(Line::new(format!("{name} {what}"), rate).latency(latency).capacity(4096))
    };
    match card.via {
        Via::RootComplex { write, read, latency } => {
            let there = between(simulation, "root complex, peer writes", write, latency);
            let back = between(simulation, "root complex, peer reads", read, latency);
            Way { there: vec![nic.up, there, far.down], back: vec![far.up, back, nic.down] }
        }
        Via::Switch { latency } => {
            let fast = Rate(f64::INFINITY);
            let there = between(simulation, "switch", fast, latency);
            let back = between(simulation, "switch back", fast, latency);
            Way { there: vec![nic.up, there, far.down], back: vec![far.up, back, nic.down] }
        }
    }
}

fn build(setup: &Setup, verb: Verb, size: u32, depth: u32, messages: u32, roles: [Role; 2]) -> Built {
    let mut simulation = Simulation::new(5);
    let nics = [simulation.reserve(), simulation.reserve()];
    let programs = [simulation.reserve(), simulation.reserve()];
    let adapter = &setup.adapter;
    for (i, name) in ["client", "server"].into_iter().enumerate() {
        let side = &setup.sides[i];
        let way = way(&mut simulation, name, side, setup);
        let (timing, window) = match &side.target {
            Target::Host => (side.host, u64::MAX),
            Target::Card(card) => (card.timing, card.write_window),
        };
        let memory = simulation.endpoint(Memory::new(timing));
        let reads = simulation.port(memory, 0);
        let writes = simulation.bounded_port(memory, 1, window);
        let from_memory = simulation.port(nics[i], FROM_MEMORY);
        let in_place = simulation.port(nics[i], IN_PLACE);
        let wire = Line { overhead: OVERHEAD, ..Line::new(format!("{name} link"), setup.rate) };
        let wire = simulation.line(wire.latency(setup.latency + adapter.rx_latency));
        let peer = simulation.bounded_port(nics[1 - i], FROM_NETWORK, adapter.buffer);
        let software = simulation.port(nics[i], FROM_SOFTWARE);
        let heard = simulation.port(programs[i], 0);
        let posting = Line::step(format!("{name} software"), adapter.post);
        let posting = simulation.line(posting.latency(setup.pcie_latency));
        let queueing = Line::step(format!("{name} work queue"), adapter.message_gap);
        let queueing = simulation.line(queueing.latency(adapter.tx_latency));
        let entry = setup.pcie_latency + side.host.write_latency + adapter.poll;
        let completed =
            simulation.line(Line::step(format!("{name} completions"), Picos::ZERO).latency(entry));
        let seen = simulation.line(Line::step(format!("{name} arrivals"), Picos::ZERO).latency(adapter.poll));
        let nic = Nic {
            adapter: *adapter,
            verb,
            mtu: setup.mtu,
            payload: side.pcie.max_payload.0,
            request: side.pcie.max_read_request.0,
            network: simulation.route(&[wire], peer),
            reading: simulation.route(&way.there, reads),
            writing: simulation.route(&way.there, writes),
            completions: simulation.route(&way.back, from_memory),
            in_place: simulation.route(&[], in_place),
            completed: simulation.route(&[completed], heard),
            received: simulation.route(&[seen], heard),
            asking: VecDeque::new(),
            gathering: VecDeque::new(),
            asked: 0,
            forming: VecDeque::new(),
            landing: VecDeque::new(),
            reads: 0,
            reads_waiting: VecDeque::new(),
            asks_again: false,
        };
        simulation.install(nics[i], nic);
        let program = Program {
            role: roles[i],
            size,
            depth,
            messages,
            post: simulation.route(&[posting, queueing], software),
            posted: 0,
            done: 0,
            begin: Picos::ZERO,
            end: Picos::ZERO,
            starts: i == 0,
        };
        simulation.install(programs[i], program);
        simulation.wake(programs[i], Picos::ZERO, 0);
    }
    Built { simulation, programs }
}

/// Bandwidth of messages of `size` bytes, `depth` of them posted at once; from client to server, of READ
/// from server to client; or in both directions.
#[must_use]
pub fn bandwidth(setup: &Setup, verb: Verb, size: u32, depth: u32, both: bool) -> Bandwidth {
    // Enough for a steady state; the first quarter is not counted.
    let messages = ((8 << 20) / size.max(1)).clamp(24, 400);
    let depth = depth.min(messages / 4);
    let roles = [Role::Stream, if both { Role::Stream } else { Role::Silent }];
    let Built { mut simulation, programs } = build(setup, verb, size, depth, messages, roles);
    simulation.run(Picos(u64::MAX));
    let rate = |id: EndpointId| {
        let program: &Program = simulation.get(id);
        let (messages, end) = match program.end {
            Picos::ZERO => (program.done.saturating_sub(program.messages / 4), simulation.now()),
            end => (program.counted(), end),
        };
        let span = (end - program.begin).seconds();
        if span > 0.0 { f64::from(messages) * f64::from(size) / span } else { 0.0 }
    };
    let total = rate(programs[0]) + if both { rate(programs[1]) } else { 0.0 };
    Bandwidth { rate: Rate(total), lines: simulation.line_reports().collect() }
}

/// Latency as perftest defines it: half a round trip; of READ the whole.
#[must_use]
pub fn latency(setup: &Setup, verb: Verb, size: u32) -> Picos {
    let roles = if verb == Verb::Read { [Role::Single, Role::Silent] } else { [Role::PingPong; 2] };
    let Built { mut simulation, programs } = build(setup, verb, size, 1, 8, roles);
    simulation.run(Picos(u64::MAX));
    let program: &Program = simulation.get(programs[0]);
    let round = Picos((program.end - program.begin).0 / u64::from(program.counted()));
    if verb == Verb::Read { round } else { Picos(round.0 / 2) }
}
