//! Registration and deregistration while other threads store to the memory.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use millstream_device::Mr;
use millstream_device::types::{
    ACCESS_LOCAL_WRITE, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE, WC_SUCCESS, WR_RDMA_WRITE,
};
use millstream_shm::PAGE;
use millstream_shm::thread::{affinity, with_affinity};

use crate::support::{Adapter, Placement, QpConfig, pair, pattern, request, run_role};

const ACCESS: u32 = ACCESS_LOCAL_WRITE | ACCESS_REMOTE_READ | ACCESS_REMOTE_WRITE;

/// Sizes of the regions (pages), and how many regions of each size are registered.
const SIZES: [(usize, usize); 6] = [(1, 100), (2, 100), (16, 100), (256, 60), (1500, 16), (16384, 1)];

/// Fresh anonymous pages, unmapped when dropped. The first word of each page counts the stores to it.
struct Counters {
    base: usize,
    pages: usize,
}

impl Counters {
    fn new(pages: usize) -> Self {
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), pages * PAGE, protection, flags, -1, 0) };
        assert_ne!(base, libc::MAP_FAILED);
        Self { base: base as usize, pages }
    }

    fn word(&self, page: usize) -> &AtomicU64 {
        assert!(page < self.pages);
        // SAFETY: the first word of a page of the mapping, which lives as long as `self`.
        unsafe { AtomicU64::from_ptr((self.base + page * PAGE) as *mut u64) }
    }
}

impl Drop for Counters {
    fn drop(&mut self) {
        // SAFETY: this value's mapping.
        unsafe { libc::munmap(self.base as *mut _, self.pages * PAGE) };
    }
}

/// Registers and deregisters fresh memory twice while `writers` threads store to all of its pages. Every page must then
/// hold the number of its stores.
fn every_store_is_found(adapter: &Adapter, pages: usize, writers: usize) {
    let memory = Counters::new(pages);
    let (begun, end) = (AtomicUsize::new(0), AtomicBool::new(false));
    let stores: Vec<u64> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..writers)
            .map(|first| {
                let (memory, begun, end) = (&memory, &begun, &end);
                scope.spawn(move || {
                    let mine = || (first..pages).step_by(writers);
                    begun.fetch_add(1, Ordering::SeqCst);
                    let mut rounds = 0;
                    while !end.load(Ordering::Relaxed) || rounds == 0 {
                        rounds += 1;
                        for page in mine() {
                            // A plain load and store: pages are first touched by either of them.
                            let word = memory.word(page);
                            word.store(word.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
                        }
                    }
                    rounds
                })
            })
            .collect();
        while begun.load(Ordering::SeqCst) < writers {
            std::thread::yield_now();
        }
        for _ in 0..2 {
            let mut mr = Mr::register(
                &adapter.pd,
                memory.base as u64,
                (pages * PAGE) as u64,
                memory.base as u64,
                ACCESS,
            )
            .expect("registered");
            std::thread::yield_now();
            mr.deregister().expect("deregistered");
        }
        end.store(true, Ordering::Relaxed);
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    for page in 0..pages {
        let found = memory.word(page).load(Ordering::Relaxed);
        assert_eq!(found, stores[page % writers], "stores to page {page} of {pages} with {writers} threads");
    }
}

#[test]
fn no_store_of_another_thread_is_lost() {
    run_role("registration");
}

/// In another process, so that its affinity does not change that of other tests' threads.
pub(crate) fn registers_under_stores() {
    let all = affinity().expect("the affinity can be read");
    for cpus in [&all[..1], &all[..all.len().min(2)]] {
        with_affinity(cpus, || {
            let adapter = Adapter::open();
            let mut first = vec![0u8; 2 * PAGE];
            drop(adapter.register(&mut first));
            // Some runtimes replace the handler of faults after the device was opened.
            // SAFETY: restores the default disposition.
            unsafe { libc::signal(libc::SIGSEGV, libc::SIG_DFL) };
            for (pages, regions) in SIZES {
                for region in 0..regions {
                    every_store_is_found(&adapter, pages, 1 + region % 2);
                }
            }
        })
        .expect("the affinity can be set");
    }
}

/// A peer writes through the kernel to a small region, while the region around it is registered and deregistered.
#[test]
fn no_write_fails_while_the_region_around_its_target_is_registered() {
    const SMALL: usize = 64;
    const WRITES: u64 = 400;
    let (owner, mut peer) = pair(Placement::OtherProcess, &QpConfig::default());
    let memory = Counters::new(64);
    let pd = owner.actor().pd().clone();
    let at = (memory.base + 3 * PAGE + 8) as u64;
    let small = Mr::register(&pd, at, SMALL as u64, at, ACCESS).expect("registered");
    let (sources, end) = ([1, 2].map(|seed| pattern(seed, SMALL)), AtomicBool::new(false));
    let held = [0, 1].map(|i| peer.hold(&sources[i]));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !end.load(Ordering::Relaxed) {
                let len = (memory.pages * PAGE) as u64;
                Mr::register(&pd, memory.base as u64, len, memory.base as u64, ACCESS)
                    .and_then(|mut around| around.deregister())
                    .expect("registered and deregistered");
            }
        });
        let mut results = Vec::new();
        for n in 0..WRITES {
            peer.post(request(n, WR_RDMA_WRITE, &[held[n as usize % 2].all()], (at, small.key())));
            let status = peer.sent(1)[0].status;
            // SAFETY: inside the mapping; no request is in progress.
            let found = unsafe { std::slice::from_raw_parts(at as *const u8, SMALL) }.to_vec();
            results.push((status, found == sources[n as usize % 2]));
            if status != WC_SUCCESS {
                break;
            }
        }
        end.store(true, Ordering::Relaxed);
        assert_eq!(results, vec![(WC_SUCCESS, true); WRITES as usize]);
    });
}
