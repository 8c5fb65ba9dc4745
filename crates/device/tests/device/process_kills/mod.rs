//! Processes that are killed at random moments under load. The survivor gets the error completions of the
//! specification, loses no other data, leaks nothing, and works with the next peer.
//!
//! `make soak` runs the long form. `MILLSTREAM_KILLS` sets the number of kills, `MILLSTREAM_SEED` the random
//! seed.

pub(crate) mod datagrams;
pub(crate) mod load;
pub(crate) mod stepping;

use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::support::{Process, Random, TEST_TIMEOUT, Usage, from_environment, wire};
use load::{Addresses, Command, Reply};

#[test]
fn the_survivor_gets_errors_and_continues() {
    soak(from_environment("MILLSTREAM_KILLS", 40), from_environment("MILLSTREAM_SEED", 1));
}

#[test]
#[ignore = "takes minutes: make soak"]
fn one_thousand_kills() {
    soak(from_environment("MILLSTREAM_KILLS", 1000), from_environment("MILLSTREAM_SEED", 1));
}

/// A process under load, and the resources that it held before its first connection.
struct LoadedProcess {
    process: Process,
    initial_usage: Usage,
    peers: u32,
}

impl LoadedProcess {
    fn start(folder: &TempDir) -> Self {
        let process = Process::start_with("load", |command| {
            // All files that a process leaves behind are in this folder.
            command.env("TMPDIR", folder.path()).env("XDG_RUNTIME_DIR", folder.path());
            // Other programs on the UDP port would change the number of its descriptors.
            command.env("MILLSTREAM_PATH", "shm")
        });
        let mut loaded = Self { process, initial_usage: Usage::of(std::process::id()), peers: 0 };
        loaded.initial_usage = loaded.usage();
        loaded
    }

    fn command(&mut self, command: &Command) {
        self.process.send_line(&serde_json::to_string(command).expect("plain data"));
    }

    fn answer(&mut self) -> Reply {
        serde_json::from_str(&self.process.recv_line()).expect("an answer")
    }

    fn usage(&mut self) -> Usage {
        self.command(&Command::Usage);
        let Reply::Usage(usage) = self.answer() else { panic!("no usage") };
        usage
    }

    fn open(&mut self, seed: u64) -> Addresses {
        self.command(&Command::Open { seed });
        let Reply::Addresses(addresses) = self.answer() else { panic!("no addresses") };
        addresses
    }
}

/// Results of a run.
#[derive(Default)]
struct SoakTotals {
    /// Times from the kill to the survivor's last completion, by whether data was in flight.
    waits: [Vec<Duration>; 2],
    sent: u64,
    received: u64,
    /// The largest number of peers that one process has outlived.
    outlived: u32,
    /// Resident memory of that process after its third peer and at its end, KiB.
    resident: [u64; 2],
}

fn soak(kills: u64, seed: u64) {
    println!("seed {seed}, {kills} kills");
    let mut random = Random::new(seed);
    let folder = tempfile::tempdir().expect("a folder");
    let mut totals = SoakTotals::default();
    let mut survivor = LoadedProcess::start(&folder);
    let mut early = 0;
    for round in 0..kills {
        let mut pair = [survivor, LoadedProcess::start(&folder)];
        let addresses = pair.each_mut().map(|loaded| loaded.open(random.next()));
        let [first, second] = &addresses;
        // Kills sometimes while they connect, mostly under load.
        let connecting = random.once_in(4);
        let after = random.below(if connecting { 2_000 } else { 30_000 });
        pair[0].command(&Command::Go(second.clone()));
        pair[1].command(&Command::Go(first.clone()));
        std::thread::sleep(Duration::from_micros(after));
        // The older process survives more often: only there would a leak accumulate.
        let victim = usize::from(!random.once_in(50));
        let [older, younger] = pair;
        let (mut dead, mut left) = if victim == 0 { (older, younger) } else { (younger, older) };
        dead.process.kill();
        let killed = Instant::now();
        let Reply::Ended { sent, received } = left.answer() else { panic!("round {round}: no end") };
        totals.waits[usize::from(!connecting)].push(killed.elapsed());
        totals.sent += sent;
        totals.received += received;
        left.peers += 1;

        let mut now = left.usage();
        while !now.same(&left.initial_usage) {
            assert!(
                killed.elapsed() < TEST_TIMEOUT,
                "round {round}: {now:#?} is left of {:#?}",
                left.initial_usage
            );
            std::thread::sleep(Duration::from_millis(1));
            now = left.usage();
        }
        if left.peers == 3 {
            early = now.resident_kib;
        }
        if left.peers > totals.outlived {
            totals.outlived = left.peers;
            totals.resident = [early, now.resident_kib];
        }
        let name = wire::socket_name(addresses[victim].numbers[0]);
        let sockets = std::fs::read_to_string("/proc/net/unix").expect("this is Linux");
        assert!(!sockets.contains(&name), "round {round}: the dead process's socket");
        survivor = left;
    }
    let left = std::fs::read_dir(folder.path()).expect("our own folder").count();
    assert_eq!(left, 0, "files of the dead");
    let [early, late] = totals.resident;
    // The arena's tables grow to some MiB once; a leak would continue.
    assert!(late < early + (24 << 10), "{early} KiB after three peers, {late} KiB after {}", totals.outlived);
    report(&mut totals, &survivor);
}

fn report(totals: &mut SoakTotals, survivor: &LoadedProcess) {
    println!("  requests of survivors      {:>12}", totals.sent);
    println!("  messages to survivors      {:>12}", totals.received);
    println!("  peers outlived by one      {:>12}", totals.outlived);
    println!(
        "  its memory, MiB            {:>5} -> {:>3}",
        totals.resident[0] >> 10,
        totals.resident[1] >> 10
    );
    println!(
        "  descriptors, mappings      {:>5}, {:>5}   as at its start",
        survivor.initial_usage.descriptors.values().sum::<usize>(),
        survivor.initial_usage.mappings.values().sum::<usize>()
    );
    println!("  {:<20}{:>7}{:>12}{:>12}{:>12}", "to the last error", "kills", "median", "99 %", "longest");
    for (what, waits) in ["while connecting", "under load"].iter().zip(&mut totals.waits) {
        waits.sort_unstable();
        let part = |n: usize, of: usize| waits.get((waits.len() * n / of).min(waits.len().max(1) - 1));
        let text = |wait: Option<&Duration>| wait.map_or("-".into(), |wait| format!("{wait:.1?}"));
        let [median, most, longest] = [part(1, 2), part(99, 100), waits.last()].map(text);
        println!("  {what:<20}{:>7}{median:>12}{most:>12}{longest:>12}", waits.len());
    }
}
