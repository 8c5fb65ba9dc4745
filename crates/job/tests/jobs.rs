//! Jobs of several processes on this host.

use std::io::{BufRead as _, BufReader, Read as _};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// The program of one rank, which `cargo test` builds into the directory beside this test's.
fn program() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let program = test.parent().and_then(|deps| deps.parent()).unwrap().join("examples/job-rank");
    assert!(program.is_file(), "{} is missing: run cargo build --examples", program.display());
    program
}

/// Kills a rank that a failed test has left.
struct Rank(Child);

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn rank(rank: usize, ranks: usize, at: &str) -> Rank {
    let mut command = Command::new(program());
    command.args([&rank.to_string(), &ranks.to_string(), at]);
    Rank(command.stdout(Stdio::piped()).stderr(Stdio::piped()).stdin(Stdio::null()).spawn().unwrap())
}

fn errors(rank: &mut Rank) -> String {
    let mut text = String::new();
    rank.0.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    text
}

#[test]
fn processes_run_on_other_ranks_with_their_streams_and_status() {
    let folder = tempfile::tempdir().unwrap();
    let at = format!("file:{}", folder.path().join("meeting-point").display());
    // Rank 0 comes last.
    let mut others: Vec<Rank> = (1..3).map(|number| rank(number, 3, &at)).collect();
    let mut first = rank(0, 3, &at);
    let mut text = String::new();
    first.0.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(
        lines,
        ["echo 200000 6 Some(3)", "refused Some(127) rank 2 does not start [\"reboot\"]", "wait Some(0) "],
        "{}",
        errors(&mut first)
    );
    assert!(first.0.wait().unwrap().success());
    assert!(others.iter_mut().all(|rank| rank.0.wait().unwrap().success()));
    assert!(std::fs::read_dir(folder.path()).unwrap().next().is_none(), "the file is removed");
}

#[test]
fn a_lost_rank_ends_its_relays_and_a_lost_hub_ends_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let at = format!("file:{}", folder.path().join("meeting-point").display());
    let mut others: Vec<Rank> = (1..3).map(|number| rank(number, 3, &at)).collect();
    let mut first = rank(0, 3, &at);
    let mut lines = BufReader::new(first.0.stdout.take().unwrap()).lines();
    // After this line the process `wait` runs at rank 1, or will not.
    assert!(lines.nth(1).unwrap().unwrap().starts_with("refused"));
    others[0].0.kill().unwrap();
    assert!(lines.next().unwrap().unwrap().starts_with("wait Some("));
    drop(first);
    let mut last = others.pop().unwrap();
    let _ = last.0.wait().unwrap();
}

fn ip(words: &str) {
    let status = Command::new("ip").args(words.split(' ')).status().unwrap();
    assert!(status.success(), "ip {words}");
}

/// Two hosts with a network: `a` has the address 10.77.0.1. Dropping it deletes them.
struct Hosts(String);

impl Hosts {
    fn new() -> Hosts {
        let hosts = Hosts(format!("millstream-job-{}", std::process::id()));
        let (a, b) = (hosts.name("a"), hosts.name("b"));
        for host in [&a, &b] {
            ip(&format!("netns add {host}"));
            ip(&format!("-n {host} link set lo up"));
        }
        ip(&format!("-n {a} link add net type veth peer name net netns {b}"));
        for (host, address) in [(&a, "10.77.0.1/24"), (&b, "10.77.0.2/24")] {
            ip(&format!("-n {host} address add {address} dev net"));
            ip(&format!("-n {host} link set net up"));
        }
        hosts
    }

    fn name(&self, host: &str) -> String {
        format!("{}-{host}", self.0)
    }

    fn rank(&self, host: &str, number: usize) -> Rank {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name(host)]).arg(program());
        command.args([&number.to_string(), "2", "10.77.0.1:7700"]).env("JOB_RANK_WAITS", "hold");
        Rank(command.stdout(Stdio::piped()).stderr(Stdio::piped()).stdin(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for host in ["a", "b"] {
            let _ = Command::new("ip").args(["netns", "delete", &self.name(host)]).status();
        }
    }
}

/// Its host loses its power: nobody closes the connections.
#[test]
fn a_rank_that_is_cut_off_is_lost_on_both_sides() {
    // Root in a container may not create them.
    let tried = Command::new("unshare").args(["--net", "--mount", "true"]).output().unwrap();
    if !tried.status.success() {
        println!("not run: network namespaces need root: {}", String::from_utf8_lossy(&tried.stderr));
        return;
    }
    let hosts = Hosts::new();
    let mut second = hosts.rank("b", 1);
    let mut first = hosts.rank("a", 0);
    let mut lines = BufReader::new(first.0.stdout.take().unwrap()).lines();
    assert!(lines.nth(1).unwrap().unwrap().starts_with("refused"));
    ip(&format!("-n {} link set net down", hosts.name("b")));
    assert_eq!(lines.next().unwrap().unwrap(), "wait Some(1) the rank of \"hold\" was lost");
    assert!(!second.0.wait().unwrap().success());
    assert_eq!(errors(&mut second).trim(), "rank 1: rank 0 has ended or was lost");
    assert!(first.0.wait().unwrap().success());
}

#[test]
fn ranks_that_do_not_come_are_named() {
    let unused = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let at = unused.to_string();
    let mut first = rank(0, 3, &at);
    let mut second = rank(1, 3, &at);
    assert!(!first.0.wait().unwrap().success());
    assert_eq!(errors(&mut first).trim(), "1 of 3 ranks did not come within 8 s: 2");
    assert!(!second.0.wait().unwrap().success());
    assert_eq!(errors(&mut second).trim(), "rank 1: rank 0 has ended or was lost");
}
