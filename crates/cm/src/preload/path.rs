//! The paths that are intercepted.

use std::ffi::{CStr, CString, c_char};

use super::sysfs_dir;

/// An intercepted path.
pub(crate) struct InterceptedPath {
    /// The path of the file that replaces it.
    pub(crate) path: CString,
    pub(crate) device: Option<Device>,
}

/// A character device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    /// `/dev/infiniband/uverbs0`
    Verbs,
    /// `/dev/infiniband/rdma_cm`
    RdmaCm,
}

impl Device {
    /// Major and minor number, as in sysfs `dev`.
    pub(crate) fn numbers(self) -> (u32, u32) {
        match self {
            Self::Verbs => (231, 192),
            Self::RdmaCm => (10, 120),
        }
    }
}

/// Intercepted directories, with everything below.
const INTERCEPTED: [&CStr; 4] = [
    c"/sys/class/infiniband",
    c"/sys/class/infiniband_verbs",
    c"/sys/class/misc/rdma_cm",
    c"/dev/infiniband",
];

/// Whether `path` is `root` or below it.
unsafe fn is_below(path: *const c_char, root: &CStr) -> bool {
    for (at, expected) in root.to_bytes().iter().enumerate() {
        // SAFETY: everything before `at` was not the string's end.
        if unsafe { *path.add(at) }.cast_unsigned() != *expected {
            return false;
        }
    }
    // SAFETY: as above.
    matches!(unsafe { *path.add(root.count_bytes()) }.cast_unsigned(), 0 | b'/')
}

/// Looks up `path`; `None` if it is not intercepted.
///
/// # Safety
/// A C string, or null.
pub(crate) unsafe fn lookup(path: *const c_char) -> Option<InterceptedPath> {
    // SAFETY: the caller vouches for the string.
    if path.is_null() || !INTERCEPTED.iter().any(|root| unsafe { is_below(path, root) }) {
        return None;
    }
    // SAFETY: as above.
    let path = unsafe { CStr::from_ptr(path) };
    let device = match path.to_bytes() {
        b"/dev/infiniband/uverbs0" => Some(Device::Verbs),
        b"/dev/infiniband/rdma_cm" => Some(Device::RdmaCm),
        _ => None,
    };
    let mut led = sysfs_dir::root()?.as_bytes().to_vec();
    led.extend(path.to_bytes());
    Some(InterceptedPath { path: CString::new(led).ok()?, device })
}

/// The original path of a path inside the sysfs copy.
pub(crate) fn original_of(path: &[u8]) -> Option<&[u8]> {
    let below = path.strip_prefix(sysfs_dir::root_if_used()?.as_bytes())?;
    below.starts_with(b"/").then_some(below)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_device_paths_are_intercepted() {
        // SAFETY: C strings.
        let is_intercepted =
            |path: &CStr| INTERCEPTED.iter().any(|root| unsafe { is_below(path.as_ptr(), root) });
        for path in [
            c"/sys/class/infiniband",
            c"/sys/class/infiniband/",
            c"/sys/class/infiniband/mill0/ports/1/state",
            c"/sys/class/infiniband_verbs/abi_version",
            c"/sys/class/misc/rdma_cm/abi_version",
            c"/dev/infiniband/rdma_cm",
        ] {
            assert!(is_intercepted(path), "{path:?}");
        }
        for path in [
            c"",
            c"/",
            c"/sys/class",
            c"/sys/class/infiniband_mad/abi_version",
            c"/sys/class/misc/rdma_cmx",
            c"/dev/infiniban",
            c"/dev/null",
            c"sys/class/infiniband",
        ] {
            assert!(!is_intercepted(path), "{path:?}");
        }
    }

    #[test]
    fn paths_map_into_the_directory_and_back() {
        // SAFETY: C strings.
        let place = unsafe { lookup(c"/dev/infiniband/rdma_cm".as_ptr()) }.expect("intercepted");
        assert_eq!(place.device, Some(Device::RdmaCm));
        assert_eq!(original_of(place.path.to_bytes()), Some(&b"/dev/infiniband/rdma_cm"[..]));
        assert_eq!(original_of(b"/dev/infiniband/rdma_cm"), None);
        // SAFETY: as above.
        assert!(unsafe { lookup(std::ptr::null()) }.is_none());
    }
}
