//! Lists of send requests, read in the caller's own layout.
//!
//! `ibv_post_send` gets a linked list, `ibv_wr_complete` a prepared batch, Rust callers a slice. [`Qp::post_list`]
//! takes any of them and copies no request that it can execute at once.
//!
//! [`Qp::post_list`]: super::Qp::post_list

use millstream_quantity::Rkey;

use super::QpType;
use crate::errno::{Errno, Result};
use crate::send_wr::SendWr;
use crate::types::Sge;

/// The fields of a send request with one scatter/gather element that an RDMA WRITE, an RDMA READ or a SEND uses.
#[derive(Clone, Copy, Debug)]
pub struct SingleSgeWr {
    /// The application's identifier of the request.
    pub wr_id: u64,
    /// `IBV_SEND_*`
    pub flags: u32,
    /// Local memory.
    pub sge: Sge,
    /// Remote memory. A SEND has none.
    pub remote_addr: u64,
    /// Key of the remote memory.
    pub rkey: Rkey,
}

/// A position in a list of send requests.
pub trait SendWrList: Copy {
    /// The opcode of the next request; None at the end.
    fn opcode(&self) -> Option<u32>;

    /// The next request, if it has this opcode and one element.
    fn single_sge(&self, opcode: u32) -> Option<SingleSgeWr>;

    /// Runs `work` on the next request, with all of its fields. The type of the queue pair determines which
    /// fields are set.
    ///
    /// # Errors
    /// EINVAL for a request that cannot be read, or at the end of the list.
    fn with_wr<R>(&self, qp_type: QpType, work: impl FnOnce(&SendWr<'_>) -> R) -> Result<R>;

    /// Called when the next request was accepted after [`with_wr`](Self::with_wr) and not executed by the fast path.
    fn accepted(&self) {}

    /// Moves on to the request after the next one.
    fn advance(&mut self);
}

/// The remaining requests of a slice.
#[derive(Clone, Copy)]
pub(super) struct WrSlice<'a>(pub(super) &'a [SendWr<'a>]);

impl SendWrList for WrSlice<'_> {
    #[inline(always)]
    fn opcode(&self) -> Option<u32> {
        Some(self.0.first()?.opcode)
    }

    #[inline(always)]
    fn single_sge(&self, opcode: u32) -> Option<SingleSgeWr> {
        let wr = self.0.first().filter(|wr| wr.opcode == opcode)?;
        let [sge] = wr.sges else { return None };
        let SendWr { wr_id, flags, remote_addr, rkey, .. } = *wr;
        Some(SingleSgeWr { wr_id, flags, sge: *sge, remote_addr, rkey })
    }

    #[inline(always)]
    fn with_wr<R>(&self, _: QpType, work: impl FnOnce(&SendWr<'_>) -> R) -> Result<R> {
        self.0.first().map(work).ok_or(Errno::INVAL)
    }

    #[inline(always)]
    fn advance(&mut self) {
        self.0 = self.0.split_first().map_or(&[], |(_, rest)| rest);
    }
}
