//! Any bytes as a connection manager's message. What is accepted says the same again.

#![no_main]

use libfuzzer_sys::fuzz_target;
use millstream_wire::cm::{Addresses, Message};

fuzz_target!(|bytes: &[u8]| {
    let _ = Addresses::parse(bytes);
    let Ok((transaction, message)) = Message::parse(bytes) else { return };
    let again = message.emit(transaction);
    assert_eq!(Message::parse(&again), Ok((transaction, message)));
});
