//! Memory that holds nothing: one range that reads as zero, another that forgets what is written.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::OnceLock;

use crate::Memfd;

/// Two ranges of [`Null::LEN`] bytes each, for as long as the process lives.
#[derive(Debug)]
pub struct Null {
    zeros: usize,
    sink: usize,
}

/// Bytes of memory behind the sink, which repeats them. Pages come with their first use.
const REPEATED: usize = 64 << 20;

impl Null {
    /// Bytes of each range: more than the length of any one element of a request.
    pub const LEN: usize = 1 << 32;

    /// The process's one; None where there is no address space for it.
    pub fn get() -> Option<&'static Self> {
        static NULL: OnceLock<Option<Null>> = OnceLock::new();
        NULL.get_or_init(Self::new).as_ref()
    }

    fn new() -> Option<Self> {
        let zeros = reserve(libc::PROT_READ)?;
        let sink = reserve(libc::PROT_NONE)?;
        let memory = Memfd::new("millstream-sink", REPEATED).ok()?;
        for at in (0..Self::LEN).step_by(REPEATED) {
            let prot = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_NORESERVE;
            let fd = memory.as_fd().as_raw_fd();
            // SAFETY: replaces a part of the range that was reserved for this.
            let piece =
                unsafe { libc::syscall(libc::SYS_mmap, sink + at, REPEATED, prot, flags, fd, 0usize) };
            if piece == -1 {
                return None;
            }
        }
        Some(Self { zeros, sink })
    }

    /// The range that reads as zero; nobody can write it.
    #[must_use]
    pub fn zeros(&self) -> *mut u8 {
        self.zeros as *mut u8
    }

    /// The range to write to; what can be read there is garbage.
    #[must_use]
    pub fn sink(&self) -> *mut u8 {
        self.sink as *mut u8
    }
}

/// A range of private pages that takes no memory.
fn reserve(prot: libc::c_int) -> Option<usize> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let base = unsafe { libc::syscall(libc::SYS_mmap, 0usize, Null::LEN, prot, flags, -1, 0usize) };
    (base != -1).then_some(base as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_kept() {
        let null = Null::get().unwrap();
        // SAFETY: inside the two ranges.
        unsafe {
            for at in [0, REPEATED - 1, REPEATED, Null::LEN - 1] {
                null.sink().add(at).write_volatile(7);
                assert_eq!(null.zeros().add(at).read_volatile(), 0);
            }
        }
    }
}
