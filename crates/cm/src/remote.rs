//! Connections to other hosts: the messages of a link as management datagrams between queue pairs 1 (IBTA
//! volume 1, 12.9). This module adds communication IDs, retransmission, and replies to duplicates.
//!
//! There is no I/O and no clock: datagrams go in and come out, time is an argument. There is no hang-up
//! between hosts: a lost peer shows when the manager's timeout expires.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use millstream_device::gsi::{ID_BITS, agreement};
use millstream_wire::cm::{self, MessageType, Addresses, Path, Rep, Req, Transport};
use millstream_wire::{Pkey, Psn, Qkey, Qpn, gid};

use crate::abi::{reason, sidr};
use crate::address::Address;
use crate::message::{Message, Parameters, private};
use crate::wire::{LinkId, Name};

/// First retransmission timeout; it doubles up to [`MAX_RETRANSMIT_TIMEOUT`].
const FIRST: Duration = Duration::from_millis(250);
const LONGEST: Duration = Duration::from_secs(4);
/// How long a closed connection replies to duplicates.
const LINGER: Duration = Duration::from_secs(10);
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
pub struct Sent {
    /// Local address.
    pub from: IpAddr,
    /// Address of the other host.
    pub to: IpAddr,
    /// The datagram.
    pub bytes: [u8; millstream_wire::mad::LEN],
}

/// The result of a received datagram.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Heard {
    /// A request: the first message of a new link. The caller chooses the link's number and
    /// [adopts](RemoteConnections::adopt) or [rejects](RemoteConnections::reject) it.
    Request(Box<Asked>),
    /// A message on a link.
    Message(LinkId, Message),
}

/// A connection request from another host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    /// The requested port.
    pub name: Name,
    /// The request.
    pub message: Message,
    conversation: Conversation,
}

/// A connection to another host.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Conversation {
    own: IpAddr,
    peer: IpAddr,
    /// Local and remote communication ID; the remote ID is zero until it is known.
    local_id: u32,
    remote_id: u32,
    transaction: u64,
    /// Transaction of the peer's last request.
    answered: u64,
    /// Transaction of the peer's DREQ, once received.
    ended: Option<u64>,
    service: u64,
    /// Remote queue pair number.
    qpn: u32,
    /// Handshake state, which determines the message type in a REJ.
    stage: Stage,
    /// The message that is retransmitted until it is answered.
    pending: Option<Pending>,
    /// The reply to duplicates of the peer's last message.
    answer: Option<[u8; millstream_wire::mad::LEN]>,
    /// Set when the manager has closed the link: when the connection is forgotten.
    over: Option<Instant>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Asking,
    Asked,
    Replied,
    Established,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Pending {
    bytes: [u8; millstream_wire::mad::LEN],
    again: Instant,
    wait: Duration,
}

/// Connections of this process to other hosts.
#[derive(Debug)]
pub struct Remote {
    /// High bits of the local communication IDs.
    block: u16,
    guid: u64,
    next: u32,
    conversations: HashMap<LinkId, Conversation>,
    /// Datagrams to send.
    out: Vec<Sent>,
}

impl Remote {
    /// For the process with this QPN prefix; communication IDs start at `first`.
    #[must_use]
    pub fn new(block: u16, guid: u64, first: u32) -> Self {
        Self { block, guid, next: first, conversations: HashMap::new(), out: Vec::new() }
    }

    /// Takes the queued datagrams.
    pub fn take_sent(&mut self) -> Vec<Sent> {
        std::mem::take(&mut self.out)
    }

    fn local_id(&mut self) -> u32 {
        self.next = self.next.wrapping_add(1);
        u32::from(self.block) << ID_BITS | self.next & ((1 << ID_BITS) - 1)
    }

    /// Whether the link leads to another host.
    #[must_use]
    pub fn has(&self, link: LinkId) -> bool {
        self.conversations.contains_key(&link)
    }

    /// Creates a link from the address `own` to a port of another host.
    pub fn connect(&mut self, link: LinkId, own: IpAddr, name: Name) {
        let local_id = self.local_id();
        let conversation = Conversation {
            own,
            peer: name.ip,
            local_id,
            remote_id: 0,
            transaction: u64::from(local_id),
            answered: 0,
            ended: None,
            service: u64::from(name.space) << 16 | u64::from(name.port),
            qpn: 0,
            stage: Stage::Asking,
            pending: None,
            answer: None,
            over: None,
        };
        self.conversations.insert(link, conversation);
    }

    /// Accepts a request as a new link.
    pub fn adopt(&mut self, link: LinkId, asked: &Asked) {
        self.conversations.insert(link, asked.conversation.clone());
    }

    /// Rejects a request: there is no listener.
    pub fn refuse(&mut self, asked: &Asked) {
        let mut conversation = asked.conversation.clone();
        let refusal = match asked.message {
            Message::SidrReq { .. } => {
                Message::SidrRep { status: sidr::UNSUPPORTED, qpn: 0, qkey: 0, private: Vec::new() }
            }
            _ => Message::Rej { reason: reason::INVALID_SERVICE_ID, private: Vec::new() },
        };
        let (bytes, _) = conversation.encode(&refusal, self.guid);
        self.out.push(Sent { from: conversation.own, to: conversation.peer, bytes });
    }

    /// Sends a message on a link.
    pub fn send(&mut self, link: LinkId, message: &Message, now: Instant) {
        let Some(conversation) = self.conversations.get_mut(&link) else { return };
        let (bytes, is_repeated) = conversation.encode(message, self.guid);
        conversation.pending = is_repeated.then_some(Pending { bytes, again: now + FIRST, wait: FIRST });
        if !is_repeated || matches!(message, Message::Rep(_)) {
            conversation.answer = Some(bytes);
        }
        self.out.push(Sent { from: conversation.own, to: conversation.peer, bytes });
    }

    /// Closes a link. The last message is still retransmitted, and duplicates are answered, for a while.
    pub fn close(&mut self, link: LinkId, now: Instant) {
        if let Some(conversation) = self.conversations.get_mut(&link) {
            conversation.over = Some(now + LINGER);
        }
    }

    /// When [`expire`](Self::expire) is due.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        let times = |c: &Conversation| [c.over, c.pending.as_ref().map(|pending| pending.again)];
        self.conversations.values().flat_map(times).flatten().min()
    }

    /// Retransmits what is due, and forgets old connections.
    pub fn expire(&mut self, now: Instant) {
        self.conversations.retain(|_, conversation| conversation.over.is_none_or(|over| over > now));
        for conversation in self.conversations.values_mut() {
            if let Some(pending) = conversation.pending.as_mut().filter(|pending| pending.again <= now) {
                pending.wait = (pending.wait * 2).min(LONGEST);
                pending.again = now + pending.wait;
                let bytes = pending.bytes;
                self.out.push(Sent { from: conversation.own, to: conversation.peer, bytes });
            }
        }
    }

    /// Whether a message waits for its reply.
    #[must_use]
    pub fn awaits_answers(&self) -> bool {
        self.conversations.values().any(|conversation| conversation.pending.is_some())
    }

    /// Handles a datagram from `peer` to the local address `own`.
    pub fn receive(&mut self, own: IpAddr, peer: IpAddr, datagram: &[u8], now: Instant) -> Option<Heard> {
        let (transaction, message) = cm::Message::parse(datagram).ok()?;
        let asks = match &message {
            cm::Message::Req(request) => Some(request.local_id),
            cm::Message::SidrReq { request_id, .. } => Some(*request_id),
            _ => None,
        };
        if let Some(remote_id) = asks {
            let known = |c: &&mut Conversation| {
                c.peer == peer && c.remote_id == remote_id && c.stage != Stage::Asking
            };
            if let Some(conversation) = self.conversations.values_mut().find(known) {
                // A duplicate; there may be no reply yet while the program decides.
                if let Some(bytes) = conversation.answer {
                    self.out.push(Sent { from: own, to: peer, bytes });
                }
                return None;
            }
            return self.asked(own, peer, transaction, &message).map(|asked| Heard::Request(Box::new(asked)));
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
        let found = self.conversations.iter_mut().find(|(_, c)| c.local_id == id && c.peer == peer);
        let Some((link, conversation)) = found else {
            let agreed = agreement(transaction, &message);
            self.out.extend(agreed.map(|bytes| Sent { from: own, to: peer, bytes }));
            return None;
        };
        let link = *link;
        let heard = conversation.hear(transaction, &message, now);
        match heard {
            Hearing::News(message) => (conversation.over.is_none()).then_some(Heard::Message(link, message)),
            Hearing::Repetition => {
                if let Some(bytes) = conversation.answer {
                    self.out.push(Sent { from: own, to: peer, bytes });
                }
                None
            }
            Hearing::Nothing => None,
        }
    }

    fn asked(
        &mut self,
        own: IpAddr,
        peer: IpAddr,
        transaction: u64,
        message: &cm::Message<'_>,
    ) -> Option<Asked> {
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
                Message::Req { src, dst, parameters: of_request(request, private) }
            }
            _ => Message::SidrReq { src, dst, private: rest[..private::SIDR_REQ.min(rest.len())].to_vec() },
        };
        let conversation = Conversation {
            own,
            peer,
            local_id: self.local_id(),
            remote_id,
            transaction,
            answered: transaction,
            ended: None,
            service,
            qpn,
            stage: Stage::Asked,
            pending: None,
            answer: None,
            over: None,
        };
        Some(Asked { name: Name { space, ip: own, port }, message: said, conversation })
    }
}

/// The result of a message on a known connection.
enum Hearing {
    News(Message),
    /// A duplicate, which is answered again.
    Repetition,
    Nothing,
}

impl Conversation {
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
                self.stage = Stage::Replied;
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
                (cm::Message::Rep(reply).emit(self.answered), true)
            }
            Message::Rtu => {
                self.stage = Stage::Established;
                (cm::Message::Rtu { local_id, remote_id, private: &[] }.emit(self.transaction), false)
            }
            Message::Rej { reason, private } => {
                let message_type = match self.stage {
                    Stage::Asked => MessageType::Req,
                    Stage::Replied | Stage::Established => MessageType::Rep,
                    Stage::Asking => MessageType::Other,
                };
                let refusal = cm::Message::Rej {
                    local_id,
                    remote_id,
                    message_type,
                    reason: (*reason).into(),
                    additional: &[],
                    private,
                };
                (refusal.emit(self.answered), false)
            }
            Message::Dreq => {
                let qpn = Qpn::new(self.qpn);
                let end = cm::Message::Dreq { local_id, remote_id, remote_qpn: qpn, private: &[] };
                self.transaction = self.transaction.wrapping_add(1 << 32);
                (end.emit(self.transaction), true)
            }
            Message::Drep => {
                (cm::Message::Drep { local_id, remote_id, private: &[] }.emit(self.answered), false)
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
                (reply.emit(self.answered), false)
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

    fn hear(&mut self, transaction: u64, message: &cm::Message<'_>, now: Instant) -> Hearing {
        match message {
            cm::Message::Rep(reply) => {
                if self.stage != Stage::Asking {
                    return Hearing::Repetition;
                }
                (self.remote_id, self.qpn) = (reply.local_id, reply.qpn.get());
                self.stage = Stage::Replied;
                (self.pending, self.answered) = (None, transaction);
                Hearing::News(Message::Rep(of_reply(reply)))
            }
            cm::Message::Rtu { .. } if self.stage == Stage::Replied && self.answer.is_some() => {
                self.stage = Stage::Established;
                (self.pending, self.answer) = (None, None);
                Hearing::News(Message::Rtu)
            }
            cm::Message::Rej { reason, private, .. } => {
                self.pending = None;
                let reason = u8::try_from(*reason).unwrap_or(reason::CONSUMER);
                Hearing::News(Message::Rej { reason, private: private.to_vec() })
            }
            cm::Message::Mra { service_timeout, .. } => {
                if let Some(pending) = &mut self.pending {
                    let time = Duration::from_nanos(4096 << service_timeout.min(&24));
                    pending.again = now + time.max(FIRST);
                }
                Hearing::Nothing
            }
            cm::Message::Dreq { .. } => {
                // Linux uses the transaction of the REQ for all messages of a connection.
                if self.ended == Some(transaction) {
                    return Hearing::Repetition;
                }
                // A sender of a REP that never got its RTU learns that the connection was established.
                (self.answered, self.ended) = (transaction, Some(transaction));
                self.answer = None;
                if self.over.is_some() {
                    let agreed = Message::Drep;
                    self.answer = Some(self.encode(&agreed, 0).0);
                    return Hearing::Repetition;
                }
                Hearing::News(Message::Dreq)
            }
            cm::Message::Drep { .. } => {
                self.pending = None;
                Hearing::News(Message::Drep)
            }
            cm::Message::SidrRep { status, qpn, qkey, private, .. } => {
                self.pending = None;
                Hearing::News(Message::SidrRep {
                    status: *status,
                    qpn: qpn.get(),
                    qkey: qkey.get(),
                    private: private.to_vec(),
                })
            }
            cm::Message::Rtu { .. } | cm::Message::Req(_) | cm::Message::SidrReq { .. } => Hearing::Nothing,
        }
    }
}

fn of_request(request: &Req<'_>, private: Vec<u8>) -> Parameters {
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

fn of_reply(reply: &Rep<'_>) -> Parameters {
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

    const PORT: Name =
        Name { space: 0x106, ip: IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2)), port: 7174 };

    /// Two hosts and the events of each.
    struct Pair {
        now: Instant,
        ends: [Remote; 2],
        ips: [IpAddr; 2],
        heard: [Vec<Heard>; 2],
    }

    impl Pair {
        fn new() -> Self {
            Self {
                now: Instant::now(),
                ends: [Remote::new(0x123, 1, 0xfffff), Remote::new(0xabc, 2, 7)],
                ips: ["10.0.0.1".parse().unwrap(), PORT.ip],
                heard: [Vec::new(), Vec::new()],
            }
        }

        /// Delivers the sent datagrams but those at the indices in `lose`.
        fn carry(&mut self, lose: &[usize]) {
            for from in 0..2 {
                for (i, sent) in self.ends[from].take_sent().into_iter().enumerate() {
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
            self.now = self.ends.iter().filter_map(Remote::deadline).min().expect("something is repeated");
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

        fn asked(&mut self) -> Box<Asked> {
            match self.heard[1].pop() {
                Some(Heard::Request(asked)) => asked,
                other => panic!("{other:?}"),
            }
        }
    }

    fn news(message: Message, link: u64) -> Vec<Heard> {
        vec![Heard::Message(LinkId(link), message)]
    }

    #[test]
    fn a_connection_comes_and_goes_though_each_message_is_lost_once() {
        let mut pair = Pair::new();
        let parameters = pair.ask();
        pair.carry(&[0]);
        assert!(pair.heard[1].is_empty());
        pair.wait();
        pair.carry(&[]);
        let asked = pair.asked();
        assert_eq!(asked.name, PORT);
        let Message::Req { src, parameters: seen, .. } = &asked.message else { panic!("{asked:?}") };
        assert_eq!((src.port, seen), (4000, &parameters));
        pair.ends[1].adopt(LinkId(8), &asked);

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
    fn a_wish_to_disconnect_in_the_transaction_of_the_request_is_news() {
        let mut pair = Pair::new();
        pair.ask();
        pair.carry(&[]);
        let asked = pair.asked();
        pair.ends[1].adopt(LinkId(8), &asked);
        pair.say(1, 8, &Message::Rep(Parameters::default()));
        pair.carry(&[]);
        pair.say(0, 1, &Message::Rtu);
        pair.carry(&[]);
        pair.heard[1].clear();

        let (link, conversation) = pair.ends[1].conversations.iter().next().expect("it is connected");
        let (link, transaction, from) = (*link, conversation.answered, conversation.peer);
        let wish = cm::Message::Dreq {
            local_id: conversation.remote_id,
            remote_id: conversation.local_id,
            remote_qpn: Qpn::new(6),
            private: &[],
        };
        let (bytes, own, now) = (wish.emit(transaction), conversation.own, pair.now);
        let heard = pair.ends[1].receive(own, from, &bytes, now);
        assert_eq!(heard, Some(Heard::Message(link, Message::Dreq)));
        assert_eq!(pair.ends[1].receive(own, from, &bytes, now), None, "it came again");
    }

    #[test]
    fn what_nobody_offers_is_refused_and_what_is_forgotten_is_over() {
        let mut pair = Pair::new();
        pair.ask();
        pair.carry(&[]);
        let asked = pair.asked();
        pair.ends[1].refuse(&asked);
        pair.carry(&[]);
        let [Heard::Message(LinkId(1), Message::Rej { reason, .. })] = &pair.heard[0][..] else {
            panic!("{:?}", pair.heard[0])
        };
        assert_eq!(*reason, reason::INVALID_SERVICE_ID);
        pair.heard[0].clear();

        // The other side has no such connection any more.
        pair.ends[1] = Remote::new(0xabc, 2, 0);
        pair.say(0, 1, &Message::Dreq);
        pair.carry(&[]);
        pair.carry(&[]);
        assert_eq!(pair.heard[0], news(Message::Drep, 1));
    }

    #[test]
    fn datagrams_of_others_mean_nothing() {
        let mut pair = Pair::new();
        pair.ask();
        let sent = pair.ends[0].take_sent().remove(0);
        let now = pair.now;
        for len in 0..sent.bytes.len() {
            assert_eq!(pair.ends[1].receive(sent.to, sent.from, &sent.bytes[..len], now), None);
        }
        // A reply from an address that received no request.
        let asked = match pair.ends[1].receive(sent.to, sent.from, &sent.bytes, now) {
            Some(Heard::Request(asked)) => asked,
            other => panic!("{other:?}"),
        };
        pair.ends[1].adopt(LinkId(8), &asked);
        pair.say(1, 8, &Message::Rep(Parameters::default()));
        let reply = pair.ends[1].take_sent().remove(0);
        let stranger = "10.0.0.3".parse().unwrap();
        assert_eq!(pair.ends[0].receive(reply.to, stranger, &reply.bytes, now), None);
        assert!(pair.ends[0].receive(reply.to, reply.from, &reply.bytes, now).is_some());
    }
}
