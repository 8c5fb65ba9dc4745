//! Writes between cards of one host through PCIe switches, without processor and memory.

use crate::component::pcie;
use crate::engine::{BytesPerSecond, Picos};
use crate::parameters::Parameters;
use crate::path::{PathError, PeerRoute, negotiated_link, pcie_efficiency, peer_route, switch_latency};
use millstream_site::{Device, Site};

/// Largest payload rate of writes over a device's PCIe link.
#[must_use]
pub fn write_ceiling(p: &Parameters, device: &Device) -> BytesPerSecond {
    BytesPerSecond(pcie::payload_rate(&device.pcie).0 * pcie_efficiency(p, &device.id))
}

/// Latency of a link, and time of a write of `size` bytes on a link.
fn on_link(p: &Parameters, link: &millstream_site::schema::PcieLink, size: u32) -> Picos {
    let raw = pcie::raw_rate(link.generation.0, link.lanes.0);
    let overhead = pcie::overhead(link.generation.0)[usize::from(pcie::MEMORY_WRITE)];
    let time = raw.time(u64::from(size) + u64::from(overhead));
    p.nanos("pcie.link.latency") + time
}

/// Time from the issue of a write of `size` bytes in one card until it is in the other.
///
/// # Errors
/// [`PathError`] if the cards are not two cards of one host.
pub fn write_latency(
    site: &Site,
    p: &Parameters,
    from: &str,
    to: &str,
    size: u32,
) -> Result<Picos, PathError> {
    let p = &*p.with_devices(&site.devices);
    let find = |name: &str| site.device(name).ok_or_else(|| PathError::Unknown(name.to_owned()));
    let ((host, from_card), (other, to_card)) = (find(from)?, find(to)?);
    if host != other || from_card == to_card {
        return Err(PathError::Unknown(to.to_owned()));
    }
    let host = &site.hosts[host.0];
    let cards = [&host.devices[from_card.0], &host.devices[to_card.0]];
    let route = match peer_route(p, host, cards[0], cards[1]) {
        PeerRoute::Switch { latency } | PeerRoute::RootComplex { latency, .. } => latency,
    };
    let ends = cards.iter().fold(Picos::ZERO, |sum, card| {
        let endpoint = p.device(&card.id, "write.latency").unwrap_or(0.0);
        sum + Picos::from_nanos(endpoint) + on_link(p, &negotiated_link(host, card), size)
    });
    Ok(ends + route)
}

/// Latency that a PCIe switch adds to a path, with one more link.
///
/// # Errors
/// [`PathError`] if the site has no such switch.
pub fn switch_hop(site: &Site, p: &Parameters, switch: &str) -> Result<Picos, PathError> {
    let p = &*p.with_devices(&site.devices);
    let (host, device) = site.device(switch).ok_or_else(|| PathError::Unknown(switch.to_owned()))?;
    let host = &site.hosts[host.0];
    let link = negotiated_link(host, &host.devices[device.0]);
    Ok(switch_latency(p, host, device) + on_link(p, &link, 0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sites::shipped;

    #[test]
    fn a_write_takes_the_switch_two_links_and_both_cards() {
        let (p, site) = (Parameters::shipped(), shipped("fpga-peers"));
        let small = write_latency(&site, &p, "node.a", "node.b", 4).unwrap();
        let hop = switch_hop(&site, &p, "node.sw").unwrap();
        assert!(small > hop + p.nanos("virtex-7.write.latency") * 2, "{small:?}");
        let large = write_latency(&site, &p, "node.a", "node.b", 128).unwrap();
        let more = (large - small).nanos();
        // 124 bytes more at 2 GB/s, on each of two links.
        assert!((more - 124.0).abs() < 1.0, "{more} ns");
        assert!(write_latency(&site, &p, "node.a", "node.a", 4).is_err());
        assert!(switch_hop(&site, &p, "node.none").is_err());
    }
}
