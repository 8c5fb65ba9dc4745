//! Remote memory: reads and writes. The target carries them out when it makes progress.

use std::ffi::c_void;

use super::ep::{Core, operate};
use super::iovecs;
use super::msg::copied_if_injected;
use crate::endpoint::{Side, Source};
use crate::header::{Header, Kind};
use crate::matching::Place;
use crate::memory::UserBuffer;
use crate::sys;

pub(super) static OPS: sys::fi_ops_rma = sys::fi_ops_rma {
    size: size_of::<sys::fi_ops_rma>(),
    read: Some(read),
    readv: Some(read_parts),
    readmsg: Some(read_message),
    write: Some(write),
    writev: Some(write_parts),
    writemsg: Some(write_message),
    inject: Some(inject),
    writedata: Some(write_data),
    injectdata: Some(inject_data),
};

/// A place in the memory of an endpoint, and the application's mark.
#[derive(Clone, Copy)]
pub(super) struct Remote {
    pub(super) at: u64,
    pub(super) address: u64,
    pub(super) key: u64,
    pub(super) context: *mut c_void,
    pub(super) flags: u64,
}

/// Writes complete when they are in place, so that a read by any path finds them.
fn write_buffer(
    core: &mut Core,
    buffer: UserBuffer,
    data: Option<u64>,
    remote: Remote,
    shown: bool,
) -> Result<(), u32> {
    let to = core.address(remote.at).ok_or(sys::FI_EADDRNOTAVAIL)?;
    let header = Header {
        tag: remote.address,
        key: remote.key,
        has_data: data.is_some(),
        data: data.unwrap_or(0),
        ..Header::new(Kind::Write)
    };
    let what = sys::MS_FI_RMA | sys::MS_FI_WRITE;
    let mut completion = core.completion(Side::Transmit, remote.context, what, remote.flags);
    completion.shown &= shown;
    let source = copied_if_injected(buffer, remote.flags)?;
    core.endpoint.send(to, header, source, completion, true);
    Ok(())
}

fn read_buffer(core: &mut Core, buffer: UserBuffer, remote: Remote) -> Result<(), u32> {
    let to = core.address(remote.at).ok_or(sys::FI_EADDRNOTAVAIL)?;
    let header = Header {
        tag: remote.address,
        key: remote.key,
        data: buffer.size(),
        ..Header::new(Kind::ReadRequest)
    };
    let what = sys::MS_FI_RMA | sys::MS_FI_READ;
    let completion = core.completion(Side::Transmit, remote.context, what, remote.flags);
    core.endpoint.ask(to, header, Source::Owned(Vec::new()), buffer, completion);
    Ok(())
}

fn with_defaults(core: &Core, remote: Remote) -> Remote {
    Remote { flags: remote.flags | core.default_flags(Side::Transmit), ..remote }
}

// Each function below passes on its arguments, which libfabric defines: open endpoints, buffers that live until the
// completion, arrays of the given length.

unsafe extern "C" fn read(
    ep: *mut sys::fid_ep,
    buffer: *mut c_void,
    length: usize,
    _: *mut c_void,
    at: sys::fi_addr_t,
    address: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    let remote = Remote { at, address, key, context, flags: 0 };
    // SAFETY: see above.
    unsafe {
        operate(ep, |core| {
            let remote = with_defaults(core, remote);
            read_buffer(core, UserBuffer::new([(buffer.cast(), length)]), remote)
        })
    }
}

unsafe extern "C" fn read_parts(
    ep: *mut sys::fid_ep,
    parts: *const sys::iovec,
    _: *mut *mut c_void,
    count: usize,
    at: sys::fi_addr_t,
    address: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    let remote = Remote { at, address, key, context, flags: 0 };
    // SAFETY: see above.
    unsafe {
        operate(ep, |core| {
            let remote = with_defaults(core, remote);
            read_buffer(core, UserBuffer::new(iovecs(parts, count)), remote)
        })
    }
}

/// The one place in remote memory of a message.
///
/// # Safety
/// A valid message.
unsafe fn remote_of(message: &sys::fi_msg_rma, flags: u64) -> Result<Remote, u32> {
    if message.rma_iov_count != 1 || message.rma_iov.is_null() {
        return Err(sys::FI_EINVAL);
    }
    // SAFETY: one entry.
    let place = unsafe { *message.rma_iov };
    Ok(Remote { at: message.addr, address: place.addr, key: place.key, context: message.context, flags })
}

unsafe extern "C" fn read_message(
    ep: *mut sys::fid_ep,
    message: *const sys::fi_msg_rma,
    flags: u64,
) -> isize {
    // SAFETY: see above.
    unsafe {
        let message = &*message;
        operate(ep, |core| {
            let remote = remote_of(message, flags)?;
            read_buffer(core, UserBuffer::new(iovecs(message.msg_iov, message.iov_count)), remote)
        })
    }
}

unsafe extern "C" fn write(
    ep: *mut sys::fid_ep,
    buffer: *const c_void,
    length: usize,
    _: *mut c_void,
    at: sys::fi_addr_t,
    address: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    let remote = Remote { at, address, key, context, flags: 0 };
    // SAFETY: see above.
    unsafe {
        operate(ep, |core| {
            let remote = with_defaults(core, remote);
            let buffer = UserBuffer::new([(buffer.cast_mut().cast(), length)]);
            write_buffer(core, buffer, None, remote, true)
        })
    }
}

unsafe extern "C" fn write_parts(
    ep: *mut sys::fid_ep,
    parts: *const sys::iovec,
    _: *mut *mut c_void,
    count: usize,
    at: sys::fi_addr_t,
    address: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    let remote = Remote { at, address, key, context, flags: 0 };
    // SAFETY: see above.
    unsafe {
        operate(ep, |core| {
            let remote = with_defaults(core, remote);
            write_buffer(core, UserBuffer::new(iovecs(parts, count)), None, remote, true)
        })
    }
}

unsafe extern "C" fn write_message(
    ep: *mut sys::fid_ep,
    message: *const sys::fi_msg_rma,
    flags: u64,
) -> isize {
    // SAFETY: see above.
    unsafe {
        let message = &*message;
        operate(ep, |core| {
            let data = (flags & sys::MS_FI_REMOTE_CQ_DATA != 0).then_some(message.data);
            let remote = remote_of(message, flags)?;
            let buffer = UserBuffer::new(iovecs(message.msg_iov, message.iov_count));
            write_buffer(core, buffer, data, remote, true)
        })
    }
}

unsafe extern "C" fn inject(
    ep: *mut sys::fid_ep,
    buffer: *const c_void,
    length: usize,
    at: sys::fi_addr_t,
    address: u64,
    key: u64,
) -> isize {
    let remote = Remote { at, address, key, context: std::ptr::null_mut(), flags: sys::MS_FI_INJECT };
    // SAFETY: see above.
    unsafe {
        operate(ep, |core| {
            let buffer = UserBuffer::new([(buffer.cast_mut().cast(), length)]);
            write_buffer(core, buffer, None, remote, false)
        })
    }
}

unsafe extern "C" fn write_data(
    ep: *mut sys::fid_ep,
    buffer: *const c_void,
    length: usize,
    _: *mut c_void,
    data: u64,
    at: sys::fi_addr_t,
    address: u64,
    key: u64,
    context: *mut c_void,
) -> isize {
    let remote = Remote { at, address, key, context, flags: 0 };
    // SAFETY: see above.
    unsafe {
        operate(ep, |core| {
            let remote = with_defaults(core, remote);
            let buffer = UserBuffer::new([(buffer.cast_mut().cast(), length)]);
            write_buffer(core, buffer, Some(data), remote, true)
        })
    }
}

unsafe extern "C" fn inject_data(
    ep: *mut sys::fid_ep,
    buffer: *const c_void,
    length: usize,
    data: u64,
    at: sys::fi_addr_t,
    address: u64,
    key: u64,
) -> isize {
    let remote = Remote { at, address, key, context: std::ptr::null_mut(), flags: sys::MS_FI_INJECT };
    // SAFETY: see above.
    unsafe {
        operate(ep, |core| {
            let buffer = UserBuffer::new([(buffer.cast_mut().cast(), length)]);
            write_buffer(core, buffer, Some(data), remote, false)
        })
    }
}
