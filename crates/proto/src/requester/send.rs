//! Which packet is next, and building it.

use std::collections::VecDeque;

use millstream_wire::{
    Headers, ICRC_LEN, Opcode, Operation, Position, Rkey, atomic_eth, bth, ieth, imm_dt, reth, xrceth,
};

use super::{Failed, Posted, Requester};
use crate::burst::Burst;
use crate::event::{Event, Status};
use crate::memory::Memory;
use crate::request::{Trailer, Work};
use crate::sequence::Sequence;
use millstream_quantity::Instant;

/// One packet in this many asks for an acknowledgement in the middle of a message.
const ASK_EVERY: u32 = 64;

/// A packet that is to be built.
struct Plan {
    at: Sequence,
    /// Sequence numbers that it uses: of a READ request, those of the responses.
    span: u32,
    opcode: Opcode,
    /// Where its payload begins in the request's.
    offset: u32,
    /// Bytes of payload; of a READ request, bytes that it asks for.
    len: u32,
    solicited: bool,
}

impl Plan {
    fn payload(&self) -> usize {
        if self.opcode.has_payload() { self.len as usize } else { 0 }
    }

    fn packet_len(&self) -> usize {
        bth::LEN + self.opcode.headers_len() + self.payload().next_multiple_of(4) + ICRC_LEN
    }
}

/// The opcode on a reliable connection (table 38).
#[inline]
fn opcode(work: &Work, position: Position) -> Opcode {
    use Position::{First, Last, Middle, Only};
    match (work, position) {
        (Work::Send(_), First) => Opcode::RC_SEND_FIRST,
        (Work::Send(_), Middle) => Opcode::RC_SEND_MIDDLE,
        (Work::Send(Trailer::None), Last) => Opcode::RC_SEND_LAST,
        (Work::Send(Trailer::None), Only) => Opcode::RC_SEND_ONLY,
        (Work::Send(Trailer::Immediate(_)), Last) => Opcode::RC_SEND_LAST_IMM,
        (Work::Send(Trailer::Immediate(_)), Only) => Opcode::RC_SEND_ONLY_IMM,
        (Work::Send(Trailer::Invalidate(_)), Last) => Opcode::RC_SEND_LAST_INV,
        (Work::Send(Trailer::Invalidate(_)), Only) => Opcode::RC_SEND_ONLY_INV,
        (Work::Write { .. }, First) => Opcode::RC_WRITE_FIRST,
        (Work::Write { .. }, Middle) => Opcode::RC_WRITE_MIDDLE,
        (Work::Write { immediate: None, .. }, Last) => Opcode::RC_WRITE_LAST,
        (Work::Write { immediate: None, .. }, Only) => Opcode::RC_WRITE_ONLY,
        (Work::Write { immediate: Some(_), .. }, Last) => Opcode::RC_WRITE_LAST_IMM,
        (Work::Write { immediate: Some(_), .. }, Only) => Opcode::RC_WRITE_ONLY_IMM,
        (Work::Read { .. }, _) => Opcode::RC_READ_REQUEST,
        (Work::CompareSwap { .. }, _) => Opcode::RC_COMPARE_SWAP,
        (Work::FetchAdd { .. }, _) => Opcode::RC_FETCH_ADD,
        (Work::AtomicWrite { .. }, _) => Opcode::RC_ATOMIC_WRITE,
        (Work::Local, _) => unreachable!("local work has no packets"),
    }
}

impl Posted {
    fn is_local(&self) -> bool {
        self.start == self.end
    }

    /// Remote address and key, shifted by `offset`.
    fn remote(&self, offset: u32) -> (u64, Rkey) {
        match self.work {
            Work::Write { va, rkey, .. } | Work::Read { va, rkey } | Work::AtomicWrite { va, rkey } => {
                (va.wrapping_add(u64::from(offset)), rkey)
            }
            _ => (0, Rkey::new(0)),
        }
    }
}

impl Requester {
    /// Fills the burst with requests.
    pub(crate) fn transmit<M: Memory>(
        &mut self,
        now: Instant,
        memory: &mut M,
        burst: &mut Burst<'_>,
        events: &mut VecDeque<Event>,
    ) -> Failed {
        if self.timers.rnr_wait.is_some() {
            return Ok(());
        }
        self.probe(now, memory, burst);
        let before = self.next;
        while self.stopped.is_none() {
            self.pass_over();
            let Some(posted) = self.queue.get(self.cursor).copied() else { break };
            if self.must_wait(&posted) {
                break;
            }
            if posted.is_local() {
                match memory.local(posted.id) {
                    Ok(()) => {
                        self.queue[self.cursor].done = true;
                        self.cursor += 1;
                        self.complete(events);
                    }
                    Err(status) => self.stopped = Some(status),
                }
                continue;
            }
            let plan = self.plan(&posted, self.next);
            let in_flight = self.next.since(self.una);
            let window = self.window();
            let fits = in_flight == 0 || in_flight + plan.span <= window;
            if !fits || !burst.is_allowed() || !burst.has_room(plan.packet_len()) {
                break;
            }
            let is_full = in_flight + plan.span >= window;
            match self.build(&posted, &plan, is_full, memory, burst) {
                Ok(()) => self.sent(&posted, &plan, now, events),
                Err(status) => self.stopped = Some(status),
            }
        }
        if before != self.next {
            self.restart_probe(now);
            self.start_timers(now);
        }
        match self.stopped {
            // Those before it are complete.
            Some(status) if self.cursor == 0 => self.fail_head(status, events),
            _ => Ok(()),
        }
    }

    /// Whether the request at the cursor must not go on now.
    fn must_wait(&self, posted: &Posted) -> bool {
        let begins = self.next == posted.start;
        // Not begun before: sending again is not beginning.
        if self.draining && begins && posted.start >= self.max {
            return true;
        }
        // All READs and atomic operations before it are complete (10.8.3.3).
        if posted.fence && begins && posted.start >= self.max && !self.outstanding.is_empty() {
            return true;
        }
        // Outstanding READs and atomic operations are limited (9.7.6.1.1).
        let is_new = self.next >= self.max;
        if posted.work.awaits_response()
            && is_new
            && self.outstanding.len() >= usize::from(self.config.max_rd_atomic)
        {
            return true;
        }
        self.lacks_credit(posted)
    }

    /// Whether the responder has told that it has no receive request for this message (9.7.7.2.5). One
    /// packet may be sent nevertheless when nothing else is under way, so that its answer brings news.
    fn lacks_credit(&self, posted: &Posted) -> bool {
        let Some(limit) = self.limit.filter(|_| posted.work.takes_receive()) else { return false };
        let ahead = (posted.ssn.get().wrapping_sub(limit.get()) << 8) as i32 >> 8;
        if ahead <= 0 {
            return false;
        }
        if self.next == posted.start { self.next != self.una } else { self.una <= posted.start }
    }

    /// The packet of a request with this sequence number.
    #[inline]
    fn plan(&self, posted: &Posted, at: Sequence) -> Plan {
        let index = at.since(posted.start);
        // Below 2³¹, as the request's length is not greater.
        let offset = (u64::from(index) * u64::from(self.mtu)) as u32;
        let left = posted.len - offset.min(posted.len);
        let carried = |opcode| self.connection.service.carried(opcode);
        let plan =
            |opcode, span, len| Plan { at, span, opcode: carried(opcode), offset, len, solicited: false };
        if let Work::Read { .. } = posted.work {
            // Requests begin and end where they did the first time, but for where the data broke off: the
            // responder takes a repeated request only for a part of the original one (9.7.5.1.5).
            let end = posted.start.plus((index / self.read_packets + 1) * self.read_packets).min(posted.end);
            // What is behind a gap has come.
            let end = self.kept.next(at.plus(1)).map_or(end, |kept| end.min(kept));
            let span = end.since(at);
            return plan(
                Opcode::RC_READ_REQUEST,
                span,
                left.min(u32::try_from(u64::from(span) * u64::from(self.mtu)).unwrap_or(u32::MAX)),
            );
        }
        let is_last = at.plus(1) == posted.end;
        let position = match (at == posted.start, is_last) {
            (true, true) => Position::Only,
            (true, false) => Position::First,
            (false, true) => Position::Last,
            (false, false) => Position::Middle,
        };
        let solicited = posted.solicited && is_last && posted.work.takes_receive();
        Plan { solicited, ..plan(opcode(&posted.work, position), 1, left.min(self.mtu)) }
    }

    /// Builds a packet for which there is room.
    #[inline]
    fn build<M: Memory>(
        &mut self,
        posted: &Posted,
        plan: &Plan,
        is_full: bool,
        memory: &mut M,
        burst: &mut Burst<'_>,
    ) -> Result<(), Status> {
        let (len, payload) = (plan.packet_len(), plan.payload());
        let pad = payload.next_multiple_of(4) - payload;
        let ends = plan.at.plus(plan.span) == posted.end;
        let ask = self.reliable && (ends || is_full || self.ask || self.unasked >= ASK_EVERY);
        let opcode = plan.opcode;
        let bth = bth::Repr {
            solicited: plan.solicited,
            pad: pad as u8,
            pkey: self.connection.pkey,
            ack_req: ask,
            ..bth::Repr::new(opcode, self.connection.remote_qp, plan.at.psn())
        };
        let packet = burst.begin(&bth, len);
        let start = bth::LEN + opcode.headers_len();
        if opcode.headers() != Headers::NONE {
            let to = &mut packet[bth::LEN..start];
            if opcode.headers().contain(Headers::XRCETH) {
                let srq = memory.shared_queue(posted.id);
                xrceth::Repr { srq }.emit(&mut xrceth::Packet::new_unchecked(&mut *to));
            }
            extensions(posted, plan, to);
        }
        if payload > 0 {
            memory.gather(posted.id, plan.offset, &mut packet[start..start + payload])?;
            packet[start + payload..start + payload + pad].fill(0);
        }
        burst.commit(len, true);
        self.unasked = if ask { 0 } else { self.unasked + 1 };
        self.ask &= !ask;
        Ok(())
    }

    /// The packet is on its way.
    #[inline]
    fn sent(&mut self, posted: &Posted, plan: &Plan, now: Instant, events: &mut VecDeque<Event>) {
        self.next = plan.at.plus(plan.span);
        self.pace.sent(now);
        if self.unasked == 0 || plan.at == self.una {
            self.patience.sent(self.next, now);
        }
        if plan.at < self.max {
            self.retransmitted += 1;
        } else if plan.at == posted.start
            && matches!(posted.work, Work::Read { .. } | Work::CompareSwap { .. } | Work::FetchAdd { .. })
        {
            self.due.push_back((posted.start, posted.end));
        }
        if posted.work.awaits_response() && self.next > self.max {
            self.outstanding.push_back(self.next);
        }
        self.max = self.max.max(self.next);
        if self.next == posted.end {
            self.cursor += 1;
        }
        if !self.reliable {
            // Complete when it is sent (9.8.1).
            self.una = self.next;
            self.complete(events);
        }
    }

    /// Sends the last packet once more if it is time to; of a READ, asks for its last packet once more.
    fn probe<M: Memory>(&mut self, now: Instant, memory: &mut M, burst: &mut Burst<'_>) {
        if !self.probe_due || !burst.is_empty() || !self.waits_for_answer() {
            return;
        }
        // Of those that were sent since the last going back.
        let last = self.next.before();
        let Some(posted) = self.queue.get(self.find(last)).copied() else { return };
        // What was asked for again before may have been lost, too.
        self.went_back = None;
        let plan = self.plan(&posted, last);
        if burst.has_room(plan.packet_len()) {
            self.ask = true;
            // If its memory is gone, the retransmit timer finds out.
            if self.build(&posted, &plan, true, memory, burst).is_ok() {
                self.retransmitted += 1;
            }
            self.probe_due = false;
            self.start_timers(now);
        }
    }
}

/// Writes the extended headers, which fill `to` (9.3, in the order of the opcode's table).
fn extensions(posted: &Posted, plan: &Plan, to: &mut [u8]) {
    let headers = plan.opcode.headers();
    if let Some(at) = headers.offset_of(Headers::RETH) {
        let (va, rkey) = posted.remote(plan.offset);
        let is_part = plan.opcode.operation() == Operation::ReadRequest;
        let length = if is_part { plan.len } else { posted.len };
        reth::Repr { va, rkey, length }.emit(&mut reth::Packet::new_unchecked(&mut to[at..]));
    }
    let atomic = match posted.work {
        Work::CompareSwap { va, rkey, compare, swap } => {
            Some(atomic_eth::Repr { va, rkey, swap_or_add: swap, compare })
        }
        Work::FetchAdd { va, rkey, add } => Some(atomic_eth::Repr { va, rkey, swap_or_add: add, compare: 0 }),
        _ => None,
    };
    if let (Some(at), Some(atomic)) = (headers.offset_of(Headers::ATOMIC_ETH), atomic) {
        atomic.emit(&mut atomic_eth::Packet::new_unchecked(&mut to[at..]));
    }
    if let (Some(at), Work::Send(Trailer::Immediate(data)) | Work::Write { immediate: Some(data), .. }) =
        (headers.offset_of(Headers::IMM_DT), posted.work)
    {
        imm_dt::Repr { data }.emit(&mut imm_dt::Packet::new_unchecked(&mut to[at..]));
    }
    if let (Some(at), Work::Send(Trailer::Invalidate(rkey))) = (headers.offset_of(Headers::IETH), posted.work)
    {
        ieth::Repr { rkey }.emit(&mut ieth::Packet::new_unchecked(&mut to[at..]));
    }
}
