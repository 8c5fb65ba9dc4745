//! Duplicate requests (9.7.5.1.5): they change no state and only queue responses.

use millstream_wire::{Operation, Packet};

use super::response::Response;
use super::{ResourceKind, Responder, ResponderResource};
use crate::extended_psn::ExtendedPsn;

impl Responder {
    pub(super) fn duplicate(&mut self, at: ExtendedPsn, packet: &Packet<&[u8]>) {
        match packet.opcode().operation() {
            Operation::Send | Operation::Write => {
                // The ACK names the last request that an ACK may answer. Naming a later READ would imply that
                // its data was sent.
                if let Some(last) = self.acknowledgeable.filter(|last| at <= *last) {
                    self.acknowledge(last);
                }
            }
            Operation::ReadRequest => self.duplicate_read(at, packet),
            Operation::CompareSwap | Operation::FetchAdd | Operation::AtomicWrite => {
                let kept = self.resource_of(at).filter(|kept| kept.start == at).map(|kept| kept.kind);
                let is_same = match kept {
                    Some(ResourceKind::Atomic(_)) => packet.atomic_eth().is_some(),
                    Some(ResourceKind::AtomicWrite) => packet.opcode().operation() == Operation::AtomicWrite,
                    _ => false,
                };
                let waits = self
                    .responses
                    .iter()
                    .any(|answer| matches!(answer, Response::Single { at: waiting, .. } if *waiting == at));
                if let Some(kind) = kept.filter(|_| is_same && !waits && self.has_room()) {
                    self.responses.push_back(Response::Single { at, kind, again: true, msn: self.msn });
                }
            }
            _ => {}
        }
    }

    /// The stored result of the READ or atomic request that contains a packet.
    fn resource_of(&self, at: ExtendedPsn) -> Option<ResponderResource> {
        self.resources.iter().find(|kept| kept.start <= at && at < kept.end).copied()
    }

    /// A duplicate READ, whole or from the middle. Its data is read again, and the key is checked then.
    fn duplicate_read(&mut self, at: ExtendedPsn, packet: &Packet<&[u8]>) {
        let (Some(kept), Some(reth)) = (self.resource_of(at), packet.reth()) else { return };
        let ResourceKind::Read { queue, va, rkey, len } = kept.kind else { return };
        let skipped = u64::from(at.since(kept.start)) * u64::from(self.mtu);
        let left = u64::from(len) - skipped.min(u64::from(len));
        // A duplicate READ may only ask for part of the original range.
        let is_part = reth.va() == va.wrapping_add(skipped)
            && reth.rkey() == rkey
            && u64::from(reth.length()) <= left
            && (reth.length() > 0 || len == 0);
        if !is_part {
            return;
        }
        let packets = |len| self.config.mtu.packets(len);
        let until = at.plus(packets(reth.length()));
        // Data that is still queued is not queued twice: a response that has begun starts again at the requested data.
        for response in &mut self.responses {
            if let Response::Read { next, va: rest, left, begun, .. } = response
                && *next < until
                && at < next.plus(packets(*left))
            {
                if at < *next {
                    *left += next.since(at) * self.mtu;
                    (*next, *rest, *begun) = (at, reth.va(), false);
                }
                return;
            }
        }
        if self.has_room() {
            // Ahead of data that was not sent yet: the requester waits for this data.
            let ahead = self.responses.iter().take_while(|response| response.repeats_read()).count();
            self.responses.insert(
                ahead,
                Response::Read {
                    next: at,
                    queue,
                    va: reth.va(),
                    rkey,
                    left: reth.length(),
                    begun: false,
                    again: true,
                    msn: self.msn,
                },
            );
        }
    }
}
