//! Two hosts with one adapter each, as the tools take them: what a way between two memories consists of.
//! A side's memory is its host's, or a card's that the adapter reaches through the root complex or a PCIe
//! switch. `nic.rs` makes lines and endpoints of it.

use crate::component::completer::CompleterTiming;
use crate::engine::{BytesPerSecond, ChannelReport, Picos};
use millstream_site::schema::PcieLink;

mod resolve;

pub use resolve::*;

/// What is behind an adapter.
#[derive(Clone, Debug, PartialEq)]
pub enum TargetMemory {
    /// Its host's memory.
    Host,
    /// A card's.
    Card(PeerCard),
}

/// A card that an adapter reaches as a peer.
#[derive(Clone, Debug, PartialEq)]
pub struct PeerCard {
    /// Its link.
    pub pcie: PcieLink,
    /// Its memory's answers.
    pub timing: CompleterTiming,
    /// What its inlet answers reads of a peer with, where that is less than its memory.
    pub read_rate: BytesPerSecond,
    /// Payload of writes that it works on at once.
    pub write_window: u64,
    /// What is between the two links.
    pub route: PeerRoute,
}

/// What is between two devices of one PCIe tree.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PeerRoute {
    /// A root complex, with what it forwards from root port to root port.
    RootComplex {
        /// Writes.
        write: BytesPerSecond,
        /// Completions.
        read: BytesPerSecond,
        /// One way.
        latency: Picos,
    },
    /// A switch.
    Switch {
        /// One way.
        latency: Picos,
    },
}

/// One side.
#[derive(Clone, Debug, PartialEq)]
pub struct PathEnd {
    /// The adapter's link.
    pub pcie: PcieLink,
    /// What it reads from and writes to.
    pub target: TargetMemory,
    /// The host's memory and root complex.
    pub host: CompleterTiming,
}

/// The adapters and their software.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adapter {
    /// Software per work request.
    pub post: Picos,
    /// Software per completion.
    pub poll: Picos,
    /// Doorbell to packet, without fetching payload.
    pub tx_latency: Picos,
    /// Packet whole to PCIe write.
    pub rx_latency: Picos,
    /// What fetching payload adds beside the PCIe read.
    pub gather_latency: Picos,
    /// Per message.
    pub message_gap: Picos,
    /// Payload asked for ahead.
    pub read_window: u32,
    /// RDMA reads in flight.
    pub outstanding_reads: u32,
    /// Received payload waiting for PCIe.
    pub buffer: u64,
    /// Messages up to here travel in the work request.
    pub inline: u32,
    /// Looking up where an arriving packet goes; none if that is hidden behind everything else.
    pub translation: Option<AddressTranslation>,
}

/// Translation of virtual addresses on the receive path, one packet after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressTranslation {
    /// Time of a packet whose page is in the table.
    pub hit: Picos,
    /// Time of a packet for which a processor has to walk its own tables.
    pub miss: Picos,
    /// Pages in the table; 0 if there is none.
    pub entries: u32,
    /// Bytes of a page.
    pub page: u32,
}

/// One more link on the way: a step from a torus' node to the next.
#[derive(Clone, Debug, PartialEq)]
pub struct NetworkHop {
    /// Its name.
    pub name: String,
    /// One direction.
    pub rate: BytesPerSecond,
    /// From one node's output to the next one's.
    pub latency: Picos,
    /// Channel memory before it, which credits stand for.
    pub buffer: u64,
}

/// The whole arrangement.
#[derive(Clone, Debug, PartialEq)]
pub struct DataPath {
    /// Client and server.
    pub ends: [PathEnd; 2],
    /// The adapters.
    pub adapter: Adapter,
    /// Each direction of the link, after encoding and flow control.
    pub rate: BytesPerSecond,
    /// Largest payload of a packet.
    pub mtu: u32,
    /// Bytes of a packet beside its payload, by kind; see [`OVERHEAD`].
    pub overhead: [u32; 4],
    /// Cable, serialisers and switches.
    pub latency: Picos,
    /// More links after the first, from client to server and back: a torus has them.
    pub later_hops: [Vec<NetworkHop>; 2],
    /// What PCIe links leave.
    pub pcie_efficiency: f64,
    /// One way over a PCIe link.
    pub pcie_latency: Picos,
}

/// Which verb.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// RDMA WRITE.
    Write,
    /// RDMA READ.
    Read,
    /// SEND.
    Send,
}

/// A measured bandwidth.
#[derive(Clone, Debug)]
pub struct BandwidthResult {
    /// Payload a second, both directions together if both were asked for.
    pub rate: BytesPerSecond,
    /// What every line did.
    pub channels: Vec<ChannelReport>,
}

/// Headers of an InfiniBand packet: LRH 8, BTH 12, ICRC 4, VCRC 2 (row I03); RETH 16 and AETH 4 more (row I04).
pub const IB_HEADERS: u32 = 26;
/// The same by kind of packet: in the middle, the first of a WRITE, an acknowledgement or response, a request.
pub const IB_OVERHEAD: [u32; 4] = [IB_HEADERS, IB_HEADERS + 16, IB_HEADERS + 4, IB_HEADERS];
