//! Null memory: a range that reads as zero, and a range that discards stores.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::OnceLock;

use crate::{Memfd, mm};

/// Two ranges of [`NullMemory::LEN`] bytes, mapped until the process ends. They back null memory regions
/// (`ibv_alloc_null_mr`).
#[derive(Debug)]
pub struct NullMemory {
    zeros: usize,
    sink: usize,
}

/// Bytes of memory behind the sink, which maps them repeatedly. Pages are allocated on first use.
const SINK_BYTES: usize = 64 << 20;

impl NullMemory {
    /// Size of each range \[bytes\]: more than the length of a scatter/gather element.
    pub const LEN: usize = 1 << 32;

    /// The ranges of this process; None if the address space is exhausted.
    pub fn get() -> Option<&'static Self> {
        static NULL: OnceLock<Option<NullMemory>> = OnceLock::new();
        NULL.get_or_init(Self::new).as_ref()
    }

    fn new() -> Option<Self> {
        let zeros = reserve(libc::PROT_READ)?;
        let sink = reserve(libc::PROT_NONE)?;
        let memory = Memfd::new("millstream-sink", SINK_BYTES).ok()?;
        for at in (0..Self::LEN).step_by(SINK_BYTES) {
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_NORESERVE;
            let fd = memory.as_fd().as_raw_fd();
            // SAFETY: replaces a part of the range reserved above.
            unsafe { mm::mmap(sink + at, SINK_BYTES, protection, flags, fd, 0) }.ok()?;
        }
        Some(Self { zeros, sink })
    }

    /// The range that reads as zero; it is mapped read-only.
    #[must_use]
    pub fn zeros(&self) -> *mut u8 {
        self.zeros as *mut u8
    }

    /// The range that discards stores; loads from it return arbitrary bytes.
    #[must_use]
    pub fn sink(&self) -> *mut u8 {
        self.sink as *mut u8
    }
}

/// Reserves a private range that takes no memory.
fn reserve(protection: libc::c_int) -> Option<usize> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    unsafe { mm::mmap(0, NullMemory::LEN, protection, flags, -1, 0) }.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stores_to_the_sink_leave_the_zeros() {
        let null = NullMemory::get().unwrap();
        // SAFETY: inside the two ranges.
        unsafe {
            for at in [0, SINK_BYTES - 1, SINK_BYTES, NullMemory::LEN - 1] {
                null.sink().add(at).write_volatile(7);
                assert_eq!(null.zeros().add(at).read_volatile(), 0);
            }
        }
    }
}
