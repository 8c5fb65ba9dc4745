//! Devices: the list of them, and what a program may ask before it opens one.

use std::{
    ffi::{c_char, c_int, c_void},
    ptr,
};

use crate::{
    errno::{self, Errno},
    sys::*,
};

/// A device as programs see it.
///
/// libmlx5 and libefa tell their own devices by the pointer that rdma-core keeps behind `ibv_device`:
/// `provider` stands at its place and stays NULL, which is none of theirs.
#[repr(C)]
pub struct Device {
    verbs: ibv_device,
    provider: *const c_void,
}

impl Device {
    /// A channel adapter named `name` (as in `/sys/class/infiniband`) with the character device
    /// `dev_name` (as in `/sys/class/infiniband_verbs`). A name too long for its field is refused with
    /// EINVAL.
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
        *place = byte.cast_signed();
    }
    Ok(())
}

/// The available devices as a NULL-terminated array, their number in `num_devices` unless it is NULL.
/// NULL and errno on failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_list(num_devices: *mut c_int) -> *mut *mut ibv_device {
    if !num_devices.is_null() {
        // SAFETY: the caller passes NULL or a writable int.
        unsafe { num_devices.write(0) };
    }
    errno::pointer(Err(Errno::UNSUPPORTED))
}

/// Frees an array of [`ibv_get_device_list`], which has handed out none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_free_device_list(_list: *mut *mut ibv_device) {}

/// The device's name, valid as long as the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
    // SAFETY: the caller passes a device of this library.
    unsafe { &raw const (*device).name }.cast()
}

/// The kernel's index of the device: -1, the kernel does not know it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_index(_device: *mut ibv_device) -> c_int {
    -1
}

/// The node GUID in network byte order; 0 and errno when there is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_guid(_device: *mut ibv_device) -> __be64 {
    Errno::UNSUPPORTED.set();
    0
}

/// The limits of an opened device. Returns 0 or an error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_device(
    _context: *mut ibv_context,
    _device_attr: *mut ibv_device_attr,
) -> c_int {
    errno::status(Err(Errno::UNSUPPORTED))
}

#[cfg(test)]
mod tests {
    use std::{ffi::CStr, mem};

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
