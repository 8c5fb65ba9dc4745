//! Extended queue pairs: creation with `ibv_create_qp_ex`, and the `ibv_wr_*` calls behind the pointers of
//! an `ibv_qp_ex`.
//!
//! `verbs.h` calls those pointers without a check, so none of them is NULL: a call for an operation that the
//! queue pair was not created for fails the batch, and `ibv_wr_complete` reports it.

use std::{ffi::c_int, slice};

use millstream_device::{
    qp::{SendOps, WrBatch},
    send_wr::SendWr,
    types::{
        Sge, WR_ATOMIC_CMP_AND_SWP, WR_ATOMIC_FETCH_AND_ADD, WR_ATOMIC_WRITE, WR_BIND_MW, WR_LOCAL_INV,
        WR_RDMA_READ, WR_RDMA_WRITE, WR_RDMA_WRITE_WITH_IMM, WR_SEND, WR_SEND_WITH_IMM, WR_SEND_WITH_INV,
    },
};
use millstream_lockfree::CancelGuard;
use millstream_quantity::{Rkey, Srqn};

use crate::{
    ah::AhObject,
    errno::{self, Errno},
    mw,
    qp::{self, QpObject},
    sys::*,
    xrc,
};

/// Attributes beyond those of `ibv_create_qp` that `verbs.h` names.
const KNOWN: u32 = IBV_QP_INIT_ATTR_PD
    | IBV_QP_INIT_ATTR_XRCD
    | IBV_QP_INIT_ATTR_CREATE_FLAGS
    | IBV_QP_INIT_ATTR_MAX_TSO_HEADER
    | IBV_QP_INIT_ATTR_IND_TABLE
    | IBV_QP_INIT_ATTR_RX_HASH
    | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;

/// Attributes that the device supports. The only creation flag among them blocks multicast loopback: the others
/// concern Ethernet frames and PCI writes.
const OFFERED: u32 = IBV_QP_INIT_ATTR_PD
    | IBV_QP_INIT_ATTR_XRCD
    | IBV_QP_INIT_ATTR_CREATE_FLAGS
    | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;

/// A new queue pair in state RESET; NULL and errno on failure.
pub(crate) unsafe extern "C" fn create_qp_ex(
    context: *mut ibv_context,
    init: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    let _uncancelled = CancelGuard::new();
    // SAFETY: the caller passes a struct whose fields are filled as far as `comp_mask` says.
    errno::pointer(unsafe { create(context, init) })
}

/// # Safety
/// `init` is filled as far as its mask says, with live objects.
unsafe fn create(context: *mut ibv_context, init: *mut ibv_qp_init_attr_ex) -> Result<*mut ibv_qp, Errno> {
    // SAFETY: fields that the mask does not name are not read. The struct starts with an
    // `ibv_qp_init_attr`, as `verbs.h` itself relies on.
    unsafe {
        let mask = (*init).comp_mask;
        if mask & !KNOWN != 0 {
            return Err(Errno::INVALID);
        }
        let flags = if mask & IBV_QP_INIT_ATTR_CREATE_FLAGS != 0 { (*init).create_flags } else { 0 };
        let no_loopback = flags == IBV_QP_CREATE_BLOCK_SELF_MCAST_LB && (*init).qp_type == IBV_QPT_UD;
        if mask & !OFFERED != 0 || (flags != 0 && !no_loopback) {
            return Err(Errno::UNSUPPORTED);
        }
        if (*init).qp_type == IBV_QPT_XRC_RECV {
            return xrc::create_receiver(context, &*init);
        }
        if mask & IBV_QP_INIT_ATTR_PD == 0 || (*init).pd.is_null() || (*(*init).pd).context != context {
            return Err(Errno::INVALID);
        }
        let operations =
            (mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS != 0).then(|| SendOps((*init).send_ops_flags));
        let made = qp::create((*init).pd, &mut *init.cast(), operations)?;
        if no_loopback {
            QpObject::of(made).inner.block_loopback();
        }
        Ok(made)
    }
}

/// A queue pair's struct with its `ibv_wr_*` calls.
pub(crate) fn interface(base: ibv_qp) -> ibv_qp_ex {
    ibv_qp_ex {
        qp_base: base,
        comp_mask: 0,
        wr_id: 0,
        wr_flags: 0,
        wr_atomic_cmp_swp: Some(wr_atomic_cmp_swp),
        wr_atomic_fetch_add: Some(wr_atomic_fetch_add),
        wr_bind_mw: Some(wr_bind_mw),
        wr_local_inv: Some(wr_local_inv),
        wr_rdma_read: Some(wr_rdma_read),
        wr_rdma_write: Some(wr_rdma_write),
        wr_rdma_write_imm: Some(wr_rdma_write_imm),
        wr_send: Some(wr_send),
        wr_send_imm: Some(wr_send_imm),
        wr_send_inv: Some(wr_send_inv),
        wr_send_tso: Some(wr_send_tso),
        wr_set_ud_addr: Some(wr_set_ud_addr),
        wr_set_xrc_srqn: Some(wr_set_xrc_srqn),
        wr_set_inline_data: Some(wr_set_inline_data),
        wr_set_inline_data_list: Some(wr_set_inline_data_list),
        wr_set_sge: Some(wr_set_sge),
        wr_set_sge_list: Some(wr_set_sge_list),
        wr_start: Some(wr_start),
        wr_complete: Some(wr_complete),
        wr_abort: Some(wr_abort),
        wr_atomic_write: Some(wr_atomic_write),
    }
}

/// Runs `work` on the batch that is being prepared.
///
/// # Safety
/// `qp` is an extended queue pair, alive, and the calling thread is between its `wr_start` and the end.
#[inline]
unsafe fn prepare(qp: *mut ibv_qp_ex, work: impl FnOnce(&mut WrBatch)) {
    // SAFETY: the caller vouches for both. A queue pair without the interface is never given to programs
    // as an `ibv_qp_ex`.
    unsafe {
        if let Some(wr_batch) = &QpObject::of(qp.cast()).wr_batch {
            wr_batch.with(work);
        }
    }
}

/// Begins a request with the `wr_id` and `wr_flags` that the program has set in the struct.
///
/// # Safety
/// As [`prepare`].
#[inline]
unsafe fn request(qp: *mut ibv_qp_ex, wr: SendWr<'static>) {
    // SAFETY: the caller vouches for the queue pair.
    unsafe {
        let (wr_id, flags) = ((*qp).wr_id, (*qp).wr_flags);
        prepare(qp, |batch| batch.request(SendWr { wr_id, flags, ..wr }));
    }
}

/// # Safety
/// As [`prepare`].
#[cold]
unsafe fn unsupported(qp: *mut ibv_qp_ex) {
    // SAFETY: the caller vouches for the queue pair.
    unsafe { prepare(qp, |batch| batch.fail(Errno::UNSUPPORTED.into())) };
}

/// Defines the calls that begin a request.
macro_rules! requests {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $kind:ty),*) => $wr:expr;)*) => { $(
        $(#[$doc])*
        unsafe extern "C" fn $name(qp: *mut ibv_qp_ex, $($arg: $kind),*) {
            // SAFETY: the caller passes a live queue pair, inside its critical section.
            unsafe { request(qp, $wr) };
        }
    )* };
}

requests! {
    /// SEND
    wr_send() => SendWr { opcode: WR_SEND, ..SendWr::default() };
    /// SEND with immediate data
    wr_send_imm(imm: __be32) => SendWr { opcode: WR_SEND_WITH_IMM, imm, ..SendWr::default() };
    /// RDMA WRITE
    wr_rdma_write(rkey: u32, remote_addr: u64) =>
        SendWr { opcode: WR_RDMA_WRITE, rkey: Rkey::new(rkey), remote_addr, ..SendWr::default() };
    /// RDMA WRITE with immediate data
    wr_rdma_write_imm(rkey: u32, remote_addr: u64, imm: __be32) =>
        SendWr { opcode: WR_RDMA_WRITE_WITH_IMM, rkey: Rkey::new(rkey), remote_addr, imm, ..SendWr::default() };
    /// RDMA READ
    wr_rdma_read(rkey: u32, remote_addr: u64) =>
        SendWr { opcode: WR_RDMA_READ, rkey: Rkey::new(rkey), remote_addr, ..SendWr::default() };
    /// Compare and swap
    wr_atomic_cmp_swp(rkey: u32, remote_addr: u64, compare: u64, swap: u64) =>
        SendWr {
            opcode: WR_ATOMIC_CMP_AND_SWP, rkey: Rkey::new(rkey), remote_addr, compare_add: compare, swap, ..SendWr::default()
        };
    /// Fetch and add
    wr_atomic_fetch_add(rkey: u32, remote_addr: u64, add: u64) =>
        SendWr { opcode: WR_ATOMIC_FETCH_AND_ADD, rkey: Rkey::new(rkey), remote_addr, compare_add: add, ..SendWr::default() };
    /// Local invalidation
    wr_local_inv(key: u32) => SendWr { opcode: WR_LOCAL_INV, imm: key, ..SendWr::default() };
    /// SEND with invalidation
    wr_send_inv(key: u32) => SendWr { opcode: WR_SEND_WITH_INV, imm: key, ..SendWr::default() };
}

/// Binding of a memory window of type 2, whose new key is in the struct at once, as with other devices.
unsafe extern "C" fn wr_bind_mw(
    qp: *mut ibv_qp_ex,
    window: *mut ibv_mw,
    rkey: u32,
    info: *const ibv_mw_bind_info,
) {
    // SAFETY: the caller passes a live queue pair, inside its critical section, an allocated window and a
    // readable struct.
    unsafe {
        request(qp, SendWr { opcode: WR_BIND_MW, ..SendWr::default() });
        prepare(qp, |batch| match mw::bind_type_2(window, &*info, rkey) {
            Ok(bind) => {
                batch.set_bind(bind);
                (*window).rkey = rkey;
            }
            Err(error) => batch.fail(error),
        });
    }
}

/// TCP segmentation offload: not supported.
unsafe extern "C" fn wr_send_tso(qp: *mut ibv_qp_ex, _header: *mut std::ffi::c_void, _len: u16, _mss: u16) {
    // SAFETY: the caller passes a live queue pair, inside its critical section.
    unsafe { unsupported(qp) };
}

/// ATOMIC WRITE of eight bytes, copied at once.
unsafe extern "C" fn wr_atomic_write(
    qp: *mut ibv_qp_ex,
    rkey: u32,
    remote_addr: u64,
    value: *const std::ffi::c_void,
) {
    // SAFETY: the caller passes a live queue pair, inside its critical section, and eight readable bytes.
    unsafe {
        request(
            qp,
            SendWr { opcode: WR_ATOMIC_WRITE, rkey: Rkey::new(rkey), remote_addr, ..SendWr::default() },
        );
        prepare(qp, |batch| batch.set_word(value.cast::<[u8; 8]>().read()));
    }
}

/// The shared receive queue of an XRC request.
unsafe extern "C" fn wr_set_xrc_srqn(qp: *mut ibv_qp_ex, number: u32) {
    // SAFETY: as above.
    unsafe { prepare(qp, |batch| batch.set_remote_srqn(Srqn::new(number))) };
}

/// The destination of the request's datagram.
unsafe extern "C" fn wr_set_ud_addr(qp: *mut ibv_qp_ex, ah: *mut ibv_ah, qpn: u32, qkey: u32) {
    // SAFETY: the caller passes a live queue pair, inside its critical section, and a live handle.
    unsafe {
        prepare(qp, |batch| match ah.is_null() {
            true => batch.fail(Errno::INVALID.into()),
            false => batch.set_destination(AhObject::destination(ah, qpn, qkey)),
        });
    }
}

/// The request's single element.
unsafe extern "C" fn wr_set_sge(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    // SAFETY: the caller passes a live queue pair, inside its critical section.
    unsafe { prepare(qp, |batch| batch.set_elements(&[Sge { addr, length, lkey }])) };
}

/// The request's elements.
unsafe extern "C" fn wr_set_sge_list(qp: *mut ibv_qp_ex, count: usize, list: *const ibv_sge) {
    // SAFETY: the caller passes a live queue pair, inside its critical section, and an array of that length;
    // the types are laid out alike.
    unsafe {
        let elements = if count == 0 { &[] } else { slice::from_raw_parts(list.cast::<Sge>(), count) };
        prepare(qp, |batch| batch.set_elements(elements));
    }
}

/// The request's inline data, copied at once.
unsafe extern "C" fn wr_set_inline_data(qp: *mut ibv_qp_ex, addr: *mut std::ffi::c_void, length: usize) {
    let piece = ibv_data_buf { addr, length };
    // SAFETY: the caller passes a live queue pair, inside its critical section, and readable data.
    unsafe { wr_set_inline_data_list(qp, 1, &raw const piece) };
}

/// The request's inline data in several pieces, copied at once.
unsafe extern "C" fn wr_set_inline_data_list(qp: *mut ibv_qp_ex, count: usize, list: *const ibv_data_buf) {
    // SAFETY: the caller passes a live queue pair, inside its critical section, and an array of that many
    // readable pieces.
    unsafe {
        let pieces = if count == 0 { &[] } else { slice::from_raw_parts(list, count) };
        let pieces = pieces.iter().map(|piece| match piece.length {
            0 => &[][..],
            _ => slice::from_raw_parts(piece.addr.cast::<u8>().cast_const(), piece.length),
        });
        prepare(qp, |batch| batch.set_inline(pieces));
    }
}

/// Enters the critical section.
unsafe extern "C" fn wr_start(qp: *mut ibv_qp_ex) {
    // SAFETY: the caller passes a live queue pair.
    if let Some(wr_batch) = unsafe { &QpObject::of(qp.cast()).wr_batch } {
        wr_batch.enter();
    }
}

/// Posts the prepared requests, all or none. Returns 0 or an error number.
unsafe extern "C" fn wr_complete(qp: *mut ibv_qp_ex) -> c_int {
    // SAFETY: the caller passes a live queue pair, inside its critical section.
    unsafe {
        let object = QpObject::of(qp.cast());
        let Some(wr_batch) = &object.wr_batch else { return errno::status(Err(Errno::UNSUPPORTED)) };
        errno::status(wr_batch.complete(&object.inner).map_err(Errno::from))
    }
}

/// Discards the prepared requests.
unsafe extern "C" fn wr_abort(qp: *mut ibv_qp_ex) {
    // SAFETY: the caller passes a live queue pair, inside its critical section.
    unsafe {
        if let Some(wr_batch) = &QpObject::of(qp.cast()).wr_batch {
            wr_batch.abort();
        }
    }
}
