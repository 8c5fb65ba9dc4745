//! Runs whose manager is lost, with a standby manager.

use crate::faults::pid;
use crate::recovery::{EVENTS, SLOW, STALL_MS, TestRun, builder, readout};
use millstream_evb::core::summary::Counts;
use millstream_evb::core::{BuIndex, RuIndex, RunSummary, StopCause, Term, Unit};
use millstream_evb::process::RunOutcome;
use millstream_evb::process::launcher::{RunCommand, RunEvent, RunProcess, commands};
use rustix::process::{Pid, Signal, kill_process};
use std::time::Duration;

/// Tests by name.
pub(crate) const TESTS: &[(&str, fn())] = &[
    ("a_standby_manager_takes_over_from_a_killed_one", a_standby_manager_takes_over_from_a_killed_one),
    (
        "a_stopped_manager_is_replaced_and_changes_nothing_when_it_continues",
        a_stopped_manager_is_replaced_and_changes_nothing_when_it_continues,
    ),
    ("a_manager_that_is_stopped_for_ever_is_replaced", a_manager_that_is_stopped_for_ever_is_replaced),
    ("a_run_that_is_paused_during_a_takeover_says_so", a_run_that_is_paused_during_a_takeover_says_so),
    ("the_losses_before_a_takeover_are_accounted_for", the_losses_before_a_takeover_are_accounted_for),
    ("a_unit_is_lost_and_joins_again_after_a_takeover", a_unit_is_lost_and_joins_again_after_a_takeover),
    ("a_run_needs_no_standby_manager", a_run_needs_no_standby_manager),
    ("without_its_manager_and_the_standby_a_run_stops", without_its_manager_and_the_standby_a_run_stops),
    ("the_second_manager_has_no_standby", the_second_manager_has_no_standby),
    (
        "a_builder_unit_that_is_lost_with_the_manager_is_replaced",
        a_builder_unit_that_is_lost_with_the_manager_is_replaced,
    ),
    (
        "a_builder_unit_that_is_stopped_when_the_manager_is_lost_is_replaced",
        a_builder_unit_that_is_stopped_when_the_manager_is_lost_is_replaced,
    ),
    (
        "events_lack_the_sources_of_a_readout_unit_that_is_lost_with_the_manager",
        events_lack_the_sources_of_a_readout_unit_that_is_lost_with_the_manager,
    ),
    (
        "a_unit_that_the_run_needs_ends_it_when_it_is_lost_with_the_manager",
        a_unit_that_the_run_needs_ends_it_when_it_is_lost_with_the_manager,
    ),
    ("each_manager_is_replaced_while_restarts_are_left", each_manager_is_replaced_while_restarts_are_left),
    ("managers_that_are_stopped_for_ever_are_replaced", managers_that_are_stopped_for_ever_are_replaced),
    ("a_lost_standby_manager_is_replaced_and_takes_over", a_lost_standby_manager_is_replaced_and_takes_over),
    (
        "a_builder_unit_that_is_lost_with_the_second_manager_is_replaced",
        a_builder_unit_that_is_lost_with_the_second_manager_is_replaced,
    ),
    (
        "a_unit_that_joined_the_second_manager_follows_the_third",
        a_unit_that_joined_the_second_manager_follows_the_third,
    ),
];

const MANAGER: RunProcess = RunProcess::Unit(Unit::Manager);
/// The standby manager of the start, which is the second manager.
const STANDBY: RunProcess = RunProcess::Standby(0);
const TAKES_OVER: &str = "standby = true";

/// Sends signals, each at its time after the first batches are done. The invariants hold and nothing is left.
fn run(test: &TestRun, signals: Vec<(RunProcess, Signal, u64)>) -> (RunSummary, RunOutcome, bool) {
    run_and(test, signals, &mut |_| {})
}

/// As [`run`]; `after` gets the process of the first manager when the standby manager has taken over.
fn run_and(
    test: &TestRun,
    signals: Vec<(RunProcess, Signal, u64)>,
    after: &mut dyn FnMut(Pid),
) -> (RunSummary, RunOutcome, bool) {
    let mut processes = Vec::new();
    let (mut signals, mut took_over) = (Some(signals), false);
    let outcome = test.launch(&mut |event| match event {
        RunEvent::Spawned { process, pid } => processes.push((process.clone(), *pid)),
        RunEvent::TookOver { .. } => {
            took_over = true;
            let manager = processes.iter().find(|(process, _)| *process == MANAGER);
            after(pid(manager.expect("it was started").1));
        }
        RunEvent::Progress(sample) if sample.done.batches > 0 => {
            let Some(signals) = signals.take() else { return };
            let place = |victim: &RunProcess| {
                let found = processes.iter().find(|(process, _)| process == victim);
                pid(found.expect("it was started").1)
            };
            let signals: Vec<_> =
                signals.into_iter().map(|(victim, signal, at)| (place(&victim), signal, at)).collect();
            std::thread::spawn(move || {
                let mut passed = 0;
                for (process, signal, at) in signals {
                    std::thread::sleep(Duration::from_millis(at - passed));
                    passed = at;
                    // A process that has ended needs no signal.
                    let _ = kill_process(process, signal);
                }
            });
        }
        _ => {}
    });
    assert!(signals.is_none(), "the run ended before its first batch: {outcome:#?}");
    test.assert_nothing_left(&processes);
    let summary = outcome.summary.clone().expect("the run had started");
    assert!(summary.is_balanced(), "{summary}\n{outcome:#?}");
    (summary, outcome, took_over)
}

/// The manager's losses cost no event, and the run succeeds.
fn assert_went_on(test: &TestRun, signals: Vec<(RunProcess, Signal, u64)>) -> RunOutcome {
    assert_went_on_and(test, signals, &mut |_| {})
}

/// As [`assert_went_on`], with [`run_and`].
fn assert_went_on_and(
    test: &TestRun,
    signals: Vec<(RunProcess, Signal, u64)>,
    after: &mut dyn FnMut(Pid),
) -> RunOutcome {
    let (summary, outcome, took_over) = run_and(test, signals, after);
    assert!(took_over && outcome.is_success(), "{summary}\n{outcome:#?}");
    assert_eq!((summary.cause, summary.assigned_events), (StopCause::EndOfRun, Some(EVENTS)), "{summary}");
    assert_eq!(summary.recovered, [Unit::Manager], "{summary}");
    assert_eq!((summary.rebuilt, summary.duplicate), (Counts::default(), Counts::default()), "{summary}");
    assert_eq!(summary.built.events, EVENTS, "{summary}");
    assert!(outcome.failures.iter().all(|failure| failure.is_recovered), "{outcome:#?}");
    test.assert_all_stored("out");
    outcome
}

fn a_standby_manager_takes_over_from_a_killed_one() {
    for landing in [["host", "host"], ["card", "card"]] {
        let test = TestRun::new(&landing, 5000, TAKES_OVER, "out");
        let outcome = assert_went_on(&test, vec![(MANAGER, Signal::KILL, 0)]);
        assert!(outcome.elapsed.is_some(), "{outcome:#?}");
    }
}

fn a_stopped_manager_is_replaced_and_changes_nothing_when_it_continues() {
    let test = TestRun::new(&["host", "host"], STALL_MS, TAKES_OVER, "out");
    // The launcher kills the stopped manager 4.5 s after the takeover.
    let outcome = assert_went_on_and(&test, vec![(MANAGER, Signal::STOP, 0)], &mut |manager| {
        let _ = kill_process(manager, Signal::CONT);
    });
    let ended = outcome.failures.iter().find(|failure| failure.process == MANAGER);
    assert!(ended.is_some_and(|failure| failure.status.code().is_some()), "{outcome:#?}");
}

fn a_manager_that_is_stopped_for_ever_is_replaced() {
    let test = TestRun::new(&["host", "host"], STALL_MS, TAKES_OVER, "out");
    let outcome = assert_went_on(&test, vec![(MANAGER, Signal::STOP, 0)]);
    let killed = outcome.failures.iter().find(|failure| failure.process == MANAGER);
    assert!(killed.is_some_and(|failure| failure.reason.contains("did not respond")), "{outcome:#?}");
}

fn a_run_that_is_paused_during_a_takeover_says_so() {
    let test = TestRun::new(&["host", "host"], 5000, TAKES_OVER, "out");
    let (commands, receiver) = commands();
    let (mut manager, mut stopped) = (None, None);
    let (mut is_killed, mut samples, mut paused) = (false, 0, Vec::new());
    let outcome = test.launch_with(receiver, &mut |event| match event {
        RunEvent::Spawned { process, pid: id } if *process == MANAGER => manager = Some(pid(*id)),
        RunEvent::Spawned { process, pid: id } if *process == builder(1) => stopped = Some(pid(*id)),
        RunEvent::Progress(sample) if !is_killed && sample.done.batches > 0 => {
            is_killed = true;
            // The takeover waits for this unit.
            kill_process(stopped.expect("it was started"), Signal::STOP).expect("it runs");
            kill_process(manager.expect("it was started"), Signal::KILL).expect("it runs");
        }
        RunEvent::Ended { process } if *process == MANAGER => {
            commands.send(RunCommand::Pause);
            let stopped = stopped.expect("it was started");
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(500));
                let _ = kill_process(stopped, Signal::CONT);
            });
        }
        RunEvent::Paused(is_paused) => {
            paused.push(*is_paused);
            if *is_paused {
                commands.send(RunCommand::Resume);
            }
        }
        // Paused without a word, it would not end.
        RunEvent::Progress(_) if is_killed && paused.is_empty() => {
            samples += 1;
            if samples > 100 {
                commands.send(RunCommand::Stop);
            }
        }
        _ => {}
    });
    assert_eq!(paused, [true, false], "{outcome:#?}");
    assert!(outcome.is_success(), "{outcome:#?}");
    test.assert_all_stored("out");
}

fn the_losses_before_a_takeover_are_accounted_for() {
    let recovery = format!("{TAKES_OVER}\nreadout_loss = \"deliver\"");
    let test = TestRun::new(&["host", "host"], 5000, &recovery, "out").with_rate(SLOW);
    let signals =
        vec![(builder(1), Signal::KILL, 0), (readout(1), Signal::KILL, 1000), (MANAGER, Signal::KILL, 2000)];
    let (summary, outcome, took_over) = run(&test, signals);
    assert!(took_over && outcome.is_success(), "{summary}\n{outcome:#?}");
    let lost = [builder(1), readout(1), MANAGER].map(|process| match process {
        RunProcess::Unit(unit) => unit,
        other => panic!("{other:?} is no unit"),
    });
    assert_eq!(summary.recovered, lost, "{summary}");
    assert_eq!(summary.duplicate, summary.rebuilt, "{summary}");
    assert_eq!(summary.built.events + summary.incomplete.readout_lost.events, EVENTS, "{summary}");
    assert!(summary.incomplete.readout_lost.events > 0, "{summary}");
    assert!(outcome.totals[1].is_some_and(|totals| totals.batches > 0), "{outcome:#?}");
}

fn a_unit_is_lost_and_joins_again_after_a_takeover() {
    let steps = vec![(When::Progress, kill(MANAGER)), (When::StandbyJoined, kill(builder(1)))];
    let (summary, outcome, _) = run_steps(with_restarts(5000, 1), steps);
    assert_eq!(summary.recovered, [Unit::Manager, Unit::Builder(BuIndex(1))], "{summary}");
    assert_eq!(summary.joined, [Unit::Builder(BuIndex(3))], "{summary}\n{outcome:#?}");
}

fn a_run_needs_no_standby_manager() {
    let test = TestRun::new(&["host", "host"], 5000, TAKES_OVER, "out");
    for signal in [Signal::KILL, Signal::STOP] {
        let (summary, outcome, took_over) = run(&test, vec![(STANDBY, signal, 0)]);
        assert!(!took_over && outcome.is_success(), "{summary}\n{outcome:#?}");
        assert_eq!((summary.recovered.len(), summary.built.events), (0, EVENTS), "{summary}");
        test.assert_all_stored("out");
        test.remove("out");
    }
}

fn assert_stopped(test: &TestRun, signals: Vec<(RunProcess, Signal, u64)>) -> RunSummary {
    let (summary, outcome, _) = run(test, signals);
    assert!(!outcome.is_success(), "{summary}\n{outcome:#?}");
    assert_eq!(summary.cause, StopCause::Lost(Unit::Manager), "{summary}");
    assert!(summary.built.events > 0 && summary.built.events < EVENTS, "{summary}");
    summary
}

fn without_its_manager_and_the_standby_a_run_stops() {
    let test = TestRun::new(&["host", "host"], 5000, TAKES_OVER, "out").with_rate(SLOW);
    let summary = assert_stopped(&test, vec![(STANDBY, Signal::KILL, 0), (MANAGER, Signal::KILL, 300)]);
    assert_eq!(summary.lost, [Unit::Manager], "{summary}");
}

fn the_second_manager_has_no_standby() {
    let test = TestRun::new(&["host", "host"], 5000, TAKES_OVER, "out").with_rate(SLOW);
    assert_stopped(&test, vec![(MANAGER, Signal::KILL, 0), (STANDBY, Signal::KILL, 500)]);
}

/// The stopped manager does not notice that the unit ends.
fn killed_with_the_manager(victim: RunProcess) -> Vec<(RunProcess, Signal, u64)> {
    vec![(MANAGER, Signal::STOP, 0), (victim, Signal::KILL, 50), (MANAGER, Signal::KILL, 100)]
}

/// Builder unit 1 and the manager are lost, and no event is.
fn assert_replaced(test: &TestRun, signals: Vec<(RunProcess, Signal, u64)>) {
    let (summary, outcome, took_over) = run(test, signals);
    assert!(took_over && outcome.is_success(), "{summary}\n{outcome:#?}");
    assert_eq!(summary.recovered, [Unit::Builder(BuIndex(1)), Unit::Manager], "{summary}");
    assert_eq!((summary.built.events, summary.duplicate), (EVENTS, summary.rebuilt), "{summary}");
    assert!(outcome.totals[1].is_some_and(|totals| totals.batches > 0), "{outcome:#?}");
    test.assert_all_stored("out");
}

fn a_builder_unit_that_is_lost_with_the_manager_is_replaced() {
    for landing in [["host", "host"], ["card", "card"]] {
        let test = TestRun::new(&landing, STALL_MS, TAKES_OVER, "out");
        assert_replaced(&test, killed_with_the_manager(builder(1)));
    }
}

fn a_builder_unit_that_is_stopped_when_the_manager_is_lost_is_replaced() {
    let recovery = format!("{TAKES_OVER}\ntakeover_timeout_ms = 6000");
    let test = TestRun::new(&["host", "host"], STALL_MS, &recovery, "out");
    assert_replaced(&test, vec![(builder(1), Signal::STOP, 0), (MANAGER, Signal::KILL, 50)]);
}

fn events_lack_the_sources_of_a_readout_unit_that_is_lost_with_the_manager() {
    let recovery = format!("{TAKES_OVER}\nreadout_loss = \"deliver\"");
    let test = TestRun::new(&["host", "host"], STALL_MS, &recovery, "out");
    let (summary, outcome, took_over) = run(&test, killed_with_the_manager(readout(1)));
    assert!(took_over && outcome.is_success(), "{summary}\n{outcome:#?}");
    assert_eq!(summary.recovered, [Unit::Readout(RuIndex(1)), Unit::Manager], "{summary}");
    assert_eq!(summary.built.events + summary.incomplete.readout_lost.events, EVENTS, "{summary}");
    assert!(summary.incomplete.readout_lost.events > 0, "{summary}");
}

fn a_unit_that_the_run_needs_ends_it_when_it_is_lost_with_the_manager() {
    let test = TestRun::new(&["host", "host"], STALL_MS, TAKES_OVER, "out");
    let summary = assert_stopped(&test, killed_with_the_manager(readout(1)));
    assert!(summary.lost.contains(&Unit::Readout(RuIndex(1))), "{summary}");
}

/// What a step waits for.
enum When {
    /// More batches are done than at the step before.
    Progress,
    /// Another standby manager can take over.
    StandbyJoined,
    /// Another unit has joined.
    Joined,
}

/// One step of a run: signals to processes, at once.
type Step = (When, Vec<(RunProcess, Signal)>);

/// Runs with one step after the other. All events are stored and nothing is left. Returns the terms of the managers that took
/// over.
fn run_steps(test: TestRun, steps: Vec<Step>) -> (RunSummary, RunOutcome, Vec<Term>) {
    // Long enough for all steps on a busy host.
    let test = test.with_rate(500);
    let (mut processes, mut terms) = (Vec::new(), Vec::new());
    let (mut steps, mut done) = (std::collections::VecDeque::from(steps), 0);
    let outcome = test.launch(&mut |event| {
        match event {
            RunEvent::Spawned { process, pid } => processes.push((process.clone(), *pid)),
            RunEvent::TookOver { term } => terms.push(*term),
            _ => {}
        }
        let is_due = match (steps.front(), event) {
            (Some((When::Progress, _)), RunEvent::Progress(sample)) => sample.done.batches > done,
            // The first one joins before the first step.
            (Some((When::StandbyJoined, _)), RunEvent::StandbyJoined)
            | (Some((When::Joined, _)), RunEvent::Joined(_)) => true,
            _ => false,
        };
        if let RunEvent::Progress(sample) = event {
            done = sample.done.batches;
        }
        if is_due && let Some((_, signals)) = steps.pop_front() {
            for (victim, signal) in signals {
                let found = processes.iter().rfind(|(process, _)| *process == victim);
                kill_process(pid(found.expect("it was started").1), signal).expect("it is there");
            }
        }
    });
    assert!(steps.is_empty(), "the run ended after {terms:?}, before {} steps: {outcome:#?}", steps.len());
    test.assert_nothing_left(&processes);
    let summary = outcome.summary.clone().expect("the run had started");
    assert!(summary.is_balanced(), "{summary}\n{outcome:#?}");
    assert!(outcome.is_success(), "{summary}\n{outcome:#?}");
    assert_eq!((summary.built.events, summary.duplicate), (EVENTS, summary.rebuilt), "{summary}");
    assert!(outcome.failures.iter().all(|failure| failure.is_recovered), "{outcome:#?}");
    test.assert_all_stored("out");
    (summary, outcome, terms)
}

fn with_restarts(timeout_ms: u64, restarts: u16) -> TestRun {
    let recovery = format!("{TAKES_OVER}\nrestarts = {restarts}");
    TestRun::new(&["host", "host"], timeout_ms, &recovery, "out")
}

fn kill(process: RunProcess) -> Vec<(RunProcess, Signal)> {
    vec![(process, Signal::KILL)]
}

fn each_manager_is_replaced_while_restarts_are_left() {
    let steps = vec![
        (When::Progress, kill(MANAGER)),
        (When::StandbyJoined, vec![]),
        (When::Progress, kill(STANDBY)),
        // At once: units connect to the standby manager before they notice that the manager is lost.
        (When::StandbyJoined, kill(RunProcess::Standby(1))),
    ];
    let (summary, outcome, terms) = run_steps(with_restarts(5000, 2), steps);
    assert_eq!(terms, [Term(2), Term(3), Term(4)], "{summary}");
    assert_eq!((summary.recovered.as_slice(), outcome.standbys), (&[Unit::Manager; 3][..], 3), "{summary}");
    assert_eq!(summary.rebuilt, Counts::default(), "{summary}");
    let report = summary.to_string();
    assert!(
        report.contains("run went on without: manager, manager (term 2), manager (term 3)\n"),
        "{report}"
    );
}

fn managers_that_are_stopped_for_ever_are_replaced() {
    let stop = |process| vec![(process, Signal::STOP)];
    let steps = vec![(When::Progress, stop(MANAGER)), (When::StandbyJoined, stop(STANDBY))];
    let (summary, outcome, terms) = run_steps(with_restarts(STALL_MS, 1), steps);
    assert_eq!(terms, [Term(2), Term(3)], "{summary}");
    assert_eq!(summary.recovered, [Unit::Manager; 2], "{summary}");
    for process in [MANAGER, STANDBY] {
        let ended = outcome.failures.iter().find(|failure| failure.process == process);
        assert!(ended.is_some_and(|failure| failure.reason.contains("did not respond")), "{outcome:#?}");
    }
}

fn a_lost_standby_manager_is_replaced_and_takes_over() {
    let steps = vec![(When::Progress, kill(STANDBY)), (When::StandbyJoined, kill(MANAGER))];
    let (summary, outcome, terms) = run_steps(with_restarts(5000, 1), steps);
    assert_eq!((terms.as_slice(), outcome.standbys), (&[Term(2)][..], 2), "{summary}");
    assert_eq!(summary.recovered, [Unit::Manager], "{summary}");
}

fn a_builder_unit_that_is_lost_with_the_second_manager_is_replaced() {
    // The stopped manager does not notice that the unit ends.
    let second = vec![(STANDBY, Signal::STOP), (builder(1), Signal::KILL), (STANDBY, Signal::KILL)];
    let steps = vec![(When::Progress, kill(MANAGER)), (When::StandbyJoined, second)];
    let (summary, _, terms) = run_steps(with_restarts(5000, 1), steps);
    assert_eq!(terms, [Term(2), Term(3)], "{summary}");
    assert_eq!(summary.recovered, [Unit::Manager, Unit::Builder(BuIndex(1)), Unit::Manager], "{summary}");
}

fn a_unit_that_joined_the_second_manager_follows_the_third() {
    let steps = vec![
        (When::Progress, kill(MANAGER)),
        (When::StandbyJoined, kill(builder(1))),
        (When::Joined, kill(STANDBY)),
    ];
    let (summary, outcome, terms) = run_steps(with_restarts(5000, 1), steps);
    assert_eq!(terms, [Term(2), Term(3)], "{summary}");
    assert_eq!(summary.recovered, [Unit::Manager, Unit::Builder(BuIndex(1)), Unit::Manager], "{summary}");
    assert_eq!(summary.joined, [Unit::Builder(BuIndex(3))], "{summary}");
    assert!(outcome.totals[3].is_some_and(|totals| totals.batches > 0), "{outcome:#?}");
}
