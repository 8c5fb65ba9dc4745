//! `millstream bench mpi`: messages between MPI ranks with buffers in host and card memory; HPC Challenge; LAMMPS.

mod hpcc;
mod lammps;
mod ranks;

use std::error::Error;
use std::path::Path;

use crate::mpi::ranks::{Buffers, Ranks, Test, Way};
use crate::{Benchmark, Figure, Table, median};

/// This benchmark.
pub const BENCHMARK: Benchmark = Benchmark {
    name: "mpi",
    title: "MPI on the soft device, with host and card memory",
    measures: "Latency, bandwidth and bidirectional bandwidth of messages between two ranks on one host, latency and \
               bandwidth of puts and gets, as the OSU micro-benchmarks define them, by memory of the two buffers. Open MPI \
               over UCX with RC queue pairs of the soft device. Card memory is given to MPI as it is \
               (libmillstream_memory). Time of MPI_Alltoall of two and four ranks, host memory. Each case first verifies \
               every byte of its messages in a pass of its own. HPC Challenge: PTRANS and MPIFFT on two ranks; its residual \
               checks must pass. LAMMPS: loop and communication time of three short runs on two ranks.",
    baseline: "UCX over its own shared memory (posix) with host buffers; for figures with `staged`, the same \
               messages between the same buffers, copied through host buffers: one buffer for latency, 64 for bandwidth; for \
               HPC Challenge and LAMMPS the same run over UCX's shared memory",
    values: "medians over the rounds",
    command: "make bench-mpi",
};

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Measures all figures in interleaved rounds; `program` is the path of `millstream`, which serves the cards.
///
/// # Errors
/// The first error of a card, a compiler or a run; a byte that arrived wrong.
pub fn run(
    program: &Path,
    library_dir: &Path,
    folder: &Path,
    rounds: usize,
    seconds: f64,
) -> Outcome<(Table, Vec<String>)> {
    let mut table = Table::new(BENCHMARK, rounds);
    let ranks = Ranks::start(program, library_dir, folder, seconds)?;
    let mut verified = 0;
    for test in Test::ALL {
        verified += messages(&mut table, &ranks, test, rounds)?;
    }
    drop(ranks);
    let mut notes = vec![format!("{verified} messages verified byte by byte before the measurements")];
    notes.extend(hpcc::measure(&mut table, library_dir, folder, rounds)?);
    notes.extend(lammps::measure(&mut table, library_dir, folder, rounds)?);
    Ok((table, notes))
}

/// One test with all its kinds of buffers. Returns the number of verified messages.
fn messages(table: &mut Table, ranks: &Ranks<'_>, test: Test, rounds: usize) -> Outcome<u64> {
    let mut ways = vec![Way::SharedMemory];
    ways.extend(test.buffers().iter().copied().map(Way::Device));
    if test.stages() {
        ways.extend([Buffers::HostCard, Buffers::CardCard].map(Way::Staged));
    }
    if test.has_windows() {
        ways.extend([Buffers::HostCard, Buffers::CardCard].map(Way::Separate));
    }
    let mut verified = 0;
    for way in &ways {
        verified += ranks.verify(test, *way)?;
    }
    // By way, by size, the value of each round.
    let mut values = vec![vec![Vec::new(); test.sizes().len()]; ways.len()];
    for _ in 0..rounds {
        for (way, values) in ways.iter().zip(&mut values) {
            for (value, values) in ranks.measure(test, *way)?.into_iter().zip(values) {
                values.push(value);
            }
        }
    }
    let middle = |way: Way, size: usize| {
        let index = ways.iter().position(|known| *known == way).unwrap_or(0);
        median(&values[index][size]).unwrap_or(0.0)
    };
    for (index, (_, size)) in test.sizes().iter().enumerate() {
        let shared = middle(Way::SharedMemory, index);
        for &buffers in test.buffers() {
            let value = middle(Way::Device(buffers), index);
            let name = test.figure(size, buffers);
            table.push(Figure::with_baseline(&name, value, test.unit(), shared));
            if buffers != Buffers::HostHost && test.stages() {
                let staged = middle(Way::Staged(buffers), index);
                let (name, direct) = match test.has_windows() {
                    true => (format!("{name}, 64 buffers, vs staged"), middle(Way::Separate(buffers), index)),
                    false => (format!("{name}, vs staged"), value),
                };
                table.push(Figure::with_baseline(name, direct, test.unit(), staged));
            }
        }
    }
    Ok(verified)
}
