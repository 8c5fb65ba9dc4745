//! Flow-level simulation: messages as fluid flows with max-min fair sharing of links.
//!
//! A flow has remaining bytes and a rate. The start or end of a flow changes the rates of all flows connected
//! to it by shared links. Progressive filling computes them (Bertsekas and Gallager, Data Networks, 6.5.2).
//! The caller subtracts headers and flow control from link rates, so results agree with the packet level.
//!
//! Flows over the same links always have the same rate, so rates are computed per path: the cost of an all-to-all
//! depends on the number of node pairs, not of messages.

use crate::engine::{BytesPerSecond, EventQueue, Picos};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(u32);

/// A list of links; all flows on it have the same rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlowPathId(u32);

/// A flow, numbered by start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlowId(pub u64);

#[derive(Debug)]
struct Link {
    rate: f64,
    /// Paths with active flows over this link.
    paths: Vec<u32>,
    /// Last rate update that reached this link; `left` and `unfixed_flows` belong to it.
    round: u64,
    left: f64,
    unfixed_flows: u32,
}

#[derive(Debug)]
struct FlowPath {
    links: Vec<u32>,
    latency: Picos,
    /// Index of this path in each of its links' lists, while the path has flows.
    positions: Vec<u32>,
    /// Flows by the value of `sent` at which each ends.
    flows: BinaryHeap<Reverse<(u64, u64, u64)>>,
    rate: f64,
    /// Bytes that a flow active since the path's first start would have sent.
    sent: f64,
    at: Picos,
    /// Version of the valid completion event.
    version: u32,
    round: u64,
    fixed: bool,
}

/// A scheduled event.
#[derive(Clone, Copy, Debug)]
enum Event {
    /// The first flow of a path has sent its last byte; stale if the path's version differs.
    End { path: u32, version: u32 },
    /// A flow's last byte has arrived.
    Arrival { tag: u64 },
}

/// A deterministic flow-level simulation.
#[derive(Debug, Default)]
pub struct FlowSimulation {
    now: Picos,
    links: Vec<Link>,
    paths: Vec<FlowPath>,
    events: EventQueue<Event>,
    /// Paths with a flow that started or ended since the last rate update.
    dirty_paths: Vec<u32>,
    round: u64,
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
        self.links.push(Link { rate: rate.0, paths: Vec::new(), round: 0, left: 0.0, unfixed_flows: 0 });
        LinkId(self.links.len() as u32 - 1)
    }

    /// Adds a path over links.
    pub fn add_path(&mut self, links: &[LinkId], latency: Picos) -> FlowPathId {
        self.paths.push(FlowPath {
            links: links.iter().map(|link| link.0).collect(),
            latency,
            positions: vec![0; links.len()],
            flows: BinaryHeap::new(),
            rate: 0.0,
            sent: 0.0,
            at: self.now,
            version: 0,
            round: 0,
            fixed: false,
        });
        FlowPathId(self.paths.len() as u32 - 1)
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
        let (now, index) = (self.now, path.0);
        let path = &mut self.paths[index as usize];
        path.advance(now);
        if path.flows.is_empty() {
            path.sent = 0.0;
            for (i, &link) in path.links.iter().enumerate() {
                let paths = &mut self.links[link as usize].paths;
                path.positions[i] = paths.len() as u32;
                paths.push(index);
            }
        }
        path.flows.push(Reverse(((path.sent * SCALE) as u64 + bytes * SCALE as u64, id, tag)));
        self.dirty_paths.push(index);
        FlowId(id)
    }

    /// Current rate of each flow on the path.
    #[must_use]
    pub fn rate(&mut self, path: FlowPathId) -> BytesPerSecond {
        self.update_rates();
        BytesPerSecond(self.paths[path.0 as usize].rate)
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
                Event::End { path, version } if self.paths[path as usize].version == version => {
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
    fn finish(&mut self, index: u32) {
        let now = self.now;
        let path = &mut self.paths[index as usize];
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
        if path.flows.is_empty() {
            for i in 0..self.paths[index as usize].links.len() {
                self.leave(index, i);
            }
        }
        self.dirty_paths.push(index);
    }

    fn leave(&mut self, index: u32, i: usize) {
        let link = self.paths[index as usize].links[i];
        let place = self.paths[index as usize].positions[i] as usize;
        let paths = &mut self.links[link as usize].paths;
        paths.swap_remove(place);
        if let Some(&moved) = paths.get(place) {
            let moved = &mut self.paths[moved as usize];
            if let Some(j) = moved.links.iter().position(|&l| l == link) {
                moved.positions[j] = place as u32;
            }
        }
    }

    /// Computes new rates for all flows that the changed paths can affect.
    fn update_rates(&mut self) {
        if self.dirty_paths.is_empty() {
            return;
        }
        self.rate_updates += 1;
        self.round += 1;
        let round = self.round;
        // Collect all links and paths connected to the changed paths.
        let mut links: Vec<u32> = Vec::new();
        let mut paths: Vec<u32> = Vec::new();
        let reach = |link: u32, links: &mut Vec<u32>, all: &mut Vec<Link>| {
            let state = &mut all[link as usize];
            if state.round != round {
                state.round = round;
                state.left = state.rate;
                state.unfixed_flows = 0;
                links.push(link);
            }
        };
        let mut dirty_paths = std::mem::take(&mut self.dirty_paths);
        for index in dirty_paths.drain(..) {
            let path = &mut self.paths[index as usize];
            if path.round == round {
                continue;
            }
            let alone = path.links.iter().all(|&link| self.links[link as usize].paths.len() == 1);
            if alone && !path.flows.is_empty() {
                // No other path uses these links: the slowest link sets the rate.
                path.round = round;
                path.advance(self.now);
                let rates = path.links.iter().map(|&link| self.links[link as usize].rate);
                path.rate = rates.fold(f64::INFINITY, f64::min) / path.flows.len() as f64;
                self.schedule(index);
                continue;
            }
            for &link in &path.links {
                if !self.links[link as usize].paths.is_empty() {
                    reach(link, &mut links, &mut self.links);
                }
            }
        }
        self.dirty_paths = dirty_paths;
        let mut next = 0;
        while next < links.len() {
            let link = links[next] as usize;
            next += 1;
            for k in 0..self.links[link].paths.len() {
                let index = self.links[link].paths[k];
                let path = &mut self.paths[index as usize];
                if path.round == round {
                    continue;
                }
                path.round = round;
                path.fixed = false;
                path.advance(self.now);
                paths.push(index);
                let count = path.flows.len() as u32;
                for i in 0..path.links.len() {
                    let other = self.paths[index as usize].links[i];
                    reach(other, &mut links, &mut self.links);
                    self.links[other as usize].unfixed_flows += count;
                }
            }
        }
        // Progressive filling: the link with the smallest fair share first.
        let mut order: BinaryHeap<Reverse<(u64, u32)>> = (links.iter())
            .filter(|&&link| self.links[link as usize].unfixed_flows > 0)
            .map(|&link| Reverse((self.links[link as usize].fair_share(), link)))
            .collect();
        while let Some(Reverse((share, link))) = order.pop() {
            let state = &self.links[link as usize];
            if state.unfixed_flows == 0 {
                continue;
            }
            let now = state.fair_share();
            if now > share {
                order.push(Reverse((now, link)));
                continue;
            }
            let rate = f64::from_bits(now);
            for k in 0..self.links[link as usize].paths.len() {
                let index = self.links[link as usize].paths[k];
                let path = &mut self.paths[index as usize];
                if std::mem::replace(&mut path.fixed, true) {
                    continue;
                }
                path.rate = rate;
                let count = path.flows.len() as u32;
                for i in 0..path.links.len() {
                    let other = self.paths[index as usize].links[i] as usize;
                    self.links[other].left = (self.links[other].left - rate * f64::from(count)).max(0.0);
                    self.links[other].unfixed_flows -= count;
                }
            }
        }
        for index in paths {
            self.schedule(index);
        }
    }

    /// Schedules the end of the first flow of a path.
    fn schedule(&mut self, index: u32) {
        let path = &mut self.paths[index as usize];
        path.version += 1;
        if let Some(&Reverse((end, ..))) = path.flows.peek() {
            let left = (end as f64 / SCALE - path.sent).max(0.0);
            // Round up, so that the flow has ended at that time.
            let span = Picos((left / path.rate * 1e12).ceil() as u64);
            self.events.push(self.now + span, Event::End { path: index, version: path.version });
        }
    }
}

/// Fixed-point scale of flow ends: 1/1024 byte.
const SCALE: f64 = 1024.0;

impl Link {
    /// Fair share of each flow without a rate; positive floats order like their bits.
    fn fair_share(&self) -> u64 {
        (self.left / f64::from(self.unfixed_flows)).max(1e-3).to_bits()
    }
}

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
