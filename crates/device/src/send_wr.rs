//! Send work requests, with the fields of `struct ibv_send_wr`.

use millstream_quantity::{Qkey, Qpn, Rkey, Srqn};

use crate::mr::window::MwBind;
use crate::types::Sge;

/// A send work request. Fields that an operation does not use are ignored.
#[derive(Clone, Copy, Debug, Default)]
pub struct SendWr<'a> {
    /// The application's identifier of the request.
    pub wr_id: u64,
    /// `IBV_WR_*`.
    pub opcode: u32,
    /// `IBV_SEND_*` bits.
    pub flags: u32,
    /// Immediate data in network byte order, or the key to invalidate.
    pub imm: u32,
    /// Local memory; with [`SEND_INLINE`](crate::types::SEND_INLINE) the keys are ignored.
    pub sges: &'a [Sge],
    /// Start in the target's memory, for RDMA and atomics.
    pub remote_addr: u64,
    /// Key of the target's memory, for RDMA and atomics.
    pub rkey: Rkey,
    /// The value to compare with, or to add.
    pub compare_add: u64,
    /// The value to store if the comparison succeeds.
    pub swap: u64,
    /// Where a datagram goes.
    pub to: Option<UdDestination>,
    /// The binding of a memory window.
    pub bind: Option<&'a MwBind>,
    /// The shared receive queue that an XRC request names.
    pub remote_srqn: Srqn,
}

/// Where a datagram goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdDestination {
    /// Whether the address is one of this host's.
    pub on_this_host: bool,
    /// The queue pair.
    pub qpn: Qpn,
    /// The Q_Key that the datagram carries.
    pub qkey: Qkey,
    /// The global route header that the receiver will find in front of the data.
    pub grh: [u8; 40],
}
