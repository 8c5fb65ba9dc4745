//! The kernels that every card brings along: some for trying a card out, the stencil, and the event kernels.

use std::sync::atomic::Ordering;

use crate::command::{Cause, Fault, Tally};
use crate::kernel::{Job, Kernel, Pulse, cluster7, verify};
use crate::memory::Span;
use crate::region::kernel::{Builtin, RegionKernel, Run, Words};
use crate::region::{plain, stencil};
use crate::registers::WORDS;

/// Number of the kernel that does nothing: for measuring how long starting takes.
pub const NULL: &str = "null";

/// Name of the kernel that stirs memory, sweep after sweep: for trying out how a card is watched, stopped and
/// checkpointed.
pub const MIX: &str = "mix";

/// All of them.
pub const BUILTINS: &[Builtin] = &[
    Builtin { name: NULL, make: || Box::new(Null) },
    Builtin { name: MIX, make: || Box::new(Mix { buffer: vec![0; CHUNK] }) },
    plain::COPY,
    plain::FILL,
    plain::REDUCE,
    stencil::BUILTIN,
    Builtin { name: verify::NAME, make: || Box::new(ForEvents(verify::Verify::new())) },
    Builtin { name: cluster7::NAME, make: || Box::new(ForEvents(cluster7::Cluster7::new())) },
];

/// Gives its arguments back as results.
struct Null;

impl RegionKernel for Null {
    fn run(&mut self, run: &mut Run<'_>) -> Result<(), Fault> {
        for index in 0..WORDS {
            run.set_result(index, run.arguments()[index]);
        }
        Ok(())
    }
}

/// Bytes that `mix` works on at a time.
const CHUNK: usize = 64 << 10;

/// Arguments: offset [bytes], length [bytes], sweeps. Every sweep makes each word of 8 bytes depend on all
/// words before it. Result: sweeps made, the last word. Goes on from any sweep.
struct Mix {
    buffer: Vec<u8>,
}

/// First state word of `mix`, so that nobody else's state is taken for its own.
const MIX_STATE: u64 = u64::from_le_bytes(*b"mix-0001");

impl RegionKernel for Mix {
    fn run(&mut self, run: &mut Run<'_>) -> Result<(), Fault> {
        let [offset, bytes, sweeps, ..] = *run.arguments();
        if !bytes.is_multiple_of(8) {
            return Err(Fault::new(Cause::Argument, 1));
        }
        run.banks().check(Span::new(offset, bytes))?;
        let mut last = 0;
        let first = match run.resume() {
            None => 0,
            Some([MIX_STATE, sweep, carried, ..]) => {
                last = *carried;
                *sweep
            }
            Some(other) => return Err(Fault::new(Cause::KernelUnresumable, other[0])),
        };
        for sweep in first..sweeps {
            last = self.sweep(run, Span::new(offset, bytes), last ^ sweep)?;
            run.progress(sweep + 1);
            run.note_traffic(bytes, bytes);
            let mut state: Words = [0; WORDS];
            state[..3].copy_from_slice(&[MIX_STATE, sweep + 1, last]);
            run.safe_point(&state)?;
        }
        run.set_result(0, sweeps);
        run.set_result(1, last);
        Ok(())
    }
}

impl Mix {
    fn sweep(&mut self, run: &Run<'_>, span: Span, seed: u64) -> Result<u64, Fault> {
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

/// An event kernel as a region runs it. Arguments: those of its descriptor, `args_offset`, `args_len`,
/// `result_offset`, `result_len`, `flags`. Results: events, fragments, corrupt fragments, decisions set,
/// payload [bytes]. Places of packets lie anywhere in memory, so it wants all banks.
struct ForEvents<K>(K);

impl<K: Kernel> RegionKernel for ForEvents<K> {
    fn run(&mut self, run: &mut Run<'_>) -> Result<(), Fault> {
        let [args_offset, args_len, result_offset, result_len, flags, ..] = *run.arguments();
        let banks = run.banks();
        let memory = banks.whole().ok_or(Fault::new(Cause::BanksRefused, banks.mask()))?;
        let flags = u32::try_from(flags).unwrap_or(u32::MAX);
        if flags & !self.0.flags() != 0 {
            return Err(Fault::new(Cause::UnknownFlags, flags.into()));
        }
        let (args, result) = (Span::new(args_offset, args_len), Span::new(result_offset, result_len));
        memory.check(args).map_err(|_| Fault::new(Cause::ArgsOutsideMemory, args.offset))?;
        memory.check(result).map_err(|_| Fault::new(Cause::ResultOutsideMemory, result.offset))?;
        let pulse = Pulse { heartbeat: run.progress_word(), stop: run.wanted() };
        let mut job = Job { memory, flags, args, result, tally: Tally::default(), pulse: &pulse };
        let outcome = self.0.run(&mut job);
        let Tally { events, fragments, corrupt_fragments, decisions_set, payload_bytes } = job.tally;
        let counts = [events, fragments, corrupt_fragments, decisions_set].map(u64::from);
        for (index, count) in counts.into_iter().chain([payload_bytes]).enumerate() {
            run.set_result(index, count);
        }
        run.note_traffic(payload_bytes, 0);
        run.progress_word().store(u64::from(events), Ordering::Relaxed);
        outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Memory;
    use crate::region::kernel::{Banks, Control, Unattended};
    use std::cell::RefCell;
    use std::sync::atomic::{AtomicBool, AtomicU64};

    /// Ends the run at the safe point after so many, and keeps the state.
    struct EndAfter {
        inner: Unattended,
        left: RefCell<(u32, Words)>,
    }

    impl Control for EndAfter {
        fn safe_point(&self, state: &Words) -> Result<(), Fault> {
            let mut left = self.left.borrow_mut();
            left.0 -= 1;
            left.1 = *state;
            if left.0 == 0 { Err(Fault::new(Cause::Interrupted, 0)) } else { Ok(()) }
        }
        fn wanted(&self) -> &AtomicBool {
            self.inner.wanted()
        }
        fn progress(&self) -> &AtomicU64 {
            self.inner.progress()
        }
    }

    #[test]
    fn mix_goes_on_from_any_sweep_as_if_nothing_had_been() {
        let fresh = || {
            let memory = Memory::anonymous(1 << 20).unwrap();
            memory.write(100, &[3; 5000]).unwrap();
            memory
        };
        let mut arguments = [0; WORDS];
        arguments[..3].copy_from_slice(&[8, 200_000, 9]);
        let kernel = || (BUILTINS.iter().find(|builtin| builtin.name == MIX).unwrap().make)();
        let contents = |memory: &Memory| memory.read_array::<200_100>(0).unwrap();

        let (straight, control) = (fresh(), Unattended::default());
        let mut run = Run::new(Banks::new(&straight, 1 << 20, 1), arguments, &control);
        kernel().run(&mut run).unwrap();
        let results = *run.results();
        assert_eq!(results[0], 9);

        for stop_after in 1..9 {
            let broken = fresh();
            let control =
                EndAfter { inner: Unattended::default(), left: RefCell::new((stop_after, [0; WORDS])) };
            let banks = Banks::new(&broken, 1 << 20, 1);
            let ended = kernel().run(&mut Run::new(banks, arguments, &control)).unwrap_err();
            assert_eq!(ended.cause, Cause::Interrupted);
            let state = control.left.borrow().1;
            let control = Unattended::default();
            let mut run = Run::new(banks, arguments, &control).resuming(state);
            kernel().run(&mut run).unwrap();
            assert_eq!(*run.results(), results);
            assert!(contents(&broken) == contents(&straight));
        }
        let control = Unattended::default();
        let mut foreign =
            Run::new(Banks::new(&straight, 1 << 20, 1), arguments, &control).resuming([7; WORDS]);
        assert_eq!(kernel().run(&mut foreign), Err(Fault::new(Cause::KernelUnresumable, 7)));
    }
}
