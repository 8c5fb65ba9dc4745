//! The transport machine's access to the application's memory and receive queue.

use std::collections::VecDeque;

use millstream_lockfree::copy_in_order;
use millstream_proto::{Access, Atomic, DeliveryError, Memory, NakReason, ReceiveId, Status, WorkId};
use millstream_wire::{Rkey, Srqn};

use super::responder_memory::{ResponderMemory, skip};
use crate::qp::Qp;
use crate::qp::keys::LocalKeys;
use crate::qp::send::PendingWr;
use crate::qp::transfer::ExecError;
use crate::send_wr::SendWr;
use crate::types::{
    ACCESS_LOCAL_WRITE, ACCESS_REMOTE_ATOMIC, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE, SEND_INLINE,
    WC_LOC_PROT_ERR, WC_LOC_QP_OP_ERR, WC_MW_BIND_ERR, WR_ATOMIC_CMP_AND_SWP, WR_ATOMIC_FETCH_AND_ADD,
};

/// A request, and the status with which it fails in its turn if its form is invalid.
#[derive(Debug)]
struct InflightWr {
    request: PendingWr,
    refused: Option<Status>,
}

/// Requests that are posted and not complete, the oldest first.
#[derive(Debug, Default)]
pub(super) struct InflightWrs {
    list: VecDeque<InflightWr>,
    /// Identifier of the oldest request.
    first: u64,
}

impl InflightWrs {
    /// Adds a request; its identifier.
    pub(super) fn add(&mut self, request: PendingWr) -> WorkId {
        self.list.push_back(InflightWr { request, refused: None });
        WorkId(self.first + self.list.len() as u64 - 1)
    }

    /// Lets the request that was added last fail in its turn.
    pub(super) fn refuse_last(&mut self, status: Status) {
        if let Some(last) = self.list.back_mut() {
            last.refused = Some(status);
        }
    }

    /// Removes the oldest request: requests complete in order.
    pub(super) fn finish(&mut self, id: WorkId) -> Option<PendingWr> {
        debug_assert_eq!(id.0, self.first);
        self.first += 1;
        self.list.pop_front().map(|inflight| inflight.request)
    }

    fn get(&self, id: WorkId) -> Option<&PendingWr> {
        self.inflight(id).map(|inflight| &inflight.request)
    }

    fn inflight(&self, id: WorkId) -> Option<&InflightWr> {
        self.list.get(id.0.checked_sub(self.first)? as usize)
    }
}

/// A queue pair's memory for one call of the transport machine.
pub(super) struct MemoryAdapter<'a> {
    pub(super) qp: &'a Qp,
    pub(super) memory: &'a mut ResponderMemory,
    pub(super) keys: &'a mut LocalKeys,
    pub(super) inflight: &'a InflightWrs,
}

fn status(error: ExecError) -> Status {
    match error {
        ExecError::Failed { status: WC_LOC_PROT_ERR, .. } => Status::LocalProtection,
        ExecError::Failed { status: WC_MW_BIND_ERR, .. } => Status::Bind,
        ExecError::Failed { status: WC_LOC_QP_OP_ERR, .. } => Status::LocalOperation,
        _ => Status::LocalLength,
    }
}

impl MemoryAdapter<'_> {
    /// Runs `copy` on each piece of a request's memory from `offset` on: its address, and which part of the `len` bytes
    /// it is.
    #[inline]
    fn pieces(
        &mut self,
        id: WorkId,
        offset: u32,
        len: usize,
        access: u32,
        mut copy: impl FnMut(*mut u8, usize, usize),
    ) -> Result<(), Status> {
        let request = self.inflight.get(id).ok_or(Status::LocalOperation)?.request();
        let mut done = 0;
        let one = [crate::types::Sge::default()];
        let rest;
        let elements = match request.sges {
            // One element needs no list.
            [element] if u64::from(offset) < u64::from(element.length) => {
                let mut one = one;
                one[0] = crate::types::Sge {
                    addr: element.addr.wrapping_add(u64::from(offset)),
                    length: element.length - offset,
                    ..*element
                };
                rest = one.into_iter().collect();
                &rest
            }
            elements => {
                rest = skip(elements, u64::from(offset));
                &rest
            }
        };
        for element in elements {
            let n = (element.length as usize).min(len - done);
            if n == 0 {
                break;
            }
            let at = if request.flags & SEND_INLINE != 0 {
                element.addr as *mut u8
            } else {
                let (adapter, pd) = (self.qp.adapter, self.qp.pd.id);
                let found = self.keys.find(adapter, pd, element.addr, n as u32, element.lkey, access);
                found.map_err(|_| Status::LocalProtection)?
            };
            copy(at, done, n);
            done += n;
        }
        if done == len { Ok(()) } else { Err(Status::LocalLength) }
    }
}

/// The access flag of a queue pair.
fn flag(access: Access) -> u32 {
    match access {
        Access::Read => ACCESS_REMOTE_READ,
        Access::Write => ACCESS_REMOTE_WRITE,
        Access::Atomic => ACCESS_REMOTE_ATOMIC,
    }
}

impl Memory for MemoryAdapter<'_> {
    #[inline]
    fn gather(&mut self, id: WorkId, offset: u32, into: &mut [u8]) -> Result<(), Status> {
        let (to, len) = (into.as_mut_ptr(), into.len());
        self.pieces(id, offset, len, 0, |from, at, n| {
            // SAFETY: the application's registered (or inline) memory, and inside `into`.
            unsafe { to.add(at).copy_from_nonoverlapping(from, n) };
        })
    }

    #[inline]
    fn scatter(&mut self, id: WorkId, offset: u32, from: &[u8]) -> Result<(), Status> {
        let (from, len) = (from.as_ptr(), from.len());
        self.pieces(id, offset, len, ACCESS_LOCAL_WRITE, |to, at, n| {
            // SAFETY: the application's registered memory, and inside `from`.
            unsafe { copy_in_order(to, from.add(at), n) };
        })
    }

    fn shared_queue(&mut self, id: WorkId) -> Srqn {
        self.inflight.get(id).map_or_else(Srqn::default, |request| request.request().remote_srqn)
    }

    fn select(&mut self, queue: Srqn) -> Result<(), NakReason> {
        self.memory.select(queue)
    }

    fn local(&mut self, id: WorkId) -> Result<(), Status> {
        let InflightWr { request, refused } = self.inflight.inflight(id).ok_or(Status::LocalOperation)?;
        match *refused {
            Some(status) => Err(status),
            None => self.qp.execute_local_op_on_wire(&request.request()).map_err(status),
        }
    }

    #[inline]
    fn take_receive(&mut self) -> Option<ReceiveId> {
        self.memory.take_receive().then_some(ReceiveId(0))
    }

    #[inline]
    fn deliver(&mut self, _id: ReceiveId, offset: u32, from: &[u8]) -> Result<(), DeliveryError> {
        self.memory.fill(offset.into(), from)
    }

    fn allows(&mut self, access: Access) -> Result<(), NakReason> {
        self.memory.offers(flag(access))
    }

    fn check(&mut self, rkey: Rkey, va: u64, len: u32, access: Access) -> Result<(), NakReason> {
        self.memory.check(flag(access), rkey.get(), va, len.into())
    }

    #[inline]
    fn write(&mut self, rkey: Rkey, va: u64, from: &[u8]) -> Result<(), NakReason> {
        self.memory.write(rkey.get(), va, from)
    }

    fn write_atomically(&mut self, rkey: Rkey, va: u64, bytes: [u8; 8]) -> Result<(), NakReason> {
        self.memory.write_word(rkey.get(), va, bytes)
    }

    #[inline]
    fn read(&mut self, rkey: Rkey, va: u64, into: &mut [u8]) -> Result<(), NakReason> {
        self.memory.read(rkey.get(), va, into)
    }

    fn atomic(&mut self, rkey: Rkey, va: u64, operation: Atomic) -> Result<u64, NakReason> {
        let wr = SendWr { remote_addr: va, rkey, ..SendWr::default() };
        self.memory.change(&match operation {
            Atomic::CompareSwap { compare, swap } => {
                SendWr { opcode: WR_ATOMIC_CMP_AND_SWP, compare_add: compare, swap, ..wr }
            }
            Atomic::FetchAdd(add) => SendWr { opcode: WR_ATOMIC_FETCH_AND_ADD, compare_add: add, ..wr },
        })
    }

    fn invalidate(&mut self, rkey: Rkey) -> Result<(), NakReason> {
        self.memory.invalidate(rkey.get())
    }
}
