//! The data path: a request carried out in the peer's memory.
//!
//! The initiator announces itself in the target's entry, checks, copies, completes, and withdraws.
//! Whoever takes memory or queues away waits for the withdrawal, so that nothing is touched after
//! `ibv_dereg_mr` or `ibv_destroy_qp` returned.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use millstream_shm::barrier;
use millstream_shm::vm::{self, Direction, Piece};

use super::Qp;
use super::keys::{LocalKeys, Window};
use super::send::SendQueue;
use super::target::{Readiness, Target};
use crate::caps::MAX_SGE;
use crate::cq::CqFull;
use crate::event::{EVENT_QP_ACCESS_ERR, EVENT_QP_REQ_ERR};
use crate::greeting::{Message, Op};
use crate::layout::Cqe;
use crate::peer::Peer;
use crate::types::{
    ACCESS_LOCAL_WRITE, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE, SEND_INLINE, SEND_SOLICITED, SendWr, Sge,
    WC_FLAG_WITH_IMM, WC_LOC_LEN_ERR, WC_LOC_PROT_ERR, WC_OP_RECV, WC_OP_RECV_RDMA_WITH_IMM,
    WC_REM_ACCESS_ERR, WC_REM_INV_REQ_ERR, WC_REM_OP_ERR, WC_RETRY_EXC_ERR, WR_RDMA_READ, WR_RDMA_WRITE,
    WR_RDMA_WRITE_WITH_IMM, WR_SEND_WITH_IMM, total_len, vendor,
};

/// Why a request was not carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// The receive queue is empty (RNR).
    NoReceive,
    /// The peer is not ready to receive, or not there yet.
    NotReady,
    /// The request completes with an error.
    Failed {
        status: u32,
        vendor: u32,
        /// What the peer must be told: its queue pair fails too, with this event.
        peer_event: Option<u32>,
    },
}

/// The peer's queue pair fails without an event; its completion tells the story.
pub(super) const NO_EVENT: u32 = u32::MAX;

fn failed(status: u32, vendor: u32) -> Stop {
    Stop::Failed { status, vendor, peer_event: None }
}

fn refused(status: u32, vendor: u32, event: u32) -> Stop {
    Stop::Failed { status, vendor, peer_event: Some(event) }
}

impl SendQueue {
    /// Carries out one request, whole.
    #[inline]
    pub(super) fn execute(&mut self, qp: &Qp, wr: &SendWr<'_>) -> Result<(), Stop> {
        if self.target.is_none() {
            self.bind(qp)?;
        }
        let (Some(peer), Some(target)) = (&self.peer, &self.target) else { return Err(Stop::NotReady) };
        if !peer.alive() {
            return Err(failed(WC_RETRY_EXC_ERR, vendor::PEER_GONE));
        }
        let busy = &target.entry.busy;
        self.announced = self.announced.wrapping_add(1) | 1;
        busy.store(self.announced, Ordering::Relaxed);
        barrier::light(peer.asymmetric);
        let mut transfer =
            Transfer { qp, peer, target, remote: &mut self.remote_keys, local: &mut self.local_keys };
        let result = transfer.run(wr);
        self.announced = self.announced.wrapping_add(1);
        busy.store(self.announced, Ordering::Release);
        match result {
            Ok(false) => Ok(()),
            Ok(true) => {
                peer.signal(target.cq.ring.channel.load(Ordering::Relaxed));
                Ok(())
            }
            Err(stop) => {
                if let Stop::Failed { peer_event: Some(event), .. } = stop {
                    peer.tell(qp.host, Message::new(Op::Fault, [self.dest_qpn, qp.qpn, event]));
                }
                Err(stop)
            }
        }
    }

    #[cold]
    fn bind(&mut self, qp: &Qp) -> Result<(), Stop> {
        if self.peer.is_none() {
            if !self.on_this_host {
                return Err(Stop::NotReady);
            }
            self.peer = Some(qp.host.peer_of(self.dest_qpn).map_err(|_| Stop::NotReady)?);
        }
        let peer = self.peer.as_ref().expect("just set");
        let gone = failed(WC_RETRY_EXC_ERR, vendor::PEER_GONE);
        let target = Target::bind(peer, self.dest_qpn).ok_or(gone)?;
        self.announced = target.entry.busy.load(Ordering::Relaxed) & !1;
        self.target = Some(target);
        Ok(())
    }
}

struct Transfer<'a> {
    qp: &'a Qp,
    peer: &'a Arc<Peer>,
    target: &'a Target,
    remote: &'a mut super::keys::RemoteKeys,
    local: &'a mut LocalKeys,
}

impl Transfer<'_> {
    /// True if the receiver's channel must be signalled.
    #[inline]
    fn run(&mut self, wr: &SendWr<'_>) -> Result<bool, Stop> {
        match self.target.readiness(self.qp.qpn) {
            Readiness::Ready => {}
            Readiness::NotYet => return Err(Stop::NotReady),
            Readiness::Gone => return Err(failed(WC_RETRY_EXC_ERR, vendor::PEER_GONE)),
        }
        match wr.opcode {
            WR_RDMA_WRITE => self.write(wr).map(|()| false),
            WR_RDMA_WRITE_WITH_IMM => self.write_with_imm(wr),
            WR_RDMA_READ => self.read(wr).map(|()| false),
            _ => self.send(wr),
        }
    }

    #[inline]
    fn write(&mut self, wr: &SendWr<'_>) -> Result<(), Stop> {
        let denied = |cause| refused(WC_REM_ACCESS_ERR, cause, EVENT_QP_ACCESS_ERR);
        if self.target.entry.access.load(Ordering::Relaxed) & ACCESS_REMOTE_WRITE == 0 {
            return Err(denied(vendor::PERMISSION));
        }
        let len = total_len(wr.sges);
        if len == 0 {
            // No key is checked for a transfer of nothing (IBTA volume 1, 9.4.1.1).
            return Ok(());
        }
        let window = self.remote.find(self.peer, wr.rkey).map_err(denied)?;
        check(window, self.target.pd, wr.remote_addr, len, ACCESS_REMOTE_WRITE).map_err(denied)?;
        let mut at = wr.remote_addr;
        for sge in wr.sges {
            let from = source(self.local, self.qp, wr, sge)?;
            store(window, self.peer, at, from, sge.length as usize)?;
            at += u64::from(sge.length);
        }
        Ok(())
    }

    fn write_with_imm(&mut self, wr: &SendWr<'_>) -> Result<bool, Stop> {
        let sequence = self.target.next_receive().ok_or(Stop::NoReceive)?;
        self.write(wr)?;
        self.complete(wr, sequence, WC_OP_RECV_RDMA_WITH_IMM, total_len(wr.sges) as u32)
    }

    fn read(&mut self, wr: &SendWr<'_>) -> Result<(), Stop> {
        let denied = |cause| refused(WC_REM_ACCESS_ERR, cause, EVENT_QP_ACCESS_ERR);
        if self.target.entry.access.load(Ordering::Relaxed) & ACCESS_REMOTE_READ == 0 {
            return Err(denied(vendor::PERMISSION));
        }
        let len = total_len(wr.sges);
        if len == 0 {
            return Ok(());
        }
        let window = self.remote.find(self.peer, wr.rkey).map_err(denied)?;
        check(window, self.target.pd, wr.remote_addr, len, ACCESS_REMOTE_READ).map_err(denied)?;
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

    fn send(&mut self, wr: &SendWr<'_>) -> Result<bool, Stop> {
        let sequence = self.target.next_receive().ok_or(Stop::NoReceive)?;
        let mut elements = [Sge::default(); MAX_SGE as usize];
        let n = self.target.read_receive(sequence, &mut elements);
        let elements = &elements[..n];
        let len = total_len(wr.sges);
        if len > total_len(elements) {
            self.fail_receive(sequence, WC_LOC_LEN_ERR, 0);
            return Err(refused(WC_REM_INV_REQ_ERR, vendor::BOUNDS, NO_EVENT));
        }
        if let Err((stop, receiver_fault)) = self.scatter(wr, elements) {
            if let Some(cause) = receiver_fault {
                self.fail_receive(sequence, WC_LOC_PROT_ERR, cause);
            }
            return Err(stop);
        }
        self.complete(wr, sequence, WC_OP_RECV, len as u32)
    }

    /// Copies the request's elements into the receiver's. A fault of the receiver comes with its cause.
    fn scatter(&mut self, wr: &SendWr<'_>, elements: &[Sge]) -> Result<(), (Stop, Option<u32>)> {
        let mut into = elements.iter().filter(|e| e.length != 0);
        let mut room = Sge::default();
        for sge in wr.sges {
            let mut from = source(self.local, self.qp, wr, sge).map_err(|stop| (stop, None))?.cast_const();
            let mut left = sge.length;
            while left != 0 {
                if room.length == 0 {
                    room = *into.next().expect("the lengths were compared");
                }
                let n = left.min(room.length);
                let fault = |cause| (refused(WC_REM_OP_ERR, cause, NO_EVENT), Some(cause));
                let window = self.remote.find(self.peer, room.lkey).map_err(fault)?;
                check(window, self.target.pd, room.addr, u64::from(n), ACCESS_LOCAL_WRITE).map_err(fault)?;
                store(window, self.peer, room.addr, from, n as usize).map_err(|stop| (stop, None))?;
                // SAFETY: within the element that was checked.
                from = unsafe { from.add(n as usize) };
                left -= n;
                room.length -= n;
                // The element's last byte may be the last of the address space.
                room.addr = room.addr.wrapping_add(u64::from(n));
            }
        }
        Ok(())
    }

    #[inline]
    fn complete(&self, wr: &SendWr<'_>, sequence: u32, opcode: u32, byte_len: u32) -> Result<bool, Stop> {
        let with_imm = matches!(wr.opcode, WR_RDMA_WRITE_WITH_IMM | WR_SEND_WITH_IMM);
        let cqe = Cqe {
            sequence,
            opcode,
            byte_len,
            imm: if with_imm { wr.imm } else { 0 },
            wc_flags: if with_imm { WC_FLAG_WITH_IMM } else { 0 },
            ..Cqe::default()
        };
        self.target
            .complete_receive(self.qp.host.pid, cqe, wr.flags & SEND_SOLICITED != 0)
            .map_err(|CqFull| refused(WC_REM_OP_ERR, vendor::CQ_FULL, EVENT_QP_REQ_ERR))
    }

    /// The receiver's own request was at fault: it completes with an error, and its queue pair fails.
    fn fail_receive(&self, sequence: u32, status: u32, vendor_err: u32) {
        let cqe = Cqe { sequence, status, opcode: WC_OP_RECV, vendor_err, ..Cqe::default() };
        if let Ok(true) = self.target.complete_receive(self.qp.host.pid, cqe, true) {
            self.peer.signal(self.target.cq.ring.channel.load(Ordering::Relaxed));
        }
    }
}

/// Where a request's element lies in this process.
#[inline]
fn source(local: &mut LocalKeys, qp: &Qp, wr: &SendWr<'_>, sge: &Sge) -> Result<*mut u8, Stop> {
    if wr.flags & SEND_INLINE != 0 {
        return Ok(sge.addr as *mut u8);
    }
    local
        .find(qp.host, qp.pd.id, sge.addr, sge.length, sge.lkey, 0)
        .map_err(|cause| failed(WC_LOC_PROT_ERR, cause))
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
fn store(window: &Window, peer: &Peer, at: u64, from: *const u8, len: usize) -> Result<(), Stop> {
    if window.maps(at, len as u64) {
        // SAFETY: the destination is mapped and cannot shrink; the source is the application's
        // registered (or inline) memory.
        unsafe { copy_in_order(window.base.add((at - window.map_start) as usize), from, len) };
        return Ok(());
    }
    partly(window, peer, at, from.cast_mut(), len, Direction::Write)
}

/// Copies `len` bytes from `at` in the region to this process; the range was checked.
#[inline]
fn load(window: &Window, peer: &Peer, at: u64, to: *mut u8, len: usize) -> Result<(), Stop> {
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
) -> Result<(), Stop> {
    let end = at + len as u64;
    let (from, to) = (window.map_start.clamp(at, end), window.map_end.clamp(at, end));
    let (from, to) = if from < to { (from, to) } else { (end, end) };
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
        let piece = Piece { base: here as u64, len: n as u64 };
        let remote = Piece { base: window.va(start), len: n as u64 };
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

/// Copies so that the last bytes become visible last: receivers that watch the end of a buffer
/// rely on it with every adapter, though the specification (9.5, o9-20) does not promise it.
///
/// # Safety
/// Both ranges must be valid for `len` bytes.
#[inline]
unsafe fn copy_in_order(to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: all accesses lie in the two ranges.
    unsafe {
        match len {
            8 => to.cast::<u64>().write_volatile_unaligned(from.cast::<u64>().read_unaligned()),
            0..8 => {
                for i in 0..len {
                    to.add(i).write_volatile(from.add(i).read());
                }
            }
            _ => {
                let body = len - 8;
                let last = from.add(body).cast::<u64>().read_unaligned();
                std::ptr::copy(from, to, body);
                fence(Ordering::Release);
                to.add(body).cast::<u64>().write_volatile_unaligned(last);
            }
        }
    }
}

trait WriteVolatileUnaligned {
    /// # Safety
    /// The pointer must be valid for writes.
    unsafe fn write_volatile_unaligned(self, value: u64);
}

impl WriteVolatileUnaligned for *mut u64 {
    #[inline(always)]
    unsafe fn write_volatile_unaligned(self, value: u64) {
        #[repr(C, packed)]
        struct Unaligned(u64);
        // SAFETY: the caller vouches for the range; the packed type needs no alignment.
        unsafe { self.cast::<Unaligned>().write_volatile(Unaligned(value)) }
    }
}
