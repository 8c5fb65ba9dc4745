//! `millstream` as a program: run, env, demo, evb, devices, stream.

#[path = "common/gpu.rs"]
mod gpu;
#[path = "common/killed.rs"]
mod killed;
#[path = "common/processes.rs"]
mod processes;
#[path = "common/running.rs"]
mod running;

use killed::leave_partial;
use millstream_fragment::stream::StreamWriter;
use millstream_fragment::{Alignment, SourceId, SourceKind};
use millstream_store::committed_numbers;
use processes::{builder, children, signal};
use running::Running;
use rustix::process::Signal;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

const PYTHON: &str = "/usr/bin/python3";

fn millstream(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_millstream")).args(arguments).output().expect("the program starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn succeeds(arguments: &[&str]) -> String {
    let output = millstream(arguments);
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{arguments:?}: {}\n{out}\n{err}", output.status);
    out
}

/// Standard error of a command that must fail.
fn fails(arguments: &[&str]) -> String {
    let output = millstream(arguments);
    assert!(!output.status.success(), "{arguments:?} must fail:\n{}", text(&output.stdout));
    text(&output.stderr)
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("crates/cli is two deep")
}

fn json(path: &Path) -> serde_json::Value {
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).expect("JSON")
}

#[test]
fn packet_fault_options_are_checked_before_the_program_starts() {
    let printed =
        succeeds(&["env", "--no-preload", "--drop", "0.01", "--delay", "#3:2ms", "--pcap", "a-%p.pcap"]);
    assert!(printed.contains("export MILLSTREAM_LINK='drop=0.01,delay=#3:2ms'"), "{printed}");
    let capture = std::path::absolute("a-%p.pcap").unwrap();
    assert!(printed.contains(&format!("export MILLSTREAM_PCAP='{}'", capture.display())), "{printed}");
    assert!(printed.contains("export MILLSTREAM_PATH='wire'"), "{printed}");
    let refused = fails(&["run", "--corrupt", "2", "--", "true"]);
    assert!(refused.contains("--corrupt=\"2\""), "{refused}");
    let refused = fails(&["run", "--no-preload", "--pcap", "a.pcap", "--path", "shm", "--", "true"]);
    assert!(refused.contains("--path shm has no packets"), "{refused}");
    let refused = fails(&["--device", "hardware", "run", "--", "true"]);
    assert!(refused.contains("--device hardware"), "{refused}");
}

#[test]
fn the_option_for_the_device_beats_the_variable() {
    let folder = tempfile::tempdir().unwrap();
    let stencil = |option: &str, variable: &str| {
        Command::new(env!("CARGO_BIN_EXE_millstream"))
            .args(["--device", option, "stencil", "--grid", "8x8", "--iterations", "1", "--verify"])
            .env("MILLSTREAM_DEVICE", variable)
            .current_dir(folder.path())
            .output()
            .unwrap()
    };
    let found = stencil("soft", "no-such-device");
    assert!(found.status.success(), "{}", text(&found.stderr));
    let missing = stencil("no-such-device", "soft");
    assert!(!missing.status.success() && text(&missing.stderr).contains("no-such-device"), "{missing:?}");
}

#[test]
fn the_demo_reproduces_every_decision_and_stores_every_byte() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path();
    let data = repository().join("data/sst1m");
    let shown = succeeds(&[
        "demo",
        "--data",
        data.to_str().unwrap(),
        "--out",
        out.to_str().unwrap(),
        "--replay",
        "3",
    ]);
    assert!(shown.contains("691,200"), "{shown}");

    let report = json(&out.join("camera.json"));
    assert_eq!(report["trigger"]["decisions_compared"], 691_200);
    assert_eq!(report["trigger"]["decisions_matching"], 691_200);
    assert_eq!(report["trigger"]["decisions_set"], 56);
    assert_eq!(report["events"], 32);
    assert_eq!(report["fragment_accounting"]["fragments_read"], 960);
    assert_eq!(report["payload_bytes"], 32 * 158_400);
    assert_eq!((&report["accepted_events"], &report["stored_events"]), (&30.into(), &30.into()));
    let replayed = json(&out.join("replay.json"));
    assert_eq!(replayed["trigger"]["decisions_matching"], 3 * 691_200);
    assert_eq!(replayed["not_stored_events"], 90);

    // Read the files with h5py, and compare with a second implementation of the input format.
    let mut rows = 0;
    for unit in ["bu0", "bu1"] {
        let mut compare = Command::new(PYTHON);
        compare.arg(repository().join("crates/store/tests/compare.py")).args(["--some", "2"]);
        compare.arg(out.join(format!("camera.{unit}.h5"))).arg("1");
        for stream in ["crate1.mfs", "crate2.mfs", "crate3.mfs", "decisions.mfs"] {
            compare.arg(out.join("data").join(stream));
        }
        let output = compare.output().expect("python3 starts; apt-get install python3-h5py");
        assert!(output.status.success(), "{unit}: {}", text(&output.stderr));
        let mut count = Command::new(PYTHON);
        count.arg("-c").arg("import h5py, sys; print(len(h5py.File(sys.argv[1])['events/number']))");
        let output = count.arg(out.join(format!("camera.{unit}.h5"))).output().unwrap();
        rows += text(&output.stdout).trim().parse::<u32>().expect("a number of rows");
    }
    assert_eq!(rows, 30);

    let names: Vec<String> = std::fs::read_dir(out)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert!(names.iter().any(|name| name.starts_with("event-") && name.ends_with(".svg")), "{names:?}");
    assert!(names.contains(&"replay.svg".to_owned()), "{names:?}");
    assert!(!names.iter().any(|name| name.ends_with(".partial")), "{names:?}");
}

#[test]
fn the_report_counts_the_payload_of_built_events_without_padding() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer =
        StreamWriter::create(folder.path().join("small.mfs"), 0..20, Alignment::CACHE_LINE).unwrap();
    for id in 0..4 {
        let mut source = writer.source(SourceId(id), SourceKind(1), "").unwrap();
        // Event 5 is incomplete. A fragment of 100 bytes occupies 128.
        for event in (0..20).filter(|event| (id, *event) != (3, 5)) {
            source.push(event, &[id as u8; 100]).unwrap();
        }
    }
    writer.finish().unwrap();
    let config = folder.path().join("small.toml");
    let text = "[run]\nname = \"small\"\nbatch = 8\ntimeout_ms = 20000\n[[readout]]\nname = \"a\"\ninput = \"small.mfs\"\n\
                [[builder]]\nname = \"bu0\"\nlanding = \"host\"\nslots = 4\n";
    std::fs::write(&config, text).unwrap();
    let report = folder.path().join("report.json");
    succeeds(&["evb", "run", "--json", report.to_str().unwrap(), config.to_str().unwrap()]);
    let report = json(&report);
    // Nothing else is on standard output then.
    let printed = succeeds(&["evb", "run", "--json", "-", config.to_str().unwrap()]);
    let printed: serde_json::Value = serde_json::from_str(&printed).expect("JSON");
    assert_eq!(printed["events"], report["events"]);
    assert_eq!((&report["events"], &report["payload_bytes"]), (&19.into(), &(19 * 400).into()), "{report}");
    let unit =
        |name: &str| report["units"].as_array().unwrap().iter().find(|unit| unit["name"] == name).unwrap();
    let readout = unit("readout a");
    assert_eq!((&readout["events"], &readout["fragments"]), (&20.into(), &79.into()));
    assert_eq!(readout["payload_bytes"], 79 * 100);
    assert_eq!(unit("builder bu0")["payload_bytes"], 19 * 400);
}

#[test]
fn a_run_whose_reader_has_gone_saves_its_report_and_picture() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).display().to_string();
    let text = "[run]\nname = \"small\"\nevents = 64\nbatch = 8\ntimeout_ms = 20000\n[[readout]]\nname = \"a\"\n[readout.generator]\n\
                first_source = 1\nsources = 1\nsize = \"64B\"\n[[builder]]\nname = \"bu0\"\nlanding = \"host\"\nslots = 4\n";
    std::fs::write(file("small.toml"), text).unwrap();
    let (report, picture) = (file("report.json"), file("picture.svg"));
    let (reader, writer) = std::io::pipe().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_millstream"));
    command.args(["evb", "run", "--json", &report, "--svg", &picture, &file("small.toml")]);
    command.stdout(writer).stderr(Stdio::piped());
    drop(reader);
    let output = command.spawn().unwrap().wait_with_output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !errors.contains("panicked"), "{}: {errors}", output.status);
    assert_eq!(json(Path::new(&report))["events"], 64);
    assert!(std::fs::read_to_string(picture).unwrap().contains("<svg"));
}

#[test]
fn a_run_whose_log_disk_is_full_or_whose_log_reader_has_gone_saves_its_report() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).display().to_string();
    // The run begins with a warning: nothing decides on events.
    let config = "[run]\nname = \"small\"\nevents = 64\nbatch = 8\ntimeout_ms = 20000\n[[readout]]\nname = \"a\"\n[readout.generator]\n\
                first_source = 1\nsources = 1\nsize = \"64B\"\n[[builder]]\nname = \"bu0\"\nlanding = \"host\"\nslots = 4\n\
                [output]\ndirectory = \"accepted\"\n";
    std::fs::write(file("small.toml"), config).unwrap();
    assert!(succeeds(&["evb", "check", &file("small.toml")]).contains("warning: "));
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    for (log, stderr) in [("full", Stdio::from(full)), ("pipe", Stdio::from(writer))] {
        let report = file(log);
        let mut command = Command::new(env!("CARGO_BIN_EXE_millstream"));
        command.args(["evb", "run", "--json", &report, &file("small.toml")]).stdout(Stdio::null());
        let status = command.stderr(stderr).status().unwrap();
        assert!(status.success(), "{log}: {status}");
        assert_eq!(json(Path::new(&report))["events"], 64);
    }
}

/// The events of the demo land in the memory of a GPU, whose kernel decides. The drivers are those of tests.
#[test]
fn the_demo_runs_on_a_gpu() {
    let folder = tempfile::tempdir().unwrap();
    gpu::link_drivers(folder.path());
    let data = repository().join("data/sst1m");
    let run = |libraries: &Path| {
        Command::new(env!("CARGO_BIN_EXE_millstream"))
            .args(["demo", "--memory-kind", "cuda:0", "--replay", "3", "--data"])
            .arg(&data)
            .arg("--out")
            .arg(folder.path())
            .env("LD_LIBRARY_PATH", libraries)
            .output()
            .expect("the program starts")
    };
    let output = run(folder.path());
    assert!(output.status.success(), "{}\n{}", text(&output.stdout), text(&output.stderr));
    for (name, events) in [("camera.json", 32), ("replay.json", 96)] {
        let report = json(&folder.path().join(name));
        assert_eq!(report["events"], events, "{report}");
        assert_eq!(report["trigger"]["decisions_matching"], events * 21_600, "{report}");
    }
    if !Path::new("/dev/nvidiactl").exists() {
        let refused = text(&run(Path::new("/nonexistent")).stderr);
        assert!(refused.contains("cuda:0: cannot load NVIDIA's driver libcuda.so.1"), "{refused}");
    }
}

/// A user's function in PTX decides on events in the memory of a GPU. The drivers are those of tests.
#[test]
fn a_users_function_decides_on_a_gpu() {
    let folder = tempfile::tempdir().unwrap();
    gpu::link_drivers(folder.path());
    let stream = folder.path().join("samples.mfs");
    let mut writer = StreamWriter::create(&stream, 0..20, Alignment::CACHE_LINE).unwrap();
    for id in 1..=2 {
        let mut source = writer.source(SourceId(id), SourceKind(0), &format!("samples {id}")).unwrap();
        // The samples of an event have its number in both bytes. Event 15 lacks a fragment.
        for event in (0..20).filter(|event| (id, *event) != (2, 15)) {
            source.push(event, &[event as u8; 100]).unwrap();
        }
    }
    writer.finish().unwrap();
    let module = repository().join("examples/kernels/decide_events.ptx");
    let config = folder.path().join("function.toml");
    let configuration = |kind: &str| {
        format!(
            "[run]\nname = \"function\"\nbatch = 8\ntimeout_ms = 20000\n[[readout]]\nname = \"a\"\ninput = \"samples.mfs\"\n\
             [[builder]]\nname = \"bu0\"\ncard = \"gpu\"\nslots = 4\n\
             [[card]]\nname = \"gpu\"\nkind = \"{kind}\"\nmemory = \"16MiB\"\nkernel = \"ptx\"\n\
             module = \"{}\"\narguments = [{}]\n",
            module.display(),
            12 * 0x101
        )
    };
    let report = folder.path().join("report.json");
    let run = |kind: &str, output: &str| {
        std::fs::write(&config, configuration(kind) + output).unwrap();
        Command::new(env!("CARGO_BIN_EXE_millstream"))
            .args(["evb", "run", "--json"])
            .args([&report, &config])
            .env("LD_LIBRARY_PATH", folder.path())
            .output()
            .expect("the program starts")
    };
    let output = run("cuda:0", "[output]\ndirectory = \"stored\"\n");
    assert!(report.exists(), "{}\n{}", text(&output.stdout), text(&output.stderr));
    let found = json(&report);
    assert_eq!((&found["accepted_events"], &found["stored_events"]), (&7.into(), &7.into()), "{found}");
    // Without an output, accepted events are only counted.
    let output = run("cuda:0", "");
    assert!(output.status.success(), "{}", text(&output.stdout));
    assert_eq!(json(&report)["accepted_events"], 7);
    let refused = text(&run("emulated", "").stderr);
    assert!(refused.contains("only a GPU runs PTX"), "{refused}");
}

/// The card of a run has one bank.
#[test]
#[cfg(feature = "wasm")]
fn a_users_function_decides_on_an_emulated_card() {
    let folder = tempfile::tempdir().unwrap();
    let module = "(module (memory (export \"memory\") 1) (func (export \"event\") (param $number i64) (param i32 i32) \
                  (result i32) (i32.and (i32.wrap_i64 (local.get $number)) (i32.const 1))))";
    std::fs::write(folder.path().join("odd.wat"), module).unwrap();
    let config = folder.path().join("function.toml");
    let text = "[run]\nname = \"function\"\nbatch = 8\ntimeout_ms = 20000\nevents = 64\n[[readout]]\nname = \"ru0\"\n[readout.generator]\n\
                first_source = 0\nsources = 2\nsize = \"200B\"\nrate_hz = 2000.0\n\
                [[builder]]\nname = \"bu0\"\ncard = \"card0\"\nslots = 4\n\
                [[card]]\nname = \"card0\"\nmemory = \"64MiB\"\nkernel = \"wasm\"\nmodule = \"odd.wat\"\n";
    std::fs::write(&config, text).unwrap();
    let report = succeeds(&["evb", "run", "--json", "-", config.to_str().unwrap()]);
    let report: serde_json::Value = serde_json::from_str(&report).expect("JSON");
    assert_eq!((&report["events"], &report["accepted_events"]), (&64.into(), &32.into()), "{report}");
}

#[test]
fn an_interrupted_run_accounts_for_every_fragment() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().to_str().unwrap().to_owned();
    let data = repository().join("data/sst1m");
    succeeds(&["demo", "--data", data.to_str().unwrap(), "--out", &out, "--replay", "1"]);
    let (config, account) = (folder.path().join("replay.toml"), folder.path().join("stopped.json"));
    let run = Command::new(env!("CARGO_BIN_EXE_millstream"))
        .args(["evb", "run", "--replay", "100000000", "--json"])
        .args([&account, &config])
        .stdout(Stdio::null())
        .spawn();
    let mut run = Running(run.expect("the program starts"));
    let running = || children(run.0.id()).into_iter().any(|unit| processor_ticks(unit) > 30);
    let deadline = Instant::now() + Duration::from_secs(60);
    while !running() {
        assert!(Instant::now() < deadline, "the run does not start");
        std::thread::sleep(Duration::from_millis(50));
    }
    signal(run.0.id(), Signal::INT);
    let status = run.ended();
    assert_eq!(status.code(), Some(1), "a run that was stopped is no success");
    let report = json(&account);
    assert!(report["error"].as_str().is_some_and(|cause| cause.contains("stop requested")), "{report}");
    let accounting = &report["fragment_accounting"];
    let outcomes = accounting["outcomes"].as_array().expect("a list by outcome and reason");
    let fragments = |count: &serde_json::Value| count["fragments"].as_u64().expect("a count");
    let built: u64 = outcomes.iter().filter(|count| count["outcome"] == "built").map(fragments).sum();
    assert!(built > 0, "{report}");
    assert_eq!(accounting["fragments_read"], outcomes.iter().map(fragments).sum::<u64>(), "{report}");
    assert!(accounting["inconsistencies"].as_array().is_some_and(Vec::is_empty), "{report}");
}

#[test]
fn a_lost_unit_is_named_as_in_the_configuration() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().to_str().unwrap().to_owned();
    let data = repository().join("data/sst1m");
    succeeds(&["demo", "--data", data.to_str().unwrap(), "--out", &out, "--replay", "1"]);
    let config = folder.path().join("replay.toml");
    let report = folder.path().join("lost.json");
    let run = Command::new(env!("CARGO_BIN_EXE_millstream"))
        .args(["evb", "run", "--replay", "100000000", "--json"])
        .args([&report, &config])
        .stdout(Stdio::null())
        .spawn();
    let mut run = Running(run.expect("the program starts"));
    let is_second_readout = |process: &u32| {
        let words = std::fs::read_to_string(format!("/proc/{process}/cmdline")).unwrap_or_default();
        words.contains("readout\x001\0") && processor_ticks(*process) > 10
    };
    let deadline = Instant::now() + Duration::from_secs(60);
    let readout = loop {
        if let Some(readout) = children(run.0.id()).into_iter().find(is_second_readout) {
            break readout;
        }
        assert!(Instant::now() < deadline, "the run does not start");
        std::thread::sleep(Duration::from_millis(20));
    };
    signal(readout, Signal::KILL);
    run.ended();
    let error = json(&report)["error"].as_str().unwrap().to_owned();
    assert!(error.contains("readout crate2 lost"), "{error}");
    assert!(!error.contains(": ;") && !error.ends_with(": "), "{error}");
}

#[test]
fn the_files_of_a_killed_builder_unit_hold_the_events_of_all_batches_that_were_done() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    succeeds(&[
        "stream",
        "unpack",
        repository().join("data/sst1m").to_str().unwrap(),
        path("data").to_str().unwrap(),
    ]);
    let readouts =
        (1..=3).map(|n| format!("[[readout]]\nname = \"crate{n}\"\ninput = \"data/crate{n}.mfs\"\n"));
    let text = format!(
        "[run]\nname = \"kept\"\nbatch = 4\ntimeout_ms = 20000\nreplay = 1000000\n{}[[builder]]\nname = \"bu0\"\nlanding = \"host\"\nslots = 4\n\
         [output]\ndirectory = \"out\"\nevents = \"built\"\nmax_events = 1000000\nrotate_size = \"4MiB\"\n",
        readouts.collect::<String>()
    );
    std::fs::write(path("kept.toml"), text).unwrap();
    let run = Command::new(env!("CARGO_BIN_EXE_millstream"))
        .args(["evb", "run", "--json"])
        .args([path("kept.json"), path("kept.toml")])
        .stdout(Stdio::null())
        .spawn();
    let mut run = Running(run.expect("the program starts"));
    // Four complete files, and events in one that is being written when the unit stands still.
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        assert!(Instant::now() < deadline, "no events are stored");
        std::thread::sleep(Duration::from_millis(5));
        if !path("out/kept.bu0.0004.h5").exists() {
            continue;
        }
        let builder = builder(&run.0);
        signal(builder, Signal::STOP);
        until_stopped(builder, deadline);
        let partials = millstream_store::partials(&path("out")).unwrap();
        // A file that was only just created cannot be read yet.
        if partials.iter().any(|partial| committed_numbers(partial).is_ok_and(|numbers| !numbers.is_empty()))
        {
            signal(builder, Signal::KILL);
            break;
        }
        signal(builder, Signal::CONT);
    }
    run.ended();

    let report = json(&path("kept.json"));
    assert_eq!(
        report["fragment_accounting"]["inconsistencies"].as_array().map(Vec::len),
        Some(0),
        "{report}"
    );
    // All events that count as built are in the files.
    let (stored, built) = (report["stored_events"].as_u64().unwrap(), report["events"].as_u64().unwrap());
    assert!(built > 0 && stored >= built && stored <= built + 4 * 4, "{stored} {built}");
    assert!(report["event_files"].as_array().unwrap().len() >= 4, "{report}");
    let listed = succeeds(&["evb", "files", path("out").to_str().unwrap()]);
    assert!(listed.contains("kept.bu0.0001.h5: ") && listed.contains("recovered"), "{listed}");

    let mut bytes = std::fs::read(path("out/kept.bu0.0002.h5")).unwrap();
    bytes[70_000] ^= 1;
    std::fs::write(path("out/kept.bu0.0002.h5"), bytes).unwrap();
    let error = fails(&["evb", "files", path("out").to_str().unwrap()]);
    assert!(error.contains("kept.bu0.0002.h5: checksum is crc32:"), "{error}");
}

/// The launcher and its units were killed before a file was complete.
#[test]
fn files_of_a_killed_run_are_listed_and_verified() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let directory = folder.path().join("out");
    std::fs::create_dir(&directory).unwrap();
    let files = ["evb", "files", directory.to_str().unwrap()];
    let recovering = [&files[..], &["--recover"]].concat();
    leave_partial(&directory.join("killed.bu0.h5"));
    // Of no builder unit, or not of this program.
    std::fs::write(directory.join("analysis.h5"), "its own").unwrap();
    std::fs::write(directory.join("analysis.v2.h5"), "").unwrap();
    assert!(fails(&files).contains("killed.bu0.h5.partial: partial"));
    let listed = succeeds(&recovering);
    assert!(
        listed.contains("killed.bu0.recovered.h5: 1 events 7 to 7,") && listed.contains(", recovered"),
        "{listed}"
    );
    assert_eq!(succeeds(&files), listed);

    // A file of another program keeps its name and its contents, and one that could not be synced is named.
    for (name, problem) in
        [("thesis.h5.partial", "the start"), ("other.bu0.h5.not-synced", "could not be synced")]
    {
        std::fs::write(directory.join(name), "its own text").unwrap();
        let error = fails(&recovering);
        assert!(error.contains(name) && error.contains(problem), "{error}");
        assert_eq!(std::fs::read(directory.join(name)).unwrap(), b"its own text");
        std::fs::remove_file(directory.join(name)).unwrap();
    }

    // The start of another run recovers what is there.
    std::fs::write(
        path("next.toml"),
        "[run]\nname = \"next\"\nbatch = 8\ntimeout_ms = 20000\nevents = 16\n[output]\ndirectory = \"out\"\nevents = \"built\"\n\
         [[readout]]\nname = \"ru0\"\n[readout.generator]\nfirst_source = 0\nsources = 1\nsize = \"200B\"\n\
         [[builder]]\nname = \"bu0\"\nslots = 4\nlanding = \"host\"\n",
    )
    .unwrap();
    leave_partial(&directory.join("other.bu0.0003.h5"));
    succeeds(&["evb", "run", path("next.toml").to_str().unwrap()]);
    let listed = succeeds(&files);
    for expected in ["next.bu0.h5: 16 events", "other.bu0.0003.recovered.h5: 1 events"] {
        assert!(listed.contains(expected), "{listed}");
    }

    // Killed before it wrote the first line of its index.
    std::fs::remove_file(directory.join("next.bu0.index.jsonl")).unwrap();
    let error = fails(&files);
    assert!(error.contains("next.bu0.h5: complete, but there is no index"), "{error}");
    assert!(succeeds(&recovering).contains("next.bu0.h5: 16 events"));
    let recovered = directory.join("killed.bu0.recovered.h5");
    let mut bytes = std::fs::read(&recovered).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&recovered, bytes).unwrap();
    let error = fails(&files);
    assert!(error.contains("killed.bu0.recovered.h5: checksum is"), "{error}");
}

/// Waits until all threads of a process are stopped.
fn until_stopped(process: u32, deadline: Instant) {
    let stopped = |task: std::io::Result<std::fs::DirEntry>| {
        task.is_ok_and(|task| stat_fields(&task.path()).first().is_some_and(|state| state == "T"))
    };
    while !std::fs::read_dir(format!("/proc/{process}/task")).unwrap().all(stopped) {
        assert!(Instant::now() < deadline, "process {process} does not stop");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// User CPU time of a process [1/100 s].
fn processor_ticks(of: u32) -> u64 {
    let fields = stat_fields(Path::new(&format!("/proc/{of}")));
    fields.get(11).map_or(0, |ticks| ticks.parse().expect("a number of ticks"))
}

/// The fields of `stat` of a process or thread from its state on; none if it has ended.
fn stat_fields(folder: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(folder.join("stat")).unwrap_or_default();
    // The name before them ends with the last parenthesis.
    text.rsplit(')').next().unwrap_or_default().split_whitespace().map(str::to_owned).collect()
}

#[test]
fn a_wrong_decision_fails_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().to_str().unwrap().to_owned();
    let data = repository().join("data/sst1m");
    succeeds(&["demo", "--data", data.to_str().unwrap(), "--out", &out, "--replay", "1"]);
    let path = folder.path().join("camera.toml");
    let wrong = std::fs::read_to_string(&path).unwrap().replace("threshold = 336", "threshold = 300");
    std::fs::write(&path, wrong).unwrap();
    let output = millstream(&["evb", "run", path.to_str().unwrap()]);
    assert!(!output.status.success());
    assert!(
        text(&output.stdout).contains("trigger decisions differ from the recorded ones"),
        "{}",
        text(&output.stdout)
    );
}

#[test]
fn a_configuration_is_refused_by_line_and_field() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.toml");
    std::fs::write(&path, "[run]\nname = \"x\"\nbatch = 8\nbatches = 9\n").unwrap();
    let path = path.to_str().unwrap();
    for command in ["check", "run"] {
        let error = fails(&["evb", command, path]);
        assert!(error.contains("run.toml") && error.contains("batches"), "{error}");
    }
    let error = fails(&["evb", "check", "/nowhere/run.toml"]);
    assert!(error.contains("/nowhere/run.toml"), "{error}");
}

#[test]
fn the_soft_device_is_listed_and_used_by_programs() {
    let shown = succeeds(&["--device", "soft", "devices", "--json"]);
    let devices: serde_json::Value = serde_json::from_str(&shown).expect("JSON");
    assert_eq!(devices[0]["soft"], true);
    let shown = succeeds(&["run", "--", "ibv_devinfo"]);
    assert!(shown.contains("mill0"), "{shown}");
    let shown = succeeds(&["env"]);
    assert!(shown.contains("export LD_LIBRARY_PATH="), "{shown}");
    let error = fails(&["run", "--", "/nowhere/program"]);
    assert!(error.contains("/nowhere/program"), "{error}");
    let error = fails(&["--device", "mlx5_7", "devices"]);
    assert!(error.contains("mlx5_7"), "{error}");
}

#[test]
fn a_shell_that_evaluates_env_uses_the_device() {
    let program = env!("CARGO_BIN_EXE_millstream");
    // Earlier values of the variables are kept.
    let script = format!(
        "LD_LIBRARY_PATH=/kept; export LD_LIBRARY_PATH; eval \"$('{program}' env)\"; ibv_devinfo && printenv"
    );
    let output = std::process::Command::new("sh").args(["-c", &script]).output().expect("a shell");
    let shown = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{shown}{}", String::from_utf8_lossy(&output.stderr));
    assert!(shown.contains("hca_id:\tmill0"), "{shown}");
    let path = shown.lines().find(|line| line.starts_with("LD_LIBRARY_PATH=")).expect("exported");
    assert!(path.ends_with(":/kept"), "{path}");
    let preload = shown.lines().find(|line| line.starts_with("LD_PRELOAD=")).expect("exported");
    assert!(preload.contains("libmillstream_preload.so"), "{preload}");
}

#[test]
fn a_truncated_stream_file_is_refused_by_offset_and_field() {
    let folder = tempfile::tempdir().unwrap();
    let packed = repository().join("data/sst1m");
    succeeds(&["stream", "unpack", packed.to_str().unwrap(), folder.path().to_str().unwrap()]);
    let whole = folder.path().join("crate1.mfs");
    let shown = succeeds(&["stream", "check", whole.to_str().unwrap()]);
    assert!(shown.contains("320 fragments"), "{shown}");
    let cut = folder.path().join("cut.mfs");
    let bytes = std::fs::read(&whole).unwrap();
    std::fs::write(&cut, &bytes[..bytes.len() / 2]).unwrap();
    let error = fails(&["stream", "check", cut.to_str().unwrap()]);
    assert!(error.contains("cut.mfs") && error.contains("byte") && error.contains("file_len"), "{error}");
}

/// The smallest run in HADES list-mode data: a begin record and one event of one block.
fn hld() -> Vec<u8> {
    let words =
        |words: &[u32], emit: fn(u32) -> [u8; 4]| words.iter().copied().flat_map(emit).collect::<Vec<u8>>();
    [
        words(&[32, 0x30001, 0x10002, 0, 1, 2, 3, 0], u32::to_le_bytes),
        words(&[32 + 24, 0x30001, 0x2001, 1, 1, 2, 3, 0], u32::to_le_bytes),
        words(&[24, 0x20001, 0x8000, 1, 0x1_e000, 0xabcd], u32::to_be_bytes),
    ]
    .concat()
}

#[test]
fn raw_data_becomes_a_stream_file() {
    let folder = tempfile::tempdir().unwrap();
    let (raw, stream) = (folder.path().join("run.hld"), folder.path().join("run.mfs"));
    std::fs::write(&raw, hld()).unwrap();
    let (raw, stream) = (raw.to_str().unwrap(), stream.to_str().unwrap());
    let output = millstream(&["stream", "import", raw, "--out", stream]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{output:?}");
    assert!(
        text.contains("(hld)") && text.contains("2 sources, events 1 to 1, 2 fragments, 56 bytes"),
        "{text}"
    );
    assert!(text.contains("not written: 1 × begin-run record, 32 bytes"), "{text}");
    assert!(millstream(&["stream", "check", stream]).status.success());

    let mut damaged = hld();
    damaged.truncate(60);
    std::fs::write(raw, damaged).unwrap();
    let output = millstream(&["stream", "import", raw, "--out", stream]);
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("run.hld: byte 60: expId"), "{text}");
    let output = millstream(&["stream", "import", raw, "--out", stream, "--events", "5..5"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("5..5 has no event"), "{output:?}");
}
