//! PCIe completer with memory: a root complex with host memory, or a card's BAR.

use super::pcie::{COMPLETION, MEMORY_READ, MEMORY_WRITE};
use crate::engine::{BytesPerSecond, Context, Endpoint, Packet, Pcie, Picos, Route};
use std::collections::VecDeque;

/// Timing of a completer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CompleterTiming {
    /// Arrival of a read to the start of its first completion.
    pub read_latency: Picos,
    /// Arrival of a write to its data in memory.
    pub write_latency: Picos,
    /// Reads in progress; others queue.
    pub max_reads: u32,
    /// Rate of the memory port.
    pub rate: BytesPerSecond,
    /// Smallest time of the memory port per request.
    pub request_gap: Picos,
    /// Largest payload of a completion.
    pub max_completion: u32,
    /// Completion payload of reads that fit into one completion: root complexes return these in cache lines (RCB).
    pub short_read_completion: u32,
}

/// A completer. The low half of a read's tag is its length; writes are posted.
#[derive(Debug)]
pub struct Completer {
    timing: CompleterTiming,
    /// Time at which the memory port is free.
    port_free_at: Picos,
    active_reads: u32,
    waiting: VecDeque<Packet>,
    reading: VecDeque<Packet>,
    writing: VecDeque<Packet>,
    /// Payload bytes written.
    pub written: u64,
    /// Time of the last write.
    pub last_write: Picos,
}

const READ_DONE: u64 = 0;
const WRITE_DONE: u64 = 1;

impl Completer {
    /// An idle completer.
    #[must_use]
    pub fn new(timing: CompleterTiming) -> Completer {
        Completer {
            timing,
            port_free_at: Picos::ZERO,
            active_reads: 0,
            waiting: VecDeque::new(),
            reading: VecDeque::new(),
            writing: VecDeque::new(),
            written: 0,
            last_write: Picos::ZERO,
        }
    }

    /// Occupies the memory port; returns the time from now until the transfer is done.
    fn occupy_port(&mut self, bytes: u64, now: Picos) -> Picos {
        let start = self.port_free_at.max(now);
        self.port_free_at = start + self.timing.request_gap.max(self.timing.rate.time(bytes));
        self.port_free_at - now
    }

    fn start(&mut self, packet: Packet, context: &mut Context<'_>) {
        self.active_reads += 1;
        let span = self.occupy_port(packet.tag & 0xffff_ffff, context.now());
        self.reading.push_back(packet);
        context.set_timer(span + self.timing.read_latency, READ_DONE);
    }
}

/// Tag of a read: length in the low half, requester in the upper half; completions carry the upper half.
#[must_use]
pub fn read_tag(requester: u32, length: u32) -> u64 {
    u64::from(requester) << 32 | u64::from(length)
}

impl Endpoint for Completer {
    fn receive(&mut self, _port: u16, packet: Packet, context: &mut Context<'_>) {
        match packet.kind {
            MEMORY_WRITE => {
                let span = self.occupy_port(u64::from(packet.size), context.now());
                self.writing.push_back(packet);
                context.set_timer(span + self.timing.write_latency, WRITE_DONE);
            }
            MEMORY_READ if self.active_reads < self.timing.max_reads => self.start(packet, context),
            MEMORY_READ => self.waiting.push_back(packet),
            _ => {}
        }
    }

    fn timer(&mut self, token: u64, context: &mut Context<'_>) {
        if token == WRITE_DONE {
            // Writes complete in order, all after the same latency.
            let Some(packet) = self.writing.pop_front() else { return };
            self.written += u64::from(packet.size);
            self.last_write = context.now();
            context.return_credits(&packet);
            if packet.reply != 0 {
                // A write with a reply route requests a notification when its data is in memory.
                context.send(
                    Route::<Pcie>::reply_to(&packet),
                    Packet::new(MEMORY_WRITE, packet.size, packet.tag),
                );
            }
            return;
        }
        let Some(packet) = self.reading.pop_front() else { return };
        let route: Route<Pcie> = Route::reply_to(&packet);
        let mut left = (packet.tag & 0xffff_ffff) as u32;
        let short = left <= self.timing.max_completion;
        let most = if short { self.timing.short_read_completion } else { self.timing.max_completion };
        while left > 0 {
            let size = left.min(most);
            left -= size;
            let tag = packet.tag >> 32 << 32 | u64::from(left);
            context.send(route, Packet::new(COMPLETION, size, tag));
        }
        self.active_reads -= 1;
        if let Some(packet) = self.waiting.pop_front() {
            self.start(packet, context);
        }
    }
}
