//! Detection within the bounds for all phases of writer and reader, and links.

use millstream_health::registers::LinkState;
use std::time::Duration;

use millstream_health::{LinkEvent, LinkMonitor, ObserverClock, PeerState, PeerWatch, Timers, TimersError};

/// A writer stalls from `stop` for `pause` ms; reads begin at `phase`. Returns the time of the failure's detection.
fn detect(timers: &Timers, phase: u64, stop: u64, pause: u64) -> (Option<u64>, PeerWatch) {
    let mut watch = PeerWatch::new(timers.misses);
    let (mut sequence, mut found) = (0, None);
    for now in 0..stop + pause + 1000 {
        if now.is_multiple_of(timers.write) && !(stop..stop + pause).contains(&now) {
            sequence += 1;
        }
        if now >= phase
            && (now - phase).is_multiple_of(timers.read)
            && watch.handle_read(sequence, false) == Some(PeerState::Failed)
        {
            found.get_or_insert(now);
        }
    }
    (found, watch)
}

#[test]
fn a_death_is_known_within_the_bound_and_no_short_stall_is_a_fault() {
    let timers = Timers::default();
    assert_eq!((timers.tolerated_stall(), timers.detection_bound(), timers.link_bound()), (180, 300, 100));
    for phase in 0..timers.read {
        for stop in 500..500 + timers.read {
            let (found, watch) = detect(&timers, phase, stop, 800);
            let after = found.expect("a death is detected") - stop;
            assert!(
                timers.tolerated_stall() < after + timers.write,
                "phase {phase}, stop {stop}: {after} ms"
            );
            assert!(after <= timers.detection_bound(), "phase {phase}, stop {stop}: {after} ms");
            assert_eq!((watch.state(), watch.recovered()), (PeerState::Alive, 1));

            let (found, watch) = detect(&timers, phase, stop, timers.tolerated_stall());
            assert_eq!((found, watch.state()), (None, PeerState::Alive), "phase {phase}, stop {stop}");
        }
    }
}

/// Both ends of a link stand still for a second, again and again. The peer sends first when a keepalive has passed since it
/// goes on, and ends at `end`. Returns when the observer, which looks at `phase` of each period, calls the link broken.
fn stand_still(timers: &Timers, phase: u64, end: u64) -> Option<u64> {
    const PERIOD: u64 = 1400;
    let stands = |now: u64| now % PERIOD >= 400;
    let mut clock = ObserverClock::new(Duration::from_millis(2 * timers.keepalive));
    let mut link = LinkMonitor::new(timers);
    link.handle_event(LinkEvent::Connected, 0);
    link.handle_event(LinkEvent::Frame, 0);
    for now in (0..10 * PERIOD).filter(|&now| !stands(now)) {
        let running = now % PERIOD;
        let time = |clock: &mut ObserverClock| clock.advance(Duration::from_millis(now)).as_millis() as u64;
        if now < end && running > 0 && running.is_multiple_of(timers.keepalive) {
            link.handle_event(LinkEvent::Frame, time(&mut clock));
        }
        if running % timers.keepalive == phase {
            let now_watched = time(&mut clock);
            if link.handle_timeout(now_watched) {
                return Some(now);
            }
        }
    }
    None
}

#[test]
fn a_machine_that_stands_still_is_no_silence() {
    let timers = Timers::default();
    for phase in 0..timers.keepalive {
        assert_eq!(stand_still(&timers, phase, u64::MAX), None, "phase {phase}");
        // A peer that does not come back is found as soon as without the pause.
        for end in [400, 1400] {
            let found = stand_still(&timers, phase, end).expect("a dead link is found");
            assert!(found >= 1400 && found <= 1400 + timers.link_bound(), "phase {phase}: {found} ms");
        }
    }
}

#[test]
fn an_announced_end_is_no_fault() {
    let mut watch = PeerWatch::new(2);
    watch.handle_read(1, false);
    assert_eq!(watch.handle_read(2, false), Some(PeerState::Alive));
    assert_eq!(watch.handle_read(3, true), Some(PeerState::Left));
    assert_eq!(watch.handle_read(3, true), None);
    assert_eq!(watch.handle_read(3, true), None);
    assert_eq!(watch.handle_read(4, false), Some(PeerState::Alive));
}

/// A host monitor that died before its node process was started again.
#[test]
fn a_peer_that_is_never_seen_fails_after_its_time_to_start() {
    let timers = Timers::default();
    let start = 5000 / timers.read as u32;
    for (mut watch, reads) in
        [(PeerWatch::new(timers.misses), timers.misses), (timers.host_watch(), timers.misses + start)]
    {
        assert!(
            (0..reads).all(|_| watch.handle_read(0, false).is_none() && watch.state() == PeerState::Unknown)
        );
        assert_eq!(watch.handle_read(0, false), Some(PeerState::Failed));
        assert_eq!(watch.handle_read(1, false), None);
        assert_eq!(watch.handle_read(2, false), Some(PeerState::Alive));
    }
}

#[test]
fn a_link_is_up_from_the_first_frame_of_a_connection_to_its_silence() {
    let mut link = LinkMonitor::new(&Timers::default());
    assert_eq!(link.handle_event(LinkEvent::Frame, 0), None, "of no connection");
    assert!(!link.handle_timeout(1000));
    let mut before = LinkState::Training;
    for now in [2000, 4000] {
        assert_eq!(link.handle_event(LinkEvent::Connected, now), None);
        assert_eq!(link.state(), before);
        assert_eq!(link.handle_event(LinkEvent::Frame, now + 90), Some(LinkState::Up));
        assert!(!link.handle_timeout(now + 189));
        assert!(link.handle_timeout(now + 190));
        assert_eq!(link.state(), LinkState::Broken);
        assert!(!link.handle_timeout(now + 1000), "it is known");
        before = LinkState::Broken;
    }
    // Connections without frames.
    for now in [6000, 8000] {
        link.handle_event(LinkEvent::Connected, now);
        assert!(!link.handle_timeout(now + 99));
        assert!(link.handle_timeout(now + 100));
        assert_eq!(link.state(), LinkState::Broken);
    }
}

#[test]
fn timers_are_checked() {
    let timers = Timers { read: 50, ..Timers::default() };
    assert_eq!(timers.check(), Err(TimersError::ReadTooShort { read: 50, write: 20 }));
    let timers = Timers { silences: 0, ..Timers::default() };
    assert_eq!(timers.check(), Err(TimersError::Zero { field: "silences" }));
    assert_eq!(Timers::default().check(), Ok(Timers::default()));
}
