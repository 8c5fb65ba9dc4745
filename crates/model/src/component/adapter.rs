//! RDMA adapters of two hosts at packet level, with the paths to memory, network and software.
//!
//! ```text
//!  software ─post─► adapter ─reads─► memory        memory ◄─writes─ translation ◄─ adapter ─► software
//!                      └──── packets of one MTU, credits, over the network hops ─────────►┘
//! ```

use crate::component::completer::{Completer, read_tag};
use crate::component::cxl::{self, CxlMemory, HomeAgent};
use crate::component::pcie::{self, LinkChannels, MEMORY_READ, MEMORY_WRITE};
use crate::component::tlb::Tlb;
use crate::component::translation::{Stream, Translator};
use crate::engine::{
    BytesPerSecond, Channel, ChannelId, Context, Endpoint, EndpointId, Internal, Network, Packet, Pcie,
    Picos, Route, Simulation,
};
use crate::path::{
    Adapter, AddressTranslation, CxlTarget, DataPath, PathEnd, PeerRoute, TargetMemory, TransportCore,
    Uplink, Verb,
};
use millstream_site::schema::PcieLink;
use std::collections::VecDeque;

// Kinds of network packets; the low two bits select the header overhead.
const MIDDLE: u16 = 4;
const FIRST: u16 = 5;
const ACK: u16 = 6;
const REQUEST: u16 = 9;
/// A later part of a packet, without headers of its own.
const CONTINUATION: u16 = 7;

// Ports of an adapter.
const FROM_SOFTWARE: u16 = 0;
const FROM_MEMORY: u16 = 1;
const FROM_NETWORK: u16 = 2;
const PLACED: u16 = 3;
const TRANSLATED: u16 = 4;
const RESPONDING: u16 = 5;
const DMA_TRANSLATED: u16 = 6;

// Tags of network packets: message length, flags, and the message type in the upper 16 bits.
const LAST: u64 = 1 << 32;
const RESPONSE: u64 = 1 << 33;
const LABEL: u64 = 0xffff << 48;

// Kinds of packets to software. The tag of a receive is its message type.
pub(crate) const COMPLETED: u16 = 0;
pub(crate) const RECEIVED: u16 = 1;

/// A work request of `size` bytes with a message type. A core writes up to `max_inline` bytes of payload into it.
pub(crate) fn message(size: u32, label: u16, max_inline: u32) -> Packet {
    let inline = if size <= max_inline { size } else { 0 };
    let kind = if size > SHORT { LONG_MESSAGE } else { SHORT_MESSAGE };
    Packet::new(kind, inline, u64::from(label) << 48 | u64::from(size))
}

/// Message type of a receive.
pub(crate) fn label(packet: &Packet) -> u16 {
    (packet.tag >> 48) as u16
}

// Kinds of work requests: an adapter needs more time for a payload of several cache lines.
const SHORT_MESSAGE: u16 = 0;
const LONG_MESSAGE: u16 = 1;
/// Largest payload in bytes of a short message.
const SHORT: u32 = 128;

// Kinds of translation steps: they select the stage's time.
const HIT: u16 = 0;
const MISS: u16 = 1;

struct TxPacket {
    unfetched: u32,
    kind: u16,
    size: u32,
    tag: u64,
}

/// An adapter.
struct Nic {
    adapter: Adapter,
    verb: Verb,
    mtu: u32,
    max_payload: u32,
    max_read_request: u32,
    network: Route<Network>,
    read_route: Route<Pcie>,
    write_route: Route<Pcie>,
    completion_route: Route<Pcie>,
    placed: Route<Pcie>,
    completed: Route<Internal>,
    received: Route<Internal>,
    /// Processing of arriving READ requests.
    responder: Route<Internal>,
    /// Address translation of arriving packets, if it takes time.
    tlb: Option<(Route<Internal>, Tlb)>,
    /// Packets that wait for translation.
    awaiting_tlb: VecDeque<Packet>,
    /// Translation of DMA addresses, if the host's IOMMU is on.
    translator: Option<Translator>,
    /// DMA reads, and packets to be written, that wait for translation.
    translating: (VecDeque<Packet>, VecDeque<Packet>),
    /// Bytes received of the current message.
    offset: u64,
    /// Messages whose payload is to be fetched: bytes left, and all bytes.
    fetch_queue: VecDeque<(u32, u32)>,
    gather_queue: VecDeque<u64>,
    fetch_bytes: u32,
    tx_pending: VecDeque<TxPacket>,
    /// Packets at the front of `tx_pending` that can be sent.
    tx_released: u32,
    /// Packets whose payload is being written to memory.
    rx_writing: VecDeque<Packet>,
    active_reads: u32,
    waiting_reads: VecDeque<u32>,
    fetch_timer_set: bool,
}

const GATHER_TIMER: u64 = 0;
const FETCH_TIMER: u64 = 1;
const READ_TIMER: u64 = 2;
const WRITE_TIMER: u64 = 3;
/// Bytes queued for the link above which payload fetches pause: at least this, and half of the bytes that are fetched at a time,
/// so that the queue lasts until the next ones are here.
const TX_BACKLOG: u32 = 32 << 10;

impl Nic {
    /// Segments a message into packets, and packets into the parts that the receiver writes to memory.
    fn segment(&mut self, size: u32, flags: u64) {
        let part = self.adapter.rx_unit.max(1).min(self.mtu);
        let (mut left, mut in_packet) = (size, 0);
        loop {
            let bytes = left.min(part).min(self.mtu - in_packet);
            let first = left == size && self.verb == Verb::Write;
            left -= bytes;
            let tag = u64::from(size) | flags | if left == 0 { LAST } else { 0 };
            let kind = match (in_packet, first) {
                (0, true) => FIRST,
                (0, false) => MIDDLE,
                _ => CONTINUATION,
            };
            in_packet = if in_packet + bytes == self.mtu { 0 } else { in_packet + bytes };
            self.tx_pending.push_back(TxPacket { unfetched: bytes, kind, size: bytes, tag });
            if left == 0 {
                return;
            }
        }
    }

    fn fetch_payload(&mut self, context: &mut Context<'_>) {
        while let Some((left, size)) = self.fetch_queue.front_mut() {
            let length = (*left).min(self.max_read_request);
            if self.fetch_bytes > 0 && self.fetch_bytes + length > self.adapter.dma_read_window {
                return;
            }
            let most = TX_BACKLOG.max(self.adapter.dma_read_window / 2);
            if context.backlog(self.network)
                > (most / self.mtu.min(self.adapter.rx_unit).max(1)).max(8) as usize
            {
                if !std::mem::replace(&mut self.fetch_timer_set, true) {
                    context.set_timer(Picos(50_000), FETCH_TIMER);
                }
                return;
            }
            let offset = u64::from(*size - *left);
            *left -= length;
            if *left == 0 {
                self.fetch_queue.pop_front();
            }
            self.fetch_bytes += length;
            let read = Packet::new(MEMORY_READ, 0, read_tag(0, length)).with_reply(self.completion_route);
            match &mut self.translator {
                None => context.send(self.read_route, read),
                Some(translator) => {
                    translator.start(Stream::Reads, offset, length, context);
                    self.translating.0.push_back(read);
                }
            }
        }
    }

    /// Sends packets whose payload is here. The first ones wait until a unit of their message is.
    fn transmit_ready(&mut self, context: &mut Context<'_>) {
        loop {
            if self.tx_released == 0 {
                let mut unit = 0;
                for packet in &self.tx_pending {
                    if packet.unfetched > 0 {
                        self.tx_released = 0;
                        return;
                    }
                    (unit, self.tx_released) = (unit + packet.size, self.tx_released + 1);
                    if unit >= self.adapter.tx_unit || packet.tag & LAST != 0 {
                        break;
                    }
                }
                if !self.is_unit_complete(unit) {
                    self.tx_released = 0;
                    return;
                }
            }
            let Some(packet) = self.tx_pending.pop_front() else { return };
            self.tx_released -= 1;
            context.send(self.network, Packet::new(packet.kind, packet.size, packet.tag));
        }
    }

    /// Whether the packets to release end a message or make up a unit.
    fn is_unit_complete(&self, unit: u32) -> bool {
        let last = self.tx_released.checked_sub(1).and_then(|last| self.tx_pending.get(last as usize));
        last.is_some_and(|packet| unit >= self.adapter.tx_unit || packet.tag & LAST != 0)
    }

    fn start(&mut self, size: u32, flags: u64, context: &mut Context<'_>) {
        self.segment(size, flags);
        if size <= self.adapter.max_inline && flags & RESPONSE == 0 {
            for packet in self.tx_pending.iter_mut().rev().take_while(|packet| packet.unfetched > 0) {
                packet.unfetched = 0;
            }
            self.transmit_ready(context);
        } else {
            self.fetch_queue.push_back((size, size));
            self.fetch_payload(context);
        }
    }

    fn request_read(&mut self, context: &mut Context<'_>) {
        while self.active_reads < self.adapter.outstanding_reads {
            let Some(size) = self.waiting_reads.pop_front() else { return };
            self.active_reads += 1;
            context.send(self.network, Packet::new(REQUEST, 0, u64::from(size)));
        }
    }

    /// Writes a packet's payload to memory.
    fn write_payload(&mut self, packet: Packet, context: &mut Context<'_>) {
        self.rx_writing.push_back(packet);
        let mut left = packet.size;
        while left > 0 {
            let size = left.min(self.max_payload);
            left -= size;
            let write = Packet::new(MEMORY_WRITE, size, 0);
            let write = if left == 0 { write.with_reply(self.placed) } else { write };
            context.send(self.write_route, write);
        }
        // The responder acknowledges at arrival, before data is in memory (IBTA volume 1, 9.7.5.1).
        if packet.tag & LAST != 0 && packet.tag & RESPONSE == 0 {
            context.send(self.network, Packet::new(ACK, 0, 0));
        }
    }

    /// Translates the addresses of arriving packets, in order.
    fn packet_arrived(&mut self, packet: Packet, context: &mut Context<'_>) {
        let offset = self.offset;
        self.offset = if packet.tag & LAST != 0 { 0 } else { offset + u64::from(packet.size) };
        match (&mut self.tlb, &mut self.translator) {
            (None, None) => self.write_payload(packet, context),
            (None, Some(translator)) => {
                translator.start(Stream::Writes, offset, packet.size, context);
                self.translating.1.push_back(packet);
            }
            (Some((route, table)), _) => {
                let step = if table.lookup(offset) { HIT } else { MISS };
                self.awaiting_tlb.push_back(packet);
                context.send(*route, Packet::new(step, 0, 0));
            }
        }
    }

    /// An access has passed the stage of translations: it leaves after its miss, in order.
    fn pass_translation(&mut self, step: Packet, context: &mut Context<'_>) {
        let Some(translator) = &mut self.translator else { return };
        let token = if Stream::of(&step) == Stream::Reads { READ_TIMER } else { WRITE_TIMER };
        context.set_timer(translator.delay(&step, context.now()), token);
    }

    /// A packet's payload is in memory.
    fn payload_placed(&mut self, context: &mut Context<'_>) {
        let Some(packet) = self.rx_writing.pop_front() else { return };
        context.return_credits(&packet);
        if packet.tag & LAST == 0 {
            return;
        }
        if packet.tag & RESPONSE != 0 {
            self.active_reads -= 1;
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
                self.waiting_reads.push_back(packet.tag as u32);
                self.request_read(context);
            }
            FROM_SOFTWARE => {
                // An inline message must not overtake messages posted before it.
                if packet.tag as u32 <= self.adapter.max_inline && self.gather_queue.is_empty() {
                    self.start(packet.tag as u32, packet.tag & LABEL, context);
                } else {
                    self.gather_queue.push_back(packet.tag);
                    context.set_timer(self.adapter.gather_latency, GATHER_TIMER);
                }
            }
            FROM_MEMORY => {
                self.fetch_bytes -= packet.size;
                let mut left = packet.size;
                for tx_pending in &mut self.tx_pending {
                    let taken = left.min(tx_pending.unfetched);
                    tx_pending.unfetched -= taken;
                    left -= taken;
                    if left == 0 {
                        break;
                    }
                }
                self.transmit_ready(context);
                self.fetch_payload(context);
            }
            RESPONDING => {
                self.gather_queue.push_back(packet.tag | RESPONSE);
                context.set_timer(self.adapter.gather_latency, GATHER_TIMER);
            }
            FROM_NETWORK => match packet.kind {
                ACK => {
                    context.return_credits(&packet);
                    context.send(self.completed, Packet::new(COMPLETED, 0, 0));
                }
                REQUEST => {
                    context.return_credits(&packet);
                    // The stage takes the time of the data on the link, too: one READ after the other.
                    context.send(self.responder, Packet::new(0, packet.tag as u32, packet.tag));
                }
                _ => self.packet_arrived(packet, context),
            },
            PLACED => self.payload_placed(context),
            TRANSLATED => {
                if let Some(packet) = self.awaiting_tlb.pop_front() {
                    self.write_payload(packet, context);
                }
            }
            DMA_TRANSLATED => self.pass_translation(packet, context),
            _ => {}
        }
    }

    fn timer(&mut self, token: u64, context: &mut Context<'_>) {
        if token == FETCH_TIMER {
            self.fetch_timer_set = false;
            self.fetch_payload(context);
        } else if token == READ_TIMER {
            if let Some(read) = self.translating.0.pop_front() {
                context.send(self.read_route, read);
            }
        } else if token == WRITE_TIMER {
            if let Some(packet) = self.translating.1.pop_front() {
                self.write_payload(packet, context);
            }
        } else if let Some(job) = self.gather_queue.pop_front() {
            self.start(job as u32, job & (RESPONSE | LABEL), context);
        }
    }
}

/// Channels from an adapter to memory, and back.
struct PciePath {
    to_memory: Vec<ChannelId<Pcie>>,
    from_memory: Vec<ChannelId<Pcie>>,
}

/// What the PCIe links of a path have in common.
#[derive(Clone, Copy)]
struct PcieTiming {
    efficiency: f64,
    /// Latency of one link direction.
    latency: Picos,
    /// Largest latency from one buffer to the next: of a link, or of a switch or root complex between two links.
    hop: Picos,
}

impl PcieTiming {
    fn new(end: &PathEnd, path: &DataPath) -> PcieTiming {
        let latency = path.pcie_latency;
        let card = if let TargetMemory::Card(card) = &end.target { Some(card) } else { None };
        let below = card.into_iter().flat_map(|card| &card.uplinks);
        let between = card.map_or(Picos::ZERO, |card| match card.route {
            PeerRoute::RootComplex { latency, .. } | PeerRoute::Switch { latency } => latency,
        });
        let links = end.uplinks.iter().chain(below).map(|uplink| latency + uplink.latency);
        let hop = links.fold(latency.max(between), Picos::max);
        PcieTiming { efficiency: end.pcie_efficiency, latency, hop }
    }

    /// Payload for which a buffer behind a link of this rate gives credits. They cover what is in flight to the buffer, because
    /// ports are built to sustain the rate of their links (PCI Express Base Specification, 2.6.1).
    fn credits(&self, rate: f64) -> u64 {
        PCIE_BUFFER + (rate * self.hop.seconds()) as u64
    }
}

/// Payload that is queued in front of a PCIe link.
const PCIE_BUFFER: u64 = 4096;

/// Adds a device's link and the uplinks of the switches above it; channels in the order towards the root complex.
fn device_links(
    simulation: &mut Simulation,
    name: &str,
    device: &PcieLink,
    uplinks: &[Uplink],
    timing: PcieTiming,
) -> Vec<LinkChannels> {
    let rate = link_rate;
    let first = (name.to_owned(), *device, Picos::ZERO);
    let above = uplinks
        .iter()
        .map(|uplink| (format!("{name} uplink of {}", uplink.name), uplink.pcie, uplink.latency));
    let all: Vec<(String, PcieLink, Picos)> = std::iter::once(first).chain(above).collect();
    let links = all.iter().enumerate().map(|(i, (name, link, of_switch))| {
        let up = all.get(i + 1).is_some_and(|(_, next, _)| rate(next) <= rate(link));
        let down = i > 0 && rate(&all[i - 1].1) <= rate(link);
        let latency = timing.latency + *of_switch;
        let buffer = timing.credits(rate(link));
        pcie::add_cut_through_link(simulation, name, link, timing.efficiency, latency, buffer, [up, down])
    });
    links.collect()
}

fn link_rate(link: &PcieLink) -> f64 {
    pcie::raw_rate(link.generation.0, link.lanes.0).0
}

fn pcie_path(simulation: &mut Simulation, name: &str, end: &PathEnd, path: &DataPath) -> PciePath {
    let timing = PcieTiming::new(end, path);
    let nic = device_links(simulation, &format!("{name} adapter pcie"), &end.pcie, &end.uplinks, timing);
    let up = |links: &[LinkChannels]| links.iter().map(|link| link.upstream).collect::<Vec<_>>();
    let down = |links: &[LinkChannels]| links.iter().rev().map(|link| link.downstream).collect::<Vec<_>>();
    let TargetMemory::Card(card) = &end.target else {
        return PciePath { to_memory: up(&nic), from_memory: down(&nic) };
    };
    let far = device_links(simulation, &format!("{name} card pcie"), &card.pcie, &card.uplinks, timing);
    // GPUs before 2013 answer reads of a peer more slowly than their memory could.
    let answers = simulation.add_channel(
        Channel::new(format!("{name} card, peer read completions"), card.read_rate).capacity(PCIE_BUFFER),
    );
    let between = |simulation: &mut Simulation, what: &str, rate: BytesPerSecond, latency: Picos| {
        let buffer = timing.credits(rate.0.min(link_rate(&end.pcie)));
        simulation.add_channel(Channel::new(format!("{name} {what}"), rate).latency(latency).capacity(buffer))
    };
    let (there, back) = match card.route {
        PeerRoute::RootComplex { write, read, latency } => (
            between(simulation, "root complex, peer writes", write, latency),
            between(simulation, "root complex, peer reads", read, latency),
        ),
        PeerRoute::Switch { latency } => {
            let fast = BytesPerSecond(f64::INFINITY);
            (
                between(simulation, "switch, writes", fast, latency),
                between(simulation, "switch, read completions", fast, latency),
            )
        }
    };
    PciePath {
        to_memory: [up(&nic), vec![there], down(&far)].concat(),
        from_memory: [vec![answers], up(&far), vec![back], down(&nic)].concat(),
    }
}

/// Payload of posted writes that a root complex takes before their lines are on the CXL link.
const CXL_POSTED: u64 = 16 << 10;

/// Adds the memory behind a CXL link; returns its home agent.
fn cxl_memory(simulation: &mut Simulation, name: &str, target: &CxlTarget) -> EndpointId {
    let home = simulation.reserve_endpoint();
    let links = cxl::add_links(simulation, &format!("{name} CXL"), &target.timing);
    let memory = simulation.add_endpoint(CxlMemory::new(target.timing.clone()));
    let [to_memory, to_home] = [simulation.port(memory, 0), simulation.port(home, cxl::FROM_LINK)];
    let (m2s, s2m) = (simulation.route(&links.m2s, to_memory), simulation.route(&links.s2m, to_home));
    simulation.install(home, HomeAgent::new(target.home, m2s, s2m));
    home
}

/// Channels of the network route; the receiving port is behind the last.
fn network_channels(
    simulation: &mut Simulation,
    path: &DataPath,
    direction: usize,
    rx_latency: Picos,
    part: u32,
) -> Vec<ChannelId<Network>> {
    let hops = path.network_hops(direction);
    let lost = path.loss_detection();
    let lines = hops.iter().enumerate().map(|(i, hop)| {
        let next = hops.get(i + 1);
        let arrives = if next.is_none() { rx_latency } else { Picos::ZERO };
        let line = Channel { overhead: path.overhead, ..Channel::new(hop.name.clone(), hop.rate) };
        // Go-back-N: what was sent until the loss is known is sent again. Each part of a packet has its share of the mean.
        let repeated = lost.0 as f64 * hop.loss / (1.0 - hop.loss) * f64::from(part) / f64::from(path.mtu);
        let line = line.latency(hop.latency + arrives).capacity(hop.buffer).gap(Picos(repeated as u64));
        // A switch stores a packet that continues on a faster link.
        let cut_through = next.is_some_and(|next| next.rate.0 <= hop.rate.0);
        simulation.add_channel(Channel { cut_through, ..line })
    });
    lines.collect()
}

/// Adds the core that carries an adapter's packets in both directions, if its transport is software.
fn transport_core(
    simulation: &mut Simulation,
    name: &str,
    core: Option<TransportCore>,
) -> Vec<ChannelId<Network>> {
    let channel = |TransportCore { message, packet, acknowledgement, copy }: TransportCore| {
        // Bytes whose copy takes the time of a packet of each kind: middle, first, acknowledgement, later parts.
        let bytes = |time: Picos| (time.seconds() * copy.0).round() as u32;
        let overhead = [bytes(packet), bytes(message), bytes(acknowledgement), bytes(packet)];
        Channel { overhead, ..Channel::new(format!("{name} transport core"), copy) }
    };
    core.map(|core| simulation.add_channel(channel(core))).into_iter().collect()
}

/// Adds both adapters with their surroundings. `programs` receive completions and messages at port 0; they post a
/// [`message`] on the returned routes.
pub(crate) fn connect(
    simulation: &mut Simulation,
    path: &DataPath,
    verb: Verb,
    programs: [EndpointId; 2],
) -> [Route<Internal>; 2] {
    let nics = [simulation.reserve_endpoint(), simulation.reserve_endpoint()];
    let names = ["client", "server"];
    let cores = [0, 1].map(|i| transport_core(simulation, names[i], path.ends[i].adapter.core));
    [0, 1].map(|i| {
        let (end, name) = (&path.ends[i], names[i]);
        let (adapter, far) = (&end.adapter, &path.ends[1 - i].adapter);
        let pcie = pcie_path(simulation, name, end, path);
        let (memory, window) = match &end.target {
            TargetMemory::Host => (simulation.add_endpoint(Completer::new(end.host)), u64::MAX),
            TargetMemory::Card(card) => {
                (simulation.add_endpoint(Completer::new(card.timing)), card.write_window)
            }
            TargetMemory::Cxl(target) => (cxl_memory(simulation, name, target), CXL_POSTED),
        };
        let reads = simulation.port(memory, 0);
        let writes = simulation.bounded_port(memory, 1, window);
        let from_memory = simulation.port(nics[i], FROM_MEMORY);
        let placed = simulation.port(nics[i], PLACED);
        let part = far.rx_unit.clamp(1, path.mtu);
        let hops = network_channels(simulation, path, i, far.rx_latency, part);
        let wire = [cores[i].clone(), hops, cores[1 - i].clone()].concat();
        let peer = simulation.bounded_port(nics[1 - i], FROM_NETWORK, far.rx_buffer);
        let software = simulation.port(nics[i], FROM_SOFTWARE);
        let software_port = simulation.port(programs[i], 0);
        let posting = Channel::stage(format!("{name} software"), adapter.post_time);
        let posting = Channel { rate: adapter.inline_rate, ..posting.latency(path.pcie_latency) };
        let posting = simulation.add_channel(posting);
        let (short, long) = match verb {
            Verb::Read => (adapter.read_gap, adapter.read_gap),
            Verb::Write | Verb::Send => {
                (adapter.message_gap, adapter.long_message_gap.max(adapter.message_gap))
            }
        };
        let queueing = Channel::stage_by_kind(format!("{name} work queue"), [short, long, short, long]);
        let queueing = simulation.add_channel(queueing.latency(adapter.tx_latency));
        let entry = path.pcie_latency + end.host.write_latency + adapter.poll_time;
        let completed =
            simulation.add_channel(Channel::stage(format!("{name} completions"), Picos::ZERO).latency(entry));
        let seen = simulation
            .add_channel(Channel::stage(format!("{name} receives"), Picos::ZERO).latency(adapter.poll_time));
        let tlb = adapter.translation.map(|AddressTranslation { hit, miss, entries, page }| {
            let steps = Channel::stage_by_kind(format!("{name} translation"), [hit, miss, hit, miss]);
            let line = simulation.add_channel(steps);
            let port = simulation.port(nics[i], TRANSLATED);
            (simulation.route(&[line], port), Tlb::new(entries, page))
        });
        let translator = end.translation.map(|timing| {
            let port = simulation.port(nics[i], DMA_TRANSLATED);
            Translator::new(simulation, name, timing, port)
        });
        let responding = Channel::new(format!("{name} responder"), path.rate).gap(adapter.response_gap);
        let responding = simulation.add_channel(responding);
        let responded = simulation.port(nics[i], RESPONDING);
        let nic = Nic {
            adapter: Adapter { rx_unit: far.rx_unit, ..*adapter },
            responder: simulation.route(&[responding], responded),
            verb,
            mtu: path.mtu,
            max_payload: end.pcie.max_payload.0,
            max_read_request: end.pcie.max_read_request.0,
            network: simulation.route(&wire, peer),
            read_route: simulation.route(&pcie.to_memory, reads),
            write_route: simulation.route(&pcie.to_memory, writes),
            completion_route: simulation.route(&pcie.from_memory, from_memory),
            placed: simulation.route(&[], placed),
            completed: simulation.route(&[completed], software_port),
            received: simulation.route(&[seen], software_port),
            tlb,
            translator,
            translating: Default::default(),
            awaiting_tlb: VecDeque::new(),
            offset: 0,
            fetch_queue: VecDeque::new(),
            gather_queue: VecDeque::new(),
            fetch_bytes: 0,
            tx_pending: VecDeque::new(),
            tx_released: 0,
            rx_writing: VecDeque::new(),
            active_reads: 0,
            waiting_reads: VecDeque::new(),
            fetch_timer_set: false,
        };
        simulation.install(nics[i], nic);
        simulation.route(&[posting, queueing], software)
    })
}
