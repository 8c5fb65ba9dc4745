//! Runs whose processes have keys of a site.

use crate::faults::{is_there, pid};
use crate::input::{TestInputs, launcher};
use crate::runs::run;
use millstream_evb::config::{ConfigFile, RunConfig};
use millstream_evb::core::{StopCause, Unit};
use millstream_evb::process::launcher::{RunEvent, RunProcess};
use millstream_rdma::Deadline;
use millstream_tls::authority::{Authority, Validity};
use millstream_tls::{KeyFiles, Keys, Security};
use rustix::process::{Signal, kill_process};
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::ops::ControlFlow;
use std::time::{Duration, Instant, SystemTime};

/// Tests by name.
pub(crate) const TESTS: &[(&str, fn())] = &[
    (
        "units_with_keys_build_events_and_strangers_are_refused",
        units_with_keys_build_events_and_strangers_are_refused,
    ),
    ("strangers_do_not_hold_up_the_start_of_a_run", strangers_do_not_hold_up_the_start_of_a_run),
    ("a_builder_unit_counts_strangers", a_builder_unit_counts_strangers),
    ("a_builder_unit_waits_for_no_stranger", a_builder_unit_waits_for_no_stranger),
    ("a_standby_manager_with_keys_takes_over", a_standby_manager_with_keys_takes_over),
    ("a_node_that_is_not_on_the_list_does_not_join", a_node_that_is_not_on_the_list_does_not_join),
    ("keys_that_cannot_be_used_are_refused_before_a_run", keys_that_cannot_be_used_are_refused_before_a_run),
];

/// Bound for an answer of the manager.
const BOUND: Duration = Duration::from_secs(10);
const DAY: Duration = Duration::from_secs(24 * 3600);

fn year() -> Validity {
    Validity::starting_now(365 * DAY)
}

/// Inputs with keys of the node `daq` beside them.
fn inputs() -> (TestInputs, Authority) {
    let inputs = TestInputs::made(2, 2, 1..401, |_, _| true);
    let authority = Authority::new("site", year()).unwrap();
    authority.issue("daq", &[], year()).unwrap().create(&inputs.folder.path().join("daq")).unwrap();
    (inputs, authority)
}

/// The table `security` with these keys.
const SECURITY: &str = "[security]\ncertificate = \"daq/certificate.pem\"\nkey = \"daq/key.pem\"\n\
                        authority = \"daq/authority.pem\"\n";

/// A client of its own keys, made from an authority.
fn client(inputs: &TestInputs, authority: &Authority, node: &str, validity: Validity) -> Security {
    let files =
        authority.issue(node, &[], validity).unwrap().create(&inputs.folder.path().join(node)).unwrap();
    Security::new(Keys::load(&files).unwrap())
}

fn listening(config: &mut RunConfig) -> String {
    config.listen = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    config.listen.clone()
}

/// Strangers come before and during the run: with plain TCP, with certificates of another authority and of the past.
fn units_with_keys_build_events_and_strangers_are_refused() {
    let (inputs, authority) = inputs();
    let mut config =
        inputs.config(2, &["host", "host"], "batch = 8\nreplay = 2000\ntimeout_ms = 10000", "", SECURITY);
    let address = listening(&mut config);
    let other = Authority::new("another site", year()).unwrap();
    // The stranger accepts the manager's certificate, so that the manager has to refuse it.
    let files = other.issue("stranger", &[], year()).unwrap();
    let files = files.create(&inputs.folder.path().join("stranger")).unwrap();
    std::fs::copy(inputs.folder.path().join("daq/authority.pem"), &files.authority).unwrap();
    let stranger = Security::new(Keys::load(&files).unwrap());
    let now = SystemTime::now();
    let late = client(&inputs, &authority, "late", Validity { from: now - 3 * DAY, until: now - DAY });
    let strangers = std::thread::spawn(move || {
        let deadline = Deadline::after(BOUND);
        let mut plain = millstream_rdma::connect::dial(&address, deadline).unwrap();
        let silent = TcpStream::connect(&address).unwrap();
        plain.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        plain.set_read_timeout(Some(BOUND)).unwrap();
        let mut answer = Vec::new();
        // An alert at most, then the end of the stream, perhaps by a reset.
        let _ = plain.read_to_end(&mut answer);
        let refused = [&stranger, &late].map(|keys| keys.dial(&address, deadline).unwrap_err().to_string());
        (answer, refused, silent)
    });
    let mut counts = Vec::new();
    let outcome = launcher().run(&config, &mut |event| {
        if let RunEvent::Refused { process: RunProcess::Unit(Unit::Manager), connections } = event {
            counts.push(*connections);
        }
    });
    let outcome = outcome.unwrap_or_else(|error| panic!("{error}"));
    assert!(outcome.is_success(), "{outcome:#?}");
    let summary = outcome.summary.expect("the run had started");
    assert_eq!((summary.cause, summary.built.events), (StopCause::EndOfRun, 400 * 2000), "{summary}");
    // Three, and the silent one if the run lasts longer than it may be silent.
    assert!(counts == [1, 2, 3] || counts == [1, 2, 3, 4], "{counts:?}");
    let (answer, [foreign, expired], _silent) = strangers.join().unwrap();
    assert!(answer.len() < 16, "{answer:02x?}");
    assert!(foreign.contains("refused this program's certificate of \"stranger\""), "{foreign}");
    assert!(expired.contains("certificate of \"late\": it has expired"), "{expired}");
}

/// Ports that a process listens at, on 127.0.0.1 or all addresses.
fn ports_of(process: u32) -> Vec<u16> {
    let sockets: Vec<String> = std::fs::read_dir(format!("/proc/{process}/fd"))
        .unwrap()
        .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok())
        .filter_map(|target| Some(target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned()))
        .collect();
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let listening = table.lines().skip(1).filter_map(|line| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let is_its_listener = fields.get(3) == Some(&"0A") && sockets.iter().any(|inode| inode == fields[9]);
        u16::from_str_radix(fields[1].rsplit_once(':')?.1, 16).ok().filter(|_| is_its_listener)
    });
    listening.collect()
}

/// Without keys, strangers dial a builder unit before its readout units do. Some say nothing, one speaks HTTP, and one announces a
/// frame of 100 MiB to the manager.
fn strangers_do_not_hold_up_the_start_of_a_run() {
    let (inputs, _) = inputs();
    let mut config = inputs.config(2, &["host"], "batch = 8\ntimeout_ms = 4000", "", "");
    let manager = listening(&mut config);
    let dial = |address: &str| millstream_rdma::connect::dial(address, Deadline::after(BOUND)).unwrap();
    let (mut strangers, mut refused, mut waiting) = (None, 0, Vec::new());
    let outcome = launcher().run(&config, &mut |event| match event {
        // A run as short as this one would end before the strangers have dialled.
        RunEvent::Spawned { process: RunProcess::Unit(Unit::Readout(_)), pid: id } => {
            kill_process(pid(*id), Signal::STOP).expect("it runs");
            waiting.push(pid(*id));
        }
        RunEvent::Spawned { process: RunProcess::Unit(Unit::Builder(_)), pid } => {
            let mut of_manager = dial(&manager);
            of_manager.write_all(&(100u32 << 20).to_be_bytes()).unwrap();
            let end = Instant::now() + BOUND;
            let port = loop {
                match ports_of(*pid).first() {
                    Some(port) => break *port,
                    None => assert!(Instant::now() < end, "the builder unit does not listen"),
                }
            };
            let mut dialled: Vec<_> = (0..3).map(|_| dial(&format!("127.0.0.1:{port}"))).collect();
            dialled[2].write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
            dialled.push(of_manager);
            strangers = Some(dialled);
            for readout in waiting.drain(..) {
                kill_process(readout, Signal::CONT).expect("it runs");
            }
        }
        RunEvent::Refused { process: RunProcess::Unit(Unit::Manager), connections } => refused = *connections,
        _ => {}
    });
    let outcome = outcome.unwrap_or_else(|error| panic!("{error}"));
    assert!(outcome.is_success() && strangers.is_some(), "{outcome:#?}");
    assert_eq!((outcome.summary.expect("the run had started").built.events, refused), (400, 1));
}

/// Strangers dial the port for data connections in the middle of the run.
fn a_builder_unit_counts_strangers() {
    const STRANGERS: u64 = 3;
    let (inputs, _) = inputs();
    let config = inputs.config(2, &["host"], "batch = 8\nreplay = 1000000\ntimeout_ms = 10000", "", SECURITY);
    let (mut builder, mut strangers, mut counts) = (None, Vec::new(), Vec::new());
    let begin = Instant::now();
    let outcome = launcher().run_while(&config, &mut |event| {
        match event {
            RunEvent::Spawned { process: RunProcess::Unit(Unit::Builder(_)), pid } => builder = Some(*pid),
            RunEvent::Progress(sample) if sample.done.batches > 0 && strangers.is_empty() => {
                let ports = ports_of(builder.expect("it was started"));
                assert_eq!(ports.len(), 1, "{ports:?}");
                strangers.extend((0..STRANGERS).map(|_| {
                    let mut stranger = TcpStream::connect(("127.0.0.1", ports[0])).unwrap();
                    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
                    stranger
                }));
            }
            RunEvent::Refused { process: RunProcess::Unit(Unit::Builder(_)), connections } => {
                counts.push(*connections);
            }
            _ => {}
        }
        match counts.len() as u64 == STRANGERS || begin.elapsed() > 6 * BOUND {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    });
    let summary = outcome.unwrap().summary.expect("the run had started");
    assert_eq!(counts, (1..=STRANGERS).collect::<Vec<_>>());
    assert_eq!(summary.cause, StopCause::Requested, "{summary}");
}

/// Strangers dial the port for data connections and say nothing. They are refused side by side, and the run goes on.
fn a_builder_unit_waits_for_no_stranger() {
    const STRANGERS: u64 = 20;
    let (inputs, _) = inputs();
    let config = inputs.config(2, &["host"], "batch = 8\nreplay = 1000000\ntimeout_ms = 4000", "", SECURITY);
    let (mut builder, mut strangers, mut refused) = (None, Vec::new(), 0);
    let mut dialled = Instant::now();
    let outcome = launcher().run_while(&config, &mut |event| {
        match event {
            RunEvent::Spawned { process: RunProcess::Unit(Unit::Builder(_)), pid } => builder = Some(*pid),
            RunEvent::Progress(sample) if sample.done.batches > 0 && strangers.is_empty() => {
                let ports = ports_of(builder.expect("it was started"));
                let dial = |_| TcpStream::connect(("127.0.0.1", ports[0])).unwrap();
                strangers.extend((0..STRANGERS).map(dial));
                dialled = Instant::now();
            }
            RunEvent::Refused { process: RunProcess::Unit(Unit::Builder(_)), connections } => {
                refused = *connections;
            }
            _ => {}
        }
        match refused == STRANGERS || dialled.elapsed() > 6 * BOUND {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    });
    let summary = outcome.unwrap().summary.expect("the run had started");
    assert_eq!((refused, summary.cause), (STRANGERS, StopCause::Requested), "{summary}");
    // Each has a second; one after the other they would take 20.
    assert!(dialled.elapsed() < Duration::from_secs(18), "{:?}", dialled.elapsed());
}

fn a_standby_manager_with_keys_takes_over() {
    let (inputs, _) = inputs();
    let run = "batch = 8\nreplay = 4000\ntimeout_ms = 10000";
    let recovery = format!("[recovery]\nstandby = true\n{SECURITY}");
    let config = inputs.config(2, &["host", "host"], run, "", &recovery);
    let (mut manager, mut took_over, mut processes) = (None, false, Vec::new());
    let outcome = launcher().run(&config, &mut |event| match event {
        RunEvent::Spawned { process, pid: id } => {
            processes.push(*id);
            if *process == RunProcess::Unit(Unit::Manager) {
                manager = Some(pid(*id));
            }
        }
        RunEvent::Progress(sample) if sample.done.batches > 0 => {
            if let Some(manager) = manager.take() {
                kill_process(manager, Signal::KILL).expect("it runs");
            }
        }
        RunEvent::TookOver { .. } => took_over = true,
        _ => {}
    });
    let outcome = outcome.unwrap_or_else(|error| panic!("{error}"));
    assert!(took_over && outcome.is_success(), "{outcome:#?}");
    let summary = outcome.summary.expect("the run had started");
    assert_eq!((summary.cause, summary.built.events), (StopCause::EndOfRun, 400 * 4000), "{summary}");
    assert!(processes.iter().all(|process| !is_there(*process)), "{processes:?}");
}

/// The units of the run are of `daq`, which is not on the list: nobody joins, and the run ends with the reason.
fn a_node_that_is_not_on_the_list_does_not_join() {
    let (inputs, _) = inputs();
    let security = format!("{SECURITY}nodes = [\"node7\"]\n");
    let config = inputs.config(2, &["host"], "batch = 8", "", &security);
    let begin = Instant::now();
    let outcome = run(&config);
    assert!(begin.elapsed() < BOUND, "{:?}", begin.elapsed());
    assert!(outcome.summary.is_none() && !outcome.is_success());
    let reasons: Vec<&str> = outcome.failures.iter().map(|failure| failure.reason.as_str()).collect();
    assert!(
        reasons
            .iter()
            .any(|reason| reason.contains("certificate of \"daq\": its node is not on the peer's list")),
        "{reasons:?}"
    );
}

fn keys_that_cannot_be_used_are_refused_before_a_run() {
    let (inputs, _) = inputs();
    let path = inputs.folder.path().join("run.toml");
    let refusal = |security: &str| {
        // The configuration without keys is valid.
        inputs.config(2, &["host"], "batch = 8", "", "");
        let text = std::fs::read_to_string(&path).unwrap() + security;
        std::fs::write(&path, text).unwrap();
        ConfigFile::load(&path).and_then(|config| config.check()).unwrap_err().to_string()
    };
    let error = refusal("[security]\ncertificate = \"daq/certificate.pem\"\n");
    assert!(error.contains("security: certificate, key and authority belong together"), "{error}");
    let error = refusal(&SECURITY.replace("daq/key.pem", "daq/nothing.pem"));
    assert!(error.contains("nothing.pem") && error.contains("No such file"), "{error}");
    let error = refusal("[security]\nnodes = [\"node7\"]\n");
    assert!(error.contains("security.nodes: keys are required"), "{error}");
    let error = refusal(&format!("{SECURITY}nodes = [\"node 7\"]\n"));
    assert!(error.contains("\"node 7\": is neither a host name nor an address"), "{error}");
    let error = refusal(&format!("{SECURITY}nodes = [\"node7\", \"localhost\"]\n"));
    assert!(
        error.contains("security.nodes: node \"localhost\": the certificates of all nodes have this name"),
        "{error}"
    );
    let files = KeyFiles::in_directory(&inputs.folder.path().join("daq"));
    std::fs::write(&files.certificate, "").unwrap();
    let error = refusal(SECURITY);
    assert!(error.contains("has no certificate in PEM"), "{error}");
}
