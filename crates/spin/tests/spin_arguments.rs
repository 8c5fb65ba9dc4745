//! Arguments of the kernel `spin`: their words, and what is refused.

use millstream_spin::kernel::{MessageBox, Operation, SpinArguments};
use millstream_spin::{Extent, Lattice};

fn arguments(operation: Operation) -> SpinArguments {
    let lattice = Lattice::new([8, 12, 16], 7).unwrap();
    let extent = Extent { origin: [4, 0, 8], size: [4, 12, 8] };
    SpinArguments { operation, double: true, threads: 3, lattice, extent, depth: 2, block: 4096 }
}

#[test]
fn arguments_survive_their_words() {
    for operation in [
        Operation::Fill,
        Operation::Pack { table: 64, boxes: 26 },
        Operation::Unpack { table: 8, boxes: 0 },
        Operation::Sweep { half_sweeps: 4 },
        Operation::Measure,
    ] {
        let arguments = arguments(operation);
        assert_eq!(SpinArguments::from_words(&arguments.to_words()), Ok(arguments));
    }
}

#[test]
fn wrong_words_are_refused_by_number() {
    let good = arguments(Operation::Pack { table: 64, boxes: 26 }).to_words();
    for (index, value, refused) in [
        (0, 5 | 1 << 16, 0),
        (0, 1 | 2 << 8 | 1 << 16, 0),
        (0, 1, 0),
        (2, 7, 2),
        (3, u64::MAX, 3),
        (4, 0, 4),
        (5, 3, 5),
        (6, 12, 6),
        (8, 6, 8),
        (9, 13, 9),
        (10, 3, 10),
        (10, u64::MAX, 10),
        (11, 0, 11),
        (11, 65, 11),
        (12, 4, 12),
        (13, 4, 13),
        (14, 1025, 14),
    ] {
        let mut words = good;
        words[index] = value;
        assert_eq!(SpinArguments::from_words(&words), Err(refused), "{index}: {value}");
    }
    let sweeps = arguments(Operation::Sweep { half_sweeps: 5 }).to_words();
    assert_eq!(SpinArguments::from_words(&sweeps), Err(13));
}

#[test]
fn boxes_outside_of_the_block_are_refused() {
    let geometry = arguments(Operation::Fill).geometry();
    let good = MessageBox { part: [-4..8, 0..12, -4..0], at: 640 };
    assert_eq!(MessageBox::from_bytes(&good.to_bytes(), &geometry), Some(good.clone()));
    let backwards = std::ops::Range { start: 3, end: 2 };
    for part in
        [[-5..8, 0..12, 0..8], [0..4, 0..17, 0..8], [0..4, backwards, 0..8], [0..4, 0..12, isize::MIN..8]]
    {
        let wrong = MessageBox { part, ..good.clone() };
        assert_eq!(MessageBox::from_bytes(&wrong.to_bytes(), &geometry), None);
    }
}
