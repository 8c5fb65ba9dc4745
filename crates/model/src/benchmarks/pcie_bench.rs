//! Adapter and hosts of pcie-bench (Neugebauer et al., SIGCOMM 2018): an NFP-6000 in three generations of Xeon hosts.

use super::dma::{DmaEngine, DmaHost};
use crate::component::completer::CompleterTiming;
use crate::engine::{BytesPerSecond, Picos};
use crate::parameters::Parameters;
use crate::path::host_completer;

/// Latency of a DMA read from memory of the adapter's socket, or of the other socket, by the processor's library id.
fn read_latency(p: &Parameters, processor: &str, is_remote: bool) -> Picos {
    let value = |name: &str| p.device(processor, name).unwrap_or_else(|| p.get(&format!("processor.{name}")));
    let hop = if is_remote { value("socket.hop") } else { 0.0 };
    let nanos = match p.device(processor, "remote.read.latency") {
        // Published for the remote socket.
        Some(remote) => remote - value("socket.hop") + hop,
        None => value("read.latency") + hop,
    };
    Picos::from_nanos(nanos)
}

/// The DMA engine of an NFP-6000; `overhead` names the parameter of the operation's overhead.
#[must_use]
pub fn nfp6000(p: &Parameters, overhead: &str) -> DmaEngine {
    DmaEngine {
        workers: p.count("nfp6000.workers"),
        tags: p.count("nfp6000.tags"),
        read_issue: p.nanos("nfp6000.read.issue"),
        write_issue: p.nanos("nfp6000.write.issue"),
        variation: p.get("nfp6000.variation"),
        fifo: p.get("nfp6000.fifo") as u64,
        write_rate: p.gigabytes("nfp6000.write.rate"),
        internal: p.gigabytes("nfp6000.memory.rate"),
        overhead: p.nanos(overhead),
    }
}

/// Bytes of a page.
const PAGE: f64 = 4096.0;

/// The host with an IOMMU and random accesses to `window` bytes in pages of 4 KiB.
///
/// Requests to pages that are not in the IOTLB wait for page walks, one after the other.
#[must_use]
pub fn with_iommu(p: &Parameters, processor: &str, host: DmaHost, window: f64) -> DmaHost {
    let value = |name: &str| p.device(processor, name).unwrap_or_else(|| p.get(&format!("processor.{name}")));
    let misses = (1.0 - value("iotlb.entries") * PAGE / window).max(0.0);
    let walk = |name: &str| Picos::from_nanos(value(name) * misses);
    let memory = CompleterTiming { request_gap: walk("iotlb.walk.read"), ..host.memory };
    DmaHost { memory, write_walk: walk("iotlb.walk.write"), ..host }
}

/// A host with memory on the adapter's socket, or on the other, by its processor's library id.
#[must_use]
pub fn host(p: &Parameters, processor: &str, is_remote: bool) -> DmaHost {
    let value = |name: &str| p.device(processor, name).unwrap_or_else(|| p.get(&format!("processor.{name}")));
    let memory = CompleterTiming {
        read_latency: read_latency(p, processor, is_remote),
        rate: BytesPerSecond::gigabytes(value("request.rate")),
        ..host_completer(p, processor)
    };
    DmaHost {
        memory,
        write_rate: if is_remote {
            BytesPerSecond::gigabytes(value("remote.write.rate"))
        } else {
            BytesPerSecond(f64::INFINITY)
        },
        write_walk: Picos::ZERO,
        link_latency: p.nanos("pcie.link.latency"),
        efficiency: p.get("pcie.efficiency"),
    }
}
