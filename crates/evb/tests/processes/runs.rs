//! Runs without failures of processes.

use crate::example;
use crate::input::{TestInputs, launcher};
use millstream_evb::config::RunConfig;
use millstream_evb::core::summary::Counts;
use millstream_evb::core::{StopCause, Unit};
use millstream_evb::process::RunOutcome;
use millstream_evb::process::launcher::{self, RunCommand, RunEvent, RunProcess};
use std::ops::ControlFlow;

/// Tests by name.
pub(crate) const TESTS: &[(&str, fn())] = &[
    ("camera_events_are_built_decided_and_stored", camera_events_are_built_decided_and_stored),
    ("the_example_runs", the_example_runs),
    ("a_replay_repeats_the_decisions", a_replay_repeats_the_decisions),
    ("any_batch_size_and_landing_builds_all_events", any_batch_size_and_landing_builds_all_events),
    (
        "missing_and_corrupt_fragments_are_accounted_by_cause",
        missing_and_corrupt_fragments_are_accounted_by_cause,
    ),
    (
        "a_source_with_too_many_corrupt_fragments_fails_the_run",
        a_source_with_too_many_corrupt_fragments_fails_the_run,
    ),
    ("an_input_that_is_truncated_is_named", an_input_that_is_truncated_is_named),
    ("events_are_stored_without_a_kernel_when_asked_for", events_are_stored_without_a_kernel_when_asked_for),
    ("a_function_for_events_decides_per_event", a_function_for_events_decides_per_event),
    ("a_run_waits_for_its_start_and_pauses", a_run_waits_for_its_start_and_pauses),
    ("a_wrong_decision_fails_the_run", a_wrong_decision_fails_the_run),
    ("lines_of_standard_error_are_forwarded_or_counted", lines_of_standard_error_are_forwarded_or_counted),
];

const CLUSTER7: &str = "kernel = \"cluster7\"\npatches = \"patches.csv\"";
const REFERENCE: &str = "[check]\nreference_decisions = \"decisions.mfs\"\n";

pub(crate) fn run(config: &RunConfig) -> RunOutcome {
    launcher().run(config, &mut |_| {}).unwrap_or_else(|error| panic!("{error}"))
}

/// A run that must succeed.
fn succeed(config: &RunConfig) -> RunOutcome {
    let outcome = run(config);
    assert!(outcome.is_success(), "{outcome:#?}");
    outcome
}

fn camera_events_are_built_decided_and_stored() {
    let inputs = TestInputs::camera();
    let rest = format!("[output]\ndirectory = \"out\"\n{REFERENCE}");
    let config = inputs.config(3, &["card", "card"], "batch = 2", CLUSTER7, &rest);
    let outcome = succeed(&config);
    let summary = outcome.summary.as_ref().unwrap();
    assert_eq!(summary.built, Counts { events: 32, fragments: 960 });
    assert_eq!((summary.accepted, summary.read.bytes.0), (30, 5_068_800));
    let statistics: Vec<_> = outcome.builders.iter().flatten().collect();
    assert_eq!(statistics.iter().map(|unit| unit.comparison.equal).sum::<u64>(), 691_200);
    assert_eq!(statistics.iter().map(|unit| unit.decisions_set).sum::<u64>(), 56);

    assert_eq!(outcome.sinks.len(), 2);
    let lists = outcome.sinks.iter().map(|(_, path)| std::fs::read_to_string(path).unwrap());
    let lists: Vec<String> = lists.collect();
    let mut numbers = Vec::new();
    for line in lists.iter().flat_map(|list| list.lines()) {
        let words: Vec<u64> = line.split(' ').map(|word| word.parse().unwrap()).collect();
        // All 30 fragments as they were recorded, and at least one decision.
        assert_eq!((words[1], words[2]), (30, 158_400));
        assert!(words[3] > 0);
        numbers.push(words[0]);
    }
    numbers.sort_unstable();
    let quiet = [1_027_892, 1_027_909];
    let expected: Vec<u64> = (1_027_888..1_027_920).filter(|event| !quiet.contains(event)).collect();
    assert_eq!(numbers, expected);
}

fn the_example_runs() {
    let inputs = TestInputs::camera();
    inputs.config(1, &["host"], "batch = 32", "", "");
    assert!(example::run(&inputs.folder.path().join("run.toml")).unwrap());
}

fn a_replay_repeats_the_decisions() {
    let inputs = TestInputs::camera();
    // 5 does not divide 32: batches go past the end of the file.
    for verify in ["true", "false"] {
        let card = format!("{CLUSTER7}\nverify = {verify}");
        let config = inputs.config(3, &["card", "card"], "batch = 5\nreplay = 20", &card, REFERENCE);
        let outcome = succeed(&config);
        let summary = outcome.summary.unwrap();
        assert_eq!((summary.built.events, summary.accepted), (640, 600));
        let equal: u64 = outcome.builders.iter().flatten().map(|unit| unit.comparison.equal).sum();
        assert_eq!(equal, 20 * 691_200);
        assert!(!outcome.samples.is_empty() && outcome.elapsed.is_some());
    }
}

fn any_batch_size_and_landing_builds_all_events() {
    let inputs = TestInputs::camera();
    for batch in [1, 7, 32, 100] {
        let run = format!("batch = {batch}\nreplay = 10\nwindow = 2");
        for (builders, card) in [
            (&["host"][..], ""),
            (&["card", "host", "host"], "kernel = \"none\""),
            (&["card", "card"], "kernel = \"verify\""),
        ] {
            let summary = succeed(&inputs.config(3, builders, &run, card, "")).summary.unwrap();
            assert_eq!(summary.built, Counts { events: 320, fragments: 9600 });
        }
    }
}

fn missing_and_corrupt_fragments_are_accounted_by_cause() {
    // Source 101 misses every tenth event, source 3 misses events 40 to 49.
    let is_there = |id, event| !(id == 101 && event % 10 == 0 || id == 3 && (40..50).contains(&event));
    let inputs = TestInputs::made(2, 4, 0..100, is_there);
    inputs.damage(1, 0, 55);
    inputs.damage(2, 102, 40);
    for builders in [&["card", "card"][..], &["card"]] {
        let config = inputs.config(2, builders, "batch = 16\nreplay = 3", "kernel = \"verify\"", "");
        let summary = succeed(&config).summary.unwrap();
        // Events 0, 10, … 90 and 40 to 49; event 40 is corrupt as well, and lacks two fragments.
        assert_eq!(summary.discarded.corrupt, Counts { events: 3 * 2, fragments: 3 * (8 + 6) });
        assert_eq!(summary.incomplete.missing_at_source, Counts { events: 3 * 18, fragments: 3 * 18 * 7 });
        assert_eq!(summary.built, Counts { events: 3 * 80, fragments: 3 * 80 * 8 });
        assert_eq!(summary.fragments_read(), 3 * (800 - 20));
    }
    // Without a kernel, corruption is found where the processor compares checksums: in the first of 64 batches, or in all.
    for (checksums, corrupt) in [("sample", 0), ("all", 2)] {
        let rest = format!("[check]\nchecksums = \"{checksums}\"\nmax_corrupt = 0.5\n");
        let summary = succeed(&inputs.config(2, &["host"], "batch = 16", "", &rest)).summary.unwrap();
        assert_eq!(summary.discarded.corrupt.events, corrupt);
        assert_eq!(summary.built.events, 81 - corrupt.min(1));
    }
}

fn a_source_with_too_many_corrupt_fragments_fails_the_run() {
    let inputs = TestInputs::made(2, 4, 0..100, |_, _| true);
    (10..13).for_each(|event| inputs.damage(2, 102, event));
    for (builders, kernel, checked) in [
        (&["card", "card"][..], "kernel = \"verify\"", 300),
        (&["host"], "", 300),
        (&["host", "card"], "kernel = \"verify\"", 300),
    ] {
        let with = |most: &str| {
            let rest = format!("[check]\nchecksums = \"all\"\n{most}\n");
            run(&inputs.config(2, builders, "batch = 16\nreplay = 3", kernel, &rest))
        };
        let outcome = with("");
        let found: Vec<_> = outcome.too_corrupt();
        assert_eq!(found.len(), 1, "{outcome:#?}");
        assert_eq!((found[0].source, found[0].checked, found[0].corrupt), (102, checked, 9));
        assert!(outcome.summary.as_ref().unwrap().is_success() && !outcome.is_success());
        assert!(with("max_corrupt = 0.03").is_success());
        assert!(!with("max_corrupt = 0.0299").is_success());
    }
}

fn an_input_that_is_truncated_is_named() {
    let inputs = TestInputs::made(1, 4, 0..2000, |_, _| true);
    let path = inputs.folder.path().join("crate1.mfs");
    let config = inputs.config(1, &["host"], "batch = 16\nreplay = 1000000", "", "");
    let mut truncated = false;
    let outcome = launcher().run(&config, &mut |event| {
        if matches!(event, RunEvent::Progress(sample) if sample.done.batches > 0) && !truncated {
            truncated = true;
            std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(4096).unwrap();
        }
    });
    let outcome = outcome.unwrap_or_else(|error| panic!("{error}"));
    let reasons: Vec<_> = outcome.failures.iter().map(|failure| failure.reason.clone()).collect();
    assert!(
        reasons.iter().any(|reason| reason.contains("crate1.mfs") && reason.contains("truncated")),
        "{reasons:?}"
    );
    assert!(outcome.summary.as_ref().unwrap().is_balanced());
}

fn events_are_stored_without_a_kernel_when_asked_for() {
    // Source 3 lacks events 40 to 49.
    let inputs = TestInputs::made(2, 4, 0..100, |id, event| !(id == 3 && (40..50).contains(&event)));
    inputs.damage(1, 0, 55);
    let stored = |landing: &str, kernel: &str, events: &str| {
        let rest = format!("[output]\ndirectory = \"out\"\nevents = \"{events}\"\n");
        let config = inputs.config(2, &[landing], "batch = 16", kernel, &rest);
        assert_eq!(config.warnings().len(), usize::from(events == "accepted"));
        let outcome = succeed(&config);
        std::fs::read_to_string(&outcome.sinks[0].1).unwrap().lines().count()
    };
    assert_eq!(stored("host", "", "accepted"), 0);
    assert_eq!(stored("host", "", "built"), 90);
    assert_eq!(stored("host", "", "all"), 100);
    assert_eq!(stored("card", "kernel = \"verify\"", "built"), 89);
    assert_eq!(stored("card", "kernel = \"verify\"", "all"), 100);
}

fn a_function_for_events_decides_per_event() {
    // Source 3 lacks events 40 to 49; the payload of source 0 is corrupt in event 55.
    let inputs = TestInputs::made(2, 4, 0..100, |id, event| !(id == 3 && (40..50).contains(&event)));
    inputs.damage(1, 0, 55);
    std::fs::write(inputs.folder.path().join("filter.wat"), crate::function::IMAGE).unwrap();
    let card = "kernel = \"wasm\"\nmodule = \"filter.wat\"\narguments = [7]";
    let rest = "[output]\ndirectory = \"out\"\n";
    let config = inputs.config(2, &["card", "card"], "batch = 16", card, rest);
    assert!(config.warnings().is_empty());
    let outcome = succeed(&config);
    let summary = outcome.summary.as_ref().unwrap();
    assert_eq!(summary.discarded.corrupt.events, 1);
    assert_eq!(summary.incomplete.missing_at_source.events, 10);
    // 0, 7, … 98 without 42 and 49, which are incomplete.
    assert_eq!((summary.built.events, summary.accepted), (89, 13));
    let mut stored: Vec<u64> = Vec::new();
    for (_, path) in &outcome.sinks {
        let list = std::fs::read_to_string(path).unwrap();
        stored.extend(list.lines().map(|line| line.split(' ').next().unwrap().parse::<u64>().unwrap()));
    }
    stored.sort_unstable();
    let expected = (0..100).filter(|event| event % 7 == 0 || (40..50).contains(event) || *event == 55);
    assert_eq!(stored, expected.collect::<Vec<_>>());
}

/// Starts paused, is resumed, paused, resumed and stopped; each step waits for the effect of the last.
fn a_run_waits_for_its_start_and_pauses() {
    let inputs = TestInputs::camera();
    let mut config = inputs.config(3, &["host"], "batch = 8\nreplay = 1000000", "", "");
    config.starts_paused = true;
    let (commands, receiver) = launcher::commands();
    let mut steps = [RunCommand::Resume, RunCommand::Pause, RunCommand::Resume, RunCommand::Stop].into_iter();
    let (mut paused, mut is_commanded) = (true, false);
    let (mut assigned, mut unchanged) = (0, 0);
    let outcome = launcher().run_with_commands(&config, receiver, &mut |event| {
        match event {
            // A command may have passed a sample that is still in the pipe.
            RunEvent::Paused(now) => (paused, is_commanded, unchanged) = (*now, false, 0),
            RunEvent::Progress(sample) => {
                unchanged = if sample.assigned == assigned { unchanged + 1 } else { 0 };
                let has_effect = if paused { unchanged >= 3 } else { sample.assigned > assigned };
                if has_effect && !is_commanded {
                    steps.next().into_iter().for_each(|command| commands.send(command));
                    is_commanded = true;
                }
                assigned = sample.assigned;
            }
            _ => {}
        }
        ControlFlow::Continue(())
    });
    let outcome = outcome.unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(steps.next(), None);
    let summary = outcome.summary.as_ref().expect("the run had started");
    assert_eq!((summary.cause, summary.lost.len()), (StopCause::Requested, 0));
    assert!(summary.is_balanced() && summary.built.events > 0, "{summary}");
}

fn a_wrong_decision_fails_the_run() {
    let inputs = TestInputs::camera();
    let card = format!("{CLUSTER7}\nthreshold = 335");
    let outcome = run(&inputs.config(3, &["card"], "batch = 8", &card, REFERENCE));
    let comparison = outcome.builders[0].as_ref().unwrap().comparison;
    assert!(comparison.compared == 691_200 && comparison.equal < 691_200, "{comparison:?}");
    assert!(outcome.summary.as_ref().unwrap().is_success() && !outcome.is_success());
}

/// Also those of processes that succeed.
fn lines_of_standard_error_are_forwarded_or_counted() {
    const LINES: u64 = 1000;
    let inputs = TestInputs::camera();
    let config = inputs.config(3, &["host"], "batch = 8", "", "");
    let noise = format!("yes noise | head -n {LINES} >&2; printf '\\377\\n' >&2");
    let script = format!("case $2 in readout) {noise};; esac; exec \"$0\" \"$@\"");
    let mut launcher = launcher();
    let program = std::mem::replace(&mut launcher.program, "/bin/sh".into());
    launcher.arguments.splice(0..0, ["-c".into(), script.into(), program.into()]);
    let (mut forwarded, mut dropped) = (0, 0);
    let outcome = launcher.run(&config, &mut |event| {
        if let RunEvent::ErrorLine { process: RunProcess::Unit(Unit::Readout(_)), line } = event {
            match line.strip_suffix(" further lines of its standard error were dropped") {
                Some(lines) => dropped += lines.parse::<u64>().unwrap(),
                None => forwarded += 1,
            }
        }
    });
    assert!(outcome.unwrap_or_else(|error| panic!("{error}")).is_success());
    assert!(forwarded >= 3 * 100 && forwarded + dropped == 3 * (LINES + 1), "{forwarded} + {dropped}");
}
