//! Queue pairs whose peer is reached by RoCE v2 packets.
//!
//! A connected queue pair drives one transport machine ([`millstream_proto`]; IBTA volume 1, 9.7 and 9.8).
//! This module provides the machine's environment: the application's requests and memory (`memory_adapter`),
//! memory and receive queues for the peer (`responder_memory`), congestion control (`congestion`), the
//! network route (`route`), completions, events and timers. `datagrams` is the counterpart for UD. The thread
//! that posts a request also sends its packets; the thread that receives packets (`crate::roce_port`) answers
//! them. Both hold the send queue's lock.

mod congestion;
mod datagrams;
mod memory_adapter;
mod repeated_datagrams;
mod responder_memory;
mod route;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use arrayvec::ArrayVec;
use millstream_proto::{
    Changes, Config, Connection, Disposition, Event, FailureCause, Instant, IpIdentification, Mtu, PostError,
    Received, ReceivedKind, SendConfig, SendModifier, SendOp, SendRequest, Service, Status, TransmitLimits,
};
use millstream_wire::icrc::Flow;
use millstream_wire::{Packet, Pkey, Rkey};

use super::keys::LocalKeys;
use super::send::{PendingWr, SendQueue};
use super::state::{QpAttr, QpState};
use super::transitions::ConnectionId;
use super::transport::Transport;
use super::{Qp, QpType};
use crate::cq::PacketPolling;
use crate::event::{EVENT_COMM_EST, EVENT_QP_ACCESS_ERR, EVENT_QP_FATAL, EVENT_QP_REQ_ERR, EVENT_SQ_DRAINED};
use crate::peer::Peer;
use crate::qp_table::Packet as ArrivedPacket;
use crate::send_wr::SendWr;
use crate::types::{
    SEND_FENCE, SEND_SIGNALED, SEND_SOLICITED, WC_FLAG_WITH_IMM, WC_FLAG_WITH_INV, WC_LOC_LEN_ERR,
    WC_LOC_PROT_ERR, WC_LOC_QP_OP_ERR, WC_MW_BIND_ERR, WC_OP_RECV, WC_OP_RECV_RDMA_WITH_IMM,
    WC_REM_ACCESS_ERR, WC_REM_INV_REQ_ERR, WC_REM_OP_ERR, WC_RETRY_EXC_ERR, WC_RNR_RETRY_EXC_ERR, WC_SUCCESS,
    WC_WR_FLUSH_ERR, WR_ATOMIC_CMP_AND_SWP, WR_ATOMIC_FETCH_AND_ADD, WR_ATOMIC_WRITE, WR_BIND_MW,
    WR_LOCAL_INV, WR_RDMA_READ, WR_RDMA_WRITE, WR_RDMA_WRITE_WITH_IMM, WR_SEND_WITH_IMM, WR_SEND_WITH_INV,
    total_len, vendor,
};
use millstream_lockfree::cqe::Cqe;

use congestion::CongestionControl;
pub(super) use datagrams::WireDatagrams;
use memory_adapter::{InflightWrs, MemoryAdapter};
use responder_memory::ResponderMemory;
pub(super) use route::Route;

/// A connected queue pair's transport machine, with its requests and memory.
#[derive(Debug)]
pub(super) struct WireTransport {
    // Order matters: the responder's memory points into the arena and holds its peer.
    machine: Connection,
    inflight: InflightWrs,
    memory: ResponderMemory,
    route: Route,
    congestion: CongestionControl,
    /// Packets that are being sent.
    buffer: Vec<u8>,
    /// Range of each burst in the buffer, and bytes of each of its packets but the last.
    bursts: ArrayVec<(Range<usize>, usize), BURSTS>,
    /// An acknowledgement is delayed and will be sent with the next packets.
    ack_delayed: bool,
    /// Whether the program requested an event when the send queue is drained.
    reports_drained: bool,
    _polling: PacketPolling,
}

/// Bytes of packets that are built at a time: the kernel's limit for one message.
const BURST: usize = millstream_link::MAX_BATCH;
/// Bursts that one system call sends.
const BURSTS: usize = 4;
/// Most bytes in flight: enough to keep both sides busy during a wake-up.
const WINDOW: usize = 2 << 20;
/// Least bytes in flight, if the peer's socket has room for them.
const LEAST_WINDOW: usize = 256 << 10;
/// Least number of queue pairs that a socket's memory is divided by.
const SHARERS: usize = 8;
/// Least and most packets in flight.
const WINDOW_PACKETS: (usize, usize) = (32, 2048);
/// Delay after which an acknowledgement of a burst's last packets is requested.
const PROBE: Duration = Duration::from_millis(4);
/// Delay before the next attempt when the socket has no room for a packet.
const CONGESTED: Duration = Duration::from_micros(100);
/// Bytes after which a queue pair lets others send and receive: it holds the locks of its send queue and of the port meanwhile.
/// The responses to one READ can be 2 GiB, and a socket of the loopback interface never fills.
const TURN: usize = 4 << 20;

/// Why [`WireTransport::transmit`] has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TransmitEnd {
    /// There is nothing more to send now.
    Idle,
    /// The socket has no room for more.
    Congested,
    /// More is to be sent, after others had their turn.
    TurnOver,
}

/// A queue pair failed while its send queue was held. The rest is due once that is released.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct QpFailure {
    /// The asynchronous event to raise, if there is one.
    pub(super) event: Option<u32>,
}

impl WireTransport {
    /// Sets up the transport of a queue pair in its transition to RTR.
    pub(super) fn new(qp: &Qp, attributes: &QpAttr, route: Route) -> Option<Self> {
        let flow = flow(qp, &route)?;
        let config = Config {
            service: match qp.kind {
                QpType::Rc => Service::Rc,
                QpType::XrcSend => Service::XrcInitiator,
                QpType::XrcRecv => Service::XrcTarget,
                // UD has another transport.
                QpType::Uc | QpType::Ud => Service::Uc,
            },
            flow,
            local_qp: qp.qpn,
            remote_qp: attributes.dest_qpn,
            pkey: Pkey::DEFAULT,
            mtu: Mtu::from_code(attributes.path_mtu)?,
            receive_psn: attributes.rq_psn,
            // The queue pair's access flags can change: the responder's memory checks them at each access.
            remote_read: true,
            remote_write: true,
            remote_atomic: true,
            max_dest_rd_atomic: attributes.max_dest_rd_atomic,
            min_rnr_timer: attributes.min_rnr_timer,
        };
        let memory = ResponderMemory::new(qp)?;
        qp.adapter.port.add_timed(qp.me.clone());
        Some(Self {
            machine: Connection::new(config),
            inflight: InflightWrs::default(),
            memory,
            route,
            congestion: CongestionControl::default(),
            buffer: Vec::new(),
            bursts: ArrayVec::new(),
            ack_delayed: false,
            reports_drained: false,
            _polling: PacketPolling::new(vec![qp.send.cq.clone(), qp.recv.cq.clone()]),
        })
    }

    /// This process, which executes the peer's requests.
    pub(super) fn own_process(&self) -> &Arc<Peer> {
        self.memory.own_process()
    }

    /// Begins to send at the transition to RTS, or takes new attributes.
    pub(super) fn start(&mut self, qp: &Qp, attributes: &QpAttr) {
        self.machine.start(SendConfig {
            send_psn: attributes.sq_psn,
            max_rd_atomic: attributes.max_rd_atomic,
            ack_timeout: attributes.timeout,
            retry_count: attributes.retry_cnt,
            rnr_retry: attributes.rnr_retry,
            window: send_window(qp, self.machine.config().mtu),
            probe: Some(PROBE),
        });
        self.machine.resume();
    }

    /// Takes attributes that later transitions have changed, and another route if there is one.
    fn modify(
        &mut self,
        qp: &Qp,
        local_keys: &mut LocalKeys,
        attributes: &QpAttr,
        route: Option<(Route, Flow)>,
    ) -> Option<QpFailure> {
        let now = now(qp);
        let mut flow = *self.machine.flow();
        if let Some((route, its_flow)) = route
            && route != self.route
        {
            (self.route, flow) = (route, its_flow);
            // Packets that the socket had no room for count as lost: their ICRC covers the former addresses.
            self.bursts.clear();
            self.congestion = CongestionControl::default();
        }
        self.machine.modify(
            now,
            &Changes {
                flow,
                max_dest_rd_atomic: attributes.max_dest_rd_atomic,
                min_rnr_timer: attributes.min_rnr_timer,
                max_rd_atomic: attributes.max_rd_atomic,
                ack_timeout: attributes.timeout,
                retry_count: attributes.retry_cnt,
                rnr_retry: attributes.rnr_retry,
            },
        );
        self.progress(qp, local_keys, now)
    }

    /// Begins no further request. If `report` is set, raises an event when all are complete.
    fn drain(&mut self, qp: &Qp, local_keys: &mut LocalKeys, report: bool) -> Option<QpFailure> {
        self.reports_drained = report;
        self.machine.drain();
        self.progress(qp, local_keys, now(qp))
    }

    /// Takes a request, sends its packets as far as possible, and keeps it until it is acknowledged.
    #[cold]
    #[inline(never)]
    pub(super) fn post(
        &mut self,
        qp: &Qp,
        local_keys: &mut LocalKeys,
        request: PendingWr,
    ) -> Option<QpFailure> {
        let now = now(qp);
        let wr = request.request();
        let (work, len) = (work(&wr), total_len(wr.sges) as u32);
        let local = work == SendOp::Local;
        let (fence, solicited) = (wr.flags & SEND_FENCE != 0, wr.flags & SEND_SOLICITED != 0);
        let id = self.inflight.add(request);
        let request = SendRequest { id, work, len: if local { 0 } else { len }, fence, solicited };
        if let Err(error) = self.machine.post(request) {
            self.inflight.refuse_last(match error {
                PostError::Length { .. } | PostError::TooLong { .. } => Status::LocalLength,
                PostError::NotOffered | PostError::NoResources | PostError::NotSending => {
                    Status::LocalOperation
                }
            });
            // It has no packets, and fails when the requests before it are complete (10.8.1).
            let refused = SendRequest { work: SendOp::Local, len: 0, ..request };
            self.machine.post(refused).expect("a queue pair that sends takes local operations");
        }
        self.progress(qp, local_keys, now)
    }

    /// Takes packets that arrived at `now`, and answers them.
    fn handle_packets(
        &mut self,
        qp: &Qp,
        local_keys: &mut LocalKeys,
        packets: &[ArrivedPacket<'_>],
        now: Instant,
    ) -> Option<QpFailure> {
        let mut failure = None;
        for (info, bytes) in packets {
            let Ok(packet) = Packet::new_checked(*bytes) else { continue };
            let Self { machine, inflight, memory, .. } = self;
            let mut adapter = MemoryAdapter { qp, memory, keys: local_keys, inflight };
            match machine.handle_datagram(now, (info.source, info.source_port).into(), &packet, &mut adapter)
            {
                Disposition::Dropped(_) => {}
                Disposition::Congestion => self.congestion.handle_cnp(now),
                _ => self.congestion.handle_packet(info.congestion_experienced(), now),
            }
            // Completions take effect at once: the next message needs the next receive.
            loop {
                failure = failure.max(self.take_events(qp));
                let Self { machine, inflight, memory, .. } = self;
                if !machine.handle_reordered(&mut MemoryAdapter { qp, memory, keys: local_keys, inflight }) {
                    break;
                }
            }
        }
        if failure.is_none()
            && self.machine.has_only_acknowledgement()
            && !self.congestion.owes_cnp
            && qp.adapter.port.is_polled(now.as_nanos())
        {
            if !std::mem::replace(&mut self.ack_delayed, true) {
                qp.adapter.port.delay_ack(qp.me.clone());
            }
            qp.set_timer(self.machine.poll_timeout());
            return None;
        }
        failure.max(self.progress(qp, local_keys, now))
    }

    /// Sends the machine's packets, reports its completions, and sets its timer.
    fn progress(&mut self, qp: &Qp, local_keys: &mut LocalKeys, now: Instant) -> Option<QpFailure> {
        let mut failure = self.take_events(qp);
        let end = self.transmit(qp, local_keys, now);
        failure = failure.max(self.take_events(qp));
        let again = match end {
            TransmitEnd::Idle => None,
            TransmitEnd::Congested => Some(now + CONGESTED),
            TransmitEnd::TurnOver => Some(now),
        };
        let paced = self.congestion.free(now);
        qp.set_timer([self.machine.poll_timeout(), again, paced].into_iter().flatten().min());
        if failure.is_some() {
            qp.set_state(QpState::Err);
        }
        failure
    }

    /// Takes the state of a machine that has failed, before its completions can be seen: a program that polls one finds the
    /// queue pair in this state.
    fn take_failed_state(&self, qp: &Qp) {
        let state = match self.machine.state() {
            millstream_proto::QpState::Err => QpState::Err,
            // Only the send queue fails (10.3.1.7).
            millstream_proto::QpState::Sqe if qp.state() == QpState::Rts => QpState::Sqe,
            _ => return,
        };
        if qp.state() != state {
            qp.set_state(state);
        }
    }

    /// Builds packets and passes them to the socket.
    fn transmit(&mut self, qp: &Qp, keys: &mut LocalKeys, now: Instant) -> TransmitEnd {
        let Some(port) = qp.adapter.port.port() else { return TransmitEnd::Idle };
        let counted = port.counts_identifications();
        let limits = TransmitLimits {
            packets: millstream_link::MAX_SEGMENTS as u32,
            identification: if counted { IpIdentification::Counted } else { IpIdentification::Zero },
            ..TransmitLimits::NONE
        };
        if std::mem::take(&mut self.congestion.owes_cnp) {
            let mut packet = congestion::cnp(self.machine.config().remote_qp);
            // A CNP is lost if the socket has no room; the next marked packet causes the next one.
            let _ = port.send(&mut [self.route.outgoing(&mut packet, congestion::CNP_LEN)]);
        }
        self.buffer.resize(BURST, 0);
        if std::mem::take(&mut self.ack_delayed) {
            qp.adapter.port.ack_sent(|last| std::ptr::addr_eq(last.as_ptr(), qp.me.as_ptr()));
        }
        let least = self.machine.config().mtu.bytes() as usize + 128;
        let mut turn = 0;
        loop {
            if turn >= TURN {
                return TransmitEnd::TurnOver;
            }
            let Self { machine, inflight, memory, buffer, bursts, route, congestion, .. } = self;
            if bursts.is_empty() {
                let mut adapter = MemoryAdapter { qp, memory, keys, inflight };
                let mut at = 0;
                while !bursts.is_full() && buffer.len() - at >= least {
                    let limits = TransmitLimits { byte_budget: congestion.byte_budget(now), ..limits };
                    let next = machine.poll_transmit(now, &mut adapter, limits, &mut buffer[at..]);
                    let Some(burst) = next else { break };
                    congestion.sent(burst.paced_bytes, now);
                    bursts.push((at..at + burst.len, burst.segment));
                    at += burst.len;
                }
                if bursts.is_empty() {
                    return TransmitEnd::Idle;
                }
                turn += at;
            }
            let (mut batches, mut rest, mut at) = (ArrayVec::<_, BURSTS>::new(), &mut buffer[..], 0);
            for (range, segment) in &*bursts {
                let (bytes, behind) = rest[range.start - at..].split_at_mut(range.len());
                batches.push(route.outgoing(bytes, *segment));
                (rest, at) = (behind, range.end);
            }
            let all = batches.len();
            match port.send_sealed(&mut batches) {
                Ok(sent) => {
                    bursts.drain(..sent);
                    if sent < all {
                        return TransmitEnd::Congested;
                    }
                }
                // The packets count as lost.
                Err(_) => {
                    bursts.clear();
                    return TransmitEnd::Congested;
                }
            }
        }
    }

    /// Reports completions and events.
    fn take_events(&mut self, qp: &Qp) -> Option<QpFailure> {
        let mut failure = None;
        self.take_failed_state(qp);
        while let Some(event) = self.machine.poll_event() {
            match event {
                Event::Completed { id, status } => {
                    let Some(request) = self.inflight.finish(id) else { continue };
                    let wr = request.request();
                    let (status, vendor) = completion(status);
                    if status != WC_SUCCESS || qp.send.signal_all || wr.flags & SEND_SIGNALED != 0 {
                        qp.complete_send(&wr, request.posted, status, vendor);
                    }
                }
                Event::Received(received) => {
                    let (cqe, solicited) = received_completion(&received);
                    if self.memory.complete(cqe, solicited).is_err() {
                        self.memory.keep_record();
                        failure = failure.max(Some(QpFailure { event: Some(EVENT_QP_FATAL) }));
                        qp.recv.cq.check_overrun();
                    }
                }
                Event::Established => {
                    if !qp.states.contact_reported.swap(true, Ordering::AcqRel) {
                        qp.raise(EVENT_COMM_EST);
                    }
                }
                Event::Drained if self.reports_drained => qp.raise(EVENT_SQ_DRAINED),
                Event::Drained => {}
                Event::Failed(fault) => {
                    let event = match fault {
                        // The request's completion has the cause.
                        FailureCause::SendRequest
                        | FailureCause::Requested
                        | FailureCause::ReceiveRequest => None,
                        FailureCause::InvalidRequest => Some(EVENT_QP_REQ_ERR),
                        FailureCause::AccessViolation => Some(EVENT_QP_ACCESS_ERR),
                    };
                    failure = failure.max(Some(QpFailure { event }));
                }
            }
        }
        failure
    }

    /// Completes all requests that wait for answers as flushed.
    pub(super) fn flush(&mut self, qp: &Qp) {
        // If only the send queue has failed, the machine has flushed it and continues to receive.
        if qp.state() == QpState::Err {
            self.machine.fail();
            qp.set_timer(None);
        }
        let _ = self.take_events(qp);
    }
}

/// Addresses and ports of the packets of a route.
fn flow(qp: &Qp, route: &Route) -> Option<Flow> {
    let source = qp.adapter.port.port()?.source_port();
    Flow::new((route.source, source), (route.destination, millstream_wire::UDP_PORT))
}

/// Packets that may be in flight. The peer's socket is taken to have as much room as ours, and as many queue pairs;
/// the responses to READs need room in ours.
fn send_window(qp: &Qp, mtu: Mtu) -> u32 {
    let room = qp.adapter.port.port().map_or(0, |port| port.udp().receive_buffer_size());
    let share = room / qp.adapter.port.timed().max(SHARERS);
    let bytes = share.max(LEAST_WINDOW.min(room)).min(WINDOW);
    let (least, most) = WINDOW_PACKETS;
    (bytes / mtu.bytes() as usize).clamp(least, most) as u32
}

fn now(qp: &Qp) -> Instant {
    Instant::from_nanos(qp.adapter.port.now())
}

impl Qp {
    /// Runs `work` on the packet transport under the send queue's lock, and fails the queue pair if `work`
    /// returns a failure. False if the queue pair has another transport.
    fn with_wire(&self, work: impl FnOnce(&mut WireTransport, &mut LocalKeys) -> Option<QpFailure>) -> bool {
        let mut send = self.send.queue.lock();
        let SendQueue { transport: Transport::Wire(wire), local_keys, .. } = &mut *send else { return false };
        let failure = work(wire, local_keys);
        let connection = self.connection();
        drop(send);
        self.fail_with(connection, failure);
        true
    }

    /// Takes attributes that later transitions have changed; without effect if the requests do not go by packets.
    pub(super) fn modify_wire(&self, attributes: &QpAttr, route: Option<Route>) {
        let route = route.and_then(|route| Some((route, flow(self, &route)?)));
        self.with_wire(|wire, local_keys| wire.modify(self, local_keys, attributes, route));
    }

    /// Drains a send queue whose requests go by packets; false if they do not.
    pub(super) fn drain_wire(&self, report: bool) -> bool {
        self.with_wire(|wire, local_keys| wire.drain(self, local_keys, report))
    }

    /// Sends the requests that a drained send queue has kept.
    pub(super) fn resume_wire(&self) {
        self.with_wire(|wire, local_keys| wire.progress(self, local_keys, now(self)));
    }

    /// Takes packets that arrived at `now`, and answers them.
    pub(crate) fn handle_packets(&self, packets: &[ArrivedPacket<'_>], now: u64) {
        let mut send = self.send.queue.lock();
        let SendQueue { transport, local_keys, .. } = &mut *send;
        let failure = match transport {
            Transport::Unconnected | Transport::Local(_) => None,
            Transport::Datagram(datagram) => {
                datagram.handle_packets(self, packets);
                None
            }
            Transport::Wire(wire) => wire.handle_packets(self, local_keys, packets, Instant::from_nanos(now)),
        };
        let connection = self.connection();
        drop(send);
        self.fail_with(connection, failure);
    }

    /// Sends an acknowledgement that is still delayed.
    pub(crate) fn flush_ack(&self) {
        self.with_wire(
            |wire, local_keys| {
                if wire.ack_delayed { wire.progress(self, local_keys, now(self)) } else { None }
            },
        );
    }

    /// Sends an acknowledgement that is still delayed, without a wait for the send queue: false if that is in use. Completions
    /// and failures have other locks, and are left: the process exits.
    pub(crate) fn try_flush_ack(&self) -> bool {
        let Some(mut send) = self.send.queue.try_lock() else { return false };
        let SendQueue { transport, local_keys, .. } = &mut *send;
        if let Transport::Wire(wire) = transport
            && wire.ack_delayed
        {
            wire.transmit(self, local_keys, now(self));
        }
        true
    }

    /// Sets the timer of the transport, whose lock the caller holds.
    pub(super) fn set_timer(&self, time: Option<Instant>) {
        match time {
            Some(time) => self.adapter.port.set_timer(&self.send.timer, time.as_nanos()),
            None => self.send.timer.clear(),
        }
    }

    /// Executes the machine's timers that have expired by `now`; the next one's time.
    pub(crate) fn handle_timer(&self, now: u64) -> Option<u64> {
        let due = self.send.timer.get()?;
        if due > now {
            return Some(due);
        }
        let now = Instant::from_nanos(now);
        self.with_wire(|wire, local_keys| {
            wire.machine.handle_timeout(now);
            wire.progress(self, local_keys, now)
        });
        self.send.timer.get()
    }

    /// Finishes the handling of a failure that was found while the send queue was held.
    fn fail_with(&self, connection: ConnectionId, failure: Option<QpFailure>) {
        if let Some(QpFailure { event }) = failure
            && self.fail_connection(connection)
            && let Some(event) = event
        {
            self.raise(event);
        }
    }
}

/// The status of a completion, and its cause.
fn completion(status: Status) -> (u32, u32) {
    match status {
        Status::Success => (WC_SUCCESS, 0),
        Status::LocalLength => (WC_LOC_LEN_ERR, vendor::BOUNDS),
        Status::LocalOperation => (WC_LOC_QP_OP_ERR, vendor::WINDOW),
        Status::LocalProtection => (WC_LOC_PROT_ERR, vendor::PERMISSION),
        Status::Flushed => (WC_WR_FLUSH_ERR, 0),
        Status::Bind => (WC_MW_BIND_ERR, vendor::WINDOW),
        Status::RemoteInvalidRequest => (WC_REM_INV_REQ_ERR, vendor::REFUSED),
        Status::RemoteAccess => (WC_REM_ACCESS_ERR, vendor::REFUSED),
        Status::RemoteOperation => (WC_REM_OP_ERR, vendor::REFUSED),
        Status::RetryExceeded => (WC_RETRY_EXC_ERR, vendor::PEER_NOT_READY),
        Status::RnrRetryExceeded => (WC_RNR_RETRY_EXC_ERR, vendor::PEER_NOT_READY),
    }
}

fn received_completion(received: &Received) -> (Cqe, bool) {
    let opcode = match received.kind {
        ReceivedKind::Send => WC_OP_RECV,
        ReceivedKind::Write => WC_OP_RECV_RDMA_WITH_IMM,
    };
    if received.status != Status::Success {
        let (status, detail) = match received.status {
            // The key to invalidate was invalid: an error of class J (9.9.3).
            Status::LocalOperation => (WC_REM_INV_REQ_ERR, vendor::NO_KEY),
            status => completion(status),
        };
        let cqe = Cqe { status: status as u16, opcode: WC_OP_RECV as u16, detail, ..Cqe::default() };
        return (cqe, true);
    }
    let (imm, wc_flags) = match (received.immediate, received.invalidated) {
        (Some(data), _) => (u32::from_ne_bytes(data), WC_FLAG_WITH_IMM),
        (None, Some(key)) => (key.get(), WC_FLAG_WITH_INV),
        (None, None) => (0, 0),
    };
    let cqe = Cqe { opcode: opcode as u16, byte_len: received.len, imm, wc_flags, ..Cqe::default() };
    (cqe, received.solicited)
}

/// The transport machine's description of a request.
fn work(wr: &SendWr<'_>) -> SendOp {
    let (va, rkey) = (wr.remote_addr, wr.rkey);
    match wr.opcode {
        WR_RDMA_WRITE => SendOp::Write { va, rkey, immediate: None },
        WR_RDMA_WRITE_WITH_IMM => SendOp::Write { va, rkey, immediate: Some(wr.imm.to_ne_bytes()) },
        WR_RDMA_READ => SendOp::Read { va, rkey },
        WR_ATOMIC_CMP_AND_SWP => SendOp::CompareSwap { va, rkey, compare: wr.compare_add, swap: wr.swap },
        WR_ATOMIC_FETCH_AND_ADD => SendOp::FetchAdd { va, rkey, add: wr.compare_add },
        WR_ATOMIC_WRITE => SendOp::AtomicWrite { va, rkey },
        WR_LOCAL_INV | WR_BIND_MW => SendOp::Local,
        WR_SEND_WITH_IMM => SendOp::Send(SendModifier::Immediate(wr.imm.to_ne_bytes())),
        WR_SEND_WITH_INV => SendOp::Send(SendModifier::Invalidate(Rkey::new(wr.imm))),
        _ => SendOp::Send(SendModifier::None),
    }
}
