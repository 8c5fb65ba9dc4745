//! What a node's time went into.

use std::time::{Duration, Instant};

use millstream_fabric::ExchangeStatistics;
use serde::{Deserialize, Serialize};

/// Time of a node by activity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TimeSplit {
    /// Time in the kernel.
    pub compute: Duration,
    /// Time in packing, puts and unpacking.
    pub communicate: Duration,
    /// Time in waits for other nodes.
    pub wait: Duration,
    /// Puts.
    pub messages: u64,
    /// Bytes put.
    pub bytes: u64,
}

/// The time of one node in reports, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NodeTimes {
    /// Time in the kernel.
    pub compute_s: f64,
    /// Time in packing, puts and unpacking.
    pub communicate_s: f64,
    /// Time in waits for other nodes.
    pub wait_s: f64,
    /// Puts.
    pub messages: u64,
    /// Bytes put.
    pub bytes: u64,
}

impl NodeTimes {
    /// All activities.
    #[must_use]
    pub fn total_s(&self) -> f64 {
        self.compute_s + self.communicate_s + self.wait_s
    }
}

/// Bytes of a split.
pub(crate) const SPLIT_BYTES: usize = 40;

impl TimeSplit {
    /// Runs work, and counts its time as computation.
    pub fn computing<R>(&mut self, work: impl FnOnce() -> R) -> R {
        let begin = Instant::now();
        let result = work();
        self.compute += begin.elapsed();
        result
    }

    /// Runs work, and counts its time as communication.
    pub fn communicating<R>(&mut self, work: impl FnOnce() -> R) -> R {
        let begin = Instant::now();
        let result = work();
        self.communicate += begin.elapsed();
        result
    }

    /// Adds what exchanges took between two looks at their statistics.
    pub fn add_exchange(&mut self, before: ExchangeStatistics, after: ExchangeStatistics) {
        self.communicate += after.communicate.saturating_sub(before.communicate);
        self.wait += after.wait.saturating_sub(before.wait);
        self.messages += after.messages - before.messages;
        self.bytes += after.bytes - before.bytes;
    }

    /// The bytes for other nodes.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; SPLIT_BYTES] {
        let mut bytes = [0; SPLIT_BYTES];
        let nanos = |time: Duration| time.as_nanos() as u64;
        let words =
            [nanos(self.compute), nanos(self.communicate), nanos(self.wait), self.messages, self.bytes];
        for (place, word) in bytes.as_chunks_mut().0.iter_mut().zip(words) {
            *place = word.to_le_bytes();
        }
        bytes
    }
}

impl NodeTimes {
    /// The times of the bytes of a split.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; SPLIT_BYTES]) -> NodeTimes {
        let mut words = bytes.as_chunks().0.iter().map(|&word| u64::from_le_bytes(word));
        let mut next = || words.next().unwrap_or(0);
        let mut seconds = || next() as f64 / 1e9;
        let [compute_s, communicate_s, wait_s] = [seconds(), seconds(), seconds()];
        NodeTimes { compute_s, communicate_s, wait_s, messages: next(), bytes: next() }
    }
}
