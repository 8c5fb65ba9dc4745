//! Requests of the lease controller to the command queue, and the queue's answers.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Shared by the queue engine and the lease controller.
#[derive(Debug, Default)]
pub(crate) struct QueueControl {
    state: Mutex<State>,
    /// The running command has to end: its lease has ended, the card ends, or the command timed out.
    interrupt_requested: AtomicBool,
    /// Generation of the card memory that commands use.
    memory_generation: AtomicU32,
    /// Leases that have ended; changed with the lock held.
    ended_leases: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    /// No command may begin.
    closed: bool,
    /// A client holds the lease, or its lease is being cleared.
    leased: bool,
    running: Option<RunningCommand>,
}

/// The running command.
#[derive(Clone, Copy, Debug)]
struct RunningCommand {
    since: Instant,
    timeout: Duration,
    /// When it was interrupted because of its timeout.
    interrupted: Option<Instant>,
    /// It did not end within the grace period; the card continues without the queue.
    hung: bool,
}

/// Whether a command begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Begin {
    /// It runs; [`QueueControl::end`] follows.
    Begun,
    /// The queue is closed.
    Closed,
    /// A lease has ended since the command was submitted: card memory, with the command, was cleared.
    Outlived,
}

/// How a command ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct CommandEnd {
    /// Its timeout had expired.
    pub(super) timed_out: bool,
    /// The controller had declared it hung.
    pub(super) hung: bool,
}

impl QueueControl {
    fn state(&self) -> MutexGuard<'_, State> {
        // No code panics with the lock held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Interrupts the running command. No command begins until [`QueueControl::open`].
    pub(crate) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        self.interrupt_requested.store(true, Ordering::SeqCst);
    }

    /// A lease begins. Rings that are opened from now on end with it.
    pub(crate) fn begin_lease(&self) {
        self.state().leased = true;
    }

    /// A lease has ended and card memory is cleared: later commands may begin.
    pub(crate) fn open(&self) {
        let mut state = self.state();
        (state.closed, state.leased) = (false, false);
        self.ended_leases.fetch_add(1, Ordering::SeqCst);
        // A command that has not ended yet stays interrupted.
        self.interrupt_requested.store(state.running.is_some(), Ordering::SeqCst);
    }

    /// The flag that tells a kernel to end.
    pub(super) fn interrupt_requested(&self) -> &AtomicBool {
        &self.interrupt_requested
    }

    /// Whether a command runs that uses this generation of card memory.
    pub(crate) fn is_busy_on(&self, generation: u32) -> bool {
        self.state().running.is_some() && self.memory_generation.load(Ordering::SeqCst) == generation
    }

    /// Whether a hung command uses this generation of card memory.
    pub(crate) fn is_hung_on(&self, generation: u32) -> bool {
        self.state().running.is_some_and(|running| running.hung)
            && self.memory_generation.load(Ordering::SeqCst) == generation
    }

    /// Later commands use this generation of card memory.
    pub(super) fn set_memory_generation(&self, generation: u32) {
        self.memory_generation.store(generation, Ordering::SeqCst);
    }

    /// Leases that have ended so far.
    pub(super) fn ended_leases(&self) -> u64 {
        self.ended_leases.load(Ordering::SeqCst)
    }

    /// Leases that have ended so far, and whether there is one that rings opened now belong to.
    pub(super) fn lease(&self) -> (u64, bool) {
        let state = self.state();
        (self.ended_leases(), state.leased)
    }

    /// Begins a command that was submitted after so many leases had ended.
    pub(super) fn begin(&self, timeout: Duration, ended_leases: u64) -> Begin {
        let mut state = self.state();
        if state.closed {
            return Begin::Closed;
        }
        if self.ended_leases() != ended_leases {
            return Begin::Outlived;
        }
        let since = Instant::now();
        state.running = Some(RunningCommand { since, timeout, interrupted: None, hung: false });
        Begin::Begun
    }

    /// How the running command ends. It counts as running until [`QueueControl::end`]: it has its completion to write.
    pub(super) fn ending(&self) -> CommandEnd {
        let running = self.state().running;
        running.map_or_else(CommandEnd::default, |RunningCommand { interrupted, hung, .. }| CommandEnd {
            timed_out: interrupted.is_some(),
            hung,
        })
    }

    /// The command has ended and writes nothing any more. Returns whether the controller had declared it hung.
    pub(super) fn end(&self) -> bool {
        let mut state = self.state();
        self.interrupt_requested.store(state.closed, Ordering::SeqCst);
        state.running.take().is_some_and(|running| running.hung)
    }

    /// Interrupts a command whose timeout has expired, and declares it hung when the grace period has passed since then.
    /// Returns true only in the call that declares it hung.
    pub(crate) fn check_timeout(&self, grace: Duration) -> bool {
        let mut state = self.state();
        let Some(running) = &mut state.running else { return false };
        if running.since.elapsed() < running.timeout {
            return false;
        }
        let interrupted = *running.interrupted.get_or_insert_with(|| {
            self.interrupt_requested.store(true, Ordering::SeqCst);
            Instant::now()
        });
        let newly_hung = interrupted.elapsed() >= grace && !running.hung;
        running.hung |= newly_hung;
        newly_hung
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(3600);

    #[test]
    fn a_command_begins_while_the_queue_is_open_and_counts_on_its_own_memory() {
        let control = QueueControl::default();
        let interrupted = || control.interrupt_requested().load(Ordering::SeqCst);
        let begins = |timeout| control.begin(timeout, control.ended_leases()) == Begin::Begun;
        assert!(begins(LONG) && control.is_busy_on(0) && !control.is_busy_on(1) && !interrupted());
        control.close();
        assert!(control.is_busy_on(0) && interrupted(), "the command has not ended yet");
        control.open();
        assert!(interrupted(), "opening does not withdraw the interrupt");
        assert_eq!(control.ending(), CommandEnd::default());
        assert!(control.is_busy_on(0), "it has its completion to write");
        assert!(!control.end() && !interrupted());
        control.close();
        assert!(!control.is_busy_on(0) && !begins(LONG) && !control.is_busy_on(0));
        let submitted = control.ended_leases();
        assert_eq!(control.begin(LONG, submitted), Begin::Closed);
        control.open();
        assert_eq!(control.begin(LONG, submitted), Begin::Outlived);
        control.set_memory_generation(1);
        assert!(begins(LONG) && control.is_busy_on(1) && !control.is_busy_on(0));
    }

    #[test]
    fn a_command_is_interrupted_after_its_timeout_and_hung_after_the_grace_period() {
        let control = QueueControl::default();
        let begins = |timeout| control.begin(timeout, 0) == Begin::Begun;
        assert!(begins(LONG));
        assert!(!control.check_timeout(Duration::ZERO));
        assert_eq!((control.ending(), control.end()), (CommandEnd::default(), false));
        assert!(begins(Duration::ZERO));
        assert!(!control.check_timeout(LONG));
        assert!(control.interrupt_requested().load(Ordering::SeqCst) && !control.is_hung_on(0));
        assert!(control.check_timeout(Duration::ZERO) && control.is_hung_on(0) && !control.is_hung_on(1));
        assert!(!control.check_timeout(Duration::ZERO), "reported once");
        assert_eq!((control.ending(), control.end()), (CommandEnd { timed_out: true, hung: true }, true));
        // The grace period begins with the interrupt, however late that is.
        let grace = Duration::from_millis(200);
        assert!(begins(Duration::ZERO));
        std::thread::sleep(grace);
        assert!(!control.check_timeout(grace) && control.interrupt_requested().load(Ordering::SeqCst));
        std::thread::sleep(grace);
        assert!(control.check_timeout(grace) && control.end());
        // The next command has its own timeout.
        assert!(begins(LONG) && !control.interrupt_requested().load(Ordering::SeqCst));
        assert_eq!((control.check_timeout(Duration::ZERO), control.ending()), (false, CommandEnd::default()));
    }
}
