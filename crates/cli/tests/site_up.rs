//! `site up` and `site check --live`: the processes of a site on this host.

#[path = "common/running.rs"]
mod running;

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use running::Running;

const MILLSTREAM: &str = env!("CARGO_BIN_EXE_millstream");

fn millstream(folder: &Path, words: &[&str]) -> Command {
    let mut command = Command::new(MILLSTREAM);
    command.args(["--device", "soft"]).args(words).current_dir(folder).env("XDG_STATE_HOME", folder);
    command.stdin(Stdio::null());
    command
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn check(folder: &Path, file: &str) -> (bool, String) {
    let Output { status, stdout, stderr } =
        millstream(folder, &["site", "check", file, "--live"]).output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    (status.success(), text)
}

#[test]
fn a_site_comes_up_agrees_with_its_file_and_ends() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (card, control) = (free_port(), free_port());
    let text = format!(
        r#"
name = "small"
[[host]]
name = "node"
count = 2
[[host.socket]]
processor = "Westmere-EP"
cores = 4
clock = "2.4 GHz"
[[host.adapter]]
name = "apenet"
model = "APEnet+"
parent = "socket0"
pcie = {{ generation = 2, lanes = 8 }}
[[torus]]
name = "ring"
adapters = "node*.apenet"
dimensions = [2]
rate = "7 Gb/s"
encoding = "8b/10b"
buffer = "64 KiB"
[[card]]
name = "site-{card}"
address = "127.0.0.1:{card}"
memory = "64MiB"
banks = 2
[[event-builder]]
name = "camera"
configuration = "camera.toml"
control = "127.0.0.1:{control}"
"#
    );
    fs::write(folder.join("site.toml"), &text).unwrap();
    let configuration = "[run]\nname = \"camera\"\nevents = 10\nbatch = 2\n[[readout]]\nname = \"ru0\"\n[readout.generator]\n\
         first_source = 1\nsources = 1\nsize = \"64B\"\n[[builder]]\nname = \"bu0\"\nlanding = \"host\"\nslots = 2\n";
    fs::write(folder.join("camera.toml"), configuration).unwrap();

    let (agrees, before) = check(folder, "site.toml");
    assert!(!agrees && before.matches("DIFFERS").count() == 3, "{before}");

    let mut command = millstream(folder, &["site", "up", "site.toml"]);
    let mut up = Running(command.stdout(Stdio::piped()).spawn().unwrap());
    let mut lines = BufReader::new(up.0.stdout.take().unwrap()).lines();
    let whole: Vec<String> = lines.by_ref().map_while(Result::ok).take(4).collect();
    assert!(whole.last().is_some_and(|line| line.contains("small is up")), "{whole:?}");
    assert!(
        whole.contains(&format!("event builder camera: run control: http://127.0.0.1:{control}/")),
        "{whole:?}"
    );
    // It listens.
    let found = check(folder, "site.toml");
    assert!(found.0 && found.1.contains("2 nodes, 2x1x1"), "{}", found.1);

    // The file changes, what runs does not.
    fs::write(folder.join("site.toml"), text.replace("banks = 2", "banks = 4")).unwrap();
    let (agrees, after) = check(folder, "site.toml");
    assert!(!agrees && after.contains("banks: 4 in the file, 2 on the card"), "{after}");

    let pid = rustix::process::Pid::from_child(&up.0);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(up.ended().success());
    let (agrees, ended) = check(folder, "site.toml");
    assert!(!agrees && ended.matches("DIFFERS").count() == 3, "{ended}");
}

#[test]
fn ctrl_c_stops_the_run_of_a_site_and_waits_for_its_end() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let address = format!("127.0.0.1:{}", free_port());
    let site = format!(
        "name = \"small\"\n[[event-builder]]\nname = \"camera\"\nconfiguration = \"camera.toml\"\ncontrol = \"{address}\"\n\
         [[event-builder]]\nname = \"elsewhere\"\nconfiguration = \"camera.toml\"\ncontrol = \"192.0.2.7:8080\"\n"
    );
    fs::write(folder.join("site.toml"), site).unwrap();
    let configuration = "[run]\nname = \"camera\"\nevents = 1000000000\nbatch = 64\ntimeout_ms = 20000\n[[readout]]\nname = \"ru0\"\n\
         [readout.generator]\nfirst_source = 1\nsources = 1\nsize = \"4KiB\"\n[[builder]]\nname = \"bu0\"\n\
         landing = \"host\"\nslots = 8\n[output]\ndirectory = \"out\"\nevents = \"built\"\nmax_events = 20000\n";
    fs::write(folder.join("camera.toml"), configuration).unwrap();
    // A group of its own, as a shell gives a program in a terminal.
    let mut command = millstream(folder, &["site", "up", "site.toml"]);
    let mut up = Running(command.stdout(Stdio::piped()).process_group(0).spawn().unwrap());
    let mut lines = BufReader::new(up.0.stdout.take().unwrap()).lines();
    let whole: Vec<String> = lines.by_ref().map_while(Result::ok).take(3).collect();
    assert!(whole.contains(
        &"event builder elsewhere: not started, 192.0.2.7:8080 is not an address of this host".into()
    ));
    assert!(whole.last().is_some_and(|line| line.contains("small is up")), "{whole:?}");

    // Not `run-control`: both configurations are in one folder.
    let token = "run-control-camera/token";
    let start = || {
        let words = ["evb", "ctl", "--address", &address, "--token-file", token, "start"];
        millstream(folder, &words).output().unwrap()
    };
    let mut started = start();
    for _ in 0..100 {
        if started.status.success() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
        started = start();
    }
    assert!(started.status.success(), "{}", String::from_utf8_lossy(&started.stderr));

    let group = rustix::process::Pid::from_child(&up.0);
    rustix::process::kill_process_group(group, rustix::process::Signal::INT).unwrap();
    assert!(up.ended().success());
    let book = fs::read_to_string(folder.join("run-control-camera/logbook.jsonl")).unwrap();
    let last = book.lines().last().unwrap();
    assert!(last.contains("\"record\":\"end\"") && last.contains("\"result\":\"stopped\""), "{last}");
    let files = fs::read_dir(folder.join("out/run-000001")).unwrap().flatten();
    let names: Vec<_> = files.map(|file| file.file_name().into_string().unwrap()).collect();
    assert!(!names.is_empty() && names.iter().all(|name| !name.starts_with('.')), "{names:?}");
}
