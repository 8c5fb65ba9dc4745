//! Plain requests, with the fewest instructions.
//!
//! Nearly all requests of nearly all programs are RDMA WRITEs and READs of one element, over a reliable
//! connection that was used before, into memory that is mapped. What such a request needs to know was looked
//! up by the ones before it, and two words tell whether it still holds: the revision of the target's entry and
//! the name of its memory key. A whole list of them is carried out under one lock.
//!
//! Whatever is not as it should be is left alone: [`Qp::post_send`] finds out what it is, and does the same
//! by the long way. So nothing is said here about errors.

use std::sync::atomic::Ordering;

use millstream_shm::{barrier, copy_in_order};

use super::keys::{LocalKeys, RemoteKeys};
use super::state::State;
use super::target::Target;
use super::{Kind, Qp};
use crate::caps::MAX_MSG;
use crate::types::{
    ACCESS_LOCAL_WRITE, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE, SEND_INLINE, SEND_SIGNALED, SendWr, Sge,
    WC_SUCCESS, WR_RDMA_READ, WR_RDMA_WRITE,
};

/// An RDMA WRITE or READ of one element.
#[derive(Clone, Copy, Debug)]
pub struct Plain {
    /// The request's name.
    pub wr_id: u64,
    /// [`WR_RDMA_WRITE`] or [`WR_RDMA_READ`].
    pub opcode: u32,
    /// `IBV_SEND_*`
    pub flags: u32,
    /// Local memory.
    pub sge: Sge,
    /// Remote memory.
    pub remote_addr: u64,
    /// Its key.
    pub rkey: u32,
}

/// A list of requests as it was posted.
pub trait Requests {
    /// The next one, if it is plain.
    fn plain(&self) -> Option<Plain>;
    /// It was carried out.
    fn advance(&mut self);
}

/// A list of one.
pub(super) struct One<'a>(pub(super) Option<&'a SendWr<'a>>);

impl Requests for One<'_> {
    #[inline(always)]
    fn plain(&self) -> Option<Plain> {
        let wr = self.0?;
        let ([sge], WR_RDMA_WRITE | WR_RDMA_READ) = (wr.sges, wr.opcode) else { return None };
        let SendWr { wr_id, opcode, flags, remote_addr, rkey, .. } = *wr;
        Some(Plain { wr_id, opcode, flags, sge: *sge, remote_addr, rkey })
    }

    #[inline(always)]
    fn advance(&mut self) {
        self.0 = None;
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
        let Some(mut next) = list.plain() else { return };
        let mut send = self.send.lock();
        let send = &mut *send;
        if send.has_parked() || self.send_room(send) == 0 {
            return;
        }
        let (Some(peer), Some(target)) = (&send.peer, &send.target) else { return };
        // As in `SendQueue::execute`: before the announcement, and after it.
        if !peer.alive() || !target.still_ready() {
            return;
        }
        let busy = &target.entry.busy;
        let mut announced = send.announced.wrapping_add(1) | 1;
        let mut room = self.send_room(send);
        loop {
            // One request's end is the next one's beginning.
            busy.store(announced, Ordering::Release);
            barrier::light(peer.asymmetric);
            if !target.still_ready() || self.state.load(Ordering::Relaxed) != State::Rts as u8 {
                break;
            }
            let keys = (&send.remote_keys, &mut send.local_keys);
            let Some((to, from)) = self.places(target, keys, &next) else { break };
            // SAFETY: one range is mapped shared memory that was checked, the other one the application's
            // registered (or inline) memory.
            unsafe { copy_in_order(to, from, next.sge.length as usize) };
            send.posted = send.posted.wrapping_add(1);
            if self.signal_all || next.flags & SEND_SIGNALED != 0 {
                self.complete_plain(&next, send.posted);
            }
            list.advance();
            room -= 1;
            match list.plain() {
                Some(plain) if room != 0 => next = plain,
                _ => break,
            }
            announced = announced.wrapping_add(2);
        }
        send.announced = announced.wrapping_add(1);
        busy.store(send.announced, Ordering::Release);
    }

    /// Where a plain request's data goes and comes from; none if it is not that simple.
    #[inline(always)]
    fn places(
        &self,
        target: &Target,
        (remote, local): (&RemoteKeys, &mut LocalKeys),
        plain: &Plain,
    ) -> Option<(*mut u8, *const u8)> {
        let Plain { sge, opcode, flags, .. } = *plain;
        let writes = opcode == WR_RDMA_WRITE;
        let access = match opcode {
            WR_RDMA_WRITE => ACCESS_REMOTE_WRITE,
            WR_RDMA_READ => ACCESS_REMOTE_READ,
            _ => return None,
        };
        // A transfer of nothing checks no key.
        if sge.length == 0 || u64::from(sge.length) > MAX_MSG || !target.allows(access) {
            return None;
        }
        let window = remote.known(plain.rkey)?;
        let there = window.mapped(target.pd, plain.remote_addr, u64::from(sge.length), access)?;
        let here = if flags & SEND_INLINE != 0 {
            let fits = writes && sge.length <= self.capacity.max_inline_data;
            fits.then_some(sge.addr as *mut u8)?
        } else {
            let access = if writes { 0 } else { ACCESS_LOCAL_WRITE };
            local.find(self.host, self.pd.id, sge.addr, sge.length, sge.lkey, access).ok()?
        };
        Some(if writes { (there, here) } else { (here, there) })
    }

    #[inline(never)]
    fn complete_plain(&self, plain: &Plain, posted: u32) {
        let wr = SendWr {
            wr_id: plain.wr_id,
            opcode: plain.opcode,
            flags: plain.flags,
            sges: &[plain.sge],
            ..SendWr::default()
        };
        self.complete_send(&wr, posted, WC_SUCCESS, 0);
    }
}
