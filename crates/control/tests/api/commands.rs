//! Commands, settings and the log book.

use crate::backend::{CONFIGURATION, Test, open};
use millstream_control::Request;
use millstream_control::directory::{Directory, RunNumber};
use millstream_control::http::ServerLimits;
use millstream_control::logbook::{EntryKind, RunResult};
use millstream_control::machine::{Command, State};
use serde_json::Value;
use std::io::Write as _;
use std::time::Duration;

#[test]
fn a_run_is_started_paused_resumed_and_stopped() {
    let test = Test::new();
    assert_eq!(test.status().state, State::Idle);
    let configured = test.succeed("configure", "");
    assert_eq!(configured.state, State::Configured);
    let configuration = configured.configuration.unwrap();
    assert_eq!((configuration.name.as_str(), configuration.events), ("test", 8000));
    test.succeed("start", r#"{"operator": "vera", "comment": "first light"}"#);
    let running = test.wait(|status| status.run.as_ref().is_some_and(|run| run.progress.events_built > 0));
    assert_eq!(running.state, State::Running);
    assert_eq!(running.allowed, [Command::Pause, Command::Stop]);
    test.succeed("pause", "");
    test.wait_for(State::Paused);
    test.succeed("resume", "");
    test.wait_for(State::Running);
    test.succeed("stop", "");
    let ended = test.wait_for(State::Configured);
    let last = ended.last_run.unwrap();
    assert_eq!((last.number, last.result), (RunNumber(1), RunResult::Stopped));
    assert!(last.events > 0 && ended.run.is_none());
    let report = test.folder.path().join("control").join(last.report.unwrap());
    let report: Value = serde_json::from_slice(&std::fs::read(report).unwrap()).unwrap();
    assert_eq!(report["events"], last.events);

    let log: Value = serde_json::from_str(&test.get("/api/v1/log?last=5").body).unwrap();
    let records: Vec<_> = log["entries"].as_array().unwrap().iter().map(|entry| &entry["record"]).collect();
    assert_eq!(records, ["begin", "resume", "pause", "resume", "end"]);
    assert_eq!(log["entries"][0]["comment"], "first light");
    assert_eq!(log["entries"][0]["sha256"], configuration.sha256);
    assert_eq!(log["entries"][4]["account"]["events_built"], last.events);
    let kept = format!("control/configurations/{}.toml", configuration.sha256);
    assert_eq!(std::fs::read_to_string(test.folder.path().join(kept)).unwrap(), CONFIGURATION);
}

#[test]
fn a_prepared_run_waits_for_its_start() {
    let test = Test::new();
    test.succeed("configure", "");
    test.succeed("prepare", "");
    let ready = test.wait(|status| {
        status.state == State::Ready && status.run.as_ref().is_some_and(|run| run.elapsed_s.0 > 0.1)
    });
    assert_eq!(ready.run.unwrap().progress.events_built, 0);
    test.succeed("start", "");
    test.wait_for(State::Running);
}

#[test]
fn a_failed_run_is_an_error_until_it_is_acknowledged() {
    let test = Test::new();
    test.succeed("configure", "");
    test.start_with_batch(13);
    let failed = test.wait_for(State::Error);
    assert_eq!(failed.last_run.unwrap().problems, ["the simulated run failed"]);
    assert_eq!(failed.faults.last().unwrap().text, "the simulated run failed");
    let refused = test.command("start", "");
    assert_eq!(refused.code, 409);
    assert!(refused.body.contains("start is not allowed while the state is error"), "{refused:?}");
    assert_eq!(test.succeed("reset", "").state, State::Configured);
}

#[test]
fn a_panic_fails_the_run_and_the_next_one_starts() {
    let test = Test::new();
    test.succeed("configure", "");
    test.start_with_batch(14);
    let failed = test.wait(|status| status.run.is_none());
    let problem = "a fault of this program ended the run: the simulated backend has a fault";
    assert_eq!((failed.state, failed.last_run.unwrap().problems), (State::Error, vec![problem.to_owned()]));
    let EntryKind::End { result, problems, .. } = &test.control.log(1)[0].kind else { panic!("no end") };
    assert_eq!((result, problems.as_slice()), (&RunResult::Failed, &[problem.to_owned()][..]));
    assert_eq!(test.succeed("reset", "").state, State::Configured);
    test.start_with_batch(4);
    test.wait_for(State::Running);
}

#[test]
fn a_slow_command_is_answered_when_it_has_ended() {
    let body_timeout = Duration::from_millis(200);
    let test = Test::with(&ServerLimits { body_timeout, ..ServerLimits::default() });
    // The read of a pipe ends with its writer.
    let file = test.folder.path().join("run.toml");
    std::fs::remove_file(&file).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(&file).status().unwrap().success());
    std::thread::scope(|scope| {
        let configured = scope.spawn(|| test.command("configure", ""));
        let mut pipe = std::fs::File::options().write(true).open(&file).unwrap();
        assert_eq!(test.status().state, State::Idle);
        std::thread::sleep(2 * body_timeout);
        pipe.write_all(CONFIGURATION.as_bytes()).unwrap();
        drop(pipe);
        let answer = configured.join().unwrap();
        assert_eq!(answer.code, 200, "{answer:?}");
    });
    assert_eq!(test.status().state, State::Configured);
}

#[test]
fn settings_of_two_operators_at_the_same_time_both_hold_or_one_is_refused() {
    let test = Test::new();
    test.succeed("configure", "");
    std::thread::scope(|scope| {
        for field in ["run.replay", "run.batch", "builder.bu.0.slots"] {
            let test = &test;
            scope.spawn(move || {
                for value in 1..=40 {
                    match test.control.set(&[(field.to_owned(), value.into())].into()) {
                        Ok(()) => {
                            let settings = test.control.status().configuration.unwrap().settings;
                            assert_eq!(settings[field], value);
                        }
                        Err(error) => assert!(error.to_string().contains("at the same time"), "{error}"),
                    }
                }
            });
        }
    });
}

#[test]
fn settings_change_the_next_run_only_if_they_are_valid() {
    let test = Test::new();
    let before = test.succeed("configure", "").configuration.unwrap();
    let set = |settings: &str| test.command("set", &format!("{{\"settings\": {{{settings}}}}}"));
    for (settings, problem) in [
        (r#""run.batch": 0"#, "run.toml:3: run.batch: 0 is out of range: must be 1 to"),
        (r#""run.batch": "many""#, "run.toml:3:"),
        (r#""run.unknown": 1"#, "unknown field `unknown`"),
        (r#""output.events": "some""#, "output.events: unknown value"),
        (r#""builder.bu9.slots": 1"#, "setting builder.bu9.slots: the configuration has no builder"),
        (r#""card.c.threshold": 1"#, "setting card.c.threshold: the configuration has no card"),
        (r#""run.name": "x""#, "setting run.name: cannot change"),
        (r#""batch": 1"#, "setting batch: unknown: use FIELD of run, output, check"),
        (r#""security.key": "/etc/shadow""#, "setting security.key: unknown: use FIELD"),
        (r#""run.batch": [1]"#, "setting run.batch: [1] is not a number"),
        (r#""run.device": "absent""#, "this host has no device absent"),
        // One refused setting refuses all.
        (r#""run.replay": 5, "run.window": 0"#, "run.window"),
    ] {
        let answer = set(settings);
        assert_eq!(answer.code, 422, "{settings}: {answer:?}");
        assert!(answer.body.replace("\\\"", "\"").contains(problem), "{settings}: {answer:?}");
        assert_eq!(test.status().configuration.unwrap().sha256, before.sha256);
    }
    assert_eq!(set(r#""run.replay": 5, "builder.bu.0.slots": 8"#).code, 200);
    let after = test.status().configuration.unwrap();
    assert_eq!((after.events, after.settings.len()), (40, 2));
    assert_ne!(after.sha256, before.sha256);
    // The file stays as it is; configuring again drops the settings.
    assert_eq!(std::fs::read_to_string(test.folder.path().join("run.toml")).unwrap(), CONFIGURATION);
    assert_eq!(test.succeed("configure", "").configuration.unwrap(), before);
    test.succeed("start", "");
    test.wait_for(State::Running);
    assert_eq!(set(r#""run.replay": 5"#).code, 409);
}

#[test]
fn no_run_starts_once_run_control_ends() {
    let test = Test::new();
    test.succeed("configure", "");
    test.control.shut_down();
    for command in ["start", "prepare"] {
        let refused = test.command(command, "");
        assert!(refused.code == 503 && refused.body.contains("run control is ending"), "{refused:?}");
    }
    let status = test.status();
    assert!(status.state == State::Configured && status.run.is_none(), "{status:?}");
    assert_eq!(status.run_number, RunNumber(0));
}

#[test]
fn an_invalid_configuration_leaves_the_present_one() {
    let test = Test::new();
    let before = test.succeed("configure", "").configuration;
    let path = test.folder.path().join("run.toml");
    std::fs::write(&path, CONFIGURATION.replace("slots = 4", "slots = 0")).unwrap();
    let answer = test.command("configure", "");
    assert_eq!(answer.code, 422);
    assert!(answer.body.contains("run.toml:13: builder.slots: 0 is out of range"), "{answer:?}");
    assert_eq!(test.status().configuration, before);
    std::fs::write(&path, CONFIGURATION.replace("[run]", "[run]\ndevice = \"absent\"")).unwrap();
    assert_eq!(test.command("configure", "").code, 422);
    assert_eq!(test.status().configuration, before);
}

#[test]
fn run_numbers_and_the_log_book_survive_the_process() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("run.toml"), CONFIGURATION).unwrap();
    let path = folder.path().join("control");
    let book = path.join("logbook.jsonl");
    let mut directory = Directory::open(&path).unwrap();
    assert_eq!(directory.next_run(None).unwrap(), RunNumber(1));
    let locked = Directory::open(&path).unwrap_err().to_string();
    assert!(locked.contains("another run control process uses this directory"), "{locked}");
    drop(directory);
    // A begin without an end, and a line that was cut.
    let begin = r#"{"time":"2026-11-24T05:00:00.000Z","run":7,"record":"begin","operator":"","comment":"","configuration":"run.toml","sha256":"00","settings":{}}"#;
    std::fs::write(&book, format!("{begin}\n{{\"time\":\"2026")).unwrap();
    let (control, _) = open(folder.path());
    let entries = control.log(10);
    assert_eq!(entries.len(), 2);
    assert!(matches!(entries[1].kind, EntryKind::End { result: RunResult::Lost, .. }), "{entries:?}");
    drop(control);
    let mut directory = Directory::open(&path).unwrap();
    // The higher of both sources.
    assert_eq!(directory.next_run(None).unwrap(), RunNumber(8));
    drop(directory);
    std::fs::write(&book, "not JSON\n").unwrap();
    let error = Directory::open(&path).unwrap_err().to_string();
    assert!(error.contains("logbook.jsonl: line 1 is not an entry"), "{error}");
    std::fs::write(&book, "").unwrap();
    std::fs::write(path.join("run-number"), "seven").unwrap();
    let error = Directory::open(&path).unwrap_err().to_string();
    assert!(error.contains("run-number: \"seven\" is not a run number"), "{error}");
}

#[test]
fn a_run_stores_no_events_in_the_folder_of_an_earlier_run() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("out");
    let mut first = Directory::open(&folder.path().join("first")).unwrap();
    assert_eq!(first.next_run(Some(&output)).unwrap(), RunNumber(1));
    let events = output.join("run-000001/events.h5");
    std::fs::write(&events, "events of the first run").unwrap();
    // Another directory, as after `--directory` or the loss of the first.
    let mut second = Directory::open(&folder.path().join("second")).unwrap();
    assert_eq!(second.next_run(Some(&output)).unwrap(), RunNumber(2));
    assert_eq!(first.next_run(Some(&output)).unwrap(), RunNumber(3));
    assert_eq!(std::fs::read_to_string(&events).unwrap(), "events of the first run");
    // The skipped numbers stay skipped without output, and after a restart.
    assert_eq!(first.next_run(None).unwrap(), RunNumber(4));
    drop(second);
    let mut second = Directory::open(&folder.path().join("second")).unwrap();
    assert_eq!((second.last_run(), second.next_run(None).unwrap()), (RunNumber(2), RunNumber(3)));

    // Through the API, and with a folder that cannot be made.
    let test = Test::new();
    let earlier = test.folder.path().join("out/run-000001");
    std::fs::create_dir_all(&earlier).unwrap();
    test.succeed("configure", "");
    test.succeed("start", "");
    test.wait_for(State::Running);
    test.succeed("stop", "");
    assert_eq!(test.wait_for(State::Configured).last_run.unwrap().number, RunNumber(2));
    assert_eq!(std::fs::read_dir(&earlier).unwrap().count(), 0);
    std::fs::remove_dir_all(test.folder.path().join("out")).unwrap();
    std::fs::write(test.folder.path().join("out"), "").unwrap();
    let refused = test.command("start", "");
    assert!(refused.code == 500 && refused.body.contains("out: cannot create"), "{refused:?}");
    assert_eq!(test.status().state, State::Configured);
}

#[test]
fn comments_are_recorded_and_bounded() {
    let test = Test::new();
    test.succeed("comment", r#"{"operator": "vera", "comment": "wind above 40 km/h"}"#);
    assert!(test.get("/api/v1/log").body.contains("wind above 40 km/h"));
    for (body, problem) in [
        ("{}", "comment: is empty"),
        (r#"{"comment": "\u0007"}"#, "comment: holds the control character"),
        (&format!("{{\"comment\": \"{}\"}}", "x".repeat(2001)), "comment: has 2001 bytes; at most 2000"),
        (
            &format!("{{\"comment\": \"x\", \"operator\": \"{}\"}}", "x".repeat(101)),
            "operator: has 101 bytes",
        ),
    ] {
        let answer = test.command("comment", body);
        assert_eq!(answer.code, 422, "{answer:?}");
        assert!(answer.body.contains(problem), "{answer:?}");
    }
}

#[test]
fn the_latest_picture_is_served_and_removed() {
    let test = Test::new();
    assert_eq!(test.get("/api/v1/display").code, 404);
    test.succeed("configure", "");
    test.succeed("start", "");
    test.wait_for(State::Running);
    let output = test.folder.path().join("out/run-000001");
    std::fs::create_dir_all(&output).unwrap();
    let file = millstream_control::display::file(&output, "bu.0");
    std::fs::write(&file, "<svg/>").unwrap();
    let answer = test.get("/api/v1/display");
    assert!(answer.code == 200 && answer.body == "<svg/>", "{answer:?}");
    assert!(answer.head.contains("content-type: image/svg+xml"), "{answer:?}");
    test.succeed("stop", "");
    test.wait_for(State::Configured);
    assert!(!file.exists());
    assert_eq!(test.get("/api/v1/display").body, "<svg/>");
}

#[test]
fn a_shut_down_ends_the_run() {
    let test = Test::new();
    test.succeed("configure", "");
    test.succeed("start", "");
    test.wait_for(State::Running);
    test.control.shut_down();
    assert_eq!(test.status().state, State::Configured);
    let request = Request::default();
    assert!(test.control.command(Command::Pause, &request).is_err());
}
