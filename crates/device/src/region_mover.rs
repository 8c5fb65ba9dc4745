//! Lets peers map the pages of regions that they use much.
//!
//! A registered region stays where it is by default, and peers copy through the kernel. They add up
//! what that costs them in the region's entry. Once the sum reaches the cost of moving the pages, a thread moves them
//! and promotes the entry; the thread ends when there is nothing left to move. So a region that is used little is
//! registered and deregistered in microseconds, and the total cost is at most twice that of the better choice.
//!
//! Where pages can only move while no other thread of the application runs, they move when the application's only thread
//! polls an empty queue, registers or deregisters memory.

use std::io;

use millstream_shm::thread::spawn;

use crate::adapter::LocalAdapter;
use crate::move_queue::Job;

/// Adds a job, and starts the thread if none runs.
pub(crate) fn add(adapter: &'static LocalAdapter, job: Job) {
    if adapter.moves.add(job) && spawn("mill-mover", move || run(adapter)).is_err() {
        adapter.moves.not_started();
    }
}

fn run(adapter: &'static LocalAdapter) {
    while let Some(job) = adapter.moves.next() {
        match job {
            Job::Share { key } => match share(adapter, key) {
                Ok(Some(key)) => settle(adapter, key),
                Ok(None) => {}
                Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
                    adapter.moves.defer(key);
                    adapter.qps.all().iter().for_each(|qp| qp.request_move());
                }
                Err(error) => give_up_for_good(adapter, key, &error),
            },
            Job::Settle { key } => settle(adapter, key),
        }
    }
}

/// Moves the regions that were left to the application's thread. The caller is a thread of the application, and holds no
/// lock of the device.
pub(crate) fn move_deferred(adapter: &'static LocalAdapter) {
    for key in adapter.moves.take_deferred() {
        match share(adapter, key) {
            // A stopped peer must not delay the application.
            Ok(Some(key)) => add(adapter, Job::Settle { key }),
            Ok(None) => {}
            // Other threads run now. Peers tell again when their costs have doubled.
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => {}
            Err(error) => give_up_for_good(adapter, key, &error),
        }
    }
}

/// Lets peers map the pages of a region. Its key; None if there was nothing to do.
fn share(adapter: &'static LocalAdapter, key: u32) -> io::Result<Option<u32>> {
    let Some((key, pages)) = adapter.mrs.pages_of(key) else { return Ok(None) };
    Ok(pages.share(key)?.then_some(key))
}

/// Lets peers map all regions that overlap the region `key`, and ends the locking of atomic operations on them: operations
/// through one key and through another one must take the same way.
fn settle(adapter: &'static LocalAdapter, key: u32) {
    for (other, pages) in adapter.mrs.overlapping(key) {
        pages.adopt(other);
    }
    let keys = adapter.mrs.unsettled_around(key);
    // If a process was stopped in the middle of an operation, atomic operations stay locked.
    if !keys.is_empty() && adapter.quiesce().is_ok() {
        keys.iter().for_each(|key| adapter.mrs.settle(*key));
    }
}

/// Ends the peers' reports, unless the pages may move later.
fn give_up_for_good(adapter: &'static LocalAdapter, key: u32, error: &io::Error) {
    const PASSING: [i32; 5] = [libc::EBUSY, libc::EAGAIN, libc::ENOMEM, libc::EMFILE, libc::ECANCELED];
    if !error.raw_os_error().is_some_and(|error| PASSING.contains(&error)) {
        tracing::debug!("peers reach the region {key:#x} through the kernel: {error}");
        adapter.mrs.never_move(key);
    }
}
