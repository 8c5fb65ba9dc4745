//! Translation of DMA addresses: the IOTLB of the root complex, or the address translation cache of a device with ATS.
//!
//! Read: PCI Express Base Specification, chapter 10 (ATS).
//!
//! ```text
//!   without ATS   DMA ─────────────────────────────► IOTLB ─ miss: page walk ─► memory
//!   with ATS      DMA ─ cache ─ hit: translated TLP ──────────────────────────► memory
//!                         └─ miss: ATS request ─► IOTLB ─ miss: page walk ─► completion ─► translated TLP
//! ```
//! Messages are at random places of the footprint, their bytes in sequence: the first access to a page of a message can miss.

use crate::engine::{Channel, Context, Internal, Packet, Picos, PortId, Route, Simulation};

/// Where addresses are translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TranslationCache {
    /// IOTLB of the root complex.
    Iotlb,
    /// Address translation cache of the adapter (ATS).
    Device,
}

/// Timing of the translation of DMA addresses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DmaTranslation {
    /// The cache.
    pub cache: TranslationCache,
    /// Bytes of a page.
    pub page: u64,
    /// Share of first accesses to a page that miss the cache.
    pub miss_share: f64,
    /// Time of a miss.
    pub miss: Picos,
    /// Time between misses of reads and of writes: page walks, or ATS requests in flight.
    pub interval: [Picos; 2],
}

/// Share of random accesses that miss a cache of `entries` pages.
#[must_use]
pub fn miss_share(entries: f64, page: f64, footprint: f64) -> f64 {
    (1.0 - entries * page / footprint).clamp(0.0, 1.0)
}

/// A stream of accesses, each of which leaves in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// DMA reads.
    Reads,
    /// DMA writes.
    Writes,
}

impl Stream {
    fn index(self) -> usize {
        match self {
            Stream::Reads => 0,
            Stream::Writes => 1,
        }
    }

    /// The stream of an access that has been translated.
    pub(super) fn of(packet: &Packet) -> Stream {
        if packet.tag == 0 { Stream::Reads } else { Stream::Writes }
    }
}

// Kinds of steps: they select the stage's time.
const HIT: u16 = 0;
const MISS: u16 = 1;

/// Translates the accesses of one adapter.
#[derive(Debug)]
pub(super) struct Translator {
    timing: DmaTranslation,
    steps: Route<Internal>,
    /// Misses that are due: the shares of the accesses so far.
    due: f64,
    /// Time at which the last access of each stream leaves.
    leaves: [Picos; 2],
}

impl Translator {
    /// Adds the translation of an adapter; its port takes the steps.
    pub(super) fn new(
        simulation: &mut Simulation,
        name: &str,
        timing: DmaTranslation,
        port: PortId<Internal>,
    ) -> Translator {
        let [reads, writes] = timing.interval;
        // The kind of a miss is 1 of a read, 3 of a write.
        let stage =
            Channel::stage_by_kind(format!("{name} translation"), [Picos::ZERO, reads, Picos::ZERO, writes]);
        let stage = simulation.add_channel(stage);
        let steps = simulation.route(&[stage], port);
        Translator { timing, steps, due: 0.0, leaves: [Picos::ZERO; 2] }
    }

    /// Starts an access of `bytes` at `offset` of a message.
    pub(super) fn start(&mut self, stream: Stream, offset: u64, bytes: u32, context: &mut Context<'_>) {
        let page = self.timing.page;
        let end = offset + u64::from(bytes.max(1)) - 1;
        let before = if offset == 0 { 0 } else { (offset - 1) / page + 1 };
        let pages = (end / page + 1).saturating_sub(before);
        self.due += pages as f64 * self.timing.miss_share;
        let misses = self.due.floor();
        self.due -= misses;
        let kind = if misses > 0.0 { MISS } else { HIT } + 2 * stream.index() as u16;
        context.send(self.steps, Packet::new(kind, 0, stream.index() as u64));
    }

    /// Time from now until an access that has passed the stage leaves, in the order of its stream.
    pub(super) fn delay(&mut self, step: &Packet, now: Picos) -> Picos {
        let miss = if step.kind & 1 == MISS { self.timing.miss } else { Picos::ZERO };
        let last = &mut self.leaves[Stream::of(step).index()];
        *last = (*last).max(now + miss);
        *last - now
    }
}

#[cfg(test)]
mod tests {
    use super::miss_share;

    #[test]
    fn the_share_of_misses_is_that_of_pages_outside_the_cache() {
        assert_eq!(miss_share(64.0, 4096.0, 4096.0), 0.0);
        assert_eq!(miss_share(64.0, 4096.0, 128.0 * 4096.0), 0.5);
        assert_eq!(miss_share(0.0, 4096.0, 1e9), 1.0);
    }
}
