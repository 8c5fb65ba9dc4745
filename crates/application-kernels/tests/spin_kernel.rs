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

/// Tables for two blocks that have a half of y each: each packs its faces, and unpacks those of the other one.
fn tables(geometry: &Geometry, [own, others]: [u64; 2]) -> [Vec<u8>; 2] {
    let (mut pack, mut unpack, mut at) = (Vec::new(), Vec::new(), 0);
    let (inside, halo) = (geometry.inside(), geometry.halo()[1] as isize);
    let end = inside[1].end;
    for (from, to) in [(end - halo..end, -halo..0), (0..halo, end..end + halo)] {
        let [from, to] = [from, to].map(|y| [inside[0].clone(), y, inside[2].clone()]);
        let bytes = Geometry::box_bytes(&from, 4) as u64;
        pack.extend(MessageBox { part: from, at: own + at }.to_bytes());
        unpack.extend(MessageBox { part: to, at: others + at }.to_bytes());
        at += bytes;
    }
    [pack, unpack]
}

#[test]
fn sweeps_in_card_memory_equal_the_reference() {
    let lattice = Lattice::new([12, 8, 10], 3).unwrap();
    let memory = Memory::anonymous(4 * BANK).unwrap();
    let blocks = [0, 4].map(|y| {
        let extent = Extent { origin: [0, y, 0], size: [12, 4, 10] };
        SpinArguments { extent, block: BLOCK + y as u64 / 4 * BANK, ..arguments(lattice) }
    });
    let messages = [2 * BANK, 2 * BANK + BANK / 2];
    let place = |block: usize, table: u64| 3 * BANK + 8192 * block as u64 + 4096 * table;
    for (i, block) in blocks.iter().enumerate() {
        let tables = tables(&block.geometry(), [messages[i], messages[1 - i]]);
        for (table, bytes) in (0..).zip(&tables) {
            memory.write(place(i, table), bytes).unwrap();
        }
    }
    let run_both = |operation: &dyn Fn(usize) -> Operation| {
        [0, 1]
            .map(|i| run(&memory, SpinArguments { operation: operation(i), ..blocks[i] }.to_words()).unwrap())
    };
    run_both(&|_| Operation::Fill);
    let mut reference = Reference::new(lattice);
    for _ in 0..3 {
        run_both(&|i| Operation::Pack { table: place(i, 0), boxes: 2 });
        run_both(&|i| Operation::Unpack { table: place(i, 1), boxes: 2 });
        let [first, second] = run_both(&|_| Operation::Measure).map(|words| sums_from_words(&words));
        assert_eq!(first.plus(&second).means(0, lattice.sites()).checksum, reference.checksum());
        run_both(&|_| Operation::Sweep { half_sweeps: 4 });
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
