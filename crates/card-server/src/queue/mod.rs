//! The command queue: reads ring configurations, fetches commands, runs them on the kernels of regions, and
//! writes completions.
//!
//! The engine keeps its state privately and does not trust shared memory. It copies a descriptor or a
//! configuration once, checks the copy and uses the copy. No input can make it panic, access memory outside
//! the card, or stop serving.

pub(crate) mod control;
pub(crate) mod interrupt;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use millstream_card_abi::command::{
    Cause, Completion, Descriptor, ENTRY_BYTES, EventCounters, Fault, MAX_RING_SLOTS, Status, nanos,
};
use millstream_card_abi::registers::{
    KERNEL_WORDS, KernelWords, REGION_CONTROL, REGION_STRIDE, Registers, region_at,
};
use millstream_card_abi::{IoContext as _, MemoryRange, SyscallError};
use millstream_shm::{EventFd, futex};

use crate::kernel::{GrantedBanks, Heartbeat, KernelRun, RunControl};
use crate::memory::Memory;
use crate::polling::PollPolicy;
use crate::queue::control::{Begin, QueueControl};
use crate::queue::interrupt::interrupt;
use crate::region::context::RegionContext;

/// A checked ring configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rings {
    command_base: u64,
    completion_base: u64,
    slots: u64,
    /// Commands fetched since these rings were opened.
    consumer: u64,
    /// Leases that had ended when the rings were opened; without a lease, when no command was waiting.
    ended_leases: u64,
    /// The rings were opened under a lease, and end with it.
    leased: bool,
}

impl Rings {
    fn check(command_base: u64, completion_base: u64, slots: u32, memory: u64) -> Result<Rings, Fault> {
        if !slots.is_power_of_two() || slots > MAX_RING_SLOTS {
            return Err(Fault::new(Cause::BadRingSlots, slots.into()));
        }
        let bytes = u64::from(slots) * ENTRY_BYTES as u64;
        for base in [command_base, completion_base] {
            let aligned = base.is_multiple_of(ENTRY_BYTES as u64);
            if !aligned || !MemoryRange::new(base, bytes).fits(memory) {
                return Err(Fault::new(Cause::BadRingAddress, base));
            }
        }
        if command_base.abs_diff(completion_base) < bytes {
            return Err(Fault::new(Cause::RingsOverlap, completion_base));
        }
        Ok(Rings {
            command_base,
            completion_base,
            slots: slots.into(),
            consumer: 0,
            ended_leases: 0,
            leased: false,
        })
    }

    /// Offset of the entry for command `index` in the ring at `base`.
    fn entry(&self, base: u64, index: u64) -> u64 {
        base + (index & (self.slots - 1)) * ENTRY_BYTES as u64
    }
}

/// Totals since the card started; the registers hold copies.
#[derive(Debug, Default)]
struct Counters {
    commands: u64,
    failed_commands: u64,
    events: u64,
    fragments: u64,
    payload_bytes: u64,
    corrupt_fragments: u64,
    decisions_set: u64,
    kernel_busy_ns: u64,
    doorbells: u64,
    interrupts: u64,
    errors: u64,
}

/// The engine of the command queue.
pub(crate) struct QueueEngine {
    context: Arc<RegionContext>,
    memory: Arc<Memory>,
    interrupt_fd: Arc<EventFd>,
    generation: u32,
    rings: Option<Rings>,
    doorbell: u32,
    counters: Counters,
    /// Called when the doorbell rings and the rings are empty: the doorbell may be for another part of the card.
    on_other_doorbell: Box<dyn Fn() + Send>,
}

impl QueueEngine {
    pub(crate) fn new(
        context: Arc<RegionContext>,
        interrupt_fd: Arc<EventFd>,
        on_other_doorbell: Box<dyn Fn() + Send>,
    ) -> QueueEngine {
        QueueEngine {
            memory: context.hardware.memory(),
            context,
            interrupt_fd,
            generation: 0,
            rings: None,
            doorbell: 0,
            counters: Counters::default(),
            on_other_doorbell,
        }
    }

    fn registers(&self) -> &Registers {
        &self.context.registers
    }

    fn control(&self) -> &QueueControl {
        &self.context.queue
    }

    /// Serves until the card stops.
    pub(crate) fn run(&mut self) -> Result<(), SyscallError> {
        let PollPolicy { spin, heartbeat } = self.context.polling;
        self.set_status(Status::Closed);
        let mut latest_work = Instant::now();
        while !self.context.stop.load(Ordering::Relaxed) {
            if self.step() {
                latest_work = Instant::now();
            } else if latest_work.elapsed() < spin {
                std::hint::spin_loop();
            } else {
                self.sleep(heartbeat)?;
            }
        }
        self.set_status(Status::Stopped);
        self.raise_interrupt();
        Ok(())
    }

    /// Applies a new ring configuration or executes the next command; false if there is neither.
    pub(crate) fn step(&mut self) -> bool {
        let doorbell_rang = self.read_doorbell();
        let generation = self.registers().ring_generation().load(Ordering::Acquire);
        if generation != self.generation {
            self.configure(generation);
            return true;
        }
        let Some(rings) = self.rings else {
            if doorbell_rang {
                (self.on_other_doorbell)();
            }
            return false;
        };
        let producer = self.registers().producer().load(Ordering::Acquire);
        let waiting = producer.wrapping_sub(rings.consumer);
        if waiting == 0 {
            let ended_leases = self.control().ended_leases();
            if rings.leased && ended_leases != rings.ended_leases {
                self.close_rings(Fault::new(Cause::Interrupted, 0));
                return true;
            }
            self.rings = Some(Rings { ended_leases, ..rings });
            // The doorbell may belong to a command that is already complete; then the call has no effect.
            if doorbell_rang {
                (self.on_other_doorbell)();
            }
            return false;
        }
        if waiting > rings.slots {
            self.close_rings(Fault::new(Cause::RingOverrun, producer));
            return true;
        }
        // No command begins between two leases. The end of that time wakes a sleeping queue.
        let timeout = self.command_timeout();
        match self.control().begin(timeout, rings.ended_leases) {
            Begin::Begun => self.run_command(rings, timeout),
            Begin::Closed => return false,
            // Not the former holder's commands, but zeros, would run for the next one.
            Begin::Outlived => self.close_rings(Fault::new(Cause::Interrupted, 0)),
        }
        true
    }

    /// Timeout of the next command.
    fn command_timeout(&self) -> Duration {
        match self.registers().command_timeout_ns().load(Ordering::Relaxed) {
            0 => self.context.command_timeout,
            nanos => Duration::from_nanos(nanos),
        }
    }

    fn read_doorbell(&mut self) -> bool {
        let doorbell = self.registers().doorbell().load(Ordering::SeqCst);
        let rings = doorbell.wrapping_sub(self.doorbell);
        if rings != 0 {
            self.doorbell = doorbell;
            self.counters.doorbells += u64::from(rings);
            self.registers().doorbells().store(self.counters.doorbells, Ordering::Relaxed);
        }
        rings != 0
    }

    /// Opens the rings that the user has configured, with all counts at zero.
    fn configure(&mut self, generation: u32) {
        self.generation = generation;
        self.rings = None;
        // First: rings of a lease that ends meanwhile are outlived.
        let (ended_leases, leased) = self.control().lease();
        self.memory = self.context.hardware.memory();
        // After the load: if memory is replaced in between, the old memory counts as in use, which is the
        // safe error.
        self.control().set_memory_generation(self.context.hardware.generation());
        let registers = self.registers();
        registers.consumer().store(0, Ordering::Relaxed);
        registers.completed().store(0, Ordering::Relaxed);
        registers.ring_fault().store(0, Ordering::Relaxed);
        if generation == 0 {
            self.set_status(Status::Closed);
        } else {
            let checked = Rings::check(
                registers.command_base().load(Ordering::Relaxed),
                registers.completion_base().load(Ordering::Relaxed),
                registers.ring_slots().load(Ordering::Relaxed),
                self.memory.size(),
            );
            match checked {
                Ok(rings) => {
                    self.rings = Some(Rings { ended_leases, leased, ..rings });
                    self.set_status(Status::Idle);
                }
                Err(fault) => self.close_rings(fault),
            }
        }
        // Released last: a user that reads the new generation also reads the other registers of it.
        self.registers().ring_active().store(generation, Ordering::Release);
        self.raise_interrupt();
    }

    fn close_rings(&mut self, fault: Fault) {
        self.rings = None;
        self.count_error(fault);
        self.registers().ring_fault().store(fault.cause.code(), Ordering::Release);
        self.set_status(Status::Faulted);
        self.raise_interrupt();
    }

    fn run_command(&mut self, rings: Rings, timeout: Duration) {
        let index = rings.consumer;
        let bytes = self
            .memory
            .read_array::<ENTRY_BYTES>(rings.entry(rings.command_base, index))
            .expect("the rings were checked against the memory when they were configured");
        let consumer = index.wrapping_add(1);
        self.rings = Some(Rings { consumer, ..rings });
        self.registers().consumer().store(consumer, Ordering::Release);
        self.set_status(Status::Busy);

        let started = Instant::now();
        let mut counters = EventCounters::default();
        let (region, cookie, outcome) = match Descriptor::from_bytes(&bytes) {
            Ok(descriptor) => {
                (descriptor.region, descriptor.cookie, self.execute(&descriptor, &mut counters))
            }
            Err((fault, cookie)) => (0, cookie, Err(fault)),
        };
        let ended = self.control().ending();
        let outcome = outcome.map_err(|fault| match fault.cause {
            Cause::Interrupted if ended.timed_out => Fault::new(Cause::DeadlineExceeded, nanos(timeout)),
            _ => fault,
        });
        let completion = Completion { cookie, index, region, outcome, counters, busy: started.elapsed() };
        self.count_command(&completion);
        if !ended.hung {
            self.memory
                .write(rings.entry(rings.completion_base, index), &completion.to_bytes())
                .expect("the rings were checked against the memory when they were configured");
        }
        // Only now: when no command runs, the controller clears memory for the next holder.
        if self.control().end() {
            // The controller has closed the rings; no user waits for this completion any more.
            return self.close_rings(Fault::new(Cause::KernelHung, nanos(completion.busy)));
        }
        self.set_status(Status::Idle);
        self.registers().completed().store(consumer, Ordering::Release);
        self.raise_interrupt();
    }

    /// Runs the kernel of a command's region on all banks.
    fn execute(&self, descriptor: &Descriptor, counters: &mut EventCounters) -> Result<(), Fault> {
        let region = descriptor.region as usize;
        let slot = self.context.kernels.get(region);
        let slot = slot.ok_or(Fault::new(Cause::NoSuchRegion, descriptor.region.into()))?;
        let mut taken = slot.take()?;
        let mut arguments: KernelWords = [0; KERNEL_WORDS];
        arguments[..5].copy_from_slice(&descriptor.arguments());
        let banks = GrantedBanks::new(&self.memory, self.context.bank_bytes, self.context.all_banks());
        let control = QueueRunControl { context: &self.context, region };
        let mut run = KernelRun::new(banks, arguments, &control);
        // A panic of a kernel must not end the card. It can leave only the kernel inconsistent: a run changes
        // no other state of the engine.
        let outcome = catch_unwind(AssertUnwindSafe(|| taken.kernel.run(&mut run)));
        *counters = EventCounters::from_words(run.results());
        slot.put_back(taken);
        outcome.unwrap_or(Err(Fault::new(Cause::KernelFailed, descriptor.region.into())))
    }

    fn count_command(&mut self, completion: &Completion) {
        let counters = &mut self.counters;
        counters.commands += 1;
        counters.events += u64::from(completion.counters.events);
        counters.fragments += u64::from(completion.counters.fragments);
        // A kernel computes it, and may compute any number.
        counters.payload_bytes = counters.payload_bytes.wrapping_add(completion.counters.payload_bytes);
        counters.corrupt_fragments += u64::from(completion.counters.corrupt_fragments);
        counters.decisions_set += u64::from(completion.counters.decisions_set);
        counters.kernel_busy_ns += nanos(completion.busy);
        if let Err(fault) = completion.outcome {
            self.counters.failed_commands += 1;
            self.count_error(fault);
        }
        let (registers, counters) = (self.registers(), &self.counters);
        for (register, value) in [
            (registers.commands(), counters.commands),
            (registers.failed_commands(), counters.failed_commands),
            (registers.events(), counters.events),
            (registers.fragments(), counters.fragments),
            (registers.payload_bytes(), counters.payload_bytes),
            (registers.corrupt_fragments(), counters.corrupt_fragments),
            (registers.decisions_set(), counters.decisions_set),
            (registers.kernel_busy_ns(), counters.kernel_busy_ns),
        ] {
            register.store(value, Ordering::Relaxed);
        }
    }

    fn count_error(&mut self, fault: Fault) {
        self.counters.errors += 1;
        let registers = self.registers();
        registers.error_cause().store(fault.cause.code(), Ordering::Relaxed);
        registers.error_detail().store(fault.detail, Ordering::Relaxed);
        registers.errors().store(self.counters.errors, Ordering::Release);
    }

    fn set_status(&self, status: Status) {
        self.registers().status().store(status as u32, Ordering::Release);
    }

    /// Wakes the users that wait for a change of the rings.
    fn raise_interrupt(&mut self) {
        self.counters.interrupts += 1;
        self.registers().interrupts().store(self.counters.interrupts, Ordering::Relaxed);
        interrupt(self.registers(), &self.interrupt_fd);
    }

    /// Sleeps until the doorbell rings, at most one heartbeat period.
    fn sleep(&mut self, heartbeat: Duration) -> Result<(), SyscallError> {
        let registers = self.registers();
        Heartbeat(registers.heartbeat()).beat();
        // The user rings first and reads `sleeping` afterwards; this thread does it in reverse order. One of the two
        // sees the other, so no doorbell is missed.
        registers.sleeping().store(1, Ordering::SeqCst);
        let slept = if registers.doorbell().load(Ordering::SeqCst) == self.doorbell {
            futex::wait(registers.doorbell(), self.doorbell, heartbeat).context("wait for the doorbell")
        } else {
            Ok(())
        };
        registers.sleeping().store(0, Ordering::Relaxed);
        slept
    }
}

/// The control of a run that a command started.
struct QueueRunControl<'a> {
    context: &'a RegionContext,
    region: usize,
}

impl RunControl for QueueRunControl<'_> {
    fn safe_point(&self, _state: &KernelWords) -> Result<(), Fault> {
        Heartbeat(self.heartbeat()).beat();
        if self.interrupt_requested().load(Ordering::SeqCst) {
            return Err(Fault::new(Cause::Interrupted, 0));
        }
        Ok(())
    }

    fn interrupt_requested(&self) -> &AtomicBool {
        self.context.queue.interrupt_requested()
    }

    fn progress(&self) -> &AtomicU64 {
        let register = REGION_CONTROL + self.region * REGION_STRIDE + region_at::progress;
        self.context.registers.word64(register)
    }

    fn heartbeat(&self) -> &AtomicU64 {
        self.context.registers.heartbeat()
    }
}

#[cfg(test)]
mod tests;
