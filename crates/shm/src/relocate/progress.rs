//! What a move of pages met on its way.

use std::fmt;
use std::io;
use std::ops::Range;
use std::time::Instant;

/// Counts of one move, for the log.
#[derive(Clone, Copy, Debug)]
pub(super) struct Progress {
    started: Instant,
    /// Answers that a page is pinned (EBUSY).
    pub(super) pinned: u32,
    /// Answers that a page is locked, or that the address space changes (EAGAIN).
    pub(super) locked: u32,
    /// Pieces whose pages went back to their place because one of them stayed pinned.
    pub(super) put_back: u32,
}

impl Default for Progress {
    fn default() -> Self {
        Self { started: Instant::now(), pinned: 0, locked: 0, put_back: 0 }
    }
}

impl Progress {
    /// Logs the end of a move: `shared` bytes of `range` are shared now, `before` of them already before it.
    pub(super) fn log(&self, range: &Range<usize>, before: usize, shared: usize, result: &io::Result<()>) {
        tracing::debug!(
            "pages {:#x}..{:#x}: {} of {} KiB moved in {:?}{self}{}",
            range.start,
            range.end,
            (shared - before) >> 10,
            range.len() >> 10,
            self.started.elapsed(),
            result.as_ref().err().map(|error| format!("; the rest stays: {error}")).unwrap_or_default(),
        );
    }
}

impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (count, what) in [
            (self.pinned, "pages found pinned"),
            (self.locked, "pages found locked"),
            (self.put_back, "pieces put back"),
        ] {
            if count != 0 {
                write!(f, ", {count} {what}")?;
            }
        }
        Ok(())
    }
}
