//! The requester: sends requests, and takes what the responder answers (9.7.3 to 9.7.6, 9.8.1).
//!
//! ```text
//!      una            next             max            tail
//!       │              │                │              │
//!  ─────┴──────────────┴────────────────┴──────────────┴────► packets
//!  done   may be lost    to be sent again   never sent yet
//! ```
//!
//! - [`pace`]: how much may be under way;
//! - [`patience`]: how long to wait for an answer;
//! - [`send`]: which packet is next, and building it;
//! - [`receive`]: acknowledgements and responses.

mod pace;
mod patience;
mod receive;
mod send;

use std::collections::VecDeque;

use millstream_wire::Msn;

use crate::config::{Config, SendConfig};
use crate::early::Early;
use crate::event::{Event, Fault, Status};
use crate::request::{PostError, Request, Work};
use crate::sequence::Sequence;
use crate::{MAX_MESSAGE, WorkId};
use millstream_quantity::{Instant, ack_timeout};
use pace::Pace;
use patience::Patience;

pub(crate) use receive::Taken;

/// One READ request asks for at most this many packets: nothing but the request's length limits how fast they come.
const READ_PACKETS: u32 = 128;
/// So many requests share the window, if as many may be under way: the responder has the next ones when it has answered
/// the first.
const READS_AT_A_TIME: u8 = 4;

/// A request that was posted and is not complete.
#[derive(Clone, Copy, Debug)]
struct Posted {
    id: WorkId,
    work: Work,
    len: u32,
    fence: bool,
    solicited: bool,
    /// Its first packet.
    start: Sequence,
    /// Its last packet but one. Equal to `start` for local work.
    end: Sequence,
    /// Send sequence number: which message it is for the responder (9.7.7.2.1). Of a READ that travels as several, the
    /// first.
    ssn: Msn,
    /// Local work that is done.
    done: bool,
}

/// Times that the requester waits for. At most one runs of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Timer {
    /// When the oldest request has not been answered for the local ACK timeout (9.7.6.1.3).
    Retransmit,
    /// When the time that an RNR NAK asked for is over (9.7.5.2.8).
    RnrWait,
    /// When it is likely that the last packet, or its answer, was lost.
    Probe,
}

/// Deadlines by timer.
#[derive(Clone, Copy, Debug, Default)]
struct Timers {
    retransmit: Option<Instant>,
    rnr_wait: Option<Instant>,
    probe: Option<Instant>,
}

/// What ends a queue pair.
pub(crate) type Failed = Result<(), Fault>;

/// Each retry waits twice as long as the one before, but no longer than so many ACK timeouts (9.7.6.1.3).
const MOST_TIMEOUTS: u32 = 4;

/// What is known to have been sent in vain, perhaps, is not sent again all at once (see [`Requester::begin_recovery`]).
#[derive(Clone, Copy, Debug)]
struct Recovery {
    /// Behind the last packet that was sent before the loss was told.
    until: Sequence,
    /// Packets that may be under way.
    room: u32,
}

/// What is missing among data that has come is asked for again by itself.
#[derive(Clone, Copy, Debug)]
struct Mending {
    /// Behind the last that is known to be missing.
    until: Sequence,
    /// What is to be sent after it.
    resume: Sequence,
}

/// Packets that are sent again before the responder says what else it lacks.
const RECOVERY_ROOM: u32 = 16;

#[derive(Debug)]
pub(crate) struct Requester {
    config: SendConfig,
    connection: Config,
    reliable: bool,
    mtu: u32,
    /// Packets that one READ request asks for at most.
    read_packets: u32,
    queue: VecDeque<Posted>,
    /// Which of the queue is next to be sent.
    cursor: usize,
    /// The oldest packet that is not answered.
    una: Sequence,
    /// The next packet to be sent.
    next: Sequence,
    /// Behind the last packet that was ever sent.
    max: Sequence,
    /// Behind the last packet of the last request that was posted.
    tail: Sequence,
    next_ssn: Msn,
    /// READs and atomic operations that were begun and whose data did not come, by their packets. Going back
    /// forgets none.
    due: VecDeque<(Sequence, Sequence)>,
    /// Data that came before what is missing.
    kept: Early,
    /// Ends of READ and atomic requests that are under way (9.7.6.1.1, limit of outstanding READs).
    outstanding: VecDeque<Sequence>,
    /// Messages that the responder has receive requests for (limit sequence number, 9.7.7.2.2).
    limit: Option<Msn>,
    /// Packets since one asked for an acknowledgement.
    unasked: u32,
    /// Ask with the next packet.
    ask: bool,
    /// The last packet shall be sent once more, to learn what is missing.
    probe_due: bool,
    /// Such packets since there was progress.
    probes: u32,
    /// Where the last going back began; once is enough until there is progress.
    went_back: Option<Sequence>,
    recovery: Option<Recovery>,
    mending: Option<Mending>,
    pace: Pace,
    patience: Patience,
    retries_left: u8,
    rnr_left: u8,
    timers: Timers,
    /// The request at the cursor cannot be sent; it fails when those before it are complete.
    stopped: Option<Status>,
    /// Begin no new request (SQD).
    draining: bool,
    drained_told: bool,
    pub(crate) retransmitted: u64,
}

impl Requester {
    pub(crate) fn new(config: SendConfig, connection: &Config) -> Self {
        let first = Sequence::first(config.send_psn);
        let reads = u32::from(config.max_rd_atomic.clamp(2, READS_AT_A_TIME));
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
            read_packets: (config.window / reads).clamp(1, READ_PACKETS),
            queue: VecDeque::new(),
            cursor: 0,
            una: first,
            next: first,
            max: first,
            tail: first,
            // The first message is number 1, as MSNs count messages completed.
            next_ssn: Msn::new(1),
            due: VecDeque::new(),
            kept: Early::default(),
            outstanding: VecDeque::new(),
            limit: None,
            unasked: 0,
            ask: false,
            probe_due: false,
            probes: 0,
            went_back: None,
            recovery: None,
            mending: None,
            pace: Pace::new(config.ack_timeout, config.window),
            patience: Patience::default(),
            retries_left: config.retry_count,
            rnr_left: config.rnr_retry,
            timers: Timers::default(),
            stopped: None,
            draining: false,
            drained_told: false,
            retransmitted: 0,
        }
    }

    /// Takes a request.
    pub(crate) fn post(&mut self, request: Request) -> Result<(), PostError> {
        let Request { id, work, len, fence, solicited } = request;
        self.check(&work, len)?;
        let packets = match work {
            Work::Local => 0,
            _ if len == 0 => 1,
            _ => len.div_ceil(self.mtu),
        };
        let messages = match work {
            Work::Local => 0,
            Work::Read { .. } => packets.div_ceil(self.read_packets),
            _ => 1,
        };
        let (start, end) = (self.tail, self.tail.plus(packets));
        self.queue.push_back(Posted {
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

    fn check(&self, work: &Work, len: u32) -> Result<(), PostError> {
        if len > MAX_MESSAGE {
            return Err(PostError::TooLong { len, most: MAX_MESSAGE });
        }
        let offered = match work {
            Work::Send(crate::Trailer::Invalidate(_)) => self.reliable,
            Work::Send(_) | Work::Write { .. } | Work::Local => true,
            work => !work.awaits_response() || self.reliable,
        };
        if !offered {
            return Err(PostError::NotOffered);
        }
        if work.awaits_response() && self.config.max_rd_atomic == 0 {
            return Err(PostError::NoResources);
        }
        let fits = match work {
            Work::CompareSwap { .. } | Work::FetchAdd { .. } | Work::AtomicWrite { .. } => len == 8,
            Work::Local => len == 0,
            _ => true,
        };
        if fits { Ok(()) } else { Err(PostError::Length { len }) }
    }

    /// The request that has a packet, and where it is in the queue.
    ///
    /// Local work has no packets; what was not done yet comes before the packet that follows it.
    fn find(&self, at: Sequence) -> usize {
        self.queue.partition_point(|posted| {
            let is_undone = posted.start == posted.end && !posted.done;
            posted.end <= at && !is_undone
        })
    }

    /// Answered up to `una`, which is after the old value: completes what that completes.
    fn advance(&mut self, una: Sequence, now: Instant, events: &mut VecDeque<Event>) {
        let packets = una.since(self.una);
        self.patience.answered(packets, una, now);
        self.pace.answered(packets, una == self.max, now);
        self.recover(una);
        self.una = una;
        while self.due.front().is_some_and(|due| due.1 <= una) {
            self.due.pop_front();
        }
        while self.outstanding.front().is_some_and(|end| *end <= una) {
            self.outstanding.pop_front();
        }
        self.went_back = None;
        self.probe_due = false;
        self.probes = 0;
        self.retries_left = self.config.retry_count;
        self.rnr_left = self.config.rnr_retry;
        // Whatever an RNR NAK was about has arrived meanwhile.
        self.timers.rnr_wait = None;
        self.complete(events);
        if self.next < una {
            self.next = una;
            self.cursor = self.find(una);
        }
        self.restart_timers(now);
    }

    /// Completes what is done at the head of the queue.
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
        self.tell_drained(events);
    }

    /// The head of the queue ends with an error; everything behind it is flushed, in order (10.8.1).
    pub(crate) fn fail_head(&mut self, status: Status, events: &mut VecDeque<Event>) -> Failed {
        if let Some(head) = self.queue.pop_front() {
            events.push_back(Event::Completed { id: head.id, status });
        }
        self.flush(events);
        Err(Fault::Request)
    }

    /// Flushes everything. Timers die with it.
    pub(crate) fn flush(&mut self, events: &mut VecDeque<Event>) {
        for posted in self.queue.drain(..) {
            events.push_back(Event::Completed { id: posted.id, status: Status::Flushed });
        }
        self.cursor = 0;
        self.due.clear();
        self.kept.clear();
        self.outstanding.clear();
        self.timers = Timers::default();
        self.stopped = None;
        self.recovery = None;
        self.mending = None;
        self.probe_due = false;
        (self.una, self.next) = (self.tail, self.tail);
        self.max = self.tail;
    }

    /// Begins again at `at`.
    fn go_back(&mut self, at: Sequence) {
        self.next = at;
        self.cursor = self.find(at);
        self.mending = None;
        self.went_back = Some(at);
        self.probe_due = false;
        self.stopped = None;
    }

    /// Packets were lost. The responder may have the others all the same, or keep them: the first packets are sent
    /// again, then as many more with each answer as went well. If an answer names more than was sent again, packets were
    /// kept, and it is another gap that is next.
    fn begin_recovery(&mut self) {
        self.patience.lost();
        self.recovery = Some(Recovery { until: self.max, room: RECOVERY_ROOM });
    }

    /// Everything before `una` is answered.
    fn recover(&mut self, una: Sequence) {
        let Some(recovery) = &mut self.recovery else { return };
        if una >= recovery.until {
            self.recovery = None;
        } else {
            recovery.room = if una > self.next { RECOVERY_ROOM } else { recovery.room.saturating_mul(2) };
        }
    }

    /// Asks again for the data that is missing in `from..until`, and then goes on where it was: everything else is
    /// on its way, or asked for again already.
    fn mend(&mut self, from: Sequence, until: Sequence) {
        self.patience.lost();
        if self.next <= from || self.timers.rnr_wait.is_some() {
            return;
        }
        let resume = self.mending.map_or(self.next, |mending| mending.resume);
        let until = self.mending.map_or(until, |mending| mending.until.max(until));
        self.mending = Some(Mending { until, resume });
        self.next = from;
        self.cursor = self.find(from);
        self.stopped = None;
    }

    /// Passes over what need not be sent again: data that has come, and what is not asked for while mending.
    fn pass_over(&mut self) {
        while self.next < self.max {
            if let Some(Mending { resume, .. }) = self.mending.take_if(|mending| mending.until <= self.next) {
                self.next = self.next.max(resume);
                self.cursor = self.find(self.next);
                continue;
            }
            let Some(posted) = self.queue.get(self.cursor) else { return };
            if self.mending.is_some() && !posted.work.awaits_response() {
                self.next = self.next.max(posted.end);
            } else if posted.work.awaits_response() && self.kept.has(self.next) {
                self.next = self.next.plus(1);
            } else {
                return;
            }
            if self.next >= posted.end {
                self.cursor += 1;
            }
        }
        self.mending = None;
    }

    /// What has not been sent again is on its way.
    fn leave_the_rest(&mut self) {
        self.recovery = None;
        self.mending = None;
        self.next = self.max;
        self.cursor = self.find(self.max);
    }

    /// Packets that may be under way.
    fn window(&self) -> u32 {
        let window = self.pace.room().min(self.config.window);
        self.recovery.map_or(window, |recovery| recovery.room.min(window))
    }

    fn in_flight(&self) -> bool {
        self.una < self.max
    }

    /// Whether nothing more is sent before there is an answer.
    fn waits_for_answer(&self) -> bool {
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
            let time = |time| now + time * MOST_TIMEOUTS.min(1 << retries);
            self.timers.retransmit = ack_timeout(self.config.ack_timeout).map(time);
        }
        if self.timers.probe.is_none() {
            self.restart_probe(now);
        }
    }

    /// Each probe without progress waits twice as long as the one before.
    fn restart_probe(&mut self, now: Instant) {
        if self.reliable && self.in_flight() && self.timers.rnr_wait.is_none() {
            let time = |most| self.patience.time(most) * (1 << self.probes.min(16));
            self.timers.probe = self.config.probe.map(|most| now + time(most));
        }
    }

    /// The earliest deadline.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let Timers { retransmit, rnr_wait, probe } = self.timers;
        [retransmit, rnr_wait, probe].into_iter().flatten().min()
    }

    /// Timers that have run out.
    fn expired(&mut self, now: Instant) -> Option<Timer> {
        let out = |timer: &mut Option<Instant>| timer.take_if(|at| *at <= now).is_some();
        if out(&mut self.timers.rnr_wait) {
            return Some(Timer::RnrWait);
        }
        if out(&mut self.timers.retransmit) {
            return Some(Timer::Retransmit);
        }
        out(&mut self.timers.probe).then_some(Timer::Probe)
    }

    pub(crate) fn handle_timeout(&mut self, now: Instant, events: &mut VecDeque<Event>) -> Failed {
        while let Some(timer) = self.expired(now) {
            match timer {
                Timer::RnrWait => {
                    self.go_back(self.una);
                    self.went_back = None;
                    self.start_timers(now);
                }
                Timer::Retransmit => {
                    // 7 is seven times, not for ever (9.7.6.1.3).
                    if self.retries_left == 0 {
                        return self.fail_head(Status::RetryExceeded, events);
                    }
                    self.retries_left -= 1;
                    self.begin_recovery();
                    self.go_back(self.una);
                    // One answer says how much had arrived.
                    self.ask = true;
                    self.timers.probe = None;
                    self.start_timers(now);
                }
                Timer::Probe => {
                    self.probe_due = self.waits_for_answer();
                    self.probes = self.probes.saturating_add(1);
                    self.restart_probe(now);
                }
            }
        }
        Ok(())
    }

    /// Begin nothing new; `Drained` is told when what was begun is complete (10.3.1.5).
    pub(crate) fn drain(&mut self, events: &mut VecDeque<Event>) {
        (self.draining, self.drained_told) = (true, false);
        self.tell_drained(events);
    }

    pub(crate) fn resume(&mut self) {
        self.draining = false;
    }

    fn tell_drained(&mut self, events: &mut VecDeque<Event>) {
        let idle = !self.in_flight() && self.queue.front().is_none_or(|head| head.start >= self.max);
        if self.draining && !self.drained_told && idle {
            self.drained_told = true;
            events.push_back(Event::Drained);
        }
    }

    /// Whether everything posted is complete.
    pub(crate) fn is_idle(&self) -> bool {
        self.queue.is_empty()
    }

    /// Whether everything that was posted has been sent, and nothing is to be repeated.
    pub(crate) fn has_sent_all(&self) -> bool {
        self.cursor == self.queue.len() && !self.probe_due
    }
}
