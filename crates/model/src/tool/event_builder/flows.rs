//! Transfers as fluids over a non-blocking network.
//!
//! An adapter serves its work requests in the order of their posting, so a node sends one transfer at a time, and the
//! flows of one moment are stars: a node's link in, and those that send to it. Links being alike, max-min fairness
//! (`flow.rs`) then has a closed form: the k flows into a node get `min(sends, takes / k)` each. So all flows into a node
//! have one rate, and a count of bytes for each node is enough to know when the first of them ends. A transfer costs
//! the logarithm of its star, whatever the number of nodes. A test holds this against [`Fluid`](crate::flow::Fluid).
//!
//! Before a node's link in there is a buffer, of half a transfer or more: two that meet by chance do not hold each other
//! up until it is full. So flows have the rate `sends` as long as there is room, and what ends arrives when the backlog
//! before it has drained.

use super::units::{Carrier, Place, Transfer, Units, Wake};
use super::{Node, Outcome, Setup};
use crate::engine::{Picos, Queue, Rate};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

#[derive(Clone, Copy, Debug)]
enum Event {
    /// The first of the flows into that node has ended, if the node's version is still this one.
    End {
        into: u16,
        version: u32,
    },
    /// Its buffer is full, in the same way.
    Full {
        into: u16,
        version: u32,
    },
    /// A node may begin its next transfer.
    Begin(u16),
    Arrived(u64),
    Completed(u64),
    Control {
        to: Place,
        pack: u32,
    },
    Wake(u64),
}

/// A transfer that an adapter has been given.
#[derive(Clone, Copy, Debug)]
struct Posted {
    tag: u64,
    bytes: u32,
    /// When its first packet can be on the link.
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
    /// By what a flow that had been here all the time would have carried at their end, in parts of a byte.
    flows: BinaryHeap<Reverse<(u64, u64)>>,
    /// What such a flow has carried, in bytes.
    carried: f64,
    at: Picos,
    version: u32,
    rate: f64,
    /// Bytes in the buffer before its link in.
    backlog: f64,
}

/// Parts of a byte that are counted.
const SCALE: f64 = 1024.0;

struct Flows {
    now: Picos,
    queue: Queue<Event>,
    senders: Vec<Sender>,
    receivers: Vec<Receiver>,
    sends: Rate,
    takes: Rate,
    /// Room before each node's link in, in bytes.
    buffer: f64,
    copy: Rate,
    before: Picos,
    after: Picos,
    control: Picos,
    /// From a transfer's end to its completion's being polled.
    polled: Picos,
    link: Rate,
}

impl Carrier for Flows {
    fn now(&self) -> Picos {
        self.now
    }

    fn transfer(&mut self, transfer: Transfer, bytes: u32) {
        let tag = transfer.tag();
        if transfer.is_local() {
            // Its processor copies it; the adapter has nothing to do with it.
            let at = self.now + self.copy.time(u64::from(bytes));
            self.queue.push(at, Event::Arrived(tag));
            return self.queue.push(at, Event::Completed(tag));
        }
        let sender = &mut self.senders[usize::from(transfer.from)];
        sender.posted.push_back(Posted { tag, bytes, ready: self.now + self.before });
        if !sender.is_busy {
            self.begin(transfer.from);
        }
    }

    fn control(&mut self, _from: Place, to: Place, after: Picos, bytes: u32, pack: u32) {
        let at = self.now + after + self.control + self.link.time(u64::from(bytes));
        self.queue.push(at, Event::Control { to, pack });
    }

    fn wake(&mut self, after: Picos, what: Wake) {
        self.queue.push(self.now + after, Event::Wake(what.token()));
    }
}

impl Flows {
    fn new(node: &Node, nodes: usize) -> Flows {
        Flows {
            now: Picos::ZERO,
            queue: Queue::new(),
            senders: (0..nodes).map(|_| Sender::default()).collect(),
            receivers: (0..nodes).map(|_| Receiver::default()).collect(),
            sends: node.sends(),
            takes: node.takes(),
            buffer: node.buffer(),
            copy: node.copy,
            before: node.before(),
            after: node.after(),
            // The other adapter acknowledges what has arrived, not what is in place.
            polled: node.latency + node.acknowledged(),
            control: node.control(),
            link: node.rate,
        }
    }

    /// Puts the node's next transfer on its link, if it has one.
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
        let into = Transfer::of_tag(tag).to;
        let receiver = &mut self.receivers[usize::from(into)];
        receiver.advance(self.now, self.takes.0, self.buffer);
        if receiver.flows.is_empty() {
            receiver.carried = 0.0;
        }
        let end = ((receiver.carried + f64::from(bytes)) * SCALE) as u64;
        receiver.flows.push(Reverse((end, tag)));
        self.share(into);
    }

    /// The flows into a node get their rate, and the first end its time.
    fn share(&mut self, into: u16) {
        let receiver = &mut self.receivers[usize::from(into)];
        receiver.version = receiver.version.wrapping_add(1);
        let Some(&Reverse((end, _))) = receiver.flows.peek() else { return };
        let (sends, takes, k) = (self.sends.0, self.takes.0, receiver.flows.len() as f64);
        let overflow = k * sends - takes;
        let room = self.buffer - receiver.backlog;
        receiver.rate = if overflow > 0.0 && room <= 0.0 { takes / k } else { sends };
        let left = (end as f64 / SCALE - receiver.carried).max(0.0);
        // Rounded up, so that it is over when the time has come.
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
            receiver.advance(self.now, self.takes.0, self.buffer);
            // Whatever rounding says.
            receiver.backlog = self.buffer;
            self.share(into);
        }
    }

    fn end(&mut self, into: u16, version: u32) {
        let receiver = &mut self.receivers[usize::from(into)];
        if receiver.version != version {
            return;
        }
        receiver.advance(self.now, self.takes.0, self.buffer);
        let Some(Reverse((_, tag))) = receiver.flows.pop() else { return };
        let drained = self.now + self.takes.time(receiver.backlog as u64);
        self.share(into);
        self.queue.push(drained + self.after, Event::Arrived(tag));
        // The acknowledgement waits with what is before the link into the sender.
        let from = Transfer::of_tag(tag).from;
        let sender = &mut self.receivers[usize::from(from)];
        sender.advance(self.now, self.takes.0, self.buffer);
        let wait = self.takes.time(sender.backlog as u64);
        self.queue.push(drained + self.polled + wait, Event::Completed(tag));
        self.begin(from);
    }
}

impl Receiver {
    fn advance(&mut self, now: Picos, takes: f64, buffer: f64) {
        let span = (now - self.at).seconds();
        let inflow = self.rate * self.flows.len() as f64;
        self.carried += self.rate * span;
        self.backlog = (self.backlog + (inflow - takes) * span).clamp(0.0, buffer);
        self.at = now;
    }
}

/// Runs the units over such a network.
pub(super) fn run(setup: &Setup, mut units: Units) -> Outcome {
    let mut flows = Flows::new(&setup.node, usize::from(setup.nodes));
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
            Event::Arrived(tag) => units.arrived(Transfer::of_tag(tag), &mut flows),
            Event::Completed(tag) => units.completed(Transfer::of_tag(tag), &mut flows),
            Event::Control { to, pack } => units.heard(to, pack, &mut flows),
            Event::Wake(token) => units.woken(Wake::of_token(token), &mut flows),
        }
    }
    units.outcome(flows.now, steps)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow::Fluid;
    use crate::parameters::Parameters;
    use crate::sites::shipped;
    use proptest::prelude::*;

    /// Ends of transfers by tag, each node's one after the other.
    fn here(node: &Node, nodes: usize, transfers: &[(Transfer, u32)]) -> Vec<(u64, Picos)> {
        let mut flows = Flows::new(node, nodes);
        (flows.before, flows.after, flows.buffer) = (Picos::ZERO, Picos::ZERO, 0.0);
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

    /// The same by progressive filling over all links.
    fn by_filling(node: &Node, nodes: usize, transfers: &[(Transfer, u32)]) -> Vec<(u64, Picos)> {
        let mut fluid = Fluid::new();
        let out: Vec<_> = (0..nodes).map(|_| fluid.link(node.sends())).collect();
        let into: Vec<_> = (0..nodes).map(|_| fluid.link(node.takes())).collect();
        let mut posted = vec![VecDeque::new(); nodes];
        for (i, &(transfer, bytes)) in transfers.iter().enumerate() {
            let way = [out[usize::from(transfer.from)], into[usize::from(transfer.to)]];
            let way = fluid.way(&way, Picos::ZERO);
            posted[usize::from(transfer.from)].push_back((way, u64::from(bytes), i as u64));
        }
        let begin = |fluid: &mut Fluid, posted: &mut VecDeque<_>| {
            if let Some((way, bytes, tag)) = posted.pop_front() {
                fluid.start(way, bytes, tag);
            }
        };
        posted.iter_mut().for_each(|posted| begin(&mut fluid, posted));
        let mut ends = Vec::new();
        while let Some((at, i)) = fluid.next_end() {
            let transfer = transfers[i as usize].0;
            ends.push((transfer.tag(), at));
            begin(&mut fluid, &mut posted[usize::from(transfer.from)]);
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
            let mut node = crate::tool::event_builder::Setup::of(
                &shipped("event-builder-500"), &Parameters::shipped(), Some(6),
            ).unwrap().node;
            if narrow {
                // A node that takes less than it sends.
                node.pcie.lanes.0 = 8;
            }
            let transfers: Vec<_> = (transfers.into_iter().enumerate())
                .filter(|(_, (from, to, _))| from != to)
                .map(|(i, (from, to, bytes))| (Transfer::of_tag(
                    u64::from(from) << 48 | u64::from(to) << 32 | i as u64), bytes))
                .collect();
            let (ours, filled) = (here(&node, 6, &transfers), by_filling(&node, 6, &transfers));
            prop_assert_eq!(ours.len(), filled.len());
            for ((tag, at), (other, expected)) in ours.iter().zip(&filled) {
                prop_assert_eq!(tag, other);
                let off = (at.seconds() - expected.seconds()).abs() / expected.seconds();
                prop_assert!(off < 1e-4, "{} against {}", at, expected);
            }
        }
    }
}
