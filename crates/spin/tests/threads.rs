//! A process that may not have as many threads as it wants. The only test of this program: it sets a limit of the process.

use std::sync::Barrier;

use millstream_spin::{Block, Extent, Lattice, Sweeper};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Runs with `spare` more bytes of address space than the process has: threads get no stack in the rest.
fn with_address_space<T>(spare: u64, run: impl FnOnce() -> T) -> T {
    let before = getrlimit(Resource::As);
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = pages.split(' ').next().unwrap().parse().unwrap();
    let limit = pages * rustix::param::page_size() as u64 + spare;
    setrlimit(Resource::As, Rlimit { current: Some(limit), ..before }).unwrap();
    let result = run();
    setrlimit(Resource::As, before).unwrap();
    result
}

#[test]
fn threads_that_the_system_refuses_are_not_waited_for() {
    let lattice = Lattice::new([32; 3], 7).unwrap();
    let block = || Block::<f32>::new(lattice, Extent { origin: [0; 3], size: lattice.size }, 1);
    let mut expected = block();
    Sweeper::new(1).sweep(&mut expected, 2);
    for spare in [1 << 20, 5 << 20] {
        let mut swept = block();
        // The C library keeps stacks of threads that have ended: these threads take them.
        let barrier = Barrier::new(17);
        std::thread::scope(|scope| {
            let wait_twice = || {
                barrier.wait();
                barrier.wait();
            };
            (0..16).for_each(|_| drop(scope.spawn(wait_twice)));
            // Threads map memory when they start: they have started before the limit is set.
            barrier.wait();
            with_address_space(spare, || Sweeper::new(8).sweep(&mut swept, 2));
            barrier.wait();
        });
        assert_eq!(swept.checksum(), expected.checksum(), "{spare} bytes");
    }
}
