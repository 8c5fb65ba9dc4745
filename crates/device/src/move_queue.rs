//! The jobs of the thread that lets peers map the pages of regions ([`crate::region_mover`]).

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// A job of the thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Job {
    /// Moves the pages of the region that has this key, or a window with this key.
    Share { key: u32 },
    /// Lets peers map the regions around the region `key` as well, and ends the locking of atomic operations on them.
    Settle { key: u32 },
}

/// The jobs, and the regions whose pages move when the application's only thread is in the device.
#[derive(Debug, Default)]
pub(crate) struct MoveQueue {
    jobs: Mutex<Jobs>,
    deferred: Mutex<Vec<u32>>,
    has_deferred: AtomicBool,
}

#[derive(Debug, Default)]
struct Jobs {
    waiting: VecDeque<Job>,
    is_running: bool,
}

impl MoveQueue {
    /// Adds a job, unless it waits already. True if the caller must start the thread.
    pub(crate) fn add(&self, job: Job) -> bool {
        let mut jobs = self.jobs.lock().expect("no panic under this lock");
        if !jobs.waiting.contains(&job) {
            jobs.waiting.push_back(job);
        }
        !std::mem::replace(&mut jobs.is_running, true)
    }

    /// The next job; None ends the thread.
    pub(crate) fn next(&self) -> Option<Job> {
        let mut jobs = self.jobs.lock().expect("no panic under this lock");
        let job = jobs.waiting.pop_front();
        jobs.is_running = job.is_some();
        job
    }

    /// Notes that the thread could not be started. The jobs wait for the next one.
    pub(crate) fn not_started(&self) {
        self.jobs.lock().expect("no panic under this lock").is_running = false;
    }

    /// Leaves a region to the application's thread.
    pub(crate) fn defer(&self, key: u32) {
        let mut deferred = self.deferred.lock().expect("no panic under this lock");
        if !deferred.contains(&key) {
            deferred.push(key);
        }
        self.has_deferred.store(true, Ordering::Release);
    }

    /// Takes the regions that were left to the application's thread.
    pub(crate) fn take_deferred(&self) -> Vec<u32> {
        if !self.has_deferred.load(Ordering::Relaxed) {
            return Vec::new();
        }
        let mut deferred = self.deferred.lock().expect("no panic under this lock");
        self.has_deferred.store(false, Ordering::Relaxed);
        std::mem::take(&mut *deferred)
    }
}
