//! Connection management messages between hosts: management datagrams to queue pair 1 (IBTA volume 1, 13.4 for
//! their header, 12.6 and 12.11 for what follows; annex A11 for the addresses in front of private data).
//!
//! They say the same as [`Message`], and who speaks to whom besides: on one host that is what a link is for.

use std::net::IpAddr;

use crate::address::Address;
use crate::message::{Message, Parameters, private};

/// Bytes of every management datagram.
pub const LEN: usize = 256;

/// A message with its envelope.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mad {
    /// The same in a request, its repetitions and its answers.
    pub transaction: u64,
    /// The sender's name for the connection.
    pub from: u32,
    /// The receiver's name for it; zero as long as the sender does not know it.
    pub to: u32,
    /// What is said.
    pub said: Said,
}

/// What can be said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Said {
    /// As on a host.
    Message {
        /// The message.
        message: Message,
        /// What only some of them need.
        context: Context,
    },
    /// "Wait": the message came, and the answer takes its time (MRA).
    Wait {
        /// Code of how long.
        timeout: u8,
    },
}

/// What messages between hosts carry besides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Context {
    /// Port space, of requests.
    pub space: u16,
    /// Path MTU, of requests, as a code.
    pub mtu: u8,
    /// The transport, of requests: 0 reliable, 1 unreliable connection.
    pub service: u8,
    /// The sender's node, of requests and replies.
    pub guid: u64,
    /// The receiver's queue pair, of DREQs.
    pub qpn: u32,
    /// What a REJ refuses: 0 a REQ, 1 a REP, 2 neither.
    pub refuses: u8,
}

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

/// Base version 1, class 7 (communication management) version 2, method Send.
const HEADER: [u8; 4] = [1, 0x07, 2, 0x03];
/// Where the message begins.
const DATA: usize = 24;
/// Code of how long an answer may take: 4.096 µs · 2^20, 4.3 s.
const RESPONSE_TIMEOUT: u8 = 20;
/// How often messages are repeated.
const RETRIES: u8 = 15;
/// Local identifiers say nothing on Ethernet.
const PERMISSIVE_LID: u16 = 0xffff;
const PKEY: u16 = 0xffff;
const HOP_LIMIT: u8 = 64;
/// `IBV_RATE_100_GBPS`
const RATE: u8 = 16;
/// Bytes of the addresses in front of private data.
const ADDRESSES: usize = 36;

struct Data<'a>(&'a mut [u8; LEN]);

impl Data<'_> {
    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.0[DATA + at..DATA + at + bytes.len()].copy_from_slice(bytes);
    }

    fn word(&mut self, at: usize, value: u32) {
        self.put(at, &value.to_be_bytes());
    }

    /// The high 24 bits of a word.
    fn three(&mut self, at: usize, value: u32) {
        self.put(at, &value.to_be_bytes()[1..]);
    }

    fn private(&mut self, at: usize, private: &[u8], room: usize) {
        self.put(at, &private[..private.len().min(room)]);
    }

    /// Annex A11, A11.3: version 0.0, the IP version, the source port, both addresses.
    fn addresses(&mut self, at: usize, src: &Address, dst: &Address) {
        let version = if src.ip.is_ipv4() { 4 } else { 6 };
        self.put(at + 1, &[version << 4]);
        self.put(at + 2, &src.port.to_be_bytes());
        for (at, ip) in [(at + 4, src.ip), (at + 20, dst.ip)] {
            match ip {
                IpAddr::V4(ip) => self.put(at + 12, &ip.octets()),
                IpAddr::V6(ip) => self.put(at, &ip.octets()),
            }
        }
    }
}

struct View<'a>(&'a [u8; LEN]);

impl View<'_> {
    fn bytes<const N: usize>(&self, at: usize) -> [u8; N] {
        let mut bytes = [0; N];
        bytes.copy_from_slice(&self.0[DATA + at..DATA + at + N]);
        bytes
    }

    fn byte(&self, at: usize) -> u8 {
        self.0[DATA + at]
    }

    fn word(&self, at: usize) -> u32 {
        u32::from_be_bytes(self.bytes(at))
    }

    fn three(&self, at: usize) -> u32 {
        self.word(at) >> 8
    }

    fn long(&self, at: usize) -> u64 {
        u64::from_be_bytes(self.bytes(at))
    }

    fn private(&self, at: usize, room: usize) -> Vec<u8> {
        self.0[DATA + at..DATA + at + room].to_vec()
    }

    /// The two ends of a request. None unless its addresses are of a known version.
    fn addresses(&self, at: usize, service: u64) -> Option<(u16, Address, Address)> {
        let space = (service >> 16) as u16;
        let port = u16::from_be_bytes(self.bytes(at + 2));
        let ip = |at: usize| -> Option<IpAddr> {
            Some(match self.byte(at - at % 4) {
                _ if self.version(at) == 4 => IpAddr::from(self.bytes::<4>(at + 12)),
                _ => IpAddr::from(self.bytes::<16>(at)),
            })
        };
        let known = service >> 32 == 0 && self.byte(at) >> 4 == 0 && matches!(self.byte(at + 1) >> 4, 4 | 6);
        let _ = ip;
        let read = |from: usize| match self.byte(at + 1) >> 4 {
            4 => IpAddr::from(self.bytes::<4>(from + 12)),
            _ => IpAddr::from(self.bytes::<16>(from)),
        };
        known.then(|| {
            let src = Address { ip: read(at + 4), port, scope: 0 };
            (space, src, Address { ip: read(at + 20), port: service as u16, scope: 0 })
        })
    }
}
