//! Requests from beyond a gap, kept until their turn comes: what was lost is then all that has to come again.
//!
//! The gap is told all the same (9.7.5.2.8), and nothing of a kept packet counts before those in front of it were carried
//! out: to the requester it is as if the network had held the packet back. It begins again at the gap, and the
//! acknowledgement of the packets behind lets it leave them out.
//!
//! A packet that is kept was not yet the very next one, so its number is easier to guess. It must not make the
//! queue pair fail where it is of no use to it: then it is as if it had not come.

use std::collections::VecDeque;

use millstream_wire::{NakCode, Packet, Syndrome};

use super::{Refused, Responder, Stop};
use crate::event::{Event, Fault};
use crate::memory::Memory;
use crate::sequence::Sequence;

impl Responder {
    /// A request whose turn has not come.
    pub(super) fn keep_for_later(&mut self, at: Sequence, packet: &Packet<&[u8]>) {
        let _ = self.kept.keep(self.expected, at, packet);
    }

    /// Carries out the next request that was kept, if its turn has come; whether there was anything to do.
    pub(crate) fn handle_kept<M: Memory>(
        &mut self,
        memory: &mut M,
        events: &mut VecDeque<Event>,
    ) -> Result<bool, Fault> {
        let Some(before) = self.catching_up else { return Ok(false) };
        let at = self.expected;
        let bytes = self.kept.take(at);
        if let Some(Ok(packet)) = bytes.as_deref().map(Packet::new_checked) {
            match self.execute(at, &packet, memory, events) {
                Ok(()) => return Ok(true),
                Err(Stop::Refused(Refused { receive: None, .. })) => {
                    self.answer_refused(at, Syndrome::Nak(NakCode::SequenceError));
                }
                Err(Stop::NoReceive) => {
                    self.catching_up = None;
                    self.not_ready(at);
                    return Ok(true);
                }
                Err(Stop::Refused(refused)) => return Err(self.refuse(at, refused, events)),
            }
        }
        self.catching_up = None;
        // The next gap was there when the requester heard of this one: it has begun again before it.
        self.early = self.kept.last();
        // At once, whether it was asked for or not: the requester is sending all that again.
        if let Some(last) = self.acknowledgeable.filter(|last| *last >= before) {
            self.acknowledge(last);
        }
        Ok(true)
    }
}
