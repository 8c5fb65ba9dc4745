//! Selecting and building the next packet.

use std::collections::VecDeque;

use millstream_wire::{
    Headers, ICRC_LEN, Opcode, Operation, Position, Rkey, atomic_eth, bth, ieth, imm_dt, reth, xrceth,
};

use super::{QpResult, Requester, SendWqe};
use crate::burst::Burst;
use crate::event::{Event, Status};
use crate::extended_psn::ExtendedPsn;
use crate::memory::Memory;
use crate::request::{SendModifier, SendOp};
use millstream_quantity::Instant;

/// The AckReq bit is set once in this many packets of a message.
const ACK_REQ_INTERVAL: u32 = 64;

/// A packet to build.
pub(super) struct PacketPlan {
    at: ExtendedPsn,
    /// PSNs that the packet uses: one, or for a READ request the number of responses.
    span: u32,
    opcode: Opcode,
    /// Offset of its payload in the request's payload.
    offset: u32,
    /// Bytes of payload, or bytes that a READ request requests.
    len: u32,
    solicited: bool,
}

impl PacketPlan {
    fn payload(&self) -> usize {
        if self.opcode.has_payload() { self.len as usize } else { 0 }
    }

    /// Behind its last packet.
    pub(super) fn end(&self) -> ExtendedPsn {
        self.at.plus(self.span)
    }

    pub(super) fn packet_len(&self) -> usize {
        bth::LEN + self.opcode.headers_len() + self.payload().next_multiple_of(4) + ICRC_LEN
    }
}

/// The RC opcode of an operation (table 38).
#[inline]
fn opcode(work: &SendOp, position: Position) -> Opcode {
    use Position::{First, Last, Middle, Only};
    match (work, position) {
        (SendOp::Send(_), First) => Opcode::RC_SEND_FIRST,
        (SendOp::Send(_), Middle) => Opcode::RC_SEND_MIDDLE,
        (SendOp::Send(SendModifier::None), Last) => Opcode::RC_SEND_LAST,
        (SendOp::Send(SendModifier::None), Only) => Opcode::RC_SEND_ONLY,
        (SendOp::Send(SendModifier::Immediate(_)), Last) => Opcode::RC_SEND_LAST_IMM,
        (SendOp::Send(SendModifier::Immediate(_)), Only) => Opcode::RC_SEND_ONLY_IMM,
        (SendOp::Send(SendModifier::Invalidate(_)), Last) => Opcode::RC_SEND_LAST_INV,
        (SendOp::Send(SendModifier::Invalidate(_)), Only) => Opcode::RC_SEND_ONLY_INV,
        (SendOp::Write { .. }, First) => Opcode::RC_WRITE_FIRST,
        (SendOp::Write { .. }, Middle) => Opcode::RC_WRITE_MIDDLE,
        (SendOp::Write { immediate: None, .. }, Last) => Opcode::RC_WRITE_LAST,
        (SendOp::Write { immediate: None, .. }, Only) => Opcode::RC_WRITE_ONLY,
        (SendOp::Write { immediate: Some(_), .. }, Last) => Opcode::RC_WRITE_LAST_IMM,
        (SendOp::Write { immediate: Some(_), .. }, Only) => Opcode::RC_WRITE_ONLY_IMM,
        (SendOp::Read { .. }, _) => Opcode::RC_READ_REQUEST,
        (SendOp::CompareSwap { .. }, _) => Opcode::RC_COMPARE_SWAP,
        (SendOp::FetchAdd { .. }, _) => Opcode::RC_FETCH_ADD,
        (SendOp::AtomicWrite { .. }, _) => Opcode::RC_ATOMIC_WRITE,
        (SendOp::Local, _) => unreachable!("local work has no packets"),
    }
}

impl SendWqe {
    pub(super) fn is_local(&self) -> bool {
        self.start == self.end
    }

    /// Remote address plus `offset`, and R_Key.
    fn remote(&self, offset: u32) -> (u64, Rkey) {
        match self.work {
            SendOp::Write { va, rkey, .. } | SendOp::Read { va, rkey } | SendOp::AtomicWrite { va, rkey } => {
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
    ) -> QpResult {
        if self.timers.rnr_wait.is_some() {
            return Ok(());
        }
        self.request_missing(now, memory, burst);
        self.probe(now, memory, burst);
        let before = self.next;
        while self.blocked_status.is_none() {
            self.skip_received();
            let Some(posted) = self.queue.get(self.cursor).copied() else { break };
            if posted.is_local() && posted.done {
                // A request before it is sent again.
                self.cursor += 1;
                continue;
            }
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
                    Err(status) => self.blocked_status = Some(status),
                }
                continue;
            }
            let plan = self.plan(&posted, self.next, posted.end);
            let in_flight = self.next.since(self.una);
            let window = self.window();
            let fits = in_flight == 0 || in_flight + plan.span <= window;
            if !fits || !burst.is_allowed() || !burst.has_room(plan.packet_len()) {
                break;
            }
            let is_full = in_flight + plan.span >= window;
            // The rest of the message waits for the acknowledgement, which may bring new credits (9.7.7.2.5).
            let awaits_credit = self.next == posted.start && self.exceeds_credits(&posted);
            match self.build(&posted, &plan, is_full || awaits_credit, memory, burst) {
                Ok(()) => self.sent(&posted, &plan, now, events),
                Err(status) => self.blocked_status = Some(status),
            }
        }
        if before != self.next {
            self.restart_probe(now);
            self.start_timers(now);
        }
        match self.blocked_status {
            // All requests before it are complete.
            Some(status) if self.cursor == 0 => self.fail_head(status, events),
            _ => Ok(()),
        }
    }

    /// Whether the request at the cursor must wait.
    fn must_wait(&self, posted: &SendWqe) -> bool {
        let begins = self.next == posted.start;
        // A retransmission is not a start.
        if self.draining && begins && posted.start >= self.max {
            return true;
        }
        // All earlier READs and atomic operations must be complete (10.8.3.3).
        if posted.fence && begins && posted.start >= self.max && !self.outstanding.is_empty() {
            return true;
        }
        // Outstanding READs and atomic operations are limited (9.7.6.1.1).
        let is_new = self.next >= self.max;
        if posted.work.awaits_response()
            && is_new
            // Of those that were posted before the limit became 0, one is outstanding at a time.
            && self.outstanding.len() >= usize::from(self.config.max_rd_atomic.max(1))
        {
            return true;
        }
        self.lacks_credit(posted)
    }

    /// Whether the responder has no receive request for this message.
    #[inline]
    fn exceeds_credits(&self, posted: &SendWqe) -> bool {
        let Some(limit) = self.limit.filter(|_| posted.work.takes_receive()) else { return false };
        (posted.ssn.get().wrapping_sub(limit.get()) << 8).cast_signed() >> 8 > 0
    }

    /// Whether this message waits for credits (9.7.7.2.5). One packet may be sent when nothing else is in flight, so that its
    /// acknowledgement updates the credits.
    fn lacks_credit(&self, posted: &SendWqe) -> bool {
        if !self.exceeds_credits(posted) {
            return false;
        }
        if self.next == posted.start { self.next != self.una } else { self.una <= posted.start }
    }

    /// The packet of a request at a sequence number. A READ requests data before `until` only.
    #[inline]
    pub(super) fn plan(&self, posted: &SendWqe, at: ExtendedPsn, until: ExtendedPsn) -> PacketPlan {
        let index = at.since(posted.start);
        // Below 2³¹, the longest request.
        let offset = (u64::from(index) * u64::from(self.mtu)) as u32;
        let left = posted.len - offset.min(posted.len);
        let carried = |opcode| self.connection.service.opcode_of(opcode);
        let plan = |opcode, span, len| PacketPlan {
            at,
            span,
            opcode: carried(opcode),
            offset,
            len,
            solicited: false,
        };
        if let SendOp::Read { .. } = posted.work {
            // A retransmitted READ request keeps its original end, as the responder accepts only part of the
            // original range (9.7.5.1.5).
            let end = self.read_request(posted, at).1.min(until);
            // The data behind the gap has arrived.
            let end = self.reorder_buffer.next(at.plus(1)).map_or(end, |kept| end.min(kept));
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
        PacketPlan { solicited, ..plan(opcode(&posted.work, position), 1, left.min(self.mtu)) }
    }

    /// Builds a packet, for which there is room.
    #[inline]
    pub(super) fn build<M: Memory>(
        &mut self,
        posted: &SendWqe,
        plan: &PacketPlan,
        needs_ack: bool,
        memory: &mut M,
        burst: &mut Burst<'_>,
    ) -> Result<(), Status> {
        let (len, payload) = (plan.packet_len(), plan.payload());
        let pad = payload.next_multiple_of(4) - payload;
        let ends = plan.end() == posted.end;
        let ask = self.reliable
            && (ends || needs_ack || self.request_ack || self.since_ack_req >= ACK_REQ_INTERVAL);
        let opcode = plan.opcode;
        let bth = bth::Repr {
            solicited: plan.solicited,
            pad: pad as u8,
            pkey: self.connection.pkey,
            ack_req: ask,
            selective_ack: self.peer_stores,
            ..bth::Repr::new(opcode, self.connection.remote_qp, plan.at.psn())
        };
        let packet = burst.begin(&bth, len);
        let start = bth::LEN + opcode.headers_len();
        if opcode.headers() != Headers::NONE {
            let to = &mut packet[bth::LEN..start];
            if opcode.headers().contains(Headers::XRCETH) {
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
        self.since_ack_req = if ask { 0 } else { self.since_ack_req + 1 };
        self.request_ack &= !ask;
        Ok(())
    }

    /// Updates the state after a packet was sent.
    #[inline]
    fn sent(&mut self, posted: &SendWqe, plan: &PacketPlan, now: Instant, events: &mut VecDeque<Event>) {
        self.next = plan.end();
        self.peer_window.sent(now);
        if self.since_ack_req == 0 || plan.at == self.una {
            self.rtt.sent(self.next, now);
        }
        if plan.at < self.max {
            self.sent_again(posted, plan, 0);
        } else if plan.at == posted.start
            && matches!(
                posted.work,
                SendOp::Read { .. } | SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. }
            )
        {
            self.awaiting_data.push_back((posted.start, posted.end));
        }
        if posted.work.awaits_response() && self.next > self.max {
            self.outstanding.push_back(self.next);
        }
        self.max = self.max.max(self.next);
        if self.next == posted.end {
            self.cursor += 1;
        }
        if !self.reliable {
            // UC requests complete when they are sent (9.8.1).
            self.una = self.next;
            self.complete(events);
        }
    }

    /// Notes that a packet was sent again; its data was requested again `attempts` times before.
    pub(super) fn sent_again(&mut self, posted: &SendWqe, plan: &PacketPlan, attempts: u8) {
        self.retransmitted += 1;
        if posted.work.awaits_response() {
            self.missing.request(plan.at, plan.end(), attempts);
        }
    }

    /// Sends a due tail loss probe: the last packet again, or a request for the last packet of a READ.
    fn probe<M: Memory>(&mut self, now: Instant, memory: &mut M, burst: &mut Burst<'_>) {
        if !self.probe_due || !burst.is_empty() || !self.awaits_ack() {
            return;
        }
        // The last packet sent since the last rewind.
        let last = self.next.before();
        let Some(posted) = self.queue.get(self.find(last)).copied() else { return };
        // Packets requested before may have been lost, too.
        self.rewound_to = None;
        let plan = self.plan(&posted, last, posted.end);
        if burst.has_room(plan.packet_len()) {
            self.request_ack = true;
            // If its memory is not accessible, the retransmit timer handles that.
            if self.build(&posted, &plan, true, memory, burst).is_ok() {
                self.sent_again(&posted, &plan, 0);
            }
            self.probe_due = false;
            self.start_timers(now);
        }
    }
}

/// Writes the extended headers into `to` (9.3, in the order of the opcode table).
fn extensions(posted: &SendWqe, plan: &PacketPlan, to: &mut [u8]) {
    let headers = plan.opcode.headers();
    if let Some(at) = headers.offset_of(Headers::RETH) {
        let (va, rkey) = posted.remote(plan.offset);
        let is_part = plan.opcode.operation() == Operation::ReadRequest;
        let length = if is_part { plan.len } else { posted.len };
        reth::Repr { va, rkey, length }.emit(&mut reth::Packet::new_unchecked(&mut to[at..]));
    }
    let atomic = match posted.work {
        SendOp::CompareSwap { va, rkey, compare, swap } => {
            Some(atomic_eth::Repr { va, rkey, swap_or_add: swap, compare })
        }
        SendOp::FetchAdd { va, rkey, add } => {
            Some(atomic_eth::Repr { va, rkey, swap_or_add: add, compare: 0 })
        }
        _ => None,
    };
    if let (Some(at), Some(atomic)) = (headers.offset_of(Headers::ATOMIC_ETH), atomic) {
        atomic.emit(&mut atomic_eth::Packet::new_unchecked(&mut to[at..]));
    }
    if let (
        Some(at),
        SendOp::Send(SendModifier::Immediate(data)) | SendOp::Write { immediate: Some(data), .. },
    ) = (headers.offset_of(Headers::IMM_DT), posted.work)
    {
        imm_dt::Repr { data }.emit(&mut imm_dt::Packet::new_unchecked(&mut to[at..]));
    }
    if let (Some(at), SendOp::Send(SendModifier::Invalidate(rkey))) =
        (headers.offset_of(Headers::IETH), posted.work)
    {
        ieth::Repr { rkey }.emit(&mut ieth::Packet::new_unchecked(&mut to[at..]));
    }
}
