//! Replays the fuzzers' seeds (`fuzz/README.md`) and checks the fuzzers' invariants, with any compiler.

use std::path::Path;

use millstream_wire::cm::{Addresses, Message};
use millstream_wire::icrc::digest_headers;
use millstream_wire::{Packet, Repr};

fn seeds(target: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds").join(target);
    let files = std::fs::read_dir(folder).unwrap();
    files.map(|file| std::fs::read(file.unwrap().path()).unwrap()).collect()
}

#[test]
fn seed_packets_round_trip_or_fail() {
    let (mut accepted, mut refused) = (0, 0);
    for bytes in seeds("packet") {
        let _ = digest_headers(&bytes);
        let Ok(packet) = Packet::new_checked(&bytes[..]) else {
            refused += 1;
            continue;
        };
        accepted += 1;
        let repr = Repr::parse(&packet).expect("an accepted packet has its headers");
        assert!(repr.buffer_len() <= bytes.len());
        let mut again = vec![0; repr.buffer_len()];
        repr.emit(&mut again);
        let again = Packet::new_checked(&again[..]).expect("what is emitted is a packet");
        let seen = Repr::parse(&again).unwrap();
        assert_eq!((seen.bth.psn, seen.payload), (repr.bth.psn, repr.payload));
    }
    assert!(accepted >= 10 && refused >= 3, "{accepted} accepted, {refused} refused");
}

#[test]
fn seed_messages_round_trip_or_fail() {
    let mut accepted = 0;
    for bytes in seeds("cm") {
        let _ = Addresses::parse(&bytes);
        let Ok((transaction, message)) = Message::parse(&bytes) else { continue };
        accepted += 1;
        assert_eq!(Message::parse(&message.emit(transaction)), Ok((transaction, message)));
    }
    assert!(accepted >= 9, "{accepted} accepted");
}
