//! `data/rows.toml`: which benchmark answers a row, with its site and arguments.
//!
//! One entry per row id. The schema is [`RowSpec`]; every error names the row and the field.

use super::Baseline;
use crate::benchmarks::disks::Submitter;
use crate::benchmarks::hbm::AccessPattern;
use crate::benchmarks::nvmf::Initiator;
use crate::benchmarks::osu::MpiLibrary;
use crate::explain::Flow;
use crate::parameters::Parameters;
use crate::sites::{SHIPPED, shipped_with};
use millstream_site::Site;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::sync::LazyLock;

/// Program that answers a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Program {
    /// perftest bandwidth of RDMA WRITE.
    IbWriteBw,
    /// perftest bandwidth of RDMA READ.
    IbReadBw,
    /// perftest bandwidth of SEND.
    IbSendBw,
    /// perftest latency of RDMA WRITE.
    IbWriteLat,
    /// perftest latency of SEND.
    IbSendLat,
    /// perftest latency of RDMA READ: a full round trip.
    IbReadLat,
    /// OSU latency of MPI.
    OsuLatency,
    /// OSU bandwidth of MPI.
    OsuBw,
    /// Smallest power of two with at least 99 % of the bandwidth of 1 MiB RDMA WRITEs.
    IbWriteBwPlateau,
    /// perftest rate of RDMA atomics, of which a responder executes one after the other.
    AtomicRate,
    /// Rate of concurrent flows of a site, their sum.
    Flows,
    /// Time of a write from one card to another of the same host, through PCIe switches.
    PeerWriteLat,
    /// Latency that a further PCIe switch adds, with its link.
    SwitchHopLat,
    /// Disks that read into a card.
    DiskReadBw,
    /// NVMe over RDMA: time of one read.
    NvmfReadLat,
    /// NVMe over RDMA: time of one write.
    NvmfWriteLat,
    /// NVMe over RDMA: reads per second that a link carries.
    NvmfReadRate,
    /// All-to-all over MPI, in pairs.
    AllToAllTime,
    /// Messages posted at once by every rank.
    ExchangeTime,
    /// pcie-bench `BW_DMA_RD`.
    DmaReadBw,
    /// pcie-bench `BW_DMA_WR`.
    DmaWriteBw,
    /// pcie-bench `BW_DMA_RW`.
    DmaRwBw,
    /// pcie-bench `LAT_DMA_RD`.
    DmaReadLat,
    /// pcie-bench `LAT_CMD_RD`.
    CmdReadLat,
    /// One AXI master reading HBM pseudo channels.
    HbmRead,
    /// Bandwidth of one direction of the stencil kernel in one HBM bank.
    StencilSweepRate,
    /// Write of a tile to a card, one stencil sweep and read back.
    StencilTime,
    /// APEnet+: time saved by a second DMA engine.
    ApenetDmaEngineGain,
    /// APEnet+: bandwidth gained by address translation in hardware.
    ApenetTranslationGain,
    /// APEnet+: sustained rate of one torus channel.
    ApenetLinkRate,
    /// APEnet+: round trip between GPUs relative to hosts.
    ApenetGpuLatencyIncrease,
    /// APEnet+: message size from which staging is faster than peer-to-peer.
    ApenetStagingCrossover,
    /// EXTOLL: `osu_bw` of large messages between accelerators.
    ExtollBandwidth,
    /// EXTOLL: time saved in one halo exchange.
    ExtollExchangeGain,
    /// Data rate of the site's first link.
    LinkDataRate,
    /// A parameter itself.
    Parameter,
    /// Fixed numbers.
    Constant,
    /// A rule of the model without a number.
    Definition,
}

/// Rows whose residuals measure the same model error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Category {
    /// DMA bandwidth of a programmable adapter.
    DmaBandwidth,
    /// DMA latency of a programmable adapter.
    DmaLatency,
    /// DMA bandwidth that page walks of an IOMMU limit.
    PageWalk,
    /// High-bandwidth memory.
    Hbm,
    /// RDMA bandwidth.
    Bandwidth,
    /// RDMA latency.
    Latency,
    /// RDMA latency on hosts of which little is published.
    VerbsLatency,
    /// Bandwidth of messages so short that their number is the limit.
    MessageRate,
    /// Disks and their protocols.
    Storage,
    /// Latency of MPI.
    MpiLatency,
    /// Bandwidth of MPI.
    MpiBandwidth,
    /// RDMA bandwidth into a card as PCIe peer.
    PeerToPeer,
    /// A message size at which behaviour changes; the model's steps are powers of two.
    Threshold,
    /// Applications and systems with few published numbers for many parameters.
    System,
}

impl Category {
    /// Message size below which the number of messages can be the limit.
    const SHORT: u32 = 16384;

    /// Kind of published rows whose errors widen the interval of a bandwidth; `is_peer`: into or out of a card.
    pub(crate) fn of_bandwidth(is_peer: bool, size: u32) -> Category {
        match size {
            _ if is_peer => Category::PeerToPeer,
            0..Self::SHORT => Category::MessageRate,
            _ => Category::Bandwidth,
        }
    }
}

impl std::fmt::Display for Category {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Category::DmaBandwidth => "dma-bandwidth",
            Category::DmaLatency => "dma-latency",
            Category::PageWalk => "page-walk",
            Category::Hbm => "hbm",
            Category::Bandwidth => "bandwidth",
            Category::Latency => "latency",
            Category::VerbsLatency => "verbs-latency",
            Category::MessageRate => "message-rate",
            Category::Storage => "storage",
            Category::MpiLatency => "mpi-latency",
            Category::MpiBandwidth => "mpi-bandwidth",
            Category::PeerToPeer => "peer-to-peer",
            Category::Threshold => "threshold",
            Category::System => "system",
        })
    }
}

/// Unit of an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum Unit {
    /// The program's own unit: bytes, seconds, bytes per second, or a ratio.
    #[default]
    #[serde(rename = "1")]
    One,
    /// 10⁹ bytes per second.
    #[serde(rename = "GB/s")]
    GigabytesPerSecond,
    /// 10⁹ bits per second.
    #[serde(rename = "Gb/s")]
    GigabitsPerSecond,
    /// 10⁶ bytes per second.
    #[serde(rename = "MB/s")]
    MegabytesPerSecond,
    /// 2²⁰ bytes per second.
    #[serde(rename = "MiB/s")]
    MebibytesPerSecond,
    /// Seconds.
    #[serde(rename = "s")]
    Seconds,
    /// Microseconds.
    #[serde(rename = "us")]
    Microseconds,
    /// Nanoseconds.
    #[serde(rename = "ns")]
    Nanoseconds,
    /// 1024 bytes.
    #[serde(rename = "KiB")]
    Kibibytes,
    /// Hundredths.
    #[serde(rename = "%")]
    Percent,
}

impl Unit {
    /// A value in the program's own unit, in this unit.
    #[must_use]
    pub fn convert(self, value: f64) -> f64 {
        match self {
            Unit::One | Unit::Seconds => value,
            Unit::GigabytesPerSecond => value * 1e-9,
            Unit::GigabitsPerSecond => value * 8e-9,
            Unit::MegabytesPerSecond => value * 1e-6,
            Unit::MebibytesPerSecond => value / f64::from(1 << 20),
            Unit::Microseconds => value * 1e6,
            Unit::Nanoseconds => value * 1e9,
            Unit::Kibibytes => value / 1024.0,
            Unit::Percent => value * 100.0,
        }
    }
}

/// Values that one field of the site takes; the row has one value for each.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FieldSweep {
    /// Path of the field ([`millstream_site::edit`]).
    pub path: String,
    /// Its values.
    pub values: Vec<String>,
}

/// One entry of `data/rows.toml`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RowSpec {
    /// Program that answers the row.
    pub program: Program,
    /// Whether the row is an input of the model; such rows are in no statistic.
    #[serde(default)]
    pub input: bool,
    /// Category whose residuals set the prediction interval; only inputs have none.
    pub category: Option<Category>,
    /// Name of a shipped site.
    pub site: Option<String>,
    /// Values of site fields by path.
    #[serde(default)]
    pub set: BTreeMap<String, String>,
    /// A site field with one value per value of the row.
    pub sweep: Option<FieldSweep>,
    /// Host, `host.card` or `host.adapter`; the first host by default.
    pub client: Option<String>,
    /// Host, `host.card` or socket.
    pub server: Option<String>,
    /// Bytes of a message, a transaction or a tile.
    pub size: Option<u64>,
    /// Work requests posted at once.
    pub queue_depth: Option<u32>,
    /// Whether both ends send.
    pub bidirectional: Option<bool>,
    /// Order of addresses in HBM.
    pub pattern: Option<AccessPattern>,
    /// HBM pseudo channels.
    pub pseudo_channels: Option<u32>,
    /// Flows of the site, each `VERB CLIENT SERVER BYTES`.
    pub flows: Option<Vec<String>>,
    /// Equal disks.
    pub disks: Option<u32>,
    /// Who submits commands to disks.
    pub submitter: Option<Submitter>,
    /// Software of an NVMe initiator.
    pub initiator: Option<Initiator>,
    /// Ranks of a collective.
    pub ranks: Option<u32>,
    /// Messages that every rank sends.
    pub messages: Option<u32>,
    /// Bytes that DMA accesses through an IOMMU at random.
    pub iommu_window: Option<u64>,
    /// MPI library.
    pub mpi: Option<MpiLibrary>,
    /// Parameter that is the answer.
    pub parameter: Option<String>,
    /// Numbers that are the answer.
    pub values: Option<Vec<f64>>,
    /// Where a constant or a definition is.
    pub source: Option<String>,
    /// Unit of the answer.
    #[serde(default)]
    pub unit: Unit,
    /// Number that multiplies the answer.
    pub scale: Option<f64>,
    /// Parameters that multiply the answer.
    #[serde(default)]
    pub factors: Vec<String>,
    /// The answer is in percent of this value.
    pub percent_of: Option<f64>,
    /// Calibrated row of the same adapter on another host.
    pub reference: Option<String>,
    /// Whether hints about the physics of the row preceded its answer: it is not blind.
    #[serde(default)]
    pub tuned: bool,
    /// Answer without model, for a program that no measured row has.
    pub baseline: Option<Baseline>,
    /// Why nobody could answer the row without model.
    pub no_baseline: Option<String>,
}

/// An entry of the row file that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{file}: row {row}: {message}")]
pub struct RowSpecError {
    /// The file.
    pub file: String,
    /// The row id; empty if the file is not TOML.
    pub row: String,
    /// The invalid field and the problem.
    pub message: String,
}

impl Program {
    /// Fields that the program needs, and fields that it accepts.
    fn fields(self) -> (&'static [&'static str], &'static [&'static str]) {
        use Program as P;
        match self {
            P::IbWriteBw | P::IbReadBw | P::IbSendBw => {
                (&["site", "server", "size"], &["client", "queue_depth", "bidirectional"])
            }
            P::IbWriteLat | P::IbSendLat | P::IbReadLat => (&["site", "server", "size"], &["client"]),
            P::OsuLatency | P::OsuBw => (&["site", "server", "size"], &["client", "mpi"]),
            P::AtomicRate | P::NvmfReadRate => (&["site", "server", "size"], &["client"]),
            P::Flows => (&["site", "flows"], &[]),
            P::PeerWriteLat => (&["site", "client", "server", "size"], &[]),
            P::SwitchHopLat => (&["site", "server"], &[]),
            P::DiskReadBw => {
                (&["site", "client", "server", "size", "disks", "queue_depth", "submitter"], &[])
            }
            P::NvmfReadLat | P::NvmfWriteLat => (&["site", "server", "size", "initiator"], &["client"]),
            P::AllToAllTime => (&["site", "server", "size", "ranks"], &["client", "mpi"]),
            P::ExchangeTime => (&["site", "client", "server", "size", "messages"], &[]),
            P::IbWriteBwPlateau => (&["site", "server"], &["client"]),
            P::DmaReadBw | P::DmaWriteBw | P::DmaRwBw => {
                (&["site", "client", "server", "size"], &["iommu_window"])
            }
            P::DmaReadLat | P::CmdReadLat => (&["site", "client", "server", "size"], &[]),
            P::HbmRead => (&["pattern", "pseudo_channels", "size"], &[]),
            P::StencilSweepRate => (&["site", "server"], &[]),
            P::StencilTime => (&["site", "server", "size"], &["client"]),
            P::LinkDataRate => (&["site"], &[]),
            P::Parameter => (&["parameter"], &[]),
            P::Constant => (&["values", "source"], &[]),
            P::Definition => (&["source"], &[]),
            P::ApenetDmaEngineGain
            | P::ApenetTranslationGain
            | P::ApenetLinkRate
            | P::ApenetGpuLatencyIncrease
            | P::ApenetStagingCrossover
            | P::ExtollBandwidth
            | P::ExtollExchangeGain => (&[], &[]),
        }
    }

    /// Whether the answer is no result of the model.
    fn is_input(self) -> bool {
        matches!(self, Program::Parameter | Program::Constant | Program::Definition | Program::LinkDataRate)
    }
}

impl RowSpec {
    /// The site with the values of `set` and of one step of a sweep.
    pub(super) fn site_with(&self, step: Option<(&str, &str)>) -> Option<Site> {
        let set = self.set.iter().map(|(path, value)| (path.as_str(), value.as_str()));
        Some(shipped_with(self.site.as_deref()?, &set.chain(step).collect::<Vec<_>>()))
    }

    /// Fields that belong to programs, with whether the entry has them.
    fn program_fields(&self) -> [(&'static str, bool); 19] {
        [
            ("site", self.site.is_some()),
            ("client", self.client.is_some()),
            ("server", self.server.is_some()),
            ("size", self.size.is_some()),
            ("queue_depth", self.queue_depth.is_some()),
            ("bidirectional", self.bidirectional.is_some()),
            ("pattern", self.pattern.is_some()),
            ("pseudo_channels", self.pseudo_channels.is_some()),
            ("mpi", self.mpi.is_some()),
            ("iommu_window", self.iommu_window.is_some()),
            ("flows", self.flows.is_some()),
            ("disks", self.disks.is_some()),
            ("submitter", self.submitter.is_some()),
            ("initiator", self.initiator.is_some()),
            ("ranks", self.ranks.is_some()),
            ("messages", self.messages.is_some()),
            ("parameter", self.parameter.is_some()),
            ("values", self.values.is_some()),
            ("source", self.source.is_some()),
        ]
    }

    fn check(&self) -> Result<(), String> {
        let (required, optional) = self.program.fields();
        for (field, is_present) in self.program_fields() {
            if required.contains(&field) && !is_present {
                return Err(format!("field `{field}` is missing: {:?} needs it", self.program));
            }
            if is_present && !required.contains(&field) && !optional.contains(&field) {
                return Err(format!("field `{field}` does not belong to {:?}", self.program));
            }
        }
        if self.program.is_input() != self.input {
            return Err(format!("field `input` must be {} for {:?}", !self.input, self.program));
        }
        if self.input == self.category.is_some() {
            return Err("field `category`: all rows but inputs have one".to_owned());
        }
        for flow in self.flows.iter().flatten() {
            flow.parse::<Flow>().map_err(|error| format!("field `flows`: {error}"))?;
        }
        if let Some(baseline) = &self.baseline {
            baseline.check()?;
        }
        if self.no_baseline.as_ref().is_some_and(|why| why.is_empty() || self.baseline.is_some()) {
            return Err("field `no_baseline`: the reason, for a row without `baseline`".to_owned());
        }
        if self.size.is_some_and(|size| size == 0) {
            return Err("field `size` must be 1 or more".to_owned());
        }
        if let Some(site) = &self.site
            && !SHIPPED.iter().any(|(name, _)| name == site)
        {
            return Err(format!("field `site`: sites/{site}.toml does not exist"));
        }
        if self.site.is_none() && !(self.set.is_empty() && self.sweep.is_none()) {
            return Err("fields `set` and `sweep` need `site`".to_owned());
        }
        let parameters = Parameters::shipped();
        let unknown = self.parameter.iter().chain(&self.factors).find(|name| !parameters.has(name));
        unknown.map_or(Ok(()), |name| Err(format!("no parameter {name:?} (fields `parameter`, `factors`)")))
    }
}

/// Reads the entries of a row file.
///
/// # Errors
/// [`RowSpecError`] names the row and the field.
pub fn parse(file: &str, text: &str) -> Result<BTreeMap<String, RowSpec>, RowSpecError> {
    let fail =
        |row: &str, message: String| RowSpecError { file: file.to_owned(), row: row.to_owned(), message };
    let table: toml::Table = text.parse().map_err(|error: toml::de::Error| fail("", error.to_string()))?;
    let entry = |(row, value): (String, toml::Value)| {
        let spec: RowSpec = value
            .try_into()
            .map_err(|error: toml::de::Error| fail(&row, error.to_string().replace('\n', " ")))?;
        spec.check().map_err(|message| fail(&row, message))?;
        Ok((row, spec))
    };
    table.into_iter().map(entry).collect()
}

static SHIPPED_SPECS: LazyLock<BTreeMap<String, RowSpec>> = LazyLock::new(|| {
    parse("rows.toml", include_str!("../../data/rows.toml"))
        .unwrap_or_else(|error| panic!("a test reads the shipped file: {error}"))
});

/// The shipped entry of a row.
#[must_use]
pub fn spec(row: &str) -> Option<&'static RowSpec> {
    SHIPPED_SPECS.get(row)
}

#[cfg(test)]
mod tests {
    use super::{parse, spec};
    use crate::rows::{calibration, questions};

    #[test]
    fn every_shipped_row_has_an_entry_and_an_existing_reference() {
        let calibrated = calibration();
        // Rows of the second set that are not simulated serve estimates by hand.
        let second = include_str!("../../data/calibration-2.csv");
        for row in calibrated.iter().chain(&questions()) {
            let Some(spec) = spec(&row.id) else {
                assert!(second.contains(&format!("\n{},", row.id)), "rows.toml has no {}", row.id);
                continue;
            };
            if let Some(reference) = &spec.reference {
                assert!(calibrated.iter().any(|row| row.id == *reference), "{}: {reference}", row.id);
            }
        }
    }

    #[test]
    fn errors_name_the_row_and_the_field() {
        let perftest =
            "program = \"ib_write_bw\", category = \"bandwidth\", site = \"edr-pair\", server = \"node1\"";
        for (entry, field) in [
            ("program = \"ib_fast_bw\"", "ib_fast_bw"),
            (perftest, "`size`"),
            (&format!("{perftest}, size = 8, sise = 9"), "`sise`"),
            (&format!("{perftest}, size = \"8\""), "size"),
            (&format!("{perftest}, size = 0"), "`size`"),
            (&format!("{perftest}, size = 8, pattern = \"random\""), "`pattern`"),
            (&format!("{perftest}, size = 8, input = true"), "`input`"),
            (&format!("{perftest}, size = 8, baseline = {{ value = 0, source = \"x\" }}"), "`baseline`"),
            (&format!("{perftest}, size = 8, baseline = {{ value = 1.0 }}"), "source"),
            (&format!("{perftest}, size = 8, no_baseline = \"\""), "`no_baseline`"),
            (&format!("{perftest}, size = 8, factors = [\"u280.nothing\"]"), "u280.nothing"),
            (&format!("{}, size = 8", perftest.replace("edr-pair", "nowhere")), "nowhere"),
            ("program = \"parameter\", parameter = \"u280.reads\"", "`input`"),
            ("program = \"apenet_link_rate\"", "`category`"),
        ] {
            let error = parse("rows.toml", &format!("X01 = {{ {entry} }}")).unwrap_err().to_string();
            assert!(error.starts_with("rows.toml: row X01: ") && error.contains(field), "{entry}: {error}");
        }
        assert!(parse("rows.toml", "X01 = 3").unwrap_err().to_string().contains("row X01"));
        assert!(parse("rows.toml", "X01 = {").is_err());
    }
}
