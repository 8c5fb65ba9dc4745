//! The consumer's side of a completion queue: polling, and cancelling completions that were not polled.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use millstream_lockfree::Timestamp;
use millstream_lockfree::cq_ring::CqEntries;
use millstream_lockfree::cqe::Cqe;
use millstream_quantity::Qpn;
use millstream_shm::ArenaBlock;

use super::Cq;
use crate::errno::Result;
use crate::recv_queue::Received;
use crate::types::{WC_GENERAL_ERR, WC_OP_RECV, WC_SUCCESS, Wc};
use crate::xrc_srq_table;

/// What the consumer's lock guards.
#[derive(Debug)]
pub(crate) struct Consumer {
    pub(super) own: VecDeque<OwnCompletion>,
    /// Own completions ever.
    pub(super) own_produced: u32,
    /// The timestamps of our own completions, if they are kept.
    pub(super) own_timestamps: VecDeque<Timestamp>,
    /// Set while completions of peers wait behind own ones.
    pub(super) turn: Option<Turn>,
    /// The shared half.
    pub(super) entries: CqEntries,
    /// The block of these entries.
    pub(super) block: ArenaBlock,
    /// Completions of peers ever consumed. The shared copy is for peers.
    pub(super) head: u32,
    /// The timestamp of the last completion that was polled, if timestamps are kept.
    pub(super) timestamp: Timestamp,
}

/// The completions that are polled before any newer one: own ones, then those of peers that waited behind them. Without it, a
/// program that posts a request for each completed one, and polls fewer than it has outstanding, never gets a receive.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turn {
    own: usize,
    received: u32,
}

/// Most completions of peers that have a turn.
const TURN: u32 = 16;

/// The position of a completion among all ever, from one.
#[derive(Clone, Copy, Debug)]
pub(super) enum Position {
    /// In the shared half.
    Shared(u32),
    /// Of our own send requests.
    Own(u32),
}

/// A completion of one of our own send requests.
#[derive(Clone, Copy, Debug)]
pub(super) struct OwnCompletion {
    pub(super) wc: Wc,
    /// Send requests of the queue pair that are reclaimed with this completion, ever.
    pub(super) posted: u32,
}

impl Cq {
    /// Cancels the pending completions of a queue pair's receive requests, and calls `lost` with the
    /// [`Cqe::sequence`] of each.
    pub(crate) fn cancel_received(&self, consumer: &Consumer, qpn: Qpn, mut lost: impl FnMut(u32)) {
        self.cancel_matching(consumer, |cqe| {
            let matches = cqe.qpn == qpn.get();
            if matches {
                lost(cqe.sequence);
            }
            matches
        });
    }

    /// Whether a completion of a receive request waits to be polled.
    pub(crate) fn has_received(&self, mut matches: impl FnMut(&Cqe) -> bool) -> bool {
        let consumer = self.consumer.lock();
        let waiting =
            (0..consumer.entries.capacity()).map(|i| consumer.entries.read(consumer.head.wrapping_add(i)));
        waiting.map_while(|cqe| cqe).any(|cqe| matches(&cqe))
    }

    /// The first completion since the last event that waits to be polled; `solicited_only`: a solicited one or an error.
    pub(super) fn find_unnotified(&self, solicited_only: bool) -> Option<Position> {
        let consumer = self.consumer.lock();
        let entries = consumer.entries;
        let notified = self.ring.notified.load(Ordering::Relaxed).wrapping_sub(consumer.head);
        // Further ahead than the entries: all of those have been polled.
        let notified = if notified <= entries.capacity() { notified } else { 0 };
        let mut waiting = (0..entries.capacity())
            .map_while(|i| entries.read(consumer.head.wrapping_add(i)).map(|cqe| (i, cqe)));
        let shared = waiting.find(|(i, cqe)| {
            *i >= notified && (!solicited_only || cqe.solicited || u32::from(cqe.status) != WC_SUCCESS)
        });
        if let Some((i, _)) = shared {
            return Some(Position::Shared(consumer.head.wrapping_add(i + 1)));
        }
        let new = consumer.own_produced.wrapping_sub(self.ring.notified_own.load(Ordering::Relaxed)) as usize;
        let skipped = consumer.own.len().saturating_sub(new);
        // A send completion is unsolicited.
        let counts = |own: &OwnCompletion| !solicited_only || own.wc.status != WC_SUCCESS;
        let found = skipped + consumer.own.iter().skip(skipped).position(counts)?;
        let after = (consumer.own.len() - found - 1) as u32;
        Some(Position::Own(consumer.own_produced.wrapping_sub(after)))
    }

    fn cancel_matching(&self, consumer: &Consumer, mut matches: impl FnMut(&Cqe) -> bool) {
        let mut at = consumer.head;
        for _ in 0..consumer.entries.capacity() {
            let Some(cqe) = consumer.entries.read(at) else { break };
            if matches(&cqe) {
                // A published entry belongs to the consumer until it is consumed.
                consumer.entries.slot(at).cancel();
            }
            at = at.wrapping_add(1);
        }
    }

    /// Polls up to `out.len()` completions.
    ///
    /// # Errors
    /// EIO after the queue has overrun and all completions that fit were polled.
    #[inline]
    pub fn poll(&self, out: &mut [Wc]) -> Result<usize> {
        let n = self.take_completions(&mut self.consumer.lock(), out);
        if n != 0 || self.is_idle() { Ok(n) } else { self.poll_again(out) }
    }

    #[cold]
    fn poll_again(&self, out: &mut [Wc]) -> Result<usize> {
        self.work_for_poller(!out.is_empty())?;
        Ok(self.take_completions(&mut self.consumer.lock(), out))
    }

    /// Polls the next completion, with its timestamp if these are kept.
    ///
    /// # Errors
    /// As [`Cq::poll`].
    #[inline]
    pub fn poll_one(&self) -> Result<Option<(Wc, Timestamp)>> {
        let found = self.take_one();
        if found.is_some() || self.is_idle() {
            return Ok(found);
        }
        self.work_for_poller(true)?;
        Ok(self.take_one())
    }

    fn take_one(&self) -> Option<(Wc, Timestamp)> {
        let mut out = [Wc::default()];
        let mut consumer = self.consumer.lock();
        (self.take_completions(&mut consumer, &mut out) == 1).then_some((out[0], consumer.timestamp))
    }

    /// Takes own completions before those of peers, as their requests were complete before a peer could answer them.
    #[inline]
    fn take_completions(&self, consumer: &mut Consumer, out: &mut [Wc]) -> usize {
        if let Some(turn) = consumer.turn {
            return self.take_in_turn(turn, consumer, out);
        }
        let n = self.take_own(consumer, out);
        if n == out.len() {
            consumer.begin_turn();
            return n;
        }
        n + self.take_received(consumer, &mut out[n..], consumer.entries.capacity())
    }

    #[inline(never)]
    fn take_in_turn(&self, mut turn: Turn, consumer: &mut Consumer, out: &mut [Wc]) -> usize {
        let own = turn.own.min(out.len());
        let mut n = self.take_own(consumer, &mut out[..own]);
        // Fewer are left if a queue pair was destroyed.
        turn.own = if n == own { turn.own - n } else { 0 };
        if n < out.len() {
            let before = consumer.head;
            n += self.take_received(consumer, &mut out[n..], turn.received);
            turn.received -= consumer.head.wrapping_sub(before);
        }
        if n == out.len() && (turn.own, turn.received) != (0, 0) {
            consumer.turn = Some(turn);
            return n;
        }
        consumer.turn = None;
        n + self.take_completions(consumer, &mut out[n..])
    }

    #[inline]
    fn take_own(&self, consumer: &mut Consumer, out: &mut [Wc]) -> usize {
        let mut n = 0;
        while n < out.len() {
            let Some(own) = consumer.own.pop_front() else { break };
            if self.timestamps {
                consumer.timestamp = consumer.own_timestamps.pop_front().unwrap_or_default();
            }
            if let Some(qp) = self.context.adapter.qps.sender_for_poller(Qpn::new(own.wc.qp_num)) {
                qp.reclaim(own.posted);
            }
            out[n] = own.wc;
            n += 1;
        }
        n
    }

    /// Looks at `most` completions of peers at most: a faulty peer can publish entries endlessly.
    #[inline]
    fn take_received(&self, consumer: &mut Consumer, out: &mut [Wc], most: u32) -> usize {
        let adapter = self.context.adapter;
        let mut n = 0;
        let mut head = consumer.head;
        let before = head;
        while n < out.len() && head.wrapping_sub(before) < most {
            let Some(cqe) = consumer.entries.read(head) else { break };
            if self.timestamps {
                consumer.timestamp = consumer.entries.timestamp(head);
            }
            head = head.wrapping_add(1);
            let receive = match adapter.qps.receiver_for_poller(Qpn::new(cqe.qpn), self.arena_offset()) {
                Some(qp) => qp.complete_receive(cqe.sequence),
                None => self.complete_for_domain(cqe.sequence),
            };
            // Completions of destroyed queue pairs, or without a matching request, are dropped.
            if let Some(receive) = receive {
                // Only values that are possible are passed on: programs rely on that.
                let opcode = WC_OP_RECV | u32::from(cqe.opcode) & 1;
                let room = if opcode == WC_OP_RECV { receive.room } else { u32::MAX };
                out[n] = Wc {
                    wr_id: receive.wr_id,
                    status: u32::from(cqe.status).min(WC_GENERAL_ERR),
                    opcode,
                    vendor_err: if cqe.status == WC_SUCCESS as u16 { 0 } else { cqe.detail },
                    byte_len: cqe.byte_len.min(room),
                    imm: cqe.imm,
                    qp_num: cqe.qpn,
                    src_qp: if cqe.status == WC_SUCCESS as u16 { cqe.detail & 0xff_ffff } else { 0 },
                    wc_flags: cqe.wc_flags,
                    sl: if cqe.status == WC_SUCCESS as u16 { (cqe.detail >> 24) as u8 } else { 0 },
                    ..Wc::default()
                };
                n += 1;
            }
        }
        if head != before {
            consumer.head = head;
            self.ring.head.store(head, Ordering::Release);
        }
        n
    }

    /// Completes a receive request of an XRC shared receive queue. The queue pair may be another process's.
    #[cold]
    fn complete_for_domain(&self, sequence: u32) -> Option<Received> {
        let srqs = &self.context.adapter.xrc_srqs;
        srqs.for_poller(sequence, self.arena_offset())?.complete(xrc_srq_table::slot(sequence))
    }

    /// Cancels the pending completions of an XRC shared receive queue, and runs `work` while pollers are locked out.
    pub(crate) fn cancel_xrc_srq(&self, number: u32, work: impl FnOnce()) {
        let consumer = self.consumer.lock();
        self.cancel_matching(&consumer, |cqe| {
            xrc_srq_table::is_of(cqe.sequence, number) && self.is_foreign(Qpn::new(cqe.qpn))
        });
        work();
    }

    /// Whether no queue pair of this process with this number completes here.
    fn is_foreign(&self, qpn: Qpn) -> bool {
        self.context.adapter.qps.receiver_for_poller(qpn, self.arena_offset()).is_none()
    }
}

impl Consumer {
    /// Lets completions of peers that wait now have their turn.
    #[inline]
    fn begin_turn(&mut self) {
        let waits = |i: u32| self.entries.is_published(self.head.wrapping_add(i));
        if waits(0) {
            let received =
                (1..TURN.min(self.entries.capacity())).take_while(|&i| waits(i)).count() as u32 + 1;
            self.turn = Some(Turn { own: self.own.len(), received });
        }
    }

    /// Stores the time now as that of our last own completion.
    #[cold]
    #[inline(never)]
    pub(super) fn store_timestamp(&mut self) {
        self.own_timestamps.push_back(Timestamp::now());
    }

    /// Cancels the pending completions of a queue pair's send requests.
    pub(crate) fn cancel(&mut self, qpn: Qpn) {
        let mut timestamps = std::mem::take(&mut self.own_timestamps).into_iter();
        let mut kept = VecDeque::new();
        self.own.retain(|own| {
            let keep = own.wc.qp_num != qpn.get();
            kept.extend(timestamps.next().filter(|_| keep));
            keep
        });
        self.own_timestamps = kept;
    }
}
