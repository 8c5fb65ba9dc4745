//! Periods and thresholds, and the bounds that follow from them.

use crate::watch::PeerWatch;

/// How much later than its adapter's monitor a host monitor may start (ms).
const HOST_START: u64 = 5000;

/// Periods and thresholds of one node. Times in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timers {
    /// Period in which a register is written (ms).
    pub write: u64,
    /// Period in which a register is read (ms).
    pub read: u64,
    /// Reads without a change before the writer counts as failed.
    pub misses: u32,
    /// Longest silence of a live link (ms).
    pub keepalive: u64,
    /// Silences before a link counts as broken.
    pub silences: u32,
    /// Period of reports to the supervisors (ms).
    pub report: u64,
    /// Reports missed before a supervisor calls a host silent.
    pub missed_reports: u32,
}

impl Default for Timers {
    fn default() -> Timers {
        Timers { write: 20, read: 100, misses: 2, keepalive: 20, silences: 5, report: 100, missed_reports: 3 }
    }
}

/// Why timers are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TimersError {
    /// A period or threshold is zero.
    #[error("{field} = 0: must be at least 1")]
    Zero {
        /// The field.
        field: &'static str,
    },
    /// A healthy writer could be missed.
    #[error(
        "read = {read} ms is shorter than three times write = {write} ms: a busy writer would count as failed"
    )]
    ReadTooShort {
        /// Period of reading (ms).
        read: u64,
        /// Period of writing (ms).
        write: u64,
    },
}

impl Timers {
    /// Checks values that came from outside.
    ///
    /// # Errors
    /// [`TimersError`] names the field.
    pub fn check(self) -> Result<Timers, TimersError> {
        let fields = [
            ("write", self.write),
            ("read", self.read),
            ("misses", self.misses.into()),
            ("keepalive", self.keepalive),
            ("silences", self.silences.into()),
            ("report", self.report),
            ("missed_reports", self.missed_reports.into()),
        ];
        if let Some((field, _)) = fields.into_iter().find(|&(_, value)| value == 0) {
            return Err(TimersError::Zero { field });
        }
        if self.read < 3 * self.write {
            return Err(TimersError::ReadTooShort { read: self.read, write: self.write });
        }
        Ok(self)
    }

    /// Longer periods by a factor, for hosts whose processors are overloaded. The thresholds stay.
    #[must_use]
    pub fn scaled(self, factor: u64) -> Timers {
        let factor = factor.max(1);
        Timers {
            write: self.write * factor,
            read: self.read * factor,
            keepalive: self.keepalive * factor,
            report: self.report * factor,
            ..self
        }
    }

    /// No stall of a writer up to this time is reported (ms): M · T_r − T_w.
    #[must_use]
    pub fn tolerated_stall(&self) -> u64 {
        u64::from(self.misses) * self.read - self.write
    }

    /// A writer's death is known after this time at the latest (ms): (M + 1) · T_r.
    #[must_use]
    pub fn detection_bound(&self) -> u64 {
        (u64::from(self.misses) + 1) * self.read
    }

    /// How an adapter watches its host, whose monitor may start later.
    #[must_use]
    pub fn host_watch(&self) -> PeerWatch {
        PeerWatch::new(self.misses).with_start((HOST_START / self.read.max(1)) as u32)
    }

    /// A dead link is known after this time at the latest (ms): K · T_k.
    #[must_use]
    pub fn link_bound(&self) -> u64 {
        u64::from(self.silences) * self.keepalive
    }
}
