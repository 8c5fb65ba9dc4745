//! The hops of a data path by name, from memory to memory.

use crate::component::cxl::{self, CxlHop, CxlTiming};
use crate::component::pcie;
use crate::component::translation::{DmaTranslation, TranslationCache};
use crate::engine::{BytesPerSecond, Picos};
use crate::parameters::Parameters;
use crate::path::{DataPath, PathEnd, PathError, PeerRoute, TargetMemory, Verb, data_path};
use millstream_quantity::Bytes;
use millstream_site::Site;
use millstream_site::schema::PcieLink;

/// One hop of a data path.
#[derive(Clone, Debug, PartialEq)]
pub struct Hop {
    /// What it is.
    pub name: String,
    /// Largest rate of payload; infinite if the hop only delays.
    pub rate: BytesPerSecond,
    /// One-way latency; of memory, that of a read.
    pub latency: Picos,
}

fn link_hop(name: &str, link: &PcieLink, efficiency: f64, latency: Picos) -> Hop {
    Hop {
        name: format!(
            "{name}: PCIe Gen{} x{}, MPS {}, MRRS {}",
            link.generation.0, link.lanes.0, link.max_payload.0, link.max_read_request.0
        ),
        rate: BytesPerSecond(pcie::payload_rate(link).0 * efficiency),
        latency,
    }
}

/// The memory behind CXL links and the links, the memory's first; rates are those of whole lines in one direction.
pub(crate) fn cxl_hops(place: &str, timing: &CxlTiming) -> Vec<Hop> {
    let host = place.split('.').next().unwrap_or(place);
    let memory =
        Hop { name: format!("{place} memory"), rate: timing.memory_rate, latency: timing.read_latency };
    let link = |hop: &CxlHop| {
        let [reads, writes] =
            [false, true].map(|is_write| cxl::payload_rate(&hop.link, timing.efficiency, is_write));
        let of = match hop.switch.as_str() {
            "" => place.to_owned(),
            switch => format!("{host}.{switch} uplink"),
        };
        let name = format!("{of}: {} (writes: {:.1} GB/s)", hop.link, writes.as_gigabytes());
        Hop { name, rate: reads, latency: hop.latency }
    };
    std::iter::once(memory).chain(timing.hops.iter().rev().map(link)).collect()
}

/// Translation of addresses; its latency is the mean of first accesses to a page.
fn translation_hop(host: &str, translation: &DmaTranslation) -> Hop {
    let cache = match translation.cache {
        TranslationCache::Iotlb => "IOTLB",
        TranslationCache::Device => "ATC (ATS)",
    };
    let DmaTranslation { page, miss_share, miss, interval, .. } = *translation;
    let slowest = interval[0].max(interval[1]);
    Hop {
        name: format!(
            "{host} translation: {cache} hits {:.0} % of {} pages, {:.0} ns a miss",
            (1.0 - miss_share) * 100.0,
            Bytes(page).binary(),
            miss.nanos()
        ),
        rate: BytesPerSecond(page as f64 / (miss_share * slowest.seconds())),
        latency: Picos::from_nanos(miss_share * miss.nanos()),
    }
}

/// Hops of one end, from memory to the adapter. The adapter reads from a source and writes to a target.
fn end_hops(place: &str, end: &PathEnd, link_latency: Picos, is_source: bool) -> Vec<Hop> {
    let host = place.split('.').next().unwrap_or(place);
    let efficiency = end.pcie_efficiency;
    let device = |name: String, link: &PcieLink| link_hop(&name, link, efficiency, link_latency);
    let mut hops = Vec::new();
    match &end.target {
        TargetMemory::Host => {
            let (rate, latency) = (end.host.rate, end.host.read_latency);
            hops.push(Hop { name: format!("{host} memory"), rate, latency });
        }
        TargetMemory::Cxl(target) => {
            hops.extend(cxl_hops(place, &target.timing));
            let latency = target.home.read_latency;
            let name = format!("{host} root complex, to CXL");
            hops.push(Hop { name, rate: BytesPerSecond(f64::INFINITY), latency });
        }
        TargetMemory::Card(card) => {
            let most = if is_source { card.read_rate.0 } else { f64::INFINITY };
            let (rate, latency) = (BytesPerSecond(card.timing.rate.0.min(most)), card.timing.read_latency);
            hops.push(Hop { name: format!("{place} memory"), rate, latency });
            hops.push(device(place.to_owned(), &card.pcie));
            for uplink in &card.uplinks {
                hops.push(device(format!("{host}.{} uplink", uplink.name), &uplink.pcie));
            }
            hops.push(match card.route {
                PeerRoute::RootComplex { write, read, latency } => {
                    let rate = if is_source { read } else { write };
                    Hop { name: format!("{host} root complex, peer to peer"), rate, latency }
                }
                PeerRoute::Switch { latency } => Hop {
                    name: format!("{host} PCIe switch, peer to peer"),
                    rate: BytesPerSecond(f64::INFINITY),
                    latency,
                },
            });
        }
    }
    hops.extend(end.translation.map(|translation| translation_hop(host, &translation)));
    for uplink in end.uplinks.iter().rev() {
        let name = format!("{host}.{} uplink", uplink.name);
        hops.push(link_hop(&name, &uplink.pcie, efficiency, link_latency + uplink.latency));
    }
    hops.push(device(format!("{host} adapter"), &end.pcie));
    hops
}

/// Names, rates and latencies of everything between two memories, for RDMA WRITEs.
///
/// # Errors
/// [`PathError`] if the site has no path between them.
pub fn hops(site: &Site, p: &Parameters, client: &str, server: &str) -> Result<Vec<Hop>, PathError> {
    let path = data_path(site, p, client, server)?;
    Ok(path_hops(&path, Verb::Write, client, server))
}

pub(crate) fn path_hops(path: &DataPath, verb: Verb, client: &str, server: &str) -> Vec<Hop> {
    let is_read = verb == Verb::Read;
    let mut all = end_hops(client, &path.ends[0], path.pcie_latency, !is_read);
    let network = path.network_hops(0).into_iter().map(|hop| {
        let payload = f64::from(path.mtu);
        let share = payload / (payload + f64::from(path.overhead[0]));
        let lost =
            if hop.loss > 0.0 { format!(", loses {} of its packets", hop.loss) } else { String::new() };
        Hop { name: hop.name + &lost, rate: BytesPerSecond(hop.rate.0 * share), latency: hop.latency }
    });
    all.extend(network);
    let mut far = end_hops(server, &path.ends[1], path.pcie_latency, is_read);
    far.reverse();
    all.extend(far);
    all
}
