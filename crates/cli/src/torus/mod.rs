//! `millstream torus`: node processes, tori on this host, tori on one thread.

mod application;
mod bfs;
mod join;
mod neurons;
mod nodes;
mod outside;
mod run;
mod shape;
mod simulate;
mod spin;
mod watch;

use std::error::Error;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use millstream_card_abi::CardName;
use millstream_health::Timers;
use millstream_rdma::device::DeviceSelector;
use millstream_shm::polling::DEFAULT_POLLING;
use millstream_torus::engine::EngineOptions;
use millstream_torus::key::{self, KeyError};
use millstream_torus::monitor::{self, MonitorOptions};
use millstream_torus::node::{self, NodeOptions, SeventhOptions};
use millstream_torus::service::supervisor::{self, SupervisorOptions};
use millstream_torus_core::{Dimensions, NodeNumber};

use crate::args::JobOptions;
use outside::TorusOutsideOptions;

#[derive(Debug, Subcommand)]
pub(crate) enum TorusCommand {
    /// Run an application on every node of a torus of processes on this host
    ///
    /// Starts one node process for each node and connects it with its six neighbours.
    /// Then starts PROGRAM beside each node. The program attaches by
    /// `TorusNode::from_environment`. The run fails if a program or a node fails, or
    /// if the packet counters do not balance.
    ///
    ///     millstream torus run --dimensions 2x2x2 -- target/debug/examples/neighbours
    ///     millstream torus run --dimensions 2x2x1 --network direct -- millstream torus bfs --scale 16
    ///
    /// On several hosts, --launcher names a program that starts the process of a node
    /// where it belongs: it is called with the process's program and arguments, and
    /// finds the node's number in MILLSTREAM_TORUS_RANK. Nodes listen at the addresses
    /// of a site file, or at --listen.
    ///
    ///     millstream torus run --dimensions 2x1x1 --launcher ./on-node --listen 10.0.0.1{node}:7500 -- ./program
    #[command(verbatim_doc_comment)]
    Run(TorusRunOptions),
    /// Run an application on a torus of nodes on the ranks of a job that srun or mpirun has started (docs/launchers.md)
    ///
    /// Start it on every rank. Node n and its PROGRAM are at rank n modulo the number
    /// of ranks.
    ///
    ///     srun --ntasks 4 millstream torus join --dimensions 2x2x1 -- ./neighbours
    ///     mpirun -n 2 millstream torus join --dimensions 2x2x1 --json -- ./neighbours
    #[command(verbatim_doc_comment)]
    Join(TorusJoinOptions),
    /// Run the process of one node; `torus run` starts these
    ///
    /// Prints `{"listening": …}`, then waits for `{"peers": [ADDRESS, …]}` with the
    /// addresses of all nodes on standard input. Ends with its standard input. With
    /// --site, the addresses are those of the site file.
    ///
    ///     millstream torus node --dimensions 2x1x1 --node 0 --key-file torus.key
    #[command(verbatim_doc_comment)]
    Node(TorusNodeOptions),
    /// Use the torus from a host that is no node, through the seventh port of a node
    ///
    /// Programs of nodes publish regions by name (`TorusNode::publish`). `torus run
    /// --seventh` prints the address and a file with the key.
    ///
    ///     millstream torus outside --gateway node0:7600 --key-file seventh.key list
    ///     millstream torus outside get 3 histogram --output histogram.bin
    ///     millstream torus outside put 3 parameters --input parameters.bin --counter 7
    #[command(verbatim_doc_comment)]
    Outside(TorusOutsideOptions),
    /// Run the host monitor of a node; `torus run --supervisors` starts these
    ///
    ///     millstream torus monitor --dimensions 2x1x1 --node 0 --key-file torus.key --supervisors node7:7490
    #[command(verbatim_doc_comment)]
    Monitor(TorusMonitorOptions),
    /// Run a supervisor; the lowest live one of several acts
    ///
    /// Prints `{"listening": ADDRESS}`. Ends with its standard input.
    ///
    ///     millstream torus supervise --dimensions 2x1x1 --key-file torus.key --listen 127.0.0.1:0
    #[command(verbatim_doc_comment)]
    Supervise(TorusSuperviseOptions),
    /// Show the state of a torus that has supervisors
    ///
    /// Draws the planes of the torus with one letter for each node, again at every
    /// change. `torus run --supervisors` prints the whole command; the file with the
    /// key lasts as long as the run.
    ///
    ///     millstream torus watch --supervisors 127.0.0.1:7490 --key-file torus.key --once --svg torus.svg
    #[command(verbatim_doc_comment)]
    Watch(TorusWatchOptions),
    /// Run all nodes of a torus on one thread, with every node writing to every other
    ///
    ///     millstream torus simulate --dimensions 4x4x4 --bytes 4096 --rounds 4
    #[command(verbatim_doc_comment)]
    Simulate(TorusSimulateOptions),
    /// Sweep a Heisenberg spin glass by over-relaxation (docs/torus-applications.md)
    ///
    /// Runs alone, with threads as nodes, or as the program of `torus run`. The result
    /// does not depend on the shape.
    ///
    ///     millstream torus spin --lattice 64 --sweeps 100 --dimensions 2x2x1 --svg spin.svg
    ///     millstream torus run --dimensions 2x2x2 -- millstream torus spin --lattice 64 --sweeps 100
    #[command(verbatim_doc_comment)]
    Spin(spin::TorusSpinOptions),
    /// Simulate a spiking network of columns with plastic synapses (docs/torus-applications.md)
    ///
    /// Runs alone, with threads as nodes, or as the program of `torus run`. The spikes
    /// do not depend on the shape.
    ///
    ///     millstream torus neurons --columns 4x4 --duration 2000 --dimensions 2x2x1 --svg neurons.svg
    ///     millstream torus run --dimensions 2x2x2 -- millstream torus neurons --columns 6x6 --duration 1000
    #[command(verbatim_doc_comment)]
    Neurons(neurons::TorusNeuronsOptions),
    /// Search a Graph500 graph breadth-first (docs/torus-applications.md)
    ///
    /// Generates the Kronecker graph of Graph500, searches from 64 roots and validates
    /// each result by the five rules. Runs alone, with threads as nodes, or as the
    /// program of `torus run`.
    ///
    ///     millstream torus bfs --scale 16 --dimensions 2x1x1 --svg bfs.svg
    ///     millstream torus run --dimensions 2x2x1 -- millstream torus bfs --scale 16 --checkpoint bfs.jsonl
    #[command(verbatim_doc_comment)]
    Bfs(bfs::TorusBfsOptions),
}

#[derive(Debug, Args)]
pub(crate) struct EngineArguments {
    /// Payload of a packet in bytes [default: 32768 for processes, 4096 for simulated nodes]
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(64..=65536))]
    packet: Option<u32>,
    /// Receive slots of each virtual channel
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    slots: u16,
}

impl EngineArguments {
    /// The options, or those of `default`.
    fn options(&self, default: EngineOptions) -> EngineOptions {
        EngineOptions { packet: self.packet.unwrap_or(default.packet), slots: self.slots, ..default }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Network {
    Torus,
    Direct,
}

/// What the torus is.
#[derive(Debug, Args)]
pub(crate) struct TorusShape {
    /// Nodes on each axis
    #[arg(long, value_name = "XxYxZ", required_unless_present = "site", conflicts_with = "site")]
    dimensions: Option<Dimensions>,
    /// Site file whose first torus has addresses of its nodes
    #[arg(long, value_name = "FILE")]
    site: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct TorusRunOptions {
    #[command(flatten)]
    shape: TorusShape,
    /// Program that starts each process of a node on its host
    #[arg(long, value_name = "PROGRAM")]
    launcher: Option<PathBuf>,
    /// Where nodes listen for neighbours; {node} stands for the node's number
    #[arg(long, value_name = "HOST:PORT", conflicts_with = "site")]
    listen: Option<String>,
    /// Where supervisors listen; nodes on other hosts must reach it
    #[arg(long, value_name = "HOST:PORT")]
    supervisor_listen: Option<String>,
    /// Connect each node with its neighbours, or all nodes with all (`direct`), without node processes
    #[arg(long, default_value = "torus", value_name = "NETWORK")]
    network: Network,
    #[command(flatten)]
    engine: EngineArguments,
    /// Card of each node, whose memory programs may register; {node} stands for the node's number
    #[arg(long, value_name = "NAME")]
    card: Option<String>,
    /// Publish each card's whole memory as `card` for hosts outside of the torus
    #[arg(long, requires_all = ["card", "seventh"])]
    publish_card: bool,
    /// Admit hosts outside of the torus at each node's seventh port, at this address; {node} stands for the node's number
    #[arg(long, value_name = "HOST:PORT")]
    seventh: Option<String>,
    /// File with the key that outside hosts must know, 16 hexadecimal digits; `-` is a line of standard input. By default one
    /// is drawn
    #[arg(long, value_name = "FILE", requires = "seventh")]
    seventh_key_file: Option<PathBuf>,
    /// Watch for faults with this many supervisors: routes change around dead nodes, and the others go on; a supervisor that
    /// ends is started again
    #[arg(long, default_value_t = 0, value_name = "N")]
    supervisors: usize,
    /// Multiply all monitoring periods, for overloaded hosts; at 1 a death is known after 0.3 s
    #[arg(long, default_value_t = 1, value_name = "FACTOR", value_parser = clap::value_parser!(u64).range(1..=1000))]
    period_factor: u64,
    /// Run PROGRAM once instead of beside each node: it is a launcher such as mpirun, whose processes attach by their ranks
    #[arg(long, conflicts_with = "supervisors")]
    once: bool,
    /// Print the packet counters as JSON
    #[arg(long)]
    json: bool,
    /// The application and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

#[derive(Debug, Args)]
#[command(mut_arg("launcher", |argument| argument.hide(true)))]
#[command(mut_arg("network", |argument| argument.hide(true)))]
pub(crate) struct TorusJoinOptions {
    #[command(flatten)]
    job: JobOptions,
    #[command(flatten)]
    run: TorusRunOptions,
}

/// Other users read the arguments of a process, so they name a file.
#[derive(Debug, Args)]
struct RunKey {
    /// File with the key of the run, 16 hexadecimal digits, which only this user can read; `-` is a line of standard input. By
    /// default MILLSTREAM_TORUS_KEY. All processes of a run have the same key
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
}

impl RunKey {
    fn find(&self) -> Result<u64, KeyError> {
        key::find(self.key_file.as_deref(), "--key-file", key::ENV_KEY)
    }
}

#[derive(Debug, Args)]
pub(crate) struct TorusNodeOptions {
    #[command(flatten)]
    shape: TorusShape,
    /// Number of this node: x + X·(y + Y·z)
    #[arg(long, value_name = "NUMBER")]
    node: u16,
    #[command(flatten)]
    key: RunKey,
    /// Address for neighbours; by default that of the site file, else 127.0.0.1:0
    #[arg(long, value_name = "HOST:PORT")]
    listen: Option<String>,
    #[command(flatten)]
    engine: EngineArguments,
    /// How long to poll after a packet before the process sleeps, in microseconds; it yields the core meanwhile, and does not
    /// poll while other processes compute there
    #[arg(long, default_value_t = DEFAULT_POLLING.as_micros() as u64, value_name = "MICROSECONDS")]
    spin: u64,
    /// Card of this host: the node acquires its lease, and programs may register its memory
    #[arg(long, value_name = "NAME")]
    card: Option<CardName>,
    /// Publish the card's whole memory as `card` for hosts outside of the torus, also while no program runs beside this node
    #[arg(long, requires = "card")]
    publish_card: bool,
    /// Address of the seventh port, for hosts outside of the torus
    #[arg(long, value_name = "HOST:PORT", requires = "seventh_key_file")]
    seventh: Option<String>,
    /// File with the key that outside hosts must know, 16 hexadecimal digits; `-` is a line of standard input, behind that
    /// of the run's key
    #[arg(long, value_name = "FILE", requires = "seventh")]
    seventh_key_file: Option<PathBuf>,
    /// Take the place of a process of this node that has ended: links are connected one by one, and an application is
    /// attached once the supervisors have taken the node back
    #[arg(long, requires = "supervisors")]
    rejoin: bool,
    /// All supervisors, the lowest first; without any, the node does not watch its links
    #[arg(long, value_name = "HOST:PORT", value_delimiter = ',')]
    supervisors: Vec<String>,
    /// Multiply all monitoring periods
    #[arg(long, default_value_t = 1, value_name = "FACTOR", value_parser = clap::value_parser!(u64).range(1..=1000))]
    period_factor: u64,
}

#[derive(Debug, Args)]
pub(crate) struct TorusMonitorOptions {
    /// Nodes on each axis
    #[arg(long, value_name = "XxYxZ")]
    dimensions: Dimensions,
    /// Number of this node
    #[arg(long, value_name = "NUMBER")]
    node: u16,
    #[command(flatten)]
    key: RunKey,
    /// All supervisors, the lowest first
    #[arg(long, required = true, value_name = "HOST:PORT", value_delimiter = ',')]
    supervisors: Vec<String>,
    /// Multiply all monitoring periods
    #[arg(long, default_value_t = 1, value_name = "FACTOR", value_parser = clap::value_parser!(u64).range(1..=1000))]
    period_factor: u64,
}

#[derive(Debug, Args)]
pub(crate) struct TorusSuperviseOptions {
    /// Nodes on each axis
    #[arg(long, value_name = "XxYxZ")]
    dimensions: Dimensions,
    #[command(flatten)]
    key: RunKey,
    /// Address for nodes, monitors and watchers
    #[arg(long, default_value = "127.0.0.1:0", value_name = "HOST:PORT")]
    listen: String,
    /// All lower supervisors, the lowest first: this one acts only if none of them lives
    #[arg(long, value_name = "HOST:PORT", value_delimiter = ',')]
    lower: Vec<String>,
    /// Multiply all monitoring periods
    #[arg(long, default_value_t = 1, value_name = "FACTOR", value_parser = clap::value_parser!(u64).range(1..=1000))]
    period_factor: u64,
}

#[derive(Debug, Args)]
pub(crate) struct TorusWatchOptions {
    /// Supervisors; the first one that answers is shown
    #[arg(long, required = true, value_name = "HOST:PORT", value_delimiter = ',')]
    supervisors: Vec<String>,
    #[command(flatten)]
    key: RunKey,
    /// Show one state and end
    #[arg(long)]
    once: bool,
    /// Print each state as a line of JSON
    #[arg(long)]
    json: bool,
    /// Also draw each state
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct TorusSimulateOptions {
    /// Nodes on each axis
    #[arg(long, value_name = "XxYxZ")]
    dimensions: Dimensions,
    /// Bytes from each node to each other node
    #[arg(long, default_value_t = 4096)]
    bytes: u32,
    /// Repetitions
    #[arg(long, default_value_t = 1)]
    rounds: u32,
    #[command(flatten)]
    engine: EngineArguments,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(
    command: &TorusCommand,
    device: Option<&DeviceSelector>,
) -> Result<ExitCode, Box<dyn Error>> {
    match command {
        TorusCommand::Run(options) => run::run(options, device),
        TorusCommand::Join(options) => join::join(options, device),
        TorusCommand::Node(options) => run_node(options, device),
        TorusCommand::Outside(options) => outside::run(options, device),
        TorusCommand::Monitor(options) => run_monitor(options),
        TorusCommand::Supervise(options) => run_supervisor(options),
        TorusCommand::Watch(options) => watch::run(options),
        TorusCommand::Simulate(options) => simulate::run(options),
        TorusCommand::Spin(options) => spin::run(options),
        TorusCommand::Neurons(options) => neurons::run(options),
        TorusCommand::Bfs(options) => bfs::run(options),
    }
}

fn run_monitor(options: &TorusMonitorOptions) -> Result<ExitCode, Box<dyn Error>> {
    monitor::run(&MonitorOptions {
        dimensions: options.dimensions,
        node: NodeNumber(options.node),
        key: options.key.find()?,
        supervisors: options.supervisors.clone(),
        timers: Timers::default().scaled(options.period_factor),
    })?;
    Ok(ExitCode::SUCCESS)
}

fn run_supervisor(options: &TorusSuperviseOptions) -> Result<ExitCode, Box<dyn Error>> {
    supervisor::run(&SupervisorOptions {
        dimensions: options.dimensions,
        key: options.key.find()?,
        listen: options.listen.clone(),
        lower: options.lower.clone(),
        timers: Timers::default().scaled(options.period_factor),
    })?;
    Ok(ExitCode::SUCCESS)
}

fn run_node(options: &TorusNodeOptions, device: Option<&DeviceSelector>) -> Result<ExitCode, Box<dyn Error>> {
    let (dimensions, addresses) = options.shape.resolve()?;
    let own = addresses.get(usize::from(options.node)).cloned();
    // In this order at standard input.
    let key = options.key.find()?;
    let seventh_key = options.seventh_key_file.as_deref().map(key::read).transpose()?;
    node::run(&NodeOptions {
        dimensions,
        node: NodeNumber(options.node),
        key,
        listen: options.listen.clone().or(own).unwrap_or_else(|| "127.0.0.1:0".to_owned()),
        peers: (!addresses.is_empty()).then_some(addresses),
        rejoin: options.rejoin,
        device: device.cloned().unwrap_or_else(DeviceSelector::from_environment),
        engine: options.engine.options(EngineOptions::of_processes()),
        spin: Duration::from_micros(options.spin),
        supervisors: options.supervisors.clone(),
        card: options.card.clone(),
        publish_card: options.publish_card,
        seventh: options.seventh.clone().zip(seventh_key).map(|(listen, key)| SeventhOptions { listen, key }),
        timers: (!options.supervisors.is_empty()).then(|| Timers::default().scaled(options.period_factor)),
    })?;
    Ok(ExitCode::SUCCESS)
}
