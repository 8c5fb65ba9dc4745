//! Messages that open a connection to a card over the network. Each travels with the connection record of its
//! sender. All later communication is RDMA and [`Message`](crate::message::Message)s.

use crate::layout;
use crate::registers::{MAGIC, VERSION};

/// Immediate data of a doorbell of the DMA engine. Immediate data of a region's doorbell is the region.
pub const IMM_DMA: u32 = 16;

/// Immediate data of a change of the lease words or control registers.
pub const IMM_CONTROL: u32 = 32;

/// Size of a message (bytes).
pub const MESSAGE_BYTES: usize = crate::message::RawMessage::BYTES;

layout! {
    /// Sent by a client.
    pub struct ClientHello[16] {
        0 magic: u64 = "as in the registers";
        8 version: u32 = "as in the registers";
        12 role: u32 = "0: a host; 1: another card";
    }
}

layout! {
    /// Sent by a card.
    pub struct ServerHello[80] {
        0 magic: u64 = "as in the registers";
        8 version: u32 = "as in the registers";
        12 client: u32 = "id of the client, for the lease word";
        16 card: u64 = "`card_id`";
        24 bar0_addr: u64 = "address of BAR0";
        32 bar0_key: u32 = "key to read BAR0";
        36 lease_key: u32 = "key for atomic operations on the lease words";
        40 memory_bytes: u64 = "size of card memory (bytes)";
        48 bank_bytes: u64 = "size of a bank (bytes)";
        56 bank_count: u32 = "number of banks";
        60 region_count: u32 = "number of regions";
        64 capabilities: u64 = "as in the registers";
        72 bar2_bytes: u64 = "size of BAR2, the DMA window (bytes)";
    }
}

impl ClientHello {
    /// The hello of a host, or of another card.
    pub fn new(is_card: bool) -> ClientHello {
        ClientHello { magic: MAGIC, version: VERSION, role: is_card.into() }
    }

    /// Decodes a hello; none if the peer is not a compatible client.
    pub fn parse(bytes: &[u8]) -> Option<ClientHello> {
        let hello = ClientHello::from_bytes(bytes.try_into().ok()?);
        (hello.magic == MAGIC && hello.version == VERSION && hello.role <= 1).then_some(hello)
    }
}

impl ServerHello {
    /// Decodes a hello; none if the peer is not a compatible card.
    pub fn parse(bytes: &[u8]) -> Option<ServerHello> {
        let hello = ServerHello::from_bytes(bytes.try_into().ok()?);
        let is_compatible = hello.magic == MAGIC && hello.version == VERSION;
        let is_consistent = hello.bank_bytes.checked_mul(hello.bank_count.into()) == Some(hello.memory_bytes);
        (is_compatible && is_consistent && hello.memory_bytes != 0).then_some(hello)
    }
}
