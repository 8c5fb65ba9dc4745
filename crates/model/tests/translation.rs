//! IOMMU and ATS: what misses of the translation caches cost, against values computed by hand.

use millstream_model::Parameters;
use millstream_model::benchmarks::perftest::{bandwidth, latency};
use millstream_model::component::translation::TranslationCache;
use millstream_model::explain::explain;
use millstream_model::flows::{Routing, concurrent};
use millstream_model::path::{PathEnd, PeerRoute, TargetMemory, Verb, data_path};
use millstream_model::sites::SHIPPED;
use millstream_site::{Site, parse};

/// The NDR pair of the CXL site, with an IOMMU and ATS on both hosts.
fn site(iommu: Option<(&str, &str)>, ats: bool) -> Site {
    let text = SHIPPED.iter().find(|(name, _)| *name == "cxl-memory").unwrap().1;
    let mut text = text.to_owned();
    if let Some((page, footprint)) = iommu {
        let field = format!("count = 2\niommu = {{ page = \"{page}\", footprint = \"{footprint}\" }}\n");
        text = text.replace("count = 2\n", &field);
    }
    if ats {
        let pcie = "pcie = { generation = 5, lanes = 16 }\n";
        text = text.replacen(pcie, &format!("{pcie}ats = true\n"), 1);
    }
    parse("site.toml", &text).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

fn end(site: &Site, p: &Parameters) -> PathEnd {
    data_path(site, p, "node0", "node1").unwrap().ends[0].clone()
}

fn rate(site: &Site, p: &Parameters, size: u32) -> f64 {
    bandwidth(&data_path(site, p, "node0", "node1").unwrap(), Verb::Write, size, 128, false)
        .rate
        .as_gigabytes()
}

fn time(site: &Site, p: &Parameters, verb: Verb, size: u32) -> f64 {
    latency(&data_path(site, p, "node0", "node1").unwrap(), verb, size).nanos()
}

fn near(a: f64, b: f64, part: f64) -> bool {
    (a / b - 1.0).abs() <= part
}

#[test]
fn nothing_is_translated_unless_the_site_says_so() {
    let p = Parameters::shipped();
    assert!(end(&site(None, false), &p).translation.is_none());
    let report = explain(&site(None, false), &p, &"write node0 node1".parse().unwrap(), 0).unwrap();
    assert!(report.translation.is_none() && !report.to_string().contains("translation"));
}

#[test]
fn a_footprint_within_the_cache_costs_nothing() {
    let p = Parameters::shipped();
    let (free, small) = (site(None, false), site(Some(("4 KiB", "128 KiB")), false));
    assert_eq!(end(&small, &p).translation.unwrap().miss_share, 0.0);
    assert!(near(rate(&small, &p, 65536), rate(&free, &p, 65536), 1e-3));
    assert!(near(time(&small, &p, Verb::Write, 64), time(&free, &p, Verb::Write, 64), 1e-9));
    // 64 entries of 2 MiB hold 128 MiB.
    assert_eq!(end(&site(Some(("2 MiB", "128 MiB")), false), &p).translation.unwrap().miss_share, 0.0);
}

#[test]
fn hit_shares_follow_from_entries_page_and_footprint() {
    let p = Parameters::shipped();
    let share = |iommu, ats| end(&site(Some(iommu), ats), &p).translation.unwrap();
    let entries = p.get("sapphirerapids-sp.iotlb.entries");
    let found = share(("4 KiB", "1 MiB"), false);
    assert_eq!(found.cache, TranslationCache::Iotlb);
    assert!(near(found.miss_share, 1.0 - entries / 256.0, 1e-12));
    let found = share(("4 KiB", "4 MiB"), true);
    assert_eq!(found.cache, TranslationCache::Device);
    assert!(near(found.miss_share, 1.0 - p.get("connectx-7.atc.entries") / 1024.0, 1e-12));
    // The round trip: two ways over PCIe, the translation agent, and the page walks of its own misses.
    let walk = (1.0 - entries / 1024.0) * p.get("sapphirerapids-sp.iotlb.walk.latency");
    let expected = 2.0 * p.get("pcie.link.latency") + p.get("sapphirerapids-sp.ats.latency") + walk;
    assert!(near(found.miss.nanos(), expected, 1e-6), "{found:?}");
}

#[test]
fn a_miss_of_every_page_adds_its_time_to_a_message() {
    let p = Parameters::shipped();
    let (free, large) = (site(None, false), site(Some(("4 KiB", "64 GiB")), false));
    let translation = end(&large, &p).translation.unwrap();
    assert!(translation.miss_share > 0.999);
    let mean = translation.miss_share * (translation.miss + translation.interval[1]).nanos();
    // A small WRITE is inline: only the receiver's DMA is translated.
    let added = time(&large, &p, Verb::Write, 8) - time(&free, &p, Verb::Write, 8);
    assert!((added - mean).abs() < 2.0, "{added} of {mean}");
    // A READ is fetched at one end and written at the other.
    let added = time(&large, &p, Verb::Read, 8) - time(&free, &p, Verb::Read, 8);
    let both = mean + translation.miss_share * (translation.miss + translation.interval[0]).nanos();
    assert!((added - both).abs() < 4.0, "{added} of {both}");
}

#[test]
fn page_walks_limit_short_messages_and_streams() {
    let p = Parameters::shipped().with("sapphirerapids-sp.iotlb.walk.write", 400.0);
    let large = site(Some(("4 KiB", "64 GiB")), false);
    let translation = end(&large, &p).translation.unwrap();
    // One walk for each page of 4 KiB, 400 ns apart.
    let expected = 4096.0 / (400.0 * translation.miss_share);
    assert!(near(rate(&large, &p, 1 << 20), expected, 0.02), "{} of {expected}", rate(&large, &p, 1 << 20));
    let report = explain(&large, &p, &"write node0 node1".parse().unwrap(), 0).unwrap();
    assert_eq!(report.bottleneck(), "server translation", "{report}");
    let cost = report.translation.unwrap();
    let free = rate(&site(None, false), &p, 1 << 20);
    assert!(near(cost.bandwidth, 1.0 - expected / free, 0.05), "{cost:?}");
    let text = report.to_string();
    assert!(
        text.contains("address translation:") && text.contains("IOTLB hits 0 % of 4 KiB pages"),
        "{text}"
    );
    // Pages of 2 MiB have 512 times fewer walks.
    assert!(near(rate(&site(Some(("2 MiB", "64 GiB")), false), &p, 1 << 20), free, 0.01));
}

#[test]
fn requests_in_flight_limit_ats() {
    let p = Parameters::shipped().with("connectx-7.atc.requests", 1.0);
    let large = site(Some(("4 KiB", "64 GiB")), true);
    let translation = end(&large, &p).translation.unwrap();
    let expected = 4096.0 / (translation.miss.nanos() * translation.miss_share);
    let found = rate(&large, &p, 1 << 20);
    assert!(near(found, expected, 0.03), "{found} of {expected}");
    let more = rate(&large, &p.with("connectx-7.atc.requests", 16.0), 1 << 20);
    assert!(more > 3.0 * found, "{more} of {found}");
    let text = explain(&large, &p, &"write node0 node1".parse().unwrap(), 0).unwrap().to_string();
    assert!(text.contains("ATC (ATS) hits"), "{text}");
}

#[test]
fn every_byte_arrives_in_order_whatever_misses() {
    let p = Parameters::shipped();
    for (page, footprint) in [("4 KiB", "300 KiB"), ("4 KiB", "8 MiB"), ("64 KiB", "1 GiB")] {
        for ats in [false, true] {
            let site = site(Some((page, footprint)), ats);
            for size in [1, 4096, 4097, 10_000, 1 << 18] {
                for verb in [Verb::Write, Verb::Read, Verb::Send] {
                    let path = data_path(&site, &p, "node0", "node1").unwrap();
                    let rate = bandwidth(&path, verb, size, 16, true).rate.as_gigabytes();
                    assert!(rate > 0.0 && rate < 100.0, "{verb:?} {size}: {rate}");
                }
            }
        }
    }
}

const PEERS: &str = r#"name = "peers"
[[host]]
name = "a"
IOMMU
[[host.socket]]
processor = "EPYC 7742"
cores = 64
clock = "2.25 GHz"
[[host.pcie-switch]]
name = "sw"
model = "PEX88096"
parent = "socket0"
pcie = { generation = 4, lanes = 16 }
[[host.adapter]]
name = "hca"
model = "ConnectX-6 Dx"
parent = "sw"
pcie = { generation = 4, lanes = 16 }
ATS
[[host.card]]
name = "gpu"
model = "A100"
parent = "sw"
pcie = { generation = 4, lanes = 16 }
memory = { kind = "HBM2e", size = "40 GiB", channels = 40, width = 256, clock = "1200 MHz" }
[[host]]
name = "b"
[[host.socket]]
processor = "EPYC 7742"
cores = 64
clock = "2.25 GHz"
[[host.adapter]]
name = "hca"
model = "ConnectX-6 Dx"
parent = "socket0"
pcie = { generation = 4, lanes = 16 }
[[link]]
from = "a.hca"
to = "b.hca"
rate = "HDR"
"#;

#[test]
fn transfers_between_peers_turn_at_the_root_complex_without_ats() {
    let p = Parameters::shipped();
    let route = |iommu: &str, ats: &str| {
        let site = parse("peers.toml", &PEERS.replace("IOMMU", iommu).replace("ATS", ats)).unwrap();
        let path = data_path(&site, &p, "b", "a.gpu").unwrap();
        let TargetMemory::Card(card) = &path.ends[1].target else { panic!("{path:?}") };
        let flows = [&"write b a.gpu".parse().unwrap()].map(Clone::clone);
        let rate =
            concurrent(&site, &p, &flows, Routing::Deterministic).unwrap().remove(0).alone.as_gigabytes();
        (card.route, path.ends[1].uplinks.len(), rate)
    };
    let on = "iommu = { page = \"4 KiB\", footprint = \"1 GiB\" }";
    let (direct, uplinks, fast) = route("", "");
    assert!(matches!(direct, PeerRoute::Switch { .. }) && uplinks == 0, "{direct:?}");
    let (redirected, uplinks, slow) = route(on, "");
    assert!(matches!(redirected, PeerRoute::RootComplex { .. }) && uplinks == 1, "{redirected:?}");
    assert!(slow <= p.get("rome.p2p.write.rate") * (1.0 + 1e-9) && slow < 0.8 * fast, "{slow} of {fast}");
    let (with_ats, uplinks, _) = route(on, "ats = true");
    assert!(matches!(with_ats, PeerRoute::Switch { .. }) && uplinks == 0, "{with_ats:?}");
}
