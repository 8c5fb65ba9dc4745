//! Local operations: binding and invalidating memory windows (IBTA volume 1, 10.6.7).

use std::time::Instant;

use millstream_lockfree::barrier;

use super::Qp;
use super::send::SendQueue;
use super::transfer::{ExecError, UNRESPONSIVE, failed};
use crate::errno::Result as VerbsResult;
use crate::ipc::TIMEOUT;
use crate::mr::window::{MwBind, MwType};
use crate::send_wr::SendWr;
use crate::types::{WC_LOC_QP_OP_ERR, WC_MW_BIND_ERR, WR_BIND_MW, vendor};

impl Qp {
    /// Posts the binding of a window, which has the new key from then on.
    ///
    /// # Errors
    /// As [`Qp::post_send`]; EINVAL for a window of another domain, another window's key, or access flags
    /// that the window's type does not permit.
    pub fn post_bind(&self, wr_id: u64, flags: u32, bind: &MwBind) -> VerbsResult<()> {
        let wr = SendWr { wr_id, opcode: WR_BIND_MW, flags, bind: Some(bind), ..SendWr::default() };
        self.post_send(&wr)
    }

    /// Executes a request that concerns this process's own memory keys only.
    #[cold]
    pub(super) fn execute_local_op(&self, send: &SendQueue, wr: &SendWr<'_>) -> Result<(), ExecError> {
        match wr.bind {
            Some(bind) if wr.opcode == WR_BIND_MW => self.bind_window(bind),
            _ => self.invalidate_window(send, wr.imm),
        }
    }

    /// Executes such a request of a queue pair whose peer is reached by packets. Only the caller, which holds the
    /// send queue, accesses memory for it.
    #[cold]
    pub(super) fn execute_local_op_on_wire(&self, wr: &SendWr<'_>) -> Result<(), ExecError> {
        match wr.bind {
            Some(bind) if wr.opcode == WR_BIND_MW => self.bind_window(bind),
            _ => {
                let done = self.adapter.mrs.invalidate(wr.imm, self.qpn);
                done.map_err(|cause| failed(WC_LOC_QP_OP_ERR, cause))
            }
        }
    }

    fn bind_window(&self, bind: &MwBind) -> Result<(), ExecError> {
        let (adapter, pd, kind) = (self.adapter, self.pd.id, bind.mw.kind());
        let refused = |cause| failed(WC_MW_BIND_ERR, cause);
        if bind.mw.is_deallocated() {
            return Err(refused(vendor::WINDOW));
        }
        // A bind that fails leaves the old binding as it is (IBTA volume 1, 11.2.8.2).
        adapter.mrs.check_bind(kind, pd, &bind.binding()).map_err(refused)?;
        if kind == MwType::Type2 {
            return adapter.mrs.bind(pd, &bind.binding(), Some(self.qpn)).map_err(refused);
        }
        adapter.mrs.unbind(bind.key >> 16);
        // No peer accesses the window by its old key when the new one becomes valid.
        if !adapter.quiesce_peers() {
            return Err(UNRESPONSIVE);
        }
        if bind.len == 0 { Ok(()) } else { adapter.mrs.bind(pd, &bind.binding(), None).map_err(refused) }
    }

    /// Invalidates a window of type 2 of this queue pair. No other key can be invalidated (10.6.7.2.6).
    fn invalidate_window(&self, send: &SendQueue, key: u32) -> Result<(), ExecError> {
        let refused = |cause| failed(WC_LOC_QP_OP_ERR, cause);
        self.adapter.mrs.invalidate(key, self.qpn).map_err(refused)?;
        // Only the peer can have an operation in flight.
        barrier::heavy();
        let initiator = || Some(send.transport.initiator());
        if self.wait_while_inflight(Instant::now() + TIMEOUT, initiator) { Ok(()) } else { Err(UNRESPONSIVE) }
    }
}
