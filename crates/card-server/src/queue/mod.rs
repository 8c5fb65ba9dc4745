//! The inside of an emulated card: takes up ring configurations, fetches commands, runs kernels,
//! writes completions.
//!
//! The engine keeps the truth privately and trusts nothing that it reads from shared memory: a
//! descriptor or a configuration is copied once, the copy is checked, and the copy is used. Nothing
//! a user writes can make it panic, reach outside card memory or stop serving the next generation
//! of the rings.

pub(crate) mod desk;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use millstream_shm::{EventFd, futex};

use crate::command::{
    Cause, Completion, Descriptor, ENTRY_BYTES, Fault, KernelId, MAX_RING_SLOTS, Status, Tally, nanos,
};
use crate::engine::desk::Ended;
use crate::kernel::{Job, Pulse, Registry, outside};
use crate::memory::{Memory, Span};
use crate::os::{Doing, OsError};
use crate::region::worker::Shop;
use crate::registers::Registers;

/// How an idle engine waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Idle {
    /// Look for work without sleeping for this long after the latest work.
    pub(crate) spin: Duration,
    /// Sleep at most this long before the next heartbeat.
    pub(crate) heartbeat: Duration,
}

/// Where the rings are: a configuration that was checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rings {
    command_base: u64,
    completion_base: u64,
    slots: u64,
    /// Commands fetched, and completed, since these rings were opened.
    consumer: u64,
}

impl Rings {
    fn check(command_base: u64, completion_base: u64, slots: u32, memory: u64) -> Result<Rings, Fault> {
        if !slots.is_power_of_two() || slots > MAX_RING_SLOTS {
            return Err(Fault::new(Cause::BadRingSlots, slots.into()));
        }
        let bytes = u64::from(slots) * ENTRY_BYTES as u64;
        for base in [command_base, completion_base] {
            let aligned = base.is_multiple_of(ENTRY_BYTES as u64);
            if !aligned || !Span::new(base, bytes).fits(memory) {
                return Err(Fault::new(Cause::RingMisplaced, base));
            }
        }
        if command_base.abs_diff(completion_base) < bytes {
            return Err(Fault::new(Cause::RingsOverlap, completion_base));
        }
        Ok(Rings { command_base, completion_base, slots: slots.into(), consumer: 0 })
    }

    /// Place of the entry for command `index` in the ring at `base`.
    fn entry(&self, base: u64, index: u64) -> u64 {
        base + (index & (self.slots - 1)) * ENTRY_BYTES as u64
    }
}

/// Totals since the card started; the registers show copies.
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

/// The engine of one card.
#[derive(Debug)]
pub(crate) struct Engine {
    registers: Arc<Registers>,
    memory: Arc<Memory>,
    registry: Registry,
    interrupt_fd: Arc<EventFd>,
    stop: Arc<AtomicBool>,
    generation: u32,
    rings: Option<Rings>,
    doorbell: u32,
    counters: Counters,
    nudge: Nudge,
    shop: Option<Arc<Shop>>,
}

/// Tells the rest of the card that somebody rang a doorbell which is none of the rings'.
struct Nudge(Box<dyn Fn() + Send>);

impl std::fmt::Debug for Nudge {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Nudge")
    }
}

impl Engine {
    pub(crate) fn new(
        registers: Arc<Registers>,
        memory: Arc<Memory>,
        registry: Registry,
        interrupt_fd: Arc<EventFd>,
        stop: Arc<AtomicBool>,
    ) -> Engine {
        Engine {
            registers,
            memory,
            registry,
            interrupt_fd,
            stop,
            generation: 0,
            rings: None,
            doorbell: 0,
            counters: Counters::default(),
            nudge: Nudge(Box::new(|| {})),
            shop: None,
        }
    }

    /// While somebody holds the card's lease, runs only kernels that are loaded into one of these regions.
    pub(crate) fn with_regions(self, shop: Arc<Shop>) -> Engine {
        Engine { shop: Some(shop), ..self }
    }

    /// Calls `nudge` when the doorbell rings and there is nothing in the rings.
    pub(crate) fn nudging(self, nudge: Box<dyn Fn() + Send>) -> Engine {
        Engine { nudge: Nudge(nudge), ..self }
    }

    /// Serves until told to stop.
    pub(crate) fn run(&mut self, idle: Idle) -> Result<(), OsError> {
        self.set_status(Status::Closed);
        let mut latest_work = Instant::now();
        while !self.stop.load(Ordering::Relaxed) {
            if self.step() {
                latest_work = Instant::now();
            } else if latest_work.elapsed() < idle.spin {
                std::hint::spin_loop();
            } else {
                self.sleep(idle.heartbeat)?;
            }
        }
        self.set_status(Status::Stopped);
        self.raise_interrupt();
        Ok(())
    }

    /// Does the next piece of work; false if there is none.
    pub(crate) fn step(&mut self) -> bool {
        let rung = self.notice_doorbell();
        let generation = self.registers.ring_generation().load(Ordering::Acquire);
        if generation != self.generation {
            self.take_up(generation);
            return true;
        }
        let Some(rings) = self.rings else {
            if rung {
                (self.nudge.0)();
            }
            return false;
        };
        let producer = self.registers.producer().load(Ordering::Acquire);
        let waiting = producer.wrapping_sub(rings.consumer);
        if waiting == 0 {
            // Perhaps one that a command has answered already; then nobody minds.
            if rung {
                (self.nudge.0)();
            }
            return false;
        }
        if waiting > rings.slots {
            self.close_rings(Fault::new(Cause::RingOverrun, producer));
            return true;
        }
        // Between two leases nothing begins; that is over when the doorbell is woken.
        let limit = self.command_limit();
        if self.shop.as_ref().is_some_and(|shop| !shop.rings.begin(limit)) {
            return false;
        }
        self.run_command(rings, limit);
        true
    }

    /// How long the next command may run.
    fn command_limit(&self) -> Duration {
        let asked = self.registers.command_deadline_ns().load(Ordering::Relaxed);
        let own = || self.shop.as_ref().map_or(Duration::MAX, |shop| shop.command_limit);
        if asked == 0 { own() } else { Duration::from_nanos(asked) }
    }

    fn notice_doorbell(&mut self) -> bool {
        let doorbell = self.registers.doorbell().load(Ordering::SeqCst);
        let rings = doorbell.wrapping_sub(self.doorbell);
        if rings != 0 {
            self.doorbell = doorbell;
            self.counters.doorbells += u64::from(rings);
            self.registers.doorbells().store(self.counters.doorbells, Ordering::Relaxed);
        }
        rings != 0
    }

    /// Starts over with the rings that the user has configured.
    fn take_up(&mut self, generation: u32) {
        self.generation = generation;
        self.rings = None;
        if let Some(shop) = &self.shop {
            self.memory = shop.hardware.memory();
            // Afterwards: of a memory that is replaced at this moment it is better to say that it is used.
            shop.rings.set_generation(shop.hardware.generation());
        }
        let registers = &self.registers;
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
                    self.rings = Some(rings);
                    self.set_status(Status::Idle);
                }
                Err(fault) => self.close_rings(fault),
            }
        }
        // Released last: who sees the new generation here sees all of its registers.
        self.registers.ring_active().store(generation, Ordering::Release);
        self.raise_interrupt();
    }

    fn close_rings(&mut self, fault: Fault) {
        self.rings = None;
        self.note_error(fault);
        self.registers.ring_fault().store(fault.cause.code(), Ordering::Release);
        self.set_status(Status::Faulted);
        self.raise_interrupt();
    }

    fn run_command(&mut self, rings: Rings, limit: Duration) {
        let index = rings.consumer;
        let place = rings.entry(rings.command_base, index);
        let bytes = self
            .memory
            .read_array::<ENTRY_BYTES>(place)
            .expect("rings were checked against the memory when they were taken up");
        let consumer = index.wrapping_add(1);
        self.rings = Some(Rings { consumer, ..rings });
        self.registers.consumer().store(consumer, Ordering::Release);
        self.set_status(Status::Busy);

        let started = Instant::now();
        let mut tally = Tally::default();
        let (kernel, cookie, outcome) = match Descriptor::from_bytes(&bytes) {
            Ok(descriptor) => (descriptor.kernel, descriptor.cookie, self.execute(&descriptor, &mut tally)),
            Err((fault, cookie)) => (KernelId(0), cookie, Err(fault)),
        };
        let ended = self.shop.as_ref().map_or_else(Ended::default, |shop| shop.rings.end());
        // What ends because its time is over says so.
        let outcome = outcome.map_err(|fault| match fault.cause {
            Cause::Interrupted if ended.late => Fault::new(Cause::DeadlineExceeded, nanos(limit)),
            _ => fault,
        });
        let completion = Completion { cookie, index, kernel, outcome, tally, busy: started.elapsed() };
        self.account(&completion);
        if ended.lost {
            // The rings were closed without it; nobody looks at its completion any more.
            return self.close_rings(Fault::new(Cause::KernelStuck, nanos(completion.busy)));
        }
        self.memory
            .write(rings.entry(rings.completion_base, index), &completion.to_bytes())
            .expect("rings were checked against the memory when they were taken up");
        self.set_status(Status::Idle);
        self.registers.completed().store(consumer, Ordering::Release);
        self.raise_interrupt();
    }

    fn execute(&mut self, descriptor: &Descriptor, tally: &mut Tally) -> Result<(), Fault> {
        let memory = &*self.memory;
        let kernel = self
            .registry
            .get(descriptor.kernel)
            .ok_or_else(|| Fault::new(Cause::UnknownKernel, descriptor.kernel.0.into()))?;
        if let Some(shop) = &self.shop
            && self.registers.lease_holder().load(Ordering::Relaxed) != 0
            && !shop.has_loaded(descriptor.kernel.0)
        {
            return Err(Fault::new(Cause::KernelNotLoaded, descriptor.kernel.0.into()));
        }
        let unknown = descriptor.flags & !kernel.flags();
        if unknown != 0 {
            return Err(Fault::new(Cause::UnknownFlags, unknown.into()));
        }
        memory.check(descriptor.args).map_err(outside(Cause::ArgsOutsideMemory))?;
        memory.check(descriptor.result).map_err(outside(Cause::ResultOutsideMemory))?;
        let stop = self.shop.as_ref().map_or(&*self.stop, |shop| shop.rings.wanted());
        let pulse = Pulse { heartbeat: self.registers.heartbeat(), stop };
        let mut job = Job {
            memory,
            flags: descriptor.flags,
            args: descriptor.args,
            result: descriptor.result,
            tally: Tally::default(),
            pulse: &pulse,
        };
        // A kernel that panics must not take the card along; its own state is its own problem,
        // everything else is behind the job.
        let outcome = catch_unwind(AssertUnwindSafe(|| kernel.run(&mut job)));
        *tally = job.tally;
        outcome.unwrap_or(Err(Fault::new(Cause::KernelFailed, descriptor.kernel.0.into())))
    }

    fn account(&mut self, completion: &Completion) {
        let counters = &mut self.counters;
        counters.commands += 1;
        counters.events += u64::from(completion.tally.events);
        counters.fragments += u64::from(completion.tally.fragments);
        counters.payload_bytes += completion.tally.payload_bytes;
        counters.corrupt_fragments += u64::from(completion.tally.corrupt_fragments);
        counters.decisions_set += u64::from(completion.tally.decisions_set);
        counters.kernel_busy_ns += nanos(completion.busy);
        if let Err(fault) = completion.outcome {
            self.counters.failed_commands += 1;
            self.note_error(fault);
        }
        let (shown, counters) = (&self.registers, &self.counters);
        for (register, value) in [
            (shown.commands(), counters.commands),
            (shown.failed_commands(), counters.failed_commands),
            (shown.events(), counters.events),
            (shown.fragments(), counters.fragments),
            (shown.payload_bytes(), counters.payload_bytes),
            (shown.corrupt_fragments(), counters.corrupt_fragments),
            (shown.decisions_set(), counters.decisions_set),
            (shown.kernel_busy_ns(), counters.kernel_busy_ns),
        ] {
            register.store(value, Ordering::Relaxed);
        }
    }

    fn note_error(&mut self, fault: Fault) {
        self.counters.errors += 1;
        let registers = &self.registers;
        registers.error_cause().store(fault.cause.code(), Ordering::Relaxed);
        registers.error_detail().store(fault.detail, Ordering::Relaxed);
        registers.errors().store(self.counters.errors, Ordering::Release);
    }

    fn set_status(&self, status: Status) {
        self.registers.status().store(status as u32, Ordering::Release);
    }

    /// Tells everybody who waits that there is news.
    fn raise_interrupt(&mut self) {
        self.counters.interrupts += 1;
        self.registers.interrupts().store(self.counters.interrupts, Ordering::Relaxed);
        interrupt(&self.registers, &self.interrupt_fd);
    }

    /// Sleeps until the doorbell rings, at most one heartbeat period.
    fn sleep(&mut self, heartbeat: Duration) -> Result<(), OsError> {
        let registers = &self.registers;
        let pulse = Pulse { heartbeat: registers.heartbeat(), stop: &self.stop };
        pulse.beat();
        // The user rings first and looks at `sleeping` afterwards, we do it the other way round:
        // one of the two sees the other, and no ring is slept through.
        registers.sleeping().store(1, Ordering::SeqCst);
        let slept = if registers.doorbell().load(Ordering::SeqCst) == self.doorbell {
            futex::wait(registers.doorbell(), self.doorbell, heartbeat).doing("wait for the doorbell")
        } else {
            Ok(())
        };
        registers.sleeping().store(0, Ordering::Relaxed);
        slept
    }
}

/// Wakes whoever waits for news of the rings.
fn interrupt(registers: &Registers, descriptor: &EventFd) {
    // Sequentially consistent against the waiter, who announces itself first and looks at this word afterwards: one of
    // the two sees the other.
    registers.interrupt().fetch_add(1, Ordering::SeqCst);
    if registers.interrupt_waiters().load(Ordering::SeqCst) != 0 {
        futex::wake_all(registers.interrupt());
    }
    if registers.interrupt_arm().load(Ordering::SeqCst) != 0
        && registers.interrupt_arm().swap(0, Ordering::SeqCst) != 0
    {
        descriptor.signal();
    }
}

/// Says that the rings are out of service, while the engine is in the command that does not end.
pub(crate) fn show_stuck(registers: &Registers, descriptor: &EventFd) {
    registers.ring_fault().store(Cause::KernelStuck.code(), Ordering::Release);
    registers.status().store(Status::Stuck as u32, Ordering::Release);
    interrupt(registers, descriptor);
}

#[cfg(test)]
mod tests;
