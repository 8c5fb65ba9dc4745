//! The process's shared receive queues that belong to XRC domains, as pollers and the device's threads find them.

use std::collections::{HashMap, VecDeque};
use std::fmt::Debug;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use crate::caps::MAX_XRC_SRQ;
use crate::errno::{Errno, Result};
use crate::qp_table::shuffled;
use crate::srq_wqes::SrqWqes;

/// The `sequence` of a completion for slot 0 of an XRC shared receive queue: the top bit, then the low bits of the
/// queue's number, then the slot.
pub(crate) const fn tag(number: u32) -> u32 {
    1 << 31 | index(number) << 16
}

/// The queue's index in the table.
pub(crate) const fn index(number: u32) -> u32 {
    number % MAX_XRC_SRQ as u32
}

/// The slot in a completion's sequence number.
pub(crate) const fn slot(sequence: u32) -> u32 {
    sequence & 0xffff
}

/// Whether a completion's sequence number names this queue.
pub(crate) const fn is_of(sequence: u32, number: u32) -> bool {
    sequence >> 16 == tag(number) >> 16
}

/// The operations of an XRC shared receive queue that the device's threads and the owners of memory use.
pub(crate) trait XrcSrqOps: Debug + Send + Sync {
    fn number(&self) -> u32;
    /// A sender reports an event ([`crate::ipc::srq_event`]).
    fn srq_event(&self, event: u32);
    /// Waits until no sender is inside an operation that began before the call; false if one stayed.
    fn wait_for_senders(&self) -> bool;
    /// Packets for the queue are received while the application polls its completion queue. Undone when the result is
    /// dropped.
    fn poll_network(&self) -> Option<Box<dyn Debug + Send + Sync>>;
}

/// The table, made at its first use.
#[derive(Debug, Default)]
pub(crate) struct XrcSrqTable(OnceLock<Queues>);

#[derive(Debug)]
struct Queues {
    /// The slots by index; pointers are valid while registered, see [`XrcSrqTable::remove`].
    polled: Box<[PolledSlot]>,
    handlers: Mutex<HashMap<u32, Weak<dyn XrcSrqOps>>>,
    /// Free indices in random order. A released index is reused as late as possible.
    free: Mutex<VecDeque<u32>>,
}

#[derive(Debug, Default)]
struct PolledSlot {
    srq: AtomicPtr<SrqWqes>,
    /// Offset of its completion queue in the arena; zero before `srq` is set and after it is cleared.
    cq: AtomicU32,
}

impl XrcSrqTable {
    fn queues(&self) -> &Queues {
        self.0.get_or_init(|| Queues {
            polled: (0..MAX_XRC_SRQ).map(|_| PolledSlot::default()).collect(),
            handlers: Mutex::default(),
            free: Mutex::new(shuffled(MAX_XRC_SRQ as u32)),
        })
    }

    /// Takes a free index.
    ///
    /// # Errors
    /// ENOMEM if none is free.
    pub(crate) fn take_index(&self) -> Result<u32> {
        self.queues().free.lock().expect("no panic under this lock").pop_front().ok_or(Errno::NOMEM)
    }

    /// Releases an index.
    pub(crate) fn release_index(&self, index: u32) {
        self.queues().free.lock().expect("no panic under this lock").push_back(index);
    }

    /// Registers a queue that completes in the completion queue at `cq`.
    ///
    /// # Safety
    /// `slots` is valid until [`XrcSrqTable::remove`].
    pub(crate) unsafe fn add(&self, index: u32, srq: Weak<dyn XrcSrqOps>, slots: *const SrqWqes, cq: u32) {
        let queues = self.queues();
        queues.handlers.lock().expect("no panic under this lock").insert(index, srq);
        let polled = &queues.polled[index as usize];
        polled.srq.store(slots.cast_mut(), Ordering::Release);
        polled.cq.store(cq, Ordering::Release);
    }

    /// Removes a queue. The caller holds the consumer lock of its completion queue, so that no poller uses it.
    pub(crate) fn remove(&self, index: u32) {
        let queues = self.queues();
        let polled = &queues.polled[index as usize];
        polled.cq.store(0, Ordering::Release);
        polled.srq.store(std::ptr::null_mut(), Ordering::Release);
        queues.handlers.lock().expect("no panic under this lock").remove(&index);
    }

    /// The queue that a completion is for, for a poller that holds the lock of the completion queue at `cq`.
    /// The completion comes from shared memory, so the completion queue is compared before the pointer is used.
    pub(crate) fn for_poller(&self, sequence: u32, cq: u32) -> Option<&SrqWqes> {
        if sequence >> 31 == 0 {
            return None;
        }
        let polled = self.0.get()?.polled.get((sequence >> 16 & 0x7fff) as usize)?;
        if polled.cq.load(Ordering::Acquire) != cq {
            return None;
        }
        // SAFETY: registered, and as just checked its removal needs the lock that the caller holds.
        unsafe { polled.srq.load(Ordering::Acquire).as_ref() }
    }

    /// The queue with this number.
    pub(crate) fn get(&self, number: u32) -> Option<Arc<dyn XrcSrqOps>> {
        let handlers = self.0.get()?.handlers.lock().expect("no panic under this lock");
        let srq = handlers.get(&index(number)).cloned();
        // Outside the lock: this may be the last reference.
        drop(handlers);
        srq?.upgrade().filter(|srq| srq.number() == number)
    }

    /// Waits until no sender is inside an operation that began before the call; false if one stayed.
    pub(crate) fn wait_for_senders(&self) -> bool {
        let Some(queues) = self.0.get() else { return true };
        let all: Vec<_> = {
            let handlers = queues.handlers.lock().expect("no panic under this lock");
            handlers.values().filter_map(Weak::upgrade).collect()
        };
        all.iter().all(|srq| srq.wait_for_senders())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequence_numbers_name_queue_and_slot() {
        for number in [0x12_3000, 0x12_3001, 0xff_efff] {
            for at in [0, 1, 0x7fff] {
                let sequence = tag(number) | at;
                assert_eq!(slot(sequence), at);
                assert!(is_of(sequence, number));
                assert!(!is_of(sequence, number ^ 1));
                assert!(!is_of(sequence & !(1 << 31), number), "the sequence of a queue pair's own queue");
            }
        }
    }
}
