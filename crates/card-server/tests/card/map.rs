//! Load and store access to a remote card: its coherence guarantees.

use std::time::Duration;

use millstream_card::control::{KernelSource, RunRequest};
use millstream_card::{RemoteCard, RemoteErrorKind, RemoteMap};
use millstream_card_abi::MemoryRange;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::cards::{BANK, NetworkCard};
use crate::host::TIMEOUT;

fn leased() -> (NetworkCard, RemoteCard) {
    let card = NetworkCard::start();
    let node = card.connect();
    node.acquire(Duration::from_secs(20), TIMEOUT).unwrap();
    (card, node)
}

#[test]
fn a_kernel_and_a_map_hand_data_to_each_other() {
    let (_card, node) = leased();
    let mut map = RemoteMap::new(&node, MemoryRange::new(BANK, 100_000)).unwrap();
    for at in (0..100_000u64).step_by(8) {
        map.store_u64(at, at * 3).unwrap();
    }
    let mut word = [0; 8];
    node.read(BANK + 80, &mut word).unwrap();
    assert_eq!(word, [0; 8], "not released yet");
    map.release().unwrap();
    node.read(BANK + 80, &mut word).unwrap();
    assert_eq!(u64::from_le_bytes(word), 240);
    assert_eq!(map.traffic(), (0, 100_000), "what is stored only is not fetched");

    node.load(0, KernelSource::Builtin("mix")).unwrap();
    let [_, last, ..] = node.run(0, &RunRequest::new(&[BANK, 100_000, 2]), TIMEOUT).unwrap();
    map.acquire();
    assert_eq!(map.load_u64(99_992).unwrap(), last);
    // Fetched once for any number of loads.
    let fetched = map.traffic().0;
    (0..50).for_each(|_| assert_eq!(map.load_u64(99_992).unwrap(), last));
    assert_eq!(map.traffic().0, fetched);
    let outside = map.load(99_999, &mut [0; 2]).unwrap_err();
    assert!(matches!(outside.kind, RemoteErrorKind::OutOfRange { .. }), "{outside}");
    assert!(RemoteMap::new(&node, MemoryRange::new(4 * BANK - 1, 2)).is_err());
}

#[derive(Clone, Debug)]
enum Step {
    Store(usize, u64, u8, u64),
    Load(usize, u64),
    Release(usize),
    Acquire(usize),
}

/// One map stores to the even bytes of a range, another map to the odd ones. A map always loads its own
/// latest store. Bytes of the other map are at least as new as its latest release before the latest acquire.
/// They are not newer than its latest release.
#[test]
fn two_maps_see_what_was_released_before_they_acquired() {
    const LEN: u64 = 10_000;
    let (_card, node) = leased();
    let step = prop_oneof![
        4 => (0..2usize, 0..LEN / 2, 1..=255u8, 1..40u64).prop_map(|(map, at, value, count)| Step::Store(map, at, value, count)),
        4 => (0..2usize, 0..LEN).prop_map(|(map, at)| Step::Load(map, at)),
        1 => (0..2usize).prop_map(Step::Release),
        1 => (0..2usize).prop_map(Step::Acquire),
    ];
    let mut runner = TestRunner::new(Config { cases: 24, ..Config::default() });
    runner
        .run(&prop::collection::vec(step, 1..150), |steps| {
            node.clear().unwrap();
            let span = MemoryRange::new(2 * BANK - 3000, LEN);
            let mut maps = [RemoteMap::new(&node, span).unwrap(), RemoteMap::new(&node, span).unwrap()];
            // The stores of each map; the bytes in card memory; the possible states of card memory since each
            // map's latest acquire.
            let mut own = [vec![0u8; LEN as usize], vec![0u8; LEN as usize]];
            let mut card = vec![0u8; LEN as usize];
            let mut oldest: [Vec<Vec<u8>>; 2] = [vec![card.clone()], vec![card.clone()]];
            for step in steps {
                match step {
                    Step::Store(map, at, value, count) => {
                        for byte in (0..count).map(|index| 2 * (at + index) + map as u64) {
                            if byte < LEN {
                                maps[map].store(byte, &[value]).unwrap();
                                own[map][byte as usize] = value;
                            }
                        }
                    }
                    Step::Load(map, at) => {
                        let mut byte = [0];
                        maps[map].load(at, &mut byte).unwrap();
                        let at = at as usize;
                        if at % 2 == map {
                            prop_assert_eq!(byte[0], own[map][at]);
                        } else {
                            // Any state of the card since the latest acquire.
                            prop_assert!(oldest[map].iter().any(|state| state[at] == byte[0]));
                        }
                    }
                    Step::Release(map) => {
                        maps[map].release().unwrap();
                        for at in (map..LEN as usize).step_by(2) {
                            card[at] = own[map][at];
                        }
                        oldest.iter_mut().for_each(|states| states.push(card.clone()));
                    }
                    Step::Acquire(map) => {
                        maps[map].acquire();
                        oldest[map] = vec![card.clone()];
                    }
                }
            }
            Ok(())
        })
        .unwrap();
}
