//! The thread of a region: executes doorbells, loads and runs the kernel, and publishes the outcome.
//!
//! The region keeps its state privately, copies what clients write before it checks it, and publishes
//! copies of its state. A run can be ended or paused only at the kernel's safe points.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use millstream_card_abi::MemoryRange;
use millstream_card_abi::codes::{MessageKind, RegionCommand, RegionState};
use millstream_card_abi::command::{Cause, Fault, nanos};
use millstream_card_abi::image::{MAX_IMAGE_BYTES, image_hash};
use millstream_card_abi::registers::{
    KERNEL_WORDS, KernelWords, REGION_CONTROL, REGION_STRIDE, Region, region_at,
};
use millstream_shm::futex;

use crate::kernel::{GrantedBanks, Heartbeat, KernelRun, LoadedKernel, RunControl, outside};
use crate::notification::{Notification, NotificationSink};
use crate::region::context::RegionContext;
use crate::region::control::{LeaseEpoch, RegionControl, RunPhase};
use crate::region::slot::KernelSlot;

/// The thread of one region.
pub(crate) struct RegionWorker {
    index: usize,
    context: Arc<RegionContext>,
    notifications: Arc<dyn NotificationSink>,
    /// The epoch in which the doorbell was last read.
    epoch: LeaseEpoch,
    /// The latest doorbell word that was executed.
    acked: u64,
    /// A kernel is loaded; only this thread loads and unloads.
    is_loaded: bool,
    runs: u64,
    failed: u64,
    busy_ns: u64,
}

impl RegionWorker {
    pub(crate) fn new(
        index: usize,
        context: Arc<RegionContext>,
        notifications: Arc<dyn NotificationSink>,
    ) -> RegionWorker {
        RegionWorker {
            index,
            context,
            notifications,
            epoch: LeaseEpoch::default(),
            acked: 0,
            is_loaded: false,
            runs: 0,
            failed: 0,
            busy_ns: 0,
        }
    }

    fn control(&self) -> &RegionControl {
        &self.context.regions[self.index]
    }

    fn slot(&self) -> &KernelSlot {
        &self.context.kernels[self.index]
    }

    fn registers(&self) -> Region<'_> {
        self.context.registers.region(self.index)
    }

    /// Serves the region until the card stops.
    pub(crate) fn serve(&mut self) {
        let context = self.context.clone();
        let control = &context.regions[self.index];
        let registers = context.registers.region(self.index);
        let doorbell = registers.doorbell();
        let heartbeat = context.polling.heartbeat;
        let mut latest_work = Instant::now();
        let mut rounds = 0u32;
        while !context.stop.load(Ordering::Relaxed) {
            let seen = control.notifications.load(Ordering::SeqCst);
            if control.phase() == RunPhase::Recovered {
                let _ = futex::wait(&control.notifications, seen, heartbeat);
                continue;
            }
            if control.reset_requested.load(Ordering::SeqCst) {
                self.reset();
            }
            let epoch = control.epoch();
            if epoch.is_closed() {
                let _ = futex::wait(&control.notifications, seen, heartbeat);
                continue;
            }
            if epoch != self.epoch {
                // The doorbell belongs to a new lease, whose numbers may repeat those of the previous one.
                (self.epoch, self.acked) = (epoch, 0);
            }
            // A command whose doorbell precedes the pause begins before it; the run then pauses at its first
            // safe point.
            let late =
                control.paused.load(Ordering::SeqCst) || doorbell.load(Ordering::Acquire) == self.acked;
            if control.pause_requested.load(Ordering::SeqCst) && late {
                if !control.paused.swap(true, Ordering::SeqCst) {
                    context.controller_wake.signal();
                }
                let seen = control.notifications.load(Ordering::SeqCst);
                if control.pause_requested.load(Ordering::SeqCst)
                    && !control.reset_requested.load(Ordering::SeqCst)
                {
                    let _ = futex::wait(&control.notifications, seen, heartbeat);
                }
                continue;
            }
            control.paused.store(false, Ordering::SeqCst);
            let word = doorbell.load(Ordering::Acquire);
            if word != self.acked {
                // The doorbell of a cleared region is zero.
                if word == 0 {
                    self.acked = 0;
                    continue;
                }
                self.execute(word);
                latest_work = Instant::now();
                continue;
            }
            // An empty region does not busy-poll.
            if self.is_loaded {
                rounds = rounds.wrapping_add(1);
                if !rounds.is_multiple_of(64) || latest_work.elapsed() < context.polling.spin {
                    std::hint::spin_loop();
                    continue;
                }
            }
            self.sleep();
        }
    }

    fn sleep(&mut self) {
        let control = self.control();
        let registers = self.registers();
        let sleeping = registers.region_sleeping();
        let seen = control.notifications.load(Ordering::SeqCst);
        sleeping.store(1, Ordering::SeqCst);
        // A client rings first and reads `region_sleeping` afterwards; this thread does it in reverse order. One
        // of the two sees the other.
        let idle = registers.doorbell().load(Ordering::SeqCst) == self.acked
            && !control.pause_requested.load(Ordering::SeqCst)
            && !control.reset_requested.load(Ordering::SeqCst)
            && control.epoch() == self.epoch
            && !self.context.stop.load(Ordering::SeqCst);
        if idle {
            let _ = futex::wait(&control.notifications, seen, self.context.polling.heartbeat);
        }
        sleeping.store(0, Ordering::Relaxed);
    }

    /// Executes a doorbell word, unless the lease in which it was read has ended.
    pub(super) fn execute(&mut self, word: u64) {
        if self.control().begin(self.epoch) {
            self.dispatch(word);
        }
    }

    fn unload(&mut self) {
        self.slot().unload();
        self.is_loaded = false;
        self.publish_kernel(0, 0, "");
    }

    fn reset(&mut self) {
        self.unload();
        let epoch = self.control().epoch();
        let acked = if epoch.is_closed() {
            // The latest doorbell is discarded; the controller zeros both registers once all regions are reset.
            self.registers().doorbell().load(Ordering::Acquire)
        } else {
            self.epoch = epoch;
            // The controller has answered the doorbells up to this one; the region executes later ones.
            self.registers().doorbell_ack().load(Ordering::Acquire)
        };
        self.acked = acked;
        let registers = self.registers();
        let set = Ordering::Relaxed;
        for index in 0..KERNEL_WORDS {
            registers.results(index).store(0, set);
            registers.safe_point_state(index).store(0, set);
        }
        registers.cause().store(0, set);
        registers.detail().store(0, set);
        registers.progress().store(0, set);
        registers.started().store(0, set);
        registers.doorbell_ack().store(acked, set);
        registers.status().store(RegionState::Empty as u32, Ordering::Release);
        let control = self.control();
        control.deadline_ns.store(0, set);
        control.finish_reset();
        self.context.controller_wake.signal();
    }

    fn dispatch(&mut self, word: u64) {
        self.acked = word;
        match RegionCommand::from_code(word as u32 & 0xff) {
            Some(RegionCommand::Load) => match self.load() {
                Ok(hash) => {
                    self.complete(word, RegionState::Ready, None);
                    self.notify(MessageKind::RegionLoaded, word, None, [hash, 0, 0, 0]);
                }
                Err(fault) => self.reject(word, fault),
            },
            Some(RegionCommand::Start) => self.run(word, false),
            Some(RegionCommand::Resume) => self.run(word, true),
            // Nothing runs, or the run would have seen the stop at a safe point.
            Some(RegionCommand::Stop) => {
                let state = if self.is_loaded { RegionState::Ready } else { RegionState::Empty };
                self.complete(word, state, None);
            }
            Some(RegionCommand::Unload) => {
                self.unload();
                self.complete(word, RegionState::Empty, None);
            }
            None => self.reject(word, Fault::new(Cause::UnknownCommand, word)),
        }
    }

    /// Loads the kernel that the control registers name and returns its hash.
    fn load(&mut self) -> Result<u64, Fault> {
        let context = self.context.clone();
        let registers = context.registers.region(self.index);
        let get = |word: &AtomicU64| word.load(Ordering::Relaxed);
        let (number, base, bytes) =
            (get(registers.kernel()), get(registers.image_base()), get(registers.image_bytes()));
        let expected_hash = get(registers.image_hash());
        // The previous kernel goes first, whether the new one can be loaded or not.
        self.unload();
        let (LoadedKernel { name, kernel }, hash) = if number == 0 {
            let span = MemoryRange::new(base, bytes);
            if bytes > MAX_IMAGE_BYTES {
                return Err(Fault::new(Cause::KernelTooLarge, bytes));
            }
            let memory = context.hardware.memory();
            memory.check(span).map_err(outside(Cause::ImageOutsideMemory))?;
            let mut image = vec![0; bytes as usize];
            memory.read(base, &mut image).map_err(outside(Cause::ImageOutsideMemory))?;
            let hash = image_hash(&image);
            if expected_hash != 0 && expected_hash != hash {
                return Err(Fault::new(Cause::KernelHash, hash));
            }
            let first = image.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
            let loader = context.loaders.iter().find(|loader| loader.recognises(&image));
            let loader = loader.ok_or(Fault::new(Cause::KernelFormat, first))?;
            let loaded = catch_unwind(AssertUnwindSafe(|| loader.load(&image)));
            (loaded.unwrap_or(Err(Fault::new(Cause::KernelFormat, first)))?, hash)
        } else {
            let unknown = Fault::new(Cause::UnknownKernel, number);
            let builtin = context.builtin_kernels.iter().find(|(known, _)| u64::from(*known) == number);
            let (_, builtin) = builtin.ok_or(unknown)?;
            let hash = image_hash(builtin.name.as_bytes());
            if expected_hash != 0 && expected_hash != hash {
                return Err(Fault::new(Cause::KernelHash, hash));
            }
            (LoadedKernel { name: builtin.name.to_owned(), kernel: (builtin.make)() }, hash)
        };
        self.slot().load(kernel);
        self.is_loaded = true;
        self.publish_kernel(number, hash, &name);
        Ok(hash)
    }

    fn publish_kernel(&self, number: u64, hash: u64, name: &str) {
        let registers = self.registers();
        let mut text = [0; 32];
        let cut = name.len().min(text.len());
        text[..cut].copy_from_slice(&name.as_bytes()[..cut]);
        for (index, bytes) in text.as_chunks::<8>().0.iter().enumerate() {
            registers.kernel_name(index).store(u64::from_le_bytes(*bytes), Ordering::Relaxed);
        }
        registers.loaded_kernel().store(number, Ordering::Relaxed);
        registers.loaded_hash().store(hash, Ordering::Relaxed);
    }

    fn run(&mut self, word: u64, resuming: bool) {
        let context = self.context.clone();
        let registers = context.registers.region(self.index);
        let get = |word: &AtomicU64| word.load(Ordering::Relaxed);
        registers.started().store(word, Ordering::Relaxed);
        let banks = get(registers.banks());
        if context.bank_count < 64 && banks >> context.bank_count != 0 {
            let bad_banks = Fault::new(Cause::NoSuchBank, banks);
            let fault = if self.is_loaded { bad_banks } else { Fault::new(Cause::RegionEmpty, 0) };
            return self.reject(word, fault);
        }
        let mut taken = match self.slot().take() {
            Ok(taken) => taken,
            Err(fault) => return self.reject(word, fault),
        };
        let arguments: KernelWords = std::array::from_fn(|index| get(registers.arguments(index)));
        let resume: KernelWords = std::array::from_fn(|index| get(registers.resume_state(index)));
        let fuel = Some(get(registers.fuel())).filter(|fuel| *fuel != 0);
        let timeout = Some(get(registers.run_timeout_ns())).filter(|timeout| *timeout != 0);
        let run_control = RegionRunControl { context: &context, index: self.index, word };
        // A run keeps the memory with which it began, even if the card replaces it.
        let memory = context.hardware.memory();
        let granted = GrantedBanks::new(&memory, context.bank_bytes, banks);
        let started = Instant::now();
        let deadline = timeout.and_then(|timeout| started.checked_add(Duration::from_nanos(timeout)));
        let mut run = KernelRun::new(granted, arguments, &run_control).bounded(fuel, deadline);
        if resuming {
            run = run.resuming(resume);
        }
        let control = &context.regions[self.index];
        if let Some(timeout) = timeout {
            // The register `clock_ns` lags behind the clock by up to a poll of the controller, and users can write it.
            let now = nanos(context.started.elapsed());
            control.deadline_ns.store(now.saturating_add(timeout).max(1), Ordering::Relaxed);
        }
        registers.cause().store(0, Ordering::Relaxed);
        registers.detail().store(0, Ordering::Relaxed);
        registers.progress().store(0, Ordering::Relaxed);
        registers.status().store(RegionState::Running as u32, Ordering::Relaxed);
        registers.doorbell_ack().store(word, Ordering::Release);
        // The controller may have interrupted the previous run when that had just ended. Cleared first: a request that
        // comes meanwhile either sets the flag again or is seen here.
        control.interrupt_requested.store(false, Ordering::SeqCst);
        let requests = [&control.pause_requested, &control.reset_requested, &*context.stop];
        if requests.iter().any(|request| request.load(Ordering::SeqCst)) {
            control.interrupt_requested.store(true, Ordering::SeqCst);
        }
        control.phase.store(RunPhase::Running as u32, Ordering::SeqCst);
        let outcome = catch_unwind(AssertUnwindSafe(|| taken.kernel.run(&mut run)));
        memory.backing().flush();
        if !control.transition(RunPhase::Running, RunPhase::Idle) {
            // The controller has given up this run; its outcome is discarded.
            self.runs += 1;
            self.failed += 1;
            control.transition(RunPhase::Hung, RunPhase::Recovered);
            context.controller_wake.signal();
            return;
        }
        let outcome = outcome.unwrap_or(Err(Fault::new(Cause::KernelFailed, get(registers.loaded_kernel()))));
        let outcome = outcome.map_err(|fault| match fault.cause {
            Cause::DeadlineExceeded => Fault::new(fault.cause, timeout.unwrap_or(0)),
            _ => fault,
        });
        self.slot().put_back(taken);
        control.deadline_ns.store(0, Ordering::Relaxed);
        if !control.pause_requested.load(Ordering::SeqCst) && !control.reset_requested.load(Ordering::SeqCst)
        {
            control.interrupt_requested.store(false, Ordering::SeqCst);
        }
        for (index, value) in run.results().iter().enumerate() {
            registers.results(index).store(*value, Ordering::Relaxed);
        }
        self.count_run(started.elapsed(), outcome.is_err(), &run);
        match outcome {
            Ok(()) => {
                let results = run.results();
                let values = [results[0], results[1], results[2], results[3]];
                self.complete(word, RegionState::Done, None);
                self.notify(MessageKind::RegionDone, word, None, values);
            }
            Err(fault) => {
                // A stop is complete now.
                let latest = registers.doorbell().load(Ordering::Acquire);
                if is_stop(latest) {
                    self.acked = latest;
                }
                let stopped = fault.cause == Cause::Interrupted;
                let state = if stopped { RegionState::Ready } else { RegionState::Faulted };
                let acked = self.acked;
                self.complete(acked, state, Some(fault));
                self.notify(MessageKind::RegionFault, word, Some(fault.cause), [fault.detail, 0, 0, 0]);
            }
        }
    }

    fn count_run(&mut self, busy: Duration, failed: bool, run: &KernelRun<'_>) {
        self.runs += 1;
        self.failed += u64::from(failed);
        self.busy_ns = self.busy_ns.saturating_add(nanos(busy));
        let registers = self.registers();
        registers.runs().store(self.runs, Ordering::Relaxed);
        registers.failed_runs().store(self.failed, Ordering::Relaxed);
        registers.busy_ns().store(self.busy_ns, Ordering::Relaxed);
        registers.fuel_used().store(run.fuel_used(), Ordering::Relaxed);
        let (read, written) = run.traffic();
        let mask = run.banks().mask();
        let banks = u64::from(mask.count_ones());
        if banks == 0 || read | written == 0 {
            return;
        }
        for bank in (0..64).filter(|bank| mask >> bank & 1 == 1) {
            self.context.registers.bank_read(bank).fetch_add(read / banks, Ordering::Relaxed);
            self.context.registers.bank_written(bank).fetch_add(written / banks, Ordering::Relaxed);
        }
    }

    fn reject(&mut self, word: u64, fault: Fault) {
        self.complete(word, RegionState::Faulted, Some(fault));
        self.notify(MessageKind::RegionFault, word, Some(fault.cause), [fault.detail, 0, 0, 0]);
    }

    /// Publishes the end of a command.
    fn complete(&self, word: u64, state: RegionState, fault: Option<Fault>) {
        let registers = self.registers();
        registers.cause().store(fault.map_or(0, |fault| fault.cause.code()), Ordering::Relaxed);
        registers.detail().store(fault.map_or(0, |fault| fault.detail), Ordering::Relaxed);
        registers.status().store(state as u32, Ordering::Release);
        registers.doorbell_ack().store(word, Ordering::Release);
    }

    fn notify(&self, kind: MessageKind, sequence: u64, cause: Option<Cause>, values: [u64; 4]) {
        let region = self.index as u32;
        self.notifications.notify(Notification { kind, region, cause, sequence, values });
    }
}

fn is_stop(doorbell: u64) -> bool {
    doorbell & 0xff == RegionCommand::Stop as u64
}

/// The control of a run that the region's doorbell started.
struct RegionRunControl<'a> {
    context: &'a RegionContext,
    index: usize,
    /// The doorbell word that started the run.
    word: u64,
}

impl RunControl for RegionRunControl<'_> {
    fn safe_point(&self, state: &KernelWords) -> Result<(), Fault> {
        let registers = self.context.registers.region(self.index);
        let control = &self.context.regions[self.index];
        if control.phase() == RunPhase::Hung {
            return Err(Fault::new(Cause::Interrupted, 0));
        }
        for (index, word) in state.iter().enumerate() {
            registers.safe_point_state(index).store(*word, Ordering::Relaxed);
        }
        // Only this region writes the register.
        let points = registers.safe_points().load(Ordering::Relaxed);
        registers.safe_points().store(points.wrapping_add(1), Ordering::Release);
        Heartbeat(self.heartbeat()).beat();
        loop {
            let doorbell = registers.doorbell().load(Ordering::Acquire);
            let stopped = doorbell != self.word && is_stop(doorbell);
            let reset = control.reset_requested.load(Ordering::SeqCst);
            if stopped || reset || self.context.stop.load(Ordering::Relaxed) {
                return Err(Fault::new(Cause::Interrupted, 0));
            }
            if !control.pause_requested.load(Ordering::SeqCst) {
                if control.paused.swap(false, Ordering::SeqCst) {
                    registers.status().store(RegionState::Running as u32, Ordering::Release);
                }
                return Ok(());
            }
            registers.status().store(RegionState::Paused as u32, Ordering::Release);
            if !control.paused.swap(true, Ordering::SeqCst) {
                self.context.controller_wake.signal();
            }
            let seen = control.notifications.load(Ordering::SeqCst);
            let reset = control.reset_requested.load(Ordering::SeqCst);
            if control.pause_requested.load(Ordering::SeqCst) && !reset {
                let _ = futex::wait(&control.notifications, seen, self.context.polling.heartbeat);
            }
        }
    }

    fn interrupt_requested(&self) -> &AtomicBool {
        &self.context.regions[self.index].interrupt_requested
    }

    fn progress(&self) -> &AtomicU64 {
        let register = REGION_CONTROL + self.index * REGION_STRIDE + region_at::progress;
        self.context.registers.word64(register)
    }

    fn heartbeat(&self) -> &AtomicU64 {
        self.context.registers.heartbeat()
    }
}

#[cfg(test)]
mod tests;
