//! Requests of an unreliable connection (9.8.2): a message arrives whole or not at all, and there are no
//! responses.
//!
//! The first packet of a message is accepted with any PSN, also a lower one (9.8.2.2.1). So neither a forged
//! packet nor a sender that was reset makes the responder ignore later messages. The specification lets
//! duplicates of a message pass; [`RecentMessages`] drops those that the network makes.

use std::collections::VecDeque;
use std::time::Duration;

use millstream_quantity::Instant;
use millstream_wire::{ICRC_LEN, NakCode, Operation, Packet, Psn};

use super::{ExecError, PartialMessage, RequestOutcome, Responder};
use crate::event::{Event, FailureCause, Status};
use crate::extended_psn::ExtendedPsn;
use crate::memory::Memory;

/// The first packets of recent messages, to detect duplicates.
#[derive(Debug, Default)]
pub(super) struct RecentMessages(VecDeque<(Instant, Psn, [u8; ICRC_LEN])>);

impl RecentMessages {
    const MOST: usize = 128;
    /// Longest time after which a network delivers a packet again. A later one is a new message.
    const AGE: Duration = Duration::from_millis(1);

    /// Whether the first packet of a message is identical to a recent one; remembers it if not.
    fn repeats(&mut self, now: Instant, psn: Psn, icrc: [u8; ICRC_LEN]) -> bool {
        while self.0.front().is_some_and(|(at, ..)| *at + Self::AGE < now) {
            self.0.pop_front();
        }
        if self.0.iter().any(|(_, number, digest)| (*number, *digest) == (psn, icrc)) {
            return true;
        }
        if self.0.len() == Self::MOST {
            self.0.pop_front();
        }
        self.0.push_back((now, psn, icrc));
        false
    }
}

impl Responder {
    /// Handles a request of the peer that arrived at `now`.
    pub(crate) fn handle_unreliable<M: Memory>(
        &mut self,
        now: Instant,
        packet: &Packet<&[u8]>,
        memory: &mut M,
        events: &mut VecDeque<Event>,
    ) -> Result<RequestOutcome, FailureCause> {
        let psn = packet.bth().psn();
        if packet.opcode().position().begins() {
            if self.recent.repeats(now, psn, packet.icrc()) {
                return Ok(RequestOutcome::Duplicate);
            }
            self.abandon();
            self.expected = ExtendedPsn::first(psn);
        }
        let at = self.expected.nearest(psn);
        if at < self.expected {
            return Ok(RequestOutcome::Duplicate);
        }
        if at > self.expected {
            // The rest of the message is lost.
            self.abandon();
        }
        if !packet.opcode().position().begins() && self.partial.is_none() {
            return Ok(RequestOutcome::OutOfSequence);
        }
        self.expected = at.plus(1);
        let operation = packet.opcode().operation();
        let result = self.check_position(packet).and_then(|()| self.check_operation(operation));
        let result = result.map_err(ExecError::from).and_then(|()| match operation {
            Operation::Send => self.send(packet, memory, events),
            Operation::Write => self.write(packet, memory, events),
            _ => Err(NakCode::InvalidRequest.into()),
        });
        match result {
            Ok(()) => Ok(RequestOutcome::Executed),
            Err(ExecError::NoReceive) => {
                self.partial = None;
                Ok(RequestOutcome::NotReady)
            }
            Err(ExecError::Nak(nak)) => match nak.receive {
                // What is too long for its receive request is the peer's error; the next message uses the request.
                Some((receive, Status::LocalLength)) => {
                    self.partial = None;
                    self.spare_receive = Some(receive);
                    Ok(RequestOutcome::Dropped)
                }
                // A local error fails the queue pair (9.9.3.2).
                Some(_) => {
                    self.partial = None;
                    let fault = self.fail_with_nak(at, nak, events);
                    self.responses.clear();
                    self.fatal_nak = None;
                    Err(fault)
                }
                // A remote error aborts only the message.
                None => {
                    self.abandon();
                    Ok(RequestOutcome::Dropped)
                }
            },
        }
    }

    /// Aborts the message; the next one uses its receive request.
    fn abandon(&mut self) {
        if let Some(PartialMessage::Send { receive, .. }) = self.partial.take() {
            self.spare_receive = Some(receive);
        }
    }
}
