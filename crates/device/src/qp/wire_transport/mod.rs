//! Queue pairs whose peer is reached by packets.
//!
//! A connected queue pair drives one machine of the transport ([`millstream_proto`]); this module is what is
//! around it: the application's requests and memory (`memory`, `landing`), completions and events, packets on
//! their way out (`outbox`), and the machine's timers. Whoever posts also sends; whoever takes packets in
//! (`crate::wire`) answers them. All of it happens under the send queue's lock.

mod congestion;
mod datagrams;
mod memory_adapter;
mod responder_memory;
mod route;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use arrayvec::ArrayVec;
use millstream_proto::{
    Config, Connection, Disposition, Event, Fault, Identification, Instant, Limits, Mtu, PostError, Received,
    ReceivedKind, Request, SendConfig, Service, Status, Trailer, Work,
};
use millstream_wire::icrc::Flow;
use millstream_wire::{Packet, Pkey, Psn, Qpn, Rkey};

use super::send::{Parked, SendQueue};
use super::state::{QpAttr, QpState};
use super::{Qp, QpType};
use crate::cq::Cq;
use crate::errno::{Errno, Result};
use crate::event::{EVENT_COMM_EST, EVENT_QP_ACCESS_ERR, EVENT_QP_FATAL, EVENT_QP_REQ_ERR, EVENT_SQ_DRAINED};
use crate::gid::{self, GidKind};
use crate::path::{self, PathKind, PathPreference};
use crate::types::{
    SEND_FENCE, SEND_SIGNALED, SEND_SOLICITED, SendWr, WC_FLAG_WITH_IMM, WC_FLAG_WITH_INV, WC_LOC_LEN_ERR,
    WC_LOC_PROT_ERR, WC_LOC_QP_OP_ERR, WC_MW_BIND_ERR, WC_OP_RECV, WC_OP_RECV_RDMA_WITH_IMM,
    WC_REM_ACCESS_ERR, WC_REM_INV_REQ_ERR, WC_REM_OP_ERR, WC_RETRY_EXC_ERR, WC_RNR_RETRY_EXC_ERR, WC_SUCCESS,
    WC_WR_FLUSH_ERR, WR_ATOMIC_CMP_AND_SWP, WR_ATOMIC_FETCH_AND_ADD, WR_ATOMIC_WRITE, WR_BIND_MW,
    WR_LOCAL_INV, WR_RDMA_READ, WR_RDMA_WRITE, WR_RDMA_WRITE_WITH_IMM, WR_SEND_WITH_IMM, WR_SEND_WITH_INV,
    total_len, vendor,
};
use crate::wire::Arrived;
use millstream_lockfree::cqe::Cqe;

use congestion::Pace;
pub(super) use datagrams::Datagrams;
use memory_adapter::{Requests, View};
use responder_memory::Landing;
use route::Route;

/// How a queue pair that goes to RTR will reach its peers; everything that can be refused was looked at.
#[derive(Debug)]
pub(super) enum Plan {
    /// No peer yet.
    Stay,
    /// Through shared memory; false if the peer is not on this host, and nothing else is allowed.
    Shm(bool),
    /// By packets.
    Wire(Route),
    /// Datagrams both ways.
    Datagrams,
}

/// What a send queue has of the wire.
#[derive(Debug, Default)]
pub(super) enum Lane {
    /// Nothing: its peer is on this host.
    #[default]
    None,
    Connected(Box<Connected>),
    Datagrams(Box<Datagrams>),
}

/// A connected queue pair's machine with what it works on.
#[derive(Debug)]
pub(super) struct Connected {
    // Order matters: the landing points into the arena and holds its peer.
    machine: Connection,
    requests: Requests,
    landing: Landing,
    route: Route,
    pace: Pace,
    /// Packets that are being sent.
    buffer: Vec<u8>,
    /// Where they are in it, and bytes of each but the last.
    bursts: ArrayVec<(Range<usize>, usize), BURSTS>,
    /// An acknowledgement will go with what is sent next.
    owes: bool,
    /// Whether the program wants to know when the send queue is drained.
    reports_drained: bool,
    _wired: Wired,
}

/// Makes pollers of queues take packets in, as long as it lives.
#[derive(Debug)]
struct Wired(Vec<Arc<Cq>>);

impl Wired {
    fn new(qp: &Qp) -> Self {
        Self::of(vec![qp.send_cq.clone(), qp.recv_cq.clone()])
    }

    fn of(queues: Vec<Arc<Cq>>) -> Self {
        queues.iter().for_each(|cq| cq.set_wired(true));
        Self(queues)
    }
}

impl Drop for Wired {
    fn drop(&mut self) {
        self.0.iter().for_each(|cq| cq.set_wired(false));
    }
}

/// When a queue pair's machine wants to be looked at, for those who do not hold its lock.
#[derive(Debug)]
pub(super) struct Alarm(AtomicU64);

impl Default for Alarm {
    fn default() -> Self {
        Self(AtomicU64::new(u64::MAX))
    }
}

/// Bytes of packets that are built at a time: what the kernel takes as one.
const BURST: usize = millstream_link::MAX_BATCH;
/// Bursts that one system call sends.
const BURSTS: usize = 4;
/// Bytes of packets under way without an answer, at most: what keeps both sides busy where waking one up takes long.
const WINDOW: usize = 2 << 20;
/// The same, at least, where the other side's socket takes as much.
const LEAST_WINDOW: usize = 256 << 10;
/// Queue pairs that share a socket's memory when it is handed out.
const SHARERS: usize = 8;
/// Packets under way without an answer, at least and at most.
const WINDOW_PACKETS: (usize, usize) = (32, 2048);
/// How long to wait for an answer to the last packets of a burst before asking for one.
const PROBE: Duration = Duration::from_millis(4);
/// How long to wait when the network has no room for a packet.
const CONGESTED: Duration = Duration::from_micros(100);

impl Qp {
    /// How a queue pair with these attributes will reach its peers.
    pub(super) fn plan(&self, attributes: &QpAttr) -> Result<Plan> {
        let preference = path::preference()?;
        if self.kind == QpType::Ud {
            if preference == PathPreference::Shm {
                return Ok(Plan::Stay);
            }
            return match self.host.wire.open(self.host) {
                Ok(_) => Ok(Plan::Datagrams),
                // Then it reaches this host only.
                Err(_) if preference == PathPreference::Auto => Ok(Plan::Stay),
                Err(error) => Err(error),
            };
        }
        match preference.path_to(&attributes.path.dgid) {
            PathKind::Shm => return Ok(Plan::Shm(true)),
            PathKind::Unreachable => return Ok(Plan::Shm(false)),
            PathKind::Wire => {}
        }
        let source = gid::table().into_iter().nth(usize::from(attributes.path.sgid_index));
        let source = source.filter(|source| source.kind == GidKind::RoceV2).ok_or(Errno::INVAL)?;
        let fits = gid::interface_mtu(source.ifindex).and_then(gid::path_mtu).unwrap_or(gid::MTU_4096);
        let path = &attributes.path;
        let route = Route::new(&source.raw, &path.dgid, source.ifindex, path.traffic_class);
        let route = route.filter(|_| attributes.path_mtu <= fits).ok_or(Errno::INVAL)?;
        self.host.wire.open(self.host)?;
        Ok(Plan::Wire(route))
    }

    /// Connects a queue pair that goes to RTR.
    pub(super) fn connect(&self, send: &mut SendQueue, attributes: &QpAttr, plan: Plan) {
        send.lane = Lane::None;
        let mut dest_qpn = attributes.dest_qpn;
        match plan {
            Plan::Stay => return,
            Plan::Shm(on_this_host) => send.connect(self, dest_qpn, on_this_host),
            Plan::Wire(route) => {
                send.connect(self, dest_qpn, false);
                // Who touches our memory for the peer is this process.
                send.peer = self.host.peer_of(self.qpn).ok();
                send.lane = self.connected(attributes, route).map_or(Lane::None, Lane::Connected);
                // Nobody who maps the arena is its peer.
                dest_qpn = 0;
            }
            Plan::Datagrams => {
                let mut datagrams = Datagrams::new(self);
                if path::preference() == Ok(PathPreference::Wire)
                    && let Some(datagrams) = &mut datagrams
                {
                    datagrams.begin(self);
                }
                send.lane = datagrams.map_or(Lane::None, |datagrams| Lane::Datagrams(Box::new(datagrams)));
                return;
            }
        }
        self.entry.dest_qpn.store(dest_qpn, Ordering::Release);
    }

    fn connected(&self, attributes: &QpAttr, route: Route) -> Option<Box<Connected>> {
        let port = self.host.wire.port()?;
        let ports = [port.source_port(), millstream_wire::UDP_PORT];
        let flow = Flow::new((route.source, ports[0]), (route.destination, ports[1]))?;
        let config = Config {
            service: match self.kind {
                QpType::Rc => Service::Reliable,
                QpType::XrcSend => Service::Initiator,
                QpType::XrcRecv => Service::Target,
                // Datagrams have a lane of their own.
                QpType::Uc | QpType::Ud => Service::Unreliable,
            },
            flow,
            local_qp: Qpn::new(self.qpn),
            remote_qp: Qpn::new(attributes.dest_qpn),
            pkey: Pkey::DEFAULT,
            mtu: Mtu::from_code(attributes.path_mtu)?,
            receive_psn: Psn::new(attributes.rq_psn),
            // They can change; the landing looks at what they are.
            remote_read: true,
            remote_write: true,
            remote_atomic: true,
            max_dest_rd_atomic: attributes.max_dest_rd_atomic,
            min_rnr_timer: attributes.min_rnr_timer,
        };
        let landing = Landing::new(self)?;
        self.host.wire.add_timed(self.me.clone());
        Some(Box::new(Connected {
            machine: Connection::new(config),
            requests: Requests::default(),
            landing,
            route,
            pace: Pace::default(),
            buffer: Vec::new(),
            bursts: ArrayVec::new(),
            owes: false,
            reports_drained: false,
            _wired: Wired::new(self),
        }))
    }
}

/// What has to be done once the send queue is let go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Aftermath {
    Nothing,
    /// The queue pair has failed, with this asynchronous event if there is one.
    Failed(Option<u32>),
}

impl Qp {
    /// A connected queue pair that goes to RTS begins to send, or takes new attributes.
    pub(super) fn start_on_wire(&self, send: &mut SendQueue, attributes: &QpAttr) {
        match &mut send.lane {
            Lane::None => {}
            Lane::Datagrams(datagrams) => datagrams.start(self, attributes.sq_psn),
            Lane::Connected(lane) => {
                lane.machine.start(SendConfig {
                    send_psn: Psn::new(attributes.sq_psn),
                    max_rd_atomic: attributes.max_rd_atomic,
                    ack_timeout: attributes.timeout,
                    retry_count: attributes.retry_cnt,
                    rnr_retry: attributes.rnr_retry,
                    window: self.window(lane.machine.config().mtu),
                    probe: Some(PROBE),
                });
                lane.machine.resume();
            }
        }
    }

    /// Packets that may be under way. The other side's socket is taken to have as much room as ours, and as many queue
    /// pairs; what READs bring comes to ours.
    fn window(&self, mtu: Mtu) -> u32 {
        let room = self.host.wire.port().map_or(0, |port| port.udp().receive_room());
        let share = room / self.host.wire.timed().max(SHARERS);
        let bytes = share.max(LEAST_WINDOW.min(room)).min(WINDOW);
        let (least, most) = WINDOW_PACKETS;
        (bytes / mtu.bytes() as usize).clamp(least, most) as u32
    }

    /// Begins nothing new, and reports when all is done if it is wanted; false if the way is not by packets.
    pub(super) fn drain_on_wire(&self, report: bool) -> bool {
        let mut send = self.send.lock();
        let Lane::Connected(lane) = &mut send.lane else { return false };
        lane.reports_drained = report;
        lane.machine.drain();
        let failed = self.attend_on_wire(&mut send, Instant::from_nanos(self.host.wire.now()));
        drop(send);
        self.suffer(failed);
        true
    }

    /// Takes a request whose way is by packets, sends what can be sent of it, and keeps it until it is answered.
    #[cold]
    #[inline(never)]
    pub(super) fn send_on_wire(&self, send: &mut SendQueue, request: Parked) -> Aftermath {
        let now = Instant::from_nanos(self.host.wire.now());
        let Lane::Connected(lane) = &mut send.lane else { return Aftermath::Nothing };
        let wr = request.request();
        let (work, len) = (work(&wr), total_len(wr.sges) as u32);
        let local = work == Work::Local;
        let (fence, solicited) = (wr.flags & SEND_FENCE != 0, wr.flags & SEND_SOLICITED != 0);
        let id = lane.requests.add(request);
        let request = Request { id, work, len: if local { 0 } else { len }, fence, solicited };
        let Err(error) = lane.machine.post(request) else { return self.attend_on_wire(send, now) };
        // What the machine does not take is a mistake of the request's, found late.
        let refused = lane.requests.take_last();
        lane.machine.fail();
        let _ = self.attend_on_wire(send, now);
        if let Some(refused) = refused {
            let wr = refused.request();
            let status = match error {
                // As if the other side had said so.
                PostError::Length { len: 8 } => WC_REM_INV_REQ_ERR,
                PostError::Length { .. } | PostError::TooLong { .. } => WC_LOC_LEN_ERR,
                PostError::NotOffered | PostError::NoResources | PostError::NotSending => WC_LOC_QP_OP_ERR,
            };
            self.complete_send(&wr, refused.posted, status, vendor::BOUNDS);
        }
        Aftermath::Failed(None)
    }

    /// Takes packets in that came at `now`, and answers them.
    pub(crate) fn arrived(&self, packets: &[Arrived<'_>], now: u64) {
        let mut send = self.send.lock();
        let now = Instant::from_nanos(now);
        let SendQueue { lane, local_keys, .. } = &mut *send;
        let mut failed = Aftermath::Nothing;
        match lane {
            Lane::None => return,
            Lane::Datagrams(datagrams) => return datagrams.arrived(self, packets),
            Lane::Connected(lane) => {
                for (origin, bytes) in packets {
                    let Ok(packet) = Packet::new_checked(*bytes) else { continue };
                    let Connected { machine, requests, landing, .. } = &mut **lane;
                    let mut view = View { qp: self, landing, keys: local_keys, requests };
                    match machine.handle_datagram(now, origin.source, &packet, &mut view) {
                        Disposition::Dropped(_) => {}
                        Disposition::Congestion => lane.pace.cnp_came(now),
                        _ => lane.pace.packet_came(origin.congestion_experienced(), now),
                    }
                    // Completions take effect at once: the next message needs the next receive.
                    loop {
                        failed = failed.max(self.take_events(lane));
                        let Connected { machine, requests, landing, .. } = &mut **lane;
                        if !machine.handle_kept(&mut View { qp: self, landing, keys: local_keys, requests }) {
                            break;
                        }
                    }
                }
                if failed == Aftermath::Nothing
                    && lane.machine.has_only_acknowledgement()
                    && !lane.pace.owes_cnp
                    && self.host.wire.is_polled(now.as_nanos())
                {
                    if !std::mem::replace(&mut lane.owes, true) {
                        self.host.wire.owe(self.host, self.me.clone());
                    }
                    return self.set_alarm(lane.machine.poll_timeout());
                }
            }
        }
        let failed = failed.max(self.attend_on_wire(&mut send, now));
        drop(send);
        self.suffer(failed);
    }

    /// Sends an acknowledgement that is still owed.
    pub(crate) fn pay_on_wire(&self) {
        let mut send = self.send.lock();
        if let Lane::Connected(lane) = &send.lane
            && lane.owes
        {
            let failed = self.attend_on_wire(&mut send, Instant::from_nanos(self.host.wire.now()));
            drop(send);
            self.suffer(failed);
        }
    }

    fn set_alarm(&self, time: Option<Instant>) {
        let time = time.map_or(u64::MAX, Instant::as_nanos);
        self.alarm.0.store(time, Ordering::Release);
        if time != u64::MAX {
            self.host.wire.schedule(self.host, time);
        }
    }

    /// Does what the machine wanted to do by now; says when it wants to be called again.
    pub(crate) fn expire_on_wire(&self, now: u64) -> Option<u64> {
        let due = self.alarm.0.load(Ordering::Acquire);
        if due > now {
            return (due != u64::MAX).then_some(due);
        }
        let mut send = self.send.lock();
        let now = Instant::from_nanos(now);
        if let Lane::Connected(lane) = &mut send.lane {
            lane.machine.handle_timeout(now);
        }
        let failed = self.attend_on_wire(&mut send, now);
        drop(send);
        self.suffer(failed);
        let due = self.alarm.0.load(Ordering::Acquire);
        (due != u64::MAX).then_some(due)
    }

    /// A failure that was found while the send queue was held.
    pub(super) fn suffer(&self, failed: Aftermath) {
        if let Aftermath::Failed(event) = failed {
            self.fail();
            if let Some(event) = event {
                self.raise(event);
            }
        }
    }

    /// Sends what the machine has to send, reports what it has to report, and sets its alarm.
    pub(super) fn attend_on_wire(&self, send: &mut SendQueue, now: Instant) -> Aftermath {
        let SendQueue { lane, local_keys, .. } = send;
        let Lane::Connected(lane) = lane else { return Aftermath::Nothing };
        let mut failed = self.take_events(lane);
        let congested = self.transmit(lane, local_keys, now);
        failed = failed.max(self.take_events(lane));
        let again = congested.then_some(now + CONGESTED);
        let paced = lane.pace.free(now);
        self.set_alarm([lane.machine.poll_timeout(), again, paced].into_iter().flatten().min());
        if failed != Aftermath::Nothing {
            self.set_state(QpState::Err);
        } else if lane.machine.state() == millstream_proto::State::SendFailed && self.state() == QpState::Rts
        {
            // Only the send queue fails (10.3.1.7).
            self.set_state(QpState::Sqe);
        }
        failed
    }

    /// Builds packets and gives them to the network; true if that has no room for more.
    fn transmit(&self, lane: &mut Connected, keys: &mut super::keys::LocalKeys, now: Instant) -> bool {
        let Some(port) = self.host.wire.port() else { return false };
        let counted = port.counts_identifications();
        let limits = Limits {
            packets: millstream_link::MAX_SEGMENTS as u32,
            identification: if counted { Identification::Counted } else { Identification::Zero },
            ..Limits::NONE
        };
        if std::mem::take(&mut lane.pace.owes_cnp) {
            let mut packet = congestion::cnp(lane.machine.config().remote_qp);
            // As if it were lost, if the network has no room: the next marked packet brings the next one.
            let _ = port.send(&mut [lane.route.outgoing(&mut packet, congestion::CNP_LEN)]);
        }
        lane.buffer.resize(BURST, 0);
        if std::mem::take(&mut lane.owes) {
            self.host.wire.paid(&self.me);
        }
        let least = lane.machine.config().mtu.bytes() as usize + 128;
        loop {
            let Connected { machine, requests, landing, buffer, bursts, route, pace, .. } = lane;
            if bursts.is_empty() {
                let mut view = View { qp: self, landing, keys, requests };
                let mut at = 0;
                while !bursts.is_full() && buffer.len() - at >= least {
                    let limits = Limits { allowance: pace.allowance(now), ..limits };
                    let next = machine.poll_transmit(now, &mut view, limits, &mut buffer[at..]);
                    let Some(burst) = next else { break };
                    pace.sent(burst.paced_bytes, now);
                    bursts.push((at..at + burst.len, burst.segment));
                    at += burst.len;
                }
                if bursts.is_empty() {
                    return false;
                }
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
                        return true;
                    }
                }
                // As if they were lost.
                Err(_) => {
                    bursts.clear();
                    return true;
                }
            }
        }
    }

    /// Reports completions and events.
    fn take_events(&self, lane: &mut Connected) -> Aftermath {
        let mut after = Aftermath::Nothing;
        while let Some(event) = lane.machine.poll_event() {
            match event {
                Event::Completed { id, status } => {
                    let Some(request) = lane.requests.finish(id) else { continue };
                    let wr = request.request();
                    let (status, vendor) = completion(status);
                    if status != WC_SUCCESS || self.signal_all || wr.flags & SEND_SIGNALED != 0 {
                        self.complete_send(&wr, request.posted, status, vendor);
                    }
                }
                Event::Received(received) => {
                    let (cqe, solicited) = received_completion(&received);
                    if lane.landing.complete(cqe, solicited).is_err() {
                        after = after.max(Aftermath::Failed(Some(EVENT_QP_FATAL)));
                        self.recv_cq.check_overrun();
                    }
                }
                Event::Established => {
                    if !self.contact_reported.swap(true, Ordering::AcqRel) {
                        self.raise(EVENT_COMM_EST);
                    }
                }
                Event::Drained if lane.reports_drained => self.raise(EVENT_SQ_DRAINED),
                Event::Drained => {}
                Event::Failed(fault) => {
                    after = after.max(Aftermath::Failed(match fault {
                        // Its completion says what was wrong.
                        Fault::Request | Fault::Asked | Fault::Receive => None,
                        Fault::PeerRequest => Some(EVENT_QP_REQ_ERR),
                        Fault::PeerAccess => Some(EVENT_QP_ACCESS_ERR),
                    }));
                }
            }
        }
        after
    }

    /// Completes all requests that wait for answers as flushed.
    pub(super) fn flush_on_wire(&self, lane: &mut Lane) {
        if let Lane::Connected(lane) = lane {
            // If only the send queue has failed, the machine has flushed it and goes on to receive.
            if self.state() == QpState::Err {
                lane.machine.fail();
                self.alarm.0.store(u64::MAX, Ordering::Release);
            }
            let _ = self.take_events(lane);
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
            // A key that it was to invalidate: an error of class J (9.9.3).
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

/// What a request asks of the transport.
fn work(wr: &SendWr<'_>) -> Work {
    let (va, rkey) = (wr.remote_addr, Rkey::new(wr.rkey));
    match wr.opcode {
        WR_RDMA_WRITE => Work::Write { va, rkey, immediate: None },
        WR_RDMA_WRITE_WITH_IMM => Work::Write { va, rkey, immediate: Some(wr.imm.to_ne_bytes()) },
        WR_RDMA_READ => Work::Read { va, rkey },
        WR_ATOMIC_CMP_AND_SWP => Work::CompareSwap { va, rkey, compare: wr.compare_add, swap: wr.swap },
        WR_ATOMIC_FETCH_AND_ADD => Work::FetchAdd { va, rkey, add: wr.compare_add },
        WR_ATOMIC_WRITE => Work::AtomicWrite { va, rkey },
        WR_LOCAL_INV | WR_BIND_MW => Work::Local,
        WR_SEND_WITH_IMM => Work::Send(Trailer::Immediate(wr.imm.to_ne_bytes())),
        WR_SEND_WITH_INV => Work::Send(Trailer::Invalidate(Rkey::new(wr.imm))),
        _ => Work::Send(Trailer::None),
    }
}
