//! Runs that store whole batches: the same events as in event files, and nothing lost.

#[path = "common/processes.rs"]
mod processes;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use millstream_store::{EventReader, event_numbers};
use processes::{builder, signal};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

fn millstream(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_millstream")).args(arguments).output().expect("the program starts")
}

/// Standard output of a command that must succeed.
fn succeeds(arguments: &[&str]) -> String {
    let output = millstream(arguments);
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Standard error of a command that must fail.
fn fails(arguments: &[&str]) -> String {
    let output = millstream(arguments);
    assert!(!output.status.success(), "{arguments:?}: {output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The camera's data, unpacked in a folder on a file system with direct I/O.
struct Camera(TempDir);

impl Camera {
    fn new() -> Camera {
        let folder = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/sst1m");
        succeeds(&["stream", "unpack", data.to_str().unwrap(), folder.path().join("data").to_str().unwrap()]);
        for name in ["patches.csv", "pixels.csv"] {
            std::fs::copy(data.join(name), folder.path().join(name)).unwrap();
        }
        Camera(folder)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A configuration with the three crates, and the rest of the file.
    fn config(&self, name: &str, run: &str, rest: &str) -> PathBuf {
        let readouts =
            (1..=3).map(|n| format!("[[readout]]\nname = \"crate{n}\"\ninput = \"data/crate{n}.mfs\"\n"));
        let path = self.path(&format!("{name}.toml"));
        let text = format!(
            "[run]\nname = \"{name}\"\ntimeout_ms = 20000\n{run}\n{}{rest}",
            readouts.collect::<String>()
        );
        std::fs::write(&path, text).unwrap();
        path
    }

    /// Runs a configuration and returns its report.
    fn run(&self, config: &Path) -> Value {
        let json = config.with_extension("json");
        succeeds(&["evb", "run", "--json", json.to_str().unwrap(), config.to_str().unwrap()]);
        report(&json)
    }
}

fn report(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Status, states of the fragments, waveforms, trigger traces and decisions of an event.
type StoredRow = (Vec<u8>, Vec<u8>, Vec<i16>, Vec<u8>, Vec<u8>);

/// What an event file has of each event.
fn events(path: &Path, has_trigger: bool) -> BTreeMap<u64, StoredRow> {
    let reader = EventReader::open(path).unwrap();
    let event = |(row, &number): (usize, &u64)| {
        let status = reader.row_u8("events/status", row).unwrap();
        let state = reader.row_u8("events/fragment_state", row).unwrap();
        let waveforms = reader.row_i16("camera/waveforms", row).unwrap();
        let traces = reader.row_u8("camera/trigger_traces", row).unwrap();
        let trigger = reader.trigger(row).unwrap();
        assert_eq!(trigger.is_some(), has_trigger);
        (number, (status, state, waveforms, traces, trigger.map_or(Vec::new(), |trigger| trigger.decisions)))
    };
    reader.numbers().iter().enumerate().map(event).collect()
}

const CARD: &str = "[[builder]]\nname = \"bu0\"\ncard = \"card0\"\nslots = 4\n[[card]]\nname = \"card0\"\nmemory = \"64MiB\"\n\
                    kernel = \"cluster7\"\npatches = \"patches.csv\"\n";
const HOST: &str = "[[builder]]\nname = \"bu0\"\nlanding = \"host\"\nslots = 4\n";

#[test]
fn unpacked_batches_equal_the_event_file_of_the_same_run() {
    let camera = Camera::new();
    for (name, builder, stored, has_trigger, more) in [
        ("card", CARD, "accepted", true, ""),
        ("host", HOST, "built", false, ""),
        ("cache", HOST, "built", false, "direct = false\n"),
    ] {
        let output = |format: &str, more: &str| {
            format!(
                "{builder}[output]\ndirectory = \"{name}-{format}\"\nevents = \"{stored}\"\nformat = \"{format}\"\n{more}"
            )
        };
        let run = "batch = 5\nreplay = 3";
        let plain = camera.run(&camera.config(name, run, &output("hdf5", "")));
        let batches = camera.run(&camera.config(name, run, &output("batches", more)));
        for field in ["accepted_events", "stored_events", "events", "fragments"] {
            assert_eq!(plain[field], batches[field], "{name}: {field}");
        }
        let storage = &batches["storage"][0];
        assert_eq!(storage["payload_bytes"], plain["storage"][0]["payload_bytes"]);
        let [direct, copied] = ["direct_bytes", "copied_bytes"].map(|field| storage[field].as_u64().unwrap());
        let payload = storage["payload_bytes"].as_u64().unwrap();
        let (written, other) = if more.is_empty() { (direct, copied) } else { (copied, direct) };
        assert!(written >= payload && other == 0, "{name}: {storage}");

        let folder = camera.path(&format!("{name}-batches"));
        let listed = succeeds(&["evb", "files", folder.to_str().unwrap()]);
        assert!(
            listed.contains(&format!("{name}.bu0.batches: {} events", batches["stored_events"])),
            "{listed}"
        );
        let (file, unpacked) = (folder.join(format!("{name}.bu0.batches")), folder.join("unpacked.h5"));
        let [file, out] = [&file, &unpacked].map(|path| path.to_str().unwrap());
        let said = succeeds(&["evb", "unpack", file, "--out", out]);
        assert!(
            said.contains(&format!("{} events", batches["stored_events"])) && said.contains("0 corrupt"),
            "{said}"
        );
        let expected = events(&camera.path(&format!("{name}-hdf5/{name}.bu0.h5")), has_trigger);
        assert!(expected.len() as u64 == plain["stored_events"].as_u64().unwrap() && expected.len() >= 90);
        assert!(events(&unpacked, has_trigger) == expected, "{name}: the files differ");
        let error = fails(&["evb", "unpack", file, "--out", out]);
        assert!(error.contains("exists"), "{error}");
        succeeds(&["evb", "unpack", file, "--out", out, "--replace"]);
    }
}

#[test]
fn batches_of_a_killed_builder_unit_are_recovered_and_stored_once() {
    let camera = Camera::new();
    let builders: String =
        (0..2).map(|n| format!("[[builder]]\nname = \"bu{n}\"\nlanding = \"host\"\nslots = 4\n")).collect();
    let rest = format!(
        "{builders}[output]\ndirectory = \"out\"\nevents = \"built\"\nmax_events = 1000000\nformat = \"batches\"\n\
         rotate_size = \"4MiB\"\n[recovery]\nbuilder_loss = \"rebuild\"\n"
    );
    let config = camera.config("killed", "batch = 4\nreplay = 300", &rest);
    let json = camera.path("killed.json");
    let run = Command::new(env!("CARGO_BIN_EXE_millstream"))
        .args(["evb", "run", "--json"])
        .args([&json, &config])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("the program starts");
    let deadline = Instant::now() + Duration::from_secs(60);
    while !camera.path("out/killed.bu0.0003.batches.partial").exists() {
        assert!(Instant::now() < deadline, "no batches are stored");
        std::thread::sleep(Duration::from_millis(2));
    }
    signal(builder(&run), Signal::KILL);
    run.wait_with_output().unwrap();

    let report = report(&json);
    // All events are in the files, and none twice.
    assert_eq!(report["derived"]["problems"], serde_json::json!([]), "{report}");
    assert_eq!(report["recovered"][0], "builder bu0", "{report}");
    let stored = report["stored_events"].as_u64().unwrap();
    assert!(stored == 32 * 300 && report["events"] == stored, "{report}");
    let out = camera.path("out");
    let listed = succeeds(&["evb", "files", out.to_str().unwrap()]);
    assert!(
        listed.contains("killed.bu0.0001.batches: ") && listed.contains("killed.bu1.0002.batches: "),
        "{listed}"
    );
    let mut numbers: Vec<u64> = report["event_files"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|path| event_numbers(Path::new(path.as_str().unwrap())).unwrap())
        .collect();
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len() as u64, stored);
}

/// A unit that is killed between renaming a file and writing its entry leaves a complete file that the index lacks.
#[test]
fn a_complete_file_that_the_index_lacks_is_named_and_added() {
    let camera = Camera::new();
    let rest = format!(
        "{HOST}[output]\ndirectory = \"listed\"\nevents = \"built\"\nmax_events = 1000000\nformat = \"batches\"\n\
         rotate_size = \"4MiB\"\n"
    );
    let config = camera.config("listed", "batch = 4\nreplay = 3", &rest);
    succeeds(&["evb", "run", config.to_str().unwrap()]);
    let folder = camera.path("listed");
    let index = folder.join("listed.bu0.index.jsonl");
    let whole = std::fs::read_to_string(&index).unwrap();
    assert!(whole.lines().count() >= 2, "{whole}");
    let (last, _) = whole.trim_end().rsplit_once('\n').unwrap();
    std::fs::write(&index, format!("{last}\n")).unwrap();
    let folder = folder.to_str().unwrap();
    let error = fails(&["evb", "files", folder]);
    assert!(error.contains("complete, but not in the index; --recover adds it"), "{error}");
    succeeds(&["evb", "files", "--recover", folder]);
    succeeds(&["evb", "files", folder]);
    assert_eq!(std::fs::read_to_string(&index).unwrap(), whole);

    // An event file that was unpacked beside its batch file has the same events.
    let [batches, unpacked] = ["batches", "h5"].map(|end| format!("{folder}/listed.bu0.0001.{end}"));
    succeeds(&["evb", "unpack", &batches, "--out", &unpacked]);
    succeeds(&["evb", "files", "--recover", folder]);
    assert_eq!(std::fs::read_to_string(&index).unwrap(), whole);
}

#[test]
fn a_second_run_with_the_same_name_keeps_the_events_of_the_first() {
    let camera = Camera::new();
    let output = format!("{HOST}[output]\ndirectory = \"again\"\nevents = \"built\"\n");
    let rotating =
        camera.config("again", "batch = 4\nreplay = 3", &format!("{output}rotate_size = \"4MiB\"\n"));
    camera.run(&rotating);
    let names = || {
        let files = std::fs::read_dir(camera.path("again")).unwrap();
        files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect::<BTreeSet<_>>()
    };
    let first = names();
    assert!(first.contains("again.bu0.0002.h5"), "{first:?}");
    let index = camera.path("again/again.bu0.index.jsonl");
    let listed = std::fs::read_to_string(&index).unwrap();

    let one_file = camera.config("again", "batch = 4\nreplay = 1", &output);
    let checked = succeeds(&["evb", "check", one_file.to_str().unwrap()]);
    assert!(checked.contains("warning: ") && checked.contains("again.bu0.0001.h5: "), "{checked}");
    let error = fails(&["evb", "run", one_file.to_str().unwrap()]);
    assert!(error.contains("again.bu0.0001.h5: ") && error.contains("events of an earlier run"), "{error}");
    assert_eq!((names(), std::fs::read_to_string(&index).unwrap()), (first, listed));

    let replacing = camera.config("again", "batch = 4\nreplay = 1", &format!("{output}replace = true\n"));
    camera.run(&replacing);
    assert_eq!(names(), ["again.bu0.h5", "again.bu0.index.jsonl"].map(str::to_owned).into());
    succeeds(&["evb", "files", "--recover", camera.path("again").to_str().unwrap()]);
    assert_eq!(std::fs::read_to_string(&index).unwrap().lines().count(), 1);
}

/// Runs a configuration with the output directory `full` on a small tmpfs in a mount namespace of its own, and copies the files
/// to the folder `copy`. Several first writes fit, also if events arrive faster than they are stored.
fn run_on_full_disk(camera: &Camera, config: &Path, json: &Path) -> Output {
    let script = "mkdir full copy && mount -t tmpfs -o size=32m tmpfs full || exit 77; \"$@\"; code=$?; cp full/* copy; exit $code";
    Command::new("unshare")
        .arg(if rustix::process::getuid().is_root() { "-m" } else { "-rm" })
        .args(["sh", "-c", script, "sh", env!("CARGO_BIN_EXE_millstream"), "evb", "run", "--json"])
        .args([json, config])
        .current_dir(camera.0.path())
        .output()
        .expect("unshare (util-linux) starts")
}

/// An event file keeps its blocks, so nothing is left for the index.
#[test]
fn a_run_whose_disk_is_full_has_a_report() {
    let camera = Camera::new();
    let rest = format!("{HOST}[output]\ndirectory = \"full\"\nevents = \"built\"\nmax_events = 1000000\n");
    let config = camera.config("full", "batch = 4\nreplay = 1000", &rest);
    let json = camera.path("full.json");
    let ran = run_on_full_disk(&camera, &config, &json);
    let said = String::from_utf8_lossy(&ran.stderr);
    if ran.status.code() == Some(77) {
        println!("skipped: no tmpfs can be mounted: {said}");
        return;
    }
    assert!(!ran.status.success());
    let report = report(&json);
    let error = report["error"].as_str().unwrap();
    assert!(error.contains("full.bu0.h5.partial: cannot write"), "{error}");
    let inconsistencies = report["fragment_accounting"]["inconsistencies"].to_string();
    assert!(
        inconsistencies.contains("full.bu0.index.jsonl: cannot write")
            && inconsistencies.contains("No space"),
        "{report}"
    );
    assert!(report["events"].as_u64().unwrap() > 0, "{report}");
}

#[test]
fn a_full_disk_ends_the_run_and_keeps_whole_batches() {
    let camera = Camera::new();
    let rest = format!(
        "{HOST}[output]\ndirectory = \"full\"\nevents = \"built\"\nmax_events = 1000000\nformat = \"batches\"\n"
    );
    let config = camera.config("full", "batch = 4\nreplay = 1000", &rest);
    let json = camera.path("full.json");
    let ran = run_on_full_disk(&camera, &config, &json);
    let said = String::from_utf8_lossy(&ran.stderr);
    if !json.exists() || said.contains("O_DIRECT") {
        println!("skipped: no tmpfs with direct I/O (Linux 6.6) can be mounted: {said}");
        return;
    }
    assert!(!ran.status.success());
    let report = report(&json);
    let error = report["error"].as_str().unwrap();
    assert!(
        error.contains("full.bu0.batches.partial: cannot write") && error.contains("No space"),
        "{error}"
    );
    assert_eq!(report["fragment_accounting"]["inconsistencies"], serde_json::json!([]), "{report}");
    // All batches that were done are in the recovered file.
    let (stored, built) = (report["stored_events"].as_u64().unwrap(), report["events"].as_u64().unwrap());
    assert!(built > 0 && stored >= built && stored <= built + 4 * 4, "{stored} {built}");
    let listed = succeeds(&["evb", "files", camera.path("copy").to_str().unwrap()]);
    assert!(listed.contains(&format!("full.bu0.recovered.batches: {stored} events")), "{listed}");
    let file = camera.path("copy/full.bu0.recovered.batches");
    let unpacked = camera.path("full.h5");
    succeeds(&["evb", "unpack", file.to_str().unwrap(), "--out", unpacked.to_str().unwrap()]);
    assert_eq!(EventReader::open(&unpacked).unwrap().numbers(), event_numbers(&file).unwrap());

    let mut bytes = std::fs::read(&file).unwrap();
    let at = bytes.len() / 2;
    bytes[at..at + 4096].iter_mut().for_each(|byte| *byte ^= 1);
    std::fs::write(&file, bytes).unwrap();
    let error = fails(&["evb", "files", camera.path("copy").to_str().unwrap()]);
    assert!(error.contains("full.bu0.recovered.batches: record "), "{error}");
}
