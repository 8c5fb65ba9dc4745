//! The requester: sends requests and handles responses (9.7.3 to 9.7.6, 9.8.1).
//!
//! ```text
//!       una            next             max            tail
//!        │              │                │              │
//!   ─────┴──────────────┴────────────────┴──────────────┴────► packets
//!  acked   in flight      to retransmit    never sent
//! ```
//!
//! - [`recovery`]: what is sent again after a loss;
//! - [`missing_data`]: data that is requested again;
//! - [`window`]: the number of packets that may be in flight;
//! - [`rtt`]: the timeout for a response;
//! - [`send`]: selecting and building the next packet;
//! - [`receive`]: acknowledgements and responses.

mod missing_data;
mod receive;
mod recovery;
mod rtt;
mod send;
mod window;

use std::collections::VecDeque;

use millstream_wire::Msn;

use crate::config::{Changes, Config, SendConfig};
use crate::event::{Event, FailureCause, Status};
use crate::extended_psn::ExtendedPsn;
use crate::reorder_buffer::ReorderBuffer;
use crate::request::{PostError, SendOp, SendRequest};
use crate::{MAX_MESSAGE, WorkId};
use millstream_quantity::{Instant, ack_timeout};
use missing_data::MissingData;
use recovery::{Gaps, Recovery, SelectiveRetransmit};
use rtt::RttEstimator;
use window::SendWindow;

pub(crate) use receive::ResponseOutcome;

/// Responses of one READ request packet: the responder sends them without further flow control.
const MAX_READ_PACKETS: u32 = 128;
/// READ request packets that share the window, so that the responder always has the next request.
const READ_REQUESTS_PER_WINDOW: u8 = 4;

/// A posted send request that is not complete.
#[derive(Clone, Copy, Debug)]
struct SendWqe {
    id: WorkId,
    work: SendOp,
    len: u32,
    fence: bool,
    solicited: bool,
    /// First packet.
    start: ExtendedPsn,
    /// Behind the last packet; equal to `start` for local operations.
    end: ExtendedPsn,
    /// Send sequence number (9.7.7.2.1): of the first request packet if a READ is split into several.
    ssn: Msn,
    /// The local operation was executed.
    done: bool,
}

/// Timers of the requester, at most one of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Timer {
    /// When the oldest request was not acknowledged for the local ACK timeout (9.7.6.1.3).
    Retransmit,
    /// When the delay of an RNR NAK is over (9.7.5.2.8).
    RnrWait,
    /// When the last packet of a burst, or its response, was probably lost.
    Probe,
    /// When the retransmission of a gap was probably lost.
    Gap,
}

/// Deadlines of the timers.
#[derive(Clone, Copy, Debug, Default)]
struct Timers {
    retransmit: Option<Instant>,
    rnr_wait: Option<Instant>,
    probe: Option<Instant>,
    gap: Option<Instant>,
}

/// An error moves the queue pair to the error state.
pub(crate) type QpResult = Result<(), FailureCause>;

/// Limit of exponential backoff, in ACK timeouts (9.7.6.1.3).
const MAX_BACKOFF: u32 = 4;

#[derive(Debug)]
pub(crate) struct Requester {
    config: SendConfig,
    connection: Config,
    reliable: bool,
    mtu: u32,
    /// Responses of one READ request packet.
    read_packets: u32,
    queue: VecDeque<SendWqe>,
    /// Index in `queue` of the next request to send.
    cursor: usize,
    /// Oldest unacknowledged packet.
    una: ExtendedPsn,
    /// Next packet to send.
    next: ExtendedPsn,
    /// Behind the last packet ever sent.
    max: ExtendedPsn,
    /// Behind the last packet of the last posted request.
    tail: ExtendedPsn,
    next_ssn: Msn,
    /// Packets of READs and atomic operations whose data is missing. A rewind keeps them.
    awaiting_data: VecDeque<(ExtendedPsn, ExtendedPsn)>,
    /// UDP source port of the last response in sequence. Data behind a gap is stored only from this port.
    port: Option<u16>,
    /// Data that arrived behind a gap.
    reorder_buffer: ReorderBuffer,
    missing: MissingData,
    /// Behind the last packet that an ACK has named. Its requests are complete when the data before it has arrived.
    acknowledged: ExtendedPsn,
    /// Ends of outstanding READ and atomic requests (9.7.6.1.1).
    outstanding: VecDeque<ExtendedPsn>,
    /// Limit sequence number: messages that the responder has receive requests for (9.7.7.2.2).
    limit: Option<Msn>,
    /// Packets since the last one with the AckReq bit.
    since_ack_req: u32,
    /// Set the AckReq bit in the next packet.
    request_ack: bool,
    /// A tail loss probe is due.
    probe_due: bool,
    /// Probes since the last progress.
    probes: u32,
    /// Start of the last rewind; there is one rewind until there is progress.
    rewound_to: Option<ExtendedPsn>,
    /// The responder stores packets that follow a lost one.
    peer_stores: bool,
    recovery: Option<Recovery>,
    gaps: Option<Gaps>,
    selective: Option<SelectiveRetransmit>,
    peer_window: SendWindow,
    rtt: RttEstimator,
    retries_left: u8,
    rnr_left: u8,
    timers: Timers,
    /// Status of the request at the cursor, which cannot be sent. It fails when those before it are complete.
    blocked_status: Option<Status>,
    /// Start no new request (SQD).
    draining: bool,
    drained_reported: bool,
    pub(crate) retransmitted: u64,
}

impl Requester {
    pub(crate) fn new(config: SendConfig, connection: &Config) -> Self {
        let first = ExtendedPsn::first(config.send_psn);
        let reads = u32::from(config.max_rd_atomic.clamp(2, READ_REQUESTS_PER_WINDOW));
        let config = SendConfig {
            window: config.window.clamp(1, SendConfig::MAX_WINDOW),
            retry_count: config.retry_count & 7,
            rnr_retry: config.rnr_retry & 7,
            ..config
        };
        Self {
            config,
            connection: *connection,
            reliable: connection.service.is_reliable(),
            mtu: connection.mtu.bytes(),
            read_packets: (config.window / reads).clamp(1, MAX_READ_PACKETS),
            queue: VecDeque::new(),
            cursor: 0,
            una: first,
            next: first,
            max: first,
            tail: first,
            // The first message is number 1: MSNs count completed messages.
            next_ssn: Msn::new(1),
            awaiting_data: VecDeque::new(),
            port: None,
            reorder_buffer: ReorderBuffer::default(),
            missing: MissingData::default(),
            acknowledged: first,
            outstanding: VecDeque::new(),
            limit: None,
            since_ack_req: 0,
            request_ack: false,
            probe_due: false,
            probes: 0,
            rewound_to: None,
            peer_stores: false,
            recovery: None,
            gaps: None,
            selective: None,
            peer_window: SendWindow::new(config.ack_timeout, config.window),
            rtt: RttEstimator::default(),
            retries_left: config.retry_count,
            rnr_left: config.rnr_retry,
            timers: Timers::default(),
            blocked_status: None,
            draining: false,
            drained_reported: false,
            retransmitted: 0,
        }
    }

    /// Takes changed attributes. The READ requests that are posted keep their packets.
    pub(crate) fn modify(&mut self, now: Instant, changes: &Changes) {
        let Changes { max_rd_atomic, ack_timeout, .. } = *changes;
        let (retry_count, rnr_retry) = (changes.retry_count & 7, changes.rnr_retry & 7);
        if ack_timeout != self.config.ack_timeout {
            self.peer_window = SendWindow::new(ack_timeout, self.config.window);
        }
        self.config = SendConfig { max_rd_atomic, ack_timeout, retry_count, rnr_retry, ..self.config };
        (self.retries_left, self.rnr_left) = (retry_count, rnr_retry);
        self.restart_timers(now);
    }

    /// Posts a request.
    pub(crate) fn post(&mut self, request: SendRequest) -> Result<(), PostError> {
        let SendRequest { id, work, len, fence, solicited } = request;
        self.check(&work, len)?;
        let packets = match work {
            SendOp::Local => 0,
            _ if len == 0 => 1,
            _ => len.div_ceil(self.mtu),
        };
        let messages = match work {
            SendOp::Local => 0,
            SendOp::Read { .. } => packets.div_ceil(self.read_packets),
            _ => 1,
        };
        let (start, end) = (self.tail, self.tail.plus(packets));
        self.queue.push_back(SendWqe {
            id,
            work,
            len,
            fence,
            solicited,
            start,
            end,
            ssn: self.next_ssn,
            done: false,
        });
        self.tail = end;
        self.next_ssn = Msn::new(self.next_ssn.get().wrapping_add(messages));
        Ok(())
    }

    fn check(&self, work: &SendOp, len: u32) -> Result<(), PostError> {
        if len > MAX_MESSAGE {
            return Err(PostError::TooLong { len, max: MAX_MESSAGE });
        }
        let offered = match work {
            SendOp::Send(crate::SendModifier::Invalidate(_)) => self.reliable,
            SendOp::Send(_) | SendOp::Write { .. } | SendOp::Local => true,
            work => !work.awaits_response() || self.reliable,
        };
        if !offered {
            return Err(PostError::NotOffered);
        }
        if work.awaits_response() && self.config.max_rd_atomic == 0 {
            return Err(PostError::NoResources);
        }
        let fits = match work {
            SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } | SendOp::AtomicWrite { .. } => len == 8,
            SendOp::Local => len == 0,
            _ => true,
        };
        if fits { Ok(()) } else { Err(PostError::Length { len }) }
    }

    /// Index in the queue of the request that contains a packet.
    ///
    /// Local operations have no packets. A pending one comes before the packet that follows it.
    fn find(&self, at: ExtendedPsn) -> usize {
        self.queue.partition_point(|posted| {
            let is_undone = posted.start == posted.end && !posted.done;
            posted.end <= at && !is_undone
        })
    }

    /// Acknowledges everything before `una`, which is later than the old value, and completes requests.
    fn advance(&mut self, una: ExtendedPsn, now: Instant, events: &mut VecDeque<Event>) {
        let packets = una.since(self.una);
        self.rtt.acknowledged(packets, una, now);
        self.peer_window.acknowledged(packets, una == self.max, now);
        self.recover(una);
        self.gaps_closed_until(una.max(self.acknowledged), now);
        self.missing.advance(una);
        self.una = una;
        while self.awaiting_data.front().is_some_and(|due| due.1 <= una) {
            self.awaiting_data.pop_front();
        }
        while self.outstanding.front().is_some_and(|end| *end <= una) {
            self.outstanding.pop_front();
        }
        self.rewound_to = None;
        self.probe_due = false;
        self.probes = 0;
        self.retries_left = self.config.retry_count;
        self.rnr_left = self.config.rnr_retry;
        // The messages that the RNR NAK refused have arrived.
        self.timers.rnr_wait = None;
        self.complete(events);
        if self.next < una {
            self.next = una;
            self.cursor = self.find(una);
        }
        self.restart_timers(now);
    }

    /// Completes finished requests at the head of the queue.
    fn complete(&mut self, events: &mut VecDeque<Event>) {
        while let Some(head) = self.queue.front() {
            let is_local = head.start == head.end;
            if if is_local { !head.done } else { self.una < head.end } {
                break;
            }
            events.push_back(Event::Completed { id: head.id, status: Status::Success });
            self.queue.pop_front();
            self.cursor = self.cursor.saturating_sub(1);
        }
        self.report_drained(events);
    }

    /// Completes the head of the queue with an error and flushes the rest in order (10.8.1).
    pub(crate) fn fail_head(&mut self, status: Status, events: &mut VecDeque<Event>) -> QpResult {
        if let Some(head) = self.queue.pop_front() {
            events.push_back(Event::Completed { id: head.id, status });
        }
        self.flush(events);
        Err(FailureCause::SendRequest)
    }

    /// Flushes all requests and stops the timers.
    pub(crate) fn flush(&mut self, events: &mut VecDeque<Event>) {
        for posted in self.queue.drain(..) {
            events.push_back(Event::Completed { id: posted.id, status: Status::Flushed });
        }
        self.cursor = 0;
        self.awaiting_data.clear();
        self.reorder_buffer.clear();
        self.missing.clear();
        self.outstanding.clear();
        self.timers = Timers::default();
        self.blocked_status = None;
        self.recovery = None;
        self.gaps = None;
        self.selective = None;
        self.probe_due = false;
        (self.una, self.next) = (self.tail, self.tail);
        self.max = self.tail;
    }

    /// Packets that may be in flight.
    fn window(&self) -> u32 {
        let window = self.peer_window.packets().min(self.config.window);
        self.recovery.map_or(window, |recovery| recovery.room.min(window))
    }

    fn in_flight(&self) -> bool {
        self.una < self.max
    }

    /// Whether nothing more can be sent before a response arrives.
    fn awaits_ack(&self) -> bool {
        self.in_flight() && (self.next == self.max || (self.recovery.is_some() && self.next > self.una))
    }

    fn restart_timers(&mut self, now: Instant) {
        self.timers.retransmit = None;
        self.timers.probe = None;
        self.start_timers(now);
    }

    fn start_timers(&mut self, now: Instant) {
        if !self.in_flight() || self.timers.rnr_wait.is_some() {
            return;
        }
        if self.timers.retransmit.is_none() {
            let retries = self.config.retry_count - self.retries_left;
            let time = |time| now + time * MAX_BACKOFF.min(1 << retries);
            self.timers.retransmit = ack_timeout(self.config.ack_timeout).map(time);
        }
        if self.timers.probe.is_none() {
            self.restart_probe(now);
        }
    }

    /// Exponential backoff of probes without progress.
    fn restart_probe(&mut self, now: Instant) {
        if self.reliable && self.in_flight() && self.timers.rnr_wait.is_none() {
            let time = |max| self.rtt.timeout(max) * (1 << self.probes.min(16));
            self.timers.probe = self.config.probe.map(|max| now + time(max));
        }
    }

    /// The earliest deadline.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let Timers { retransmit, rnr_wait, probe, gap } = self.timers;
        [retransmit, rnr_wait, probe, gap].into_iter().flatten().min()
    }

    /// Takes a timer that expired.
    fn expired(&mut self, now: Instant) -> Option<Timer> {
        let out = |timer: &mut Option<Instant>| timer.take_if(|at| *at <= now).is_some();
        if out(&mut self.timers.rnr_wait) {
            return Some(Timer::RnrWait);
        }
        if out(&mut self.timers.retransmit) {
            return Some(Timer::Retransmit);
        }
        if out(&mut self.timers.gap) {
            return Some(Timer::Gap);
        }
        out(&mut self.timers.probe).then_some(Timer::Probe)
    }

    pub(crate) fn handle_timeout(&mut self, now: Instant, events: &mut VecDeque<Event>) -> QpResult {
        while let Some(timer) = self.expired(now) {
            match timer {
                Timer::RnrWait => {
                    self.rewind(self.una);
                    self.rewound_to = None;
                    self.start_timers(now);
                }
                Timer::Retransmit => {
                    // A retry count of 7 is finite (9.7.6.1.3).
                    if self.retries_left == 0 {
                        return self.fail_head(Status::RetryExceeded, events);
                    }
                    self.retries_left -= 1;
                    self.begin_recovery(false);
                    self.rewind(self.una);
                    // The acknowledgement reports how much had arrived.
                    self.request_ack = true;
                    self.timers.probe = None;
                    self.start_timers(now);
                }
                Timer::Gap => self.retransmit_oldest(now),
                Timer::Probe => {
                    self.request_all_missing();
                    self.probe_due = self.awaits_ack();
                    self.probes = self.probes.saturating_add(1);
                    self.restart_probe(now);
                }
            }
        }
        Ok(())
    }

    /// Starts no new request; `Drained` follows when the started ones are complete (10.3.1.5).
    pub(crate) fn drain(&mut self, events: &mut VecDeque<Event>) {
        (self.draining, self.drained_reported) = (true, false);
        self.report_drained(events);
    }

    pub(crate) fn resume(&mut self) {
        self.draining = false;
    }

    fn report_drained(&mut self, events: &mut VecDeque<Event>) {
        let idle = !self.in_flight() && self.queue.front().is_none_or(|head| head.start >= self.max);
        if self.draining && !self.drained_reported && idle {
            self.drained_reported = true;
            events.push_back(Event::Drained);
        }
    }

    /// Whether every posted request is complete.
    pub(crate) fn is_idle(&self) -> bool {
        self.queue.is_empty()
    }

    /// Whether every posted request was sent, and nothing is to be retransmitted.
    pub(crate) fn has_sent_all(&self) -> bool {
        self.cursor == self.queue.len() && !self.probe_due
    }
}
