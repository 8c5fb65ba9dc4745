//! The `stat` family, with the symbols of old and new programs.
//!
//! Regular files that stand for devices are reported as character devices. So are event channels, whose
//! descriptors programs check before use.

#![allow(missing_docs, reason = "named after the C library's functions")]

use std::ffi::{c_char, c_int, c_uint};

use crate::engine;

use super::c_string::path_bytes;
use super::path::{Device, Target, with_target};
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

/// The device behind a descriptor that is named by an empty path.
#[inline]
unsafe fn by_empty_path(dir: c_int, path: *const c_char, flags: c_int) -> Option<Device> {
    if flags & libc::AT_EMPTY_PATH == 0 || !engine::has_channels() {
        return None;
    }
    // SAFETY: the caller passes a C string. Newer kernels take null for an empty one.
    let is_empty = path.is_null() || unsafe { path_bytes(path) } == Some(b"");
    (is_empty && engine::is_channel(dir)).then_some(Device::RdmaCm)
}

macro_rules! by_path {
    ($($name:ident($($version:ident: $vtype:ty,)? @path, @answer);)*) => {$(
        #[cfg_attr(feature = "interpose", unsafe(no_mangle))]
        #[allow(non_snake_case, reason = "the C library's name")]
        pub unsafe extern "C-unwind" fn $name(
            $($version: $vtype,)? path: *const c_char, answer: *mut libc::stat
        ) -> c_int {
            let call = |target: Target| {
                let path = target.path;
                let failed = forward!(
                    $name($($version: $vtype,)? path: *const c_char, answer: *mut libc::stat) -> c_int, missing -1
                );
                // SAFETY: the caller passes a structure to fill in.
                unsafe { show(target.device(), failed, answer) }
            };
            // SAFETY: the caller passes a C string.
            unsafe { with_target(libc::AT_FDCWD, path, call) }
        }
    )*};
}

by_path! {
    stat(@path, @answer);
    stat64(@path, @answer);
    lstat(@path, @answer);
    lstat64(@path, @answer);
    __xstat(version: c_int, @path, @answer);
    __xstat64(version: c_int, @path, @answer);
    __lxstat(version: c_int, @path, @answer);
    __lxstat64(version: c_int, @path, @answer);
}

macro_rules! at {
    ($($name:ident($($version:ident: $vtype:ty,)? @dir, @path, @answer, @flags);)*) => {$(
        #[cfg_attr(feature = "interpose", unsafe(no_mangle))]
        #[allow(non_snake_case, reason = "the C library's name")]
        pub unsafe extern "C-unwind" fn $name(
            $($version: $vtype,)? dir: c_int, path: *const c_char, answer: *mut libc::stat, flags: c_int
        ) -> c_int {
            // SAFETY: the caller passes a C string.
            let channel = unsafe { by_empty_path(dir, path, flags) };
            let call = |target: Target| {
                let path = target.path;
                let failed = forward!($name(
                    $($version: $vtype,)? dir: c_int, path: *const c_char, answer: *mut libc::stat, flags: c_int
                ) -> c_int, missing -1);
                // SAFETY: the caller passes a structure to fill in.
                unsafe { show(target.device().or(channel), failed, answer) }
            };
            // SAFETY: the caller passes a C string.
            unsafe { with_target(dir, path, call) }
        }
    )*};
}

at! {
    fstatat(@dir, @path, @answer, @flags);
    fstatat64(@dir, @path, @answer, @flags);
    __fxstatat(version: c_int, @dir, @path, @answer, @flags);
    __fxstatat64(version: c_int, @dir, @path, @answer, @flags);
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
    let channel = unsafe { by_empty_path(dir, path, flags) };
    let call = |target: Target| {
        let path = target.path;
        let failed = forward!(statx(
            dir: c_int, path: *const c_char, flags: c_int, mask: c_uint, answer: *mut libc::statx
        ) -> c_int, missing -1);
        if let (0, Some(device)) = (failed, target.device().or(channel)) {
            // SAFETY: the function has just filled it in.
            unsafe {
                (*answer).stx_mode = CHARACTER_DEVICE as u16;
                ((*answer).stx_rdev_major, (*answer).stx_rdev_minor) = device.numbers();
            }
        }
        failed
    };
    // SAFETY: the caller passes a C string.
    unsafe { with_target(dir, path, call) }
}
