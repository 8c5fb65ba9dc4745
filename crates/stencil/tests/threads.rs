//! A process that may not have as many threads as it wants. The only test of this program: it sets a limit of the process.

use std::sync::Barrier;

use millstream_stencil::{Jacobi, Plane, reference};
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
    let (rows, columns, sweeps) = (4096, 256, 11);
    let cells: Vec<f32> = (0..rows * columns).map(|at| (at % 251) as f32).collect();
    let expected = reference(&cells, rows, columns, sweeps);
    for spare in [1 << 20, 5 << 20, 16 << 20] {
        let (mut source, mut destination) = (cells.clone(), cells.clone());
        let mut jacobi = Jacobi::new(8);
        // SAFETY: two distinct planes of this test.
        let mut run = || unsafe {
            let (source, destination) =
                (Plane::of(&mut source, rows, columns), Plane::of(&mut destination, rows, columns));
            jacobi.run(source, destination, sweeps, &|| true).unwrap();
        };
        // The scratch memory of the threads stays allocated.
        run();
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
            with_address_space(spare, run);
            barrier.wait();
        });
        assert!(destination == expected, "{spare} bytes");
    }
}
