//! A connected queue pair.

use core::net::SocketAddr;
use std::collections::VecDeque;

use millstream_wire::icrc::{Flow, FlowCrc};
use millstream_wire::{Packet, Service as WireService};

use crate::burst::{Burst, Transmit, TransmitLimits};
use crate::config::{Changes, Config, SendConfig, Service};
use crate::event::{Event, FailureCause};
use crate::memory::Memory;
use crate::request::{PostError, SendRequest};
use crate::requester::{Requester, ResponseOutcome};
use crate::responder::{RequestOutcome, Responder};
use millstream_quantity::Instant;

/// States of a queue pair (10.3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QpState {
    /// Ready to receive.
    Rtr,
    /// Ready to send.
    Rts,
    /// Send queue drain: completes started requests, starts no new one.
    Sqd,
    /// Send queue error (UC only): receives, but the send queue failed.
    Sqe,
    /// Error: only repeats the NAK that was the cause.
    Err,
}

/// The outcome of a received packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disposition {
    /// New and valid.
    Accepted,
    /// A request that was executed before, or a response that was known.
    Duplicate,
    /// A request behind a gap.
    OutOfSequence,
    /// A message without a receive request.
    NotReady,
    /// A request that made the queue pair fail.
    Nak,
    /// A congestion notification: the sender should reduce its rate.
    Congestion,
    /// Dropped without effect.
    Dropped(DropReason),
}

/// The reason why a packet was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DropReason {
    /// Source address other than the peer's.
    WrongSource,
    /// Another queue pair, partition or transport service.
    WrongDestination,
    /// A response that matches no request.
    Unexpected,
    /// The queue pair has failed, or does not accept requests.
    QpState,
}

/// Packet counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Packets sent.
    pub sent: u64,
    /// Requests that were sent more than once.
    pub retransmitted: u64,
    /// Packets received.
    pub received: u64,
    /// Received duplicates.
    pub duplicates: u64,
    /// Received packets behind a gap.
    pub out_of_sequence: u64,
    /// Received packets that were dropped.
    pub dropped: u64,
}

/// A queue pair of a connected service (RC, UC, XRC).
///
/// After each call: process the events of [`poll_event`](Self::poll_event), call
/// [`handle_reordered`](Self::handle_reordered), send the packets of [`poll_transmit`](Self::poll_transmit),
/// and schedule [`handle_timeout`](Self::handle_timeout) at [`poll_timeout`](Self::poll_timeout). If several
/// datagrams are handled before anything is sent, their acknowledgements are coalesced.
///
/// A connection that failed over a peer's request repeats its NAK. Keep the connection, and pass datagrams to
/// it, until the queue pair is reset or destroyed.
#[derive(Debug)]
pub struct Connection {
    config: Config,
    flow: FlowCrc,
    state: QpState,
    requester: Option<Requester>,
    responder: Responder,
    events: VecDeque<Event>,
    established: bool,
    /// Requests go before responses in the next burst.
    requests_next: bool,
    counters: Counters,
}

impl Connection {
    /// A queue pair in RTR.
    #[must_use]
    pub fn new(config: Config) -> Self {
        Self {
            responder: Responder::new(config),
            flow: config.flow.crc(),
            config,
            state: QpState::Rtr,
            requester: None,
            events: VecDeque::new(),
            established: false,
            requests_next: false,
            counters: Counters::default(),
        }
    }

    /// Moves from RTR to RTS; ignored in other states.
    pub fn start(&mut self, config: SendConfig) {
        if self.state == QpState::Rtr {
            self.requester = Some(Requester::new(config, &self.config));
            self.state = QpState::Rts;
        }
    }

    /// Takes changed attributes. They hold for all later packets, also of requests that have begun, whose retries start
    /// anew. Before RTS, those of the send queue are ignored: [`start`](Self::start) sets them.
    pub fn modify(&mut self, now: Instant, changes: &Changes) {
        let Changes { flow, max_dest_rd_atomic, min_rnr_timer, .. } = *changes;
        self.config = Config { flow, max_dest_rd_atomic, min_rnr_timer, ..self.config };
        self.flow = flow.crc();
        self.responder.modify(self.config);
        if let Some(requester) = &mut self.requester {
            requester.modify(now, changes);
        }
    }

    /// The attributes of the queue pair.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Addresses and ports of own packets.
    #[must_use]
    pub fn flow(&self) -> &Flow {
        &self.config.flow
    }

    /// The state of the queue pair.
    #[must_use]
    pub fn state(&self) -> QpState {
        self.state
    }

    /// Packet counters since the queue pair was created.
    #[must_use]
    pub fn counters(&self) -> Counters {
        let retransmitted = self.requester.as_ref().map_or(0, |requester| requester.retransmitted);
        Counters { retransmitted, ..self.counters }
    }

    /// Whether every send request is complete and nothing is to be sent.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.requester.as_ref().is_none_or(Requester::is_idle) && !self.responder.has_responses()
    }

    /// Whether a single ACK is all that could be sent now. The caller may delay it, to coalesce it with later
    /// ones (9.7.5.1.2).
    #[must_use]
    pub fn has_only_acknowledgement(&self) -> bool {
        self.responder.has_only_acknowledgement()
            && self.requester.as_ref().is_none_or(Requester::has_sent_all)
    }

    /// Posts a send request. In the error states it is flushed at once (10.8.1).
    ///
    /// # Errors
    /// If the request is invalid, or the queue pair is not in a state to send.
    pub fn post(&mut self, request: SendRequest) -> Result<(), PostError> {
        let requester = self.requester.as_mut().ok_or(PostError::NotSending)?;
        requester.post(request)?;
        if matches!(self.state, QpState::Err | QpState::Sqe) {
            requester.flush(&mut self.events);
        }
        Ok(())
    }

    /// Moves from RTS to SQD; [`Event::Drained`] follows when the started requests are complete.
    pub fn drain(&mut self) {
        if let (QpState::Rts, Some(requester)) = (self.state, &mut self.requester) {
            self.state = QpState::Sqd;
            requester.drain(&mut self.events);
        }
    }

    /// Moves from SQD or SQE to RTS.
    pub fn resume(&mut self) {
        if let (QpState::Sqd | QpState::Sqe, Some(requester)) = (self.state, &mut self.requester) {
            self.state = QpState::Rts;
            requester.resume();
        }
    }

    /// Moves to the error state and flushes send requests.
    pub fn fail(&mut self) {
        if self.state != QpState::Err {
            self.failed(FailureCause::Requested);
        }
    }

    #[cold]
    fn failed(&mut self, fault: FailureCause) {
        if fault == FailureCause::SendRequest && self.config.service == Service::Uc {
            // Only the send queue fails (10.3.1.7).
            self.state = QpState::Sqe;
            return;
        }
        self.state = QpState::Err;
        self.responder.flush(&mut self.events);
        if let Some(requester) = &mut self.requester {
            requester.flush(&mut self.events);
        }
        self.events.push_back(Event::Failed(fault));
    }

    /// Handles a packet from the address and UDP port `from`, whose ICRC was correct or could not be checked.
    pub fn handle_datagram<M: Memory>(
        &mut self,
        now: Instant,
        from: SocketAddr,
        packet: &Packet<&[u8]>,
        memory: &mut M,
    ) -> Disposition {
        let disposition = self.dispose(now, from, packet, memory);
        self.counters.received += 1;
        match disposition {
            Disposition::Duplicate => self.counters.duplicates += 1,
            Disposition::OutOfSequence => self.counters.out_of_sequence += 1,
            Disposition::Dropped(_) => self.counters.dropped += 1,
            _ => {}
        }
        disposition
    }

    /// Handles the next packet of the reorder buffer if it is in sequence now; returns whether there was
    /// work. Call it after each [`handle_datagram`](Self::handle_datagram) until it returns `false`. Process
    /// the [events](Self::poll_event) of each packet before the next: at most one receive request is in use.
    pub fn handle_reordered<M: Memory>(&mut self, memory: &mut M) -> bool {
        if self.state == QpState::Err {
            return false;
        }
        self.responder.handle_reordered(memory, &mut self.events).unwrap_or_else(|fault| {
            self.failed(fault);
            true
        })
    }

    fn dispose<M: Memory>(
        &mut self,
        now: Instant,
        from: SocketAddr,
        packet: &Packet<&[u8]>,
        memory: &mut M,
    ) -> Disposition {
        let (bth, opcode) = (packet.bth(), packet.opcode());
        if from.ip().to_canonical() != self.config.flow.destination() {
            return Disposition::Dropped(DropReason::WrongSource);
        }
        if bth.dest_qp() != self.config.local_qp || !bth.pkey().matches(self.config.pkey) {
            return Disposition::Dropped(DropReason::WrongDestination);
        }
        if opcode.service() == WireService::Cnp {
            return Disposition::Congestion;
        }
        // An XRC initiator receives responses only, a target requests only.
        let right_way = match self.config.service {
            Service::Rc | Service::Uc => true,
            Service::XrcInitiator => opcode.is_response(),
            Service::XrcTarget => !opcode.is_response(),
        };
        if opcode.service() != self.config.service.wire_service() || !right_way {
            return Disposition::Dropped(DropReason::WrongDestination);
        }
        if opcode.is_response() {
            return self.dispose_response(now, from.port(), packet, memory);
        }
        if self.state == QpState::Err {
            self.responder.handle_request_after_failure(packet);
            return Disposition::Dropped(DropReason::QpState);
        }
        let result = match self.config.service {
            Service::Uc => self.responder.handle_unreliable(now, packet, memory, &mut self.events),
            _ => self.responder.handle_request(from.port(), packet, memory, &mut self.events),
        };
        match result {
            Ok(RequestOutcome::Executed) => {
                self.establish();
                Disposition::Accepted
            }
            Ok(RequestOutcome::Duplicate) => Disposition::Duplicate,
            Ok(RequestOutcome::OutOfSequence) => Disposition::OutOfSequence,
            Ok(RequestOutcome::NotReady) => {
                self.establish();
                Disposition::NotReady
            }
            Ok(RequestOutcome::Dropped) => Disposition::Dropped(DropReason::QpState),
            Err(fault) => {
                self.failed(fault);
                Disposition::Nak
            }
        }
    }

    fn dispose_response<M: Memory>(
        &mut self,
        now: Instant,
        port: u16,
        packet: &Packet<&[u8]>,
        memory: &mut M,
    ) -> Disposition {
        let Some(requester) = self.requester.as_mut().filter(|_| self.state != QpState::Err) else {
            return Disposition::Dropped(DropReason::QpState);
        };
        match requester.handle_response(now, port, packet, memory, &mut self.events) {
            Ok(ResponseOutcome::Accepted) => Disposition::Accepted,
            Ok(ResponseOutcome::Stale) => Disposition::Duplicate,
            Ok(ResponseOutcome::Unexpected) => Disposition::Dropped(DropReason::Unexpected),
            Err(fault) => {
                self.failed(fault);
                Disposition::Accepted
            }
        }
    }

    /// Reports the first request of the peer.
    fn establish(&mut self) {
        if !self.established {
            self.established = true;
            if self.state == QpState::Rtr {
                self.events.push_back(Event::Established);
            }
        }
    }

    /// Fills `out` with packets to send; `None` if there are none. Call it until it returns `None`.
    ///
    /// The packets of one call have one length, only the last may be shorter: the layout of segmentation
    /// offload. `out` should hold at least one packet: a path MTU and 64 bytes.
    pub fn poll_transmit<M: Memory>(
        &mut self,
        now: Instant,
        memory: &mut M,
        limits: TransmitLimits,
        out: &mut [u8],
    ) -> Option<Transmit> {
        let mut burst = Burst::new(out, self.flow, limits);
        // Responses and requests take turns. An ACK is short and may end any burst.
        self.requests_next = !self.requests_next || self.responder.has_only_acknowledgement();
        for requests in [self.requests_next, !self.requests_next] {
            let result = match (&mut self.requester, requests) {
                (Some(requester), true) if self.state != QpState::Err => {
                    requester.transmit(now, memory, &mut burst, &mut self.events)
                }
                (_, false) => self.responder.transmit(memory, &mut burst),
                _ => Ok(()),
            };
            if let Err(fault) = result {
                self.failed(fault);
                // After a failure of the responder only its NAK is left, which cannot fail.
                let _ = self.responder.transmit(memory, &mut burst);
            }
        }
        let transmit = burst.finish()?;
        self.counters.sent += u64::from(transmit.packets);
        Some(transmit)
    }

    /// The time at which [`handle_timeout`](Self::handle_timeout) is due, unless another call changes it.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.requester.as_ref().and_then(Requester::deadline)
    }

    /// Handles the timers that expired at `now`.
    pub fn handle_timeout(&mut self, now: Instant) {
        if let Some(requester) = &mut self.requester
            && let Err(fault) = requester.handle_timeout(now, &mut self.events)
        {
            self.failed(fault);
        }
    }

    /// The next event, oldest first.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }
}
