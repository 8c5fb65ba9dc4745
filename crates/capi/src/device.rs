//! The device list, and queries that need no open device.

use std::{
    ffi::{c_char, c_int, c_void},
    mem, ptr,
    sync::OnceLock,
};

use millstream_device as device;
use millstream_lockfree::CancelGuard;
use millstream_shm::fork;

use crate::{
    errno::{self, Errno},
    sys::*,
    versioned,
};

/// A device: the program's struct.
///
/// libmlx5 and libefa recognize their own devices by the pointer that rdma-core keeps behind `ibv_device`:
/// `provider` has its offset and stays NULL.
#[repr(C)]
pub struct Device {
    verbs: ibv_device,
    provider: *const c_void,
}

impl Device {
    /// A channel adapter named `name` (as in `/sys/class/infiniband`) with the character device `dev_name`
    /// (as in `/sys/class/infiniband_verbs`). EINVAL if a name is too long for its field.
    pub fn new(name: &str, dev_name: &str) -> Result<Self, Errno> {
        let mut verbs =
            ibv_device { node_type: IBV_NODE_CA, transport_type: IBV_TRANSPORT_IB, ..ibv_device::default() };
        fill(&mut verbs.name, name)?;
        fill(&mut verbs.dev_name, dev_name)?;
        fill(&mut verbs.ibdev_path, &format!("/sys/class/infiniband/{name}"))?;
        fill(&mut verbs.dev_path, &format!("/sys/class/infiniband_verbs/{dev_name}"))?;
        Ok(Self { verbs, provider: ptr::null() })
    }

    /// The pointer that programs hold.
    pub fn as_verbs(this: *mut Self) -> *mut ibv_device {
        this.cast()
    }

    /// The device behind a program's pointer.
    ///
    /// # Safety
    /// `device` comes from [`Device::as_verbs`] and its `Device` outlives `'a`.
    pub unsafe fn from_verbs<'a>(device: *mut ibv_device) -> &'a Self {
        // SAFETY: `verbs` is the first field of a `repr(C)` struct.
        unsafe { &*device.cast() }
    }
}

/// Copies `text` into a zeroed field of a C struct, leaving at least one NUL.
fn fill(field: &mut [c_char], text: &str) -> Result<(), Errno> {
    if text.len() >= field.len() || text.contains('\0') {
        return Err(Errno::INVALID);
    }
    for (place, byte) in field.iter_mut().zip(text.bytes()) {
        *place = byte as c_char;
    }
    Ok(())
}

/// The available devices as a NULL-terminated array, their number in `num_devices` unless it is NULL.
/// NULL and errno on failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_list(num_devices: *mut c_int) -> *mut *mut ibv_device {
    let _uncancelled = CancelGuard::new();
    let list = the_device().map(|device| Box::into_raw(Box::new([device, ptr::null_mut()])).cast());
    if !num_devices.is_null() {
        // SAFETY: the caller passes NULL or a writable int.
        unsafe { num_devices.write(c_int::from(list.is_ok())) };
    }
    errno::pointer(list)
}

/// Frees an array of [`ibv_get_device_list`], but not the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ibv_device) {
    let _uncancelled = CancelGuard::new();
    if !list.is_null() {
        // SAFETY: the array was boxed by `ibv_get_device_list`.
        drop(unsafe { Box::from_raw(list.cast::<[*mut ibv_device; 2]>()) });
    }
}

/// The only device, created at first use and never freed: programs hold pointers to it after they freed
/// the list.
fn the_device() -> Result<*mut ibv_device, Errno> {
    struct Shared(*mut Device);
    // SAFETY: the device is never written to after it was made.
    unsafe impl Send for Shared {}
    // SAFETY: as above.
    unsafe impl Sync for Shared {}
    static DEVICE: OnceLock<Result<Shared, Errno>> = OnceLock::new();
    let made = fork::get_or_init(&DEVICE, || {
        crate::fork::init_from_environment();
        Device::new(device::DEVICE_NAME, "uverbs0").map(|device| Shared(Box::into_raw(Box::new(device))))
    });
    match made {
        Ok(shared) => Ok(Device::as_verbs(shared.0)),
        Err(error) => Err(*error),
    }
}

/// The device's name, valid as long as the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
    // SAFETY: the caller passes a device of this library.
    unsafe { &raw const (*device).name }.cast()
}

/// The kernel's index of the device: always -1, because it is not a kernel device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_index(_device: *mut ibv_device) -> c_int {
    -1
}

/// The node GUID in network byte order; 0 and errno when there is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_guid(_device: *mut ibv_device) -> __be64 {
    device::gid::node_guid().to_be()
}

/// The limits of an opened device. Returns 0 or an error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_device(
    _context: *mut ibv_context,
    device_attr: *mut ibv_device_attr,
) -> c_int {
    let _uncancelled = CancelGuard::new();
    // SAFETY: the caller passes a writable struct.
    unsafe { device_attr.write(attributes()) };
    0
}

fn attributes() -> ibv_device_attr {
    let guid = device::gid::node_guid().to_be();
    let mut attr = ibv_device_attr {
        node_guid: guid,
        sys_image_guid: guid,
        max_mr_size: u64::MAX,
        page_size_cap: 0xffff_f000,
        vendor_id: device::VENDOR_ID,
        vendor_part_id: device::VENDOR_PART_ID,
        hw_ver: 1,
        max_qp: device::MAX_QP as c_int,
        max_qp_wr: device::MAX_QP_WR as c_int,
        device_cap_flags: IBV_DEVICE_RC_RNR_NAK_GEN
            | IBV_DEVICE_SYS_IMAGE_GUID
            | IBV_DEVICE_XRC
            | IBV_DEVICE_CURR_QP_STATE_MOD
            | device::MEMORY_CAPS,
        max_sge: device::MAX_SGE as c_int,
        max_sge_rd: device::MAX_SGE as c_int,
        max_cq: device::MAX_CQ as c_int,
        max_cqe: device::MAX_CQE as c_int,
        max_mr: device::MAX_MR as c_int,
        max_mw: device::MAX_MW as c_int,
        max_pd: device::MAX_PD as c_int,
        max_qp_rd_atom: c_int::from(device::MAX_RD_ATOMIC),
        max_res_rd_atom: c_int::from(device::MAX_RD_ATOMIC) * device::MAX_QP as c_int,
        max_qp_init_rd_atom: c_int::from(device::MAX_RD_ATOMIC),
        atomic_cap: IBV_ATOMIC_HCA,
        max_ah: i32::MAX,
        max_srq: device::MAX_CQ as c_int,
        max_srq_wr: device::MAX_QP_WR as c_int,
        max_srq_sge: device::MAX_SGE as c_int,
        max_mcast_grp: device::MAX_MULTICAST as c_int,
        max_mcast_qp_attach: device::MAX_MULTICAST as c_int,
        max_total_mcast_qp_attach: device::MAX_MULTICAST as c_int,
        max_pkeys: 1,
        local_ca_ack_delay: 1,
        phys_port_cnt: 1,
        ..ibv_device_attr::default()
    };
    for (place, byte) in attr.fw_ver.iter_mut().zip(env!("CARGO_PKG_VERSION").bytes()) {
        *place = byte as c_char;
    }
    attr
}

/// The limits of an opened device with all extensions; writes only the first `size` bytes of `attr`, the size
/// of the struct that the caller was compiled with. Returns 0 or an error number.
pub(crate) unsafe extern "C" fn query_device_ex(
    _context: *mut ibv_context,
    input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    size: usize,
) -> c_int {
    let _uncancelled = CancelGuard::new();
    // SAFETY: the caller passes NULL or a readable struct.
    let asks = unsafe { input.as_ref() }.map_or(0, |input| input.comp_mask);
    if asks != 0 || size < mem::size_of::<ibv_device_attr>() {
        return errno::status(Err(Errno::INVALID));
    }
    let orig_attr = attributes();
    let answer = ibv_device_attr_ex {
        orig_attr,
        odp_caps: ibv_odp_caps {
            general_caps: device::ODP_CAPS,
            per_transport_caps: ibv_odp_caps__bindgen_ty_1 {
                rc_odp_caps: device::ODP_RC_CAPS,
                uc_odp_caps: device::ODP_UC_CAPS,
                ud_odp_caps: device::ODP_UD_CAPS,
            },
        },
        max_dm_size: device::MAX_DM,
        // XRC has the capabilities of RC.
        xrc_odp_caps: device::ODP_RC_CAPS,
        completion_timestamp_mask: u64::MAX,
        hca_core_clock: device::CLOCK_KHZ,
        cq_mod_caps: ibv_cq_moderation_caps { max_cq_count: u16::MAX, max_cq_period: u16::MAX },
        device_cap_flags_ex: u64::from(orig_attr.device_cap_flags) | device::ATOMIC_WRITE_CAP,
        phys_port_cnt_ex: u32::from(orig_attr.phys_port_cnt),
        ..ibv_device_attr_ex::default()
    };
    // SAFETY: the caller's struct has this size.
    unsafe { versioned::write(attr, size, &answer) };
    0
}

/// The current time of the clock of completion time stamps: ticks in `tv_nsec`, as other devices report.
/// Returns 0 or an error number.
pub(crate) unsafe extern "C" fn query_rt_values(
    _context: *mut ibv_context,
    values: *mut ibv_values_ex,
) -> c_int {
    let _uncancelled = CancelGuard::new();
    // SAFETY: the caller passes a struct with a filled mask.
    unsafe {
        (*values).comp_mask &= IBV_VALUES_MASK_RAW_CLOCK;
        if (*values).comp_mask != 0 {
            (*values).raw_clock =
                libc::timespec { tv_sec: 0, tv_nsec: device::Timestamp::now().0.cast_signed() };
        }
    }
    0
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    #[test]
    fn a_program_reads_the_name_it_was_given() {
        let mut device = Device::new("soft0", "uverbs0").expect("names that fit");
        let verbs = Device::as_verbs(&mut device);
        // SAFETY: `device` lives; the name is a C string inside it.
        let name = unsafe { CStr::from_ptr(ibv_get_device_name(verbs)) };
        assert_eq!(name, c"soft0");
    }

    #[test]
    fn a_name_that_does_not_fit_is_refused() {
        let room = IBV_SYSFS_NAME_MAX as usize;
        assert!(Device::new(&"x".repeat(room - 1), "uverbs0").is_ok());
        assert_eq!(Device::new(&"x".repeat(room), "uverbs0").err(), Some(Errno::INVALID));
        assert_eq!(Device::new("soft0", "u\0").err(), Some(Errno::INVALID));
    }

    #[test]
    fn the_provider_pointer_follows_the_public_struct() {
        assert_eq!(mem::offset_of!(Device, provider), mem::size_of::<ibv_device>());
    }
}
