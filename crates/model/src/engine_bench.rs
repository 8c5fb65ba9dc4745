//! Workloads of `millstream bench model`: event queues and the packet engine.

use crate::engine::{
    BytesPerSecond, Channel, Context, Endpoint, EventQueue, Internal, Packet, Picos, Random, Route,
    Simulation,
};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// An entry as large as the engine's events.
pub type Entry = [u64; 4];

/// A priority queue of future events.
pub trait FutureEventSet {
    /// Adds an entry.
    fn push(&mut self, at: u64, entry: Entry);
    /// Removes the earliest entry.
    fn pop(&mut self) -> Option<(u64, Entry)>;
}

impl FutureEventSet for EventQueue<Entry> {
    fn push(&mut self, at: u64, entry: Entry) {
        EventQueue::push(self, Picos(at), entry);
    }
    fn pop(&mut self) -> Option<(u64, Entry)> {
        EventQueue::pop(self).map(|(at, entry)| (at.0, entry))
    }
}

/// The standard library's binary heap; a sequence number keeps equal times in order.
#[derive(Debug, Default)]
pub struct BinaryHeapQueue {
    heap: BinaryHeap<Reverse<(u64, u64, Entry)>>,
    order: u64,
}

impl FutureEventSet for BinaryHeapQueue {
    fn push(&mut self, at: u64, entry: Entry) {
        self.order += 1;
        self.heap.push(Reverse((at, self.order, entry)));
    }
    fn pop(&mut self) -> Option<(u64, Entry)> {
        self.heap.pop().map(|Reverse((at, _, entry))| (at, entry))
    }
}

/// A four-ary heap: half as deep as a binary heap, and siblings share one or two cache lines.
#[derive(Debug, Default)]
pub struct FourAryHeapQueue {
    heap: Vec<(u64, u64, Entry)>,
    order: u64,
}

impl FutureEventSet for FourAryHeapQueue {
    fn push(&mut self, at: u64, entry: Entry) {
        self.order += 1;
        let new = (at, self.order, entry);
        let mut here = self.heap.len();
        self.heap.push(new);
        while here > 0 {
            let above = (here - 1) / 4;
            if (self.heap[above].0, self.heap[above].1) <= (at, self.order) {
                break;
            }
            self.heap[here] = self.heap[above];
            here = above;
        }
        self.heap[here] = new;
    }

    fn pop(&mut self) -> Option<(u64, Entry)> {
        let last = self.heap.pop()?;
        let Some(&first) = self.heap.first() else { return Some((last.0, last.2)) };
        let mut here = 0;
        loop {
            let children = here * 4 + 1..(here * 4 + 5).min(self.heap.len());
            let Some(earliest) = children.min_by_key(|&c| (self.heap[c].0, self.heap[c].1)) else { break };
            if (self.heap[earliest].0, self.heap[earliest].1) >= (last.0, last.1) {
                break;
            }
            self.heap[here] = self.heap[earliest];
            here = earliest;
        }
        self.heap[here] = last;
        Some((first.0, first.2))
    }
}

/// Hold model (Jones, CACM 29(4), 1986): keeps `pending` entries queued, and replaces the earliest by an entry 1 to
/// 200 ns later, `operations` times. Returns the last time, to compare queues.
pub fn hold(queue: &mut impl FutureEventSet, pending: usize, operations: u64) -> u64 {
    let mut random = Random::new(1);
    for i in 0..pending {
        queue.push(random.below(200_000), [i as u64; 4]);
    }
    let mut last = 0;
    for _ in 0..operations {
        let Some((at, entry)) = queue.pop() else { break };
        last = at;
        queue.push(at + 1_000 + random.below(200_000), entry);
    }
    last
}

/// Sends every received packet around its ring again.
struct Forwarder {
    route: Route<Internal>,
    left: u64,
}

impl Endpoint for Forwarder {
    fn receive(&mut self, _port: u16, packet: Packet, context: &mut Context<'_>) {
        self.left = self.left.saturating_sub(1);
        if self.left == 0 {
            context.stop();
        } else {
            context.send(self.route, packet);
        }
    }
}

/// Number of events of `packets` packets on rings of eight channels with credits, in total `rounds` rounds.
/// Every hop is two events: the departure from a channel and the arrival at the next.
#[must_use]
pub fn packet_rings(packets: u64, rounds: u64) -> u64 {
    let mut simulation = Simulation::new(1);
    let rings = packets.div_ceil(16).max(1);
    for ring in 0..rings {
        let lines: Vec<_> = (0..8)
            .map(|i| {
                let line =
                    Channel::new(format!("channel {ring} {i}"), BytesPerSecond::gigabytes(8.0 + i as f64));
                simulation.add_channel(line.overhead(24).latency(Picos(100_000)).capacity(1 << 16))
            })
            .collect();
        let relay = simulation.reserve_endpoint();
        let port = simulation.port(relay, 0);
        let route = simulation.route(&lines, port);
        simulation.install(relay, Forwarder { route, left: (rounds / rings).max(1) });
        let start = simulation.add_endpoint(Injector { route, packets: packets / rings });
        simulation.set_timer(start, Picos::ZERO, 0);
    }
    simulation.run(Picos(u64::MAX));
    simulation.events()
}

/// Sends the first packets.
struct Injector {
    route: Route<Internal>,
    packets: u64,
}

impl Endpoint for Injector {
    fn receive(&mut self, _port: u16, _packet: Packet, _context: &mut Context<'_>) {}

    fn timer(&mut self, _token: u64, context: &mut Context<'_>) {
        for tag in 0..self.packets {
            context.send(self.route, Packet::new(0, 256, tag));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_queues_agree() {
        let times = [
            hold(&mut EventQueue::new(), 1000, 20_000),
            hold(&mut BinaryHeapQueue::default(), 1000, 20_000),
            hold(&mut FourAryHeapQueue::default(), 1000, 20_000),
        ];
        assert!(times[0] > 0 && times.iter().all(|&time| time == times[0]), "{times:?}");
    }

    #[test]
    fn runs_are_deterministic() {
        assert_eq!(packet_rings(100, 5_000), packet_rings(100, 5_000));
    }
}
