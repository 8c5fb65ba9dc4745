//! Paths over tori: the route of `torus-core`, its links, the adapters at its ends.

use super::resolve::{APENET, Place, SMALL, path_end, split_residual_latency};
use super::{DataPath, NetworkHop, PathError, Verb};
use crate::benchmarks::torus::{Torus, TorusHop, dead_links};
use crate::benchmarks::{apenet, perftest};
use crate::engine::{BytesPerSecond, Picos};
use crate::parameters::Parameters;
use millstream_site::validate::LinkEnd;
use millstream_site::{DeviceId, HostId, NetworkLink, Site};

/// A route through a torus: its first link and the hops of both directions.
pub(crate) struct TorusPath<'a> {
    pub(crate) link: &'a NetworkLink,
    pub(crate) adapters: [DeviceId; 2],
    pub(crate) hops: [Vec<TorusHop>; 2],
    pub(crate) torus: usize,
}

pub(crate) fn torus_path(site: &Site, from: HostId, to: HostId) -> Option<TorusPath<'_>> {
    site.tori.iter().enumerate().find_map(|(torus, t)| {
        let position = |host: HostId| t.nodes.iter().position(|(h, _)| *h == host);
        let (a, b) = (position(from)?, position(to)?);
        let dead = dead_links(site, t);
        let routing = Torus { dimensions: t.dimensions.clone(), dead, ..Torus::default() };
        let link = site.links.iter().find(|link| {
            link.dimension.is_some()
                && [link.from, link.to].contains(&LinkEnd::Adapter(t.nodes[a].0, t.nodes[a].1))
        })?;
        Some(TorusPath {
            link,
            adapters: [t.nodes[a].1, t.nodes[b].1],
            hops: [routing.hops(a, b)?, routing.hops(b, a)?],
            torus,
        })
    })
}

/// The hops of a route after the first.
fn later_hops(
    site: &Site,
    torus_path: &TorusPath<'_>,
    hops: &[TorusHop],
    rate: BytesPerSecond,
    latency: Picos,
) -> Vec<NetworkHop> {
    let nodes = &site.tori[torus_path.torus].nodes;
    let buffer = torus_path.link.buffer.map_or(u64::MAX, |buffer| buffer.0);
    (hops.iter().skip(1))
        .map(|hop| {
            let host = &site.hosts[nodes[hop.node].0.0].name;
            let direction = if hop.positive { '+' } else { '-' };
            let dimension = ["x", "y", "z"][hop.dimension];
            NetworkHop {
                name: format!("{host} link {direction}{dimension}"),
                rate,
                latency,
                buffer,
                loss: 0.0,
            }
        })
        .collect()
}

/// Path between two memories whose hosts are nodes of a torus.
pub(super) fn data_path_over_torus(
    site: &Site,
    p: &Parameters,
    torus_path: &TorusPath<'_>,
    a: Place,
    b: Place,
) -> Result<DataPath, PathError> {
    let link_rate = torus_path.link.rate;
    let apenet = site.hosts[a.host.0].devices[torus_path.adapters[0].0].id == APENET;
    let buffer = torus_path.link.buffer.map_or(u64::MAX, |buffer| buffer.0);
    let rate = BytesPerSecond(
        link_rate.0 * p.get("apenet.payload.efficiency") * p.get("apenet.protocol.efficiency"),
    );
    let hop_latency = p.nanos("apenet.hop.latency");
    let mut path = DataPath {
        ends: [
            path_end(site, p, a, torus_path.adapters[0], BytesPerSecond(link_rate.0))?,
            path_end(site, p, b, torus_path.adapters[1], BytesPerSecond(link_rate.0))?,
        ],
        link_rate: BytesPerSecond(link_rate.0),
        rate,
        mtu: torus_path.link.mtu.0,
        // The shares of the rate include headers and stuffing.
        overhead: [0; 4],
        latency: hop_latency,
        loss: 0.0,
        first_hops: None,
        later_hops: [0, 1].map(|i| later_hops(site, torus_path, &torus_path.hops[i], rate, hop_latency)),
        pcie_latency: p.nanos("pcie.link.latency"),
    };
    for end in &mut path.ends {
        end.adapter.rx_buffer = buffer;
    }
    if apenet {
        // Half a round trip between neighbours is published; GPU ends add their known latencies.
        let (from, to) = (a.device.is_some(), b.device.is_some());
        let both = apenet::small_latency(p, from, to) + apenet::small_latency(p, to, from);
        let published = Picos::from_nanos(both / 2.0 * 1e3);
        split_residual_latency(&mut path, published, |path| perftest::latency(path, Verb::Write, SMALL));
    }
    Ok(path)
}
