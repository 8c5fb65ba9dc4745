//! Atomic operations. The target carries them out when it makes progress, one after the other.

use std::ffi::{c_int, c_void};

use super::ep::{CallFlags, operate};
use super::rma::Remote;
use super::{array, error, error_size};
use crate::atomic::{AtomicKind, is_supported, size_of as value_size};
use crate::endpoint::Source;
use crate::header::{Header, Kind};
use crate::memory::UserBuffer;
use crate::ring::PAYLOAD;
use crate::sys;

pub(super) static OPS: sys::fi_ops_atomic = sys::fi_ops_atomic {
    size: size_of::<sys::fi_ops_atomic>(),
    write: Some(write),
    writev: Some(write_parts),
    writemsg: Some(write_message),
    inject: Some(inject),
    readwrite: Some(fetch),
    readwritev: Some(fetch_parts),
    readwritemsg: Some(fetch_message),
    compwrite: Some(compare),
    compwritev: Some(compare_parts),
    compwritemsg: Some(compare_message),
    writevalid: Some(write_valid),
    readwritevalid: Some(fetch_valid),
    compwritevalid: Some(compare_valid),
};

/// Maximum number of values of one operation, whose operands and values to compare with fit one slot.
fn max_values(datatype: u32, kind: AtomicKind) -> usize {
    let bytes = if kind == AtomicKind::Compare { PAYLOAD / 2 } else { PAYLOAD };
    value_size(datatype).map_or(0, |size| bytes / size)
}

/// An atomic operation, and its values in the application's memory.
struct Operation<'v> {
    datatype: u32,
    operation: u32,
    kind: AtomicKind,
    operands: &'v [sys::fi_ioc],
    /// Values to compare with.
    compared: &'v [sys::fi_ioc],
    /// Where the previous values go.
    results: &'v [sys::fi_ioc],
}

impl Operation<'_> {
    /// The values that the target needs: operands, then values to compare with.
    ///
    /// # Safety
    /// Each part has its number of values of the type.
    unsafe fn values(&self, size: usize) -> Result<Vec<u8>, u32> {
        let mut values = Vec::new();
        if self.operation == sys::FI_ATOMIC_READ {
            // A read has no operands, only results.
            values.resize(self.results.iter().map(|part| part.count * size).sum(), 0);
        } else {
            // SAFETY: the caller's values.
            unsafe { append(self.operands, size, &mut values) };
        }
        if self.kind == AtomicKind::Compare {
            let operands = values.len();
            // SAFETY: as above.
            unsafe { append(self.compared, size, &mut values) };
            if values.len() != 2 * operands {
                return Err(sys::FI_EINVAL);
            }
        }
        if values.len() > PAYLOAD { Err(sys::FI_EMSGSIZE) } else { Ok(values) }
    }

    /// Sends the operation to the target.
    ///
    /// # Safety
    /// An open endpoint. Each part has its number of values of the type; the results live until the completion.
    unsafe fn submit(&self, ep: *mut sys::fid_ep, remote: Remote) -> isize {
        // SAFETY: the caller's.
        unsafe {
            operate(ep, |core| {
                let size = value_size(self.datatype).ok_or(sys::FI_EOPNOTSUPP)?;
                if !is_supported(self.datatype, self.operation, self.kind) {
                    return Err(sys::FI_EOPNOTSUPP);
                }
                let values = self.values(size)?;
                let results = self.results.iter().map(|part| (part.addr.cast(), part.count * size));
                let results = UserBuffer::new(results);
                let to = core.address(remote.at).ok_or(sys::FI_EADDRNOTAVAIL)?;
                let header = Header {
                    tag: remote.address,
                    key: remote.key,
                    datatype: self.datatype as u8,
                    operation: self.operation as u8,
                    data: match self.kind {
                        AtomicKind::Write => 0,
                        AtomicKind::Fetch => 1,
                        AtomicKind::Compare => 2,
                    },
                    ..Header::new(Kind::Atomic)
                };
                let access = if self.kind == AtomicKind::Write { sys::MS_FI_WRITE } else { sys::MS_FI_READ };
                let completion = core.completion(remote.context, sys::MS_FI_ATOMIC | access, remote.flags);
                core.endpoint.send_request(to, header, Source::Owned(values), results, completion);
                Ok(())
            })
        }
    }
}

/// Appends values of the application.
///
/// # Safety
/// Each part has its number of values of that size.
unsafe fn append(parts: &[sys::fi_ioc], size: usize, to: &mut Vec<u8>) {
    for part in parts {
        // SAFETY: the caller's values.
        let buffer = unsafe { UserBuffer::new([(part.addr.cast(), part.count * size)]) };
        buffer.read(0, part.count * size, to);
    }
}

fn part(values: *const c_void, count: usize) -> [sys::fi_ioc; 1] {
    [sys::fi_ioc { addr: values.cast_mut(), count }]
}

/// Submits the operation of a message.
///
/// # Safety
/// As for [`Operation::submit`], and a valid message.
unsafe fn submit_message(
    ep: *mut sys::fid_ep,
    message: *const sys::fi_msg_atomic,
    flags: u64,
    kind: AtomicKind,
    compared: &[sys::fi_ioc],
    results: &[sys::fi_ioc],
) -> isize {
    // SAFETY: the caller's message.
    unsafe {
        let message = &*message;
        let Some(target) = message.rma_iov.as_ref().filter(|_| message.rma_iov_count == 1) else {
            return error_size(sys::FI_EINVAL);
        };
        let (at, context, flags) = (message.addr, message.context, CallFlags::Given(flags));
        let remote = Remote { at, address: target.addr, key: target.key, context, flags };
        let operands = array(message.msg_iov, message.iov_count);
        let (datatype, operation) = (message.datatype, message.op);
        Operation { datatype, operation, kind, operands, compared, results }.submit(ep, remote)
    }
}

// Each function below passes on its arguments, which libfabric defines: open endpoints, values that live until the
// completion, arrays of the given length.

unsafe extern "C" fn write(
    ep: *mut sys::fid_ep,
    values: *const c_void,
    count: usize,
    _: *mut c_void,
    at: sys::fi_addr_t,
    address: u64,
    key: u64,
    datatype: sys::fi_datatype,
    operation: sys::fi_op,
    context: *mut c_void,
) -> isize {
    let remote = Remote { at, address, key, context, flags: CallFlags::Default };
    let (kind, operands) = (AtomicKind::Write, &part(values, count));
    // SAFETY: see above.
    unsafe {
        Operation { datatype, operation, kind, operands, compared: &[], results: &[] }.submit(ep, remote)
    }
}

unsafe extern "C" fn write_parts(
    ep: *mut sys::fid_ep,
    values: *const sys::fi_ioc,
    _: *mut *mut c_void,
    count: usize,
    at: sys::fi_addr_t,
    address: u64,
    key: u64,
    datatype: sys::fi_datatype,
    operation: sys::fi_op,
    context: *mut c_void,
) -> isize {
    let remote = Remote { at, address, key, context, flags: CallFlags::Default };
    let kind = AtomicKind::Write;
    // SAFETY: see above.
    unsafe {
        let operands = array(values, count);
        Operation { datatype, operation, kind, operands, compared: &[], results: &[] }.submit(ep, remote)
    }
}

unsafe extern "C" fn write_message(
    ep: *mut sys::fid_ep,
    message: *const sys::fi_msg_atomic,
    flags: u64,
) -> isize {
    // SAFETY: see above.
    unsafe { submit_message(ep, message, flags, AtomicKind::Write, &[], &[]) }
}

unsafe extern "C" fn inject(
    ep: *mut sys::fid_ep,
    values: *const c_void,
    count: usize,
    at: sys::fi_addr_t,
    address: u64,
    key: u64,
    datatype: sys::fi_datatype,
    operation: sys::fi_op,
) -> isize {
    let remote = Remote { at, address, key, context: std::ptr::null_mut(), flags: CallFlags::Inject };
    let (kind, operands) = (AtomicKind::Write, &part(values, count));
    // SAFETY: see above.
    unsafe {
        Operation { datatype, operation, kind, operands, compared: &[], results: &[] }.submit(ep, remote)
    }
}

unsafe extern "C" fn fetch(
    ep: *mut sys::fid_ep,
    values: *const c_void,
    count: usize,
    _: *mut c_void,
    result: *mut c_void,
    _: *mut c_void,
    at: sys::fi_addr_t,
    address: u64,
    key: u64,
    datatype: sys::fi_datatype,
    operation: sys::fi_op,
    context: *mut c_void,
) -> isize {
    let remote = Remote { at, address, key, context, flags: CallFlags::Default };
    let (kind, operands, results) = (AtomicKind::Fetch, &part(values, count), &part(result, count));
    // SAFETY: see above.
    unsafe { Operation { datatype, operation, kind, operands, compared: &[], results }.submit(ep, remote) }
}

unsafe extern "C" fn fetch_parts(
    ep: *mut sys::fid_ep,
    values: *const sys::fi_ioc,
    _: *mut *mut c_void,
    count: usize,
    results: *mut sys::fi_ioc,
    _: *mut *mut c_void,
    result_count: usize,
    at: sys::fi_addr_t,
    address: u64,
    key: u64,
    datatype: sys::fi_datatype,
    operation: sys::fi_op,
    context: *mut c_void,
) -> isize {
    let remote = Remote { at, address, key, context, flags: CallFlags::Default };
    let kind = AtomicKind::Fetch;
    // SAFETY: see above.
    unsafe {
        let (operands, results) = (array(values, count), array(results, result_count));
        Operation { datatype, operation, kind, operands, compared: &[], results }.submit(ep, remote)
    }
}

unsafe extern "C" fn fetch_message(
    ep: *mut sys::fid_ep,
    message: *const sys::fi_msg_atomic,
    results: *mut sys::fi_ioc,
    _: *mut *mut c_void,
    result_count: usize,
    flags: u64,
) -> isize {
    // SAFETY: see above.
    unsafe { submit_message(ep, message, flags, AtomicKind::Fetch, &[], array(results, result_count)) }
}

unsafe extern "C" fn compare(
    ep: *mut sys::fid_ep,
    values: *const c_void,
    count: usize,
    _: *mut c_void,
    compared: *const c_void,
    _: *mut c_void,
    result: *mut c_void,
    _: *mut c_void,
    at: sys::fi_addr_t,
    address: u64,
    key: u64,
    datatype: sys::fi_datatype,
    operation: sys::fi_op,
    context: *mut c_void,
) -> isize {
    let remote = Remote { at, address, key, context, flags: CallFlags::Default };
    let (kind, operands) = (AtomicKind::Compare, &part(values, count));
    let (compared, results) = (&part(compared, count), &part(result, count));
    // SAFETY: see above.
    unsafe { Operation { datatype, operation, kind, operands, compared, results }.submit(ep, remote) }
}

unsafe extern "C" fn compare_parts(
    ep: *mut sys::fid_ep,
    values: *const sys::fi_ioc,
    _: *mut *mut c_void,
    count: usize,
    compared: *const sys::fi_ioc,
    _: *mut *mut c_void,
    compared_count: usize,
    results: *mut sys::fi_ioc,
    _: *mut *mut c_void,
    result_count: usize,
    at: sys::fi_addr_t,
    address: u64,
    key: u64,
    datatype: sys::fi_datatype,
    operation: sys::fi_op,
    context: *mut c_void,
) -> isize {
    let remote = Remote { at, address, key, context, flags: CallFlags::Default };
    let kind = AtomicKind::Compare;
    // SAFETY: see above.
    unsafe {
        let (operands, compared) = (array(values, count), array(compared, compared_count));
        let results = array(results, result_count);
        Operation { datatype, operation, kind, operands, compared, results }.submit(ep, remote)
    }
}

unsafe extern "C" fn compare_message(
    ep: *mut sys::fid_ep,
    message: *const sys::fi_msg_atomic,
    compared: *const sys::fi_ioc,
    _: *mut *mut c_void,
    compared_count: usize,
    results: *mut sys::fi_ioc,
    _: *mut *mut c_void,
    result_count: usize,
    flags: u64,
) -> isize {
    // SAFETY: see above.
    unsafe {
        let (compared, results) = (array(compared, compared_count), array(results, result_count));
        submit_message(ep, message, flags, AtomicKind::Compare, compared, results)
    }
}

/// # Safety
/// `count` is null or writable.
unsafe fn valid(datatype: u32, operation: u32, kind: AtomicKind, count: *mut usize) -> c_int {
    if !is_supported(datatype, operation, kind) {
        return error(sys::FI_EOPNOTSUPP);
    }
    // SAFETY: the caller's pointer.
    if let Some(count) = unsafe { count.as_mut() } {
        *count = max_values(datatype, kind);
    }
    0
}

unsafe extern "C" fn write_valid(
    _: *mut sys::fid_ep,
    datatype: sys::fi_datatype,
    operation: sys::fi_op,
    count: *mut usize,
) -> c_int {
    // SAFETY: see above.
    unsafe { valid(datatype, operation, AtomicKind::Write, count) }
}

unsafe extern "C" fn fetch_valid(
    _: *mut sys::fid_ep,
    datatype: sys::fi_datatype,
    operation: sys::fi_op,
    count: *mut usize,
) -> c_int {
    // SAFETY: see above.
    unsafe { valid(datatype, operation, AtomicKind::Fetch, count) }
}

unsafe extern "C" fn compare_valid(
    _: *mut sys::fid_ep,
    datatype: sys::fi_datatype,
    operation: sys::fi_op,
    count: *mut usize,
) -> c_int {
    // SAFETY: see above.
    unsafe { valid(datatype, operation, AtomicKind::Compare, count) }
}

pub(super) unsafe extern "C" fn query(
    _: *mut sys::fid_domain,
    datatype: sys::fi_datatype,
    operation: sys::fi_op,
    attributes: *mut sys::fi_atomic_attr,
    flags: u64,
) -> c_int {
    let kind = if flags & sys::MS_FI_COMPARE_ATOMIC != 0 {
        AtomicKind::Compare
    } else if flags & sys::MS_FI_FETCH_ATOMIC != 0 {
        AtomicKind::Fetch
    } else {
        AtomicKind::Write
    };
    if !is_supported(datatype, operation, kind) {
        return error(sys::FI_EOPNOTSUPP);
    }
    // SAFETY: libfabric's pointer.
    if let Some(attributes) = unsafe { attributes.as_mut() } {
        attributes.size = value_size(datatype).unwrap_or(0);
        attributes.count = max_values(datatype, kind);
    }
    0
}
