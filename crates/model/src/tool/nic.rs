//! Adapters of two hosts, packet by packet, and all that is between their programs.
//!
//! ```text
//!  program ─post─► adapter ─reads─► memory        memory ◄─writes─ translation ◄─ adapter ─► program
//!                     └──── packets of one MTU, credits, over the legs of the way ────►┘
//! ```

use super::verbs::{Adapter, Leg, Setup, Side, Target, Translation, Verb, Via};
use crate::engine::{
    Context, Endpoint, EndpointId, Internal, Line, LineId, Network, Packet, Pcie, Picos, Rate, Route,
    Simulation,
};
use crate::part::memory::{Memory, read_tag};
use crate::part::pcie::{self, READ, WRITE};
use crate::part::translation::Table;
use std::collections::VecDeque;

// Kinds of network packets; the low two bits choose the overhead.
const MIDDLE: u16 = 4;
const FIRST: u16 = 5;
const ACK: u16 = 6;
const REQUEST: u16 = 9;

// Ports of an adapter.
const FROM_SOFTWARE: u16 = 0;
const FROM_MEMORY: u16 = 1;
const FROM_NETWORK: u16 = 2;
const IN_PLACE: u16 = 3;
const TRANSLATED: u16 = 4;

// Tags on the network: the message's length, flags above, and the program's label in the upper 16 bits.
const LAST: u64 = 1 << 32;
const RESPONSE: u64 = 1 << 33;
const LABEL: u64 = 0xffff << 48;

// Kinds of what programs hear; the tag of what is received is its label.
pub(super) const COMPLETED: u16 = 0;
pub(super) const RECEIVED: u16 = 1;

/// A message for the adapter: its size and the label that the receiver hears.
pub(super) fn message(size: u32, label: u16) -> Packet {
    Packet::new(0, 0, u64::from(label) << 48 | u64::from(size))
}

/// The label of what was received.
pub(super) fn label(packet: &Packet) -> u16 {
    (packet.tag >> 48) as u16
}

// Kinds of steps of a translation: they choose how long it takes.
const HIT: u16 = 0;
const MISS: u16 = 1;

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
    /// Where addresses of arriving packets are looked up, if that takes time.
    translating: Option<(Route<Internal>, Table)>,
    /// Packets that wait for their addresses.
    translated: VecDeque<Packet>,
    /// Bytes of the message that is arriving, so far.
    offset: u64,
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
    fn form(&mut self, size: u32, flags: u64) {
        let mut left = size;
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

    fn start(&mut self, size: u32, flags: u64, context: &mut Context<'_>) {
        self.form(size, flags);
        if size <= self.adapter.inline && flags & RESPONSE == 0 {
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

    /// A packet's payload goes to memory.
    fn write(&mut self, packet: Packet, context: &mut Context<'_>) {
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

    /// A packet has arrived: its address is looked up first, in order with the others.
    fn arrive(&mut self, packet: Packet, context: &mut Context<'_>) {
        let offset = self.offset;
        self.offset = if packet.tag & LAST != 0 { 0 } else { offset + u64::from(packet.size) };
        match &mut self.translating {
            None => self.write(packet, context),
            Some((route, table)) => {
                let step = if table.look_up(offset) { HIT } else { MISS };
                self.translated.push_back(packet);
                context.send(*route, Packet::new(step, 0, 0));
            }
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
            context.send(self.received, Packet::new(RECEIVED, 0, packet.tag & LABEL));
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
                // What is sent with its work request does not overtake what was posted before it.
                if packet.tag as u32 <= self.adapter.inline && self.gathering.is_empty() {
                    self.start(packet.tag as u32, packet.tag & LABEL, context);
                } else {
                    self.gathering.push_back(packet.tag);
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
                _ => self.arrive(packet, context),
            },
            IN_PLACE => self.landed(context),
            TRANSLATED => {
                if let Some(packet) = self.translated.pop_front() {
                    self.write(packet, context);
                }
            }
            _ => {}
        }
    }

    fn wake(&mut self, token: u64, context: &mut Context<'_>) {
        if token == ASK {
            self.asks_again = false;
            self.ask(context);
        } else if let Some(job) = self.gathering.pop_front() {
            self.start(job as u32, job & (RESPONSE | LABEL), context);
        }
    }
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
    // A card that answers a peer's reads slower than its memory could: GPUs of before 2013.
    let answers =
        simulation.line(Line::new(format!("{name} card, answers to peers"), card.read_rate).capacity(4096));
    let between = |simulation: &mut Simulation, what: &str, rate: Rate, latency: Picos| {
        simulation.line(Line::new(format!("{name} {what}"), rate).latency(latency).capacity(4096))
    };
    match card.via {
        Via::RootComplex { write, read, latency } => {
            let there = between(simulation, "root complex, peer writes", write, latency);
            let back = between(simulation, "root complex, peer reads", read, latency);
            Way { there: vec![nic.up, there, far.down], back: vec![answers, far.up, back, nic.down] }
        }
        Via::Switch { latency } => {
            let fast = Rate(f64::INFINITY);
            let there = between(simulation, "switch", fast, latency);
            let back = between(simulation, "switch back", fast, latency);
            Way { there: vec![nic.up, there, far.down], back: vec![answers, far.up, back, nic.down] }
        }
    }
}

/// The lines of a way through the network; the port is at the last one's end.
fn legs(simulation: &mut Simulation, side: &str, setup: &Setup, further: &[Leg]) -> Vec<LineId<Network>> {
    let arrives = |is_last: bool| if is_last { setup.adapter.rx_latency } else { Picos::ZERO };
    let alone = further.is_empty();
    let first = Line { overhead: setup.overhead, ..Line::new(format!("{side} link"), setup.rate) };
    let first = Line { cut_through: !alone, ..first.latency(setup.latency + arrives(alone)) };
    let mut lines = vec![simulation.line(first)];
    for (i, leg) in further.iter().enumerate() {
        let last = i + 1 == further.len();
        let line = Line { overhead: setup.overhead, ..Line::new(leg.name.clone(), leg.rate) };
        let line = line.latency(leg.latency + arrives(last)).capacity(leg.buffer);
        lines.push(simulation.line(Line { cut_through: !last, ..line }));
    }
    lines
}

/// Adds both adapters and what is around them. `programs` hear at their port 0; a [message] that they send
/// on the route that comes back for each is posted.
pub(super) fn connect(
    simulation: &mut Simulation,
    setup: &Setup,
    verb: Verb,
    programs: [EndpointId; 2],
) -> [Route<Internal>; 2] {
    let nics = [simulation.reserve(), simulation.reserve()];
    let adapter = &setup.adapter;
    let names = ["client", "server"];
    [0, 1].map(|i| {
        let (side, name) = (&setup.sides[i], names[i]);
        let way = way(simulation, name, side, setup);
        let (timing, window) = match &side.target {
            Target::Host => (side.host, u64::MAX),
            Target::Card(card) => (card.timing, card.write_window),
        };
        let memory = simulation.endpoint(Memory::new(timing));
        let reads = simulation.port(memory, 0);
        let writes = simulation.bounded_port(memory, 1, window);
        let from_memory = simulation.port(nics[i], FROM_MEMORY);
        let in_place = simulation.port(nics[i], IN_PLACE);
        let wire = legs(simulation, name, setup, &setup.further[i]);
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
        let translating = adapter.translation.map(|Translation { hit, miss, entries, page }| {
            let steps = Line::steps(format!("{name} translation"), [hit, miss, hit, miss]);
            let line = simulation.line(steps);
            let port = simulation.port(nics[i], TRANSLATED);
            (simulation.route(&[line], port), Table::new(entries, page))
        });
        let nic = Nic {
            adapter: *adapter,
            verb,
            mtu: setup.mtu,
            payload: side.pcie.max_payload.0,
            request: side.pcie.max_read_request.0,
            network: simulation.route(&wire, peer),
            reading: simulation.route(&way.there, reads),
            writing: simulation.route(&way.there, writes),
            completions: simulation.route(&way.back, from_memory),
            in_place: simulation.route(&[], in_place),
            completed: simulation.route(&[completed], heard),
            received: simulation.route(&[seen], heard),
            translating,
            translated: VecDeque::new(),
            offset: 0,
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
        simulation.route(&[posting, queueing], software)
    })
}
