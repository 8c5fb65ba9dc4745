//! The responder: executes requests through [`Memory`] and responds (9.7.4, 9.7.5, 9.8.2).
//!
//! - [`execute`]: requests in sequence;
//! - [`reorder`]: requests behind a gap;
//! - [`duplicate`]: requests that were executed before;
//! - [`response`]: acknowledgements and responses to send;
//! - [`unreliable`]: requests of unreliable connections, which have no responses.

mod duplicate;
mod execute;
mod reorder;
mod response;
mod unreliable;

use std::collections::VecDeque;

use millstream_wire::{Msn, NakCode, Operation, Packet, Position, Rkey, Srqn, Syndrome};

use crate::config::Config;
use crate::event::{Event, FailureCause, Received, ReceivedKind, Status};
use crate::extended_psn::ExtendedPsn;
use crate::memory::Memory;
use crate::reorder_buffer::ReorderBuffer;
use crate::request::ReceiveId;
use response::Response;
use unreliable::RecentMessages;

/// The outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestOutcome {
    /// Executed.
    Executed,
    /// Executed before; answered again if its result is still stored.
    Duplicate,
    /// Behind a gap.
    OutOfSequence,
    /// No receive request.
    NotReady,
    /// Dropped silently.
    Dropped,
}

/// A message of several packets that is not complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PartialMessage {
    Send {
        receive: ReceiveId,
        offset: u32,
    },
    /// The rest of a WRITE.
    Write {
        rkey: Rkey,
        va: u64,
        left: u32,
        len: u32,
    },
}

/// An executed READ or atomic operation, kept to answer duplicates (9.7.5.1.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ResponderResource {
    start: ExtendedPsn,
    end: ExtendedPsn,
    kind: ResourceKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ResourceKind {
    Read {
        queue: Srqn,
        va: u64,
        rkey: Rkey,
        len: u32,
    },
    /// The original value: an atomic operation is not executed twice.
    Atomic(u64),
    AtomicWrite,
}

/// A NAK that fails the queue pair, and the status of the receive request in use.
struct Nak {
    code: NakCode,
    receive: Option<(ReceiveId, Status)>,
}

impl From<NakCode> for Nak {
    fn from(code: NakCode) -> Self {
        Self { code, receive: None }
    }
}

/// The reason why a request was not executed.
enum ExecError {
    Nak(Nak),
    NoReceive,
}

impl From<NakCode> for ExecError {
    fn from(nak: NakCode) -> Self {
        Self::Nak(nak.into())
    }
}

#[derive(Debug)]
pub(crate) struct Responder {
    config: Config,
    mtu: u32,
    /// Expected packet (ePSN).
    expected: ExtendedPsn,
    msn: Msn,
    partial: Option<PartialMessage>,
    /// Shared receive queue of the current message (XRC).
    queue: Srqn,
    /// Last packet behind the gap that was reported by a NAK; one NAK is sent per gap.
    reported_gap: Option<ExtendedPsn>,
    /// UDP source port of the last valid request in sequence. Packets behind a gap are stored only
    /// from this port.
    port: Option<u16>,
    /// Packets behind the gap.
    reorder_buffer: ReorderBuffer,
    /// The requester takes selective acknowledgements, as its last packet in sequence said.
    takes_selective_acks: bool,
    /// Set when a gap was closed: stored packets behind it may be in sequence.
    gap_closed_at: Option<ExtendedPsn>,
    /// Last executed packet that an ACK may name. READs and atomic operations are acknowledged by their
    /// responses only.
    acknowledgeable: Option<ExtendedPsn>,
    responses: VecDeque<Response>,
    resources: VecDeque<ResponderResource>,
    /// The NAK that failed the queue pair, and its packet.
    fatal_nak: Option<(ExtendedPsn, NakCode)>,
    /// Recent messages (UC).
    recent: RecentMessages,
    /// A receive request of an aborted message, which the next message uses.
    spare_receive: Option<ReceiveId>,
}

impl Responder {
    pub(crate) fn new(config: Config) -> Self {
        Self {
            mtu: config.mtu.bytes(),
            expected: ExtendedPsn::first(config.receive_psn),
            msn: Msn::new(0),
            partial: None,
            queue: Srqn::new(0),
            reported_gap: None,
            port: None,
            reorder_buffer: ReorderBuffer::default(),
            takes_selective_acks: false,
            gap_closed_at: None,
            acknowledgeable: None,
            responses: VecDeque::new(),
            resources: VecDeque::new(),
            fatal_nak: None,
            recent: RecentMessages::default(),
            spare_receive: None,
            config,
        }
    }

    /// Takes changed attributes.
    pub(crate) fn modify(&mut self, config: Config) {
        self.config = config;
    }

    /// Handles a request of the peer, from a UDP source port.
    pub(crate) fn handle_request<M: Memory>(
        &mut self,
        port: u16,
        packet: &Packet<&[u8]>,
        memory: &mut M,
        events: &mut VecDeque<Event>,
    ) -> Result<RequestOutcome, FailureCause> {
        let at = self.expected.nearest(packet.bth().psn());
        // The PSN is checked first: other fields count only in the expected packet (9.7.4.1.2).
        if at > self.expected {
            let follows = self.reorder_buffer.last().is_some_and(|last| at <= last.plus(1));
            if self.port == Some(port) {
                self.store(at, packet);
            }
            let packets = match packet.opcode().operation() {
                Operation::ReadRequest => {
                    packet.reth().map_or(1, |reth| self.config.mtu.packets(reth.length()))
                }
                _ => 1,
            };
            self.behind_gap(at, at.plus(packets).before(), !follows || packet.bth().ack_req());
            return Ok(RequestOutcome::OutOfSequence);
        }
        if at < self.expected {
            self.duplicate(at, packet);
            return Ok(RequestOutcome::Duplicate);
        }
        match self.execute(at, packet, memory, events) {
            Ok(()) => {
                self.port = Some(port);
                self.reorder_buffer.in_sequence();
                self.takes_selective_acks = packet.bth().selective_ack();
                if self.reported_gap.take().is_some() {
                    self.gap_closed_at = Some(self.expected);
                }
                Ok(RequestOutcome::Executed)
            }
            Err(ExecError::NoReceive) => {
                self.port = Some(port);
                self.not_ready(at);
                Ok(RequestOutcome::NotReady)
            }
            Err(ExecError::Nak(nak)) => Err(self.fail_with_nak(at, nak, events)),
        }
    }

    /// Handles a message without a receive request.
    fn not_ready(&mut self, at: ExtendedPsn) {
        // Packets that follow cause no sequence NAK: the RNR NAK tells the requester where to restart.
        self.reported_gap = Some(at);
        self.queue_nak(at, Syndrome::RnrNak { timer_code: self.config.min_rnr_timer });
    }

    /// Handles a packet behind a gap (9.7.5.2.8), from `at` to its `last` sequence number. It causes one NAK per gap, and
    /// another one when the requester has rewound without closing the gap. A selective acknowledgement is sent in any
    /// case that is worth a `report`.
    fn behind_gap(&mut self, at: ExtendedPsn, last: ExtendedPsn, report: bool) {
        if self.takes_selective_acks {
            if report || self.reported_gap.is_none() {
                self.acknowledge_selectively();
            }
            self.reported_gap = Some(last);
            return;
        }
        let begins_again = self.reported_gap.is_none_or(|former| at <= former);
        if begins_again {
            self.queue_nak(self.expected, Syndrome::Nak(NakCode::SequenceError));
        }
        self.reported_gap = Some(last);
    }

    /// Fails the queue pair over a request. The completion of its receive request precedes the failure.
    fn fail_with_nak(&mut self, at: ExtendedPsn, nak: Nak, events: &mut VecDeque<Event>) -> FailureCause {
        self.fatal_nak = Some((at, nak.code));
        self.reorder_buffer.clear();
        let in_progress = match self.partial.take() {
            Some(PartialMessage::Send { receive, .. }) => Some((receive, Status::Flushed)),
            _ => None,
        };
        let receive = nak.receive.or(in_progress);
        if let Some((id, status)) = receive {
            events.push_back(Event::Received(broken(id, status)));
        }
        self.queue_nak(at, Syndrome::Nak(nak.code));
        match nak.code {
            NakCode::RemoteAccess => FailureCause::AccessViolation,
            NakCode::InvalidRequest if nak.receive.is_none() => FailureCause::InvalidRequest,
            _ => FailureCause::ReceiveRequest,
        }
    }

    /// Handles a request after the failure: the NAK is repeated, as it may have been lost.
    pub(crate) fn handle_request_after_failure(&mut self, packet: &Packet<&[u8]>) -> RequestOutcome {
        let Some((at, nak)) = self.fatal_nak else { return RequestOutcome::Dropped };
        let is_about = at.nearest(packet.bth().psn()) <= at;
        if is_about && self.responses.is_empty() {
            self.queue_nak(at, Syndrome::Nak(nak));
        }
        RequestOutcome::Dropped
    }

    /// The queue pair failed for another reason: flushes the receive request in use and the queued responses.
    pub(crate) fn flush(&mut self, events: &mut VecDeque<Event>) {
        self.reorder_buffer.clear();
        let receive = match self.partial.take() {
            Some(PartialMessage::Send { receive, .. }) => Some(receive),
            _ => None,
        };
        for id in [receive, self.spare_receive.take()].into_iter().flatten() {
            events.push_back(Event::Received(broken(id, Status::Flushed)));
        }
        if self.fatal_nak.is_none() {
            self.responses.clear();
        }
        self.resources.clear();
    }

    /// Checks that the packet continues its message and has the payload length of its position (9.7.4.1.3,
    /// 9.7.4.1.6).
    fn check_position(&self, packet: &Packet<&[u8]>) -> Result<(), NakCode> {
        let (operation, position) = (packet.opcode().operation(), packet.opcode().position());
        let follows = match self.partial {
            None => position.begins(),
            Some(PartialMessage::Send { .. }) => operation == Operation::Send && !position.begins(),
            Some(PartialMessage::Write { .. }) => operation == Operation::Write && !position.begins(),
        };
        let payload = packet.payload().len() as u32;
        let fits = match position {
            Position::First | Position::Middle => payload == self.mtu,
            Position::Last => (1..=self.mtu).contains(&payload),
            Position::Only => payload <= self.mtu,
        };
        if follows && fits { Ok(()) } else { Err(NakCode::InvalidRequest) }
    }

    /// Checks that the queue pair permits the operation (9.7.4.1.4).
    fn check_operation(&self, operation: Operation) -> Result<(), NakCode> {
        let allowed = match operation {
            Operation::Write | Operation::AtomicWrite => self.config.remote_write,
            Operation::ReadRequest => self.config.remote_read,
            Operation::CompareSwap | Operation::FetchAdd => self.config.remote_atomic,
            _ => true,
        };
        if allowed { Ok(()) } else { Err(NakCode::InvalidRequest) }
    }
}

/// Completion of a receive request without a message.
fn broken(id: ReceiveId, status: Status) -> Received {
    Received {
        id,
        status,
        kind: ReceivedKind::Send,
        len: 0,
        immediate: None,
        invalidated: None,
        solicited: false,
        source: None,
    }
}
