//! Receive queues: requests in the arena for the peer to use up, their names kept privately.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use millstream_lockfree::{BiasedLock, SpinGuard, prefetch};

use super::Qp;
use super::state::QpState;
use crate::errno::{Errno, Result};
use crate::greeting::{Message, Op};
use crate::layout::{QpEntry, RecvSlot};
use crate::types::{Sge, room};

#[derive(Debug)]
pub(super) struct RecvQueue {
    slots: NonNull<u8>,
    slot_len: usize,
    mask: u32,
    /// The most requests at a time.
    depth: u32,
    /// One poster at a time.
    poster: BiasedLock<()>,
    /// Requests ever posted.
    tail: AtomicU32,
    /// Requests ever completed towards the application.
    done: AtomicU32,
    notes: Box<[RecvWqe]>,
}

/// What the owner remembers of a receive request, out of peers' reach.
#[derive(Debug, Default)]
pub(crate) struct RecvWqe {
    wr_id: AtomicU64,
    room: AtomicU32,
}

/// A receive request that was completed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Received {
    /// The application's name for it.
    pub(crate) wr_id: u64,
    /// Bytes that it had room for.
    pub(crate) room: u32,
}

impl RecvWqe {
    #[inline]
    pub(crate) fn write(&self, wr_id: u64, sges: &[Sge]) {
        self.wr_id.store(wr_id, Ordering::Relaxed);
        self.room.store(room(sges), Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn read(&self) -> Received {
        Received { wr_id: self.wr_id.load(Ordering::Relaxed), room: self.room.load(Ordering::Relaxed) }
    }
}

// SAFETY: the slots lie in the arena, are written under the lock and read by the peer.
unsafe impl Send for RecvQueue {}
// SAFETY: as above.
unsafe impl Sync for RecvQueue {}

/// The posting side, locked.
pub(super) struct Poster<'a> {
    queue: &'a RecvQueue,
    _guard: SpinGuard<'a, ()>,
}

impl Poster<'_> {
    #[inline]
    pub(super) fn done(&self) -> u32 {
        self.queue.done.load(Ordering::Acquire)
    }

    pub(super) fn tail(&self) -> u32 {
        self.queue.tail.load(Ordering::Acquire)
    }
}

impl RecvQueue {
    pub(super) fn new(slots: NonNull<u8>, count: u32, slot_len: usize, depth: u32) -> Self {
        Self {
            depth,
            slots,
            slot_len,
            mask: count - 1,
            poster: BiasedLock::new(()),
            tail: AtomicU32::new(0),
            done: AtomicU32::new(0),
            notes: (0..count).map(|_| RecvWqe::default()).collect(),
        }
    }

    #[inline]
    pub(super) fn lock(&self) -> Poster<'_> {
        Poster { queue: self, _guard: self.poster.lock() }
    }

    /// Takes the oldest request as completed if it has this sequence number. A completion that
    /// does not fit is a peer's error or a duplicate, and is not delivered.
    #[inline]
    pub(super) fn complete(&self, sequence: u32) -> Option<Received> {
        let done = self.done.load(Ordering::Relaxed);
        if sequence != done || done == self.tail.load(Ordering::Acquire) {
            return None;
        }
        let received = self.notes[(done & self.mask) as usize].read();
        self.done.store(done.wrapping_add(1), Ordering::Release);
        // Where the request goes that replaces this one.
        prefetch::for_store(self.slot(done.wrapping_add(self.depth)));
        Some(received)
    }

    /// Empties the queue; completions under way will not fit any request.
    pub(super) fn clear(&self, entry: &QpEntry) {
        let _guard = self.poster.lock();
        let tail = self.tail.load(Ordering::Relaxed);
        self.done.store(tail, Ordering::Relaxed);
        entry.rq_head.store(tail, Ordering::Release);
    }

    #[inline]
    fn slot(&self, at: u32) -> *mut u8 {
        self.slots.as_ptr().wrapping_add((at & self.mask) as usize * self.slot_len)
    }

    /// # Safety
    /// The caller holds the poster's lock and the slot is free.
    #[inline]
    unsafe fn write(&self, at: u32, sges: &[Sge]) {
        // SAFETY: the index is masked to slots that exist, and the slot has room for the elements.
        unsafe {
            let slot = self.slot(at);
            let elements = slot.add(size_of::<RecvSlot>()).cast::<Sge>();
            match sges {
                [one] => elements.write(*one),
                _ => elements.copy_from_nonoverlapping(sges.as_ptr(), sges.len()),
            }
            (*slot.cast::<RecvSlot>()).n_sge.store(sges.len() as u32, Ordering::Relaxed);
        }
    }
}

impl Qp {
    /// Posts a receive request.
    ///
    /// # Errors
    /// EINVAL in state RESET or with too many elements, ENOMEM when the queue is full.
    #[inline]
    pub fn post_recv(&self, wr_id: u64, sges: &[Sge]) -> Result<()> {
        self.post_recvs(std::iter::once((wr_id, sges)))
    }

    /// Posts receive requests, each with its name and its elements, up to the first that is refused. The peer sees
    /// them all at once.
    ///
    /// # Errors
    /// As [`Qp::post_recv`], of the request that was taken last.
    #[inline]
    pub fn post_recvs<'a>(&self, requests: impl Iterator<Item = (u64, &'a [Sge])>) -> Result<()> {
        let poster = self.recv.lock();
        let state = self.state();
        if state == QpState::Reset || self.srq.is_some() {
            return Err(Errno::INVAL);
        }
        let first = self.recv.tail.load(Ordering::Relaxed);
        let mut tail = first;
        let mut result = Ok(());
        for (wr_id, sges) in requests {
            if sges.len() > self.capacity.max_recv_sge as usize {
                result = Err(Errno::INVAL);
                break;
            }
            if tail.wrapping_sub(poster.done()) >= self.capacity.max_recv_wr {
                result = Err(if self.kind.has_receive_queue() { Errno::NOMEM } else { Errno::INVAL });
                break;
            }
            // SAFETY: locked, and there is room.
            unsafe { self.recv.write(tail, sges) };
            self.recv.notes[(tail & self.recv.mask) as usize].write(wr_id, sges);
            tail = tail.wrapping_add(1);
        }
        if tail == first {
            return result;
        }
        self.recv.tail.store(tail, Ordering::Release);
        self.entry.rq_tail.store(tail, Ordering::Release);
        drop(poster);
        if state == QpState::Err {
            self.flush_receives();
        } else if self.entry.rnr_wait.load(Ordering::Relaxed) != 0 {
            self.wake_sender();
        }
        result
    }

    /// The peer's application sleeps and its request waits for this receive.
    #[cold]
    fn wake_sender(&self) {
        if self.entry.rnr_wait.swap(0, Ordering::AcqRel) == 0 {
            return;
        }
        if let Some((peer, sender)) = self.sender() {
            peer.tell(self.host, Message::new(Op::Refilled, [sender]));
        }
    }
}
