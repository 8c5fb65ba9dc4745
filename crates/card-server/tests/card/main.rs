//! Tests of cards as processes, by their clients.

mod camera;
mod cards;
mod checkpoint;
mod gpu_driver;
mod host;
mod hung_kernels;
mod lease;
mod map;
mod memory_kinds;
mod port;
mod process;
mod regions;
mod security;
mod sharing;
mod waiting;

/// Not a test: the entry point of a card process.
#[test]
fn card_main() {
    host::card_main();
}

/// Not a test: the entry point of a card process on the network.
#[test]
fn network_card_main() {
    cards::card_main();
}

/// Not a test: the entry point of a process that writes to a card.
#[test]
fn writer_main() {
    lease::writer_main();
}
