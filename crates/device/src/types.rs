//! Completions, scatter/gather elements and constants of verbs, laid out as in `infiniband/verbs.h`.

/// One scatter/gather element.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sge {
    /// Address in the memory region's own address space.
    pub addr: u64,
    /// Bytes.
    pub length: u32,
    /// Key of the memory region.
    pub lkey: u32,
}

/// Sum of element lengths, in 64 bits: four 32-bit lengths can overflow 32.
#[inline]
#[must_use]
pub fn total_len(sges: &[Sge]) -> u64 {
    sges.iter().map(|s| u64::from(s.length)).sum()
}

/// Sum of element lengths, saturated to the 32 bits of a completion.
#[inline]
#[must_use]
pub(crate) fn recv_capacity(sges: &[Sge]) -> u32 {
    u32::try_from(total_len(sges)).unwrap_or(u32::MAX)
}

/// A work completion, laid out as `struct ibv_wc`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wc {
    /// The application's identifier of the request.
    pub wr_id: u64,
    /// `IBV_WC_*` status.
    pub status: u32,
    /// `IBV_WC_*` operation.
    pub opcode: u32,
    /// Cause of an error, one of [`vendor`].
    pub vendor_err: u32,
    /// Bytes received.
    pub byte_len: u32,
    /// Immediate data or the invalidated key.
    pub imm: u32,
    /// The request's queue pair.
    pub qp_num: u32,
    /// The sender's queue pair, for datagrams.
    pub src_qp: u32,
    /// `IBV_WC_GRH`, `IBV_WC_WITH_IMM`, …
    pub wc_flags: u32,
    /// Partition key index.
    pub pkey_index: u16,
    /// Source local identifier; zero on Ethernet.
    pub slid: u16,
    /// Service level.
    pub sl: u8,
    /// Path bits of the destination.
    pub dlid_path_bits: u8,
}

/// Causes in [`Wc::vendor_err`], defined by this device.
pub mod vendor {
    /// The peer's process has exited or its queue pair was destroyed.
    pub const PEER_GONE: u32 = 1;
    /// The peer did not become ready within the retry time.
    pub const PEER_NOT_READY: u32 = 2;
    /// No such remote key.
    pub const NO_KEY: u32 = 3;
    /// The remote range exceeds the memory region.
    pub const BOUNDS: u32 = 4;
    /// The memory region or queue pair does not allow this access.
    pub const PERMISSION: u32 = 5;
    /// The memory region belongs to another protection domain.
    pub const DOMAIN: u32 = 6;
    /// The kernel refused the copy between address spaces.
    pub const COPY: u32 = 7;
    /// The receiver's completion queue was full.
    pub const CQ_FULL: u32 = 8;
    /// The memory window is not in a state for this.
    pub const WINDOW: u32 = 9;
    /// The XRC domain has no such shared receive queue.
    pub const NO_QUEUE: u32 = 10;
    /// The peer sent a NAK.
    pub const REFUSED: u32 = 11;
}

macro_rules! constants {
    ($($(#[$meta:meta])* $name:ident = $value:expr;)*) => {
        $($(#[$meta])* pub const $name: u32 = $value;)*
    };
}

constants! {
    /// `IBV_WR_RDMA_WRITE`
    WR_RDMA_WRITE = 0;
    /// `IBV_WR_RDMA_WRITE_WITH_IMM`
    WR_RDMA_WRITE_WITH_IMM = 1;
    /// `IBV_WR_SEND`
    WR_SEND = 2;
    /// `IBV_WR_SEND_WITH_IMM`
    WR_SEND_WITH_IMM = 3;
    /// `IBV_WR_RDMA_READ`
    WR_RDMA_READ = 4;

    /// `IBV_WR_ATOMIC_CMP_AND_SWP`
    WR_ATOMIC_CMP_AND_SWP = 5;
    /// `IBV_WR_ATOMIC_FETCH_AND_ADD`
    WR_ATOMIC_FETCH_AND_ADD = 6;
    /// `IBV_WR_LOCAL_INV`
    WR_LOCAL_INV = 7;
    /// `IBV_WR_BIND_MW`
    WR_BIND_MW = 8;
    /// `IBV_WR_SEND_WITH_INV`
    WR_SEND_WITH_INV = 9;
    /// `IBV_WR_ATOMIC_WRITE`
    WR_ATOMIC_WRITE = 15;

    /// `IBV_SEND_FENCE`
    SEND_FENCE = 1;
    /// `IBV_SEND_SIGNALED`
    SEND_SIGNALED = 2;
    /// `IBV_SEND_SOLICITED`
    SEND_SOLICITED = 4;
    /// `IBV_SEND_INLINE`
    SEND_INLINE = 8;

    /// `IBV_WC_SUCCESS`
    WC_SUCCESS = 0;
    /// `IBV_WC_LOC_LEN_ERR`
    WC_LOC_LEN_ERR = 1;
    /// `IBV_WC_LOC_QP_OP_ERR`
    WC_LOC_QP_OP_ERR = 2;
    /// `IBV_WC_LOC_PROT_ERR`
    WC_LOC_PROT_ERR = 4;
    /// `IBV_WC_WR_FLUSH_ERR`
    WC_WR_FLUSH_ERR = 5;
    /// `IBV_WC_MW_BIND_ERR`
    WC_MW_BIND_ERR = 6;
    /// `IBV_WC_REM_INV_REQ_ERR`
    WC_REM_INV_REQ_ERR = 9;
    /// `IBV_WC_REM_ACCESS_ERR`
    WC_REM_ACCESS_ERR = 10;
    /// `IBV_WC_REM_OP_ERR`
    WC_REM_OP_ERR = 11;
    /// `IBV_WC_RETRY_EXC_ERR`
    WC_RETRY_EXC_ERR = 12;
    /// `IBV_WC_RNR_RETRY_EXC_ERR`
    WC_RNR_RETRY_EXC_ERR = 13;
    /// `IBV_WC_GENERAL_ERR`
    WC_GENERAL_ERR = 21;

    /// `IBV_WC_SEND`
    WC_OP_SEND = 0;
    /// `IBV_WC_RDMA_WRITE`
    WC_OP_RDMA_WRITE = 1;
    /// `IBV_WC_RDMA_READ`
    WC_OP_RDMA_READ = 2;
    /// `IBV_WC_COMP_SWAP`
    WC_OP_COMP_SWAP = 3;
    /// `IBV_WC_FETCH_ADD`
    WC_OP_FETCH_ADD = 4;
    /// `IBV_WC_BIND_MW`
    WC_OP_BIND_MW = 5;
    /// `IBV_WC_LOCAL_INV`
    WC_OP_LOCAL_INV = 6;
    /// `IBV_WC_ATOMIC_WRITE`
    WC_OP_ATOMIC_WRITE = 9;
    /// `IBV_WC_RECV`
    WC_OP_RECV = 128;
    /// `IBV_WC_RECV_RDMA_WITH_IMM`
    WC_OP_RECV_RDMA_WITH_IMM = 129;

    /// `IBV_WC_GRH`
    WC_FLAG_GRH = 1;
    /// `IBV_WC_WITH_IMM`
    WC_FLAG_WITH_IMM = 2;
    /// `IBV_WC_WITH_INV`
    WC_FLAG_WITH_INV = 8;

    /// `IBV_ACCESS_LOCAL_WRITE`
    ACCESS_LOCAL_WRITE = 1;
    /// `IBV_ACCESS_REMOTE_WRITE`
    ACCESS_REMOTE_WRITE = 2;
    /// `IBV_ACCESS_REMOTE_READ`
    ACCESS_REMOTE_READ = 4;
    /// `IBV_ACCESS_REMOTE_ATOMIC`
    ACCESS_REMOTE_ATOMIC = 8;
    /// `IBV_ACCESS_MW_BIND`
    ACCESS_MW_BIND = 16;
    /// `IBV_ACCESS_ZERO_BASED`
    ACCESS_ZERO_BASED = 32;
    /// `IBV_ACCESS_ON_DEMAND`
    ACCESS_ON_DEMAND = 64;
    /// `IBV_ACCESS_HUGETLB`
    ACCESS_HUGETLB = 128;
    /// Bits that a device may ignore (`IBV_ACCESS_OPTIONAL_RANGE`), such as relaxed ordering.
    ACCESS_OPTIONAL = 0x3ff << 20;
}

/// The opcode of a send request's completion.
#[must_use]
pub fn completion_opcode(opcode: u32) -> u32 {
    match opcode {
        WR_RDMA_WRITE | WR_RDMA_WRITE_WITH_IMM => WC_OP_RDMA_WRITE,
        WR_RDMA_READ => WC_OP_RDMA_READ,
        WR_ATOMIC_CMP_AND_SWP => WC_OP_COMP_SWAP,
        WR_ATOMIC_FETCH_AND_ADD => WC_OP_FETCH_ADD,
        WR_LOCAL_INV => WC_OP_LOCAL_INV,
        WR_BIND_MW => WC_OP_BIND_MW,
        WR_ATOMIC_WRITE => WC_OP_ATOMIC_WRITE,
        _ => WC_OP_SEND,
    }
}
