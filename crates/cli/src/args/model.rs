//! Arguments of `millstream model`.

use std::path::PathBuf;

use clap::builder::RangedU64ValueParser;
use clap::{Args, Subcommand};
use millstream_model::power::{IdleStates, Load};

/// Numbers of samples that are simulated in seconds, and whose results fit into memory.
fn samples() -> RangedU64ValueParser<u64> {
    clap::value_parser!(u64).range(..=1_000_000)
}

#[derive(Debug, Args)]
pub(crate) struct Settings {
    /// Override a parameter, for example `u280.reads=16`; `model calibrate` lists all parameters
    ///
    /// `explain`, `flows` and `measure` also accept a path into the site file (`host.server.adapter.hca.pcie.lanes=8`,
    /// `link.0.rate=HDR`); `explain` and `measure` also several values: a list `A,B,C` or a range `A..B`,
    /// `A..B+STEP`, `A..B*FACTOR`.
    #[arg(long = "set", value_name = "NAME=VALUE")]
    pub(crate) set: Vec<String>,
}

/// Output files for a table of results and its picture.
#[derive(Debug, Args)]
pub(crate) struct ResultOptions {
    #[command(flatten)]
    pub(crate) tables: TableOptions,
    /// Also draw the results; `-` for standard output, without the text
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
}

/// Output files for a table of results.
#[derive(Debug, Args)]
pub(crate) struct TableOptions {
    /// Also write the results as JSON; `-` for standard output, without the text
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Also write the results as comma-separated values; `-` for standard output, without the text
    #[arg(long, value_name = "FILE")]
    pub(crate) csv: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ModelCommand {
    /// Print every parameter with its range, and the residual of every published row
    ///
    ///     millstream model calibrate --set u280.reads=16
    ///     millstream model calibrate --leave-one-out
    ///     millstream model calibrate --measurements ib_write_bw.txt --site sites/edr-pair.toml --out devices.toml
    ///     millstream model calibrate --measurements fio.json --site sites/p3700-disks.toml --out devices.toml
    #[command(verbatim_doc_comment)]
    Calibrate {
        #[command(flatten)]
        settings: Settings,
        /// Fit the parameters again instead of using the shipped values
        #[arg(long)]
        fit: bool,
        /// Predict every published row without itself, its host and its system; print errors and coverage of intervals
        #[arg(long, value_name = "SAMPLES", num_args = 0..=1, default_missing_value = "1000", value_parser = samples())]
        leave_one_out: Option<u64>,
        /// Fit the devices of --site to this output of perftest, OSU, fio or pcie-bench, or CSV file (benchmark,bytes,value,unit, and queue-depth of disks)
        #[arg(long, value_name = "FILE", requires = "site", conflicts_with_all = ["fit", "leave_one_out"])]
        measurements: Vec<PathBuf>,
        /// Site on which --measurements ran
        #[arg(long, value_name = "FILE", requires = "measurements")]
        site: Option<PathBuf>,
        /// Client of the measurements: host, host.card, or host.adapter of DMA tests [default: the first host]
        #[arg(long, requires = "measurements")]
        client: Option<String>,
        /// Server of the measurements: host or host.card [default: the second host]
        #[arg(long, requires = "measurements")]
        server: Option<String>,
        /// Disk of the measurements with fio: host.ssd [default: the site's only disk model]
        #[arg(long, value_name = "HOST.SSD", requires = "measurements")]
        disk: Option<String>,
        /// Output file with the fitted devices, for the site file; `-` for standard output, without the report
        #[arg(long, value_name = "FILE", requires = "measurements")]
        out: Option<PathBuf>,
    },
    /// Predict the rows of a question table, with 90 % intervals
    ///
    ///     millstream model predict --questions questions.csv --out answers.csv
    #[command(verbatim_doc_comment)]
    Predict {
        /// CSV file with the columns id, system, quantity, unit
        #[arg(long, value_name = "FILE")]
        questions: PathBuf,
        /// Output CSV file with the columns id, value, unit, low, high, how; `-` for standard output
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
        /// Number of parameter samples for the intervals
        #[arg(long, default_value_t = millstream_model::predict::SAMPLES, value_name = "N", value_parser = samples())]
        samples: u64,
        #[command(flatten)]
        settings: Settings,
    },
    /// Draw figures as SVG, each with its data as CSV
    ///
    ///     millstream model figures --out figures
    #[command(verbatim_doc_comment)]
    Figures {
        /// Output folder
        #[arg(long, default_value = "target/figures", value_name = "FOLDER")]
        out: PathBuf,
        #[command(flatten)]
        settings: Settings,
    },
    /// Simulate the event builder on a site: the state machines of the real program over a modelled network
    ///
    /// The default site is the LHCb event builder: 500 nodes, one second of data
    /// taking (docs/model-event-builder.md).
    ///
    ///     millstream model event-builder --nodes 64 --seconds 0.01
    #[command(verbatim_doc_comment)]
    EventBuilder(ModelledEventBuilder),
    /// Predict the bandwidth of a flow, its bottleneck and the next limit
    ///
    /// A flow is VERB CLIENT SERVER [BYTES]; client and server are hosts, or cards, CXL
    /// memory and disks as host.card; BYTES are the block size of a disk. Cores of a
    /// host read and write its own CXL memory:
    ///
    ///     millstream model explain sites/recipe-baseline.toml "write client server.u280"
    ///     millstream model explain sites/apenet-torus.toml "write node0 node42" --set torus.torus.lanes=1,2,4
    ///     millstream model explain sites/recipe-backplane.toml "read client server.u280" \
    ///         --set u280.reads=1..32*2 --svg reads.svg
    ///
    /// With several values per setting, prints one row per combination.
    #[command(verbatim_doc_comment)]
    Explain {
        /// The site file
        site: PathBuf,
        /// The flow
        flow: String,
        /// Samples of the parameters behind the interval; 0: no interval
        #[arg(long, default_value_t = millstream_model::predict::SAMPLES, value_name = "N", value_parser = samples())]
        samples: u64,
        #[command(flatten)]
        settings: Settings,
        #[command(flatten)]
        output: ResultOptions,
    },
    /// Predict the bandwidths of flows that run at the same time
    ///
    /// A flow is VERB CLIENT SERVER [BYTES], or one of --pattern; its ends are hosts,
    /// cards (host.card), CXL memory and disks (host.ssd), also of one host. Flows
    /// share links, PCIe ports, memory (memory-bandwidth) and disks max-min fairly:
    ///
    ///     millstream model flows my.toml "write node0 node2" "write node1 node2"
    ///     millstream model flows my.toml --pattern all-to-all --routing adaptive
    ///     millstream model flows my.toml "write node0.ssd node1.gpu" --csv flows.csv
    ///
    /// Both rates of a flow have 90 % intervals.
    #[command(verbatim_doc_comment)]
    Flows {
        /// The site file
        site: PathBuf,
        /// Flows
        #[arg(required_unless_present = "pattern")]
        flows: Vec<String>,
        /// Also WRITEs between all hosts: all-to-all, shift:N, incast:HOST
        #[arg(long)]
        pattern: Option<millstream_model::flows::Pattern>,
        /// Message size of the pattern
        #[arg(long, default_value_t = 1 << 20, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(1..=1 << 30))]
        bytes: u32,
        /// Shortest routes over switches: deterministic (by destination) or adaptive (all equally)
        #[arg(long, default_value = "deterministic")]
        routing: millstream_model::flows::Routing,
        /// Samples of the parameters behind the intervals; 0: no intervals
        #[arg(long, default_value_t = millstream_model::predict::SAMPLES, value_name = "N", value_parser = samples())]
        samples: u64,
        #[command(flatten)]
        settings: Settings,
        #[command(flatten)]
        tables: TableOptions,
    },
    /// Simulate an incast over RoCE at the last switch: PFC alone, and PFC with DCQCN
    ///
    /// Every packet is simulated, with the soft device's DCQCN; the port's marking
    /// curve is that of the DCQCN paper, scaled to its rate. Senders write without
    /// end.
    ///
    ///     millstream model congestion my.toml --to node0 --from node1 --from node2
    #[command(verbatim_doc_comment)]
    Congestion {
        /// The site file
        site: PathBuf,
        /// The receiver
        #[arg(long, value_name = "HOST")]
        to: String,
        /// A sender; at least two
        #[arg(long, value_name = "HOST", required = true)]
        from: Vec<String>,
        /// Simulated time; the first half is not measured
        #[arg(long, default_value_t = 40.0, value_name = "MS")]
        milliseconds: f64,
        /// Bytes of one sender in the switch above which it is paused [default: network-switch.buffer]
        #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u64).range(8192..))]
        pause_above: Option<u64>,
        #[command(flatten)]
        settings: Settings,
    },
    /// Compare two sites: bandwidth and latency between two memories with intervals, power, energy and price
    ///
    /// Prices come from `price` values of [device.ID] in the site files. --cores,
    /// --frequency, --idle-states and --transfers add the power at this load.
    ///
    ///     millstream model compare sites/edr-pair.toml sites/hdr-fat-tree.toml
    #[command(verbatim_doc_comment)]
    Compare {
        /// One site file
        first: PathBuf,
        /// The other site file
        second: PathBuf,
        /// Client: host or host.card [default: the first host]
        #[arg(long)]
        client: Option<String>,
        /// Server: host or host.card [default: the second host]
        #[arg(long)]
        server: Option<String>,
        #[command(flatten)]
        load: LoadOptions,
        /// Samples of the parameters behind the intervals
        #[arg(long, default_value_t = millstream_model::predict::SAMPLES, value_name = "N", value_parser = samples())]
        samples: u64,
        #[command(flatten)]
        settings: Settings,
    },
    /// Simulate a benchmark program between two memories of a site
    ///
    /// CLIENT and SERVER are hosts, or cards as host.card; DMA tests go from
    /// host.adapter to a host or host.socket1. Benchmarks: ib_write_bw, ib_read_bw,
    /// ib_send_bw, ib_write_lat, ib_read_lat, ib_send_lat, osu_latency, osu_bw,
    /// osu_bibw, dma_read_bw, dma_write_bw, dma_rw_bw, dma_read_lat, stencil;
    /// mlc_idle_latency, mlc_read_bw, mlc_rw_bw and mlc_write_bw go from a host to
    /// CXL memory of this host.
    ///
    ///     millstream model measure ib_write_bw sites/lhcb-pair-fdr-e5.toml node0 node1
    ///     millstream model measure osu_bw sites/extoll-booster.toml booster0.mic booster1.mic --sizes 65536,1048576
    ///     millstream model measure dma_read_bw sites/pcie-bench.toml haswell.nfp haswell
    ///     millstream model measure mlc_read_bw sites/cxl-memory.toml node0 node0.expander
    #[command(verbatim_doc_comment)]
    Measure {
        /// The benchmark
        benchmark: millstream_model::measure::Benchmark,
        /// The site file
        site: PathBuf,
        /// Client: host or host.card
        client: String,
        /// Server: host or host.card
        server: String,
        /// Message sizes in bytes [default: powers of two in the benchmark's range]
        #[arg(long, value_name = "BYTES", value_delimiter = ',')]
        sizes: Vec<u64>,
        /// Samples of the parameters behind the intervals; 0: no intervals
        #[arg(long, default_value_t = millstream_model::predict::SAMPLES, value_name = "N", value_parser = samples())]
        samples: u64,
        #[command(flatten)]
        settings: Settings,
        #[command(flatten)]
        output: ResultOptions,
    },
}

#[derive(Debug, Args)]
pub(crate) struct ModelledEventBuilder {
    /// The site file
    pub(crate) site: Option<PathBuf>,
    /// Use only the first nodes of the site
    #[arg(long)]
    pub(crate) nodes: Option<u16>,
    /// Simulated data-taking time
    #[arg(long, default_value_t = 1.0)]
    pub(crate) seconds: f64,
    /// Event rate
    #[arg(long, default_value_t = 40e6, value_name = "HZ")]
    pub(crate) rate: f64,
    /// Make all events available at the start, to measure the maximum throughput
    #[arg(long)]
    pub(crate) saturated: bool,
    /// Consecutive events per multi-fragment packet
    #[arg(long, default_value_t = 600)]
    pub(crate) batch: u16,
    /// Mean payload of a fragment
    #[arg(long, default_value_t = 200.0, value_name = "BYTES")]
    pub(crate) fragment: f64,
    /// Share of the built events that builder units store on the disks of the site with `write-block`
    #[arg(long, default_value_t = 1.0, value_name = "SHARE")]
    pub(crate) accepted: f64,
    /// Slots (batches) of a builder unit
    #[arg(long, default_value_t = 20)]
    pub(crate) slots: u16,
    /// Batches in flight from a readout unit to one builder unit
    #[arg(long, default_value_t = 8)]
    pub(crate) window: u16,
    /// Batches in flight from a readout unit to all builder units
    #[arg(long, default_value_t = 4)]
    pub(crate) in_flight: u32,
    /// Disable traffic shaping: every readout unit sends in the order of assignment
    #[arg(long)]
    pub(crate) unshaped: bool,
    /// Simulate at packet level: for few nodes and milliseconds
    #[arg(long)]
    pub(crate) packets: bool,
    /// Slow down a builder unit's kernel, for example 3=10
    #[arg(long, value_name = "NODE=FACTOR")]
    pub(crate) slow_builder: Vec<String>,
    /// Drop one fragment at its source in one of this many batches (0: never)
    #[arg(long, default_value_t = 0, value_name = "BATCHES")]
    pub(crate) missing_every: u64,
    /// Corrupt one fragment's checksum in one of this many batches (0: never)
    #[arg(long, default_value_t = 0, value_name = "BATCHES")]
    pub(crate) corrupt_every: u64,
    /// Request a stop at this simulated time
    #[arg(long, value_name = "SECONDS")]
    pub(crate) stop_at: Option<f64>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) settings: Settings,
}

/// What the devices of a site do.
#[derive(Debug, Args)]
pub(crate) struct LoadOptions {
    /// Share of the cores that work, 0 to 1 [default: 1 if another option of the load is given]
    #[arg(long, value_name = "SHARE")]
    cores: Option<f64>,
    /// Clock of the cores relative to that at full load, 0.1 to 2 [default: 1]
    #[arg(long, value_name = "FACTOR")]
    frequency: Option<f64>,
    /// Sleep states of idle cores: deep, or shallow (C1 at most) [default: deep]
    #[arg(long, value_name = "STATES")]
    idle_states: Option<IdleStates>,
    /// Share of their rate that adapters, cards, disks and switches carry, 0 to 1 [default: 1]
    #[arg(long, value_name = "SHARE")]
    transfers: Option<f64>,
}

impl LoadOptions {
    /// The load; none if no option is given.
    pub(crate) fn load(&self) -> Result<Option<Load>, String> {
        let LoadOptions { cores, frequency, idle_states, transfers } = self;
        if cores.or(*frequency).or(*transfers).is_none() && idle_states.is_none() {
            return Ok(None);
        }
        let load = Load {
            cores: cores.unwrap_or(1.0),
            frequency: frequency.unwrap_or(1.0),
            idle: idle_states.unwrap_or_default(),
            transfers: transfers.unwrap_or(1.0),
        };
        load.check().map(Some)
    }
}
