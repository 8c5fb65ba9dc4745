//! Queue pair attributes, named after those of the verbs.

use core::time::Duration;

use millstream_wire::icrc::Flow;
use millstream_wire::{Opcode, Pkey, Psn, Qpn};

/// Connected transport services.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    /// Reliable connection (RC).
    Rc,
    /// Unreliable connection (UC).
    Uc,
    /// XRC initiator (annex A14): sends requests, each for a shared receive queue that it names.
    XrcInitiator,
    /// XRC target: only responds.
    XrcTarget,
}

impl Service {
    /// Whether messages are acknowledged.
    #[inline]
    #[must_use]
    pub const fn is_reliable(self) -> bool {
        !matches!(self, Self::Uc)
    }

    /// The transport service in opcodes.
    #[inline]
    #[must_use]
    pub const fn wire_service(self) -> millstream_wire::Service {
        match self {
            Self::Rc => millstream_wire::Service::Rc,
            Self::Uc => millstream_wire::Service::Uc,
            Self::XrcInitiator | Self::XrcTarget => millstream_wire::Service::Xrc,
        }
    }

    /// Translates an RC opcode to this service. Only operations of the service are planned, so there always
    /// is one.
    #[inline]
    pub(crate) fn opcode_of(self, opcode: Opcode) -> Opcode {
        match self {
            Self::Rc => opcode,
            other => {
                opcode.with_service(other.wire_service()).expect("only what the service offers is planned")
            }
        }
    }
}

/// Path MTU: payload of each packet of a message but the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u16)]
pub enum Mtu {
    /// 256 bytes.
    B256 = 256,
    /// 512 bytes.
    B512 = 512,
    /// 1024 bytes.
    B1024 = 1024,
    /// 2048 bytes.
    B2048 = 2048,
    /// 4096 bytes.
    B4096 = 4096,
}

impl Mtu {
    /// All path MTUs.
    pub const ALL: [Self; 5] = [Self::B256, Self::B512, Self::B1024, Self::B2048, Self::B4096];

    /// The path MTU in bytes.
    #[inline]
    #[must_use]
    pub const fn bytes(self) -> u32 {
        self as u32
    }

    /// From the code of the verbs and of communication management: 1 (256) to 5 (4096).
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::B256),
            2 => Some(Self::B512),
            3 => Some(Self::B1024),
            4 => Some(Self::B2048),
            5 => Some(Self::B4096),
            _ => None,
        }
    }

    /// The largest path MTU whose packets fit the MTU of an interface. IPv6 and UDP headers take 48 bytes,
    /// transport headers up to 32, the ICRC 4.
    #[must_use]
    pub fn within(interface: u32) -> Option<Self> {
        Self::ALL.into_iter().rev().find(|mtu| mtu.bytes() + 40 + 8 + 32 + 4 <= interface)
    }

    /// Packets of a message of `len` bytes.
    #[inline]
    #[must_use]
    pub const fn packets(self, len: u32) -> u32 {
        if len == 0 { 1 } else { len.div_ceil(self.bytes()) }
    }
}

/// Number of outstanding READs and atomic operations.
pub type RdAtomic = u8;

/// Attributes of the transition from INIT to RTR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Transport service.
    pub service: Service,
    /// Addresses and ports of own packets.
    pub flow: Flow,
    /// Local queue pair number.
    pub local_qp: Qpn,
    /// Remote queue pair number.
    pub remote_qp: Qpn,
    /// Partition key.
    pub pkey: Pkey,
    /// Path MTU.
    pub mtu: Mtu,
    /// First PSN of the peer (`rq_psn`).
    pub receive_psn: Psn,
    /// Whether the peer may issue READs.
    pub remote_read: bool,
    /// Whether the peer may issue WRITEs.
    pub remote_write: bool,
    /// Whether the peer may issue atomic operations.
    pub remote_atomic: bool,
    /// Outstanding READs and atomic operations of the peer (`max_dest_rd_atomic`).
    pub max_dest_rd_atomic: RdAtomic,
    /// 5-bit code of the delay that an RNR NAK requests (`min_rnr_timer`).
    pub min_rnr_timer: u8,
}

/// Attributes that later transitions change: to RTS, and within SQD.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Changes {
    /// Addresses and ports of own packets.
    pub flow: Flow,
    /// As in [`Config`].
    pub max_dest_rd_atomic: RdAtomic,
    /// As in [`Config`].
    pub min_rnr_timer: u8,
    /// As in [`SendConfig`].
    pub max_rd_atomic: RdAtomic,
    /// As in [`SendConfig`].
    pub ack_timeout: u8,
    /// As in [`SendConfig`].
    pub retry_count: u8,
    /// As in [`SendConfig`].
    pub rnr_retry: u8,
}

/// Attributes of the transition from RTR to RTS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendConfig {
    /// First own PSN (`sq_psn`).
    pub send_psn: Psn,
    /// Own outstanding READs and atomic operations (`max_rd_atomic`).
    pub max_rd_atomic: RdAtomic,
    /// 5-bit local ACK timeout code (`timeout`).
    pub ack_timeout: u8,
    /// Retransmissions without a response: 0 to 7 (`retry_cnt`).
    pub retry_count: u8,
    /// Retransmissions after an RNR NAK: 0 to 6, 7 for infinite (`rnr_retry`).
    pub rnr_retry: u8,
    /// Packets in flight, READ responses included: the capacity of the receiver's socket.
    pub window: u32,
    /// Delay of the tail loss probe, which retransmits the last packet of a burst long before the ACK
    /// timeout. `None`: no probe, as in hardware.
    pub probe: Option<Duration>,
}

impl SendConfig {
    /// Upper bound of `window`, far below half of the PSN space (9.7.1).
    pub const MAX_WINDOW: u32 = 1 << 20;
}
