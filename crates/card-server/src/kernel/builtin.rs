//! The kernels of every card: some to test a card, the stencil, and the event kernels.

use millstream_card_abi::MemoryRange;
use millstream_card_abi::command::{Cause, Fault};
use millstream_card_abi::registers::{KERNEL_WORDS, KernelWords};

use crate::kernel::events::{cluster7, verify};
use crate::kernel::{BuiltinKernel, Kernel, KernelRun, blocks, stencil};

/// Name of the kernel that returns its arguments, to measure the time of a start.
pub const NULL: &str = "null";

/// Name of the kernel that mixes memory, sweep after sweep, to test monitoring, stop and checkpoint.
pub const MIX: &str = "mix";

/// All kernels of every card.
pub const BUILTINS: &[BuiltinKernel] = &[
    verify::BUILTIN,
    cluster7::BUILTIN,
    BuiltinKernel { name: NULL, make: || Box::new(Null) },
    BuiltinKernel { name: MIX, make: || Box::new(Mix { buffer: vec![0; CHUNK] }) },
    blocks::COPY,
    blocks::FILL,
    blocks::REDUCE,
    stencil::BUILTIN,
];

/// Returns its arguments as results.
struct Null;

impl Kernel for Null {
    fn run(&mut self, run: &mut KernelRun<'_>) -> Result<(), Fault> {
        for index in 0..KERNEL_WORDS {
            run.set_result(index, run.arguments()[index]);
        }
        Ok(())
    }
}

/// Bytes that `mix` processes at a time.
const CHUNK: usize = 64 << 10;

/// Arguments: offset (bytes), length (bytes), sweeps. Every sweep makes each word of 8 bytes depend on all
/// words before it. Results: number of sweeps, the last word. Resumes at any sweep.
struct Mix {
    buffer: Vec<u8>,
}

/// First state word of `mix`, which identifies its state.
const MIX_STATE: u64 = u64::from_le_bytes(*b"mix-0001");

impl Kernel for Mix {
    fn run(&mut self, run: &mut KernelRun<'_>) -> Result<(), Fault> {
        let [offset, bytes, sweeps, ..] = *run.arguments();
        if !bytes.is_multiple_of(8) {
            return Err(Fault::new(Cause::InvalidArgument, 1));
        }
        run.banks().check(MemoryRange::new(offset, bytes))?;
        let mut last = 0;
        let first = match run.resume() {
            None => 0,
            Some([MIX_STATE, sweep, carried, ..]) => {
                last = *carried;
                *sweep
            }
            Some(other) => return Err(Fault::new(Cause::KernelNotResumable, other[0])),
        };
        for sweep in first..sweeps {
            last = self.sweep(run, MemoryRange::new(offset, bytes), last ^ sweep)?;
            run.set_progress(sweep + 1);
            run.add_traffic(bytes, bytes);
            let mut state: KernelWords = [0; KERNEL_WORDS];
            state[..3].copy_from_slice(&[MIX_STATE, sweep + 1, last]);
            run.safe_point(&state)?;
        }
        run.set_result(0, sweeps);
        run.set_result(1, last);
        Ok(())
    }
}

impl Mix {
    fn sweep(&mut self, run: &KernelRun<'_>, span: MemoryRange, seed: u64) -> Result<u64, Fault> {
        let mut carried = seed;
        for at in (0..span.len).step_by(CHUNK) {
            let len = (span.len - at).min(CHUNK as u64) as usize;
            let chunk = &mut self.buffer[..len];
            run.banks().read(span.offset + at, chunk)?;
            for word in chunk.as_chunks_mut::<8>().0 {
                carried = (u64::from_le_bytes(*word) ^ carried.rotate_left(23))
                    .wrapping_mul(0x9e37_79b9_7f4a_7c15)
                    .wrapping_add(1);
                *word = carried.to_le_bytes();
            }
            run.banks().write(span.offset + at, chunk)?;
        }
        Ok(carried)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::sync::atomic::{AtomicBool, AtomicU64};

    use super::*;
    use crate::kernel::{GrantedBanks, RunControl, StandaloneControl};
    use crate::memory::Memory;

    /// Ends the run at a safe point and keeps its state.
    struct EndAfter {
        inner: StandaloneControl,
        /// Safe points left, and the state of the latest one.
        left: RefCell<(u32, KernelWords)>,
    }

    impl RunControl for EndAfter {
        fn safe_point(&self, state: &KernelWords) -> Result<(), Fault> {
            let mut left = self.left.borrow_mut();
            left.0 -= 1;
            left.1 = *state;
            if left.0 == 0 { Err(Fault::new(Cause::Interrupted, 0)) } else { Ok(()) }
        }
        fn interrupt_requested(&self) -> &AtomicBool {
            self.inner.interrupt_requested()
        }
        fn heartbeat(&self) -> &AtomicU64 {
            self.inner.heartbeat()
        }
        fn progress(&self) -> &AtomicU64 {
            self.inner.progress()
        }
    }

    #[test]
    fn mix_resumes_at_any_sweep_with_the_same_result() {
        let fresh = || {
            let memory = Memory::anonymous(1 << 20).unwrap();
            memory.write(100, &[3; 5000]).unwrap();
            memory
        };
        let mut arguments = [0; KERNEL_WORDS];
        arguments[..3].copy_from_slice(&[8, 200_000, 9]);
        let kernel = || (BUILTINS.iter().find(|builtin| builtin.name == MIX).unwrap().make)();
        let contents = |memory: &Memory| memory.read_array::<200_100>(0).unwrap();

        let (straight, control) = (fresh(), StandaloneControl::default());
        let mut run = KernelRun::new(GrantedBanks::new(&straight, 1 << 20, 1), arguments, &control);
        kernel().run(&mut run).unwrap();
        let results = *run.results();
        assert_eq!(results[0], 9);

        for stop_after in 1..9 {
            let broken = fresh();
            let control = EndAfter {
                inner: StandaloneControl::default(),
                left: RefCell::new((stop_after, [0; KERNEL_WORDS])),
            };
            let banks = GrantedBanks::new(&broken, 1 << 20, 1);
            let ended = kernel().run(&mut KernelRun::new(banks, arguments, &control)).unwrap_err();
            assert_eq!(ended.cause, Cause::Interrupted);
            let state = control.left.borrow().1;
            let control = StandaloneControl::default();
            let mut run = KernelRun::new(banks, arguments, &control).resuming(state);
            kernel().run(&mut run).unwrap();
            assert_eq!(*run.results(), results);
            assert!(contents(&broken) == contents(&straight));
        }
        let control = StandaloneControl::default();
        let mut foreign = KernelRun::new(GrantedBanks::new(&straight, 1 << 20, 1), arguments, &control)
            .resuming([7; KERNEL_WORDS]);
        assert_eq!(kernel().run(&mut foreign), Err(Fault::new(Cause::KernelNotResumable, 7)));
    }
}
