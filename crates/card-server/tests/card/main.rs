//! Cards in processes of their own.

mod camera;
mod cards;
mod checkpoint;
mod host;
mod kinds;
mod lease;
mod map;
mod process;
mod regions;
mod sharing;
mod stuck;

/// Not a test: turns a copy of this program into a card.
#[test]
fn be_a_card() {
    host::be_a_card();
}

/// Not a test: turns a copy of this program into a card on the network.
#[test]
fn be_a_card_on_the_network() {
    cards::be_a_card();
}
