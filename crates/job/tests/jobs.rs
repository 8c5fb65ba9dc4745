//! Jobs of several processes on this host.

use std::io::{BufRead as _, BufReader, Read as _};
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

#[test]
fn ranks_that_do_not_come_are_named() {
    let at = format!("127.0.0.1:{}", 19_000 + std::process::id() % 900);
    let mut first = rank(0, 3, &at);
    let mut second = rank(1, 3, &at);
    assert!(!first.0.wait().unwrap().success());
    assert_eq!(errors(&mut first).trim(), "1 of 3 ranks did not come within 8 s: 2");
    assert!(!second.0.wait().unwrap().success());
    assert_eq!(errors(&mut second).trim(), "rank 1: rank 0 has ended or was lost");
}
