//! Asynchronous events of an opened device.

use std::ffi::c_int;

use crate::{context::Context, cq::CqObject, errno, qp::QpObject, srq::SrqObject, sys::*};

/// The object of an event: one of the pointers of `ibv_async_event::element`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum About {
    Qp,
    Cq,
    Srq,
    /// The port or the device.
    Other,
}

fn about(event: ibv_event_type) -> About {
    match event {
        IBV_EVENT_CQ_ERR => About::Cq,
        IBV_EVENT_SRQ_ERR | IBV_EVENT_SRQ_LIMIT_REACHED => About::Srq,
        IBV_EVENT_QP_FATAL
        | IBV_EVENT_QP_REQ_ERR
        | IBV_EVENT_QP_ACCESS_ERR
        | IBV_EVENT_COMM_EST
        | IBV_EVENT_SQ_DRAINED
        | IBV_EVENT_PATH_MIG
        | IBV_EVENT_PATH_MIG_ERR
        | IBV_EVENT_QP_LAST_WQE_REACHED => About::Qp,
        _ => About::Other,
    }
}

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
    match about(next.kind()) {
        About::Qp => out.element.qp = next.pointer() as *mut ibv_qp,
        About::Srq => out.element.srq = next.pointer() as *mut ibv_srq,
        About::Cq => out.element.cq = next.pointer() as *mut ibv_cq,
        About::Other => out.element.port_num = 1,
    }
    // SAFETY: the caller passes a writable event.
    unsafe { event.write(out) };
    next.leave_unacknowledged();
    0
}

/// Acknowledges an asynchronous event. The destruction of its object waits for that.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_ack_async_event(event: *mut ibv_async_event) {
    // SAFETY: the caller passes an event of `ibv_get_async_event`. Its object is alive, because its
    // destruction waits for this call.
    unsafe {
        let event = &*event;
        match about(event.event_type) {
            About::Qp => QpObject::of(event.element.qp).handle.acknowledge(),
            About::Srq => SrqObject::of(event.element.srq).inner.handle().acknowledge(),
            About::Cq => CqObject::of(event.element.cq).inner.handle().acknowledge(),
            About::Other => {}
        }
    }
}
