//! Runs from live sources: generators and datagrams.

use crate::input::{TestInputs, launcher};
use millstream_evb::config::{ConfigFile, RunConfig};
use millstream_evb::core::summary::Counts;
use millstream_evb::process::RunOutcome;
use millstream_evb::process::launcher::RunEvent;
use millstream_evb::source::SourceStatistics;
use millstream_evb::source::datagram::Datagram;
use millstream_fragment::{Fragment, SourceId};
use std::net::UdpSocket;
use std::path::Path;
use std::time::Duration;

/// Tests by name.
pub(crate) const TESTS: &[(&str, fn())] = &[
    ("generated_events_are_built_at_their_rate", generated_events_are_built_at_their_rate),
    ("files_and_generators_make_one_run", files_and_generators_make_one_run),
    ("datagrams_are_built_and_lost_ones_are_counted", datagrams_are_built_and_lost_ones_are_counted),
    (
        "a_unit_that_is_behind_by_more_than_its_buffer_goes_on",
        a_unit_that_is_behind_by_more_than_its_buffer_goes_on,
    ),
    ("a_run_goes_on_without_a_silent_front_end", a_run_goes_on_without_a_silent_front_end),
];

fn config(folder: &Path, text: &str) -> RunConfig {
    let path = folder.join("live.toml");
    std::fs::write(&path, text).unwrap();
    ConfigFile::load(&path).and_then(|config| config.check()).unwrap_or_else(|error| panic!("{error}"))
}

fn succeed(config: &RunConfig, watch: &mut dyn FnMut(&RunEvent)) -> RunOutcome {
    let outcome = launcher().run(config, watch).unwrap_or_else(|error| panic!("{error}"));
    assert!(outcome.is_success(), "{outcome:#?}");
    outcome
}

fn generated_events_are_built_at_their_rate() {
    let folder = tempfile::tempdir().unwrap();
    let text = r#"
[run]
name = "generated"
batch = 8
events = 400
timeout_ms = 10000
[[readout]]
name = "g0"
[readout.generator]
first_source = 0x10
sources = 3
size = "1KiB"
size_distribution = "exponential"
rate_hz = 1000
arrival = "poisson"
missing = 0.05
[[readout]]
name = "g1"
[readout.generator]
first_source = 0x20
sources = 1
size = 100
rate_hz = 1000
[[builder]]
name = "bu0"
landing = "host"
slots = 4
[output]
directory = "out"
events = "all"
"#;
    let outcome = succeed(&config(folder.path(), text), &mut |_| {});
    let summary = outcome.summary.as_ref().unwrap();
    let incomplete = summary.incomplete.missing_at_source;
    assert_eq!(summary.built.events + incomplete.events, 400, "{summary}");
    assert_eq!(summary.built.fragments, 4 * summary.built.events);
    // 1,200 fragments are missing with a probability of 5 %: 60 with a standard deviation of 7.5.
    let missing = 1600 - summary.fragments_read();
    assert!((20..100).contains(&missing) && incomplete.events > 0, "{summary}");
    // The last event comes after 0.4 s.
    assert!(outcome.elapsed.unwrap() > Duration::from_millis(300), "{:?}", outcome.elapsed);
    let list = std::fs::read_to_string(&outcome.sinks[0].1).unwrap();
    assert_eq!(list.lines().count(), 400);
    for line in list.lines() {
        let words: Vec<u64> = line.split(' ').map(|word| word.parse().unwrap()).collect();
        // All fragments are intact, and the second unit's has 100 bytes.
        assert!((1..=4).contains(&words[1]) && words[2] >= 100, "{line}");
    }
}

fn files_and_generators_make_one_run() {
    let inputs = TestInputs::made(1, 2, 50..60, |_, _| true);
    let text = r#"
[run]
name = "mixed"
batch = 4
timeout_ms = 10000
drain_timeout_ms = 1500
events = 35
[[readout]]
name = "file"
input = "crate1.mfs"
[[readout]]
name = "generator"
generator = { first_source = 0x1000, sources = 2, size = 64, size_distribution = "uniform", seed = 3 }
[[builder]]
name = "bu0"
landing = "host"
slots = 4
"#;
    let outcome = succeed(&config(inputs.folder.path(), text), &mut |_| {});
    assert_eq!(outcome.summary.unwrap().built, Counts { events: 35, fragments: 140 });
}

/// Sends datagrams of sources 7 and 8.
struct FrontEnd {
    socket: UdpSocket,
    sequence: [u64; 2],
}

impl FrontEnd {
    fn connected(port: u16) -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.connect(("127.0.0.1", port)).unwrap();
        FrontEnd { socket, sequence: [0; 2] }
    }

    fn send(&mut self, source: usize, event: u64) {
        let payload = vec![source as u8; 40 + event as usize % 50];
        let mut bytes = Vec::new();
        let fragment = Fragment::new(event, &payload);
        let source_id = SourceId(7 + source as u32);
        Datagram { source: source_id, sequence: self.sequence[source], fragment }.write(&mut bytes);
        self.sequence[source] += 1;
        self.socket.send(&bytes).unwrap();
    }

    /// Events 50 and 51 of source 8 are lost on the way.
    fn send_event(&mut self, event: u64) {
        self.send(0, event);
        if (50..52).contains(&event) {
            self.sequence[1] += 1;
        } else {
            self.send(1, event);
        }
    }
}

fn free_port() -> u16 {
    UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A run of one readout unit with a UDP receiver for sources from 7 on, and one builder unit.
fn udp_run(name: &str, events: u64, port: u16, sources: u16, buffer: u32) -> String {
    format!(
        r#"
[run]
name = "{name}"
batch = 8
events = {events}
timeout_ms = 10000
[[readout]]
name = "front-end"
[readout.udp]
listen = "127.0.0.1:{port}"
first_source = 7
sources = {sources}
max_len = 100
buffer_events = {buffer}
[[builder]]
name = "bu0"
landing = "host"
slots = 4
"#
    )
}

/// Front ends go on while a run is paused: events are lost, but not those after the pause.
fn a_unit_that_is_behind_by_more_than_its_buffer_goes_on() {
    const EVENTS: u64 = 4000;
    let folder = tempfile::tempdir().unwrap();
    let port = free_port();
    let config = config(folder.path(), &udp_run("behind", EVENTS, port, 1, 200));
    let mut front_end = FrontEnd::connected(port);
    let (mut bursts, mut first, mut done) = (0, 0, 0);
    let outcome = succeed(&config, &mut |event| {
        let RunEvent::Progress(sample) = event else { return };
        if sample.done.events() < done {
            return;
        }
        let burst = first..(first + 40).min(EVENTS);
        burst.clone().for_each(|event| front_end.send(0, event));
        done = burst.end.saturating_sub(40);
        // Each third burst comes after a gap of more than the buffer, and passes its events.
        bursts += 1;
        let has_gap = bursts % 3 == 0 && burst.end < EVENTS - 300;
        first = burst.end + if has_gap { 260 } else { 0 };
        front_end.sequence[0] = first;
    });
    let summary = outcome.summary.as_ref().unwrap();
    assert_eq!(summary.built.events + summary.incomplete.missing_at_source.events, EVENTS, "{summary}");
    assert!(summary.built.events > 500, "{summary}");
    assert!(outcome.sources[0].overflow > 0, "{:?}", outcome.sources);
}

/// A front end falls silent in the middle of a run, sends again, and its last datagrams are lost.
fn a_run_goes_on_without_a_silent_front_end() {
    const EVENTS: u64 = 3000;
    /// Fits into the smallest socket buffer.
    const BURST: u64 = 100;
    let folder = tempfile::tempdir().unwrap();
    let port = free_port();
    let text = udp_run("silent", EVENTS, port, 1, 4096)
        + "[[readout]]\nname = \"trigger\"\ngenerator = { first_source = 1, sources = 1, size = 8, rate_hz = 1000 }\n\
           [recovery]\nsource_timeout_ms = 300\n";
    let config = config(folder.path(), &text);
    let mut front_end = FrontEnd::connected(port);
    let (mut next, mut silent) = (0, Vec::new());
    let outcome = succeed(&config, &mut |event| {
        let is_due = match event {
            RunEvent::Started => true,
            RunEvent::SourcesSilent(unit, is_silent) => {
                silent.push((config.unit_name(*unit), *is_silent));
                false
            }
            // The run is beyond what the front end has sent.
            RunEvent::Progress(sample) if silent.len() == 1 => sample.done.events() >= 5 * BURST,
            RunEvent::Progress(sample) => {
                next = next.max(sample.done.events());
                silent.len() > 1 && next < EVENTS - 10 * BURST
            }
            _ => false,
        };
        if is_due {
            (next..next + BURST).for_each(|event| front_end.send(0, event));
            next += BURST;
        }
    });
    let summary = outcome.summary.as_ref().unwrap();
    let incomplete = summary.incomplete.missing_at_source.events;
    assert_eq!(summary.built.events + incomplete, EVENTS, "{summary}");
    assert!(summary.built.events >= BURST && incomplete >= 10 * BURST, "{summary}");
    let front_end = |is_silent| ("front-end".to_owned(), is_silent);
    assert_eq!(silent[..3], [front_end(true), front_end(false), front_end(true)]);
    assert!(outcome.sources[0].late > 0, "{:?}", outcome.sources);
}

fn datagrams_are_built_and_lost_ones_are_counted() {
    const EVENTS: u64 = 240;
    /// Fits into the smallest socket buffer.
    const BURST: u64 = 40;
    let folder = tempfile::tempdir().unwrap();
    let port = free_port();
    let output = "[output]\ndirectory = \"out\"\nevents = \"all\"\n";
    let text = udp_run("datagrams", EVENTS, port, 2, 256) + output;
    let config = config(folder.path(), &text);
    let mut front_end = FrontEnd::connected(port);
    let mut sent = 0;
    let outcome = succeed(&config, &mut |event| {
        // The next burst goes when the last one is built: no datagram is lost but those that are not sent.
        let is_ready = match event {
            RunEvent::Started => true,
            RunEvent::Progress(sample) => sample.done.events() >= sent,
            _ => false,
        };
        if is_ready && sent < EVENTS {
            front_end.socket.send(b"not a datagram of a front end").unwrap();
            (sent..sent + BURST).for_each(|event| front_end.send_event(event));
            sent += BURST;
        }
    });
    let summary = outcome.summary.as_ref().unwrap();
    assert_eq!(summary.built, Counts { events: EVENTS - 2, fragments: 2 * (EVENTS - 2) });
    assert_eq!(summary.incomplete.missing_at_source, Counts { events: 2, fragments: 2 });
    let statistics =
        |source, received, lost| SourceStatistics { source, received, lost, ..SourceStatistics::default() };
    assert_eq!(outcome.sources, [statistics(7, EVENTS, 0), statistics(8, EVENTS - 2, 2)]);
    let list = std::fs::read_to_string(&outcome.sinks[0].1).unwrap();
    assert_eq!(list.lines().count() as u64, EVENTS);
}
