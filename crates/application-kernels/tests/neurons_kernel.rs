//! The kernel `neurons` without a card: its spikes, and what it refuses.

use millstream_application::Place;
use millstream_application_kernels::neurons::BUILTIN;
use millstream_card_abi::command::{Cause, Fault};
use millstream_card_abi::registers::KernelWords;
use millstream_card_server::Memory;
use millstream_card_server::kernel::{GrantedBanks, Kernel, KernelRun, StandaloneControl};
use millstream_neurons::kernel::{Description, Operation, VALUE_BYTES};
use millstream_neurons::{Model, Network, Population, UNITS_PER_MV};

const BANK: u64 = 4 << 20;
const DESCRIPTION: u64 = 64;
const FIRING: u64 = 1 << 20;
const ARRAYS: u64 = 2 << 20;

fn network() -> Network {
    Network {
        grid: [2, 1],
        neurons: 100,
        synapses: 30,
        shares: [760, 120, 80, 40],
        longest_delay: 20,
        excitatory_weight: 9 * UNITS_PER_MV,
        inhibitory_weight: -5 * UNITS_PER_MV,
        is_plastic: true,
        model: Model::Izhikevich,
        seed: 3,
    }
}

fn run(kernel: &mut dyn Kernel, memory: &Memory, operation: Operation) -> Result<KernelWords, Fault> {
    let control = StandaloneControl::default();
    let mut run = KernelRun::new(GrantedBanks::new(memory, BANK, 1), operation.to_words(), &control);
    kernel.run(&mut run)?;
    Ok(*run.results())
}

/// Writes a population and its description. Returns the operation that takes it.
fn prepare(memory: &Memory, population: &mut Population, change: impl Fn(&mut Description)) -> Operation {
    let (mut at, mut arrays) = (ARRAYS, [Place::default(); 7]);
    for ((place, bytes), size) in arrays.iter_mut().zip(population.array_bytes()).zip(VALUE_BYTES) {
        memory.write(at, bytes).unwrap();
        *place = Place { at, count: (bytes.len() / size) as u64 };
        at += (bytes.len() as u64).next_multiple_of(64);
    }
    let columns = vec![0, 1];
    let mut description =
        Description { network: network(), columns, arrays, firing: FIRING, peers: Vec::new() };
    change(&mut description);
    let text = serde_json::to_vec(&description).unwrap();
    memory.write(DESCRIPTION, &text).unwrap();
    Operation::Attach { at: DESCRIPTION, bytes: text.len() as u64 }
}

#[test]
fn spikes_in_card_memory_equal_those_in_host_memory() {
    let memory = Memory::anonymous(BANK).unwrap();
    let mut kernel = (BUILTIN.make)();
    let mut population = Population::new(&network(), &[0, 1]).unwrap();
    let attach = prepare(&memory, &mut population, |_| {});
    run(&mut *kernel, &memory, attach).unwrap();
    let mut spikes = 0;
    // Across the end of a second, when weights change.
    for step in 0..1100 {
        let expected = population.step_alone();
        run(&mut *kernel, &memory, Operation::Fire).unwrap();
        let count = u64::from_le_bytes(memory.read_array(FIRING).unwrap());
        let mut list = vec![0; 4 * count as usize];
        memory.read(FIRING + 8, &mut list).unwrap();
        let fired: Vec<u32> = list.as_chunks().0.iter().map(|&id| u32::from_le_bytes(id)).collect();
        assert_eq!(fired, expected, "step {step}");
        let results = run(&mut *kernel, &memory, Operation::Step { parity: 0 }).unwrap();
        let counts = population.take_counts();
        let words = [counts.excitatory, counts.inhibitory, counts.events, counts.raster];
        assert_eq!(results[..4], words, "step {step}");
        spikes += count;
    }
    assert!(spikes > 1000, "{spikes}");
    // The lists of the kernel move to another instance.
    let room = 1 << 19;
    let [bytes, ..] = run(&mut *kernel, &memory, Operation::Arrivals { at: FIRING, bytes: room }).unwrap();
    let mut arrivals = vec![0; bytes as usize];
    memory.read(FIRING, &mut arrivals).unwrap();
    assert_eq!(arrivals, population.arrivals_bytes());
    let full = run(&mut *kernel, &memory, Operation::Arrivals { at: FIRING, bytes: bytes - 1 });
    assert_eq!(full, Err(Fault::new(Cause::InvalidArgument, 2)));
}

#[test]
fn wrong_descriptions_and_arguments_are_refused() {
    let memory = Memory::anonymous(BANK).unwrap();
    let mut kernel = (BUILTIN.make)();
    let invalid = |index| Err(Fault::new(Cause::InvalidArgument, index));
    // Nothing is attached.
    assert_eq!(run(&mut *kernel, &memory, Operation::Fire), invalid(0));
    let mut population = Population::new(&network(), &[0, 1]).unwrap();
    let changes: [fn(&mut Description); 8] = [
        |d| d.columns = vec![1, 0],
        |d| d.columns = vec![0, 2],
        |d| d.network.neurons = 0,
        |d| d.network.shares = [0; 4],
        |d| d.arrays[0].count += 1,
        |d| d.arrays[4].count -= 1,
        |d| d.arrays[6].count = 0,
        // Offsets that are no offsets.
        |d| d.arrays[4].at = d.arrays[5].at,
    ];
    for (i, change) in changes.into_iter().enumerate() {
        let attach = prepare(&memory, &mut population, change);
        assert_eq!(run(&mut *kernel, &memory, attach), invalid(1), "change {i}");
        assert_eq!(run(&mut *kernel, &memory, Operation::Fire), invalid(0));
    }
    for at in [BANK, u64::MAX - 7, ARRAYS + 4] {
        let attach = prepare(&memory, &mut population, |description| description.arrays[0].at = at);
        let fault = run(&mut *kernel, &memory, attach).unwrap_err();
        assert_eq!((fault.cause, fault.detail), (Cause::AccessViolation, at));
    }
    memory.write(DESCRIPTION, b"{").unwrap();
    assert_eq!(run(&mut *kernel, &memory, Operation::Attach { at: DESCRIPTION, bytes: 1 }), invalid(1));
    let attach = prepare(&memory, &mut population, |_| {});
    run(&mut *kernel, &memory, attach).unwrap();
    // A count without slots, and a slot of nobody.
    memory.write(FIRING, &[1, 0, 0, 0, 255, 255, 255, 255]).unwrap();
    let arrivals = Operation::SetArrivals { at: FIRING, bytes: 8, step: 0 };
    assert_eq!(run(&mut *kernel, &memory, arrivals), invalid(1));
    for (words, index) in
        [([9, 0, 0, 0], 0), ([0, 0, 1 << 40, 0], 2), ([2, 0, 0, 2], 3), ([4, 0, 0, 1 << 31], 3)]
    {
        let mut all = [0; 16];
        all[..4].copy_from_slice(&words);
        assert_eq!(Operation::from_words(&all), Err(index));
    }
}
