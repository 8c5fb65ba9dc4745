//! Work requests of any form through the C ABI (`play`): the fuzzer's seeds, and random ones, on both paths.
//! `MILLSTREAM_PLAYS` sets the number of random ones, `MILLSTREAM_SEED` the random seed.

mod play;

use std::path::Path;
use std::process::Command;

use play::FuzzSession;

fn from_environment(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| {
        text.parse().unwrap_or_else(|_| panic!("{name} is {text:?}, which is not a number"))
    })
}

#[test]
fn fuzzer_seeds_keep_the_account() {
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/work_requests");
    let mut session = FuzzSession::new();
    let mut count = 0;
    for entry in std::fs::read_dir(&seeds).expect("the seeds are there") {
        let file = entry.expect("readable").path();
        println!("{}", file.display());
        session.run(&std::fs::read(file).expect("a file"));
        count += 1;
    }
    assert!(count >= 10, "{count} seeds");
}

#[test]
fn random_work_requests_keep_the_account() {
    let (seed, plays) = (from_environment("MILLSTREAM_SEED", 1), from_environment("MILLSTREAM_PLAYS", 150));
    let mut session = FuzzSession::new();
    for play in 0..plays {
        let mut state = (seed << 32 | play).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = || {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            (state >> 56) as u8
        };
        let len = usize::from(next()) * 2;
        let bytes: Vec<u8> = (0..len).map(|_| next()).collect();
        println!("seed {seed}, play {play}");
        session.run(&bytes);
    }
    let totals = session.totals;
    println!("{totals:?}");
    let fates =
        [totals.posted - totals.accepted, totals.sent, totals.received, totals.failed, totals.flushed];
    assert!(fates.iter().all(|count| *count > plays / 8), "{totals:?}");
}

#[test]
fn the_account_is_kept_over_packets() {
    let mut command = Command::new(std::env::current_exe().expect("a test program has a path"));
    command.args(["keep_the_account", "--test-threads", "1"]).env("MILLSTREAM_PATH", "wire");
    let output = command.output().expect("this program starts again");
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("2 passed"), "{text}\n{errors}");
}
