//! Many nodes share several cards, and both come and go while others work.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use millstream_card::control::{KernelSource, RunRequest};
use millstream_card::{RemoteCard, RemoteError, RemoteErrorKind, RemoteOptions};
use millstream_card_abi::registers::at;

use crate::cards::{BANK, NetworkCard, device};
use crate::host::TIMEOUT;

const LEASE: Duration = Duration::from_secs(20);

/// Number of different inputs; bytes of each.
const SEEDS: u64 = 5;
const BYTES: usize = 64 << 10;

/// Runs a kernel on a leased card; each seed has its own input and result.
fn work(card: &RemoteCard, seed: u64) -> Result<u64, RemoteError> {
    let mut before = vec![1; BYTES];
    card.read(BANK, &mut before)?;
    assert!(before.iter().all(|byte| *byte == 0), "another node's data");
    let input: Vec<u8> = (0..BYTES as u64).map(|at| (at * (seed + 1) % 251) as u8).collect();
    card.write(BANK, &input)?;
    card.load(0, KernelSource::Builtin("mix"))?;
    Ok(card.run(0, &RunRequest::new(&[BANK, BYTES as u64, 2]), TIMEOUT)?[1])
}

/// The cards of the test, and the addresses of those that were killed.
#[derive(Default)]
struct CardPool {
    cards: Vec<NetworkCard>,
    killed: Vec<String>,
}

impl CardPool {
    fn kill(&mut self, index: usize) {
        let mut card = self.cards.remove(index);
        // Recorded before the kill, so that no node sees the loss of a card that counts as alive.
        self.killed.push(card.address.clone());
        card.kill();
    }
}

#[test]
fn nodes_and_cards_come_and_go_and_every_result_is_right() {
    const JOBS: u64 = 300;
    let pool =
        Mutex::new(CardPool { cards: (0..3).map(|_| NetworkCard::start()).collect(), ..CardPool::default() });
    let expected: Vec<u64> = {
        let card = pool.lock().unwrap().cards[0].connect();
        (0..SEEDS)
            .map(|seed| {
                card.acquire(LEASE, TIMEOUT).unwrap();
                let result = work(&card, seed).unwrap();
                card.release().unwrap();
                result
            })
            .collect()
    };
    let (done, lost, busy) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let node = |number: u64, jobs: u64| {
        let mut known: HashMap<String, RemoteCard> = HashMap::new();
        let mut turn = number;
        let mut own = 0;
        while own < jobs && done.load(Ordering::Relaxed) < JOBS {
            turn += 1;
            let address = {
                let pool = pool.lock().unwrap();
                pool.cards[turn as usize % pool.cards.len()].address.clone()
            };
            let outcome = (|| {
                let card = match known.get(&address) {
                    Some(card) => card.clone(),
                    None => RemoteCard::connect(&device(), &address, RemoteOptions::default())?,
                };
                known.insert(address.clone(), card.clone());
                card.acquire(LEASE, Duration::from_millis(2))?;
                let result = work(&card, turn % SEEDS)?;
                card.release()?;
                Ok(result)
            })();
            match outcome {
                Ok(result) => {
                    assert_eq!(result, expected[(turn % SEEDS) as usize]);
                    own += 1;
                    done.fetch_add(1, Ordering::Relaxed);
                }
                Err(RemoteError { kind: RemoteErrorKind::Leased { .. }, .. }) => {
                    busy.fetch_add(1, Ordering::Relaxed);
                }
                Err(error) => {
                    assert!(pool.lock().unwrap().killed.contains(&error.card), "{error}");
                    known.remove(&address);
                    lost.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
        // A node that exits during a kernel without releasing its lease.
        if jobs < JOBS
            && let Some(card) = known.values().find(|card| card.acquire(LEASE, Duration::ZERO).is_ok())
        {
            let _ = card
                .load(0, KernelSource::Builtin("spin"))
                .and_then(|_| card.start(0, &RunRequest::new(&[])));
        }
    };
    let wait = |jobs| {
        let deadline = Instant::now() + 4 * TIMEOUT;
        while done.load(Ordering::Relaxed) < jobs {
            assert!(Instant::now() < deadline, "{done:?} of {jobs} jobs");
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    std::thread::scope(|scope| {
        let node = &node;
        for number in 0..3 {
            scope.spawn(move || node(number, JOBS));
        }
        scope.spawn(move || node(3, 20));
        wait(JOBS / 4);
        let card = NetworkCard::start();
        pool.lock().unwrap().cards.push(card);
        scope.spawn(move || node(4, JOBS));
        wait(JOBS / 2);
        pool.lock().unwrap().kill(0);
        wait(JOBS * 3 / 4);
        pool.lock().unwrap().kill(1);
    });
    let (done, lost, busy) = (done.into_inner(), lost.into_inner(), busy.into_inner());
    println!("{done} jobs; {busy} times a card was another node's, {lost} times it was gone");
    assert!(done >= JOBS && busy > 0);
    // The remaining cards are free, and each has granted several leases.
    let pool = pool.into_inner().unwrap();
    assert_eq!(pool.cards.len(), 2);
    for card in &pool.cards {
        let node = card.connect();
        node.acquire(LEASE, TIMEOUT).unwrap();
        assert!(node.register(at::lease_grants).unwrap() > 1);
    }
}
