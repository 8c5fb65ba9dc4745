//! Batches of send requests: prepared one call at a time, posted all or none.
//!
//! The device's side of `ibv_wr_start` … `ibv_wr_complete`. A batch keeps copies of requests, element lists and inline
//! data until it is complete. Then its requests are posted by the code of [`Qp::post_send`].

use millstream_lockfree::{SpinGuard, SpinLock};
use millstream_quantity::{Rkey, Srqn};

use super::send::{PostOutcome, SendQueue};
use super::wr_list::{SendWrList, SingleSgeWr};
use super::{Qp, QpCap, QpType};
use crate::errno::{Errno, Result};
use crate::mr::window::MwBind;
use crate::send_wr::{SendWr, UdDestination};
use crate::types::{
    SEND_INLINE, Sge, WR_ATOMIC_CMP_AND_SWP, WR_ATOMIC_FETCH_AND_ADD, WR_ATOMIC_WRITE, WR_BIND_MW,
    WR_LOCAL_INV, WR_RDMA_READ, WR_RDMA_WRITE, WR_RDMA_WRITE_WITH_IMM, WR_SEND, WR_SEND_WITH_IMM,
    WR_SEND_WITH_INV,
};

/// Operations of an extended queue pair: `IBV_QP_EX_WITH_*` bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SendOps(pub u64);

impl SendOps {
    /// All operations of a transport service.
    #[must_use]
    pub fn of(kind: QpType) -> Self {
        let bits = OPCODES.iter().zip(0..).filter(|(opcode, _)| kind.offers(**opcode));
        Self(bits.map(|(_, bit)| 1 << bit).sum())
    }

    /// The set as bits by opcode.
    fn opcodes(self) -> u32 {
        let included =
            OPCODES.iter().zip(0..).filter(|(opcode, bit)| **opcode != NONE && self.0 >> bit & 1 != 0);
        included.map(|(opcode, _)| 1 << opcode).sum()
    }
}

/// The opcode of each bit, from the lowest on.
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

/// An operation that this device does not have.
const NONE: u32 = u32::MAX;

/// Requests that are prepared and not posted yet.
#[derive(Debug)]
pub struct WrBatch {
    /// Opcodes that the queue pair was created for, a bit each.
    opcodes: u32,
    capacity: QpCap,
    requests: Vec<PreparedWr>,
    elements: Vec<Sge>,
    inline: Vec<u8>,
    destinations: Vec<UdDestination>,
    binds: Vec<MwBind>,
    /// The error of the first invalid call.
    error: Option<Errno>,
}

/// A prepared request. Parts that few requests have are in the batch's lists.
#[derive(Clone, Copy, Debug)]
struct PreparedWr {
    wr_id: u64,
    opcode: u32,
    /// With [`SEND_INLINE`] if its data is inline.
    flags: u32,
    imm: u32,
    rkey: Rkey,
    remote_addr: u64,
    compare_add: u64,
    swap: u64,
    remote_srqn: Srqn,
    /// Start and number of its elements, or of the bytes of its inline data.
    data: (u32, u32),
    /// Index of its destination.
    to: Option<u32>,
    /// Index of its binding.
    bind: Option<u32>,
}

impl WrBatch {
    /// Begins a request. The calls that follow set its elements, destination and binding; those in `wr` are ignored.
    #[inline]
    pub fn request(&mut self, wr: SendWr<'static>) {
        if self.opcodes.checked_shr(wr.opcode).unwrap_or(0) & 1 == 0 {
            return self.fail(Errno::INVAL);
        }
        if self.requests.len() >= self.capacity.max_send_wr as usize {
            return self.fail(Errno::NOMEM);
        }
        let SendWr { wr_id, opcode, flags, imm, rkey, remote_addr, compare_add, swap, remote_srqn, .. } = wr;
        self.requests.push(PreparedWr {
            wr_id,
            opcode,
            flags: flags & !SEND_INLINE,
            imm,
            rkey,
            remote_addr,
            compare_add,
            swap,
            remote_srqn,
            data: (0, 0),
            to: None,
            bind: None,
        });
    }

    /// Sets the binding of the last request, a [`WR_BIND_MW`].
    pub fn set_bind(&mut self, bind: MwBind) {
        let place = self.binds.len() as u32;
        if let Some(last) = self.last() {
            last.bind = Some(place);
            self.binds.push(bind);
        }
    }

    /// Sets the last request's elements.
    #[inline]
    pub fn set_elements(&mut self, sges: &[Sge]) {
        if sges.len() > self.capacity.max_send_sge as usize {
            return self.fail(Errno::INVAL);
        }
        let at = self.elements.len() as u32;
        if let Some(last) = self.last() {
            last.flags &= !SEND_INLINE;
            last.data = (at, sges.len() as u32);
            self.elements.extend_from_slice(sges);
        }
    }

    /// Sets the last request's inline data, which is copied.
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
        self.end_inline(at);
    }

    /// Sets the value of the last request, a [`WR_ATOMIC_WRITE`].
    pub fn set_word(&mut self, value: [u8; 8]) {
        let at = self.inline.len();
        if self.last().is_some() {
            self.inline.extend_from_slice(&value);
            self.end_inline(at);
        }
    }

    /// Makes the inline bytes from `at` on the last request's data.
    #[inline]
    fn end_inline(&mut self, at: usize) {
        let len = self.inline.len() - at;
        if let Some(last) = self.last() {
            last.flags |= SEND_INLINE;
            last.data = (at as u32, len as u32);
        }
    }

    /// Sets the destination of the last request's datagram.
    #[inline]
    pub fn set_destination(&mut self, to: UdDestination) {
        let place = self.destinations.len() as u32;
        if let Some(last) = self.last() {
            last.to = Some(place);
            self.destinations.push(to);
        }
    }

    /// Sets the XRC shared receive queue of the last request.
    #[inline]
    pub fn set_remote_srqn(&mut self, number: Srqn) {
        if let Some(last) = self.last() {
            last.remote_srqn = number;
        }
    }

    /// Records an invalid call: no request of the batch will be posted.
    #[cold]
    pub fn fail(&mut self, error: Errno) {
        self.error.get_or_insert(error);
    }

    /// The request that the next setter changes. None after an error: requests are no longer added then.
    #[inline]
    fn last(&mut self) -> Option<&mut PreparedWr> {
        if self.error.is_some() {
            return None;
        }
        if self.requests.is_empty() {
            self.fail(Errno::INVAL);
        }
        self.requests.last_mut()
    }

    #[inline]
    fn clear(&mut self) {
        self.requests.clear();
        self.elements.clear();
        self.inline.clear();
        self.destinations.clear();
        self.binds.clear();
        self.error = None;
    }

    /// A request's inline data, as an element.
    #[inline(always)]
    fn inline(&self, prepared: &PreparedWr) -> Sge {
        let (at, length) = prepared.data;
        Sge { addr: self.inline[at as usize..].as_ptr() as u64, length, lkey: 0 }
    }

    /// A request's elements, if they are not inline data.
    #[inline(always)]
    fn elements(&self, prepared: &PreparedWr) -> &[Sge] {
        let (at, count) = prepared.data;
        &self.elements[at as usize..][..count as usize]
    }

    /// The request as a [`SendWr`]. `room` is for the element that points to inline data.
    fn complete<'a>(&'a self, prepared: &PreparedWr, room: &'a mut [Sge; 1]) -> SendWr<'a> {
        let &PreparedWr { wr_id, opcode, flags, imm, rkey, remote_addr, .. } = prepared;
        let &PreparedWr { compare_add, swap, remote_srqn, .. } = prepared;
        let sges = if flags & SEND_INLINE != 0 {
            *room = [self.inline(prepared)];
            &room[..]
        } else {
            self.elements(prepared)
        };
        let to = prepared.to.map(|at| self.destinations[at as usize]);
        let bind = prepared.bind.map(|at| &self.binds[at as usize]);
        SendWr {
            wr_id,
            opcode,
            flags,
            imm,
            sges,
            remote_addr,
            rkey,
            compare_add,
            swap,
            to,
            bind,
            remote_srqn,
        }
    }
}

/// The rest of a batch.
#[derive(Clone, Copy)]
struct BatchRest<'a> {
    batch: &'a WrBatch,
    requests: &'a [PreparedWr],
}

impl SendWrList for BatchRest<'_> {
    #[inline(always)]
    fn opcode(&self) -> Option<u32> {
        Some(self.requests.first()?.opcode)
    }

    #[inline(always)]
    fn single_sge(&self, opcode: u32) -> Option<SingleSgeWr> {
        let prepared = self.requests.first().filter(|prepared| prepared.opcode == opcode)?;
        let PreparedWr { wr_id, flags, remote_addr, rkey, .. } = *prepared;
        let sge = if flags & SEND_INLINE != 0 {
            self.batch.inline(prepared)
        } else {
            let [sge] = self.batch.elements(prepared) else { return None };
            *sge
        };
        Some(SingleSgeWr { wr_id, flags, sge, remote_addr, rkey })
    }

    #[inline(always)]
    fn with_wr<R>(&self, _: QpType, work: impl FnOnce(&SendWr<'_>) -> R) -> Result<R> {
        let prepared = self.requests.first().ok_or(Errno::INVAL)?;
        Ok(work(&self.batch.complete(prepared, &mut [Sge::default()])))
    }

    #[inline(always)]
    fn advance(&mut self) {
        self.requests = self.requests.split_first().map_or(&[], |(_, rest)| rest);
    }
}

/// The critical section in which one thread at a time prepares a batch.
#[derive(Debug)]
pub struct WrBatchLock(SpinLock<WrBatch>);

impl WrBatchLock {
    /// The critical section of a queue pair of this type and capacity, for these operations.
    ///
    /// # Errors
    /// EOPNOTSUPP for an operation that the transport service or the device does not have.
    pub fn new(kind: QpType, capacity: QpCap, operations: SendOps) -> Result<Self> {
        if operations.0 & !SendOps::of(kind).0 != 0 {
            return Err(Errno::NOTSUP);
        }
        Ok(Self(SpinLock::new(WrBatch {
            opcodes: operations.opcodes(),
            capacity,
            requests: Vec::new(),
            elements: Vec::new(),
            inline: Vec::new(),
            destinations: Vec::new(),
            binds: Vec::new(),
            error: None,
        })))
    }

    /// Enters the critical section with an empty batch.
    #[inline]
    pub fn enter(&self) {
        let mut batch = self.0.lock();
        batch.clear();
        std::mem::forget(batch);
    }

    /// Runs `work` on the batch.
    ///
    /// # Safety
    /// The calling thread is inside.
    #[inline]
    pub unsafe fn with<R>(&self, work: impl FnOnce(&mut WrBatch) -> R) -> R {
        // SAFETY: no other thread is inside, and no reference outlives this call.
        work(unsafe { &mut *self.0.as_ptr() })
    }

    /// Posts the batch and leaves the critical section.
    ///
    /// # Errors
    /// As [`Qp::post_send`], of any of the requests, or the error of the first invalid call. Then nothing is posted.
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

    /// Leaves the critical section without posting.
    ///
    /// # Safety
    /// The calling thread is inside.
    pub unsafe fn abort(&self) {
        // SAFETY: taken in `enter`.
        unsafe { self.0.force_unlock() };
    }
}

impl Qp {
    /// Posts all requests of a batch, or none.
    #[inline]
    fn post_batch(&self, batch: &WrBatch) -> Result<()> {
        if let Some(error) = batch.error {
            return Err(error);
        }
        let mut rest = BatchRest { batch, requests: &batch.requests };
        let mut send = self.send.queue.lock();
        // All or none: a later request must not turn out invalid when earlier ones are executed already.
        if batch.requests.len() > 1 {
            self.check_batch(&send, rest)?;
        }
        self.post_fast_locked(&mut send, &mut rest);
        if rest.requests.is_empty() { Ok(()) } else { self.post_batch_rest(send, rest) }
    }

    /// Checks that all requests would be accepted now.
    fn check_batch(&self, send: &SendQueue, rest: BatchRest<'_>) -> Result<()> {
        self.takes_sends()?;
        for prepared in rest.requests {
            self.check_form(&rest.batch.complete(prepared, &mut [Sge::default()]))?;
        }
        if self.send_room(send) < rest.requests.len() as u32 { Err(Errno::NOMEM) } else { Ok(()) }
    }

    /// Posts a request that the fast path did not execute, and the requests behind it.
    #[inline(never)]
    fn post_batch_rest(&self, mut send: SpinGuard<'_, SendQueue>, mut rest: BatchRest<'_>) -> Result<()> {
        if rest.batch.requests.len() == 1 {
            self.check_batch(&send, rest)?;
        }
        let (mut room, mut failed) = ([Sge::default()], false);
        while let Some(prepared) = rest.requests.first() {
            let wr = rest.batch.complete(prepared, &mut room);
            if let Some(bind) = wr.bind {
                bind.mw.set_key(bind.key);
            }
            // A request may fail the queue pair; the requests behind it are flushed then.
            if self.states.is_rts() {
                failed |= self.admit(&mut send, &wr) == PostOutcome::QpFailed;
            } else {
                self.admit_outside_rts(&mut send, &wr);
            }
            rest.advance();
            self.post_fast_locked(&mut send, &mut rest);
        }
        let connection = self.connection();
        drop(send);
        if failed {
            self.fail_connection(connection);
        }
        Ok(())
    }
}
