//! Acknowledgements and responses to be sent. They go out in the order of their requests, so that none says
//! that data was sent which was not.

use millstream_wire::{ICRC_LEN, Msn, NakCode, Opcode, Rkey, Srqn, Syndrome, aeth, atomic_ack_eth, bth};

use super::{Kept, Responder};
use crate::burst::Burst;
use crate::config::Service;
use crate::event::Fault;
use crate::memory::Memory;
use crate::sequence::Sequence;

/// Something to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// Everything up to a packet was carried out.
    Acknowledge { at: Sequence, msn: Msn },
    /// Everything before a packet was carried out, and it was not: RNR NAK or NAK.
    Refuse { at: Sequence, syndrome: Syndrome, msn: Msn },
    /// The rest of a READ's data.
    Read { next: Sequence, queue: Srqn, va: u64, rkey: Rkey, left: u32, begun: bool, again: bool, msn: Msn },
    /// The result of an operation with a response of one packet.
    One { at: Sequence, what: Kept, again: bool, msn: Msn },
}

impl Answer {
    /// Whether the peer waits for it as one of the operations that it may have under way. What is said again
    /// may have been answered by now.
    pub(super) const fn uses_resource(&self) -> bool {
        matches!(self, Self::Read { again: false, .. } | Self::One { again: false, .. })
    }
}

impl Responder {
    /// Acknowledges everything up to `at`. Acknowledgements that wait next to each other become one (9.7.5.1.2).
    pub(super) fn acknowledge(&mut self, at: Sequence) {
        let answer = Answer::Acknowledge { at, msn: self.msn };
        if let Some(last @ Answer::Acknowledge { .. }) = self.answers.back_mut() {
            *last = answer;
        } else if self.has_room() {
            self.answers.push_back(answer);
        }
    }

    /// Says why a packet was not carried out. The latest word about it is the one that counts.
    pub(super) fn answer_refused(&mut self, at: Sequence, syndrome: Syndrome) {
        if matches!(self.answers.back(), Some(Answer::Refuse { at: same, .. }) if *same == at) {
            self.answers.pop_back();
        }
        let is_fatal = self.refusal.is_some();
        if is_fatal || self.has_room() {
            self.answers.push_back(Answer::Refuse { at, syndrome, msn: self.msn });
        }
    }

    /// Whether another answer may wait. The operations that the peer may have under way, and an acknowledgement
    /// between any two, always have room; more are the work of duplicates, and those of a broken or hostile peer.
    pub(super) fn has_room(&self) -> bool {
        self.answers.len() < 2 * usize::from(self.config.max_dest_rd_atomic) + 16
    }

    /// Whether there is something to be sent.
    pub(crate) fn has_answers(&self) -> bool {
        !self.answers.is_empty()
    }

    /// Whether that is one acknowledgement.
    pub(crate) fn has_only_acknowledgement(&self) -> bool {
        self.answers.len() == 1 && matches!(self.answers[0], Answer::Acknowledge { .. })
    }

    /// Fills the burst with answers.
    pub(crate) fn transmit<M: Memory>(&mut self, memory: &mut M, burst: &mut Burst<'_>) -> Result<(), Fault> {
        while let Some(answer) = self.answers.front().copied() {
            match answer {
                Answer::Acknowledge { at, msn } => {
                    if !self.build(burst, Opcode::RC_ACKNOWLEDGE, at, (Syndrome::ACK_UNLIMITED, msn), None) {
                        return Ok(());
                    }
                    self.answers.pop_front();
                }
                Answer::Refuse { at, syndrome, msn } => {
                    if !self.build(burst, Opcode::RC_ACKNOWLEDGE, at, (syndrome, msn), None) {
                        return Ok(());
                    }
                    self.answers.pop_front();
                }
                Answer::One { at, what, msn, .. } => {
                    let (opcode, original) = match what {
                        Kept::Atomic(original) => (Opcode::RC_ATOMIC_ACKNOWLEDGE, Some(original)),
                        // An atomic write is answered like a READ of nothing (annex A19).
                        _ => (Opcode::RC_READ_RESPONSE_ONLY, None),
                    };
                    if !self.build(burst, opcode, at, (Syndrome::ACK_UNLIMITED, msn), original) {
                        return Ok(());
                    }
                    self.answers.pop_front();
                }
                Answer::Read { next, queue, va, rkey, left, begun, again, msn } => {
                    let len = left.min(self.mtu);
                    let opcode = match (begun, len == left) {
                        (false, true) => Opcode::RC_READ_RESPONSE_ONLY,
                        (false, false) => Opcode::RC_READ_RESPONSE_FIRST,
                        (true, false) => Opcode::RC_READ_RESPONSE_MIDDLE,
                        (true, true) => Opcode::RC_READ_RESPONSE_LAST,
                    };
                    match self.build_data(burst, opcode, next, msn, (queue, va, rkey, len), memory) {
                        Ok(false) => return Ok(()),
                        Ok(true) if len == left => {
                            self.answers.pop_front();
                        }
                        Ok(true) => {
                            self.answers[0] = Answer::Read {
                                next: next.plus(1),
                                queue,
                                va: va.wrapping_add(u64::from(len)),
                                rkey,
                                left: left - len,
                                begun: true,
                                again,
                                msn,
                            };
                        }
                        // The requester may have the data, and the owner have taken the key away since: a network
                        // that delays doubles must not end the connection. One that waits is told.
                        Err(nak) if again => {
                            self.answers[0] = Answer::Refuse { at: next, syndrome: Syndrome::Nak(nak), msn };
                        }
                        Err(nak) => {
                            // The key was taken away meanwhile. What comes after is not answered any more.
                            self.answers.clear();
                            self.refusal = Some((next, nak));
                            self.answer_refused(next, Syndrome::Nak(nak));
                            return Err(Fault::PeerAccess);
                        }
                    }
                }
            }
        }
        Ok(())
    }

    fn bth(&self, opcode: Opcode, at: Sequence, pad: u8) -> bth::Repr {
        let opcode = self.config.service.carried(opcode);
        let bth = bth::Repr::new(opcode, self.config.remote_qp, at.psn());
        bth::Repr { pad, pkey: self.config.pkey, ..bth }
    }

    /// A packet without payload; false if there is no room.
    fn build(
        &self,
        burst: &mut Burst<'_>,
        opcode: Opcode,
        at: Sequence,
        (syndrome, msn): (Syndrome, Msn),
        original: Option<u64>,
    ) -> bool {
        let len = bth::LEN + opcode.headers_len() + ICRC_LEN;
        if !burst.has_room(len) {
            return false;
        }
        let packet = burst.begin(&self.bth(opcode, at, 0), len);
        aeth::Repr { syndrome: syndrome.to_byte(), msn }
            .emit(&mut aeth::Packet::new_unchecked(&mut packet[bth::LEN..]));
        if let Some(original) = original {
            let header = atomic_ack_eth::Repr { original };
            header.emit(&mut atomic_ack_eth::Packet::new_unchecked(&mut packet[bth::LEN + aeth::LEN..]));
        }
        burst.commit(len, false);
        true
    }

    /// A packet with a READ's data; false if there is no room, or congestion control allows no more.
    #[inline]
    fn build_data<M: Memory>(
        &self,
        burst: &mut Burst<'_>,
        opcode: Opcode,
        at: Sequence,
        msn: Msn,
        (queue, va, rkey, payload): (Srqn, u64, Rkey, u32),
        memory: &mut M,
    ) -> Result<bool, NakCode> {
        let payload = payload as usize;
        let pad = payload.next_multiple_of(4) - payload;
        let start = bth::LEN + opcode.headers_len();
        let len = start + payload + pad + ICRC_LEN;
        if !burst.is_allowed() || !burst.has_room(len) {
            return Ok(false);
        }
        let packet = burst.begin(&self.bth(opcode, at, pad as u8), len);
        if start > bth::LEN {
            let header = aeth::Repr { syndrome: Syndrome::ACK_UNLIMITED.to_byte(), msn };
            header.emit(&mut aeth::Packet::new_unchecked(&mut packet[bth::LEN..]));
        }
        if payload > 0 {
            if self.config.service == Service::Target {
                memory.select(queue).map_err(|refusal| refusal.nak())?;
            }
            memory.read(rkey, va, &mut packet[start..start + payload]).map_err(|refusal| refusal.nak())?;
            packet[start + payload..start + payload + pad].fill(0);
        }
        burst.commit(len, true);
        Ok(true)
    }
}
