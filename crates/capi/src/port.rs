//! Ports: their attributes, GID table and P_Key table.

use std::{
    ffi::{c_int, c_uint},
    mem,
};

use millstream_device::{
    self as device,
    gid::{GidEntry, GidKind},
    gid_table::GidTable,
};
use millstream_lockfree::CancelGuard;

use crate::{
    errno::{self, Errno},
    sys::*,
    versioned,
};

/// Flag of a port whose addresses are global, as on Ethernet. The header's enumeration has no name, so no binding is made.
const IBV_QPF_GRH_REQUIRED: u8 = 1;

/// Bytes of `ibv_port_attr` in programs that were compiled before `port_cap_flags2` was added.
const COMPAT_PORT_ATTR: usize = mem::offset_of!(ibv_port_attr, port_cap_flags2);

/// The attributes of a port. `port_attr_len` is the size of the struct that the caller was compiled with. Returns 0 or an
/// error number.
pub(crate) unsafe extern "C" fn query_port(
    _context: *mut ibv_context,
    port_num: u8,
    port_attr: *mut ibv_port_attr,
    port_attr_len: usize,
) -> c_int {
    let _uncancelled = CancelGuard::new();
    if port_num != 1 {
        return errno::status(Err(Errno::INVALID));
    }
    let attr = ibv_port_attr {
        state: IBV_PORT_ACTIVE,
        max_mtu: IBV_MTU_4096,
        active_mtu: device::path::preference().unwrap_or_default().active_mtu().into(),
        gid_tbl_len: GidTable::current().places() as c_int,
        port_cap_flags: IBV_PORT_IP_BASED_GIDS | IBV_PORT_CM_SUP,
        max_msg_sz: device::MAX_MSG as u32,
        pkey_tbl_len: 1,
        max_vl_num: 1,
        // 4X HDR, 200 Gb/s: the order of one core's copy rate.
        active_width: 2,
        active_speed: 64,
        phys_state: 5,
        link_layer: IBV_LINK_LAYER_ETHERNET as u8,
        flags: IBV_QPF_GRH_REQUIRED,
        ..ibv_port_attr::default()
    };
    // SAFETY: the caller's struct has this size.
    unsafe { versioned::write(port_attr, port_attr_len, &attr) };
    0
}

/// The attributes of a port for callers compiled without the `ibv_query_port` macro: the struct is
/// shorter. Returns 0 or an error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_port(
    context: *mut ibv_context,
    port_num: u8,
    port_attr: *mut _compat_ibv_port_attr,
) -> c_int {
    let _uncancelled = CancelGuard::new();
    // SAFETY: the caller's struct has the stated length, the contract of both functions is the same.
    unsafe { query_port(context, port_num, port_attr.cast(), COMPAT_PORT_ATTR) }
}

/// An entry of the GID table; an empty one is zero, as in rdma-core. Returns 0, or -1 with errno.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_gid(
    _context: *mut ibv_context,
    port_num: u8,
    index: c_int,
    gid: *mut ibv_gid,
) -> c_int {
    let _uncancelled = CancelGuard::new();
    // A negative index is beyond the table.
    let raw = match entry(port_num.into(), index as c_uint) {
        Ok(entry) => entry.raw,
        Err(Errno::NO_DATA) => [0; 16],
        Err(error) => return errno::index(Err(error)),
    };
    // SAFETY: the caller passes a writable GID.
    unsafe { gid.write(ibv_gid { raw }) };
    0
}

/// An entry of the GID table of a port: ENODATA if it is empty.
fn entry(port_num: u32, index: c_uint) -> Result<GidEntry, Errno> {
    let (table, index) = (GidTable::current(), index as usize);
    if port_num != 1 || index >= table.places() {
        return Err(Errno::INVALID);
    }
    table.get(index).cloned().ok_or(Errno::NO_DATA)
}

fn verbs_entry(index: usize, entry: &GidEntry) -> ibv_gid_entry {
    ibv_gid_entry {
        gid: ibv_gid { raw: entry.raw },
        gid_index: index as u32,
        port_num: 1,
        gid_type: match entry.kind {
            GidKind::RoceV1 => IBV_GID_TYPE_ROCE_V1,
            GidKind::RoceV2 => IBV_GID_TYPE_ROCE_V2,
        },
        ndev_ifindex: entry.ifindex,
    }
}

/// An entry of the GID table with its type and interface; `entry_size` is the size of the struct that the
/// caller was compiled with. Returns 0 or an error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _ibv_query_gid_ex(
    _context: *mut ibv_context,
    port_num: u32,
    gid_index: u32,
    entry: *mut ibv_gid_entry,
    flags: u32,
    entry_size: usize,
) -> c_int {
    let _uncancelled = CancelGuard::new();
    if flags != 0 {
        return errno::status(Err(Errno::INVALID));
    }
    let found = match self::entry(port_num, gid_index) {
        Ok(found) => verbs_entry(gid_index as usize, &found),
        Err(error) => return errno::status(Err(error)),
    };
    // SAFETY: the caller's struct has this size.
    unsafe { versioned::write(entry, entry_size, &found) };
    0
}

/// The type of an entry of the GID table as sysfs shows it: 0 for RoCE v1 and, as in rdma-core, for an empty one, 1 for
/// RoCE v2. A private symbol, but `ibv_devinfo` uses it. Returns 0, or -1 with errno.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_gid_type(
    _context: *mut ibv_context,
    port_num: u8,
    index: c_uint,
    kind: *mut c_uint,
) -> c_int {
    let _uncancelled = CancelGuard::new();
    let is_v2 = match entry(port_num.into(), index) {
        Ok(entry) => entry.kind == GidKind::RoceV2,
        Err(Errno::NO_DATA) => false,
        Err(error) => return errno::index(Err(error)),
    };
    // SAFETY: the caller passes a writable enum, which is an int.
    unsafe { kind.write(c_uint::from(is_v2)) };
    0
}

/// The valid entries of the GID tables of all ports, which must fit. Returns their number or a negative
/// error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _ibv_query_gid_table(
    _context: *mut ibv_context,
    entries: *mut ibv_gid_entry,
    max_entries: usize,
    flags: u32,
    entry_size: usize,
) -> isize {
    let _uncancelled = CancelGuard::new();
    if flags != 0 || entry_size == 0 {
        return errno::count(Err(Errno::INVALID));
    }
    let table = GidTable::current();
    let entry_count = table.entries().count();
    if entry_count > max_entries {
        return errno::count(Err(Errno::INVALID));
    }
    for (at, (index, entry)) in table.entries().enumerate() {
        let entry = verbs_entry(index, entry);
        // SAFETY: the caller's array has `max_entries` structs of `entry_size` bytes.
        unsafe {
            let place = entries.byte_add(at * entry_size);
            versioned::write(place, entry_size, &entry);
        }
    }
    errno::count(Ok(entry_count))
}

/// An entry of the P_Key table, in network byte order. Returns 0, or -1 with errno.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_pkey(
    _context: *mut ibv_context,
    port_num: u8,
    index: c_int,
    pkey: *mut __be16,
) -> c_int {
    if port_num != 1 || index != 0 {
        return errno::index(Err(Errno::INVALID));
    }
    // SAFETY: the caller passes a writable key.
    unsafe { pkey.write(DEFAULT_PKEY) };
    0
}

/// The default partition with full membership; equal in both byte orders.
const DEFAULT_PKEY: __be16 = 0xffff;

/// The index of a P_Key, given in network byte order. Returns it, or -1 with errno.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_pkey_index(_context: *mut ibv_context, port_num: u8, pkey: __be16) -> c_int {
    let found = port_num == 1 && pkey == DEFAULT_PKEY;
    errno::index(if found { Ok(0) } else { Err(Errno::INVALID) })
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use super::*;

    /// A caller's memory for structs, without a zero.
    fn room() -> [u64; 64] {
        [u64::MAX; 64]
    }

    /// Byte `from` and those behind it that are not as they were.
    fn written(room: &[u64], from: usize) -> Vec<u8> {
        let bytes = room.iter().flat_map(|word| word.to_ne_bytes()).skip(from);
        bytes.take_while(|byte| *byte != 0xff).collect()
    }

    #[test]
    fn fields_of_later_versions_are_zero() {
        let (port, gid) = (mem::size_of::<ibv_port_attr>(), mem::size_of::<ibv_gid_entry>());
        let mut answer = room();
        // SAFETY: the structs are inside the array, whose alignment suffices. The context is not used.
        unsafe {
            assert_eq!(query_port(ptr::null_mut(), 1, answer.as_mut_ptr().cast(), port + 12), 0);
            assert_eq!(written(&answer, port), [0; 12]);
            let index = GidTable::current().entries().next().expect("a loopback interface").0 as u32;
            answer = room();
            let entry = answer.as_mut_ptr().cast();
            assert_eq!(_ibv_query_gid_ex(ptr::null_mut(), 1, index, entry, 0, gid + 8), 0);
            assert_eq!(written(&answer, gid), [0; 8]);
            let mut table = vec![u64::MAX; 256 * (gid + 8) / 8];
            let entries = table.as_mut_ptr().cast();
            let count = _ibv_query_gid_table(ptr::null_mut(), entries, 256, 0, gid + 8).unsigned_abs();
            for at in 0..count {
                assert_eq!(written(&table, at * (gid + 8) + gid)[..8], [0; 8]);
            }
            assert_eq!(written(&table, count * (gid + 8)), []);
        }
    }

    #[test]
    fn callers_with_an_earlier_version_get_their_fields_only() {
        let mut answer = room();
        // SAFETY: as above.
        let status = unsafe { ibv_query_port(ptr::null_mut(), 1, answer.as_mut_ptr().cast()) };
        assert_eq!(status, 0);
        assert_eq!(written(&answer, COMPAT_PORT_ATTR), []);
    }
}
