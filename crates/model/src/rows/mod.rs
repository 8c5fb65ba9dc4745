//! Rows of the published tables, and which modelled measurement answers each.

mod csv;

pub(crate) use csv::quote;
pub use csv::{CsvError, calibration, load, parse, questions};

use crate::benchmarks::dma::{self, DmaEngine, DmaHost, DmaTest};
use crate::benchmarks::hbm::{AccessPattern, read};
use crate::benchmarks::perftest::{bandwidth, latency};
use crate::benchmarks::{apenet, extoll};
use crate::component::completer::CompleterTiming;
use crate::engine::BytesPerSecond;
use crate::parameters::Parameters;
use crate::path::{DataPath, Verb};
use crate::path::{data_path, hbm, host_completer};
use crate::sites::{shipped, shipped_with};
use millstream_site::Site;
use millstream_site::schema::{Generation, PayloadSize, PcieLanes, PcieLink};

/// A row: a measurement somebody published, or asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Its name in the table.
    pub id: String,
    /// What was measured on.
    pub system: String,
    /// What was measured.
    pub quantity: String,
    /// The published value, as printed; empty in a question.
    pub value: String,
    /// Its unit.
    pub unit: String,
    /// Under which conditions.
    pub conditions: String,
}

/// What the model says about a row.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// Values in the row's unit; most rows have one.
    Values {
        /// The values.
        values: Vec<f64>,
        /// By which measurement.
        how: &'static str,
    },
    /// A definition or constant that the model is built on, and where.
    Definition(&'static str),
    /// The model has nothing to say, and why.
    NotModelled(&'static str),
}

/// Rows with something in common: their residuals say how far to trust the model there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Category {
    /// DMA bandwidth of the programmable adapter.
    DmaBandwidth,
    /// DMA latency of the programmable adapter.
    DmaLatency,
    /// HBM.
    Hbm,
    /// Bandwidth of adapters.
    Bandwidth,
    /// Latency of adapters.
    Latency,
    /// Bandwidth into a card as a peer.
    Peer,
    /// A size at which something changes: the model's steps are powers of two.
    Threshold,
    /// Whole applications and older systems, where few numbers fit many parameters.
    System,
}

impl Row {
    /// Its family.
    #[must_use]
    pub fn category(&self) -> Category {
        let is = |word: &str| self.quantity.contains(word);
        match self.system.as_str() {
            s if s.starts_with("pcie-bench") && is("BW_") => Category::DmaBandwidth,
            s if s.starts_with("pcie-bench") => Category::DmaLatency,
            "U280-HBM" => Category::Hbm,
            s if s.starts_with("EDR ConnectX") || is("ib_write_lat") => Category::Latency,
            "Cilardo2021" if is("Path 2") || is("Path 3") => Category::Peer,
            "external-P2P" if is("GPU") => Category::Peer,
            "Cilardo2021" | "InfiniBand" | "external-P2P" | "EDR host-to-host" | "100G IB host-to-host" => {
                Category::Bandwidth
            }
            _ if is("plateau is reached") || is("beats staged") => Category::Threshold,
            "LHCb-EB" if is("ib_write_bw") => Category::Bandwidth,
            _ => Category::System,
        }
    }

    /// The number before a unit of bytes in the quantity: `BW_DMA_RD 64 B`, `4 KB`.
    fn bytes(&self) -> Option<u32> {
        let words: Vec<&str> = self.quantity.split([' ', ',']).filter(|w| !w.is_empty()).collect();
        words.windows(2).find_map(|pair| {
            let factor = match pair[1] {
                "B" => 1,
                "KB" => 1024,
                "MiB" => 1 << 20,
                _ => return None,
            };
            pair[0].parse::<u32>().ok().map(|n| n * factor)
        })
    }
}

fn one(value: f64, how: &'static str) -> Answer {
    Answer::Values { values: vec![value], how }
}

/// A PCIe link with the usual read request.
pub(crate) fn link(generation: u8, lanes: u8, payload: u32) -> PcieLink {
    PcieLink {
        generation: Generation(generation),
        lanes: PcieLanes(lanes),
        max_payload: PayloadSize(payload),
        max_read_request: PayloadSize(512),
    }
}

/// The programmable adapter of pcie-bench.
#[must_use]
pub fn nfp6000(p: &Parameters, overhead: &str) -> DmaEngine {
    DmaEngine {
        workers: p.count("nfp6000.workers"),
        tags: p.count("nfp6000.tags"),
        read_issue: p.nanos("nfp6000.read.issue"),
        write_issue: p.nanos("nfp6000.write.issue"),
        variation: p.get("nfp6000.variation"),
        fifo: p.get("nfp6000.fifo") as u64,
        write_rate: p.gigabytes("nfp6000.write.rate"),
        internal: p.gigabytes("nfp6000.memory.rate"),
        overhead: p.nanos(overhead),
    }
}

/// A host of pcie-bench, by the system's name.
#[must_use]
pub fn bench_host(p: &Parameters, system: &str) -> DmaHost {
    let remote = system.ends_with("remote");
    let hop = |cpu: &str| p.nanos(&format!("cpu.{cpu}.socket.hop"));
    let read_latency = if system.contains("IB-") {
        let far = p.nanos("cpu.ivybridge-ep.remote.read.latency");
        if remote { far } else { far - hop("ivybridge-ep") }
    } else if system.contains("BDW") {
        let near = p.nanos("cpu.broadwell-ep.read.latency");
        if remote { near + hop("broadwell-ep") } else { near }
    } else {
        // Nobody published the other socket of this host; its successor's way there is taken.
        let near = p.nanos("cpu.haswell-ep.read.latency");
        if remote { near + hop("broadwell-ep") } else { near }
    };
    let memory = CompleterTiming { read_latency, rate: p.gigabytes("cpu.memory.rate"), ..host_completer(p) };
    DmaHost {
        memory,
        write_rate: if remote { p.gigabytes("cpu.remote.write.rate") } else { BytesPerSecond(f64::INFINITY) },
        link_latency: p.nanos("pcie.link.latency"),
        efficiency: p.get("pcie.efficiency"),
    }
}

fn pcie_bench(row: &Row, p: &Parameters) -> Option<Answer> {
    let size = row.bytes()?;
    let host = bench_host(p, &row.system);
    let slot = link(3, 8, 256);
    let test = match row.quantity.split(' ').next()? {
        "BW_DMA_RD" => DmaTest::Read,
        "BW_DMA_WR" => DmaTest::Write,
        "BW_DMA_RW" => DmaTest::ReadWrite,
        word => {
            let overhead =
                if word == "LAT_CMD_RD" { "nfp6000.command.overhead" } else { "nfp6000.dma.overhead" };
            let time = dma::read_latency(&nfp6000(p, overhead), &host, &slot, size);
            return Some(one(time.nanos(), "one read of the programmable adapter, simulated"));
        }
    };
    let rate = dma::bandwidth(&nfp6000(p, "nfp6000.dma.overhead"), &host, &slot, test, size);
    Some(one(rate.as_gigabits(), "DMA test of the programmable adapter, simulated"))
}

fn hbm_row(row: &Row, p: &Parameters) -> Option<Answer> {
    let memory = hbm(p, None);
    if row.quantity.contains("aggregate") {
        let channel = read(&memory, AccessPattern::Sequential, 1, 512);
        return Some(one(
            32.0 * channel.as_gigabytes() * p.get("hbm.aggregate.share"),
            "32 channels, each alone, simulated",
        ));
    }
    let pattern =
        if row.quantity.contains("Sequential") { AccessPattern::Sequential } else { AccessPattern::Random };
    let channels = [1, 2, 4].into_iter().find(|n| row.quantity.contains(&format!("{n}PC")))?;
    let rate = read(&memory, pattern, channels, row.bytes()?);
    Some(one(rate.as_gigabytes(), "one master on pseudo channels with banks and refresh, simulated"))
}

fn between(site: &Site, p: &Parameters, server: &str) -> DataPath {
    let client = site.hosts[0].name.clone();
    data_path(site, p, &client, server)
        .unwrap_or_else(|error| panic!("the shipped sites carry their flows: {error}"))
}

const LARGE: u32 = 1 << 20;

fn recipe(p: &Parameters, site: &str, clock: &str, server: &str, verb: Verb) -> f64 {
    let site = shipped_with(site, "450 MHz", clock);
    bandwidth(&between(&site, p, server), verb, LARGE, 128, false).rate.as_gigabytes()
}

/// `ib_write_bw` between two nodes of a shipped site.
fn write_bw(p: &Parameters, site: &str, size: u32) -> f64 {
    let site = shipped(site);
    bandwidth(&between(&site, p, "node1"), Verb::Write, size, 128, false).rate.as_gigabits()
}

fn event_builder(p: &Parameters, site: &str) -> f64 {
    // Chunks of 600 fragments of 200 B by SEND, 20 credits (rows L29 to L31); both nodes send.
    let path = between(&shipped(site), p, "node1");
    bandwidth(&path, Verb::Send, 600 * 200, 20, true).rate.as_gigabits() * p.get("lseb.share")
}

fn edr(p: &Parameters, mtu: u32) -> DataPath {
    between(&shipped_with("edr-pair", "mtu = 4096", &format!("mtu = {mtu}")), p, "node1")
}

/// The smallest power of two that reaches the plateau within 1 %.
fn plateau(p: &Parameters) -> f64 {
    let top = write_bw(p, "lhcb-pair-fdr-e5", LARGE);
    let reached =
        (6..20).map(|bit| 1u32 << bit).find(|&size| write_bw(p, "lhcb-pair-fdr-e5", size) >= 0.99 * top);
    f64::from(reached.unwrap_or(LARGE)) / 1024.0
}

/// What the model says about a row.
#[must_use]
pub fn answer(row: &Row, p: &Parameters) -> Answer {
    let found = match row.system.as_str() {
        s if s.starts_with("pcie-bench") => pcie_bench(row, p),
        "U280-HBM" if !matches!(row.id.as_str(), "H01" | "H02" | "H03" | "H04") => hbm_row(row, p),
        _ => by_id(row, p),
    };
    found.unwrap_or(Answer::NotModelled("no modelled measurement has this definition"))
}

fn by_id(row: &Row, p: &Parameters) -> Option<Answer> {
    let perftest = "perftest between the site's hosts, simulated";
    let peer = "perftest into the card's memory, simulated";
    Some(match row.id.as_str() {
        "C01" => one(recipe(p, "recipe-baseline", "450 MHz", "server", Verb::Write), perftest),
        "C02" => one(recipe(p, "recipe-baseline", "450 MHz", "server.u280", Verb::Write), peer),
        "C03" => one(recipe(p, "recipe-baseline", "450 MHz", "server.u280", Verb::Read), peer),
        "C04" => one(stencil_rate(p).as_gigabytes(), "one bank's share for one direction"),
        "C05" => {
            let write = recipe(p, "recipe-baseline", "450 MHz", "server.u280", Verb::Write);
            let back = recipe(p, "recipe-baseline", "450 MHz", "server.u280", Verb::Read);
            let tile = 4.0;
            let time = tile / write + tile / stencil_rate(p).as_gigabytes() + tile / back;
            one(time, "write, one sweep and read back, one after the other")
        }
        "C06" => one(recipe(p, "recipe-backplane", "450 MHz", "server.u280", Verb::Write), peer),
        "C07" => one(recipe(p, "recipe-backplane", "450 MHz", "server.u280", Verb::Read), peer),
        "C08" => one(recipe(p, "recipe-backplane", "250 MHz", "server.u280", Verb::Write), peer),
        "C09" => one(recipe(p, "recipe-backplane", "250 MHz", "server.u280", Verb::Read), peer),
        "A01" => one(100.0 * apenet::gain_of_two_engines(p), "one against two DMA engines, simulated"),
        "A02" | "A24" => {
            one(100.0 * apenet::gain_of_hardware_translation(p), "receive path packet by packet")
        }
        "A03" => one(7.0, "lane rate of the torus site"),
        "A04" => one(7.0 * 4.0, "lanes of the torus site"),
        "A06" => one(apenet::link_rate(p).as_gigabytes(), "link of the torus site, its code and protocol"),
        "A09" => one(100.0 * apenet::gpu_latency_increase(p), "sum of the two ends, both GPUs"),
        "A13" => one(
            apenet::staging_crossover(p) / 1024.0,
            "where the two straight lines of time against size cross",
        ),
        "A21" => one(p.get("apenet.translate.software") / 1e3, "parameter"),
        "A22" => one(p.get("apenet.translate.hardware"), "parameter"),
        "A25" => one(p.get("apenet.latency"), "parameter"),
        "L02" => one(
            write_bw(p, "lhcb-pair-fdr-d", LARGE) * p.get("cpu.d1540.pcie.share") / 54.3 * 100.0,
            perftest,
        ),
        "L03" => one(write_bw(p, "lhcb-pair-fdr-e5", LARGE) / 54.3 * 100.0, perftest),
        "L04" => one(plateau(p), "perftest over all sizes, simulated"),
        "L05" => one(event_builder(p, "lhcb-pair-fdr-e5"), "SENDs of 120 kB in both directions, simulated"),
        "L06" => one(
            event_builder(p, "lhcb-pair-fdr-d") * p.get("lseb.d1540.share"),
            "SENDs of 120 kB in both directions, simulated; a factor for the processor",
        ),
        "L09" => one(event_builder(p, "lhcb-pair-qdr-e5"), "SENDs of 120 kB in both directions, simulated"),
        "L10" => one(
            event_builder(p, "lhcb-pair-qdr-c") * p.get("lseb.c2750.share"),
            "SENDs of 120 kB in both directions, simulated; a factor for the processor",
        ),
        "N01" => one(p.get("extoll.latency"), "parameter"),
        "N02" => {
            one(extoll::bandwidth(p).as_gigabytes(), "the link's rate, headers, and reads of the accelerator")
        }
        "N03" => one(100.0 * extoll::exchange_gain(p), "one halo's exchange over both stacks"),
        "X24" => {
            let site = shipped("hdr-gpu-pair");
            one(
                bandwidth(&between(&site, p, "server"), Verb::Write, LARGE, 128, false).rate.as_gigabytes(),
                perftest,
            )
        }
        "X25" => {
            let site = shipped("hdr-gpu-pair");
            one(
                bandwidth(&between(&site, p, "server.gpu"), Verb::Write, LARGE, 128, false)
                    .rate
                    .as_gigabytes(),
                peer,
            )
        }
        "I02" => {
            let rates = ["QDR", "FDR", "EDR", "HDR"].map(|name| {
                let site = shipped_with("edr-pair", "\"EDR\"", &format!("{name:?}"));
                site.links[0].rate.0 * 8e-9
            });
            Answer::Values { values: rates.to_vec(), how: "data rate of a site's link" }
        }
        "I20" => one(write_bw(p, "edr-pair", LARGE), perftest),
        "I21" => one(latency(&edr(p, 4096), Verb::Write, 2 << 20).nanos() / 1e3, perftest),
        "I22" => one(write_bw(p, "edr-pair", 65536) * 125e6 / f64::from(1 << 20), perftest),
        "I30" | "I31" | "I32" | "I33" => {
            one(latency(&edr(p, 4096), Verb::Send, row.bytes()?).nanos() / 1e3, perftest)
        }
        "I34" => {
            let values =
                [256, 512, 1024, 2048, 4096].map(|mtu| latency(&edr(p, mtu), Verb::Send, 4096).nanos() / 1e3);
            Answer::Values { values: values.to_vec(), how: perftest }
        }
        "P12" => one(p.get("pcie.switch.latency"), "parameter; sites may say otherwise"),
        "H03" => Answer::Values {
            values: vec![16.0 * hbm(p, None).rate.0 / 1e6, 32.0 * hbm(p, None).rate.0 / 1e6],
            how: "channels of the card's memory",
        },
        "H04" => one(p.get("hbm.refresh.interval") / 1e3, "parameter"),
        "B07" => one(p.get("adapter.outstanding.reads"), "parameter"),
        "H01" | "H02" => Answer::Definition("sites/recipe-baseline.toml"),
        "L29" | "L30" => Answer::Definition("rows.rs: chunks of 600 × 200 B, 20 credits"),
        "N04" | "N05" | "N07" => Answer::Definition("sites/extoll-booster.toml"),
        "P01" | "P02" | "P03" | "P04" | "P07" | "P08" => Answer::Definition("part/pcie.rs"),
        "P05" | "P06" => Answer::Definition("pcie.efficiency: one factor for all of it"),
        "P13" | "P14" => Answer::Definition("u280.reads, u280.writes: ranges"),
        "I01" => Answer::Definition("site file: QDR, FDR, EDR"),
        "I03" | "I04" => Answer::Definition("tool/verbs.rs: headers"),
        _ => return None,
    })
}

/// What one direction of the stencil gets of a bank.
#[must_use]
pub fn stencil_rate(p: &Parameters) -> BytesPerSecond {
    let memory = hbm(p, None);
    BytesPerSecond(memory.rate.0 * memory.refresh_share() * p.get("u280.stencil.share"))
}
