//! Threads of one connection: some wait for runs, others use the card meanwhile.

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use millstream_card::control::{KernelSource, RunRequest};
use millstream_card::{RemoteCard, RemoteError, RemoteErrorKind, RemoteOptions};
use millstream_card_abi::codes::MessageKind;
use millstream_card_abi::command::Cause;

use crate::cards::{NetworkCard, SLOW_IMAGE};
use crate::host::TIMEOUT;

const LEASE: Duration = Duration::from_secs(4);

/// Connects to a card and loads an endless kernel into its first two regions.
fn connect(card: &NetworkCard) -> RemoteCard {
    let node = card.connect();
    node.acquire(LEASE, TIMEOUT).unwrap();
    for region in [0, 1] {
        node.load(region, KernelSource::Builtin("spin")).unwrap();
    }
    node
}

#[track_caller]
fn is_interrupted(outcome: Result<[u64; 4], RemoteError>) {
    let kind = outcome.unwrap_err().kind;
    assert!(matches!(kind, RemoteErrorKind::Rejected { cause: Cause::Interrupted, .. }), "{kind}");
}

#[test]
fn threads_that_wait_for_runs_delay_no_operation_and_get_their_own_messages() {
    let card = NetworkCard::start();
    let node = connect(&card);
    let (ended, ends) = mpsc::channel();
    for region in [0, 1] {
        let (node, ended) = (node.clone(), ended.clone());
        thread::spawn(move || {
            let _ = ended.send((region, node.run(region, &RunRequest::new(&[region.into()]), TIMEOUT)));
        });
    }
    // A thread that takes all other messages.
    let listener = node.clone();
    let listener = thread::spawn(move || listener.message(TIMEOUT).unwrap().expect("a message"));
    // Longer than the lease: whoever has the connection renews it.
    let until = Instant::now() + LEASE + Duration::from_secs(2);
    let mut rounds = 0u64;
    while Instant::now() < until {
        rounds += 1;
        node.write(4096, &rounds.to_le_bytes()).unwrap();
        let mut word = [0; 8];
        node.read(4096, &mut word).unwrap();
        assert_eq!(u64::from_le_bytes(word), rounds);
    }
    assert!(rounds > 100, "{rounds} rounds: operations wait for waiting threads");
    assert!(ends.try_recv().is_err(), "a run has ended by itself");

    for region in [1, 0] {
        assert!(node.stop(region).unwrap());
        let (stopped, outcome) = ends.recv_timeout(TIMEOUT).unwrap();
        assert_eq!(stopped, region);
        is_interrupted(outcome);
    }
    // The messages of both runs went to the threads that waited for them. This one is for anyone.
    assert!(!listener.is_finished());
    let word = node.start(0, &RunRequest::new(&[14])).unwrap();
    let message = listener.join().unwrap();
    assert_eq!((message.sequence, message.cause), (word, Some(Cause::KernelTrapped)));
}

#[test]
fn a_thread_waits_on_when_the_one_that_slept_with_the_connection_has_left() {
    let card = NetworkCard::start();
    let node = connect(&card);
    let word = node.submit(0, &RunRequest::new(&[])).unwrap();
    let first = node.clone();
    let first = thread::spawn(move || first.message(Duration::from_millis(300)).unwrap());
    let second = node.clone();
    let second = thread::spawn(move || second.wait(word, TIMEOUT));
    assert_eq!(first.join().unwrap(), None);
    assert!(node.stop(0).unwrap());
    is_interrupted(second.join().unwrap());
}

#[test]
fn a_submitted_run_keeps_its_message_until_somebody_waits() {
    let card = NetworkCard::start();
    let node = connect(&card);
    let word = node.submit(0, &RunRequest::new(&[14])).unwrap();
    assert_eq!(node.message(Duration::from_millis(200)).unwrap(), None);
    let kind = node.wait(word, TIMEOUT).unwrap_err().kind;
    assert!(matches!(kind, RemoteErrorKind::Rejected { cause: Cause::KernelTrapped, .. }), "{kind}");
    // Who waits for too short a time finds the message later.
    let word = node.submit(0, &RunRequest::new(&[])).unwrap();
    let kind = node.wait(word, Duration::from_millis(20)).unwrap_err().kind;
    assert!(matches!(kind, RemoteErrorKind::TimedOut(..)), "{kind}");
    assert!(node.stop(0).unwrap());
    let message = node.message(TIMEOUT).unwrap().expect("the end of the run");
    assert_eq!((message.kind, message.sequence), (MessageKind::RegionFault, word));
}

#[test]
fn the_end_of_a_lease_ends_the_waits_for_its_runs() {
    let card = NetworkCard::start();
    let node = connect(&card);
    let word = node.submit(0, &RunRequest::new(&[])).unwrap();
    let waits: Vec<_> = (0..2)
        .map(|_| {
            let node = node.clone();
            thread::spawn(move || node.wait(word, TIMEOUT).unwrap_err().kind)
        })
        .collect();
    thread::sleep(Duration::from_millis(50));
    node.release().unwrap();
    node.acquire(LEASE, TIMEOUT).unwrap();
    for wait in waits {
        let kind = wait.join().unwrap();
        assert!(
            matches!(
                kind,
                RemoteErrorKind::Rejected { cause: Cause::Interrupted, .. } | RemoteErrorKind::NotLeased(_)
            ),
            "{kind}"
        );
    }
}

#[test]
fn the_death_of_a_card_ends_all_waits() {
    let mut card = NetworkCard::start();
    let node = connect(&card);
    let waits: Vec<_> = [0, 1]
        .map(|region| {
            let node = node.clone();
            thread::spawn(move || node.run(region, &RunRequest::new(&[]), TIMEOUT).unwrap_err())
        })
        .into();
    thread::sleep(Duration::from_millis(50));
    card.kill();
    for wait in waits {
        let error = wait.join().unwrap();
        assert!(error.is_fatal(), "{error}");
    }
}

#[test]
fn a_slow_load_outlasts_the_timeout_of_commands_and_delays_no_operation() {
    let card = NetworkCard::start();
    let node =
        card.connect_with(RemoteOptions { timeout: Duration::from_secs(4), ..RemoteOptions::default() });
    node.acquire(LEASE, TIMEOUT).unwrap();
    let loading = node.clone();
    let loading =
        thread::spawn(move || loading.load(0, KernelSource::Image { image: SLOW_IMAGE, at: 1 << 20 }));
    let mut rounds = 0u64;
    while !loading.is_finished() {
        rounds += 1;
        node.write(4096, &rounds.to_le_bytes()).unwrap();
        thread::sleep(Duration::from_millis(1));
    }
    loading.join().unwrap().unwrap();
    assert!(rounds > 100, "{rounds} rounds: operations wait for the load");
}
