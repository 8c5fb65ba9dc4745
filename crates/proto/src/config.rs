//! What a queue pair is set up with, in the words of the verbs' attributes.

use core::time::Duration;

use millstream_wire::icrc::Flow;
use millstream_wire::{Opcode, Pkey, Psn, Qpn};

/// The connected transport services.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    /// Reliable: exactly once, in order, or an error.
    Reliable,
    /// Unreliable: at most once, in order.
    Unreliable,
    /// The sending end of an extended reliable connection (annex A14): its requests name a shared receive queue.
    Initiator,
    /// The receiving end of one: it only answers.
    Target,
}

impl Service {
    /// Whether messages arrive or fail.
    #[inline]
    #[must_use]
    pub const fn is_reliable(self) -> bool {
        !matches!(self, Self::Unreliable)
    }

    /// As packets name it.
    #[inline]
    #[must_use]
    pub const fn on_the_wire(self) -> millstream_wire::Service {
        match self {
            Self::Reliable => millstream_wire::Service::Rc,
            Self::Unreliable => millstream_wire::Service::Uc,
            Self::Initiator | Self::Target => millstream_wire::Service::Xrc,
        }
    }

    /// What a packet of a reliable connection is called here. The machines plan in its opcodes, and only what the
    /// service offers, so there always is one.
    #[inline]
    pub(crate) fn carried(self, opcode: Opcode) -> Opcode {
        match self {
            Self::Reliable => opcode,
            other => opcode.on(other.on_the_wire()).expect("only what the service offers is planned"),
        }
    }
}

/// Payload of a packet that is not a message's last.
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
    /// All of them.
    pub const ALL: [Self; 5] = [Self::B256, Self::B512, Self::B1024, Self::B2048, Self::B4096];

    /// Bytes.
    #[inline]
    #[must_use]
    pub const fn bytes(self) -> u32 {
        self as u32
    }

    /// From the code of the verbs and of connection management: 1 for 256 to 5 for 4096.
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

    /// The largest one whose packets an interface carries whole: 40 bytes of IPv6, 8 of UDP and up to 32 of
    /// transport headers and ICRC come on top.
    #[must_use]
    pub fn within(interface: u32) -> Option<Self> {
        Self::ALL.into_iter().rev().find(|mtu| mtu.bytes() + 40 + 8 + 32 + 4 <= interface)
    }

    /// Packets of a message.
    #[inline]
    #[must_use]
    pub const fn packets(self, len: u32) -> u32 {
        if len == 0 { 1 } else { len.div_ceil(self.bytes()) }
    }
}

/// How many READs and atomic operations may be under way.
pub type RdAtomic = u8;

/// What a connected queue pair needs to receive (INIT to RTR).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Reliable or not.
    pub service: Service,
    /// Where own packets go: from own to the peer's address.
    pub flow: Flow,
    /// Own queue pair number.
    pub local_qp: Qpn,
    /// The peer's.
    pub remote_qp: Qpn,
    /// The partition.
    pub pkey: Pkey,
    /// Path MTU.
    pub mtu: Mtu,
    /// What the peer starts with (`rq_psn`).
    pub receive_psn: Psn,
    /// Whether peers may READ.
    pub remote_read: bool,
    /// Whether peers may WRITE.
    pub remote_write: bool,
    /// Whether peers may do atomic operations.
    pub remote_atomic: bool,
    /// READs and atomic operations of the peer at a time (`max_dest_rd_atomic`).
    pub max_dest_rd_atomic: RdAtomic,
    /// 5-bit code of the time that a peer shall wait after an RNR NAK (`min_rnr_timer`).
    pub min_rnr_timer: u8,
}

/// What it needs to send as well (RTR to RTS).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendConfig {
    /// What to start with (`sq_psn`).
    pub send_psn: Psn,
    /// Own READs and atomic operations at a time (`max_rd_atomic`).
    pub max_rd_atomic: RdAtomic,
    /// 5-bit code of the local ACK timeout (`timeout`).
    pub ack_timeout: u8,
    /// How often to try again without an answer: 0 to 7 (`retry_cnt`).
    pub retry_count: u8,
    /// How often to try again after an RNR NAK: 0 to 6, 7 for ever (`rnr_retry`).
    pub rnr_retry: u8,
    /// Packets that may be under way: what the receiver's socket takes. Answers to READs count.
    pub window: u32,
    /// When the last packets of a burst are not answered for this long, the last one is sent once more to learn
    /// what is missing, long before the ACK timeout. None: never, as adapters do.
    pub probe: Option<Duration>,
}

impl SendConfig {
    /// The most packets that may be under way: far fewer than half of all PSNs (9.7.1).
    pub const MAX_WINDOW: u32 = 1 << 20;
}
