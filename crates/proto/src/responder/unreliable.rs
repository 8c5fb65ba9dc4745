//! Requests of an unreliable connection (9.8.2): a message arrives whole or not at all, and there are no
//! responses.

use std::collections::VecDeque;

use millstream_wire::{NakCode, Operation, Packet};

use super::{ExecError, PartialMessage, RequestOutcome, Responder};
use crate::event::{Event, FailureCause};
use crate::memory::Memory;

impl Responder {
    /// Handles a request of the peer.
    pub(crate) fn handle_unreliable<M: Memory>(
        &mut self,
        packet: &Packet<&[u8]>,
        memory: &mut M,
        events: &mut VecDeque<Event>,
    ) -> Result<RequestOutcome, FailureCause> {
        let at = self.expected.nearest(packet.bth().psn());
        let begins = packet.opcode().position().begins();
        // A gap: the rest of the message is lost, and the next first packet is accepted with any PSN
        // (9.8.2.2.1). Packets from before are duplicates or were overtaken.
        if at < self.expected {
            return Ok(RequestOutcome::Duplicate);
        }
        if at > self.expected || begins {
            self.abandon();
        }
        self.expected = at.plus(1);
        if !begins && self.partial.is_none() {
            return Ok(RequestOutcome::OutOfSequence);
        }
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
