//! Asynchronous events of an opened device.

use std::{ffi::c_int, sync::atomic::Ordering};

use millstream_device::AsyncEvent;

use crate::{context::Context, errno, sys::*};

/// Takes the next asynchronous event, waiting for one unless the context's `async_fd` is non-blocking.
/// Returns 0, or -1 with errno.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_async_event(
    context: *mut ibv_context,
    event: *mut ibv_async_event,
) -> c_int {
    // SAFETY: the caller passes an open context.
    let next = match unsafe { Context::device(context) }.next_event() {
        Ok(next) => next,
        Err(error) => return errno::index(Err(error.into())),
    };
    let mut out = ibv_async_event { event_type: next.kind(), ..ibv_async_event::default() };
    match &next {
        AsyncEvent::Qp(qp, _) => out.element.qp = qp.user.load(Ordering::Acquire) as *mut ibv_qp,
        AsyncEvent::Srq(srq, _) => out.element.srq = srq.user.load(Ordering::Acquire) as *mut ibv_srq,
        AsyncEvent::Cq(cq, _) => out.element.cq = cq.user.load(Ordering::Acquire) as *mut ibv_cq,
    }
    // SAFETY: the caller passes a writable event.
    unsafe { event.write(out) };
    0
}

/// Acknowledges an asynchronous event. Nothing waits for it: an event of a destroyed object is not
/// handed out.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_ack_async_event(_event: *mut ibv_async_event) {}
