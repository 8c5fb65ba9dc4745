//! Messages, with and without tags.

use std::ffi::c_void;

use super::ep::{CallFlags, Core, operate};
use super::{info, iovec, iovecs};
use crate::endpoint::{Side, Source};
use crate::header::{Header, Kind};
use crate::matching::{Pattern, Receive, ReceiveBuffer};
use crate::memory::UserBuffer;
use crate::sys;

pub(super) static OPS: sys::fi_ops_msg = sys::fi_ops_msg {
    size: size_of::<sys::fi_ops_msg>(),
    recv: Some(receive),
    recvv: Some(receive_parts),
    recvmsg: Some(receive_message),
    send: Some(send),
    sendv: Some(send_parts),
    sendmsg: Some(send_message),
    inject: Some(inject),
    senddata: Some(send_data),
    injectdata: Some(inject_data),
};
pub(super) static TAGGED_OPS: sys::fi_ops_tagged = sys::fi_ops_tagged {
    size: size_of::<sys::fi_ops_tagged>(),
    recv: Some(tagged_receive),
    recvv: Some(tagged_receive_parts),
    recvmsg: Some(tagged_receive_message),
    send: Some(tagged_send),
    sendv: Some(tagged_send_parts),
    sendmsg: Some(tagged_send_message),
    inject: Some(tagged_inject),
    senddata: Some(tagged_send_data),
    injectdata: Some(tagged_inject_data),
};

/// Target, tag and completion of a message.
struct Sending {
    to: u64,
    tag: Option<u64>,
    data: Option<u64>,
    context: *mut c_void,
    flags: CallFlags,
}

/// Sends the parts as one message.
///
/// # Safety
/// An open endpoint, and parts that live until the completion.
unsafe fn send_parts_of(
    ep: *mut sys::fid_ep,
    parts: impl Iterator<Item = (*mut u8, usize)>,
    sending: Sending,
) -> isize {
    // SAFETY: the caller's.
    unsafe {
        operate(ep, |core| {
            let to = core.address(sending.to).ok_or(sys::FI_EADDRNOTAVAIL)?;
            let (kind, capability) = match sending.tag {
                Some(_) => (Kind::Tagged, sys::MS_FI_TAGGED),
                None => (Kind::Message, sys::MS_FI_MSG),
            };
            let header = Header {
                tag: sending.tag.unwrap_or(0),
                has_data: sending.data.is_some(),
                data: sending.data.unwrap_or(0),
                ..Header::new(kind)
            };
            let completion = core.completion(sending.context, sys::MS_FI_SEND | capability, sending.flags);
            let flags = sending.flags.of(core, Side::Transmit);
            let source = copied_if_injected(UserBuffer::new(parts), flags)?;
            let acknowledged = flags & sys::MS_FI_DELIVERY_COMPLETE != 0;
            core.endpoint.send(to, header, source, completion, acknowledged);
            Ok(())
        })
    }
}

/// With `FI_INJECT` the application may reuse the buffer at once.
pub(super) fn copied_if_injected(buffer: UserBuffer, flags: u64) -> Result<Source, u32> {
    if flags & sys::MS_FI_INJECT == 0 {
        return Ok(Source::User(buffer));
    }
    let size = buffer.size() as usize;
    if size > info::INJECT {
        return Err(sys::FI_EMSGSIZE);
    }
    let mut bytes = Vec::with_capacity(size);
    buffer.read(0, size, &mut bytes);
    Ok(Source::Owned(bytes))
}

/// Sends a copy, without a completion.
///
/// # Safety
/// An open endpoint and a buffer.
unsafe fn inject_one(
    ep: *mut sys::fid_ep,
    buffer: *const c_void,
    length: usize,
    to: u64,
    tag: Option<u64>,
    data: Option<u64>,
) -> isize {
    let sending = Sending { to, tag, data, context: std::ptr::null_mut(), flags: CallFlags::Inject };
    // SAFETY: the caller's.
    unsafe { send_parts_of(ep, iovec(buffer, length), sending) }
}

/// Source, tag and completion of a receive.
struct Receiving {
    from: u64,
    /// The tag, and its ignored bits.
    tag: Option<(u64, u64)>,
    context: *mut c_void,
    flags: CallFlags,
}

fn receive_buffer(core: &mut Core, buffer: UserBuffer, receiving: &Receiving) -> Result<(), u32> {
    let source = core.source(receiving.from).map_err(|()| sys::FI_EADDRNOTAVAIL)?;
    let (tag, ignore) = receiving.tag.unwrap_or((0, 0));
    let pattern = Pattern { tagged: receiving.tag.is_some(), source, tag, ignore };
    let (context, flags) = (receiving.context as usize, receiving.flags.of(core, Side::Receive));
    let (claim, discard) = (flags & sys::MS_FI_CLAIM != 0, flags & sys::MS_FI_DISCARD != 0);
    if flags & sys::MS_FI_PEEK != 0 {
        core.endpoint.peek(&pattern, context, claim, discard);
        return Ok(());
    }
    if claim && discard {
        return if core.endpoint.discard_claimed(&pattern, context) { Ok(()) } else { Err(sys::FI_EINVAL) };
    }
    let signaled = core.is_signaled(Side::Receive, flags);
    let receive = Receive { buffer, context, signaled, pattern };
    if !claim {
        core.endpoint.receive(receive);
        return Ok(());
    }
    if core.endpoint.receive_claimed(receive) { Ok(()) } else { Err(sys::FI_EINVAL) }
}

/// Receives a message into the parts.
///
/// # Safety
/// An open endpoint, and parts that live until the completion.
unsafe fn receive_parts_of(
    ep: *mut sys::fid_ep,
    parts: impl Iterator<Item = (*mut u8, usize)>,
    receiving: Receiving,
) -> isize {
    // SAFETY: the caller's.
    unsafe { operate(ep, |core| receive_buffer(core, UserBuffer::new(parts), &receiving)) }
}

// Each function below passes on its arguments, which libfabric defines: open endpoints, buffers that live until the
// completion, arrays of the given length.

unsafe extern "C" fn receive(
    ep: *mut sys::fid_ep,
    buffer: *mut c_void,
    length: usize,
    _: *mut c_void,
    from: sys::fi_addr_t,
    context: *mut c_void,
) -> isize {
    let receiving = Receiving { from, tag: None, context, flags: CallFlags::Default };
    // SAFETY: see above.
    unsafe { receive_parts_of(ep, iovec(buffer, length), receiving) }
}

unsafe extern "C" fn receive_parts(
    ep: *mut sys::fid_ep,
    parts: *const sys::iovec,
    _: *mut *mut c_void,
    count: usize,
    from: sys::fi_addr_t,
    context: *mut c_void,
) -> isize {
    let receiving = Receiving { from, tag: None, context, flags: CallFlags::Default };
    // SAFETY: see above.
    unsafe { receive_parts_of(ep, iovecs(parts, count), receiving) }
}

unsafe extern "C" fn receive_message(ep: *mut sys::fid_ep, message: *const sys::fi_msg, flags: u64) -> isize {
    // SAFETY: see above.
    unsafe {
        let message = &*message;
        let receiving = Receiving {
            from: message.addr,
            tag: None,
            context: message.context,
            flags: CallFlags::Given(flags),
        };
        receive_parts_of(ep, iovecs(message.msg_iov, message.iov_count), receiving)
    }
}

unsafe extern "C" fn send(
    ep: *mut sys::fid_ep,
    buffer: *const c_void,
    length: usize,
    _: *mut c_void,
    to: sys::fi_addr_t,
    context: *mut c_void,
) -> isize {
    let sending = Sending { to, tag: None, data: None, context, flags: CallFlags::Default };
    // SAFETY: see above.
    unsafe { send_parts_of(ep, iovec(buffer, length), sending) }
}

unsafe extern "C" fn send_parts(
    ep: *mut sys::fid_ep,
    parts: *const sys::iovec,
    _: *mut *mut c_void,
    count: usize,
    to: sys::fi_addr_t,
    context: *mut c_void,
) -> isize {
    let sending = Sending { to, tag: None, data: None, context, flags: CallFlags::Default };
    // SAFETY: see above.
    unsafe { send_parts_of(ep, iovecs(parts, count), sending) }
}

unsafe extern "C" fn send_message(ep: *mut sys::fid_ep, message: *const sys::fi_msg, flags: u64) -> isize {
    // SAFETY: see above.
    unsafe {
        let message = &*message;
        let data = (flags & sys::MS_FI_REMOTE_CQ_DATA != 0).then_some(message.data);
        let (to, context, flags) = (message.addr, message.context, CallFlags::Given(flags));
        let sending = Sending { to, tag: None, data, context, flags };
        send_parts_of(ep, iovecs(message.msg_iov, message.iov_count), sending)
    }
}

unsafe extern "C" fn inject(
    ep: *mut sys::fid_ep,
    buffer: *const c_void,
    length: usize,
    to: sys::fi_addr_t,
) -> isize {
    // SAFETY: see above.
    unsafe { inject_one(ep, buffer, length, to, None, None) }
}

unsafe extern "C" fn send_data(
    ep: *mut sys::fid_ep,
    buffer: *const c_void,
    length: usize,
    _: *mut c_void,
    data: u64,
    to: sys::fi_addr_t,
    context: *mut c_void,
) -> isize {
    let sending = Sending { to, tag: None, data: Some(data), context, flags: CallFlags::Default };
    // SAFETY: see above.
    unsafe { send_parts_of(ep, iovec(buffer, length), sending) }
}

unsafe extern "C" fn inject_data(
    ep: *mut sys::fid_ep,
    buffer: *const c_void,
    length: usize,
    data: u64,
    to: sys::fi_addr_t,
) -> isize {
    // SAFETY: see above.
    unsafe { inject_one(ep, buffer, length, to, None, Some(data)) }
}

unsafe extern "C" fn tagged_receive(
    ep: *mut sys::fid_ep,
    buffer: *mut c_void,
    length: usize,
    _: *mut c_void,
    from: sys::fi_addr_t,
    tag: u64,
    ignore: u64,
    context: *mut c_void,
) -> isize {
    let receiving = Receiving { from, tag: Some((tag, ignore)), context, flags: CallFlags::Default };
    // SAFETY: see above.
    unsafe { receive_parts_of(ep, iovec(buffer, length), receiving) }
}

unsafe extern "C" fn tagged_receive_parts(
    ep: *mut sys::fid_ep,
    parts: *const sys::iovec,
    _: *mut *mut c_void,
    count: usize,
    from: sys::fi_addr_t,
    tag: u64,
    ignore: u64,
    context: *mut c_void,
) -> isize {
    let receiving = Receiving { from, tag: Some((tag, ignore)), context, flags: CallFlags::Default };
    // SAFETY: see above.
    unsafe { receive_parts_of(ep, iovecs(parts, count), receiving) }
}

unsafe extern "C" fn tagged_receive_message(
    ep: *mut sys::fid_ep,
    message: *const sys::fi_msg_tagged,
    flags: u64,
) -> isize {
    // SAFETY: see above.
    unsafe {
        let message = &*message;
        let tag = Some((message.tag, message.ignore));
        let receiving =
            Receiving { from: message.addr, tag, context: message.context, flags: CallFlags::Given(flags) };
        receive_parts_of(ep, iovecs(message.msg_iov, message.iov_count), receiving)
    }
}

unsafe extern "C" fn tagged_send(
    ep: *mut sys::fid_ep,
    buffer: *const c_void,
    length: usize,
    _: *mut c_void,
    to: sys::fi_addr_t,
    tag: u64,
    context: *mut c_void,
) -> isize {
    let sending = Sending { to, tag: Some(tag), data: None, context, flags: CallFlags::Default };
    // SAFETY: see above.
    unsafe { send_parts_of(ep, iovec(buffer, length), sending) }
}

unsafe extern "C" fn tagged_send_parts(
    ep: *mut sys::fid_ep,
    parts: *const sys::iovec,
    _: *mut *mut c_void,
    count: usize,
    to: sys::fi_addr_t,
    tag: u64,
    context: *mut c_void,
) -> isize {
    let sending = Sending { to, tag: Some(tag), data: None, context, flags: CallFlags::Default };
    // SAFETY: see above.
    unsafe { send_parts_of(ep, iovecs(parts, count), sending) }
}

unsafe extern "C" fn tagged_send_message(
    ep: *mut sys::fid_ep,
    message: *const sys::fi_msg_tagged,
    flags: u64,
) -> isize {
    // SAFETY: see above.
    unsafe {
        let message = &*message;
        let data = (flags & sys::MS_FI_REMOTE_CQ_DATA != 0).then_some(message.data);
        let (to, context, flags) = (message.addr, message.context, CallFlags::Given(flags));
        let sending = Sending { to, tag: Some(message.tag), data, context, flags };
        send_parts_of(ep, iovecs(message.msg_iov, message.iov_count), sending)
    }
}

unsafe extern "C" fn tagged_inject(
    ep: *mut sys::fid_ep,
    buffer: *const c_void,
    length: usize,
    to: sys::fi_addr_t,
    tag: u64,
) -> isize {
    // SAFETY: see above.
    unsafe { inject_one(ep, buffer, length, to, Some(tag), None) }
}

unsafe extern "C" fn tagged_send_data(
    ep: *mut sys::fid_ep,
    buffer: *const c_void,
    length: usize,
    _: *mut c_void,
    data: u64,
    to: sys::fi_addr_t,
    tag: u64,
    context: *mut c_void,
) -> isize {
    let sending = Sending { to, tag: Some(tag), data: Some(data), context, flags: CallFlags::Default };
    // SAFETY: see above.
    unsafe { send_parts_of(ep, iovec(buffer, length), sending) }
}

unsafe extern "C" fn tagged_inject_data(
    ep: *mut sys::fid_ep,
    buffer: *const c_void,
    length: usize,
    data: u64,
    to: sys::fi_addr_t,
    tag: u64,
) -> isize {
    // SAFETY: see above.
    unsafe { inject_one(ep, buffer, length, to, Some(tag), Some(data)) }
}
