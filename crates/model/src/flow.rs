//! The flow level: messages as fluids that share links max-min fairly.
//!
//! For hundreds of nodes, packets are too many. A flow has bytes left and a rate; whenever a flow starts or
//! ends, the rates of the flows that share a link with it, directly or through others, are computed anew
//! (progressive filling: Bertsekas and Gallager, Data Networks, 6.5.2). What headers and flow control leave
//! of a link is taken off its rate beforehand, so that both levels agree where both apply.
//!
//! Rates are grouped: flows with the same links have the same rate, always, so that an all-to-all of many
//! messages costs as much as its pairs.

use crate::engine::{Picos, Queue, Rate};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A link of the flow level.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(u32);

/// A way: flows on it share everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WayId(u32);

/// A flow, by order of its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlowId(pub u64);

#[derive(Debug)]
struct Link {
    rate: f64,
    /// Ways with flows on them.
    ways: Vec<u32>,
    /// Rates computed in this round, and whether the round has it.
    round: u64,
    left: f64,
    open: u32,
}

#[derive(Debug)]
struct Way {
    links: Vec<u32>,
    latency: Picos,
    /// Its place in each of its links' lists, while it has flows.
    places: Vec<u32>,
    /// Flows on it, by the bytes that one flow of it has carried when each of them ends.
    flows: BinaryHeap<Reverse<(u64, u64, u64)>>,
    rate: f64,
    /// Bytes that a flow which had been here all the time would have carried, in 1/1024 bytes.
    carried: f64,
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
    End { way: u32, version: u32 },
    /// A last byte has arrived.
    Arrival { tag: u64 },
}

/// The simulation at flow level. Deterministic; time is [`Picos`].
#[derive(Debug, Default)]
pub struct Fluid {
    now: Picos,
    links: Vec<Link>,
    ways: Vec<Way>,
    events: Queue<Event>,
    /// Ways on which a flow has started or ended since rates were shared out.
    changed: Vec<u32>,
    round: u64,
    started: u64,
    shares: u64,
}

impl Fluid {
    /// An empty one.
    #[must_use]
    pub fn new() -> Fluid {
        Fluid::default()
    }

    /// Adds a link.
    pub fn link(&mut self, rate: Rate) -> LinkId {
        self.links.push(Link { rate: rate.0, ways: Vec::new(), round: 0, left: 0.0, open: 0 });
        LinkId(self.links.len() as u32 - 1)
    }

    /// Adds a way over links.
    pub fn way(&mut self, links: &[LinkId], latency: Picos) -> WayId {
        self.ways.push(Way {
            links: links.iter().map(|link| link.0).collect(),
            latency,
            places: vec![0; links.len()],
            flows: BinaryHeap::new(),
            rate: 0.0,
            carried: 0.0,
            at: self.now,
            version: 0,
            round: 0,
            fixed: false,
        });
        WayId(self.ways.len() as u32 - 1)
    }

    /// The time.
    #[must_use]
    pub fn now(&self) -> Picos {
        self.now
    }

    /// How often rates were shared out.
    #[must_use]
    pub fn shares(&self) -> u64 {
        self.shares
    }

    /// Starts a flow now; `tag` comes back with its end.
    pub fn start(&mut self, way: WayId, bytes: u64, tag: u64) -> FlowId {
        let id = self.started;
        self.started += 1;
        let (now, index) = (self.now, way.0);
        let way = &mut self.ways[index as usize];
        way.advance(now);
        if way.flows.is_empty() {
            way.carried = 0.0;
            for (i, &link) in way.links.iter().enumerate() {
                let ways = &mut self.links[link as usize].ways;
                way.places[i] = ways.len() as u32;
                ways.push(index);
            }
        }
        way.flows.push(Reverse(((way.carried * SCALE) as u64 + bytes * SCALE as u64, id, tag)));
        self.changed.push(index);
        FlowId(id)
    }

    /// A flow's rate at this moment, if its way has any.
    #[must_use]
    pub fn rate(&mut self, way: WayId) -> Rate {
        self.settle();
        Rate(self.ways[way.0 as usize].rate)
    }

    /// The next end of a flow: its time and tag. The time moves there.
    pub fn next_end(&mut self) -> Option<(Picos, u64)> {
        loop {
            // Rates are shared out once for all that happens at one time.
            if !self.events.has_more_now() {
                self.settle();
            }
            let Some((at, event)) = self.events.pop() else {
                // What was popped last may have been out of date and late: time starts from now again.
                self.events = Queue::new();
                return None;
            };
            match event {
                Event::End { way, version } if self.ways[way as usize].version == version => {
                    self.now = at;
                    self.finish(way);
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
        let way = &mut self.ways[index as usize];
        way.advance(now);
        way.version += 1;
        // The first has ended, whatever rounding says, and those with it.
        let mut due = (way.carried * SCALE) as u64 + 1;
        if let Some(Reverse((first, ..))) = way.flows.peek() {
            due = due.max(*first);
        }
        while let Some(&Reverse((end, _, tag))) = way.flows.peek() {
            if end > due {
                break;
            }
            way.flows.pop();
            self.events.push(now + way.latency, Event::Arrival { tag });
        }
        if way.flows.is_empty() {
            for i in 0..self.ways[index as usize].links.len() {
                self.leave(index, i);
            }
        }
        self.changed.push(index);
    }

    fn leave(&mut self, index: u32, i: usize) {
        let link = self.ways[index as usize].links[i];
        let place = self.ways[index as usize].places[i] as usize;
        let ways = &mut self.links[link as usize].ways;
        ways.swap_remove(place);
        if let Some(&moved) = ways.get(place) {
            let moved = &mut self.ways[moved as usize];
            if let Some(j) = moved.links.iter().position(|&l| l == link) {
                moved.places[j] = place as u32;
            }
        }
    }

    /// Shares links out anew among all flows that a change can reach.
    fn settle(&mut self) {
        if self.changed.is_empty() {
            return;
        }
        self.shares += 1;
        self.round += 1;
        let round = self.round;
        // Everything that shares a link with what changed, and what shares with that.
        let mut links: Vec<u32> = Vec::new();
        let mut ways: Vec<u32> = Vec::new();
        let reach = |link: u32, links: &mut Vec<u32>, all: &mut Vec<Link>| {
            let state = &mut all[link as usize];
            if state.round != round {
                state.round = round;
                state.left = state.rate;
                state.open = 0;
                links.push(link);
            }
        };
        let mut changed = std::mem::take(&mut self.changed);
        for index in changed.drain(..) {
            let way = &mut self.ways[index as usize];
            if way.round == round {
                continue;
            }
            let alone = way.links.iter().all(|&link| self.links[link as usize].ways.len() == 1);
            if alone && !way.flows.is_empty() {
                // Nobody shares its links: the narrowest of them is its own.
                way.round = round;
                way.advance(self.now);
                let rates = way.links.iter().map(|&link| self.links[link as usize].rate);
                way.rate = rates.fold(f64::INFINITY, f64::min) / way.flows.len() as f64;
                self.schedule(index);
                continue;
            }
            for &link in &way.links {
                if !self.links[link as usize].ways.is_empty() {
                    reach(link, &mut links, &mut self.links);
                }
            }
        }
        self.changed = changed;
        let mut next = 0;
        while next < links.len() {
            let link = links[next] as usize;
            next += 1;
            for k in 0..self.links[link].ways.len() {
                let index = self.links[link].ways[k];
                let way = &mut self.ways[index as usize];
                if way.round == round {
                    continue;
                }
                way.round = round;
                way.fixed = false;
                way.advance(self.now);
                ways.push(index);
                let count = way.flows.len() as u32;
                for i in 0..way.links.len() {
                    let other = self.ways[index as usize].links[i];
                    reach(other, &mut links, &mut self.links);
                    self.links[other as usize].open += count;
                }
            }
        }
        // Progressive filling, the fullest link first.
        let mut order: BinaryHeap<Reverse<(u64, u32)>> = (links.iter())
            .filter(|&&link| self.links[link as usize].open > 0)
            .map(|&link| Reverse((self.links[link as usize].share(), link)))
            .collect();
        while let Some(Reverse((share, link))) = order.pop() {
            let state = &self.links[link as usize];
            if state.open == 0 {
                continue;
            }
            let now = state.share();
            if now > share {
                order.push(Reverse((now, link)));
                continue;
            }
            let rate = f64::from_bits(now);
            for k in 0..self.links[link as usize].ways.len() {
                let index = self.links[link as usize].ways[k];
                let way = &mut self.ways[index as usize];
                if std::mem::replace(&mut way.fixed, true) {
                    continue;
                }
                way.rate = rate;
                let count = way.flows.len() as u32;
                for i in 0..way.links.len() {
                    let other = self.ways[index as usize].links[i] as usize;
                    self.links[other].left = (self.links[other].left - rate * f64::from(count)).max(0.0);
                    self.links[other].open -= count;
                }
            }
        }
        for index in ways {
            self.schedule(index);
        }
    }

    /// Notes when the first flow of a way ends at its rate.
    fn schedule(&mut self, index: u32) {
        let way = &mut self.ways[index as usize];
        way.version += 1;
        if let Some(&Reverse((end, ..))) = way.flows.peek() {
            let left = (end as f64 / SCALE - way.carried).max(0.0);
            // Rounded up, so that it is over when the time has come.
            let span = Picos((left / way.rate * 1e12).ceil() as u64);
            self.events.push(self.now + span, Event::End { way: index, version: way.version });
        }
    }
}

/// Parts of a byte that are counted.
const SCALE: f64 = 1024.0;

impl Link {
    /// What each flow that has no rate yet would get, as bits that order as numbers do (it is positive).
    fn share(&self) -> u64 {
        (self.left / f64::from(self.open)).max(1e-3).to_bits()
    }
}

impl Way {
    fn advance(&mut self, now: Picos) {
        if !self.flows.is_empty() {
            self.carried += self.rate * (now - self.at).seconds();
        }
        self.at = now;
    }
}

/// All hosts send `messages` messages to all others over one non-blocking switch, all at once; returns the
/// time of the last.
#[must_use]
pub fn all_to_all(hosts: u32, messages: u32, bytes: u64, rate: Rate, latency: Picos) -> Picos {
    let mut fluid = Fluid::new();
    let up: Vec<LinkId> = (0..hosts).map(|_| fluid.link(rate)).collect();
    let down: Vec<LinkId> = (0..hosts).map(|_| fluid.link(rate)).collect();
    for (from, &out) in up.iter().enumerate() {
        for (_, &into) in down.iter().enumerate().filter(|&(to, _)| to != from) {
            let way = fluid.way(&[out, into], latency);
            (0..messages).for_each(|_| {
                fluid.start(way, bytes, 0);
            });
        }
    }
    let mut last = Picos::ZERO;
    while let Some((at, _)) = fluid.next_end() {
        last = at;
    }
    last
}

/// The same with one message of each host under way: host i sends its messages to host i + 1, then those to
/// host i + 2, and so on.
#[must_use]
pub fn all_to_all_in_turns(hosts: u32, messages: u32, bytes: u64, rate: Rate, latency: Picos) -> Picos {
    let mut fluid = Fluid::new();
    let up: Vec<LinkId> = (0..hosts).map(|_| fluid.link(rate)).collect();
    let down: Vec<LinkId> = (0..hosts).map(|_| fluid.link(rate)).collect();
    // A way to each peer of each host, in the order of its turns.
    let peers = hosts.saturating_sub(1);
    let ways: Vec<WayId> = (0..hosts)
        .flat_map(|from| (1..hosts).map(move |k| (from, (from + k) % hosts)))
        .map(|(from, to)| fluid.way(&[up[from as usize], down[to as usize]], latency))
        .collect();
    let mut sent = vec![0u32; hosts as usize];
    let start = |fluid: &mut Fluid, sent: &mut [u32], host: u32| {
        let turn = sent[host as usize];
        if turn < peers * messages {
            sent[host as usize] += 1;
            fluid.start(ways[(host * peers + turn / messages) as usize], bytes, u64::from(host));
        }
    };
    (0..hosts).for_each(|host| start(&mut fluid, &mut sent, host));
    let mut last = Picos::ZERO;
    while let Some((at, host)) = fluid.next_end() {
        last = at;
        start(&mut fluid, &mut sent, host as u32);
    }
    last
}
