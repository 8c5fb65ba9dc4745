//! Batches of send requests: prepared one call at a time, posted all or none.
//!
//! This is the device's side of `ibv_wr_start` … `ibv_wr_complete`. What the calls prepare are the same
//! requests that [`Qp::post_send`] takes, so both ways lead to the same code; a batch only remembers them,
//! with copies of their lists and inline data, until it is complete.

use std::ops::Range;
use std::sync::atomic::Ordering;

use millstream_shm::SpinLock;

use super::send::Admitted;
use super::state::State;
use super::{Capacity, Kind, Qp};
use crate::errno::{Errno, Result};
use crate::mr::window::Bind;
use crate::types::{
    Destination, SEND_INLINE, SendWr, Sge, WR_ATOMIC_CMP_AND_SWP, WR_ATOMIC_FETCH_AND_ADD, WR_ATOMIC_WRITE,
    WR_BIND_MW, WR_LOCAL_INV, WR_RDMA_READ, WR_RDMA_WRITE, WR_RDMA_WRITE_WITH_IMM, WR_SEND, WR_SEND_WITH_IMM,
    WR_SEND_WITH_INV,
};

/// Operations that a queue pair was made for: `IBV_QP_EX_WITH_*` bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Operations(pub u64);

impl Operations {
    /// What a transport can do.
    #[must_use]
    pub fn of(kind: Kind) -> Self {
        let bits = OPCODES.iter().zip(0..).filter(|(opcode, _)| kind.offers(**opcode));
        Self(bits.map(|(_, bit)| 1 << bit).sum())
    }

    #[inline]
    fn include(self, opcode: u32) -> bool {
        OPCODES.iter().zip(0..).any(|(known, bit)| *known == opcode && self.0 >> bit & 1 != 0)
    }
}

/// The operation of each bit, from the lowest on.
const OPCODES: [u32; 13] = [
    WR_RDMA_WRITE,
    WR_RDMA_WRITE_WITH_IMM,
    WR_SEND,
    WR_SEND_WITH_IMM,
    WR_RDMA_READ,
    WR_ATOMIC_CMP_AND_SWP,
    WR_ATOMIC_FETCH_AND_ADD,
    WR_LOCAL_INV,
    WR_BIND_MW,
    WR_SEND_WITH_INV,
    NONE,
    NONE,
    WR_ATOMIC_WRITE,
];

/// No operation of this device.
const NONE: u32 = u32::MAX;

/// Requests that were prepared and not posted yet.
#[derive(Debug)]
pub struct Batch {
    operations: Operations,
    capacity: Capacity,
    requests: Vec<Prepared>,
    elements: Vec<Sge>,
    inline: Vec<u8>,
    /// What the first wrong call did wrong.
    error: Option<Errno>,
}

#[derive(Debug)]
struct Prepared {
    /// Everything but its elements.
    wr: SendWr<'static>,
    data: Data,
    bind: Option<Box<Bind>>,
}

#[derive(Clone, Debug)]
enum Data {
    Elements(Range<usize>),
    Inline(Range<usize>),
}

impl Batch {
    /// Begins a request; its elements in `wr` are not looked at, the calls that follow set them.
    #[inline]
    pub fn request(&mut self, wr: SendWr<'static>) {
        if !self.operations.include(wr.opcode) {
            return self.fail(Errno::INVAL);
        }
        if self.requests.len() >= self.capacity.max_send_wr as usize {
            return self.fail(Errno::NOMEM);
        }
        let at = self.elements.len();
        self.requests.push(Prepared {
            wr: SendWr { flags: wr.flags & !SEND_INLINE, ..wr },
            data: Data::Elements(at..at),
            bind: None,
        });
    }

    /// What the last request, a [`WR_BIND_MW`], shall bind.
    pub fn set_bind(&mut self, bind: Bind) {
        if let Some(last) = self.last() {
            last.bind = Some(Box::new(bind));
        }
    }

    /// The last request's memory.
    #[inline]
    pub fn set_elements(&mut self, sges: &[Sge]) {
        if sges.len() > self.capacity.max_send_sge as usize {
            return self.fail(Errno::INVAL);
        }
        let at = self.elements.len();
        if let Some(last) = self.last() {
            last.data = Data::Elements(at..at + sges.len());
            self.elements.extend_from_slice(sges);
        }
    }

    /// The last request's data, copied now.
    #[inline]
    pub fn set_inline<'a>(&mut self, pieces: impl Iterator<Item = &'a [u8]>) {
        let at = self.inline.len();
        if self.last().is_none() {
            return;
        }
        for piece in pieces {
            if piece.len() > self.capacity.max_inline_data as usize - (self.inline.len() - at) {
                return self.fail(Errno::INVAL);
            }
            self.inline.extend_from_slice(piece);
        }
        let end = self.inline.len();
        if let Some(last) = self.last() {
            last.data = Data::Inline(at..end);
        }
    }

    /// What the last request, a [`WR_ATOMIC_WRITE`], shall write.
    pub fn set_word(&mut self, value: [u8; 8]) {
        let at = self.inline.len();
        if let Some(last) = self.last() {
            last.data = Data::Inline(at..at + value.len());
            self.inline.extend_from_slice(&value);
        }
    }

    /// Where the last request's datagram goes.
    #[inline]
    pub fn set_destination(&mut self, to: Destination) {
        if let Some(last) = self.last() {
            last.wr.to = Some(to);
        }
    }

    /// The shared receive queue that the last request goes through.
    #[inline]
    pub fn set_remote_srqn(&mut self, number: u32) {
        if let Some(last) = self.last() {
            last.wr.remote_srqn = number;
        }
    }

    /// Something was asked for that cannot be: nothing of the batch will be posted.
    #[cold]
    pub fn fail(&mut self, error: Errno) {
        self.error.get_or_insert(error);
    }

    /// After an error requests are no longer counted, so the last one may not be the one that is meant.
    #[inline]
    fn last(&mut self) -> Option<&mut Prepared> {
        if self.error.is_some() {
            return None;
        }
        if self.requests.is_empty() {
            self.fail(Errno::INVAL);
        }
        self.requests.last_mut()
    }

    fn clear(&mut self) {
        self.requests.clear();
        self.elements.clear();
        self.inline.clear();
        self.error = None;
    }
}

impl Prepared {
    /// The request with its elements; `inline` is room for the one that points to inline data.
    #[inline]
    fn complete<'a>(&'a self, batch: &'a Batch, inline: &'a mut [Sge; 1]) -> SendWr<'a> {
        match &self.data {
            Data::Elements(range) => {
                SendWr { sges: &batch.elements[range.clone()], bind: self.bind.as_deref(), ..self.wr }
            }
            Data::Inline(range) => {
                let data = &batch.inline[range.clone()];
                *inline = [Sge { addr: data.as_ptr() as u64, length: data.len() as u32, lkey: 0 }];
                SendWr { sges: inline, flags: self.wr.flags | SEND_INLINE, ..self.wr }
            }
        }
    }
}

/// A queue pair's critical section: one thread at a time prepares a batch.
#[derive(Debug)]
pub struct Section(SpinLock<Batch>);

impl Section {
    /// The section of a queue pair of this kind and size, for these operations.
    ///
    /// # Errors
    /// EOPNOTSUPP for an operation that the transport does not have, or that does not exist here.
    pub fn new(kind: Kind, capacity: Capacity, operations: Operations) -> Result<Self> {
        if operations.0 & !Operations::of(kind).0 != 0 {
            return Err(Errno::NOTSUP);
        }
        Ok(Self(SpinLock::new(Batch {
            operations,
            capacity,
            requests: Vec::new(),
            elements: Vec::new(),
            inline: Vec::new(),
            error: None,
        })))
    }

    /// Enters, with an empty batch; waits while another thread is inside.
    #[inline]
    pub fn enter(&self) {
        let mut batch = self.0.lock();
        batch.clear();
        std::mem::forget(batch);
    }

    /// The batch.
    ///
    /// # Safety
    /// The calling thread is inside.
    #[inline]
    pub unsafe fn with<R>(&self, work: impl FnOnce(&mut Batch) -> R) -> R {
        // SAFETY: nobody else is inside, and no reference outlives this call.
        work(unsafe { &mut *self.0.as_ptr() })
    }

    /// Posts the batch and leaves.
    ///
    /// # Errors
    /// As [`Qp::post_send`] of any of its requests, or what preparing them met first; then nothing is posted.
    ///
    /// # Safety
    /// The calling thread is inside.
    #[inline]
    pub unsafe fn complete(&self, qp: &Qp) -> Result<()> {
        // SAFETY: as in `with`.
        let result = qp.post_batch(unsafe { &*self.0.as_ptr() });
        // SAFETY: taken in `enter`.
        unsafe { self.0.force_unlock() };
        result
    }

    /// Leaves; nothing is posted.
    ///
    /// # Safety
    /// The calling thread is inside.
    pub unsafe fn abort(&self) {
        // SAFETY: taken in `enter`.
        unsafe { self.0.force_unlock() };
    }
}

impl Qp {
    /// Posts all of a batch, or nothing.
    #[inline]
    fn post_batch(&self, batch: &Batch) -> Result<()> {
        if let Some(error) = batch.error {
            return Err(error);
        }
        let mut room = [Sge::default()];
        let mut send = self.send.lock();
        self.takes_sends()?;
        for prepared in &batch.requests {
            self.check_form(&prepared.complete(batch, &mut room))?;
        }
        if self.send_room(&send) < batch.requests.len() as u32 {
            return Err(Errno::NOMEM);
        }
        let mut failed = false;
        for prepared in &batch.requests {
            let wr = prepared.complete(batch, &mut room);
            if let Some(bind) = wr.bind {
                bind.mw.set_key(bind.key);
            }
            // A request may fail the queue pair, and then those behind it are flushed.
            if self.state.load(Ordering::Relaxed) == State::Rts as u8 {
                failed |= self.admit(&mut send, &wr) == Admitted::Fatally;
            } else {
                self.admit_elsewhere(&mut send, &wr);
            }
        }
        drop(send);
        if failed {
            self.fail();
        }
        Ok(())
    }
}
