//! A connected queue pair.

use core::net::IpAddr;
use std::collections::VecDeque;

use millstream_wire::icrc::{Flow, Prepared};
use millstream_wire::{Packet, Service as WireService};

use crate::burst::{Burst, Limits, Transmit};
use crate::config::{Config, SendConfig, Service};
use crate::event::{Event, Fault};
use crate::memory::Memory;
use crate::request::{PostError, Request};
use crate::requester::{Requester, Taken};
use crate::responder::{Outcome, Responder};
use millstream_quantity::Instant;

/// What a queue pair does now (10.3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Receives (RTR).
    Receiving,
    /// Receives and sends (RTS).
    Sending,
    /// Receives, and completes what it has begun to send (SQD).
    Draining,
    /// Receives; the send queue failed (SQE, unreliable connections only).
    SendFailed,
    /// Failed (ERR): only the refusal that was the cause is still said.
    Failed,
}

/// What became of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disposition {
    /// It was news.
    Accepted,
    /// A request carried out before, answered again; or an answer that was known.
    Duplicate,
    /// A request from beyond a gap.
    OutOfSequence,
    /// A message that found no receive request.
    NotReady,
    /// A request that made the queue pair fail.
    Refused,
    /// Congestion was told: the sender should slow down.
    Congestion,
    /// Nothing happened.
    Dropped(DropReason),
}

/// Why nothing happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DropReason {
    /// From another address than the peer's.
    Source,
    /// For another queue pair, partition or transport service.
    Destination,
    /// A response to what was not asked, or not so.
    Unexpected,
    /// The queue pair has failed, or does not take the request.
    State,
}

/// What has happened so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Packets given to be sent.
    pub sent: u64,
    /// Of them, requests that were sent before.
    pub retransmitted: u64,
    /// Packets that came.
    pub received: u64,
    /// Of them, duplicates.
    pub duplicates: u64,
    /// Of them, from beyond a gap.
    pub out_of_sequence: u64,
    /// Of them, dropped.
    pub dropped: u64,
}

/// A queue pair of the reliable or unreliable connected service.
///
/// After every call, take what [`poll_event`](Self::poll_event) has, let [`handle_kept`](Self::handle_kept) take what was
/// kept, send what
/// [`poll_transmit`](Self::poll_transmit) has, and see to it that [`handle_timeout`](Self::handle_timeout) is
/// called at the time of [`poll_timeout`](Self::poll_timeout). Acknowledgements are put together if several
/// datagrams are handled before anything is sent.
///
/// A connection that failed over a peer's request goes on to tell the peer why; it should be kept, and
/// given datagrams, until the queue pair is reset or destroyed.
#[derive(Debug)]
pub struct Connection {
    config: Config,
    flow: Prepared,
    state: State,
    requester: Option<Requester>,
    responder: Responder,
    events: VecDeque<Event>,
    established: bool,
    /// Whether requests are next, when there are responses as well.
    requests_next: bool,
    counters: Counters,
}

impl Connection {
    /// A queue pair that receives (INIT to RTR).
    #[must_use]
    pub fn new(config: Config) -> Self {
        Self {
            responder: Responder::new(config),
            flow: config.flow.prepare(),
            config,
            state: State::Receiving,
            requester: None,
            events: VecDeque::new(),
            established: false,
            requests_next: false,
            counters: Counters::default(),
        }
    }

    /// Begins to send as well (RTR to RTS). In other states nothing happens.
    pub fn start(&mut self, config: SendConfig) {
        if self.state == State::Receiving {
            self.requester = Some(Requester::new(config, &self.config));
            self.state = State::Sending;
        }
    }

    /// What the queue pair was set up with.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Where packets go.
    #[must_use]
    pub fn flow(&self) -> &Flow {
        &self.config.flow
    }

    /// What the queue pair does now.
    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// What has happened so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        let retransmitted = self.requester.as_ref().map_or(0, |requester| requester.retransmitted);
        Counters { retransmitted, ..self.counters }
    }

    /// Whether every send request is complete and nothing is to be sent.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.requester.as_ref().is_none_or(Requester::is_idle) && !self.responder.has_answers()
    }

    /// Whether all that could be sent now is one positive acknowledgement. It does no harm to send that a little later,
    /// with a request that follows perhaps (9.7.5.1.2).
    #[must_use]
    pub fn has_only_acknowledgement(&self) -> bool {
        self.responder.has_only_acknowledgement()
            && self.requester.as_ref().is_none_or(Requester::has_sent_all)
    }

    /// Takes a send request. In the error states it is flushed at once (10.8.1).
    ///
    /// # Errors
    /// If the request is not one that the queue pair could carry out, ever or now.
    pub fn post(&mut self, request: Request) -> Result<(), PostError> {
        let requester = self.requester.as_mut().ok_or(PostError::NotSending)?;
        requester.post(request)?;
        if matches!(self.state, State::Failed | State::SendFailed) {
            requester.flush(&mut self.events);
        }
        Ok(())
    }

    /// Completes what was begun and begins nothing new (RTS to SQD); [`Event::Drained`] tells the end.
    pub fn drain(&mut self) {
        if let (State::Sending, Some(requester)) = (self.state, &mut self.requester) {
            self.state = State::Draining;
            requester.drain(&mut self.events);
        }
    }

    /// Goes on to send (SQD or SQE to RTS).
    pub fn resume(&mut self) {
        if let (State::Draining | State::SendFailed, Some(requester)) = (self.state, &mut self.requester) {
            self.state = State::Sending;
            requester.resume();
        }
    }

    /// Fails (any state to ERR): send requests are flushed.
    pub fn fail(&mut self) {
        if self.state != State::Failed {
            self.failed(Fault::Asked);
        }
    }

    #[cold]
    fn failed(&mut self, fault: Fault) {
        if fault == Fault::Request && self.config.service == Service::Unreliable {
            // Only the send queue fails (10.3.1.7).
            self.state = State::SendFailed;
            return;
        }
        self.state = State::Failed;
        self.responder.flush(&mut self.events);
        if let Some(requester) = &mut self.requester {
            requester.flush(&mut self.events);
        }
        self.events.push_back(Event::Failed(fault));
    }

    /// Takes a packet that came from `from`, and whose ICRC was right or could not be checked.
    pub fn handle_datagram<M: Memory>(
        &mut self,
        now: Instant,
        from: IpAddr,
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

    /// Takes the next packet that came before its turn, if that is now; whether there was anything to do. To be called
    /// after each [`handle_datagram`](Self::handle_datagram) until there was not. What one packet tells is to be
    /// [taken](Self::poll_event) before the next: at most one receive request is in use.
    pub fn handle_kept<M: Memory>(&mut self, memory: &mut M) -> bool {
        if self.state == State::Failed {
            return false;
        }
        self.responder.handle_kept(memory, &mut self.events).unwrap_or_else(|fault| {
            self.failed(fault);
            true
        })
    }

    fn dispose<M: Memory>(
        &mut self,
        now: Instant,
        from: IpAddr,
        packet: &Packet<&[u8]>,
        memory: &mut M,
    ) -> Disposition {
        let (bth, opcode) = (packet.bth(), packet.opcode());
        if from.to_canonical() != self.config.flow.destination() {
            return Disposition::Dropped(DropReason::Source);
        }
        if bth.dest_qp() != self.config.local_qp || !bth.pkey().matches(self.config.pkey) {
            return Disposition::Dropped(DropReason::Destination);
        }
        if opcode.service() == WireService::Cnp {
            return Disposition::Congestion;
        }
        // The ends of an extended connection send requests one way, and answers the other.
        let right_way = match self.config.service {
            Service::Reliable | Service::Unreliable => true,
            Service::Initiator => opcode.is_response(),
            Service::Target => !opcode.is_response(),
        };
        if opcode.service() != self.config.service.on_the_wire() || !right_way {
            return Disposition::Dropped(DropReason::Destination);
        }
        if opcode.is_response() {
            return self.dispose_response(now, packet, memory);
        }
        if self.state == State::Failed {
            self.responder.handle_request_after_failure(packet);
            return Disposition::Dropped(DropReason::State);
        }
        let result = match self.config.service {
            Service::Unreliable => self.responder.handle_unreliable(packet, memory, &mut self.events),
            _ => self.responder.handle_request(packet, memory, &mut self.events),
        };
        match result {
            Ok(Outcome::Executed) => {
                self.establish();
                Disposition::Accepted
            }
            Ok(Outcome::Duplicate) => Disposition::Duplicate,
            Ok(Outcome::OutOfSequence) => Disposition::OutOfSequence,
            Ok(Outcome::NotReady) => {
                self.establish();
                Disposition::NotReady
            }
            Ok(Outcome::Dropped) => Disposition::Dropped(DropReason::State),
            Err(fault) => {
                self.failed(fault);
                Disposition::Refused
            }
        }
    }

    fn dispose_response<M: Memory>(
        &mut self,
        now: Instant,
        packet: &Packet<&[u8]>,
        memory: &mut M,
    ) -> Disposition {
        let Some(requester) = self.requester.as_mut().filter(|_| self.state != State::Failed) else {
            return Disposition::Dropped(DropReason::State);
        };
        match requester.handle_response(now, packet, memory, &mut self.events) {
            Ok(Taken::Well) => Disposition::Accepted,
            Ok(Taken::Stale) => Disposition::Duplicate,
            Ok(Taken::Unexpected) => Disposition::Dropped(DropReason::Unexpected),
            Err(fault) => {
                self.failed(fault);
                Disposition::Accepted
            }
        }
    }

    /// The peer's first request.
    fn establish(&mut self) {
        if !self.established {
            self.established = true;
            if self.state == State::Receiving {
                self.events.push_back(Event::Established);
            }
        }
    }

    /// Fills `out` with packets to be sent now; None if there are none. Call it until then.
    ///
    /// All packets of one call have the same length, but the last one may be shorter, so the buffer can be given to
    /// segmentation offload as it is. `out` should hold at least one packet: a path MTU and 64 bytes.
    pub fn poll_transmit<M: Memory>(
        &mut self,
        now: Instant,
        memory: &mut M,
        limits: Limits,
        out: &mut [u8],
    ) -> Option<Transmit> {
        let mut burst = Burst::new(out, self.flow, limits);
        // Responses and requests take turns; but an acknowledgement is short, and can end a burst of anything.
        self.requests_next = !self.requests_next || self.responder.has_only_acknowledgement();
        for requests in [self.requests_next, !self.requests_next] {
            let result = match (&mut self.requester, requests) {
                (Some(requester), true) if self.state != State::Failed => {
                    requester.transmit(now, memory, &mut burst, &mut self.events)
                }
                (_, false) => self.responder.transmit(memory, &mut burst),
                _ => Ok(()),
            };
            if let Err(fault) = result {
                self.failed(fault);
                // If the responder failed, there is a refusal to be sent; there is nothing else to fail over.
                let _ = self.responder.transmit(memory, &mut burst);
            }
        }
        let transmit = burst.finish()?;
        self.counters.sent += u64::from(transmit.packets);
        Some(transmit)
    }

    /// When [`handle_timeout`](Self::handle_timeout) is due, if nothing else happens before.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.requester.as_ref().and_then(Requester::deadline)
    }

    /// Does what is due at `now`; nothing if nothing is.
    pub fn handle_timeout(&mut self, now: Instant) {
        if let Some(requester) = &mut self.requester
            && let Err(fault) = requester.handle_timeout(now, &mut self.events)
        {
            self.failed(fault);
        }
    }

    /// What there is to tell, oldest first.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }
}
