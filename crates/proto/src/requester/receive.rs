//! Acknowledgements and responses (9.7.5.1, 9.7.6).

use std::collections::VecDeque;
use std::time::Duration;

use millstream_wire::{Msn, NakCode, Operation, Packet, Syndrome, credits, rnr_nanos};

use super::Requester;
use crate::event::{Event, Fault, Status};
use crate::memory::Memory;
use crate::request::Work;
use crate::sequence::Sequence;
use millstream_quantity::Instant;

/// What became of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// It was news, or at least could have been.
    Well,
    /// About something long answered.
    Stale,
    /// About something that was never asked, or not so.
    Unexpected,
}

impl Requester {
    /// Takes a packet from the responder.
    pub(crate) fn handle_response<M: Memory>(
        &mut self,
        now: Instant,
        packet: &Packet<&[u8]>,
        memory: &mut M,
        events: &mut VecDeque<Event>,
    ) -> Result<Taken, Fault> {
        if !self.reliable {
            return Ok(Taken::Unexpected);
        }
        let at = self.una.nearest(packet.bth().psn());
        // Neither answered already nor still to be sent: only such a packet changes anything (9.7.5.1.2).
        if at >= self.max {
            return Ok(Taken::Unexpected);
        }
        let (syndrome, msn) = match packet.aeth() {
            Some(aeth) => (Syndrome::from_byte(aeth.syndrome()), Some(aeth.msn())),
            None => (Syndrome::ACK_UNLIMITED, None),
        };
        if at < self.una {
            // The last answer once more may bring credits (9.7.7.2.3).
            if at.plus(1) == self.una && packet.opcode().operation() == Operation::Acknowledge {
                self.take_credits(syndrome, msn);
            }
            return Ok(Taken::Stale);
        }
        match packet.opcode().operation() {
            Operation::Acknowledge => self.acknowledge(at, syndrome, msn, now, events),
            Operation::ReadResponse | Operation::AtomicAcknowledge => {
                if !matches!(syndrome, Syndrome::Ack { .. }) {
                    return Ok(Taken::Unexpected);
                }
                let taken = self.response(at, packet, memory, now, events)?;
                if taken == Taken::Well {
                    if msn.is_some() {
                        self.take_credits(syndrome, msn);
                    }
                    self.catch_up(memory, now, events)?;
                }
                Ok(taken)
            }
            _ => Ok(Taken::Unexpected),
        }
    }

    fn take_credits(&mut self, syndrome: Syndrome, msn: Option<Msn>) {
        if let (Syndrome::Ack { credit_code }, Some(msn)) = (syndrome, msn) {
            self.limit = credits(credit_code).map(|credits| Msn::new(msn.get().wrapping_add(credits)));
        }
    }

    fn acknowledge(
        &mut self,
        at: Sequence,
        syndrome: Syndrome,
        msn: Option<Msn>,
        now: Instant,
        events: &mut VecDeque<Event>,
    ) -> Result<Taken, Fault> {
        match syndrome {
            Syndrome::Ack { .. } => {
                self.take_credits(syndrome, msn);
                self.settle(at.plus(1), now, events);
            }
            // A NAK acknowledges what is before its packet (9.7.5.2.8).
            Syndrome::RnrNak { timer_code } => {
                if self.settle(at, now, events) {
                    self.not_ready(timer_code, now, events)?;
                }
            }
            Syndrome::Nak(NakCode::SequenceError) => {
                if self.settle(at, now, events) {
                    self.missing();
                }
            }
            Syndrome::Nak(code) => {
                if self.settle(at, now, events) {
                    let status = match code {
                        NakCode::RemoteAccess => Status::RemoteAccess,
                        NakCode::RemoteOperational => Status::RemoteOperation,
                        NakCode::InvalidRequest | NakCode::SequenceError => Status::RemoteInvalidRequest,
                    };
                    self.fail_head(status, events)?;
                }
            }
            Syndrome::Reserved(_) => return Ok(Taken::Unexpected),
        }
        Ok(Taken::Well)
    }

    /// The responder has carried out everything before `until`. False if that means that data is missing:
    /// then it is asked for again (an implied NAK, 9.7.5.2.2).
    fn settle(&mut self, until: Sequence, now: Instant, events: &mut VecDeque<Event>) -> bool {
        let expected = self.due.front().map(|due| due.0.max(self.una));
        let settled = expected.map_or(until, |expected| until.min(expected));
        if settled > self.una {
            self.advance(settled, now, events);
        }
        if settled == until {
            return true;
        }
        if self.went_back != Some(settled) && self.timers.rnr_wait.is_none() {
            self.begin_recovery();
            self.go_back(settled);
        }
        false
    }

    /// No receive request for the oldest packet.
    fn not_ready(&mut self, timer_code: u8, now: Instant, events: &mut VecDeque<Event>) -> Result<(), Fault> {
        if self.timers.rnr_wait.is_some() {
            return Ok(());
        }
        match self.rnr_left {
            0 => return self.fail_head(Status::RnrRetryExceeded, events),
            // For ever (9.7.5.2.8).
            7 => {}
            _ => self.rnr_left -= 1,
        }
        // The wait is as long as the responder wants: the other timers do not end it.
        self.timers.rnr_wait = Some(now + Duration::from_nanos(rnr_nanos(timer_code)));
        self.timers.retransmit = None;
        self.timers.probe = None;
        self.probe_due = false;
        Ok(())
    }

    /// The oldest packet did not arrive, later ones did.
    ///
    /// That alone uses up no retry, and does not start the retransmit timer anew: in a network that reorders, many
    /// such NAKs come within one round trip. What ends the attempts is time without progress.
    fn missing(&mut self) {
        // Nothing was sent again since: the same NAK once more.
        if self.timers.rnr_wait.is_none() && self.next != self.una {
            self.begin_recovery();
            self.go_back(self.una);
        }
    }

    /// Takes data that was kept, and whose turn has come. What is no answer may be forged: it is asked for again.
    fn catch_up<M: Memory>(
        &mut self,
        memory: &mut M,
        now: Instant,
        events: &mut VecDeque<Event>,
    ) -> Result<(), Fault> {
        while let Some(expected) = self.due.front().map(|due| due.0.max(self.una)) {
            let Some(bytes) = self.kept.take(expected) else { break };
            let Ok(packet) = Packet::new_checked(&bytes[..]) else { break };
            if self.response(expected, &packet, memory, now, events)? != Taken::Well {
                break;
            }
        }
        Ok(())
    }

    /// Data of a READ or of an atomic operation.
    fn response<M: Memory>(
        &mut self,
        at: Sequence,
        packet: &Packet<&[u8]>,
        memory: &mut M,
        now: Instant,
        events: &mut VecDeque<Event>,
    ) -> Result<Taken, Fault> {
        let Some(posted) = self.queue.get(self.find(at)).copied() else { return Ok(Taken::Unexpected) };
        let atomic = packet.atomic_ack_eth().map(|header| header.original().to_ne_bytes());
        let (offset, data) = match (posted.work, &atomic) {
            (Work::Read { .. }, None) => {
                let offset = u64::from(at.since(posted.start)) * u64::from(self.mtu);
                // Each packet has exactly what was asked for, so all together are no more than that.
                let due = (u64::from(posted.len) - offset).min(u64::from(self.mtu));
                if packet.payload().len() as u64 != due {
                    return Ok(Taken::Unexpected);
                }
                (offset as u32, packet.payload())
            }
            (Work::CompareSwap { .. } | Work::FetchAdd { .. }, Some(word)) => (0, &word[..]),
            (Work::AtomicWrite { .. }, None) if packet.payload().is_empty() => {
                self.settle(at.plus(1), now, events);
                return Ok(Taken::Well);
            }
            _ => return Ok(Taken::Unexpected),
        };
        match self.due.front().map(|due| due.0.max(self.una)) {
            Some(expected) if at == expected => {}
            // Something before it is missing.
            Some(expected) if at > expected => {
                self.early(expected, at, packet, now, events);
                return Ok(Taken::Well);
            }
            _ => return Ok(Taken::Stale),
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
            // This was not asked for again: what was asked for the first time is still coming.
            self.leave_the_rest();
        }
        self.advance(at.plus(1), now, events);
        Ok(Taken::Well)
    }

    /// Data that came before its turn: all that is missing in front of it is asked for again, and nothing else.
    fn early(
        &mut self,
        expected: Sequence,
        at: Sequence,
        packet: &Packet<&[u8]>,
        now: Instant,
        events: &mut VecDeque<Event>,
    ) {
        let last = self.kept.last().filter(|last| *last >= expected);
        if !self.kept.keep(expected, at, packet) {
            self.settle(at, now, events);
            return;
        }
        if expected > self.una {
            self.advance(expected, now, events);
        }
        match last {
            None => self.mend(expected, at),
            Some(last) if at > last => self.mend(last.plus(1), at),
            // It was asked for again, and what was asked for before it did not come; or it was a probe.
            Some(_) if self.went_back != Some(expected) => {
                self.went_back = Some(expected);
                self.mend(expected, at);
            }
            Some(_) => {}
        }
    }
}
