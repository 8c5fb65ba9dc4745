//! One run of a kernel: arguments, granted memory, limits, results, and its control by the region or the
//! queue.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use millstream_card_abi::command::{Cause, Fault};
use millstream_card_abi::registers::{KERNEL_WORDS, KernelWords};

use crate::kernel::GrantedBanks;

/// How the starter of a run controls and observes it.
pub trait RunControl {
    /// The kernel is at a safe point with this state. Returns when the run may continue, or the fault that ends
    /// it.
    fn safe_point(&self, state: &KernelWords) -> Result<(), Fault>;

    /// True if the run has to end or pause at its next safe point. The loader of a kernel that reaches no safe
    /// point on its own (a WebAssembly module in a loop) interrupts it.
    fn interrupt_requested(&self) -> &AtomicBool;

    /// The register that shows progress.
    fn progress(&self) -> &AtomicU64;

    /// The register that changes while the kernel is alive.
    fn heartbeat(&self) -> &AtomicU64;
}

/// A register that changes while its card is alive.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Heartbeat<'a>(pub(crate) &'a AtomicU64);

impl Heartbeat<'_> {
    pub(crate) fn beat(self) {
        // Only the card writes this register, so load and store need not be one operation.
        let beats = self.0.load(Ordering::Relaxed);
        self.0.store(beats.wrapping_add(1), Ordering::Relaxed);
    }
}

/// One run of a kernel.
pub struct KernelRun<'a> {
    banks: GrantedBanks<'a>,
    arguments: KernelWords,
    resume: Option<KernelWords>,
    fuel: Option<u64>,
    deadline: Option<Instant>,
    results: KernelWords,
    fuel_used: u64,
    bytes_read: u64,
    bytes_written: u64,
    control: &'a dyn RunControl,
}

impl<'a> KernelRun<'a> {
    /// A run with these banks and arguments, under `control`. Tests and benchmarks use [`StandaloneControl`].
    pub fn new(
        banks: GrantedBanks<'a>,
        arguments: KernelWords,
        control: &'a dyn RunControl,
    ) -> KernelRun<'a> {
        KernelRun {
            banks,
            arguments,
            resume: None,
            fuel: None,
            deadline: None,
            results: [0; KERNEL_WORDS],
            fuel_used: 0,
            bytes_read: 0,
            bytes_written: 0,
            control,
        }
    }

    /// Continues from the state of another run.
    #[must_use]
    pub fn resuming(self, state: KernelWords) -> KernelRun<'a> {
        KernelRun { resume: Some(state), ..self }
    }

    /// Bounds the run.
    #[must_use]
    pub fn bounded(self, fuel: Option<u64>, deadline: Option<Instant>) -> KernelRun<'a> {
        KernelRun { fuel, deadline, ..self }
    }

    /// The memory that the kernel may use.
    pub fn banks(&self) -> GrantedBanks<'a> {
        self.banks
    }

    /// The argument words.
    pub fn arguments(&self) -> &KernelWords {
        &self.arguments
    }

    /// State words of another run to continue from. A kernel without this ability refuses with
    /// `KernelNotResumable`.
    pub fn resume(&self) -> Option<&KernelWords> {
        self.resume.as_ref()
    }

    /// Limit of the run's work, in units of the kernel.
    pub fn fuel(&self) -> Option<u64> {
        self.fuel
    }

    /// When the run must have ended.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Passes a safe point: see [`RunControl::safe_point`]. Ends the run if its deadline has passed.
    pub fn safe_point(&self, state: &KernelWords) -> Result<(), Fault> {
        self.control.safe_point(state)?;
        match self.deadline {
            Some(deadline) if Instant::now() >= deadline => Err(Fault::new(Cause::DeadlineExceeded, 0)),
            _ => Ok(()),
        }
    }

    /// The flag of [`RunControl::interrupt_requested`].
    pub fn interrupt_requested(&self) -> &'a AtomicBool {
        self.control.interrupt_requested()
    }

    /// Advances the heartbeat; a fault if the run has to end. For kernels that cannot resume: the run
    /// ends here, it does not pause.
    pub fn beat(&self) -> Result<(), Fault> {
        Heartbeat(self.control.heartbeat()).beat();
        if !self.interrupt_requested().load(Ordering::Relaxed) {
            return Ok(());
        }
        // A run that is too long is interrupted as well.
        let is_late = self.deadline.is_some_and(|deadline| Instant::now() >= deadline);
        Err(Fault::new(if is_late { Cause::DeadlineExceeded } else { Cause::Interrupted }, 0))
    }

    /// Publishes the progress of the run, in units of the kernel.
    pub fn set_progress(&self, done: u64) {
        self.control.progress().store(done, Ordering::Relaxed);
    }

    /// Sets a result word.
    ///
    /// # Panics
    /// If there is no such word.
    pub fn set_result(&mut self, index: usize, value: u64) {
        self.results[index] = value;
    }

    /// The result words.
    pub fn results(&self) -> &KernelWords {
        &self.results
    }

    /// Adds to the fuel used.
    pub fn add_fuel(&mut self, used: u64) {
        self.fuel_used = self.fuel_used.saturating_add(used);
    }

    /// Fuel used.
    pub fn fuel_used(&self) -> u64 {
        self.fuel_used
    }

    /// Adds bytes that the kernel has read and written, for the performance counters of its banks.
    pub fn add_traffic(&mut self, read: u64, written: u64) {
        self.bytes_read = self.bytes_read.saturating_add(read);
        self.bytes_written = self.bytes_written.saturating_add(written);
    }

    /// Bytes read and written.
    pub fn traffic(&self) -> (u64, u64) {
        (self.bytes_read, self.bytes_written)
    }
}

impl fmt::Debug for KernelRun<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KernelRun").field("arguments", &self.arguments).field("banks", &self.banks).finish()
    }
}

/// A control that never pauses or ends a run, to run kernels outside a card.
#[derive(Debug, Default)]
pub struct StandaloneControl {
    interrupt_requested: AtomicBool,
    progress: AtomicU64,
    heartbeat: AtomicU64,
}

impl RunControl for StandaloneControl {
    fn safe_point(&self, _state: &KernelWords) -> Result<(), Fault> {
        Ok(())
    }

    fn interrupt_requested(&self) -> &AtomicBool {
        &self.interrupt_requested
    }

    fn progress(&self) -> &AtomicU64 {
        &self.progress
    }

    fn heartbeat(&self) -> &AtomicU64 {
        &self.heartbeat
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::memory::Memory;

    #[test]
    fn an_interrupted_run_has_exceeded_its_deadline_or_was_stopped() {
        let memory = Memory::anonymous(4096).unwrap();
        let control = StandaloneControl::default();
        let run = || KernelRun::new(GrantedBanks::new(&memory, 4096, 1), [0; KERNEL_WORDS], &control);
        let (past, future) = (Instant::now(), Instant::now() + Duration::from_secs(3600));
        assert!(run().bounded(None, Some(past)).beat().is_ok(), "nobody has interrupted it yet");
        control.interrupt_requested().store(true, Ordering::Relaxed);
        for (deadline, cause) in [
            (Some(past), Cause::DeadlineExceeded),
            (Some(future), Cause::Interrupted),
            (None, Cause::Interrupted),
        ] {
            assert_eq!(run().bounded(None, deadline).beat(), Err(Fault::new(cause, 0)), "{deadline:?}");
        }
    }
}
