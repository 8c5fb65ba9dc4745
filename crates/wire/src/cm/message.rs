//! Messages as values.

use super::layout::{comm_ids, dreq, mra, rej, rep, req, sidr_rep, sidr_req};
use super::{private, reason};
use crate::mad::{self, header};
use crate::{Error, Result};
use millstream_quantity::{Pkey, Psn, Qkey, Qpn};

/// The transport service of a connection (12.6.5, field "transport service type").
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// Reliable connection.
    #[default]
    Rc,
    /// Unreliable connection.
    Uc,
    /// Extended reliable connection.
    Xrc,
}

/// The message that an MRA acknowledges or a REJ rejects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageType {
    /// The REQ.
    Req,
    /// The REP.
    Rep,
    /// Any other message.
    Other,
}

impl MessageType {
    const fn from_bits(bits: u8) -> Self {
        match bits & 3 {
            0 => Self::Req,
            1 => Self::Rep,
            _ => Self::Other,
        }
    }

    const fn bits(self) -> u8 {
        match self {
            Self::Req => 0,
            Self::Rep => 1,
            Self::Other => 2,
        }
    }
}

/// The path that a REQ proposes. On RoCE, GIDs are IP addresses and there are no LIDs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path {
    /// Local LID; rdma_cm sends 0xffff on Ethernet.
    pub local_lid: u16,
    /// Remote LID.
    pub remote_lid: u16,
    /// Local GID.
    pub local_gid: u128,
    /// Remote GID.
    pub remote_gid: u128,
    /// Flow label: 20 bits.
    pub flow_label: u32,
    /// 6-bit packet rate code.
    pub packet_rate: u8,
    /// Traffic class.
    pub traffic_class: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Service level: 4 bits.
    pub service_level: u8,
    /// Whether both ends are in one subnet.
    pub subnet_local: bool,
    /// 5-bit local ACK timeout code.
    pub ack_timeout: u8,
}

/// Connection request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Req<'a> {
    /// Local communication ID.
    pub local_id: u32,
    /// Service ID.
    pub service_id: u64,
    /// Local CA GUID.
    pub ca_guid: u64,
    /// Local Q_Key.
    pub qkey: Qkey,
    /// Local queue pair number.
    pub qpn: Qpn,
    /// Inbound READs and atomic operations that the sender accepts at a time.
    pub responder_resources: u8,
    /// Outbound READs and atomic operations that the sender issues at a time.
    pub initiator_depth: u8,
    /// 5-bit code of the time in which the remote manager should answer.
    pub remote_response_timeout: u8,
    /// 5-bit code of the time in which the local manager answers.
    pub local_response_timeout: u8,
    /// The transport service.
    pub transport: Transport,
    /// Whether the sender counts receive requests in acknowledgements (end-to-end flow control).
    pub flow_control: bool,
    /// Starting PSN.
    pub psn: Psn,
    /// Retry count for the receiver: 3 bits.
    pub retry_count: u8,
    /// RNR retry count for the receiver: 3 bits.
    pub rnr_retry_count: u8,
    /// Partition key.
    pub pkey: Pkey,
    /// Path MTU code: 1 to 5.
    pub mtu: u8,
    /// Retransmissions of messages by managers: 4 bits.
    pub max_cm_retries: u8,
    /// Whether the queue pair uses a shared receive queue.
    pub srq: bool,
    /// The primary path.
    pub path: Path,
    /// Private data: up to [`private::REQ`] bytes, all of them in a received message.
    pub private: &'a [u8],
}

/// Connection reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rep<'a> {
    /// Local communication ID.
    pub local_id: u32,
    /// Communication ID of the requester.
    pub remote_id: u32,
    /// Local Q_Key.
    pub qkey: Qkey,
    /// Local queue pair number; zero for an XRC target.
    pub qpn: Qpn,
    /// Local end-to-end context number: the queue pair number of an XRC target.
    pub eecn: Qpn,
    /// Starting PSN.
    pub psn: Psn,
    /// Inbound READs and atomic operations that the sender accepts at a time.
    pub responder_resources: u8,
    /// Outbound READs and atomic operations that the sender issues at a time.
    pub initiator_depth: u8,
    /// 5-bit target ACK delay code.
    pub target_ack_delay: u8,
    /// Failover accepted: 2 bits, 0 if the alternate path was accepted.
    pub failover: u8,
    /// Whether the sender counts receive requests in acknowledgements (end-to-end flow control).
    pub flow_control: bool,
    /// RNR retry count for the requester: 3 bits.
    pub rnr_retry_count: u8,
    /// Whether the queue pair uses a shared receive queue.
    pub srq: bool,
    /// Local CA GUID.
    pub ca_guid: u64,
    /// Private data: up to [`private::REP`] bytes, all of them in a received message.
    pub private: &'a [u8],
}

/// A message of communication management. Private data to be sent has at most the length in [`private`];
/// received private data always has that length, because messages do not carry its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message<'a> {
    /// REQ: connection request.
    Req(Req<'a>),
    /// MRA: the sender needs longer to answer.
    Mra {
        /// Local communication ID.
        local_id: u32,
        /// Remote communication ID.
        remote_id: u32,
        /// The message that is acknowledged.
        message_type: MessageType,
        /// 5-bit service timeout code.
        service_timeout: u8,
        /// Private data of the program.
        private: &'a [u8],
    },
    /// REJ: rejects a message, or gives up.
    Rej {
        /// Local communication ID; 0 if the sender has none.
        local_id: u32,
        /// Remote communication ID.
        remote_id: u32,
        /// The message that is rejected.
        message_type: MessageType,
        /// Reason; see [`reason`](super::reason).
        reason: u16,
        /// Additional rejection information: up to 72 bytes.
        additional: &'a [u8],
        /// Private data of the program.
        private: &'a [u8],
    },
    /// REP: connection reply.
    Rep(Rep<'a>),
    /// RTU: ready to use.
    Rtu {
        /// Local communication ID.
        local_id: u32,
        /// Remote communication ID.
        remote_id: u32,
        /// Private data of the program.
        private: &'a [u8],
    },
    /// DREQ: request to end a connection.
    Dreq {
        /// Local communication ID.
        local_id: u32,
        /// Remote communication ID.
        remote_id: u32,
        /// Remote queue pair number.
        remote_qpn: Qpn,
        /// Private data of the program.
        private: &'a [u8],
    },
    /// DREP: reply to a DREQ.
    Drep {
        /// Local communication ID.
        local_id: u32,
        /// Remote communication ID.
        remote_id: u32,
        /// Private data of the program.
        private: &'a [u8],
    },
    /// SIDR_REQ: requests the queue pair of a datagram service.
    SidrReq {
        /// Request ID.
        request_id: u32,
        /// Partition key.
        pkey: Pkey,
        /// Service ID.
        service_id: u64,
        /// Private data of the program.
        private: &'a [u8],
    },
    /// SIDR_REP: the queue pair of a datagram service.
    SidrRep {
        /// Request ID.
        request_id: u32,
        /// Status; zero if the service exists.
        status: u8,
        /// Queue pair of the service.
        qpn: Qpn,
        /// Service ID of the request.
        service_id: u64,
        /// Q_Key of the service.
        qkey: Qkey,
        /// Additional information: up to 72 bytes.
        additional: &'a [u8],
        /// Private data of the program.
        private: &'a [u8],
    },
}

/// Attribute IDs (12.6.4, table 98).
mod attribute {
    pub(super) const REQ: u16 = 0x10;
    pub(super) const MRA: u16 = 0x11;
    pub(super) const REJ: u16 = 0x12;
    pub(super) const REP: u16 = 0x13;
    pub(super) const RTU: u16 = 0x14;
    pub(super) const DREQ: u16 = 0x15;
    pub(super) const DREP: u16 = 0x16;
    pub(super) const SIDR_REQ: u16 = 0x17;
    pub(super) const SIDR_REP: u16 = 0x18;
}

impl<'a> Message<'a> {
    /// The sender's communication ID, if it gives up a request that has no answer: it does not know the receiver's ID then.
    #[must_use]
    pub fn withdrawn_request(&self) -> Option<u32> {
        match self {
            Self::Rej { local_id, remote_id: 0, reason: reason::TIMEOUT, .. } => Some(*local_id),
            _ => None,
        }
    }

    /// Parses a management datagram into transaction ID and message.
    ///
    /// # Errors
    /// If it is truncated, belongs to another management class, or has an invalid field.
    pub fn parse(bytes: &'a [u8]) -> Result<(u64, Self)> {
        let (transaction, attribute) = mad::parse_communication(bytes)?;
        let data = &bytes[header::LEN..mad::LEN];
        macro_rules! view {
            ($name:ident) => {
                ($name::Packet::new_checked(data)?, &data[$name::LEN..])
            };
        }
        let message = match attribute {
            attribute::REQ => Self::Req(parse_req(data)?),
            attribute::REP => Self::Rep(parse_rep(data)?),
            attribute::MRA => {
                let (mra, private) = view!(mra);
                Self::Mra {
                    local_id: mra.local_id(),
                    remote_id: mra.remote_id(),
                    message_type: MessageType::from_bits(mra.byte_8() >> 6),
                    service_timeout: mra.byte_9() >> 3,
                    private,
                }
            }
            attribute::REJ => {
                let (rej, private) = view!(rej);
                let len = usize::from(rej.byte_9() >> 1).min(72);
                Self::Rej {
                    local_id: rej.local_id(),
                    remote_id: rej.remote_id(),
                    message_type: MessageType::from_bits(rej.byte_8() >> 6),
                    reason: rej.reason(),
                    additional: &data[12..12 + len],
                    private,
                }
            }
            attribute::RTU => {
                let (rtu, private) = view!(comm_ids);
                Self::Rtu { local_id: rtu.local_id(), remote_id: rtu.remote_id(), private }
            }
            attribute::DREQ => {
                let (dreq, private) = view!(dreq);
                Self::Dreq {
                    local_id: dreq.local_id(),
                    remote_id: dreq.remote_id(),
                    remote_qpn: dreq.remote_qpn(),
                    private,
                }
            }
            attribute::DREP => {
                let (drep, private) = view!(comm_ids);
                Self::Drep { local_id: drep.local_id(), remote_id: drep.remote_id(), private }
            }
            attribute::SIDR_REQ => {
                let (sidr, private) = view!(sidr_req);
                Self::SidrReq {
                    request_id: sidr.request_id(),
                    pkey: sidr.pkey(),
                    service_id: sidr.service_id(),
                    private,
                }
            }
            attribute::SIDR_REP => {
                let (sidr, private) = view!(sidr_rep);
                let len = usize::from(sidr.additional_len()).min(72);
                Self::SidrRep {
                    request_id: sidr.request_id(),
                    status: sidr.status(),
                    qpn: sidr.qpn(),
                    service_id: sidr.service_id(),
                    qkey: sidr.qkey(),
                    additional: &data[24..24 + len],
                    private,
                }
            }
            other => {
                return Err(Error::Field { header: "MAD", field: "attribute", value: other.into() });
            }
        };
        Ok((transaction, message))
    }

    /// Emits a management datagram. Private data and additional information beyond their field are cut off.
    #[must_use]
    pub fn emit(&self, transaction: u64) -> [u8; mad::LEN] {
        let mut bytes = [0; mad::LEN];
        let mad = mad::communication(transaction, self.attribute());
        mad.emit(&mut header::Packet::new_unchecked(&mut bytes[..]));
        let data = &mut bytes[header::LEN..];
        macro_rules! emit {
            ($name:ident, $repr:expr) => {{
                $repr.emit(&mut $name::Packet::new_unchecked(&mut *data));
                $name::LEN
            }};
        }
        let at = match *self {
            Self::Req(ref message) => emit!(req, req_repr(message)),
            Self::Rep(ref message) => emit!(rep, rep_repr(message)),
            Self::Mra { local_id, remote_id, message_type, service_timeout, .. } => emit!(
                mra,
                mra::Repr {
                    local_id,
                    remote_id,
                    byte_8: message_type.bits() << 6,
                    byte_9: service_timeout << 3
                }
            ),
            Self::Rej { local_id, remote_id, message_type, reason, additional, .. } => {
                let (additional, len) = padded(additional);
                let (byte_8, byte_9) = (message_type.bits() << 6, len << 1);
                emit!(rej, rej::Repr { local_id, remote_id, byte_8, byte_9, reason, additional })
            }
            Self::Rtu { local_id, remote_id, .. } | Self::Drep { local_id, remote_id, .. } => {
                emit!(comm_ids, comm_ids::Repr { local_id, remote_id })
            }
            Self::Dreq { local_id, remote_id, remote_qpn, .. } => {
                emit!(dreq, dreq::Repr { local_id, remote_id, remote_qpn })
            }
            Self::SidrReq { request_id, pkey, service_id, .. } => {
                emit!(sidr_req, sidr_req::Repr { request_id, pkey, service_id })
            }
            Self::SidrRep { request_id, status, qpn, service_id, qkey, additional, .. } => {
                let (additional, additional_len) = padded(additional);
                emit!(
                    sidr_rep,
                    sidr_rep::Repr { request_id, status, additional_len, qpn, service_id, qkey, additional }
                )
            }
        };
        let (private, room) = self.private();
        let len = private.len().min(room);
        data[at..at + len].copy_from_slice(&private[..len]);
        bytes
    }

    fn attribute(&self) -> u16 {
        match self {
            Self::Req(_) => attribute::REQ,
            Self::Mra { .. } => attribute::MRA,
            Self::Rej { .. } => attribute::REJ,
            Self::Rep(_) => attribute::REP,
            Self::Rtu { .. } => attribute::RTU,
            Self::Dreq { .. } => attribute::DREQ,
            Self::Drep { .. } => attribute::DREP,
            Self::SidrReq { .. } => attribute::SIDR_REQ,
            Self::SidrRep { .. } => attribute::SIDR_REP,
        }
    }

    /// The private data and the length of its field.
    fn private(&self) -> (&'a [u8], usize) {
        match *self {
            Self::Req(Req { private, .. }) => (private, private::REQ),
            Self::Mra { private, .. } => (private, private::MRA),
            Self::Rej { private, .. } => (private, private::REJ),
            Self::Rep(Rep { private, .. }) => (private, private::REP),
            Self::Rtu { private, .. } => (private, private::RTU),
            Self::Dreq { private, .. } => (private, private::DREQ),
            Self::Drep { private, .. } => (private, private::DREP),
            Self::SidrReq { private, .. } => (private, private::SIDR_REQ),
            Self::SidrRep { private, .. } => (private, private::SIDR_REP),
        }
    }
}

fn padded(additional: &[u8]) -> ([u8; 72], u8) {
    let len = additional.len().min(72);
    let mut bytes = [0; 72];
    bytes[..len].copy_from_slice(&additional[..len]);
    (bytes, len as u8)
}

fn parse_req(data: &[u8]) -> Result<Req<'_>> {
    let req = req::Packet::new_checked(data)?;
    let wrong = |field, value: u8| Error::Field { header: "REQ", field, value: value.into() };
    let transport = match ((req.byte_43() >> 1) & 3, req.byte_51() & 7) {
        (0, _) => Transport::Rc,
        (1, _) => Transport::Uc,
        (3, 1) => Transport::Xrc,
        (service, _) => return Err(wrong("transport service type", service)),
    };
    let mtu = req.byte_50() >> 4;
    if !(1..=5).contains(&mtu) {
        return Err(wrong("path packet payload MTU", mtu));
    }
    let bits = req.word_88();
    Ok(Req {
        local_id: req.local_id(),
        service_id: req.service_id(),
        ca_guid: req.ca_guid(),
        qkey: req.qkey(),
        qpn: req.qpn(),
        responder_resources: req.responder_resources(),
        initiator_depth: req.initiator_depth(),
        remote_response_timeout: req.byte_43() >> 3,
        local_response_timeout: req.byte_47() >> 3,
        transport,
        flow_control: req.byte_43() & 1 != 0,
        psn: req.psn(),
        retry_count: req.byte_47() & 7,
        rnr_retry_count: req.byte_50() & 7,
        pkey: req.pkey(),
        mtu,
        max_cm_retries: req.byte_51() >> 4,
        srq: req.byte_51() & 8 != 0,
        path: Path {
            local_lid: req.local_lid(),
            remote_lid: req.remote_lid(),
            local_gid: req.local_gid(),
            remote_gid: req.remote_gid(),
            flow_label: bits >> 12,
            packet_rate: (bits & 63) as u8,
            traffic_class: req.traffic_class(),
            hop_limit: req.hop_limit(),
            service_level: req.byte_94() >> 4,
            subnet_local: req.byte_94() & 8 != 0,
            ack_timeout: req.byte_95() >> 3,
        },
        private: &data[req::LEN..],
    })
}

fn req_repr(req: &Req<'_>) -> req::Repr {
    let (transport, extended) = match req.transport {
        Transport::Rc => (0, 0),
        Transport::Uc => (1, 0),
        Transport::Xrc => (3, 1),
    };
    let path = &req.path;
    req::Repr {
        local_id: req.local_id,
        service_id: req.service_id,
        ca_guid: req.ca_guid,
        qkey: req.qkey,
        qpn: req.qpn,
        responder_resources: req.responder_resources,
        initiator_depth: req.initiator_depth,
        byte_43: req.remote_response_timeout << 3 | transport << 1 | u8::from(req.flow_control),
        psn: req.psn,
        byte_47: req.local_response_timeout << 3 | req.retry_count & 7,
        pkey: req.pkey,
        byte_50: req.mtu << 4 | req.rnr_retry_count & 7,
        byte_51: req.max_cm_retries << 4 | u8::from(req.srq) << 3 | extended,
        local_lid: path.local_lid,
        remote_lid: path.remote_lid,
        local_gid: path.local_gid,
        remote_gid: path.remote_gid,
        word_88: path.flow_label << 12 | u32::from(path.packet_rate & 63),
        traffic_class: path.traffic_class,
        hop_limit: path.hop_limit,
        byte_94: path.service_level << 4 | u8::from(path.subnet_local) << 3,
        byte_95: path.ack_timeout << 3,
    }
}

fn parse_rep(data: &[u8]) -> Result<Rep<'_>> {
    let rep = rep::Packet::new_checked(data)?;
    Ok(Rep {
        local_id: rep.local_id(),
        remote_id: rep.remote_id(),
        qkey: rep.qkey(),
        qpn: rep.qpn(),
        eecn: rep.eecn(),
        psn: rep.psn(),
        responder_resources: rep.responder_resources(),
        initiator_depth: rep.initiator_depth(),
        target_ack_delay: rep.byte_26() >> 3,
        failover: (rep.byte_26() >> 1) & 3,
        flow_control: rep.byte_26() & 1 != 0,
        rnr_retry_count: rep.byte_27() >> 5,
        srq: rep.byte_27() & 16 != 0,
        ca_guid: rep.ca_guid(),
        private: &data[rep::LEN..],
    })
}

fn rep_repr(rep: &Rep<'_>) -> rep::Repr {
    rep::Repr {
        local_id: rep.local_id,
        remote_id: rep.remote_id,
        qkey: rep.qkey,
        qpn: rep.qpn,
        eecn: rep.eecn,
        psn: rep.psn,
        responder_resources: rep.responder_resources,
        initiator_depth: rep.initiator_depth,
        byte_26: rep.target_ack_delay << 3 | (rep.failover & 3) << 1 | u8::from(rep.flow_control),
        byte_27: rep.rnr_retry_count << 5 | u8::from(rep.srq) << 4,
        ca_guid: rep.ca_guid,
    }
}
