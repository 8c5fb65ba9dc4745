//! Fragments from front-end processes of the same host, through shared memory (crate `millstream-front-end`).
//!
//! A front end waits while the unit is busy, so fragments are not dropped: a record stays in the ring until there is room for
//! its event.

use super::assembly::Assembly;
use super::datagram::Datagram;
use super::generator::packet;
use super::{Source, SourceStatistics};
use crate::config::RingConfig;
use crate::core::plan::Batch;
use crate::layout::PacketArea;
use crate::process::ProcessError;
use crate::process::error::IoContext;
use millstream_fragment::packetize::{FileExtent, PacketLayout};
use millstream_fragment::{Fragment, SourceId};
use millstream_front_end::{RingConsumer, RingListener, RingOptions};
use rustix::event::epoll;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// Records taken in one poll, so that sending goes on.
const BURST: usize = 4096;
/// Longest time without a look at rings whose wake-up is not armed, or that hold a record without room.
const RECHECK: Duration = Duration::from_millis(1);
/// Most front ends at a time.
const MAX_FRONT_ENDS: usize = 64;
/// Longest time until the place of a front end that has ended is free, while there are as many as possible.
const RECHECK_PLACES: Duration = Duration::from_millis(100);

/// Takes the fragments of a readout unit from rings.
pub struct RingReceiver {
    listener: RingListener,
    /// Whether the listener wakes the unit. It does not while there is no place for a front end: it stays readable.
    listens: bool,
    /// Readable when a front end connects, or has pushed to a ring that sleeps.
    poll: OwnedFd,
    rings: Vec<RingConsumer>,
    assembly: Assembly,
    sources: Vec<SourceId>,
    /// Fragments taken by source: their sequence numbers.
    sequences: Vec<u64>,
    /// Refused fragments and dead time of front ends that have ended, by source.
    refused: Vec<(u64, Duration)>,
    kind: u32,
    /// Whether all rings are empty and will wake the unit.
    sleeps: bool,
}

impl RingReceiver {
    /// Takes `events` events. `kept` of them may be in batches that are not released.
    pub(super) fn bind(
        config: &RingConfig,
        areas: &[PacketArea],
        first_event: u64,
        events: u64,
        kept: u64,
    ) -> Result<RingReceiver, ProcessError> {
        let options = RingOptions {
            first_source: config.first_source,
            sources: config.sources.into(),
            max_len: config.max_len,
            capacity: config.size.0,
            high: config.busy_above,
            low: config.busy_below,
        };
        let listener =
            RingListener::bind(&config.name, options).context("wait for front ends (readout.ring.name)")?;
        let poll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(std::io::Error::from)
            .context("wait for front ends")?;
        watch(&poll, listener.as_fd())?;
        let ids: Vec<u32> = areas.iter().map(|area| area.source).collect();
        let run = first_event..first_event.saturating_add(events);
        Ok(RingReceiver {
            listener,
            listens: true,
            poll,
            rings: Vec::new(),
            assembly: Assembly::new(
                &ids,
                run,
                config.buffer_events.max(kept),
                config.max_len,
                config.give_up,
            ),
            sequences: vec![0; ids.len()],
            refused: vec![(0, Duration::ZERO); ids.len()],
            sources: ids.into_iter().map(SourceId).collect(),
            kind: config.kind,
            sleeps: false,
        })
    }

    /// Lets the listener wake the unit while there is a place for a front end.
    fn watch_listener(&mut self) {
        let has_place = self.rings.len() < MAX_FRONT_ENDS;
        if has_place != self.listens {
            let changed = match has_place {
                true => watch(&self.poll, self.listener.as_fd()).is_ok(),
                false => epoll::delete(&self.poll, self.listener.as_fd()).is_ok(),
            };
            self.listens ^= changed;
        }
    }

    /// Takes records of a ring while there is room for their events. Returns whether it is empty; `None` if the front end
    /// has ended or violates the protocol.
    fn drain(
        ring: &mut RingConsumer,
        assembly: &mut Assembly,
        (sources, sequences): (&[SourceId], &mut [u64]),
        now: Instant,
    ) -> Option<bool> {
        // Before the last look: records of a front end that has ended are there.
        let has_ended = ring.has_ended();
        for _ in 0..BURST {
            let header = match ring.peek() {
                Ok(Some(header)) => header,
                Ok(None) if has_ended => return None,
                Ok(None) => {
                    ring.release();
                    return Some(ring.sleep());
                }
                Err(_) => return None,
            };
            if !assembly.has_room(header.event) {
                assembly.note_waiting(header.event, now);
                break;
            }
            let Some(record) = ring.take() else { break };
            let Some(position) = sources.iter().position(|source| source.0 == header.source) else {
                continue;
            };
            let fragment = Fragment { event: header.event, payload: record.payload, crc: header.crc };
            let sequence = sequences[position];
            sequences[position] += 1;
            assembly.handle(&Datagram { source: sources[position], sequence, fragment }, now);
        }
        ring.release();
        Some(false)
    }
}

/// Adds a descriptor to those that wake the unit.
fn watch(poll: &OwnedFd, descriptor: BorrowedFd<'_>) -> Result<(), ProcessError> {
    let readable = epoll::EventFlags::IN;
    epoll::add(poll, descriptor, epoll::EventData::new_u64(0), readable)
        .map_err(std::io::Error::from)
        .context("wait for front ends")
}

impl Source for RingReceiver {
    fn start_at(&mut self, events: u64) {
        self.assembly.start_at(events);
    }

    fn poll_available(&mut self, now: Instant) -> u64 {
        while self.rings.len() < MAX_FRONT_ENDS
            && let Ok(Some(ring)) = self.listener.accept()
        {
            if watch(&self.poll, ring.wake_fd()).is_ok() {
                self.rings.push(ring);
            }
        }
        self.sleeps = true;
        let mut at = 0;
        while at < self.rings.len() {
            let places = (&self.sources[..], &mut self.sequences[..]);
            match RingReceiver::drain(&mut self.rings[at], &mut self.assembly, places, now) {
                Some(is_empty) => {
                    self.sleeps &= is_empty;
                    at += 1;
                }
                None => {
                    let ring = self.rings.remove(at);
                    for (position, sum) in self.refused.iter_mut().enumerate() {
                        let (refused, dead) = ring.refused(position);
                        *sum = (sum.0 + refused, sum.1 + dead);
                    }
                }
            }
        }
        self.watch_listener();
        self.assembly.available(now)
    }

    fn poll_timeout(&self) -> Option<Instant> {
        let recheck = (!self.sleeps).then(|| Instant::now() + RECHECK);
        let places = (!self.listens).then(|| Instant::now() + RECHECK_PLACES);
        self.assembly.timeout().into_iter().chain(recheck).chain(places).min()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.poll.as_fd())
    }

    fn packet(
        &mut self,
        position: usize,
        batch: &Batch,
        buffer: &mut [u8],
        extents: &mut Vec<FileExtent>,
    ) -> Result<PacketLayout, ProcessError> {
        extents.clear();
        let end = batch.first_event.0 + u64::from(batch.events);
        let fragments: Vec<Fragment<'_>> =
            self.assembly.fragments(position, batch.first_event.0..end).collect();
        packet(self.sources[position], self.kind, batch, &fragments, buffer)
    }

    fn release(&mut self, batch: &Batch) {
        let first = batch.first_event.0;
        self.assembly.release(first..first + u64::from(batch.events));
    }

    fn statistics(&self) -> Vec<SourceStatistics> {
        let mut statistics = self.assembly.statistics();
        for (position, source) in statistics.iter_mut().enumerate() {
            let open = self.rings.iter().map(|ring| ring.refused(position));
            for (refused, dead) in open.chain([self.refused[position]]) {
                source.refused += refused;
                source.dead_time += dead;
            }
        }
        statistics
    }
}
