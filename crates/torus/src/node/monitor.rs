//! The adapter monitor: it watches the host and the links, and tells the neighbours in every frame.

use std::time::Duration;

use millstream_health::registers::{AdapterWatchdog, Condition, DiagnosisWord, LinkState, RemoteFault};
use millstream_health::{LinkEvent, LinkMonitor, PeerState, PeerWatch, Timers};
use millstream_quantity::Instant;
use millstream_torus_core::topology::DIRECTIONS;
use millstream_torus_core::{Dimensions, Direction, NodeNumber};

use crate::health_page::HealthPage;

/// Window in which errors of a link are counted (ms), and how many make it sick.
const ERROR_WINDOW: u64 = 1000;
const ERROR_THRESHOLD: u32 = 8;

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
            let mut link = LinkMonitor::new(&timers, ERROR_WINDOW, ERROR_THRESHOLD);
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
        side.link.handle_event(LinkEvent::Frame, millis(now));
        let word = DiagnosisWord(word.into());
        if side.heard != word {
            side.heard = word;
            self.publish(direction, millis(now));
        }
    }

    /// A link is connected again.
    pub(super) fn connected(&mut self, direction: Direction, now: Instant) {
        if let Some(side) = &mut self.sides[direction.index()] {
            for event in [LinkEvent::Disable, LinkEvent::Enable, LinkEvent::Connected] {
                side.link.handle_event(event, millis(now));
            }
            // The neighbour may have begun anew: it is told everything again.
            (side.frames, side.sent_at, side.sent_word) = (0, 0, 0);
            self.publish(direction, millis(now));
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
            // A broken link stays so until it is connected again.
            let works = matches!(side.link.state(), LinkState::Up | LinkState::Sick);
            let changed = works.then(|| side.link.handle_timeout(now)).flatten();
            if changed == Some(LinkState::Broken) {
                events.broken.push(direction);
            }
            if changed.is_some() {
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
        if !matches!(side.link.state(), LinkState::Up | LinkState::Sick) {
            return;
        }
        if frames != side.frames {
            (side.frames, side.sent_at) = (frames, now);
        }
        let link = if side.link.state() == LinkState::Sick { 3 } else { 2 };
        let word = DiagnosisWord::default()
            .with_host(host as u64)
            .with_service(service.into())
            .with_adapter(Condition::Ok as u64)
            .with_link(link)
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
