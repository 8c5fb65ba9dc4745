//! Copies of memory beside other threads: the baselines of transfers between processes.

use std::hint::black_box;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use millstream_shm::memcpy::throughput;
pub(crate) use millstream_shm::memcpy::{Pages, allocate, memcpy, memcpy_between};

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
pub(crate) fn memcpy_beside_poller(pages: Pages, block: usize, time: Duration) -> io::Result<f64> {
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

/// GB/s of a two-thread memcpy with a flag per message: what a SEND does without a queue pair. A SEND may be faster, as its
/// receiver takes several completions at once.
///
/// The sender reads a receive request, copies `block` bytes and stores a completion. The receiver waits for each
/// completion and posts its request again. There are no keys, queue pairs or checks.
///
/// # Errors
/// As [`memcpy`].
///
/// # Panics
/// If `block` is zero.
pub(crate) fn two_thread_memcpy(pages: Pages, block: usize, time: Duration) -> io::Result<f64> {
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
        for copy in [memcpy_beside_poller, two_thread_memcpy] {
            // The threads may wait for a processor during a measurement.
            let speeds = [(); 5].map(|()| copy(Pages::Base, 4096, Duration::from_millis(5)).unwrap());
            assert!(speeds.iter().any(|speed| *speed > 0.001), "{speeds:?}");
            assert!(speeds.iter().all(|speed| *speed < 10_000.0), "{speeds:?}");
        }
    }
}
