//! Runs with worker processes that decide on events in landing memory.

use crate::input::TestInputs;
use crate::runs::run;
use millstream_evb::config::RunConfig;
use millstream_software_trigger::protocol::{EventSet, Job, Reply, receive, send};
use std::error::Error;
use std::path::Path;
use std::time::Duration;

/// Tests by name.
pub(crate) const TESTS: &[(&str, fn())] = &[
    ("worker_processes_decide_on_built_events", worker_processes_decide_on_built_events),
    (
        "worker_processes_see_incomplete_events_when_asked_for",
        worker_processes_see_incomplete_events_when_asked_for,
    ),
    ("the_batches_of_a_worker_that_dies_go_to_another", the_batches_of_a_worker_that_dies_go_to_another),
    ("an_event_that_kills_workers_ends_the_run", an_event_that_kills_workers_ends_the_run),
    (
        "a_worker_may_be_slower_than_the_timeout_of_the_run",
        a_worker_may_be_slower_than_the_timeout_of_the_run,
    ),
    ("a_worker_that_hangs_is_killed", a_worker_that_hangs_is_killed),
    ("no_worker_that_hangs_is_left", no_worker_that_hangs_is_left),
    (
        "the_batches_of_a_worker_with_a_wrong_reply_go_to_another",
        the_batches_of_a_worker_with_a_wrong_reply_go_to_another,
    ),
    (
        "batches_of_a_unit_without_workers_are_built_by_another",
        batches_of_a_unit_without_workers_are_built_by_another,
    ),
];

/// A worker: `any` accepts all events, `modulus N` accepts events that N divides and that are intact, `missing` accepts incomplete events,
/// `die FILE` exits at event 50 unless FILE exists, and creates it; `die` exits at event 50; `slow` takes 4 s for event 50; `hang` does not return. `raw WHAT
/// FILE` speaks the protocol without the crate: it answers with another `id`, or too `long`, unless FILE exists, and creates it;
/// or it does `nothing`.
pub(crate) fn work(words: &[String]) -> Result<bool, Box<dyn Error>> {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    if let ["raw", what, file] = words[..] {
        return work_raw(what, Path::new(file));
    }
    let number = words.get(1).and_then(|word| word.parse().ok()).unwrap_or(1);
    if words[0] == "any" {
        millstream_software_trigger::serve(|_| true)?;
        return Ok(true);
    }
    millstream_software_trigger::serve(|event| {
        let fragments = event.fragments();
        assert!(fragments.iter().all(|fragment| {
            fragment.is_missing()
                || fragment.payload().starts_with(format!("source {} ", fragment.source()).as_bytes())
        }));
        match words[0] {
            "missing" => !event.is_complete(),
            "die" if event.number() == 50 && !words.get(1).is_some_and(|file| Path::new(file).exists()) => {
                words.get(1).into_iter().for_each(|file| std::fs::write(file, "").unwrap());
                std::process::exit(7);
            }
            "slow" if event.number() == 50 => {
                std::thread::sleep(Duration::from_secs(10));
                true
            }
            "hang" => loop {
                std::thread::park();
            },
            _ => event.number().is_multiple_of(number),
        }
    })?;
    Ok(true)
}

fn work_raw(what: &str, file: &Path) -> Result<bool, Box<dyn Error>> {
    let socket = std::io::stdin();
    let mut buffer = vec![0; 1 << 16];
    receive(&socket, &mut buffer)?;
    loop {
        let (len, _) = receive(&socket, &mut buffer)?;
        if len == 0 {
            return Ok(true);
        }
        if what == "nothing" {
            loop {
                std::thread::park();
            }
        }
        let job = Job::decode(&buffer[..len])?;
        let mut reply = Reply { id: job.id, accepted: job.candidates };
        // Of both workers, one does.
        if std::fs::File::create_new(file).is_ok() {
            match what {
                "id" => reply.id += 1,
                _ => reply.accepted = EventSet::of(job.events + 8),
            }
        }
        send(&socket, &reply.encode(), None)?;
    }
}

/// A run of 100 events in which source 3 lacks events 40 to 49.
fn config(inputs: &TestInputs, builders: &[&str], trigger: &str, worker: &[&str]) -> RunConfig {
    config_with(inputs, builders, "", trigger, worker)
}

/// As [`config`], with other parameters of the run.
fn config_with(
    inputs: &TestInputs,
    builders: &[&str],
    parameters: &str,
    trigger: &str,
    worker: &[&str],
) -> RunConfig {
    let program = std::env::current_exe().unwrap();
    let arguments = [&["worker"], worker].concat();
    // Others answer, but on a busy machine late.
    let timeout_ms = if worker == ["hang"] || worker.contains(&"nothing") { 400 } else { 20_000 };
    let trigger = format!(
        "\n[builder.trigger]\nprogram = {program:?}\narguments = {arguments:?}\ntimeout_ms = {timeout_ms}\n{trigger}\n"
    );
    let rest = "[output]\ndirectory = \"out\"\n";
    inputs.config(2, builders, &format!("batch = 16\n{parameters}"), "kernel = \"verify\"", rest);
    // The helper writes the tables of cards between those of builder units.
    let path = inputs.folder.path().join("run.toml");
    let text = std::fs::read_to_string(&path).unwrap();
    let text =
        text.replace("slots = 4\nlanding = \"host\"\n", &format!("slots = 4\nlanding = \"host\"\n{trigger}"));
    let text = text.replace("\n[[card]]", &format!("{trigger}\n[[card]]"));
    std::fs::write(&path, text).unwrap();
    let config = millstream_evb::config::ConfigFile::load(&path).and_then(|config| config.check()).unwrap();
    assert!(config.warnings().is_empty());
    config
}

/// A batch that waits for its decisions for longer than three timeouts costs no builder unit.
fn a_worker_may_be_slower_than_the_timeout_of_the_run() {
    let inputs = inputs();
    let config = config_with(&inputs, &["host", "host"], "timeout_ms = 3000\n", "", &["slow"]);
    let outcome = run(&config);
    let summary = outcome.summary.as_ref().expect("the run had started");
    assert_eq!((summary.built.events, &summary.recovered[..]), (90, &[][..]), "{summary}");
    assert_eq!(stored(&outcome).len(), 90);
}

fn inputs() -> TestInputs {
    TestInputs::made(2, 4, 0..100, |id, event| !(id == 3 && (40..50).contains(&event)))
}

fn stored(outcome: &millstream_evb::process::RunOutcome) -> Vec<u64> {
    let mut stored: Vec<u64> = Vec::new();
    for (_, path) in &outcome.sinks {
        let list = std::fs::read_to_string(path).unwrap();
        stored.extend(list.lines().map(|line| line.split(' ').next().unwrap().parse::<u64>().unwrap()));
    }
    stored.sort_unstable();
    stored
}

fn worker_processes_decide_on_built_events() {
    let inputs = inputs();
    for builders in [&["host"][..], &["card", "host"]] {
        let outcome = run(&config(&inputs, builders, "workers = 2", &["modulus", "7"]));
        assert!(outcome.is_success(), "{outcome:#?}");
        let expected = (0..100).filter(|event| event % 7 == 0 && !(40..50).contains(event));
        assert_eq!(stored(&outcome), expected.collect::<Vec<_>>());
        assert_eq!(outcome.summary.as_ref().unwrap().accepted, 13);
        let counts: Vec<_> = outcome.builders.iter().flatten().map(|unit| unit.workers).collect();
        assert_eq!(counts.iter().map(|counts| counts.events).sum::<u64>(), 90);
        assert_eq!(counts.iter().map(|counts| counts.accepted).sum::<u64>(), 13);
    }
}

fn worker_processes_see_incomplete_events_when_asked_for() {
    let inputs = inputs();
    let outcome = run(&config(&inputs, &["host"], "events = \"all\"", &["missing"]));
    assert!(outcome.is_success(), "{outcome:#?}");
    assert_eq!(stored(&outcome), (40..50).collect::<Vec<_>>());
    assert_eq!(outcome.summary.as_ref().unwrap().accepted, 0);
}

fn the_batches_of_a_worker_that_dies_go_to_another() {
    let inputs = inputs();
    let file = inputs.folder.path().join("died");
    let outcome = run(&config(&inputs, &["host"], "workers = 2", &["die", file.to_str().unwrap()]));
    assert!(outcome.is_success(), "{outcome:#?}");
    assert_eq!(stored(&outcome).len(), 90);
    assert_eq!(outcome.builders[0].as_ref().unwrap().workers.lost, 1);
}

fn the_batches_of_a_worker_with_a_wrong_reply_go_to_another() {
    let inputs = inputs();
    for what in ["id", "long"] {
        let file = inputs.folder.path().join(what);
        let outcome = run(&config(&inputs, &["host"], "workers = 2", &["raw", what, file.to_str().unwrap()]));
        assert!(outcome.is_success(), "{outcome:#?}");
        assert_eq!(stored(&outcome).len(), 90);
        assert_eq!(outcome.builders[0].as_ref().unwrap().workers.lost, 1);
        std::fs::remove_dir_all(inputs.folder.path().join("out")).unwrap();
    }
}

fn no_worker_that_hangs_is_left() {
    let inputs = inputs();
    let mark = inputs.folder.path().join("nothing").to_str().unwrap().to_owned();
    let outcome = run(&config(&inputs, &["host"], "workers = 3", &["raw", "nothing", &mark]));
    assert!(!outcome.is_success());
    let is_worker = |process: &std::fs::DirEntry| {
        let arguments = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
        arguments.split(|&byte| byte == 0).any(|argument| argument == mark.as_bytes())
    };
    let left = std::fs::read_dir("/proc").unwrap().flatten().filter(is_worker).count();
    assert_eq!(left, 0);
}

fn an_event_that_kills_workers_ends_the_run() {
    let outcome = run(&config(&inputs(), &["host"], "workers = 4", &["die"]));
    assert!(!outcome.is_success());
    let error = outcome.builders[0].as_ref().unwrap().error.clone().unwrap();
    assert!(error.contains("batch 3 ended 2 workers") && error.contains("exit status: 7"), "{error}");
    assert!(outcome.summary.as_ref().unwrap().is_balanced());
}

fn a_worker_that_hangs_is_killed() {
    let outcome = run(&config(&inputs(), &["host"], "workers = 1", &["hang"]));
    assert!(!outcome.is_success());
    let error = outcome.builders[0].as_ref().unwrap().error.clone().unwrap();
    assert!(error.contains("did not decide on batch 0 in time"), "{error}");
}

/// The only worker of a unit exits. Its batches that the worker had not seen are not done.
fn batches_of_a_unit_without_workers_are_built_by_another() {
    let inputs = inputs();
    for builders in [["host", "host"], ["card", "card"]] {
        let file = inputs.folder.path().join(format!("died-{}", builders[0]));
        let parameters = "replay = 100\ndrain_timeout_ms = 500\n[recovery]\nbuilder_loss = \"rebuild\"";
        let worker = ["die", file.to_str().unwrap()];
        let outcome = run(&config_with(&inputs, &builders, parameters, "workers = 1", &worker));
        assert!(outcome.is_success(), "{outcome:#?}");
        assert_eq!(outcome.summary.as_ref().unwrap().recovered.len(), 1);
        // The worker accepts every event that it sees.
        let expected = (0..10_000).filter(|event| !(40..50).contains(&(event % 100)));
        assert_eq!(stored(&outcome), expected.collect::<Vec<_>>());
    }
}
