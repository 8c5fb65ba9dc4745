//! The counters at the end of a run: injected = delivered + dropped by cause + in slots.

use std::collections::BTreeMap;
use std::fmt;

use millstream_torus_core::router::DropCause;
use serde::{Deserialize, Serialize};

use crate::engine::Engine;
use crate::seventh::OutsideCounters;

/// Packets and operations of a node, or of all nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrafficCounters {
    /// Packets that entered the network here.
    pub injected: u64,
    /// Packets from neighbours.
    pub received: u64,
    /// Packets to neighbours.
    pub transmitted: u64,
    /// Packets that ended here at their target.
    pub delivered: u64,
    /// Dropped packets by cause.
    pub dropped: BTreeMap<String, u64>,
    /// Packets in slots and injection queues.
    pub in_slots: u64,
    /// Packets sent again.
    pub repeated: u64,
    /// Bytes of payload in place.
    pub delivered_bytes: u64,
    /// Bytes of payload that applications copied through staging memory; none for operations between regions.
    pub staged_bytes: u64,
    /// Operations refused.
    pub refused: u64,
    /// Packets with wrong headers.
    pub malformed: u64,
    /// Commands of hosts outside of the torus.
    pub outside: OutsideCounters,
    /// The epoch.
    pub epoch: u32,
    /// Whether nothing waits.
    pub idle: bool,
}

impl TrafficCounters {
    /// The counters of a node, without those of its seventh port.
    #[must_use]
    pub fn of(engine: &Engine) -> TrafficCounters {
        let (packets, counters) = (engine.packets(), engine.counters());
        let dropped = (DropCause::ALL.iter().zip(packets.dropped))
            .filter(|&(_, count)| count > 0)
            .map(|(cause, count)| (cause.name().to_owned(), count))
            .collect();
        TrafficCounters {
            injected: packets.injected,
            received: packets.received,
            transmitted: packets.transmitted,
            delivered: packets.delivered,
            dropped,
            in_slots: engine.waiting(),
            repeated: engine.repeated_and_foreign().0,
            delivered_bytes: counters.delivered_bytes,
            staged_bytes: counters.staged_bytes,
            refused: counters.refused,
            malformed: counters.malformed,
            outside: OutsideCounters::default(),
            epoch: engine.epoch().0,
            idle: engine.is_idle(),
        }
    }

    /// Adds another node's counters.
    pub fn add(&mut self, other: &TrafficCounters) {
        self.injected += other.injected;
        self.received += other.received;
        self.transmitted += other.transmitted;
        self.delivered += other.delivered;
        for (cause, count) in &other.dropped {
            *self.dropped.entry(cause.clone()).or_default() += count;
        }
        self.in_slots += other.in_slots;
        self.repeated += other.repeated;
        self.delivered_bytes += other.delivered_bytes;
        self.staged_bytes += other.staged_bytes;
        self.refused += other.refused;
        self.malformed += other.malformed;
        self.outside.add(&other.outside);
        self.epoch = self.epoch.max(other.epoch);
        self.idle &= other.idle;
    }

    /// The sum over nodes.
    #[must_use]
    pub fn total<'a>(counters: impl IntoIterator<Item = &'a TrafficCounters>) -> TrafficCounters {
        let mut total = TrafficCounters { idle: true, ..TrafficCounters::default() };
        counters.into_iter().for_each(|counters| total.add(counters));
        total
    }

    /// Dropped packets.
    #[must_use]
    pub fn dropped_total(&self) -> u64 {
        self.dropped.values().sum()
    }

    /// Whether every packet, and every command of an outside host, is accounted for. It holds for all nodes together while no link carries a packet; nodes that
    /// were killed take their terms with them.
    #[must_use]
    pub fn is_balanced(&self) -> bool {
        self.injected + self.received
            == self.delivered + self.dropped_total() + self.in_slots + self.transmitted
            && self.outside.is_balanced()
    }

    /// Packets on links: sent by one node and not received by another.
    #[must_use]
    pub fn on_links(&self) -> i64 {
        self.transmitted as i64 - self.received as i64
    }
}

impl fmt::Display for TrafficCounters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} packets injected = {} delivered + {} dropped + {} in slots + {} on links",
            self.injected,
            self.delivered,
            self.dropped_total(),
            self.in_slots,
            self.on_links()
        )?;
        for (cause, count) in &self.dropped {
            write!(f, "; {cause} {count}")?;
        }
        if self.outside.commands > 0 {
            write!(f, "; {}", self.outside)?;
        }
        Ok(())
    }
}
