//! Requests that were carried out before (9.7.5.1.5): nothing changes but what is to be sent.

use millstream_wire::{Operation, Packet};

use super::answer::Answer;
use super::{Kept, Resource, Responder};
use crate::sequence::Sequence;

impl Responder {
    pub(super) fn duplicate(&mut self, at: Sequence, packet: &Packet<&[u8]>) {
        match packet.opcode().operation() {
            Operation::Send | Operation::Write => {
                // With the number of the last request that an acknowledgement is the answer to, not with
                // that of a READ after it: that would say that its data had been sent.
                if let Some(last) = self.acknowledgeable.filter(|last| at <= *last) {
                    self.acknowledge(last);
                }
            }
            Operation::ReadRequest => self.read_again(at, packet),
            Operation::CompareSwap | Operation::FetchAdd | Operation::AtomicWrite => {
                let kept = self.resource_of(at).filter(|kept| kept.start == at).map(|kept| kept.what);
                let is_same = match kept {
                    Some(Kept::Atomic(_)) => packet.atomic_eth().is_some(),
                    Some(Kept::AtomicWrite) => packet.opcode().operation() == Operation::AtomicWrite,
                    _ => false,
                };
                let waits = self
                    .answers
                    .iter()
                    .any(|answer| matches!(answer, Answer::One { at: waiting, .. } if *waiting == at));
                if let Some(what) = kept.filter(|_| is_same && !waits && self.has_room()) {
                    self.answers.push_back(Answer::One { at, what, again: true, msn: self.msn });
                }
            }
            _ => {}
        }
    }

    /// What is remembered of the request that a packet belonged to.
    fn resource_of(&self, at: Sequence) -> Option<Resource> {
        self.resources.iter().find(|kept| kept.start <= at && at < kept.end).copied()
    }

    /// A READ again, whole or from the middle. Its data is read anew; the key is checked when it is.
    fn read_again(&mut self, at: Sequence, packet: &Packet<&[u8]>) {
        let (Some(kept), Some(reth)) = (self.resource_of(at), packet.reth()) else { return };
        let Kept::Read { queue, va, rkey, len } = kept.what else { return };
        let skipped = u64::from(at.since(kept.start)) * u64::from(self.mtu);
        let left = u64::from(len) - skipped.min(u64::from(len));
        // Only a part of what was asked for the first time.
        let is_part = reth.va() == va.wrapping_add(skipped)
            && reth.rkey() == rkey
            && u64::from(reth.length()) <= left
            && (reth.length() > 0 || len == 0);
        if !is_part {
            return;
        }
        // Data that still waits to be sent need not be sent twice.
        let waits = self.answers.iter().any(|answer| match answer {
            Answer::Read { next, left, .. } => {
                let end = next.plus(self.config.mtu.packets(*left));
                *next <= at && at.plus(self.config.mtu.packets(reth.length())) <= end
            }
            _ => false,
        });
        if !waits && self.has_room() {
            self.answers.push_back(Answer::Read {
                next: at,
                queue,
                va: reth.va(),
                rkey,
                left: reth.length(),
                begun: false,
                again: true,
                msn: self.msn,
            });
        }
    }
}
