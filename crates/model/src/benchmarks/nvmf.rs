//! NVMe over RDMA, one command of an initiator at a time (NVM Express over Fabrics 1.1, 7.3).
//!
//! ```text
//!   read     SEND command ─► target ─► WRITE of the data, SEND of the response ─► initiator
//!   write    SEND command with the data in its capsule ─► target ─► SEND of the response ─► initiator
//! ```
//! The target has no disk: a null block device answers at once.

use super::perftest::latency_at;
use crate::engine::Picos;
use crate::parameters::Parameters;
use crate::path::{DataPath, Verb};
use crate::precision::Precision;
use crate::ssd::Access;

/// Software of the initiator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Initiator {
    /// SPDK: polls in user space.
    #[default]
    Spdk,
    /// The kernel's driver below its block layer, with an interrupt per command.
    Kernel,
}

/// Bytes of a command capsule without data, and of a response capsule (NVM Express over Fabrics 1.1, 2).
pub const COMMAND: u32 = 64;
/// Bytes of a response capsule.
pub const RESPONSE: u32 = 16;

/// Time from the submission of a command to its completion.
#[must_use]
pub fn latency(
    precision: Precision,
    path: &DataPath,
    p: &Parameters,
    access: Access,
    initiator: Initiator,
    block: u32,
) -> Picos {
    let send = |size: u32| latency_at(precision, path, Verb::Send, size);
    let network = match access {
        // The response follows the data of the WRITE on the same queue pair.
        Access::Read => {
            let long = send(COMMAND) + latency_at(precision, path, Verb::Write, block);
            let [client, server] = &path.ends;
            long + client.adapter.long_message_gap.max(server.adapter.message_gap)
        }
        Access::Write => send(COMMAND + block) + send(RESPONSE),
    };
    let software = match initiator {
        Initiator::Spdk => p.get("nvmf.spdk.overhead"),
        Initiator::Kernel => p.get("nvmf.kernel.overhead"),
    };
    network + Picos::from_nanos((software + p.get("nvmf.target.overhead")) * 1e3)
}

/// Reads of `block` bytes per second that the link carries from target to initiator: data and response of each.
#[must_use]
pub fn read_rate(path: &DataPath, block: u32) -> f64 {
    let [middle, first, ..] = path.overhead;
    let packets = block.div_ceil(path.mtu).max(1);
    let data = block + first + (packets - 1) * middle;
    path.rate.0 / f64::from(data + RESPONSE + middle)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::path::data_path;
    use crate::sites::shipped;

    #[test]
    fn a_command_takes_a_round_trip_its_data_and_the_software() {
        let p = Parameters::shipped();
        let path = data_path(&shipped("roce100-cx5"), &p, "node0", "node1").unwrap();
        let of = |access, initiator, block| {
            latency(Precision::Full, &path, &p, access, initiator, block).nanos() * 1e-3
        };
        let one_way = latency_at(Precision::Full, &path, Verb::Send, COMMAND).nanos() * 1e-3;
        for access in [Access::Read, Access::Write] {
            let polled = of(access, Initiator::Spdk, 4096);
            let software = p.get("nvmf.spdk.overhead") + p.get("nvmf.target.overhead");
            assert!(polled > 2.0 * one_way + software, "{polled} us, {one_way} us one way");
            let more = of(access, Initiator::Kernel, 4096) - polled;
            let expected = p.get("nvmf.kernel.overhead") - p.get("nvmf.spdk.overhead");
            assert!((more - expected).abs() < 1e-3, "{more}");
            // Another 60 KiB take at least their time on the link.
            let longer = of(access, Initiator::Spdk, 65536) - polled;
            assert!(longer > 61440.0 / path.link_rate.0 * 1e6, "{longer}");
        }
    }
}
