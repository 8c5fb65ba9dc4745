//! Rates of `memcpy` between mappings: the baseline of benchmarks and of the reports of runs.

use std::hint::black_box;
use std::io;
use std::time::{Duration, Instant};

use crate::{Mapping, Memfd};

/// The pages of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// Base pages, as in a program's heap.
    Base,
    /// Huge pages where the system has them, populated, as in a region that peers write to.
    Huge,
}

/// `len` bytes of shareable memory, written once so that page faults are not measured.
///
/// # Errors
/// The error of allocating or populating the memory.
pub fn allocate(pages: Pages, len: usize) -> io::Result<Mapping> {
    let mapping = Memfd::new("millstream-memcpy", len)?.map()?;
    if pages == Pages::Huge {
        mapping.prefault(0, len)?;
    }
    // SAFETY: the mapping has `len` bytes, and no other thread has it.
    unsafe { mapping.base().write_bytes(1, len) };
    Ok(mapping)
}

/// GB/s of `memcpy` in blocks of `block` bytes, measured for about `time`.
///
/// The copies cycle through a source of `source` bytes and a destination of `window` bytes. With one block each, both
/// stay in the cache; a large window behaves like the slots of an event builder.
///
/// # Errors
/// The error of allocating the buffers.
///
/// # Panics
/// If `block` is zero or larger than `source` or `window`.
pub fn memcpy(pages: Pages, block: usize, source: usize, window: usize, time: Duration) -> io::Result<f64> {
    assert!(block > 0 && block <= window && block <= source);
    let (from, to) = (allocate(pages, source)?, allocate(pages, window)?);
    // SAFETY: two mappings of ours, of these sizes.
    Ok(unsafe { memcpy_between((from.base(), source), (to.base(), window), block, time) })
}

/// As [`memcpy`], between two existing ranges, given with their sizes.
///
/// # Panics
/// As [`memcpy`].
///
/// # Safety
/// The first range is readable, the second one writable, and they do not overlap. No other thread accesses
/// them meanwhile.
pub unsafe fn memcpy_between(
    (from, source): (*const u8, usize),
    (to, window): (*mut u8, usize),
    block: usize,
    time: Duration,
) -> f64 {
    assert!(block > 0 && block <= window && block <= source);
    let (source_blocks, window_blocks) = (source / block, window / block);
    let (mut source_index, mut window_index) = (0, 0);
    let mut copy = |_| {
        // SAFETY: whole blocks inside both ranges, which do not overlap.
        unsafe {
            let (from, to) = (from.add(source_index * block), to.add(window_index * block));
            black_box(to).copy_from_nonoverlapping(black_box(from), block);
        }
        // No modulo: on older processors two divisions take as long as a copy of 4 KiB.
        source_index = if source_index + 1 == source_blocks { 0 } else { source_index + 1 };
        window_index = if window_index + 1 == window_blocks { 0 } else { window_index + 1 };
    };
    (0..window_blocks).for_each(&mut copy);
    throughput(block, time, copy)
}

/// GB/s of copies of `block` bytes each, measured for about `time`. `copy` makes one copy and gets their number so far.
pub fn throughput(block: usize, time: Duration, mut copy: impl FnMut(usize)) -> f64 {
    // Reading the clock costs as much as copying some hundred bytes.
    let copies_per_clock_read = (65536 / block).max(1);
    let start = Instant::now();
    let mut copies = 0usize;
    while start.elapsed() < time {
        for _ in 0..copies_per_clock_read {
            copy(copies);
            copies += 1;
        }
    }
    (copies * block) as f64 / start.elapsed().as_secs_f64() / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn throughput_is_plausible() {
        for pages in [Pages::Base, Pages::Huge] {
            // The thread may wait for a processor during a measurement.
            let speeds =
                [(); 5].map(|()| memcpy(pages, 4096, 8192, 1 << 20, Duration::from_millis(5)).unwrap());
            assert!(speeds.iter().any(|speed| *speed > 0.01), "{speeds:?}");
            assert!(speeds.iter().all(|speed| *speed < 10_000.0), "{speeds:?}");
        }
    }
}
