//! Arguments of `millstream bench`.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::builder::RangedU64ValueParser;
use clap::{Args, Subcommand, ValueEnum};
use millstream_bench::model::ModelCase;
use millstream_bench::verbs::raw_verbs::Operation;
use millstream_card_server::backing::BackingKind;

#[derive(Debug, Args)]
pub(crate) struct BenchOptions {
    #[command(subcommand)]
    pub(crate) command: BenchCommand,
    /// Folder of the results files, one a benchmark: NAME.jsonl
    #[arg(long, global = true, default_value = "target/bench", value_name = "FOLDER")]
    pub(crate) out: PathBuf,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Measure the soft device on one host: perftest, UCX and a raw verbs program
    ///
    ///     millstream bench verbs --rounds 3
    #[command(verbatim_doc_comment)]
    Verbs {
        #[command(flatten)]
        rounds: Rounds<5>,
    },
    /// Measure the soft device's costs by queue pairs and processes
    ///
    ///     millstream bench scale
    #[command(verbatim_doc_comment)]
    Scale {
        #[command(flatten)]
        rounds: Rounds<3>,
    },
    /// Measure the soft device between two network namespaces (as root)
    ///
    ///     millstream bench wire --only ib_write_bw --mtu 9000 --rounds 1
    #[command(verbatim_doc_comment)]
    Wire {
        #[command(flatten)]
        rounds: Rounds<3>,
        /// MTUs of the veth pair
        #[arg(long, value_delimiter = ',', default_values_t = [1500, 9000], value_name = "BYTES")]
        mtu: Vec<u32>,
        /// Measure only figures whose names contain one of these words, and their baselines
        #[arg(long, value_delimiter = ',', value_name = "WORD")]
        only: Vec<String>,
    },
    /// Measure building and handling of RoCE v2 packets, without sockets
    ///
    ///     millstream bench proto --rounds 5
    #[command(verbatim_doc_comment)]
    Proto {
        #[command(flatten)]
        rounds: Rounds<21>,
    },
    /// Measure the event builder by number of units, batch size and kernel
    ///
    ///     millstream bench evb --seconds 2
    #[command(verbatim_doc_comment)]
    Evb {
        #[command(flatten)]
        rounds: Rounds<3>,
        /// Approximate duration of each run
        #[arg(long, default_value_t = 0.7, value_name = "SECONDS", value_parser = seconds)]
        seconds: f64,
    },
    /// Break processes, sources, disks and links of the event builder, and count what is lost
    ///
    /// Prints the fault matrix. A run takes some seconds; each row has N runs.
    /// Faults of a disk need strace; faults of a link need root, for network
    /// namespaces.
    ///
    ///     millstream bench faults --only builder
    ///     millstream bench faults --only "manager, killed" --rounds 100
    #[command(verbatim_doc_comment)]
    Faults {
        /// Runs of each case; the largest losses, and the median and the longest time to recover are printed
        #[arg(long, default_value_t = 1, value_name = "N", value_parser = at_least_one())]
        rounds: usize,
        /// Run only cases whose names contain one of these words
        #[arg(long, value_name = "WORD", num_args = 1..)]
        only: Vec<String>,
        /// Write the matrix into this page, between its marks; rows of cases that did not run stay
        #[arg(long, value_name = "FILE")]
        document: Option<PathBuf>,
    },
    /// Measure the event builder with many short fragments, and beside busy workers of a software trigger
    ///
    ///     millstream bench evb-load --seconds 2
    #[command(verbatim_doc_comment)]
    EvbLoad {
        #[command(flatten)]
        rounds: Rounds<3>,
        /// Approximate duration of each run
        #[arg(long, default_value_t = 0.7, value_name = "SECONDS", value_parser = seconds)]
        seconds: f64,
    },
    /// Measure what a builder unit stores a second, as whole batches and in HDF5, beside `dd`
    ///
    ///     millstream bench evb-storage --megabytes 4000 --out /data/bench
    #[command(verbatim_doc_comment)]
    EvbStorage {
        #[command(flatten)]
        rounds: Rounds<3>,
        /// Payload of each run, and room that it needs in the folder of `--out`
        #[arg(long, default_value_t = 1000, value_name = "MB", value_parser = clap::value_parser!(u64).range(1..))]
        megabytes: u64,
    },
    /// Run the event builder at full rate for ten minutes, and compare its rate, memory and descriptors with those at the start
    ///
    ///     millstream bench evb-endurance --seconds 60
    #[command(verbatim_doc_comment)]
    EvbEndurance {
        /// Approximate duration of the run
        #[arg(long, default_value_t = 600.0, value_name = "SECONDS", value_parser = seconds)]
        seconds: f64,
    },
    /// Measure cards on the network: transfers, doorbell to interrupt, idle CPU time, the cluster7 kernel
    ///
    ///     millstream bench card --only doorbell
    #[command(verbatim_doc_comment)]
    Card {
        #[command(flatten)]
        rounds: Rounds<5>,
        /// Measure only figures whose names contain one of these words
        #[arg(long, value_name = "WORD", num_args = 1..)]
        only: Vec<String>,
    },
    /// Measure a card of GPU memory beside an emulated one, with the event builder on both
    ///
    ///     millstream bench gpu --memory-kind cuda:0
    #[command(verbatim_doc_comment)]
    Gpu {
        #[command(flatten)]
        rounds: Rounds<3>,
        /// Kind of card memory: cuda:N
        #[arg(long, default_value = "cuda:0", value_name = "KIND", value_parser = crate::card::args::memory_kind)]
        memory_kind: BackingKind,
    },
    /// Measure MPI messages between host and card memory against UCX's shared memory and copies; HPC Challenge, LAMMPS
    ///
    /// Needs Open MPI (openmpi-bin, libopenmpi-dev) and the libraries and headers of
    /// `make lib`; HPC Challenge (hpcc) and LAMMPS are optional.
    ///
    ///     millstream bench mpi --rounds 3
    #[command(verbatim_doc_comment)]
    Mpi {
        #[command(flatten)]
        rounds: Rounds<3>,
        /// Duration of each measurement of one message size
        #[arg(long, default_value_t = 0.2, value_name = "SECONDS", value_parser = seconds)]
        seconds: f64,
    },
    /// Measure the stencil kernel against C, numba, numpy and WebAssembly
    ///
    ///     millstream bench stencil --side 16384
    #[command(verbatim_doc_comment)]
    Stencil {
        #[command(flatten)]
        rounds: Rounds<5>,
        #[command(flatten)]
        grid: SquareGrid,
        /// Python interpreter with numpy and numba [default: venv/bin/python in the results folder, if it exists]
        #[arg(long, value_name = "PROGRAM")]
        python: Option<PathBuf>,
    },
    /// Measure whole stencil jobs on emulated cards against the kernel alone
    ///
    ///     millstream bench stencil-jobs --side 16384
    #[command(verbatim_doc_comment)]
    StencilJobs {
        #[command(flatten)]
        rounds: Rounds<5>,
        #[command(flatten)]
        grid: SquareGrid,
    },
    /// Measure the spin glass of `torus spin` against C, and what the network adds
    ///
    ///     millstream bench spin --side 256
    #[command(verbatim_doc_comment)]
    Spin {
        #[command(flatten)]
        rounds: Rounds<3>,
        /// Sites along each axis
        #[arg(long, default_value_t = 128, value_name = "N", value_parser = at_least_one())]
        side: usize,
        /// Sweeps of a measurement
        #[arg(long, default_value_t = 40, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
        sweeps: u64,
    },
    /// Measure the spiking network of `torus neurons` beside NEST and Brian2
    ///
    ///     millstream bench neurons --columns 10
    #[command(verbatim_doc_comment)]
    Neurons {
        #[command(flatten)]
        rounds: Rounds<3>,
        /// Columns along each axis, of 1000 neurons with 200 synapses
        #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
        columns: u32,
        /// Duration of a measurement in ms
        #[arg(long, default_value_t = 1000, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..))]
        duration: u64,
        /// Python interpreter with NEST and Brian2 [default: venv/bin/python in the results folder, if it exists]
        #[arg(long, value_name = "PROGRAM")]
        python: Option<PathBuf>,
    },
    /// Measure the search of `torus bfs` beside networkit, igraph and GraphBLAS
    ///
    ///     millstream bench bfs --scale 20
    #[command(verbatim_doc_comment)]
    Bfs {
        #[command(flatten)]
        rounds: Rounds<3>,
        /// Logarithm of the number of vertices
        #[arg(long, default_value_t = 18, value_name = "SCALE", value_parser = clap::value_parser!(u32).range(4..=26))]
        scale: u32,
        /// Number of searches of a round
        #[arg(long, default_value_t = 16, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
        roots: u32,
        /// Python interpreter with the libraries [default: venv/bin/python in the results folder, if it exists]
        #[arg(long, value_name = "PROGRAM")]
        python: Option<PathBuf>,
    },
    /// Measure the model: its event queue against heaps, its flow level against SimGrid
    ///
    ///     millstream bench model
    #[command(verbatim_doc_comment)]
    Model {
        #[command(flatten)]
        rounds: Rounds<3>,
    },
    /// Measure the torus against a full mesh, a bare WRITE and memcpy
    ///
    ///     millstream bench torus --rounds 3
    #[command(verbatim_doc_comment)]
    Torus {
        #[command(flatten)]
        rounds: Rounds<3>,
    },
    /// The application of `bench torus` on one node
    #[command(hide = true)]
    TorusClient {
        /// File for the values that node 0 measures
        #[arg(long, value_name = "FILE")]
        results: Option<PathBuf>,
        /// Only put this many messages to each neighbour
        #[arg(long, value_name = "N")]
        traffic: Option<u32>,
        /// Only publish a region, and wait for a host outside of the torus
        #[arg(long)]
        serve_outside: bool,
    },
    /// Render docs/benchmarks.md from the results of all machines
    ///
    /// Copies the results files of this machine into its folder below RESULTS, then
    /// renders the document from all files there. The results of other machines and
    /// benchmarks stay. Results of a partial run, which lack figures that the
    /// folder of their machine has, are an error.
    ///
    ///     millstream bench report
    #[command(verbatim_doc_comment)]
    Report {
        /// Folder of the results that the repository keeps, one folder a machine
        #[arg(long, default_value = "docs/benchmarks", value_name = "FOLDER")]
        results: PathBuf,
        /// The document
        #[arg(long, default_value = "docs/benchmarks.md", value_name = "FILE")]
        document: PathBuf,
        /// The page with the short table of figures
        #[arg(long, default_value = "README.md", value_name = "FILE")]
        readme: PathBuf,
    },
    /// One side of the raw UDP link; `wire` starts it
    #[command(hide = true)]
    RawUdp(RawUdpOptions),
    /// One side of the raw verbs program; `verbs` starts it. Without HOST it is the server
    #[command(hide = true)]
    RawVerbs(RawVerbsArguments),
    /// One simulation; `model` starts it. Prints events, virtual seconds and peak memory in KiB
    #[command(hide = true)]
    ModelCase {
        /// torus, concurrent or sequential
        case: ModelCase,
        /// Hosts, or nodes along each dimension of a torus
        size: u32,
        /// Messages from each host to each other host
        messages: u32,
        /// Bytes per message
        bytes: u64,
    },
    /// One reading process; `scale` starts it
    #[command(hide = true)]
    ScaleReader {
        /// The server: host:port
        address: String,
        /// Bytes of its region
        size: usize,
    },
    /// The costs of registered memory of one size; `scale` starts it
    #[command(hide = true)]
    ScaleRegistration {
        /// Bytes of the region
        size: usize,
    },
    /// One client process; `scale` starts it
    #[command(hide = true)]
    ScaleClient {
        /// The server: host:port
        address: String,
        /// Queue pairs
        pairs: usize,
    },
}

/// Measurements of nothing have no value.
fn at_least_one() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..)
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if seconds > 0.0 && seconds.is_finite() => Ok(seconds),
        _ => Err("expected a number of seconds above 0".to_owned()),
    }
}

#[derive(Debug, Args)]
pub(crate) struct Rounds<const DEFAULT: usize> {
    /// Interleaved rounds; most values are medians over them
    #[arg(long, default_value_t = DEFAULT, value_name = "N", value_parser = at_least_one())]
    pub(crate) rounds: usize,
}

#[derive(Debug, Args)]
pub(crate) struct SquareGrid {
    /// Rows and columns of the grid
    #[arg(long, default_value_t = 8192, value_name = "N", value_parser = at_least_one())]
    pub(crate) side: usize,
}

#[derive(Debug, Args)]
pub(crate) struct RawUdpOptions {
    /// The role of this process, and what to measure
    pub(crate) role: RawUdpRole,
    /// Payload per packet (bytes)
    #[arg(long, default_value_t = 1024, value_name = "BYTES")]
    pub(crate) payload: usize,
    /// Let the kernel split buffers into packets
    #[arg(long)]
    pub(crate) segmentation_offload: bool,
    /// Compute and check the ICRC of each packet
    #[arg(long)]
    pub(crate) icrc: bool,
    /// Local address
    #[arg(long, default_value = "127.0.0.1")]
    pub(crate) from: IpAddr,
    /// The server's address
    #[arg(long, default_value = "127.0.0.1")]
    pub(crate) to: IpAddr,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum RawUdpRole {
    Serve,
    Bandwidth,
    Latency,
}

#[derive(Debug, Args)]
pub(crate) struct RawVerbsArguments {
    /// write, read, send, latency, latency-completed, system-write or system-read
    pub(crate) operation: Operation,
    /// The server's host; this process is the server if it is missing
    pub(crate) host: Option<String>,
    /// TCP port of the server
    #[arg(short, long)]
    pub(crate) port: u16,
    /// Bytes per work request
    #[arg(short, long, default_value_t = 8)]
    pub(crate) size: u32,
    /// Work requests per ibv_post_send, a power of two
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub(crate) post_list: usize,
    /// Send the data inline
    #[arg(long)]
    pub(crate) inline: bool,
    /// Register private memory on the server
    #[arg(long)]
    pub(crate) private: bool,
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use crate::args::Arguments;

    #[test]
    fn counts_and_durations_of_nothing_are_refused() {
        for (command, option, values) in [
            ("verbs", "--rounds", &["0", "-1"][..]),
            ("faults", "--rounds", &["0"]),
            ("evb", "--seconds", &["0", "-1", "nan", "inf", "1s"]),
            ("mpi", "--seconds", &["0"]),
            ("evb-storage", "--megabytes", &["0"]),
            ("neurons", "--duration", &["0"]),
            ("stencil", "--side", &["0"]),
        ] {
            for value in values {
                let words = ["millstream", "bench", command, &format!("{option}={value}")];
                let error = Arguments::try_parse_from(words).map(drop).unwrap_err().to_string();
                assert!(error.contains(option) && error.contains(value), "{error}");
            }
        }
    }
}
