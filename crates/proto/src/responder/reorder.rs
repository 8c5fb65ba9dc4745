//! Requests from the reorder buffer.
//!
//! The sequence NAK is sent as specified (9.7.5.2.8). A stored packet has no effect before the packets in
//! front of it were executed. The requester rewinds to the gap; the ACK of the stored packets lets it skip
//! them.
//!
//! A stored packet without access to the memory that it names fails the queue pair, as in sequence. Otherwise
//! the peer could try any number of memory keys on one connection. Other invalid stored packets are treated as
//! lost, because their PSNs were easier to forge than the expected one. If the peer did send the packet, it
//! sends it again in sequence.

use std::collections::VecDeque;

use millstream_wire::{NakCode, Packet, Syndrome};

use super::{ExecError, Nak, Responder};
use crate::config::Service;
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
        if let Some(bytes) = bytes
            && let Ok(packet) = Packet::new_checked(&bytes[..])
        {
            let result = self.execute(at, &packet, memory, events);
            self.reorder_buffer.recycle(bytes);
            match result {
                Ok(()) => return Ok(true),
                Err(ExecError::Nak(Nak { code, receive }))
                    if self.counts_as_lost(code, receive.is_some()) =>
                {
                    // A message that has begun keeps its receive request.
                    if self.partial.is_none() {
                        self.spare_receive = receive.map(|(id, _)| id);
                    }
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
        if self.takes_selective_acks && self.reported_gap.is_some() {
            self.acknowledge_selectively();
            return Ok(true);
        }
        // Sent at once, even without the AckReq bit: the requester is retransmitting these packets.
        if let Some(last) = self.acknowledgeable.filter(|last| *last >= before) {
            self.acknowledge(last);
        }
        Ok(true)
    }

    /// Whether a stored packet that failed with this NAK is treated as lost. A spare receive request of an XRC
    /// target could belong to another queue than the next message, so there the failure counts.
    fn counts_as_lost(&self, code: NakCode, in_receive: bool) -> bool {
        code != NakCode::RemoteAccess && !(in_receive && self.config.service == Service::XrcTarget)
    }
}
