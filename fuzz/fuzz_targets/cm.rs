//! Parses any bytes as a communication management message; an accepted message survives a round trip.

#![no_main]

use libfuzzer_sys::fuzz_target;
use millstream_wire::cm::{Addresses, Message};

fuzz_target!(|bytes: &[u8]| {
    let _ = Addresses::parse(bytes);
    let Ok((transaction, message)) = Message::parse(bytes) else { return };
    let again = message.emit(transaction);
    assert_eq!(Message::parse(&again), Ok((transaction, message)));
});
