//! Flow-level network of the event builder: transfers as fluid flows over a non-blocking switch.
//!
//! An adapter serves work requests in posting order, so a node sends one transfer at a time. Concurrent flows
//! therefore form stars: one receiving link with its senders. All links are alike, so max-min fairness has a
//! closed form: each of k flows into a node gets `min(tx, rx / k)`. The cost of a transfer is the logarithm
//! of its star's size and does not depend on the number of nodes. A test compares this with
//! [`FlowSimulation`](crate::flow::FlowSimulation).
//!
//! A buffer of the switch precedes each receiving link. Flows keep the rate `tx` until it is full; a transfer arrives when
//! the backlog in front of it has drained.

use super::network::{ControlEndpoint, NetworkModel, TimerEvent, Transfer};
use super::units::Units;
use super::{Node, RunResult, Scenario};
use crate::engine::{BytesPerSecond, EventQueue, Picos};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

#[derive(Clone, Copy, Debug)]
enum Event {
    /// The first flow into a node has ended; stale if the node's version differs.
    End {
        into: u16,
        version: u32,
    },
    /// The buffer of a node is full; stale if the node's version differs.
    Full {
        into: u16,
        version: u32,
    },
    /// A node may start its next transfer.
    Begin(u16),
    Arrived(u64),
    Completed(u64),
    Control {
        to: ControlEndpoint,
        control_batch: u32,
    },
    Timer(u64),
}

/// A posted transfer.
#[derive(Clone, Copy, Debug)]
struct Posted {
    tag: u64,
    bytes: u32,
    /// Time at which its first packet can be on the link.
    ready: Picos,
}

#[derive(Debug, Default)]
struct Sender {
    posted: VecDeque<Posted>,
    is_busy: bool,
}

/// Flows into a node.
#[derive(Debug, Default)]
struct Receiver {
    /// Flows by the value of `sent` at which each ends, in units of 1/`SCALE` byte.
    flows: BinaryHeap<Reverse<(u64, u64)>>,
    /// Bytes that a flow active since the first start would have sent.
    sent: f64,
    at: Picos,
    version: u32,
    rate: f64,
    /// Bytes in the buffer before the receiving link.
    backlog: f64,
}

/// Fixed-point scale of flow ends.
const SCALE: f64 = 1024.0;

struct FlowNetwork {
    now: Picos,
    queue: EventQueue<Event>,
    senders: Vec<Sender>,
    receivers: Vec<Receiver>,
    tx_rate: BytesPerSecond,
    rx_rate: BytesPerSecond,
    /// Buffer before each receiving link, in bytes.
    buffer: f64,
    copy: BytesPerSecond,
    post_latency: Picos,
    delivery_latency: Picos,
    control_latency: Picos,
    /// End of a transfer to the polling of its completion.
    ack_latency: Picos,
    link: BytesPerSecond,
}

impl NetworkModel for FlowNetwork {
    fn now(&self) -> Picos {
        self.now
    }

    fn transfer(&mut self, transfer: Transfer, bytes: u32) {
        let tag = transfer.tag();
        if transfer.is_local() {
            // The processor copies local transfers; the adapter is not involved.
            let at = self.now + self.copy.time(u64::from(bytes));
            self.queue.push(at, Event::Arrived(tag));
            return self.queue.push(at, Event::Completed(tag));
        }
        let sender = &mut self.senders[usize::from(transfer.from)];
        sender.posted.push_back(Posted { tag, bytes, ready: self.now + self.post_latency });
        if !sender.is_busy {
            self.begin(transfer.from);
        }
    }

    fn control(
        &mut self,
        _from: ControlEndpoint,
        to: ControlEndpoint,
        after: Picos,
        bytes: u32,
        control_batch: u32,
    ) {
        let at = self.now + after + self.control_latency + self.link.time(u64::from(bytes));
        self.queue.push(at, Event::Control { to, control_batch });
    }

    fn set_timer(&mut self, after: Picos, event: TimerEvent) {
        self.queue.push(self.now + after, Event::Timer(event.token()));
    }
}

impl FlowNetwork {
    fn new(node: &Node, nodes: usize) -> FlowNetwork {
        FlowNetwork {
            now: Picos::ZERO,
            queue: EventQueue::new(),
            senders: (0..nodes).map(|_| Sender::default()).collect(),
            receivers: (0..nodes).map(|_| Receiver::default()).collect(),
            tx_rate: node.tx_payload_rate(),
            rx_rate: node.rx_payload_rate(),
            buffer: node.rx_buffer(),
            copy: node.copy,
            post_latency: node.post_latency(),
            delivery_latency: node.delivery_latency(),
            // The responder acknowledges at arrival, before data is in memory.
            ack_latency: node.latency + node.ack_latency(),
            control_latency: node.control_latency(),
            link: node.rate,
        }
    }

    /// Starts the node's next posted transfer.
    fn begin(&mut self, node: u16) {
        let sender = &mut self.senders[usize::from(node)];
        let Some(&Posted { tag, bytes, ready }) = sender.posted.front() else {
            sender.is_busy = false;
            return;
        };
        sender.is_busy = true;
        if ready > self.now {
            return self.queue.push(ready, Event::Begin(node));
        }
        sender.posted.pop_front();
        let into = Transfer::from_tag(tag).to;
        let receiver = &mut self.receivers[usize::from(into)];
        receiver.advance(self.now, self.rx_rate.0, self.buffer);
        if receiver.flows.is_empty() {
            receiver.sent = 0.0;
        }
        let end = ((receiver.sent + f64::from(bytes)) * SCALE) as u64;
        receiver.flows.push(Reverse((end, tag)));
        self.update_rates(into);
    }

    /// Sets the rate of the flows into a node, and schedules the end of the first.
    fn update_rates(&mut self, into: u16) {
        let receiver = &mut self.receivers[usize::from(into)];
        receiver.version = receiver.version.wrapping_add(1);
        let Some(&Reverse((end, _))) = receiver.flows.peek() else { return };
        let (tx_rate, rx_rate, k) = (self.tx_rate.0, self.rx_rate.0, receiver.flows.len() as f64);
        let overflow = k * tx_rate - rx_rate;
        let room = self.buffer - receiver.backlog;
        receiver.rate = if overflow > 0.0 && room <= 0.0 { rx_rate / k } else { tx_rate };
        let left = (end as f64 / SCALE - receiver.sent).max(0.0);
        // Round up, so that the flow has ended at that time.
        let span = Picos((left / receiver.rate * 1e12).ceil() as u64);
        let version = receiver.version;
        if overflow > 0.0 && room > 0.0 {
            let full = Picos((room / overflow * 1e12).ceil() as u64);
            if full < span {
                return self.queue.push(self.now + full, Event::Full { into, version });
            }
        }
        self.queue.push(self.now + span, Event::End { into, version });
    }

    fn full(&mut self, into: u16, version: u32) {
        let receiver = &mut self.receivers[usize::from(into)];
        if receiver.version == version {
            receiver.advance(self.now, self.rx_rate.0, self.buffer);
            // Removes the rounding error.
            receiver.backlog = self.buffer;
            self.update_rates(into);
        }
    }

    fn end(&mut self, into: u16, version: u32) {
        let receiver = &mut self.receivers[usize::from(into)];
        if receiver.version != version {
            return;
        }
        receiver.advance(self.now, self.rx_rate.0, self.buffer);
        let Some(Reverse((_, tag))) = receiver.flows.pop() else { return };
        let drained = self.now + self.rx_rate.time(receiver.backlog as u64);
        self.update_rates(into);
        self.queue.push(drained + self.delivery_latency, Event::Arrived(tag));
        // The acknowledgement queues in front of the sender's receiving link.
        let from = Transfer::from_tag(tag).from;
        let sender = &mut self.receivers[usize::from(from)];
        sender.advance(self.now, self.rx_rate.0, self.buffer);
        let wait = self.rx_rate.time(sender.backlog as u64);
        self.queue.push(drained + self.ack_latency + wait, Event::Completed(tag));
        self.begin(from);
    }
}

impl Receiver {
    fn advance(&mut self, now: Picos, rx_rate: f64, buffer: f64) {
        let span = (now - self.at).seconds();
        let inflow = self.rate * self.flows.len() as f64;
        self.sent += self.rate * span;
        self.backlog = (self.backlog + (inflow - rx_rate) * span).clamp(0.0, buffer);
        self.at = now;
    }
}

/// Runs the units over the flow-level network.
pub(super) fn run(scenario: &Scenario, mut units: Units) -> RunResult {
    let mut flows = FlowNetwork::new(&scenario.node, usize::from(scenario.nodes));
    units.start(&mut flows);
    let mut steps = 0;
    while !units.is_over() {
        let Some((at, event)) = flows.queue.pop() else { break };
        flows.now = at;
        steps += 1;
        match event {
            Event::End { into, version } => flows.end(into, version),
            Event::Full { into, version } => flows.full(into, version),
            Event::Begin(node) => flows.begin(node),
            Event::Arrived(tag) => units.arrived(Transfer::from_tag(tag), &mut flows),
            Event::Completed(tag) => units.completed(Transfer::from_tag(tag), &mut flows),
            Event::Control { to, control_batch } => units.control_received(to, control_batch, &mut flows),
            Event::Timer(token) => units.timer_expired(TimerEvent::from_token(token), &mut flows),
        }
    }
    units.outcome(flows.now, steps)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow::FlowSimulation;
    use crate::parameters::Parameters;
    use crate::sites::shipped;
    use proptest::prelude::*;

    /// Completion times by tag.
    fn completions(node: &Node, nodes: usize, transfers: &[(Transfer, u32)]) -> Vec<(u64, Picos)> {
        let mut flows = FlowNetwork::new(node, nodes);
        (flows.post_latency, flows.delivery_latency, flows.buffer) = (Picos::ZERO, Picos::ZERO, 0.0);
        transfers.iter().for_each(|&(transfer, bytes)| flows.transfer(transfer, bytes));
        let mut ends = Vec::new();
        while let Some((at, event)) = flows.queue.pop() {
            flows.now = at;
            match event {
                Event::End { into, version } => flows.end(into, version),
                Event::Begin(node) => flows.begin(node),
                Event::Arrived(tag) => ends.push((tag, at)),
                _ => {}
            }
        }
        ends.sort_unstable();
        ends
    }

    /// Completion times by progressive filling over all links.
    fn by_progressive_filling(node: &Node, nodes: usize, transfers: &[(Transfer, u32)]) -> Vec<(u64, Picos)> {
        let mut flow_simulation = FlowSimulation::new();
        let out: Vec<_> = (0..nodes).map(|_| flow_simulation.add_link(node.tx_payload_rate())).collect();
        let into: Vec<_> = (0..nodes).map(|_| flow_simulation.add_link(node.rx_payload_rate())).collect();
        let mut posted = vec![VecDeque::new(); nodes];
        for (i, &(transfer, bytes)) in transfers.iter().enumerate() {
            let links = [out[usize::from(transfer.from)], into[usize::from(transfer.to)]];
            let path = flow_simulation.add_path(&links, Picos::ZERO);
            posted[usize::from(transfer.from)].push_back((path, u64::from(bytes), i as u64));
        }
        let begin = |flow_simulation: &mut FlowSimulation, posted: &mut VecDeque<_>| {
            if let Some((path, bytes, tag)) = posted.pop_front() {
                flow_simulation.start_flow(path, bytes, tag);
            }
        };
        posted.iter_mut().for_each(|posted| begin(&mut flow_simulation, posted));
        let mut ends = Vec::new();
        while let Some((at, i)) = flow_simulation.next_completion() {
            let transfer = transfers[i as usize].0;
            ends.push((transfer.tag(), at));
            begin(&mut flow_simulation, &mut posted[usize::from(transfer.from)]);
        }
        ends.sort_unstable();
        ends
    }

    proptest! {
        #[test]
        fn stars_share_as_progressive_filling_does(
            transfers in prop::collection::vec((0u16..6, 0u16..6, 1_000u32..200_000), 1..60),
            narrow: bool,
        ) {
            let mut node = crate::benchmarks::event_builder::Scenario::from_site(
                &shipped("event-builder-500"), &Parameters::shipped(), Some(6),
            ).unwrap().node;
            if narrow {
                // A node that receives more slowly than it sends.
                node.pcie.lanes.0 = 8;
            }
            let transfers: Vec<_> = (transfers.into_iter().enumerate())
                .filter(|(_, (from, to, _))| from != to)
                .map(|(i, (from, to, bytes))| (Transfer::from_tag(
                    u64::from(from) << 48 | u64::from(to) << 32 | i as u64), bytes))
                .collect();
            let (ours, filled) = (completions(&node, 6, &transfers), by_progressive_filling(&node, 6, &transfers));
            prop_assert_eq!(ours.len(), filled.len());
            for ((tag, at), (other, expected)) in ours.iter().zip(&filled) {
                prop_assert_eq!(tag, other);
                let off = (at.seconds() - expected.seconds()).abs() / expected.seconds();
                prop_assert!(off < 1e-4, "{} against {}", at, expected);
            }
        }
    }
}
