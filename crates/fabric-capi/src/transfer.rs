//! Operations of one node.

use std::ffi::{c_int, c_void};
use std::time::Duration;

use millstream_fabric::{Notification, RegionId, Span};

use crate::error::{Failure, call};
use crate::handle::{give, state};
use crate::sys;

/// # Safety
/// `notification` is null or valid.
unsafe fn notification(notification: *const sys::ms_fabric_notification) -> Result<Notification, Failure> {
    // SAFETY: the caller's pointer.
    let Some(given) = (unsafe { notification.as_ref() }) else { return Ok(Notification::None) };
    match given.kind {
        sys::MS_FABRIC_NOTIFY_NONE => Ok(Notification::None),
        sys::MS_FABRIC_NOTIFY_COUNTER => {
            Ok(Notification::Counter { index: own_counter(given.counter)?, add: given.add })
        }
        sys::MS_FABRIC_NOTIFY_EVENT => Ok(Notification::Event { tag: given.tag }),
        kind => Err(Failure::invalid(format!("notification kind {kind} is unknown"))),
    }
}

/// A counter of the application. The further ones of a node count for collective operations.
fn own_counter(index: u16) -> Result<u16, Failure> {
    if u32::from(index) < sys::MS_FABRIC_COUNTERS { Ok(index) } else { Err(Failure::no_counter(index)) }
}

/// Bytes of the caller.
///
/// # Safety
/// `data` points to `length` bytes, or `length` is 0; nothing writes them during the call.
pub(crate) unsafe fn bytes<'b>(data: *const c_void, length: usize) -> Result<&'b [u8], Failure> {
    check_buffer(data, length)?;
    if length == 0 {
        return Ok(&[]);
    }
    // SAFETY: not null, of a possible length, and the caller says that they exist.
    Ok(unsafe { std::slice::from_raw_parts(data.cast(), length) })
}

/// Bytes of the caller to be written.
///
/// # Safety
/// `data` points to `length` bytes, or `length` is 0; nothing else uses them during the call.
pub(crate) unsafe fn bytes_mut<'b>(data: *mut c_void, length: usize) -> Result<&'b mut [u8], Failure> {
    check_buffer(data, length)?;
    if length == 0 {
        return Ok(&mut []);
    }
    // SAFETY: not null, of a possible length, and the caller says that they exist.
    Ok(unsafe { std::slice::from_raw_parts_mut(data.cast(), length) })
}

fn check_buffer(data: *const c_void, length: usize) -> Result<(), Failure> {
    if length > isize::MAX as usize {
        return Err(Failure::invalid(format!("a length of {length} bytes is impossible")));
    }
    if data.is_null() && length > 0 {
        return Err(Failure::invalid(format!("the address of {length} bytes is null")));
    }
    Ok(())
}

/// Writes to a region of a node.
///
/// # Safety
/// `fabric` is a handle; `data` points to `length` bytes; `with` is null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ms_fabric_put(
    fabric: *mut sys::ms_fabric,
    to: u16,
    region: u64,
    offset: u64,
    data: *const c_void,
    length: usize,
    with: *const sys::ms_fabric_notification,
) -> c_int {
    call(|| {
        // SAFETY: the caller's handle and pointers.
        let (mut state, data, with) = unsafe { (state(fabric)?, bytes(data, length)?, notification(with)?) };
        let to = state.node(to)?;
        Ok(state.member.fabric().put(to, RegionId(region), offset, data, with)?)
    })
}

/// Writes from a region of this node.
///
/// # Safety
/// `fabric` is a handle; `with` is null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ms_fabric_put_region(
    fabric: *mut sys::ms_fabric,
    to: u16,
    region: u64,
    offset: u64,
    source: u64,
    source_offset: u64,
    length: usize,
    with: *const sys::ms_fabric_notification,
) -> c_int {
    call(|| {
        // SAFETY: the caller's handle and pointers.
        let (mut state, with) = unsafe { (state(fabric)?, notification(with)?) };
        let source = Span { region: RegionId(source), offset: source_offset, length };
        let to = state.node(to)?;
        Ok(state.member.fabric().put_region(to, RegionId(region), offset, source, with)?)
    })
}

/// Reads from a region of a node.
///
/// # Safety
/// `fabric` is a handle; `data` points to `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ms_fabric_get(
    fabric: *mut sys::ms_fabric,
    from: u16,
    region: u64,
    offset: u64,
    data: *mut c_void,
    length: usize,
) -> c_int {
    call(|| {
        // SAFETY: the caller's handle and pointers.
        let (mut state, data) = unsafe { (state(fabric)?, bytes_mut(data, length)?) };
        let from = state.node(from)?;
        Ok(state.member.fabric().get(from, RegionId(region), offset, data)?)
    })
}

/// Reads into a region of this node.
///
/// # Safety
/// `fabric` is a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ms_fabric_get_region(
    fabric: *mut sys::ms_fabric,
    from: u16,
    region: u64,
    offset: u64,
    target: u64,
    target_offset: u64,
    length: usize,
) -> c_int {
    call(|| {
        // SAFETY: the caller's handle.
        let mut state = unsafe { state(fabric) }?;
        let into = Span { region: RegionId(target), offset: target_offset, length };
        let from = state.node(from)?;
        Ok(state.member.fabric().get_region(from, RegionId(region), offset, into)?)
    })
}

/// Adds to a word.
///
/// # Safety
/// `fabric` is a handle; `previous` is null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ms_fabric_fetch_add(
    fabric: *mut sys::ms_fabric,
    at: u16,
    region: u64,
    offset: u64,
    add: u64,
    previous: *mut u64,
) -> c_int {
    call(|| {
        // SAFETY: the caller's handle and pointer.
        unsafe {
            let mut state = state(fabric)?;
            let at = state.node(at)?;
            give(previous, state.member.fabric().fetch_add(at, RegionId(region), offset, add)?);
        }
        Ok(())
    })
}

/// Replaces a word if it has an expected value.
///
/// # Safety
/// `fabric` is a handle; `previous` is null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ms_fabric_compare_swap(
    fabric: *mut sys::ms_fabric,
    at: u16,
    region: u64,
    offset: u64,
    expected: u64,
    desired: u64,
    previous: *mut u64,
) -> c_int {
    call(|| {
        // SAFETY: the caller's handle and pointer.
        unsafe {
            let mut state = state(fabric)?;
            let (at, region) = (state.node(at)?, RegionId(region));
            give(previous, state.member.fabric().compare_swap(at, region, offset, expected, desired)?);
        }
        Ok(())
    })
}

/// Waits until all puts to a node are visible there.
///
/// # Safety
/// `fabric` is a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ms_fabric_flush(fabric: *mut sys::ms_fabric, to: u16) -> c_int {
    call(|| {
        // SAFETY: the caller's handle.
        let mut state = unsafe { state(fabric) }?;
        let to = state.node(to)?;
        Ok(state.member.fabric().flush(to)?)
    })
}

/// Value of a counter.
///
/// # Safety
/// `fabric` is a handle; `value` is null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ms_fabric_counter(
    fabric: *const sys::ms_fabric,
    index: u16,
    value: *mut u64,
) -> c_int {
    call(|| {
        // SAFETY: the caller's handle and pointer.
        unsafe { give(value, state(fabric)?.member.fabric().counter(own_counter(index)?)?) };
        Ok(())
    })
}

/// Waits for a counter.
///
/// # Safety
/// `fabric` is a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ms_fabric_wait_counter(
    fabric: *mut sys::ms_fabric,
    index: u16,
    value: u64,
    from: u16,
    timeout_ms: u64,
) -> c_int {
    call(|| {
        // SAFETY: the caller's handle.
        let mut state = unsafe { state(fabric) }?;
        let timeout = Duration::from_millis(timeout_ms);
        let (index, from) = (own_counter(index)?, state.node(from)?);
        Ok(state.member.fabric().wait_counter(index, value, from, timeout)?)
    })
}

/// The next event.
///
/// # Safety
/// `fabric` is a handle; `event` is null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ms_fabric_poll_event(
    fabric: *mut sys::ms_fabric,
    event: *mut sys::ms_fabric_event,
) -> c_int {
    let mut found = 0;
    let code = call(|| {
        // SAFETY: the caller's handle.
        let mut state = unsafe { state(fabric) }?;
        let Some(next) = state.member.fabric().poll_event() else { return Ok(()) };
        found = 1;
        let value = sys::ms_fabric_event {
            region: next.region.0,
            offset: next.offset,
            length: next.length,
            tag: next.tag,
            source: next.source.0,
        };
        // SAFETY: the caller's pointer.
        unsafe { give(event, value) };
        Ok(())
    });
    if code == 0 { found } else { -code }
}

/// Events that found the queue full.
///
/// # Safety
/// `fabric` is a handle; `count` is null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ms_fabric_lost_events(fabric: *const sys::ms_fabric, count: *mut u64) -> c_int {
    call(|| {
        // SAFETY: the caller's handle and pointer.
        unsafe { give(count, state(fabric)?.member.fabric().lost_events()) };
        Ok(())
    })
}

/// A node that is known to be lost, or -1.
///
/// # Safety
/// `fabric` is a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ms_fabric_lost_node(fabric: *const sys::ms_fabric) -> c_int {
    let mut lost = -1;
    call(|| {
        // SAFETY: the caller's handle.
        let mut state = unsafe { state(fabric) }?;
        lost = state.member.fabric().lost_node().map_or(-1, |node| node.0.into());
        Ok(())
    });
    lost
}
