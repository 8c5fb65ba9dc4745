//! Incast over `RoCE`: several senders to one port of a switch, with PFC and DCQCN, packet by packet.
//!
//! ```text
//!   sender ─ paced by its reaction point ─► switch: queue, ECN marks ─► receiver: notification point ─ CNP ─► sender
//!                       ◄─ PFC: pause above XOFF, resume at XON, per sender ─┘
//! ```
//! The reaction and notification points are those of the soft device ([`millstream_link::dcqcn`]). Read: IEEE 802.1Qbb (PFC);
//! Zhu et al., SIGCOMM 2015 (DCQCN; section 5.2 has the marking curve).

use crate::engine::{BytesPerSecond, EventQueue, Picos, Random};
use crate::parameters::Parameters;
use crate::path::route::Network;
use crate::path::{PathError, ROCE_V2_HEADERS, data_path, switch_buffer};
use crate::result_table::{ResultTable, TableValue};
use millstream_link::dcqcn::{self, NotificationPoint, ReactionPoint};
use millstream_site::schema::Protocol;
use millstream_site::{HostId, Site};
use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

/// ECN marking: no packet below `low` bytes in the queue, a share that rises to `share` at `high`, all packets above.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Marking {
    /// `K_min` in bytes.
    pub low: u64,
    /// `K_max` in bytes.
    pub high: u64,
    /// `P_max`.
    pub share: f64,
}

impl Marking {
    /// The paper's curve at 40 Gb/s (5 KB, 200 KB, 1 %), scaled to a line rate.
    #[must_use]
    pub fn from_paper(line_rate: BytesPerSecond) -> Marking {
        let scale = (line_rate.0 / 5e9).max(0.1);
        Marking { low: (5e3 * scale) as u64, high: (200e3 * scale) as u64, share: 0.01 }
    }

    /// Probability that a packet is marked with this many bytes in the queue.
    #[must_use]
    pub fn probability(&self, queue: u64) -> f64 {
        match queue {
            _ if queue <= self.low => 0.0,
            _ if queue > self.high => 1.0,
            _ => self.share * (queue - self.low) as f64 / (self.high - self.low) as f64,
        }
    }
}

/// An incast.
#[derive(Clone, Debug, PartialEq)]
pub struct Incast {
    /// Line rate of each sender.
    pub senders: Vec<BytesPerSecond>,
    /// Rate of the congested port.
    pub port: BytesPerSecond,
    /// Payload of a packet.
    pub mtu: u32,
    /// Header bytes of a packet.
    pub headers: u32,
    /// Latency from each sender to the switch.
    pub delays: Vec<Picos>,
    /// Latency from the switch to the receiver.
    pub last_delay: Picos,
    /// Bytes of a sender in the switch above which it is paused, and down to which it stays paused.
    pub pause: [u64; 2],
    /// DCQCN with this marking; none: PFC only.
    pub dcqcn: Option<Marking>,
    /// Simulated time; the first half is not measured.
    pub duration: Picos,
}

/// What an incast does.
#[derive(Clone, Debug, PartialEq)]
pub struct IncastResult {
    /// Payload rate of each sender.
    pub rates: Vec<BytesPerSecond>,
    /// Mean bytes in the queue.
    pub mean_queue: f64,
    /// Most bytes in the queue, over the whole run.
    pub max_queue: u64,
    /// Share of the time in which a sender was paused, mean over senders.
    pub paused: f64,
    /// Congestion notification packets.
    pub notifications: u64,
}

#[derive(Clone, Copy, Debug)]
enum Event {
    /// A sender may send its next packet.
    Send(u32),
    /// A packet of this sender is at the switch.
    Arrive(u32),
    /// The port has sent its packet.
    Depart,
    /// A packet is at the receiver.
    Receive(u32, bool),
    /// A notification is at its sender.
    Notify(u32),
    /// A pause or its end is at its sender.
    Pause(u32, bool),
}

struct Sender {
    reaction: Option<ReactionPoint>,
    notification: NotificationPoint,
    paused_since: Option<Picos>,
    paused: Picos,
    /// Whether a `Send` event is pending.
    scheduled: bool,
    /// Time at which its link is free.
    free: Picos,
    /// Whether the switch has asked it to pause.
    is_stopped: bool,
    in_switch: u64,
    received: u64,
}

fn duration(time: Picos) -> Duration {
    Duration::from_nanos(time.0 / 1000)
}

struct Run<'a> {
    incast: &'a Incast,
    events: EventQueue<Event>,
    random: Random,
    senders: Vec<Sender>,
    queue: VecDeque<(u32, bool)>,
    queued: u64,
    changed: Picos,
    /// Bytes in the queue times picoseconds, after the first half.
    area: f64,
    result: IncastResult,
}

impl Run<'_> {
    fn wire_bytes(&self) -> u64 {
        u64::from(self.incast.mtu + self.incast.headers)
    }

    fn set_queued(&mut self, bytes: u64, now: Picos) {
        let half = Picos(self.incast.duration.0 / 2);
        self.area += self.queued as f64 * (now.max(half) - self.changed.max(half)).0 as f64;
        (self.queued, self.changed) = (bytes, now);
        self.result.max_queue = self.result.max_queue.max(bytes);
    }

    fn schedule(&mut self, i: u32, now: Picos) {
        let sender = &mut self.senders[i as usize];
        if sender.scheduled || sender.paused_since.is_some() {
            return;
        }
        let paced =
            sender.reaction.as_ref().map_or(Picos::ZERO, |r| Picos(r.poll_send().as_nanos() as u64 * 1000));
        sender.scheduled = true;
        self.events.push(now.max(sender.free).max(paced), Event::Send(i));
    }

    fn send(&mut self, i: u32, now: Picos) {
        let bytes = self.wire_bytes();
        let sender = &mut self.senders[i as usize];
        sender.scheduled = false;
        if sender.paused_since.is_some() {
            return;
        }
        if let Some(reaction) = &mut sender.reaction {
            reaction.handle_sent(bytes as usize, duration(now));
        }
        sender.free = now + self.incast.senders[i as usize].time(bytes);
        self.events.push(sender.free + self.incast.delays[i as usize], Event::Arrive(i));
        self.schedule(i, now);
    }

    fn start_port(&mut self, now: Picos) {
        if !self.queue.is_empty() {
            self.events.push(now + self.incast.port.time(self.wire_bytes()), Event::Depart);
        }
    }

    fn arrive(&mut self, i: u32, now: Picos) {
        let is_marked = (self.incast.dcqcn)
            .is_some_and(|marking| self.random.uniform() < marking.probability(self.queued));
        let is_idle = self.queue.is_empty();
        self.queue.push_back((i, is_marked));
        let bytes = self.wire_bytes();
        self.set_queued(self.queued + bytes, now);
        let sender = &mut self.senders[i as usize];
        sender.in_switch += bytes;
        if sender.in_switch > self.incast.pause[0] && !std::mem::replace(&mut sender.is_stopped, true) {
            self.events.push(now + self.incast.delays[i as usize], Event::Pause(i, true));
        }
        if is_idle {
            self.start_port(now);
        }
    }

    fn depart(&mut self, now: Picos) {
        let Some((i, is_marked)) = self.queue.pop_front() else { return };
        let bytes = self.wire_bytes();
        self.set_queued(self.queued - bytes, now);
        let sender = &mut self.senders[i as usize];
        sender.in_switch -= bytes;
        if sender.is_stopped && sender.in_switch <= self.incast.pause[1] {
            sender.is_stopped = false;
            self.events.push(now + self.incast.delays[i as usize], Event::Pause(i, false));
        }
        self.events.push(now + self.incast.last_delay, Event::Receive(i, is_marked));
        self.start_port(now);
    }

    fn receive(&mut self, i: u32, is_marked: bool, now: Picos) {
        let back = self.incast.last_delay + self.incast.delays[i as usize];
        let is_measured = now.0 > self.incast.duration.0 / 2;
        let sender = &mut self.senders[i as usize];
        if is_measured {
            sender.received += u64::from(self.incast.mtu);
        }
        if sender.notification.handle_packet(is_marked, duration(now)) {
            self.result.notifications += 1;
            self.events.push(now + back, Event::Notify(i));
        }
    }

    fn pause(&mut self, i: u32, begins: bool, now: Picos) {
        let sender = &mut self.senders[i as usize];
        if begins {
            sender.paused_since = Some(now);
        } else if let Some(since) = sender.paused_since.take() {
            sender.paused += now - since;
            self.schedule(i, now);
        }
    }

    fn finish(mut self) -> IncastResult {
        let end = self.incast.duration;
        self.set_queued(self.queued, end);
        let measured = end.0 as f64 / 2.0;
        self.result.mean_queue = self.area / measured;
        self.result.rates =
            self.senders.iter().map(|s| BytesPerSecond(s.received as f64 / (measured * 1e-12))).collect();
        let paused = |sender: &Sender| {
            let open = sender.paused_since.map_or(Picos::ZERO, |since| end - since);
            (sender.paused + open).0 as f64 / end.0 as f64
        };
        self.result.paused = self.senders.iter().map(paused).sum::<f64>() / self.senders.len().max(1) as f64;
        self.result
    }
}

/// Simulates an incast of endless messages.
#[must_use]
pub fn incast(incast: &Incast) -> IncastResult {
    let sender = |line: &BytesPerSecond| Sender {
        reaction: incast.dcqcn.map(|_| ReactionPoint::new(dcqcn::Parameters::from_paper(*line))),
        notification: NotificationPoint::default(),
        paused_since: None,
        paused: Picos::ZERO,
        scheduled: false,
        free: Picos::ZERO,
        is_stopped: false,
        in_switch: 0,
        received: 0,
    };
    let mut run = Run {
        incast,
        events: EventQueue::new(),
        random: Random::new(17),
        senders: incast.senders.iter().map(sender).collect(),
        queue: VecDeque::new(),
        queued: 0,
        changed: Picos::ZERO,
        area: 0.0,
        result: IncastResult {
            rates: Vec::new(),
            mean_queue: 0.0,
            max_queue: 0,
            paused: 0.0,
            notifications: 0,
        },
    };
    (0..run.senders.len() as u32).for_each(|i| run.schedule(i, Picos::ZERO));
    while let Some((now, event)) = run.events.pop() {
        if now > incast.duration {
            break;
        }
        match event {
            Event::Send(i) => run.send(i, now),
            Event::Arrive(i) => run.arrive(i, now),
            Event::Depart => run.depart(now),
            Event::Receive(i, is_marked) => run.receive(i, is_marked, now),
            Event::Pause(i, begins) => run.pause(i, begins, now),
            Event::Notify(i) => {
                if let Some(reaction) = &mut run.senders[i as usize].reaction {
                    reaction.handle_cnp(duration(now));
                }
            }
        }
    }
    run.finish()
}

/// A site that cannot have the incast.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CongestionError {
    /// A sender has no path.
    #[error(transparent)]
    Path(#[from] PathError),
    /// A link is `InfiniBand`.
    #[error(
        "{from} to {to}: the route has an InfiniBand link, which has credits instead of PFC; set protocol = \"RoCEv2\""
    )]
    NotRoce {
        /// Sender.
        from: String,
        /// Receiver.
        to: String,
    },
    /// The last link is not behind a switch.
    #[error("{from} to {to}: no switch is between them, so that no port is shared")]
    NoSwitch {
        /// Sender.
        from: String,
        /// Receiver.
        to: String,
    },
    /// There are too few senders.
    #[error("an incast needs two senders, {0} given")]
    Senders(usize),
    /// A sender is named twice: its adapter sends one stream.
    #[error("{0} is named twice: name each sender once")]
    Repeated(String),
}

/// The incast of some hosts of a site to another. The congested port is the last switch's; other ports of the routes are not.
///
/// # Errors
/// [`CongestionError`] names the sender and what its route lacks.
pub fn incast_of(
    site: &Site,
    p: &Parameters,
    receiver: &str,
    senders: &[String],
) -> Result<Incast, CongestionError> {
    let host = |name: &str| {
        let found = site.hosts.iter().position(|host| host.name == name).map(HostId);
        found.ok_or_else(|| PathError::Unknown(name.to_owned()))
    };
    if senders.len() < 2 {
        return Err(CongestionError::Senders(senders.len()));
    }
    let mut named = BTreeSet::new();
    if let Some(twice) = senders.iter().find(|sender| !named.insert(*sender)) {
        return Err(CongestionError::Repeated(twice.clone()));
    }
    let p = &*p.with_devices(&site.devices);
    let network = Network::new(site);
    let to = host(receiver)?;
    let mut incast = Incast {
        senders: Vec::new(),
        port: BytesPerSecond(0.0),
        mtu: 4096,
        headers: ROCE_V2_HEADERS,
        delays: Vec::new(),
        last_delay: Picos::ZERO,
        pause: [0; 2],
        dcqcn: None,
        duration: Picos(40_000_000_000),
    };
    let mut buffer = 0;
    for sender in senders {
        let from = host(sender)?;
        let names = || (sender.clone(), receiver.to_owned());
        // Reports places that have no path, and hosts that are one.
        let path = data_path(site, p, sender, receiver)?;
        let route = network.route(from, to);
        let links: Vec<_> =
            route.iter().flat_map(|route| &route.links).map(|hop| &site.links[hop.link]).collect();
        let (from, to) = names();
        if links.iter().any(|link| link.protocol != Protocol::RoceV2) {
            return Err(CongestionError::NotRoce { from, to });
        }
        let [before @ .., last] = links.as_slice() else {
            return Err(CongestionError::NoSwitch { from, to });
        };
        if before.is_empty() {
            return Err(CongestionError::NoSwitch { from, to });
        }
        let cable = |metres: f64| Picos::from_seconds(metres * 5e-9);
        let length = |link: &millstream_site::NetworkLink| link.length.map_or(1.0, |length| length.0);
        // The switch's latency is before its output queue.
        let whole = path.network_hops(0).iter().fold(Picos::ZERO, |sum, hop| sum + hop.latency);
        incast.last_delay = cable(length(last));
        incast.delays.push(whole.max(incast.last_delay) - incast.last_delay);
        let slowest = before.iter().map(|link| link.rate.0).fold(f64::INFINITY, f64::min);
        incast.senders.push(BytesPerSecond(slowest));
        incast.port = BytesPerSecond(last.rate.0);
        buffer = route
            .iter()
            .filter_map(|route| route.links.last())
            .map(|hop| switch_buffer(p, site, hop.source(site)))
            .sum();
        incast.mtu = path.mtu;
    }
    incast.pause = [buffer, buffer.saturating_sub(2 * u64::from(incast.mtu))];
    incast.dcqcn = Some(Marking::from_paper(incast.port));
    Ok(incast)
}

/// Results with PFC only and with DCQCN side by side.
#[must_use]
pub fn table(receiver: &str, incast_with_dcqcn: &Incast) -> ResultTable {
    let without = Incast { dcqcn: None, ..incast_with_dcqcn.clone() };
    let results = [&without, incast_with_dcqcn].map(incast);
    let row = |name: &str, value: &dyn Fn(&IncastResult) -> f64| {
        let numbers = results.iter().map(|result| TableValue::Number(value(result)));
        std::iter::once(TableValue::Text(name.to_owned())).chain(numbers).collect::<Vec<_>>()
    };
    let rates =
        |result: &IncastResult| result.rates.iter().map(|rate| rate.as_gigabytes()).collect::<Vec<f64>>();
    let rows = vec![
        row("total [GB/s]", &|r| rates(r).iter().sum()),
        row("slowest sender [GB/s]", &|r| rates(r).into_iter().fold(f64::INFINITY, f64::min)),
        row("fastest sender [GB/s]", &|r| rates(r).into_iter().fold(0.0, f64::max)),
        row("mean queue [KB]", &|r| r.mean_queue * 1e-3),
        row("largest queue [KB]", &|r| r.max_queue as f64 * 1e-3),
        row("senders paused [%]", &|r| r.paused * 100.0),
        row("notifications (CNP)", &|r| r.notifications as f64),
    ];
    let columns = ["", "PFC", "PFC and DCQCN"].map(str::to_owned).to_vec();
    let title = format!("incast of {} senders to {receiver}", incast_with_dcqcn.senders.len());
    ResultTable { title, columns, rows }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAYLOAD: f64 = 4096.0 / 4178.0;

    fn two_to_one(dcqcn: bool) -> Incast {
        let line = BytesPerSecond::gigabits(100.0);
        Incast {
            senders: vec![line; 2],
            port: line,
            mtu: 4096,
            headers: ROCE_V2_HEADERS,
            delays: vec![Picos(1_000_000); 2],
            last_delay: Picos(10_000),
            pause: [64 << 10, 56 << 10],
            dcqcn: dcqcn.then(|| Marking::from_paper(line)),
            duration: Picos(40_000_000_000),
        }
    }

    #[test]
    fn pfc_keeps_the_port_full_and_the_queue_bounded() {
        let config = two_to_one(false);
        let result = incast(&config);
        let total: f64 = result.rates.iter().map(|rate| rate.0).sum();
        assert!((total / (12.5e9 * PAYLOAD) - 1.0).abs() < 1e-3, "{result:?}");
        // Two senders of the port's rate: each is paused half of the time.
        assert!((result.paused - 0.5).abs() < 0.02, "{result:?}");
        // Each sender has XOFF, what is on its way for a round trip of 2 µs at 12.5 GB/s, and two packets.
        let most = 2.0 * (65536.0 + 2e-6 * 12.5e9 + 2.0 * 4178.0);
        assert!(result.max_queue as f64 <= most && result.max_queue > 2 * 65536, "{result:?} of {most}");
        assert_eq!(result.notifications, 0);
    }

    #[test]
    fn a_sender_goes_on_when_the_switch_is_empty_of_it() {
        for pause in [[8192, 0], [0, 0]] {
            let result = incast(&Incast { pause, ..two_to_one(false) });
            assert!(
                result.rates.iter().all(|rate| rate.0 > 1e9) && result.paused > 0.4,
                "{pause:?}: {result:?}"
            );
        }
    }

    #[test]
    fn dcqcn_pauses_less_and_shares_the_port() {
        // Pauses begin above the marking curve, which ends at 500 KB.
        let [pfc, dcqcn] =
            [false, true].map(|dcqcn| incast(&Incast { pause: [512 << 10, 504 << 10], ..two_to_one(dcqcn) }));
        assert!(dcqcn.notifications > 10 && dcqcn.paused < 0.1 * pfc.paused, "{dcqcn:?}");
        assert!(dcqcn.mean_queue < 0.5 * pfc.mean_queue, "{dcqcn:?}");
        let total: f64 = dcqcn.rates.iter().map(|rate| rate.0).sum();
        assert!((0.7..=1.0).contains(&(total / (12.5e9 * PAYLOAD))), "{dcqcn:?}");
        let ratio = dcqcn.rates[0].0 / dcqcn.rates[1].0;
        assert!((0.5..2.0).contains(&ratio), "{dcqcn:?}");
    }

    #[test]
    fn an_incast_at_800_gigabits_fills_the_port_and_needs_headroom_of_a_round_trip() {
        let site = crate::sites::shipped("roce800-cx8");
        let senders = ["node0", "node1", "node3", "node4"].map(str::to_owned);
        let mut config = incast_of(&site, &Parameters::shipped(), "node2", &senders).unwrap();
        config.duration = Picos(4_000_000_000);
        let pfc = incast(&Incast { dcqcn: None, ..config.clone() });
        let total: f64 = pfc.rates.iter().map(|rate| rate.0).sum();
        assert!((total / (100e9 * PAYLOAD) - 1.0).abs() < 2e-3, "{pfc:?}");
        // What four senders have on their way when they are paused: a round trip at 100 GB/s each, above XOFF.
        let round_trip = 2.0 * config.delays[0].seconds() * 100e9;
        let headroom = pfc.max_queue as f64 - 4.0 * config.pause[0] as f64;
        // The port takes a quarter of it meanwhile.
        let expected = 3.0 * round_trip;
        assert!(
            headroom > 0.95 * expected && headroom < expected + 4.0 * 3.0 * 4178.0,
            "{headroom} of {expected}"
        );
        let dcqcn = incast(&config);
        assert!(dcqcn.notifications > 10 && dcqcn.paused < pfc.paused, "{dcqcn:?}");
    }

    #[test]
    fn a_single_sender_is_never_paused() {
        let mut config = two_to_one(true);
        (config.senders, config.delays) = (vec![config.port], vec![Picos(1_000_000)]);
        let result = incast(&config);
        assert!((result.rates[0].0 / (12.5e9 * PAYLOAD) - 1.0).abs() < 1e-3, "{result:?}");
        assert_eq!((result.paused, result.notifications), (0.0, 0));
        assert!(result.max_queue <= 2 * 4178);
    }

    #[test]
    fn marking_follows_the_papers_curve() {
        let marking = Marking { low: 5_000, high: 200_000, share: 0.01 };
        assert_eq!(marking.probability(5_000), 0.0);
        assert!((marking.probability(102_500) - 0.005).abs() < 1e-12);
        assert_eq!((marking.probability(200_000), marking.probability(200_001)), (0.01, 1.0));
    }

    #[test]
    fn a_site_gives_rates_and_delays() {
        let site = crate::sites::shipped_with("roce100-cx5", &[("host.node.count", "3")]);
        let p = Parameters::shipped();
        let senders = ["node0", "node1"].map(str::to_owned);
        let incast = incast_of(&site, &p, "node2", &senders).unwrap();
        assert_eq!((incast.port.0, incast.mtu), (12.5e9, 1024));
        // A cable of 3 m and the switch of 300 ns before the queue; the cable behind it is the port's.
        assert_eq!(incast.last_delay, Picos(15_000));
        assert!(incast.delays[0] >= Picos(300_000), "{incast:?}");
        let error = incast_of(&site, &p, "node2", &senders[..1]).unwrap_err();
        assert_eq!(error, CongestionError::Senders(1));
        let twice = ["node0", "node1", "node0"].map(str::to_owned);
        let error = incast_of(&site, &p, "node2", &twice).unwrap_err();
        assert_eq!(error, CongestionError::Repeated("node0".to_owned()));
        // A switch of its own buffers, at 800 Gb/s.
        let site = crate::sites::shipped("roce800-cx8");
        let fast = incast_of(&site, &p, "node2", &senders).unwrap();
        assert_eq!((fast.port.0, fast.mtu, fast.headers), (100e9, 4096, ROCE_V2_HEADERS));
        assert_eq!(fast.pause[0], p.get("spectrum-4.buffer") as u64);
        assert_eq!(fast.dcqcn, Some(Marking { low: 100_000, high: 4_000_000, share: 0.01 }));
        let site = crate::sites::shipped("ndr-fat-tree");
        let error = incast_of(&site, &p, "node2", &senders).unwrap_err().to_string();
        assert!(error.contains("credits instead of PFC"), "{error}");
    }
}
