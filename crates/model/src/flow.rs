//! Flow-level simulation: messages as fluid flows with max-min fair sharing of links.
//!
//! A flow has remaining bytes and a rate. The start or end of a flow changes the rates of all flows connected
//! to it by shared links; [`crate::max_min`] computes them.
//! The caller subtracts headers and flow control from link rates, so results agree with the packet level.
//!
//! Flows over the same links always have the same rate, so rates are computed per path: the cost of an all-to-all
//! depends on the number of node pairs, not of messages.

use crate::engine::{BytesPerSecond, EventQueue, Picos};
use crate::max_min::{FairShares, ResourceId, SharedPathId};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(ResourceId);

/// A list of links; all flows on it have the same rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlowPathId(SharedPathId);

/// A flow, numbered by start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlowId(pub u64);

#[derive(Debug)]
struct FlowPath {
    latency: Picos,
    /// Flows by the value of `sent` at which each ends.
    flows: BinaryHeap<Reverse<(u64, u64, u64)>>,
    /// Rate of each flow.
    rate: f64,
    /// Bytes that a flow active since the path's first start would have sent.
    sent: f64,
    at: Picos,
    /// Version of the valid completion event.
    version: u32,
}

/// A scheduled event.
#[derive(Clone, Copy, Debug)]
enum Event {
    /// The first flow of a path has sent its last byte; stale if the path's version differs.
    End { path: SharedPathId, version: u32 },
    /// A flow's last byte has arrived.
    Arrival { tag: u64 },
}

/// A deterministic flow-level simulation.
#[derive(Debug, Default)]
pub struct FlowSimulation {
    now: Picos,
    /// Rates: the weight of a path is the number of its flows.
    shares: FairShares,
    paths: Vec<FlowPath>,
    events: EventQueue<Event>,
    changed: Vec<SharedPathId>,
    started: u64,
    rate_updates: u64,
}

impl FlowSimulation {
    /// An empty simulation.
    #[must_use]
    pub fn new() -> FlowSimulation {
        FlowSimulation::default()
    }

    /// Adds a link.
    pub fn add_link(&mut self, rate: BytesPerSecond) -> LinkId {
        LinkId(self.shares.add_resource(rate.0))
    }

    /// Adds a path over links.
    pub fn add_path(&mut self, links: &[LinkId], latency: Picos) -> FlowPathId {
        self.paths.push(FlowPath {
            latency,
            flows: BinaryHeap::new(),
            rate: 0.0,
            sent: 0.0,
            at: self.now,
            version: 0,
        });
        FlowPathId(self.shares.add_path(&links.iter().map(|link| link.0).collect::<Vec<_>>()))
    }

    /// Simulated time.
    #[must_use]
    pub fn now(&self) -> Picos {
        self.now
    }

    /// Number of rate updates.
    #[must_use]
    pub fn rate_updates(&self) -> u64 {
        self.rate_updates
    }

    /// Starts a flow now; [`FlowSimulation::next_completion`] returns `tag` at its end.
    pub fn start_flow(&mut self, path: FlowPathId, bytes: u64, tag: u64) -> FlowId {
        let id = self.started;
        self.started += 1;
        let state = &mut self.paths[path.0.index()];
        state.advance(self.now);
        if state.flows.is_empty() {
            state.sent = 0.0;
        }
        state.flows.push(Reverse(((state.sent * SCALE) as u64 + bytes * SCALE as u64, id, tag)));
        self.shares.set_weight(path.0, state.flows.len() as f64);
        FlowId(id)
    }

    /// Current rate of each flow on the path.
    #[must_use]
    pub fn rate(&mut self, path: FlowPathId) -> BytesPerSecond {
        self.update_rates();
        BytesPerSecond(self.paths[path.0.index()].rate)
    }

    /// Advances to the next completion; returns its time and the flow's tag.
    pub fn next_completion(&mut self) -> Option<(Picos, u64)> {
        loop {
            // One rate update serves all events of one time.
            if !self.events.has_event_now() {
                self.update_rates();
            }
            let Some((at, event)) = self.events.pop() else {
                // The last popped event may be stale and in the future: restart the queue.
                self.events = EventQueue::new();
                return None;
            };
            match event {
                Event::End { path, version } if self.paths[path.index()].version == version => {
                    self.now = at;
                    self.finish(path);
                }
                Event::End { .. } => {}
                Event::Arrival { tag } => {
                    self.now = at;
                    return Some((at, tag));
                }
            }
        }
    }

    /// Removes the flows of a path that have sent everything, and schedules their arrivals.
    fn finish(&mut self, id: SharedPathId) {
        let now = self.now;
        let path = &mut self.paths[id.index()];
        path.advance(now);
        path.version += 1;
        // Rounding must not keep the first flow alive.
        let mut due = (path.sent * SCALE) as u64 + 1;
        if let Some(Reverse((first, ..))) = path.flows.peek() {
            due = due.max(*first);
        }
        while let Some(&Reverse((end, _, tag))) = path.flows.peek() {
            if end > due {
                break;
            }
            path.flows.pop();
            self.events.push(now + path.latency, Event::Arrival { tag });
        }
        self.shares.set_weight(id, path.flows.len() as f64);
    }

    /// Computes new rates for all flows that started or ended flows can affect.
    fn update_rates(&mut self) {
        if !self.shares.is_dirty() {
            return;
        }
        self.rate_updates += 1;
        let mut changed = std::mem::take(&mut self.changed);
        self.shares.update(&mut changed);
        for id in changed.drain(..) {
            let path = &mut self.paths[id.index()];
            path.advance(self.now);
            path.rate = self.shares.level(id).max(SLOWEST);
            self.schedule(id);
        }
        self.changed = changed;
    }

    /// Schedules the end of the first flow of a path.
    fn schedule(&mut self, id: SharedPathId) {
        let path = &mut self.paths[id.index()];
        path.version += 1;
        if let Some(&Reverse((end, ..))) = path.flows.peek() {
            let left = (end as f64 / SCALE - path.sent).max(0.0);
            // Round up, so that the flow has ended at that time.
            let span = Picos((left / path.rate * 1e12).ceil() as u64);
            self.events.push(self.now + span, Event::End { path: id, version: path.version });
        }
    }
}

/// Rate in B/s that rounding leaves a flow on a full link.
const SLOWEST: f64 = 1e-3;

/// Fixed-point scale of flow ends: 1/1024 byte.
const SCALE: f64 = 1024.0;

impl FlowPath {
    fn advance(&mut self, now: Picos) {
        if !self.flows.is_empty() {
            self.sent += self.rate * (now - self.at).seconds();
        }
        self.at = now;
    }
}

/// All-to-all of `messages` messages per pair over a non-blocking switch, all started at once.
/// Returns the time of the last completion.
#[must_use]
pub fn all_to_all(hosts: u32, messages: u32, bytes: u64, rate: BytesPerSecond, latency: Picos) -> Picos {
    let mut flows = FlowSimulation::new();
    let up: Vec<LinkId> = (0..hosts).map(|_| flows.add_link(rate)).collect();
    let down: Vec<LinkId> = (0..hosts).map(|_| flows.add_link(rate)).collect();
    for (from, &out) in up.iter().enumerate() {
        for (_, &into) in down.iter().enumerate().filter(|&(to, _)| to != from) {
            let path = flows.add_path(&[out, into], latency);
            (0..messages).for_each(|_| {
                flows.start_flow(path, bytes, 0);
            });
        }
    }
    let mut last = Picos::ZERO;
    while let Some((at, _)) = flows.next_completion() {
        last = at;
    }
    last
}

/// All-to-all in which each host has one message in flight: host i sends to host i + 1, then to host i + 2, and so on.
/// Returns the time of the last completion.
#[must_use]
pub fn all_to_all_sequential(
    hosts: u32,
    messages: u32,
    bytes: u64,
    rate: BytesPerSecond,
    latency: Picos,
) -> Picos {
    let mut flows = FlowSimulation::new();
    let up: Vec<LinkId> = (0..hosts).map(|_| flows.add_link(rate)).collect();
    let down: Vec<LinkId> = (0..hosts).map(|_| flows.add_link(rate)).collect();
    // Paths to the peers of each host, in sending order.
    let peers = hosts.saturating_sub(1);
    let paths: Vec<FlowPathId> = (0..hosts)
        .flat_map(|from| (1..hosts).map(move |k| (from, (from + k) % hosts)))
        .map(|(from, to)| flows.add_path(&[up[from as usize], down[to as usize]], latency))
        .collect();
    let mut sent = vec![0u32; hosts as usize];
    let start = |flows: &mut FlowSimulation, sent: &mut [u32], host: u32| {
        let turn = sent[host as usize];
        if turn < peers * messages {
            sent[host as usize] += 1;
            flows.start_flow(paths[(host * peers + turn / messages) as usize], bytes, u64::from(host));
        }
    };
    (0..hosts).for_each(|host| start(&mut flows, &mut sent, host));
    let mut last = Picos::ZERO;
    while let Some((at, host)) = flows.next_completion() {
        last = at;
        start(&mut flows, &mut sent, host as u32);
    }
    last
}
