//! Remote memory: reads and writes. The target carries them out when it makes progress.

use std::ffi::c_void;

use super::ep::{CallFlags, operate};
use super::msg::copied_if_injected;
use super::{error_size, iovec, iovecs};
use crate::endpoint::{Side, Source};
use crate::header::{Header, Kind};
use crate::matching::ReceiveBuffer;
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

/// Remote memory of an operation, and how the operation completes.
#[derive(Clone, Copy)]
pub(super) struct Remote {
    /// Number of the target in the address vector.
    pub(super) at: u64,
    /// Offset in the region.
    pub(super) address: u64,
    pub(super) key: u64,
    pub(super) context: *mut c_void,
    pub(super) flags: CallFlags,
}

/// Writes the parts. The write completes when it is in place, so that a read by any path finds it.
///
/// # Safety
/// An open endpoint, and parts that live until the completion.
unsafe fn write_to(
    ep: *mut sys::fid_ep,
    parts: impl Iterator<Item = (*mut u8, usize)>,
    data: Option<u64>,
    remote: Remote,
) -> isize {
    // SAFETY: the caller's.
    unsafe {
        operate(ep, |core| {
            let to = core.address(remote.at).ok_or(sys::FI_EADDRNOTAVAIL)?;
            let header = Header {
                tag: remote.address,
                key: remote.key,
                has_data: data.is_some(),
                data: data.unwrap_or(0),
                ..Header::new(Kind::Write)
            };
            let kind = sys::MS_FI_RMA | sys::MS_FI_WRITE;
            let completion = core.completion(remote.context, kind, remote.flags);
            let source = copied_if_injected(UserBuffer::new(parts), remote.flags.of(core, Side::Transmit))?;
            core.endpoint.send(to, header, source, completion, true);
            Ok(())
        })
    }
}

/// Reads into the parts.
///
/// # Safety
/// As for [`write_to`].
unsafe fn read_from(
    ep: *mut sys::fid_ep,
    parts: impl Iterator<Item = (*mut u8, usize)>,
    remote: Remote,
) -> isize {
    // SAFETY: the caller's.
    unsafe {
        operate(ep, |core| {
            let to = core.address(remote.at).ok_or(sys::FI_EADDRNOTAVAIL)?;
            let buffer = UserBuffer::new(parts);
            let header = Header {
                tag: remote.address,
                key: remote.key,
                data: buffer.size(),
                ..Header::new(Kind::ReadRequest)
            };
            let completion = core.completion(remote.context, sys::MS_FI_RMA | sys::MS_FI_READ, remote.flags);
            core.endpoint.send_request(to, header, Source::Owned(Vec::new()), buffer, completion);
            Ok(())
        })
    }
}

/// The remote memory of a message, if it is one range.
///
/// # Safety
/// A valid message.
unsafe fn remote_of(message: &sys::fi_msg_rma, flags: u64) -> Option<Remote> {
    // SAFETY: the caller's message.
    let range = unsafe { message.rma_iov.as_ref() }.filter(|_| message.rma_iov_count == 1)?;
    let flags = CallFlags::Given(flags);
    Some(Remote { at: message.addr, address: range.addr, key: range.key, context: message.context, flags })
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
    let remote = Remote { at, address, key, context, flags: CallFlags::Default };
    // SAFETY: see above.
    unsafe { read_from(ep, iovec(buffer, length), remote) }
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
    let remote = Remote { at, address, key, context, flags: CallFlags::Default };
    // SAFETY: see above.
    unsafe { read_from(ep, iovecs(parts, count), remote) }
}

unsafe extern "C" fn read_message(
    ep: *mut sys::fid_ep,
    message: *const sys::fi_msg_rma,
    flags: u64,
) -> isize {
    // SAFETY: see above.
    unsafe {
        let message = &*message;
        let Some(remote) = remote_of(message, flags) else { return error_size(sys::FI_EINVAL) };
        read_from(ep, iovecs(message.msg_iov, message.iov_count), remote)
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
    let remote = Remote { at, address, key, context, flags: CallFlags::Default };
    // SAFETY: see above.
    unsafe { write_to(ep, iovec(buffer, length), None, remote) }
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
    let remote = Remote { at, address, key, context, flags: CallFlags::Default };
    // SAFETY: see above.
    unsafe { write_to(ep, iovecs(parts, count), None, remote) }
}

unsafe extern "C" fn write_message(
    ep: *mut sys::fid_ep,
    message: *const sys::fi_msg_rma,
    flags: u64,
) -> isize {
    // SAFETY: see above.
    unsafe {
        let message = &*message;
        let Some(remote) = remote_of(message, flags) else { return error_size(sys::FI_EINVAL) };
        let data = (flags & sys::MS_FI_REMOTE_CQ_DATA != 0).then_some(message.data);
        write_to(ep, iovecs(message.msg_iov, message.iov_count), data, remote)
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
    let remote = Remote { at, address, key, context: std::ptr::null_mut(), flags: CallFlags::Inject };
    // SAFETY: see above.
    unsafe { write_to(ep, iovec(buffer, length), None, remote) }
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
    let remote = Remote { at, address, key, context, flags: CallFlags::Default };
    // SAFETY: see above.
    unsafe { write_to(ep, iovec(buffer, length), Some(data), remote) }
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
    let remote = Remote { at, address, key, context: std::ptr::null_mut(), flags: CallFlags::Inject };
    // SAFETY: see above.
    unsafe { write_to(ep, iovec(buffer, length), Some(data), remote) }
}
