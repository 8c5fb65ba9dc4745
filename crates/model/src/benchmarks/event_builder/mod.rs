//! Event builder: the state machines of `millstream-evb-core` in simulated time over a modelled network.
//!
//! ```text
//!   manager, readout units, builder units (millstream-evb-core)
//!        │ their processes: [units]
//!   ─────┼───────────────── [network::NetworkModel] ─────────────
//!        ├─ [packet_level]: adapters, PCIe, links and a switch on the engine
//!        └─ [flow_level]: transfers as fluid flows, for hundreds of nodes
//! ```
//! A node has a readout unit with one source and a builder unit. The manager has its own switch port. A node's processor
//! copies the data that the node sends to itself.
//!
//! The core makes all decisions: assignment, slots, credits, sending order, completeness, and the run summary of the run.

mod cost;
mod flow_level;
mod network;
mod packet_level;
mod storage;
mod summary;
mod units;

use crate::component::pcie;
use crate::engine::{BytesPerSecond, Picos};
use crate::parameters::Parameters;
use crate::path::route::Network;
use crate::path::{Adapter, DataPath, PathEnd, PathError, data_path, switch_buffer};
pub use cost::BuiltCost;
pub use millstream_evb_core::plan::PlanError;
pub use millstream_evb_core::shaping::TrafficShaping;
pub use millstream_evb_core::summary::RunSummary;
use millstream_site::schema::PcieLink;
use millstream_site::validate::LinkEnd;
use millstream_site::{HostId, Site};
pub use storage::{Storage, StorageUse};
pub use summary::ScenarioReport;

/// Workload: event rate, batching and fragment sizes.
#[derive(Clone, Debug, PartialEq)]
pub struct ReadoutLoad {
    /// Events per second; without a rate, all events are available at the start.
    pub rate: Option<f64>,
    /// Events of the run.
    pub events: u64,
    /// Consecutive events per batch (multi-fragment packet).
    pub batch: u16,
    /// Mean payload of a fragment in bytes.
    pub fragment: f64,
    /// Standard deviation of the payload.
    pub deviation: f64,
    /// Bytes per fragment that a multi-fragment packet adds to the payload.
    pub index: u32,
    /// One batch in this many lacks a fragment at its source; 0: none.
    pub missing_every: u64,
    /// One batch in this many has a fragment with a wrong checksum; 0: none.
    pub corrupt_every: u64,
}

/// Event builder configuration; `docs/event-builder.md` explains the fields.
#[derive(Clone, Debug, PartialEq)]
pub struct Configuration {
    /// Slots of each builder unit.
    pub slots: u16,
    /// Batches in flight from one readout unit to one builder unit.
    pub window: u16,
    /// Batches in flight from one readout unit.
    pub in_flight: u32,
    /// Traffic shaping.
    pub traffic_shaping: TrafficShaping,
}

/// A node with its path to the others; all nodes are alike.
#[derive(Clone, Debug)]
pub struct Node {
    /// Adapter and software.
    pub adapter: Adapter,
    /// PCIe link of the adapter, or a slower one of the switches above it.
    pub pcie: PcieLink,
    /// Share of the PCIe link rate that DLLPs leave.
    pub pcie_efficiency: f64,
    /// Latency of one direction between the adapter and the root complex.
    pub pcie_latency: Picos,
    /// Memory and root complex.
    pub memory: crate::component::completer::CompleterTiming,
    /// Rate of each network link direction, after line code and flow control.
    pub rate: BytesPerSecond,
    /// Largest payload of a packet.
    pub mtu: u32,
    /// Header bytes of a packet by kind; see [`overhead`](crate::path::overhead).
    pub overhead: [u32; 4],
    /// One-way latency of cables and switch.
    pub latency: Picos,
    /// Whether there is a switch. Without one there are two nodes, and the manager is on the first.
    pub switched: bool,
    /// Bytes that the switch buffers per output.
    pub switch_buffer: u64,
    /// Copy rate of one processor core, for a node's transfers to itself.
    pub copy: BytesPerSecond,
}

impl Node {
    /// Largest payload rate of sending: the slower of link and PCIe completions.
    #[must_use]
    pub fn tx_payload_rate(&self) -> BytesPerSecond {
        let pcie = self.raw_pcie() / (1.0 + self.share(pcie::COMPLETION, self.pcie.max_payload.0));
        BytesPerSecond(self.link_payload().min(pcie).min(self.memory.rate.0))
    }

    /// Largest payload rate of receiving while sending as much: link, or PCIe writes beside the read requests.
    #[must_use]
    pub fn rx_payload_rate(&self) -> BytesPerSecond {
        let writes = self.share(pcie::MEMORY_WRITE, self.pcie.max_payload.0);
        let requests = self.share(pcie::MEMORY_READ, self.pcie.max_read_request.0);
        BytesPerSecond(
            self.link_payload().min(self.raw_pcie() / (1.0 + writes + requests)).min(self.memory.rate.0),
        )
    }

    /// Bytes buffered before a node's slowest receiving channel.
    fn rx_buffer(&self) -> f64 {
        let switch = if self.switched { self.switch_buffer } else { 0 };
        let adapter = if self.rx_payload_rate().0 < self.link_payload() { self.adapter.rx_buffer } else { 0 };
        (switch + adapter) as f64
    }

    fn raw_pcie(&self) -> f64 {
        pcie::raw_rate(self.pcie.generation.0, self.pcie.lanes.0).0 * self.pcie_efficiency
    }

    fn link_payload(&self) -> f64 {
        self.rate.0 * f64::from(self.mtu) / f64::from(self.mtu + self.overhead[0])
    }

    /// Header bytes of a kind of PCIe packets per byte of payload.
    fn share(&self, kind: u16, payload: u32) -> f64 {
        let overhead = pcie::overhead(self.pcie.generation.0)[usize::from(kind)];
        f64::from(overhead) / f64::from(payload.min(self.mtu))
    }

    /// Latency from posting to the first packet on an idle link.
    fn post_latency(&self) -> Picos {
        let adapter = &self.adapter;
        let fetch = self.pcie_latency * 3 + self.memory.read_latency;
        adapter.post_time + adapter.message_gap + adapter.tx_latency + adapter.gather_latency + fetch
    }

    /// Latency from the last packet on the sender's link to the builder unit.
    fn delivery_latency(&self) -> Picos {
        // Switch and adapter each store and forward the last packet once.
        let hops = self.rate.time(u64::from(self.mtu)) * (1 + u64::from(self.switched));
        self.latency
            + hops
            + self.adapter.rx_latency
            + self.pcie_latency
            + self.memory.write_latency
            + self.adapter.poll_time
    }

    /// Latency from the last packet's arrival at the responder to the readout unit.
    fn ack_latency(&self) -> Picos {
        self.latency + self.pcie_latency + self.memory.write_latency + self.adapter.poll_time
    }

    /// Latency of a control message, without the sender's time.
    fn control_latency(&self) -> Picos {
        self.adapter.tx_latency
            + self.latency
            + self.adapter.rx_latency
            + self.pcie_latency * 2
            + self.memory.write_latency
            + self.adapter.poll_time
    }
}

/// A builder unit with a slower kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SlowBuilder {
    /// Index of the builder unit.
    pub builder: u16,
    /// Slowdown of its kernel.
    pub factor: f64,
}

/// An event builder run to simulate.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Number of nodes.
    pub nodes: u16,
    /// Model of a node.
    pub node: Node,
    /// Workload.
    pub load: ReadoutLoad,
    /// Event builder configuration.
    pub configuration: Configuration,
    /// Rate at which a builder unit's kernel processes a batch.
    pub kernel: BytesPerSecond,
    /// Builder units with slower kernels.
    pub slow_builders: Vec<SlowBuilder>,
    /// Disks on which each builder unit stores its accepted events; none: events are only counted.
    pub storage: Option<Storage>,
    /// Time of a stop request.
    pub stop_at: Option<Picos>,
    /// Seed of the fragment sizes.
    pub seed: u64,
}

/// A scenario that cannot be simulated.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum EventBuilderError {
    /// The site has no path between its nodes.
    #[error(transparent)]
    Path(#[from] PathError),
    /// The site has too few nodes, or they differ.
    #[error("{0}")]
    Site(String),
    /// A number is out of range.
    #[error("{what} = {value}: must be {must}")]
    Number {
        /// The field.
        what: &'static str,
        /// Its value.
        value: f64,
        /// Its range.
        must: &'static str,
    },
    /// The event builder core rejects the plan.
    #[error(transparent)]
    Plan(#[from] PlanError),
}

impl ReadoutLoad {
    /// LHCb after its upgrade: 40 MHz of 100 kB events over 500 nodes (row L28), 600 events per batch (row
    /// L30). Multi-fragment packets add 16 B per fragment (docs/formats.md).
    #[must_use]
    pub fn lhcb(seconds: f64) -> ReadoutLoad {
        let events = (40e6 * seconds).round() as u64;
        ReadoutLoad {
            rate: Some(40e6),
            events,
            batch: 600,
            fragment: 200.0,
            deviation: 20.0,
            index: 16,
            missing_every: 0,
            corrupt_every: 0,
        }
    }

    /// Payload of a batch from one source.
    fn payload(&self, events: u16, draw: u64) -> u32 {
        // The sum of four uniform numbers is nearly normal; a batch sums many fragments.
        let sum: u64 = (0..4).map(|i| draw >> (16 * i) & 0xffff).sum();
        let normal = (sum as f64 / 65536.0 - 2.0) * 3f64.sqrt();
        let events = f64::from(events);
        (events * self.fragment + events.sqrt() * self.deviation * normal).round().max(events) as u32
    }
}

impl Default for Configuration {
    /// LHCb's values where they are published: 20 credits (row L30).
    fn default() -> Configuration {
        Configuration { slots: 20, window: 8, in_flight: 4, traffic_shaping: TrafficShaping::BarrelShifter }
    }
}

/// What a path has that the event builder's network does not.
fn not_modelled(path: &DataPath) -> Option<&'static str> {
    let [end, _] = &path.ends;
    match () {
        () if end.adapter.core.is_some() => Some("a transport in software"),
        () if end.adapter.translation.is_some() => Some("an adapter that translates addresses"),
        () if end.translation.is_some() => Some("hosts with an IOMMU"),
        () => None,
    }
}

/// The slowest PCIe link between an adapter and the root complex, and the latency of one direction of all.
fn to_root_complex(end: &PathEnd, link_latency: Picos) -> (PcieLink, Picos) {
    let rate = |link: &PcieLink| pcie::raw_rate(link.generation.0, link.lanes.0).0;
    let mut slowest = end.pcie;
    let mut latency = link_latency;
    for uplink in &end.uplinks {
        if rate(&uplink.pcie) < rate(&slowest) {
            // Packets keep the adapter's sizes.
            slowest = PcieLink { generation: uplink.pcie.generation, lanes: uplink.pcie.lanes, ..end.pcie };
        }
        latency += uplink.latency + link_latency;
    }
    (slowest, latency)
}

impl Scenario {
    /// The first `nodes` nodes of a site, or all.
    ///
    /// # Errors
    /// If the site has too few nodes, different nodes, or no path between them.
    pub fn from_site(site: &Site, p: &Parameters, nodes: Option<u16>) -> Result<Scenario, EventBuilderError> {
        let available = site.hosts.len();
        let wanted = nodes.map_or(available, usize::from);
        let refuse = |why: String| Err(EventBuilderError::Site(format!("{}: {why}", site.name)));
        if wanted < 2 || wanted > available || wanted > usize::from(u16::MAX) {
            return refuse(format!(
                "{wanted} nodes: the site has {available} hosts, and an event builder needs at least 2"
            ));
        }
        if let Some(other) = site.hosts[..wanted].iter().find(|host| host.group != site.hosts[0].group) {
            return refuse(format!(
                "hosts {} and {} differ: all nodes must be alike",
                site.hosts[0].name, other.name
            ));
        }
        let p = &*p.with_devices(&site.devices);
        let pair = data_path(site, p, &site.hosts[0].name, &site.hosts[1].name)?;
        if let Some(part) = not_modelled(&pair) {
            return refuse(format!("the event builder on {part} is not modelled"));
        }
        // All nodes need a path; the first pair's latency is used for all.
        for host in &site.hosts[2..wanted] {
            data_path(site, p, &site.hosts[0].name, &host.name)?;
        }
        let storage = Storage::of_host(p, &site.hosts[0])?;
        let route = Network::new(site).route(HostId(0), HostId(1));
        let before_last = route.and_then(|route| route.links.last().map(|hop| hop.source(site)));
        let switch = before_last.filter(|end| matches!(end, LinkEnd::Switch(_)));
        let buffer = switch.map(|switch| switch_buffer(p, site, switch));
        Ok(Scenario { storage, ..Scenario::between(pair, p, wanted as u16, buffer) })
    }

    /// All nodes are at a switch with this buffer per output; none: two nodes without a switch.
    fn between(pair: DataPath, p: &Parameters, nodes: u16, switch_buffer: Option<u64>) -> Scenario {
        let latency = pair.network_hops(0).iter().fold(Picos::ZERO, |sum, hop| sum + hop.latency);
        let [end, _] = pair.ends;
        let (pcie, pcie_latency) = to_root_complex(&end, pair.pcie_latency);
        Scenario {
            nodes,
            node: Node {
                adapter: end.adapter,
                pcie,
                pcie_efficiency: end.pcie_efficiency,
                pcie_latency,
                memory: end.host,
                rate: pair.rate,
                mtu: pair.mtu,
                overhead: pair.overhead,
                latency,
                switched: switch_buffer.is_some(),
                switch_buffer: switch_buffer.unwrap_or(u64::MAX),
                copy: p.gigabytes("host.copy.rate"),
            },
            load: ReadoutLoad::lhcb(1.0),
            configuration: Configuration::default(),
            kernel: end.host.rate,
            slow_builders: Vec::new(),
            storage: None,
            stop_at: None,
            seed: 1,
        }
    }

    fn check(&self) -> Result<(), EventBuilderError> {
        let number = |what, value: f64, must, good: bool| {
            if good { Ok(()) } else { Err(EventBuilderError::Number { what, value, must }) }
        };
        let load = &self.load;
        number("nodes", f64::from(self.nodes), "2 or more; 2 without a switch", {
            self.nodes >= 2 && (self.node.switched || self.nodes == 2)
        })?;
        number("batch", f64::from(load.batch), "1 or more", load.batch > 0)?;
        number("fragment", load.fragment, "1 to 65536 bytes", (1.0..=65536.0).contains(&load.fragment))?;
        number(
            "deviation",
            load.deviation,
            "0 to the mean payload",
            (0.0..=load.fragment).contains(&load.deviation),
        )?;
        // The sum of a batch's fragments is at most four deviations above its mean.
        let events = f64::from(load.batch);
        let bytes = events * (load.fragment + f64::from(load.index)) + 4.0 * events.sqrt() * load.deviation;
        number("batch × fragment", bytes, "less than 4 GiB", bytes < f64::from(u32::MAX))?;
        number("events", load.events as f64, "1 or more", load.events > 0)?;
        if let Some(rate) = load.rate {
            number("rate", rate, "more than 0 and at most 10¹² events a second", rate > 0.0 && rate <= 1e12)?;
            let seconds = load.events as f64 / rate;
            number("events / rate", seconds, "at most 10⁶ seconds", seconds <= 1e6)?;
        }
        number("slots", f64::from(self.configuration.slots), "1 or more", self.configuration.slots > 0)?;
        number("window", f64::from(self.configuration.window), "1 or more", self.configuration.window > 0)?;
        number(
            "in-flight",
            f64::from(self.configuration.in_flight),
            "1 or more",
            self.configuration.in_flight > 0,
        )?;
        if let Some(Storage { accepted, .. }) = self.storage {
            number("accepted", accepted, "0 to 1", (0.0..=1.0).contains(&accepted))?;
        }
        for slow in &self.slow_builders {
            let good = slow.builder < self.nodes && (1.0..=1e6).contains(&slow.factor);
            number("slow builder factor", slow.factor, "1 to 10⁶, for an existing builder unit", good)?;
        }
        Ok(())
    }
}

/// Level of detail of the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelLevel {
    /// Packet level, for small systems.
    Packets,
    /// Flow level, for many nodes.
    Flows,
}

/// Counters of a builder unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BuilderStats {
    /// Batches built.
    pub batches: u64,
    /// Largest number of slots in use.
    pub max_slots_used: u16,
}

/// Result of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct RunResult {
    /// The core's summary of the run.
    pub summary: RunSummary,
    /// First event (first assignment if saturated) to last batch built.
    pub span: Picos,
    /// End of the run, including its reports.
    pub end: Picos,
    /// Transfers, including those of a node to itself.
    pub transfers: u64,
    /// Payload bytes built.
    pub built: u64,
    /// Payload bytes that crossed the network.
    pub network_payload: u64,
    /// Bytes that crossed the network, with the headers of multi-fragment packets.
    pub network_bytes: u64,
    /// Counters by builder unit.
    pub builders: Vec<BuilderStats>,
    /// Largest number of batches that a readout unit buffered.
    pub max_buffered_batches: u64,
    /// Latency from a batch's last event to its completion: mean and maximum.
    pub build_latency: [Picos; 2],
    /// Largest utilization of a node's receiving link.
    pub peak_link_utilization: f64,
    /// What the disks did, if builder units store events.
    pub storage: Option<StorageUse>,
    /// Simulation events.
    pub steps: u64,
}

impl RunResult {
    /// Events built per second.
    #[must_use]
    pub fn event_rate(&self) -> f64 {
        self.summary.built.events as f64 / self.span.seconds()
    }

    /// Payload rate of all builder units.
    #[must_use]
    pub fn rate(&self) -> BytesPerSecond {
        BytesPerSecond(self.built as f64 / self.span.seconds())
    }

    /// Payload rate over the network of all builder units.
    #[must_use]
    pub fn network_rate(&self) -> BytesPerSecond {
        BytesPerSecond(self.network_payload as f64 / self.span.seconds())
    }
}

/// Simulates a run to its end.
///
/// # Errors
/// [`EventBuilderError`] if the scenario is invalid.
pub fn run(scenario: &Scenario, level: ModelLevel) -> Result<RunResult, EventBuilderError> {
    scenario.check()?;
    let units = units::Units::new(scenario)?;
    Ok(match level {
        ModelLevel::Flows => flow_level::run(scenario, units),
        ModelLevel::Packets => packet_level::run(scenario, units),
    })
}
