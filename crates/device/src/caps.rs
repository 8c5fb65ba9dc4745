//! What the device offers. Only what is accepted is advertised.

/// Vendor id, a locally administered OUI (`02-4D-53`): nobody's, and not zero, which some programs take for
/// a device that did not answer. Programs tune themselves to known vendors, which we are not.
pub const VENDOR_ID: u32 = 0x02_4d53;
/// Part id.
pub const VENDOR_PART_ID: u32 = 0x4d53;
/// Name of the device.
pub const DEVICE_NAME: &str = "mill0";
/// Longest message, bytes.
pub const MAX_MSG: u64 = 1 << 31;
/// Queue pairs in one process.
pub const MAX_QP: usize = 4096;
/// Work requests in one queue.
pub const MAX_QP_WR: u32 = 32768;
/// Scatter/gather elements in one work request.
pub const MAX_SGE: u32 = 32;
/// Inline data in one work request, bytes.
pub const MAX_INLINE: u32 = 1024;
/// Completion queues in one process.
pub const MAX_CQ: u32 = 65536;
/// Entries in one completion queue.
pub const MAX_CQE: u32 = 1 << 22;
/// Memory regions in one process.
pub const MAX_MR: usize = 65536;
/// Protection domains in one process.
pub const MAX_PD: u32 = 1 << 20;
/// Outstanding RDMA READs of one queue pair, as initiator or target.
pub const MAX_RD_ATOMIC: u8 = 128;
