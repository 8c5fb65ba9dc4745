//! Torus network: latency by hops, bandwidth by hops, all-to-all.
//!
//! Routes, routers, virtual channels and credits are those of `torus-core`, which node processes run, too. `network.rs` joins
//! the routers in virtual time. Nodes are network adapters with links of their own, or processes that share the cores of one
//! host ([`SharedCores`]).

mod network;
mod routes;

use millstream_site::Site;
use millstream_torus_core::{DeadSet, Dimensions, NodeNumber};

use crate::engine::{BytesPerSecond, Picos};
use crate::parameters::Parameters;
use network::Network;
use routes::Routes;

pub(crate) use routes::dead_links;

/// A torus.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Torus {
    /// Nodes per dimension, one to three.
    pub dimensions: Vec<u32>,
    /// Rate of one link direction.
    pub rate: BytesPerSecond,
    /// Largest payload of a packet.
    pub packet_size: u32,
    /// Receive buffer of a channel in bytes.
    pub buffer: u64,
    /// Latency from a node's output to the next node's output.
    pub hop_latency: Picos,
    /// Latency from memory to the first output plus from the last input to memory.
    pub end_latency: Picos,
    /// Nodes are processes of one host.
    pub cores: Option<SharedCores>,
    /// Failed links: routes lead around them.
    pub dead: DeadSet,
}

/// Cores of a host whose processes are the nodes. Each hop and each delivery of a packet takes time of one core.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SharedCores {
    /// Number of cores.
    pub cores: u32,
    /// Time of a core for a packet without its bytes.
    pub packet: Picos,
    /// Rate at which a core copies payload.
    pub copy: BytesPerSecond,
}

impl SharedCores {
    fn time(&self, bytes: u32) -> Picos {
        self.packet + self.copy.time(u64::from(bytes))
    }
}

/// Why a site's torus cannot be modelled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TorusError {
    /// The site has none.
    #[error("site {site:?} has no [[torus]]")]
    NoTorus {
        /// Name of the site.
        site: String,
    },
    /// The adapters' device lacks a value.
    #[error("device {device:?} of the adapters of torus {torus:?} has no value {value:?}")]
    NoValue {
        /// The device.
        device: String,
        /// The torus.
        torus: String,
        /// The value.
        value: &'static str,
    },
    /// `torus-core` refuses the dimensions.
    #[error("torus {torus:?}: {cause}")]
    Dimensions {
        /// The torus.
        torus: String,
        /// The cause.
        cause: String,
    },
}

impl Torus {
    /// The first torus of a site whose adapters are node processes: their device has the values `torus.end.latency`,
    /// `torus.hop.latency`, `torus.packet.time` (ns), `torus.copy.rate` (GB/s) and `torus.cores`.
    ///
    /// # Errors
    /// [`TorusError`] names what is missing.
    pub fn of_processes(site: &Site, p: &Parameters) -> Result<Torus, TorusError> {
        let p = &*p.with_devices(&site.devices);
        let Some(torus) = site.tori.first() else {
            return Err(TorusError::NoTorus { site: site.name.clone() });
        };
        let (host, adapter) = torus.nodes[0];
        let device = &site.hosts[host.0].devices[adapter.0].id;
        let value = |value: &'static str| {
            let missing = || TorusError::NoValue { device: device.clone(), torus: torus.name.clone(), value };
            p.device(device, value).ok_or_else(missing)
        };
        let link = site.links.iter().find(|link| link.dimension.is_some());
        let (mtu, buffer) = link.map_or((4096, None), |link| (link.mtu.0, link.buffer));
        let model = Torus {
            dimensions: torus.dimensions.clone(),
            rate: BytesPerSecond(torus.rate.0),
            packet_size: mtu,
            buffer: buffer.map_or(u64::MAX, |buffer| buffer.0),
            hop_latency: Picos::from_nanos(value("torus.hop.latency")?),
            end_latency: Picos::from_nanos(value("torus.end.latency")?),
            cores: Some(SharedCores {
                cores: value("torus.cores")?.round().max(1.0) as u32,
                packet: Picos::from_nanos(value("torus.packet.time")?),
                copy: BytesPerSecond::gigabytes(value("torus.copy.rate")?),
            }),
            dead: dead_links(site, torus),
        };
        match model.core_dimensions() {
            Ok(_) => Ok(model),
            Err(cause) => Err(TorusError::Dimensions { torus: torus.name.clone(), cause }),
        }
    }

    /// Number of nodes.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.dimensions.iter().map(|&d| d as usize).product()
    }

    fn core_dimensions(&self) -> Result<Dimensions, String> {
        let mut sizes = [1; 3];
        for (size, &dimension) in sizes.iter_mut().zip(&self.dimensions) {
            *size = u16::try_from(dimension).map_err(|error| format!("dimension {dimension}: {error}"))?;
        }
        Dimensions::new(sizes).map_err(|error| error.to_string())
    }

    /// The dimensions for `torus-core`.
    ///
    /// # Panics
    /// If there are none or too many nodes: see [`Torus::of_processes`].
    fn core(&self) -> Dimensions {
        self.core_dimensions().unwrap_or_else(|error| panic!("a torus that was checked: {error}"))
    }

    /// Hops of the route between two nodes, as `torus-core` chooses it; none if failed links separate them, or the torus has more
    /// nodes than `torus-core` numbers.
    #[must_use]
    pub fn hops(&self, from: usize, to: usize) -> Option<Vec<TorusHop>> {
        Routes::new(self.core_dimensions().ok()?, &self.dead)
            .hops(NodeNumber(from as u16), NodeNumber(to as u16))
    }

    /// Bisection bandwidth of the longest dimension, both directions: the limit of an all-to-all.
    #[must_use]
    pub fn bisection(&self) -> BytesPerSecond {
        let longest = self.dimensions.iter().copied().max().unwrap_or(1) as usize;
        // A cut crosses a ring at two links of two directions each; a ring of two nodes has one link.
        let cuts = if longest > 2 { 2 } else { 1 };
        BytesPerSecond((self.nodes() / longest * cuts * 2) as f64 * self.rate.0)
    }
}

/// One link of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TorusHop {
    /// The node whose output it is.
    pub node: usize,
    /// The dimension.
    pub dimension: usize,
    /// Whether the coordinate increases.
    pub positive: bool,
    /// Whether the packet enters this ring here.
    pub enters_ring: bool,
}

/// Result of an all-to-all.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AllToAll {
    /// Time of the last arrival.
    pub time: Picos,
    /// Payload of all messages per time.
    pub rate: BytesPerSecond,
    /// Events of the simulation.
    pub events: u64,
}

/// All-to-all: every node sends a message of this size to every other that it reaches.
///
/// # Panics
/// If a packet is lost, which the router's rules exclude.
#[must_use]
pub fn all_to_all(torus: &Torus, message: u64) -> AllToAll {
    let nodes = torus.nodes();
    let packets = message.div_ceil(u64::from(torus.packet_size)).max(1) as u32;
    let size = torus.packet_size.min(message.max(1) as u32);
    let mut network = Network::new(torus, torus.core(), size);
    let mut pairs = 0;
    for from in 0..nodes {
        // Node i starts with node i + 1, so no node is the first target of all.
        pairs += (1..nodes).filter(|k| network.plan(from, (from + k) % nodes, packets)).count();
    }
    let outcome = network.run();
    assert_eq!(outcome.delivered, u64::from(packets) * pairs as u64, "every packet arrives");
    let bytes = message as f64 * pairs as f64;
    let time = outcome.time + torus.end_latency;
    AllToAll { time, rate: BytesPerSecond(bytes / time.seconds().max(1e-12)), events: outcome.events }
}

/// Rate of one node that sends `bytes` to another one, in packets without a pause; 0 if failed links separate them.
///
/// # Panics
/// If a packet is lost, which the router's rules exclude.
#[must_use]
pub fn stream(torus: &Torus, from: usize, to: usize, bytes: u64) -> BytesPerSecond {
    let packets = bytes.div_ceil(u64::from(torus.packet_size)).max(1) as u32;
    let size = torus.packet_size.min(bytes.max(1) as u32);
    let mut network = Network::new(torus, torus.core(), size);
    if !network.plan(from, to, packets) {
        return BytesPerSecond(0.0);
    }
    let outcome = network.run();
    assert_eq!(outcome.delivered, u64::from(packets), "every packet arrives");
    BytesPerSecond(bytes as f64 / outcome.time.seconds().max(1e-12))
}

/// Latency of one small packet; none if failed links separate the nodes.
#[must_use]
pub fn small_packet_latency(torus: &Torus, from: usize, to: usize) -> Option<Picos> {
    let hops = torus.hops(from, to)?.len() as u64;
    Some(torus.end_latency + (torus.hop_latency + torus.rate.time(64)) * hops)
}
