//! `evb join` and `torus join` on the ranks of `mpirun` and of a script, on this host.

#[path = "common/running.rs"]
mod running;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use millstream_evb::config::ConfigFile;
use millstream_evb::process::Launcher;
use millstream_job::{Hub, Job, Rendezvous};
use running::Running;

const MILLSTREAM: &str = env!("CARGO_BIN_EXE_millstream");

/// Two readout and two builder units on generated fragments.
fn configuration(folder: &Path, events: u64, rate: &str) -> PathBuf {
    let mut text = format!("[run]\nname = \"job\"\nbatch = 8\nevents = {events}\ntimeout_ms = 20000\n");
    for unit in 0..2 {
        text += &format!(
            "[[readout]]\nname = \"ru{unit}\"\n[readout.generator]\nfirst_source = {}\nsources = 2\nsize = \"1KiB\"\n{rate}\n",
            0x100 * (unit + 1)
        );
    }
    for unit in 0..2 {
        text += &format!("[[builder]]\nname = \"bu{unit}\"\nlanding = \"host\"\nslots = 8\n");
    }
    text += "[output]\ndirectory = \"events\"\nevents = \"built\"\nmax_events = 1000000\n";
    let path = folder.join("job.toml");
    fs::write(&path, text).unwrap();
    path
}

/// `mpirun` of Open MPI for `ranks` ranks on this host.
fn mpirun(ranks: usize) -> Command {
    let mut command = Command::new("mpirun.openmpi");
    command.args(["-n", &ranks.to_string(), "--oversubscribe", MILLSTREAM]).stdin(Stdio::null());
    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    command
}

fn output(command: &mut Command) -> Output {
    command.output().unwrap_or_else(|error| panic!("{command:?}: {error}; `make setup` installs openmpi-bin"))
}

#[track_caller]
fn succeeds(command: &mut Command) -> String {
    let done = output(command);
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    assert!(
        done.status.success(),
        "{command:?}: {}\n{text}{}",
        done.status,
        String::from_utf8_lossy(&done.stderr)
    );
    text
}

/// Each fragment that was read has one outcome.
#[track_caller]
fn check_account(report: &serde_json::Value) {
    let account = &report["fragment_accounting"];
    let outcomes = account["outcomes"].as_array().unwrap();
    let sum: u64 = outcomes.iter().map(|outcome| outcome["fragments"].as_u64().unwrap()).sum();
    assert!(report["events"].as_u64().unwrap() > 0, "{report}");
    assert_eq!(account["fragments_read"], sum, "{report}");
    assert_eq!(account["inconsistencies"], serde_json::json!([]), "{report}");
}

fn report(path: &Path) -> serde_json::Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn units_on_the_ranks_of_mpirun_build_all_events() {
    let folder = tempfile::tempdir().unwrap();
    let config = configuration(folder.path(), 2000, "");
    let json = folder.path().join("report.json");
    let words =
        ["--device", "soft", "evb", "join", config.to_str().unwrap(), "--json", json.to_str().unwrap()];
    succeeds(mpirun(5).args(words));
    assert_eq!(report(&json)["events"], 2000, "{}", report(&json));
}

#[test]
fn torus_nodes_and_programs_are_on_the_ranks_of_mpirun() {
    let folder = tempfile::tempdir().unwrap();
    let program = format!(
        "echo $OMPI_COMM_WORLD_RANK $MILLSTREAM_TORUS_RANK of $MILLSTREAM_TORUS_SIZE >{}/$MILLSTREAM_TORUS_RANK",
        folder.path().display()
    );
    let words =
        ["--device", "soft", "torus", "join", "--dimensions", "2x2x1", "--json", "--", "sh", "-c", &program];
    let account: serde_json::Value = serde_json::from_str(&succeeds(mpirun(3).args(words))).unwrap();
    assert_eq!(account["nodes"].as_array().unwrap().len(), 4);
    let mut places: Vec<String> =
        (0..4).map(|node| fs::read_to_string(folder.path().join(node.to_string())).unwrap()).collect();
    places.iter_mut().for_each(|place| *place = place.trim().to_owned());
    assert_eq!(places, ["0 0 of 4", "1 1 of 4", "2 2 of 4", "0 3 of 4"]);
}

/// The rank that started the run names the failure; the others were not told that they lost it.
#[test]
fn a_torus_whose_program_fails_ends_on_all_ranks_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let at = format!("file:{}", folder.path().join("rank-0").display());
    let torus = ["--device", "soft", "torus", "join", "--dimensions", "2x1x1"];
    let start = |number| Running(rank(number, 2, &at, &torus).args(["--", "false"]).spawn().unwrap());
    let mut ranks: Vec<_> = (0..2).map(start).collect();
    let codes: Vec<_> = ranks.iter_mut().map(|rank| rank.ended().code()).collect();
    let errors: Vec<_> = (ranks.iter_mut())
        .map(|rank| std::io::read_to_string(rank.0.stderr.take().unwrap()).unwrap())
        .collect();
    assert_eq!(codes, [Some(1), Some(0)], "{errors:?}");
    assert!(errors[0].contains("application") && !errors[1].contains("lost"), "{errors:?}");
}

/// Ranks of a script.
fn start_ranks(ranks: usize, at: &str, words: &[&str]) -> Vec<Running> {
    (0..ranks).map(|number| Running(rank(number, ranks, at, words).spawn().unwrap())).collect()
}

/// One rank of a script.
fn rank(number: usize, ranks: usize, at: &str, words: &[&str]) -> Command {
    let mut command = Command::new(MILLSTREAM);
    command.args(words).args(["--rank", &number.to_string(), "--ranks", &ranks.to_string(), "--at", at]);
    command.env_remove(SECRET).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

const SECRET: &str = "MILLSTREAM_JOB_SECRET";

/// Waits until a file of the output directory has events.
fn wait_for_events(folder: &Path) {
    let deadline = Instant::now() + Duration::from_secs(90);
    let large = |entry: fs::DirEntry| entry.metadata().is_ok_and(|metadata| metadata.len() > 100_000);
    while !fs::read_dir(folder).is_ok_and(|mut entries| entries.any(|entry| entry.is_ok_and(large))) {
        assert!(Instant::now() < deadline, "no events in {}", folder.display());
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_job_that_gets_sigterm_on_all_ranks_ends_with_its_account() {
    let folder = tempfile::tempdir().unwrap();
    let config = configuration(folder.path(), 10_000_000, "rate_hz = 500.0");
    let json = folder.path().join("report.json");
    let at = format!("file:{}", folder.path().join("rank0").display());
    let words =
        ["--device", "soft", "evb", "join", config.to_str().unwrap(), "--json", json.to_str().unwrap()];
    let mut ranks = start_ranks(3, &at, &words);
    wait_for_events(&folder.path().join("events"));
    for rank in &ranks {
        let pid = rustix::process::Pid::from_child(&rank.0);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    }
    // The run was stopped, so rank 0 does not succeed; it has all terms of the conservation law. The others end in order.
    let codes: Vec<_> = ranks.iter_mut().map(|rank| rank.ended().code()).collect();
    let report = report(&json);
    assert_eq!(codes, [Some(1), Some(0), Some(0)], "{report}");
    check_account(&report);
}

#[test]
fn a_process_outside_of_a_job_names_what_is_missing() {
    let mut command = Command::new(MILLSTREAM);
    for name in ["OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK"] {
        command.env_remove(name);
    }
    let done = output(command.args(["evb", "join", "absent.toml"]));
    let text = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(!done.status.success() && text.contains("start it by srun or mpirun"), "{text}");
}

/// The arguments of all processes of this host.
fn argument_lists() -> Vec<String> {
    let processes = fs::read_dir("/proc").unwrap().flatten();
    // A process may end meanwhile.
    let lists = processes.filter_map(|process| fs::read(process.path().join("cmdline")).ok());
    lists.map(|list| String::from_utf8_lossy(&list).replace('\0', " ")).collect()
}

#[test]
fn no_argument_list_has_the_secret_and_the_secret_requests_no_process() {
    let folder = tempfile::tempdir().unwrap();
    let config = configuration(folder.path(), 10_000_000, "rate_hz = 500.0");
    let at = format!("file:{}", folder.path().join("rank0").display());
    let words = ["--device", "soft", "evb", "join", config.to_str().unwrap()];
    let secret = format!("kept-{}", std::process::id());
    let start = |number| Running(rank(number, 3, &at, &words).env(SECRET, &secret).spawn().unwrap());
    let mut ranks: Vec<_> = (0..3).map(start).collect();
    wait_for_events(&folder.path().join("events"));
    let hub = fs::read_to_string(folder.path().join("rank0")).unwrap();
    let port = hub.trim().rsplit_once(':').unwrap().1;
    let lists = argument_lists();
    let relays = lists.iter().filter(|list| list.contains(&format!("relay --hub 127.0.0.1:{port} ")));
    assert!(relays.count() >= 4, "the units of this job have relays: {lists:#?}");
    let shown: Vec<_> = lists.iter().filter(|list| list.contains(&secret)).collect();
    assert!(shown.is_empty(), "{shown:?}");

    // The secret is the key of ranks. Relays have another one.
    let key = folder.path().join("key");
    fs::write(&key, &secret).unwrap();
    let mut relay = Command::new(MILLSTREAM);
    relay.args(["relay", "--hub", &format!("127.0.0.1:{port}"), "--key-file"]).arg(&key);
    let done = output(relay.args(["--", "builder", "0", "127.0.0.1:9"]).stdin(Stdio::null()));
    let text = String::from_utf8_lossy(&done.stderr);
    assert!(!done.status.success() && text.contains("does not know the key"), "{text}");
    for rank in &ranks {
        let pid = rustix::process::Pid::from_child(&rank.0);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    }
    for rank in &mut ranks {
        rank.ended();
    }
}

/// Whoever knows the key of a job and takes the port first is its hub, with a configuration of its own. `trigger` is that
/// of its builder units. Returns the errors of the run.
fn run_of_another_hub(folder: &Path, trigger: &str) -> String {
    let (theirs, own) = (folder.join("theirs"), folder.join("own"));
    fs::create_dir(&theirs).and_then(|()| fs::create_dir(&own)).unwrap();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let job = Job {
        rank: 0,
        ranks: 2,
        key: String::new(),
        rendezvous: Rendezvous::Address { host: "127.0.0.1".to_owned(), port },
    };
    let hub = Hub::open(&job, |_| 1).unwrap();
    let words = ["--device", "soft", "evb", "join"];
    let own = configuration(&own, 100, "");
    let at = format!("127.0.0.1:{port}");
    let mut agent = rank(1, 2, &at, &[&words[..], &[own.to_str().unwrap()]].concat());
    let _agent = Running(agent.spawn().unwrap());
    let deadline = Instant::now() + Duration::from_secs(60);
    while hub.wait_for_ranks(Duration::ZERO).unwrap_err().to_string().ends_with("0, 1") {
        assert!(Instant::now() < deadline, "the agent does not join");
        std::thread::sleep(Duration::from_millis(20));
    }

    let path = configuration(&theirs, 100, "");
    let text = fs::read_to_string(&path).unwrap();
    let place = folder.join("own").join("events");
    fs::create_dir(&place).unwrap();
    let place = place.display();
    let text = text.replace("directory = \"events\"", &format!("directory = \"{place}\""));
    let text = text.replace("slots = 8\n", &format!("slots = 8\n{trigger}"));
    // A software trigger selects the events itself.
    let text = text.replace("events = \"built\"\n", "");
    fs::write(&path, text).unwrap();
    // Their builder units run at the rank, all else beside the hub.
    let program = theirs.join("launch");
    let script = format!(
        "#!/bin/sh\ncase $1 in\nbuilder) exec {MILLSTREAM} relay --hub {} --key-file {} -- \"$@\";;\n\
         *) exec {MILLSTREAM} --device soft evb unit -- \"$@\";;\nesac\n",
        hub.address(),
        hub.relay_key().display(),
    );
    fs::write(&program, script).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let config = ConfigFile::load(&path).unwrap().check().unwrap();
    let outcome = Launcher { program, arguments: Vec::new() }.run(&config, &mut |_| {});
    format!("{outcome:?}")
}

#[test]
fn a_rank_runs_no_trigger_of_another_configuration() {
    let folder = tempfile::tempdir().unwrap();
    let (program, proof) = (folder.path().join("program"), folder.path().join("proof"));
    fs::write(&program, format!("#!/bin/sh\necho run >{}\n", proof.display())).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let trigger = format!("[builder.trigger]\nprogram = \"{}\"\n", program.display());
    let outcome = run_of_another_hub(folder.path(), &trigger);
    assert!(!proof.exists(), "the program ran: {outcome}");
    assert!(outcome.contains("differs in trigger of builder bu0"), "{outcome}");
}
