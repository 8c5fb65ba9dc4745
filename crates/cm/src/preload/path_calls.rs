//! Functions that open, list, test and resolve paths; `write`, for commands.

#![allow(missing_docs, reason = "named after the C library's functions")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;

use crate::{Errno, engine, user_memory};
use libc::{DIR, FILE, mode_t, size_t, ssize_t};

use super::open::{OpenAction, StreamAction, open_action, stream_action};
use super::path::{Target, directory_of, original_of, with_target};
use super::{errno, set_errno};
use crate::preload::forward::forward;

/// Functions like `open(path, flags, mode)`. The C functions take the mode only with `O_CREAT`. Both calling
/// conventions put it into the third argument, which is ignored otherwise.
macro_rules! open {
    ($($name:ident($($dir:ident: $dtype:ty,)? @path, @flags $(, $mode:ident: $mtype:ty)?);)*) => {$(
        #[cfg_attr(feature = "interpose", unsafe(no_mangle))]
        #[allow(non_snake_case, reason = "the C library's name")]
        pub unsafe extern "C-unwind" fn $name(
            $($dir: $dtype,)? path: *const c_char, flags: c_int $(, $mode: $mtype)?
        ) -> c_int {
            // SAFETY: a path of `with_target`.
            let call = |target: Target| match unsafe { open_action(&target, flags) } {
                OpenAction::Return(fd) => fd,
                OpenAction::Open(path, flags) => forward!($name(
                    $($dir: $dtype,)? path: *const c_char, flags: c_int $(, $mode: $mtype)?
                ) -> c_int, missing -1),
            };
            // SAFETY: the caller passes a C string.
            unsafe { with_target(directory_of!($($dir)?), path, call) }
        }
    )*};
}

open! {
    open(@path, @flags, mode: mode_t);
    open64(@path, @flags, mode: mode_t);
    openat(dir: c_int, @path, @flags, mode: mode_t);
    openat64(dir: c_int, @path, @flags, mode: mode_t);
    // Variants that fortified programs call when the flags are not known at compile time.
    __open_2(@path, @flags);
    __open64_2(@path, @flags);
    __openat_2(dir: c_int, @path, @flags);
    __openat64_2(dir: c_int, @path, @flags);
}

macro_rules! fopen {
    ($($name:ident;)*) => {$(
        #[cfg_attr(feature = "interpose", unsafe(no_mangle))]
        pub unsafe extern "C-unwind" fn $name(path: *const c_char, mode: *const c_char) -> *mut FILE {
            // SAFETY: a path of `with_target`, and the caller's C string.
            let call = |target: Target| match unsafe { stream_action(&target, mode) } {
                StreamAction::Return(stream) => stream,
                StreamAction::Open(path) => forward!(
                    $name(path: *const c_char, mode: *const c_char) -> *mut FILE, missing ptr::null_mut()
                ),
            };
            // SAFETY: the caller passes a C string.
            unsafe { with_target(libc::AT_FDCWD, path, call) }
        }
    )*};
}

fopen! { fopen; fopen64; }

/// Functions that only read a path: the path is replaced, other arguments are passed on.
macro_rules! redirect {
    ($($name:ident($($before:ident: $btype:ty,)* @path $(in $dir:ident)? $(, $after:ident: $atype:ty)*) -> $ret:ty, $missing:expr;)*) => {$(
        #[cfg_attr(feature = "interpose", unsafe(no_mangle))]
        #[allow(non_snake_case, reason = "the C library's name")]
        pub unsafe extern "C-unwind" fn $name($($before: $btype,)* path: *const c_char $(, $after: $atype)*) -> $ret {
            let call = |target: Target| {
                let path = target.path;
                forward!($name($($before: $btype,)* path: *const c_char $(, $after: $atype)*) -> $ret, missing $missing)
            };
            // SAFETY: the caller passes a C string.
            unsafe { with_target(directory_of!($($dir)?), path, call) }
        }
    )*};
}

/// Callback argument of `scandir`.
type Filter = *const c_void;

redirect! {
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

/// Restores the original path in the result, without its first `base` bytes.
unsafe fn restore_original(found: *mut c_char, base: usize) -> *mut c_char {
    if !found.is_null() {
        // SAFETY: a C string that was just made, and a shorter one in its place.
        unsafe {
            let bytes = CStr::from_ptr(found).to_bytes_with_nul();
            if let Some(known) = original_of(bytes).and_then(|original| original.get(base..)) {
                ptr::copy(known.as_ptr(), found.cast(), known.len());
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
            let call = |target: Target| {
                let path = if target.has_stand_in() { path } else { target.path };
                let found = forward!(
                    $name(path: *const c_char $(, $after: $atype)*) -> *mut c_char, missing ptr::null_mut()
                );
                // SAFETY: what the function returned.
                if target.is_intercepted() { unsafe { restore_original(found, 0) } } else { found }
            };
            // SAFETY: the caller passes a C string.
            unsafe { with_target(libc::AT_FDCWD, path, call) }
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
            let call = |target: Target| {
                let is_restored = target.is_intercepted() && !found.is_null();
                // SAFETY: the caller passes a structure, which has results of earlier calls with this flag.
                let before = if is_restored && flags & libc::GLOB_APPEND != 0 { unsafe { (*found).gl_pathc } } else { 0 };
                let pattern = if target.has_stand_in() { pattern } else { target.path };
                let result = forward!($name(
                    pattern: *const c_char, flags: c_int, failed: *const c_void, found: *mut libc::glob_t
                ) -> c_int, missing libc::GLOB_ABORTED);
                if is_restored && result == 0 {
                    // SAFETY: the function has filled in this many strings, behind those that the program reserved.
                    unsafe {
                        let reserved = if flags & libc::GLOB_DOOFFS != 0 { (*found).gl_offs } else { 0 };
                        for i in before..(*found).gl_pathc {
                            restore_original(*(*found).gl_pathv.add(reserved + i), target.base);
                        }
                    }
                }
                result
            };
            // SAFETY: the caller passes a C string.
            unsafe { with_target(libc::AT_FDCWD, pattern, call) }
        }
    )*};
}

glob! { glob; glob64; }

/// Bytes of the longest command, and more. A write may be longer: like the kernel, the device ignores what follows the command.
const LONGEST_COMMAND: usize = 512;

/// Executes the command that is written to a channel; None if the descriptor is no channel any more. Out of line: it takes
/// much stack.
///
/// # Safety
/// Addresses in the command are valid where the kernel forbids to check them.
#[cold]
#[inline(never)]
unsafe fn write_command(fd: c_int, from: *const c_void, len: size_t) -> Option<Result<usize, Errno>> {
    let mut command = [0; LONGEST_COMMAND];
    let command = &mut command[..len.min(LONGEST_COMMAND)];
    // SAFETY: the caller vouches for the addresses.
    unsafe {
        match user_memory::read(from.addr() as u64, command) {
            Ok(()) => engine::write(fd, command).map(|written| written.map(|_| len)),
            Err(error) => Some(Err(error)),
        }
    }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn write(fd: c_int, from: *const c_void, len: size_t) -> ssize_t {
    let before = errno();
    // SAFETY: the addresses are the program's.
    let answered = engine::is_channel(fd).then(|| unsafe { write_command(fd, from, len) }).flatten();
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
