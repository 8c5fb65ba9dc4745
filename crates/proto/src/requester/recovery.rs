//! Recovery from losses.
//!
//! A sequence NAK names one packet, and says nothing about those that follow it. A responder may discard them
//! (9.7.5.2.8), or store them in a [`ReorderBuffer`](crate::reorder_buffer::ReorderBuffer). So a requester *rewinds*
//! to the missing packet: it sends a few packets from there on, and waits for their acknowledgement ([`Recovery`]).
//!
//! An acknowledgement that covers more than was sent again shows that the responder stores packets. From then on the
//! requester asks for selective acknowledgements ([`selective_ack`](crate::selective_ack)), which other responders
//! ignore. A responder that sends them receives only what is missing, while new packets follow
//! ([`SelectiveRetransmit`]).
//!
//! The requester itself knows which READ data is missing ([`missing_data`](super::missing_data)).

use millstream_quantity::Instant;

use super::{Requester, SendWqe};
use crate::extended_psn::ExtendedPsn;
use crate::request::SendOp;
use crate::selective_ack::StoredPackets;

/// Packets that a rewound requester sends before the responder reports what else is missing.
const RECOVERY_WINDOW: u32 = 16;

/// Slow retransmission after a rewind: a few packets first, and twice as many with each round trip.
#[derive(Clone, Copy, Debug)]
pub(super) struct Recovery {
    /// Behind the last packet that was sent before the loss was detected.
    until: ExtendedPsn,
    /// Packets that may be in flight.
    pub(super) room: u32,
    /// Behind the last packet of the current round trip.
    round_end: ExtendedPsn,
    /// The responder reported the loss.
    pub(super) is_reported: bool,
}

/// Retransmission of a range of packets only, without those that have arrived.
#[derive(Clone, Copy, Debug)]
pub(super) struct SelectiveRetransmit {
    /// Behind the last packet of the range.
    until: ExtendedPsn,
    /// The packet to send next afterwards.
    pub(super) resume: ExtendedPsn,
}

/// Gaps that a selective acknowledgement reported.
#[derive(Debug)]
pub(super) struct Gaps {
    /// The oldest packet that is missing at the responder.
    at: ExtendedPsn,
    stored: StoredPackets,
    /// Behind the last gap that was sent again.
    sent_until: ExtendedPsn,
    /// Retransmissions of the oldest packet without progress.
    attempts: u32,
}

impl Requester {
    /// Rewinds to `at`: all packets from there on are sent again.
    pub(super) fn rewind(&mut self, at: ExtendedPsn) {
        self.next = at;
        self.cursor = self.find(at);
        self.selective = None;
        self.forget_gaps();
        self.missing.rewind(at);
        self.rewound_to = Some(at);
        self.probe_due = false;
        self.blocked_status = None;
    }

    /// Starts recovery from a loss, which the responder has reported or which was detected otherwise.
    pub(super) fn begin_recovery(&mut self, is_reported: bool) {
        self.rtt.lost();
        let round_end = self.una.plus(1);
        self.recovery = Some(Recovery { until: self.max, room: RECOVERY_WINDOW, round_end, is_reported });
    }

    /// Updates the gaps: the responder has executed all requests before `at`.
    pub(super) fn gaps_closed_until(&mut self, at: ExtendedPsn, now: Instant) {
        if self.gaps.is_none() {
            return;
        }
        let at = self.next_request_packet(at);
        let Some(gaps) = &mut self.gaps else { return };
        if at >= gaps.sent_until {
            self.forget_gaps();
        } else if at > gaps.at {
            gaps.at = at;
            gaps.attempts = 0;
            self.restart_gap_timer(now);
        }
    }

    /// Updates recovery when everything before `una` is acknowledged.
    pub(super) fn recover(&mut self, una: ExtendedPsn) {
        let Some(recovery) = &mut self.recovery else { return };
        if una >= recovery.until {
            self.recovery = None;
        } else if una > self.next {
            self.peer_stores |= recovery.is_reported;
            recovery.room = RECOVERY_WINDOW;
        } else if una >= recovery.round_end {
            recovery.room = recovery.room.saturating_mul(2);
            recovery.round_end = self.next;
        }
    }

    /// Handles a sequence NAK: the packet at `at` was lost, later ones arrived.
    ///
    /// It uses up no retry and does not restart the retransmit timer: a reordering network causes many such
    /// NAKs within one round trip. Only time without progress ends the attempts.
    pub(super) fn handle_sequence_nak(&mut self, at: ExtendedPsn) {
        // No packet was sent since the last rewind, so the NAK is a duplicate.
        if self.timers.rnr_wait.is_none() && self.next > at && self.gaps.is_none() {
            self.begin_recovery(true);
            self.rewind(at);
        }
    }

    /// Handles a selective acknowledgement: the packet at `at` was lost, and of the later ones those arrived that
    /// `bitmap` names. Gaps that were not reported before are sent again.
    pub(super) fn handle_selective_ack(&mut self, at: ExtendedPsn, bitmap: &[u8], now: Instant) {
        if self.timers.rnr_wait.is_some() {
            return;
        }
        let stored = StoredPackets::parse(at.plus(1), bitmap);
        let end = stored.end().min(self.max);
        let (sent_until, attempts) =
            self.gaps.as_ref().map_or((at, 0), |gaps| (gaps.sent_until.max(at), gaps.attempts));
        self.recovery = None;
        self.gaps = Some(Gaps { at, stored, sent_until: sent_until.max(end), attempts });
        if sent_until < end {
            self.retransmit_gaps(sent_until, end);
        }
        if self.timers.gap.is_none() {
            self.restart_gap_timer(now);
        }
    }

    /// Sends what is missing in `from..end` again, then new packets.
    fn retransmit_gaps(&mut self, from: ExtendedPsn, end: ExtendedPsn) {
        self.rtt.lost();
        let former = self.selective.map(|selective| (self.next, selective.until));
        let (from, until) = former.map_or((from, end), |former| (from.min(former.0), end.max(former.1)));
        self.selective = Some(SelectiveRetransmit { until, resume: self.max });
        self.next = from;
        self.cursor = self.find(from);
        self.blocked_status = None;
        self.request_ack = true;
    }

    /// Sends the oldest missing packet again, because there was no progress. The responder reports what else is missing.
    pub(super) fn retransmit_oldest(&mut self, now: Instant) {
        if let Some(gaps) = &mut self.gaps {
            let at = gaps.at;
            let end = at.plus(1).min(self.max);
            gaps.sent_until = end;
            gaps.attempts += 1;
            self.retransmit_gaps(at, end);
            self.restart_gap_timer(now);
        }
    }

    fn restart_gap_timer(&mut self, now: Instant) {
        let attempts = self.gaps.as_ref().map_or(0, |gaps| gaps.attempts.min(16));
        self.timers.gap = self.config.probe.map(|max| now + self.rtt.gap_timeout(max) * (1 << attempts));
    }

    fn forget_gaps(&mut self) {
        self.gaps = None;
        self.timers.gap = None;
    }

    /// Skips packets that need no retransmission: data that arrived, requests that the responder has stored, and
    /// packets outside a selective retransmission.
    pub(super) fn skip_received(&mut self) {
        while self.next < self.max {
            if let Some(SelectiveRetransmit { resume, .. }) =
                self.selective.take_if(|selective| selective.until <= self.next)
            {
                self.next = self.next.max(resume);
                self.cursor = self.find(self.next);
                continue;
            }
            let Some(posted) = self.queue.get(self.cursor) else { return };
            let awaits_data = posted.work.awaits_response();
            if awaits_data && self.reorder_buffer.has(self.next) {
                self.next = self.next.plus(1);
            } else if let Some(end) = self.end_if_stored(posted) {
                self.next = end;
            } else {
                return;
            }
            if self.next >= posted.end {
                self.cursor += 1;
            }
        }
        self.selective = None;
    }

    /// The first request packet at or behind `at`, which may lie among the responses of a READ.
    fn next_request_packet(&self, at: ExtendedPsn) -> ExtendedPsn {
        match self.queue.get(self.find(at)) {
            Some(posted) if posted.start < at && matches!(posted.work, SendOp::Read { .. }) => {
                let (start, end) = self.read_request(posted, at);
                if at == start { at } else { end }
            }
            _ => at,
        }
    }

    /// First sequence number, and the one behind the last, of the request packet of a READ that covers `at`.
    #[inline]
    pub(super) fn read_request(&self, posted: &SendWqe, at: ExtendedPsn) -> (ExtendedPsn, ExtendedPsn) {
        let index = at.since(posted.start) / self.read_packets;
        let start = posted.start.plus(index * self.read_packets);
        (start, start.plus(self.read_packets).min(posted.end))
    }

    /// Behind the request packet to send next, if a selective retransmission need not send it.
    fn end_if_stored(&self, posted: &SendWqe) -> Option<ExtendedPsn> {
        let gaps = self.gaps.as_ref().filter(|_| self.selective.is_some() && !posted.is_local())?;
        let (start, end) = match posted.work {
            SendOp::Read { .. } => self.read_request(posted, self.next),
            _ => (self.next, self.next.plus(1)),
        };
        // A READ request that was not executed is sent for all of its data.
        let is_sent = start < self.next && start >= self.una;
        (is_sent || gaps.stored.has(start)).then_some(end)
    }

    /// Stops retransmitting: the rest is in flight. After a lost request, only a responder that stores packets sends the
    /// data of requests that were not sent again.
    pub(super) fn cancel_retransmit(&mut self) {
        self.peer_stores |= self.recovery.take().is_some_and(|recovery| recovery.is_reported);
        self.selective = None;
        self.next = self.max;
        self.cursor = self.find(self.max);
    }
}
