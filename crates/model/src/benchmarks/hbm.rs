//! HBM bandwidth of one AXI master: transactions of one size, sequential or random, over pseudo channels.
//!
//! ```text
//!   AXI master, one ID ─► switch ─► pseudo channel: 16 banks, one data bus, refresh
//! ```
//! A pseudo channel serves transactions in order; each waits for its bank's row cycle and for the data bus. AXI does not
//! reorder responses of one ID. A master that changes the pseudo channel therefore waits for all responses of the previous
//! one.

use crate::engine::{
    BytesPerSecond, Channel, Context, Endpoint, Internal, Packet, Picos, Random, Route, Simulation,
};
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
    /// Refresh interval (tREFI).
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
    free: Picos,
    banks: Vec<Picos>,
    next_refresh: Picos,
    ready: VecDeque<Packet>,
}

/// Bytes of a row of a pseudo channel (JESD235).
const ROW: u64 = 1024;

impl Endpoint for PseudoChannel {
    fn receive(&mut self, _port: u16, packet: Packet, context: &mut Context<'_>) {
        let size = packet.tag & 0xffff;
        let address = packet.tag >> 16;
        let now = context.now();
        let bank = (address / ROW % self.banks.len() as u64) as usize;
        let row_open = packet.kind == OPEN_ROW;
        let mut start = self.free.max(now);
        if !row_open {
            start = start.max(self.banks[bank]);
        }
        while start >= self.next_refresh {
            // A refresh that fell into an idle period is over, or nearly.
            start = start.max(self.next_refresh + self.hbm.refresh_cycle);
            self.next_refresh += self.hbm.refresh_interval;
        }
        let span = self.hbm.rate.time(size);
        self.free = start + span;
        // The row cycle covers short bursts; for long ones the row stays open.
        self.banks[bank] = start + self.hbm.row_cycle.max(span + Picos(self.hbm.row_cycle.0 / 2));
        self.ready.push_back(packet);
        context.set_timer(self.free - now, 0);
    }

    fn timer(&mut self, _token: u64, context: &mut Context<'_>) {
        let Some(packet) = self.ready.pop_front() else { return };
        context.send(Route::<Internal>::reply_to(&packet), packet);
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
    const TRANSACTIONS: u64 = 20_000;
    let mut simulation = Simulation::new(11);
    let master = simulation.reserve_endpoint();
    let answer = simulation.port(master, 0);
    let half = Picos(hbm.switch_round_trip.0 / 2);
    let to = simulation.add_channel(Channel::stage("switch, requests", Picos::ZERO).latency(half));
    let back = simulation.add_channel(Channel::stage("switch, data", Picos::ZERO).latency(half));
    let reply = simulation.route(&[back], answer);
    let routes = (0..channels)
        .map(|_| {
            let channel = simulation.add_endpoint(PseudoChannel {
                hbm: *hbm,
                free: Picos::ZERO,
                banks: vec![Picos::ZERO; hbm.banks as usize],
                next_refresh: hbm.refresh_interval,
                ready: VecDeque::new(),
            });
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
        transactions: TRANSACTIONS,
        end: Picos::ZERO,
    };
    simulation.install(master, code);
    simulation.set_timer(master, Picos::ZERO, 0);
    simulation.run(Picos(u64::MAX));
    let end = simulation.get::<AxiMaster>(master).end;
    BytesPerSecond((TRANSACTIONS * u64::from(size)) as f64 / end.seconds())
}
