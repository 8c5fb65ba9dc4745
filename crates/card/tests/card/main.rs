//! Cards in processes of their own.

mod camera;
mod host;
mod process;

/// Not a test: turns a copy of this program into a card.
#[test]
fn be_a_card() {
    host::be_a_card();
}
