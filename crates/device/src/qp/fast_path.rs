//! Plain requests, with the fewest instructions.
//!
//! Nearly all requests of nearly all programs are RDMA WRITEs, READs and SENDs of one element, over a reliable
//! connection that was used before, into memory that is mapped. What such a request needs to know was looked
//! up by the ones before it, and two words tell whether it still holds: the revision of the target's entry and
//! the name of its memory key. A whole list of them is carried out under one lock.
//!
//! Whatever is not as it should be is left alone: [`Qp::post_send`] finds out what it is, and does the same
//! by the long way. So nothing is said here about errors.

use std::sync::atomic::Ordering;

use millstream_lockfree::copy_in_order;

use super::keys::{LocalKeys, RemoteKeys, Use};
use super::send::SendQueue;
use super::state::QpState;
use super::target::{READ_AHEAD, Receive, Target};
use super::transport::Transport;
use super::{Qp, QpType};
use crate::caps::MAX_MSG;
use crate::types::{
    ACCESS_LOCAL_WRITE, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE, SEND_INLINE, SEND_SIGNALED, SEND_SOLICITED,
    SendWr, Sge, WC_OP_RECV, WC_SUCCESS, WR_RDMA_READ, WR_RDMA_WRITE, WR_SEND,
};
use millstream_lockfree::cqe::Cqe;

/// An RDMA WRITE, READ or SEND of one element.
#[derive(Clone, Copy, Debug)]
pub struct Plain {
    /// The request's name.
    pub wr_id: u64,
    /// `IBV_SEND_*`
    pub flags: u32,
    /// Local memory.
    pub sge: Sge,
    /// Remote memory, but for a SEND.
    pub remote_addr: u64,
    /// Its key.
    pub rkey: u32,
}

/// A list of requests as it was posted: a place in it.
pub trait Requests: Copy {
    /// The next one, if it is plain and has this opcode.
    fn plain(&self, opcode: u32) -> Option<Plain>;
    /// The opcode of the next one, plain or not.
    fn opcode(&self) -> Option<u32>;
    /// It was carried out.
    fn advance(&mut self);
}

/// What is left of a list.
#[derive(Clone, Copy)]
pub(super) struct Rest<'a>(pub(super) &'a [SendWr<'a>]);

impl Requests for Rest<'_> {
    #[inline(always)]
    fn plain(&self, opcode: u32) -> Option<Plain> {
        let wr = self.0.first().filter(|wr| wr.opcode == opcode)?;
        let [sge] = wr.sges else { return None };
        let SendWr { wr_id, flags, remote_addr, rkey, .. } = *wr;
        Some(Plain { wr_id, flags, sge: *sge, remote_addr, rkey })
    }

    #[inline(always)]
    fn opcode(&self) -> Option<u32> {
        Some(self.0.first()?.opcode)
    }

    #[inline(always)]
    fn advance(&mut self) {
        self.0 = self.0.split_first().map_or(&[], |(_, rest)| rest);
    }
}

/// SENDs of a list, but for the first, are told of together. A receiver that polls has the line of the next completion, and gives it up
/// once for all of them instead of for each.
const TOGETHER: u32 = READ_AHEAD as u32;
/// When so many bytes are copied, the receiver waits no longer for the first of them.
const BYTES_TOGETHER: u32 = 32 << 10;

/// A SEND whose data is where it belongs, and which the receiver is not yet told of.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Placed {
    wr_id: u64,
    length: u32,
    signalled: bool,
}

/// Those that the receiver is told of together. Kept with the queue: what is on the stack has to be cleared.
pub(super) type Group = [Placed; TOGETHER as usize];

/// Who must be told of a request that was carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Notify {
    Nobody,
    Receiver,
}

/// Which requests one loop carries out. Each has a loop of its own, so that none pays for what only others need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Run {
    Writes,
    Reads,
    Sends,
}

impl Run {
    /// By which the next request of a list would be carried out, if it is plain.
    #[inline(always)]
    pub(super) fn of(list: &impl Requests) -> Option<Self> {
        match list.opcode()? {
            WR_RDMA_WRITE => Some(Run::Writes),
            WR_RDMA_READ => Some(Run::Reads),
            WR_SEND => Some(Run::Sends),
            _ => None,
        }
    }

    #[inline(always)]
    const fn opcode(self) -> u32 {
        match self {
            Run::Writes => WR_RDMA_WRITE,
            Run::Reads => WR_RDMA_READ,
            Run::Sends => WR_SEND,
        }
    }

    /// What the target must allow.
    #[inline(always)]
    const fn access(self) -> u32 {
        match self {
            Run::Writes => ACCESS_REMOTE_WRITE,
            Run::Reads => ACCESS_REMOTE_READ,
            Run::Sends => 0,
        }
    }
}

impl Qp {
    /// Carries out requests from the front of a list, up to the first that needs more attention: that one,
    /// and what follows it, is still to be posted.
    #[inline]
    pub fn post_plain(&self, list: &mut impl Requests) {
        if self.kind != QpType::Rc {
            return;
        }
        let Some(next) = Run::of(list) else { return };
        self.post_plain_locked(&mut self.send.lock(), next, list);
    }

    /// The same for a reliable connection whose send queue is locked, and the loop that the next request is for.
    #[inline(always)]
    pub(super) fn post_plain_locked(&self, send: &mut SendQueue, mut next: Run, list: &mut impl Requests) {
        loop {
            let rest = match next {
                Run::Writes => self.run(Run::Writes, send, *list),
                Run::Reads => self.run(Run::Reads, send, *list),
                Run::Sends => self.post_sends_plain(send, *list),
            };
            let Some(rest) = rest else { return };
            *list = rest;
            let Some(behind) = Run::of(list) else { return };
            next = behind;
        }
    }

    /// SENDs out of the way: within one function WRITEs and READs would pay for their registers.
    #[inline(never)]
    fn post_sends_plain<L: Requests>(&self, send: &mut SendQueue, list: L) -> Option<L> {
        self.run(Run::Sends, send, list)
    }

    /// Carries out requests of one kind from the front of a list; what is left of it, nothing if not even the first one
    /// was.
    #[inline(always)]
    fn run<L: Requests>(&self, run: Run, send: &mut SendQueue, mut list: L) -> Option<L> {
        let mut room = self.send_room(send);
        if send.has_pending() || room == 0 {
            return None;
        }
        let Transport::Local(local) = &mut send.transport else { return None };
        let (Some(peer), Some(target)) = (&local.peer, &local.target) else { return None };
        // As in `SendQueue::execute`: before the announcement, and after it. What it allows is as it was then, too.
        let revision = target.ready_at()?;
        if !peer.alive() || target.revision() != revision || !target.allows(run.access()) {
            return None;
        }
        let (inflight, asymmetric) = (&target.entry.inflight, peer.asymmetric);
        let always = if self.signal_all { SEND_SIGNALED } else { 0 };
        let mut announced = local.announced;
        let (mut signal, mut going_on) = (false, false);
        while let Some(next) = list.plain(run.opcode())
            && room != 0
            && !signal
        {
            // One request's end is the next one's beginning.
            inflight.begin(&mut announced, asymmetric);
            if target.revision() != revision || self.state.load(Ordering::Relaxed) != QpState::Rts as u8 {
                break;
            }
            let keys = (&local.remote_keys, &mut send.local_keys);
            if run == Run::Sends && going_on && next.flags & SEND_SOLICITED == 0 {
                let accounts = (&mut room, &mut send.posted, &mut send.group);
                let Some(notify) = self.send_together(target, keys, &mut list, accounts) else { break };
                signal = notify == Notify::Receiver;
                continue;
            }
            let done = match run {
                Run::Writes => self.write_plain(target, keys, &next),
                Run::Reads => self.read_plain(target, keys, &next),
                Run::Sends => self.send_plain(target, keys, &next),
            };
            let Some(notify) = done else { break };
            signal = notify == Notify::Receiver;
            send.posted = send.posted.wrapping_add(1);
            if (next.flags | always) & SEND_SIGNALED != 0 {
                self.complete_plain(next.wr_id, run.opcode(), next.sge.length, send.posted);
            }
            list.advance();
            room -= 1;
            going_on = true;
        }
        inflight.end(&mut announced);
        local.announced = announced;
        if signal {
            peer.signal(target.cq.channel());
        }
        going_on.then_some(list)
    }

    /// Carries out a WRITE; none if it is not that simple.
    #[inline(always)]
    fn write_plain(
        &self,
        target: &Target,
        (remote, local): (&RemoteKeys, &mut LocalKeys),
        plain: &Plain,
    ) -> Option<Notify> {
        let len = u64::from(plain.sge.length);
        let to = remote.known(plain.rkey)?.mapped(target.pd, plain.remote_addr, len, Use::Write)?;
        let from = self.local_place(local, plain, Use::Read)?;
        // SAFETY: mapped shared memory that was checked, and the application's registered or inline memory.
        unsafe { copy_in_order(to, from, len as usize) };
        Some(Notify::Nobody)
    }

    /// Carries out a READ; none if it is not that simple.
    #[inline(always)]
    fn read_plain(
        &self,
        target: &Target,
        (remote, local): (&RemoteKeys, &mut LocalKeys),
        plain: &Plain,
    ) -> Option<Notify> {
        if plain.flags & SEND_INLINE != 0 {
            return None;
        }
        let len = u64::from(plain.sge.length);
        let from = remote.known(plain.rkey)?.mapped(target.pd, plain.remote_addr, len, Use::Read)?;
        let to = self.local_place(local, plain, Use::Fill)?;
        // SAFETY: as above.
        unsafe { copy_in_order(to, from, len as usize) };
        Some(Notify::Nobody)
    }

    /// Carries out a SEND; none if it is not that simple.
    #[inline(always)]
    fn send_plain(
        &self,
        target: &Target,
        keys: (&RemoteKeys, &mut LocalKeys),
        plain: &Plain,
    ) -> Option<Notify> {
        let receive = self.place_plain(target, keys, plain, 0)?;
        let cqe = Cqe { opcode: WC_OP_RECV as u16, byte_len: plain.sge.length, ..Cqe::default() };
        let solicited = plain.flags & SEND_SOLICITED != 0;
        // A queue that takes no more is found out, and told of, by the long way.
        let signal = target.complete_receive(self.party(), receive, cqe, solicited).ok()?;
        Some(if signal { Notify::Receiver } else { Notify::Nobody })
    }

    /// Copies a SEND's data to where the receive request wants it that comes after the `before` oldest; none if it is not
    /// that simple.
    #[inline(always)]
    fn place_plain(
        &self,
        target: &Target,
        (remote, local): (&RemoteKeys, &mut LocalKeys),
        plain: &Plain,
        before: u32,
    ) -> Option<Receive> {
        let len = plain.sge.length;
        let here = self.local_place(local, plain, Use::Read)?;
        let (receive, room) = target.plain_receive(before)?;
        if len > room.length {
            return None;
        }
        let there = remote.known(room.lkey)?.mapped(target.pd, room.addr, u64::from(len), Use::Fill)?;
        // SAFETY: as above.
        unsafe { copy_in_order(there, here, len as usize) };
        Some(receive)
    }

    /// Carries out the SENDs at the front of a list, up to [`TOGETHER`] and what `room` there is, and goes on in the list
    /// behind them; none if not even the first one is that simple, or the receiver's queue does not take them all. Then the
    /// list is where it was, and what was copied will be once more.
    ///
    /// The caller's announcement stands for all of them: the receiver's queues stay while it does.
    #[inline(never)]
    fn send_together(
        &self,
        target: &Target,
        (remote, local): (&RemoteKeys, &mut LocalKeys),
        list: &mut impl Requests,
        (room, posted, group): (&mut u32, &mut u32, &mut Group),
    ) -> Option<Notify> {
        let mut at = *list;
        let (mut count, mut bytes) = (0, 0);
        while count < TOGETHER.min(*room) && bytes < BYTES_TOGETHER {
            let alike = |plain: &Plain| plain.flags & SEND_SOLICITED == 0;
            let Some(plain) = at.plain(WR_SEND).filter(alike) else { break };
            if self.place_plain(target, (remote, &mut *local), &plain, count).is_none() {
                break;
            }
            let Plain { wr_id, flags, sge: Sge { length, .. }, .. } = plain;
            group[count as usize] = Placed { wr_id, length, signalled: flags & SEND_SIGNALED != 0 };
            bytes += length;
            count += 1;
            at.advance();
        }
        if count == 0 {
            return None;
        }
        let length = |at: u32| group[at as usize].length;
        let signal = target.complete_receives(self.party(), count, length).ok()?;
        *list = at;
        *room -= count;
        for placed in &group[..count as usize] {
            *posted = posted.wrapping_add(1);
            if self.signal_all || placed.signalled {
                self.complete_plain(placed.wr_id, WR_SEND, placed.length, *posted);
            }
        }
        Some(if signal { Notify::Receiver } else { Notify::Nobody })
    }

    /// Where a plain request's data is in this process; none if that is not so simple, or not right, or there is none: a
    /// transfer of nothing checks no key.
    #[inline(always)]
    fn local_place(&self, local: &mut LocalKeys, plain: &Plain, purpose: Use) -> Option<*mut u8> {
        let Sge { addr, length, lkey } = plain.sge;
        if !(1..=MAX_MSG).contains(&u64::from(length)) {
            return None;
        }
        if plain.flags & SEND_INLINE != 0 {
            return (length <= self.capacity.max_inline_data).then_some(addr as *mut u8);
        }
        match local.known(self.host, addr, length, lkey, purpose) {
            Some(place) => Some(place),
            None => self.find_local(local, addr, length, lkey, purpose),
        }
    }

    /// The same for a region that was not used before, or not lately.
    #[cold]
    #[inline(never)]
    fn find_local(
        &self,
        local: &mut LocalKeys,
        addr: u64,
        length: u32,
        lkey: u32,
        purpose: Use,
    ) -> Option<*mut u8> {
        let access = if purpose == Use::Read { 0 } else { ACCESS_LOCAL_WRITE };
        local.find(self.host, self.pd.id, addr, length, lkey, access).ok()
    }

    /// By its parts: a request whose address nobody wants stays in registers.
    #[inline(never)]
    fn complete_plain(&self, wr_id: u64, opcode: u32, length: u32, posted: u32) {
        let sge = Sge { length, ..Sge::default() };
        let wr = SendWr { wr_id, opcode, sges: &[sge], ..SendWr::default() };
        self.complete_send(&wr, posted, WC_SUCCESS, 0);
    }
}
