//! From a site and parameters to what the tools take.

use crate::engine::{Picos, Rate};
use crate::parameters::Parameters;
use crate::part::memory::Timing;
use crate::part::pcie;
use crate::tool::apenet;
use crate::tool::hbm::Hbm;
use crate::tool::osu::{self, Mpi};
use crate::tool::perftest;
use crate::tool::torus::{Step, Torus};
use crate::tool::verbs::{Adapter, Card, Leg, OVERHEAD, Setup, Side, Target, Translation, Verb, Via};
use millstream_site::check::{CardMemory, End, Parent};
use millstream_site::{DeviceId, DeviceKind, HostId, Site, Wire};

/// A flow that a site cannot carry.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SetupError {
    /// The site has no such host or card.
    #[error("{0:?} is no host and no host.card of this site")]
    Unknown(String),
    /// The two are the same host.
    #[error("{0:?} and {1:?} are one host: the model's flows go from host to host")]
    SameHost(String, String),
    /// No link leads from one host to the other.
    #[error("no link leads from {0:?} to {1:?}")]
    NoLink(String, String),
}

/// Memory at one end of a flow.
#[derive(Clone, Copy, Debug)]
struct Place {
    host: HostId,
    card: Option<DeviceId>,
}

/// Which adapters, with their software, a host has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Make {
    /// InfiniBand adapters of the ConnectX line; others of InfiniBand are taken for such.
    ConnectX,
    /// The torus' FPGA.
    Apenet,
    /// EXTOLL's FPGA.
    Extoll,
}

fn make(model: &str) -> Make {
    match model.to_lowercase() {
        name if name.contains("apenet") => Make::Apenet,
        name if name.contains("extoll") => Make::Extoll,
        _ => Make::ConnectX,
    }
}

fn place(site: &Site, name: &str) -> Result<Place, SetupError> {
    let unknown = || SetupError::Unknown(name.to_owned());
    match site.hosts.iter().position(|host| host.name == name) {
        Some(host) => Ok(Place { host: HostId(host), card: None }),
        None => {
            let (host, card) = site.device(name).ok_or_else(unknown)?;
            let is_card = matches!(site.hosts[host.0].devices[card.0].kind, DeviceKind::Card(_));
            if is_card { Ok(Place { host, card: Some(card) }) } else { Err(unknown()) }
        }
    }
}

/// The name under which a processor's parameters are.
fn family(processor: &str) -> &'static str {
    let name = processor.to_lowercase();
    let known = [("epyc", "rome"), ("rome", "rome"), ("skylake", "skylake-sp"), ("v4", "broadwell-ep")];
    known.into_iter().find(|(word, _)| name.contains(word)).map_or("skylake-sp", |(_, family)| family)
}

/// The link, or the two links over one switch, between two hosts.
struct Hop<'a> {
    wire: &'a Wire,
    adapters: [DeviceId; 2],
    switch: Option<usize>,
}

fn hop(site: &Site, from: HostId, to: HostId) -> Option<Hop<'_>> {
    let ends = |wire: &Wire, host: HostId| match (wire.from, wire.to) {
        (End::Adapter(a, d), other) if a == host => Some((d, other)),
        (other, End::Adapter(b, d)) if b == host => Some((d, other)),
        _ => None,
    };
    site.wires.iter().find_map(|wire| {
        let (mine, other) = ends(wire, from)?;
        match other {
            End::Adapter(host, device) if host == to => {
                Some(Hop { wire, adapters: [mine, device], switch: None })
            }
            End::Adapter(..) => None,
            End::Switch(switch) => site.wires.iter().find_map(|second| {
                let (theirs, other) = ends(second, to)?;
                (other == End::Switch(switch)).then_some(Hop {
                    wire,
                    adapters: [mine, theirs],
                    switch: Some(switch),
                })
            }),
        }
    })
}

/// HBM as parameters have it, at a port of that clock and width.
#[must_use]
pub fn hbm(p: &Parameters, memory: Option<&CardMemory>) -> Hbm {
    let rate = memory.map_or(14.4e9, |m| m.clock * f64::from(m.width));
    Hbm {
        rate: Rate(rate),
        row_cycle: p.nanos("hbm.row.cycle"),
        banks: p.count("hbm.banks"),
        refresh_interval: p.nanos("hbm.refresh.interval"),
        refresh_cycle: p.nanos("hbm.refresh.cycle"),
        turnaround: p.nanos("hbm.port.turnaround"),
    }
}

/// A host's root complex and memory.
#[must_use]
pub fn host_memory(p: &Parameters) -> Timing {
    Timing {
        read_latency: p.nanos("cpu.read.latency"),
        write_latency: p.nanos("cpu.write.latency"),
        reads: 256,
        rate: Rate::gigabytes(60.0),
        gap: Picos::ZERO,
        completion: 256,
        short_completion: p.count("pcie.completion.short"),
    }
}

/// What a card's inlet answers a peer's reads with, where that is known to be less than its memory.
fn answers(p: &Parameters, model: &str, wire: Rate) -> Rate {
    // Fermi: the GPUs of APEnet+'s time.
    if ["M20", "C20", "S20"].iter().any(|fermi| model.contains(fermi)) {
        p.gigabytes("apenet.gpu.read.rate")
    } else if model.contains("Phi") {
        Rate(wire.0 * p.get("extoll.payload.share") * p.get("extoll.mic.share"))
    } else {
        Rate(f64::INFINITY)
    }
}

fn card_timing(p: &Parameters, model: &str, memory: &CardMemory, payload: u32) -> (Timing, u64) {
    let name = |what: &str| format!("{}.{what}", if model.contains("U280") { "u280" } else { "gpu" });
    let hbm = hbm(p, Some(memory));
    // A U280's port can be slower than its pseudo channel of 64 bit at 1.8 GT/s.
    let behind = if model.contains("U280") { 14.4e9 * hbm.refresh_share() } else { f64::INFINITY };
    // The memory's own clock scales its part of the latencies, the bridge's does not.
    let at_450 = p.get("hbm.port.turnaround");
    let memory_part = at_450 * 450e6 / memory.clock;
    let bridge = p.get(&name("write.round")) - at_450;
    let timing = Timing {
        read_latency: Picos::from_nanos(p.get(&name("bridge.latency")) + memory_part),
        write_latency: Picos::from_nanos(bridge + memory_part),
        reads: p.count(&name("reads")),
        // The port or the memory behind it, which runs at its own clock and has refresh to do.
        rate: Rate((hbm.rate.0 * p.get("hbm.port.share")).min(behind)),
        gap: Picos::ZERO,
        completion: payload,
        short_completion: payload,
    };
    (timing, u64::from(p.count(&name("writes")) * payload))
}

/// ConnectX adapters and their software.
#[must_use]
pub fn adapter(p: &Parameters) -> Adapter {
    Adapter {
        post: p.nanos("adapter.post"),
        poll: p.nanos("adapter.poll"),
        tx_latency: p.nanos("adapter.tx.latency"),
        rx_latency: p.nanos("adapter.rx.latency"),
        gather_latency: p.nanos("adapter.gather.latency"),
        message_gap: p.nanos("adapter.message.gap"),
        read_window: p.count("adapter.read.window"),
        outstanding_reads: p.count("adapter.outstanding.reads"),
        buffer: p.get("adapter.buffer") as u64,
        inline: 188,
        translation: None,
    }
}

/// The torus' adapters: two DMA engines with a packet each, a table for addresses, channel memory.
fn apenet_adapter(p: &Parameters, buffer: u64) -> Adapter {
    let software = p.get("apenet.translate.software") / p.get("apenet.processor.share");
    Adapter {
        tx_latency: Picos::ZERO,
        rx_latency: Picos::ZERO,
        gather_latency: Picos::ZERO,
        read_window: p.count("apenet.engines") * apenet::PACKET,
        buffer,
        inline: 0,
        translation: Some(Translation {
            hit: p.nanos("apenet.translate.hardware"),
            miss: Picos::from_nanos(software),
            // Zero entries are no table: everything is software.
            entries: p.get("apenet.translate.entries").round() as u32,
            page: p.count("apenet.translate.page"),
        }),
        ..adapter(p)
    }
}

/// EXTOLL's adapters; what is known of them is a latency, which is spread over both ends afterwards.
fn extoll_adapter(p: &Parameters) -> Adapter {
    Adapter {
        tx_latency: Picos::ZERO,
        rx_latency: Picos::ZERO,
        gather_latency: Picos::ZERO,
        inline: 0,
        ..adapter(p)
    }
}

fn side(
    site: &Site,
    p: &Parameters,
    place: Place,
    adapter: DeviceId,
    wire: Rate,
) -> Result<Side, SetupError> {
    let host = &site.hosts[place.host.0];
    let nic = &host.devices[adapter.0];
    let target = match place.card {
        None => Target::Host,
        Some(id) => {
            let card = &host.devices[id.0];
            let DeviceKind::Card(Some(memory)) = &card.kind else {
                return Err(SetupError::Unknown(format!(
                    "{}.{} (a card without memory)",
                    host.name, card.name
                )));
            };
            let via = match (nic.parent, card.parent) {
                (Parent::Switch(a), Parent::Switch(b)) if a == b => {
                    let latency = match &host.devices[a.0].kind {
                        DeviceKind::Switch(Some(latency)) => Picos::from_seconds(latency.0),
                        _ => p.nanos("pcie.switch.latency"),
                    };
                    Via::Switch { latency }
                }
                // A booster node's adapter is the root port itself: nothing of a processor is between.
                _ if host.sockets.iter().all(|socket| make(&socket.processor) == Make::Extoll) => {
                    Via::Switch { latency: p.nanos("pcie.switch.latency") }
                }
                _ => {
                    let processor = host.sockets.first().map_or("", |s| s.processor.as_str());
                    let name = |what: &str| format!("cpu.{}.p2p.{what}", family(processor));
                    let read = name("read.rate");
                    // Where no published number exists, reads go as writes do.
                    let read = if p.has(&read) { read } else { name("write.rate") };
                    Via::RootComplex {
                        write: p.gigabytes(&name("write.rate")),
                        read: p.gigabytes(&read),
                        latency: p.nanos("cpu.p2p.latency"),
                    }
                }
            };
            let (timing, write_window) = card_timing(p, &card.model, memory, card.pcie.max_payload.0);
            let read_rate = answers(p, &card.model, wire);
            Target::Card(Card { pcie: card.pcie, timing, read_rate, write_window, via })
        }
    };
    let memory = host_memory(p);
    let read_latency = match make(&nic.model) {
        Make::Apenet => p.nanos("apenet.read.latency"),
        Make::ConnectX | Make::Extoll => memory.read_latency,
    };
    // A completion is at most as long as the link's payload.
    let completion = memory.completion.min(nic.pcie.max_payload.0);
    Ok(Side { pcie: nic.pcie, target, host: Timing { read_latency, completion, ..memory } })
}

/// The way through a torus: the first link, and those after it in both directions.
struct Ring<'a> {
    wire: &'a Wire,
    adapters: [DeviceId; 2],
    steps: [Vec<Step>; 2],
    torus: usize,
}

fn ring(site: &Site, from: HostId, to: HostId) -> Option<Ring<'_>> {
    site.tori.iter().enumerate().find_map(|(torus, t)| {
        let place = |host: HostId| t.nodes.iter().position(|(h, _)| *h == host);
        let (a, b) = (place(from)?, place(to)?);
        let ways = Torus { dimensions: t.dimensions.clone(), ..Torus::default() };
        let wire = site.wires.iter().find(|wire| {
            wire.dimension.is_some()
                && [wire.from, wire.to].contains(&End::Adapter(t.nodes[a].0, t.nodes[a].1))
        })?;
        Some(Ring {
            wire,
            adapters: [t.nodes[a].1, t.nodes[b].1],
            steps: [ways.steps(a, b), ways.steps(b, a)],
            torus,
        })
    })
}

/// The links of a way after its first.
fn further(site: &Site, ring: &Ring<'_>, steps: &[Step], rate: Rate, hop: Picos) -> Vec<Leg> {
    let nodes = &site.tori[ring.torus].nodes;
    let buffer = ring.wire.buffer.map_or(u64::MAX, |buffer| buffer.0 as u64);
    (steps.iter().skip(1))
        .map(|step| {
            let host = &site.hosts[nodes[step.node].0.0].name;
            let way = format!("{}{}", if step.up { '+' } else { '-' }, ["x", "y", "z"][step.dimension]);
            Leg { name: format!("{host} link {way}"), rate, latency: hop, buffer }
        })
        .collect()
}

/// Gives both adapters equal parts of what is left of a published latency after everything else.
fn fill_up(setup: &mut Setup, published: Picos, measured: impl Fn(&Setup) -> Picos) {
    let further = std::mem::take(&mut setup.further);
    let rest = published - measured(setup);
    setup.further = further;
    setup.adapter.tx_latency = Picos(rest.0 / 2);
    setup.adapter.rx_latency = Picos(rest.0 / 2);
}

fn over_torus(site: &Site, p: &Parameters, ring: &Ring<'_>, a: Place, b: Place) -> Result<Setup, SetupError> {
    let wire = ring.wire.rate;
    let model = &site.hosts[a.host.0].devices[ring.adapters[0].0].model;
    let apenet = make(model) == Make::Apenet;
    let buffer = ring.wire.buffer.map_or(u64::MAX, |buffer| buffer.0 as u64);
    let rate = Rate(wire.0 * p.get("apenet.payload.share") * p.get("apenet.protocol.share"));
    let hop = p.nanos("apenet.hop.latency");
    let mut setup = Setup {
        sides: [
            side(site, p, a, ring.adapters[0], Rate(wire.0))?,
            side(site, p, b, ring.adapters[1], Rate(wire.0))?,
        ],
        adapter: if apenet { apenet_adapter(p, buffer) } else { adapter(p) },
        rate,
        mtu: ring.wire.mtu.0,
        // Headers and stuffing are in the shares of the rate.
        overhead: [0; 4],
        latency: hop,
        further: [0, 1].map(|i| further(site, ring, &ring.steps[i], rate, hop)),
        pcie_efficiency: p.get("pcie.efficiency"),
        pcie_latency: p.nanos("pcie.link.latency"),
    };
    if apenet {
        // Half a round trip between neighbours is published; a GPU at an end adds what is known of it.
        let (from, to) = (a.card.is_some(), b.card.is_some());
        let both = apenet::small_latency(p, from, to) + apenet::small_latency(p, to, from);
        let published = Picos::from_nanos(both / 2.0 * 1e3);
        fill_up(&mut setup, published, |setup| perftest::latency(setup, Verb::Write, SMALL));
    }
    Ok(setup)
}

/// Bytes of a message in a published smallest latency.
const SMALL: u32 = 8;

/// What the tools need for flows between the memories of two hosts or cards.
///
/// # Errors
/// [`SetupError`] if the site has not got them, or no way between them.
pub fn setup(site: &Site, p: &Parameters, client: &str, server: &str) -> Result<Setup, SetupError> {
    let (a, b) = (place(site, client)?, place(site, server)?);
    if a.host == b.host {
        return Err(SetupError::SameHost(client.to_owned(), server.to_owned()));
    }
    if let Some(ring) = ring(site, a.host, b.host) {
        return over_torus(site, p, &ring, a, b);
    }
    let hop =
        hop(site, a.host, b.host).ok_or_else(|| SetupError::NoLink(client.to_owned(), server.to_owned()))?;
    let metres = hop.wire.length.map_or(1.0, |length| length.0);
    let switch = hop.switch.map_or(0.0, |switch| site.switches[switch].latency.0);
    let wire = hop.wire.rate.0;
    let sides =
        [side(site, p, a, hop.adapters[0], Rate(wire))?, side(site, p, b, hop.adapters[1], Rate(wire))?];
    let extoll = make(&site.hosts[a.host.0].devices[hop.adapters[0].0].model) == Make::Extoll;
    let infiniband = wire * p.get("ib.flow.share") * if wire > 10e9 { p.get("ib.fast.share") } else { 1.0 };
    let mut setup = Setup {
        sides,
        adapter: if extoll { extoll_adapter(p) } else { adapter(p) },
        rate: Rate(if extoll { wire * p.get("extoll.payload.share") } else { infiniband }),
        mtu: hop.wire.mtu.0,
        overhead: if extoll { [0; 4] } else { OVERHEAD },
        // 5 ns a metre of copper or glass.
        latency: Picos::from_seconds(metres * 5e-9 + switch),
        further: [Vec::new(), Vec::new()],
        pcie_efficiency: p.get("pcie.efficiency"),
        pcie_latency: p.nanos("pcie.link.latency"),
    };
    if extoll {
        // What is published is the smallest osu_latency.
        let published = Picos::from_nanos(p.get("extoll.latency") * 1e3);
        let mpi = Mpi::new(p);
        fill_up(&mut setup, published, |setup| osu::latency(setup, &mpi, SMALL));
    }
    Ok(setup)
}

/// What one direction of the stencil gets of a bank of a card's memory; none where that is no card with memory.
#[must_use]
pub fn stencil_rate(site: &Site, p: &Parameters, card: &str) -> Option<Rate> {
    let (host, device) = site.device(card)?;
    let DeviceKind::Card(Some(memory)) = &site.hosts[host.0].devices[device.0].kind else { return None };
    let bank = hbm(p, Some(memory));
    Some(Rate(bank.rate.0 * bank.refresh_share() * p.get("u280.stencil.share")))
}

/// Ceiling of a PCIe link for writes, after flow control.
#[must_use]
pub fn pcie_ceiling(setup: &Setup, side: usize) -> Rate {
    let link = &setup.sides[side].pcie;
    let raw = pcie::raw_rate(link.generation.0, link.lanes.0);
    let payload = u64::from(link.max_payload.0);
    pcie::write_ceiling(Rate(raw.0 * setup.pcie_efficiency), payload, payload)
}
