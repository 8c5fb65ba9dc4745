//! Checkpoint on one card, restore on another: the results are equal, bit for bit.

use std::path::Path;
use std::time::{Duration, Instant};

use millstream_card::checkpoint::{CheckpointError, CheckpointSummary, restore, save};
use millstream_card::control::{KernelSource, RunRequest};
use millstream_card::{RemoteCard, RemoteErrorKind};
use millstream_card_abi::registers::{REGION_CONTROL, at, region_at};

use crate::cards::{BANK, NetworkCard};
use crate::host::TIMEOUT;

const LEASE: Duration = Duration::from_secs(20);
const BYTES: u64 = 64 << 10;
const SWEEPS: u64 = 3000;

fn leased() -> (NetworkCard, RemoteCard) {
    let card = NetworkCard::start();
    let node = card.connect();
    node.acquire(LEASE, TIMEOUT).unwrap();
    (card, node)
}

fn prepare(node: &RemoteCard) -> RunRequest {
    let input: Vec<u8> = (0..BYTES).map(|at| (at * 7 % 253) as u8).collect();
    node.write(BANK, &input).unwrap();
    node.write(3 * BANK, b"far away").unwrap();
    node.load(1, KernelSource::Builtin("mix")).unwrap();
    RunRequest::new(&[BANK, BYTES, SWEEPS])
}

fn output(node: &RemoteCard) -> Vec<u8> {
    let mut output = vec![0; BYTES as usize];
    node.read(BANK, &mut output).unwrap();
    output
}

#[test]
fn a_restored_run_continues_on_another_card_to_the_same_result() {
    let (_straight_card, straight) = leased();
    let start = prepare(&straight);
    let expected = straight.run(1, &start, TIMEOUT).unwrap();
    let expected_output = output(&straight);

    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("card.checkpoint");
    let (first_card, first) = leased();
    let start = prepare(&first);
    let rung = first.start(1, &start).unwrap();
    let until = Instant::now() + TIMEOUT;
    while first.register(REGION_CONTROL + 0x200 + region_at::progress).unwrap() < 10 {
        assert!(Instant::now() < until);
    }
    let mut reports = Vec::new();
    let saved = save(&first, &file, |done, all| reports.push((done, all))).unwrap();
    let [(1, name, progress)] = &saved.running[..] else { panic!("{saved:?}") };
    assert!(name == "mix" && (10..SWEEPS).contains(progress), "{saved:?}");
    assert_eq!(reports.last().unwrap().0, reports.last().unwrap().1);
    // The first card continues after its checkpoint.
    assert_eq!(first.wait(rung, TIMEOUT).unwrap(), expected);
    drop((first, first_card));
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1, "nothing else is left behind");

    let (_second_card, second) = leased();
    let restored = restore(&second, &file, |_, _| {}).unwrap();
    assert_eq!(restored, saved);
    let until = Instant::now() + TIMEOUT;
    while second.register(REGION_CONTROL + 0x200 + region_at::runs).unwrap() == 0 {
        assert!(Instant::now() < until, "it does not come to an end");
    }
    assert_eq!(second.register(REGION_CONTROL + 0x200 + region_at::results + 8).unwrap(), expected[1]);
    assert!(output(&second) == expected_output);
    let mut far = [0; 8];
    second.read(3 * BANK, &mut far).unwrap();
    assert_eq!(&far, b"far away");
}

#[test]
fn a_damaged_checkpoint_is_refused_before_anything_is_restored() {
    let (_card, node) = leased();
    prepare(&node);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("whole");
    let saved = save(&node, &file, |_, _| {}).unwrap();
    assert_eq!((saved.loaded.as_slice(), saved.running.len()), (&[(1, "mix".to_owned())][..], 0));
    let whole = std::fs::read(&file).unwrap();
    node.release().unwrap();
    node.acquire(LEASE, TIMEOUT).unwrap();

    let bad = folder.path().join("bad");
    let try_with = |bytes: &[u8], words: &str| {
        std::fs::write(&bad, bytes).unwrap();
        let error = restore(&node, Path::new(&bad), |_, _| {}).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("bad") && text.contains(words), "{text}, not {words}");
    };
    let damaged = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x10;
        bytes
    };
    try_with(&damaged(0), "magic = ");
    try_with(&damaged(8), "version = ");
    try_with(&damaged(25), "crc = ");
    try_with(&damaged(72 + 360 + 100), "crc = ");
    try_with(&damaged(72 + 2 * 360 + 5), "chunk 0: offset");
    try_with(&damaged(72 + 2 * 360 + 24 + 999), "chunk 0: crc");
    try_with(&damaged(whole.len() - 1), "crc = ");
    try_with(&whole[..whole.len() - 1], "chunk 1: len");
    try_with(&whole[..50], "header = 0x32: the file ends");
    try_with(b"", "header = 0x0: the file ends");
    let missing = restore(&node, Path::new("/nonexistent/x"), |_, _| {}).unwrap_err();
    assert!(matches!(missing, CheckpointError::Io { .. }));
    // None of these attempts has restored anything.
    assert_eq!(node.register(at::bank_rdma_written + 8).unwrap(), BYTES);
    let mut all = vec![1; (4 * BANK) as usize];
    node.read(0, &mut all).unwrap();
    assert!(all.iter().all(|byte| *byte == 0));
    assert_ne!(restore(&node, &file, |_, _| {}).unwrap(), CheckpointSummary::default());
}

#[test]
fn a_lease_is_handed_from_process_to_process() {
    let card = NetworkCard::start();
    let first = card.connect();
    first.acquire(Duration::from_secs(3), TIMEOUT).unwrap();
    first.write(0, b"stays").unwrap();
    first.load(0, KernelSource::Builtin("null")).unwrap();
    let token = first.detach().unwrap();
    // The connection has no lease from then on, so it cannot end that of another one.
    assert!(first.held().is_none());
    assert!(matches!(first.release().unwrap_err().kind, RemoteErrorKind::NotLeased(None)));
    let text = serde_json::to_string(&token).unwrap();
    let second = card.connect();
    second.attach(&serde_json::from_str(&text).unwrap()).unwrap();
    drop(first);
    let mut bytes = [0; 5];
    second.read(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"stays");
    assert_eq!(second.run(0, &RunRequest::new(&[1, 2]), TIMEOUT).unwrap()[..2], [1, 2]);
    second.release().unwrap();
    let late = card.connect().attach(&token).unwrap_err();
    assert!(matches!(late.kind, RemoteErrorKind::NotLeased(_)), "{late}");
}
