//! Which connections a process of a run accepts. It counts those that it refuses, and reports each count to its launcher.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use millstream_tls::Security;

/// Takes the number of connections that a process has refused so far.
pub type ReportRefused = fn(u64);

/// Which connections a process accepts, and how many it has refused.
#[derive(Clone)]
pub(super) struct Admission {
    pub(super) security: Security,
    refused: Arc<AtomicU64>,
    report: ReportRefused,
}

impl Admission {
    pub(super) fn new(security: Security, report: ReportRefused) -> Admission {
        Admission { security, refused: Arc::default(), report }
    }

    /// Counts and reports a connection that is dropped.
    pub(super) fn refuse(&self, address: SocketAddr, reason: &str) {
        let refused = 1 + self.refused.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(%address, reason, refused, "connection dropped");
        (self.report)(refused);
    }
}
