//! Strings that the program passes, at addresses that may be invalid.

use std::ffi::c_char;

use super::{errno, set_errno};

/// Bytes of the longest path with its NUL, as in the kernel.
pub(crate) const PATH_MAX: usize = libc::PATH_MAX as usize;
/// A multiple of it is the size of every page.
const PAGE: usize = 4096;
/// The kernel's signal sets have this many bytes.
const SIGNAL_SET: usize = 8;

/// Whether the kernel can read the page of `address`. It takes no lock and changes nothing.
fn is_readable(address: usize) -> bool {
    /// `rt_sigprocmask` reads the new set before it refuses this operation.
    const NO_OPERATION: libc::c_int = -1;
    let set = address & !(SIGNAL_SET - 1);
    if set == 0 {
        return false;
    }
    // Miri has no such system call.
    if cfg!(miri) {
        return true;
    }
    let before = errno();
    // SAFETY: the kernel checks the address, and has no set to fill in.
    let refused = unsafe { libc::syscall(libc::SYS_rt_sigprocmask, NO_OPERATION, set, 0usize, SIGNAL_SET) };
    // Any other error says nothing about the address, for example that of a seccomp filter.
    let is_readable = refused == 0 || errno() != libc::EFAULT;
    set_errno(before);
    is_readable
}

/// The bytes of a path before its NUL; `None` if the kernel cannot read them either, or there are too many.
///
/// # Safety
/// Memory that can be read does not change while the result is used.
#[inline]
pub(crate) unsafe fn path_bytes<'a>(path: *const c_char) -> Option<&'a [u8]> {
    let start = path.addr();
    let mut len = 0;
    while len < PATH_MAX {
        let address = start.checked_add(len)?;
        if !is_readable(address) {
            return None;
        }
        let room = (PAGE - address % PAGE).min(PATH_MAX - len);
        // SAFETY: the bytes are in one page, which can be read.
        let found = unsafe { libc::strnlen(path.add(len), room) };
        len += found;
        if found < room {
            // SAFETY: all pages up to here can be read.
            return Some(unsafe { std::slice::from_raw_parts(path.cast(), len) });
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use super::*;

    /// Two pages, of which only the first one can be read.
    fn pages() -> *mut u8 {
        // SAFETY: a new mapping, whose second page nobody uses.
        unsafe {
            let (protection, flags) =
                (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            let pages = libc::mmap(ptr::null_mut(), 2 * PAGE, protection, flags, -1, 0);
            assert_ne!(pages, libc::MAP_FAILED);
            assert_eq!(libc::mprotect(pages.add(PAGE), PAGE, libc::PROT_NONE), 0);
            pages.cast()
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "a system call that Miri lacks")]
    fn strings_end_before_memory_that_cannot_be_read() {
        let first = pages();
        // SAFETY: bytes of the page.
        unsafe {
            set_errno(0);
            let text = first.add(PAGE - 5);
            text.copy_from_nonoverlapping(c"/dev".as_ptr().cast(), 5);
            assert_eq!(path_bytes(text.cast()), Some(&b"/dev"[..]));
            assert_eq!(path_bytes(text.add(4).cast()), Some(&b""[..]));
            text.add(4).write(b'/');
            assert_eq!(path_bytes(text.cast()), None, "it continues in the next page");
            assert_eq!(path_bytes(first.add(PAGE).cast()), None);
            for address in [0, 7, 8, usize::MAX] {
                assert_eq!(path_bytes(ptr::without_provenance(address)), None, "{address}");
            }
            assert_eq!(errno(), 0);
        }
    }

    #[test]
    fn strings_of_the_longest_path_and_more() {
        for (len, is_path) in [(PATH_MAX - 1, true), (PATH_MAX, false)] {
            let text = [vec![b'a'; len], vec![0]].concat();
            // SAFETY: a C string.
            let found = unsafe { path_bytes(text.as_ptr().cast()) };
            assert_eq!(found.map(<[u8]>::len), is_path.then_some(len));
        }
    }
}
