//! The event builder: the state machines of `millstream-evb-core`, the very ones that its processes run, in virtual
//! time over a modelled network.
//!
//! ```text
//!   manager, readout units, builder units (millstream-evb-core)
//!        │ what their processes do with them: [units]
//!   ─────┼───────────────── [Carrier] ─────────────────────────
//!        ├─ [packets]: adapters, PCIe, links and a switch, packet by packet, on the engine
//!        └─ [flows]: transfers as fluids, for hundreds of nodes
//! ```
//! A node has a readout unit with one source and a builder unit. The manager has a place of its own. What a node
//! sends to itself is copied by its processor and does not travel.
//!
//! Nothing here decides what goes where or when: whose batch it is, which slot takes it, whether there is a credit,
//! whose turn it is, when a batch is whole and what the account says are the core's answers.

mod flow_level;
mod packet_level;
mod summary;
mod units;

use crate::component::pcie;
use crate::engine::{BytesPerSecond, Picos};
use crate::parameters::Parameters;
use crate::path::{Adapter, DataPath, IB_HEADERS};
use crate::path::{PathError, data_path};
pub use millstream_evb_core::account::Account;
pub use millstream_evb_core::plan::PlanError;
pub use millstream_evb_core::shaping::TrafficShaping;
use millstream_site::Site;
use millstream_site::schema::PcieLink;
pub use summary::RunSummary;

/// What is read out, and how it is cut.
#[derive(Clone, Debug, PartialEq)]
pub struct ReadoutLoad {
    /// Events a second; without it all events are at hand from the start, as in a replay.
    pub rate: Option<f64>,
    /// Events of the run.
    pub events: u64,
    /// Consecutive events of a batch: of a multi-fragment packet.
    pub batch: u16,
    /// Mean payload of a fragment, in bytes.
    pub fragment: f64,
    /// Its standard deviation.
    pub deviation: f64,
    /// Bytes that a multi-fragment packet spends on each fragment beside its payload.
    pub index: u32,
    /// Of so many batches one lacks a fragment at its source; 0: none does.
    pub missing_every: u64,
    /// Of so many batches one has a fragment with a wrong checksum; 0: none has.
    pub corrupt_every: u64,
}

/// How the event builder is configured: `docs/event-builder.md` has the words.
#[derive(Clone, Debug, PartialEq)]
pub struct Configuration {
    /// Slots of each builder unit.
    pub slots: u16,
    /// Batches under way from one readout unit to one builder unit.
    pub window: u16,
    /// Batches under way from one readout unit.
    pub in_flight: u32,
    /// Whether traffic is shaped.
    pub shape: TrafficShaping,
}

/// A node and its way to the others, all alike.
#[derive(Clone, Debug)]
pub struct Node {
    /// The adapter and its software.
    pub adapter: Adapter,
    /// Its PCIe link.
    pub pcie: PcieLink,
    /// What PCIe links leave.
    pub pcie_efficiency: f64,
    /// One way over a PCIe link.
    pub pcie_latency: Picos,
    /// Memory and root complex.
    pub memory: crate::component::completer::CompleterTiming,
    /// Each direction of the network link, after encoding and flow control.
    pub rate: BytesPerSecond,
    /// Largest payload of a packet.
    pub mtu: u32,
    /// Cables and switch, one way.
    pub latency: Picos,
    /// Whether there is a switch. Without one there are two nodes, and the manager is on the first.
    pub switched: bool,
    /// What the switch buffers for each of its outputs.
    pub switch_buffer: u64,
    /// One core's copy, by which a node's own fragments get to its builder unit.
    pub copy: BytesPerSecond,
}

impl Node {
    /// What a node can send, in payload: link or PCIe completions.
    #[must_use]
    pub fn tx_payload_rate(&self) -> BytesPerSecond {
        let pcie = self.raw_pcie() / (1.0 + self.share(pcie::COMPLETION_OVERHEAD, self.pcie.max_payload.0));
        BytesPerSecond(self.link_payload().min(pcie).min(self.memory.rate.0))
    }

    /// What it can take while it sends as much: link, or PCIe writes beside the requests of its own reads.
    #[must_use]
    pub fn rx_payload_rate(&self) -> BytesPerSecond {
        let writes = self.share(pcie::REQUEST_OVERHEAD, self.pcie.max_payload.0);
        let requests = self.share(pcie::REQUEST_OVERHEAD, self.pcie.max_read_request.0);
        BytesPerSecond(
            self.link_payload().min(self.raw_pcie() / (1.0 + writes + requests)).min(self.memory.rate.0),
        )
    }

    /// What waits before a node's narrowest line when more comes than it takes.
    fn rx_buffer(&self) -> f64 {
        let switch = if self.switched { self.switch_buffer } else { 0 };
        let adapter = if self.rx_payload_rate().0 < self.link_payload() { self.adapter.buffer } else { 0 };
        (switch + adapter) as f64
    }

    fn raw_pcie(&self) -> f64 {
        pcie::raw_rate(self.pcie.generation.0, self.pcie.lanes.0).0 * self.pcie_efficiency
    }

    fn link_payload(&self) -> f64 {
        self.rate.0 * f64::from(self.mtu) / f64::from(self.mtu + IB_HEADERS)
    }

    fn share(&self, overhead: u32, payload: u32) -> f64 {
        f64::from(overhead) / f64::from(payload.min(self.mtu))
    }

    /// From a post to the first packet on an idle link.
    fn post_latency(&self) -> Picos {
        let adapter = &self.adapter;
        let fetch = self.pcie_latency * 3 + self.memory.read_latency;
        adapter.post + adapter.message_gap + adapter.tx_latency + adapter.gather_latency + fetch
    }

    /// From the last packet's end on the sender's link to the builder unit's knowing.
    fn delivery_latency(&self) -> Picos {
        // The last packet is stored and forwarded once by the switch and once into PCIe.
        let hops = self.rate.time(u64::from(self.mtu)) * (1 + u64::from(self.switched));
        self.latency
            + hops
            + self.adapter.rx_latency
            + self.pcie_latency
            + self.memory.write_latency
            + self.adapter.poll
    }

    /// From the last packet's arrival at the other adapter to the readout unit's knowing.
    fn ack_latency(&self) -> Picos {
        self.latency + self.pcie_latency + self.memory.write_latency + self.adapter.poll
    }

    /// A control message's way, beside its sender's time.
    fn control_latency(&self) -> Picos {
        self.adapter.tx_latency
            + self.latency
            + self.adapter.rx_latency
            + self.pcie_latency * 2
            + self.memory.write_latency
            + self.adapter.poll
    }
}

/// A builder unit that is slower than the others.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SlowBuilder {
    /// Which.
    pub builder: u16,
    /// So many times.
    pub factor: f64,
}

/// A whole arrangement.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Nodes.
    pub nodes: u16,
    /// One of them.
    pub node: Node,
    /// What is read out.
    pub load: ReadoutLoad,
    /// How the event builder is configured.
    pub configuration: Configuration,
    /// Rate at which a builder unit's kernel goes through a batch.
    pub kernel: BytesPerSecond,
    /// Builder units that are slower.
    pub slow_builders: Vec<SlowBuilder>,
    /// Someone wants the run to end at this time.
    pub stop_at: Option<Picos>,
    /// Seed of the fragments' sizes.
    pub seed: u64,
}

/// A site that the event builder's model cannot take.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum EventBuilderError {
    /// No way between its nodes.
    #[error(transparent)]
    Path(#[from] PathError),
    /// Nodes differ, or there are not enough.
    #[error("{0}")]
    Site(String),
    /// A number that cannot be.
    #[error("{what} = {value}: must be {must}")]
    Number {
        /// Which.
        what: &'static str,
        /// The number.
        value: f64,
        /// What it must be.
        must: &'static str,
    },
    /// The plan does not hold.
    #[error(transparent)]
    Plan(#[from] PlanError),
}

impl ReadoutLoad {
    /// LHCb's after its upgrade: 40 MHz of events of 100 kB over 500 nodes (row L28), 600 to a batch (row L30), in
    /// this event builder's multi-fragment packets (docs/formats.md: 16 B for each fragment).
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

    /// Payload of a batch of so many events from one source, by batch and source.
    fn payload(&self, events: u16, draw: u64) -> u32 {
        // Four uniform numbers make one that is nearly normal; a batch sums many fragments anyhow.
        let sum: u64 = (0..4).map(|i| draw >> (16 * i) & 0xffff).sum();
        let normal = (sum as f64 / 65536.0 - 2.0) * 3f64.sqrt();
        let events = f64::from(events);
        (events * self.fragment + events.sqrt() * self.deviation * normal).round().max(events) as u32
    }
}

impl Default for Configuration {
    /// As LHCb's software has it where it has the word: 20 credits (row L30).
    fn default() -> Configuration {
        Configuration { slots: 20, window: 8, in_flight: 4, shape: TrafficShaping::BarrelShifter }
    }
}

impl Scenario {
    /// The first `nodes` nodes of a site, or all.
    ///
    /// # Errors
    /// If the site has not got so many nodes that are alike and linked.
    pub fn from_site(site: &Site, p: &Parameters, nodes: Option<u16>) -> Result<Scenario, EventBuilderError> {
        let there = site.hosts.len();
        let wanted = nodes.map_or(there, usize::from);
        let refuse = |why: String| Err(EventBuilderError::Site(format!("{}: {why}", site.name)));
        if wanted < 2 || wanted > there || wanted > usize::from(u16::MAX) {
            return refuse(format!(
                "{wanted} nodes of an event builder: the site has {there} hosts, and 2 is the least"
            ));
        }
        if let Some(other) = site.hosts[..wanted].iter().find(|host| host.kind != site.hosts[0].kind) {
            return refuse(format!(
                "{} and {} differ: the nodes must be alike",
                site.hosts[0].name, other.name
            ));
        }
        let pair = data_path(site, p, &site.hosts[0].name, &site.hosts[1].name)?;
        // Every other node must be there, too; the way is as long as the first pair's.
        for host in &site.hosts[2..wanted] {
            data_path(site, p, &site.hosts[0].name, &host.name)?;
        }
        let switched = !site.switches.is_empty();
        Ok(Scenario::between(pair, p, wanted as u16, switched))
    }

    fn between(pair: DataPath, p: &Parameters, nodes: u16, switched: bool) -> Scenario {
        let [end, _] = pair.ends;
        Scenario {
            nodes,
            node: Node {
                adapter: pair.adapter,
                pcie: end.pcie,
                pcie_efficiency: pair.pcie_efficiency,
                pcie_latency: pair.pcie_latency,
                memory: end.host,
                rate: pair.rate,
                mtu: pair.mtu,
                latency: pair.latency,
                switched,
                switch_buffer: p.get("switch.buffer") as u64,
                copy: p.gigabytes("host.copy.rate"),
            },
            load: ReadoutLoad::lhcb(1.0),
            configuration: Configuration::default(),
            kernel: end.host.rate,
            slow_builders: Vec::new(),
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
            "0 to the fragment's mean",
            (0.0..=load.fragment).contains(&load.deviation),
        )?;
        number("events", load.events as f64, "1 or more", load.events > 0)?;
        if let Some(rate) = load.rate {
            number("rate", rate, "more than 0 and at most 10¹² events a second", rate > 0.0 && rate <= 1e12)?;
        }
        number("slots", f64::from(self.configuration.slots), "1 or more", self.configuration.slots > 0)?;
        number("window", f64::from(self.configuration.window), "1 or more", self.configuration.window > 0)?;
        number(
            "in-flight",
            f64::from(self.configuration.in_flight),
            "1 or more",
            self.configuration.in_flight > 0,
        )?;
        for slow in &self.slow_builders {
            let good = slow.builder < self.nodes && slow.factor.is_finite() && slow.factor >= 1.0;
            number(
                "slow builder unit's factor",
                slow.factor,
                "1 or more, of a builder unit that there is",
                good,
            )?;
        }
        Ok(())
    }
}

/// How finely the network is modelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelLevel {
    /// Packet by packet: small systems.
    Packets,
    /// Transfers as fluids: many nodes.
    Flows,
}

/// What a builder unit had to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BuilderStats {
    /// Batches that it built.
    pub batches: u64,
    /// The most slots that held a batch, or part of one, at a time.
    pub max_slots_used: u16,
}

/// How a run went.
#[derive(Clone, Debug, PartialEq)]
pub struct RunResult {
    /// The core's account.
    pub account: Account,
    /// From the start of data taking, or the first assignment if all events were at hand, to the last batch done.
    pub span: Picos,
    /// The end, with its reports.
    pub end: Picos,
    /// Transfers from node to node, those to oneself included.
    pub transfers: u64,
    /// Payload built: of fragments, wherever they came from.
    pub built: u64,
    /// Payload of it that travelled.
    pub network_payload: u64,
    /// What travelled with it, headers of multi-fragment packets included.
    pub network_bytes: u64,
    /// By builder unit.
    pub builders: Vec<BuilderStats>,
    /// The most batches that a readout unit had to hold: taken, and not yet sent.
    pub max_buffered_batches: u64,
    /// From a batch's last event to its being built: mean, and the longest.
    pub build_latency: [Picos; 2],
    /// The busiest node's share of what its link into it could carry in that time.
    pub peak_link_utilization: f64,
    /// Events of the simulation.
    pub steps: u64,
}

impl RunResult {
    /// Events built a second.
    #[must_use]
    pub fn event_rate(&self) -> f64 {
        self.account.built.events as f64 / self.span.seconds()
    }

    /// What all nodes together built.
    #[must_use]
    pub fn rate(&self) -> BytesPerSecond {
        BytesPerSecond(self.built as f64 / self.span.seconds())
    }

    /// What all nodes together got over the network.
    #[must_use]
    pub fn network_rate(&self) -> BytesPerSecond {
        BytesPerSecond(self.network_payload as f64 / self.span.seconds())
    }
}

/// Runs an event builder to the end of its run.
///
/// # Errors
/// [`EventBuilderError`] if the arrangement cannot be.
pub fn run(scenario: &Scenario, level: ModelLevel) -> Result<RunResult, EventBuilderError> {
    scenario.check()?;
    let units = units::Units::new(scenario)?;
    Ok(match level {
        ModelLevel::Flows => flow_level::run(scenario, units),
        ModelLevel::Packets => packet_level::run(scenario, units),
    })
}
