//! The `stat` family, with the symbols of old and new programs.
//!
//! Regular files that stand for devices are reported as character devices. So are event channels, whose
//! descriptors programs check before use.

#![allow(missing_docs, reason = "named after the C library's functions")]

use std::ffi::{c_char, c_int, c_uint};

use crate::engine;

use super::path::{Device, directory_of, lookup_at};
use crate::preload::forward::forward;

/// Readable and writable for all users, as udev creates these devices.
const CHARACTER_DEVICE: u32 = libc::S_IFCHR | 0o666;

/// Changes the result for a file into that of a device.
unsafe fn show(device: Option<Device>, failed: c_int, answer: *mut libc::stat) -> c_int {
    if let (0, Some(device)) = (failed, device) {
        let (major, minor) = device.numbers();
        // SAFETY: the function has just filled it in.
        unsafe {
            (*answer).st_mode = CHARACTER_DEVICE;
            (*answer).st_rdev = libc::makedev(major, minor);
        }
    }
    failed
}

/// `struct stat` and `struct stat64` are identical on 64-bit machines.
const _: () = assert!(size_of::<libc::stat>() == size_of::<libc::stat64>());

macro_rules! by_path {
    ($($name:ident($($before:ident: $btype:ty,)* @path $(in $dir:ident)?, @answer $(, $after:ident: $atype:ty)*);)*) => {$(
        #[cfg_attr(feature = "interpose", unsafe(no_mangle))]
        #[allow(non_snake_case, reason = "the C library's name")]
        pub unsafe extern "C-unwind" fn $name(
            $($before: $btype,)* path: *const c_char, answer: *mut libc::stat $(, $after: $atype)*
        ) -> c_int {
            // SAFETY: the caller passes a C string.
            let place = unsafe { lookup_at(directory_of!($($dir)?), path) };
            let path = place.as_ref().map_or(path, |place| place.path.as_ptr());
            let failed = forward!($name(
                $($before: $btype,)* path: *const c_char, answer: *mut libc::stat $(, $after: $atype)*
            ) -> c_int, missing -1);
            // SAFETY: the caller passes a structure to fill in.
            unsafe { show(place.and_then(|place| place.device), failed, answer) }
        }
    )*};
}

by_path! {
    stat(@path, @answer);
    stat64(@path, @answer);
    lstat(@path, @answer);
    lstat64(@path, @answer);
    fstatat(dir: c_int, @path in dir, @answer, flags: c_int);
    fstatat64(dir: c_int, @path in dir, @answer, flags: c_int);
    __xstat(version: c_int, @path, @answer);
    __xstat64(version: c_int, @path, @answer);
    __lxstat(version: c_int, @path, @answer);
    __lxstat64(version: c_int, @path, @answer);
    __fxstatat(version: c_int, dir: c_int, @path in dir, @answer, flags: c_int);
    __fxstatat64(version: c_int, dir: c_int, @path in dir, @answer, flags: c_int);
}

macro_rules! by_descriptor {
    ($($name:ident($($before:ident: $btype:ty,)* @fd, @answer);)*) => {$(
        #[cfg_attr(feature = "interpose", unsafe(no_mangle))]
        #[allow(non_snake_case, reason = "the C library's name")]
        pub unsafe extern "C-unwind" fn $name($($before: $btype,)* fd: c_int, answer: *mut libc::stat) -> c_int {
            let device = engine::is_channel(fd).then_some(Device::RdmaCm);
            let failed =
                forward!($name($($before: $btype,)* fd: c_int, answer: *mut libc::stat) -> c_int, missing -1);
            // SAFETY: the caller passes a structure to fill in.
            unsafe { show(device, failed, answer) }
        }
    )*};
}

by_descriptor! {
    fstat(@fd, @answer);
    fstat64(@fd, @answer);
    __fxstat(version: c_int, @fd, @answer);
    __fxstat64(version: c_int, @fd, @answer);
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn statx(
    dir: c_int,
    path: *const c_char,
    flags: c_int,
    mask: c_uint,
    answer: *mut libc::statx,
) -> c_int {
    // SAFETY: the caller passes a C string.
    let place = unsafe { lookup_at(dir, path) };
    let path = place.as_ref().map_or(path, |place| place.path.as_ptr());
    let failed = forward!(statx(
        dir: c_int, path: *const c_char, flags: c_int, mask: c_uint, answer: *mut libc::statx
    ) -> c_int, missing -1);
    if let (0, Some(device)) = (failed, place.and_then(|place| place.device)) {
        // SAFETY: the function has just filled it in.
        unsafe {
            (*answer).stx_mode = CHARACTER_DEVICE as u16;
            ((*answer).stx_rdev_major, (*answer).stx_rdev_minor) = device.numbers();
        }
    }
    failed
}
