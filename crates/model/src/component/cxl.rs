//! CXL.mem: flits on a PCIe physical layer, a memory device (type 3), and the home agent that turns TLPs into cache lines.
//!
//! Read: Compute Express Link Specification 2.0, 4.2.3 (slots of 68 B flits) and 4.2.5 (packing rules); 3.1, 4.3.2 (256 B
//! flits); 3.3 (CXL.mem: M2S Req and RwD, S2M NDR and DRS).
//!
//! ```text
//!   68 B flit   protocol id 2 ─ slot 16 ─ slot 16 ─ slot 16 ─ slot 16 ─ CRC 2        flits of data only have four slots of data
//!   256 B flit  header 2 ─ H slot 14 ─ 14 G slots of 16 ─ credits 2 ─ CRC 8 ─ FEC 6  data is in G slots
//!
//!   read    M2S Req: 1 slot ──► memory ──► S2M DRS: header, 4 slots of data; two headers to an H slot, three to a G slot
//!   write   M2S RwD: 1 slot of header, 4 of data, 1 of byte enables if partial ──► memory ──► S2M NDR: as headers of DRS
//! ```

use super::pcie::{COMPLETION, MEMORY_READ, MEMORY_WRITE};
use crate::engine::{
    BytesPerSecond, Channel, ChannelId, Context, Cxl, Endpoint, Packet, Pcie, Picos, Route, Simulation,
};
use millstream_site::cxl::{CxlLink, Flit};
use std::collections::VecDeque;

/// Bytes of a cache line, the unit of every access.
pub const LINE: u32 = 64;

// Kinds of messages; the low two bits select the time on the link.
/// M2S Req: a read of a line.
pub const REQUEST: u16 = 0;
/// M2S RwD: a write of a line.
pub const WRITE: u16 = 1;
/// M2S RwD with byte enables: a write of a part of a line.
pub const PARTIAL_WRITE: u16 = 2;
/// S2M DRS: a line of data.
pub const DATA: u16 = 0;
/// S2M NDR: a write is complete.
pub const NO_DATA: u16 = 1;

/// Flits of each message in a stream of messages of its kind, by direction: M2S, S2M.
fn flits(flit: Flit) -> [[f64; 4]; 2] {
    match flit {
        // Four slots to a flit. Two lines have both headers in the H slot of one flit; the other flits are full of data: nine
        // slots for two lines.
        Flit::Bytes68 => [[0.25, 1.25, 1.5, 1.5], [9.0 / 8.0, 1.0 / 8.0, 0.0, 0.0]],
        // 15 slots to a flit, one header of a request each. An H slot has two headers of responses, a G slot three: 44 to a flit.
        Flit::Bytes256 => {
            let [request, header] = [1.0 / 15.0, 1.0 / 44.0];
            [
                [request, 5.0 * request, 6.0 * request, 6.0 * request],
                // Four G slots of data, which have room for twelve headers, and a header.
                [13.0 * header, header, 0.0, 0.0],
            ]
        }
    }
}

/// Rate of a link after line code: 128b/130b up to generation 5, none in generation 6.
#[must_use]
pub fn raw_rate(link: &CxlLink) -> BytesPerSecond {
    let (transfers, encoding) = match link.generation.0 {
        ..=3 => (8.0, 128.0 / 130.0),
        4 => (16.0, 128.0 / 130.0),
        5 => (32.0, 128.0 / 130.0),
        _ => (64.0, 1.0),
    };
    BytesPerSecond::gigabits(transfers * encoding * f64::from(link.lanes.0))
}

/// Payload rate of a stream of reads (S2M) or of writes (M2S) of whole lines.
#[must_use]
pub fn payload_rate(link: &CxlLink, efficiency: f64, is_write: bool) -> BytesPerSecond {
    let [m2s, s2m] = flits(link.flit);
    let per_line = if is_write { m2s[usize::from(WRITE)] } else { s2m[usize::from(DATA)] };
    let wire = per_line * f64::from(link.flit.bytes());
    BytesPerSecond(raw_rate(link).0 * efficiency * f64::from(LINE) / wire)
}

/// A link on the way to a memory device.
#[derive(Clone, Debug, PartialEq)]
pub struct CxlHop {
    /// Name of the switch whose upstream port it ends at; empty for the memory device.
    pub switch: String,
    /// The link.
    pub link: CxlLink,
    /// Latency of one direction: ports of sockets and memory devices at its ends, and the switch that it leads to.
    pub latency: Picos,
}

/// Timing of the links to a memory device and of the memory.
#[derive(Clone, Debug, PartialEq)]
pub struct CxlTiming {
    /// Links from the root port to the device.
    pub hops: Vec<CxlHop>,
    /// Share of a link's rate that skip ordered sets and control flits leave.
    pub efficiency: f64,
    /// Request at the device to data at the device, of an idle memory.
    pub read_latency: Picos,
    /// Data at the device to its completion.
    pub write_latency: Picos,
    /// Rate of the memory.
    pub memory_rate: BytesPerSecond,
}

impl CxlTiming {
    /// Latency of all links in one direction.
    #[must_use]
    pub fn latency(&self) -> Picos {
        self.hops.iter().fold(Picos::ZERO, |sum, hop| sum + hop.latency)
    }

    /// Payload rate of the slowest link; see [`payload_rate`].
    #[must_use]
    pub fn payload_rate(&self, efficiency: f64, is_write: bool) -> BytesPerSecond {
        let rates = self.hops.iter().map(|hop| payload_rate(&hop.link, efficiency, is_write).0);
        BytesPerSecond(rates.fold(f64::INFINITY, f64::min))
    }
}

/// Both directions of the links between a root port and a memory device, in the order of messages.
#[derive(Clone, Debug)]
pub struct CxlChannels {
    /// Master to subordinate: from the host.
    pub m2s: Vec<ChannelId<Cxl>>,
    /// Subordinate to master: to the host.
    pub s2m: Vec<ChannelId<Cxl>>,
}

/// Adds both directions of all links. A switch has a whole message before it packs it into flits of the next link.
pub fn add_links(simulation: &mut Simulation, name: &str, timing: &CxlTiming) -> CxlChannels {
    let mut channels = CxlChannels { m2s: Vec::new(), s2m: Vec::new() };
    for hop in &timing.hops {
        let rate = raw_rate(&hop.link).0 * timing.efficiency;
        let [m2s, s2m] = flits(hop.link.flit).map(|direction| {
            direction.map(|flits| Picos::from_seconds(flits * f64::from(hop.link.flit.bytes()) / rate))
        });
        let of = if hop.switch.is_empty() { String::new() } else { format!(" uplink of {}", hop.switch) };
        let channel = |direction: &str, times: [Picos; 4]| {
            Channel::stage_by_kind(format!("{name}{of} {direction}"), times).latency(hop.latency)
        };
        channels.m2s.push(simulation.add_channel(channel("M2S", m2s)));
        channels.s2m.insert(0, simulation.add_channel(channel("S2M", s2m)));
    }
    channels
}

/// A memory device: answers every message after its latency, one line after the other.
#[derive(Debug)]
pub struct CxlMemory {
    timing: CxlTiming,
    free_at: Picos,
    reading: VecDeque<Packet>,
    writing: VecDeque<Packet>,
}

const READ_DONE: u64 = 0;
const WRITE_DONE: u64 = 1;

impl CxlMemory {
    /// An idle device.
    #[must_use]
    pub fn new(timing: CxlTiming) -> CxlMemory {
        CxlMemory { timing, free_at: Picos::ZERO, reading: VecDeque::new(), writing: VecDeque::new() }
    }
}

impl Endpoint for CxlMemory {
    fn receive(&mut self, _port: u16, packet: Packet, context: &mut Context<'_>) {
        let start = self.free_at.max(context.now());
        self.free_at = start + self.timing.memory_rate.time(u64::from(LINE));
        let waited = start - context.now();
        if packet.kind == REQUEST {
            self.reading.push_back(packet);
            context.set_timer(waited + self.timing.read_latency, READ_DONE);
        } else {
            self.writing.push_back(packet);
            context.set_timer(waited + self.timing.write_latency, WRITE_DONE);
        }
    }

    fn timer(&mut self, token: u64, context: &mut Context<'_>) {
        let (queue, kind) =
            if token == READ_DONE { (&mut self.reading, DATA) } else { (&mut self.writing, NO_DATA) };
        if let Some(packet) = queue.pop_front() {
            context.send(Route::<Cxl>::reply_to(&packet), Packet::new(kind, 0, packet.tag));
        }
    }
}

/// Timing of the home agent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HomeAgentTiming {
    /// Arrival of a read to its first request on the link.
    pub read_latency: Picos,
    /// Arrival of a write to its first line on the link.
    pub write_latency: Picos,
    /// Lines in progress.
    pub outstanding: u32,
    /// Largest payload of a completion.
    pub max_completion: u32,
}

/// A TLP in progress.
#[derive(Debug)]
struct Access {
    packet: Packet,
    /// Bytes whose lines are not on the link yet.
    unsent: u32,
    /// Bytes that the memory has not answered.
    unanswered: u32,
    /// Bytes read that no completion has taken.
    collected: u32,
}

/// The home agent of a root complex: splits TLPs into lines for the memory behind a link, and puts completions together.
#[derive(Debug)]
pub struct HomeAgent {
    timing: HomeAgentTiming,
    m2s: Route<Cxl>,
    s2m: Route<Cxl>,
    /// TLPs whose latency has not passed.
    arriving: [VecDeque<Packet>; 2],
    /// Reads and writes; the memory answers each kind in order.
    accesses: [VecDeque<Access>; 2],
    outstanding: u32,
    /// Whether the next line is of a write: both kinds take turns.
    writes_next: bool,
}

/// Port of the memory's answers; other ports take TLPs.
pub const FROM_LINK: u16 = 2;
const READ: usize = 0;
const POSTED: usize = 1;

impl HomeAgent {
    /// An idle home agent. `s2m` is the route of answers to its port [`FROM_LINK`].
    #[must_use]
    pub fn new(timing: HomeAgentTiming, m2s: Route<Cxl>, s2m: Route<Cxl>) -> HomeAgent {
        HomeAgent {
            timing,
            m2s,
            s2m,
            arriving: Default::default(),
            accesses: Default::default(),
            outstanding: 0,
            writes_next: false,
        }
    }

    /// Sends lines until too many are in progress.
    fn send_lines(&mut self, context: &mut Context<'_>) {
        while self.outstanding < self.timing.outstanding {
            let first = usize::from(self.writes_next);
            let waits = |access: &Access| access.unsent > 0;
            let Some(which) = [first, 1 - first].into_iter().find(|&i| self.accesses[i].iter().any(waits))
            else {
                return;
            };
            self.writes_next = which == READ;
            let Some(access) = self.accesses[which].iter_mut().find(|access| waits(access)) else { return };
            let bytes = access.unsent.min(LINE);
            access.unsent -= bytes;
            let kind = match which {
                READ => REQUEST,
                _ if bytes < LINE => PARTIAL_WRITE,
                _ => WRITE,
            };
            self.outstanding += 1;
            context.send(self.m2s, Packet::new(kind, 0, 0).with_reply(self.s2m));
        }
    }

    fn line_read(&mut self, context: &mut Context<'_>) {
        let most = self.timing.max_completion;
        let Some(access) = self.accesses[READ].front_mut() else { return };
        let bytes = access.unanswered.min(LINE);
        access.unanswered -= bytes;
        access.collected += bytes;
        if access.collected >= most || access.unanswered == 0 {
            let tag = access.packet.tag >> 32 << 32 | u64::from(access.unanswered);
            let completion = Packet::new(COMPLETION, access.collected, tag);
            access.collected = 0;
            context.send(Route::<Pcie>::reply_to(&access.packet), completion);
        }
        if access.unanswered == 0 {
            self.accesses[READ].pop_front();
        }
    }

    fn line_written(&mut self, context: &mut Context<'_>) {
        let Some(access) = self.accesses[POSTED].front_mut() else { return };
        access.unanswered -= access.unanswered.min(LINE);
        if access.unanswered > 0 {
            return;
        }
        let packet = access.packet;
        self.accesses[POSTED].pop_front();
        context.return_credits(&packet);
        if packet.reply != 0 {
            context
                .send(Route::<Pcie>::reply_to(&packet), Packet::new(MEMORY_WRITE, packet.size, packet.tag));
        }
    }
}

impl Endpoint for HomeAgent {
    fn receive(&mut self, port: u16, packet: Packet, context: &mut Context<'_>) {
        match (port, packet.kind) {
            (FROM_LINK, kind) => {
                self.outstanding -= 1;
                if kind == DATA {
                    self.line_read(context)
                } else {
                    self.line_written(context)
                }
                self.send_lines(context);
            }
            (_, MEMORY_READ) => {
                self.arriving[READ].push_back(packet);
                context.set_timer(self.timing.read_latency, READ as u64);
            }
            (_, MEMORY_WRITE) => {
                self.arriving[POSTED].push_back(packet);
                context.set_timer(self.timing.write_latency, POSTED as u64);
            }
            _ => {}
        }
    }

    fn timer(&mut self, token: u64, context: &mut Context<'_>) {
        let which = token as usize;
        let Some(packet) = self.arriving[which].pop_front() else { return };
        let bytes = if which == READ { (packet.tag & 0xffff_ffff) as u32 } else { packet.size };
        let bytes = bytes.max(1);
        self.accesses[which].push_back(Access { packet, unsent: bytes, unanswered: bytes, collected: 0 });
        self.send_lines(context);
    }
}
