//! Completion queues and completions.

use std::fmt;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use millstream_quantity::Qpn;
use rdma_mummy_sys::{
    ibv_cq, ibv_poll_cq, ibv_wc, ibv_wc_flags, ibv_wc_opcode, ibv_wc_status,
    imm_data_invalidated_rkey_union_t,
};
use sideway::ibverbs::completion::{
    BasicCompletionQueue, CompletionChannel, CompletionQueue as _, CreateCompletionQueueErrorKind,
};

use super::request::WrId;
use crate::device::Device;
use crate::error::os_error;

/// Status of a completed work request (IBTA volume 1, 11.6.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Status {
    /// Success.
    Success,
    /// The receive is too small for the message, or the message exceeds the queue pair's limit.
    LocalLengthError,
    /// The work request is inconsistent.
    LocalQpOperationError,
    /// A local address or key does not permit the access.
    LocalProtectionError,
    /// The queue pair failed before it processed the work request.
    WorkRequestFlushedError,
    /// Binding a memory window failed.
    MemoryWindowBindError,
    /// The peer's response does not match the request.
    BadResponseError,
    /// Local memory could not be accessed for a WRITE with immediate data.
    LocalAccessError,
    /// The peer rejected the request as invalid.
    RemoteInvalidRequestError,
    /// The remote address or key does not permit the access.
    RemoteAccessError,
    /// The peer could not complete the operation.
    RemoteOperationError,
    /// The peer did not respond.
    TransportRetryCounterExceeded,
    /// The peer had no posted receive.
    RnrRetryCounterExceeded,
    /// The peer aborted the operation.
    RemoteAborted,
    /// The device failed.
    FatalError,
    /// A response timed out.
    ResponseTimeoutError,
    /// Other error of the device.
    GeneralError,
    /// Unknown status code.
    Other(u32),
}

impl Status {
    const NAMES: [(u32, Status, &'static str); 17] = [
        (ibv_wc_status::IBV_WC_SUCCESS, Status::Success, "success"),
        (ibv_wc_status::IBV_WC_LOC_LEN_ERR, Status::LocalLengthError, "local length error"),
        (ibv_wc_status::IBV_WC_LOC_QP_OP_ERR, Status::LocalQpOperationError, "local QP operation error"),
        (ibv_wc_status::IBV_WC_LOC_PROT_ERR, Status::LocalProtectionError, "local protection error"),
        (ibv_wc_status::IBV_WC_WR_FLUSH_ERR, Status::WorkRequestFlushedError, "work request flushed error"),
        (ibv_wc_status::IBV_WC_MW_BIND_ERR, Status::MemoryWindowBindError, "memory window bind error"),
        (ibv_wc_status::IBV_WC_BAD_RESP_ERR, Status::BadResponseError, "bad response error"),
        (ibv_wc_status::IBV_WC_LOC_ACCESS_ERR, Status::LocalAccessError, "local access error"),
        (
            ibv_wc_status::IBV_WC_REM_INV_REQ_ERR,
            Status::RemoteInvalidRequestError,
            "remote invalid request error",
        ),
        (ibv_wc_status::IBV_WC_REM_ACCESS_ERR, Status::RemoteAccessError, "remote access error"),
        (ibv_wc_status::IBV_WC_REM_OP_ERR, Status::RemoteOperationError, "remote operation error"),
        (
            ibv_wc_status::IBV_WC_RETRY_EXC_ERR,
            Status::TransportRetryCounterExceeded,
            "transport retry counter exceeded",
        ),
        (
            ibv_wc_status::IBV_WC_RNR_RETRY_EXC_ERR,
            Status::RnrRetryCounterExceeded,
            "RNR retry counter exceeded",
        ),
        (ibv_wc_status::IBV_WC_REM_ABORT_ERR, Status::RemoteAborted, "remote aborted"),
        (ibv_wc_status::IBV_WC_FATAL_ERR, Status::FatalError, "fatal error"),
        (ibv_wc_status::IBV_WC_RESP_TIMEOUT_ERR, Status::ResponseTimeoutError, "response timeout error"),
        (ibv_wc_status::IBV_WC_GENERAL_ERR, Status::GeneralError, "general error"),
    ];

    fn from_code(code: u32) -> Status {
        Self::NAMES
            .iter()
            .find(|(known, ..)| *known == code)
            .map_or(Status::Other(code), |(_, status, _)| *status)
    }

    /// Whether the peer is lost or unreachable, in contrast to an invalid request.
    pub fn is_peer_lost(self) -> bool {
        matches!(
            self,
            Status::TransportRetryCounterExceeded
                | Status::RnrRetryCounterExceeded
                | Status::ResponseTimeoutError
        )
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Self::NAMES.iter().find(|(_, status, _)| status == self) {
            Some((_, _, name)) => f.write_str(name),
            None => write!(f, "{self:?}"),
        }
    }
}

/// Operation of a completed work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Opcode {
    /// SEND.
    Send,
    /// RDMA WRITE, with or without immediate data.
    Write,
    /// RDMA READ.
    Read,
    /// Compare-and-swap.
    CompareSwap,
    /// Fetch-and-add.
    FetchAdd,
    /// Receive of a SEND.
    Receive,
    /// Receive of a WRITE's immediate data.
    ReceiveWriteImmediate,
    /// Unknown opcode.
    Other(u32),
}

impl Opcode {
    fn from_code(code: u32) -> Opcode {
        match code {
            ibv_wc_opcode::IBV_WC_SEND => Opcode::Send,
            ibv_wc_opcode::IBV_WC_RDMA_WRITE => Opcode::Write,
            ibv_wc_opcode::IBV_WC_RDMA_READ => Opcode::Read,
            ibv_wc_opcode::IBV_WC_COMP_SWAP => Opcode::CompareSwap,
            ibv_wc_opcode::IBV_WC_FETCH_ADD => Opcode::FetchAdd,
            ibv_wc_opcode::IBV_WC_RECV => Opcode::Receive,
            ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM => Opcode::ReceiveWriteImmediate,
            other => Opcode::Other(other),
        }
    }
}

/// A completion.
///
/// After a failure, only the work request id, the status and the queue pair number are valid; see [`Completion::check`].
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Completion(ibv_wc);

impl Completion {
    /// Fills the buffer for [`CompletionQueue::poll`].
    pub const EMPTY: Completion = Completion(ibv_wc {
        wr_id: 0,
        status: ibv_wc_status::IBV_WC_SUCCESS,
        opcode: ibv_wc_opcode::IBV_WC_SEND,
        vendor_err: 0,
        byte_len: 0,
        imm_data_invalidated_rkey_union: imm_data_invalidated_rkey_union_t { imm_data: 0 },
        qp_num: 0,
        src_qp: 0,
        wc_flags: 0,
        pkey_index: 0,
        slid: 0,
        sl: 0,
        dlid_path_bits: 0,
    });

    /// The work request id.
    #[inline]
    pub fn wr_id(&self) -> WrId {
        WrId(self.0.wr_id)
    }

    /// The status.
    #[inline]
    pub fn status(&self) -> Status {
        if self.is_success() { Status::Success } else { Status::from_code(self.0.status) }
    }

    /// Whether the status is success.
    #[inline]
    pub fn is_success(&self) -> bool {
        self.0.status == ibv_wc_status::IBV_WC_SUCCESS
    }

    /// The operation, if successful.
    #[inline]
    pub fn opcode(&self) -> Opcode {
        Opcode::from_code(self.0.opcode)
    }

    /// Bytes received, read, or written by the peer's WRITE with immediate data.
    #[inline]
    #[allow(clippy::len_without_is_empty, reason = "a completion is not a container")]
    pub fn len(&self) -> u32 {
        self.0.byte_len
    }

    /// Immediate data, in host order.
    #[inline]
    pub fn imm(&self) -> Option<u32> {
        let has = self.0.wc_flags & ibv_wc_flags::IBV_WC_WITH_IMM.0 != 0;
        // SAFETY: both variants of the union are 32 plain bits; the flag says that they are immediate data.
        has.then(|| u32::from_be(unsafe { self.0.imm_data_invalidated_rkey_union.imm_data }))
    }

    /// Number of the local queue pair.
    #[inline]
    pub fn qpn(&self) -> Qpn {
        Qpn::new(self.0.qp_num)
    }

    /// The error, unless the status is success.
    ///
    /// # Errors
    /// [`WorkError`] for any other status.
    #[inline]
    pub fn check(&self) -> Result<(), WorkError> {
        if self.is_success() {
            return Ok(());
        }
        Err(WorkError {
            status: self.status(),
            vendor_error: self.0.vendor_err,
            wr_id: self.wr_id(),
            qpn: self.qpn(),
        })
    }
}

impl fmt::Debug for Completion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut fields = f.debug_struct("Completion");
        fields.field("wr_id", &self.0.wr_id).field("status", &self.status()).field("qpn", &self.qpn());
        if self.is_success() {
            fields.field("opcode", &self.opcode()).field("len", &self.len()).field("imm", &self.imm());
        }
        fields.finish()
    }
}

/// A failed work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("work request {:#x} on queue pair {qpn}: {status} (vendor error {vendor_error:#x})", .wr_id.0)]
pub struct WorkError {
    /// The status.
    pub status: Status,
    /// The vendor's error code.
    pub vendor_error: u32,
    /// The work request id.
    pub wr_id: WrId,
    /// The queue pair number.
    pub qpn: Qpn,
}

/// Why a queue could not be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QueueError {
    /// An option exceeds the device's limit.
    #[error("RDMA device {device}: {field} = {value} is out of range: must be 1 to {limit}")]
    OutOfRange {
        /// The device.
        device: String,
        /// The option.
        field: &'static str,
        /// The value.
        value: u64,
        /// The device's limit.
        limit: u64,
    },
    /// The device refused.
    #[error("RDMA device {device}: cannot {what}: {cause}")]
    Call {
        /// The device.
        device: String,
        /// The operation.
        what: String,
        /// The cause.
        cause: io::Error,
    },
}

/// Polling a completion queue failed: it overran, or the device failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot poll a completion queue: {cause}")]
pub struct PollError {
    /// The cause.
    pub cause: io::Error,
}

/// A completion queue. Clones share it.
#[derive(Debug, Clone)]
pub struct CompletionQueue {
    raw: NonNull<ibv_cq>,
    depth: u32,
    queue: Arc<BasicCompletionQueue>,
}

// SAFETY: the verbs on a completion queue are thread-safe, and `queue` keeps the object that `raw` points to
// alive.
unsafe impl Send for CompletionQueue {}
// SAFETY: as above.
unsafe impl Sync for CompletionQueue {}

impl CompletionQueue {
    /// Creates a queue of `depth` entries for polling. [`CompletionWaiter::completion_queue`](crate::wait::CompletionWaiter::completion_queue)
    /// creates one that a thread can block on.
    ///
    /// # Errors
    /// [`QueueError`] if `depth` is 0 or beyond the device's limit, or the device refuses.
    pub fn new(device: &Device, depth: u32) -> Result<CompletionQueue, QueueError> {
        CompletionQueue::create(device, depth, None)
    }

    pub(crate) fn create(
        device: &Device,
        depth: u32,
        channel: Option<&Arc<CompletionChannel>>,
    ) -> Result<CompletionQueue, QueueError> {
        in_range(device, "completion queue depth", depth, device.limits().completions)?;
        let mut builder = device.context().create_cq_builder();
        builder.setup_cqe(depth);
        if let Some(channel) = channel {
            builder.setup_comp_channel(channel, 0);
        }
        let queue = builder.build().map_err(|error| QueueError::Call {
            device: device.name().to_owned(),
            what: format!("create a completion queue of depth {depth}"),
            cause: os_error!(error.0, CreateCompletionQueueErrorKind::Ibverbs),
        })?;
        // SAFETY: kept together with its owner.
        let raw = unsafe { queue.cq() };
        Ok(CompletionQueue { raw, depth, queue })
    }

    /// Number of entries. If more completions arrive, the queue and its queue pairs fail.
    pub fn depth(&self) -> u32 {
        self.depth
    }

    /// Takes up to `buffer.len()` completions, oldest first.
    ///
    /// # Errors
    /// [`PollError`] if the queue has failed.
    #[inline]
    pub fn poll<'b>(&self, buffer: &'b mut [Completion]) -> Result<&'b [Completion], PollError> {
        let room = i32::try_from(buffer.len()).unwrap_or(i32::MAX);
        // SAFETY: `queue` keeps the object alive; the buffer has room for `room` completions, whose type is
        // transparent.
        let taken = unsafe { ibv_poll_cq(self.raw.as_ptr(), room, buffer.as_mut_ptr().cast::<ibv_wc>()) };
        match usize::try_from(taken) {
            Ok(taken) => Ok(&buffer[..taken]),
            Err(_) => Err(poll_failed()),
        }
    }

    pub(crate) fn raw(&self) -> NonNull<ibv_cq> {
        self.raw
    }

    pub(crate) fn shared(&self) -> Arc<BasicCompletionQueue> {
        Arc::clone(&self.queue)
    }
}

/// Called directly after the call that failed: its value is no error number, and libraries need not set errno.
#[cold]
fn poll_failed() -> PollError {
    let cause = io::Error::last_os_error();
    let is_unset = cause.raw_os_error() == Some(0);
    PollError {
        cause: if is_unset {
            io::Error::other("the queue has overrun, or the device has failed")
        } else {
            cause
        },
    }
}

pub(crate) fn in_range(
    device: &Device,
    field: &'static str,
    value: u32,
    limit: u32,
) -> Result<(), QueueError> {
    if (1..=limit).contains(&value) {
        return Ok(());
    }
    Err(QueueError::OutOfRange {
        device: device.name().to_owned(),
        field,
        value: value.into(),
        limit: limit.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn completion(change: impl FnOnce(&mut ibv_wc)) -> Completion {
        let mut completion = Completion::EMPTY;
        change(&mut completion.0);
        completion
    }

    #[test]
    fn every_status_of_the_specification_has_its_own_name() {
        let mut names = std::collections::HashSet::new();
        for (code, status, name) in Status::NAMES {
            assert_eq!(Status::from_code(code), status);
            assert_eq!(status.to_string(), name);
            assert!(names.insert(name));
        }
        assert_eq!(Status::from_code(999), Status::Other(999));
        assert_eq!(Status::Other(999).to_string(), "Other(999)");
    }

    #[test]
    fn immediate_data_is_there_only_with_its_flag_and_in_host_order() {
        let with = completion(|wc| {
            wc.wc_flags = ibv_wc_flags::IBV_WC_WITH_IMM.0;
            wc.imm_data_invalidated_rkey_union.imm_data = 0x0102_0304u32.to_be();
            wc.opcode = ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM;
        });
        assert_eq!(with.imm(), Some(0x0102_0304));
        assert_eq!(with.opcode(), Opcode::ReceiveWriteImmediate);
        assert_eq!(Completion::EMPTY.imm(), None);
    }

    #[test]
    fn an_error_names_request_status_and_queue_pair() {
        let failed = completion(|wc| {
            wc.status = ibv_wc_status::IBV_WC_REM_ACCESS_ERR;
            wc.wr_id = 0x10;
            wc.qp_num = 0x2a;
            wc.vendor_err = 3;
        });
        let error = failed.check().unwrap_err();
        assert_eq!(error.status, Status::RemoteAccessError);
        assert_eq!(
            error.to_string(),
            "work request 0x10 on queue pair 0x00002a: remote access error (vendor error 0x3)"
        );
        assert!(Completion::EMPTY.check().is_ok());
        assert!(Status::TransportRetryCounterExceeded.is_peer_lost() && !error.status.is_peer_lost());
    }
}
