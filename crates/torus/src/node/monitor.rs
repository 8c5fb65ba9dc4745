//! The adapter monitor: it watches the host and the links, and tells the neighbours in every frame.

use std::time::Duration;

use millstream_health::registers::{AdapterWatchdog, Condition, DiagnosisWord, LinkState, RemoteFault};
use millstream_health::{LinkEvent, LinkMonitor, PeerState, PeerWatch, Timers};
use millstream_quantity::Instant;
use millstream_torus_core::topology::DIRECTIONS;
use millstream_torus_core::{Dimensions, Direction, NodeNumber};

use crate::health_page::HealthPage;

/// What diagnosis words say of their link: no other one is sent.
const LINK_UP: u64 = 2;

/// A link as the monitor sees it.
#[derive(Debug)]
struct Side {
    link: LinkMonitor,
    heard: DiagnosisWord,
    remote: RemoteFault,
    /// Frames sent at the last tick, and when that count changed.
    frames: u64,
    sent_at: u64,
    /// The last diagnosis word sent.
    sent_word: u16,
}

/// What a tick found.
#[derive(Debug, Default)]
pub(super) struct MonitorEvents {
    /// Links that broke.
    pub(super) broken: Vec<Direction>,
    /// Links that were silent, and whose neighbours know everything.
    pub(super) silent: Vec<Direction>,
    /// Diagnosis words that changed: they go out at once.
    pub(super) words: Vec<(Direction, u16)>,
}

#[derive(Debug)]
pub(super) struct AdapterMonitor {
    timers: Timers,
    page: HealthPage,
    host: PeerWatch,
    host_state: Condition,
    service: bool,
    sides: [Option<Side>; DIRECTIONS],
    sequence: u32,
    written: Option<u64>,
    read: Option<u64>,
}

impl AdapterMonitor {
    pub(super) fn new(
        torus: &Dimensions,
        here: NodeNumber,
        timers: Timers,
        page: HealthPage,
        connected: bool,
        now: Instant,
    ) -> AdapterMonitor {
        let sides = Direction::ALL.map(|direction| {
            torus.neighbour(here, direction)?;
            let mut link = LinkMonitor::new(&timers);
            let event = if connected { LinkEvent::Connected } else { LinkEvent::QueuePairError };
            link.handle_event(event, millis(now));
            let heard = DiagnosisWord::default().with_service(1);
            Some(Side {
                link,
                heard,
                remote: RemoteFault::default(),
                frames: 0,
                sent_at: millis(now),
                sent_word: 0,
            })
        });
        let mut monitor = AdapterMonitor {
            timers,
            page,
            host: timers.host_watch(),
            host_state: Condition::Ok,
            service: true,
            sides,
            sequence: 0,
            written: None,
            read: None,
        };
        Direction::ALL.into_iter().for_each(|direction| monitor.publish(direction, millis(now)));
        monitor
    }

    /// How long nothing needs to be looked at.
    pub(super) fn sleep(&self) -> Duration {
        Duration::from_millis(self.timers.write.min(self.timers.keepalive))
    }

    /// A frame or a keep-alive arrived.
    pub(super) fn frame(&mut self, direction: Direction, word: u16, now: Instant) {
        let Some(side) = &mut self.sides[direction.index()] else { return };
        let came_up = side.link.handle_event(LinkEvent::Frame, millis(now)).is_some();
        let word = DiagnosisWord(word.into());
        if std::mem::replace(&mut side.heard, word) != word || came_up {
            self.publish(direction, millis(now));
        }
    }

    /// A link is connected again. It is up when the first frame has arrived.
    pub(super) fn connected(&mut self, direction: Direction, now: Instant) {
        if let Some(side) = &mut self.sides[direction.index()] {
            side.link.handle_event(LinkEvent::Connected, millis(now));
            // The neighbour may have begun anew: it is told everything again.
            (side.frames, side.sent_at, side.sent_word) = (0, 0, 0);
        }
    }

    /// A link is out of use.
    pub(super) fn failed(&mut self, direction: Direction, now: Instant) {
        if let Some(side) = &mut self.sides[direction.index()] {
            side.link.handle_event(LinkEvent::QueuePairError, millis(now));
            self.publish(direction, millis(now));
        }
    }

    /// Time passed. `frames` are frames sent so far over each link.
    pub(super) fn tick(&mut self, frames: impl Fn(Direction) -> u64, now: Instant) -> MonitorEvents {
        let now = millis(now);
        let mut events = MonitorEvents::default();
        if self.read.is_none_or(|read| now >= read + self.timers.read) {
            self.read = Some(now);
            self.read_host();
        }
        for direction in Direction::ALL {
            let Some(side) = &mut self.sides[direction.index()] else { continue };
            if side.link.handle_timeout(now) {
                events.broken.push(direction);
                self.publish(direction, now);
            }
            self.speak(direction, frames(direction), now, &mut events);
        }
        if self.written.is_none_or(|written| now >= written + self.timers.write) {
            self.written = Some(now);
            self.write();
        }
        events
    }

    /// Decides whether a link needs a frame of its own because its word changed, or a keep-alive because it was silent.
    fn speak(&mut self, direction: Direction, frames: u64, now: u64, events: &mut MonitorEvents) {
        let (host, service) = (self.host_state, self.service);
        let Some(side) = &mut self.sides[direction.index()] else { return };
        // A new connection has begun with a frame.
        if side.link.state() != LinkState::Up {
            return;
        }
        if frames != side.frames {
            (side.frames, side.sent_at) = (frames, now);
        }
        let word = DiagnosisWord::default()
            .with_host(host as u64)
            .with_service(service.into())
            .with_adapter(Condition::Ok as u64)
            .with_link(LINK_UP)
            .0 as u16;
        let changed = word != side.sent_word;
        if changed {
            side.sent_word = word;
            events.words.push((direction, word));
        }
        if changed {
            side.sent_at = now;
        } else if now >= side.sent_at + self.timers.keepalive {
            side.sent_at = now;
            events.silent.push(direction);
        }
    }

    fn read_host(&mut self) {
        let word = self.page.host();
        let stopping = Condition::from_code(word.host()) == Condition::Stopping;
        self.host.handle_read(word.sequence() as u32, stopping);
        self.service = self.host.state() == PeerState::Unknown || word.service() == 1;
        self.host_state = match self.host.state() {
            PeerState::Failed => Condition::Failed,
            PeerState::Left => Condition::Stopping,
            PeerState::Unknown => Condition::Ok,
            _ => Condition::from_code(word.host()),
        };
    }

    fn write(&mut self) {
        self.sequence = self.sequence.wrapping_add(1);
        let links = (self.sides.iter().enumerate()).fold(0, |links, (at, side)| {
            let state = side.as_ref().map_or(LinkState::Absent, |side| side.link.state());
            links | (state as u64) << (3 * at)
        });
        let word = AdapterWatchdog::default()
            .with_sequence(self.sequence.into())
            .with_adapter(Condition::Ok as u64)
            .with_links(links);
        self.page.set_adapter(word);
    }

    /// Writes what is known of a neighbour.
    fn publish(&mut self, direction: Direction, now: u64) {
        let Some(side) = &mut self.sides[direction.index()] else { return };
        let word = side.remote;
        side.remote = word
            .with_sequence(word.sequence() + 1)
            .with_host(side.heard.host())
            .with_service(side.heard.service())
            .with_adapter(side.heard.adapter())
            .with_link(side.link.state() as u64)
            .with_changed(now);
        self.page.set_remote(direction, side.remote);
    }
}

fn millis(now: Instant) -> u64 {
    now.as_nanos() / 1_000_000
}

#[cfg(test)]
mod tests {
    use super::*;

    /// TCP works between two neighbours, and their packets are lost.
    #[test]
    fn a_link_that_connects_but_carries_no_frames_stays_broken() {
        let torus: Dimensions = "2x1x1".parse().unwrap();
        let here = NodeNumber(0);
        let link = Direction::ALL.into_iter().find(|&direction| torus.neighbour(here, direction).is_some());
        let link = link.unwrap();
        let at = |ms: u64| Instant::from_nanos(ms * 1_000_000);
        let (page, descriptor) = HealthPage::create().unwrap();
        let seen = HealthPage::open(descriptor).unwrap();
        let timers = Timers::default();
        let mut monitor = AdapterMonitor::new(&torus, here, timers, page, true, at(0));
        let state = || LinkState::from_code(seen.remote(link).link());
        monitor.frame(link, 0, at(10));
        assert_eq!(state(), LinkState::Up);
        for connected in [1000, 2000, 3000] {
            monitor.failed(link, at(connected - 500));
            monitor.connected(link, at(connected));
            for ms in 0..timers.link_bound() {
                assert!(monitor.tick(|_| 1, at(connected + ms)).broken.is_empty());
                assert_eq!(state(), LinkState::Broken);
            }
            assert_eq!(monitor.tick(|_| 1, at(connected + timers.link_bound())).broken, [link]);
        }
        monitor.connected(link, at(4000));
        monitor.frame(link, 0, at(4010));
        assert_eq!(state(), LinkState::Up);
        assert_eq!(monitor.tick(|_| 1, at(4020)).words.len(), 1, "the neighbour is told everything again");
    }
}
