//! Benchmarks by name, between two memories of a site: `millstream model measure`.

use crate::benchmarks::apenet;
use crate::benchmarks::dma::{self, DmaEngine, DmaHost, DmaTest};
use crate::benchmarks::mlc::{self, MlcTest};
use crate::benchmarks::osu::{self, Mpi, MpiLibrary};
use crate::benchmarks::pcie_bench::{self, nfp6000};
use crate::benchmarks::perftest::{bandwidth_at, latency_at};
use crate::component::completer::CompleterTiming;
use crate::component::cxl::LINE;
use crate::engine::{BytesPerSecond, Picos};
use crate::explain::slowest_link;
use crate::interval::{Interval, Level, factors::factors, leave_out, response};
use crate::parallel::parallel_map;
use crate::parameters::Parameters;
use crate::path::Verb;
use crate::path::{
    DataPath, PathError, core_access, data_path, host_completer, negotiated_link, no_host_memory,
    stencil_rate,
};
use crate::precision::Precision;
use crate::result_table::TableValue;
use crate::rows::Category;
use millstream_site::schema::PcieLink;
use millstream_site::validate::Parent;
use millstream_site::{DeviceKind, Site, SocketId};
use std::str::FromStr;

/// A benchmark program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Benchmark {
    /// perftest bandwidth of a verb.
    Bandwidth(Verb),
    /// perftest latency of a verb.
    Latency(Verb),
    /// An OSU micro-benchmark.
    Osu(osu::OsuTest),
    /// pcie-bench bandwidth.
    Dma(DmaTest),
    /// pcie-bench read latency.
    DmaLatency,
    /// Memory Latency Checker on CXL memory of the same host.
    Mlc(MlcTest),
    /// Write of a tile to a remote card, one sweep of the five-point stencil, and read back.
    Stencil,
}

/// A benchmark with its description.
#[derive(Clone, Copy, Debug)]
pub struct BenchmarkInfo {
    /// The benchmark.
    pub benchmark: Benchmark,
    /// Name of the real program.
    pub name: &'static str,
    /// Definition of its results.
    pub definition: &'static str,
    /// Columns after the size.
    pub columns: &'static [&'static str],
    /// Smallest and largest default size; powers of two.
    pub sizes: (u64, u64),
}

const BW: &[&str] = &["BW average [MiB/s]", "BW average [Gb/s]", "message rate [Mpps]"];
const LAT: &[&str] = &["t_typical [us]"];
const OSU: &[&str] = &["bandwidth [MB/s]"];
const MLC: &[&str] = &["bandwidth [GB/s]"];
const DMA: &[&str] = &["bandwidth [Gb/s]"];
const BW_DEFINITION: &str = "payload per time between completions at the client; one QP, tx-depth 128; MiB = 2^20 bytes, Gb = 10^9 bits (perftest)";
const LAT_DEFINITION: &str = "half a round trip (perftest)";

/// All benchmarks.
pub const BENCHMARKS: &[BenchmarkInfo] = &[
    BenchmarkInfo {
        benchmark: Benchmark::Bandwidth(Verb::Write),
        name: "ib_write_bw",
        definition: BW_DEFINITION,
        columns: BW,
        sizes: (2, 8 << 20),
    },
    BenchmarkInfo {
        benchmark: Benchmark::Bandwidth(Verb::Read),
        name: "ib_read_bw",
        definition: BW_DEFINITION,
        columns: BW,
        sizes: (2, 8 << 20),
    },
    BenchmarkInfo {
        benchmark: Benchmark::Bandwidth(Verb::Send),
        name: "ib_send_bw",
        definition: BW_DEFINITION,
        columns: BW,
        sizes: (2, 8 << 20),
    },
    BenchmarkInfo {
        benchmark: Benchmark::Latency(Verb::Write),
        name: "ib_write_lat",
        definition: LAT_DEFINITION,
        columns: LAT,
        sizes: (2, 8 << 20),
    },
    BenchmarkInfo {
        benchmark: Benchmark::Latency(Verb::Read),
        name: "ib_read_lat",
        definition: "full round trip (perftest)",
        columns: LAT,
        sizes: (2, 8 << 20),
    },
    BenchmarkInfo {
        benchmark: Benchmark::Latency(Verb::Send),
        name: "ib_send_lat",
        definition: LAT_DEFINITION,
        columns: LAT,
        sizes: (2, 8 << 20),
    },
    BenchmarkInfo {
        benchmark: Benchmark::Osu(osu::OsuTest::Latency),
        name: "osu_latency",
        definition: "half a round trip of blocking sends and receives (OMB 5.3)",
        columns: &["latency [us]"],
        sizes: (1, 4 << 20),
    },
    BenchmarkInfo {
        benchmark: Benchmark::Osu(osu::OsuTest::Bandwidth),
        name: "osu_bw",
        definition: "windows of 64 sends, then a reply of 4 bytes; MB = 10^6 bytes (OMB 5.3)",
        columns: OSU,
        sizes: (1, 4 << 20),
    },
    BenchmarkInfo {
        benchmark: Benchmark::Osu(osu::OsuTest::Bidirectional),
        name: "osu_bibw",
        definition: "windows of 64 receives and 64 sends on both sides, sum of both directions; MB = 10^6 bytes (OMB 5.3)",
        columns: OSU,
        sizes: (1, 4 << 20),
    },
    BenchmarkInfo {
        benchmark: Benchmark::Dma(DmaTest::Read),
        name: "dma_read_bw",
        definition: "DMA reads of host memory, bytes per time (pcie-bench BW_DMA_RD)",
        columns: DMA,
        sizes: (64, 2048),
    },
    BenchmarkInfo {
        benchmark: Benchmark::Dma(DmaTest::Write),
        name: "dma_write_bw",
        definition: "DMA writes to host memory, bytes per time (pcie-bench BW_DMA_WR)",
        columns: DMA,
        sizes: (64, 2048),
    },
    BenchmarkInfo {
        benchmark: Benchmark::Dma(DmaTest::ReadWrite),
        name: "dma_rw_bw",
        definition: "alternating DMA reads and writes, bytes of one direction per time (pcie-bench BW_DMA_RW)",
        columns: DMA,
        sizes: (64, 2048),
    },
    BenchmarkInfo {
        benchmark: Benchmark::DmaLatency,
        name: "dma_read_lat",
        definition: "one DMA read, start to completion handling (pcie-bench LAT_DMA_RD)",
        columns: &["latency [ns]"],
        sizes: (8, 2048),
    },
    BenchmarkInfo {
        benchmark: Benchmark::Mlc(MlcTest::IdleLatency),
        name: "mlc_idle_latency",
        definition: "dependent loads of cache lines by one core from CXL memory (Intel MLC --idle_latency)",
        columns: &["latency [ns]"],
        sizes: (64, 64),
    },
    BenchmarkInfo {
        benchmark: Benchmark::Mlc(MlcTest::Reads),
        name: "mlc_read_bw",
        definition: "reads of CXL memory by all cores (Intel MLC --max_bandwidth, ALL Reads)",
        columns: MLC,
        sizes: (64, 64),
    },
    BenchmarkInfo {
        benchmark: Benchmark::Mlc(MlcTest::ReadsAndWrites),
        name: "mlc_rw_bw",
        definition: "two reads to a write of CXL memory by all cores, sum of both (Intel MLC --max_bandwidth, 2:1 Reads-Writes)",
        columns: MLC,
        sizes: (64, 64),
    },
    BenchmarkInfo {
        benchmark: Benchmark::Mlc(MlcTest::Writes),
        name: "mlc_write_bw",
        definition: "writes that bypass the caches to CXL memory by all cores; less than 64 bytes need byte enables (Intel MLC -W6)",
        columns: MLC,
        sizes: (8, 64),
    },
    BenchmarkInfo {
        benchmark: Benchmark::Stencil,
        name: "stencil",
        definition: "write of a tile to the card, one sweep of the five-point Jacobi kernel in one bank, and read back, in sequence",
        columns: &["write [s]", "sweep [s]", "read back [s]", "total [s]"],
        sizes: (1 << 28, 1 << 32),
    },
];

/// A benchmark that cannot run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BenchmarkError {
    /// The site has no such path.
    #[error(transparent)]
    Path(#[from] PathError),
    /// A DMA test needs an adapter or a card as client and memory of its host as server.
    #[error(
        "{0:?}: a DMA test needs host.adapter as client, or a card with a DMA engine, and host or host.socket1 of the same host as server"
    )]
    NotAnAdapter(String),
    /// The model has no DMA engine for this adapter.
    #[error(
        "{name:?} is a {model}: the model has the DMA engines of NFP-6000, APEnet+ and FPGA cards; others need dma.workers, dma.tags and dma.overhead in a [device.ID]"
    )]
    NoDmaEngine {
        /// Name of the adapter.
        name: String,
        /// Its model.
        model: String,
    },
    /// A test of CXL memory needs a host and its memory.
    #[error(
        "{client:?} and {server:?}: the benchmark needs a host as client and CXL memory of this host as server, {client}.MEMORY"
    )]
    NotCxlMemory {
        /// Client.
        client: String,
        /// Server.
        server: String,
    },
    /// The stencil benchmark needs a card with memory.
    #[error("{0:?}: the stencil needs a card with memory, named host.card")]
    NoCard(String),
    /// A size is out of range.
    #[error("{benchmark}: size {size} is out of range, 1 to {max} bytes")]
    Size {
        /// Name of the benchmark.
        benchmark: &'static str,
        /// Largest size.
        max: u64,
        /// The given size.
        size: u64,
    },
}

impl FromStr for Benchmark {
    type Err = String;

    fn from_str(text: &str) -> Result<Benchmark, String> {
        let names = || BENCHMARKS.iter().map(|t| t.name).collect::<Vec<_>>().join(", ");
        let found = BENCHMARKS.iter().find(|t| t.name == text);
        found.map(|t| t.benchmark).ok_or_else(|| format!("no benchmark {text:?}: one of {}", names()))
    }
}

impl Benchmark {
    /// The benchmark's description.
    ///
    /// # Panics
    /// Never: a test looks up every benchmark.
    #[must_use]
    pub fn info(self) -> &'static BenchmarkInfo {
        BENCHMARKS.iter().find(|t| t.benchmark == self).expect("BENCHMARKS has all benchmarks")
    }

    /// Largest size; simulations count bytes in 32 bits.
    fn max_size(self) -> u64 {
        match self {
            Benchmark::Stencil => 1 << 50,
            Benchmark::Mlc(_) => u64::from(LINE),
            _ => 1 << 30,
        }
    }

    /// The column that a chart shows and an interval belongs to, counted from the first after the size: of a bandwidth
    /// in Gb/s, of a stencil the total.
    #[must_use]
    pub fn main_column(self) -> usize {
        match self {
            Benchmark::Bandwidth(_) => 1,
            _ => self.info().columns.len() - 1,
        }
    }

    /// Kind of published rows whose errors widen the interval of a result.
    fn category(self, path: Option<&DataPath>, size: u64) -> Category {
        match self {
            Benchmark::Bandwidth(_) => path
                .map_or(Category::Bandwidth, |path| Category::of_bandwidth(path.is_to_peer(), size as u32)),
            Benchmark::Latency(_) => Category::VerbsLatency,
            Benchmark::Osu(osu::OsuTest::Latency) => Category::MpiLatency,
            Benchmark::Osu(_) => Category::MpiBandwidth,
            Benchmark::Dma(_) => Category::DmaBandwidth,
            Benchmark::DmaLatency => Category::DmaLatency,
            // No published row is about cores: the category with the largest errors of bandwidths.
            Benchmark::Mlc(_) => Category::PeerToPeer,
            Benchmark::Stencil => Category::System,
        }
    }

    /// Largest value of the main column: the rate of the slowest link.
    fn limit(self, path: Option<&DataPath>) -> f64 {
        match (self, path) {
            (Benchmark::Bandwidth(_), Some(path)) => slowest_link(path).as_gigabits(),
            _ => f64::INFINITY,
        }
    }

    /// Default sizes.
    #[must_use]
    pub fn sizes(self) -> Vec<u64> {
        let (low, high) = self.info().sizes;
        std::iter::successors(Some(low), |size| Some(size * 2)).take_while(|&size| size <= high).collect()
    }
}

/// Issue time of a request or packet: a cycle of an FPGA's clock.
const CARD_ISSUE: Picos = Picos(4_000);
/// Payload bytes between a card's DMA engine and its link.
const CARD_FIFO: u64 = 4096;

/// DMA engine of a device that has `dma.workers`, `dma.tags` and `dma.overhead`: its memory is never the limit.
fn card_engine(p: &Parameters, id: &str) -> Option<DmaEngine> {
    let value = |name: &str| p.device(id, name);
    Some(DmaEngine {
        workers: value("dma.workers")?.round().max(1.0) as u32,
        tags: value("dma.tags")?.round().max(1.0) as u32,
        read_issue: CARD_ISSUE,
        write_issue: CARD_ISSUE,
        variation: 0.0,
        fifo: CARD_FIFO,
        write_rate: BytesPerSecond::gigabytes(256.0),
        internal: BytesPerSecond::gigabytes(256.0),
        overhead: Picos::from_nanos(value("dma.overhead")?),
    })
}

/// DMA engine of an adapter or a card, with host memory and the PCIe link between them.
pub(crate) fn dma_setup(
    site: &Site,
    p: &Parameters,
    client: &str,
    server: &str,
) -> Result<(DmaEngine, DmaHost, PcieLink), BenchmarkError> {
    let not_adapter = || BenchmarkError::NotAnAdapter(client.to_owned());
    let (host, device) = site.device(client).ok_or_else(not_adapter)?;
    let host = &site.hosts[host.0];
    let adapter = &host.devices[device.0];
    if !matches!(adapter.kind, DeviceKind::Adapter | DeviceKind::Card(_)) {
        return Err(not_adapter());
    }
    if host.sockets.is_empty() {
        return Err(no_host_memory(host).into());
    }
    let mut above = adapter.parent;
    let near = loop {
        match above {
            Parent::Socket(socket) => break socket,
            Parent::Switch(switch) => above = host.devices[switch.0].parent,
        }
    };
    let not_memory = || BenchmarkError::NotAnAdapter(server.to_owned());
    let memory = match server.strip_prefix(host.name.as_str()).ok_or_else(not_memory)? {
        "" => near,
        rest => {
            let place =
                rest.strip_prefix(".socket").and_then(|digits| digits.parse().ok()).ok_or_else(not_memory)?;
            if place >= host.sockets.len() {
                return Err(not_memory());
            }
            SocketId(place)
        }
    };
    match adapter.id.as_str() {
        "nfp6000" => {
            let memory_host = pcie_bench::host(p, &host.sockets[near.0].id, memory != near);
            Ok((nfp6000(p, "nfp6000.dma.overhead"), memory_host, adapter.pcie))
        }
        "apenet" => Ok((apenet::dma_engine(p.count("apenet.engines")), apenet::dma_host(p), adapter.pcie)),
        id => {
            let engine = card_engine(p, id).ok_or_else(|| BenchmarkError::NoDmaEngine {
                name: client.to_owned(),
                model: adapter.model.clone(),
            })?;
            let processor = &host.sockets[near.0].id;
            let memory_host = pcie_bench::host(p, processor, memory != near);
            let efficiency = p.device(id, "pcie.efficiency").unwrap_or(memory_host.efficiency);
            // The cards have several requests in progress: the rate of one is not the limit.
            let rate = host_completer(p, processor).rate;
            let completer = CompleterTiming { rate, ..memory_host.memory };
            Ok((
                engine,
                DmaHost { efficiency, memory: completer, ..memory_host },
                negotiated_link(host, adapter),
            ))
        }
    }
}

/// Bandwidth of writing a tile to a card, of one stencil sweep, and of reading the tile back.
pub(crate) fn stencil_rates(
    precision: Precision,
    site: &Site,
    p: &Parameters,
    client: &str,
    server: &str,
) -> Result<[BytesPerSecond; 3], BenchmarkError> {
    let path = data_path(site, p, client, server)?;
    let sweep = stencil_rate(site, p, server).ok_or_else(|| BenchmarkError::NoCard(server.to_owned()))?;
    let transfer = |verb| bandwidth_at(precision, &path, verb, 1 << 20, 128, false).rate;
    Ok([transfer(Verb::Write), sweep, transfer(Verb::Read)])
}

/// Result of a benchmark in seconds, or bytes per second.
///
/// # Errors
/// [`BenchmarkError`] as of [`measure`].
pub fn value(
    site: &Site,
    p: &Parameters,
    benchmark: Benchmark,
    between: (&str, &str),
    size: u64,
) -> Result<f64, BenchmarkError> {
    let rows = measure(site, p, benchmark, between, &[size])?;
    let column = if benchmark == Benchmark::Stencil { 4 } else { 1 };
    let result = rows.first().and_then(|row| match row.get(column) {
        Some(TableValue::Number(number)) => Some(*number),
        _ => None,
    });
    let factor = match benchmark {
        Benchmark::Bandwidth(_) => f64::from(1 << 20),
        Benchmark::Latency(_) | Benchmark::Osu(osu::OsuTest::Latency) => 1e-6,
        Benchmark::Osu(_) => 1e6,
        Benchmark::Dma(_) => 0.125e9,
        Benchmark::DmaLatency | Benchmark::Mlc(MlcTest::IdleLatency) => 1e-9,
        Benchmark::Mlc(_) => 1e9,
        Benchmark::Stencil => 1.0,
    };
    Ok(result.map_or(f64::NAN, |number| number * factor))
}

/// Runs a benchmark between two endpoints of a site; one row per size, starting with the size.
///
/// # Errors
/// [`BenchmarkError`] if the site lacks the endpoints, a path between them, or the benchmark's
/// devices.
pub fn measure(
    site: &Site,
    p: &Parameters,
    benchmark: Benchmark,
    between: (&str, &str),
    sizes: &[u64],
) -> Result<Vec<Vec<TableValue>>, BenchmarkError> {
    let results = results(Precision::Full, site, p, benchmark, between, sizes)?;
    let row = |(&size, values): (&u64, Vec<f64>)| -> Vec<TableValue> {
        std::iter::once(size as f64).chain(values).map(TableValue::Number).collect()
    };
    Ok(sizes.iter().zip(results).map(row).collect())
}

/// [`measure`] with two more values in each row: the ends of the 90 % interval of the result's
/// [main column](Benchmark::main_column), from this many samples of the parameters.
///
/// # Errors
/// As [`measure`].
pub fn measure_with_intervals(
    site: &Site,
    p: &Parameters,
    benchmark: Benchmark,
    between: (&str, &str),
    sizes: &[u64],
    samples: u64,
) -> Result<Vec<Vec<TableValue>>, BenchmarkError> {
    let mut rows = measure(site, p, benchmark, between, sizes)?;
    let main = benchmark.main_column();
    let spreads = response::spreads(&p.with_devices(&site.devices), samples, |p| {
        let results = results(Precision::Sample, site, p, benchmark, between, sizes).ok()?;
        Some(results.iter().map(|values| values[main]).collect())
    });
    let path = data_path(site, p, between.0, between.1).ok();
    for ((&size, row), spread) in sizes.iter().zip(&mut rows).zip(spreads) {
        let Some(&TableValue::Number(value)) = row.get(1 + main) else { continue };
        let factors = factors(leave_out::shipped(), Level::System, benchmark.category(path.as_ref(), size));
        let interval = Interval::new(value, spread, factors).below(benchmark.limit(path.as_ref()));
        row.extend([interval.low, interval.high].map(TableValue::Number));
    }
    Ok(rows)
}

/// Values of the benchmark's columns, by size.
fn results(
    precision: Precision,
    site: &Site,
    p: &Parameters,
    benchmark: Benchmark,
    (client, server): (&str, &str),
    sizes: &[u64],
) -> Result<Vec<Vec<f64>>, BenchmarkError> {
    let max = benchmark.max_size();
    if let Some(&size) = sizes.iter().find(|&&size| size == 0 || size > max) {
        return Err(BenchmarkError::Size { benchmark: benchmark.info().name, max, size });
    }
    let rows = |f: &(dyn Fn(u32) -> Vec<f64> + Sync)| parallel_map(sizes, |&size| f(size as u32));
    let results = match benchmark {
        Benchmark::Bandwidth(verb) => {
            let path = data_path(site, p, client, server)?;
            rows(&|size| {
                let rate = bandwidth_at(precision, &path, verb, size, 128, false).rate;
                vec![rate.0 / f64::from(1 << 20), rate.as_gigabits(), rate.0 / f64::from(size) * 1e-6]
            })
        }
        Benchmark::Latency(verb) => {
            let path = data_path(site, p, client, server)?;
            rows(&|size| vec![latency_at(precision, &path, verb, size).nanos() * 1e-3])
        }
        Benchmark::Osu(test) => {
            let (path, mpi) = (data_path(site, p, client, server)?, Mpi::new(p, MpiLibrary::default()));
            rows(&|size| {
                vec![match test {
                    osu::OsuTest::Latency => osu::latency(&path, &mpi, size).nanos() * 1e-3,
                    _ => {
                        let both = test == osu::OsuTest::Bidirectional;
                        osu::bandwidth_at(precision, &path, &mpi, size, both).rate.0 * 1e-6
                    }
                }]
            })
        }
        Benchmark::Dma(test) => {
            let (engine, host, link) = dma_setup(site, p, client, server)?;
            rows(&|size| vec![dma::bandwidth(&engine, &host, &link, test, size).as_gigabits()])
        }
        Benchmark::DmaLatency => {
            let (engine, host, link) = dma_setup(site, p, client, server)?;
            rows(&|size| vec![dma::read_latency(&engine, &host, &link, size).nanos()])
        }
        Benchmark::Mlc(test) => {
            let access = core_access(site, p, client, server)?.ok_or_else(|| {
                BenchmarkError::NotCxlMemory { client: client.to_owned(), server: server.to_owned() }
            })?;
            rows(&|size| {
                vec![match test {
                    MlcTest::IdleLatency => mlc::idle_latency(&access).nanos(),
                    _ => mlc::bandwidth(precision, &access, test, size).rate.as_gigabytes(),
                }]
            })
        }
        Benchmark::Stencil => {
            let rates = stencil_rates(precision, site, p, client, server)?;
            parallel_map(sizes, |&size| {
                let parts = rates.map(|rate| size as f64 / rate.0);
                vec![parts[0], parts[1], parts[2], parts.iter().sum()]
            })
        }
    };
    Ok(results)
}
