//! Polling one completion at a time: the device's side of `ibv_start_poll`, `ibv_next_poll` and `ibv_end_poll`.

use millstream_lockfree::{SpinLock, Timestamp};

use super::Cq;
use crate::clock::WallClock;
use crate::errno::{Errno, Result};
use crate::types::Wc;

/// The critical section of a completion queue between `ibv_start_poll` and `ibv_end_poll`.
#[derive(Debug, Default)]
pub struct CqPoller(SpinLock<PolledWc>);

/// The completion that was polled last.
#[derive(Debug, Default)]
pub struct PolledWc {
    /// The completion.
    pub wc: Wc,
    /// Its timestamp, if the queue keeps these.
    pub timestamp: Timestamp,
    clock: Option<WallClock>,
}

impl PolledWc {
    /// Its timestamp by the wall clock: nanoseconds since 1970. The clocks are compared once per critical section, so that
    /// timestamps of a batch keep their differences.
    pub fn wall_time(&mut self) -> u64 {
        self.clock.get_or_insert_with(WallClock::read).at(self.timestamp)
    }

    #[inline]
    fn advance(&mut self, cq: &Cq) -> Result<()> {
        (self.wc, self.timestamp) = cq.poll_one()?.ok_or(Errno::NOENT)?;
        Ok(())
    }
}

impl CqPoller {
    /// Enters the critical section with the next completion. Waits while another thread is inside.
    ///
    /// # Errors
    /// ENOENT if the queue is empty, otherwise as [`Cq::poll`]; then the thread is not inside.
    #[inline]
    pub fn start(&self, cq: &Cq) -> Result<()> {
        let mut current = self.0.lock();
        current.advance(cq)?;
        current.clock = None;
        std::mem::forget(current);
        Ok(())
    }

    /// Polls the next completion.
    ///
    /// # Errors
    /// As [`CqPoller::start`], but the thread stays inside.
    ///
    /// # Safety
    /// The calling thread is inside.
    #[inline]
    pub unsafe fn next(&self, cq: &Cq) -> Result<()> {
        // SAFETY: no other thread is inside, and the reference does not outlive this call.
        unsafe { &mut *self.0.as_ptr() }.advance(cq)
    }

    /// Accesses the completion.
    ///
    /// # Safety
    /// The calling thread is inside.
    #[inline]
    pub unsafe fn with<R>(&self, access: impl FnOnce(&mut PolledWc) -> R) -> R {
        // SAFETY: as above.
        access(unsafe { &mut *self.0.as_ptr() })
    }

    /// Leaves the critical section.
    ///
    /// # Safety
    /// The calling thread is inside.
    #[inline]
    pub unsafe fn end(&self) {
        // SAFETY: taken in `start`.
        unsafe { self.0.force_unlock() };
    }
}
