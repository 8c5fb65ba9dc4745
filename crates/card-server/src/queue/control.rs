//! Requests of the lease controller to the command queue, and the queue's answers.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
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
}

#[derive(Debug, Default)]
struct State {
    /// No command may begin.
    closed: bool,
    running: Option<RunningCommand>,
}

/// The running command.
#[derive(Clone, Copy, Debug)]
struct RunningCommand {
    since: Instant,
    timeout: Duration,
    /// It was interrupted because of its timeout.
    timed_out: bool,
    /// It did not end within the grace period; the card continues without the queue.
    hung: bool,
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

    pub(crate) fn open(&self) {
        let mut state = self.state();
        state.closed = false;
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

    /// Begins a command, unless the queue is closed; [`QueueControl::end`] follows.
    pub(super) fn begin(&self, timeout: Duration) -> bool {
        let mut state = self.state();
        let begins = !state.closed;
        if begins {
            let since = Instant::now();
            state.running = Some(RunningCommand { since, timeout, timed_out: false, hung: false });
        }
        begins
    }

    pub(super) fn end(&self) -> CommandEnd {
        let mut state = self.state();
        self.interrupt_requested.store(state.closed, Ordering::SeqCst);
        let ended = state.running.take();
        ended.map_or_else(CommandEnd::default, |RunningCommand { timed_out, hung, .. }| CommandEnd {
            timed_out,
            hung,
        })
    }

    /// Interrupts a command whose timeout has expired, and declares it hung after the grace period. Returns
    /// true only in the call that declares it hung.
    pub(crate) fn check_timeout(&self, grace: Duration) -> bool {
        let mut state = self.state();
        let Some(running) = &mut state.running else { return false };
        let Some(overdue) = running.since.elapsed().checked_sub(running.timeout) else { return false };
        if !running.timed_out {
            running.timed_out = true;
            self.interrupt_requested.store(true, Ordering::SeqCst);
        }
        let newly_hung = overdue >= grace && !running.hung;
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
        assert!(control.begin(LONG) && control.is_busy_on(0) && !control.is_busy_on(1) && !interrupted());
        control.close();
        assert!(control.is_busy_on(0) && interrupted(), "the command has not ended yet");
        control.open();
        assert!(interrupted(), "opening does not withdraw the interrupt");
        assert_eq!(control.end(), CommandEnd::default());
        assert!(!interrupted());
        control.close();
        assert!(!control.is_busy_on(0) && !control.begin(LONG) && !control.is_busy_on(0));
        control.open();
        control.set_memory_generation(1);
        assert!(control.begin(LONG) && control.is_busy_on(1) && !control.is_busy_on(0));
    }

    #[test]
    fn a_command_is_interrupted_after_its_timeout_and_hung_after_the_grace_period() {
        let control = QueueControl::default();
        assert!(control.begin(LONG));
        assert!(!control.check_timeout(Duration::ZERO));
        assert_eq!(control.end(), CommandEnd::default());
        assert!(control.begin(Duration::ZERO));
        assert!(!control.check_timeout(LONG));
        assert!(control.interrupt_requested().load(Ordering::SeqCst) && !control.is_hung_on(0));
        assert!(control.check_timeout(Duration::ZERO) && control.is_hung_on(0) && !control.is_hung_on(1));
        assert!(!control.check_timeout(Duration::ZERO), "reported once");
        assert_eq!(control.end(), CommandEnd { timed_out: true, hung: true });
        // The next command has its own timeout.
        assert!(control.begin(LONG) && !control.interrupt_requested().load(Ordering::SeqCst));
        assert_eq!((control.check_timeout(Duration::ZERO), control.end()), (false, CommandEnd::default()));
    }
}
