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

use millstream_shm::copy_in_order;

use super::keys::{LocalKeys, RemoteKeys};
use super::send::SendQueue;
use super::state::State;
use super::target::{READ_AHEAD, Receive, Target};
use super::{Kind, Qp};
use crate::caps::MAX_MSG;
use crate::cqe::Cqe;
use crate::types::{
    ACCESS_LOCAL_WRITE, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE, SEND_INLINE, SEND_SIGNALED, SEND_SOLICITED,
    SendWr, Sge, WC_OP_RECV, WC_SUCCESS, WR_RDMA_READ, WR_RDMA_WRITE, WR_SEND,
};

/// An RDMA WRITE, READ or SEND of one element.
#[derive(Clone, Copy, Debug)]
pub struct Plain {
    /// The request's name.
    pub wr_id: u64,
    /// [`WR_RDMA_WRITE`], [`WR_RDMA_READ`] or [`WR_SEND`].
    pub opcode: u32,
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
    /// The next one, if it is plain.
    fn plain(&self) -> Option<Plain>;
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
    fn plain(&self) -> Option<Plain> {
        let wr = self.0.first()?;
        let ([sge], WR_RDMA_WRITE | WR_RDMA_READ | WR_SEND) = (wr.sges, wr.opcode) else { return None };
        let SendWr { wr_id, opcode, flags, remote_addr, rkey, .. } = *wr;
        Some(Plain { wr_id, opcode, flags, sge: *sge, remote_addr, rkey })
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
const BYTES_TOGETHER: u32 = 16 << 10;

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

/// Which requests one loop carries out. Each has a loop of its own, so that WRITEs and READs do not pay for what only
/// SENDs need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Run {
    Copies,
    Sends,
}

impl Run {
    /// By which the next request of a list would be carried out, if it is plain.
    #[inline(always)]
    pub(super) fn of(list: &impl Requests) -> Option<Self> {
        match list.opcode()? {
            WR_RDMA_WRITE | WR_RDMA_READ => Some(Run::Copies),
            WR_SEND => Some(Run::Sends),
            _ => None,
        }
    }

    #[inline(always)]
    fn is_for(self, plain: &Plain) -> bool {
        (plain.opcode == WR_SEND) == (self == Run::Sends)
    }
}

impl Qp {
    /// Carries out requests from the front of a list, up to the first that needs more attention: that one,
    /// and what follows it, is still to be posted.
    #[inline]
    pub fn post_plain(&self, list: &mut impl Requests) {
        if self.kind != Kind::Rc {
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
                Run::Copies => self.run(Run::Copies, send, *list),
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
        if send.has_parked() || room == 0 {
            return None;
        }
        let (Some(peer), Some(target)) = (&send.peer, &send.target) else { return None };
        // As in `SendQueue::execute`: before the announcement, and after it.
        if !peer.alive() || !target.still_ready() {
            return None;
        }
        let busy = &target.entry.busy;
        let mut announced = send.announced;
        let (mut signal, mut going_on) = (false, false);
        while let Some(next) = list.plain()
            && run.is_for(&next)
            && room != 0
            && !signal
        {
            // One request's end is the next one's beginning.
            busy.begin(&mut announced, peer.asymmetric);
            if !target.still_ready() || self.state.load(Ordering::Relaxed) != State::Rts as u8 {
                break;
            }
            let keys = (&send.remote_keys, &mut send.local_keys);
            if run == Run::Sends && going_on && next.flags & SEND_SOLICITED == 0 {
                let accounts = (&mut room, &mut send.posted, &mut send.group);
                let Some(notify) = self.send_together(target, keys, &mut list, accounts) else { break };
                signal = notify == Notify::Receiver;
                continue;
            }
            let done = match run {
                Run::Copies => self.copy_plain(target, keys, &next),
                Run::Sends => self.send_plain(target, keys, &next),
            };
            let Some(notify) = done else { break };
            signal = notify == Notify::Receiver;
            send.posted = send.posted.wrapping_add(1);
            if self.signal_all || next.flags & SEND_SIGNALED != 0 {
                self.complete_plain(next.wr_id, next.opcode, next.sge.length, send.posted);
            }
            list.advance();
            room -= 1;
            going_on = true;
        }
        busy.end(&mut announced);
        send.announced = announced;
        if signal {
            peer.signal(target.cq.channel());
        }
        going_on.then_some(list)
    }

    /// Carries out a WRITE or READ; none if it is not that simple.
    #[inline(always)]
    fn copy_plain(
        &self,
        target: &Target,
        (remote, local): (&RemoteKeys, &mut LocalKeys),
        plain: &Plain,
    ) -> Option<Notify> {
        let writes = plain.opcode == WR_RDMA_WRITE;
        let access = match plain.opcode {
            WR_RDMA_WRITE => ACCESS_REMOTE_WRITE,
            WR_RDMA_READ if plain.flags & SEND_INLINE == 0 => ACCESS_REMOTE_READ,
            _ => return None,
        };
        // A transfer of nothing checks no key.
        if plain.sge.length == 0 || !target.allows(access) {
            return None;
        }
        let len = u64::from(plain.sge.length);
        let there = remote.known(plain.rkey)?.mapped(target.pd, plain.remote_addr, len, access)?;
        let here = self.local_place(local, plain, if writes { 0 } else { ACCESS_LOCAL_WRITE })?;
        let (to, from) = if writes { (there, here) } else { (here, there) };
        // SAFETY: one range is mapped shared memory that was checked, the other one the application's
        // registered (or inline) memory.
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
        let here = self.local_place(local, plain, 0)?;
        let (receive, room) = target.plain_receive(before)?;
        let len = plain.sge.length;
        if len == 0 || len > room.length {
            return None;
        }
        let there =
            remote.known(room.lkey)?.mapped(target.pd, room.addr, u64::from(len), ACCESS_LOCAL_WRITE)?;
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
            let alike = |plain: &Plain| plain.opcode == WR_SEND && plain.flags & SEND_SOLICITED == 0;
            let Some(plain) = at.plain().filter(alike) else { break };
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

    /// Where a plain request's data is in this process; none if that is not so simple, or not right.
    #[inline(always)]
    fn local_place(&self, local: &mut LocalKeys, plain: &Plain, access: u32) -> Option<*mut u8> {
        let Sge { addr, length, lkey } = plain.sge;
        if plain.flags & SEND_INLINE != 0 {
            return (length <= self.capacity.max_inline_data).then_some(addr as *mut u8);
        }
        if u64::from(length) > MAX_MSG {
            return None;
        }
        match local.known(self.host, self.pd.id, addr, length, lkey, access) {
            Some(place) => Some(place),
            None => self.find_local(local, addr, length, lkey, access),
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
        access: u32,
    ) -> Option<*mut u8> {
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
