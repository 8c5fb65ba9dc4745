//! A table of the process's objects of one kind: pollers find an object by its index, the device's threads its
//! operations.
//!
//! Pollers read pointers without a lock. An object is removed while its completion queues are locked, so that no
//! poller uses it then.

use std::collections::{HashMap, VecDeque};
use std::fmt::Debug;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use millstream_shm::random_u64;

use crate::errno::{Errno, Result};

/// Pollers see a `T`, threads an `O`. All copies are the same table.
#[derive(Debug)]
pub(crate) struct SlotTable<T: 'static, O: ?Sized + 'static> {
    /// The slots by index; pointers are valid while registered, see [`SlotTable::remove`].
    slots: &'static [Slot<T>],
    registry: &'static Registry<O>,
}

impl<T, O: ?Sized> Clone for SlotTable<T, O> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T, O: ?Sized> Copy for SlotTable<T, O> {}

#[derive(Debug)]
struct Slot<T> {
    object: AtomicPtr<T>,
    /// Offset of the completion queue of its receives in the arena; zero before `object` is set and after it is cleared.
    recv_cq: AtomicU32,
}

#[derive(Debug)]
struct Registry<O: ?Sized> {
    operations: Mutex<HashMap<u32, Weak<O>>>,
    /// Free indices, in random order. A released index is reused as late as possible: its former peers may not have
    /// noticed.
    free: Mutex<VecDeque<u32>>,
}

impl<T, O: ?Sized + Debug> SlotTable<T, O> {
    /// An empty table for `count` objects. It is never freed.
    pub(crate) fn leak(count: usize) -> Self {
        let slot = || Slot { object: AtomicPtr::default(), recv_cq: AtomicU32::new(0) };
        let slots: Vec<_> = (0..count).map(|_| slot()).collect();
        let registry = Registry { operations: Mutex::default(), free: Mutex::new(shuffled(count as u32)) };
        Self { slots: slots.leak(), registry: Box::leak(Box::new(registry)) }
    }

    /// Takes a free index; [`SlotTable::release_index`] releases it.
    ///
    /// # Errors
    /// ENOMEM if none is free.
    pub(crate) fn take_index(&self) -> Result<u32> {
        self.registry.free.lock().expect("no panic under this lock").pop_front().ok_or(Errno::NOMEM)
    }

    /// Releases an index.
    pub(crate) fn release_index(&self, index: u32) {
        self.registry.free.lock().expect("no panic under this lock").push_back(index);
    }

    fn operations(&self) -> MutexGuard<'_, HashMap<u32, Weak<O>>> {
        self.registry.operations.lock().expect("no panic under this lock")
    }

    /// Registers an object whose receives complete in the queue at `recv_cq`.
    ///
    /// # Safety
    /// `object` is valid until [`SlotTable::remove`].
    pub(crate) unsafe fn add(&self, index: u32, operations: Weak<O>, object: *const T, recv_cq: u32) {
        self.operations().insert(index, operations);
        let slot = &self.slots[index as usize];
        slot.object.store(object.cast_mut(), Ordering::Release);
        slot.recv_cq.store(recv_cq, Ordering::Release);
    }

    /// Removes an object. The caller holds the consumer locks of its completion queues, so that no poller uses it.
    pub(crate) fn remove(&self, index: u32) {
        let slot = &self.slots[index as usize];
        slot.recv_cq.store(0, Ordering::Release);
        slot.object.store(std::ptr::null_mut(), Ordering::Release);
        self.operations().remove(&index);
    }

    /// The object at an index that is smaller than the table.
    ///
    /// # Safety
    /// The caller holds the consumer lock of a completion queue of this object.
    #[inline]
    pub(crate) unsafe fn locked_by_caller(&self, index: u32) -> Option<&T> {
        // SAFETY: registered pointers are valid; removal needs the lock that the caller holds.
        unsafe { self.slots[index as usize].object.load(Ordering::Acquire).as_ref() }
    }

    /// The object at an index, for a poller that holds the lock of the completion queue at `recv_cq`. The index comes
    /// from shared memory: it may name an object that completes elsewhere and can be removed at any time. So the
    /// completion queue is compared before the pointer is used.
    #[inline]
    pub(crate) fn for_poller(&self, index: u32, recv_cq: u32) -> Option<&T> {
        let slot = self.slots.get(index as usize)?;
        if slot.recv_cq.load(Ordering::Acquire) != recv_cq {
            return None;
        }
        // SAFETY: registered, and as just checked its removal needs the lock that the caller holds.
        unsafe { slot.object.load(Ordering::Acquire).as_ref() }
    }

    /// The operations of the object at an index.
    pub(crate) fn get(&self, index: u32) -> Option<Arc<O>> {
        let found = self.operations().get(&index).cloned();
        // Outside the lock: this may be the last reference.
        found?.upgrade()
    }

    /// The operations of all objects.
    pub(crate) fn all(&self) -> Vec<Arc<O>> {
        self.operations().values().filter_map(Weak::upgrade).collect()
    }
}

/// The numbers below `n` in random order (Fisher and Yates).
fn shuffled(n: u32) -> VecDeque<u32> {
    let mut numbers: VecDeque<u32> = (0..n).collect();
    for i in (1..n as usize).rev() {
        numbers.swap(i, random_u64() as usize % (i + 1));
    }
    numbers
}
