//! One line: packets in order, one at a time.

use super::time::{Picos, Rate};
use super::{Packet, Random};
use std::collections::VecDeque;

/// How a line is made.
#[derive(Clone, Debug)]
pub struct Line {
    /// What reports call it.
    pub name: String,
    /// Rate of payload and overhead.
    pub rate: Rate,
    /// Bytes that a packet brings beside its payload, by the low two bits of its kind.
    pub overhead: [u32; 4],
    /// Time that every packet takes beside its bytes.
    pub gap: Picos,
    /// Mean of an exponentially distributed time on top of `gap`.
    pub jitter: Picos,
    /// From the last bit put out to the last bit arrived.
    pub latency: Picos,
    /// Payload that may wait before the line.
    pub capacity: u64,
    /// Whether the head of a packet goes on while its tail is coming.
    pub cut_through: bool,
}

impl Line {
    /// A line of that rate, without overhead, latency or limit.
    #[must_use]
    pub fn new(name: impl Into<String>, rate: Rate) -> Line {
        Line {
            name: name.into(),
            rate,
            overhead: [0; 4],
            gap: Picos::ZERO,
            jitter: Picos::ZERO,
            latency: Picos::ZERO,
            capacity: u64::MAX,
            cut_through: false,
        }
    }

    /// A step that takes time per packet, whatever its size.
    #[must_use]
    pub fn step(name: impl Into<String>, gap: Picos) -> Line {
        Line { gap, ..Line::new(name, Rate(f64::INFINITY)) }
    }

    /// A step whose time depends on the packet's kind (its low two bits), not on its size: packets have no payload.
    #[must_use]
    pub fn steps(name: impl Into<String>, times: [Picos; 4]) -> Line {
        // At 10¹² B/s a byte of overhead is a picosecond.
        let overhead = times.map(|time| u32::try_from(time.0).unwrap_or(u32::MAX));
        Line { overhead, ..Line::new(name, Rate(1e12)) }
    }

    /// With bytes per packet.
    #[must_use]
    pub fn overhead(self, bytes: u32) -> Line {
        Line { overhead: [bytes; 4], ..self }
    }

    /// With a latency behind it.
    #[must_use]
    pub fn latency(self, latency: Picos) -> Line {
        Line { latency, ..self }
    }

    /// With limited room before it.
    #[must_use]
    pub fn capacity(self, bytes: u64) -> Line {
        Line { capacity: bytes, ..self }
    }

    /// With a time per packet.
    #[must_use]
    pub fn gap(self, gap: Picos) -> Line {
        Line { gap, ..self }
    }

    /// With a random time per packet.
    #[must_use]
    pub fn jitter(self, mean: Picos) -> Line {
        Line { jitter: mean, ..self }
    }

    /// How long a payload of that kind takes on it, without its random part.
    #[must_use]
    pub fn time(&self, kind: u16, payload: u64) -> Picos {
        self.gap + self.rate.time(payload + u64::from(self.overhead[usize::from(kind & 3)]))
    }
}

/// What a line has done.
#[derive(Clone, Debug, PartialEq)]
pub struct LineReport {
    /// Its name.
    pub name: String,
    /// Packets put out.
    pub packets: u64,
    /// Payload put out.
    pub payload: u64,
    /// Time in which it was putting something out.
    pub busy: Picos,
    /// Time in which its first packet waited for room behind it.
    pub blocked: Picos,
    /// From the simulation's start until the report.
    pub span: Picos,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Activity {
    Idle,
    Busy(Picos),
    Waiting(Picos),
}

#[derive(Debug)]
pub(super) struct LineState {
    pub(super) line: Line,
    pub(super) buffer: u32,
    pub(super) queue: VecDeque<Packet>,
    activity: Activity,
    packets: u64,
    payload: u64,
    busy: Picos,
    blocked: Picos,
    /// The last size's time, as most packets are of one size.
    cached: (u32, u16, Picos),
}

impl LineState {
    pub(super) fn new(line: Line, buffer: u32) -> LineState {
        let cached = (0, 0, line.time(0, 0));
        LineState {
            line,
            buffer,
            queue: VecDeque::new(),
            activity: Activity::Idle,
            packets: 0,
            payload: 0,
            busy: Picos::ZERO,
            blocked: Picos::ZERO,
            cached,
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.activity == Activity::Idle
    }

    pub(super) fn is_waiting(&self) -> bool {
        matches!(self.activity, Activity::Waiting(_))
    }

    pub(super) fn backlog(&self) -> usize {
        self.queue.len()
    }

    pub(super) fn wait(&mut self, now: Picos) {
        self.activity = Activity::Waiting(now);
    }

    pub(super) fn resume(&mut self, now: Picos) {
        if let Activity::Waiting(since) = self.activity {
            self.blocked += now - since;
            self.activity = Activity::Idle;
        }
    }

    /// The packet's time on the line. It stays at the queue's front until it is out.
    #[inline]
    pub(super) fn begin(&mut self, now: Picos, packet: Packet, random: &mut Random) -> Picos {
        self.activity = Activity::Busy(now);
        if (self.cached.0, self.cached.1) != (packet.size, packet.kind) {
            let span = self.line.time(packet.kind, u64::from(packet.size));
            self.cached = (packet.size, packet.kind, span);
        }
        let span = self.cached.2;
        if self.line.jitter == Picos::ZERO {
            span
        } else {
            span + Picos((self.line.jitter.0 as f64 * random.exponential()) as u64)
        }
    }

    #[inline]
    pub(super) fn finish(&mut self, now: Picos) -> Packet {
        if let Activity::Busy(since) = self.activity {
            self.busy += now - since;
        }
        self.activity = Activity::Idle;
        let packet = self.queue.pop_front().expect("a busy line has its packet in front");
        self.packets += 1;
        self.payload += u64::from(packet.size);
        packet
    }

    pub(super) fn report(&self, now: Picos) -> LineReport {
        let since = |at: Picos| now - at;
        let (busy, blocked) = match self.activity {
            Activity::Idle => (self.busy, self.blocked),
            Activity::Busy(at) => (self.busy + since(at), self.blocked),
            Activity::Waiting(at) => (self.busy, self.blocked + since(at)),
        };
        LineReport {
            name: self.line.name.clone(),
            packets: self.packets,
            payload: self.payload,
            busy,
            blocked,
            span: now,
        }
    }
}
