//! Counters of completions. Reading one makes progress.

use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::ep::BoundEndpoints;
use super::{error, fid, give, object, ops, table};
use crate::sys;

/// A counter, as endpoints see it.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) done: AtomicU64,
    pub(super) failed: AtomicU64,
    pub(super) endpoints: BoundEndpoints,
}

#[repr(C)]
pub(super) struct Counter {
    fid: sys::fid_cntr,
    counts: Arc<Counts>,
}

impl Counter {
    pub(super) fn counts(&self) -> &Arc<Counts> {
        &self.counts
    }
}

static CNTR: sys::fi_ops = ops::<Counter>();
static CNTR_OPS: sys::fi_ops_cntr = sys::fi_ops_cntr {
    size: size_of::<sys::fi_ops_cntr>(),
    read: Some(read),
    readerr: Some(read_error),
    add: Some(add),
    set: Some(set),
    wait: Some(wait),
    adderr: Some(add_error),
    seterr: Some(set_error),
};

pub(super) unsafe extern "C" fn open(
    _: *mut sys::fid_domain,
    _: *mut sys::fi_cntr_attr,
    cntr: *mut *mut sys::fid_cntr,
    context: *mut c_void,
) -> c_int {
    let fid = fid(sys::FI_CLASS_CNTR, context, &CNTR);
    // SAFETY: the caller's place.
    unsafe {
        give(Counter { fid: sys::fid_cntr { fid, ops: table(&CNTR_OPS) }, counts: Arc::default() }, cntr)
    }
}

/// # Safety
/// An open counter.
unsafe fn counts<'c>(cntr: *mut sys::fid_cntr) -> &'c Arc<Counts> {
    // SAFETY: the caller's.
    unsafe { &object::<Counter, _>(cntr).counts }
}

unsafe extern "C" fn read(cntr: *mut sys::fid_cntr) -> u64 {
    // SAFETY: an open counter, here and below.
    let counts = unsafe { counts(cntr) };
    if !counts.endpoints.progress() {
        std::thread::yield_now();
    }
    counts.done.load(Ordering::Acquire)
}

unsafe extern "C" fn read_error(cntr: *mut sys::fid_cntr) -> u64 {
    // SAFETY: as above.
    unsafe { counts(cntr) }.failed.load(Ordering::Acquire)
}

unsafe extern "C" fn add(cntr: *mut sys::fid_cntr, value: u64) -> c_int {
    // SAFETY: as above.
    unsafe { counts(cntr) }.done.fetch_add(value, Ordering::Relaxed);
    0
}

unsafe extern "C" fn set(cntr: *mut sys::fid_cntr, value: u64) -> c_int {
    // SAFETY: as above.
    unsafe { counts(cntr) }.done.store(value, Ordering::Relaxed);
    0
}

unsafe extern "C" fn add_error(cntr: *mut sys::fid_cntr, value: u64) -> c_int {
    // SAFETY: as above.
    unsafe { counts(cntr) }.failed.fetch_add(value, Ordering::Relaxed);
    0
}

unsafe extern "C" fn set_error(cntr: *mut sys::fid_cntr, value: u64) -> c_int {
    // SAFETY: as above.
    unsafe { counts(cntr) }.failed.store(value, Ordering::Relaxed);
    0
}

unsafe extern "C" fn wait(cntr: *mut sys::fid_cntr, threshold: u64, timeout_ms: c_int) -> c_int {
    let timeout = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
    let start = Instant::now();
    // SAFETY: as above.
    let failed = unsafe { read_error(cntr) };
    loop {
        // SAFETY: as above.
        if unsafe { read(cntr) } >= threshold {
            return 0;
        }
        // SAFETY: as above.
        if unsafe { read_error(cntr) } != failed {
            return error(sys::FI_EAVAIL);
        }
        if timeout.is_some_and(|timeout| start.elapsed() >= timeout) {
            return error(sys::FI_ETIMEDOUT);
        }
    }
}
