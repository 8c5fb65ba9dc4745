//! `copy`, `fill` and `reduce`: simple kernels to test a card.
//!
//! All process words of 8 bytes in blocks of one megabyte, and resume at any block.

use millstream_card_abi::MemoryRange;
use millstream_card_abi::command::{Cause, Fault};
use millstream_card_abi::registers::KERNEL_WORDS;

use crate::kernel::{BuiltinKernel, Kernel, KernelRun};

/// `copy`: arguments: offset to copy from, offset to copy to, length (bytes); the ranges may not overlap.
/// Result: bytes copied.
pub const COPY: BuiltinKernel = BuiltinKernel { name: "copy", make: || Box::new(Blocks(copy)) };

/// `fill`: arguments: offset, value, length (bytes). Stores the value to every word. Result: bytes filled.
pub const FILL: BuiltinKernel = BuiltinKernel { name: "fill", make: || Box::new(Blocks(fill)) };

/// `reduce`: arguments: offset, 0, length (bytes). Results: bytes added, the sum of all words modulo 2^64.
pub const REDUCE: BuiltinKernel = BuiltinKernel { name: "reduce", make: || Box::new(Blocks(reduce)) };

/// Bytes from one safe point to the next.
const BLOCK: u64 = 1 << 20;

/// First state word, which identifies the state of these kernels.
const STATE: u64 = u64::from_le_bytes(*b"blocks-1");

/// Processes one block, `at` its range within the argument's range. `before` is the carried value of the previous
/// block; returns that of this one.
type Step = fn(run: &KernelRun<'_>, at: MemoryRange, before: u64, buffer: &mut [u8]) -> Result<u64, Fault>;

struct Blocks(Step);

impl Kernel for Blocks {
    fn run(&mut self, run: &mut KernelRun<'_>) -> Result<(), Fault> {
        let len = run.arguments()[2];
        if !len.is_multiple_of(8) {
            return Err(Fault::new(Cause::InvalidArgument, 2));
        }
        let (mut done, mut carried) = match run.resume() {
            None => (0, 0),
            Some([STATE, done, carried, ..]) => (*done, *carried),
            Some(other) => return Err(Fault::new(Cause::KernelNotResumable, other[0])),
        };
        let mut buffer = vec![0; BLOCK.min(len) as usize];
        while done < len {
            let bytes = BLOCK.min(len - done);
            carried = (self.0)(run, MemoryRange::new(done, bytes), carried, &mut buffer[..bytes as usize])?;
            done += bytes;
            run.set_progress(done);
            let mut state = [0; KERNEL_WORDS];
            state[..3].copy_from_slice(&[STATE, done, carried]);
            run.safe_point(&state)?;
        }
        run.set_result(0, len);
        run.set_result(1, carried);
        Ok(())
    }
}

/// The offset `at` bytes after argument `index`.
fn offset_of(run: &KernelRun<'_>, index: usize, at: u64) -> Result<u64, Fault> {
    let offset = run.arguments()[index];
    offset.checked_add(at).ok_or(Fault::new(Cause::AccessViolation, offset))
}

fn copy(run: &KernelRun<'_>, at: MemoryRange, _: u64, buffer: &mut [u8]) -> Result<u64, Fault> {
    let [from, to, len, ..] = *run.arguments();
    if MemoryRange::new(from, len).overlaps(MemoryRange::new(to, len)) {
        return Err(Fault::new(Cause::InvalidArgument, 1));
    }
    run.banks().read(offset_of(run, 0, at.offset)?, buffer)?;
    run.banks().write(offset_of(run, 1, at.offset)?, buffer)?;
    Ok(0)
}

fn fill(run: &KernelRun<'_>, at: MemoryRange, _: u64, buffer: &mut [u8]) -> Result<u64, Fault> {
    buffer.as_chunks_mut::<8>().0.fill(run.arguments()[1].to_le_bytes());
    run.banks().write(offset_of(run, 0, at.offset)?, buffer)?;
    Ok(0)
}

fn reduce(run: &KernelRun<'_>, at: MemoryRange, before: u64, buffer: &mut [u8]) -> Result<u64, Fault> {
    run.banks().read(offset_of(run, 0, at.offset)?, buffer)?;
    let words = buffer.as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes));
    Ok(words.fold(before, u64::wrapping_add))
}

#[cfg(test)]
mod tests {
    use millstream_card_abi::registers::KernelWords;

    use super::*;
    use crate::kernel::{GrantedBanks, StandaloneControl};
    use crate::memory::Memory;

    const BANK: u64 = 2 << 20;

    fn run(
        builtin: &BuiltinKernel,
        memory: &Memory,
        words: [u64; 3],
        resume: Option<KernelWords>,
    ) -> Result<KernelWords, Fault> {
        let mut arguments = [0; KERNEL_WORDS];
        arguments[..3].copy_from_slice(&words);
        let control = StandaloneControl::default();
        let mut run = KernelRun::new(GrantedBanks::new(memory, BANK, 0b110), arguments, &control);
        if let Some(state) = resume {
            run = run.resuming(state);
        }
        (builtin.make)().run(&mut run)?;
        Ok(*run.results())
    }

    #[test]
    fn fill_copy_and_reduce_agree() {
        let memory = Memory::anonymous(3 * BANK).unwrap();
        let len = BLOCK + 4096;
        run(&FILL, &memory, [BANK, 7, len], None).unwrap();
        run(&COPY, &memory, [BANK, 2 * BANK - 8, len], None).unwrap();
        let sum = |offset, len| run(&REDUCE, &memory, [offset, 0, len], None).unwrap()[..2].to_vec();
        assert_eq!(sum(2 * BANK - 8, len), [len, 7 * len / 8]);
        assert_eq!(sum(2 * BANK - 8 + len, 8), [8, 0]);
        // Resumes at the second block.
        let mut state = [0; KERNEL_WORDS];
        state[..3].copy_from_slice(&[STATE, BLOCK, 100]);
        assert_eq!(run(&REDUCE, &memory, [BANK, 0, len], Some(state)).unwrap()[1], 100 + 7 * 4096 / 8);
    }

    #[test]
    fn bad_ranges_and_lengths_are_refused() {
        let memory = Memory::anonymous(3 * BANK).unwrap();
        let refused = |builtin, words| run(builtin, &memory, words, None).unwrap_err();
        for builtin in [&COPY, &FILL, &REDUCE] {
            assert_eq!(refused(builtin, [BANK, BANK + 64, 12]), Fault::new(Cause::InvalidArgument, 2));
            for offset in [0, 3 * BANK, u64::MAX - 7] {
                assert_eq!(refused(builtin, [offset, BANK, 16]).cause, Cause::AccessViolation);
            }
        }
        assert_eq!(refused(&COPY, [BANK, BANK + 8, 16]), Fault::new(Cause::InvalidArgument, 1));
        assert_eq!(refused(&COPY, [BANK, 0, 16]), Fault::new(Cause::AccessViolation, 0));
    }
}
