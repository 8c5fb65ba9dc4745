//! Requests from the reorder buffer.
//!
//! The sequence NAK is sent as specified (9.7.5.2.8). A stored packet has no effect before the packets in
//! front of it were executed. The requester rewinds to the gap; the ACK of the stored packets lets it skip
//! them.
//!
//! The PSN of a stored packet was not exactly the expected one, so it is easier to forge. An invalid stored
//! packet therefore does not fail the queue pair; it is treated as lost.

use std::collections::VecDeque;

use millstream_wire::{NakCode, Packet, Syndrome};

use super::{ExecError, Nak, Responder};
use crate::event::{Event, FailureCause};
use crate::extended_psn::ExtendedPsn;
use crate::memory::Memory;

impl Responder {
    /// Stores a request behind a gap.
    pub(super) fn store(&mut self, at: ExtendedPsn, packet: &Packet<&[u8]>) {
        let _ = self.reorder_buffer.keep(self.expected, at, packet);
    }

    /// Executes the next stored request if it is in sequence; returns whether there was work.
    pub(crate) fn handle_reordered<M: Memory>(
        &mut self,
        memory: &mut M,
        events: &mut VecDeque<Event>,
    ) -> Result<bool, FailureCause> {
        let Some(before) = self.gap_closed_at else { return Ok(false) };
        let at = self.expected;
        let bytes = self.reorder_buffer.take(at);
        if let Some(Ok(packet)) = bytes.as_deref().map(Packet::new_checked) {
            match self.execute(at, &packet, memory, events) {
                Ok(()) => return Ok(true),
                Err(ExecError::Nak(Nak { receive: None, .. })) => {
                    self.queue_nak(at, Syndrome::Nak(NakCode::SequenceError));
                }
                Err(ExecError::NoReceive) => {
                    self.gap_closed_at = None;
                    self.not_ready(at);
                    return Ok(true);
                }
                Err(ExecError::Nak(nak)) => return Err(self.fail_with_nak(at, nak, events)),
            }
        }
        self.gap_closed_at = None;
        // The next gap existed when the requester received the NAK for this one: it has rewound behind it
        // already.
        self.reported_gap = self.reorder_buffer.last();
        // Sent at once, even without the AckReq bit: the requester is retransmitting these packets.
        if let Some(last) = self.acknowledgeable.filter(|last| *last >= before) {
            self.acknowledge(last);
        }
        Ok(true)
    }
}
