//! The command and completion rings as their user sees them: submit, poll, wait.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use millstream_shm::futex;

use crate::card::Card;
use crate::command::{Cause, Completion, Descriptor, ENTRY_BYTES, Status, nanos};
use crate::memory::AccessError;
use crate::os::{Doing, OsError};

/// Longest sleep between two looks whether the card is alive.
const LIVENESS_PERIOD: Duration = Duration::from_millis(50);

/// Time within which a card takes up new rings if it is not computing.
const TAKE_UP_WITHIN: Duration = Duration::from_secs(10);

/// Where the two rings are in card memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingPlaces {
    /// Command ring [bytes], a multiple of 64.
    pub commands: u64,
    /// Completion ring [bytes], a multiple of 64.
    pub completions: u64,
    /// Entries of each ring, a power of two up to
    /// [`MAX_RING_SLOTS`](crate::command::MAX_RING_SLOTS).
    pub slots: u32,
}

impl RingPlaces {
    /// Both rings, one behind the other, from `offset` on.
    pub fn at(offset: u64, slots: u32) -> RingPlaces {
        RingPlaces {
            commands: offset,
            completions: offset.saturating_add(u64::from(slots) * ENTRY_BYTES as u64),
            slots,
        }
    }

    /// Memory that both rings take [bytes].
    pub const fn bytes(slots: u32) -> u64 {
        2 * slots as u64 * ENTRY_BYTES as u64
    }
}

/// Why a ring does not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    /// All slots hold commands whose completions were not taken yet.
    #[error("all {0} slots of the command ring are in use")]
    Full(u32),
    /// Nothing completed in time.
    #[error("no completion within {0:?}")]
    TimedOut(Duration),
    /// The card has ended or died; what was not completed never will be.
    #[error("card is gone")]
    CardGone,
    /// The card refuses these rings, or has closed them.
    #[error("card has closed the rings: {0}")]
    Closed(Cause),
    /// Another user has opened rings of its own.
    #[error("rings were taken over by another user of the card")]
    Superseded,
    /// The rings are not in card memory.
    #[error(transparent)]
    OutOfRange(#[from] AccessError),
    /// A system call failed.
    #[error(transparent)]
    Os(#[from] OsError),
}

/// Open rings: the right to give the card commands.
///
/// A card has one pair of rings. Opening them anew, from here or from another process, ends the
/// use of the earlier ones.
#[derive(Debug)]
pub struct Ring {
    card: Card,
    places: RingPlaces,
    generation: u32,
    /// Commands written.
    submitted: u64,
    /// Completions taken.
    taken: u64,
    spin: Duration,
}

impl Ring {
    /// Opens rings at `places`, after the card has finished the command it may be running.
    ///
    /// # Errors
    /// [`RingError::Closed`] also if that command was given up and has not ended.
    pub fn open(card: &Card, places: RingPlaces) -> Result<Ring, RingError> {
        let registers = card.registers();
        let active = registers.ring_active().load(Ordering::Acquire);
        registers.command_base().store(places.commands, Ordering::Relaxed);
        registers.completion_base().store(places.completions, Ordering::Relaxed);
        registers.ring_slots().store(places.slots, Ordering::Relaxed);
        registers.producer().store(0, Ordering::Relaxed);
        registers.command_deadline_ns().store(0, Ordering::Relaxed);
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
            places,
            generation,
            submitted: 0,
            taken: 0,
            spin: Duration::from_micros(20),
        };
        ring.sleep_until(TAKE_UP_WITHIN, |ring| {
            let active = ring.card.registers().ring_active().load(Ordering::Acquire);
            if active != generation {
                let stuck = ring.card.registers().status().load(Ordering::Acquire) == Status::Stuck as u32;
                return if stuck { Err(RingError::Closed(Cause::KernelStuck)) } else { Ok(None) };
            }
            ring.check_running().map(Some)
        })?;
        Ok(ring)
    }

    /// The card behind the rings.
    pub fn card(&self) -> &Card {
        &self.card
    }

    /// How long [`Ring::wait`] looks for a completion before it sleeps (20 µs unless set).
    pub fn set_spin(&mut self, spin: Duration) {
        self.spin = spin;
    }

    /// How long each command may run from now on, instead of what the card says in `command_limit_ns`. One that takes longer
    /// ends with [`Cause::DeadlineExceeded`]; if it does not end then, the card closes the rings with
    /// [`Cause::KernelStuck`].
    pub fn set_deadline(&self, deadline: Duration) {
        let deadline = nanos(deadline).max(1);
        self.card.registers().command_deadline_ns().store(deadline, Ordering::Relaxed);
    }

    /// Commands whose completion was not taken yet.
    pub fn in_flight(&self) -> u64 {
        self.submitted - self.taken
    }

    /// Gives the card a command; returns its index: 0, 1, 2, …
    pub fn submit(&mut self, descriptor: &Descriptor) -> Result<u64, RingError> {
        if self.in_flight() == u64::from(self.places.slots) {
            return Err(RingError::Full(self.places.slots));
        }
        let index = self.submitted;
        self.card.memory().write(self.entry(self.places.commands, index), &descriptor.to_bytes())?;
        self.submitted += 1;
        self.card.registers().producer().store(self.submitted, Ordering::Release);
        self.card.ring_doorbell();
        Ok(index)
    }

    /// Takes the next completion, in the order of the commands, if there is one.
    pub fn poll(&mut self) -> Result<Option<Completion>, RingError> {
        let completed = self.card.registers().completed().load(Ordering::Acquire);
        if self.taken == self.submitted || completed <= self.taken {
            return self.check_running().map(|()| None);
        }
        let place = self.entry(self.places.completions, self.taken);
        let entry = self.card.memory().read_array(place)?;
        // Looked at after the entry: if the rings are still ours, so was the entry.
        match self.check_running() {
            Ok(()) | Err(RingError::Closed(_)) => {}
            Err(error) => return Err(error),
        }
        self.taken += 1;
        Ok(Some(Completion::from_bytes(&entry)))
    }

    /// Waits for the next completion: spins for a while, then sleeps. Returns within `timeout`,
    /// and at once when the card is gone.
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

    /// Arms [`Card::interrupt_fd`]: it becomes readable at the next completion. Poll the ring once
    /// more after this and before waiting on the descriptor.
    pub fn arm(&self) {
        // What an earlier interrupt left.
        self.card.clear_interrupt();
        self.card.registers().interrupt_arm().store(1, Ordering::SeqCst);
    }

    fn entry(&self, base: u64, index: u64) -> u64 {
        base + index % u64::from(self.places.slots) * ENTRY_BYTES as u64
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

    /// Sleeps on the card's interrupts until `look` finds something.
    fn sleep_until<T>(
        &mut self,
        timeout: Duration,
        mut look: impl FnMut(&mut Ring) -> Result<Option<T>, RingError>,
    ) -> Result<T, RingError> {
        let started = Instant::now();
        let card = self.card.clone();
        let interrupt = card.registers().interrupt();
        let _waiter = Waiter::announce(card.registers().interrupt_waiters());
        loop {
            let alive = card.is_alive();
            let seen = interrupt.load(Ordering::SeqCst);
            if let Some(found) = look(self)? {
                return Ok(found);
            }
            // Asked before the look, so that what a card finished before its death is found.
            if !alive {
                return Err(RingError::CardGone);
            }
            let left = timeout.saturating_sub(started.elapsed());
            if left.is_zero() {
                return Err(RingError::TimedOut(timeout));
            }
            futex::wait(interrupt, seen, left.min(LIVENESS_PERIOD)).doing("wait for an interrupt")?;
        }
    }
}

/// Counts this process among those that the card must wake.
struct Waiter<'a>(&'a AtomicU32);

impl<'a> Waiter<'a> {
    fn announce(waiters: &'a AtomicU32) -> Waiter<'a> {
        waiters.fetch_add(1, Ordering::SeqCst);
        Waiter(waiters)
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // Only if nobody has taken over: closes the rings so that the card forgets them.
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
