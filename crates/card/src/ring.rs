//! The command and completion rings of a local card: submit, poll, wait.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use millstream_shm::futex;

use crate::card::Card;
use millstream_card_abi::AccessError;
use millstream_card_abi::command::{Cause, Completion, Descriptor, ENTRY_BYTES, Status, nanos};
use millstream_card_abi::{IoContext as _, SyscallError};

/// Longest sleep between two checks that the card is alive.
const LIVENESS_PERIOD: Duration = Duration::from_millis(50);

/// Time within which an idle card reads a new configuration.
const CONFIGURE_TIMEOUT: Duration = Duration::from_secs(10);

/// Layout of the two rings in card memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingLayout {
    /// Offset of the command ring (bytes), a multiple of 64.
    pub commands: u64,
    /// Offset of the completion ring (bytes), a multiple of 64.
    pub completions: u64,
    /// Entries of each ring, a power of two up to
    /// [`MAX_RING_SLOTS`](millstream_card_abi::command::MAX_RING_SLOTS).
    pub slots: u32,
}

impl RingLayout {
    /// Both rings, one after the other, from `offset` on.
    pub fn at(offset: u64, slots: u32) -> RingLayout {
        RingLayout {
            commands: offset,
            completions: offset.saturating_add(u64::from(slots) * ENTRY_BYTES as u64),
            slots,
        }
    }

    /// Size of both rings (bytes).
    pub const fn bytes(slots: u32) -> u64 {
        2 * slots as u64 * ENTRY_BYTES as u64
    }
}

/// Why a ring operation failed.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    /// All slots hold commands whose completions have not been polled.
    #[error("all {0} slots of the command ring are in use")]
    Full(u32),
    /// Nothing completed in time.
    #[error("no completion within {0:?}")]
    TimedOut(Duration),
    /// The card has ended or died. Outstanding commands will not complete.
    #[error("card has ended or died; open it again")]
    CardGone,
    /// The card rejected these rings, or has closed them.
    #[error("card has closed the rings: {0}")]
    Closed(Cause),
    /// Another process has opened the rings.
    #[error("another process has opened the rings of the card")]
    Superseded,
    /// The rings are not in card memory.
    #[error(transparent)]
    OutOfRange(#[from] AccessError),
    /// A system call failed.
    #[error(transparent)]
    Os(#[from] SyscallError),
}

/// The open rings of a card.
///
/// A card has one pair of rings. Opening them again, from any process, ends their earlier use.
#[derive(Debug)]
pub struct Ring {
    card: Card,
    layout: RingLayout,
    generation: u32,
    /// Commands written.
    submitted: u64,
    /// Completions polled.
    polled: u64,
    spin: Duration,
}

impl Ring {
    /// Opens rings with this layout, after the card has completed the running command.
    ///
    /// # Errors
    /// Also [`RingError::Closed`] if the running command is hung.
    pub fn open(card: &Card, layout: RingLayout) -> Result<Ring, RingError> {
        let registers = card.registers();
        let active = registers.ring_active().load(Ordering::Acquire);
        registers.command_base().store(layout.commands, Ordering::Relaxed);
        registers.completion_base().store(layout.completions, Ordering::Relaxed);
        registers.ring_slots().store(layout.slots, Ordering::Relaxed);
        registers.producer().store(0, Ordering::Relaxed);
        registers.command_timeout_ns().store(0, Ordering::Relaxed);
        let configured = registers.ring_generation().load(Ordering::Relaxed);
        let generation = [1, 2, 3]
            .map(|step| configured.max(active).wrapping_add(step))
            .into_iter()
            .find(|&new| new != 0 && new != active && new != configured)
            .expect("at most two of three consecutive numbers are excluded");
        registers.ring_generation().store(generation, Ordering::Release);
        card.ring_doorbell();
        let mut ring = Ring {
            card: card.clone(),
            layout,
            generation,
            submitted: 0,
            polled: 0,
            spin: Duration::from_micros(20),
        };
        ring.sleep_until(CONFIGURE_TIMEOUT, |ring| {
            let active = ring.card.registers().ring_active().load(Ordering::Acquire);
            if active != generation {
                let hung = ring.card.registers().status().load(Ordering::Acquire) == Status::Hung as u32;
                return if hung { Err(RingError::Closed(Cause::KernelHung)) } else { Ok(None) };
            }
            ring.check_running().map(Some)
        })?;
        Ok(ring)
    }

    /// The card behind the rings.
    pub fn card(&self) -> &Card {
        &self.card
    }

    /// Sets how long [`Ring::wait`] polls before it sleeps; the default is 20 µs.
    pub fn set_spin(&mut self, spin: Duration) {
        self.spin = spin;
    }

    /// Sets the longest time of later commands, in place of the card's `default_command_timeout_ns`. A longer
    /// command ends with [`Cause::DeadlineExceeded`]. If it does not end, the card closes the rings with
    /// [`Cause::KernelHung`].
    pub fn set_command_timeout(&self, timeout: Duration) {
        let timeout = nanos(timeout).max(1);
        self.card.registers().command_timeout_ns().store(timeout, Ordering::Relaxed);
    }

    /// Commands whose completion has not been polled.
    pub fn in_flight(&self) -> u64 {
        self.submitted - self.polled
    }

    /// Submits a command; returns its index: 0, 1, 2, …
    ///
    /// # Errors
    /// [`RingError::Closed`] and [`RingError::Superseded`] if these rings are no longer open: rings that were opened under a
    /// lease end with it. A command that is submitted at that moment is not executed.
    pub fn submit(&mut self, descriptor: &Descriptor) -> Result<u64, RingError> {
        self.check_running()?;
        if self.in_flight() == u64::from(self.layout.slots) {
            return Err(RingError::Full(self.layout.slots));
        }
        let index = self.submitted;
        self.card.memory().write(self.entry(self.layout.commands, index), &descriptor.to_bytes())?;
        self.submitted += 1;
        self.card.registers().producer().store(self.submitted, Ordering::Release);
        self.card.ring_doorbell();
        Ok(index)
    }

    /// Returns the next completion, in the order of the commands, if there is one.
    pub fn poll(&mut self) -> Result<Option<Completion>, RingError> {
        let completed = self.card.registers().completed().load(Ordering::Acquire);
        if self.polled == self.submitted || completed <= self.polled {
            return self.check_running().map(|()| None);
        }
        let offset = self.entry(self.layout.completions, self.polled);
        let entry = self.card.memory().read_array(offset)?;
        // Checked after the read: if the rings are still open here, the entry is theirs. The end of a lease clears it.
        match self.check_running() {
            Ok(()) => {}
            Err(RingError::Closed(cause)) if cause != Cause::Interrupted => {}
            Err(error) => return Err(error),
        }
        self.polled += 1;
        Ok(Some(Completion::from_bytes(&entry)))
    }

    /// Waits for the next completion: polls, then sleeps. Returns after `timeout`, or as soon as the card has ended.
    pub fn wait(&mut self, timeout: Duration) -> Result<Completion, RingError> {
        let started = Instant::now();
        while started.elapsed() < self.spin.min(timeout) {
            if let Some(completion) = self.poll()? {
                return Ok(completion);
            }
            std::hint::spin_loop();
        }
        self.sleep_until(timeout, Ring::poll)
    }

    /// Arms [`Card::interrupt_fd`]: it becomes readable at the next completion. Poll the ring once more before
    /// waiting on the descriptor.
    pub fn arm_interrupt(&self) {
        // Clears an earlier interrupt.
        self.card.clear_interrupt();
        self.card.registers().interrupt_arm().store(1, Ordering::SeqCst);
    }

    fn entry(&self, base: u64, index: u64) -> u64 {
        base + index % u64::from(self.layout.slots) * ENTRY_BYTES as u64
    }

    fn check_running(&self) -> Result<(), RingError> {
        let registers = self.card.registers();
        let fault = registers.ring_fault().load(Ordering::Acquire);
        if registers.ring_active().load(Ordering::Acquire) != self.generation
            || registers.ring_generation().load(Ordering::Relaxed) != self.generation
        {
            Err(RingError::Superseded)
        } else if fault != 0 {
            Err(RingError::Closed(Cause::from_code(fault)))
        } else {
            Ok(())
        }
    }

    /// Sleeps on the card's interrupts until `poll` returns a value.
    fn sleep_until<T>(
        &mut self,
        timeout: Duration,
        mut poll: impl FnMut(&mut Ring) -> Result<Option<T>, RingError>,
    ) -> Result<T, RingError> {
        let started = Instant::now();
        let card = self.card.clone();
        let interrupt = card.registers().interrupt_sequence();
        let _waiter = InterruptWaiter::register(card.registers().interrupt_waiters());
        loop {
            let alive = card.is_alive();
            let seen = interrupt.load(Ordering::SeqCst);
            if let Some(found) = poll(self)? {
                return Ok(found);
            }
            // Liveness is read before the poll, so that completions before the end of the card are returned.
            if !alive {
                return Err(RingError::CardGone);
            }
            let left = timeout.saturating_sub(started.elapsed());
            if left.is_zero() {
                return Err(RingError::TimedOut(timeout));
            }
            futex::wait(interrupt, seen, left.min(LIVENESS_PERIOD)).context("wait for an interrupt")?;
        }
    }
}

/// Registers this process as a waiter that the card has to wake.
struct InterruptWaiter<'a>(&'a AtomicU32);

impl<'a> InterruptWaiter<'a> {
    fn register(waiters: &'a AtomicU32) -> InterruptWaiter<'a> {
        waiters.fetch_add(1, Ordering::SeqCst);
        InterruptWaiter(waiters)
    }
}

impl Drop for InterruptWaiter<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // Closes the rings, unless another process has opened them.
        let closed = self.card.registers().ring_generation().compare_exchange(
            self.generation,
            0,
            Ordering::SeqCst,
            Ordering::Relaxed,
        );
        if closed.is_ok() {
            self.card.ring_doorbell();
        }
    }
}
