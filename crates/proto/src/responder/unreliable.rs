//! Requests of an unreliable connection (9.8.2): a message arrives whole or not at all, and nothing is answered.

use std::collections::VecDeque;

use millstream_wire::{NakCode, Operation, Packet};

use super::{Outcome, Progress, Responder, Stop};
use crate::event::{Event, Fault};
use crate::memory::Memory;

impl Responder {
    /// Takes a request from the peer.
    pub(crate) fn handle_unreliable<M: Memory>(
        &mut self,
        packet: &Packet<&[u8]>,
        memory: &mut M,
        events: &mut VecDeque<Event>,
    ) -> Result<Outcome, Fault> {
        let at = self.expected.nearest(packet.bth().psn());
        let begins = packet.opcode().position().begins();
        // A gap: the rest of the message is lost; the next one that begins is welcome whatever its number
        // (9.8.2.2.1). One that comes late is a duplicate, or was overtaken.
        if at < self.expected {
            return Ok(Outcome::Duplicate);
        }
        if at > self.expected || begins {
            self.abandon();
        }
        self.expected = at.plus(1);
        if !begins && self.progress.is_none() {
            return Ok(Outcome::OutOfSequence);
        }
        let operation = packet.opcode().operation();
        let result = self.check_position(packet).and_then(|()| self.check_operation(operation));
        let result = result.map_err(Stop::from).and_then(|()| match operation {
            Operation::Send => self.send(packet, memory, events),
            Operation::Write => self.write(packet, memory, events),
            _ => Err(NakCode::InvalidRequest.into()),
        });
        match result {
            Ok(()) => Ok(Outcome::Executed),
            Err(Stop::NoReceive) => {
                self.progress = None;
                Ok(Outcome::NotReady)
            }
            Err(Stop::Refused(refused)) => match refused.receive {
                // A fault of this side ends the queue pair (9.9.3.2).
                Some(_) => {
                    self.progress = None;
                    let fault = self.refuse(at, refused, events);
                    self.answers.clear();
                    self.refusal = None;
                    Err(fault)
                }
                // One of the other side only the message.
                None => {
                    self.abandon();
                    Ok(Outcome::Dropped)
                }
            },
        }
    }

    /// The rest of the message will not come. Its receive request is there for the next one.
    fn abandon(&mut self) {
        if let Some(Progress::Send { receive, .. }) = self.progress.take() {
            self.held = Some(receive);
        }
    }
}
