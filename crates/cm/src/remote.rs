//! Connections to other hosts: the messages of a link as management datagrams between queue pairs 1 (IBTA
//! volume 1, 12.9). This module adds communication IDs, retransmission, and replies to duplicates.
//!
//! There is no I/O and no clock: datagrams are arguments and results, and time is an argument. There is no
//! hang-up between hosts: a lost peer shows when the manager's timeout expires.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use millstream_device::gsi::{ID_BITS, reply_to_dreq};
use millstream_wire::cm::{self, Addresses, MessageType, Path, Rep, Req, Transport};
use millstream_wire::{Pkey, Psn, Qkey, Qpn, gid};

use crate::abi::{reason, sidr};
use crate::address::Address;
use crate::io::{LinkId, PortName};
use crate::message::{Message, Parameters, private};

/// First retransmission timeout; it doubles up to [`MAX_RETRANSMIT_TIMEOUT`].
const FIRST_RETRANSMIT_TIMEOUT: Duration = Duration::from_millis(250);
const MAX_RETRANSMIT_TIMEOUT: Duration = Duration::from_secs(4);
/// Time for which a closed connection replies to duplicates.
const REPLY_TO_DUPLICATES: Duration = Duration::from_secs(10);
/// CM response timeout code: 4.096 µs · 2^20 = 4.3 s, as in Linux.
const RESPONSE_TIMEOUT: u8 = 20;
/// CM retries granted to the peer.
const RETRIES: u8 = 15;
/// Ethernet has no LIDs.
const NO_LID: u16 = 0xffff;
const HOP_LIMIT: u8 = 64;
/// `IBV_RATE_100_GBPS`
const RATE: u8 = 16;

/// A management datagram to send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutgoingMad {
    /// Local address.
    pub from: IpAddr,
    /// Address of the other host.
    pub to: IpAddr,
    /// The datagram.
    pub bytes: [u8; millstream_wire::mad::LEN],
}

/// The result of a received datagram.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CmEvent {
    /// A request: the first message of a new link. The caller chooses the link's number and
    /// [adopts](RemoteConnections::adopt) or [rejects](RemoteConnections::reject) it.
    Request(Box<IncomingReq>),
    /// A message on a link.
    Message(LinkId, Message),
}

/// A connection request from another host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IncomingReq {
    /// The requested port.
    pub name: PortName,
    /// The request.
    pub message: Message,
    connection: CmConnection,
}

/// A connection to another host.
#[derive(Clone, Debug, PartialEq, Eq)]
struct CmConnection {
    own: IpAddr,
    peer: IpAddr,
    /// Local and remote communication ID; the remote ID is zero until it is known.
    local_id: u32,
    remote_id: u32,
    transaction: u64,
    /// Transaction of the peer's last request.
    peer_transaction: u64,
    /// Transaction of the peer's DREQ, once received.
    dreq_transaction: Option<u64>,
    service: u64,
    /// Remote queue pair number.
    qpn: u32,
    /// Handshake state, which determines the message type in a REJ.
    state: HandshakeState,
    /// The message that is retransmitted until it is answered.
    pending: Option<Retransmission>,
    /// The reply to duplicates of the peer's last message.
    answer: Option<[u8; millstream_wire::mad::LEN]>,
    /// Time at which a closed connection is removed; `None` while the link is open.
    forget_at: Option<Instant>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HandshakeState {
    ReqSent,
    ReqRcvd,
    RepExchanged,
    Established,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Retransmission {
    bytes: [u8; millstream_wire::mad::LEN],
    again: Instant,
    wait: Duration,
}

/// Connections of this process to other hosts.
#[derive(Debug)]
pub struct RemoteConnections {
    /// High bits of the local communication IDs.
    block: u16,
    guid: u64,
    next: u32,
    connections: HashMap<LinkId, CmConnection>,
    /// Datagrams to send.
    out: Vec<OutgoingMad>,
}

impl RemoteConnections {
    /// Connections of the process with this QPN prefix; communication IDs start at `first`.
    #[must_use]
    pub fn new(block: u16, guid: u64, first: u32) -> Self {
        Self { block, guid, next: first, connections: HashMap::new(), out: Vec::new() }
    }

    /// Takes the queued datagrams.
    pub fn take_outgoing(&mut self) -> Vec<OutgoingMad> {
        std::mem::take(&mut self.out)
    }

    fn local_id(&mut self) -> u32 {
        self.next = self.next.wrapping_add(1);
        u32::from(self.block) << ID_BITS | self.next & ((1 << ID_BITS) - 1)
    }

    /// Whether the link leads to another host.
    #[must_use]
    pub fn has(&self, link: LinkId) -> bool {
        self.connections.contains_key(&link)
    }

    /// Creates a link from the address `own` to a port of another host.
    pub fn connect(&mut self, link: LinkId, own: IpAddr, name: PortName) {
        let local_id = self.local_id();
        let connection = CmConnection {
            own,
            peer: name.ip,
            local_id,
            remote_id: 0,
            transaction: u64::from(local_id),
            peer_transaction: 0,
            dreq_transaction: None,
            service: u64::from(name.space) << 16 | u64::from(name.port),
            qpn: 0,
            state: HandshakeState::ReqSent,
            pending: None,
            answer: None,
            forget_at: None,
        };
        self.connections.insert(link, connection);
    }

    /// Accepts a request as a new link.
    pub fn adopt(&mut self, link: LinkId, request: &IncomingReq) {
        self.connections.insert(link, request.connection.clone());
    }

    /// Rejects a request: there is no listener.
    pub fn reject(&mut self, request: &IncomingReq) {
        let mut connection = request.connection.clone();
        let refusal = match request.message {
            Message::SidrReq { .. } => {
                Message::SidrRep { status: sidr::UNSUPPORTED, qpn: 0, qkey: 0, private: Vec::new() }
            }
            _ => Message::Rej { reason: reason::INVALID_SERVICE_ID, private: Vec::new() },
        };
        let (bytes, _) = connection.encode(&refusal, self.guid);
        self.out.push(OutgoingMad { from: connection.own, to: connection.peer, bytes });
    }

    /// Sends a message on a link.
    pub fn send(&mut self, link: LinkId, message: &Message, now: Instant) {
        let Some(connection) = self.connections.get_mut(&link) else { return };
        let (bytes, is_repeated) = connection.encode(message, self.guid);
        connection.pending = is_repeated.then_some(Retransmission {
            bytes,
            again: now + FIRST_RETRANSMIT_TIMEOUT,
            wait: FIRST_RETRANSMIT_TIMEOUT,
        });
        if !is_repeated || matches!(message, Message::Rep(_)) {
            connection.answer = Some(bytes);
        }
        self.out.push(OutgoingMad { from: connection.own, to: connection.peer, bytes });
    }

    /// Closes a link. For a while the last message is still retransmitted, and duplicates are answered.
    pub fn close(&mut self, link: LinkId, now: Instant) {
        if let Some(connection) = self.connections.get_mut(&link) {
            connection.forget_at = Some(now + REPLY_TO_DUPLICATES);
        }
    }

    /// The time at which [`expire`](Self::expire) is due.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        let times = |c: &CmConnection| [c.forget_at, c.pending.as_ref().map(|pending| pending.again)];
        self.connections.values().flat_map(times).flatten().min()
    }

    /// Retransmits due messages, and removes closed connections.
    pub fn expire(&mut self, now: Instant) {
        self.connections.retain(|_, connection| connection.forget_at.is_none_or(|forget_at| forget_at > now));
        for connection in self.connections.values_mut() {
            if let Some(pending) = connection.pending.as_mut().filter(|pending| pending.again <= now) {
                pending.wait = (pending.wait * 2).min(MAX_RETRANSMIT_TIMEOUT);
                pending.again = now + pending.wait;
                let bytes = pending.bytes;
                self.out.push(OutgoingMad { from: connection.own, to: connection.peer, bytes });
            }
        }
    }

    /// Whether a message waits for its reply.
    #[must_use]
    pub fn has_unanswered(&self) -> bool {
        self.connections.values().any(|connection| connection.pending.is_some())
    }

    /// Handles a datagram from `peer` to the local address `own`.
    pub fn receive(&mut self, own: IpAddr, peer: IpAddr, datagram: &[u8], now: Instant) -> Option<CmEvent> {
        let (transaction, message) = cm::Message::parse(datagram).ok()?;
        let asks = match &message {
            cm::Message::Req(request) => Some(request.local_id),
            cm::Message::SidrReq { request_id, .. } => Some(*request_id),
            _ => None,
        };
        if let Some(remote_id) = asks {
            let known = |c: &&mut CmConnection| {
                c.peer == peer && c.remote_id == remote_id && c.state != HandshakeState::ReqSent
            };
            if let Some(connection) = self.connections.values_mut().find(known) {
                // A duplicate; there may be no reply yet while the program decides.
                if let Some(bytes) = connection.answer {
                    self.out.push(OutgoingMad { from: own, to: peer, bytes });
                }
                return None;
            }
            return self
                .handle_request(own, peer, transaction, &message)
                .map(|request| CmEvent::Request(Box::new(request)));
        }
        let id = match &message {
            cm::Message::SidrRep { request_id, .. } => *request_id,
            cm::Message::Rep(reply) => reply.remote_id,
            cm::Message::Mra { remote_id, .. }
            | cm::Message::Rej { remote_id, .. }
            | cm::Message::Rtu { remote_id, .. }
            | cm::Message::Dreq { remote_id, .. }
            | cm::Message::Drep { remote_id, .. } => *remote_id,
            cm::Message::Req(_) | cm::Message::SidrReq { .. } => return None,
        };
        let found = self.connections.iter_mut().find(|(_, c)| c.local_id == id && c.peer == peer);
        let Some((link, connection)) = found else {
            let drep = reply_to_dreq(transaction, &message);
            self.out.extend(drep.map(|bytes| OutgoingMad { from: own, to: peer, bytes }));
            return None;
        };
        let link = *link;
        let heard = connection.handle_message(transaction, &message, now);
        match heard {
            Received::New(message) => {
                (connection.forget_at.is_none()).then_some(CmEvent::Message(link, message))
            }
            Received::Duplicate => {
                if let Some(bytes) = connection.answer {
                    self.out.push(OutgoingMad { from: own, to: peer, bytes });
                }
                None
            }
            Received::Ignored => None,
        }
    }

    fn handle_request(
        &mut self,
        own: IpAddr,
        peer: IpAddr,
        transaction: u64,
        message: &cm::Message<'_>,
    ) -> Option<IncomingReq> {
        let (service, remote_id, data) = match message {
            cm::Message::Req(request) => (request.service_id, request.local_id, request.private),
            cm::Message::SidrReq { service_id, request_id, private, .. } => {
                (*service_id, *request_id, *private)
            }
            _ => return None,
        };
        let (addresses, rest) = Addresses::parse(data).ok()?;
        let (space, port) = ((service >> 16) as u16, service as u16);
        if service >> 32 != 0 {
            return None;
        }
        // The addresses of the packet count, not those in the request.
        let src = Address { ip: peer, port: addresses.source_port, scope: 0 };
        let dst = Address { ip: own, port, scope: 0 };
        let mut qpn = 0;
        let said = match message {
            cm::Message::Req(request) => {
                qpn = request.qpn.get();
                let private = rest[..private::REQ.min(rest.len())].to_vec();
                Message::Req { src, dst, parameters: parameters_of_req(request, private) }
            }
            _ => Message::SidrReq { src, dst, private: rest[..private::SIDR_REQ.min(rest.len())].to_vec() },
        };
        let connection = CmConnection {
            own,
            peer,
            local_id: self.local_id(),
            remote_id,
            transaction,
            peer_transaction: transaction,
            dreq_transaction: None,
            service,
            qpn,
            state: HandshakeState::ReqRcvd,
            pending: None,
            answer: None,
            forget_at: None,
        };
        Some(IncomingReq { name: PortName { space, ip: own, port }, message: said, connection })
    }
}

/// The result of a message on a known connection.
enum Received {
    New(Message),
    /// A duplicate, which is answered again.
    Duplicate,
    Ignored,
}

impl CmConnection {
    /// The datagram of a message, and whether it is retransmitted until it is answered.
    fn encode(&mut self, message: &Message, guid: u64) -> ([u8; millstream_wire::mad::LEN], bool) {
        let (local_id, remote_id) = (self.local_id, self.remote_id);
        let with_addresses = |src: &Address, dst: &Address, private: &[u8]| {
            let mut data = vec![0; Addresses::LEN + private.len()];
            let addresses = Addresses { source: src.ip, source_port: src.port, destination: dst.ip };
            addresses.emit(&mut data);
            data[Addresses::LEN..].copy_from_slice(private);
            data
        };
        match message {
            Message::Req { src, dst, parameters } => {
                let data = with_addresses(src, dst, &parameters.private);
                (self.request(parameters, guid, &data).emit(self.transaction), true)
            }
            Message::SidrReq { src, dst, private } => {
                let data = with_addresses(src, dst, private);
                let request = cm::Message::SidrReq {
                    request_id: local_id,
                    pkey: Pkey::DEFAULT,
                    service_id: self.service,
                    private: &data,
                };
                (request.emit(self.transaction), true)
            }
            Message::Rep(parameters) => {
                self.state = HandshakeState::RepExchanged;
                let reply = Rep {
                    local_id,
                    remote_id,
                    qkey: Qkey::new(0),
                    qpn: Qpn::new(parameters.qpn),
                    psn: Psn::new(parameters.psn),
                    responder_resources: parameters.responder_resources,
                    initiator_depth: parameters.initiator_depth,
                    target_ack_delay: 15,
                    failover: 1,
                    flow_control: parameters.flow_control != 0,
                    rnr_retry_count: parameters.rnr_retry_count,
                    srq: parameters.srq != 0,
                    ca_guid: guid,
                    private: &parameters.private,
                };
                (cm::Message::Rep(reply).emit(self.peer_transaction), true)
            }
            Message::Rtu => {
                self.state = HandshakeState::Established;
                (cm::Message::Rtu { local_id, remote_id, private: &[] }.emit(self.transaction), false)
            }
            Message::Rej { reason, private } => {
                let message_type = match self.state {
                    HandshakeState::ReqRcvd => MessageType::Req,
                    HandshakeState::RepExchanged | HandshakeState::Established => MessageType::Rep,
                    HandshakeState::ReqSent => MessageType::Other,
                };
                let refusal = cm::Message::Rej {
                    local_id,
                    remote_id,
                    message_type,
                    reason: (*reason).into(),
                    additional: &[],
                    private,
                };
                (refusal.emit(self.peer_transaction), false)
            }
            Message::Dreq => {
                let qpn = Qpn::new(self.qpn);
                let end = cm::Message::Dreq { local_id, remote_id, remote_qpn: qpn, private: &[] };
                self.transaction = self.transaction.wrapping_add(1 << 32);
                (end.emit(self.transaction), true)
            }
            Message::Drep => {
                (cm::Message::Drep { local_id, remote_id, private: &[] }.emit(self.peer_transaction), false)
            }
            Message::SidrRep { status, qpn, qkey, private } => {
                let reply = cm::Message::SidrRep {
                    request_id: remote_id,
                    status: *status,
                    qpn: Qpn::new(*qpn),
                    service_id: self.service,
                    qkey: Qkey::new(*qkey),
                    additional: &[],
                    private,
                };
                (reply.emit(self.peer_transaction), false)
            }
        }
    }

    fn request<'a>(&self, parameters: &Parameters, guid: u64, private: &'a [u8]) -> cm::Message<'a> {
        cm::Message::Req(Req {
            local_id: self.local_id,
            service_id: self.service,
            ca_guid: guid,
            qkey: Qkey::new(0),
            qpn: Qpn::new(parameters.qpn),
            responder_resources: parameters.responder_resources,
            initiator_depth: parameters.initiator_depth,
            remote_response_timeout: RESPONSE_TIMEOUT,
            local_response_timeout: RESPONSE_TIMEOUT,
            transport: if parameters.extended != 0 { Transport::Xrc } else { Transport::Rc },
            flow_control: parameters.flow_control != 0,
            psn: Psn::new(parameters.psn),
            retry_count: parameters.retry_count,
            rnr_retry_count: parameters.rnr_retry_count,
            pkey: Pkey::DEFAULT,
            mtu: parameters.mtu,
            max_cm_retries: RETRIES,
            srq: parameters.srq != 0,
            path: Path {
                local_lid: NO_LID,
                remote_lid: NO_LID,
                local_gid: gid(self.own).to_bits(),
                remote_gid: gid(self.peer).to_bits(),
                flow_label: 0,
                packet_rate: RATE,
                traffic_class: 0,
                hop_limit: HOP_LIMIT,
                service_level: 0,
                subnet_local: false,
                ack_timeout: parameters.timeout,
            },
            private,
        })
    }

    fn handle_message(&mut self, transaction: u64, message: &cm::Message<'_>, now: Instant) -> Received {
        match message {
            cm::Message::Rep(reply) => {
                if self.state != HandshakeState::ReqSent {
                    return Received::Duplicate;
                }
                (self.remote_id, self.qpn) = (reply.local_id, reply.qpn.get());
                self.state = HandshakeState::RepExchanged;
                (self.pending, self.peer_transaction) = (None, transaction);
                Received::New(Message::Rep(parameters_of_rep(reply)))
            }
            cm::Message::Rtu { .. }
                if self.state == HandshakeState::RepExchanged && self.answer.is_some() =>
            {
                self.state = HandshakeState::Established;
                (self.pending, self.answer) = (None, None);
                Received::New(Message::Rtu)
            }
            cm::Message::Rej { reason, private, .. } => {
                self.pending = None;
                let reason = u8::try_from(*reason).unwrap_or(reason::CONSUMER);
                Received::New(Message::Rej { reason, private: private.to_vec() })
            }
            cm::Message::Mra { service_timeout, .. } => {
                if let Some(pending) = &mut self.pending {
                    let time = Duration::from_nanos(4096 << service_timeout.min(&24));
                    pending.again = now + time.max(FIRST_RETRANSMIT_TIMEOUT);
                }
                Received::Ignored
            }
            cm::Message::Dreq { .. } => {
                // Linux uses the transaction of the REQ for all messages of a connection.
                if self.dreq_transaction == Some(transaction) {
                    return Received::Duplicate;
                }
                // For the sender of a REP whose RTU was lost, this establishes the connection.
                (self.peer_transaction, self.dreq_transaction) = (transaction, Some(transaction));
                self.answer = None;
                if self.forget_at.is_some() {
                    let drep = Message::Drep;
                    self.answer = Some(self.encode(&drep, 0).0);
                    return Received::Duplicate;
                }
                Received::New(Message::Dreq)
            }
            cm::Message::Drep { .. } => {
                self.pending = None;
                Received::New(Message::Drep)
            }
            cm::Message::SidrRep { status, qpn, qkey, private, .. } => {
                self.pending = None;
                Received::New(Message::SidrRep {
                    status: *status,
                    qpn: qpn.get(),
                    qkey: qkey.get(),
                    private: private.to_vec(),
                })
            }
            cm::Message::Rtu { .. } | cm::Message::Req(_) | cm::Message::SidrReq { .. } => Received::Ignored,
        }
    }
}

fn parameters_of_req(request: &Req<'_>, private: Vec<u8>) -> Parameters {
    Parameters {
        qpn: request.qpn.get(),
        psn: request.psn.get(),
        responder_resources: request.responder_resources,
        initiator_depth: request.initiator_depth,
        flow_control: request.flow_control.into(),
        retry_count: request.retry_count,
        rnr_retry_count: request.rnr_retry_count,
        srq: request.srq.into(),
        timeout: request.path.ack_timeout,
        mtu: request.mtu,
        extended: u8::from(request.transport == Transport::Xrc),
        ece: [0; 2],
        private,
    }
}

fn parameters_of_rep(reply: &Rep<'_>) -> Parameters {
    Parameters {
        qpn: reply.qpn.get(),
        psn: reply.psn.get(),
        responder_resources: reply.responder_resources,
        initiator_depth: reply.initiator_depth,
        flow_control: reply.flow_control.into(),
        rnr_retry_count: reply.rnr_retry_count,
        srq: reply.srq.into(),
        private: reply.private.to_vec(),
        ..Parameters::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PORT: PortName =
        PortName { space: 0x106, ip: IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2)), port: 7174 };

    /// Two hosts and the events of each.
    struct Pair {
        now: Instant,
        ends: [RemoteConnections; 2],
        ips: [IpAddr; 2],
        heard: [Vec<CmEvent>; 2],
    }

    impl Pair {
        fn new() -> Self {
            Self {
                now: Instant::now(),
                ends: [RemoteConnections::new(0x123, 1, 0xfffff), RemoteConnections::new(0xabc, 2, 7)],
                ips: ["10.0.0.1".parse().unwrap(), PORT.ip],
                heard: [Vec::new(), Vec::new()],
            }
        }

        /// Delivers the sent datagrams but those at the indices in `lose`.
        fn carry(&mut self, lose: &[usize]) {
            for from in 0..2 {
                for (i, sent) in self.ends[from].take_outgoing().into_iter().enumerate() {
                    assert_eq!((sent.from, sent.to), (self.ips[from], self.ips[1 - from]));
                    if !lose.contains(&i) {
                        let heard = self.ends[1 - from].receive(sent.to, sent.from, &sent.bytes, self.now);
                        self.heard[1 - from].extend(heard);
                    }
                }
            }
        }

        /// Advances time to the next retransmission.
        fn wait(&mut self) {
            self.now = self
                .ends
                .iter()
                .filter_map(RemoteConnections::deadline)
                .min()
                .expect("something is repeated");
            let now = self.now;
            self.ends.iter_mut().for_each(|end| end.expire(now));
        }

        fn say(&mut self, end: usize, link: u64, message: &Message) {
            let now = self.now;
            self.ends[end].send(LinkId(link), message, now);
        }

        fn ask(&mut self) -> Parameters {
            let ips = self.ips;
            self.ends[0].connect(LinkId(1), ips[0], PORT);
            let parameters = Parameters {
                qpn: 5,
                psn: 9,
                mtu: 3,
                timeout: 14,
                private: vec![1; 56],
                ..Parameters::default()
            };
            let [src, dst] =
                [(ips[0], 4000), (ips[1], PORT.port)].map(|(ip, port)| Address { ip, port, scope: 0 });
            self.say(0, 1, &Message::Req { src, dst, parameters: parameters.clone() });
            parameters
        }

        fn request(&mut self) -> Box<IncomingReq> {
            match self.heard[1].pop() {
                Some(CmEvent::Request(request)) => request,
                other => panic!("{other:?}"),
            }
        }
    }

    fn news(message: Message, link: u64) -> Vec<CmEvent> {
        vec![CmEvent::Message(LinkId(link), message)]
    }

    #[test]
    fn connection_survives_the_loss_of_each_message() {
        let mut pair = Pair::new();
        let parameters = pair.ask();
        pair.carry(&[0]);
        assert!(pair.heard[1].is_empty());
        pair.wait();
        pair.carry(&[]);
        let request = pair.request();
        assert_eq!(request.name, PORT);
        let Message::Req { src, parameters: seen, .. } = &request.message else { panic!("{request:?}") };
        assert_eq!((src.port, seen), (4000, &parameters));
        pair.ends[1].adopt(LinkId(8), &request);

        // The REP is lost; the REQ is repeated and answered again.
        let reply = Parameters { qpn: 6, private: vec![2; 196], ..Parameters::default() };
        pair.say(1, 8, &Message::Rep(reply.clone()));
        pair.carry(&[0]);
        pair.wait();
        pair.carry(&[]);
        assert_eq!(std::mem::take(&mut pair.heard[0]), news(Message::Rep(reply), 1));
        assert!(pair.heard[1].is_empty(), "a repetition is no second request");

        pair.say(0, 1, &Message::Rtu);
        pair.carry(&[0]);
        pair.wait();
        pair.carry(&[]);
        pair.carry(&[]);
        assert_eq!(std::mem::take(&mut pair.heard[1]), news(Message::Rtu, 8));
        assert!(pair.ends.iter().all(|end| end.deadline().is_none()), "nothing is repeated any more");

        pair.say(0, 1, &Message::Dreq);
        pair.carry(&[]);
        assert_eq!(std::mem::take(&mut pair.heard[1]), news(Message::Dreq, 8));
        pair.say(1, 8, &Message::Drep);
        let now = pair.now;
        pair.ends[1].close(LinkId(8), now);
        pair.carry(&[0]);
        pair.wait();
        pair.carry(&[]);
        pair.carry(&[]);
        assert_eq!(std::mem::take(&mut pair.heard[0]), news(Message::Drep, 1));
        assert!(pair.heard[1].is_empty());
    }

    /// Linux uses one transaction for all messages of one side of a connection.
    #[test]
    fn dreq_in_the_transaction_of_the_req_is_new() {
        let mut pair = Pair::new();
        pair.ask();
        pair.carry(&[]);
        let request = pair.request();
        pair.ends[1].adopt(LinkId(8), &request);
        pair.say(1, 8, &Message::Rep(Parameters::default()));
        pair.carry(&[]);
        pair.say(0, 1, &Message::Rtu);
        pair.carry(&[]);
        pair.heard[1].clear();

        let (link, connection) = pair.ends[1].connections.iter().next().expect("it is connected");
        let (link, transaction, from) = (*link, connection.peer_transaction, connection.peer);
        let wish = cm::Message::Dreq {
            local_id: connection.remote_id,
            remote_id: connection.local_id,
            remote_qpn: Qpn::new(6),
            private: &[],
        };
        let (bytes, own, now) = (wish.emit(transaction), connection.own, pair.now);
        let heard = pair.ends[1].receive(own, from, &bytes, now);
        assert_eq!(heard, Some(CmEvent::Message(link, Message::Dreq)));
        assert_eq!(pair.ends[1].receive(own, from, &bytes, now), None, "it came again");
    }

    #[test]
    fn missing_listener_rejects_and_unknown_connection_gets_drep() {
        let mut pair = Pair::new();
        pair.ask();
        pair.carry(&[]);
        let request = pair.request();
        pair.ends[1].reject(&request);
        pair.carry(&[]);
        let [CmEvent::Message(LinkId(1), Message::Rej { reason, .. })] = &pair.heard[0][..] else {
            panic!("{:?}", pair.heard[0])
        };
        assert_eq!(*reason, reason::INVALID_SERVICE_ID);
        pair.heard[0].clear();

        // The other side has lost the connection.
        pair.ends[1] = RemoteConnections::new(0xabc, 2, 0);
        pair.say(0, 1, &Message::Dreq);
        pair.carry(&[]);
        pair.carry(&[]);
        assert_eq!(pair.heard[0], news(Message::Drep, 1));
    }

    #[test]
    fn datagrams_of_strangers_are_ignored() {
        let mut pair = Pair::new();
        pair.ask();
        let sent = pair.ends[0].take_outgoing().remove(0);
        let now = pair.now;
        for len in 0..sent.bytes.len() {
            assert_eq!(pair.ends[1].receive(sent.to, sent.from, &sent.bytes[..len], now), None);
        }
        // A reply from an address that received no request.
        let request = match pair.ends[1].receive(sent.to, sent.from, &sent.bytes, now) {
            Some(CmEvent::Request(request)) => request,
            other => panic!("{other:?}"),
        };
        pair.ends[1].adopt(LinkId(8), &request);
        pair.say(1, 8, &Message::Rep(Parameters::default()));
        let reply = pair.ends[1].take_outgoing().remove(0);
        let stranger = "10.0.0.3".parse().unwrap();
        assert_eq!(pair.ends[0].receive(reply.to, stranger, &reply.bytes, now), None);
        assert!(pair.ends[0].receive(reply.to, reply.from, &reply.bytes, now).is_some());
    }
}
