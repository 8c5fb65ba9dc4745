//! Memory behind a completer: a root complex with its host's memory, or a card's window.

use super::pcie::{COMPLETION, MEMORY_READ, MEMORY_WRITE};
use crate::engine::{BytesPerSecond, Context, Endpoint, Packet, Pcie, Picos, Route};
use std::collections::VecDeque;

/// How a completer answers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CompleterTiming {
    /// From a read's arrival to its first completion's start.
    pub read_latency: Picos,
    /// From a write's arrival to its data being in place.
    pub write_latency: Picos,
    /// Reads that it works on at once; more wait.
    pub reads: u32,
    /// What its memory delivers and takes.
    pub rate: BytesPerSecond,
    /// Time of the memory port per request beside its bytes.
    pub gap: Picos,
    /// Largest payload of a completion.
    pub completion: u32,
    /// Payload of the completions of a read that one completion could answer: root complexes return such
    /// reads line by line as the lines come.
    pub short_completion: u32,
}

/// A completer. Reads carry their length in the low half of the tag; writes are posted.
#[derive(Debug)]
pub struct Completer {
    timing: CompleterTiming,
    /// When the memory's port is free.
    free: Picos,
    active: u32,
    waiting: VecDeque<Packet>,
    ready: VecDeque<Packet>,
    releasing: VecDeque<Packet>,
    /// Payload written.
    pub written: u64,
    /// When the last write was in place.
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
            free: Picos::ZERO,
            active: 0,
            waiting: VecDeque::new(),
            ready: VecDeque::new(),
            releasing: VecDeque::new(),
            written: 0,
            last_write: Picos::ZERO,
        }
    }

    /// Takes the memory's port for that many bytes; returns the time from now until it is done.
    fn port(&mut self, bytes: u64, now: Picos) -> Picos {
        let start = self.free.max(now);
        self.free = start + self.timing.gap + self.timing.rate.time(bytes);
        self.free - now
    }

    fn start(&mut self, packet: Packet, context: &mut Context<'_>) {
        self.active += 1;
        let span = self.port(packet.tag & 0xffff_ffff, context.now());
        self.ready.push_back(packet);
        context.set_timer(span + self.timing.read_latency, READ_DONE);
    }
}

/// The tag of a read of that length; the upper half is the requester's and comes back.
#[must_use]
pub fn read_tag(requester: u32, length: u32) -> u64 {
    u64::from(requester) << 32 | u64::from(length)
}

impl Endpoint for Completer {
    fn receive(&mut self, _port: u16, packet: Packet, context: &mut Context<'_>) {
        match packet.kind {
            MEMORY_WRITE => {
                let span = self.port(u64::from(packet.size), context.now());
                self.releasing.push_back(packet);
                context.set_timer(span + self.timing.write_latency, WRITE_DONE);
            }
            MEMORY_READ if self.active < self.timing.reads => self.start(packet, context),
            MEMORY_READ => self.waiting.push_back(packet),
            _ => {}
        }
    }

    fn timer(&mut self, token: u64, context: &mut Context<'_>) {
        if token == WRITE_DONE {
            // Writes are served in order, each after the same latency.
            let Some(packet) = self.releasing.pop_front() else { return };
            self.written += u64::from(packet.size);
            self.last_write = context.now();
            context.return_credits(&packet);
            if packet.reply != 0 {
                // Whoever wants to know when a write is in place sends a way back with it.
                context.send(
                    Route::<Pcie>::reply_to(&packet),
                    Packet::new(MEMORY_WRITE, packet.size, packet.tag),
                );
            }
            return;
        }
        let Some(packet) = self.ready.pop_front() else { return };
        let route: Route<Pcie> = Route::reply_to(&packet);
        let mut left = (packet.tag & 0xffff_ffff) as u32;
        let short = left <= self.timing.completion;
        let most = if short { self.timing.short_completion } else { self.timing.completion };
        while left > 0 {
            let size = left.min(most);
            left -= size;
            let tag = packet.tag >> 32 << 32 | u64::from(left);
            context.send(route, Packet::new(COMPLETION, size, tag));
        }
        self.active -= 1;
        if let Some(packet) = self.waiting.pop_front() {
            self.start(packet, context);
        }
    }
}
