//! Runs in which a process is killed, stopped, or does not start.

use crate::SLOW_OUTPUT;
use crate::input::{TestInputs, launcher};
use crate::runs::run;
use millstream_evb::config::RunConfig;
use millstream_evb::core::summary::Counts;
use millstream_evb::core::{BuIndex, RuIndex, RunSummary, StopCause, Unit};
use millstream_evb::process::RunOutcome;
use millstream_evb::process::launcher::{ProcessFailure, RunEvent, RunProcess};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::ops::ControlFlow;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Tests by name.
pub(crate) const TESTS: &[(&str, fn())] = &[
    ("a_killed_readout_unit_is_accounted_for", a_killed_readout_unit_is_accounted_for),
    ("a_killed_builder_unit_is_accounted_for", a_killed_builder_unit_is_accounted_for),
    ("a_killed_card_is_accounted_for", a_killed_card_is_accounted_for),
    ("a_killed_manager_is_accounted_for", a_killed_manager_is_accounted_for),
    ("a_stopped_builder_unit_is_accounted_for", a_stopped_builder_unit_is_accounted_for),
    ("a_stopped_manager_does_not_hang_the_run", a_stopped_manager_does_not_hang_the_run),
    ("connections_that_are_no_units_are_ignored", connections_that_are_no_units_are_ignored),
    (
        "the_report_of_a_readout_unit_that_was_stopped_for_a_while_counts",
        the_report_of_a_readout_unit_that_was_stopped_for_a_while_counts,
    ),
    ("a_stop_with_slow_storage_counts_all_stored_events", a_stop_with_slow_storage_counts_all_stored_events),
    ("a_run_that_is_asked_to_stop_closes_its_account", a_run_that_is_asked_to_stop_closes_its_account),
    ("a_start_that_hangs_can_be_stopped", a_start_that_hangs_can_be_stopped),
    ("a_killed_launcher_leaves_nothing_behind", a_killed_launcher_leaves_nothing_behind),
    ("a_unit_that_does_not_come_up_is_named", a_unit_that_does_not_come_up_is_named),
    ("a_port_taken_after_the_check_is_named", a_port_taken_after_the_check_is_named),
];

/// Time that a busy machine may add to the timeouts of a run.
const SLACK: Duration = Duration::from_secs(20);

/// When all processes of a run have ended after a fault: the manager detects a late batch, waits for the reports of readout
/// units and of builder units, and the launcher kills what is left (docs/event-builder.md, Failures).
fn bound(config: &RunConfig) -> Duration {
    let plan = &config.plan;
    let detected = 3 * plan.timeout;
    let reported = 2 * plan.drain_timeout;
    let killed = 4 * plan.drain_timeout + Duration::from_millis(500);
    detected + reported + killed + SLACK
}

pub(crate) fn pid(process: u32) -> Pid {
    i32::try_from(process).ok().and_then(Pid::from_raw).expect("a process id")
}

/// Whether the process runs. A zombie does not.
pub(crate) fn is_there(process: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    status.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with('Z'))
}

/// Runs until some batches are done, sends the signal to one process, and waits for the end.
fn run_with_signal(config: &RunConfig, victim: &RunProcess, signal: Signal) -> RunOutcome {
    let mut processes = Vec::new();
    let mut signalled: Option<Instant> = None;
    let outcome = launcher().run(config, &mut |event| match event {
        RunEvent::Spawned { process, pid } => processes.push((process.clone(), *pid)),
        RunEvent::Progress(sample) if signalled.is_none() && sample.done.batches > 0 => {
            let (_, process) =
                processes.iter().find(|(process, _)| process == victim).expect("it was started");
            kill_process(pid(*process), signal).expect("it runs");
            signalled = Some(Instant::now());
        }
        _ => {}
    });
    let outcome = outcome.unwrap_or_else(|error| panic!("{error}"));
    let took = signalled.expect("the run went on for long enough").elapsed();
    assert!(took < bound(config), "{took:?}");
    assert!(processes.iter().all(|(_, process)| !is_there(*process)), "{processes:?}");
    outcome
}

/// A long run on two cards with a signal in the middle. Returns its summary, whose invariants hold. A following run
/// succeeds.
fn summary_after_signal(victim: &RunProcess, signal: Signal) -> (RunSummary, RunOutcome) {
    let inputs = TestInputs::camera();
    let kernel = "kernel = \"cluster7\"\npatches = \"patches.csv\"";
    // Without recovery, every loss ends the run.
    let rest = "[check]\nreference_decisions = \"decisions.mfs\"\n[recovery]\nbuilder_loss = \"stop\"\n";
    let with = |replay: u64| {
        let run = format!("batch = 8\nreplay = {replay}\ntimeout_ms = 3000\ndrain_timeout_ms = 1000");
        inputs.config(3, &["card", "card"], &run, kernel, rest)
    };
    let outcome = run_with_signal(&with(1_000_000), victim, signal);
    assert!(!outcome.is_success());
    let summary = outcome.summary.clone().expect("the run had started");
    assert!(summary.is_balanced(), "{summary}");
    let fates = summary.incomplete_total().fragments + summary.discarded_total().fragments;
    assert_eq!(summary.fragments_read(), summary.built.fragments + fates);
    assert!(summary.fragments_read() > 0, "{summary}");
    let next = run(&with(2));
    assert!(next.is_success(), "{next:#?}");
    (summary, outcome)
}

fn a_killed_readout_unit_is_accounted_for() {
    let unit = Unit::Readout(RuIndex(1));
    let (summary, outcome) = summary_after_signal(&RunProcess::Unit(unit), Signal::KILL);
    assert_eq!((summary.cause, summary.lost.as_slice()), (StopCause::Lost(unit), &[unit][..]), "{summary}");
    assert!(summary.read.inferred > 0 && summary.built.events > 0, "{summary}");
    // The surviving units agree with the reference decisions.
    assert!(outcome.builders.iter().flatten().all(|unit| unit.comparison.is_full()));
    assert!(outcome.failures.iter().any(|failure| failure.process == RunProcess::Unit(unit)));
}

fn a_killed_builder_unit_is_accounted_for() {
    let unit = Unit::Builder(BuIndex(0));
    let (summary, _) = summary_after_signal(&RunProcess::Unit(unit), Signal::KILL);
    assert_eq!((summary.cause, summary.lost.as_slice()), (StopCause::Lost(unit), &[unit][..]), "{summary}");
    assert!(summary.read.inferred == 0 && summary.built.events > 0, "{summary}");
}

fn a_killed_card_is_accounted_for() {
    let (summary, outcome) = summary_after_signal(&RunProcess::Card("card1".to_owned()), Signal::KILL);
    assert_eq!((summary.cause, summary.lost.len()), (StopCause::CardLost(BuIndex(1)), 0), "{summary}");
    assert!(outcome.builders[1].as_ref().is_some_and(|unit| unit.error.is_some()));
}

fn a_killed_manager_is_accounted_for() {
    let unit = Unit::Manager;
    let (summary, outcome) = summary_after_signal(&RunProcess::Unit(unit), Signal::KILL);
    assert_eq!((summary.cause, summary.lost.as_slice()), (StopCause::Lost(unit), &[unit][..]), "{summary}");
    assert!(summary.built.events > 0 && summary.assigned_events.is_none(), "{summary}");
    assert_eq!(outcome.elapsed, None);
}

fn a_stopped_builder_unit_is_accounted_for() {
    let unit = Unit::Builder(BuIndex(1));
    let (summary, _) = summary_after_signal(&RunProcess::Unit(unit), Signal::STOP);
    assert!(matches!(summary.cause, StopCause::TimedOut { by: Unit::Manager, .. }), "{summary}");
    assert_eq!(summary.lost, [unit], "{summary}");
}

fn a_stopped_manager_does_not_hang_the_run() {
    let unit = Unit::Manager;
    let (summary, outcome) = summary_after_signal(&RunProcess::Unit(unit), Signal::STOP);
    assert_eq!((summary.cause, summary.lost.as_slice()), (StopCause::Lost(unit), &[unit][..]), "{summary}");
    let failure = outcome.failures.iter().find(|failure| failure.process == RunProcess::Unit(unit));
    assert!(failure.is_some_and(|failure| failure.reason.contains("silent")), "{outcome:#?}");
}

fn connections_that_are_no_units_are_ignored() {
    let inputs = TestInputs::camera();
    let mut config = inputs.config(1, &["host"], "batch = 8\nreplay = 10000", "", "");
    config.listen = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let address = config.listen.clone();
    let (connected, connections) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let until = Instant::now() + SLACK;
        while Instant::now() < until {
            // One speaks HTTP, one is silent and stays open.
            if let Ok(mut one) = TcpStream::connect(&address)
                && let Ok(other) = TcpStream::connect(&address)
            {
                let _ = one.write_all(b"GET / HTTP/1.1\r\n\r\n");
                let _ = connected.send((one, other));
                return;
            }
        }
    });
    let outcome = run(&config);
    assert!(outcome.is_success(), "{outcome:#?}");
    assert_eq!(connections.try_iter().count(), 1, "nothing connected before the run ended");
}

fn the_report_of_a_readout_unit_that_was_stopped_for_a_while_counts() {
    let inputs = TestInputs::camera();
    let run = "batch = 8\nreplay = 1000000\ntimeout_ms = 1000\ndrain_timeout_ms = 2000";
    let config = inputs.config(3, &["host", "host"], run, "", "");
    let victim = RunProcess::Unit(Unit::Readout(RuIndex(1)));
    let mut process = None;
    let mut stopped = false;
    let outcome = launcher().run(&config, &mut |event| match event {
        RunEvent::Spawned { process: role, pid: id } if *role == victim => process = Some(pid(*id)),
        RunEvent::Progress(sample) if !stopped && sample.done.batches > 0 => {
            stopped = true;
            let process = process.expect("it was started");
            kill_process(process, Signal::STOP).expect("it runs");
            // The batch ends after 1 s, and the manager waits for reports for four more. The launcher ends a unit that does not
            // answer 8.5 s after the batch's end.
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(6000));
                let _ = kill_process(process, Signal::CONT);
            });
        }
        _ => {}
    });
    let outcome = outcome.unwrap_or_else(|error| panic!("{error}"));
    let summary = outcome.summary.as_ref().expect("the run had started");
    assert!(summary.is_balanced() && !summary.cause.is_success(), "{summary}");
    let read: Vec<u64> = outcome.readouts.iter().flatten().map(|report| report.fragments_read).collect();
    assert_eq!(read.len(), 3, "{summary}");
    assert_eq!(summary.fragments_read(), read.iter().sum::<u64>(), "{summary}");
    assert_eq!((summary.read.inferred, summary.lost.as_slice()), (0, &[][..]), "{summary}");
}

fn a_stop_with_slow_storage_counts_all_stored_events() {
    let inputs = TestInputs::camera();
    let card = "kernel = \"cluster7\"\npatches = \"patches.csv\"";
    let run = "batch = 8\nreplay = 1000000\ndrain_timeout_ms = 50";
    let rest = format!("[output]\ndirectory = \"{SLOW_OUTPUT}\"\n");
    let config = inputs.config(3, &["card"], run, card, &rest);
    let outcome = launcher().run_while(&config, &mut |event| match event {
        RunEvent::Progress(sample) if sample.done.batches > 0 => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    });
    let outcome = outcome.unwrap_or_else(|error| panic!("{error}"));
    let summary = outcome.summary.as_ref().expect("the run had started");
    assert!(summary.is_balanced() && summary.lost.is_empty(), "{summary}");
    assert_eq!(summary.discarded.builder_lost, Counts::default(), "{summary}");
    let [(_, list)] = &outcome.sinks[..] else { panic!("{outcome:#?}") };
    let lines = std::fs::read_to_string(list).unwrap().lines().count() as u64;
    assert_eq!(lines, summary.accepted, "{summary}");
    assert_eq!(outcome.builders[0].as_ref().and_then(|unit| unit.stored), Some(lines));
}

fn a_run_that_is_asked_to_stop_closes_its_account() {
    let inputs = TestInputs::camera();
    let config = inputs.config(3, &["host", "host"], "batch = 8\nreplay = 1000000", "", "");
    let outcome = launcher().run_while(&config, &mut |event| match event {
        RunEvent::Progress(sample) if sample.done.batches > 0 => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    });
    let outcome = outcome.unwrap_or_else(|error| panic!("{error}"));
    let summary = outcome.summary.as_ref().unwrap();
    assert_eq!((summary.cause, summary.lost.len()), (StopCause::Requested, 0));
    assert!(summary.is_balanced() && summary.built.events > 0, "{summary}");
    assert!(!outcome.is_success());
}

/// A program between launcher and process waits: for a password, or for a disk. First the manager's, then that of the units. The
/// configuration is longer than a pipe.
fn a_start_that_hangs_can_be_stopped() {
    let inputs = TestInputs::camera();
    let mut config = inputs.config(3, &["host", "host"], "batch = 8", "", "");
    config.builders[0].name = "b".repeat(1 << 17);
    for (hangs, spawned) in [("manager", 1), ("readout", 6)] {
        let script = format!("case $2 in {hangs}) exec sleep 1000;; *) exec \"$0\" \"$@\";; esac");
        let mut launcher = launcher();
        let program = std::mem::replace(&mut launcher.program, "/bin/sh".into());
        launcher.arguments.splice(0..0, ["-c".into(), script.into(), program.into()]);
        let mut processes = Vec::new();
        let outcome = launcher.run_while(&config, &mut |event| match event {
            RunEvent::Spawned { pid, .. } => {
                processes.push(*pid);
                ControlFlow::Continue(())
            }
            RunEvent::Waiting if processes.len() == spawned => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        });
        let outcome = outcome.unwrap_or_else(|error| panic!("{error}"));
        assert!(outcome.summary.is_none() && processes.len() == spawned, "{outcome:#?}");
        assert!(!processes.iter().any(|process| is_there(*process)), "{outcome:#?}");
        let is_manager = |failure: &&ProcessFailure| failure.process == RunProcess::Unit(Unit::Manager);
        let manager = outcome.failures.iter().find(is_manager).expect("it has not succeeded");
        let reason = if hangs == "manager" { "was killed" } else { "the run was stopped: stop requested" };
        assert!(manager.reason.contains(reason), "{manager:?}");
    }
}

fn a_killed_launcher_leaves_nothing_behind() {
    let inputs = TestInputs::camera();
    let kernel = "kernel = \"verify\"";
    inputs.config(3, &["card", "host"], "batch = 8\nreplay = 1000000", kernel, "");
    let mut launcher = Command::new(std::env::current_exe().unwrap())
        .arg("launch")
        .arg(inputs.folder.path().join("run.toml"))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(launcher.stderr.take().unwrap()).lines().map_while(Result::ok);
    let started = lines.filter_map(|line| line.strip_prefix("process ")?.split(':').next()?.parse().ok());
    // A card, the manager, three readout units and two builder units.
    let processes: Vec<u32> = started.take(7).collect();
    assert_eq!(processes.len(), 7);
    // Kills it in startup or in the run.
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    let until = Instant::now() + SLACK;
    while let Some(left) = processes.iter().find(|process| is_there(**process)) {
        assert!(Instant::now() < until, "{left} of {processes:?} is still there");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn a_unit_that_does_not_come_up_is_named() {
    let inputs = TestInputs::camera();
    let config = inputs.config(3, &["host"], "batch = 8", "", "");
    std::fs::remove_file(inputs.folder.path().join("crate2.mfs")).unwrap();
    let started = Instant::now();
    let outcome = run(&config);
    assert!(started.elapsed() < bound(&config), "{:?}", started.elapsed());
    assert!(outcome.summary.is_none() && !outcome.is_success());
    // The first failure is the cause of the others.
    let failure = &outcome.failures[0];
    assert!(
        failure.process == RunProcess::Unit(Unit::Readout(RuIndex(1)))
            && failure.reason.contains("crate2.mfs"),
        "{outcome:#?}"
    );
    let manager = outcome.failures.iter().find(|failure| failure.process == RunProcess::Unit(Unit::Manager));
    assert!(
        manager.is_some_and(|failure| failure.reason.contains("readout 1 could not start")),
        "{outcome:#?}"
    );
}

fn a_port_taken_after_the_check_is_named() {
    let inputs = TestInputs::camera();
    let mut config = inputs.config(1, &["host"], "batch = 8", "", "");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    config.listen = taken.local_addr().unwrap().to_string();
    let outcome = run(&config);
    assert!(outcome.summary.is_none());
    let failure = &outcome.failures[0];
    assert!(
        failure.process == RunProcess::Unit(Unit::Manager) && failure.reason.contains(&config.listen),
        "{failure:?}"
    );
}
