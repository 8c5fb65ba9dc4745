//! `millstream evb control` and `millstream evb ctl` with real processes.

#[path = "common/killed.rs"]
mod killed;

use killed::leave_partial;
use millstream_fragment::stream::StreamWriter;
use millstream_fragment::{Alignment, SourceId, SourceKind};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const BOUND: Duration = Duration::from_secs(120);
const CONFIGURATION: &str = "\
[run]
name = \"test\"
batch = 8
replay = 100000000
timeout_ms = 20000
drain_timeout_ms = 5000

[[readout]]
name = \"crate1\"
input = \"crate1.mfs\"

[[builder]]
name = \"bu0\"
landing = \"host\"
slots = 8

[output]
directory = \"out\"
events = \"built\"
max_events = 100
";

/// A run control process.
struct RunControl {
    folder: tempfile::TempDir,
    process: Child,
    address: String,
}

impl RunControl {
    fn start() -> RunControl {
        RunControl::start_with(CONFIGURATION)
    }

    fn start_with(configuration: &str) -> RunControl {
        RunControl::start_through(Command::new(env!("CARGO_BIN_EXE_millstream")), configuration)
    }

    fn start_through(mut program: Command, configuration: &str) -> RunControl {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let mut writer = StreamWriter::create(path.join("crate1.mfs"), 0..64, Alignment::CACHE_LINE).unwrap();
        let mut source = writer.source(SourceId(1), SourceKind(9), "").unwrap();
        (0..64).for_each(|event| source.push(event, &[7; 1000]).unwrap());
        writer.finish().unwrap();
        std::fs::write(path.join("run.toml"), configuration).unwrap();
        let mut process = program
            .args(["--device", "soft", "evb", "control", "run.toml", "--listen", "127.0.0.1:0"])
            .current_dir(path)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines().map_while(Result::ok);
        let address = lines.find_map(|line| {
            Some(line.strip_prefix("run control: http://")?.trim_end_matches('/').to_owned())
        });
        assert!(lines.any(|line| line.starts_with("configured: ")));
        // The rest is read, so that the process can write it.
        std::thread::spawn(move || lines.for_each(drop));
        RunControl { folder, process, address: address.expect("an address") }
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn ctl(&self, arguments: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_millstream"))
            .args(["evb", "ctl", "--address", &self.address])
            .args(arguments)
            .current_dir(self.path())
            .output()
            .unwrap()
    }

    fn succeeds(&self, arguments: &[&str]) -> String {
        let output = self.ctl(arguments);
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{arguments:?}: {}\n{out}\n{err}", output.status);
        out.into_owned()
    }

    fn fails(&self, arguments: &[&str]) -> String {
        let output = self.ctl(arguments);
        assert!(!output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stdout));
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    fn status(&self) -> serde_json::Value {
        serde_json::from_str(&self.succeeds(&["status", "--json"])).unwrap()
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let process = rustix::process::Pid::from_raw(self.process.id() as i32).unwrap();
        rustix::process::kill_process(process, signal).unwrap();
    }

    /// Waits for the end of run control, which succeeds, and returns the last record of the log book.
    fn ended(&mut self) -> serde_json::Value {
        wait(|| self.process.try_wait().unwrap().is_some());
        assert!(self.process.wait().unwrap().success());
        let book = std::fs::read_to_string(self.path().join("run-control/logbook.jsonl")).unwrap();
        serde_json::from_str(book.lines().last().unwrap()).unwrap()
    }
}

impl Drop for RunControl {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn wait(mut is_reached: impl FnMut() -> bool) {
    let until = Instant::now() + BOUND;
    while !is_reached() {
        assert!(Instant::now() < until);
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn runs_are_commanded_from_a_terminal() {
    let mut control = RunControl::start();
    assert!(control.succeeds(&["start", "--comment", "first"]).starts_with("state: running"));
    wait(|| control.status()["run"]["events_built"].as_u64() > Some(1000));
    control.succeeds(&["pause"]);
    let paused = control.status();
    assert_eq!(paused["state"], "paused");
    let units = paused["units"].as_array().unwrap();
    let names: Vec<_> = units.iter().map(|unit| unit["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["manager", "crate1", "bu0"]);
    control.succeeds(&["resume"]);
    let refused = control.fails(&["set", "run.batch=4"]);
    assert!(refused.contains("set is not allowed while the state is running"), "{refused}");
    assert!(control.succeeds(&["stop"]).starts_with("state: configured"));
    let files = std::fs::read_dir(control.path().join("out/run-000001")).unwrap().flatten();
    let names: Vec<_> = files.map(|file| file.file_name().into_string().unwrap()).collect();
    assert!(names.iter().any(|name| name.ends_with(".h5")), "{names:?}");
    assert!(!names.iter().any(|name| name.starts_with('.')), "{names:?}");

    let refused = control.fails(&["set", "run.batch=0"]);
    assert!(refused.contains("run.toml:3: run.batch: 0 is out of range: must be 1 to"), "{refused}");
    control.succeeds(&["set", "run.replay=10", "run.batch=4"]);
    control.succeeds(&["start"]);
    wait(|| control.status()["last_run"]["number"] == 2);
    let ended = control.status();
    assert_eq!((&ended["state"], &ended["last_run"]["result"]), (&"configured".into(), &"complete".into()));
    assert_eq!(ended["last_run"]["events"], 640);
    assert_eq!(ended["faults"].as_array().map(Vec::len), Some(0));
    let log = control.succeeds(&["log"]);
    assert!(log.contains("run 1 begin") && log.contains("first") && log.contains("stopped"), "{log}");

    // A signal during a run ends it with its records.
    control.succeeds(&["set", "run.replay=100000000"]);
    control.succeeds(&["start"]);
    control.signal(rustix::process::Signal::TERM);
    let last = control.ended();
    assert_eq!(
        (&last["record"], &last["run"], &last["result"]),
        (&"end".into(), &3.into(), &"stopped".into())
    );
    let unreachable = control.fails(&["status"]);
    assert!(unreachable.contains("is `millstream evb control` running there?"), "{unreachable}");
}

#[test]
fn a_hang_up_ends_a_run_with_its_records() {
    // These tests may run below `nohup` themselves.
    let mut program = Command::new("env");
    program.args(["--default-signal=HUP", env!("CARGO_BIN_EXE_millstream")]);
    let mut control = RunControl::start_through(program, CONFIGURATION);
    control.succeeds(&["start"]);
    // The shell and the kernel send one each.
    control.signal(rustix::process::Signal::HUP);
    std::thread::sleep(Duration::from_millis(50));
    control.signal(rustix::process::Signal::HUP);
    let last = control.ended();
    assert_eq!((&last["record"], &last["result"]), (&"end".into(), &"stopped".into()));
}

#[test]
fn a_hang_up_that_was_ignored_from_the_start_ends_nothing() {
    let mut nohup = Command::new("nohup");
    nohup.arg(env!("CARGO_BIN_EXE_millstream"));
    let mut control = RunControl::start_through(nohup, CONFIGURATION);
    control.signal(rustix::process::Signal::HUP);
    assert!(control.succeeds(&["start"]).starts_with("state: running"));
    control.signal(rustix::process::Signal::TERM);
    assert_eq!(control.ended()["result"], "stopped");
}

#[test]
fn a_killed_unit_is_a_named_fault() {
    let control = RunControl::start();
    control.succeeds(&["start"]);
    let units = control.status()["units"].clone();
    let builder = units.as_array().unwrap().iter().find(|unit| unit["name"] == "bu0").unwrap();
    let process = rustix::process::Pid::from_raw(builder["pid"].as_i64().unwrap() as i32).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::KILL).unwrap();
    wait(|| {
        let status = control.status();
        let mut faults = status["faults"].as_array().into_iter().flatten();
        faults.any(|fault| fault["text"] == "bu0 ended during the run")
    });
    control.ctl(&["stop"]);
    wait(|| control.status()["run"].is_null());
    // Whether the run fails is the run's policy; the next one starts all the same.
    control.succeeds(&["configure"]);
    control.succeeds(&["start"]);
    control.succeeds(&["stop"]);
}

#[test]
fn a_run_that_went_on_without_a_unit_is_stopped_without_a_failure() {
    let second = "[[builder]]\nname = \"bu1\"\nlanding = \"host\"\nslots = 8\n";
    let control = RunControl::start_with(&format!("{CONFIGURATION}{second}"));
    control.succeeds(&["start"]);
    let built = || control.status()["run"]["events_built"].as_u64();
    wait(|| built() > Some(0));
    let units = control.status()["units"].clone();
    let builder = units.as_array().unwrap().iter().find(|unit| unit["name"] == "bu1").unwrap();
    let process = rustix::process::Pid::from_raw(builder["pid"].as_i64().unwrap() as i32).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::KILL).unwrap();
    wait(|| control.status()["faults"].as_array().is_some_and(|faults| !faults.is_empty()));
    let before = built();
    wait(|| built() > before);
    assert!(control.succeeds(&["stop"]).starts_with("state: configured"));
    assert_eq!(control.status()["last_run"]["result"], "stopped");
}

#[test]
fn settings_are_checked_as_by_evb_check() {
    let card = "[[card]]\nname = \"card0\"\nmemory = \"64MiB\"\nkernel = \"verify\"\n";
    let text = CONFIGURATION.replace("landing = \"host\"", "card = \"card0\"");
    let control = RunControl::start_with(&format!("{text}{card}"));
    let path = control.path().join("run.toml");
    let check = |from: &str, to: &str| {
        std::fs::write(
            control.path().join("changed.toml"),
            std::fs::read_to_string(&path).unwrap().replace(from, to),
        )
        .unwrap();
        let checked = Command::new(env!("CARGO_BIN_EXE_millstream"))
            .args(["evb", "check", "changed.toml"])
            .current_dir(control.path())
            .output()
            .unwrap();
        assert!(!checked.status.success(), "{}", String::from_utf8_lossy(&checked.stdout));
        String::from_utf8_lossy(&checked.stderr).into_owned()
    };
    for (setting, line, problem) in [
        ("run.device=nothing", ("[run]", "[run]\ndevice = \"nothing\""), "no RDMA device \"nothing\""),
        ("card.card0.kind=cuda:99", ("[[card]]", "[[card]]\nkind = \"cuda:99\""), "card.kind: "),
    ] {
        let (checked, refused) = (check(line.0, line.1), control.fails(&["set", setting]));
        assert!(checked.contains(problem), "{checked}");
        assert!(refused.contains(problem), "{refused}");
    }
    assert_eq!(control.status()["configuration"]["settings"], serde_json::json!({}));
}

#[test]
fn a_start_recovers_what_killed_runs_left_in_their_folders() {
    let control = RunControl::start();
    let killed = control.path().join("out/run-000001");
    std::fs::create_dir_all(&killed).unwrap();
    leave_partial(&killed.join("test.bu0.h5"));
    control.succeeds(&["set", "run.replay=10"]);
    control.succeeds(&["start"]);
    wait(|| control.status()["last_run"]["number"] == 2);
    assert_eq!(control.status()["last_run"]["result"], "complete");
    assert!(killed.join("test.bu0.recovered.h5").exists());
    let files = ["evb", "files", "out/run-000001"];
    let listed =
        Command::new(env!("CARGO_BIN_EXE_millstream")).args(files).current_dir(control.path()).output();
    let listed = listed.unwrap();
    let text = String::from_utf8_lossy(&listed.stdout);
    assert!(listed.status.success() && text.contains("test.bu0.recovered.h5: 1 events"), "{text}");
}

#[test]
fn a_wrong_token_and_a_used_directory_are_refused() {
    let control = RunControl::start();
    let refused = control.fails(&["start", "--token-file", "missing"]);
    assert!(refused.contains("missing: cannot open"), "{refused}");
    let second = Command::new(env!("CARGO_BIN_EXE_millstream"))
        .args(["--device", "soft", "evb", "control", "run.toml", "--listen", "127.0.0.1:0"])
        .current_dir(control.path())
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&second.stderr);
    assert!(!second.status.success() && error.contains("another run control process"), "{error}");
}
