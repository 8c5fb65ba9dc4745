//! `millstream torus run`: site files, hosts outside, keys, signals.

#[path = "common/running.rs"]
mod running;

use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Output};

use running::Running;

fn millstream(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_millstream")).args(words).output().expect("it starts")
}

/// The first torus of APEnet+, cut down to two nodes.
fn site(addresses: &str) -> tempfile::NamedTempFile {
    let text = include_str!("../../../sites/apenet-torus.toml")
        .replace("count = 64", "count = 2")
        .replace("dimensions = [4, 4, 4]", "dimensions = [2]");
    let file = tempfile::Builder::new().suffix(".toml").tempfile().expect("a file");
    std::fs::write(file.path(), text + addresses).expect("written");
    file
}

#[test]
fn a_site_file_names_shape_and_addresses() {
    let ports =
        [millstream_shm::ports::unused(), millstream_shm::ports::unused()].map(|port| port.expect("a port"));
    let file = site(&format!("addresses = [\"127.0.0.1:{}\", \"localhost:{}\"]\n", ports[0], ports[1]));
    let path = file.path().to_str().expect("a name");
    let script = r#"test "$MILLSTREAM_TORUS_DIMENSIONS $MILLSTREAM_TORUS_SIZE" = "2x1x1 2""#;
    let run =
        millstream(&["--device", "soft", "torus", "run", "--site", path, "--json", "--", "sh", "-c", script]);
    let error = String::from_utf8_lossy(&run.stderr).into_owned();
    assert!(run.status.success(), "{error}");
    let report: serde_json::Value = serde_json::from_slice(&run.stdout).expect("JSON");
    assert_eq!((&report["dimensions"], &report["total"]["idle"]), (&"2x1x1".into(), &true.into()));
}

#[test]
fn a_site_without_addresses_is_refused_by_name() {
    let file = site("");
    let path = file.path().to_str().expect("a name");
    let run = millstream(&["torus", "run", "--site", path, "--", "true"]);
    let error = String::from_utf8_lossy(&run.stderr).into_owned();
    assert!(!run.status.success() && error.contains("torus \"torus\" has no addresses"), "{error}");
    let run = millstream(&["torus", "run", "--", "true"]);
    let error = String::from_utf8_lossy(&run.stderr).into_owned();
    assert!(!run.status.success() && error.contains("--dimensions"), "{error}");
}

fn word_behind(option: &str, line: &str) -> String {
    let mut words = line.split_whitespace().skip_while(|word| *word != option);
    words.nth(1).unwrap_or_else(|| panic!("no {option}: {line}")).to_owned()
}

/// The key in the file that a line names, which only this user reads.
fn key_in(line: &str) -> String {
    let file = word_behind("--key-file", line);
    let mode = std::fs::metadata(&file).expect("it exists").permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "{file}");
    std::fs::read_to_string(file).expect("a key").trim().to_owned()
}

#[test]
fn a_host_outside_uses_what_programs_publish() {
    let test = std::env::current_exe().expect("known");
    let program = test.ancestors().nth(2).expect("in target/debug/deps").join("examples/published");
    assert!(program.is_file(), "{} is missing: run cargo build --examples", program.display());
    let key = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(key.path(), "0000000000c0ffee\n").expect("written");
    let key = key.path().to_str().expect("a name");
    let seventh = ["--seventh", "127.0.0.1:0", "--seventh-key-file", key, "--"];
    let run = Command::new(env!("CARGO_BIN_EXE_millstream"))
        .args(["--device", "soft", "torus", "run", "--dimensions", "2x2x1", "--json"])
        .args(seventh)
        .arg(program)
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn();
    let mut run = Running(run.expect("it starts"));
    let mut errors = std::io::BufReader::new(run.0.stderr.take().expect("piped"));
    let mut line = String::new();
    // Nodes may warn of a busy machine.
    while !line.starts_with("outside hosts:") {
        line.clear();
        assert!(std::io::BufRead::read_line(&mut errors, &mut line).expect("a line") > 0, "no outside hosts");
    }
    let variables = [
        ("MILLSTREAM_TORUS_GATEWAY", word_behind("--gateway", &line)),
        ("MILLSTREAM_TORUS_GATEWAY_KEY", key_in(&line)),
    ];
    let outside = |words: &[&str], input: &[u8]| {
        let process = Command::new(env!("CARGO_BIN_EXE_millstream"))
            .args(["--device", "soft", "torus", "outside"])
            .args(words)
            .envs(variables.clone())
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped())
            .spawn();
        let mut process = process.expect("it starts");
        std::io::Write::write_all(&mut process.stdin.take().expect("piped"), input).expect("it reads");
        process.wait_with_output().expect("it ends")
    };
    let start = std::time::Instant::now();
    let listed = loop {
        let output = outside(&["list", "--json"], &[]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let listed: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout).expect("JSON");
        if listed.len() == 8 {
            break listed;
        }
        assert!(start.elapsed().as_secs() < 60, "{listed:?}");
    };
    let numbers = listed.iter().filter(|row| row["name"] == "number" && row["access"] == "read-write");
    assert_eq!(numbers.count(), 4);
    let put = |node: &str, number: u64| {
        let output = outside(&["put", node, "number", "--counter", "0"], &number.to_le_bytes());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    put("3", 12);
    while outside(&["get", "3", "square"], &[]).stdout != 144_u64.to_le_bytes() {
        assert!(start.elapsed().as_secs() < 60, "no square");
    }
    let refused = outside(&["put", "3", "square"], &[1; 8]);
    let error = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && error.contains("does not allow this access"), "{error}");
    let missing = outside(&["get", "3", "cube"], &[]);
    let error = String::from_utf8_lossy(&missing.stderr).into_owned();
    assert!(!missing.status.success() && error.contains("has published no region \"cube\""), "{error}");
    ["0", "1", "2", "3"].into_iter().for_each(|node| put(node, 0));
    let output = run.0.stdout.take().expect("piped");
    let report: serde_json::Value = serde_json::from_reader(output).expect("JSON");
    assert!(run.0.wait().expect("it ends").success());
    let outside = &report["total"]["outside"];
    assert!(outside["commands"].as_u64() > Some(10), "{outside}");
    assert_eq!(outside["commands"], outside["completed"]);
}

/// Both are shown to other users of the host.
#[test]
fn no_argument_list_and_no_socket_name_has_a_key() {
    let options = ["--dimensions", "2x1x1", "--supervisors", "1", "--seventh", "127.0.0.1:0", "--"];
    let run = Command::new(env!("CARGO_BIN_EXE_millstream"))
        .args(["--device", "soft", "torus", "run"])
        .args(options)
        .args(["sleep", "60"])
        .stderr(std::process::Stdio::piped())
        .spawn();
    let mut run = Running(run.expect("it starts"));
    let mut errors = std::io::BufReader::new(run.0.stderr.take().expect("piped"));
    let mut files = Vec::new();
    let keys = ["watch:", "outside hosts:"].map(|start| {
        let mut line = String::new();
        // Nodes and supervisors may warn of a busy machine.
        while !line.starts_with(start) {
            line.clear();
            assert!(std::io::BufRead::read_line(&mut errors, &mut line).expect("a line") > 0, "no {start}");
        }
        files.push(word_behind("--key-file", &line));
        let key = key_in(&line);
        assert!(!line.contains(&key), "{line}");
        key
    });
    assert!(keys.iter().all(|key| key.len() == 16) && keys[0] != keys[1], "{keys:?}");
    let sockets = std::fs::read_to_string("/proc/net/unix").expect("Linux shows sockets");
    assert!(sockets.matches("@millstream-torus-").count() >= 2, "{sockets}");
    let launcher = run.0.id().to_string();
    let roles = || {
        let mut roles = Vec::new();
        for process in std::fs::read_dir("/proc").expect("Linux shows processes").flatten() {
            // Others end meanwhile.
            let Ok(arguments) = std::fs::read(process.path().join("cmdline")) else { continue };
            let arguments = String::from_utf8_lossy(&arguments).replace('\0', " ");
            assert!(!keys.iter().any(|key| arguments.contains(key)), "{arguments}");
            let status = std::fs::read_to_string(process.path().join("stat")).unwrap_or_default();
            let parent = status.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(1));
            if parent == Some(&launcher) && arguments.contains("--key-file -") {
                roles.extend(
                    arguments.split(' ').skip_while(|word| *word != "torus").nth(1).map(str::to_owned),
                );
            }
        }
        roles.sort();
        roles
    };
    assert!(!keys.iter().any(|key| sockets.contains(key)), "{sockets}");
    let start = std::time::Instant::now();
    // A process that has just been started has no arguments yet.
    while roles() != ["monitor", "monitor", "node", "node", "supervise"] {
        assert!(start.elapsed().as_secs() < 60, "{:?}", roles());
    }
    let launcher = rustix::process::Pid::from_child(&run.0);
    rustix::process::kill_process(launcher, rustix::process::Signal::TERM).expect("our child");
    assert_eq!(run.ended().code(), Some(1));
    assert!(!files.iter().any(|file| std::path::Path::new(file).exists()), "{files:?}");
}

/// The launcher has several descriptors for each process; programs may call `select`.
#[test]
fn the_limit_of_open_files_is_raised_but_not_for_programs() {
    let script = "ulimit -Sn 64 && exec \"$0\" --device soft torus run --dimensions 1x1x1 --once -- \
        sh -c 'ulimit -Sn; ulimit -Hn; grep \"Max open files\" /proc/$PPID/limits'";
    let output = Command::new("sh").args(["-c", script, env!("CARGO_BIN_EXE_millstream")]).output();
    let output = output.expect("it starts");
    let text = String::from_utf8_lossy(&output.stdout);
    let lines: Vec<_> = text.lines().collect();
    let [soft, hard, of_launcher, ..] = lines[..] else { panic!("{output:?}") };
    let raised = of_launcher.split_whitespace().nth(3).expect("a number");
    assert_eq!((soft, raised.parse()), ("64", Ok(hard.parse().unwrap_or(u64::MAX).min(1 << 16))), "{text}");
}

#[test]
fn a_process_without_a_key_says_how_to_give_it_one() {
    for words in [&["node", "--dimensions", "1x1x1", "--node", "0"][..], &["watch", "--supervisors", ":1"]] {
        let run = Command::new(env!("CARGO_BIN_EXE_millstream"))
            .arg("torus")
            .args(words)
            .env_remove("MILLSTREAM_TORUS_KEY")
            .output()
            .expect("it starts");
        let error = String::from_utf8_lossy(&run.stderr).into_owned();
        assert_eq!(run.status.code(), Some(1), "{error}");
        assert!(error.contains("name a file with --key-file, or set MILLSTREAM_TORUS_KEY"), "{error}");
    }
    let wrong = millstream(&["torus", "watch", "--supervisors", ":1", "--key-file", "/dev/null"]);
    let error = String::from_utf8_lossy(&wrong.stderr).into_owned();
    assert!(!wrong.status.success() && error.contains("\"/dev/null\" has no key"), "{error}");
}

/// `timeout`, a service manager and `kill` send SIGTERM to the launcher alone.
#[test]
fn sigterm_ends_the_applications() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("pid");
    let script = format!("echo $$ > {0}.new; mv {0}.new {0}; exec sleep 60", file.display());
    for network in ["torus", "direct"] {
        let run = Command::new(env!("CARGO_BIN_EXE_millstream"))
            .args(["--device", "soft", "torus", "run", "--network", network, "--dimensions", "1x1x1", "--"])
            .args(["sh", "-c", &script])
            .stderr(std::process::Stdio::piped())
            .spawn();
        let mut run = Running(run.expect("it starts"));
        let pid: i32 = loop {
            if let Ok(text) = std::fs::read_to_string(&file) {
                break text.trim().parse().expect("a number");
            }
            assert!(run.0.try_wait().expect("our child").is_none(), "{network}: it ended");
            std::thread::sleep(std::time::Duration::from_millis(20));
        };
        std::fs::remove_file(&file).expect("it exists");
        let launcher = rustix::process::Pid::from_child(&run.0);
        rustix::process::kill_process(launcher, rustix::process::Signal::TERM).expect("our child");
        let mut error = String::new();
        std::io::Read::read_to_string(&mut run.0.stderr.take().expect("piped"), &mut error).expect("text");
        assert_eq!(run.ended().code(), Some(1), "{error}");
        assert!(error.contains("asked to end"), "{network}: {error}");
        // The launcher has reaped it.
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists(), "{network}");
    }
}
