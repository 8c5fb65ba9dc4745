//! Runs the program of a row.

use super::Row;
use super::command::command;
use super::spec::{Program, RowSpec, spec};
use crate::benchmarks::disks::{self, Submitter};
use crate::benchmarks::dma::{self, DmaTest};
use crate::benchmarks::hbm::{self, AccessPattern};
use crate::benchmarks::osu::{self, Mpi};
use crate::benchmarks::pcie_bench::{self, nfp6000};
use crate::benchmarks::perftest::{bandwidth_at, latency_at};
use crate::benchmarks::{apenet, extoll};
use crate::benchmarks::{exchange, nvmf, peer};
use crate::explain::Flow;
use crate::flows::{Routing, concurrent};
use crate::measure::{dma_setup, stencil_rates};
use crate::parameters::Parameters;
use crate::path::{self, DataPath, Verb, data_path};
use crate::precision::Precision;
use crate::ssd::Access;
use millstream_site::Site;

/// The model's answer to a row.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// Values in the row's unit; most rows have one.
    Values {
        /// The values.
        values: Vec<f64>,
        /// The program, for readers.
        method: String,
    },
    /// A rule or constant of the model without a number, and its place.
    Definition(String),
    /// No program answers the row; the reason.
    NotModelled(&'static str),
}

/// Work requests in flight, as perftest's `--tx-depth` default.
const QUEUE_DEPTH: u32 = 128;
const MEBIBYTE: u32 = 1 << 20;

/// Answers a row with its entry of `data/rows.toml`.
#[must_use]
pub fn answer(row: &Row, p: &Parameters) -> Answer {
    answer_at(Precision::Full, row, p)
}

/// [`answer`] with longer or shorter benchmarks.
#[must_use]
pub fn answer_at(precision: Precision, row: &Row, p: &Parameters) -> Answer {
    let Some(spec) = spec(&row.id) else {
        return Answer::NotModelled("rows.toml has no entry for this row");
    };
    if spec.program == Program::Definition {
        return Answer::Definition(spec.source.clone().unwrap_or_default());
    }
    let run = Run { row: &row.id, spec, p, precision };
    let values = match (&spec.values, &spec.sweep) {
        (Some(values), _) => values.clone(),
        (None, None) => vec![run.value(None)],
        (None, Some(sweep)) => {
            sweep.values.iter().map(|value| run.value(Some((&sweep.path, value)))).collect()
        }
    };
    let scale = spec.factors.iter().fold(spec.scale.unwrap_or(1.0), |scale, name| scale * p.get(name));
    let percent = spec.percent_of.map_or(1.0, |whole| 100.0 / whole);
    let values = values.into_iter().map(|value| spec.unit.convert(value) * scale * percent).collect();
    Answer::Values { values, method: run.method() }
}

/// One run of a row's program.
struct Run<'a> {
    row: &'a str,
    spec: &'a RowSpec,
    p: &'a Parameters,
    precision: Precision,
}

impl Run<'_> {
    /// The site with the values of `set` and of one step of a sweep.
    fn site(&self, step: Option<(&str, &str)>) -> Site {
        let site = self.spec.site_with(step);
        site.unwrap_or_else(|| panic!("row {}: the schema check requires a site", self.row))
    }

    fn text<'a>(&self, field: &'a Option<String>) -> &'a str {
        field.as_deref().unwrap_or_else(|| panic!("row {}: the schema check requires this field", self.row))
    }

    fn size(&self) -> u32 {
        self.spec.size.map_or(MEBIBYTE, |size| u32::try_from(size).unwrap_or(u32::MAX))
    }

    fn client<'a>(&'a self, site: &'a Site) -> &'a str {
        self.spec.client.as_deref().unwrap_or(&site.hosts[0].name)
    }

    fn path(&self, step: Option<(&str, &str)>) -> DataPath {
        let site = self.site(step);
        data_path(&site, self.p, self.client(&site), self.text(&self.spec.server))
            .unwrap_or_else(|error| panic!("row {}: {error}", self.row))
    }

    fn mpi(&self) -> Mpi {
        Mpi::new(self.p, self.spec.mpi.unwrap_or_default())
    }

    fn verb_bandwidth(&self, path: &DataPath, verb: Verb, size: u32) -> f64 {
        let depth = self.spec.queue_depth.unwrap_or(QUEUE_DEPTH);
        let both = self.spec.bidirectional.unwrap_or(false);
        bandwidth_at(self.precision, path, verb, size, depth, both).rate.0
    }

    /// Smallest power of two within 1 % of the bandwidth of large messages.
    fn plateau(&self, path: &DataPath) -> f64 {
        let top = self.verb_bandwidth(path, Verb::Write, MEBIBYTE);
        let reached = (6..20)
            .map(|bit| 1u32 << bit)
            .find(|&size| self.verb_bandwidth(path, Verb::Write, size) >= 0.99 * top);
        f64::from(reached.unwrap_or(MEBIBYTE))
    }

    /// Sum of the rates of concurrent flows.
    fn flows(&self, step: Option<(&str, &str)>) -> f64 {
        let parse = |flow: &String| flow.parse().unwrap_or_else(|error| panic!("row {}: {error}", self.row));
        let flows: Vec<Flow> = self.spec.flows.iter().flatten().map(parse).collect();
        let rates = concurrent(&self.site(step), self.p, &flows, Routing::Deterministic);
        let rates = rates.unwrap_or_else(|error| panic!("row {}: {error}", self.row));
        rates.iter().map(|rate| rate.together.0).sum()
    }

    /// Disks that read into a card; `client` is one of them.
    fn disk_read(&self, step: Option<(&str, &str)>) -> f64 {
        let (site, spec) = (self.site(step), self.spec);
        let p = &*self.p.with_devices(&site.devices);
        let device = |name: &str| {
            let (host, device) = site.device(name).unwrap_or_else(|| panic!("row {}: no {name}", self.row));
            &site.hosts[host.0].devices[device.0]
        };
        let link = peer::write_ceiling(p, device(self.text(&spec.server)));
        let commands = (spec.size.unwrap_or(0), spec.queue_depth.unwrap_or(1));
        let submitter = spec.submitter.unwrap_or(Submitter::Card);
        let id = &device(self.client(&site)).id;
        disks::read_bandwidth(p, id, spec.disks.unwrap_or(1), commands, submitter, link)
            .map_or(f64::NAN, |rate| rate.0)
    }

    fn nvmf(&self, step: Option<(&str, &str)>, access: Access) -> f64 {
        let initiator = self.spec.initiator.unwrap_or_default();
        nvmf::latency(self.precision, &self.path(step), self.p, access, initiator, self.size()).seconds()
    }

    fn dma(&self, test: Option<DmaTest>) -> f64 {
        let site = self.site(None);
        let (engine, host, link) = dma_setup(&site, self.p, self.client(&site), self.text(&self.spec.server))
            .unwrap_or_else(|error| panic!("row {}: {error}", self.row));
        match test {
            Some(test) if self.spec.iommu_window.is_some() => {
                let window = self.spec.iommu_window.unwrap_or(0) as f64;
                let socket = site.device(self.client(&site)).map_or(0, |(host, _)| host.0);
                let processor = &site.hosts[socket].sockets[0].id;
                let host = pcie_bench::with_iommu(self.p, processor, host, window);
                dma::bandwidth(&engine, &host, &link, test, self.size()).0
            }
            Some(test) => dma::bandwidth(&engine, &host, &link, test, self.size()).0,
            None if self.spec.program == Program::CmdReadLat => {
                let engine = nfp6000(self.p, "nfp6000.command.overhead");
                dma::read_latency(&engine, &host, &link, self.size()).seconds()
            }
            None => dma::read_latency(&engine, &host, &link, self.size()).seconds(),
        }
    }

    /// The program's result in its own unit: bytes, seconds, bytes per second, or a ratio.
    fn value(&self, step: Option<(&str, &str)>) -> f64 {
        let (spec, p) = (self.spec, self.p);
        match spec.program {
            Program::IbWriteBw => self.verb_bandwidth(&self.path(step), Verb::Write, self.size()),
            Program::IbReadBw => self.verb_bandwidth(&self.path(step), Verb::Read, self.size()),
            Program::IbSendBw => self.verb_bandwidth(&self.path(step), Verb::Send, self.size()),
            Program::IbWriteLat => {
                latency_at(self.precision, &self.path(step), Verb::Write, self.size()).seconds()
            }
            Program::IbSendLat => {
                latency_at(self.precision, &self.path(step), Verb::Send, self.size()).seconds()
            }
            Program::IbReadLat => {
                latency_at(self.precision, &self.path(step), Verb::Read, self.size()).seconds()
            }
            Program::OsuLatency => osu::latency(&self.path(step), &self.mpi(), self.size()).seconds(),
            Program::OsuBw => {
                osu::bandwidth_at(self.precision, &self.path(step), &self.mpi(), self.size(), false).rate.0
            }
            Program::IbWriteBwPlateau => self.plateau(&self.path(step)),
            Program::AtomicRate => self.path(step).atomic_rate(p),
            Program::Flows => self.flows(step),
            Program::PeerWriteLat => {
                let (site, size) = (self.site(step), self.size());
                peer::write_latency(&site, p, self.client(&site), self.text(&spec.server), size)
                    .unwrap_or_else(|error| panic!("row {}: {error}", self.row))
                    .seconds()
            }
            Program::SwitchHopLat => peer::switch_hop(&self.site(step), p, self.text(&spec.server))
                .unwrap_or_else(|error| panic!("row {}: {error}", self.row))
                .seconds(),
            Program::DiskReadBw => self.disk_read(step),
            Program::NvmfReadLat => self.nvmf(step, Access::Read),
            Program::NvmfWriteLat => self.nvmf(step, Access::Write),
            Program::NvmfReadRate => nvmf::read_rate(&self.path(step), self.size()),
            Program::AllToAllTime => {
                exchange::pairwise(&self.path(step), &self.mpi(), spec.ranks.unwrap_or(2), self.size())
                    .seconds()
            }
            Program::ExchangeTime => {
                let messages = spec.messages.unwrap_or(1);
                exchange::pipelined(self.precision, &self.path(step), messages, self.size()).seconds()
            }
            Program::DmaReadBw => self.dma(Some(DmaTest::Read)),
            Program::DmaWriteBw => self.dma(Some(DmaTest::Write)),
            Program::DmaRwBw => self.dma(Some(DmaTest::ReadWrite)),
            Program::DmaReadLat | Program::CmdReadLat => self.dma(None),
            Program::HbmRead => {
                let pattern = spec.pattern.unwrap_or(AccessPattern::Sequential);
                let channels = spec.pseudo_channels.unwrap_or(1);
                hbm::read_at(self.precision, &path::hbm(p, None), pattern, channels, self.size()).0
            }
            Program::StencilSweepRate => path::stencil_rate(&self.site(step), p, self.text(&spec.server))
                .map_or(f64::NAN, |rate| rate.0),
            Program::StencilTime => {
                let site = self.site(step);
                let rates =
                    stencil_rates(self.precision, &site, p, self.client(&site), self.text(&spec.server));
                let rates = rates.unwrap_or_else(|error| panic!("row {}: {error}", self.row));
                rates.iter().map(|rate| spec.size.unwrap_or(0) as f64 / rate.0).sum()
            }
            Program::ApenetDmaEngineGain => apenet::gain_of_two_engines(p),
            Program::ApenetTranslationGain => apenet::gain_of_hardware_translation(p),
            Program::ApenetLinkRate => apenet::link_rate(p).0,
            Program::ApenetGpuLatencyIncrease => apenet::gpu_latency_increase(p),
            Program::ApenetStagingCrossover => apenet::staging_crossover(p),
            Program::ExtollBandwidth => extoll::bandwidth(p).0,
            Program::ExtollExchangeGain => extoll::exchange_gain(p),
            Program::LinkDataRate => self.site(step).links[0].rate.0,
            Program::Parameter => p.get(self.text(&spec.parameter)),
            Program::Constant | Program::Definition => f64::NAN,
        }
    }

    fn perftest(&self, name: &str) -> String {
        let memory = if self.text(&self.spec.server).contains('.') { "card memory" } else { "host memory" };
        let both = if self.spec.bidirectional == Some(true) { ", both directions" } else { "" };
        format!("{name}, {memory}{both}, simulated")
    }

    /// The program in words, for the column `method` of predictions.
    fn method(&self) -> String {
        let spec = self.spec;
        let factors = match spec.factors.join(" and ") {
            names if names.is_empty() => String::new(),
            names => format!(", times {names}"),
        };
        let method = match spec.program {
            Program::IbWriteBw => self.perftest("ib_write_bw"),
            Program::IbReadBw => self.perftest("ib_read_bw"),
            Program::IbSendBw => self.perftest("ib_send_bw"),
            Program::IbWriteLat => self.perftest("ib_write_lat"),
            Program::IbSendLat => self.perftest("ib_send_lat"),
            Program::IbReadLat => self.perftest("ib_read_lat"),
            Program::OsuLatency => self.perftest("osu_latency"),
            Program::OsuBw => self.perftest("osu_bw"),
            Program::IbWriteBwPlateau => "ib_write_bw over all sizes, simulated".to_owned(),
            Program::AtomicRate => "atomics of one responder, one PCIe read after the other".to_owned(),
            Program::Flows => {
                format!("flows {}", spec.flows.iter().flatten().cloned().collect::<Vec<_>>().join(", "))
            }
            Program::PeerWriteLat => "write from card to card through PCIe switches".to_owned(),
            Program::SwitchHopLat => "latency of a PCIe switch and its link".to_owned(),
            Program::DiskReadBw => "command queues of the disks, submission, link of the card".to_owned(),
            Program::NvmfReadLat => self.perftest("NVMe read: SEND, WRITE of data and response, software"),
            Program::NvmfWriteLat => {
                self.perftest("NVMe write: SEND with data, SEND of the response, software")
            }
            Program::NvmfReadRate => "data and responses of NVMe reads at the link's rate".to_owned(),
            Program::AllToAllTime => self.perftest("pairwise all-to-all"),
            Program::ExchangeTime => self.perftest("messages posted at once"),
            Program::DmaReadBw | Program::DmaWriteBw | Program::DmaRwBw => {
                "pcie-bench DMA bandwidth, simulated".to_owned()
            }
            Program::DmaReadLat | Program::CmdReadLat => "pcie-bench read latency, simulated".to_owned(),
            Program::HbmRead => "one AXI master reading HBM pseudo channels, simulated".to_owned(),
            Program::StencilSweepRate => "one direction's share of one HBM bank".to_owned(),
            Program::StencilTime => "sum of write, one sweep and read back".to_owned(),
            Program::ApenetDmaEngineGain => "one against two DMA engines, simulated".to_owned(),
            Program::ApenetTranslationGain => "receive path packet by packet, simulated".to_owned(),
            Program::ApenetLinkRate => "link rate of the site after line code and protocol".to_owned(),
            Program::ApenetGpuLatencyIncrease => "sum of both ends' latencies".to_owned(),
            Program::ApenetStagingCrossover => "intersection of two linear latency models".to_owned(),
            Program::ExtollBandwidth => "link rate less headers and the accelerator's read limit".to_owned(),
            Program::ExtollExchangeGain => "formula over one halo exchange on both stacks".to_owned(),
            Program::LinkDataRate => "input: data rate of the site's link".to_owned(),
            Program::Parameter => format!("input: parameter {}", self.text(&spec.parameter)),
            Program::Constant | Program::Definition => format!("input: {}", self.text(&spec.source)),
        };
        let command = command(spec).map_or(String::new(), |words| format!(": millstream model {words}"));
        method + &command + &factors
    }
}
