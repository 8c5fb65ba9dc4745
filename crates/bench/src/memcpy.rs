//! Copies of memory: the baselines of most benchmarks.

use std::hint::black_box;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use millstream_shm::{Mapping, Memfd};

/// The pages of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// Base pages, as in a program's heap.
    Base,
    /// Huge pages where the system has them, populated, as in a region that peers write to.
    Huge,
}

/// `len` bytes of shareable memory, written once so that page faults are not measured.
pub(crate) fn allocate(pages: Pages, len: usize) -> io::Result<Mapping> {
    let mapping = Memfd::new("millstream-bench", len)?.map()?;
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

/// GB/s of copies of `block` bytes each, measured for about `time`.
fn throughput(block: usize, time: Duration, mut copy: impl FnMut(usize)) -> f64 {
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

/// GB/s of `memcpy` of one block while another thread polls a flag, on another core if there is one.
///
/// This is the upper bound of a copy whose receiver polls: two cores of a virtual machine may be two threads
/// of one physical core.
///
/// # Errors
/// As [`memcpy`].
///
/// # Panics
/// As [`memcpy`].
pub fn memcpy_beside_poller(pages: Pages, block: usize, time: Duration) -> io::Result<f64> {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Without a pause instruction, as polling programs do.
            let mut polls = 0u64;
            while !over.load(Ordering::Acquire) {
                polls = polls.wrapping_add(1);
            }
            black_box(polls);
        });
        let result = memcpy(pages, block, block, block, time);
        over.store(true, Ordering::Release);
        result
    })
}

/// GB/s of a two-thread memcpy with a flag per message: the upper bound of what a SEND can reach.
///
/// The sender reads a receive request, copies `block` bytes and stores a completion. The receiver waits for each
/// completion and posts its request again. There are no keys, queue pairs or checks.
///
/// # Errors
/// As [`memcpy`].
///
/// # Panics
/// If `block` is zero.
pub fn two_thread_memcpy(pages: Pages, block: usize, time: Duration) -> io::Result<f64> {
    assert!(block > 0);
    let (from, to) = (allocate(pages, block)?, allocate(pages, block)?);
    let [requests, completions] =
        [(); 2].map(|()| (0..RING_ENTRIES).map(|_| RingEntry::default()).collect::<Box<[_]>>());
    // A request's last word is the message that may use it; a completion's is one more than the completed message.
    for (message, request) in requests.iter().enumerate() {
        request.0[3].store(message, Ordering::Relaxed);
    }
    let over = AtomicBool::new(false);
    let receive = || {
        for message in 0.. {
            let completion = &completions[message % RING_ENTRIES];
            while completion.0[3].load(Ordering::Acquire) != message + 1 {
                if over.load(Ordering::Relaxed) {
                    return;
                }
            }
            black_box(completion.0[0].load(Ordering::Relaxed));
            let request = &requests[message % RING_ENTRIES];
            request.0[0].store(message, Ordering::Relaxed);
            request.0[3].store(message + RING_ENTRIES, Ordering::Release);
        }
    };
    let send = |message: usize| {
        let (request, completion) = (&requests[message % RING_ENTRIES], &completions[message % RING_ENTRIES]);
        while request.0[3].load(Ordering::Acquire) != message {
            std::hint::spin_loop();
        }
        // SAFETY: `block` bytes of each, and no other thread accesses either.
        unsafe { black_box(to.base()).copy_from_nonoverlapping(black_box(from.base()), block) };
        completion.0[0].store(request.0[0].load(Ordering::Relaxed), Ordering::Relaxed);
        completion.0[3].store(message + 1, Ordering::Release);
    };
    std::thread::scope(|scope| {
        scope.spawn(receive);
        let result = throughput(block, time, send);
        over.store(true, Ordering::Relaxed);
        Ok(result)
    })
}

/// Entries of the request ring and of the completion ring.
const RING_ENTRIES: usize = 512;

/// A request or a completion of the device's size: two share a cache line.
#[derive(Default)]
#[repr(align(32))]
struct RingEntry([AtomicUsize; 4]);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn throughput_is_plausible() {
        for pages in [Pages::Base, Pages::Huge] {
            let speed = memcpy(pages, 4096, 8192, 1 << 20, Duration::from_millis(5)).unwrap();
            assert!(speed > 0.01 && speed < 10_000.0, "{speed}");
        }
        for copy in [memcpy_beside_poller, two_thread_memcpy] {
            let speed = copy(Pages::Base, 4096, Duration::from_millis(5)).unwrap();
            assert!(speed > 0.001 && speed < 10_000.0, "{speed}");
        }
    }
}
