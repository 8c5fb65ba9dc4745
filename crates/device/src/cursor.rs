//! Completions one at a time, field by field: the device's side of `ibv_start_poll` … `ibv_end_poll`.

use millstream_lockfree::{SpinLock, Timestamp};

use crate::clock::WallClock;
use crate::cq::Cq;
use crate::errno::{Errno, Result};
use crate::types::Wc;

/// A completion queue's critical section: one thread at a time looks at completions.
#[derive(Debug, Default)]
pub struct Cursor(SpinLock<Current>);

/// The completion that is looked at.
#[derive(Debug, Default)]
pub struct Current {
    /// The completion.
    pub wc: Wc,
    /// When it was added, if the queue keeps times.
    pub time: Timestamp,
    clock: Option<WallClock>,
}

impl Current {
    /// When it was added, by the wall clock: nanoseconds since 1970. Both clocks are compared once from
    /// start to end, so that the times of a batch keep their distances.
    pub fn wall_time(&mut self) -> u64 {
        self.clock.get_or_insert_with(WallClock::read).at(self.time)
    }

    #[inline]
    fn advance(&mut self, cq: &Cq) -> Result<()> {
        (self.wc, self.time) = cq.poll_one()?.ok_or(Errno::NOENT)?;
        Ok(())
    }
}

impl Cursor {
    /// Enters with the next completion; waits while another thread is inside.
    ///
    /// # Errors
    /// ENOENT if there is none, otherwise as [`Cq::poll`]; then the thread is not inside.
    #[inline]
    pub fn start(&self, cq: &Cq) -> Result<()> {
        let mut current = self.0.lock();
        current.advance(cq)?;
        current.clock = None;
        std::mem::forget(current);
        Ok(())
    }

    /// Goes to the next completion.
    ///
    /// # Errors
    /// As [`Cursor::start`], but the thread stays inside.
    ///
    /// # Safety
    /// The calling thread is inside.
    #[inline]
    pub unsafe fn next(&self, cq: &Cq) -> Result<()> {
        // SAFETY: nobody else is inside, and the reference does not outlive this call.
        unsafe { &mut *self.0.as_ptr() }.advance(cq)
    }

    /// Looks at the completion.
    ///
    /// # Safety
    /// The calling thread is inside.
    #[inline]
    pub unsafe fn with<R>(&self, look: impl FnOnce(&mut Current) -> R) -> R {
        // SAFETY: as above.
        look(unsafe { &mut *self.0.as_ptr() })
    }

    /// Leaves.
    ///
    /// # Safety
    /// The calling thread is inside.
    #[inline]
    pub unsafe fn end(&self) {
        // SAFETY: taken in `start`.
        unsafe { self.0.force_unlock() };
    }
}
