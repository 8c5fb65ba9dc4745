//! Runs that go on when a process is killed or stopped.

use crate::faults::{is_there, pid};
use crate::input::launcher;
use crate::{FAILING_OUTPUT, KILLED_OUTPUT, LATE_OUTPUT, SLOWLY_CLOSED_OUTPUT};
use millstream_evb::config::{ConfigFile, RunConfig};
use millstream_evb::core::summary::Counts;
use millstream_evb::core::{BuIndex, RuIndex, RunSummary, StopCause, Unit};
use millstream_evb::process::launcher::{CommandReceiver, RunEvent, RunProcess};
use millstream_evb::process::{Launcher, RunOutcome};
use rustix::process::{Signal, kill_process};
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Duration;
use tempfile::TempDir;

/// Tests by name.
pub(crate) const TESTS: &[(&str, fn())] = &[
    (
        "batches_of_a_killed_builder_unit_are_built_by_another",
        batches_of_a_killed_builder_unit_are_built_by_another,
    ),
    (
        "a_builder_unit_that_is_killed_after_storing_stores_nothing_twice",
        a_builder_unit_that_is_killed_after_storing_stores_nothing_twice,
    ),
    ("batches_of_a_killed_card_are_built_by_another", batches_of_a_killed_card_are_built_by_another),
    (
        "batches_that_wait_for_storage_when_the_card_is_killed_are_stored_once",
        batches_that_wait_for_storage_when_the_card_is_killed_are_stored_once,
    ),
    (
        "a_stopped_builder_unit_is_ended_and_its_batches_are_built",
        a_stopped_builder_unit_is_ended_and_its_batches_are_built,
    ),
    (
        "a_builder_unit_that_cannot_store_stores_nothing_twice",
        a_builder_unit_that_cannot_store_stores_nothing_twice,
    ),
    ("a_builder_unit_may_take_long_to_close_its_files", a_builder_unit_may_take_long_to_close_its_files),
    (
        "a_killed_wrapper_ends_its_unit_and_the_run_goes_on",
        a_killed_wrapper_ends_its_unit_and_the_run_goes_on,
    ),
    (
        "a_killed_wrapper_that_leaves_a_child_elsewhere_is_not_waited_for",
        a_killed_wrapper_that_leaves_a_child_elsewhere_is_not_waited_for,
    ),
    ("a_spare_builder_unit_takes_over", a_spare_builder_unit_takes_over),
    (
        "events_without_a_killed_readout_unit_are_delivered",
        events_without_a_killed_readout_unit_are_delivered,
    ),
    (
        "events_without_a_killed_readout_unit_are_discarded",
        events_without_a_killed_readout_unit_are_discarded,
    ),
    (
        "a_stopped_readout_unit_is_ended_and_the_run_goes_on",
        a_stopped_readout_unit_is_ended_and_the_run_goes_on,
    ),
    ("a_killed_readout_unit_joins_again", a_killed_readout_unit_joins_again),
    ("a_stopped_readout_unit_joins_again", a_stopped_readout_unit_joins_again),
    ("a_killed_builder_unit_joins_again", a_killed_builder_unit_joins_again),
    ("a_builder_unit_joins_again_with_a_new_card", a_builder_unit_joins_again_with_a_new_card),
    ("a_run_waits_for_its_only_units_to_join_again", a_run_waits_for_its_only_units_to_join_again),
    ("a_run_whose_only_builder_unit_does_not_join_stops", a_run_whose_only_builder_unit_does_not_join_stops),
    ("a_short_stop_costs_only_time", a_short_stop_costs_only_time),
    ("a_restart_that_cannot_be_started_is_left_out", a_restart_that_cannot_be_started_is_left_out),
];

pub(crate) const EVENTS: u64 = 4000;
/// Fragments of an event: two readout units with two sources each.
const SOURCES: usize = 4;

/// Timeout of runs in which a process is stopped, in milliseconds: a busy machine may leave the others without a processor for a
/// second.
pub(crate) const STALL_MS: u64 = 3000;

/// A run of two seconds or more on generated events that stores all built events in lists.
pub(crate) struct TestRun {
    folder: TempDir,
    text: String,
}

impl TestRun {
    /// `landing` has one entry for each builder unit: `host`, or `card` for one with the kernel `verify`.
    pub(crate) fn new(landing: &[&str], timeout_ms: u64, recovery: &str, output: &str) -> TestRun {
        let mut text = format!(
            "[run]\nname = \"goes-on\"\nbatch = 8\nevents = {EVENTS}\ntimeout_ms = {timeout_ms}\n\
             drain_timeout_ms = 1000\n[recovery]\n{recovery}\n\
             [output]\ndirectory = \"{output}\"\nevents = \"built\"\n"
        );
        for readout in 0..2 {
            text += &format!(
                "[[readout]]\nname = \"ru{readout}\"\n[readout.generator]\nfirst_source = {}\nsources = 2\n\
                 size = \"200B\"\nrate_hz = 2000.0\n",
                readout * 100
            );
        }
        for (index, landing) in landing.iter().enumerate() {
            text += &format!("[[builder]]\nname = \"bu{index}\"\nslots = 4\n");
            text += &match *landing {
                "card" => format!(
                    "card = \"card{index}\"\n[[card]]\nname = \"card{index}\"\nmemory = \"64MiB\"\n\
                     kernel = \"verify\"\n"
                ),
                _ => "landing = \"host\"\n".to_owned(),
            };
        }
        TestRun { folder: TempDir::new().expect("temporary folders can be made"), text }
    }

    /// Another number of readout units.
    fn with_readouts(mut self, readouts: usize) -> TestRun {
        let first = self.text.find("[[readout]]").expect("the run has readout units");
        let second = self.text[first + 1..].find("[[readout]]").map_or(self.text.len(), |at| first + 1 + at);
        let last = self.text.find("[[builder]]").expect("the run has builder units");
        assert_eq!(readouts, 1, "a run of one readout unit is made from one of two");
        self.text.replace_range(second..last, "");
        self
    }

    /// Another rate of events, in hertz.
    pub(crate) fn with_rate(mut self, rate: u32) -> TestRun {
        self.text = self.text.replace("rate_hz = 2000.0", &format!("rate_hz = {rate}.0"));
        self
    }

    /// Runs to the end.
    pub(crate) fn launch(&self, watch: &mut dyn FnMut(&RunEvent)) -> RunOutcome {
        self.launch_by(&launcher(), watch)
    }

    /// Runs to the end, with this launcher.
    fn launch_by(&self, launcher: &Launcher, watch: &mut dyn FnMut(&RunEvent)) -> RunOutcome {
        launcher.run(&self.config(), watch).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Runs to the end, under commands.
    pub(crate) fn launch_with(
        &self,
        commands: CommandReceiver,
        watch: &mut dyn FnMut(&RunEvent),
    ) -> RunOutcome {
        let outcome = launcher().run_with_commands(&self.config(), commands, &mut |event| {
            watch(event);
            ControlFlow::Continue(())
        });
        outcome.unwrap_or_else(|error| panic!("{error}"))
    }

    fn config(&self) -> RunConfig {
        let path = self.folder.path().join("run.toml");
        std::fs::write(&path, &self.text).unwrap();
        ConfigFile::load(&path).and_then(|config| config.check()).unwrap_or_else(|error| panic!("{error}"))
    }

    /// No process of the run is there.
    pub(crate) fn assert_nothing_left(&self, processes: &[(RunProcess, u32)]) {
        assert!(processes.iter().all(|(_, process)| !is_there(*process)), "{processes:?}");
    }

    /// Removes an output directory.
    pub(crate) fn remove(&self, output: &str) {
        std::fs::remove_dir_all(self.folder.path().join(output)).unwrap();
    }

    /// Sends the signal to one process in mid-run, and SIGCONT after `resume`. The invariants hold and nothing is left.
    fn run_any(
        &self,
        victim: &RunProcess,
        signal: Signal,
        resume: Option<Duration>,
    ) -> (RunSummary, RunOutcome) {
        let mut processes = Vec::new();
        let mut signalled = false;
        let outcome = self.launch(&mut |event| match event {
            RunEvent::Spawned { process, pid } => processes.push((process.clone(), *pid)),
            RunEvent::Progress(sample) if !signalled && sample.done.batches > 0 => {
                signalled = true;
                let found = processes.iter().find(|(process, _)| process == victim);
                let process = pid(found.expect("it was started").1);
                kill_process(process, signal).expect("it runs");
                if let Some(after) = resume {
                    std::thread::spawn(move || {
                        std::thread::sleep(after);
                        let _ = kill_process(process, Signal::CONT);
                    });
                }
            }
            _ => {}
        });
        self.assert_nothing_left(&processes);
        let summary = outcome.summary.clone().expect("the run had started");
        assert!(signalled && summary.is_balanced(), "{summary}\n{outcome:#?}");
        (summary, outcome)
    }

    /// As [`run_any`](Self::run_any); the run builds all events.
    fn run(&self, victim: &RunProcess, signal: Signal, resume: Option<Duration>) -> (RunSummary, RunOutcome) {
        let (summary, outcome) = self.run_any(victim, signal, resume);
        assert!(outcome.is_success(), "{summary}\n{outcome:#?}");
        assert_eq!(
            (summary.cause, summary.assigned_events),
            (StopCause::EndOfRun, Some(EVENTS)),
            "{summary}"
        );
        (summary, outcome)
    }

    /// Fragments of each stored event. No event is stored twice.
    fn stored(&self, output: &str) -> BTreeMap<u64, usize> {
        let mut stored = BTreeMap::new();
        for entry in std::fs::read_dir(self.folder.path().join(output)).unwrap() {
            let path = entry.unwrap().path();
            for line in lines(&path) {
                let words: Vec<u64> = line.split(' ').map(|word| word.parse().unwrap()).collect();
                let before = stored.insert(words[0], words[1] as usize);
                assert_eq!(before, None, "event {} is stored twice", words[0]);
            }
        }
        stored
    }

    /// Every event is stored once, with all its fragments.
    pub(crate) fn assert_all_stored(&self, output: &str) {
        let stored = self.stored(output);
        assert_eq!(stored.len() as u64, EVENTS);
        assert!(stored.values().all(|&fragments| fragments == SOURCES));
    }
}

/// The complete lines of a list; that of a killed unit may end within one.
fn lines(path: &Path) -> Vec<String> {
    let list = std::fs::read_to_string(path).unwrap();
    list.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')).map(str::to_owned).collect()
}

pub(crate) fn builder(index: u16) -> RunProcess {
    RunProcess::Unit(Unit::Builder(BuIndex(index)))
}

pub(crate) fn readout(index: u16) -> RunProcess {
    RunProcess::Unit(Unit::Readout(RuIndex(index)))
}

fn assert_rebuilt(summary: &RunSummary, lost: u16) {
    assert_eq!(summary.recovered, [Unit::Builder(BuIndex(lost))], "{summary}");
    assert_eq!(summary.built, Counts { events: EVENTS, fragments: EVENTS * SOURCES as u64 }, "{summary}");
    assert_eq!(summary.duplicate, summary.rebuilt, "{summary}");
    assert_eq!(summary.fragments_read(), EVENTS * SOURCES as u64, "{summary}");
}

fn batches_of_a_killed_builder_unit_are_built_by_another() {
    let run = TestRun::new(&["host", "host"], 5000, "", "out");
    let (summary, outcome) = run.run(&builder(1), Signal::KILL, None);
    assert_rebuilt(&summary, 1);
    assert_selected(&outcome, EVENTS);
    assert!(outcome.failures.iter().all(|failure| failure.is_recovered), "{outcome:#?}");
    run.assert_all_stored("out");
}

/// The unit's own sink kills it; the signal to the other unit does nothing.
fn a_builder_unit_that_is_killed_after_storing_stores_nothing_twice() {
    let run = TestRun::new(&["host", "host"], 5000, "", KILLED_OUTPUT);
    let (summary, outcome) = run.run(&builder(1), Signal::CONT, None);
    assert_rebuilt(&summary, 0);
    run.assert_all_stored(KILLED_OUTPUT);
    let duplicates: u64 = outcome.builders.iter().flatten().map(|unit| unit.storage.duplicates).sum();
    assert!(duplicates > 0, "{summary}");
}

fn batches_of_a_killed_card_are_built_by_another() {
    let run = TestRun::new(&["card", "card"], 5000, "", "out");
    let (summary, _) = run.run(&RunProcess::Card("card0".to_owned()), Signal::KILL, None);
    assert_rebuilt(&summary, 0);
    run.assert_all_stored("out");
}

/// The other unit gets these batches only when the unit without a card has stored them.
fn batches_that_wait_for_storage_when_the_card_is_killed_are_stored_once() {
    let run = TestRun::new(&["card", "card"], 5000, "", LATE_OUTPUT);
    let (summary, _) = run.run(&RunProcess::Card("card0".to_owned()), Signal::KILL, None);
    assert_rebuilt(&summary, 0);
    run.assert_all_stored(LATE_OUTPUT);
}

fn a_stopped_builder_unit_is_ended_and_its_batches_are_built() {
    let run = TestRun::new(&["host", "host"], STALL_MS, "", "out");
    let (summary, outcome) = run.run(&builder(1), Signal::STOP, None);
    assert_rebuilt(&summary, 1);
    let ended = outcome.failures.iter().find(|failure| failure.process == builder(1));
    assert!(ended.is_some_and(|failure| failure.reason.contains("did not respond")), "{outcome:#?}");
    run.assert_all_stored("out");
}

/// Other units get its batches while it closes its files.
fn a_builder_unit_that_cannot_store_stores_nothing_twice() {
    let run = TestRun::new(&["host", "host"], 5000, "", FAILING_OUTPUT);
    let (summary, outcome) = run.run(&builder(1), Signal::CONT, None);
    assert_rebuilt(&summary, 0);
    run.assert_all_stored(FAILING_OUTPUT);
    let failed = outcome.builders[0].as_ref().and_then(|unit| unit.error.as_deref());
    assert_eq!(failed, Some("the disk of the test is full"));
}

fn a_builder_unit_may_take_long_to_close_its_files() {
    let run = TestRun::new(&["host", "host"], 5000, "", SLOWLY_CLOSED_OUTPUT);
    let (_, outcome) = run.run(&builder(1), Signal::CONT, None);
    run.assert_all_stored(SLOWLY_CLOSED_OUTPUT);
    let stored = outcome.builders.iter().flatten().map(|unit| unit.stored.expect("its sink is closed"));
    assert_eq!(stored.sum::<u64>(), EVENTS);
}

/// Runs with each unit started by a shell, which waits for it. Kills that of builder unit 1. `start` is its command for
/// the unit. Returns the ids of the shells.
fn run_with_killed_wrapper(start: &str) -> (TestRun, RunOutcome, Vec<u32>) {
    // Units of a killed wrapper end after a second or two.
    let run = TestRun::new(&["host", "host"], 5000, "", "out").with_rate(400);
    let Launcher { program, arguments } = launcher();
    let script = format!("exec 3<&0; {start} \"$0\" \"$@\" <&3 3<&- & wait $!");
    let mut words = vec!["-c".into(), script.into(), program.into_os_string()];
    words.extend(arguments);
    let launcher = Launcher { program: "/bin/sh".into(), arguments: words };
    let mut wrappers = Vec::new();
    let mut victim = None;
    let mut is_killed = false;
    let outcome = run.launch_by(&launcher, &mut |event| match event {
        RunEvent::Spawned { process, pid } => {
            wrappers.push(*pid);
            victim = victim.or((*process == builder(1)).then_some(*pid));
        }
        RunEvent::Progress(sample) if !is_killed && sample.done.batches > 0 => {
            is_killed = true;
            kill_process(pid(victim.expect("it was started")), Signal::KILL).expect("it runs");
        }
        _ => {}
    });
    assert!(is_killed, "{outcome:#?}");
    (run, outcome, wrappers)
}

/// Processes that run in these process groups.
fn left_in(groups: &[u32]) -> Vec<u32> {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let processes = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let is_in = |process: &u32| {
        let status = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
        // State, parent and group follow the name.
        let group = status.rsplit(") ").next().and_then(|rest| rest.split(' ').nth(2)?.parse().ok());
        group.is_some_and(|group| groups.contains(&group)) && is_there(*process)
    };
    processes.filter(is_in).collect()
}

fn a_killed_wrapper_ends_its_unit_and_the_run_goes_on() {
    let (run, outcome, wrappers) = run_with_killed_wrapper("");
    let summary = outcome.summary.as_ref().expect("the run had started");
    assert!(outcome.is_success(), "{summary}\n{outcome:#?}");
    assert_rebuilt(summary, 1);
    run.assert_all_stored("out");
    assert_eq!(left_in(&wrappers), [0; 0]);
}

fn a_killed_wrapper_that_leaves_a_child_elsewhere_is_not_waited_for() {
    // The units are not in the wrappers' process groups, and go on. So does what holds standard error.
    let folder = TempDir::new().unwrap();
    let list = folder.path().join("processes");
    let sleep = format!("sh -c 'echo $$ >>{}; exec sleep 3600 >&2'", list.display());
    let (run, outcome, _) = run_with_killed_wrapper(&format!("setsid --fork {sleep}; setsid --wait"));
    for process in lines(&list) {
        let _ = kill_process(pid(process.parse().unwrap()), Signal::KILL);
    }
    assert!(outcome.failures.iter().any(|failure| failure.process == builder(1)), "{outcome:#?}");
    run.assert_all_stored("out");
}

fn a_spare_builder_unit_takes_over() {
    let run = TestRun::new(&["host", "host"], 5000, "spare_builders = 1", "out");
    let (summary, outcome) = run.run(&builder(0), Signal::KILL, None);
    assert_rebuilt(&summary, 0);
    assert!(outcome.totals[1].is_some_and(|totals| totals.batches > 0), "{outcome:#?}");
    run.assert_all_stored("out");
}

fn assert_incomplete(summary: &RunSummary) {
    assert_eq!(summary.recovered, [Unit::Readout(RuIndex(1))], "{summary}");
    let incomplete = summary.incomplete.readout_lost;
    assert_eq!(summary.built.events + incomplete.events, EVENTS, "{summary}");
    assert_eq!(incomplete.fragments, incomplete.events * SOURCES as u64 / 2, "{summary}");
    assert!(summary.built.events > 0 && incomplete.events > 0 && summary.read.inferred > 0, "{summary}");
}

fn events_without_a_killed_readout_unit_are_delivered() {
    for landing in ["host", "card"] {
        let run = TestRun::new(&[landing, landing], 5000, "readout_loss = \"deliver\"", "out");
        let (summary, _) = run.run(&readout(1), Signal::KILL, None);
        assert_incomplete(&summary);
        let stored = run.stored("out");
        assert_eq!(stored.len() as u64, EVENTS);
        let whole = stored.values().filter(|&&fragments| fragments == SOURCES).count() as u64;
        let half = stored.values().filter(|&&fragments| fragments == SOURCES / 2).count() as u64;
        assert_eq!((whole, half), (summary.built.events, summary.incomplete.readout_lost.events));
    }
}

fn events_without_a_killed_readout_unit_are_discarded() {
    for (events, has_trigger) in [("built", false), ("all", false), ("accepted", true)] {
        let mut run = TestRun::new(&["host", "host"], 5000, "readout_loss = \"discard\"", "out");
        run.text = run.text.replace("events = \"built\"", &format!("events = {events:?}"));
        if has_trigger {
            let program = std::env::current_exe().unwrap();
            let trigger = format!(
                "landing = \"host\"\n[builder.trigger]\nprogram = {program:?}\n\
                 arguments = [\"worker\", \"any\"]\nevents = \"all\"\n"
            );
            run.text = run.text.replace("landing = \"host\"\n", &trigger);
        }
        let (summary, outcome) = run.run(&readout(1), Signal::KILL, None);
        assert_incomplete(&summary);
        assert_eq!(run.stored("out").len() as u64, summary.built.events);
        assert_selected(&outcome, summary.built.events);
    }
}

/// The units that are left and those that were killed have selected this number of events.
fn assert_selected(outcome: &RunOutcome, events: u64) {
    let selected: u64 = outcome.totals.iter().flatten().map(|totals| totals.selected).sum();
    assert_eq!(selected, events, "{outcome:#?}");
}

fn a_stopped_readout_unit_is_ended_and_the_run_goes_on() {
    let run = TestRun::new(&["host", "host"], STALL_MS, "readout_loss = \"deliver\"", "out");
    let (summary, outcome) = run.run(&readout(1), Signal::STOP, None);
    assert_eq!(summary.recovered, [Unit::Readout(RuIndex(1))], "{summary}");
    assert!(outcome.failures.iter().all(|failure| failure.is_recovered), "{outcome:#?}");
    assert_eq!(run.stored("out").len() as u64, EVENTS);
}

/// A rate at which a run is long enough for units to join again on a busy machine.
pub(crate) const SLOW: u32 = 800;

/// The restarted readout unit delivers to the end of the run; only events in between lack its sources.
fn assert_joined_readout(run: &TestRun, summary: &RunSummary, lost: u16, joined: u16) {
    assert_eq!(summary.recovered, [Unit::Readout(RuIndex(lost))], "{summary}");
    assert_eq!(summary.joined, [Unit::Readout(RuIndex(joined))], "{summary}");
    let incomplete = summary.incomplete.readout_lost.events;
    assert_eq!(summary.built.events + incomplete, EVENTS, "{summary}");
    let stored = run.stored("out");
    assert_eq!(stored.len() as u64, EVENTS);
    let last = *stored.last_key_value().unwrap().1;
    let whole = stored.values().filter(|fragments| **fragments == last).count() as u64;
    assert_eq!((whole, *stored.first_key_value().unwrap().1), (summary.built.events, last), "{summary}");
    assert!(summary.read.inferred > 0 && summary.read.reported > 0, "{summary}");
}

fn a_killed_readout_unit_joins_again() {
    for landing in ["host", "card"] {
        let run = TestRun::new(&[landing, landing], 5000, "readout_loss = \"deliver\"\nrestarts = 1", "out")
            .with_rate(SLOW);
        let (summary, outcome) = run.run(&readout(1), Signal::KILL, None);
        assert_joined_readout(&run, &summary, 1, 3);
        let report = outcome.readouts[3].as_ref().expect("the restarted unit reports");
        assert!(report.fragments_read > 0, "{report:?}");
        assert!(outcome.failures.iter().all(|failure| failure.is_recovered), "{outcome:#?}");
    }
}

fn a_stopped_readout_unit_joins_again() {
    let run = TestRun::new(&["host", "host"], STALL_MS, "readout_loss = \"deliver\"\nrestarts = 1", "out");
    // Long enough for the launcher to kill the stopped process.
    let run = run.with_rate(300);
    let (summary, _) = run.run(&readout(0), Signal::STOP, None);
    assert_joined_readout(&run, &summary, 0, 2);
}

fn a_killed_builder_unit_joins_again() {
    let run = TestRun::new(&["host", "host"], 5000, "restarts = 2", "out").with_rate(SLOW);
    let (summary, outcome) = run.run(&builder(1), Signal::KILL, None);
    assert_rebuilt(&summary, 1);
    assert_eq!(summary.joined, [Unit::Builder(BuIndex(3))], "{summary}");
    assert!(outcome.totals[3].is_some_and(|totals| totals.batches > 0), "{outcome:#?}");
    assert!(outcome.totals[2].is_some_and(|totals| totals.batches == 0), "{outcome:#?}");
    run.assert_all_stored("out");
}

fn a_builder_unit_joins_again_with_a_new_card() {
    for victim in [RunProcess::Card("card1".to_owned()), builder(1)] {
        let run = TestRun::new(&["card", "card"], 5000, "restarts = 1", "out").with_rate(SLOW);
        let (summary, outcome) = run.run(&victim, Signal::KILL, None);
        assert_rebuilt(&summary, 1);
        assert_eq!(summary.joined, [Unit::Builder(BuIndex(3))], "{summary}");
        assert!(outcome.totals[3].is_some_and(|totals| totals.batches > 0), "{outcome:#?}");
        run.assert_all_stored("out");
    }
}

fn a_run_waits_for_its_only_units_to_join_again() {
    let run = TestRun::new(&["host"], 5000, "restarts = 1", "out").with_readouts(1);
    let (summary, _) = run.run(&builder(0), Signal::KILL, None);
    assert_eq!(summary.joined, [Unit::Builder(BuIndex(1))], "{summary}");
    assert_eq!(summary.built, Counts { events: EVENTS, fragments: EVENTS * SOURCES as u64 / 2 }, "{summary}");
    assert_eq!(run.stored("out").len() as u64, EVENTS);

    let run =
        TestRun::new(&["host"], 5000, "readout_loss = \"deliver\"\nrestarts = 1", "out").with_readouts(1);
    let (summary, _) = run.run(&readout(0), Signal::KILL, None);
    assert_joined_readout(&run, &summary, 0, 1);
}

fn a_run_whose_only_builder_unit_does_not_join_stops() {
    let run = TestRun::new(&["host"], 2000, "restarts = 1\njoin_timeout_ms = 1", "out");
    let (summary, outcome) = run.run_any(&builder(0), Signal::KILL, None);
    let lost = StopCause::Lost(Unit::Builder(BuIndex(0)));
    assert!(
        summary.cause == lost || matches!(summary.cause, StopCause::Unreachable { .. }),
        "{summary}\n{outcome:#?}"
    );
    assert!(summary.joined.is_empty() && !outcome.is_success(), "{summary}");
}

fn a_short_stop_costs_only_time() {
    for victim in [builder(1), readout(1), RunProcess::Unit(Unit::Manager)] {
        let run = TestRun::new(&["host", "host"], 5000, "readout_loss = \"deliver\"", "out");
        let (summary, _) = run.run(&victim, Signal::STOP, Some(Duration::from_millis(700)));
        assert_eq!((summary.recovered.len(), summary.rebuilt), (0, Counts::default()), "{summary}");
        run.assert_all_stored("out");
    }
}

/// The program of the units is gone when two of them, and the standby manager, have to be started again.
fn a_restart_that_cannot_be_started_is_left_out() {
    let run = TestRun::new(&["host", "host"], 5000, "restarts = 1\nstandby = true", "out");
    let program = run.folder.path().join("program");
    std::os::unix::fs::symlink(std::env::current_exe().unwrap(), &program).unwrap();
    let launcher = Launcher { program: program.clone(), ..launcher() };
    let mut processes = Vec::new();
    let mut killed = false;
    let outcome = run.launch_by(&launcher, &mut |event| match event {
        RunEvent::Spawned { process, pid } => processes.push((process.clone(), *pid)),
        RunEvent::Progress(sample) if !killed && sample.done.batches > 0 => {
            killed = true;
            std::fs::remove_file(&program).unwrap();
            for victim in [builder(1), RunProcess::Standby(0)] {
                let (_, process) = processes.iter().find(|(process, _)| *process == victim).unwrap();
                kill_process(pid(*process), Signal::KILL).expect("it runs");
            }
        }
        _ => {}
    });
    run.assert_nothing_left(&processes);
    let summary = outcome.summary.as_ref().expect("the run had started");
    assert!(killed && outcome.is_success(), "{summary}\n{outcome:#?}");
    assert_rebuilt(summary, 1);
    assert!(summary.joined.is_empty(), "{summary}");
    run.assert_all_stored("out");
}
