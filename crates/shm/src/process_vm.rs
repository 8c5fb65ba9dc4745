//! Copies between address spaces by the kernel (`process_vm_readv(2)`), for memory that cannot be mapped.

use std::io;

use crate::PAGE;

/// A range of memory in some process, with the layout of `struct iovec`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct IoVec {
    /// Address in the process that owns the memory.
    pub base: u64,
    /// Length \[bytes\].
    pub len: u64,
}

/// Direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From this process into the other.
    Write,
    /// From the other process into this one.
    Read,
}

/// Copies between `local` ranges and one `remote` range of the process with the thread `tid`.
///
/// # Errors
/// EFAULT if either side has no such memory or the copy stops early; ESRCH if the process has exited; EPERM
/// if the kernel forbids the access.
///
/// # Safety
/// The local ranges must be valid for the access that `direction` makes.
pub unsafe fn copy(tid: u32, local: &[IoVec], remote: IoVec, direction: Direction) -> io::Result<()> {
    // The kernel moves at most MAX_RW_COUNT (2 GiB less a page) per call.
    const CHUNK: u64 = 1 << 30;
    let mut remote_address = remote.base;
    for range in local {
        let mut done = 0;
        while done < range.len {
            let len = (range.len - done).min(CHUNK);
            let ours = libc::iovec { iov_base: (range.base + done) as *mut _, iov_len: len as usize };
            let theirs = libc::iovec { iov_base: remote_address as *mut _, iov_len: len as usize };
            // rustix has no such call.
            // SAFETY: the caller vouches for the local range; the kernel checks the remote one.
            let n = unsafe {
                match direction {
                    Direction::Write => {
                        libc::process_vm_writev(tid as i32, &raw const ours, 1, &raw const theirs, 1, 0)
                    }
                    Direction::Read => {
                        libc::process_vm_readv(tid as i32, &raw const ours, 1, &raw const theirs, 1, 0)
                    }
                }
            };
            if n < 0 {
                return Err(io::Error::last_os_error());
            }
            if n == 0 {
                return Err(io::Error::from_raw_os_error(libc::EFAULT));
            }
            done += n as u64;
            remote_address += n as u64;
        }
    }
    Ok(())
}

/// Checks bytes that [`copy`] has just read from the process with the thread `tid`.
///
/// A copy waits while the process moves the page ([`crate::relocate`]). If the process ends meanwhile, the kernel ends the wait with
/// a page of zeros. By then, the process has no memory any more. So bytes that may be such a page's are those of the
/// process only if it still has memory.
///
/// # Errors
/// ESRCH if the process has exited and the bytes may not be its own. EFAULT if it executes another program, unless that one has
/// memory at this address.
///
/// # Safety
/// `local` is valid for loads.
pub unsafe fn check_read(tid: u32, local: IoVec, remote: IoVec) -> io::Result<()> {
    let next_page = PAGE as u64 - remote.base % PAGE as u64;
    // SAFETY: the caller vouches for the range.
    let is_zero = |at: u64| unsafe { ((local.base + at) as *const u8).read_volatile() } == 0;
    let mut first_of_pages = std::iter::once(0).chain((next_page..local.len).step_by(PAGE));
    if local.len == 0 || !first_of_pages.any(is_zero) {
        return Ok(());
    }
    let mut byte = 0u8;
    let here = IoVec { base: (&raw mut byte) as u64, len: 1 };
    // SAFETY: one byte on the stack.
    unsafe { copy(tid, &[here], IoVec { len: 1, ..remote }, Direction::Read) }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::time::{Duration, Instant};

    use super::*;
    use crate::Mapping;
    use crate::userfault::{Faults, Userfault};

    /// Reads `len` bytes as a peer does.
    fn read(tid: u32, at: u64, len: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0xff; len];
        let local = IoVec { base: bytes.as_mut_ptr() as u64, len: len as u64 };
        let remote = IoVec { base: at, len: len as u64 };
        // SAFETY: the local range is the vector.
        unsafe {
            copy(tid, &[local], remote, Direction::Read)?;
            check_read(tid, local, remote)?;
        }
        Ok(bytes)
    }

    #[test]
    fn zeros_of_a_running_process_are_read() {
        let memory = Mapping::anonymous(3 * PAGE).unwrap();
        for at in [0, 1, PAGE - 1] {
            assert_eq!(
                read(std::process::id(), memory.base() as u64 + at as u64, 2 * PAGE).unwrap(),
                vec![0; 2 * PAGE]
            );
        }
        assert!(read(std::process::id(), memory.base() as u64, 0).unwrap().is_empty());
    }

    /// Its page waits as while it moves, and the kernel then gives out zeros in place of what the process had there.
    #[test]
    fn a_read_that_outlives_the_process_is_an_error() {
        if !crate::relocate::is_available() {
            println!("skipped: pages do not move here; run as root, or set vm.unprivileged_userfaultfd=1");
            return;
        }
        let memory = Mapping::anonymous(3 * PAGE).unwrap();
        // The page before is there, and its bytes differ from zero.
        // SAFETY: inside the mapping.
        unsafe { memory.base().write_bytes(7, PAGE) };
        let start = memory.base() as usize;
        let (mut ready, mut in_child) = io::pipe().unwrap();
        // SAFETY: the C library makes its heap usable in the child, which is killed.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let userfault = Userfault::for_all_accesses();
            let missing = start + PAGE..start + 3 * PAGE;
            let waits = userfault.as_ref().is_ok_and(|it| it.register(&missing, Faults::Missing).is_ok());
            let _ = in_child.write_all(&[u8::from(waits)]);
            std::thread::sleep(Duration::from_secs(60));
            // SAFETY: ends the child.
            unsafe { libc::_exit(0) };
        }
        assert!(child > 0);
        // If the child ends, the read ends.
        drop(in_child);
        let tid = child as u32;
        let mut waits = [0];
        ready.read_exact(&mut waits).unwrap();
        let (number, of_reader) = std::sync::mpsc::channel();
        let reader = std::thread::spawn(move || {
            number.send(crate::thread::id()).unwrap();
            read(tid, start as u64 + PAGE as u64 - 8, 16)
        });
        let state = format!("/proc/self/task/{}/syscall", of_reader.recv().unwrap());
        let in_copy = format!("{} ", libc::SYS_process_vm_readv);
        let deadline = Instant::now() + Duration::from_secs(20);
        let is_waiting = || std::fs::read_to_string(&state).is_ok_and(|call| call.starts_with(&in_copy));
        while !is_waiting() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        let waiting = is_waiting();
        // SAFETY: our own child.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, std::ptr::null_mut(), 0);
        }
        let result = reader.join().unwrap();
        assert_eq!((waits, waiting), ([1], true), "the reader waits for the page");
        assert_eq!(result.map_err(|error| error.raw_os_error()), Err(Some(libc::ESRCH)));
    }
}
