//! What a kernel in a region is, whatever it is made of: native code or WebAssembly.
//!
//! A kernel computes on the banks that it was given and on nothing else. It gets sixteen argument words and
//! leaves sixteen result words. At *safe points*, which it reaches at least every few milliseconds, it hands
//! over sixteen state words from which, together with its banks, it could go on; there it may be stopped,
//! held while the card is checkpointed, or ended by its deadline.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use crate::command::{Cause, Fault};
use crate::kernel::outside;
use crate::memory::{Memory, Span};
use crate::registers::WORDS;

/// Argument, result or state words.
pub type Words = [u64; WORDS];

/// A kernel that is loaded into a region.
pub trait RegionKernel: Send {
    /// Runs to the end, or until a safe point returns a fault, which is to be handed on.
    fn run(&mut self, run: &mut Run<'_>) -> Result<(), Fault>;
}

/// Makes kernels from images in card memory.
pub trait Loader: Send + Sync {
    /// What it loads, for messages and the documentation.
    fn format(&self) -> &'static str;

    /// Whether the image, of which these are the first bytes, is for this loader.
    fn recognises(&self, image: &[u8]) -> bool;

    /// Makes a kernel of an image. Any bytes may come; what is wrong with them is a fault of the causes
    /// `KernelFormat` and `KernelTooLarge`.
    fn load(&self, image: &[u8]) -> Result<LoadedKernel, Fault>;
}

impl fmt::Debug for dyn Loader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Loader({})", self.format())
    }
}

/// A kernel with its name.
pub struct LoadedKernel {
    /// Name for the region's registers; what exceeds 32 bytes is cut.
    pub name: String,
    /// The kernel.
    pub kernel: Box<dyn RegionKernel>,
}

impl fmt::Debug for LoadedKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadedKernel").field("name", &self.name).finish_non_exhaustive()
    }
}

/// A kernel that cards bring along, by name.
#[derive(Clone, Copy)]
pub struct Builtin {
    /// Name in the kernel directory, at most 28 bytes.
    pub name: &'static str,
    /// Makes one.
    pub make: fn() -> Box<dyn RegionKernel>,
}

impl fmt::Debug for Builtin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builtin").field("name", &self.name).finish_non_exhaustive()
    }
}

/// The memory that a kernel may use: some of the card's banks. Offsets are those of card memory.
#[derive(Clone, Copy, Debug)]
pub struct Banks<'a> {
    memory: &'a Memory,
    bank_bytes: u64,
    mask: u64,
}

impl<'a> Banks<'a> {
    /// Banks of a memory: bit `i` of `mask` grants the bytes from `i` × `bank_bytes` on.
    pub fn new(memory: &'a Memory, bank_bytes: u64, mask: u64) -> Banks<'a> {
        Banks { memory, bank_bytes, mask }
    }

    /// Which banks, one bit each.
    pub fn mask(&self) -> u64 {
        self.mask
    }

    /// Size of a bank [bytes].
    pub fn bank_bytes(&self) -> u64 {
        self.bank_bytes
    }

    /// All of card memory, if every bank was given.
    pub fn whole(&self) -> Option<&'a Memory> {
        let banks = self.memory.size() / self.bank_bytes;
        let all = if banks >= 64 { u64::MAX } else { (1 << banks) - 1 };
        (self.mask & all == all).then_some(self.memory)
    }

    /// Checks that a range lies in banks that were given.
    pub fn check(&self, span: Span) -> Result<(), Fault> {
        let foreign = Fault::new(Cause::ForeignMemory, span.offset);
        self.memory.check(span).map_err(|_| foreign)?;
        if span.len == 0 {
            return Ok(());
        }
        let (first, last) = (span.offset / self.bank_bytes, (span.offset + span.len - 1) / self.bank_bytes);
        match (first..=last).all(|bank| bank < 64 && self.mask >> bank & 1 == 1) {
            true => Ok(()),
            false => Err(foreign),
        }
    }

    /// Copies bytes out of the banks. What somebody writes at the same moment may arrive in part.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), Fault> {
        let span = Span::new(offset, out.len() as u64);
        self.check(span)?;
        self.memory.read(offset, out).map_err(outside(Cause::ForeignMemory))
    }

    /// Copies bytes into the banks.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Fault> {
        let span = Span::new(offset, bytes.len() as u64);
        self.check(span)?;
        self.memory.write(offset, bytes).map_err(outside(Cause::ForeignMemory))
    }

    /// The address of a range, for native kernels; memory of some kinds of cards has none. It is valid for the whole range as long as the memory
    /// lives; other processes, and adapters, may write there at any time, so no reference may be made to it
    /// unless the user has promised to keep away.
    pub fn as_ptr(&self, span: Span) -> Result<*mut u8, Fault> {
        self.check(span)?;
        let base = self.memory.as_ptr().ok_or(Fault::new(Cause::MemoryNotMapped, self.mask))?;
        Ok(base.wrapping_add(span.offset as usize))
    }
}

/// One run of a kernel: what it is to do, what it may use, and where it says what it did.
pub struct Run<'a> {
    banks: Banks<'a>,
    arguments: Words,
    resume: Option<Words>,
    fuel: Option<u64>,
    deadline: Option<Instant>,
    results: Words,
    fuel_used: u64,
    bytes_read: u64,
    bytes_written: u64,
    control: &'a dyn Control,
}

/// What the region around a run does for it.
pub trait Control {
    /// The kernel is at a safe point with these state words: comes back when it may go on, or with the
    /// fault that ends it.
    fn safe_point(&self, state: &Words) -> Result<(), Fault>;

    /// True once the run is to end or to be held at its next safe point; a kernel that cannot reach one by
    /// itself (a WebAssembly module in a loop) is interrupted by whoever runs it.
    fn wanted(&self) -> &AtomicBool;

    /// The register that shows progress.
    fn progress(&self) -> &AtomicU64;
}

impl<'a> Run<'a> {
    /// A run with these banks and arguments, under `control`. Regions make them; tests and benchmarks may
    /// with [`Unattended`].
    pub fn new(banks: Banks<'a>, arguments: Words, control: &'a dyn Control) -> Run<'a> {
        Run {
            banks,
            arguments,
            resume: None,
            fuel: None,
            deadline: None,
            results: [0; WORDS],
            fuel_used: 0,
            bytes_read: 0,
            bytes_written: 0,
            control,
        }
    }

    /// Goes on from the state of another run.
    #[must_use]
    pub fn resuming(self, state: Words) -> Run<'a> {
        Run { resume: Some(state), ..self }
    }

    /// Bounds the run.
    #[must_use]
    pub fn bounded(self, fuel: Option<u64>, deadline: Option<Instant>) -> Run<'a> {
        Run { fuel, deadline, ..self }
    }

    /// The memory that the kernel may use.
    pub fn banks(&self) -> Banks<'a> {
        self.banks
    }

    /// The argument words.
    pub fn arguments(&self) -> &Words {
        &self.arguments
    }

    /// State words of another run to go on from; a kernel that cannot refuses with `KernelUnresumable`.
    pub fn resume(&self) -> Option<&Words> {
        self.resume.as_ref()
    }

    /// Units of work that the run may use, for kernels that count them.
    pub fn fuel(&self) -> Option<u64> {
        self.fuel
    }

    /// When the run has to be over.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// See [`Control::safe_point`]; also ends the run when its deadline has passed.
    pub fn safe_point(&self, state: &Words) -> Result<(), Fault> {
        self.control.safe_point(state)?;
        match self.deadline {
            Some(deadline) if Instant::now() >= deadline => Err(Fault::new(Cause::DeadlineExceeded, 0)),
            _ => Ok(()),
        }
    }

    /// See [`Control::wanted`].
    pub fn wanted(&self) -> &'a AtomicBool {
        self.control.wanted()
    }

    /// Shows how far the run has come, in the kernel's own measure.
    pub fn progress(&self, done: u64) {
        self.control.progress().store(done, Ordering::Relaxed);
    }

    /// The register that shows progress, for kernels that count in it themselves.
    pub fn progress_word(&self) -> &'a AtomicU64 {
        self.control.progress()
    }

    /// Sets a result word.
    ///
    /// # Panics
    /// If there is no such word.
    pub fn set_result(&mut self, index: usize, value: u64) {
        self.results[index] = value;
    }

    /// The result words.
    pub fn results(&self) -> &Words {
        &self.results
    }

    /// Notes units of work used, for the registers.
    pub fn note_fuel(&mut self, used: u64) {
        self.fuel_used = self.fuel_used.saturating_add(used);
    }

    /// Units of work used.
    pub fn fuel_used(&self) -> u64 {
        self.fuel_used
    }

    /// Notes bytes that the kernel has read and written, for the performance counters of its banks.
    pub fn note_traffic(&mut self, read: u64, written: u64) {
        self.bytes_read = self.bytes_read.saturating_add(read);
        self.bytes_written = self.bytes_written.saturating_add(written);
    }

    /// Bytes read and written, as noted.
    pub fn traffic(&self) -> (u64, u64) {
        (self.bytes_read, self.bytes_written)
    }
}

impl fmt::Debug for Run<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Run").field("arguments", &self.arguments).field("banks", &self.banks).finish()
    }
}

/// A control that never holds or ends a run, for running kernels by themselves.
#[derive(Debug, Default)]
pub struct Unattended {
    wanted: AtomicBool,
    progress: AtomicU64,
}

impl Control for Unattended {
    fn safe_point(&self, _state: &Words) -> Result<(), Fault> {
        Ok(())
    }

    fn wanted(&self) -> &AtomicBool {
        &self.wanted
    }

    fn progress(&self) -> &AtomicU64 {
        &self.progress
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_reaches_its_banks_and_no_other() {
        let memory = Memory::anonymous(4 * 4096).unwrap();
        let banks = Banks::new(&memory, 4096, 0b0110);
        banks.write(4096, &[7; 8192]).unwrap();
        let mut bytes = [0; 2];
        banks.read(3 * 4096 - 2, &mut bytes).unwrap();
        assert_eq!(bytes, [7; 2]);
        for (offset, len) in [(0, 1), (4095, 2), (3 * 4096 - 1, 2), (u64::MAX, 1), (4096, u64::MAX)] {
            let refused = banks.check(Span::new(offset, len)).unwrap_err();
            assert_eq!(refused, Fault::new(Cause::ForeignMemory, offset));
        }
        assert!(banks.as_ptr(Span::new(4096, 8192)).is_ok());
        assert!(banks.as_ptr(Span::new(4096, 8193)).is_err());
    }
}
