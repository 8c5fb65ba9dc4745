//! The measuring programs by their names, between two places of a site: what `millstream model measure` runs.

use crate::benchmarks::apenet;
use crate::benchmarks::dma::{self, DmaEngine, DmaHost, DmaTest};
use crate::benchmarks::osu::{self, Mpi};
use crate::benchmarks::perftest::{bandwidth, latency};
use crate::parallel::parallel_map;
use crate::parameters::Parameters;
use crate::path::Verb;
use crate::path::{PathError, data_path, stencil_rate};
use crate::result_table::TableValue;
use crate::rows::{bench_host, nfp6000};
use millstream_site::schema::PcieLink;
use millstream_site::validate::Parent;
use millstream_site::{DeviceKind, Site, SocketId};
use std::str::FromStr;

/// A measuring program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Benchmark {
    /// perftest's bandwidth of a verb.
    Bandwidth(Verb),
    /// perftest's latency of a verb.
    Latency(Verb),
    /// An OSU micro-benchmark.
    Osu(osu::OsuTest),
    /// pcie-bench's bandwidth.
    Dma(DmaTest),
    /// pcie-bench's read latency.
    DmaLatency,
    /// One sweep of the five-point stencil over a tile on a remote card.
    Stencil,
}

/// A tool with all that people and the command line have to know of it.
#[derive(Clone, Copy, Debug)]
pub struct BenchmarkInfo {
    /// The tool.
    pub benchmark: Benchmark,
    /// Its name, as the real one's.
    pub name: &'static str,
    /// What its numbers are.
    pub definition: &'static str,
    /// Columns after the size.
    pub columns: &'static [&'static str],
    /// Smallest and largest size if none are given: powers of two.
    pub sizes: (u64, u64),
}

const BW: &[&str] = &["BW average [MiB/s]", "BW average [Gb/s]", "message rate [Mpps]"];
const LAT: &[&str] = &["t_typical [us]"];
const OSU: &[&str] = &["bandwidth [MB/s]"];
const DMA: &[&str] = &["bandwidth [Gb/s]"];
const BW_IS: &str = "payload by the time between completions at the client, one queue pair, 128 requests under way; MiB are 2^20 bytes, Gb 10^9 bits (perftest)";
const LAT_IS: &str = "half a round trip, one message at a time (perftest)";

/// All tools.
pub const BENCHMARKS: &[BenchmarkInfo] = &[
    BenchmarkInfo {
        benchmark: Benchmark::Bandwidth(Verb::Write),
        name: "ib_write_bw",
        definition: BW_IS,
        columns: BW,
        sizes: (2, 8 << 20),
    },
    BenchmarkInfo {
        benchmark: Benchmark::Bandwidth(Verb::Read),
        name: "ib_read_bw",
        definition: BW_IS,
        columns: BW,
        sizes: (2, 8 << 20),
    },
    BenchmarkInfo {
        benchmark: Benchmark::Bandwidth(Verb::Send),
        name: "ib_send_bw",
        definition: BW_IS,
        columns: BW,
        sizes: (2, 8 << 20),
    },
    BenchmarkInfo {
        benchmark: Benchmark::Latency(Verb::Write),
        name: "ib_write_lat",
        definition: LAT_IS,
        columns: LAT,
        sizes: (2, 8 << 20),
    },
    BenchmarkInfo {
        benchmark: Benchmark::Latency(Verb::Read),
        name: "ib_read_lat",
        definition: "a whole round trip, one message at a time (perftest)",
        columns: LAT,
        sizes: (2, 8 << 20),
    },
    BenchmarkInfo {
        benchmark: Benchmark::Latency(Verb::Send),
        name: "ib_send_lat",
        definition: LAT_IS,
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
        definition: "windows of 64 sends, each answered by 4 bytes; MB are 10^6 bytes (OMB 5.3)",
        columns: OSU,
        sizes: (1, 4 << 20),
    },
    BenchmarkInfo {
        benchmark: Benchmark::Osu(osu::OsuTest::Bidirectional),
        name: "osu_bibw",
        definition: "windows of 64 receives and 64 sends on both ends, both directions added; MB are 10^6 bytes (OMB 5.3)",
        columns: OSU,
        sizes: (1, 4 << 20),
    },
    BenchmarkInfo {
        benchmark: Benchmark::Dma(DmaTest::Read),
        name: "dma_read_bw",
        definition: "an adapter's DMA reads of memory, bytes by time (pcie-bench BW_DMA_RD)",
        columns: DMA,
        sizes: (64, 2048),
    },
    BenchmarkInfo {
        benchmark: Benchmark::Dma(DmaTest::Write),
        name: "dma_write_bw",
        definition: "an adapter's DMA writes to memory, bytes by time (pcie-bench BW_DMA_WR)",
        columns: DMA,
        sizes: (64, 2048),
    },
    BenchmarkInfo {
        benchmark: Benchmark::Dma(DmaTest::ReadWrite),
        name: "dma_rw_bw",
        definition: "reads and writes in turns, bytes of one direction by time (pcie-bench BW_DMA_RW)",
        columns: DMA,
        sizes: (64, 2048),
    },
    BenchmarkInfo {
        benchmark: Benchmark::DmaLatency,
        name: "dma_read_lat",
        definition: "one DMA read, from its start to the adapter's hearing of its end (pcie-bench LAT_DMA_RD)",
        columns: &["latency [ns]"],
        sizes: (8, 2048),
    },
    BenchmarkInfo {
        benchmark: Benchmark::Stencil,
        name: "stencil",
        definition: "a tile is written to the card, swept once by the five-point Jacobi kernel in one bank, and read back, one after the other",
        columns: &["write [s]", "sweep [s]", "read back [s]", "all [s]"],
        sizes: (1 << 28, 1 << 32),
    },
];

/// What cannot be measured.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BenchmarkError {
    /// The site cannot carry it.
    #[error(transparent)]
    Path(#[from] PathError),
    /// DMA tests start from an adapter.
    #[error(
        "{0:?}: DMA tests go from an adapter, as host.adapter, to its host or a socket, as host or host.socket1"
    )]
    NotAnAdapter(String),
    /// The adapter's DMA engine is not described.
    #[error("{name:?} is a {model}: DMA engines are described of the NFP-6000 and of APEnet+")]
    NoDmaEngine {
        /// The adapter.
        name: String,
        /// What it is.
        model: String,
    },
    /// The stencil needs a card.
    #[error("{0:?}: the stencil runs on a card with memory, as host.card")]
    NoCard(String),
    /// No such size.
    #[error("{benchmark} takes sizes from 1 to {most} bytes, not {size}")]
    Size {
        /// The tool.
        benchmark: &'static str,
        /// The most that it takes.
        most: u64,
        /// What was asked for.
        size: u64,
    },
}

impl FromStr for Benchmark {
    type Err = String;

    fn from_str(text: &str) -> Result<Benchmark, String> {
        let names = || BENCHMARKS.iter().map(|t| t.name).collect::<Vec<_>>().join(", ");
        let found = BENCHMARKS.iter().find(|t| t.name == text);
        found.map(|t| t.benchmark).ok_or_else(|| format!("no benchmark {text:?}; there are {}", names()))
    }
}

impl Benchmark {
    /// What there is to know of it.
    ///
    /// # Panics
    /// Never: the list has all tools, and a test looks for each.
    #[must_use]
    pub fn info(self) -> &'static BenchmarkInfo {
        BENCHMARKS.iter().find(|t| t.benchmark == self).expect("the list has all tools")
    }

    /// The largest message: simulations count in 32 bits.
    fn max_size(self) -> u64 {
        if self == Benchmark::Stencil { 1 << 50 } else { 1 << 30 }
    }

    /// Its usual sizes.
    #[must_use]
    pub fn sizes(self) -> Vec<u64> {
        let (low, high) = self.info().sizes;
        std::iter::successors(Some(low), |size| Some(size * 2)).take_while(|&size| size <= high).collect()
    }
}

/// An adapter's DMA engine and the memory it goes to.
fn dma_setup(
    site: &Site,
    p: &Parameters,
    client: &str,
    server: &str,
) -> Result<(DmaEngine, DmaHost, PcieLink), BenchmarkError> {
    let fail = || BenchmarkError::NotAnAdapter(client.to_owned());
    let (host, device) = site.device(client).ok_or_else(fail)?;
    let host = &site.hosts[host.0];
    let adapter = &host.devices[device.0];
    if adapter.kind != DeviceKind::Adapter {
        return Err(fail());
    }
    let mut above = adapter.parent;
    let near = loop {
        match above {
            Parent::Socket(socket) => break socket,
            Parent::Switch(switch) => above = host.devices[switch.0].parent,
        }
    };
    let wrong = || BenchmarkError::NotAnAdapter(server.to_owned());
    let memory = match server.strip_prefix(host.name.as_str()).ok_or_else(wrong)? {
        "" => near,
        rest => {
            let place =
                rest.strip_prefix(".socket").and_then(|digits| digits.parse().ok()).ok_or_else(wrong)?;
            if place >= host.sockets.len() {
                return Err(wrong());
            }
            SocketId(place)
        }
    };
    let model = adapter.model.to_uppercase();
    if model.contains("NFP") {
        // The table's words for hosts.
        let processor = host.sockets[near.0].processor.as_str();
        let known = [("v2", "IB-"), ("v4", "BDW-")];
        let name = known.iter().find(|(word, _)| processor.ends_with(word)).map_or("HSW-", |(_, name)| name);
        let distance = if memory == near { "local" } else { "remote" };
        let end = bench_host(p, &format!("{name}{processor}-{distance}"));
        return Ok((nfp6000(p, "nfp6000.dma.overhead"), end, adapter.pcie));
    }
    if model.contains("APENET") {
        return Ok((apenet::dma_engine(p.count("apenet.engines")), apenet::dma_host(p), adapter.pcie));
    }
    Err(BenchmarkError::NoDmaEngine { name: client.to_owned(), model: adapter.model.clone() })
}

/// Runs a tool between two places of a site; one row for each size, the size first.
///
/// # Errors
/// [`MeasureError`] if the site has not got the places, or no way between them.
pub fn measure(
    site: &Site,
    p: &Parameters,
    benchmark: Benchmark,
    (client, server): (&str, &str),
    sizes: &[u64],
) -> Result<Vec<Vec<TableValue>>, BenchmarkError> {
    let most = benchmark.max_size();
    if let Some(&size) = sizes.iter().find(|&&size| size == 0 || size > most) {
        return Err(BenchmarkError::Size { benchmark: benchmark.info().name, most, size });
    }
    let rows = |f: &(dyn Fn(u32) -> Vec<f64> + Sync)| parallel_map(sizes, |&size| f(size as u32));
    let results = match benchmark {
        Benchmark::Bandwidth(verb) => {
            let path = data_path(site, p, client, server)?;
            rows(&|size| {
                let rate = bandwidth(&path, verb, size, 128, false).rate;
                vec![rate.0 / f64::from(1 << 20), rate.as_gigabits(), rate.0 / f64::from(size) * 1e-6]
            })
        }
        Benchmark::Latency(verb) => {
            let path = data_path(site, p, client, server)?;
            rows(&|size| vec![latency(&path, verb, size).nanos() * 1e-3])
        }
        Benchmark::Osu(test) => {
            let (path, mpi) = (data_path(site, p, client, server)?, Mpi::new(p));
            rows(&|size| {
                vec![match test {
                    osu::OsuTest::Latency => osu::latency(&path, &mpi, size).nanos() * 1e-3,
                    _ => {
                        let both = test == osu::OsuTest::Bidirectional;
                        osu::bandwidth(&path, &mpi, size, both).rate.0 * 1e-6
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
        Benchmark::Stencil => {
            let path = data_path(site, p, client, server)?;
            let sweep =
                stencil_rate(site, p, server).ok_or_else(|| BenchmarkError::NoCard(server.to_owned()))?;
            let transfer = |verb| bandwidth(&path, verb, 1 << 20, 128, false).rate.0;
            let (write, read) = (transfer(Verb::Write), transfer(Verb::Read));
            parallel_map(sizes, |&size| {
                let parts = [write, sweep.0, read].map(|rate| size as f64 / rate);
                vec![parts[0], parts[1], parts[2], parts.iter().sum()]
            })
        }
    };
    let rows = sizes
        .iter()
        .zip(results)
        .map(|(&size, values)| std::iter::once(size as f64).chain(values).map(TableValue::Number).collect());
    Ok(rows.collect())
}
