//! The data path: one request executed in the responder's memory (IBTA volume 1, 9.4).

use std::sync::Arc;

use millstream_lockfree::store_u64;

use super::datagram::{self, Elements, Piece, Pieces};
use super::keys::{AccessRight, LocalKeys, RemoteKeys};
use super::remote_memory::{atomic_word, check_access, store_word};
use super::remote_qp::{Receive, RemoteQp, SrqLimit};
use super::{Qp, QpType};
use crate::event::{EVENT_QP_ACCESS_ERR, EVENT_QP_FATAL, EVENT_QP_REQ_ERR, NO_EVENT};
use crate::peer::Peer;
use crate::send_wr::SendWr;
use crate::types::{
    ACCESS_LOCAL_WRITE, ACCESS_REMOTE_ATOMIC, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE, SEND_INLINE,
    SEND_SOLICITED, Sge, WC_FLAG_WITH_IMM, WC_FLAG_WITH_INV, WC_LOC_LEN_ERR, WC_LOC_PROT_ERR, WC_OP_RECV,
    WC_OP_RECV_RDMA_WITH_IMM, WC_REM_ACCESS_ERR, WC_REM_INV_REQ_ERR, WC_REM_OP_ERR, WC_RETRY_EXC_ERR,
    WR_ATOMIC_CMP_AND_SWP, WR_ATOMIC_FETCH_AND_ADD, WR_ATOMIC_WRITE, WR_RDMA_READ, WR_RDMA_WRITE,
    WR_RDMA_WRITE_WITH_IMM, WR_SEND_WITH_IMM, WR_SEND_WITH_INV, total_len, vendor,
};
use millstream_lockfree::cq_ring::PushError;
use millstream_lockfree::cqe::Cqe;

/// The reason why a request was not executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExecError {
    /// The receive queue is empty (RNR).
    ReceiverNotReady,
    /// The peer is not in a state to receive, or does not exist yet.
    PeerNotReady,
    /// The peer's queue pair was destroyed or its process has exited.
    PeerGone,
    /// The request completes with an error.
    Failed {
        status: u32,
        vendor: u32,
        /// The peer's queue pair fails too, with this event.
        peer_event: Option<u32>,
    },
}

/// A lock in the peer's memory was not released in time.
pub(super) const UNRESPONSIVE: ExecError =
    ExecError::Failed { status: WC_RETRY_EXC_ERR, vendor: vendor::PEER_NOT_READY, peer_event: None };

/// The target's queue pair does not allow this operation (table 58, "unsupported or reserved opcode").
const NOT_OFFERED: ExecError = ExecError::Failed {
    status: WC_REM_INV_REQ_ERR,
    vendor: vendor::PERMISSION,
    peer_event: Some(EVENT_QP_REQ_ERR),
};

pub(super) fn failed(status: u32, vendor: u32) -> ExecError {
    ExecError::Failed { status, vendor, peer_event: None }
}

pub(super) fn refused(status: u32, vendor: u32, event: u32) -> ExecError {
    ExecError::Failed { status, vendor, peer_event: Some(event) }
}

/// The responder does not allow the access to its memory.
fn denied(cause: u32) -> ExecError {
    refused(WC_REM_ACCESS_ERR, cause, EVENT_QP_ACCESS_ERR)
}

/// A local element must not be accessed.
pub(super) fn protection(cause: u32) -> ExecError {
    failed(WC_LOC_PROT_ERR, cause)
}

pub(super) struct Transfer<'a> {
    pub(super) qp: &'a Qp,
    pub(super) peer: &'a Arc<Peer>,
    pub(super) target: &'a RemoteQp,
    pub(super) remote: &'a mut RemoteKeys,
    pub(super) local: &'a mut LocalKeys,
}

impl Transfer<'_> {
    /// Executes a request; true if the receiver's completion channel must be signalled.
    #[inline]
    pub(super) fn run(&mut self, wr: &SendWr<'_>) -> Result<bool, ExecError> {
        self.target.current_responder_status(self.qp.qpn).check()?;
        match wr.opcode {
            WR_RDMA_WRITE | WR_RDMA_WRITE_WITH_IMM => self.run_write(wr),
            WR_RDMA_READ => self.read(wr).map(|()| false),
            WR_ATOMIC_CMP_AND_SWP | WR_ATOMIC_FETCH_AND_ADD => self.atomic(wr).map(|()| false),
            WR_ATOMIC_WRITE => self.atomic_write(wr).map(|()| false),
            _ => self.send(wr),
        }
    }

    /// Executes an RDMA WRITE, with immediate data or without it, for a target that was found ready.
    #[inline]
    pub(super) fn run_write(&mut self, wr: &SendWr<'_>) -> Result<bool, ExecError> {
        if wr.opcode == WR_RDMA_WRITE {
            return self.write(wr).map(|()| false);
        }
        if !self.target.has_receive() {
            return Err(ExecError::ReceiverNotReady);
        }
        self.write(wr)?;
        // If another sender took the receive, the data is written again, as after an RNR NAK on hardware.
        let receive = self.take_receive()?;
        self.complete(wr, receive, total_len(wr.sges) as u32)
    }

    /// Checks that the target's queue pair allows the access.
    #[inline(always)]
    fn check_offered(&self, access: u32) -> Result<(), ExecError> {
        if self.target.allows(access) { Ok(()) } else { Err(NOT_OFFERED) }
    }

    #[inline]
    fn write(&mut self, wr: &SendWr<'_>) -> Result<(), ExecError> {
        self.check_offered(ACCESS_REMOTE_WRITE)?;
        let len = total_len(wr.sges);
        if len == 0 {
            // A zero-length transfer checks no key (IBTA volume 1, 9.4.1.1).
            return Ok(());
        }
        let range = (wr.rkey.get(), wr.remote_addr, len);
        let to =
            self.remote.resolve(self.peer, self.target, range, AccessRight::RemoteWrite).map_err(denied)?;
        let mut offset = 0;
        for sge in wr.sges {
            let from =
                local_address(self.qp, self.local, wr.flags, sge, AccessRight::Read).map_err(protection)?;
            // SAFETY: the application's registered or inline memory; the lengths add up to the range's.
            unsafe { to.store(offset, from, sge.length as usize)? };
            offset += u64::from(sge.length);
        }
        Ok(())
    }

    #[inline]
    fn take_receive(&self) -> Result<Receive, ExecError> {
        // An unreliable connection whose receiver lost a completion, because its queue was full or locked, sends on until the
        // receiver has failed. Its next receive would overwrite the record of the lost one.
        if self.qp.kind == QpType::Uc && self.target.shares_receives() && self.target.has_abandoned() {
            return Err(refused(WC_REM_OP_ERR, vendor::CQ_FULL, EVENT_QP_FATAL));
        }
        let (receive, limit) = self.target.take_receive(self.qp.owner_id())?;
        if limit == SrqLimit::Reached {
            self.peer.send(self.target.below_limit());
        }
        Ok(receive)
    }

    /// Executes an atomic operation on eight bytes of the target and returns the old value (9.4.5).
    fn atomic(&mut self, wr: &SendWr<'_>) -> Result<(), ExecError> {
        self.check_offered(ACCESS_REMOTE_ATOMIC)?;
        if !wr.remote_addr.is_multiple_of(8) {
            return Err(refused(WC_REM_INV_REQ_ERR, vendor::BOUNDS, EVENT_QP_REQ_ERR));
        }
        let [sge] = wr.sges else { return Err(failed(WC_LOC_LEN_ERR, vendor::BOUNDS)) };
        if sge.length != 8 {
            return Err(failed(WC_LOC_LEN_ERR, vendor::BOUNDS));
        }
        let to = local_address(self.qp, self.local, 0, sge, AccessRight::LocalWrite).map_err(protection)?;
        let window = self.remote.find(self.peer, wr.rkey.get()).map_err(denied)?;
        check_access(window, self.target, wr.remote_addr, 8, ACCESS_REMOTE_ATOMIC).map_err(denied)?;
        let old = atomic_word(window, self.peer, self.qp.adapter.id.pid, wr)?;
        let range = (wr.rkey.get(), wr.remote_addr, 8);
        self.remote.confirm(self.peer, self.target, range, ACCESS_REMOTE_ATOMIC).map_err(denied)?;
        // SAFETY: eight bytes of the application's registered memory.
        unsafe { store_u64(to, old) };
        Ok(())
    }

    /// Stores eight bytes atomically, after all earlier writes (annex A19, 5.2.1).
    #[cold]
    fn atomic_write(&mut self, wr: &SendWr<'_>) -> Result<(), ExecError> {
        self.check_offered(ACCESS_REMOTE_WRITE)?;
        if !wr.remote_addr.is_multiple_of(8) {
            return Err(refused(WC_REM_INV_REQ_ERR, vendor::BOUNDS, EVENT_QP_REQ_ERR));
        }
        let mut value = [0u8; 8];
        let mut at = 0;
        for sge in wr.sges {
            let from =
                local_address(self.qp, self.local, wr.flags, sge, AccessRight::Read).map_err(protection)?;
            // The lengths added up to eight when they were checked; they may have changed.
            let n = (sge.length as usize).min(value.len() - at);
            // SAFETY: the application's registered (or inline) memory, and inside the value.
            unsafe { value.as_mut_ptr().add(at).copy_from(from, n) };
            at += n;
        }
        let window = self.remote.find(self.peer, wr.rkey.get()).map_err(denied)?;
        check_access(window, self.target, wr.remote_addr, 8, ACCESS_REMOTE_WRITE).map_err(denied)?;
        store_word(window, self.peer, self.qp.adapter.id.pid, wr.remote_addr, value)
    }

    fn read(&mut self, wr: &SendWr<'_>) -> Result<(), ExecError> {
        self.check_offered(ACCESS_REMOTE_READ)?;
        let len = total_len(wr.sges);
        if len == 0 {
            return Ok(());
        }
        let range = (wr.rkey.get(), wr.remote_addr, len);
        let from = self.remote.resolve(self.peer, self.target, range, AccessRight::Read).map_err(denied)?;
        let mut offset = 0;
        for sge in wr.sges {
            let to =
                local_address(self.qp, self.local, 0, sge, AccessRight::LocalWrite).map_err(protection)?;
            // SAFETY: the application's registered memory; the lengths add up to the range's.
            unsafe { from.load(offset, to, sge.length as usize)? };
            offset += u64::from(sge.length);
        }
        self.remote.confirm(self.peer, self.target, range, ACCESS_REMOTE_READ).map_err(denied)
    }

    fn send(&mut self, wr: &SendWr<'_>) -> Result<bool, ExecError> {
        // Local errors are found before a receive is taken that other senders could use.
        let mut pieces = Pieces::new();
        datagram::pieces(self.local, self.qp, wr, &mut pieces)?;
        let receive = self.take_receive()?;
        let mut elements = Elements::new();
        self.target.read_receive(receive, &mut elements);
        let len = total_len(wr.sges);
        if len > total_len(&elements) {
            if self.qp.kind.is_reliable() || self.target.shares_receives() {
                self.fail_receive(receive, WC_LOC_LEN_ERR, vendor::BOUNDS);
            }
            return Err(refused(WC_REM_INV_REQ_ERR, vendor::BOUNDS, NO_EVENT));
        }
        let message = pieces.iter().copied();
        // SAFETY: the pieces are the application's registered (or inline) memory.
        if let Err(fault) = unsafe { scatter(self.remote, self.peer, self.target, message, &elements) } {
            let cause = if let ScatterError::Receiver(cause) = fault { cause } else { vendor::COPY };
            self.fail_receive(receive, WC_LOC_PROT_ERR, cause);
            return Err(fault.into());
        }
        if wr.opcode == WR_SEND_WITH_INV
            && let Err(cause) = self.invalidate(wr.imm)
        {
            // The receiver's error, of class J (IBTA volume 1, 9.9.3).
            self.fail_receive(receive, WC_REM_INV_REQ_ERR, cause);
            return Err(refused(WC_REM_ACCESS_ERR, cause, EVENT_QP_ACCESS_ERR));
        }
        self.complete(wr, receive, len as u32)
    }

    #[inline]
    fn complete(&self, wr: &SendWr<'_>, receive: Receive, byte_len: u32) -> Result<bool, ExecError> {
        let cqe = recv_cqe(wr.opcode, wr.imm, byte_len);
        self.target
            .complete_receive(self.qp.owner_id(), receive, cqe, wr.flags & SEND_SOLICITED != 0)
            .map_err(|why| match why {
                PushError::Full => refused(WC_REM_OP_ERR, vendor::CQ_FULL, EVENT_QP_FATAL),
                PushError::Locked => UNRESPONSIVE,
            })
    }

    /// Invalidates a memory window of type 2 of the target queue pair. No other key can be invalidated (10.6.7.2.6).
    #[cold]
    fn invalidate(&mut self, key: u32) -> Result<(), u32> {
        self.remote.invalidate(self.peer, key, self.target.qpn())
    }

    /// Completes a receive with an error, which fails the receiver's queue pair.
    fn fail_receive(&self, receive: Receive, status: u32, detail: u32) {
        let cqe = Cqe { status: status as u16, opcode: WC_OP_RECV as u16, detail, ..Cqe::default() };
        if let Ok(true) = self.target.complete_receive(self.qp.owner_id(), receive, cqe, true) {
            self.peer.signal(self.target.cq.channel());
        }
    }
}

/// The error of scattering a message.
#[derive(Clone, Copy, Debug)]
pub(super) enum ScatterError {
    /// An error of the receive, with the cause.
    Receiver(u32),
    /// The copy failed.
    Copy(ExecError),
}

impl From<ScatterError> for ExecError {
    fn from(fault: ScatterError) -> Self {
        match fault {
            ScatterError::Receiver(cause) => refused(WC_REM_OP_ERR, cause, NO_EVENT),
            ScatterError::Copy(stop) => stop,
        }
    }
}

/// Copies a message into a receive's elements, which are at least as long.
///
/// # Safety
/// The pieces are readable memory.
#[inline]
pub(super) unsafe fn scatter(
    keys: &mut RemoteKeys,
    peer: &Arc<Peer>,
    target: &RemoteQp,
    message: impl Iterator<Item = Piece>,
    elements: &[Sge],
) -> Result<(), ScatterError> {
    let mut into = elements.iter().filter(|e| e.length != 0);
    let mut room = Sge::default();
    for (mut from, mut left) in message {
        while left != 0 {
            if room.length == 0 {
                room = *into.next().expect("the lengths were compared");
            }
            let n = left.min(room.length);
            let range = (room.lkey, room.addr, u64::from(n));
            let to =
                keys.resolve(peer, target, range, AccessRight::LocalWrite).map_err(ScatterError::Receiver)?;
            // SAFETY: within the piece, and as long as the range.
            unsafe { to.store(0, from, n as usize) }.map_err(ScatterError::Copy)?;
            // SAFETY: within the piece.
            from = unsafe { from.add(n as usize) };
            left -= n;
            room.length -= n;
            // The element may end at the end of the address space.
            room.addr = room.addr.wrapping_add(u64::from(n));
        }
    }
    Ok(())
}

/// Address of a request's element in this process, if the request may access it so. An error is the cause for the
/// completion.
#[inline(always)]
pub(super) fn local_address(
    qp: &Qp,
    keys: &mut LocalKeys,
    flags: u32,
    sge: &Sge,
    access: AccessRight,
) -> Result<*mut u8, u32> {
    if flags & SEND_INLINE != 0 {
        return Ok(sge.addr as *mut u8);
    }
    match keys.known(qp.adapter, sge.addr, sge.length, sge.lkey, access) {
        Some(address) => Ok(address),
        // Passed by its fields: an element whose address is not taken stays in registers.
        None => look_up_local(qp, keys, sge.addr, sge.length, sge.lkey, access),
    }
}

/// Looks an element up whose key is new to the queue pair, or that must not be accessed.
#[cold]
#[inline(never)]
fn look_up_local(
    qp: &Qp,
    keys: &mut LocalKeys,
    addr: u64,
    length: u32,
    lkey: u32,
    access: AccessRight,
) -> Result<*mut u8, u32> {
    let access = if access == AccessRight::Read { 0 } else { ACCESS_LOCAL_WRITE };
    keys.find(qp.adapter, qp.pd.id, addr, length, lkey, access)
}

/// The responder's completion of a message that the opcode of a send request describes.
#[inline(always)]
pub(super) fn recv_cqe(opcode: u32, imm: u32, byte_len: u32) -> Cqe {
    let (imm, wc_flags) = match opcode {
        WR_RDMA_WRITE_WITH_IMM | WR_SEND_WITH_IMM => (imm, WC_FLAG_WITH_IMM),
        WR_SEND_WITH_INV => (imm, WC_FLAG_WITH_INV),
        _ => (0, 0),
    };
    let opcode = if opcode == WR_RDMA_WRITE_WITH_IMM { WC_OP_RECV_RDMA_WITH_IMM } else { WC_OP_RECV };
    Cqe { opcode: opcode as u16, byte_len, imm, wc_flags, ..Cqe::default() }
}
