//! The messages as values.

use super::layout::{dreq, mra, pair, rej, rep, req, sidr_rep, sidr_req};
use super::private;
use crate::mad::{self, header};
use crate::{Error, Result};
use millstream_quantity::{Pkey, Psn, Qkey, Qpn};

/// The transport service of a connection (12.6.5, field "transport service type").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Extended reliable connection.
    Xrc,
}

/// About which message an MRA or REJ is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum About {
    /// The REQ.
    Req,
    /// The REP.
    Rep,
    /// Another one.
    Other,
}

impl About {
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
    /// The asker's LID; rdma_cm says 0xffff on Ethernet.
    pub local_lid: u16,
    /// The other's.
    pub remote_lid: u16,
    /// The asker's GID.
    pub local_gid: u128,
    /// The other's.
    pub remote_gid: u128,
    /// Flow label: 20 bits.
    pub flow_label: u32,
    /// Code of the packet rate: 6 bits.
    pub packet_rate: u8,
    /// Traffic class.
    pub traffic_class: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Service level: 4 bits.
    pub service_level: u8,
    /// Whether both are in one subnet.
    pub subnet_local: bool,
    /// Code of the local ACK timeout: 5 bits.
    pub ack_timeout: u8,
}

/// Asks for a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Req<'a> {
    /// The asker's name for the connection.
    pub local_id: u32,
    /// What is asked for.
    pub service_id: u64,
    /// The asker's adapter.
    pub ca_guid: u64,
    /// The asker's key for datagrams.
    pub qkey: Qkey,
    /// The asker's queue pair.
    pub qpn: Qpn,
    /// READs and atomic operations that the asker takes at a time.
    pub responder_resources: u8,
    /// READs and atomic operations that the asker wants to send at a time.
    pub initiator_depth: u8,
    /// Code of the time within which the other side's manager should answer: 5 bits.
    pub remote_response_timeout: u8,
    /// Code of the time within which the asker's manager answers: 5 bits.
    pub local_response_timeout: u8,
    /// The transport service.
    pub transport: Transport,
    /// Whether the asker counts receive requests in acknowledgements.
    pub flow_control: bool,
    /// What the asker sends first.
    pub psn: Psn,
    /// How often the other side shall repeat what got no answer: 3 bits.
    pub retry_count: u8,
    /// How often after an RNR NAK: 3 bits.
    pub rnr_retry_count: u8,
    /// The partition.
    pub pkey: Pkey,
    /// Code of the path MTU: 1 to 5.
    pub mtu: u8,
    /// How often managers repeat messages: 4 bits.
    pub max_cm_retries: u8,
    /// Whether the asker receives from a shared queue.
    pub srq: bool,
    /// The way.
    pub path: Path,
    /// Up to [`private::REQ`] bytes; all of them when it was received.
    pub private: &'a [u8],
}

/// Agrees to a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rep<'a> {
    /// The sender's name for the connection.
    pub local_id: u32,
    /// The asker's.
    pub remote_id: u32,
    /// The sender's key for datagrams.
    pub qkey: Qkey,
    /// The sender's queue pair.
    pub qpn: Qpn,
    /// What the sender sends first.
    pub psn: Psn,
    /// READs and atomic operations that the sender takes at a time.
    pub responder_resources: u8,
    /// READs and atomic operations that the sender wants to send at a time.
    pub initiator_depth: u8,
    /// Code of the time that acknowledgements take: 5 bits.
    pub target_ack_delay: u8,
    /// What became of the alternate path: 2 bits, 0 accepted.
    pub failover: u8,
    /// Whether the sender counts receive requests in acknowledgements.
    pub flow_control: bool,
    /// How often the asker shall repeat after an RNR NAK: 3 bits.
    pub rnr_retry_count: u8,
    /// Whether the sender receives from a shared queue.
    pub srq: bool,
    /// The sender's adapter.
    pub ca_guid: u64,
    /// Up to [`private::REP`] bytes; all of them when it was received.
    pub private: &'a [u8],
}

/// What connection managers say. Private data is as long as a program gave it, at most that of its kind
/// ([`private`]); when it was received it has the full length, as nothing says where it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message<'a> {
    /// Asks for a connection.
    Req(Req<'a>),
    /// Will take longer.
    Mra {
        /// The sender's name for the connection.
        local_id: u32,
        /// The receiver's.
        remote_id: u32,
        /// What was received.
        about: About,
        /// Code of the time that it will take: 5 bits.
        service_timeout: u8,
        /// The program's.
        private: &'a [u8],
    },
    /// Refuses, or gives up.
    Rej {
        /// The sender's name for the connection; 0 if it has none.
        local_id: u32,
        /// The receiver's.
        remote_id: u32,
        /// What is refused.
        about: About,
        /// Why; see [`reason`](super::reason).
        reason: u16,
        /// More about that: up to 72 bytes.
        additional: &'a [u8],
        /// The program's.
        private: &'a [u8],
    },
    /// Agrees.
    Rep(Rep<'a>),
    /// Is ready.
    Rtu {
        /// The sender's name for the connection.
        local_id: u32,
        /// The receiver's.
        remote_id: u32,
        /// The program's.
        private: &'a [u8],
    },
    /// Wants to end a connection.
    Dreq {
        /// The sender's name for the connection.
        local_id: u32,
        /// The receiver's.
        remote_id: u32,
        /// The receiver's queue pair.
        remote_qpn: Qpn,
        /// The program's.
        private: &'a [u8],
    },
    /// Agrees to that.
    Drep {
        /// The sender's name for the connection.
        local_id: u32,
        /// The receiver's.
        remote_id: u32,
        /// The program's.
        private: &'a [u8],
    },
    /// Asks for a datagram service.
    SidrReq {
        /// The asker's name for the request.
        request_id: u32,
        /// The partition.
        pkey: Pkey,
        /// What is asked for.
        service_id: u64,
        /// The program's.
        private: &'a [u8],
    },
    /// Says where it is.
    SidrRep {
        /// The asker's name for the request.
        request_id: u32,
        /// Zero if there is such a service.
        status: u8,
        /// Its queue pair.
        qpn: Qpn,
        /// What was asked for.
        service_id: u64,
        /// The key that its queue pair asks for.
        qkey: Qkey,
        /// More about the status: up to 72 bytes.
        additional: &'a [u8],
        /// The program's.
        private: &'a [u8],
    },
}

/// Attribute numbers (12.6.4, table 98).
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
    /// From a management datagram; also the transaction that it belongs to.
    ///
    /// # Errors
    /// If it is shorter than one, is not about communication management, or has a field that means nothing.
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
                    about: About::from_bits(mra.byte_8() >> 6),
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
                    about: About::from_bits(rej.byte_8() >> 6),
                    reason: rej.reason(),
                    additional: &data[12..12 + len],
                    private,
                }
            }
            attribute::RTU => {
                let (rtu, private) = view!(pair);
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
                let (drep, private) = view!(pair);
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

    /// As a management datagram. Private data and additional information that are longer than their place are cut.
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
            Self::Mra { local_id, remote_id, about, service_timeout, .. } => emit!(
                mra,
                mra::Repr { local_id, remote_id, byte_8: about.bits() << 6, byte_9: service_timeout << 3 }
            ),
            Self::Rej { local_id, remote_id, about, reason, additional, .. } => {
                let (additional, len) = padded(additional);
                let (byte_8, byte_9) = (about.bits() << 6, len << 1);
                emit!(rej, rej::Repr { local_id, remote_id, byte_8, byte_9, reason, additional })
            }
            Self::Rtu { local_id, remote_id, .. } | Self::Drep { local_id, remote_id, .. } => {
                emit!(pair, pair::Repr { local_id, remote_id })
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

    /// Private data, and the most that its kind of message has.
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
        psn: rep.psn,
        responder_resources: rep.responder_resources,
        initiator_depth: rep.initiator_depth,
        byte_26: rep.target_ack_delay << 3 | (rep.failover & 3) << 1 | u8::from(rep.flow_control),
        byte_27: rep.rnr_retry_count << 5 | u8::from(rep.srq) << 4,
        ca_guid: rep.ca_guid,
    }
}
