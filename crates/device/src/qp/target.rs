//! The peer's queue pair, as its initiator sees it: where its queues lie, checked once.

use std::ptr::NonNull;
use std::sync::atomic::Ordering;

use crate::caps::{MAX_CQE, MAX_QP, MAX_QP_WR, MAX_SGE};
use crate::cq::RemoteCq;
use crate::layout::{CqRing, Cqe, QpEntry, RecvSlot, cq_ring_len, qp_state, recv_slot_len};
use crate::peer::Peer;
use crate::types::Sge;

/// Why a request cannot be carried out now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Readiness {
    Ready,
    /// Not yet in a state to receive; packets would be dropped and sent again.
    NotYet,
    /// Gone for good.
    Gone,
}

#[derive(Debug)]
pub(super) struct Target {
    pub(super) entry: &'static QpEntry,
    qpn: u32,
    life: u32,
    slots: NonNull<u8>,
    slot_len: usize,
    mask: u32,
    sges: u32,
    pub(super) cq: RemoteCq,
    pub(super) pd: u32,
}

// SAFETY: points into the peer's arena, where everything is atomics or raw copies.
unsafe impl Send for Target {}

impl Target {
    /// Finds the queue pair and checks where its queues claim to be. The result points into the
    /// peer's arena and must not outlive the peer.
    pub(super) fn bind(peer: &Peer, qpn: u32) -> Option<Self> {
        let entry = peer.qp_entry(qpn as usize % MAX_QP)?;
        // SAFETY: the caller keeps the peer, and with it the arena, for as long as the result.
        let entry: &'static QpEntry = unsafe { &*std::ptr::from_ref(entry) };
        if entry.qpn.load(Ordering::Acquire) != qpn {
            return None;
        }
        let mask = entry.rq_mask.load(Ordering::Relaxed);
        let sges = entry.rq_sges.load(Ordering::Relaxed);
        if !power_of_two_mask(mask, MAX_QP_WR.next_power_of_two()) || sges == 0 || sges > MAX_SGE {
            return None;
        }
        let slot_len = recv_slot_len(sges);
        let slots =
            peer.at(entry.rq.load(Ordering::Relaxed) as usize * 64, (mask as usize + 1) * slot_len)?;
        let at = entry.recv_cq.load(Ordering::Relaxed) as usize * 64;
        // SAFETY: in the arena, aligned to a line, and made of atomics.
        let ring: &'static CqRing = unsafe { &*peer.at(at, size_of::<CqRing>())?.cast::<CqRing>() };
        let cq_mask = ring.mask.load(Ordering::Acquire);
        if !power_of_two_mask(cq_mask, MAX_CQE) {
            return None;
        }
        peer.at(at, cq_ring_len(cq_mask as usize + 1))?;
        Some(Self {
            entry,
            qpn,
            life: entry.life.load(Ordering::Acquire),
            slots: NonNull::new(slots)?,
            slot_len,
            mask,
            sges,
            cq: RemoteCq { ring, mask: cq_mask },
            pd: entry.pd.load(Ordering::Relaxed),
        })
    }

    /// Whether requests from the queue pair `me` can be carried out.
    #[inline]
    pub(super) fn readiness(&self, me: u32) -> Readiness {
        let entry = self.entry;
        let state = entry.state.load(Ordering::Acquire);
        let same =
            entry.qpn.load(Ordering::Relaxed) == self.qpn && entry.life.load(Ordering::Relaxed) == self.life;
        match state {
            _ if !same => Readiness::Gone,
            qp_state::RTR | qp_state::RTS | qp_state::SQD | qp_state::SQE => {
                if entry.dest_qpn.load(Ordering::Relaxed) == me { Readiness::Ready } else { Readiness::Gone }
            }
            qp_state::RESET | qp_state::INIT => Readiness::NotYet,
            _ => Readiness::Gone,
        }
    }

    /// The oldest receive request that is not used up: its sequence number.
    #[inline]
    pub(super) fn next_receive(&self) -> Option<u32> {
        let head = self.entry.rq_head.load(Ordering::Relaxed);
        (head != self.entry.rq_tail.load(Ordering::Acquire)).then_some(head)
    }

    /// Copies a receive request's elements out of shared memory.
    #[inline]
    pub(super) fn read_receive(&self, sequence: u32, out: &mut [Sge; MAX_SGE as usize]) -> usize {
        // SAFETY: the index is masked to slots that exist and the count bounded by their size; the
        // copy may be garbage if the owner misbehaves, and is checked like any other.
        unsafe {
            let slot = self.slots.as_ptr().add((sequence & self.mask) as usize * self.slot_len);
            let n = (*slot.cast::<RecvSlot>()).n_sge.load(Ordering::Relaxed).min(self.sges) as usize;
            let from = slot.add(size_of::<RecvSlot>()).cast::<Sge>();
            for (i, to) in out.iter_mut().take(n).enumerate() {
                *to = from.add(i).read_volatile();
            }
            n
        }
    }

    /// Completes a receive request and uses it up; true if the receiver's channel must be signalled.
    #[inline]
    pub(super) fn complete_receive(
        &self,
        me: u32,
        cqe: Cqe,
        solicited: bool,
    ) -> Result<bool, crate::cq::CqFull> {
        let signal = self.cq.push(me, Cqe { qpn: self.qpn, ..cqe }, solicited)?;
        // Only now: a receive that was used up but not completed would be lost if we died between.
        self.entry.rq_head.store(cqe.sequence.wrapping_add(1), Ordering::Release);
        Ok(signal)
    }
}

fn power_of_two_mask(mask: u32, most: u32) -> bool {
    mask.checked_add(1).is_some_and(|n| n.is_power_of_two() && n <= most)
}
