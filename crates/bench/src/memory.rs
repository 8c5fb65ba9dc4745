//! The copies that everything is held against.

use std::hint::black_box;
use std::time::{Duration, Instant};

/// Memory from a memfd, mapped shared: the kind of memory that transfers land in.
#[derive(Debug)]
pub struct SharedBuffer {
    base: *mut u8,
    len: usize,
}

impl SharedBuffer {
    /// Makes and touches `len` bytes.
    ///
    /// # Errors
    /// What `memfd_create`, `ftruncate` or `mmap` report.
    pub fn new(len: usize) -> std::io::Result<Self> {
        // SAFETY: creates a descriptor and a new mapping; the descriptor is closed again, the
        // mapping keeps the memory.
        let base = unsafe {
            let fd = libc::memfd_create(c"millstream-bench".as_ptr(), libc::MFD_CLOEXEC);
            if fd < 0 {
                return Err(std::io::Error::last_os_error());
            }
            let sized = libc::ftruncate(fd, len as libc::off_t) == 0;
            let prot = libc::PROT_READ | libc::PROT_WRITE;
            let base = libc::mmap(std::ptr::null_mut(), len, prot, libc::MAP_SHARED, fd, 0);
            let error = std::io::Error::last_os_error();
            libc::close(fd);
            if !sized || base == libc::MAP_FAILED {
                return Err(error);
            }
            base.cast::<u8>()
        };
        // SAFETY: the mapping has `len` bytes. First touch is slow and must not be measured.
        unsafe { base.write_bytes(1, len) };
        Ok(Self { base, len })
    }
}

impl Drop for SharedBuffer {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}

/// GB/s of `memcpy` in blocks of `block` bytes, for about `time`: blocks are taken in turn from
/// their places in a source of `source` bytes to their places in a destination of `window` bytes.
/// One block each is the hot case; a large window is what an event builder's slots look like to the
/// caches.
///
/// # Errors
/// What making the buffers reports.
///
/// # Panics
/// If `block` is zero or larger than `source` or `window`.
pub fn memcpy(block: usize, source: usize, window: usize, time: Duration) -> std::io::Result<f64> {
    assert!(block > 0 && block <= window && block <= source);
    let (from, to) = (SharedBuffer::new(source)?, SharedBuffer::new(window)?);
    let (sources, places) = (source / block, window / block);
    let copy = |turn: usize| {
        // SAFETY: whole blocks inside both buffers, which do not overlap.
        unsafe {
            let here = from.base.add(turn % sources * block);
            let there = to.base.add(turn % places * block);
            black_box(there).copy_from_nonoverlapping(black_box(here), block);
        }
    };
    (0..places).for_each(copy);
    // A call of the clock costs as much as copying some hundred bytes.
    let between_looks = (65536 / block).max(1);
    let start = Instant::now();
    let mut copies = 0usize;
    while start.elapsed() < time {
        for _ in 0..between_looks {
            copy(copies);
            copies += 1;
        }
    }
    Ok((copies * block) as f64 / start.elapsed().as_secs_f64() / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_takes_time() {
        let speed = memcpy(4096, 8192, 1 << 20, Duration::from_millis(5)).unwrap();
        assert!(speed > 0.01 && speed < 10_000.0, "{speed}");
    }
}
