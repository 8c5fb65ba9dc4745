//! Messages between two processes about one connection (IBTA volume 1, 12.6 and 12.11).
//!
//! Each link carries one connection, so messages need no communication IDs, and a closed link reports a dead
//! peer. Integers are in host order: both processes are on one host.

use millstream_wire::cm::Transport;
use millstream_wire::{Psn, Qkey, Qpn};

use crate::address::{self, Address};

/// First byte of every message; changes with the format.
const VERSION: u8 = 4;
/// Longest message in bytes.
pub const MAX_LEN: usize = 512;

/// Private data of programs in each message, in bytes: the specification's length, less the 36 bytes of annex
/// A11 in requests.
pub mod private {
    /// REQ.
    pub const REQ: usize = 92 - 36;
    /// REP.
    pub const REP: usize = 196;
    /// REJ.
    pub const REJ: usize = 148;
    /// SIDR_REQ.
    pub const SIDR_REQ: usize = 216 - 36;
    /// SIDR_REP.
    pub const SIDR_REP: usize = 136;
}

/// Connection parameters that one side sends to the other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConnectionParameters {
    /// Queue pair number.
    pub qpn: Qpn,
    /// PSN with which the receiver of the message starts sending.
    pub psn: Psn,
    /// Inbound READs that the sender accepts at a time.
    pub responder_resources: u8,
    /// Outbound READs that the sender issues at a time.
    pub initiator_depth: u8,
    /// Whether the sender supports end-to-end flow control.
    pub flow_control: u8,
    /// Transport retry count for the receiver.
    pub retry_count: u8,
    /// RNR retry count for the receiver.
    pub rnr_retry_count: u8,
    /// Whether the queue pair uses a shared receive queue.
    pub srq: u8,
    /// ACK timeout code of the path.
    pub timeout: u8,
    /// Path MTU code; zero if unspecified.
    pub mtu: u8,
    /// The transport service.
    pub transport: Transport,
    /// Vendor ID and options of enhanced connection establishment.
    pub ece: [u32; 2],
    /// Private data.
    pub private: Vec<u8>,
}

/// A message of the connection protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// Connection request.
    Req {
        /// Address of the requester.
        src: Address,
        /// Address of the listener.
        dst: Address,
        /// ConnectionParameters of the requester.
        parameters: ConnectionParameters,
    },
    /// Connection reply.
    Rep(ConnectionParameters),
    /// Ready to use.
    Rtu,
    /// Rejects a request, or gives up.
    Rej {
        /// Rejection reason.
        reason: u8,
        /// Private data.
        private: Vec<u8>,
    },
    /// Disconnect request.
    Dreq,
    /// Disconnect reply.
    Drep,
    /// Request for a datagram service.
    SidrReq {
        /// Address of the requester.
        src: Address,
        /// Address of the listener.
        dst: Address,
        /// Private data.
        private: Vec<u8>,
    },
    /// Reply of a datagram service.
    SidrRep {
        /// Status; zero if the service exists.
        status: u8,
        /// Queue pair number of the service.
        qpn: Qpn,
        /// Q_Key of the service.
        qkey: Qkey,
        /// Private data.
        private: Vec<u8>,
    },
}

impl Message {
    /// Encodes the message.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut to = vec![VERSION];
        match self {
            Self::Req { src, dst, parameters } => {
                to.push(1);
                to.extend(src.encode());
                to.extend(dst.encode());
                parameters.encode(&mut to);
            }
            Self::Rep(parameters) => {
                to.push(2);
                parameters.encode(&mut to);
            }
            Self::Rtu => to.push(3),
            Self::Rej { reason, private } => {
                to.extend([4, *reason]);
                put_private(&mut to, private);
            }
            Self::Dreq => to.push(5),
            Self::Drep => to.push(6),
            Self::SidrReq { src, dst, private } => {
                to.push(7);
                to.extend(src.encode());
                to.extend(dst.encode());
                put_private(&mut to, private);
            }
            Self::SidrRep { status, qpn, qkey, private } => {
                to.extend([8, *status]);
                to.extend(qpn.get().to_ne_bytes());
                to.extend(qkey.get().to_ne_bytes());
                put_private(&mut to, private);
            }
        }
        to
    }

    /// Decodes a message; `None` unless the bytes are exactly one message.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut from = Reader(bytes);
        if from.byte()? != VERSION {
            return None;
        }
        let message = match from.byte()? {
            1 => Self::Req {
                src: from.address()?,
                dst: from.address()?,
                parameters: ConnectionParameters::decode(&mut from)?,
            },
            2 => Self::Rep(ConnectionParameters::decode(&mut from)?),
            3 => Self::Rtu,
            4 => Self::Rej { reason: from.byte()?, private: from.private()? },
            5 => Self::Dreq,
            6 => Self::Drep,
            7 => Self::SidrReq { src: from.address()?, dst: from.address()?, private: from.private()? },
            8 => Self::SidrRep {
                status: from.byte()?,
                qpn: Qpn::new(from.word()?),
                qkey: Qkey::new(from.word()?),
                private: from.private()?,
            },
            _ => return None,
        };
        from.0.is_empty().then_some(message)
    }
}

impl ConnectionParameters {
    fn encode(&self, to: &mut Vec<u8>) {
        for word in [self.qpn.get(), self.psn.get(), self.ece[0], self.ece[1]] {
            to.extend(word.to_ne_bytes());
        }
        to.extend([
            self.responder_resources,
            self.initiator_depth,
            self.flow_control,
            self.retry_count,
            self.rnr_retry_count,
            self.srq,
            self.timeout,
            self.mtu,
            transport_code(self.transport),
        ]);
        put_private(to, &self.private);
    }

    fn decode(from: &mut Reader<'_>) -> Option<Self> {
        Some(Self {
            qpn: Qpn::new(from.word()?),
            psn: Psn::new(from.word()?),
            ece: [from.word()?, from.word()?],
            responder_resources: from.byte()?,
            initiator_depth: from.byte()?,
            flow_control: from.byte()?,
            retry_count: from.byte()? & 7,
            rnr_retry_count: from.byte()? & 7,
            srq: from.byte()?,
            timeout: from.byte()? & 31,
            mtu: from.byte()? & 7,
            transport: transport_of(from.byte()?)?,
            private: from.private()?,
        })
    }
}

fn transport_code(transport: Transport) -> u8 {
    match transport {
        Transport::Rc => 0,
        Transport::Uc => 1,
        Transport::Xrc => 2,
    }
}

fn transport_of(code: u8) -> Option<Transport> {
    [Transport::Rc, Transport::Uc, Transport::Xrc].into_iter().find(|other| transport_code(*other) == code)
}

fn put_private(to: &mut Vec<u8>, private: &[u8]) {
    // The length was checked when the program passed the data.
    to.push(private.len() as u8);
    to.extend(private);
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*first)
    }

    fn word(&mut self) -> Option<u32> {
        self.array().map(u32::from_ne_bytes)
    }

    fn address(&mut self) -> Option<Address> {
        let bytes: [u8; address::LEN] = self.array()?;
        Address::parse(&bytes).ok()
    }

    fn private(&mut self) -> Option<Vec<u8>> {
        let len = usize::from(self.byte()?);
        let (private, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(private.to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<Message> {
        let src = Address { ip: "127.0.0.1".parse().unwrap(), port: 40000, scope: 0 };
        let dst = Address { ip: "::1".parse().unwrap(), port: 7471, scope: 0 };
        let parameters = ConnectionParameters {
            qpn: Qpn::new(0xabcdef),
            psn: Psn::new(0x123456),
            responder_resources: 1,
            initiator_depth: 2,
            flow_control: 1,
            retry_count: 7,
            rnr_retry_count: 6,
            srq: 1,
            timeout: 19,
            mtu: 3,
            transport: Transport::Xrc,
            ece: [3, 4],
            private: b"hello".to_vec(),
        };
        vec![
            Message::Req { src, dst, parameters: parameters.clone() },
            Message::Rep(ConnectionParameters { private: vec![9; private::REP], ..parameters }),
            Message::Rtu,
            Message::Rej { reason: 28, private: Vec::new() },
            Message::Dreq,
            Message::Drep,
            Message::SidrReq { src: dst, dst: src, private: vec![1; private::SIDR_REQ] },
            Message::SidrRep { status: 1, qpn: Qpn::new(5), qkey: Qkey::new(6), private: vec![2] },
        ]
    }

    #[test]
    fn messages_round_trip() {
        for message in all() {
            let bytes = message.encode();
            assert!(bytes.len() <= MAX_LEN);
            assert_eq!(Message::decode(&bytes), Some(message));
        }
    }

    #[test]
    fn truncated_and_extended_messages_are_rejected() {
        for message in all() {
            let mut bytes = message.encode();
            for len in 0..bytes.len() {
                assert_eq!(Message::decode(&bytes[..len]), None, "{message:?} cut to {len}");
            }
            bytes.push(0);
            assert_eq!(Message::decode(&bytes), None, "{message:?} and more");
        }
    }

    #[test]
    fn retry_counts_and_timeouts_are_truncated_to_their_width() {
        let parameters =
            ConnectionParameters { retry_count: 255, timeout: 255, ..ConnectionParameters::default() };
        let Some(Message::Rep(seen)) = Message::decode(&Message::Rep(parameters).encode()) else {
            panic!("no REP")
        };
        assert_eq!((seen.retry_count, seen.timeout), (7, 31));
    }
}
