//! Cards on the network: what a card with a verbs device of its own and the nodes that use it say to each
//! other. Everything after the connection is made is RDMA.

pub mod checkpoint;
pub mod control;
pub(crate) mod copies;
pub(crate) mod crowd;
pub mod info;
pub mod map;
pub(crate) mod port;
pub mod remote;

pub use map::RemoteMap;
pub use port::PortError;
pub use remote::{Held, LeaseToken, RemoteCard, RemoteError, RemoteErrorKind, RemoteOptions, Snapshot};

use crate::layout::layout;
use crate::registers::{MAGIC, VERSION};

/// Immediate data of a doorbell: the region, or one of the following.
pub const IMM_COPIES: u32 = 16;

/// Immediate data: look at the lease words and the control registers.
pub const IMM_CONTROL: u32 = 32;

/// Bytes that a card sends at most in a message.
pub const MESSAGE_BYTES: usize = crate::region::message::RawMessage::BYTES;

layout! {
    /// What a node sends along with its connection record.
    pub struct Visit[16] {
        0 magic: u64 = "as in the registers";
        8 version: u32 = "as in the registers";
        12 role: u32 = "0: a node; 1: another card";
    }
}

layout! {
    /// What a card sends along with its connection record.
    pub struct Greeting[80] {
        0 magic: u64 = "as in the registers";
        8 version: u32 = "as in the registers";
        12 node: u32 = "number of the node, to be written into the lease word";
        16 card: u64 = "`card_id`";
        24 bar0_addr: u64 = "address of BAR0";
        32 bar0_key: u32 = "key to read it";
        36 lease_key: u32 = "key for atomic operations on the lease words";
        40 memory_bytes: u64 = "size of card memory [bytes]";
        48 bank_bytes: u64 = "size of a bank [bytes]";
        56 bank_count: u32 = "number of banks";
        60 region_count: u32 = "number of regions";
        64 capabilities: u64 = "as in the registers";
        72 dma_bytes: u64 = "size of the DMA window, BAR2 [bytes]";
    }
}

impl Visit {
    /// Of a node, or of another card.
    pub fn of(card: bool) -> Visit {
        Visit { magic: MAGIC, version: VERSION, role: card.into() }
    }

    /// Reads what came along; nothing if it is no visit of this version.
    pub fn from_extra(extra: &[u8]) -> Option<Visit> {
        let visit = Visit::from_bytes(extra.try_into().ok()?);
        (visit.magic == MAGIC && visit.version == VERSION && visit.role <= 1).then_some(visit)
    }
}

impl Greeting {
    /// Reads what came along; nothing if it is no card of this version.
    pub fn from_extra(extra: &[u8]) -> Option<Greeting> {
        let greeting = Greeting::from_bytes(extra.try_into().ok()?);
        let known = greeting.magic == MAGIC && greeting.version == VERSION;
        let sound =
            greeting.bank_bytes.checked_mul(greeting.bank_count.into()) == Some(greeting.memory_bytes);
        (known && sound && greeting.memory_bytes != 0).then_some(greeting)
    }
}
