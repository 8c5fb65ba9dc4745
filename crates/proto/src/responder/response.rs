//! Acknowledgements and responses to send, in the order of their requests: no ACK may imply READ data that
//! was not sent.

use millstream_wire::{ICRC_LEN, Msn, NakCode, Opcode, Rkey, Srqn, Syndrome, aeth, atomic_ack_eth, bth};

use super::{ResourceKind, Responder};
use crate::burst::Burst;
use crate::config::Service;
use crate::event::FailureCause;
use crate::extended_psn::ExtendedPsn;
use crate::memory::Memory;
use crate::selective_ack;

/// A queued acknowledgement or response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Response {
    /// ACK of all packets up to `at`.
    Ack { at: ExtendedPsn, msn: Msn },
    /// NAK or RNR NAK of the packet `at`; acknowledges all packets before it.
    Nak { at: ExtendedPsn, syndrome: Syndrome, msn: Msn },
    /// NAK of the packet `at`, with the packets behind it that have arrived when it is sent.
    SelectiveAck { at: ExtendedPsn, msn: Msn },
    /// The rest of a READ response.
    Read {
        next: ExtendedPsn,
        queue: Srqn,
        va: u64,
        rkey: Rkey,
        left: u32,
        begun: bool,
        again: bool,
        msn: Msn,
    },
    /// The response of an operation with one response packet.
    Single { at: ExtendedPsn, kind: ResourceKind, again: bool, msn: Msn },
}

impl Response {
    /// Whether it occupies a responder resource. A response to a duplicate request does not.
    pub(super) const fn uses_resource(&self) -> bool {
        matches!(self, Self::Read { again: false, .. } | Self::Single { again: false, .. })
    }

    /// Whether it is the response to a duplicate READ request.
    pub(super) const fn repeats_read(&self) -> bool {
        matches!(self, Self::Read { again: true, .. })
    }
}

impl Responder {
    /// Queues an ACK of all packets up to `at`. Adjacent ACKs are coalesced (9.7.5.1.2).
    pub(super) fn acknowledge(&mut self, at: ExtendedPsn) {
        let answer = Response::Ack { at, msn: self.msn };
        if let Some(last @ Response::Ack { .. }) = self.responses.back_mut() {
            *last = answer;
        } else if self.has_room() {
            self.responses.push_back(answer);
        }
    }

    /// Queues a NAK or RNR NAK, which replaces an earlier one of the same packet.
    pub(super) fn queue_nak(&mut self, at: ExtendedPsn, syndrome: Syndrome) {
        if matches!(self.responses.back(), Some(Response::Nak { at: same, .. }) if *same == at) {
            self.responses.pop_back();
        }
        let is_fatal = self.fatal_nak.is_some();
        if is_fatal || self.has_room() {
            self.responses.push_back(Response::Nak { at, syndrome, msn: self.msn });
        }
    }

    /// Queues a selective acknowledgement. It acknowledges all packets before the gap, like the ACK or the earlier
    /// one that it replaces.
    pub(super) fn acknowledge_selectively(&mut self) {
        if let Some(Response::Ack { .. } | Response::SelectiveAck { .. }) = self.responses.back() {
            self.responses.pop_back();
        }
        if self.has_room() {
            self.responses.push_back(Response::SelectiveAck { at: self.expected, msn: self.msn });
        }
    }

    /// Whether another response may be queued. There is always room for the operations that the peer may have
    /// outstanding, with an ACK between any two. More come from duplicates, or from a broken or hostile peer.
    pub(super) fn has_room(&self) -> bool {
        self.responses.len() < 2 * usize::from(self.config.max_dest_rd_atomic) + 16
    }

    /// Whether a response is queued.
    pub(crate) fn has_responses(&self) -> bool {
        !self.responses.is_empty()
    }

    /// Whether a single ACK is all that is queued.
    pub(crate) fn has_only_acknowledgement(&self) -> bool {
        self.responses.len() == 1 && matches!(self.responses[0], Response::Ack { .. })
    }

    /// Fills the burst with responses.
    pub(crate) fn transmit<M: Memory>(
        &mut self,
        memory: &mut M,
        burst: &mut Burst<'_>,
    ) -> Result<(), FailureCause> {
        while let Some(answer) = self.responses.front().copied() {
            match answer {
                Response::Ack { at, msn } => {
                    if !self.build(burst, Opcode::RC_ACKNOWLEDGE, at, (Syndrome::ACK_UNLIMITED, msn), None) {
                        return Ok(());
                    }
                    self.responses.pop_front();
                }
                Response::Nak { at, syndrome, msn } => {
                    if !self.build(burst, Opcode::RC_ACKNOWLEDGE, at, (syndrome, msn), None) {
                        return Ok(());
                    }
                    self.responses.pop_front();
                }
                Response::SelectiveAck { at, msn } => {
                    // Once the gap is closed, a later response reports the rest.
                    if at == self.expected && !self.build_selective_ack(burst, at, msn) {
                        return Ok(());
                    }
                    self.responses.pop_front();
                }
                Response::Single { at, kind, msn, .. } => {
                    let (opcode, original) = match kind {
                        ResourceKind::Atomic(original) => (Opcode::RC_ATOMIC_ACKNOWLEDGE, Some(original)),
                        // An atomic WRITE is answered by an empty READ response (annex A19).
                        _ => (Opcode::RC_READ_RESPONSE_ONLY, None),
                    };
                    if !self.build(burst, opcode, at, (Syndrome::ACK_UNLIMITED, msn), original) {
                        return Ok(());
                    }
                    self.responses.pop_front();
                }
                Response::Read { next, queue, va, rkey, left, begun, again, msn } => {
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
                            self.responses.pop_front();
                        }
                        Ok(true) => {
                            self.responses[0] = Response::Read {
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
                        // The requester may have the data already, and the key may have been invalidated
                        // since. A delayed duplicate must not end the connection. A requester that waits
                        // receives the NAK.
                        Err(nak) if again => {
                            self.responses[0] = Response::Nak { at: next, syndrome: Syndrome::Nak(nak), msn };
                        }
                        Err(nak) => {
                            // The key was invalidated meanwhile; later requests are not answered.
                            self.responses.clear();
                            self.fatal_nak = Some((next, nak));
                            self.queue_nak(next, Syndrome::Nak(nak));
                            return Err(FailureCause::AccessViolation);
                        }
                    }
                }
            }
        }
        Ok(())
    }

    fn bth(&self, opcode: Opcode, at: ExtendedPsn, pad: u8) -> bth::Repr {
        let opcode = self.config.service.opcode_of(opcode);
        let bth = bth::Repr::new(opcode, self.config.remote_qp, at.psn());
        bth::Repr { pad, pkey: self.config.pkey, ..bth }
    }

    /// Builds a packet without payload; false if there is no room.
    fn build(
        &self,
        burst: &mut Burst<'_>,
        opcode: Opcode,
        at: ExtendedPsn,
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

    /// Builds a selective acknowledgement; false if there is no room.
    fn build_selective_ack(&self, burst: &mut Burst<'_>, at: ExtendedPsn, msn: Msn) -> bool {
        let opcode = Opcode::RC_SELECTIVE_ACKNOWLEDGE;
        let start = bth::LEN + opcode.headers_len();
        let end = start + selective_ack::bitmap_len(&self.reorder_buffer, at);
        let len = end + ICRC_LEN;
        if !burst.has_room(len) {
            return false;
        }
        let packet = burst.begin(&self.bth(opcode, at, 0), len);
        let syndrome = Syndrome::Nak(NakCode::SequenceError).to_byte();
        aeth::Repr { syndrome, msn }.emit(&mut aeth::Packet::new_unchecked(&mut packet[bth::LEN..]));
        selective_ack::emit_bitmap(&self.reorder_buffer, at, &mut packet[start..end]);
        burst.commit(len, false);
        true
    }

    /// Builds a READ response; false if there is no room, or the byte budget is used up.
    #[inline]
    fn build_data<M: Memory>(
        &self,
        burst: &mut Burst<'_>,
        opcode: Opcode,
        at: ExtendedPsn,
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
            if self.config.service == Service::XrcTarget {
                memory.select(queue).map_err(|reason| reason.nak())?;
            }
            memory.read(rkey, va, &mut packet[start..start + payload]).map_err(|reason| reason.nak())?;
            packet[start + payload..start + payload + pad].fill(0);
        }
        burst.commit(len, true);
        Ok(true)
    }
}
