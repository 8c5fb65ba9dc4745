//! The kernel `spin` without a card: its results, and what it refuses.

use millstream_application_kernels::spin::BUILTIN;
use millstream_card_abi::command::{Cause, Fault};
use millstream_card_abi::registers::KernelWords;
use millstream_card_server::Memory;
use millstream_card_server::kernel::{GrantedBanks, KernelRun, StandaloneControl};
use millstream_spin::kernel::{MessageBox, Operation, SpinArguments, sums_from_words};
use millstream_spin::{Extent, Geometry, Lattice, Reference};

const BANK: u64 = 1 << 20;
const BLOCK: u64 = 1 << 16;

fn run(memory: &Memory, words: KernelWords) -> Result<KernelWords, Fault> {
    let control = StandaloneControl::default();
    let mut run = KernelRun::new(GrantedBanks::new(memory, BANK, 0b1111), words, &control);
    (BUILTIN.make)().run(&mut run)?;
    Ok(*run.results())
}

fn arguments(lattice: Lattice) -> SpinArguments {
    let extent = Extent { origin: [0; 3], size: lattice.size };
    let operation = Operation::Fill;
    SpinArguments { operation, double: false, threads: 2, lattice, extent, depth: 2, block: BLOCK }
}

/// Tables that copy the faces of a block, which has the whole lattice, to its own halos.
fn periodic(geometry: &Geometry, messages: u64) -> [Vec<u8>; 2] {
    let (mut pack, mut unpack, mut at) = (Vec::new(), Vec::new(), messages);
    let (inside, halo) = (geometry.inside(), geometry.halo().map(|halo| halo as isize));
    let steps = (-1..=1).flat_map(|y| (-1..=1).map(move |z| [0, y, z])).filter(|step| *step != [0; 3]);
    for step in steps {
        let end = |a: usize| inside[a].end;
        let from = std::array::from_fn(|a| match step[a] {
            1 => end(a) - halo[a]..end(a),
            -1 => 0..halo[a],
            _ => inside[a].clone(),
        });
        let to = std::array::from_fn(|a| match step[a] {
            1 => -halo[a]..0,
            -1 => end(a)..end(a) + halo[a],
            _ => inside[a].clone(),
        });
        let bytes = Geometry::box_bytes(&from, 4) as u64;
        pack.extend(MessageBox { part: from, at }.to_bytes());
        unpack.extend(MessageBox { part: to, at }.to_bytes());
        at += bytes;
    }
    [pack, unpack]
}

#[test]
fn sweeps_in_card_memory_equal_the_reference() {
    let lattice = Lattice::new([12, 8, 10], 3).unwrap();
    let arguments = arguments(lattice);
    let memory = Memory::anonymous(4 * BANK).unwrap();
    let words = |operation| SpinArguments { operation, ..arguments }.to_words();
    let [pack, unpack] = periodic(&arguments.geometry(), 2 * BANK);
    memory.write(3 * BANK, &pack).unwrap();
    memory.write(3 * BANK + 4096, &unpack).unwrap();
    run(&memory, words(Operation::Fill)).unwrap();
    let mut reference = Reference::new(lattice);
    for _ in 0..3 {
        run(&memory, words(Operation::Pack { table: 3 * BANK, boxes: 8 })).unwrap();
        run(&memory, words(Operation::Unpack { table: 3 * BANK + 4096, boxes: 8 })).unwrap();
        let sums = sums_from_words(&run(&memory, words(Operation::Measure)).unwrap());
        assert_eq!(sums.means(0, lattice.sites()).checksum, reference.checksum());
        run(&memory, words(Operation::Sweep { half_sweeps: 4 })).unwrap();
        reference.sweep();
        reference.sweep();
    }
}

#[test]
fn ranges_outside_the_banks_are_refused() {
    let lattice = Lattice::new([12, 8, 10], 3).unwrap();
    let memory = Memory::anonymous(4 * BANK).unwrap();
    let arguments = arguments(lattice);
    for block in [4 * BANK - 64, u64::MAX - 63] {
        let fault = run(&memory, SpinArguments { block, ..arguments }.to_words()).unwrap_err();
        assert_eq!((fault.cause, fault.detail), (Cause::AccessViolation, block));
    }
    let huge = Lattice::new([1 << 10, 1 << 10, 1 << 20], 3).unwrap();
    let extent = Extent { origin: [0; 3], size: huge.size };
    let words = SpinArguments { lattice: huge, extent, ..arguments }.to_words();
    assert_eq!(run(&memory, words).unwrap_err().cause, Cause::AccessViolation);
    // A table, a box, and a message.
    let table = |table| SpinArguments { operation: Operation::Pack { table, boxes: 1 }, ..arguments };
    assert_eq!(run(&memory, table(4 * BANK).to_words()).unwrap_err().cause, Cause::AccessViolation);
    for (part, at, detail) in
        [([0..4, 0..4, -5..4], 2 * BANK, 3 * BANK), ([0..4, 0..4, 0..4], 4 * BANK - 4, 4 * BANK - 4)]
    {
        memory.write(3 * BANK, &MessageBox { part, at }.to_bytes()).unwrap();
        let fault = run(&memory, table(3 * BANK).to_words()).unwrap_err();
        assert_eq!((fault.cause, fault.detail), (Cause::AccessViolation, detail));
    }
    let mut words = arguments.to_words();
    words[0] |= 9;
    assert_eq!(run(&memory, words), Err(Fault::new(Cause::InvalidArgument, 0)));
    let control = StandaloneControl::default();
    let banks = GrantedBanks::new(&memory, BANK, 0b1111);
    let mut resumed = KernelRun::new(banks, arguments.to_words(), &control).resuming([5; 16]);
    let refused = (BUILTIN.make)().run(&mut resumed);
    assert_eq!(refused, Err(Fault::new(Cause::KernelNotResumable, 5)));
}
