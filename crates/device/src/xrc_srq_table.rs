//! The process's shared receive queues that belong to XRC domains, as pollers and the device's threads find them.

use std::fmt::Debug;
use std::sync::{Arc, OnceLock, Weak};

use crate::caps::MAX_XRC_SRQ;
use crate::errno::Result;
use crate::slot_table::SlotTable;
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
    /// Frees the locks of the queue whose holders are gone.
    fn recover_locks(&self);
    /// Waits until no sender is inside an operation that began before the call; false if one stayed.
    fn wait_for_senders(&self) -> bool;
    /// Packets for the queue are received while the application polls its completion queue. Undone when the result is
    /// dropped.
    fn poll_network(&self) -> Option<Box<dyn Debug + Send + Sync>>;
}

/// The table, made at its first use.
#[derive(Debug, Default)]
pub(crate) struct XrcSrqTable(OnceLock<SlotTable<SrqWqes, dyn XrcSrqOps>>);

impl XrcSrqTable {
    fn table(&self) -> &SlotTable<SrqWqes, dyn XrcSrqOps> {
        self.0.get_or_init(|| SlotTable::leak(MAX_XRC_SRQ))
    }

    /// Takes a free index.
    ///
    /// # Errors
    /// ENOMEM if none is free.
    pub(crate) fn take_index(&self) -> Result<u32> {
        self.table().take_index()
    }

    /// Releases an index.
    pub(crate) fn release_index(&self, index: u32) {
        self.table().release_index(index);
    }

    /// Registers a queue that completes in the completion queue at `cq`.
    ///
    /// # Safety
    /// `wqes` is valid until [`XrcSrqTable::remove`].
    pub(crate) unsafe fn add(&self, index: u32, srq: Weak<dyn XrcSrqOps>, wqes: *const SrqWqes, cq: u32) {
        // SAFETY: the caller's promise.
        unsafe { self.table().add(index, srq, wqes, cq) };
    }

    /// Removes a queue. The caller holds the consumer lock of its completion queue, so that no poller uses it.
    pub(crate) fn remove(&self, index: u32) {
        self.table().remove(index);
    }

    /// The queue that a completion is for, for a poller that holds the lock of the completion queue at `cq`.
    pub(crate) fn for_poller(&self, sequence: u32, cq: u32) -> Option<&SrqWqes> {
        if sequence >> 31 == 0 {
            return None;
        }
        self.0.get()?.for_poller(sequence >> 16 & 0x7fff, cq)
    }

    /// The queue with this number.
    pub(crate) fn get(&self, number: u32) -> Option<Arc<dyn XrcSrqOps>> {
        self.0.get()?.get(index(number)).filter(|srq| srq.number() == number)
    }

    /// Frees the locks of all queues whose holders are gone.
    pub(crate) fn recover_locks(&self) {
        if let Some(table) = self.0.get() {
            table.all().iter().for_each(|srq| srq.recover_locks());
        }
    }

    /// Waits until no sender is inside an operation that began before the call; false if one stayed.
    pub(crate) fn wait_for_senders(&self) -> bool {
        self.0.get().is_none_or(|table| table.all().iter().all(|srq| srq.wait_for_senders()))
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
