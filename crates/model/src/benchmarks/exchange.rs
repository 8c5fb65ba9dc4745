//! Exchanges between the ranks of a collective: the payload that every rank sends over its own adapter.
//!
//! A pairwise all-to-all has `n − 1` steps, in which each rank sends one message and receives one (Thakur, Rabenseifner and
//! Gropp, IJHPCA 19(1), 2005). A pipelined exchange posts all messages at once: their payload at the path's rate, and the
//! latency of the last one. Both take the switches between the ranks as not blocking.

use super::osu::{self, Mpi};
use super::perftest::{bandwidth_at, latency_at};
use crate::engine::Picos;
use crate::path::{DataPath, Verb};
use crate::precision::Precision;

/// Time of a pairwise all-to-all of messages of `size` bytes over MPI.
#[must_use]
pub fn pairwise(path: &DataPath, mpi: &Mpi, ranks: u32, size: u32) -> Picos {
    osu::latency(path, mpi, size) * u64::from(ranks.saturating_sub(1))
}

/// Time until `messages` WRITEs of `size` bytes, posted at once, are in the memory of their targets.
#[must_use]
pub fn pipelined(precision: Precision, path: &DataPath, messages: u32, size: u32) -> Picos {
    let rate = bandwidth_at(precision, path, Verb::Write, size, 128, false).rate.0;
    let others = f64::from(messages.saturating_sub(1)) * f64::from(size) / rate;
    latency_at(precision, path, Verb::Write, size) + Picos::from_seconds(others)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Parameters;
    use crate::benchmarks::osu::MpiLibrary;
    use crate::path::data_path;
    use crate::sites::shipped;

    #[test]
    fn long_messages_take_their_bytes_and_short_ones_their_latency() {
        let p = Parameters::shipped();
        let path = data_path(&shipped("hdr-fat-tree"), &p, "node0", "node1").unwrap();
        let mpi = Mpi::new(&p, MpiLibrary::default());
        let line = 7.0 * f64::from(1 << 20) / path.link_rate.0;
        let pairs = pairwise(&path, &mpi, 8, 1 << 20).seconds();
        let posted = pipelined(Precision::Full, &path, 7, 1 << 20).seconds();
        assert!(line < posted && posted < pairs && pairs < 1.3 * line, "{line} {posted} {pairs}");
        let short = pairwise(&path, &mpi, 8, 8);
        assert_eq!(short, osu::latency(&path, &mpi, 8) * 7);
        assert_eq!(pairwise(&path, &mpi, 1, 8), Picos::ZERO);
    }
}
