//! The copies that everything is held against.

use std::hint::black_box;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use millstream_shm::{Mapping, Memfd};

/// Kinds of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// As programs have it: small pages.
    Ordinary,
    /// As landing memory is prepared: huge pages where the system has them.
    Landing,
}

/// `len` bytes of memory that can be shared, touched: the first touch is slow and must not be measured.
pub(crate) fn memory(kind: Kind, len: usize) -> io::Result<Mapping> {
    let mapping = Memfd::new("millstream-bench", len)?.map()?;
    if kind == Kind::Landing {
        mapping.prefault(0, len)?;
    }
    // SAFETY: the mapping has `len` bytes, and nobody else has it.
    unsafe { mapping.base().write_bytes(1, len) };
    Ok(mapping)
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
pub fn memcpy(kind: Kind, block: usize, source: usize, window: usize, time: Duration) -> io::Result<f64> {
    assert!(block > 0 && block <= window && block <= source);
    let (from, to) = (memory(kind, source)?, memory(kind, window)?);
    // SAFETY: two mappings of ours, of these sizes.
    Ok(unsafe { memcpy_between((from.base(), source), (to.base(), window), block, time) })
}

/// As [`memcpy`], between two ranges that are there already, given with their sizes.
///
/// # Panics
/// As [`memcpy`].
///
/// # Safety
/// The first range can be read, the second one written, and they do not overlap. Nobody else uses them meanwhile.
pub unsafe fn memcpy_between(
    (from, source): (*const u8, usize),
    (to, window): (*mut u8, usize),
    block: usize,
    time: Duration,
) -> f64 {
    assert!(block > 0 && block <= window && block <= source);
    let (sources, places) = (source / block, window / block);
    let (mut here, mut there) = (0, 0);
    let mut copy = |_| {
        // SAFETY: whole blocks inside both ranges, which do not overlap.
        unsafe {
            let (from, to) = (from.add(here * block), to.add(there * block));
            black_box(to).copy_from_nonoverlapping(black_box(from), block);
        }
        // Without divisions: on older processors two of them take as long as a copy of 4 KiB.
        here = if here + 1 == sources { 0 } else { here + 1 };
        there = if there + 1 == places { 0 } else { there + 1 };
    };
    (0..places).for_each(&mut copy);
    speed(block, time, copy)
}

/// GB/s of copies of `block` bytes each, for about `time`.
fn speed(block: usize, time: Duration, mut copy: impl FnMut(usize)) -> f64 {
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
    (copies * block) as f64 / start.elapsed().as_secs_f64() / 1e9
}

/// The same while another thread looks at a word all the time, on another core if there is one: what a copy
/// can reach when the receiver polls. Two cores of a virtual machine may be two threads of one real one.
///
/// # Errors
/// As [`memcpy`].
///
/// # Panics
/// As [`memcpy`].
pub fn memcpy_beside_poller(kind: Kind, block: usize, time: Duration) -> io::Result<f64> {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Like a program that polls, without a pause.
            let mut looks = 0u64;
            while !over.load(Ordering::Acquire) {
                looks = looks.wrapping_add(1);
            }
            black_box(looks);
        });
        let result = memcpy(kind, block, block, block, time);
        over.store(true, Ordering::Release);
        result
    })
}

/// Two threads, and between them what a message needs at the very least: the sender reads a request of the
/// receiver's, copies `block` bytes, and stores a completion; the receiver waits for each completion and posts its request
/// again. No keys, no queues, no checks: what a SEND could reach here.
///
/// # Errors
/// As [`memcpy`].
///
/// # Panics
/// If `block` is zero.
pub fn memcpy_told(kind: Kind, block: usize, time: Duration) -> io::Result<f64> {
    assert!(block > 0);
    let (from, to) = (memory(kind, block)?, memory(kind, block)?);
    let [requests, completions] =
        [(); 2].map(|()| (0..PLACES).map(|_| Place::default()).collect::<Box<[_]>>());
    // The turn at which a request can be used, and the turn after the one that a completion tells of.
    for (turn, request) in requests.iter().enumerate() {
        request.0[3].store(turn, Ordering::Relaxed);
    }
    let over = AtomicBool::new(false);
    let receive = || {
        for turn in 0.. {
            let completion = &completions[turn % PLACES];
            while completion.0[3].load(Ordering::Acquire) != turn + 1 {
                if over.load(Ordering::Relaxed) {
                    return;
                }
            }
            black_box(completion.0[0].load(Ordering::Relaxed));
            requests[turn % PLACES].0[0].store(turn, Ordering::Relaxed);
            requests[turn % PLACES].0[3].store(turn + PLACES, Ordering::Release);
        }
    };
    let send = |turn: usize| {
        let (request, completion) = (&requests[turn % PLACES], &completions[turn % PLACES]);
        while request.0[3].load(Ordering::Acquire) != turn {
            std::hint::spin_loop();
        }
        // SAFETY: `block` bytes of each, and nobody else touches either.
        unsafe { black_box(to.base()).copy_from_nonoverlapping(black_box(from.base()), block) };
        completion.0[0].store(request.0[0].load(Ordering::Relaxed), Ordering::Relaxed);
        completion.0[3].store(turn + 1, Ordering::Release);
    };
    std::thread::scope(|scope| {
        scope.spawn(receive);
        let result = speed(block, time, send);
        over.store(true, Ordering::Relaxed);
        Ok(result)
    })
}

/// Requests and completions that two threads have for each other.
const PLACES: usize = 512;

/// A request or a completion, as large as the device's: two share a line.
#[derive(Default)]
#[repr(align(32))]
struct Place([AtomicUsize; 4]);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_takes_time() {
        for kind in [Kind::Ordinary, Kind::Landing] {
            let speed = memcpy(kind, 4096, 8192, 1 << 20, Duration::from_millis(5)).unwrap();
            assert!(speed > 0.01 && speed < 10_000.0, "{speed}");
        }
        for copy in [memcpy_beside_poller, memcpy_told] {
            let speed = copy(Kind::Ordinary, 4096, Duration::from_millis(5)).unwrap();
            assert!(speed > 0.001 && speed < 10_000.0, "{speed}");
        }
    }
}
