//! Disks that read into one card as PCIe peers: many commands outstanding on each.

use crate::engine::BytesPerSecond;
use crate::parameters::Parameters;
use crate::ssd::{Access, CommandQueue};

/// Who submits the commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Submitter {
    /// One processor thread for all disks.
    Thread,
    /// The card itself.
    Card,
}

/// Payload per second of `disks` equal disks with `outstanding` commands of `block` bytes each, into a card whose link carries
/// `link`; none if the library lacks a value of the disk.
#[must_use]
pub fn read_bandwidth(
    p: &Parameters,
    id: &str,
    disks: u32,
    (block, outstanding): (u64, u32),
    submitter: Submitter,
    link: BytesPerSecond,
) -> Option<BytesPerSecond> {
    let queue = CommandQueue::new(p, id, Access::Read)?;
    let all = queue.bandwidth(block, outstanding).0 * f64::from(disks);
    let submitted = match submitter {
        Submitter::Thread => p.get("nvme.thread.rate") * 1e6 * block as f64,
        Submitter::Card => f64::INFINITY,
    };
    Some(BytesPerSecond(all.min(submitted).min(link.0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_of_disks_thread_and_link_is_the_limit() {
        let p = Parameters::shipped();
        let link = BytesPerSecond(53e9);
        let read = |disks, block, depth, submitter| {
            read_bandwidth(&p, "pm1753", disks, (block, depth), submitter, link).unwrap().0
        };
        assert_eq!(read(16, 1 << 20, 64, Submitter::Card), 53e9);
        let by_thread = read(16, 512, 256, Submitter::Thread);
        assert_eq!(by_thread, p.get("nvme.thread.rate") * 1e6 * 512.0);
        let by_disks = read(4, 4096, 4, Submitter::Card);
        let one = CommandQueue::new(&p, "pm1753", Access::Read).unwrap().bandwidth(4096, 4).0;
        assert!((by_disks / one - 4.0).abs() < 1e-9);
        assert!(read_bandwidth(&p, "u280", 1, (4096, 1), Submitter::Card, link).is_none());
    }
}
