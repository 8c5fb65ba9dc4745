//! Adapter and hosts of pcie-bench (Neugebauer et al., SIGCOMM 2018): an NFP-6000 in three generations of Xeon hosts.

use super::dma::{DmaEngine, DmaHost};
use crate::component::completer::CompleterTiming;
use crate::engine::{BytesPerSecond, Picos};
use crate::parameters::Parameters;
use crate::path::host_completer;

/// Processor generation of a host, with the row ids' abbreviation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Processor {
    /// Ivy Bridge-EP (IB).
    IvyBridge,
    /// Haswell-EP (HSW).
    Haswell,
    /// Broadwell-EP (BDW).
    Broadwell,
}

impl Processor {
    /// The generation of a Xeon E5 by its model name.
    #[must_use]
    pub fn of_model(model: &str) -> Processor {
        match model {
            _ if model.ends_with("v2") => Processor::IvyBridge,
            _ if model.ends_with("v4") => Processor::Broadwell,
            _ => Processor::Haswell,
        }
    }

    /// Latency of a DMA read from memory of the adapter's socket, or of the other socket.
    fn read_latency(self, p: &Parameters, is_remote: bool) -> Picos {
        let hop = |cpu: &str| p.nanos(&format!("cpu.{cpu}.socket.hop"));
        match self {
            // The calibrated row is of the remote socket.
            Processor::IvyBridge => {
                let remote = p.nanos("cpu.ivybridge-ep.remote.read.latency");
                if is_remote { remote } else { remote - hop("ivybridge-ep") }
            }
            Processor::Haswell | Processor::Broadwell => {
                let name = if self == Processor::Haswell { "haswell-ep" } else { "broadwell-ep" };
                let local = p.nanos(&format!("cpu.{name}.read.latency"));
                // No socket hop of Haswell-EP is published: Broadwell-EP's is used.
                if is_remote { local + hop("broadwell-ep") } else { local }
            }
        }
    }
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

/// A host with memory on the adapter's socket, or on the other.
#[must_use]
pub fn host(p: &Parameters, processor: Processor, is_remote: bool) -> DmaHost {
    let read_latency = processor.read_latency(p, is_remote);
    let memory = CompleterTiming { read_latency, rate: p.gigabytes("cpu.memory.rate"), ..host_completer(p) };
    DmaHost {
        memory,
        write_rate: if is_remote {
            p.gigabytes("cpu.remote.write.rate")
        } else {
            BytesPerSecond(f64::INFINITY)
        },
        link_latency: p.nanos("pcie.link.latency"),
        efficiency: p.get("pcie.efficiency"),
    }
}
