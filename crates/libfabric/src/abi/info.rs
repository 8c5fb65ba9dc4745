//! What the provider offers, and whether that is what a program asks for.

use std::ffi::{CStr, c_char};

use crate::sys;

pub(super) const FABRIC_NAME: &CStr = c"torus";
pub(super) const DOMAIN_NAME: &CStr = c"torus";
/// The provider's own format of addresses.
const ADDRESS_FORMAT: u32 = 1 << 31 | 0x4d53;
const PROTOCOL: u32 = 1 << 31 | 0x4d53;
/// Bytes that an operation copies at once, so that the application may reuse them.
pub(super) const INJECT: usize = 4096;
pub(super) const IOVECS: usize = 4;
const DEPTH: usize = 1024;
const MAX_MESSAGE: usize = 1 << 40;

const DIRECTIONS: u64 = sys::MS_FI_SEND
    | sys::MS_FI_RECV
    | sys::MS_FI_READ
    | sys::MS_FI_WRITE
    | sys::MS_FI_REMOTE_READ
    | sys::MS_FI_REMOTE_WRITE;
const PRIMARY: u64 = sys::MS_FI_MSG | sys::MS_FI_TAGGED | sys::MS_FI_RMA | sys::MS_FI_ATOMIC;
const LOCALITY: u64 = sys::MS_FI_LOCAL_COMM | sys::MS_FI_REMOTE_COMM;
const CAPABILITIES: u64 = PRIMARY | DIRECTIONS | LOCALITY | sys::MS_FI_DIRECTED_RECV | sys::MS_FI_SOURCE;
const OPERATION_FLAGS: u64 = sys::MS_FI_COMPLETION
    | sys::MS_FI_INJECT
    | sys::MS_FI_INJECT_COMPLETE
    | sys::MS_FI_TRANSMIT_COMPLETE
    | sys::MS_FI_DELIVERY_COMPLETE;

/// The part of the capabilities that asks for something that is always there.
fn granted(asked: u64) -> u64 {
    if asked == 0 {
        return CAPABILITIES;
    }
    let directions = if asked & DIRECTIONS == 0 { DIRECTIONS } else { 0 };
    asked | directions | LOCALITY
}

/// # Safety
/// `found` is null or a string.
unsafe fn names(found: *const c_char, name: &CStr) -> bool {
    // SAFETY: the caller's string.
    found.is_null() || unsafe { CStr::from_ptr(found) } == name
}

/// The provider's entry, or none if a hint excludes it.
///
/// # Safety
/// The hints and all that they point to are valid.
pub(super) unsafe fn matching(version: u32, hints: Option<&sys::fi_info>) -> Option<*mut sys::fi_info> {
    let none = sys::fi_info::default();
    let hints = hints.unwrap_or(&none);
    if hints.caps & !CAPABILITIES != 0 || ![0, ADDRESS_FORMAT].contains(&hints.addr_format) {
        return None;
    }
    let caps = granted(hints.caps);
    // SAFETY: the caller's hints.
    let (tx, rx, ep, domain, fabric) = unsafe {
        (
            hints.tx_attr.as_ref(),
            hints.rx_attr.as_ref(),
            hints.ep_attr.as_ref(),
            hints.domain_attr.as_ref(),
            hints.fabric_attr.as_ref(),
        )
    };
    // SAFETY: names of the caller's hints.
    let named = unsafe {
        domain.is_none_or(|domain| names(domain.name, DOMAIN_NAME))
            && fabric.is_none_or(|fabric| names(fabric.name, FABRIC_NAME))
    };
    let fits = tx.is_none_or(|tx| {
        tx.inject_size <= INJECT
            && tx.iov_limit <= IOVECS
            && tx.rma_iov_limit <= 1
            && tx.op_flags & !OPERATION_FLAGS == 0
            && tx.msg_order & !u64::from(sys::FI_ORDER_STRICT) == 0
            && tx.size <= DEPTH
    }) && rx.is_none_or(|rx| {
        rx.iov_limit <= IOVECS
            && rx.op_flags & !sys::MS_FI_COMPLETION == 0
            && rx.msg_order & !u64::from(sys::FI_ORDER_STRICT) == 0
            && rx.size <= DEPTH
    }) && ep.is_none_or(|ep| {
        [sys::FI_EP_UNSPEC, sys::FI_EP_RDM].contains(&ep.type_)
            && [0, PROTOCOL].contains(&ep.protocol)
            && ep.max_msg_size <= MAX_MESSAGE
            && ep.tx_ctx_cnt <= 1
            && ep.rx_ctx_cnt <= 1
    }) && domain.is_none_or(|domain| {
        domain.cq_data_size <= 8
            && ![domain.control_progress, domain.data_progress].contains(&sys::FI_PROGRESS_AUTO)
    });
    if !named || !fits {
        return None;
    }
    Some(build(version, caps, tx, rx, domain))
}

/// # Notes
/// libfabric frees each part with `free`.
fn build(
    version: u32,
    caps: u64,
    tx: Option<&sys::fi_tx_attr>,
    rx: Option<&sys::fi_rx_attr>,
    domain: Option<&sys::fi_domain_attr>,
) -> *mut sys::fi_info {
    let order = u64::from(sys::FI_ORDER_STRICT);
    let send = sys::MS_FI_SEND | sys::MS_FI_READ | sys::MS_FI_WRITE;
    let receive = sys::MS_FI_RECV | sys::MS_FI_REMOTE_READ | sys::MS_FI_REMOTE_WRITE;
    let tx_attr = sys::fi_tx_attr {
        caps: caps & (PRIMARY | send),
        op_flags: tx.map_or(0, |tx| tx.op_flags),
        msg_order: order,
        inject_size: INJECT,
        size: DEPTH,
        iov_limit: IOVECS,
        rma_iov_limit: 1,
        ..Default::default()
    };
    let rx_attr = sys::fi_rx_attr {
        caps: caps & (PRIMARY | receive | sys::MS_FI_DIRECTED_RECV | sys::MS_FI_SOURCE),
        op_flags: rx.map_or(0, |rx| rx.op_flags),
        msg_order: order,
        size: DEPTH,
        iov_limit: IOVECS,
        ..Default::default()
    };
    let ep_attr = sys::fi_ep_attr {
        type_: sys::FI_EP_RDM,
        protocol: PROTOCOL,
        protocol_version: 1,
        max_msg_size: MAX_MESSAGE,
        max_order_raw_size: MAX_MESSAGE,
        max_order_war_size: MAX_MESSAGE,
        max_order_waw_size: MAX_MESSAGE,
        // All bits of a tag.
        mem_tag_format: u64::MAX,
        tx_ctx_cnt: 1,
        rx_ctx_cnt: 1,
        ..Default::default()
    };
    let asked = domain.map_or(sys::FI_AV_UNSPEC, |domain| domain.av_type);
    // Before 1.5, 2 was the mode of regions at offsets with keys of the application; now it is none of the bits.
    let scalable = if version < (1 << 16 | 5) { sys::FI_MR_SCALABLE as i32 } else { 0 };
    let domain_attr = sys::fi_domain_attr {
        name: string(DOMAIN_NAME),
        threading: sys::FI_THREAD_SAFE,
        control_progress: sys::FI_PROGRESS_MANUAL,
        data_progress: sys::FI_PROGRESS_MANUAL,
        resource_mgmt: sys::FI_RM_ENABLED,
        av_type: if asked == sys::FI_AV_UNSPEC { sys::FI_AV_TABLE } else { asked },
        mr_mode: scalable,
        mr_key_size: 8,
        cq_data_size: 8,
        cq_cnt: 1024,
        ep_cnt: 1,
        tx_ctx_cnt: 1,
        rx_ctx_cnt: 1,
        max_ep_tx_ctx: 1,
        max_ep_rx_ctx: 1,
        cntr_cnt: 1024,
        mr_iov_limit: 1,
        caps: LOCALITY,
        mr_cnt: 1 << 20,
        ..Default::default()
    };
    let fabric_attr =
        sys::fi_fabric_attr { name: string(FABRIC_NAME), api_version: version, ..Default::default() };
    allocate(sys::fi_info {
        caps,
        addr_format: ADDRESS_FORMAT,
        tx_attr: allocate(tx_attr),
        rx_attr: allocate(rx_attr),
        ep_attr: allocate(ep_attr),
        domain_attr: allocate(domain_attr),
        fabric_attr: allocate(fabric_attr),
        ..Default::default()
    })
}

fn allocate<T>(value: T) -> *mut T {
    // SAFETY: memory of the size of a value, checked before it is written.
    unsafe {
        let place = libc::malloc(size_of::<T>()).cast::<T>();
        if !place.is_null() {
            place.write(value);
        }
        place
    }
}

fn string(text: &CStr) -> *mut c_char {
    // SAFETY: a string.
    unsafe { libc::strdup(text.as_ptr()) }
}
