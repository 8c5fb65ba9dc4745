//! Data paths between two hosts: adapters, PCIe, memory and network links.
//!
//! [`data_path`] builds a [`DataPath`] from a site and parameters. [`crate::component`] simulates it.

use crate::component::completer::CompleterTiming;
use crate::component::cxl::{CxlTiming, HomeAgentTiming};
use crate::component::translation::DmaTranslation;
use crate::engine::{BytesPerSecond, ChannelReport, Picos};
use crate::parameters::Parameters;
use millstream_site::schema::PcieLink;

mod cxl;
mod hops;
mod resolve;
pub mod route;
mod torus;
mod translation;

pub(crate) use cxl::timing as cxl_timing;
pub use cxl::{CoreAccess, core_access};
pub(crate) use hops::path_hops;
pub use hops::{Hop, hops};
pub use resolve::*;
pub(crate) use torus::torus_path;

/// Memory that an adapter accesses.
#[derive(Clone, Debug, PartialEq)]
pub enum TargetMemory {
    /// Memory of its host.
    Host,
    /// Memory of a card.
    Card(PeerCard),
    /// Memory behind a CXL link of the host's root complex.
    Cxl(CxlTarget),
}

/// Memory behind a CXL link, as adapters access it.
#[derive(Clone, Debug, PartialEq)]
pub struct CxlTarget {
    /// The links and the device.
    pub timing: CxlTiming,
    /// The root complex.
    pub home: HomeAgentTiming,
}

/// A card that an adapter accesses as PCIe peer.
#[derive(Clone, Debug, PartialEq)]
pub struct PeerCard {
    /// PCIe link of the card.
    pub pcie: PcieLink,
    /// Timing of its memory as completer.
    pub timing: CompleterTiming,
    /// Largest rate of completions to a peer, if below the memory's rate.
    pub read_rate: BytesPerSecond,
    /// Payload bytes of writes in progress.
    pub write_window: u64,
    /// Route between the two PCIe links.
    pub route: PeerRoute,
    /// Links of the switches above the card, below the turning point of the route; the nearest first.
    pub uplinks: Vec<Uplink>,
}

/// Link of a PCIe switch to its parent.
#[derive(Clone, Debug, PartialEq)]
pub struct Uplink {
    /// Name of the switch.
    pub name: String,
    /// The link, with the payload that both of its ends accept.
    pub pcie: PcieLink,
    /// Latency of the switch, unless the route between two devices includes it.
    pub latency: Picos,
}

/// Route between two devices of one PCIe tree.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PeerRoute {
    /// Through the root complex, from root port to root port.
    RootComplex {
        /// Rate of writes.
        write: BytesPerSecond,
        /// Rate of completions.
        read: BytesPerSecond,
        /// One-way latency.
        latency: Picos,
    },
    /// Through a PCIe switch.
    Switch {
        /// One-way latency.
        latency: Picos,
    },
}

/// One end of a data path.
#[derive(Clone, Debug, PartialEq)]
pub struct PathEnd {
    /// PCIe link of the adapter.
    pub pcie: PcieLink,
    /// Links of the switches above the adapter, up to the socket or to the turning point of a route to a card; the nearest
    /// first.
    pub uplinks: Vec<Uplink>,
    /// Memory that the adapter accesses.
    pub target: TargetMemory,
    /// Timing of host memory and root complex.
    pub host: CompleterTiming,
    /// Share of PCIe link rates that DLLPs and the adapter leave.
    pub pcie_efficiency: f64,
    /// Translation of the adapter's DMA addresses, if the host's IOMMU is on.
    pub translation: Option<DmaTranslation>,
    /// Timing of the adapter and its software.
    pub adapter: Adapter,
}

/// Timing of an adapter and its software.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adapter {
    /// Software time per work request.
    pub post_time: Picos,
    /// Software time per completion.
    pub poll_time: Picos,
    /// Doorbell to first packet, without payload fetch.
    pub tx_latency: Picos,
    /// Last byte of a packet to its PCIe write.
    pub rx_latency: Picos,
    /// Latency of a payload fetch, in addition to the PCIe read.
    pub gather_latency: Picos,
    /// Processing time per message.
    pub message_gap: Picos,
    /// Processing time per message with a payload of several cache lines.
    pub long_message_gap: Picos,
    /// Payload bytes of outstanding DMA reads.
    pub dma_read_window: u32,
    /// Outstanding RDMA READs.
    pub outstanding_reads: u32,
    /// Receive buffer in bytes.
    pub rx_buffer: u64,
    /// Processing time per READ request sent.
    pub read_gap: Picos,
    /// Processing time of the responder per READ.
    pub response_gap: Picos,
    /// Payload bytes of a message that are fetched before its first packet leaves.
    pub tx_unit: u32,
    /// Payload bytes of a packet that are received before they are written to memory.
    pub rx_unit: u32,
    /// Largest inline message in bytes.
    pub max_inline: u32,
    /// Rate at which a core writes an inline payload (programmed I/O).
    pub inline_rate: BytesPerSecond,
    /// Address translation of received packets; none if it is hidden by other latencies.
    pub translation: Option<AddressTranslation>,
    /// The core that carries packets, if the transport is software.
    pub core: Option<TransportCore>,
}

/// Times of a core that runs a transport in software (rxe, the soft device): it sends and receives one packet after the other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TransportCore {
    /// Time of the first packet of a WRITE and of a READ request, without its bytes.
    pub message: Picos,
    /// Time of every other packet with data, without its bytes.
    pub packet: Picos,
    /// Time of an acknowledgement.
    pub acknowledgement: Picos,
    /// Rate at which payload passes.
    pub copy: BytesPerSecond,
}

/// Timing of address translation on the receive path, one packet at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressTranslation {
    /// Time of a hit in the translation table.
    pub hit: Picos,
    /// Time of a miss, which the adapter's processor handles.
    pub miss: Picos,
    /// Pages of the table; 0 without a table.
    pub entries: u32,
    /// Bytes of a page.
    pub page: u32,
}

/// A link of a route.
#[derive(Clone, Debug, PartialEq)]
pub struct NetworkHop {
    /// Name of the link.
    pub name: String,
    /// Rate of one direction.
    pub rate: BytesPerSecond,
    /// Latency from one node's output to the next node's.
    pub latency: Picos,
    /// Buffer in front of the link in bytes.
    pub buffer: u64,
    /// Share of packets that the link loses.
    pub loss: f64,
}

/// A data path from client to server, with everything that benchmarks need.
#[derive(Clone, Debug, PartialEq)]
pub struct DataPath {
    /// Client and server.
    pub ends: [PathEnd; 2],
    /// Rate of each link direction, after line code.
    pub link_rate: BytesPerSecond,
    /// Rate of each link direction, after line code and flow control.
    pub rate: BytesPerSecond,
    /// Largest payload of a packet.
    pub mtu: u32,
    /// Header bytes of a packet by kind; see [`overhead`].
    pub overhead: [u32; 4],
    /// Latency of cable, serialisers and switches.
    pub latency: Picos,
    /// Share of packets that the link loses.
    pub loss: f64,
    /// First link of each direction, if a route has several links of its own.
    pub first_hops: Option<[NetworkHop; 2]>,
    /// Links after the first, from client to server and back.
    pub later_hops: [Vec<NetworkHop>; 2],
    /// Latency of one PCIe link direction.
    pub pcie_latency: Picos,
}

impl DataPath {
    /// Whether an end is memory of a card, a PCIe peer of the adapter.
    pub(crate) fn is_to_peer(&self) -> bool {
        self.ends.iter().any(|end| end.target != TargetMemory::Host)
    }

    /// Links of one direction: 0 from client to server, 1 back.
    #[must_use]
    pub fn network_hops(&self, direction: usize) -> Vec<NetworkHop> {
        let first = match &self.first_hops {
            Some(first) => first[direction].clone(),
            None => NetworkHop {
                name: format!("{} link", ["client", "server"][direction]),
                rate: self.rate,
                latency: self.latency,
                buffer: u64::MAX,
                loss: self.loss,
            },
        };
        [vec![first], self.later_hops[direction].clone()].concat()
    }

    /// Atomics per second of a responder, which reads and writes host memory for one after the other.
    #[must_use]
    pub fn atomic_rate(&self, p: &Parameters) -> f64 {
        let read = self.pcie_latency * 2 + self.ends[1].host.read_latency;
        1.0 / (read + p.nanos("atomic.gap")).seconds()
    }

    /// This path without names: paths that differ in names only behave alike.
    #[must_use]
    pub fn without_names(&self) -> DataPath {
        let mut path = self.clone();
        let [there, back] = &mut path.later_hops;
        let hops = there.iter_mut().chain(back).chain(path.first_hops.iter_mut().flatten());
        hops.for_each(|hop| hop.name.clear());
        for end in &mut path.ends {
            if let TargetMemory::Cxl(target) = &mut end.target {
                // The memory device's link stays apart from those of switches.
                let switches = target.timing.hops.iter_mut().filter(|hop| !hop.switch.is_empty());
                switches.for_each(|hop| "switch".clone_into(&mut hop.switch));
            }
            let card = if let TargetMemory::Card(card) = &mut end.target { Some(card) } else { None };
            let below = card.into_iter().flat_map(|card| &mut card.uplinks);
            end.uplinks.iter_mut().chain(below).for_each(|uplink| uplink.name.clear());
        }
        path
    }

    /// Time from the start of a packet until the sender knows that it was lost: the next packet arrives, and the responder's
    /// NAK comes back.
    #[must_use]
    pub fn loss_detection(&self) -> Picos {
        let way = |i: usize| self.network_hops(i).iter().fold(Picos::ZERO, |sum, hop| sum + hop.latency);
        let packet = self.rate.time(u64::from(self.mtu + self.overhead[0]));
        let [client, server] = &self.ends;
        way(0) + way(1) + client.adapter.rx_latency + server.adapter.rx_latency + packet * 2
    }
}

/// A verb.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// RDMA WRITE.
    Write,
    /// RDMA READ.
    Read,
    /// SEND.
    Send,
}

/// Result of a bandwidth benchmark.
#[derive(Clone, Debug)]
pub struct BandwidthResult {
    /// Payload per second; of both directions if both send.
    pub rate: BytesPerSecond,
    /// Counters of all channels.
    pub channels: Vec<ChannelReport>,
}

/// Header bytes of an InfiniBand packet: LRH 8, BTH 12, ICRC 4, VCRC 2 (row I03).
pub const IB_HEADERS: u32 = 26;
/// Headers of a `RoCE` v2 packet: preamble and gap 20, Ethernet 14, IPv4 20, UDP 8, BTH 12, ICRC 4, FCS 4.
pub const ROCE_V2_HEADERS: u32 = 82;

/// Header bytes by packet kind, from those of every packet: middle, first of a WRITE (RETH 16), acknowledgement or response
/// (AETH 4; row I04), and later parts of one packet.
#[must_use]
pub const fn overhead(headers: u32) -> [u32; 4] {
    [headers, headers + 16, headers + 4, 0]
}
