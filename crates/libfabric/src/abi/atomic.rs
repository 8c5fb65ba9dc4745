//! Atomic operations. The target carries them out when it makes progress, one after the other.

use std::ffi::{c_int, c_void};

use super::ep::{Core, operate};
use super::error;
use super::rma::Remote;
use crate::atomic::{Flavour, is_supported, size_of as value_size};
use crate::endpoint::{Side, Source};
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

/// Values that one operation changes at most: operands and values to compare with are in one slot.
fn most_values(datatype: u32, flavour: Flavour) -> usize {
    let bytes = if flavour == Flavour::Compare { PAYLOAD / 2 } else { PAYLOAD };
    value_size(datatype).map_or(0, |size| bytes / size)
}

/// An operation on values.
struct Change {
    datatype: u32,
    operation: u32,
    flavour: Flavour,
}

/// Appends values of the application.
///
/// # Safety
/// Each part has that many values of the type.
unsafe fn gather(parts: &[sys::fi_ioc], size: usize, into: &mut Vec<u8>) {
    for part in parts {
        // SAFETY: the caller's values.
        let buffer = unsafe { UserBuffer::new([(part.addr.cast(), part.count * size)]) };
        buffer.read(0, part.count * size, into);
    }
}

fn submit(
    core: &mut Core,
    change: &Change,
    values: Vec<u8>,
    place: UserBuffer,
    remote: Remote,
    shown: bool,
) -> Result<(), u32> {
    if !is_supported(change.datatype, change.operation, change.flavour) {
        return Err(sys::FI_EOPNOTSUPP);
    }
    if values.len() > PAYLOAD {
        return Err(sys::FI_EMSGSIZE);
    }
    let to = core.address(remote.at).ok_or(sys::FI_EADDRNOTAVAIL)?;
    let header = Header {
        tag: remote.address,
        key: remote.key,
        datatype: change.datatype as u8,
        operation: change.operation as u8,
        data: match change.flavour {
            Flavour::Write => 0,
            Flavour::Fetch => 1,
            Flavour::Compare => 2,
        },
        ..Header::new(Kind::Atomic)
    };
    let what =
        sys::MS_FI_ATOMIC | if change.flavour == Flavour::Write { sys::MS_FI_WRITE } else { sys::MS_FI_READ };
    let mut completion = core.completion(Side::Transmit, remote.context, what, remote.flags);
    completion.shown &= shown;
    core.endpoint.ask(to, header, Source::Owned(values), place, completion);
    Ok(())
}

/// # Safety
/// Parts with values of the type: operands, values to compare with, places for results.
unsafe fn operate_on(
    ep: *mut sys::fid_ep,
    change: Change,
    operands: &[sys::fi_ioc],
    compared: &[sys::fi_ioc],
    results: &[sys::fi_ioc],
    remote: Remote,
    mode: Mode,
) -> isize {
    // SAFETY: the caller's.
    unsafe {
        operate(ep, |core| {
            let size = value_size(change.datatype).ok_or(sys::FI_EOPNOTSUPP)?;
            let flags = if mode == Mode::Default { core.default_flags(Side::Transmit) } else { 0 };
            let remote = Remote { flags: remote.flags | flags, ..remote };
            let mut values = Vec::new();
            if change.operation == sys::FI_ATOMIC_READ {
                // A read has no operands, only places.
                values.resize(results.iter().map(|part| part.count * size).sum(), 0);
            } else {
                gather(operands, size, &mut values);
            }
            let before = values.len();
            if change.flavour == Flavour::Compare {
                gather(compared, size, &mut values);
                if values.len() != 2 * before {
                    return Err(sys::FI_EINVAL);
                }
            }
            let place = UserBuffer::new(results.iter().map(|part| (part.addr.cast(), part.count * size)));
            submit(core, &change, values, place, remote, mode != Mode::Inject)
        })
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// With the endpoint's flags.
    Default,
    /// With the flags of the call.
    Given,
    /// Without a completion.
    Inject,
}

fn part(values: *const c_void, count: usize) -> [sys::fi_ioc; 1] {
    [sys::fi_ioc { addr: values.cast_mut(), count }]
}

/// # Safety
/// `count` parts, or none.
unsafe fn parts<'p>(parts: *const sys::fi_ioc, count: usize) -> &'p [sys::fi_ioc] {
    if parts.is_null() || count == 0 {
        return &[];
    }
    // SAFETY: the caller's array.
    unsafe { std::slice::from_raw_parts(parts, count) }
}

/// # Safety
/// A valid message.
unsafe fn remote_of(message: &sys::fi_msg_atomic, flags: u64) -> Option<Remote> {
    // SAFETY: the caller's message.
    let place = unsafe { message.rma_iov.as_ref() }.filter(|_| message.rma_iov_count == 1)?;
    Some(Remote { at: message.addr, address: place.addr, key: place.key, context: message.context, flags })
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
    let remote = Remote { at, address, key, context, flags: 0 };
    let change = Change { datatype, operation, flavour: Flavour::Write };
    // SAFETY: see above.
    unsafe { operate_on(ep, change, &part(values, count), &[], &[], remote, Mode::Default) }
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
    let remote = Remote { at, address, key, context, flags: 0 };
    let change = Change { datatype, operation, flavour: Flavour::Write };
    // SAFETY: see above.
    unsafe { operate_on(ep, change, parts(values, count), &[], &[], remote, Mode::Default) }
}

unsafe extern "C" fn write_message(
    ep: *mut sys::fid_ep,
    message: *const sys::fi_msg_atomic,
    flags: u64,
) -> isize {
    // SAFETY: see above.
    unsafe {
        let message = &*message;
        let Some(remote) = remote_of(message, flags) else { return error(sys::FI_EINVAL) as isize };
        let change = Change { datatype: message.datatype, operation: message.op, flavour: Flavour::Write };
        let values = parts(message.msg_iov, message.iov_count);
        operate_on(ep, change, values, &[], &[], remote, Mode::Given)
    }
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
    let remote = Remote { at, address, key, context: std::ptr::null_mut(), flags: 0 };
    let change = Change { datatype, operation, flavour: Flavour::Write };
    // SAFETY: see above.
    unsafe { operate_on(ep, change, &part(values, count), &[], &[], remote, Mode::Inject) }
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
    let remote = Remote { at, address, key, context, flags: 0 };
    let change = Change { datatype, operation, flavour: Flavour::Fetch };
    let (values, results) = (part(values, count), part(result, count));
    // SAFETY: see above.
    unsafe { operate_on(ep, change, &values, &[], &results, remote, Mode::Default) }
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
    let remote = Remote { at, address, key, context, flags: 0 };
    let change = Change { datatype, operation, flavour: Flavour::Fetch };
    // SAFETY: see above.
    unsafe {
        let (values, results) = (parts(values, count), parts(results, result_count));
        operate_on(ep, change, values, &[], results, remote, Mode::Default)
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
    unsafe {
        let message = &*message;
        let Some(remote) = remote_of(message, flags) else { return error(sys::FI_EINVAL) as isize };
        let change = Change { datatype: message.datatype, operation: message.op, flavour: Flavour::Fetch };
        let (values, results) = (parts(message.msg_iov, message.iov_count), parts(results, result_count));
        operate_on(ep, change, values, &[], results, remote, Mode::Given)
    }
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
    let remote = Remote { at, address, key, context, flags: 0 };
    let change = Change { datatype, operation, flavour: Flavour::Compare };
    let (values, compared, results) = (part(values, count), part(compared, count), part(result, count));
    // SAFETY: see above.
    unsafe { operate_on(ep, change, &values, &compared, &results, remote, Mode::Default) }
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
    let remote = Remote { at, address, key, context, flags: 0 };
    let change = Change { datatype, operation, flavour: Flavour::Compare };
    // SAFETY: see above.
    unsafe {
        let (values, compared) = (parts(values, count), parts(compared, compared_count));
        operate_on(ep, change, values, compared, parts(results, result_count), remote, Mode::Default)
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
        let message = &*message;
        let Some(remote) = remote_of(message, flags) else { return error(sys::FI_EINVAL) as isize };
        let change = Change { datatype: message.datatype, operation: message.op, flavour: Flavour::Compare };
        let values = parts(message.msg_iov, message.iov_count);
        let (compared, results) = (parts(compared, compared_count), parts(results, result_count));
        operate_on(ep, change, values, compared, results, remote, Mode::Given)
    }
}

/// # Safety
/// `count` is null or a place.
unsafe fn valid(datatype: u32, operation: u32, flavour: Flavour, count: *mut usize) -> c_int {
    if !is_supported(datatype, operation, flavour) {
        return error(sys::FI_EOPNOTSUPP);
    }
    // SAFETY: the caller's place.
    if let Some(count) = unsafe { count.as_mut() } {
        *count = most_values(datatype, flavour);
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
    unsafe { valid(datatype, operation, Flavour::Write, count) }
}

unsafe extern "C" fn fetch_valid(
    _: *mut sys::fid_ep,
    datatype: sys::fi_datatype,
    operation: sys::fi_op,
    count: *mut usize,
) -> c_int {
    // SAFETY: see above.
    unsafe { valid(datatype, operation, Flavour::Fetch, count) }
}

unsafe extern "C" fn compare_valid(
    _: *mut sys::fid_ep,
    datatype: sys::fi_datatype,
    operation: sys::fi_op,
    count: *mut usize,
) -> c_int {
    // SAFETY: see above.
    unsafe { valid(datatype, operation, Flavour::Compare, count) }
}

pub(super) unsafe extern "C" fn query(
    _: *mut sys::fid_domain,
    datatype: sys::fi_datatype,
    operation: sys::fi_op,
    attributes: *mut sys::fi_atomic_attr,
    flags: u64,
) -> c_int {
    let flavour = if flags & sys::MS_FI_COMPARE_ATOMIC != 0 {
        Flavour::Compare
    } else if flags & sys::MS_FI_FETCH_ATOMIC != 0 {
        Flavour::Fetch
    } else {
        Flavour::Write
    };
    if !is_supported(datatype, operation, flavour) {
        return error(sys::FI_EOPNOTSUPP);
    }
    // SAFETY: libfabric's place.
    if let Some(attributes) = unsafe { attributes.as_mut() } {
        attributes.size = value_size(datatype).unwrap_or(0);
        attributes.count = most_values(datatype, flavour);
    }
    0
}
