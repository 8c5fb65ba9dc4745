//! `evb join`, `torus join` and cards as generic resources under Slurm: munged, slurmctld and two slurmd of this test in a
//! temporary directory.
//!
//! `make test-slurm` runs it. It needs root, as slurmd does, and Debian's slurmd, slurmctld, slurm-client and munge.

#[path = "common/running.rs"]
mod running;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use running::Running;

const MILLSTREAM: &str = env!("CARGO_BIN_EXE_millstream");
const PROGRAMS: [&str; 5] = ["munged", "slurmctld", "slurmd", "srun", "scancel"];

/// The daemons of a cluster of two nodes; dropping it ends them.
struct Slurm {
    folder: PathBuf,
    daemons: Vec<Child>,
}

impl Drop for Slurm {
    fn drop(&mut self) {
        for daemon in self.daemons.iter_mut().rev() {
            let _ = rustix::process::kill_process(
                rustix::process::Pid::from_child(daemon),
                rustix::process::Signal::TERM,
            );
            let deadline = Instant::now() + Duration::from_secs(5);
            while matches!(daemon.try_wait(), Ok(None)) && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(20));
            }
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}

fn installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain([PathBuf::from("/usr/sbin")])
        .any(|folder| folder.join(program).is_file())
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

impl Slurm {
    fn start(folder: &Path) -> Slurm {
        Slurm::start_with(folder, "", ["", ""])
    }

    /// `lines` are more lines of slurm.conf, `nodes` more words of its two nodes.
    fn start_with(folder: &Path, lines: &str, nodes: [&str; 2]) -> Slurm {
        // munged checks the owner and mode of each folder on the way to its files.
        fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).unwrap();
        let munge = folder.join("munge");
        fs::create_dir_all(&munge).unwrap();
        fs::set_permissions(&munge, fs::Permissions::from_mode(0o711)).unwrap();
        let key = munge.join("key");
        fs::write(&key, [0x5a; 128]).unwrap();
        fs::set_permissions(&key, fs::Permissions::from_mode(0o400)).unwrap();
        let path = |name: &str| folder.join(name).display().to_string();
        for name in ["state", "spool-n1", "spool-n2"] {
            fs::create_dir_all(folder.join(name)).unwrap();
        }
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        let host = host.trim();
        let conf = format!(
            "ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmctldPort={}\nSlurmUser=root\nSlurmdUser=root\n\
             AuthType=auth/munge\nAuthInfo=socket={munge}\nCredType=cred/munge\nStateSaveLocation={state}\n\
             SlurmdSpoolDir={spool}-%n\nSlurmctldPidFile={ctld}\nSlurmdPidFile={slurmd}-%n.pid\nSlurmctldLogFile={ctldlog}\n\
             SlurmdLogFile={slurmdlog}-%n.log\nProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\n\
             SelectType=select/cons_tres\nSelectTypeParameters=CR_Core\nSchedulerType=sched/builtin\nReturnToService=2\nMpiDefault=none\nSlurmdParameters=config_overrides\n\
             KillWait=30\nSwitchType=switch/none\nJobAcctGatherType=jobacct_gather/none\nAccountingStorageType=accounting_storage/none\n\
             NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={} CPUs=8 {}\n\
             NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={} CPUs=8 {}\n\
             PartitionName=all Nodes=n1,n2 Default=YES State=UP OverSubscribe=FORCE\n{lines}",
            free_port(),
            free_port(),
            nodes[0],
            free_port(),
            nodes[1],
            munge = path("munge/socket"),
            state = path("state"),
            spool = path("spool"),
            ctld = path("slurmctld.pid"),
            slurmd = path("slurmd"),
            ctldlog = path("slurmctld.log"),
            slurmdlog = path("slurmd"),
        );
        fs::write(folder.join("slurm.conf"), conf).unwrap();
        fs::write(folder.join("cgroup.conf"), "CgroupPlugin=autodetect\n").unwrap();
        let mut slurm = Slurm { folder: folder.to_owned(), daemons: Vec::new() };
        let munge = |name: &str| munge.join(name).display().to_string();
        slurm.daemon(&[
            "munged",
            "--foreground",
            "--force",
            "--key-file",
            &munge("key"),
            "--socket",
            &munge("socket"),
            "--pid-file",
            &munge("pid"),
            "--log-file",
            &munge("log"),
            "--seed-file",
            &munge("seed"),
        ]);
        slurm.wait_for("munged", |slurm| slurm.folder.join("munge/socket").exists());
        slurm.daemon(&["slurmctld", "-D"]);
        slurm.daemon(&["slurmd", "-D", "-N", "n1"]);
        slurm.daemon(&["slurmd", "-D", "-N", "n2"]);
        slurm.wait_for("two idle nodes", |slurm| {
            let shown = slurm.command("sinfo", &["--noheader", "--format", "%D %t"]).output().unwrap();
            String::from_utf8_lossy(&shown.stdout).trim() == "2 idle"
        });
        slurm
    }

    fn command(&self, program: &str, words: &[&str]) -> Command {
        let mut command = Command::new(program);
        let path = format!("{}:/usr/sbin", std::env::var("PATH").unwrap_or_default());
        command.args(words).env("SLURM_CONF", self.folder.join("slurm.conf")).env("PATH", path);
        command.current_dir(&self.folder).stdin(Stdio::null());
        command
    }

    fn daemon(&mut self, words: &[&str]) {
        let log =
            fs::File::create(self.folder.join(format!("{}-{}.out", words[0], self.daemons.len()))).unwrap();
        let mut command = self.command(words[0], &words[1..]);
        command.stdout(log.try_clone().unwrap()).stderr(log);
        self.daemons.push(command.spawn().unwrap_or_else(|error| panic!("{words:?}: {error}")));
    }

    fn wait_for(&mut self, what: &str, done: impl Fn(&Slurm) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(90);
        while !done(self) {
            let ended = self.daemons.iter_mut().any(|daemon| !matches!(daemon.try_wait(), Ok(None)));
            if ended || Instant::now() >= deadline {
                panic!("no {what}:\n{}", self.logs());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    #[track_caller]
    fn wait(&self, what: &str, done: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !done() {
            assert!(Instant::now() < deadline, "no {what}:\n{}", self.logs());
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn logs(&self) -> String {
        let mut text = String::new();
        for folder in [self.folder.clone(), self.folder.join("munge")] {
            for entry in fs::read_dir(folder).unwrap().flatten() {
                let path = entry.path();
                if path.extension().is_some_and(|extension| extension == "out" || extension == "log") {
                    let log = fs::read_to_string(&path).unwrap_or_default();
                    let last: Vec<&str> = log.lines().rev().take(15).collect();
                    text += &format!("== {}\n", path.display());
                    last.iter().rev().for_each(|line| text += &format!("{line}\n"));
                }
            }
        }
        text
    }

    /// A command of `srun` with tasks on both nodes.
    fn srun(&self, tasks: usize, words: &[&str]) -> Command {
        let (tasks, each) = (tasks.to_string(), (tasks / 2).to_string());
        let places =
            ["--nodes", "2", "--ntasks", &tasks, "--ntasks-per-node", &each, "--distribution", "cyclic"];
        let mut command = self.command("srun", &places);
        command.arg(MILLSTREAM);
        command.args(["--device", "soft"]).args(words);
        command
    }
}

fn configuration(folder: &Path, name: &str, events: u64, rate: &str) -> String {
    let text = format!(
        "[run]\nname = \"{name}\"\nbatch = 8\nevents = {events}\ntimeout_ms = 20000\n\
         [[readout]]\nname = \"ru0\"\n[readout.generator]\nfirst_source = 256\nsources = 2\nsize = \"1KiB\"\n{rate}\n\
         [[readout]]\nname = \"ru1\"\n[readout.generator]\nfirst_source = 512\nsources = 2\nsize = \"1KiB\"\n{rate}\n\
         [[builder]]\nname = \"bu0\"\nlanding = \"host\"\nslots = 8\n\
         [output]\ndirectory = \"{name}\"\nevents = \"built\"\nmax_events = 1000000\n"
    );
    let path = folder.join(format!("{name}.toml"));
    fs::write(&path, text).unwrap();
    path.display().to_string()
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

/// Whether the test can run here. If not, prints the reason.
fn can_run() -> bool {
    let missing: Vec<_> = PROGRAMS.into_iter().filter(|program| !installed(program)).collect();
    if !missing.is_empty() {
        eprintln!(
            "NOT RUN: {} not installed; apt-get install slurmd slurmctld slurm-client munge",
            missing.join(", ")
        );
        return false;
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("NOT RUN: slurmd needs root");
        return false;
    }
    true
}

#[test]
#[ignore = "starts Slurm's daemons: make test-slurm"]
fn slurm_runs_units_and_nodes_and_a_cancelled_job_ends_with_its_account() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let slurm = Slurm::start(folder);

    // A run to its end: the manager and three units on two nodes.
    let config = configuration(folder, "whole", 2000, "");
    let json = folder.join("whole.json");
    let done = slurm.srun(4, &["evb", "join", &config, "--json", json.to_str().unwrap()]).output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success(), "{text}\n{}", slurm.logs());
    assert_eq!(report(&json)["events"], 2000, "{text}");

    // Nodes of a torus, in turn on the two nodes of the cluster.
    let program = "echo $SLURMD_NODENAME $SLURM_PROCID >node-$MILLSTREAM_TORUS_RANK";
    let words = ["torus", "join", "--dimensions", "2x2x1", "--", "sh", "-c", program];
    let done = slurm.srun(4, &words).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let places: Vec<String> = (0..4)
        .map(|node| fs::read_to_string(folder.join(format!("node-{node}"))).unwrap().trim().to_owned())
        .collect();
    assert_eq!(places, ["n1 0", "n2 1", "n1 2", "n2 3"]);

    // A cancelled job.
    let config = configuration(folder, "cancelled", 10_000_000, "rate_hz = 500.0");
    let json = folder.join("cancelled.json");
    let words = ["evb", "join", &config, "--json", json.to_str().unwrap()];
    let mut job = slurm.srun(4, &words).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let events = folder.join("cancelled");
    let large = |entry: fs::DirEntry| entry.metadata().is_ok_and(|metadata| metadata.len() > 100_000);
    let deadline = Instant::now() + Duration::from_secs(90);
    while !fs::read_dir(&events).is_ok_and(|mut entries| entries.any(|entry| entry.is_ok_and(large))) {
        assert!(Instant::now() < deadline, "{}", slurm.logs());
        std::thread::sleep(Duration::from_millis(100));
    }
    let queue = slurm.command("squeue", &["--noheader", "--format", "%i"]).output().unwrap();
    let id = String::from_utf8_lossy(&queue.stdout).trim().to_owned();
    assert!(slurm.command("scancel", &[&id]).status().unwrap().success());
    let _ = job.wait().unwrap();
    let report = report(&json);
    check_account(&report);
}

/// An emulated card of a node; dropping it ends its process.
struct Card {
    _process: Running,
    address: String,
}

impl Card {
    fn is_free(&self) -> bool {
        self.info()["lease"]["state"] == "Free"
    }

    fn serve(name: &str) -> Card {
        let address = format!("127.0.0.1:{}", free_port());
        let process = Command::new(MILLSTREAM)
            .args(["--device", "soft", "card", "serve", name, "--memory", "16MiB", "--listen", &address])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn();
        let process = Running(process.unwrap());
        let deadline = Instant::now() + Duration::from_secs(30);
        while std::net::TcpStream::connect(&address).is_err() {
            assert!(Instant::now() < deadline, "card {name} does not listen at {address}");
            std::thread::sleep(Duration::from_millis(50));
        }
        Card { _process: process, address }
    }

    fn info(&self) -> serde_json::Value {
        let output = Command::new(MILLSTREAM)
            .args(["--device", "soft", "card", "info", &self.address, "--json"])
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }
}

/// A script of tools/slurm with the files of this test; Slurm passes no variables to it.
fn script(folder: &Path, name: &str) -> String {
    let tools = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/slurm").canonicalize().unwrap();
    let programs = Path::new(MILLSTREAM).parent().unwrap();
    let text = format!(
        "#!/bin/sh\nexport PATH={programs}:$PATH MILLSTREAM_DEVICE=soft MILLSTREAM_LIB={library}\n\
         export MILLSTREAM_CARDS={folder}/cards MILLSTREAM_JOBS={folder}/jobs\nexec {tools}/{name} 2>>{folder}/{name}.log\n",
        programs = programs.display(),
        library = programs.join("../lib").display(),
        folder = folder.display(),
        tools = tools.display(),
    );
    let path = folder.join(name);
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path.display().to_string()
}

#[test]
#[ignore = "starts Slurm's daemons: make test-slurm"]
fn slurm_allocates_cards_and_their_leases_end_with_the_job() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let cards = [Card::serve("card0"), Card::serve("card1")];
    let addresses = format!("# cards of this node\n{}\n{}\n", cards[0].address, cards[1].address);
    fs::write(folder.join("cards"), addresses).unwrap();
    fs::write(folder.join("gres.conf"), "NodeName=n1 Name=card Count=2\nNodeName=n2 Name=card Count=0\n")
        .unwrap();
    let resources = format!(
        "GresTypes=card\nProlog={}\nTaskProlog={}\nEpilog={}\n",
        script(folder, "cards-prolog.sh"),
        script(folder, "cards-task-prolog.sh"),
        script(folder, "cards-epilog.sh"),
    );
    let slurm = Slurm::start_with(folder, &resources, ["Gres=card:2", ""]);
    let run = |words: &[&str], program: &str| {
        let mut command = slurm.command("srun", words);
        command.args(["sh", "-c", program]).env("MILLSTREAM", MILLSTREAM).env("MILLSTREAM_DEVICE", "soft");
        command.output().unwrap()
    };
    let text = |output: &std::process::Output| {
        format!(
            "{}{}\n{}\n{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr),
            fs::read_to_string(folder.join("cards-prolog.sh.log")).unwrap_or_default(),
            slurm.logs()
        )
    };

    // One card: its lease is the job's, and its memory is usable in the job.
    let program = "$MILLSTREAM card put $MILLSTREAM_CARDS 0 /etc/passwd && $MILLSTREAM card info $MILLSTREAM_CARDS --json";
    let done = run(&["--gres", "card:1"], program);
    assert!(done.status.success(), "{}", text(&done));
    let info = String::from_utf8_lossy(&done.stdout);
    let info = &info[info.find('{').unwrap()..];
    let info: serde_json::Value = serde_json::from_str(info).unwrap();
    assert_ne!(info["lease"]["state"], "Free", "{}", text(&done));
    slurm.wait("the end of the job's lease", || cards.iter().all(Card::is_free));
    assert!(fs::read_dir(folder.join("jobs")).unwrap().next().is_none());

    // Two cards for one job; a job beside it waits for one of them and then runs.
    let program = "echo $MILLSTREAM_CARDS; sleep 3";
    let words = ["--gres", "card:2", "sh", "-c", program];
    let first = slurm.command("srun", &words).stdout(Stdio::piped()).spawn().unwrap();
    slurm.wait("two leases", || cards.iter().all(|card| !card.is_free()));
    let second = run(&["--gres", "card:1"], "echo $MILLSTREAM_CARDS");
    let first = first.wait_with_output().unwrap();
    let both = format!("{},{}\n", cards[0].address, cards[1].address);
    assert_eq!(String::from_utf8_lossy(&first.stdout), both, "{}", text(&first));
    assert_eq!(
        String::from_utf8_lossy(&second.stdout),
        format!("{}\n", cards[0].address),
        "{}",
        text(&second)
    );

    // A job without cards gets none.
    let none = run(&[], "echo [$MILLSTREAM_CARDS]");
    assert_eq!(String::from_utf8_lossy(&none.stdout), "[]\n", "{}", text(&none));

    // A cancelled job leaves no lease.
    let mut job = slurm.command("srun", &["--gres", "card:2", "sleep", "600"]).spawn().unwrap();
    slurm.wait("two leases", || cards.iter().all(|card| !card.is_free()));
    assert!(slurm.command("scancel", &["--user", "root"]).status().unwrap().success());
    let _ = job.wait().unwrap();
    slurm.wait("the end of the cancelled job's leases", || cards.iter().all(Card::is_free));
}
