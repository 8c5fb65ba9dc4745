//! Parses any bytes as a RoCEv2 packet; an accepted packet can be rebuilt from its headers.

#![no_main]

use libfuzzer_sys::fuzz_target;
use millstream_wire::icrc::digest_headers;
use millstream_wire::{Packet, Repr};

fuzz_target!(|bytes: &[u8]| {
    let _ = digest_headers(bytes);
    let Ok(packet) = Packet::new_checked(bytes) else { return };
    let repr = Repr::parse(&packet).expect("an accepted packet has its headers");
    assert!(repr.buffer_len() <= bytes.len());
    let mut again = vec![0; repr.buffer_len()];
    repr.emit(&mut again);
    let again = Packet::new_checked(&again[..]).expect("what is emitted is a packet");
    assert_eq!(
        Repr::parse(&again).map(|seen| (seen.bth.psn, seen.payload)),
        Ok((repr.bth.psn, repr.payload))
    );
});
