//! READ data and atomic results that are missing: they are requested again, range by range, while new requests follow.
//!
//! A responder answers these requests in their order. So data of a later one shows that the data of an earlier one, or
//! the request, was lost again. No timer is needed while data arrives.

use std::collections::VecDeque;

use super::Requester;
use crate::burst::Burst;
use crate::extended_psn::ExtendedPsn;
use crate::memory::Memory;
use millstream_quantity::Instant;

/// Times that a range is requested again before a timer decides. A network that reorders packets causes some in vain.
const MAX_ATTEMPTS: u8 = 8;

/// A range of packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range {
    from: ExtendedPsn,
    until: ExtendedPsn,
    /// Times that it was requested again.
    attempts: u8,
}

/// Ranges in which data is missing. Parts of them may have arrived, or need no data.
#[derive(Debug, Default)]
pub(super) struct MissingData {
    due: VecDeque<Range>,
    /// Requested again, in the order of the requests.
    requested: VecDeque<Range>,
    /// Behind the last packet whose response is known to have been sent.
    sent_until: ExtendedPsn,
}

impl MissingData {
    /// The responder has sent all data before `until`: what did not arrive from `from` on was lost.
    pub(super) fn lost(&mut self, from: ExtendedPsn, until: ExtendedPsn) {
        let from = from.max(self.sent_until);
        self.sent_until = self.sent_until.max(until);
        if from < until {
            self.due.push_back(Range { from, until, attempts: 0 });
        }
    }

    /// Data in `from..until` is requested again.
    pub(super) fn request(&mut self, from: ExtendedPsn, until: ExtendedPsn, attempts: u8) {
        self.requested.push_back(Range { from, until, attempts });
    }

    /// The data at `at` has arrived, in the first packet of a response or another one.
    #[inline]
    pub(super) fn arrived(&mut self, at: ExtendedPsn, begins: bool) {
        if !self.requested.is_empty() {
            self.find_lost(at, begins);
        }
    }

    fn find_lost(&mut self, at: ExtendedPsn, begins: bool) {
        let Some(index) = self.requested.iter().position(|range| range.from <= at && at < range.until) else {
            return;
        };
        let range = self.requested[index];
        let rest = Range { from: at.plus(1), ..range };
        if at == range.from && !begins {
            // The first response was late. It says nothing about the second one.
            self.requested[index] = rest;
            return;
        }
        let skipped = Range { until: at, ..range };
        for range in self.requested.drain(..=index).take(index).chain([skipped]) {
            if range.from < range.until && range.attempts < MAX_ATTEMPTS {
                self.due.push_back(Range { attempts: range.attempts + 1, ..range });
            }
        }
        if rest.from < rest.until {
            self.requested.push_front(rest);
        }
    }

    /// Everything before `una` has arrived.
    pub(super) fn advance(&mut self, una: ExtendedPsn) {
        while self.requested.front().is_some_and(|range| range.until <= una) {
            self.requested.pop_front();
        }
    }

    /// Everything from `at` on is sent again.
    pub(super) fn rewind(&mut self, at: ExtendedPsn) {
        for ranges in [&mut self.due, &mut self.requested] {
            ranges.retain(|range| range.from < at);
        }
        self.sent_until = self.sent_until.min(at);
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}

impl Requester {
    /// All missing data is to be requested again, because there was no progress.
    pub(super) fn request_all_missing(&mut self) {
        let last = self.reorder_buffer.last();
        if let (Some(expected), Some(last)) = (self.expected_data(), last)
            && expected < last
        {
            self.missing.clear();
            self.missing.lost(expected, last);
        }
    }

    /// Requests data again that was lost.
    pub(super) fn request_missing<M: Memory>(&mut self, now: Instant, memory: &mut M, burst: &mut Burst<'_>) {
        while let Some(range) = self.missing.due.front_mut() {
            range.from = range.from.max(self.una);
            let range = *range;
            // The rest is sent again anyway.
            let until = range.until.min(self.selective.map_or(self.next, |selective| selective.resume));
            let posted = self.queue.get(self.find(range.from)).copied();
            let Some(posted) = posted.filter(|_| range.from < until) else {
                self.missing.due.pop_front();
                continue;
            };
            let from = if !posted.work.awaits_response() {
                posted.end
            } else if self.reorder_buffer.has(range.from) {
                range.from.plus(1)
            } else {
                let plan = self.plan(&posted, range.from, until);
                if !burst.is_allowed() || !burst.has_room(plan.packet_len()) {
                    return;
                }
                let end = plan.end();
                // If the memory of an atomic WRITE is not accessible, the retransmit timer handles that.
                if self.build(&posted, &plan, false, memory, burst).is_ok() {
                    self.sent_again(&posted, &plan, range.attempts);
                    self.restart_probe(now);
                }
                end
            };
            self.missing.due[0].from = from;
        }
    }
}
