//! Acknowledgements and responses (9.7.5.1, 9.7.6).

use std::collections::VecDeque;
use std::time::Duration;

use millstream_wire::{Msn, NakCode, Operation, Packet, Syndrome, credits, rnr_nanos};

use super::Requester;
use crate::event::{Event, FailureCause, Status};
use crate::extended_psn::ExtendedPsn;
use crate::memory::Memory;
use crate::request::SendOp;
use millstream_quantity::Instant;

/// The outcome of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ResponseOutcome {
    /// Valid, and possibly new.
    Accepted,
    /// For a request that is already complete.
    Stale,
    /// Matches no request.
    Unexpected,
}

impl Requester {
    /// Handles a packet from the responder's UDP source port.
    pub(crate) fn handle_response<M: Memory>(
        &mut self,
        now: Instant,
        port: u16,
        packet: &Packet<&[u8]>,
        memory: &mut M,
        events: &mut VecDeque<Event>,
    ) -> Result<ResponseOutcome, FailureCause> {
        if !self.reliable {
            return Ok(ResponseOutcome::Unexpected);
        }
        let at = self.una.nearest(packet.bth().psn());
        // Only responses to packets in flight have an effect (9.7.5.1.2).
        if at >= self.max {
            return Ok(ResponseOutcome::Unexpected);
        }
        let (syndrome, msn) = match packet.aeth() {
            Some(aeth) => (Syndrome::from_byte(aeth.syndrome()), Some(aeth.msn())),
            None => (Syndrome::ACK_UNLIMITED, None),
        };
        if at < self.una {
            // A repeated ACK may carry new credits (9.7.7.2.3).
            if at.plus(1) == self.una && packet.opcode().operation() == Operation::Acknowledge {
                self.take_credits(syndrome, msn);
            }
            return Ok(ResponseOutcome::Stale);
        }
        match packet.opcode().operation() {
            Operation::Acknowledge => {
                self.port = Some(port);
                self.acknowledge(at, syndrome, msn, now, events)
            }
            Operation::SelectiveAcknowledge => {
                if syndrome != Syndrome::Nak(NakCode::SequenceError) {
                    return Ok(ResponseOutcome::Unexpected);
                }
                self.port = Some(port);
                if at >= self.acknowledged {
                    self.acknowledge_requests(at, now, events);
                    self.handle_selective_ack(at, packet.payload(), now);
                }
                Ok(ResponseOutcome::Accepted)
            }
            Operation::ReadResponse | Operation::AtomicAcknowledge => {
                if !matches!(syndrome, Syndrome::Ack { .. }) {
                    return Ok(ResponseOutcome::Unexpected);
                }
                let in_sequence = self.expected_data() == Some(at);
                let storable = self.port == Some(port);
                let taken = self.response(at, storable, packet, memory, now, events)?;
                if taken == ResponseOutcome::Accepted {
                    if in_sequence {
                        self.port = Some(port);
                    }
                    if msn.is_some() {
                        self.take_credits(syndrome, msn);
                    }
                    self.take_reordered(memory, now, events)?;
                }
                Ok(taken)
            }
            _ => Ok(ResponseOutcome::Unexpected),
        }
    }

    fn take_credits(&mut self, syndrome: Syndrome, msn: Option<Msn>) {
        if let (Syndrome::Ack { credit_code }, Some(msn)) = (syndrome, msn) {
            self.limit = credits(credit_code).map(|credits| Msn::new(msn.get().wrapping_add(credits)));
        }
    }

    fn acknowledge(
        &mut self,
        at: ExtendedPsn,
        syndrome: Syndrome,
        msn: Option<Msn>,
        now: Instant,
        events: &mut VecDeque<Event>,
    ) -> Result<ResponseOutcome, FailureCause> {
        match syndrome {
            Syndrome::Ack { .. } => {
                self.take_credits(syndrome, msn);
                self.acknowledge_requests(at.plus(1), now, events);
            }
            // A NAK acknowledges the packets before its own (9.7.5.2.8).
            Syndrome::RnrNak { timer_code } => {
                if self.acknowledge_until(at, now, events) {
                    self.not_ready(timer_code, now, events)?;
                }
            }
            Syndrome::Nak(NakCode::SequenceError) => {
                if at >= self.acknowledged {
                    self.acknowledge_requests(at, now, events);
                    self.handle_sequence_nak(at);
                }
            }
            Syndrome::Nak(code) => {
                if self.acknowledge_until(at, now, events) {
                    let status = match code {
                        NakCode::RemoteAccess => Status::RemoteAccess,
                        NakCode::RemoteOperational => Status::RemoteOperation,
                        NakCode::InvalidRequest | NakCode::SequenceError => Status::RemoteInvalidRequest,
                    };
                    self.fail_head(status, events)?;
                }
            }
            Syndrome::Reserved(_) => return Ok(ResponseOutcome::Unexpected),
        }
        Ok(ResponseOutcome::Accepted)
    }

    /// Handles an acknowledgement of all requests before `until`. It implies that their READ data was sent: what is
    /// missing is requested again (an implied NAK, 9.7.5.2.2).
    fn acknowledge_requests(&mut self, until: ExtendedPsn, now: Instant, events: &mut VecDeque<Event>) {
        self.acknowledged = self.acknowledged.max(until);
        self.settle(self.una, now, events);
        self.gaps_closed_until(self.acknowledged, now);
        if let Some(expected) = self.expected_data().filter(|expected| *expected < until) {
            self.data_lost(self.first_unknown(expected), until);
        }
    }

    /// Acknowledges everything before `una`, and what an ACK has acknowledged behind it up to the next missing data.
    fn settle(&mut self, una: ExtendedPsn, now: Instant, events: &mut VecDeque<Event>) {
        if una > self.una {
            self.advance(una, now, events);
        }
        let settled =
            self.expected_data().map_or(self.acknowledged, |expected| self.acknowledged.min(expected));
        if settled > self.una {
            self.advance(settled, now, events);
        }
    }

    /// Acknowledges everything before `until`, where a NAK has named the packet at `until`. Returns false if READ data
    /// before it is missing: then the NAK has no other effect, and all packets from that data on are sent again.
    fn acknowledge_until(&mut self, until: ExtendedPsn, now: Instant, events: &mut VecDeque<Event>) -> bool {
        let expected = self.awaiting_data.front().map(|due| due.0.max(self.una));
        let settled = expected.map_or(until, |expected| until.min(expected));
        if settled > self.una {
            self.advance(settled, now, events);
        }
        if settled == until {
            return true;
        }
        if self.rewound_to != Some(settled) && self.timers.rnr_wait.is_none() {
            self.begin_recovery(false);
            self.rewind(settled);
        }
        false
    }

    /// Handles an RNR NAK of the oldest packet.
    fn not_ready(
        &mut self,
        timer_code: u8,
        now: Instant,
        events: &mut VecDeque<Event>,
    ) -> Result<(), FailureCause> {
        if self.timers.rnr_wait.is_some() {
            return Ok(());
        }
        match self.rnr_left {
            0 => return self.fail_head(Status::RnrRetryExceeded, events),
            // Infinite (9.7.5.2.8).
            7 => {}
            _ => self.rnr_left -= 1,
        }
        // The responder chooses the delay. No other timer ends it.
        self.timers.rnr_wait = Some(now + Duration::from_nanos(rnr_nanos(timer_code)));
        self.timers.retransmit = None;
        self.timers.probe = None;
        self.timers.gap = None;
        self.probe_due = false;
        Ok(())
    }

    /// Handles stored data that is in sequence now. An invalid packet may be forged; its data is requested
    /// again.
    fn take_reordered<M: Memory>(
        &mut self,
        memory: &mut M,
        now: Instant,
        events: &mut VecDeque<Event>,
    ) -> Result<(), FailureCause> {
        while let Some(expected) = self.expected_data() {
            let Some(bytes) = self.reorder_buffer.take(expected) else { break };
            let Ok(packet) = Packet::new_checked(&bytes[..]) else { break };
            let result = self.response(expected, true, &packet, memory, now, events)?;
            self.reorder_buffer.recycle(bytes);
            if result != ResponseOutcome::Accepted {
                break;
            }
        }
        Ok(())
    }

    /// The next packet of the oldest READ or atomic operation whose data is missing.
    pub(super) fn expected_data(&self) -> Option<ExtendedPsn> {
        self.awaiting_data.front().map(|due| due.0.max(self.una))
    }

    /// Handles data of a READ or atomic operation. `storable`: it came from the UDP source port in use.
    fn response<M: Memory>(
        &mut self,
        at: ExtendedPsn,
        storable: bool,
        packet: &Packet<&[u8]>,
        memory: &mut M,
        now: Instant,
        events: &mut VecDeque<Event>,
    ) -> Result<ResponseOutcome, FailureCause> {
        let Some(posted) = self.queue.get(self.find(at)).copied() else {
            return Ok(ResponseOutcome::Unexpected);
        };
        let atomic = packet.atomic_ack_eth().map(|header| header.original().to_ne_bytes());
        let (offset, data) = match (posted.work, &atomic) {
            (SendOp::Read { .. }, None) => {
                let offset = u64::from(at.since(posted.start)) * u64::from(self.mtu);
                // Each packet has exactly the requested length, so the sum does not exceed the request.
                let due = (u64::from(posted.len) - offset).min(u64::from(self.mtu));
                if packet.payload().len() as u64 != due {
                    return Ok(ResponseOutcome::Unexpected);
                }
                (offset as u32, packet.payload())
            }
            (SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. }, Some(word)) => (0, &word[..]),
            (SendOp::AtomicWrite { .. }, None) if packet.payload().is_empty() => {
                self.acknowledge_until(at.plus(1), now, events);
                return Ok(ResponseOutcome::Accepted);
            }
            _ => return Ok(ResponseOutcome::Unexpected),
        };
        self.missing.arrived(at, packet.opcode().position().begins());
        match self.expected_data() {
            Some(expected) if at == expected => {}
            // Data before it is missing.
            Some(expected) if at > expected => {
                self.handle_out_of_order_data(expected, at, storable.then_some(packet), now, events);
                return Ok(ResponseOutcome::Accepted);
            }
            _ => return Ok(ResponseOutcome::Stale),
        }
        if !data.is_empty()
            && let Err(status) = memory.scatter(posted.id, offset, data)
        {
            if at > self.una {
                self.advance(at, now, events);
            }
            self.fail_head(status, events)?;
        }
        if at >= self.next {
            // This data was not requested again: the first response is still arriving.
            self.cancel_retransmit();
        }
        self.settle(at.plus(1), now, events);
        self.reorder_buffer.in_sequence();
        Ok(ResponseOutcome::Accepted)
    }

    /// Handles data behind a gap: only the missing data before it is requested again.
    fn handle_out_of_order_data(
        &mut self,
        expected: ExtendedPsn,
        at: ExtendedPsn,
        storable: Option<&Packet<&[u8]>>,
        now: Instant,
        events: &mut VecDeque<Event>,
    ) {
        let missing_from = self.first_unknown(expected);
        if !storable.is_some_and(|packet| self.reorder_buffer.keep(expected, at, packet)) {
            self.acknowledge_until(at, now, events);
            return;
        }
        if expected > self.una {
            self.advance(expected, now, events);
        }
        if at >= self.next && self.recovery.is_some_and(|recovery| recovery.is_reported) {
            self.cancel_retransmit();
        }
        self.data_lost(missing_from, at);
    }

    /// Behind the last data that has arrived.
    fn first_unknown(&self, expected: ExtendedPsn) -> ExtendedPsn {
        self.reorder_buffer.last().map_or(expected, |last| expected.max(last.plus(1)))
    }

    /// Requests data in `from..until` again. The responder has sent data behind it.
    fn data_lost(&mut self, from: ExtendedPsn, until: ExtendedPsn) {
        if from < until && self.timers.rnr_wait.is_none() {
            self.rtt.lost();
            self.missing.lost(from, until);
        }
    }
}
