//! The fast path: frequent requests with the fewest instructions.
//!
//! Most requests are RDMA WRITEs, READs and SENDs of one element. They use a reliable connection that was
//! used before, and mapped memory. Earlier requests have looked up the target and the memory key. Two words
//! show whether the result is still valid: the revision of the target's entry and the name of the memory key.
//! WRITEs of several elements and WRITEs with immediate data, which end a batch of them, have a separate
//! loop. All requests of a list are executed under one lock.
//!
//! The checks and copies are those of the general path (`transfer`, `remote_memory`). A request that fails a
//! check, or is not in the caches, is left to the general path. That executes the request or reports the
//! error.

use super::keys::{AccessRight, LocalKeys, RemoteKeys};
use super::remote_qp::{READ_AHEAD, Receive, RemoteQp};
use super::send::SendQueue;
use super::transfer::{Transfer, local_address, recv_cqe};
use super::transport::Transport;
use super::wr_list::{SendWrList, SingleSgeWr};
use super::{Qp, QpType};
use crate::caps::MAX_MSG;
use crate::peer::Peer;
use crate::send_wr::SendWr;
use crate::types::{
    ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE, SEND_SIGNALED, SEND_SOLICITED, Sge, WC_SUCCESS, WR_RDMA_READ,
    WR_RDMA_WRITE, WR_RDMA_WRITE_WITH_IMM, WR_SEND,
};

/// Most SENDs of a group. SENDs of a list, except the first, are completed at the receiver in groups. The
/// cache line of the next completion then moves once per group instead of once per SEND.
const MAX_GROUP: u32 = READ_AHEAD as u32;
/// Most bytes of a group. This bounds the delay of a group's first message.
const MAX_GROUP_BYTES: u32 = 32 << 10;

/// A SEND whose data was copied and whose receive is not completed yet.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CopiedSend {
    wr_id: u64,
    length: u32,
    signalled: bool,
}

/// A group of SENDs. The send queue keeps it: on the stack it would have to be cleared.
pub(super) type SendGroup = [CopiedSend; MAX_GROUP as usize];

/// Whose completion channel must be signalled for a request that was executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Signal {
    Nobody,
    Receiver,
}

impl Signal {
    #[inline(always)]
    fn receiver_if(signal: bool) -> Self {
        if signal { Self::Receiver } else { Self::Nobody }
    }
}

/// An operation on one element. Each has its own copy of the loop, so that none pays for another's needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FastOp {
    /// An RDMA WRITE.
    Write,
    /// An RDMA READ.
    Read,
    /// A SEND.
    Send,
}

impl FastOp {
    #[inline(always)]
    const fn opcode(self) -> u32 {
        match self {
            Self::Write => WR_RDMA_WRITE,
            Self::Read => WR_RDMA_READ,
            Self::Send => WR_SEND,
        }
    }

    /// The access that the target's queue pair must allow.
    #[inline(always)]
    const fn access(self) -> u32 {
        match self {
            Self::Write => ACCESS_REMOTE_WRITE,
            Self::Read => ACCESS_REMOTE_READ,
            Self::Send => 0,
        }
    }
}

/// The revision at which the target was found ready; None if that has to be looked up again.
#[inline(always)]
fn ready_revision(peer: &Peer, target: &RemoteQp, access: u32) -> Option<u32> {
    let revision = target.ready_at()?;
    (peer.alive() && target.revision() == revision && target.allows(access)).then_some(revision)
}

/// Whether requests with this opcode may take the fast path.
#[inline(always)]
fn may_be_fast(opcode: u32) -> bool {
    matches!(opcode, WR_RDMA_WRITE | WR_RDMA_WRITE_WITH_IMM | WR_RDMA_READ | WR_SEND)
}

impl Qp {
    /// Executes requests from the front of a list, up to the first that is left to the general path.
    #[inline(always)]
    pub(super) fn post_fast(&self, list: &mut impl SendWrList) {
        if self.kind == QpType::Rc
            && let Some(opcode) = list.opcode()
            && may_be_fast(opcode)
        {
            self.run_list(&mut self.send.queue.lock(), opcode, list);
        }
    }

    /// Executes requests as [`post_fast`](Self::post_fast) does, for a caller that holds the send queue.
    #[inline(always)]
    pub(super) fn post_fast_locked(&self, send: &mut SendQueue, list: &mut impl SendWrList) {
        if self.kind == QpType::Rc
            && let Some(opcode) = list.opcode()
        {
            self.run_list(send, opcode, list);
        }
    }

    /// Executes a list whose first request has this opcode.
    #[inline(always)]
    fn run_list(&self, send: &mut SendQueue, mut opcode: u32, list: &mut impl SendWrList) {
        loop {
            // Comparisons, most frequent first: the compiler makes a jump table of a `match`.
            let rest = if opcode == WR_RDMA_WRITE {
                self.run(FastOp::Write, send, *list).or_else(|| self.run_gather_writes(send, *list))
            } else if opcode == WR_RDMA_READ {
                self.run(FastOp::Read, send, *list)
            } else {
                self.run_others(opcode, send, *list)
            };
            let Some(rest) = rest else { return };
            *list = rest;
            let Some(next) = list.opcode() else { return };
            opcode = next;
        }
    }

    /// Executes other requests out of line: in one function with them, WRITEs and READs would have fewer registers.
    #[inline(never)]
    fn run_others<L: SendWrList>(&self, opcode: u32, send: &mut SendQueue, list: L) -> Option<L> {
        if opcode == WR_SEND {
            self.run(FastOp::Send, send, list)
        } else if opcode == WR_RDMA_WRITE_WITH_IMM {
            self.run_gather_writes(send, list)
        } else {
            None
        }
    }

    /// Executes requests of one element and one operation from the front of a list. The rest of the list, or None if
    /// not even the first request was executed.
    #[inline(always)]
    fn run<L: SendWrList>(&self, op: FastOp, send: &mut SendQueue, mut list: L) -> Option<L> {
        let mut room = self.send_room(send);
        if send.has_pending() || room == 0 {
            return None;
        }
        let Transport::Local(local) = &mut send.transport else { return None };
        let (Some(peer), Some(target)) = (&local.peer, &local.target) else { return None };
        let revision = ready_revision(peer, target, op.access())?;
        let (inflight, asymmetric) = (&target.entry.inflight, peer.asymmetric);
        let always = if self.send.signal_all { SEND_SIGNALED } else { 0 };
        let (mut signal, mut progressed) = (Signal::Nobody, false);
        loop {
            let Some(wr) = list.single_sge(op.opcode()) else {
                if !progressed {
                    // Nothing was announced yet.
                    return None;
                }
                break;
            };
            if room == 0 || signal == Signal::Receiver {
                break;
            }
            // Ends the announcement of one request and begins that of the next one.
            inflight.begin(&mut local.announced, asymmetric);
            if target.revision() != revision || !self.states.is_rts() {
                break;
            }
            let keys = (&local.remote_keys, &mut send.local_keys);
            if op == FastOp::Send && progressed && wr.flags & SEND_SOLICITED == 0 {
                let accounts = (&mut room, &mut send.posted, &mut send.group);
                let Some(done) = self.send_group(target, keys, &mut list, accounts) else { break };
                signal = done;
            } else {
                let done = match op {
                    FastOp::Write => self.fast_write(target, keys, &wr),
                    FastOp::Read => self.fast_read(target, keys, &wr),
                    FastOp::Send => self.fast_send(target, keys, &wr),
                };
                let Some(done) = done else { break };
                signal = done;
                send.posted = send.posted.wrapping_add(1);
                if (wr.flags | always) & SEND_SIGNALED != 0 {
                    self.complete_first(list, op, send.posted);
                }
                list.advance();
                room -= 1;
                progressed = true;
            }
        }
        inflight.end(&mut local.announced);
        if signal == Signal::Receiver {
            peer.signal(target.cq.channel());
        }
        progressed.then_some(list)
    }

    /// Executes WRITEs, with immediate data or without it, of any number of elements, by the functions of the general
    /// path. The rest of the list, or None if not even the first request was executed.
    ///
    /// A request that fails is left to the general path, which writes its bytes again. Requests for a shared
    /// receive queue are left to the general path, too, because taking a receive there cannot be undone.
    #[inline(never)]
    fn run_gather_writes<L: SendWrList>(&self, send: &mut SendQueue, mut list: L) -> Option<L> {
        let mut room = self.send_room(send);
        if send.has_pending() || room == 0 {
            return None;
        }
        let SendQueue { transport: Transport::Local(local), local_keys, posted, .. } = send else {
            return None;
        };
        let (Some(peer), Some(target)) = (&local.peer, &local.target) else { return None };
        let revision = ready_revision(peer, target, ACCESS_REMOTE_WRITE)?;
        if target.shares_receives() {
            return None;
        }
        let (inflight, asymmetric) = (&target.entry.inflight, peer.asymmetric);
        let always = if self.send.signal_all { SEND_SIGNALED } else { 0 };
        let mut announced = local.announced;
        let mut transfer =
            Transfer { qp: self, peer, target, remote: &mut local.remote_keys, local: local_keys };
        let mut progressed = false;
        let signal = loop {
            inflight.begin(&mut announced, asymmetric);
            if target.revision() != revision || !self.states.is_rts() {
                break false;
            }
            let done = list.with_wr(self.kind, |wr| {
                self.check_form(wr).ok()?;
                let signal = transfer.run_write(wr).ok()?;
                *posted = posted.wrapping_add(1);
                if (wr.flags | always) & SEND_SIGNALED != 0 {
                    self.complete_send(wr, *posted, WC_SUCCESS, 0);
                }
                Some(signal)
            });
            let Ok(Some(signal)) = done else { break false };
            list.advance();
            room -= 1;
            progressed = true;
            let follows = matches!(list.opcode(), Some(WR_RDMA_WRITE | WR_RDMA_WRITE_WITH_IMM));
            if signal || room == 0 || !follows {
                break signal;
            }
        };
        inflight.end(&mut announced);
        local.announced = announced;
        if signal {
            peer.signal(target.cq.channel());
        }
        progressed.then_some(list)
    }

    /// Executes a WRITE of one element, or leaves it to the general path.
    #[inline(always)]
    fn fast_write(
        &self,
        target: &RemoteQp,
        (remote, local): (&RemoteKeys, &mut LocalKeys),
        wr: &SingleSgeWr,
    ) -> Option<Signal> {
        let len = u64::from(wr.sge.length);
        let to = remote.mapped(target, wr.rkey.get(), wr.remote_addr, len, AccessRight::RemoteWrite)?;
        self.check_fast_length(WR_RDMA_WRITE, wr)?;
        let from = local_address(self, local, wr.flags, &wr.sge, AccessRight::Read).ok()?;
        // SAFETY: the application's registered or inline memory, and a range that was checked.
        unsafe { to.store(0, from, len as usize) }.ok()?;
        Some(Signal::Nobody)
    }

    /// Executes a READ of one element, or leaves it to the general path.
    #[inline(always)]
    fn fast_read(
        &self,
        target: &RemoteQp,
        (remote, local): (&RemoteKeys, &mut LocalKeys),
        wr: &SingleSgeWr,
    ) -> Option<Signal> {
        let len = u64::from(wr.sge.length);
        let from = remote.mapped(target, wr.rkey.get(), wr.remote_addr, len, AccessRight::Read)?;
        self.check_fast_length(WR_RDMA_READ, wr)?;
        let to = local_address(self, local, 0, &wr.sge, AccessRight::LocalWrite).ok()?;
        // SAFETY: as above.
        unsafe { from.load(0, to, len as usize) }.ok()?;
        // Otherwise, the general path reads again, or finds no region.
        remote.is_still_known(wr.rkey.get()).then_some(Signal::Nobody)
    }

    /// Executes a SEND of one element, or leaves it to the general path.
    #[inline(always)]
    fn fast_send(
        &self,
        target: &RemoteQp,
        keys: (&RemoteKeys, &mut LocalKeys),
        wr: &SingleSgeWr,
    ) -> Option<Signal> {
        let receive = self.copy_send(target, keys, wr, 0)?;
        let cqe = recv_cqe(WR_SEND, 0, wr.sge.length);
        let solicited = wr.flags & SEND_SOLICITED != 0;
        // The general path reports a full completion queue.
        let signal = target.complete_receive(self.owner_id(), receive, cqe, solicited).ok()?;
        Some(Signal::receiver_if(signal))
    }

    /// Copies a SEND's data into the receive behind the `before` oldest ones, if both have one element.
    #[inline(always)]
    fn copy_send(
        &self,
        target: &RemoteQp,
        (remote, local): (&RemoteKeys, &mut LocalKeys),
        wr: &SingleSgeWr,
        before: u32,
    ) -> Option<Receive> {
        let len = u64::from(wr.sge.length);
        self.check_fast_length(WR_SEND, wr)?;
        let from = local_address(self, local, wr.flags, &wr.sge, AccessRight::Read).ok()?;
        let (receive, into) = target.single_sge_receive(before)?;
        if len > u64::from(into.length) {
            return None;
        }
        let to = remote.mapped(target, into.lkey, into.addr, len, AccessRight::LocalWrite)?;
        // SAFETY: as above.
        unsafe { to.store(0, from, len as usize) }.ok()?;
        Some(receive)
    }

    /// Executes the SENDs at the front of a list as a group, and advances the list behind them. None if not
    /// even the first one qualifies, or the receiver's completion queue has no room for all. The list then
    /// stays, and the general path copies the data again.
    ///
    /// The caller's announcement covers all of them: the receiver's queues remain valid while it lasts.
    #[inline(never)]
    fn send_group(
        &self,
        target: &RemoteQp,
        (remote, local): (&RemoteKeys, &mut LocalKeys),
        list: &mut impl SendWrList,
        (room, posted, group): (&mut u32, &mut u32, &mut SendGroup),
    ) -> Option<Signal> {
        let mut at = *list;
        let (mut count, mut bytes) = (0, 0);
        while count < MAX_GROUP.min(*room) && bytes < MAX_GROUP_BYTES {
            let unsolicited = |wr: &SingleSgeWr| wr.flags & SEND_SOLICITED == 0;
            let Some(wr) = at.single_sge(WR_SEND).filter(unsolicited) else { break };
            if self.copy_send(target, (remote, &mut *local), &wr, count).is_none() {
                break;
            }
            let SingleSgeWr { wr_id, flags, sge: Sge { length, .. }, .. } = wr;
            group[count as usize] = CopiedSend { wr_id, length, signalled: flags & SEND_SIGNALED != 0 };
            bytes += length;
            count += 1;
            at.advance();
        }
        if count == 0 {
            return None;
        }
        let length = |at: u32| group[at as usize].length;
        let signal = target.complete_receives(self.owner_id(), count, length).ok()?;
        *list = at;
        *room -= count;
        for send in &group[..count as usize] {
            *posted = posted.wrapping_add(1);
            if self.send.signal_all || send.signalled {
                self.complete_fast(send.wr_id, WR_SEND, send.length, *posted);
            }
        }
        Some(Signal::receiver_if(signal))
    }

    /// Leaves a request to the general path that has too much data, or none: an empty one checks no key.
    #[inline(always)]
    fn check_fast_length(&self, opcode: u32, wr: &SingleSgeWr) -> Option<()> {
        let len = u64::from(wr.sge.length);
        (len != 0 && self.may_carry(opcode, wr.flags, len, MAX_MSG)).then_some(())
    }

    /// Completes the first request of a list. Its fields are read again, so that the loop needs no registers for them.
    #[inline(never)]
    fn complete_first(&self, list: impl SendWrList, op: FastOp, posted: u32) {
        if let Some(wr) = list.single_sge(op.opcode()) {
            self.complete_fast(wr.wr_id, op.opcode(), wr.sge.length, posted);
        }
    }

    /// Completes a request. The arguments are fields of the request: a request whose address is not taken
    /// stays in registers.
    #[inline(never)]
    fn complete_fast(&self, wr_id: u64, opcode: u32, length: u32, posted: u32) {
        let sge = Sge { length, ..Sge::default() };
        let wr = SendWr { wr_id, opcode, sges: &[sge], ..SendWr::default() };
        self.complete_send(&wr, posted, WC_SUCCESS, 0);
    }
}
