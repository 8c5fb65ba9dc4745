//! Extended completion queues: creation with `ibv_create_cq_ex`, and the functions behind the pointers of an
//! `ibv_cq_ex`, which read completions in place.

use std::ffi::c_int;

use millstream_lockfree::CancelGuard;

use crate::{
    cq::{self, CqObject, Options},
    errno::{self, Errno},
    pd::PdObject,
    sys::*,
};

/// Fields of completions that `verbs.h` names.
const KNOWN_FIELDS: u32 = IBV_CREATE_CQ_SUP_WC_FLAGS;

/// Fields that this device supports: no VLANs, no flow tags, no tags.
const FIELDS: u32 = IBV_WC_STANDARD_FLAGS | TIMES;

const TIMES: u32 = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK;

/// A new completion queue; NULL and errno on failure.
pub(crate) unsafe extern "C" fn create_cq_ex(
    context: *mut ibv_context,
    init: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    let _uncancelled = CancelGuard::new();
    // SAFETY: the caller passes a struct whose fields are filled as far as `comp_mask` says.
    errno::pointer(unsafe { create(context, init) })
}

/// # Safety
/// `init` is filled as far as its mask says, with live objects.
unsafe fn create(context: *mut ibv_context, init: *mut ibv_cq_init_attr_ex) -> Result<*mut ibv_cq_ex, Errno> {
    // SAFETY: fields that the mask does not name are not read.
    unsafe {
        let (mask, fields) = ((*init).comp_mask, (*init).wc_flags);
        let flags = if mask & IBV_CQ_INIT_ATTR_MASK_FLAGS != 0 { (*init).flags } else { 0 };
        let known_flags = IBV_CREATE_CQ_ATTR_SINGLE_THREADED | IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;
        if mask & !(IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD) != 0
            || fields & !u64::from(KNOWN_FIELDS) != 0
            || flags & !known_flags != 0
        {
            return Err(Errno::INVALID);
        }
        // A single-threaded queue is locked as well: an uncontended lock is cheap.
        // IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN is refused: this device drops no completion silently.
        if fields & !u64::from(FIELDS) != 0 || flags & IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN != 0 {
            return Err(Errno::UNSUPPORTED);
        }
        let domain = if mask & IBV_CQ_INIT_ATTR_MASK_PD == 0 {
            None
        } else {
            let pd = (*init).parent_domain;
            if pd.is_null() || (*pd).context != context || !PdObject::of(pd).inner.is_parent() {
                return Err(Errno::INVALID);
            }
            Some(PdObject::of(pd).inner.clone())
        };
        let options = Options {
            domain,
            entries: (*init).cqe,
            cq_context: (*init).cq_context,
            channel: (*init).channel,
            vector: (*init).comp_vector,
            timed: fields & u64::from(TIMES) != 0,
        };
        cq::create(context, &options).map(<*mut ibv_cq>::cast)
    }
}

/// A completion queue's struct with its polling calls.
pub(crate) fn interface(base: ibv_cq) -> ibv_cq_ex {
    ibv_cq_ex {
        context: base.context,
        channel: base.channel,
        cq_context: base.cq_context,
        handle: base.handle,
        cqe: base.cqe,
        mutex: base.mutex,
        cond: base.cond,
        comp_events_completed: base.comp_events_completed,
        async_events_completed: base.async_events_completed,
        comp_mask: 0,
        status: IBV_WC_SUCCESS,
        wr_id: 0,
        start_poll: Some(start_poll),
        next_poll: Some(next_poll),
        end_poll: Some(end_poll),
        read_opcode: Some(read_opcode),
        read_vendor_err: Some(read_vendor_err),
        read_byte_len: Some(read_byte_len),
        read_imm_data: Some(read_imm_data),
        read_qp_num: Some(read_qp_num),
        read_src_qp: Some(read_src_qp),
        read_wc_flags: Some(read_wc_flags),
        read_slid: Some(read_slid),
        read_sl: Some(read_sl),
        read_dlid_path_bits: Some(read_dlid_path_bits),
        read_completion_ts: Some(read_completion_ts),
        read_cvlan: Some(read_cvlan),
        read_flow_tag: Some(read_flow_tag),
        read_tm_info: Some(read_tm_info),
        read_completion_wallclock_ns: Some(read_completion_wallclock_ns),
    }
}

/// Starts polling with the next completion. Returns 0, ENOENT if there is none, or another error number.
unsafe extern "C" fn start_poll(cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int {
    // SAFETY: the caller passes a live queue and a filled struct.
    unsafe {
        if attr.as_ref().is_some_and(|attr| attr.comp_mask != 0) {
            return libc::EINVAL;
        }
        let object = CqObject::of(cq.cast());
        show(cq, object, object.poller.start(&object.inner))
    }
}

/// Moves to the next completion. Returns 0, ENOENT if there is none, or another error number.
unsafe extern "C" fn next_poll(cq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: the caller passes a live queue that it has begun to poll.
    unsafe {
        let object = CqObject::of(cq.cast());
        show(cq, object, object.poller.next(&object.inner))
    }
}

/// Writes the fields that programs read without a call. An empty queue is not recorded as an error.
///
/// # Safety
/// The calling thread is inside the critical section if `result` is Ok.
#[inline]
unsafe fn show(cq: *mut ibv_cq_ex, object: &CqObject, result: millstream_device::Result<()>) -> c_int {
    match result {
        Ok(()) => {
            // SAFETY: the caller is inside, and no other thread writes these fields.
            unsafe { ((*cq).wr_id, (*cq).status) = object.poller.with(|now| (now.wc.wr_id, now.wc.status)) };
            0
        }
        Err(error) => error.0,
    }
}

/// Ends polling.
unsafe extern "C" fn end_poll(cq: *mut ibv_cq_ex) {
    // SAFETY: the caller passes a live queue that it has begun to poll.
    unsafe { CqObject::of(cq.cast()).poller.end() };
}

/// Defines the calls that read a field of the current completion.
macro_rules! fields {
    ($($(#[$doc:meta])* $name:ident -> $kind:ty = |$now:ident| $value:expr;)*) => { $(
        $(#[$doc])*
        unsafe extern "C" fn $name(cq: *mut ibv_cq_ex) -> $kind {
            // SAFETY: the caller passes a live queue and is between the start of polling and its end.
            unsafe { CqObject::of(cq.cast()).poller.with(|$now| $value) }
        }
    )* };
}

fields! {
    /// The operation.
    read_opcode -> ibv_wc_opcode = |now| now.wc.opcode;
    /// The cause of an error.
    read_vendor_err -> u32 = |now| now.wc.vendor_err;
    /// Bytes received.
    read_byte_len -> u32 = |now| now.wc.byte_len;
    /// Immediate data, or the invalidated key.
    read_imm_data -> __be32 = |now| now.wc.imm;
    /// The queue pair of the request.
    read_qp_num -> u32 = |now| now.wc.qp_num;
    /// The sender's queue pair.
    read_src_qp -> u32 = |now| now.wc.src_qp;
    /// `IBV_WC_*` flags.
    read_wc_flags -> std::ffi::c_uint = |now| now.wc.wc_flags;
    /// The sender's local identifier.
    read_slid -> u32 = |now| u32::from(now.wc.slid);
    /// Service level.
    read_sl -> u8 = |now| now.wc.sl;
    /// Path bits of the destination.
    read_dlid_path_bits -> u8 = |now| now.wc.dlid_path_bits;
    /// Time stamp of the device's clock.
    read_completion_ts -> u64 = |now| now.timestamp.0;
    /// Time stamp of the wall clock.
    read_completion_wallclock_ns -> u64 = |now| now.wall_time();
    /// Unused: no queue can be created with this field.
    read_cvlan -> u16 = |_now| 0;
    /// Unused: no queue can be created with this field.
    read_flow_tag -> u32 = |_now| 0;
}

/// Unused: no queue can be created with these fields.
unsafe extern "C" fn read_tm_info(_cq: *mut ibv_cq_ex, info: *mut ibv_wc_tm_info) {
    // SAFETY: the caller passes a writable struct.
    unsafe { info.write(ibv_wc_tm_info::default()) };
}
