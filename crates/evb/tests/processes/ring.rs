//! Runs from front-end processes on the same host.

use crate::input::launcher;
use millstream_evb::config::{ConfigFile, RunConfig};
use millstream_evb::process::RunOutcome;
use millstream_evb::process::launcher::RunEvent;
use millstream_front_end::{ConnectError, FrontEnd, Push};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Tests by name.
pub(crate) const TESTS: &[(&str, fn())] = &[
    ("a_front_end_in_c_pushes_fragments", a_front_end_in_c_pushes_fragments),
    ("a_front_end_is_told_to_wait_and_nothing_is_lost", a_front_end_is_told_to_wait_and_nothing_is_lost),
    ("a_front_end_beyond_the_limit_gets_the_next_place", a_front_end_beyond_the_limit_gets_the_next_place),
];

/// A run with a ring of two sources, 0x300 and 0x301.
fn config(folder: &Path, name: &str, events: u64, ring: &str) -> RunConfig {
    let path = folder.join("ring.toml");
    let text = format!(
        "[run]\nname = \"ring\"\nbatch = 16\nevents = {events}\ntimeout_ms = 10000\n\
         [[readout]]\nname = \"ring\"\n[readout.ring]\nname = \"{name}\"\nfirst_source = 0x300\nsources = 2\n\
         max_len = 64\n{ring}\n[[builder]]\nname = \"bu0\"\nlanding = \"host\"\nslots = 8\n\
         [output]\ndirectory = \"out\"\nevents = \"built\"\n[check]\nchecksums = \"all\"\n"
    );
    std::fs::write(&path, text).unwrap();
    ConfigFile::load(&path).and_then(|config| config.check()).unwrap_or_else(|error| panic!("{error}"))
}

fn succeed(config: &RunConfig, watch: &mut dyn FnMut(&RunEvent)) -> RunOutcome {
    let outcome = launcher().run(config, watch).unwrap_or_else(|error| panic!("{error}"));
    assert!(outcome.is_success(), "{outcome:#?}");
    outcome
}

fn a_front_end_in_c_pushes_fragments() {
    let folder = tempfile::tempdir().unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let program = folder.path().join("front-end");
    let mut cc = Command::new("cc");
    cc.args(["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-I"])
        .arg(root.join("crates/front-end/include"));
    cc.arg(root.join("examples/8-front-end/front-end.c")).arg("-o").arg(&program);
    assert!(cc.status().expect("run cc").success(), "cc cannot compile the front end");

    let name = format!("c-{}", std::process::id());
    let config = config(folder.path(), &name, 3000, "");
    let mut front_end = None;
    let outcome = succeed(&config, &mut |event| {
        if matches!(event, RunEvent::Started) {
            let started = Command::new(&program).args([&name, "3000"]).stdout(Stdio::piped()).spawn();
            front_end = Some(started.expect("it was compiled"));
        }
    });
    let output = front_end.expect("the run started").wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.starts_with("3000 events of 2 sources pushed"), "{text}");
    assert_eq!(outcome.summary.as_ref().unwrap().built.events, 3000);
    let list = std::fs::read_to_string(&outcome.sinks[0].1).unwrap();
    // Both fragments of every event are intact.
    assert!(list.lines().count() == 3000 && list.lines().all(|line| line.split(' ').nth(1) == Some("2")));
    let received: Vec<_> = outcome.sources.iter().map(|source| (source.source, source.received)).collect();
    assert_eq!(received, [(0x300, 3000), (0x301, 3000)]);
}

fn a_front_end_is_told_to_wait_and_nothing_is_lost() {
    let folder = tempfile::tempdir().unwrap();
    let name = format!("busy-{}", std::process::id());
    // Room for 32 events of each source: the front end is faster than the run starts.
    let ring = "size = 4096\nbuffer_events = 32\ngive_up_ms = 20000";
    let config = config(folder.path(), &name, 2000, ring);
    let pushing = std::thread::spawn(move || {
        let mut front_end = FrontEnd::connect(&name, Duration::from_secs(30)).unwrap();
        for event in 0..2000u64 {
            for source in 0x300..0x302 {
                assert_eq!(front_end.push_waiting(source, event, &event.to_le_bytes()), Push::Accepted);
            }
        }
    });
    let outcome = succeed(&config, &mut |_| {});
    pushing.join().unwrap();
    assert_eq!(outcome.summary.as_ref().unwrap().built.events, 2000);
    let refused: u64 = outcome.sources.iter().map(|source| source.refused).sum();
    let dead: Duration = outcome.sources.iter().map(|source| source.dead_time).sum();
    assert!(refused > 0 && dead > Duration::ZERO, "{:?}", outcome.sources);
    assert!(outcome.sources.iter().all(|source| source.lost + source.overflow + source.invalid == 0));
}

fn a_front_end_beyond_the_limit_gets_the_next_place() {
    let folder = tempfile::tempdir().unwrap();
    let name = format!("many-{}", std::process::id());
    let config = config(folder.path(), &name, 32, "size = 4096\ngive_up_ms = 20000");
    let pushing = std::thread::spawn(move || {
        let connect = |timeout| FrontEnd::connect(&name, timeout);
        let long = Duration::from_secs(30);
        let mut idle: Vec<FrontEnd> = (0..64).map(|_| connect(long).unwrap()).collect();
        assert!(matches!(connect(Duration::from_millis(1)), Err(ConnectError::TimedOut(_))));
        drop(idle.pop());
        let mut last = connect(long).unwrap();
        for event in 0..32u64 {
            for source in 0x300..0x302 {
                assert_eq!(last.push_waiting(source, event, &event.to_le_bytes()), Push::Accepted);
            }
        }
    });
    let outcome = succeed(&config, &mut |_| {});
    pushing.join().unwrap();
    assert_eq!(outcome.summary.as_ref().unwrap().built.events, 32);
}
