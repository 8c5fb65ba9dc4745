//! Completion queues and completion channels.

use std::{
    ffi::{c_int, c_uint, c_void},
    mem,
    os::fd::{AsFd, AsRawFd},
    slice,
    sync::Arc,
    time::Duration,
};

use millstream_device::{Channel, Cq, CqPoller, Pd, types::Wc};
use millstream_lockfree::CancelGuard;

use crate::{
    context::{COMP_VECTORS, Context},
    cq_ex,
    errno::{self, Errno},
    sys::*,
};

/// A completion channel: the program's struct and the device's object.
#[repr(C)]
struct ChannelObject {
    verbs: ibv_comp_channel,
    inner: Arc<Channel>,
}

/// A completion queue: the program's struct and the device's object.
#[repr(C)]
pub(crate) struct CqObject {
    verbs: ibv_cq_ex,
    pub(crate) inner: Arc<Cq>,
    /// The current completion of `ibv_start_poll`.
    pub(crate) poller: CqPoller,
    /// The parent domain that it was created in.
    domain: Option<Arc<Pd>>,
}

impl CqObject {
    /// # Safety
    /// `cq` comes from [`ibv_create_cq`] and is alive.
    #[inline]
    pub(crate) unsafe fn of<'a>(cq: *mut ibv_cq) -> &'a Self {
        // SAFETY: `verbs` is the first field and starts as an `ibv_cq`; the caller vouches for the pointer.
        unsafe { &*cq.cast() }
    }
}

// The device fills programs' completions in place.
const _: () = {
    assert!(mem::size_of::<Wc>() == mem::size_of::<ibv_wc>());
    assert!(mem::offset_of!(Wc, qp_num) == mem::offset_of!(ibv_wc, qp_num));
    assert!(mem::offset_of!(Wc, wc_flags) == mem::offset_of!(ibv_wc, wc_flags));
    assert!(mem::offset_of!(Wc, dlid_path_bits) == mem::offset_of!(ibv_wc, dlid_path_bits));
};

/// A new completion channel; NULL and errno on failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    let _uncancelled = CancelGuard::new();
    // SAFETY: the caller passes an open context.
    let made = Channel::new(unsafe { Context::device(context) });
    errno::pointer(made.map_err(Errno::from).map(|inner| {
        let verbs = ibv_comp_channel { context, fd: inner.as_fd().as_raw_fd(), refcnt: 0 };
        Box::into_raw(Box::new(ChannelObject { verbs, inner })).cast()
    }))
}

/// Destroys a completion channel. Returns 0 or an error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    let _uncancelled = CancelGuard::new();
    let object = channel.cast::<ChannelObject>();
    // SAFETY: the caller passes a live channel.
    if unsafe { (*object).inner.in_use() } {
        return errno::status(Err(Errno::BUSY));
    }
    // SAFETY: boxed by `ibv_create_comp_channel`; the caller gives it up.
    drop(unsafe { Box::from_raw(object) });
    0
}

/// A new completion queue for at least `cqe` completions; NULL and errno on failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_cq(
    context: *mut ibv_context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    comp_vector: c_int,
) -> *mut ibv_cq {
    let _uncancelled = CancelGuard::new();
    let (Ok(entries), Ok(vector)) = (u32::try_from(cqe), u32::try_from(comp_vector)) else {
        return errno::pointer(Err(Errno::INVALID));
    };
    // SAFETY: the caller passes an open context, and NULL or a live channel.
    errno::pointer(unsafe {
        create(context, &Options { entries, cq_context, channel, vector, timed: false, domain: None })
    })
}

/// The attributes of a new completion queue.
pub(crate) struct Options {
    pub(crate) entries: u32,
    pub(crate) cq_context: *mut c_void,
    pub(crate) channel: *mut ibv_comp_channel,
    pub(crate) vector: u32,
    pub(crate) timed: bool,
    pub(crate) domain: Option<Arc<Pd>>,
}

/// # Safety
/// The context is open, and the channel NULL or live.
pub(crate) unsafe fn create(context: *mut ibv_context, options: &Options) -> Result<*mut ibv_cq, Errno> {
    if options.vector >= COMP_VECTORS as u32 {
        return Err(Errno::INVALID);
    }
    let channel = options.channel;
    // SAFETY: the caller vouches for both.
    let (device, events) = unsafe {
        let events = channel.cast::<ChannelObject>().as_ref().map(|object| object.inner.clone());
        (Context::device(context), events)
    };
    let make = if options.timed { Cq::with_timestamps } else { Cq::new };
    let inner = make(device, options.entries, events)?;
    let verbs = ibv_cq {
        context,
        channel,
        cq_context: options.cq_context,
        cqe: inner.capacity() as c_int,
        ..ibv_cq::default()
    };
    let verbs = cq_ex::interface(verbs);
    let domain = options.domain.clone();
    if let Some(domain) = &domain {
        domain.attach();
    }
    let object = Box::leak(Box::new(CqObject { verbs, inner, poller: CqPoller::default(), domain }));
    let address = std::ptr::from_mut(object).addr() as u64;
    object.inner.handle().set_pointer(address);
    Ok(std::ptr::from_mut(object).cast())
}

/// Changes the capacity of a completion queue to at least `cqe`. Returns 0 or an error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int {
    let _uncancelled = CancelGuard::new();
    // SAFETY: the caller passes a live queue.
    let inner = unsafe { &CqObject::of(cq).inner };
    let entries = u32::try_from(cqe).map_err(|_| Errno::INVALID);
    let result = entries.and_then(|entries| Ok(inner.resize(entries)?));
    if result.is_ok() {
        // SAFETY: as above; programs read the capacity here.
        unsafe { (&raw mut (*cq).cqe).write_volatile(inner.capacity() as c_int) };
    }
    errno::status(result)
}

/// Changes the moderation of a completion queue's events. Returns 0 or an error number.
pub(crate) unsafe extern "C" fn modify_cq(cq: *mut ibv_cq, attr: *mut ibv_modify_cq_attr) -> c_int {
    let _uncancelled = CancelGuard::new();
    // SAFETY: the caller passes a live queue and a struct that is filled as far as its mask says.
    unsafe {
        let mask = (*attr).attr_mask;
        if mask & !IBV_CQ_ATTR_MODERATE != 0 {
            return errno::status(Err(Errno::INVALID));
        }
        if mask & IBV_CQ_ATTR_MODERATE != 0 {
            let (count, period) = ((*attr).moderate.cq_count, (*attr).moderate.cq_period);
            CqObject::of(cq).inner.moderate(count, Duration::from_micros(period.into()));
        }
    }
    0
}

/// Destroys a completion queue. Returns 0 or an error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int {
    let _uncancelled = CancelGuard::new();
    // SAFETY: the caller passes a live queue.
    let result = unsafe { CqObject::of(cq) }.inner.destroy();
    if result.is_ok() {
        // SAFETY: boxed by `ibv_create_cq`; the caller gives it up.
        let object = unsafe { Box::from_raw(cq.cast::<CqObject>()) };
        if let Some(domain) = &object.domain {
            domain.detach();
        }
    }
    errno::status(result.map_err(Errno::from))
}

/// Takes the next completion event, waiting for one unless the channel's descriptor is non-blocking.
/// Returns 0, or -1 with errno.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    // SAFETY: the caller passes a live channel.
    let event = unsafe { &*channel.cast::<ChannelObject>() }.inner.next_event();
    match event {
        Ok(queue) => {
            let object = queue.handle().pointer() as *mut ibv_cq;
            // SAFETY: the queue is alive: its destruction waits for this event's acknowledgement. The
            // caller passes writable pointers.
            unsafe {
                cq.write(object);
                cq_context.write((*object).cq_context);
            }
            0
        }
        Err(error) => errno::index(Err(error.into())),
    }
}

/// Acknowledges completion events. The queue's destruction waits for that.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_ack_cq_events(cq: *mut ibv_cq, nevents: c_uint) {
    // SAFETY: the caller passes a live queue.
    unsafe { CqObject::of(cq) }.inner.acknowledge(nevents);
}

/// Takes at most `num_entries` completions. Returns their number, negative on failure.
pub(crate) unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, num_entries: c_int, wc: *mut ibv_wc) -> c_int {
    if num_entries <= 0 {
        return if num_entries == 0 { 0 } else { errno::index(Err(Errno::INVALID)) };
    }
    // SAFETY: the caller passes a live queue and an array of that many completions, plain integers
    // laid out alike.
    let result = unsafe {
        let out = slice::from_raw_parts_mut(wc.cast::<Wc>(), num_entries as usize);
        CqObject::of(cq).inner.poll(out)
    };
    errno::index(result.map(|n| n as c_int).map_err(Errno::from))
}

/// Asks for one event at the next completion. Returns 0 or an error number.
pub(crate) unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: the caller passes a live queue.
    unsafe { CqObject::of(cq) }.inner.arm(solicited_only != 0);
    0
}
