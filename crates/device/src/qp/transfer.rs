//! The data path: one request executed in the responder's memory (IBTA volume 1, 9.4).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use millstream_lockfree::{copy_in_order, store_u64};
use millstream_shm::vm::{self, Direction};

use super::Qp;
use super::datagram::{self, Elements, Piece, Pieces};
use super::keys::{LocalKeys, Window};
use super::target::{Left, Receive, Target};
use crate::event::{EVENT_QP_ACCESS_ERR, EVENT_QP_FATAL, EVENT_QP_REQ_ERR, NO_EVENT};
use crate::peer::Peer;
use crate::types::{
    ACCESS_LOCAL_WRITE, ACCESS_REMOTE_ATOMIC, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE, SEND_INLINE,
    SEND_SOLICITED, SendWr, Sge, WC_FLAG_WITH_IMM, WC_FLAG_WITH_INV, WC_LOC_LEN_ERR, WC_LOC_PROT_ERR,
    WC_OP_RECV, WC_OP_RECV_RDMA_WITH_IMM, WC_REM_ACCESS_ERR, WC_REM_INV_REQ_ERR, WC_REM_OP_ERR,
    WC_RETRY_EXC_ERR, WR_ATOMIC_CMP_AND_SWP, WR_ATOMIC_FETCH_AND_ADD, WR_ATOMIC_WRITE, WR_RDMA_READ,
    WR_RDMA_WRITE, WR_RDMA_WRITE_WITH_IMM, WR_SEND_WITH_IMM, WR_SEND_WITH_INV, total_len, vendor,
};
use millstream_lockfree::cq_ring::PushError;
use millstream_lockfree::cqe::Cqe;

/// Why a request was not carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExecError {
    /// The receive queue is empty (RNR).
    ReceiverNotReady,
    /// The peer is not ready to receive, or not there yet.
    PeerNotReady,
    /// The peer's queue pair or its process is gone.
    PeerGone,
    /// The request completes with an error.
    Failed {
        status: u32,
        vendor: u32,
        /// What the peer must be told: its queue pair fails too, with this event.
        peer_event: Option<u32>,
    },
}

/// A lease in the peer's memory is not to be had.
pub(super) const UNRESPONSIVE: ExecError =
    ExecError::Failed { status: WC_RETRY_EXC_ERR, vendor: vendor::PEER_NOT_READY, peer_event: None };

/// The target's queue pair is not set up for this operation (table 58, "unsupported or reserved opcode").
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

pub(super) struct Transfer<'a> {
    pub(super) qp: &'a Qp,
    pub(super) peer: &'a Arc<Peer>,
    pub(super) target: &'a Target,
    pub(super) remote: &'a mut super::keys::RemoteKeys,
    pub(super) local: &'a mut LocalKeys,
}

impl Transfer<'_> {
    /// True if the receiver's channel must be signalled.
    #[inline]
    pub(super) fn run(&mut self, wr: &SendWr<'_>) -> Result<bool, ExecError> {
        self.target.readiness(self.qp.qpn).check()?;
        match wr.opcode {
            WR_RDMA_WRITE => self.write(wr).map(|()| false),
            WR_RDMA_WRITE_WITH_IMM => self.write_with_imm(wr),
            WR_RDMA_READ => self.read(wr).map(|()| false),
            WR_ATOMIC_CMP_AND_SWP | WR_ATOMIC_FETCH_AND_ADD => self.atomic(wr).map(|()| false),
            WR_ATOMIC_WRITE => self.atomic_write(wr).map(|()| false),
            _ => self.send(wr),
        }
    }

    #[inline]
    fn write(&mut self, wr: &SendWr<'_>) -> Result<(), ExecError> {
        let denied = |cause| refused(WC_REM_ACCESS_ERR, cause, EVENT_QP_ACCESS_ERR);
        if self.target.entry.access.load(Ordering::Relaxed) & ACCESS_REMOTE_WRITE == 0 {
            return Err(NOT_OFFERED);
        }
        let len = total_len(wr.sges);
        if len == 0 {
            // No key is checked for a transfer of nothing (IBTA volume 1, 9.4.1.1).
            return Ok(());
        }
        let window = self.remote.find(self.peer, wr.rkey).map_err(denied)?;
        admit(window, self.target, wr.remote_addr, len, ACCESS_REMOTE_WRITE).map_err(denied)?;
        let mut at = wr.remote_addr;
        for sge in wr.sges {
            let from = source(self.local, self.qp, wr, sge)?;
            store(window, self.peer, at, from, sge.length as usize)?;
            at += u64::from(sge.length);
        }
        Ok(())
    }

    fn write_with_imm(&mut self, wr: &SendWr<'_>) -> Result<bool, ExecError> {
        if !self.target.has_receive() {
            return Err(ExecError::ReceiverNotReady);
        }
        self.write(wr)?;
        // Another sender may have taken it; the data is then written again, as after a real RNR NAK.
        let receive = self.take_receive()?;
        self.complete(wr, receive, WC_OP_RECV_RDMA_WITH_IMM, total_len(wr.sges) as u32)
    }

    #[inline]
    fn take_receive(&self) -> Result<Receive, ExecError> {
        let (receive, left) = self.target.take_receive(self.qp.party())?;
        if left == Left::BelowLimit {
            self.peer.tell(self.qp.host, self.target.below_limit());
        }
        Ok(receive)
    }

    /// Changes eight bytes at the target and brings back what was there (9.4.5).
    fn atomic(&mut self, wr: &SendWr<'_>) -> Result<(), ExecError> {
        let denied = |cause| refused(WC_REM_ACCESS_ERR, cause, EVENT_QP_ACCESS_ERR);
        if self.target.entry.access.load(Ordering::Relaxed) & ACCESS_REMOTE_ATOMIC == 0 {
            return Err(NOT_OFFERED);
        }
        if !wr.remote_addr.is_multiple_of(8) {
            return Err(refused(WC_REM_INV_REQ_ERR, vendor::BOUNDS, EVENT_QP_REQ_ERR));
        }
        let [sge] = wr.sges else { return Err(failed(WC_LOC_LEN_ERR, vendor::BOUNDS)) };
        if sge.length != 8 {
            return Err(failed(WC_LOC_LEN_ERR, vendor::BOUNDS));
        }
        let to = self
            .local
            .find(self.qp.host, self.qp.pd.id, sge.addr, 8, sge.lkey, ACCESS_LOCAL_WRITE)
            .map_err(|cause| failed(WC_LOC_PROT_ERR, cause))?;
        let window = self.remote.find(self.peer, wr.rkey).map_err(denied)?;
        admit(window, self.target, wr.remote_addr, 8, ACCESS_REMOTE_ATOMIC).map_err(denied)?;
        let old = change_word(window, self.peer, self.qp.host.pid, wr)?;
        // SAFETY: eight bytes of the application's registered memory.
        unsafe { store_u64(to, old) };
        Ok(())
    }

    /// Stores eight bytes at once, after all that was written before them (annex A19, 5.2.1).
    #[cold]
    fn atomic_write(&mut self, wr: &SendWr<'_>) -> Result<(), ExecError> {
        let denied = |cause| refused(WC_REM_ACCESS_ERR, cause, EVENT_QP_ACCESS_ERR);
        if self.target.entry.access.load(Ordering::Relaxed) & ACCESS_REMOTE_WRITE == 0 {
            return Err(NOT_OFFERED);
        }
        if !wr.remote_addr.is_multiple_of(8) {
            return Err(refused(WC_REM_INV_REQ_ERR, vendor::BOUNDS, EVENT_QP_REQ_ERR));
        }
        let mut value = [0u8; 8];
        let mut at = 0;
        for sge in wr.sges {
            let from = source(self.local, self.qp, wr, sge)?;
            // Eight bytes in all were posted; what is counted here must be believed by nobody.
            let n = (sge.length as usize).min(value.len() - at);
            // SAFETY: the application's registered (or inline) memory, and inside the value.
            unsafe { value.as_mut_ptr().add(at).copy_from(from, n) };
            at += n;
        }
        let window = self.remote.find(self.peer, wr.rkey).map_err(denied)?;
        admit(window, self.target, wr.remote_addr, 8, ACCESS_REMOTE_WRITE).map_err(denied)?;
        set_word(window, self.peer, self.qp.host.pid, wr.remote_addr, value)
    }

    fn read(&mut self, wr: &SendWr<'_>) -> Result<(), ExecError> {
        let denied = |cause| refused(WC_REM_ACCESS_ERR, cause, EVENT_QP_ACCESS_ERR);
        if self.target.entry.access.load(Ordering::Relaxed) & ACCESS_REMOTE_READ == 0 {
            return Err(NOT_OFFERED);
        }
        let len = total_len(wr.sges);
        if len == 0 {
            return Ok(());
        }
        let window = self.remote.find(self.peer, wr.rkey).map_err(denied)?;
        admit(window, self.target, wr.remote_addr, len, ACCESS_REMOTE_READ).map_err(denied)?;
        let mut at = wr.remote_addr;
        for sge in wr.sges {
            let to = self
                .local
                .find(self.qp.host, self.qp.pd.id, sge.addr, sge.length, sge.lkey, ACCESS_LOCAL_WRITE)
                .map_err(|cause| failed(WC_LOC_PROT_ERR, cause))?;
            load(window, self.peer, at, to, sge.length as usize)?;
            at += u64::from(sge.length);
        }
        Ok(())
    }

    fn send(&mut self, wr: &SendWr<'_>) -> Result<bool, ExecError> {
        // Our own faults are found before a request is taken that others could use.
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
        if let Err(fault) = unsafe { scatter(self.remote, self.peer, self.target.pd, message, &elements) } {
            let cause = if let Fault::Receiver(cause) = fault { cause } else { vendor::COPY };
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
        self.complete(wr, receive, WC_OP_RECV, len as u32)
    }

    #[inline]
    fn complete(
        &self,
        wr: &SendWr<'_>,
        receive: Receive,
        opcode: u32,
        byte_len: u32,
    ) -> Result<bool, ExecError> {
        let (imm, wc_flags) = match wr.opcode {
            WR_RDMA_WRITE_WITH_IMM | WR_SEND_WITH_IMM => (wr.imm, WC_FLAG_WITH_IMM),
            WR_SEND_WITH_INV => (wr.imm, WC_FLAG_WITH_INV),
            _ => (0, 0),
        };
        let cqe = Cqe { opcode: opcode as u16, byte_len, imm, wc_flags, ..Cqe::default() };
        self.target.complete_receive(self.qp.party(), receive, cqe, wr.flags & SEND_SOLICITED != 0).map_err(
            |why| match why {
                PushError::Full => refused(WC_REM_OP_ERR, vendor::CQ_FULL, EVENT_QP_FATAL),
                PushError::Locked => UNRESPONSIVE,
            },
        )
    }

    /// Ends the life of a memory window of type 2 of the target queue pair; nothing else can be
    /// invalidated (10.6.7.2.6).
    #[cold]
    fn invalidate(&mut self, key: u32) -> Result<(), u32> {
        let window = self.remote.find(self.peer, key)?;
        if !window.belongs_to(self.target.qpn()) {
            return Err(vendor::DOMAIN);
        }
        if window.invalidate() { Ok(()) } else { Err(vendor::NO_KEY) }
    }

    /// The receiver's own request was at fault: it completes with an error, and its queue pair fails.
    fn fail_receive(&self, receive: Receive, status: u32, detail: u32) {
        let cqe = Cqe { status: status as u16, opcode: WC_OP_RECV as u16, detail, ..Cqe::default() };
        if let Ok(true) = self.target.complete_receive(self.qp.party(), receive, cqe, true) {
            self.peer.signal(self.target.cq.channel());
        }
    }
}

/// Whose fault it is that a message could not be placed.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fault {
    /// The receiver's request, with the cause.
    Receiver(u32),
    /// The way there.
    Copy(ExecError),
}

impl From<Fault> for ExecError {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::Receiver(cause) => refused(WC_REM_OP_ERR, cause, NO_EVENT),
            Fault::Copy(stop) => stop,
        }
    }
}

/// Copies a message into a receive request's elements, which are at least as long.
///
/// # Safety
/// The pieces are readable memory.
#[inline]
pub(super) unsafe fn scatter(
    keys: &mut super::keys::RemoteKeys,
    peer: &Arc<Peer>,
    pd: u32,
    message: impl Iterator<Item = Piece>,
    elements: &[Sge],
) -> Result<(), Fault> {
    let mut into = elements.iter().filter(|e| e.length != 0);
    let mut room = Sge::default();
    for (mut from, mut left) in message {
        while left != 0 {
            if room.length == 0 {
                room = *into.next().expect("the lengths were compared");
            }
            let n = left.min(room.length);
            let window = keys.find(peer, room.lkey).map_err(Fault::Receiver)?;
            check(window, pd, room.addr, u64::from(n), ACCESS_LOCAL_WRITE).map_err(Fault::Receiver)?;
            store(window, peer, room.addr, from, n as usize).map_err(Fault::Copy)?;
            // SAFETY: within the piece.
            from = unsafe { from.add(n as usize) };
            left -= n;
            room.length -= n;
            // The element's last byte may be the last of the address space.
            room.addr = room.addr.wrapping_add(u64::from(n));
        }
    }
    Ok(())
}

/// Where a request's element lies in this process.
#[inline]
pub(super) fn source(
    local: &mut LocalKeys,
    qp: &Qp,
    wr: &SendWr<'_>,
    sge: &Sge,
) -> Result<*mut u8, ExecError> {
    if wr.flags & SEND_INLINE != 0 {
        return Ok(sge.addr as *mut u8);
    }
    local
        .find(qp.host, qp.pd.id, sge.addr, sge.length, sge.lkey, 0)
        .map_err(|cause| failed(WC_LOC_PROT_ERR, cause))
}

/// Changes the aligned eight bytes at `wr.remote_addr`, which were checked, as the request says; what was there
/// before. `me` is this process.
pub(super) fn change_word(window: &Window, peer: &Peer, me: u32, wr: &SendWr<'_>) -> Result<u64, ExecError> {
    let word = window.map_word(wr.remote_addr);
    Ok(match (word, wr.opcode) {
        (Some(word), WR_ATOMIC_CMP_AND_SWP) => word
            .compare_exchange(wr.compare_add, wr.swap, Ordering::AcqRel, Ordering::Acquire)
            .unwrap_or_else(|old| old),
        (Some(word), _) => word.fetch_add(wr.compare_add, Ordering::AcqRel),
        (None, _) => change_by_copies(window, peer, me, wr)?,
    })
}

/// The same in memory that only some initiators can map: one initiator at a time.
#[cold]
fn change_by_copies(window: &Window, peer: &Peer, me: u32, wr: &SendWr<'_>) -> Result<u64, ExecError> {
    let lock = peer.atomics().ok_or(failed(WC_RETRY_EXC_ERR, vendor::PEER_GONE))?;
    let _guard = lock.lock(me).ok_or(UNRESPONSIVE)?;
    let mut old = [0u8; 8];
    load(window, peer, wr.remote_addr, old.as_mut_ptr(), 8)?;
    let old = u64::from_ne_bytes(old);
    let new = match wr.opcode {
        WR_ATOMIC_CMP_AND_SWP if old != wr.compare_add => return Ok(old),
        WR_ATOMIC_CMP_AND_SWP => wr.swap,
        _ => old.wrapping_add(wr.compare_add),
    };
    store(window, peer, wr.remote_addr, new.to_ne_bytes().as_ptr(), 8)?;
    Ok(old)
}

/// Stores the aligned eight bytes at `at`, which were checked, at once. `me` is this process.
pub(super) fn set_word(
    window: &Window,
    peer: &Peer,
    me: u32,
    at: u64,
    value: [u8; 8],
) -> Result<(), ExecError> {
    if let Some(word) = window.map_word(at) {
        word.store(u64::from_ne_bytes(value), Ordering::Release);
        return Ok(());
    }
    // Not between the two copies of an atomic operation of somebody else's.
    let lock = peer.atomics().ok_or(failed(WC_RETRY_EXC_ERR, vendor::PEER_GONE))?;
    let _guard = lock.lock(me).ok_or(UNRESPONSIVE)?;
    store(window, peer, at, value.as_ptr(), 8)
}

/// Whether the target's queue pair lets its peer use a part of a region or window.
#[inline]
pub(super) fn admit(window: &Window, target: &Target, at: u64, len: u64, access: u32) -> Result<(), u32> {
    check(window, target.pd, at, len, access)
        .or_else(|cause| admit_window(window, target, at, len, access, cause))
}

/// A memory window of type 2 asks for its queue pair rather than for a domain.
#[cold]
fn admit_window(
    window: &Window,
    target: &Target,
    at: u64,
    len: u64,
    access: u32,
    cause: u32,
) -> Result<(), u32> {
    if window.belongs_to(target.qpn()) { check(window, 0, at, len, access) } else { Err(cause) }
}

#[inline]
fn check(window: &Window, pd: u32, at: u64, len: u64, access: u32) -> Result<(), u32> {
    if window.pd != pd {
        Err(vendor::DOMAIN)
    } else if window.access & access != access {
        Err(vendor::PERMISSION)
    } else if !window.contains(at, len) {
        Err(vendor::BOUNDS)
    } else {
        Ok(())
    }
}

/// Copies `len` bytes from this process to `at` in the region; the range was checked.
#[inline]
pub(super) fn store(
    window: &Window,
    peer: &Peer,
    at: u64,
    from: *const u8,
    len: usize,
) -> Result<(), ExecError> {
    if window.writable && window.maps(at, len as u64) {
        // SAFETY: the destination is mapped for stores and cannot shrink; the source is the application's
        // registered (or inline) memory.
        unsafe { copy_in_order(window.base.add((at - window.map_start) as usize), from, len) };
        return Ok(());
    }
    partly(window, peer, at, from.cast_mut(), len, Direction::Write)
}

/// Copies `len` bytes from `at` in the region to this process; the range was checked.
#[inline]
pub(super) fn load(window: &Window, peer: &Peer, at: u64, to: *mut u8, len: usize) -> Result<(), ExecError> {
    if window.maps(at, len as u64) {
        // SAFETY: as in `store`.
        unsafe { copy_in_order(to, window.base.add((at - window.map_start) as usize), len) };
        return Ok(());
    }
    partly(window, peer, at, to, len, Direction::Read)
}

/// The same where not all of the range is mapped: up to three pieces, the outer ones through the kernel.
#[cold]
fn partly(
    window: &Window,
    peer: &Peer,
    at: u64,
    local: *mut u8,
    len: usize,
    direction: Direction,
) -> Result<(), ExecError> {
    if window.forgets() && direction == Direction::Write {
        return Ok(());
    }
    let end = at + len as u64;
    let (from, to) = (window.map_start.clamp(at, end), window.map_end.clamp(at, end));
    let usable = from < to && (window.writable || direction == Direction::Read);
    let (from, to) = if usable { (from, to) } else { (end, end) };
    for (start, stop, mapped) in [(at, from, false), (from, to, true), (to, end, false)] {
        if start == stop {
            continue;
        }
        let n = (stop - start) as usize;
        // SAFETY: within the local range that the caller vouches for.
        let here = unsafe { local.add((start - at) as usize) };
        if mapped {
            // SAFETY: inside the mapped part.
            unsafe {
                let there = window.base.add((start - window.map_start) as usize);
                match direction {
                    Direction::Write => copy_in_order(there, here, n),
                    Direction::Read => copy_in_order(here, there, n),
                }
            }
            continue;
        }
        let piece = vm::Piece { base: here as u64, len: n as u64 };
        let remote = vm::Piece { base: window.va(start), len: n as u64 };
        // SAFETY: the local piece is the application's registered (or inline) memory.
        unsafe { vm::copy(peer.pid, &[piece], remote, direction) }.map_err(|error| {
            if error.raw_os_error() == Some(libc::ESRCH) {
                failed(WC_RETRY_EXC_ERR, vendor::PEER_GONE)
            } else {
                failed(WC_REM_OP_ERR, vendor::COPY)
            }
        })?;
    }
    Ok(())
}
