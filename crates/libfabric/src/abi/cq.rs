//! Completion queues. Reading one makes progress.

use std::collections::VecDeque;
use std::ffi::{c_char, c_int, c_void};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::ep::BoundEndpoints;
use super::{error, error_size, fid, give, lock, no_bind, object, table};
use crate::endpoint::Completion;
use crate::sys;

/// A completion, and the number of its source's address.
type Entry = (Completion, u64);

/// A queue, as endpoints see it.
#[derive(Debug)]
pub(super) struct Queue {
    format: u32,
    entries: Mutex<VecDeque<Entry>>,
    pub(super) endpoints: BoundEndpoints,
}

impl Queue {
    pub(super) fn push(&self, completion: Completion, source: u64) {
        lock(&self.entries).push_back((completion, source));
    }
}

#[repr(C)]
pub(super) struct CompletionQueue {
    fid: sys::fid_cq,
    queue: Arc<Queue>,
}

impl CompletionQueue {
    pub(super) fn queue(&self) -> &Arc<Queue> {
        &self.queue
    }
}

static CQ: sys::fi_ops = sys::fi_ops {
    size: size_of::<sys::fi_ops>(),
    close: Some(super::close::<CompletionQueue>),
    bind: Some(no_bind),
    control: Some(super::no_control),
    ops_open: None,
    tostr: None,
    ops_set: None,
};
static CQ_OPS: sys::fi_ops_cq = sys::fi_ops_cq {
    size: size_of::<sys::fi_ops_cq>(),
    read: Some(read),
    readfrom: Some(read_from),
    readerr: Some(read_error),
    sread: Some(wait),
    sreadfrom: Some(wait_from),
    signal: Some(no_signal),
    strerror: Some(describe),
};

pub(super) unsafe extern "C" fn open(
    _: *mut sys::fid_domain,
    attributes: *mut sys::fi_cq_attr,
    cq: *mut *mut sys::fid_cq,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the caller's attributes and place.
    unsafe {
        let Some(given) = attributes.as_mut() else { return error(sys::FI_EINVAL) };
        if ![sys::FI_WAIT_NONE, sys::FI_WAIT_UNSPEC, sys::FI_WAIT_YIELD].contains(&given.wait_obj) {
            return error(sys::FI_ENOSYS);
        }
        if given.format == sys::FI_CQ_FORMAT_UNSPEC {
            given.format = sys::FI_CQ_FORMAT_CONTEXT;
        }
        let fid = fid(sys::FI_CLASS_CQ, context, &CQ);
        let queue =
            Queue { format: given.format, entries: Mutex::default(), endpoints: BoundEndpoints::default() };
        give(CompletionQueue { fid: sys::fid_cq { fid, ops: table(&CQ_OPS) }, queue: Arc::new(queue) }, cq)
    }
}

/// Writes an entry in the queue's format.
///
/// # Safety
/// `to` has a place for entry `at`.
unsafe fn write(to: *mut c_void, at: usize, format: u32, done: &Completion) {
    let (op_context, flags, len) = (done.context as *mut c_void, done.flags, done.length as usize);
    let (buf, data, tag) = (std::ptr::null_mut(), done.data, done.tag);
    // SAFETY: the caller's place.
    unsafe {
        match format {
            sys::FI_CQ_FORMAT_MSG => to.cast::<sys::fi_cq_msg_entry>().add(at).write(sys::fi_cq_msg_entry {
                op_context,
                flags,
                len,
            }),
            sys::FI_CQ_FORMAT_DATA => {
                let entry = sys::fi_cq_data_entry { op_context, flags, len, buf, data };
                to.cast::<sys::fi_cq_data_entry>().add(at).write(entry);
            }
            sys::FI_CQ_FORMAT_TAGGED => {
                let entry = sys::fi_cq_tagged_entry { op_context, flags, len, buf, data, tag };
                to.cast::<sys::fi_cq_tagged_entry>().add(at).write(entry);
            }
            _ => to.cast::<sys::fi_cq_entry>().add(at).write(sys::fi_cq_entry { op_context }),
        }
    }
}

unsafe extern "C" fn read_from(
    cq: *mut sys::fid_cq,
    to: *mut c_void,
    count: usize,
    sources: *mut sys::fi_addr_t,
) -> isize {
    // SAFETY: an open queue, and places for `count` entries and sources.
    unsafe {
        let queue = &object::<CompletionQueue, _>(cq).queue;
        let worked = queue.endpoints.progress();
        let mut entries = lock(&queue.entries);
        let mut taken = 0;
        while taken < count
            && let Some(&(done, source)) = entries.front().filter(|(done, _)| done.error == 0)
        {
            entries.pop_front();
            write(to, taken, queue.format, &done);
            if !sources.is_null() {
                sources.add(taken).write(source);
            }
            taken += 1;
        }
        if taken > 0 {
            return taken as isize;
        }
        if !entries.is_empty() && count > 0 {
            return error_size(sys::FI_EAVAIL);
        }
        drop(entries);
        if !worked {
            // Programs poll; on few processors the node processes need a turn.
            std::thread::yield_now();
        }
        error_size(sys::FI_EAGAIN)
    }
}

unsafe extern "C" fn read(cq: *mut sys::fid_cq, to: *mut c_void, count: usize) -> isize {
    // SAFETY: as for `read_from`.
    unsafe { read_from(cq, to, count, std::ptr::null_mut()) }
}

unsafe extern "C" fn wait_from(
    cq: *mut sys::fid_cq,
    to: *mut c_void,
    count: usize,
    sources: *mut sys::fi_addr_t,
    _condition: *const c_void,
    timeout_ms: c_int,
) -> isize {
    let timeout = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
    let start = Instant::now();
    loop {
        // SAFETY: as for `read_from`.
        let taken = unsafe { read_from(cq, to, count, sources) };
        if taken != error_size(sys::FI_EAGAIN) || timeout.is_some_and(|timeout| start.elapsed() >= timeout) {
            return taken;
        }
    }
}

unsafe extern "C" fn wait(
    cq: *mut sys::fid_cq,
    to: *mut c_void,
    count: usize,
    condition: *const c_void,
    timeout_ms: c_int,
) -> isize {
    // SAFETY: as for `read_from`.
    unsafe { wait_from(cq, to, count, std::ptr::null_mut(), condition, timeout_ms) }
}

unsafe extern "C" fn read_error(cq: *mut sys::fid_cq, to: *mut sys::fi_cq_err_entry, _flags: u64) -> isize {
    // SAFETY: an open queue, and a place for an entry.
    unsafe {
        let queue = &object::<CompletionQueue, _>(cq).queue;
        let mut entries = lock(&queue.entries);
        let Some(&(done, _)) = entries.front().filter(|(done, _)| done.error != 0) else {
            return error_size(sys::FI_EAGAIN);
        };
        entries.pop_front();
        let Some(to) = to.as_mut() else { return error_size(sys::FI_EINVAL) };
        to.op_context = done.context as *mut c_void;
        to.flags = done.flags;
        to.len = done.length as usize;
        to.buf = std::ptr::null_mut();
        to.data = done.data;
        to.tag = done.tag;
        to.olen = done.overflow as usize;
        to.err = done.error as c_int;
        to.prov_errno = done.error as c_int;
        // There is no further data about errors. A caller of 1.5 or later may have given a buffer for it.
        to.err_data_size = 0;
    }
    1
}

unsafe extern "C" fn no_signal(_: *mut sys::fid_cq) -> c_int {
    error(sys::FI_ENOSYS)
}

unsafe extern "C" fn describe(
    _: *mut sys::fid_cq,
    code: c_int,
    _: *const c_void,
    _: *mut c_char,
    _: usize,
) -> *const c_char {
    let text = match code as u32 {
        sys::FI_ETRUNC => c"the message is longer than its receive",
        sys::FI_ECANCELED => c"canceled",
        sys::FI_ENOMSG => c"no such message is here",
        sys::FI_EKEYREJECTED => c"the target has no memory region with this key",
        sys::FI_EACCES => c"the target's memory region does not allow the access",
        sys::FI_EINVAL => c"the range exceeds the target's memory region, or operands do not fit",
        sys::FI_EOPNOTSUPP => c"the atomic operation does not exist for the type",
        sys::FI_ECONNABORTED => c"the node is lost",
        sys::FI_EHOSTUNREACH => c"no live path leads to the node",
        _ => c"unknown error",
    };
    text.as_ptr()
}
