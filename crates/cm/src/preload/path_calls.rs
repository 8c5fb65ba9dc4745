//! Functions that open, list, test and resolve paths; `write`, for commands.

#![allow(missing_docs, reason = "named after the C library's functions")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::os::fd::IntoRawFd as _;
use std::ptr;

use crate::{Errno, engine, user_memory};
use libc::{DIR, FILE, mode_t, size_t, ssize_t};

use super::path::{Device, InterceptedPath, directory_of, lookup, lookup_at, original_of};
use super::{errno, fail_with, set_errno};
use crate::preload::forward::forward;

/// The action that opens a path.
enum OpenAction {
    /// Done: a descriptor, or -1 with errno.
    Return(c_int),
    /// Open this path instead.
    Redirect(InterceptedPath),
    /// The path is not intercepted.
    Forward,
}

unsafe fn opened(dir: c_int, path: *const c_char, flags: c_int) -> OpenAction {
    // SAFETY: the caller of `open` passes a C string.
    match unsafe { lookup_at(dir, path) } {
        None => OpenAction::Forward,
        Some(InterceptedPath { device: None, .. })
            if flags & (libc::O_CREAT | libc::O_WRONLY | libc::O_RDWR) != 0 =>
        {
            OpenAction::Return(fail_with(libc::EACCES))
        }
        Some(place @ InterceptedPath { device: None, .. }) => OpenAction::Redirect(place),
        // The verbs library does not use the kernel's device, and no other program can use it.
        Some(InterceptedPath { device: Some(Device::Verbs), .. }) => {
            OpenAction::Return(fail_with(libc::ENXIO))
        }
        Some(InterceptedPath { device: Some(Device::RdmaCm), .. }) => OpenAction::Return(open_channel(flags)),
    }
}

/// Out of line: it takes much stack.
#[cold]
#[inline(never)]
fn open_channel(flags: c_int) -> c_int {
    match engine::open(flags) {
        Ok(channel) => channel.into_raw_fd(),
        Err(error) => fail_with(Errno::from(error).0),
    }
}

/// Functions like `open(path, flags, mode)`. The C functions take the mode only with `O_CREAT`. Both calling
/// conventions put it into the third argument, which is ignored otherwise.
macro_rules! open {
    ($($name:ident;)*) => {$(
        #[cfg_attr(feature = "interpose", unsafe(no_mangle))]
        pub unsafe extern "C-unwind" fn $name(path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
            // SAFETY: the caller passes a C string.
            let opened = unsafe { opened(libc::AT_FDCWD, path, flags) };
            let path = match &opened {
                OpenAction::Return(fd) => return *fd,
                OpenAction::Redirect(place) => place.path.as_ptr(),
                OpenAction::Forward => path,
            };
            forward!($name(path: *const c_char, flags: c_int, mode: mode_t) -> c_int, missing -1)
        }
    )*};
}

open! { open; open64; }

macro_rules! openat {
    ($($name:ident;)*) => {$(
        #[cfg_attr(feature = "interpose", unsafe(no_mangle))]
        pub unsafe extern "C-unwind" fn $name(dir: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
            // SAFETY: the caller passes a C string.
            let opened = unsafe { opened(dir, path, flags) };
            let path = match &opened {
                OpenAction::Return(fd) => return *fd,
                OpenAction::Redirect(place) => place.path.as_ptr(),
                OpenAction::Forward => path,
            };
            forward!($name(dir: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int, missing -1)
        }
    )*};
}

openat! { openat; openat64; }

/// Variants that fortified programs call when the flags are not known at compile time.
macro_rules! open_2 {
    ($($name:ident;)*) => {$(
        #[cfg_attr(feature = "interpose", unsafe(no_mangle))]
        #[allow(non_snake_case, reason = "the C library's name")]
        pub unsafe extern "C-unwind" fn $name(path: *const c_char, flags: c_int) -> c_int {
            // SAFETY: the caller passes a C string.
            let opened = unsafe { opened(libc::AT_FDCWD, path, flags) };
            let path = match &opened {
                OpenAction::Return(fd) => return *fd,
                OpenAction::Redirect(place) => place.path.as_ptr(),
                OpenAction::Forward => path,
            };
            forward!($name(path: *const c_char, flags: c_int) -> c_int, missing -1)
        }
    )*};
}

open_2! { __open_2; __open64_2; }

macro_rules! openat_2 {
    ($($name:ident;)*) => {$(
        #[cfg_attr(feature = "interpose", unsafe(no_mangle))]
        #[allow(non_snake_case, reason = "the C library's name")]
        pub unsafe extern "C-unwind" fn $name(dir: c_int, path: *const c_char, flags: c_int) -> c_int {
            // SAFETY: the caller passes a C string.
            let opened = unsafe { opened(dir, path, flags) };
            let path = match &opened {
                OpenAction::Return(fd) => return *fd,
                OpenAction::Redirect(place) => place.path.as_ptr(),
                OpenAction::Forward => path,
            };
            forward!($name(dir: c_int, path: *const c_char, flags: c_int) -> c_int, missing -1)
        }
    )*};
}

openat_2! { __openat_2; __openat64_2; }

/// Functions that only read a path: the path is replaced, other arguments are passed on.
macro_rules! redirect {
    ($($name:ident($($before:ident: $btype:ty,)* @path $(in $dir:ident)? $(, $after:ident: $atype:ty)*) -> $ret:ty, $missing:expr;)*) => {$(
        #[cfg_attr(feature = "interpose", unsafe(no_mangle))]
        #[allow(non_snake_case, reason = "the C library's name")]
        pub unsafe extern "C-unwind" fn $name($($before: $btype,)* path: *const c_char $(, $after: $atype)*) -> $ret {
            // SAFETY: the caller passes a C string.
            let place = unsafe { lookup_at(directory_of!($($dir)?), path) };
            let path = place.as_ref().map_or(path, |place| place.path.as_ptr());
            forward!($name($($before: $btype,)* path: *const c_char $(, $after: $atype)*) -> $ret, missing $missing)
        }
    )*};
}

/// Callback argument of `scandir`.
type Filter = *const c_void;

redirect! {
    fopen(@path, mode: *const c_char) -> *mut FILE, ptr::null_mut();
    fopen64(@path, mode: *const c_char) -> *mut FILE, ptr::null_mut();
    opendir(@path) -> *mut DIR, ptr::null_mut();
    scandir(@path, list: *mut c_void, filter: Filter, compare: Filter) -> c_int, -1;
    scandir64(@path, list: *mut c_void, filter: Filter, compare: Filter) -> c_int, -1;
    access(@path, mode: c_int) -> c_int, -1;
    eaccess(@path, mode: c_int) -> c_int, -1;
    euidaccess(@path, mode: c_int) -> c_int, -1;
    faccessat(dir: c_int, @path in dir, mode: c_int, flags: c_int) -> c_int, -1;
    readlink(@path, to: *mut c_char, len: size_t) -> ssize_t, -1;
    __readlink_chk(@path, to: *mut c_char, len: size_t, room: size_t) -> ssize_t, -1;
    readlinkat(dir: c_int, @path in dir, to: *mut c_char, len: size_t) -> ssize_t, -1;
    __readlinkat_chk(dir: c_int, @path in dir, to: *mut c_char, len: size_t, room: size_t) -> ssize_t, -1;
    getxattr(@path, name: *const c_char, value: *mut c_void, size: size_t) -> ssize_t, -1;
    lgetxattr(@path, name: *const c_char, value: *mut c_void, size: size_t) -> ssize_t, -1;
    listxattr(@path, list: *mut c_char, size: size_t) -> ssize_t, -1;
    llistxattr(@path, list: *mut c_char, size: size_t) -> ssize_t, -1;
}

/// Restores the original path in the result.
unsafe fn restore_original(found: *mut c_char) -> *mut c_char {
    if !found.is_null() {
        // SAFETY: a C string that was just made, and a shorter one in its place.
        unsafe {
            let bytes = CStr::from_ptr(found).to_bytes();
            if let Some(known) = original_of(bytes) {
                let known = known.to_vec();
                found.cast::<u8>().copy_from_nonoverlapping(known.as_ptr(), known.len());
                *found.add(known.len()) = 0;
            }
        }
    }
    found
}

macro_rules! resolve {
    ($($name:ident(@path $(, $after:ident: $atype:ty)*);)*) => {$(
        #[cfg_attr(feature = "interpose", unsafe(no_mangle))]
        #[allow(non_snake_case, reason = "the C library's name")]
        pub unsafe extern "C-unwind" fn $name(path: *const c_char $(, $after: $atype)*) -> *mut c_char {
            // SAFETY: the caller passes a C string.
            let place = unsafe { lookup(path) };
            let is_intercepted = place.is_some();
            let path = place.as_ref().map_or(path, |place| place.path.as_ptr());
            let found =
                forward!($name(path: *const c_char $(, $after: $atype)*) -> *mut c_char, missing ptr::null_mut());
            // SAFETY: what the function returned.
            if is_intercepted { unsafe { restore_original(found) } } else { found }
        }
    )*};
}

resolve! {
    realpath(@path, to: *mut c_char);
    __realpath_chk(@path, to: *mut c_char, room: size_t);
    canonicalize_file_name(@path);
}

/// `glob(3)` opens directories inside the C library, past this one. A pattern below an intercepted directory is redirected,
/// and its results are restored.
macro_rules! glob {
    ($($name:ident;)*) => {$(
        #[cfg_attr(feature = "interpose", unsafe(no_mangle))]
        pub unsafe extern "C-unwind" fn $name(
            pattern: *const c_char, flags: c_int, failed: *const c_void, found: *mut libc::glob_t
        ) -> c_int {
            // SAFETY: the caller passes a C string.
            let place = unsafe { lookup(pattern) };
            let is_intercepted = place.is_some() && !found.is_null();
            // SAFETY: the caller passes a structure, which has results of earlier calls with this flag.
            let before = if is_intercepted && flags & libc::GLOB_APPEND != 0 { unsafe { (*found).gl_pathc } } else { 0 };
            let pattern = place.as_ref().map_or(pattern, |place| place.path.as_ptr());
            let result = forward!($name(
                pattern: *const c_char, flags: c_int, failed: *const c_void, found: *mut libc::glob_t
            ) -> c_int, missing libc::GLOB_ABORTED);
            if is_intercepted && result == 0 {
                // SAFETY: the function has filled in this many strings, behind those that the program reserved.
                unsafe {
                    let reserved = if flags & libc::GLOB_DOOFFS != 0 { (*found).gl_offs } else { 0 };
                    for i in before..(*found).gl_pathc {
                        restore_original(*(*found).gl_pathv.add(reserved + i));
                    }
                }
            }
            result
        }
    )*};
}

glob! { glob; glob64; }

/// Bytes of the longest command.
const LONGEST_COMMAND: usize = 512;

/// Whether a write may be a command. Every write of the program calls this, so it is cheap. It rejects
/// the eight-byte writes to an eventfd, so the engine can write while it holds its lock.
#[inline]
fn may_be_command(fd: c_int, len: size_t) -> bool {
    const SHORTEST: usize = 12;
    engine::has_channels() && (SHORTEST..=LONGEST_COMMAND).contains(&len) && engine::is_channel(fd)
}

/// Executes the command that is written to a channel; None if the descriptor is no channel any more. Out of line: it takes
/// much stack.
///
/// # Safety
/// Addresses in the command are valid where the kernel forbids to check them.
#[cold]
#[inline(never)]
unsafe fn write_command(fd: c_int, from: *const c_void, len: size_t) -> Option<Result<usize, Errno>> {
    let mut command = [0; LONGEST_COMMAND];
    let command = &mut command[..len];
    // SAFETY: the caller vouches for the addresses.
    unsafe {
        match user_memory::read(from.addr() as u64, command) {
            Ok(()) => engine::write(fd, command),
            Err(error) => Some(Err(error)),
        }
    }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn write(fd: c_int, from: *const c_void, len: size_t) -> ssize_t {
    let before = errno();
    // SAFETY: the addresses are the program's.
    let answered = may_be_command(fd, len).then(|| unsafe { write_command(fd, from, len) }).flatten();
    match answered {
        Some(Ok(written)) => {
            set_errno(before);
            written.cast_signed()
        }
        Some(Err(error)) => {
            set_errno(error.0);
            -1
        }
        None => forward!(write(fd: c_int, from: *const c_void, len: size_t) -> ssize_t, missing -1),
    }
}
