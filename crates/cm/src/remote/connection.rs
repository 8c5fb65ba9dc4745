//! One connection to another host: its messages as management datagrams, and the states of its handshake.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use millstream_wire::cm::{self, Addresses, MessageType, Path, Rep, Req, Transport};
use millstream_wire::{Pkey, Qkey, Qpn, gid};

use crate::abi::reason;
use crate::address::Address;
use crate::message::{ConnectionParameters, Message};

/// First retransmission timeout; it doubles up to [`MAX_RETRANSMIT_TIMEOUT`].
pub(super) const FIRST_RETRANSMIT_TIMEOUT: Duration = Duration::from_millis(250);
pub(super) const MAX_RETRANSMIT_TIMEOUT: Duration = Duration::from_secs(4);
/// Time for which a closed connection replies to duplicates.
pub(super) const REPLY_TO_DUPLICATES: Duration = Duration::from_secs(10);
/// CM response timeout code: 4.096 µs · 2^20 = 4.3 s, as in Linux.
const RESPONSE_TIMEOUT: u8 = 20;
/// CM retries granted to the peer.
const RETRIES: u8 = 15;
/// Ethernet has no LIDs.
const NO_LID: u16 = 0xffff;
const HOP_LIMIT: u8 = 64;
/// `IBV_RATE_100_GBPS`
const RATE: u8 = 16;

/// A connection to another host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CmConnection {
    pub(super) own: IpAddr,
    pub(super) peer: IpAddr,
    /// Local and remote communication ID; the remote ID is zero until it is known.
    pub(super) local_id: u32,
    pub(super) remote_id: u32,
    pub(super) transaction: u64,
    /// Transaction of the peer's last request.
    pub(super) peer_transaction: u64,
    /// Transaction of the peer's DREQ, once received.
    pub(super) dreq_transaction: Option<u64>,
    pub(super) service: u64,
    /// Remote queue pair number.
    pub(super) qpn: Qpn,
    /// The transport service, once a REQ has named it.
    pub(super) transport: Transport,
    /// Handshake state, which determines the message type in a REJ.
    pub(super) state: HandshakeState,
    /// The message that is retransmitted until it is answered.
    pub(super) pending: Option<Retransmission>,
    /// The reply to duplicates of the peer's last message.
    pub(super) answer: Option<[u8; millstream_wire::mad::LEN]>,
    /// Time at which a closed connection is removed; `None` while the link is open.
    pub(super) forget_at: Option<Instant>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HandshakeState {
    ReqSent,
    ReqRcvd,
    RepExchanged,
    Established,
    DreqSent,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Retransmission {
    pub(super) bytes: [u8; millstream_wire::mad::LEN],
    pub(super) again: Instant,
    pub(super) wait: Duration,
}

/// The result of a message on a known connection.
pub(super) enum Received {
    New(Message),
    /// A duplicate, which is answered again.
    Duplicate,
    Ignored,
}

impl CmConnection {
    /// The datagram of a message, and whether it is retransmitted until it is answered.
    pub(super) fn encode(&mut self, message: &Message, guid: u64) -> ([u8; millstream_wire::mad::LEN], bool) {
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
                self.transport = parameters.transport;
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
                // An XRC target has its number in another field, as in Linux.
                let none = Qpn::new(0);
                let (qpn, eecn) = match self.transport {
                    Transport::Xrc => (none, parameters.qpn),
                    Transport::Rc | Transport::Uc => (parameters.qpn, none),
                };
                let reply = Rep {
                    local_id,
                    remote_id,
                    qkey: Qkey::new(0),
                    qpn,
                    eecn,
                    psn: parameters.psn,
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
                    HandshakeState::RepExchanged | HandshakeState::Established | HandshakeState::DreqSent => {
                        MessageType::Rep
                    }
                    HandshakeState::ReqSent => MessageType::Other,
                };
                // The peer finds a request that it has not answered by its sender.
                let guid = guid.to_be_bytes();
                let additional: &[u8] = if self.state == HandshakeState::ReqSent { &guid } else { &[] };
                let refusal = cm::Message::Rej {
                    local_id,
                    remote_id,
                    message_type,
                    reason: (*reason).into(),
                    additional,
                    private,
                };
                (refusal.emit(self.peer_transaction), false)
            }
            Message::Dreq => {
                self.state = HandshakeState::DreqSent;
                let qpn = self.qpn;
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
                    qpn: *qpn,
                    service_id: self.service,
                    qkey: *qkey,
                    additional: &[],
                    private,
                };
                (reply.emit(self.peer_transaction), false)
            }
        }
    }

    fn request<'a>(
        &self,
        parameters: &ConnectionParameters,
        guid: u64,
        private: &'a [u8],
    ) -> cm::Message<'a> {
        cm::Message::Req(Req {
            local_id: self.local_id,
            service_id: self.service,
            ca_guid: guid,
            qkey: Qkey::new(0),
            qpn: parameters.qpn,
            responder_resources: parameters.responder_resources,
            initiator_depth: parameters.initiator_depth,
            remote_response_timeout: RESPONSE_TIMEOUT,
            local_response_timeout: RESPONSE_TIMEOUT,
            transport: parameters.transport,
            flow_control: parameters.flow_control != 0,
            psn: parameters.psn,
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

    /// Whether a message has the communication ID of the other end, once that is known. A host that does not know the connection
    /// has none for it: its DREP has 0, and its REJ of a message that establishes one.
    pub(super) fn is_from_peer(&self, message: &cm::Message<'_>) -> bool {
        let (sender, may_be_unknown) = match message {
            cm::Message::Rtu { local_id, .. }
            | cm::Message::Dreq { local_id, .. }
            | cm::Message::Mra { local_id, .. } => (*local_id, false),
            cm::Message::Drep { local_id, .. } => (*local_id, true),
            cm::Message::Rej { local_id, .. } => (*local_id, self.state != HandshakeState::Established),
            _ => return true,
        };
        self.remote_id == 0 || sender == self.remote_id || may_be_unknown && sender == 0
    }

    pub(super) fn handle_message(
        &mut self,
        transaction: u64,
        message: &cm::Message<'_>,
        now: Instant,
    ) -> Received {
        match message {
            cm::Message::Rep(reply) => {
                // A request that was withdrawn is answered by its REJ.
                if self.state != HandshakeState::ReqSent || self.forget_at.is_some() {
                    return Received::Duplicate;
                }
                let parameters = parameters_of_rep(reply, self.transport);
                (self.remote_id, self.qpn) = (reply.local_id, parameters.qpn);
                self.state = HandshakeState::RepExchanged;
                (self.pending, self.peer_transaction) = (None, transaction);
                Received::New(Message::Rep(parameters))
            }
            // A late RTU or REJ does not answer a DREQ, which is repeated until its DREP.
            cm::Message::Rtu { .. }
                if self.state == HandshakeState::RepExchanged && self.answer.is_some() =>
            {
                self.state = HandshakeState::Established;
                (self.pending, self.answer) = (None, None);
                Received::New(Message::Rtu)
            }
            cm::Message::Rej { reason, private, .. } => {
                if self.state != HandshakeState::DreqSent {
                    self.pending = None;
                }
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
                // The REP was lost. The peer repeats it, because the REQ is repeated, and the DREQ.
                if self.state == HandshakeState::ReqSent && self.forget_at.is_none() {
                    return Received::Ignored;
                }
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
                    qpn: *qpn,
                    qkey: *qkey,
                    private: private.to_vec(),
                })
            }
            cm::Message::Rtu { .. } | cm::Message::Req(_) | cm::Message::SidrReq { .. } => Received::Ignored,
        }
    }
}

pub(super) fn parameters_of_req(request: &Req<'_>, private: Vec<u8>) -> ConnectionParameters {
    ConnectionParameters {
        qpn: request.qpn,
        psn: request.psn,
        responder_resources: request.responder_resources,
        initiator_depth: request.initiator_depth,
        flow_control: request.flow_control.into(),
        retry_count: request.retry_count,
        rnr_retry_count: request.rnr_retry_count,
        srq: request.srq.into(),
        timeout: request.path.ack_timeout,
        mtu: request.mtu,
        transport: request.transport,
        ece: [0; 2],
        private,
    }
}

fn parameters_of_rep(reply: &Rep<'_>, transport: Transport) -> ConnectionParameters {
    ConnectionParameters {
        qpn: if transport == Transport::Xrc { reply.eecn } else { reply.qpn },
        transport,
        psn: reply.psn,
        responder_resources: reply.responder_resources,
        initiator_depth: reply.initiator_depth,
        flow_control: reply.flow_control.into(),
        rnr_retry_count: reply.rnr_retry_count,
        srq: reply.srq.into(),
        private: reply.private.to_vec(),
        ..ConnectionParameters::default()
    }
}
