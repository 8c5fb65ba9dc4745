//! The flow level: messages as fluids that share links max-min fairly.
//!
//! For hundreds of nodes, packets are too many. A flow has bytes left and a rate; whenever a flow starts or
//! ends, the rates of the flows that share a link with it, directly or through others, are computed anew
//! (progressive filling: Bertsekas and Gallager, Data Networks, 6.5.2). What headers and flow control leave
//! of a link is taken off its rate beforehand, so that both levels agree where both apply.
//!
//! Rates are grouped: flows with the same links have the same rate, always, so that an all-to-all of many
//! messages costs as much as its pairs.

use crate::engine::{BytesPerSecond, EventQueue, Picos};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A link of the flow level.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(u32);

/// A way: flows on it share everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlowPathId(u32);

/// A flow, by order of its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlowId(pub u64);

#[derive(Debug)]
struct Link {
    rate: f64,
    /// Ways with flows on them.
    paths: Vec<u32>,
    /// Rates computed in this round, and whether the round has it.
    round: u64,
    left: f64,
    unfixed_flows: u32,
}

#[derive(Debug)]
struct FlowPath {
    links: Vec<u32>,
    latency: Picos,
    /// Its place in each of its links' lists, while it has flows.
    positions: Vec<u32>,
    /// Flows on it, by the bytes that one flow of it has carried when each of them ends.
    flows: BinaryHeap<Reverse<(u64, u64, u64)>>,
    rate: f64,
    /// Bytes that a flow which had been here all the time would have carried, in 1/1024 bytes.
    sent: f64,
    at: Picos,
    /// Which entry of the queue of ends is this way's.
    version: u32,
    round: u64,
    fixed: bool,
}

/// What happens.
#[derive(Clone, Copy, Debug)]
enum Event {
    /// The first flow of a way has put its last byte out, unless the way's version is another by now.
    End { path: u32, version: u32 },
    /// A last byte has arrived.
    Arrival { tag: u64 },
}

/// The simulation at flow level. Deterministic; time is [`Picos`].
#[derive(Debug, Default)]
pub struct FlowSimulation {
    now: Picos,
    links: Vec<Link>,
    paths: Vec<FlowPath>,
    events: EventQueue<Event>,
    /// Ways on which a flow has started or ended since rates were shared out.
    dirty_paths: Vec<u32>,
    round: u64,
    started: u64,
    rate_updates: u64,
}

impl FlowSimulation {
    /// An empty one.
    #[must_use]
    pub fn new() -> FlowSimulation {
        FlowSimulation::default()
    }

    /// Adds a link.
    pub fn add_link(&mut self, rate: BytesPerSecond) -> LinkId {
        self.links.push(Link { rate: rate.0, paths: Vec::new(), round: 0, left: 0.0, unfixed_flows: 0 });
        LinkId(self.links.len() as u32 - 1)
    }

    /// Adds a way over links.
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

    /// The time.
    #[must_use]
    pub fn now(&self) -> Picos {
        self.now
    }

    /// How often rates were shared out.
    #[must_use]
    pub fn rate_updates(&self) -> u64 {
        self.rate_updates
    }

    /// Starts a flow now; `tag` comes back with its end.
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

    /// A flow's rate at this moment, if its way has any.
    #[must_use]
    pub fn rate(&mut self, path: FlowPathId) -> BytesPerSecond {
        self.update_rates();
        BytesPerSecond(self.paths[path.0 as usize].rate)
    }

    /// The next end of a flow: its time and tag. The time moves there.
    pub fn next_completion(&mut self) -> Option<(Picos, u64)> {
        loop {
            // Rates are shared out once for all that happens at one time.
            if !self.events.has_event_now() {
                self.update_rates();
            }
            let Some((at, event)) = self.events.pop() else {
                // What was popped last may have been out of date and late: time starts from now again.
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

    /// The flows of a way that have carried everything leave it; their last byte travels on.
    fn finish(&mut self, index: u32) {
        let now = self.now;
        let path = &mut self.paths[index as usize];
        path.advance(now);
        path.version += 1;
        // The first has ended, whatever rounding says, and those with it.
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

    /// Shares links out anew among all flows that a change can reach.
    fn update_rates(&mut self) {
        if self.dirty_paths.is_empty() {
            return;
        }
        self.rate_updates += 1;
        self.round += 1;
        let round = self.round;
        // Everything that shares a link with what changed, and what shares with that.
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
                // Nobody shares its links: the narrowest of them is its own.
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
        // Progressive filling, the fullest link first.
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

    /// Notes when the first flow of a way ends at its rate.
    fn schedule(&mut self, index: u32) {
        let path = &mut self.paths[index as usize];
        path.version += 1;
        if let Some(&Reverse((end, ..))) = path.flows.peek() {
            let left = (end as f64 / SCALE - path.sent).max(0.0);
            // Rounded up, so that it is over when the time has come.
            let span = Picos((left / path.rate * 1e12).ceil() as u64);
            self.events.push(self.now + span, Event::End { path: index, version: path.version });
        }
    }
}

/// Parts of a byte that are counted.
const SCALE: f64 = 1024.0;

impl Link {
    /// What each flow that has no rate yet would get, as bits that order as numbers do (it is positive).
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

/// All hosts send `messages` messages to all others over one non-blocking switch, all at once; returns the
/// time of the last.
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

/// The same with one message of each host under way: host i sends its messages to host i + 1, then those to
/// host i + 2, and so on.
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
    // A way to each peer of each host, in the order of its turns.
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
