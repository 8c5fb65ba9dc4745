//! `stencil`: five-point Jacobi sweeps over a grid in card memory.
//!
//! | argument | |
//! |---|---|
//! | 0 | 0: float32, 1: float64 |
//! | 1, 2 | rows, columns |
//! | 3 | elements from one row to the next |
//! | 4, 5 | offsets of the grid and of a second one of the same size |
//! | 6 | sweeps |
//! | 7, 8 | the rows to compute, first and past the last, at most 16 sweeps; 0, 0: the whole grid, any number of sweeps |
//! | 9, 10 | further rows, or 0, 0 |
//!
//! Results: 0: sweeps, 1: points computed, 2: time in the sweeps (ns). The result is always in the second grid;
//! the first keeps its values if there are at most 16 sweeps. The outermost rows and columns never change.
//! [`millstream_stencil`] defines the arithmetic.
//!
//! The kernel uses every core of an emulated card. It can pause or stop at any time: an interrupted pass is
//! repeated.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Instant;

use millstream_card_abi::MemoryRange;
use millstream_card_abi::command::{Cause, Fault, nanos};
use millstream_card_abi::registers::{KERNEL_WORDS, KernelWords};
use millstream_card_abi::stencil::{NAME, StencilArguments};
use millstream_stencil::{Element, Jacobi, MAX_DEPTH, Plane};

use crate::kernel::{BuiltinKernel, Kernel, KernelRun};

/// The kernel.
pub const BUILTIN: BuiltinKernel = BuiltinKernel { name: NAME, make: || Box::<Stencil>::default() };

/// First state word, which identifies the state of this kernel.
const STATE: u64 = u64::from_le_bytes(*b"sten-001");

/// Decodes and checks the argument words; the fault names the first bad one.
fn decode(words: &KernelWords) -> Result<StencilArguments, Fault> {
    let refused = |index: u64| Fault::new(Cause::InvalidArgument, index);
    let [element, rows, columns, pitch, source, destination, sweeps, ..] = *words;
    if element > 1 {
        return Err(refused(0));
    }
    let bytes = if element == 1 { 8 } else { 4 };
    if rows == 0 || columns == 0 {
        return Err(refused(if rows == 0 { 1 } else { 2 }));
    }
    let plane = pitch.checked_mul(rows).and_then(|cells| cells.checked_mul(bytes));
    if pitch < columns || plane.is_none() {
        return Err(refused(3));
    }
    for (index, offset) in [(4, source), (5, destination)] {
        if !offset.is_multiple_of(bytes) {
            return Err(refused(index));
        }
    }
    let ranges = [words[7]..words[8], words[9]..words[10]];
    for (index, range) in [(7, &ranges[0]), (9, &ranges[1])] {
        if range.start > range.end || range.end > rows {
            return Err(refused(index));
        }
    }
    let arguments =
        StencilArguments { double: element == 1, rows, columns, pitch, source, destination, sweeps, ranges };
    if !is_whole(&arguments) && sweeps > MAX_DEPTH as u64 {
        return Err(refused(6));
    }
    let [from, to] = grid_ranges(&arguments);
    if from.overlaps(to) {
        return Err(refused(5));
    }
    Ok(arguments)
}

fn is_whole(arguments: &StencilArguments) -> bool {
    arguments.ranges.iter().all(|range| range.is_empty())
}

/// The ranges of the two grids.
fn grid_ranges(arguments: &StencilArguments) -> [MemoryRange; 2] {
    let element = if arguments.double { 8 } else { 4 };
    // The last row ends with its columns.
    let cells = arguments.pitch * (arguments.rows - 1) + arguments.columns;
    [arguments.source, arguments.destination].map(|offset| MemoryRange::new(offset, cells * element))
}

/// The kernel, with the buffers that its threads reuse between runs.
struct Stencil {
    single: Jacobi<f32>,
    double: Jacobi<f64>,
}

impl Default for Stencil {
    fn default() -> Stencil {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        Stencil { single: Jacobi::new(threads), double: Jacobi::new(threads) }
    }
}

impl Kernel for Stencil {
    fn run(&mut self, run: &mut KernelRun<'_>) -> Result<(), Fault> {
        let arguments = decode(run.arguments())?;
        if arguments.double {
            sweep(&mut self.double, run, &arguments)
        } else {
            sweep(&mut self.single, run, &arguments)
        }
    }
}

fn sweep<E: Element>(
    jacobi: &mut Jacobi<E>,
    run: &mut KernelRun<'_>,
    arguments: &StencilArguments,
) -> Result<(), Fault> {
    let mut planes = Vec::new();
    for span in grid_ranges(arguments) {
        planes.push(Plane {
            base: run.banks().as_ptr(span)?.cast::<E>(),
            pitch: arguments.pitch as usize,
            rows: arguments.rows as usize,
            columns: arguments.columns as usize,
        });
    }
    let whole = [0..arguments.rows, 0..0];
    let ranges = if is_whole(arguments) { &whole } else { &arguments.ranges };
    let ranges = ranges.iter().map(|range| range.start as usize..range.end as usize);
    let ranges: Vec<_> = ranges.filter(|range| !range.is_empty()).collect();
    let rows: usize = ranges.iter().map(Range::len).sum();

    let sweeps = arguments.sweeps;
    // An odd number of passes ends in the second grid.
    let passes = sweeps.div_ceil(MAX_DEPTH as u64) | 1;
    let mut pass = match run.resume() {
        None => 0,
        Some([STATE, pass, ..]) if *pass <= passes => *pass,
        Some(other) => return Err(Fault::new(Cause::KernelNotResumable, other[0])),
    };
    let mut sweep_ns = 0;
    while pass < passes {
        let depth = (sweeps + passes - 1 - pass) / passes;
        let (from, to) = if pass % 2 == 0 { (planes[0], planes[1]) } else { (planes[1], planes[0]) };
        let (interrupted, deadline) = (run.interrupt_requested(), run.deadline());
        let go_on = || {
            !interrupted.load(Ordering::Relaxed) && deadline.is_none_or(|deadline| Instant::now() < deadline)
        };
        let started = Instant::now();
        let mut outcome = Ok(());
        for range in &ranges {
            // SAFETY: both planes are in the run's banks, which outlive the run, and do not overlap. Other
            // processes may write to card memory; that makes the result undefined, not the access.
            outcome = outcome
                .and_then(|()| unsafe { jacobi.run_rows(from, to, range.clone(), depth as usize, &go_on) });
        }
        sweep_ns += nanos(started.elapsed());
        if outcome.is_ok() {
            pass += 1;
            let bytes = rows as u64 * arguments.columns * E::BYTES as u64;
            run.add_traffic(bytes, bytes);
            run.set_progress(pass * sweeps / passes);
        }
        // An interrupted pass leaves its source grid unchanged, so it is repeated.
        let mut state = [0; KERNEL_WORDS];
        state[..2].copy_from_slice(&[STATE, pass]);
        run.safe_point(&state)?;
        if outcome.is_err() {
            // The interrupt request was withdrawn, or its reason is not visible yet.
            std::thread::yield_now();
        }
    }
    run.set_result(0, sweeps);
    run.set_result(1, sweeps * rows as u64 * arguments.columns);
    run.set_result(2, sweep_ns);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, AtomicU64};

    use super::*;
    use crate::kernel::{GrantedBanks, RunControl, StandaloneControl};
    use crate::memory::Memory;

    const BANK: u64 = 1 << 20;

    fn arguments(rows: u64, columns: u64, sweeps: u64) -> StencilArguments {
        StencilArguments {
            double: false,
            rows,
            columns,
            pitch: columns,
            source: BANK,
            destination: 2 * BANK,
            sweeps,
            ranges: [0..0, 0..0],
        }
    }

    fn grid(rows: u64, columns: u64) -> Vec<f32> {
        (0..rows * columns).map(|at| (at * at % 1009) as f32 / 3.0).collect()
    }

    fn memory(cells: &[f32]) -> Memory {
        let memory = Memory::anonymous(4 * BANK).unwrap();
        let bytes: Vec<u8> = cells.iter().flat_map(|cell| cell.to_le_bytes()).collect();
        memory.write(BANK, &bytes).unwrap();
        memory
    }

    fn result(memory: &Memory, cells: usize) -> Vec<f32> {
        let mut bytes = vec![0; 4 * cells];
        memory.read(2 * BANK, &mut bytes).unwrap();
        bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }

    fn run(memory: &Memory, words: KernelWords) -> Result<KernelWords, Fault> {
        let control = StandaloneControl::default();
        let mut run = KernelRun::new(GrantedBanks::new(memory, BANK, 0b0110), words, &control);
        (BUILTIN.make)().run(&mut run)?;
        Ok(*run.results())
    }

    #[test]
    fn the_result_is_in_the_second_grid_after_any_number_of_sweeps() {
        for sweeps in [0, 1, 16, 17, 40] {
            let cells = grid(90, 130);
            let memory = memory(&cells);
            let results = run(&memory, arguments(90, 130, sweeps).to_words()).unwrap();
            assert_eq!(results[..2], [sweeps, sweeps * 90 * 130]);
            let expected = millstream_stencil::reference(&cells, 90, 130, sweeps as usize);
            assert!(result(&memory, cells.len()) == expected, "{sweeps}");
        }
    }

    #[test]
    fn ranges_of_rows_are_computed_and_no_others() {
        let cells = grid(90, 130);
        let memory = memory(&cells);
        let words = StencilArguments { ranges: [3..10, 80..90], ..arguments(90, 130, 9) }.to_words();
        assert_eq!(run(&memory, words).unwrap()[1], 9 * 17 * 130);
        let expected = millstream_stencil::reference(&cells, 90, 130, 9);
        for (row, computed) in result(&memory, cells.len()).chunks(130).enumerate() {
            let inside = (3..10).contains(&row) || row >= 80;
            let expected_row = if inside { &expected[row * 130..][..130] } else { &[0.0; 130] };
            assert!(computed == expected_row, "row {row}");
        }
    }

    #[test]
    fn bad_arguments_are_refused_by_number() {
        let memory = memory(&grid(90, 130));
        let good = arguments(90, 130, 5).to_words();
        for (index, value, refused) in [
            (0, 2, 0),
            (1, 0, 1),
            (2, 0, 2),
            (3, 129, 3),
            (3, u64::MAX / 8, 3),
            (4, BANK + 2, 4),
            (5, BANK + 4, 5),
            (8, 91, 7),
            (10, 91, 9),
            (7, 5, 7),
        ] {
            let mut words = good;
            words[index] = value;
            assert_eq!(
                run(&memory, words),
                Err(Fault::new(Cause::InvalidArgument, refused)),
                "{index}: {value}"
            );
        }
        let mut words = good;
        (words[6], words[8]) = (17, 3);
        assert_eq!(run(&memory, words), Err(Fault::new(Cause::InvalidArgument, 6)));
        for (index, offset) in [(4, 0), (5, 3 * BANK - 4), (5, 4 * BANK), (5, u64::MAX - 3)] {
            let mut words = good;
            words[index] = offset;
            let fault = run(&memory, words).unwrap_err();
            assert_eq!((fault.cause, fault.detail), (Cause::AccessViolation, offset));
        }
    }

    /// Ends the run at the first safe point after an interrupt request, and keeps the state.
    #[derive(Default)]
    struct InterruptOnce {
        interrupt_requested: AtomicBool,
        progress: AtomicU64,
        heartbeat: AtomicU64,
        state: Mutex<KernelWords>,
    }

    impl RunControl for InterruptOnce {
        fn safe_point(&self, state: &KernelWords) -> Result<(), Fault> {
            *self.state.lock().unwrap() = *state;
            if self.interrupt_requested.load(Ordering::Relaxed) {
                Err(Fault::new(Cause::Interrupted, 0))
            } else {
                Ok(())
            }
        }
        fn interrupt_requested(&self) -> &AtomicBool {
            &self.interrupt_requested
        }
        fn heartbeat(&self) -> &AtomicU64 {
            &self.heartbeat
        }
        fn progress(&self) -> &AtomicU64 {
            &self.progress
        }
    }

    #[test]
    fn an_interrupted_run_resumes_with_the_same_result() {
        let cells = grid(400, 500);
        let words = arguments(400, 500, 2000).to_words();
        let memory = memory(&cells);
        let control = InterruptOnce::default();
        let banks = GrantedBanks::new(&memory, BANK, 0b0110);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while control.progress.load(Ordering::Relaxed) < 100 {
                    std::thread::yield_now();
                }
                control.interrupt_requested.store(true, Ordering::Relaxed);
            });
            let mut run = KernelRun::new(banks, words, &control);
            assert_eq!((BUILTIN.make)().run(&mut run).unwrap_err().cause, Cause::Interrupted);
        });
        let state = *control.state.lock().unwrap();
        let control = StandaloneControl::default();
        let mut run = KernelRun::new(banks, words, &control).resuming(state);
        (BUILTIN.make)().run(&mut run).unwrap();
        assert!(result(&memory, cells.len()) == millstream_stencil::reference(&cells, 400, 500, 2000));
        let mut foreign = KernelRun::new(banks, words, &control).resuming([7; KERNEL_WORDS]);
        let refused = (BUILTIN.make)().run(&mut foreign);
        assert_eq!(refused, Err(Fault::new(Cause::KernelNotResumable, 7)));
    }
}
