//! HBM bandwidth of one AXI master: transactions of one size, sequential or random, over pseudo channels.
//!
//! ```text
//!   AXI master, one ID ─► switch ─► pseudo channel: reordering window, 16 banks, one data bus, refresh
//! ```
//! The controller of a pseudo channel picks the transaction of its window whose row is open or whose bank is ready first
//! (JESD235: tRC of a bank, distance between activates of all banks). AXI does not reorder responses of one ID. A master that
//! changes the pseudo channel therefore waits for all responses of the previous one.

use crate::engine::{
    BytesPerSecond, Channel, Context, Endpoint, Internal, Packet, Picos, Random, Route, Simulation,
};
use crate::precision::Precision;
use std::collections::VecDeque;

/// Timing of an HBM pseudo channel and its port.
#[derive(Clone, Copy, Debug)]
pub struct HbmTiming {
    /// Rate of the data bus, or of the port if that is slower.
    pub rate: BytesPerSecond,
    /// Row cycle time of a bank (tRC).
    pub row_cycle: Picos,
    /// Banks of a pseudo channel.
    pub banks: u32,
    /// Smallest mean distance of activates in one pseudo channel (tRRD, tFAW).
    pub activate_interval: Picos,
    /// Transactions among which the controller chooses.
    pub reorder_window: u32,
    /// Refresh interval (tREFI), longer than the refresh cycle; 0: no refresh.
    pub refresh_interval: Picos,
    /// Refresh cycle time (tRFC).
    pub refresh_cycle: Picos,
    /// Round trip through the switch.
    pub switch_round_trip: Picos,
}

impl HbmTiming {
    /// Share of the data bus that refresh leaves.
    #[must_use]
    pub fn refresh_share(&self) -> f64 {
        if self.refresh_interval == Picos(0) {
            return 1.0;
        }
        1.0 - self.refresh_cycle.0 as f64 / self.refresh_interval.0 as f64
    }
}

/// Order of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AccessPattern {
    /// Consecutive addresses.
    Sequential,
    /// Uniformly distributed addresses.
    Random,
}

/// One pseudo channel.
struct PseudoChannel {
    hbm: HbmTiming,
    /// Time at which the data bus is free.
    bus_free: Picos,
    /// Time from which the next row can be activated.
    next_activate: Picos,
    /// Time from which each bank can be activated.
    banks: Vec<Picos>,
    next_refresh: Picos,
    waiting: VecDeque<Packet>,
    /// Whether a timer will choose the next transaction.
    is_choosing: bool,
    transferring: VecDeque<Packet>,
}

/// Bytes of a row of a pseudo channel (JESD235).
const ROW: u64 = 1024;

// Timers of a pseudo channel.
const TRANSFERRED: u64 = 0;
const CHOOSE: u64 = 1;

impl PseudoChannel {
    fn new(hbm: &HbmTiming) -> PseudoChannel {
        PseudoChannel {
            hbm: *hbm,
            bus_free: Picos::ZERO,
            next_activate: Picos::ZERO,
            banks: vec![Picos::ZERO; hbm.banks as usize],
            next_refresh: hbm.refresh_interval,
            waiting: VecDeque::new(),
            is_choosing: false,
            transferring: VecDeque::new(),
        }
    }

    fn bank(&self, packet: &Packet) -> usize {
        ((packet.tag >> 16) / ROW % self.banks.len() as u64) as usize
    }

    /// Earliest start of a transaction's data.
    fn earliest(&self, packet: &Packet, now: Picos) -> Picos {
        let start = self.bus_free.max(now);
        if packet.kind == OPEN_ROW {
            return start;
        }
        start.max(self.next_activate).max(self.banks[self.bank(packet)])
    }

    /// Starts the transaction of the window that can start first; the oldest of several.
    fn choose(&mut self, context: &mut Context<'_>) {
        let now = context.now();
        let window = self.waiting.iter().take(self.hbm.reorder_window as usize).enumerate();
        let Some((chosen, _)) = window.min_by_key(|(_, packet)| self.earliest(packet, now)) else { return };
        let Some(packet) = self.waiting.remove(chosen) else { return };
        let mut start = self.earliest(&packet, now);
        while self.hbm.refresh_interval > Picos(0) && start >= self.next_refresh {
            // A refresh that fell into an idle period is over, or nearly.
            start = start.max(self.next_refresh + self.hbm.refresh_cycle);
            self.next_refresh += self.hbm.refresh_interval;
        }
        let span = self.hbm.rate.time(packet.tag & 0xffff);
        self.bus_free = start + span;
        if packet.kind != OPEN_ROW {
            self.next_activate = start + self.hbm.activate_interval;
        }
        // The row cycle covers short bursts; for long ones the row stays open.
        let bank = self.bank(&packet);
        self.banks[bank] = start + self.hbm.row_cycle.max(span + Picos(self.hbm.row_cycle.0 / 2));
        self.transferring.push_back(packet);
        context.set_timer(self.bus_free - now, TRANSFERRED);
        // The next choice is due when this transaction's data starts.
        self.is_choosing = true;
        context.set_timer(start - now, CHOOSE);
    }
}

impl Endpoint for PseudoChannel {
    fn receive(&mut self, _port: u16, packet: Packet, context: &mut Context<'_>) {
        self.waiting.push_back(packet);
        if !self.is_choosing {
            self.choose(context);
        }
    }

    fn timer(&mut self, token: u64, context: &mut Context<'_>) {
        if token == CHOOSE {
            self.is_choosing = false;
            self.choose(context);
        } else if let Some(packet) = self.transferring.pop_front() {
            context.send(Route::<Internal>::reply_to(&packet), packet);
        }
    }
}

const OPEN_ROW: u16 = 1;

struct AxiMaster {
    pattern: AccessPattern,
    size: u64,
    channels: Vec<Route<Internal>>,
    reply: Route<Internal>,
    outstanding: u32,
    limit: u32,
    current: usize,
    /// Next address, drawn but not sent.
    next: Option<u64>,
    position: u64,
    random: Random,
    done: u64,
    transactions: u64,
    end: Picos,
}

/// Bytes of each pseudo channel that the test covers.
const PSEUDO_CHANNEL_SPAN: u64 = 256 << 20;

impl AxiMaster {
    fn fill(&mut self, context: &mut Context<'_>) {
        while self.outstanding < self.limit {
            let span = PSEUDO_CHANNEL_SPAN * self.channels.len() as u64;
            let address = match (self.next.take(), self.pattern) {
                (Some(address), _) => address,
                (None, AccessPattern::Sequential) => {
                    self.position += self.size;
                    self.position % span
                }
                (None, AccessPattern::Random) => self.random.below(span / self.size) * self.size,
            };
            let channel = (address / PSEUDO_CHANNEL_SPAN) as usize;
            if channel != self.current && self.outstanding > 0 {
                self.next = Some(address);
                return;
            }
            self.current = channel;
            self.outstanding += 1;
            let open = self.pattern == AccessPattern::Sequential && !address.is_multiple_of(ROW);
            let kind = if open { OPEN_ROW } else { 0 };
            let packet = Packet::new(kind, 0, address << 16 | self.size).with_reply(self.reply);
            context.send(self.channels[channel], packet);
        }
    }
}

impl Endpoint for AxiMaster {
    fn receive(&mut self, _port: u16, _packet: Packet, context: &mut Context<'_>) {
        self.outstanding -= 1;
        self.done += 1;
        if self.done == self.transactions {
            self.end = context.now();
            context.stop();
        } else {
            self.fill(context);
        }
    }

    fn timer(&mut self, _token: u64, context: &mut Context<'_>) {
        self.fill(context);
    }
}

/// Read bandwidth of one AXI master: transactions of `size` bytes over `channels` pseudo channels.
#[must_use]
pub fn read(hbm: &HbmTiming, pattern: AccessPattern, channels: u32, size: u32) -> BytesPerSecond {
    read_at(Precision::Full, hbm, pattern, channels, size)
}

/// [`read`] of a longer or shorter run.
#[must_use]
pub fn read_at(
    precision: Precision,
    hbm: &HbmTiming,
    pattern: AccessPattern,
    channels: u32,
    size: u32,
) -> BytesPerSecond {
    let transactions: u64 = precision.pick(20_000, 4_000);
    let mut simulation = Simulation::new(11);
    let master = simulation.reserve_endpoint();
    let answer = simulation.port(master, 0);
    let half = Picos(hbm.switch_round_trip.0 / 2);
    let to = simulation.add_channel(Channel::stage("switch, requests", Picos::ZERO).latency(half));
    let back = simulation.add_channel(Channel::stage("switch, data", Picos::ZERO).latency(half));
    let reply = simulation.route(&[back], answer);
    let routes = (0..channels)
        .map(|_| {
            let channel = simulation.add_endpoint(PseudoChannel::new(hbm));
            let port = simulation.port(channel, 0);
            simulation.route(&[to], port)
        })
        .collect();
    let code = AxiMaster {
        pattern,
        size: u64::from(size),
        channels: routes,
        reply,
        outstanding: 0,
        limit: 64,
        current: 0,
        next: None,
        position: 0,
        random: Random::new(3),
        done: 0,
        transactions,
        end: Picos::ZERO,
    };
    simulation.install(master, code);
    simulation.set_timer(master, Picos::ZERO, 0);
    simulation.run(Picos(u64::MAX));
    let end = simulation.get::<AxiMaster>(master).end;
    BytesPerSecond((transactions * u64::from(size)) as f64 / end.seconds())
}
