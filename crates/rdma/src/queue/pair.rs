//! Connected queue pairs.

use std::fmt;
use std::io;
use std::ptr::NonNull;

use millstream_quantity::Qpn;
use rdma_mummy_sys::{
    ibv_modify_qp, ibv_post_recv, ibv_post_send, ibv_qp, ibv_qp_attr, ibv_qp_attr_mask, ibv_qp_state,
    ibv_recv_wr, ibv_send_flags, ibv_send_wr,
};
use sideway::ibverbs::queue_pair::{BasicQueuePair, QueuePair as _};

use super::list::{RecvList, SendList};
use super::request::{Operation, Signal, WrId, inline_element, recv_request, send_request};
use crate::memory::{RemoteAddress, Sge};

/// A work request was rejected.
#[derive(Debug, thiserror::Error)]
#[error("queue pair {qpn}: cannot post {what} (after {posted} accepted work requests): {cause}")]
pub struct PostError {
    /// The queue pair.
    pub qpn: Qpn,
    /// Kind of work request.
    pub what: &'static str,
    /// Work requests of the same list that were accepted before.
    pub posted: usize,
    /// The cause; `ENOMEM` if the queue is full.
    pub cause: io::Error,
}

impl PostError {
    /// Whether the queue was full. Polling completions makes room.
    pub fn is_full(&self) -> bool {
        self.cause.raw_os_error() == Some(libc::ENOMEM)
    }
}

/// A connected queue pair of the reliable service. Dropping it destroys the queue pair; outstanding work requests get no
/// completion.
///
/// Made by [`PreparedQueuePair::connect`](crate::connect::PreparedQueuePair::connect).
pub struct QueuePair {
    raw: NonNull<ibv_qp>,
    number: Qpn,
    peer: String,
    max_inline: u32,
    owner: BasicQueuePair,
}

// SAFETY: the verbs on a queue pair are thread-safe, and `owner` keeps the object that `raw` points to alive.
unsafe impl Send for QueuePair {}
// SAFETY: as above.
unsafe impl Sync for QueuePair {}

impl QueuePair {
    pub(crate) fn new(owner: BasicQueuePair, max_inline: u32) -> QueuePair {
        // SAFETY: kept together with its owner.
        let raw = unsafe { owner.qp() };
        QueuePair { raw, number: Qpn::new(owner.qp_number()), peer: String::new(), max_inline, owner }
    }

    pub(crate) fn owner_mut(&mut self) -> &mut BasicQueuePair {
        &mut self.owner
    }

    pub(crate) fn set_peer(&mut self, peer: String) {
        self.peer = peer;
    }

    /// Its queue pair number, which completions carry.
    pub fn qpn(&self) -> Qpn {
        self.number
    }

    /// The C queue pair, valid while this lives, for programs that build their own work requests.
    pub fn as_raw(&self) -> NonNull<ibv_qp> {
        self.raw
    }

    /// The peer, for error messages.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// Maximum inline data, in bytes.
    pub fn max_inline(&self) -> u32 {
        self.max_inline
    }

    /// Posts a SEND.
    ///
    /// # Errors
    /// [`PostError`] if the queue is full or the work request is invalid.
    #[inline]
    pub fn post_send(&self, from: &[Sge], signal: Signal, wr_id: WrId) -> Result<(), PostError> {
        self.post_one("a SEND", Operation::Send, from, signal, wr_id)
    }

    /// Posts a SEND with immediate data.
    ///
    /// # Errors
    /// As [`post_send`](QueuePair::post_send).
    #[inline]
    pub fn post_send_imm(
        &self,
        from: &[Sge],
        imm: u32,
        signal: Signal,
        wr_id: WrId,
    ) -> Result<(), PostError> {
        self.post_one("a SEND with immediate data", Operation::SendImm(imm), from, signal, wr_id)
    }

    /// Posts an inline SEND. The bytes are copied; their memory need not be registered.
    ///
    /// # Errors
    /// As [`post_send`](QueuePair::post_send), also when there are more than
    /// [`max_inline`](QueuePair::max_inline) bytes.
    #[inline]
    pub fn post_send_inline(&self, bytes: &[u8], signal: Signal, wr_id: WrId) -> Result<(), PostError> {
        self.post_inline("an inline SEND", Operation::Send, bytes, signal, wr_id)
    }

    /// Posts an RDMA WRITE.
    ///
    /// # Errors
    /// As [`post_send`](QueuePair::post_send). An invalid remote key or address is reported by the completion.
    #[inline]
    pub fn post_write(
        &self,
        from: &[Sge],
        to: RemoteAddress,
        signal: Signal,
        wr_id: WrId,
    ) -> Result<(), PostError> {
        self.post_one("an RDMA WRITE", Operation::Write(to), from, signal, wr_id)
    }

    /// Posts an RDMA WRITE with immediate data, which consumes a receive of the peer.
    ///
    /// # Errors
    /// As [`post_write`](QueuePair::post_write).
    #[inline]
    pub fn post_write_imm(
        &self,
        from: &[Sge],
        to: RemoteAddress,
        imm: u32,
        signal: Signal,
        wr_id: WrId,
    ) -> Result<(), PostError> {
        self.post_one("an RDMA WRITE with immediate data", Operation::WriteImm(to, imm), from, signal, wr_id)
    }

    /// Posts an inline RDMA WRITE. The bytes are copied; their memory need not be registered.
    ///
    /// # Errors
    /// As [`post_write`](QueuePair::post_write), also when there are more than
    /// [`max_inline`](QueuePair::max_inline) bytes.
    #[inline]
    pub fn post_write_inline(
        &self,
        bytes: &[u8],
        to: RemoteAddress,
        signal: Signal,
        wr_id: WrId,
    ) -> Result<(), PostError> {
        self.post_inline("an inline RDMA WRITE", Operation::Write(to), bytes, signal, wr_id)
    }

    /// Posts an RDMA READ into local memory.
    ///
    /// # Errors
    /// As [`post_write`](QueuePair::post_write).
    #[inline]
    pub fn post_read(
        &self,
        to: &[Sge],
        from: RemoteAddress,
        signal: Signal,
        wr_id: WrId,
    ) -> Result<(), PostError> {
        self.post_one("an RDMA READ", Operation::Read(from), to, signal, wr_id)
    }

    /// Posts an atomic compare-and-swap of 8 bytes. The previous value is written to `previous`, 8 bytes.
    ///
    /// # Errors
    /// As [`post_write`](QueuePair::post_write).
    pub fn post_compare_swap(
        &self,
        previous: Sge,
        word: RemoteAddress,
        (compare, swap): (u64, u64),
        wr_id: WrId,
    ) -> Result<(), PostError> {
        let operation = Operation::CompareSwap(word, compare, swap);
        self.post_one("an atomic compare-and-swap", operation, &[previous], Signal::Yes, wr_id)
    }

    /// Posts an atomic fetch-and-add of 8 bytes. The previous value is written to `previous`, 8 bytes.
    ///
    /// # Errors
    /// As [`post_write`](QueuePair::post_write).
    pub fn post_fetch_add(
        &self,
        previous: Sge,
        word: RemoteAddress,
        add: u64,
        wr_id: WrId,
    ) -> Result<(), PostError> {
        let operation = Operation::FetchAdd(word, add);
        self.post_one("an atomic fetch-and-add", operation, &[previous], Signal::Yes, wr_id)
    }

    /// Posts a receive. Without elements it can only take immediate data.
    ///
    /// # Errors
    /// [`PostError`] if the queue is full or the work request is invalid.
    #[inline]
    pub fn post_recv(&self, to: &[Sge], wr_id: WrId) -> Result<(), PostError> {
        let mut request = recv_request(to, wr_id);
        self.post_recv_chain(&mut request).map_err(|(_, cause)| self.failed("a receive", 0, cause))
    }

    /// Posts all work requests of a list in order, and clears the list.
    ///
    /// # Errors
    /// [`PostError`] with the number of accepted work requests; the others are dropped.
    pub fn post_list(&self, list: &mut SendList) -> Result<(), PostError> {
        let first = list.link();
        let result = match first.is_null() {
            true => Ok(()),
            // SAFETY: `link` has pointed every request to its elements and its successor, which live in the
            // list.
            false => unsafe { self.post_chain(first) },
        };
        let result =
            result.map_err(|(bad, cause)| self.failed("a list of send requests", list.position(bad), cause));
        list.clear();
        result
    }

    /// Posts all receives of a list in order, and clears the list.
    ///
    /// # Errors
    /// [`PostError`] with the number of accepted receives; the others are dropped.
    pub fn post_recv_list(&self, list: &mut RecvList) -> Result<(), PostError> {
        let first = list.link();
        // SAFETY: `link` returned null or a request of the list, which outlives the call.
        let result = match unsafe { first.as_mut() } {
            None => Ok(()),
            Some(first) => self.post_recv_chain(first),
        };
        let result =
            result.map_err(|(bad, cause)| self.failed("a list of receives", list.position(bad), cause));
        list.clear();
        result
    }

    /// Moves the queue pair to the error state: outstanding work requests are flushed, and packets of the peer are rejected.
    ///
    /// # Errors
    /// The error of the device.
    pub fn shut_down(&self) -> io::Result<()> {
        // SAFETY: an attribute structure of plain data, in which all zeros are valid.
        let mut attributes: ibv_qp_attr = unsafe { std::mem::zeroed() };
        attributes.qp_state = ibv_qp_state::IBV_QPS_ERR;
        // SAFETY: `owner` keeps the queue pair alive.
        match unsafe {
            ibv_modify_qp(self.raw.as_ptr(), &mut attributes, ibv_qp_attr_mask::IBV_QP_STATE.0 as i32)
        } {
            0 => Ok(()),
            code => Err(os_error_of(code)),
        }
    }

    #[inline]
    fn post_one(
        &self,
        what: &'static str,
        operation: Operation,
        sges: &[Sge],
        signal: Signal,
        wr_id: WrId,
    ) -> Result<(), PostError> {
        let mut request = send_request(operation, sges, wr_id, signal);
        // SAFETY: one request without successor; its elements are borrowed for longer than the call.
        unsafe { self.post_chain(&mut request) }.map_err(|(_, cause)| self.failed(what, 0, cause))
    }

    #[inline]
    fn post_inline(
        &self,
        what: &'static str,
        operation: Operation,
        bytes: &[u8],
        signal: Signal,
        wr_id: WrId,
    ) -> Result<(), PostError> {
        let mut element = inline_element(bytes);
        let mut request = send_request(operation, &[], wr_id, signal);
        request.sg_list = &mut element;
        request.num_sge = 1;
        request.send_flags |= ibv_send_flags::IBV_SEND_INLINE.0;
        // SAFETY: one request without successor; its element and the bytes, which the device copies before
        // the call returns, are borrowed for longer than the call.
        unsafe { self.post_chain(&mut request) }.map_err(|(_, cause)| self.failed(what, 0, cause))
    }

    /// # Safety
    /// `first` starts a chain of requests whose elements are live; an inline request's elements name memory
    /// of this process that may be read.
    #[inline]
    unsafe fn post_chain(&self, first: *mut ibv_send_wr) -> Result<(), (*const ibv_send_wr, io::Error)> {
        let mut bad = std::ptr::null_mut();
        // SAFETY: `owner` keeps the queue pair alive; the caller guarantees the chain.
        match unsafe { ibv_post_send(self.raw.as_ptr(), first, &mut bad) } {
            0 => Ok(()),
            code => Err((bad, os_error_of(code))),
        }
    }

    #[inline]
    fn post_recv_chain(&self, first: &mut ibv_recv_wr) -> Result<(), (*const ibv_recv_wr, io::Error)> {
        let mut bad = std::ptr::null_mut();
        // SAFETY: `owner` keeps the queue pair alive; every request of the chain was made by `recv_request`
        // or linked by its list, with elements that live longer than the call.
        match unsafe { ibv_post_recv(self.raw.as_ptr(), first, &mut bad) } {
            0 => Ok(()),
            code => Err((bad, os_error_of(code))),
        }
    }

    #[cold]
    fn failed(&self, what: &'static str, posted: usize, cause: io::Error) -> PostError {
        PostError { qpn: self.number, what, posted, cause }
    }
}

/// Verbs return a positive error number; some providers return -1 and set `errno`.
#[cold]
fn os_error_of(code: i32) -> io::Error {
    if code > 0 { io::Error::from_raw_os_error(code) } else { io::Error::last_os_error() }
}

impl fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QueuePair({}, peer {:?})", self.number, self.peer)
    }
}
