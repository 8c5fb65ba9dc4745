//! The command line: commands, options and their help texts.

#[cfg(feature = "bench")]
pub(crate) mod bench;
#[cfg(feature = "model")]
pub(crate) mod model;
#[cfg(feature = "stencil")]
pub(crate) mod stencil;

use std::ffi::OsString;
use std::num::NonZeroU64;
use std::ops::Range;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use millstream_card_server::backing::BackingKind;
use millstream_rdma::device::DeviceSelector;

#[cfg(feature = "bench")]
use self::bench::BenchOptions;
#[cfg(feature = "model")]
use self::model::ModelCommand;
#[cfg(feature = "stencil")]
use self::stencil::StencilOptions;
use crate::card::CardOptions;
use crate::features;
#[cfg(feature = "torus")]
use crate::torus::TorusCommand;

/// Soft RDMA device, event builder over one-sided RDMA, and accelerator cards on the network.
///
/// All commands use verbs: an InfiniBand or RoCE adapter if there is one, otherwise the soft device. The soft device needs no
/// hardware, no kernel module and no root.
///
///     millstream run -- ibv_devinfo        any verbs program on the soft device
///     millstream demo                      build recorded camera events on this host
///     millstream stencil --grid 4096x4096  compute on emulated cards

#[derive(Debug, Parser)]
#[command(name = "millstream", version, max_term_width = 100, verbatim_doc_comment, after_help = features::missing_commands())]
pub(crate) struct Arguments {
    /// RDMA device: `auto` (an adapter if present, else the soft device), `hardware`, `soft`, or a name from
    /// `millstream devices` [default: MILLSTREAM_DEVICE, or auto]
    #[arg(long, global = true, value_name = "NAME")]
    pub(crate) device: Option<DeviceSelector>,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Build recorded camera events into the memory of two emulated cards and check every byte
    ///
    /// The first run builds the 32 recorded events of the SST-1M camera: three readout
    /// units, one per camera crate, write them into the cards of two builder units.
    /// The cards verify all checksums and compute the camera's trigger, whose 691,200
    /// decisions must equal the recorded ones. Accepted events go to HDF5. The second
    /// run repeats the events for throughput.
    ///
    ///     millstream demo --out results
    #[command(verbatim_doc_comment)]
    Demo(DemoOptions),
    /// Check and run event builder configurations (docs/event-builder.md)
    #[command(subcommand)]
    Evb(EvbCommand),
    /// Serve, use and watch accelerator cards on the network (docs/cards.md)
    Card(CardOptions),
    /// List the RDMA devices of this machine
    ///
    ///     millstream devices --json
    #[command(verbatim_doc_comment)]
    Devices(DevicesOptions),
    /// Run a verbs program on the soft device
    ///
    /// The unmodified program loads Millstream's libibverbs.so.1 instead of the
    /// system's. A preloaded library provides the device's sysfs files and rdma_cm
    /// (docs/rdma-cm.md). Run both ends of a connection this way, as the same user:
    ///
    ///     millstream run -- ib_write_bw & sleep 2
    ///     millstream run -- ib_write_bw localhost
    #[command(verbatim_doc_comment)]
    Run(RunOptions),
    /// Print shell commands that run later programs on the soft device
    ///
    ///     eval "$(millstream env)"
    #[command(verbatim_doc_comment)]
    Env(EnvOptions),
    /// Compute five-point Jacobi sweeps on leased cards (docs/stencil.md)
    ///
    /// Divides the grid into tiles of rows, one a card. Cards exchange boundary rows
    /// directly while they compute. Prints the time of each step by block of sweeps;
    /// --svg draws it.
    ///
    ///     millstream stencil --grid 4096x4096 --iterations 100 --local 2 --verify
    ///     millstream stencil --input before.npy --iterations 100 --output after.h5 \
    ///         --cards node7:7480,node8:7480 --svg timeline.svg
    #[cfg(feature = "stencil")]
    #[command(verbatim_doc_comment)]
    Stencil(StencilOptions),
    /// Check and unpack fragment stream files (docs/formats.md)
    #[command(subcommand)]
    Stream(StreamCommand),
    /// Run applications on a torus of nodes (docs/torus.md)
    #[cfg(feature = "torus")]
    #[command(subcommand)]
    Torus(TorusCommand),
    /// Check and draw site files (docs/site.md)
    #[command(subcommand)]
    Site(SiteCommand),
    /// Predict the performance of a site, and check the model against published measurements (docs/model.md)
    #[cfg(feature = "model")]
    #[command(subcommand)]
    Model(ModelCommand),
    /// Write man pages, one for each command
    ///
    ///     millstream manual --out man1
    #[cfg(feature = "manual")]
    #[command(verbatim_doc_comment)]
    Manual {
        /// Output folder
        #[arg(long, value_name = "FOLDER")]
        out: PathBuf,
    },
    /// Print the completion script of a shell
    ///
    ///     eval "$(millstream completions bash)"
    #[cfg(feature = "manual")]
    #[command(verbatim_doc_comment)]
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Measure against a baseline in the same run; results go to target/bench (docs/benchmarks.md)
    #[cfg(feature = "bench")]
    Bench(BenchOptions),
    /// Stands for a process of another rank; `evb join` and `torus join` start it
    #[command(hide = true)]
    Relay(RelayOptions),
    /// Compiles the module on standard input; cards start it
    #[cfg(feature = "wasm")]
    #[command(hide = true)]
    CompileModule,
}

#[derive(Debug, Subcommand)]
pub(crate) enum SiteCommand {
    /// Validate site files and print what they contain
    ///
    ///     millstream site check sites/recipe-baseline.toml
    ///     millstream site check my-site.toml --live
    #[command(verbatim_doc_comment)]
    Check {
        /// Site files
        #[arg(required = true)]
        files: Vec<PathBuf>,
        /// Compare cards, tori and event builders with those that run
        #[cfg(feature = "torus")]
        #[arg(long)]
        live: bool,
    },
    /// Start the emulated cards, torus nodes and event builders of a site on this host, until Ctrl-C
    ///
    ///     millstream site up my-site.toml
    #[cfg(feature = "torus")]
    #[command(verbatim_doc_comment)]
    Up {
        /// The site file
        file: PathBuf,
    },
    /// Make the authority of a site, and a certificate and key for each of its nodes
    ///
    /// Programs with keys (MILLSTREAM_KEYS, or [security] in a configuration) accept
    /// control connections of nodes with a certificate of the same authority only.
    /// OUT/authority stays with the administrator. OUT/NODE goes to the node.
    ///
    ///     millstream site keys my-site.toml --out keys
    ///     MILLSTREAM_KEYS=keys/node0 millstream card serve u280-0
    ///     millstream site keys my-site.toml --out keys --renew
    #[command(verbatim_doc_comment)]
    Keys(SiteKeysOptions),
    /// Print a site as objects of Kubernetes: an indexed Job for each event builder and torus
    ///
    ///     millstream site manifests my-site.toml --image registry.example/millstream:0.1 | kubectl apply -f -
    #[command(verbatim_doc_comment)]
    Manifests(SiteManifestsOptions),
    /// Draw a site as SVG
    ///
    ///     millstream site show sites/recipe-baseline.toml --out baseline.svg
    #[command(verbatim_doc_comment)]
    Show {
        /// The site file
        file: PathBuf,
        /// Output file [default: the site file's name with extension .svg, in the current directory]
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct SiteKeysOptions {
    /// The site file
    pub(crate) file: PathBuf,
    /// Output folder
    #[arg(long, value_name = "FOLDER")]
    pub(crate) out: PathBuf,
    /// Validity of the nodes' certificates, in days
    #[arg(long, default_value_t = 365, value_parser = clap::value_parser!(u32).range(1..=36_500), value_name = "DAYS")]
    pub(crate) days: u32,
    /// A further host name or address of a node; may be repeated
    #[arg(long = "name", value_parser = node_name, value_name = "NODE=NAME")]
    pub(crate) names: Vec<(String, String)>,
    /// Issue new keys to the nodes with the authority in the folder, for the names of their present keys
    #[arg(long)]
    pub(crate) renew: bool,
}

fn node_name(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((node, name)) if !node.is_empty() && !name.is_empty() => Ok((node.to_owned(), name.to_owned())),
        _ => Err("expected NODE=NAME, for example node0=10.0.0.7".to_owned()),
    }
}

#[derive(Debug, Args)]
pub(crate) struct SiteManifestsOptions {
    /// The site file
    pub(crate) file: PathBuf,
    /// Image of all pods
    #[arg(long, default_value = "millstream:latest", value_name = "IMAGE")]
    pub(crate) image: String,
    /// Persistent volume claim with configurations, inputs and outputs
    #[arg(long, default_value = "millstream-data", value_name = "NAME")]
    pub(crate) claim: String,
    /// The application of torus nodes and its arguments
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, default_values_t = ["sleep".to_owned(), "infinity".to_owned()], value_name = "PROGRAM")]
    pub(crate) application: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct DevicesOptions {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct EnvOptions {
    /// Do not preload the library for sysfs files and rdma_cm: verbs only
    #[arg(long)]
    pub(crate) no_preload: bool,
    #[command(flatten)]
    pub(crate) link: LinkOptions,
}

/// Faults and captures of packets between hosts. WHICH is a probability such as 0.01, or packet numbers such as '#3+17'.
#[derive(Debug, Args)]
#[command(next_help_heading = "Packets between hosts (docs/wire-link.md)")]
pub(crate) struct LinkOptions {
    /// Path to peers: shared memory on this host and packets to other hosts (auto), shared memory only, or packets only
    /// [default: MILLSTREAM_PATH, or auto; wire with faults or a capture]
    #[arg(long, value_name = "auto|shm|wire")]
    pub(crate) path: Option<PathArgument>,
    /// How long a process that does not poll its completion queues polls for packets before it sleeps, in microseconds, if
    /// they arrive at shorter intervals; 0: it always sleeps [default: 50]
    #[arg(long, value_name = "MICROSECONDS")]
    pub(crate) spin: Option<u64>,
    /// Drop these packets; WHICH: a probability (0.01), or packet numbers ('#3+17')
    #[arg(long, value_name = "WHICH")]
    pub(crate) drop: Option<String>,
    /// Send these packets twice
    #[arg(long, value_name = "WHICH")]
    pub(crate) duplicate: Option<String>,
    /// Send these packets after their successor
    #[arg(long, value_name = "WHICH")]
    pub(crate) reorder: Option<String>,
    /// Flip one bit of these packets
    #[arg(long, value_name = "WHICH")]
    pub(crate) corrupt: Option<String>,
    /// Mark these packets with ECN congestion experienced, which slows the sender down
    #[arg(long, value_name = "WHICH")]
    pub(crate) mark: Option<String>,
    /// Delay these packets: WHICH:TIME, such as 0.01:2ms
    #[arg(long, value_name = "WHICH:TIME")]
    pub(crate) delay: Option<String>,
    /// Seed of the random numbers [default: 1]
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<String>,
    /// Apply faults to packets sent, received, or both [default: send]
    #[arg(long, value_name = "SIDE")]
    pub(crate) side: Option<String>,
    /// Write all packets to this capture file; `%p` becomes the process id, and a second port of the process writes to NAME-2
    #[arg(long, value_name = "FILE")]
    pub(crate) pcap: Option<PathBuf>,
}

/// The values of `MILLSTREAM_PATH` (`millstream_device::path`).
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum PathArgument {
    Auto,
    Shm,
    Wire,
}

#[derive(Debug, Args)]
pub(crate) struct RunOptions {
    /// Do not preload the library for sysfs files and rdma_cm: verbs only
    #[arg(long)]
    pub(crate) no_preload: bool,
    #[command(flatten)]
    pub(crate) link: LinkOptions,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    pub(crate) program: Vec<OsString>,
}

#[derive(Debug, Args)]
pub(crate) struct DemoOptions {
    /// Folder with the packed camera data [default: data/sst1m, here or above the program, or share/millstream/data/sst1m of the installation]
    #[arg(long, value_name = "FOLDER")]
    pub(crate) data: Option<PathBuf>,
    /// Folder of the results
    #[arg(long, default_value = "target/demo", value_name = "FOLDER")]
    pub(crate) out: PathBuf,
    /// Repetitions of the events in the second run
    #[arg(long, default_value_t = 2000, value_name = "N")]
    pub(crate) replay: u64,
    /// Kind of card memory: emulated, pci:ADDRESS or cuda:N; a GPU runs the trigger itself (docs/cards.md)
    #[arg(long, default_value = "emulated", value_name = "KIND", value_parser = crate::card::args::memory_kind)]
    pub(crate) memory_kind: BackingKind,
}

#[derive(Debug, Subcommand)]
pub(crate) enum EvbCommand {
    /// Run a configuration, every unit a process; Ctrl-C stops it and reports where every fragment went
    ///
    ///     millstream evb run camera.toml --json report.json --svg throughput.svg
    ///     millstream evb run cluster.toml --launcher ./over-ssh
    #[command(verbatim_doc_comment)]
    Run(EvbRunOptions),
    /// Run a configuration on the ranks of a job that srun or mpirun has started (docs/launchers.md)
    ///
    /// Start it on every rank. Rank 0 runs the manager and prints the report; the
    /// units are on the other ranks in turn.
    ///
    ///     srun --ntasks 5 millstream evb join camera.toml
    ///     mpirun -n 5 millstream evb join camera.toml --json report.json
    ///     millstream evb join camera.toml --rank 0 --ranks 1 --at 127.0.0.1:7500
    #[command(verbatim_doc_comment)]
    Join(EvbJoinOptions),
    /// Check a configuration without running it, and print its units and memory
    ///
    ///     millstream evb check camera.toml
    #[command(verbatim_doc_comment)]
    Check {
        /// The configuration
        config: PathBuf,
    },
    /// Compare event files with their indexes, and name partial files (docs/output.md)
    ///
    ///     millstream evb files accepted
    ///     millstream evb files accepted --recover
    #[command(verbatim_doc_comment)]
    Files {
        /// The output directory of runs
        directory: PathBuf,
        /// Complete the partial files of builder units that ended early
        #[arg(long)]
        recover: bool,
    },
    /// Write the stored events of a batch file into an HDF5 event file (docs/output.md)
    ///
    ///     millstream evb unpack accepted/run.bu0.batches --out run.bu0.h5
    #[command(verbatim_doc_comment)]
    Unpack {
        /// The batch file
        #[arg(value_name = "FILE.batches")]
        batches: PathBuf,
        /// The event file
        #[arg(long, value_name = "FILE.h5")]
        out: PathBuf,
        /// Replace an event file of this name
        #[arg(long)]
        replace: bool,
    },
    /// Start and stop runs on the commands of operators, over HTTP and on a page (docs/run-control.md)
    ///
    /// With MILLSTREAM_KEYS it serves HTTPS to clients with a certificate of the site,
    /// which permits commands (docs/keys.md).
    ///
    ///     millstream evb control camera.toml
    ///     millstream evb control camera.toml --listen 0.0.0.0:8080 --directory /data/run-control
    #[cfg(feature = "control")]
    #[command(verbatim_doc_comment)]
    Control(EvbControlOptions),
    /// Command a run control process
    ///
    ///     millstream evb ctl status
    ///     millstream evb ctl configure
    ///     millstream evb ctl start --comment "calibration, high voltage on"
    ///     millstream evb ctl pause
    ///     millstream evb ctl resume
    ///     millstream evb ctl stop
    ///     millstream evb ctl set card.card0.threshold=400 run.replay=1000
    ///     millstream evb ctl log --last 20
    #[cfg(feature = "control")]
    #[command(verbatim_doc_comment)]
    Ctl(EvbCtlOptions),
    /// Run one process of a run; started by `run`
    #[command(hide = true)]
    Unit {
        /// File with the checked configuration of this host, as JSON; the process runs no other one
        #[arg(long)]
        own: Option<PathBuf>,
        /// Role and its parameters
        #[arg(required = true)]
        words: Vec<String>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct EvbRunOptions {
    /// The configuration
    pub(crate) config: PathBuf,
    /// Passes over the inputs; overrides `run.replay` of the configuration
    #[arg(long, value_name = "N")]
    pub(crate) replay: Option<u64>,
    /// Write the report as JSON; `-` for standard output
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Draw the throughput over time
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
    /// Start each process of the run through PROGRAM, which may run it on another host: `PROGRAM millstream evb unit
    /// readout 0 ADDRESS`. PROGRAM must pass standard input and output through, and `listen` in the configuration must
    /// be an address that all hosts reach (docs/event-builder.md)
    #[arg(long, value_name = "PROGRAM")]
    pub(crate) launcher: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(mut_arg("launcher", |argument| argument.hide(true)))]
pub(crate) struct EvbJoinOptions {
    #[command(flatten)]
    pub(crate) run: EvbRunOptions,
    #[command(flatten)]
    pub(crate) job: JobOptions,
}

/// This process as a rank of a job.
#[derive(Debug, Args)]
pub(crate) struct JobOptions {
    /// Rank of this process [default: from the variables of Slurm, Open MPI or PMI]
    #[arg(long, value_name = "N")]
    pub(crate) rank: Option<usize>,
    /// Number of ranks [default: from the same variables]
    #[arg(long, value_name = "N")]
    pub(crate) ranks: Option<usize>,
    /// Where rank 0 listens: HOST:PORT, or file:PATH on a shared file system, where rank 0 writes its address [default:
    /// from the same variables]
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) at: Option<String>,
}

/// A process of another rank, started by rank 0 of a job.
#[derive(Debug, Args)]
pub(crate) struct RelayOptions {
    /// Address of the hub
    #[arg(long)]
    pub(crate) hub: String,
    /// File with the hub's key for relays
    #[arg(long)]
    pub(crate) key_file: PathBuf,
    /// Role of the process
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) words: Vec<String>,
}

#[cfg(feature = "control")]
#[derive(Debug, Args)]
pub(crate) struct EvbControlOptions {
    /// The configuration of the runs
    pub(crate) config: PathBuf,
    /// Address of the HTTP API and the page; port 0 selects a free port
    #[arg(long, default_value = "127.0.0.1:8080", value_name = "ADDRESS")]
    pub(crate) listen: String,
    /// Directory of run numbers, log book and reports [default: run-control beside the configuration]
    #[arg(long, value_name = "DIRECTORY")]
    pub(crate) directory: Option<PathBuf>,
    /// File with the token that permits commands; made if missing [default: token in the directory]
    #[arg(long, value_name = "FILE")]
    pub(crate) token_file: Option<PathBuf>,
    /// Start each process of a run through PROGRAM, as `millstream evb run --launcher` does
    #[arg(long, value_name = "PROGRAM")]
    pub(crate) launcher: Option<PathBuf>,
}

#[cfg(feature = "control")]
#[derive(Debug, Args)]
pub(crate) struct EvbCtlOptions {
    #[command(subcommand)]
    pub(crate) command: CtlCommand,
    /// Address of run control
    #[arg(long, global = true, default_value = "127.0.0.1:8080", value_name = "ADDRESS")]
    pub(crate) address: String,
    /// File with the token of run control, for commands [default: run-control/token; none with MILLSTREAM_KEYS]
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) token_file: Option<PathBuf>,
    /// Print the answer as JSON
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

/// Options of commands that the log book records.
#[cfg(feature = "control")]
#[derive(Debug, Args)]
pub(crate) struct CtlRecord {
    /// Comment for the log book
    #[arg(long, default_value = "", value_name = "TEXT")]
    pub(crate) comment: String,
    /// Do not wait until the state is reached
    #[arg(long)]
    pub(crate) no_wait: bool,
}

#[cfg(feature = "control")]
#[derive(Debug, Subcommand)]
pub(crate) enum CtlCommand {
    /// Print the state, the run and the units
    ///
    ///     millstream evb ctl status --json
    #[command(verbatim_doc_comment)]
    Status,
    /// Read and check the configuration file
    ///
    ///     millstream evb ctl configure
    #[command(verbatim_doc_comment)]
    Configure,
    /// Change settings of the next runs; values are numbers, true, false or texts
    ///
    ///     millstream evb ctl set card.card0.threshold=400 output.max_events=1000
    #[command(verbatim_doc_comment)]
    Set {
        /// Settings and their values
        #[arg(required = true, value_name = "FIELD=VALUE")]
        settings: Vec<String>,
    },
    /// Start the processes of a run; the run waits for `start`
    ///
    ///     millstream evb ctl prepare --comment "waits for the beam"
    #[command(verbatim_doc_comment)]
    Prepare(CtlRecord),
    /// Start a run
    ///
    ///     millstream evb ctl start --comment "calibration"
    #[command(verbatim_doc_comment)]
    Start(CtlRecord),
    /// Assign no further event; events in flight are finished
    ///
    ///     millstream evb ctl pause
    #[command(verbatim_doc_comment)]
    Pause,
    /// Assign events again
    ///
    ///     millstream evb ctl resume
    #[command(verbatim_doc_comment)]
    Resume,
    /// End the run; its files and its report are complete
    ///
    ///     millstream evb ctl stop
    #[command(verbatim_doc_comment)]
    Stop,
    /// Acknowledge an error; without an error, drop the configuration
    ///
    ///     millstream evb ctl reset
    #[command(verbatim_doc_comment)]
    Reset,
    /// Write a comment into the log book
    ///
    ///     millstream evb ctl comment "wind above 40 km/h"
    #[command(verbatim_doc_comment)]
    Comment {
        /// The text
        text: String,
    },
    /// Print the last entries of the log book
    ///
    ///     millstream evb ctl log --last 20
    #[command(verbatim_doc_comment)]
    Log {
        /// Number of entries
        #[arg(long, default_value_t = 20, value_name = "N")]
        last: usize,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum StreamCommand {
    /// Verify stream files with all checksums, and list their sources
    ///
    ///     millstream stream check crate1.mfs crate2.mfs
    #[command(verbatim_doc_comment)]
    Check {
        /// Stream files
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
    },
    /// Unpack and verify a folder of packed stream files, such as data/sst1m
    ///
    ///     millstream stream unpack data/sst1m camera
    #[command(verbatim_doc_comment)]
    Unpack {
        /// Folder with the packed files and their MANIFEST
        packed: PathBuf,
        /// Destination folder
        unpacked: PathBuf,
    },
    /// Write a raw data file of an experiment as a stream file, the input of a readout unit (docs/raw-data.md)
    ///
    ///     millstream stream import run.hld --out run.mfs
    ///     millstream stream import run.mid --format midas --events 100..200 --out part.mfs
    #[command(verbatim_doc_comment)]
    Import {
        /// Raw data file
        file: PathBuf,
        /// Stream file; it appears when it is complete
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
        /// Format of the raw data [default: the one that the start of the file shows]
        #[arg(long, value_name = "NAME", value_parser = millstream_formats::all().iter().map(|format| format.name()).collect::<Vec<_>>())]
        format: Option<String>,
        /// Events to write, without END [default: all]; files of one run have the same events
        #[arg(long, value_name = "FIRST..END", value_parser = event_range)]
        events: Option<Range<u64>>,
        /// Event id to import [default: the first one of the file]; midas
        #[arg(long, value_name = "ID", value_parser = clap::value_parser!(u16).range(..0x8000))]
        event_id: Option<u16>,
        /// Divisor of indices that gives the event [default: the greatest common divisor of the file's indices]; microslices, msa
        #[arg(long, value_name = "DIVISOR")]
        index_divisor: Option<NonZeroU64>,
    },
    /// List the formats that `stream import` reads
    ///
    ///     millstream stream formats
    #[command(verbatim_doc_comment)]
    Formats,
}

/// Parses `FIRST..END`.
fn event_range(text: &str) -> Result<Range<u64>, String> {
    let wrong = || format!("{text:?} is not FIRST..END, such as 0..1000");
    let (first, end) = text.split_once("..").ok_or_else(wrong)?;
    let range = first.parse().map_err(|_| wrong())?..end.parse().map_err(|_| wrong())?;
    if range.is_empty() { Err(format!("{text} has no event: FIRST is less than END")) } else { Ok(range) }
}

#[cfg(test)]
mod tests {
    use super::Arguments;
    use clap::{CommandFactory as _, Parser as _};

    /// The words of a command line; double quotes hold spaces.
    fn words(line: &str) -> Vec<String> {
        let quoted = line.split('"').enumerate().flat_map(|(at, part)| match at % 2 {
            0 => part.split_whitespace().map(str::to_owned).collect(),
            _ => vec![part.to_owned()],
        });
        quoted.take_while(|word| word != "&").collect()
    }

    fn check(command: &clap::Command, path: &str) {
        let subcommands: Vec<_> =
            command.get_subcommands().filter(|command| !command.is_hide_set()).collect();
        for command in &subcommands {
            check(command, &format!("{path} {}", command.get_name()));
        }
        if !subcommands.is_empty() {
            return;
        }
        let about = command.get_long_about().map(ToString::to_string).unwrap_or_default();
        for line in about.lines().skip(1).filter(|line| !line.starts_with(' ')) {
            assert!(line.chars().count() <= 80, "`{path} --help`: more than 80 columns: {line}");
        }
        let examples = about.replace("\\\n", " ");
        let mut examples = examples.lines().filter(|line| line.starts_with("    ")).peekable();
        assert!(examples.peek().is_some(), "`{path} --help` has no example");
        for line in examples.map(str::trim).filter(|line| line.starts_with("millstream ")) {
            if let Err(error) = Arguments::try_parse_from(words(line)) {
                panic!("example of `{path} --help`: {line}: {error}");
            }
        }
    }

    #[test]
    fn the_help_of_every_command_has_examples_that_parse() {
        check(&Arguments::command(), "millstream");
    }
}
