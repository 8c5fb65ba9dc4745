//! How threads of a card wait for work.

use std::time::Duration;

/// How an idle thread waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PollPolicy {
    /// Busy-poll for this long after the latest work.
    pub(crate) spin: Duration,
    /// Sleep at most this long before the next heartbeat.
    pub(crate) heartbeat: Duration,
}
