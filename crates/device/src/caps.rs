//! Attributes and limits of the device, as `ibv_query_device` reports them.

use std::sync::OnceLock;

use millstream_shm::{fork, number_from_environment};

/// Vendor id: a locally administered OUI (`02-4D-53`). Some programs reject zero, and some apply tuning for
/// registered vendors.
pub const VENDOR_ID: u32 = 0x02_4d53;
/// Part id.
pub const VENDOR_PART_ID: u32 = 0x4d53;
/// Name of the device.
pub const DEVICE_NAME: &str = "mill0";
/// Longest message, bytes.
pub const MAX_MSG: u64 = 1 << 31;
/// Queue pairs in one process.
pub const MAX_QP: usize = 4096;
/// Attachments of queue pairs to multicast groups in one process.
pub const MAX_MULTICAST: usize = 1024;
/// Shared receive queues of XRC domains in one process.
pub const MAX_XRC_SRQ: usize = 4096;
/// Work requests in one queue.
pub const MAX_QP_WR: u32 = 32768;
/// Scatter/gather elements in one work request.
pub const MAX_SGE: u32 = 32;
/// Inline data in one work request, bytes: a page and the header of a message layer.
pub const MAX_INLINE: u32 = 4096 + 64;
/// Inline data that every queue pair accepts, bytes. Adapters have at least the room of a work queue entry.
const MIN_INLINE: u32 = 64;
/// Completion queues in one process.
pub const MAX_CQ: u32 = 65536;
/// Entries in one completion queue.
pub const MAX_CQE: u32 = millstream_lockfree::cq_ring::MAX_ENTRIES;
/// Memory regions in one process.
pub const MAX_MR: usize = 65536;
/// Memory windows in one process; windows and regions share one table.
pub const MAX_MW: usize = MAX_MR;
/// Device memory in one process, bytes.
pub const MAX_DM: u64 = 256 << 20;
/// Protection domains in one process.
pub const MAX_PD: u32 = 1 << 20;
/// Outstanding RDMA READs of one queue pair, as initiator or target.
pub const MAX_RD_ATOMIC: u8 = 128;

/// Memory bits of `device_cap_flags`: windows of type 1 (`IBV_DEVICE_MEM_WINDOW`) and type 2B
/// (`_MEM_WINDOW_TYPE_2B`), local and remote invalidation (`_MEM_MGT_EXTENSIONS`).
pub const MEMORY_CAPS: u32 = 1 << 17 | 1 << 21 | 1 << 24;
/// `IBV_DEVICE_ATOMIC_WRITE` in `device_cap_flags_ex`.
pub const ATOMIC_WRITE_CAP: u64 = 1 << 40;
/// `odp_caps.general_caps`: on-demand paging, including implicit regions.
pub const ODP_CAPS: u64 = 1 | 1 << 1;
/// `IBV_ODP_SUPPORT_*` of reliable connections: SEND, RECV, WRITE, READ, ATOMIC, SRQ_RECV.
pub const ODP_RC_CAPS: u32 = 0x3f;
/// `IBV_ODP_SUPPORT_*` of unreliable connections: SEND, RECV, WRITE, SRQ_RECV.
pub const ODP_UC_CAPS: u32 = 0x27;
/// `IBV_ODP_SUPPORT_*` of datagrams: SEND, RECV, SRQ_RECV.
pub const ODP_UD_CAPS: u32 = 0x23;

/// Inline data that a queue pair gets, bytes: at least what it was created with. A connected one gets [`MAX_INLINE`], or
/// `MILLSTREAM_INLINE` bytes: inline data is copied once, straight to the target, so a message layer like UCX sends a page
/// without a copy into a buffer of its own. Such layers take the room for the size of a message. It must not exceed
/// their segments (UCX: 8 KiB), nor the path MTU of datagrams.
pub(crate) fn granted_inline(asked: u32, is_connected: bool) -> u32 {
    static CONNECTED: OnceLock<u32> = OnceLock::new();
    let connected =
        || number_from_environment("MILLSTREAM_INLINE", "bytes", MAX_INLINE).clamp(MIN_INLINE, MAX_INLINE);
    asked.max(if is_connected { *fork::get_or_init(&CONNECTED, connected) } else { MIN_INLINE })
}
