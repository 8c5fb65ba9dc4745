//! The kernel of a region.
//!
//! The region's thread loads and unloads it. A run takes it out of the slot and puts it back, so a run never
//! blocks a reset. A kernel that was unloaded during its run is dropped afterwards.

use std::sync::{Mutex, MutexGuard, PoisonError};

use millstream_card_abi::command::{Cause, Fault};

use crate::kernel::Kernel;

/// Holds the kernel of one region.
#[derive(Default)]
pub(crate) struct KernelSlot {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    content: Content,
    /// Counts loads and unloads.
    generation: u64,
}

#[derive(Default)]
enum Content {
    #[default]
    Empty,
    Ready(Box<dyn Kernel>),
    InUse,
}

/// A kernel for the time of one run.
pub(crate) struct TakenKernel {
    pub(crate) kernel: Box<dyn Kernel>,
    generation: u64,
}

impl KernelSlot {
    fn state(&self) -> MutexGuard<'_, State> {
        // No code panics with the lock held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Loads a kernel in place of the one there.
    pub(crate) fn load(&self, kernel: Box<dyn Kernel>) {
        self.set(Content::Ready(kernel));
    }

    /// Removes the kernel.
    pub(crate) fn unload(&self) {
        self.set(Content::Empty);
    }

    fn set(&self, content: Content) {
        let mut state = self.state();
        state.generation += 1;
        let previous = std::mem::replace(&mut state.content, content);
        drop(state);
        // Outside the lock: a kernel may take long to drop.
        drop(previous);
    }

    /// Takes the kernel for a run; [`KernelSlot::put_back`] follows.
    pub(crate) fn take(&self) -> Result<TakenKernel, Fault> {
        let mut state = self.state();
        let generation = state.generation;
        match std::mem::take(&mut state.content) {
            Content::Empty => Err(Fault::new(Cause::RegionEmpty, 0)),
            Content::InUse => {
                state.content = Content::InUse;
                Err(Fault::new(Cause::RegionBusy, 0))
            }
            Content::Ready(kernel) => {
                state.content = Content::InUse;
                Ok(TakenKernel { kernel, generation })
            }
        }
    }

    /// Ends a run. The kernel is dropped if the slot was loaded or unloaded meanwhile.
    pub(crate) fn put_back(&self, taken: TakenKernel) {
        let mut state = self.state();
        if state.generation == taken.generation {
            state.content = Content::Ready(taken.kernel);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::builtin::BUILTINS;

    fn cause(outcome: Result<TakenKernel, Fault>) -> Option<Cause> {
        outcome.err().map(|fault| fault.cause)
    }

    #[test]
    fn a_kernel_is_used_by_one_run_at_a_time() {
        let slot = KernelSlot::default();
        assert_eq!(cause(slot.take()), Some(Cause::RegionEmpty));
        slot.load((BUILTINS[0].make)());
        let taken = slot.take().unwrap();
        assert_eq!(cause(slot.take()), Some(Cause::RegionBusy));
        slot.put_back(taken);
        assert_eq!(cause(slot.take()), None);
    }

    #[test]
    fn a_kernel_that_was_unloaded_during_its_run_does_not_return() {
        let slot = KernelSlot::default();
        slot.load((BUILTINS[0].make)());
        let taken = slot.take().unwrap();
        slot.unload();
        slot.put_back(taken);
        assert_eq!(cause(slot.take()), Some(Cause::RegionEmpty));
        slot.load((BUILTINS[0].make)());
        let taken = slot.take().unwrap();
        slot.load((BUILTINS[0].make)());
        let next = slot.take().unwrap();
        slot.put_back(taken);
        assert_eq!(cause(slot.take()), Some(Cause::RegionBusy));
        slot.put_back(next);
        assert_eq!(cause(slot.take()), None);
    }
}
