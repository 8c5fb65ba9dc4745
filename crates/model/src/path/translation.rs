//! Translation of an adapter's DMA addresses: timing from the site and the device library.

use super::resolve::fact;
use crate::component::translation::{DmaTranslation, TranslationCache, miss_share};
use crate::engine::Picos;
use crate::parameters::Parameters;
use millstream_site::iommu::Iommu;
use millstream_site::{Device, Host};

/// Translation of an adapter's DMA by the IOMMU of its host, whose processor has this library id; none if it is off.
pub(super) fn of_adapter(
    p: &Parameters,
    host: &Host,
    adapter: &Device,
    processor: &str,
) -> Option<DmaTranslation> {
    let Iommu { page, footprint } = host.iommu?;
    let of_processor = |value: &str| fact(p, processor, "processor", value);
    let misses = |entries: f64| miss_share(entries, page.0 as f64, footprint.0 as f64);
    let (walk, at_root) = (of_processor("iotlb.walk.latency"), misses(of_processor("iotlb.entries")));
    let entries = if adapter.ats { p.device(&adapter.id, "atc.entries") } else { None };
    let Some(entries) = entries else {
        let interval =
            ["iotlb.walk.read", "iotlb.walk.write"].map(|value| Picos::from_nanos(of_processor(value)));
        return Some(DmaTranslation {
            cache: TranslationCache::Iotlb,
            page: page.0,
            miss_share: at_root,
            miss: Picos::from_nanos(walk),
            interval,
        });
    };
    // A page that the device's cache lacks is in the IOTLB as often as any page.
    let round_trip = 2.0 * p.get("pcie.link.latency") + of_processor("ats.latency") + at_root * walk;
    let requests = p.device(&adapter.id, "atc.requests").unwrap_or(1.0).max(1.0);
    // The page walks of requests in flight overlap no more than others.
    let interval = (round_trip / requests).max(at_root * of_processor("iotlb.walk.read"));
    Some(DmaTranslation {
        cache: TranslationCache::Device,
        page: page.0,
        miss_share: misses(entries),
        miss: Picos::from_nanos(round_trip),
        interval: [Picos::from_nanos(interval); 2],
    })
}
