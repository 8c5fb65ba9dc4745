//! A pair of source and target node: order and exactly-once delivery across changes of its route.
//!
//! ```text
//!   push ─► [acknowledged │ sent in this generation │ not sent] ─► poll ─► header (generation, sequence)
//!                         └── restart: new generation, repeat from the first unacknowledged packet
//! ```
//! Sequences continue across generations. A target accepts only the next sequence of the newest generation. It
//! acknowledges a repeat but never executes it, because the memory may be in other use.

use std::collections::VecDeque;
use std::fmt;

/// Generation of a pair's route.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Generation(pub u16);

impl Generation {
    /// The next generation.
    #[must_use]
    pub fn next(self) -> Generation {
        Generation(self.0.wrapping_add(1))
    }

    /// Whether this generation is newer than another; the numbers wrap.
    #[must_use]
    pub fn is_newer_than(self, other: Generation) -> bool {
        self.0.wrapping_sub(other.0) as i16 > 0
    }
}

/// Place of a packet in its pair's order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Sequence(pub u32);

impl Sequence {
    /// The next place.
    #[must_use]
    pub fn next(self) -> Sequence {
        Sequence(self.0.wrapping_add(1))
    }

    /// Places from `earlier` to here; the numbers wrap.
    #[must_use]
    pub fn since(self, earlier: Sequence) -> u32 {
        self.0.wrapping_sub(earlier.0)
    }
}

impl fmt::Display for Sequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sequence {}", self.0)
    }
}

/// The source's side. It holds each packet until the target acknowledges it.
#[derive(Clone, Debug)]
pub struct PairSender<T> {
    generation: Generation,
    /// Sequence of the first unacknowledged packet.
    first: Sequence,
    unacknowledged: VecDeque<T>,
    /// Packets of `unacknowledged` that were sent in this generation.
    sent: usize,
    /// Packets of `unacknowledged` that were sent in any generation.
    ever_sent: usize,
    window: usize,
    foreign: u64,
    repeated: u64,
}

impl<T> PairSender<T> {
    /// A pair with at most `window` packets on their way.
    #[must_use]
    pub fn new(window: usize) -> PairSender<T> {
        PairSender {
            generation: Generation(0),
            first: Sequence(0),
            unacknowledged: VecDeque::new(),
            sent: 0,
            ever_sent: 0,
            window: window.max(1),
            foreign: 0,
            repeated: 0,
        }
    }

    /// Appends a packet.
    pub fn push(&mut self, packet: T) {
        self.unacknowledged.push_back(packet);
    }

    /// The next packet to send, with its generation and sequence.
    pub fn poll(&mut self) -> Option<(Generation, Sequence, &T)> {
        if self.sent >= self.window {
            return None;
        }
        let packet = self.unacknowledged.get(self.sent)?;
        // `sent` counts entries of a window, far below 2³².
        let sequence = Sequence(self.first.0.wrapping_add(self.sent as u32));
        self.sent += 1;
        self.ever_sent = self.ever_sent.max(self.sent);
        Some((self.generation, sequence, packet))
    }

    /// An acknowledgement: all packets before `next` arrived. Returns them in order. One that this sender cannot have
    /// caused is counted and ignored.
    pub fn handle_acknowledgement(
        &mut self,
        generation: Generation,
        next: Sequence,
    ) -> impl Iterator<Item = T> + '_ {
        let count = next.since(self.first) as usize;
        // A late acknowledgement is older than `first`: its distance wraps to a large number.
        let late = self.first.since(next) <= u32::MAX / 2;
        let mut taken = 0;
        if count <= self.ever_sent && !generation.is_newer_than(self.generation) {
            taken = count;
        } else if !late {
            self.foreign += 1;
        }
        self.first = Sequence(self.first.0.wrapping_add(taken as u32));
        self.sent = self.sent.saturating_sub(taken);
        self.ever_sent -= taken;
        self.unacknowledged.drain(..taken)
    }

    /// Begins a new generation on another route: unacknowledged packets are sent again.
    pub fn restart(&mut self) {
        self.repeated += self.sent as u64;
        self.generation = self.generation.next();
        self.sent = 0;
    }

    /// Packets that are not acknowledged, sent or not.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.unacknowledged.len()
    }

    /// Whether every packet is acknowledged.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.unacknowledged.is_empty()
    }

    /// Whether packets of this generation may be on their way.
    #[must_use]
    pub fn in_flight(&self) -> bool {
        self.sent > 0
    }

    /// The generation.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// Acknowledgements of packets that were never sent.
    #[must_use]
    pub fn foreign_acknowledgements(&self) -> u64 {
        self.foreign
    }

    /// Packets sent again after a change of route.
    #[must_use]
    pub fn repeated(&self) -> u64 {
        self.repeated
    }

    /// Gives all packets back, for example because the target is lost.
    pub fn abandon(&mut self) -> impl Iterator<Item = T> + '_ {
        let count = self.unacknowledged.len();
        self.first = Sequence(self.first.0.wrapping_add(count as u32));
        self.sent = 0;
        self.ever_sent = 0;
        self.unacknowledged.drain(..)
    }
}

/// What the target does with a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acceptance {
    /// Executes it.
    Execute,
    /// Acknowledges it again and never executes it: it arrived before.
    Repeat,
    /// Drops it: an earlier packet is missing.
    Gap,
    /// Drops it: the source has left that route.
    StaleGeneration,
}

/// The target's side.
#[derive(Clone, Copy, Debug, Default)]
pub struct PairReceiver {
    generation: Generation,
    expected: Sequence,
    unreported: u32,
}

impl PairReceiver {
    /// A pair from which nothing has arrived.
    #[must_use]
    pub fn new() -> PairReceiver {
        PairReceiver::default()
    }

    /// A packet arrived.
    pub fn handle_packet(&mut self, generation: Generation, sequence: Sequence) -> Acceptance {
        if self.generation.is_newer_than(generation) {
            return Acceptance::StaleGeneration;
        }
        self.generation = generation;
        self.unreported += 1;
        if sequence == self.expected {
            self.expected = self.expected.next();
            Acceptance::Execute
        } else if self.expected.since(sequence) <= u32::MAX / 2 {
            Acceptance::Repeat
        } else {
            Acceptance::Gap
        }
    }

    /// Packets since the last acknowledgement.
    #[must_use]
    pub fn unreported(&self) -> u32 {
        self.unreported
    }

    /// The cumulative acknowledgement, for the next header of the reverse pair or a packet of its own.
    pub fn acknowledge(&mut self) -> (Generation, Sequence) {
        self.unreported = 0;
        (self.generation, self.expected)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repeat_is_acknowledged_and_not_executed() {
        let mut sender = PairSender::new(8);
        let mut receiver = PairReceiver::new();
        for packet in 0..3 {
            sender.push(packet);
        }
        let mut sent = Vec::new();
        while let Some((generation, sequence, &packet)) = sender.poll() {
            sent.push((generation, sequence, packet));
        }
        // The first arrives, the acknowledgement is lost, the route dies.
        assert_eq!(receiver.handle_packet(sent[0].0, sent[0].1), Acceptance::Execute);
        sender.restart();
        assert_eq!(sender.repeated(), 3);
        let (generation, sequence, &packet) = sender.poll().unwrap();
        assert_eq!((generation, packet), (Generation(1), 0));
        assert_eq!(receiver.handle_packet(generation, sequence), Acceptance::Repeat);
        // A late packet of the old route is dropped, although its sequence is the expected one.
        assert_eq!(receiver.handle_packet(sent[1].0, sent[1].1), Acceptance::StaleGeneration);
        let (generation, next) = receiver.acknowledge();
        assert_eq!(sender.handle_acknowledgement(generation, next).collect::<Vec<_>>(), [0]);
        assert!(!sender.is_idle());
    }

    #[test]
    fn sequences_and_generations_wrap() {
        let mut sender = PairSender::new(4);
        let mut receiver = PairReceiver::new();
        sender.first = Sequence(u32::MAX - 1);
        receiver.expected = sender.first;
        sender.generation = Generation(u16::MAX);
        receiver.generation = sender.generation;
        for i in 0..6 {
            sender.push(i);
            sender.restart();
            let (generation, sequence, _) = sender.poll().unwrap();
            assert_eq!(receiver.handle_packet(generation, sequence), Acceptance::Execute);
            let (generation, next) = receiver.acknowledge();
            assert_eq!(sender.handle_acknowledgement(generation, next).collect::<Vec<_>>(), [i]);
        }
    }

    #[test]
    fn a_foreign_acknowledgement_changes_nothing() {
        let mut sender = PairSender::new(4);
        sender.push('a');
        let _ = sender.poll();
        for (generation, next) in [(0, 2), (0, 1_000_000), (1, 1)] {
            assert_eq!(sender.handle_acknowledgement(Generation(generation), Sequence(next)).count(), 0);
        }
        assert_eq!(sender.foreign_acknowledgements(), 3);
        // A late acknowledgement is normal and not foreign.
        assert_eq!(sender.handle_acknowledgement(Generation(0), Sequence(0)).count(), 0);
        assert_eq!(sender.foreign_acknowledgements(), 3);
        assert_eq!(sender.handle_acknowledgement(Generation(0), Sequence(1)).count(), 1);
    }

    #[test]
    fn the_window_bounds_packets_on_their_way() {
        let mut sender = PairSender::new(2);
        (0..5).for_each(|i| sender.push(i));
        assert_eq!(std::iter::from_fn(|| sender.poll().map(|(_, s, _)| s.0)).collect::<Vec<_>>(), [0, 1]);
        assert_eq!(sender.handle_acknowledgement(Generation(0), Sequence(1)).count(), 1);
        assert_eq!(std::iter::from_fn(|| sender.poll().map(|(_, s, _)| s.0)).collect::<Vec<_>>(), [2]);
    }
}
