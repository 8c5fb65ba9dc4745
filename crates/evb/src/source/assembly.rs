//! Sorts fragments by event, and decides when an event is there.
//!
//! Each source has a ring of events. An event is there when every source has sent it or a later one; sources that stay
//! behind the others for longer than a time limit are not waited for. A fragment without room is dropped, but several in
//! a row count as sent: otherwise a unit that is behind by more than its rings would wait for events that no source
//! sends again. No sockets, no clock: the time is an argument.

use super::SourceStatistics;
use super::datagram::Datagram;
use super::sequence::SequenceNumbers;
use millstream_fragment::Fragment;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::time::{Duration, Instant};

/// Fragments without room, in a row, after which their source is believed to be that far: a single one may have a wrong
/// event number.
const BELIEVED: u32 = 8;

/// The fragments of a readout unit's sources that have arrived and are not yet sent.
#[derive(Debug)]
pub struct Assembly {
    /// The run's events.
    run: Range<u64>,
    /// Events that each ring holds.
    depth: u64,
    max_len: u32,
    limit: Duration,
    sources: Vec<SourceRing>,
    /// Events before this one were sent.
    sent: u64,
    /// Ranges of events that were sent behind it, by their first.
    sent_ahead: BTreeMap<u64, u64>,
    /// One past the latest event of any source.
    latest: u64,
    /// Values of `latest` with the times at which they were reached.
    reached: VecDeque<(Instant, u64)>,
    /// Events before this one are not waited for.
    overdue: u64,
}

#[derive(Debug)]
struct SourceRing {
    statistics: SourceStatistics,
    sequence: SequenceNumbers,
    /// One past the latest event.
    next: u64,
    /// Fragments without room since the last one with room: their number in a row, and the latest event.
    dropped: Option<(u32, u64)>,
    events: Vec<Slot>,
}

/// A fragment, or nothing.
#[derive(Clone, Debug, Default)]
struct Slot {
    event: Option<u64>,
    crc: u32,
    payload: Vec<u8>,
}

impl Assembly {
    /// Rings of `depth` events for the sources. Fragments have at most `max_len` bytes. A source that stays behind the
    /// others for longer than `limit` is not waited for.
    pub fn new(sources: &[u32], run: Range<u64>, depth: u64, max_len: u32, limit: Duration) -> Assembly {
        let ring = |&source: &u32| SourceRing {
            statistics: SourceStatistics { source, ..SourceStatistics::default() },
            sequence: SequenceNumbers::new(Some(0)),
            next: run.start,
            dropped: None,
            events: vec![Slot::default(); depth as usize],
        };
        Assembly {
            sources: sources.iter().map(ring).collect(),
            sent: run.start,
            sent_ahead: BTreeMap::new(),
            latest: run.start,
            overdue: run.start,
            reached: VecDeque::new(),
            run,
            depth,
            max_len,
            limit,
        }
    }

    /// Starts behind the run's first `events` events. The sources have sent others before.
    pub fn start_at(&mut self, events: u64) {
        let first = self.run.start.saturating_add(events);
        (self.sent, self.latest, self.overdue) = (first, first, first);
        for ring in &mut self.sources {
            (ring.sequence, ring.next) = (SequenceNumbers::new(None), first);
        }
    }

    /// A datagram arrived. False if no source of this unit has its id.
    pub fn handle(&mut self, datagram: &Datagram<'_>, now: Instant) -> bool {
        let id = datagram.source.0;
        let Some(ring) = self.sources.iter_mut().find(|ring| ring.statistics.source == id) else {
            return false;
        };
        let Fragment { event, payload, crc } = datagram.fragment;
        ring.sequence.arrived(datagram.sequence, &mut ring.statistics.lost);
        if !self.run.contains(&event) || payload.len() > self.max_len as usize {
            ring.statistics.invalid += 1;
            return true;
        }
        if event < self.sent {
            ring.statistics.late += 1;
            // A source that was not waited for is waited for again while it catches up.
            ring.next = ring.next.max(event + 1);
        } else if event - self.sent >= self.depth {
            ring.statistics.overflow += 1;
            if ring.note_dropped(event, self.depth) {
                self.reach(event + 1, now);
            }
        } else {
            ring.store(event, payload, crc, self.depth);
            self.reach(event + 1, now);
        }
        true
    }

    /// A source has sent the event before `next`: earlier ones are not to be expected any longer than the limit.
    fn reach(&mut self, next: u64, now: Instant) {
        if next > self.latest {
            self.latest = next;
            self.reached.push_back((now, next));
        }
    }

    /// Whether a fragment of this event can be stored now: sources that can wait are asked to. Events that are not of the
    /// run, or too late, need no room.
    pub fn has_room(&self, event: u64) -> bool {
        !self.run.contains(&event) || event < self.sent.saturating_add(self.depth)
    }

    /// A source that waits has a fragment of this event, for which there is no room: events before it are not to be
    /// expected any longer than the limit.
    pub fn note_waiting(&mut self, event: u64, now: Instant) {
        self.reach(event.saturating_sub(self.depth).saturating_add(1), now);
    }

    /// Number of the run's events that are there, counted from the first.
    pub fn available(&mut self, now: Instant) -> u64 {
        while let Some(&(_, event)) = self.reached.front().filter(|(at, _)| now - *at >= self.limit) {
            self.overdue = event;
            self.reached.pop_front();
        }
        let all = self.sources.iter().map(|ring| ring.next).min().unwrap_or(self.latest);
        all.max(self.overdue) - self.run.start
    }

    /// When the next event becomes overdue.
    pub fn timeout(&self) -> Option<Instant> {
        let behind = |event: u64| self.sources.iter().any(|ring| ring.next < event);
        self.reached.iter().find(|(_, event)| behind(*event)).map(|(at, _)| *at + self.limit)
    }

    /// The fragments of the source at `position` for these events, in order.
    pub fn fragments(&self, position: usize, events: Range<u64>) -> impl Iterator<Item = Fragment<'_>> {
        let ring = &self.sources[position];
        events.filter_map(|event| {
            let slot = &ring.events[(event % self.depth) as usize];
            (slot.event == Some(event)).then(|| Fragment { event, payload: &slot.payload, crc: slot.crc })
        })
    }

    /// A batch was sent. The room of its events is free when all events before it were sent as well.
    pub fn release(&mut self, events: Range<u64>) {
        self.sent_ahead.insert(events.start, events.end);
        while let Some(end) = self.sent_ahead.remove(&self.sent) {
            self.sent = end;
        }
    }

    /// What was received and lost, by source.
    pub fn statistics(&self) -> Vec<SourceStatistics> {
        self.sources.iter().map(|ring| ring.statistics).collect()
    }
}

impl SourceRing {
    /// A fragment without room is dropped. Returns whether the source is at this event: several in a row were near each other.
    fn note_dropped(&mut self, event: u64, depth: u64) -> bool {
        let (count, latest) = match self.dropped {
            Some((count, latest)) if event.abs_diff(latest) < depth => {
                (count + u32::from(event > latest), latest.max(event))
            }
            _ => (1, event),
        };
        let is_believed = count >= BELIEVED;
        self.dropped = Some((count.min(BELIEVED), latest));
        if is_believed {
            self.next = self.next.max(latest + 1);
        }
        is_believed
    }

    /// Stores a fragment, unless it is there already.
    fn store(&mut self, event: u64, payload: &[u8], crc: u32, depth: u64) {
        self.dropped = None;
        let slot = &mut self.events[(event % depth) as usize];
        if slot.event == Some(event) {
            self.statistics.duplicate += 1;
            return;
        }
        slot.event = Some(event);
        slot.crc = crc;
        slot.payload.clear();
        slot.payload.extend_from_slice(payload);
        self.statistics.received += 1;
        self.next = self.next.max(event + 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use millstream_fragment::SourceId;

    const LIMIT: Duration = Duration::from_millis(100);

    fn assembly() -> Assembly {
        Assembly::new(&[1, 2], 10..1000, 16, 64, LIMIT)
    }

    fn send(assembly: &mut Assembly, source: u32, sequence: u64, event: u64, now: Instant) {
        let payload = [source as u8; 8];
        let fragment = Fragment::new(event, &payload);
        assert!(assembly.handle(&Datagram { source: SourceId(source), sequence, fragment }, now));
    }

    #[test]
    fn an_event_is_there_when_all_sources_have_passed_it() {
        let now = Instant::now();
        let mut assembly = assembly();
        send(&mut assembly, 1, 0, 10, now);
        assert_eq!(assembly.available(now), 0);
        send(&mut assembly, 2, 0, 12, now);
        assert_eq!(assembly.available(now), 1);
        send(&mut assembly, 1, 1, 12, now);
        assert_eq!(assembly.available(now), 3);
        let events = |position| assembly.fragments(position, 10..13).map(|f| f.event).collect::<Vec<_>>();
        assert_eq!((events(0), events(1)), (vec![10, 12], vec![12]));
    }

    #[test]
    fn a_silent_source_is_not_waited_for() {
        let now = Instant::now();
        let mut assembly = assembly();
        send(&mut assembly, 1, 0, 10, now);
        assert_eq!(assembly.timeout(), Some(now + LIMIT));
        assert_eq!(assembly.available(now + LIMIT / 2), 0);
        assert_eq!(assembly.available(now + LIMIT), 1);
        assembly.release(10..11);
        send(&mut assembly, 2, 0, 10, now + LIMIT);
        assert_eq!(assembly.statistics()[1].late, 1);
    }

    #[test]
    fn late_fragments_tell_how_far_their_source_is() {
        let now = Instant::now();
        let mut assembly = assembly();
        for source in 1..3 {
            send(&mut assembly, source, 0, 10, now);
        }
        // The run has gone on without them.
        assembly.release(10..20);
        for source in 1..3 {
            send(&mut assembly, source, 1, 15, now);
        }
        assert_eq!(assembly.available(now), 6);
        assert!(assembly.statistics().iter().all(|source| source.late == 1));
    }

    #[test]
    fn every_datagram_is_counted_once() {
        let now = Instant::now();
        let mut assembly = assembly();
        // The datagram with sequence number 2 is lost; event 11 comes twice.
        send(&mut assembly, 1, 0, 10, now);
        send(&mut assembly, 1, 3, 13, now);
        send(&mut assembly, 1, 1, 11, now);
        send(&mut assembly, 1, 4, 11, now);
        send(&mut assembly, 1, 5, 26, now);
        send(&mut assembly, 1, 6, 5000, now);
        send(&mut assembly, 1, 7, 14, now);
        let statistics = assembly.statistics()[0];
        let expected = SourceStatistics {
            source: 1,
            received: 4,
            lost: 1,
            late: 0,
            duplicate: 1,
            overflow: 1,
            invalid: 1,
            ..SourceStatistics::default()
        };
        assert_eq!(statistics, expected);
        let stranger = Datagram { source: SourceId(9), sequence: 0, fragment: Fragment::new(10, &[]) };
        assert!(!assembly.handle(&stranger, now));
    }

    #[test]
    fn a_front_end_that_starts_again_counts_its_losses() {
        let now = Instant::now();
        let mut assembly = Assembly::new(&[1], 0..10_000, 10_000, 64, LIMIT);
        (0..5000).filter(|event| event % 100 > 0).for_each(|event| send(&mut assembly, 1, event, event, now));
        for event in (5000..10_000).filter(|event| event % 50 > 0) {
            send(&mut assembly, 1, event - 5000, event, now);
        }
        let statistics = assembly.statistics()[0];
        // What the front end sent before its first datagram that arrived is not known after its restart.
        assert_eq!((statistics.received, statistics.lost), (4950 + 4900, 50 + 99));
    }

    #[test]
    fn a_source_that_waits_behind_a_gap_goes_on() {
        let now = Instant::now();
        let mut assembly = assembly();
        assert!(
            assembly.has_room(25)
                && !assembly.has_room(26)
                && assembly.has_room(5)
                && assembly.has_room(2000)
        );
        assembly.note_waiting(500, now);
        assert_eq!(assembly.available(now + LIMIT / 2), 0);
        assert_eq!(assembly.available(now + LIMIT), 500 - 16 + 1 - 10);
        assembly.release(10..485);
        assert!(assembly.has_room(500));
    }

    #[test]
    fn a_source_that_is_ahead_by_more_than_the_ring_goes_on() {
        let mut now = Instant::now();
        let mut assembly = assembly();
        send(&mut assembly, 1, 0, 10, now);
        send(&mut assembly, 2, 0, 10, now);
        assert_eq!(assembly.available(now), 1);
        assembly.release(10..11);
        // Source 1 pauses, or its datagrams are lost, for more events than a ring has; source 2 stays silent.
        for event in 500..500 + u64::from(BELIEVED) - 1 {
            send(&mut assembly, 1, event - 10, event, now);
        }
        now += LIMIT;
        assert_eq!(assembly.available(now), 1);
        for event in 507..600 {
            send(&mut assembly, 1, event - 10, event, now);
            now += LIMIT / 8;
            let available = 10 + assembly.available(now);
            if available > 11 {
                // They are built without the dropped fragments.
                assembly.release(11.max(assembly.sent)..available.max(assembly.sent));
            }
        }
        let statistics = assembly.statistics();
        assert!(statistics[0].received > 80, "{statistics:?}");
        assert_eq!(statistics[0].received + statistics[0].overflow, 101);
        // Source 2 has room again, too.
        send(&mut assembly, 2, 589, 599, now);
        assert_eq!(assembly.statistics()[1].received, 2);
    }

    #[test]
    fn wrong_event_numbers_end_no_wait() {
        let now = Instant::now();
        let mut assembly = assembly();
        for event in 10..20 {
            send(&mut assembly, 1, 2 * (event - 10), event, now);
            send(&mut assembly, 1, 2 * (event - 10) + 1, 900 + event, now);
        }
        // Without one between them, but far from each other, or always the same.
        for event in [100, 200, 300, 400, 500, 600, 700, 800, 900].into_iter().chain([950; 20]) {
            send(&mut assembly, 1, 0, event, now);
        }
        assert_eq!(assembly.available(now + LIMIT), 10);
    }

    #[test]
    fn it_may_start_in_the_middle_of_a_run() {
        let now = Instant::now();
        let mut assembly = assembly();
        assembly.start_at(90);
        assert_eq!(assembly.available(now), 90);
        send(&mut assembly, 1, 500, 99, now);
        send(&mut assembly, 1, 501, 100, now);
        send(&mut assembly, 2, 700, 100, now);
        send(&mut assembly, 2, 702, 102, now);
        assert_eq!(assembly.available(now), 91);
        let statistics = assembly.statistics();
        assert_eq!((statistics[0].lost, statistics[0].late, statistics[0].received), (0, 1, 1));
        assert_eq!((statistics[1].lost, statistics[1].received), (1, 2));
    }

    #[test]
    fn room_is_reused_after_release() {
        let now = Instant::now();
        let mut assembly = assembly();
        for event in 10..26 {
            send(&mut assembly, 1, event - 10, event, now);
        }
        send(&mut assembly, 1, 16, 26, now);
        assert_eq!(assembly.statistics()[0].overflow, 1);
        assembly.release(10..11);
        send(&mut assembly, 1, 17, 26, now);
        assert_eq!(assembly.fragments(0, 26..27).count(), 1);
        assert_eq!(assembly.fragments(0, 10..11).count(), 0);
    }
}
