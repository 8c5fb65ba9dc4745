//! A torus on this host: one process for each node, and one application beside each.

mod applications;
mod arguments;
mod child;
mod direct;
mod service_process;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use millstream_torus_core::{Dimensions, NodeNumber};

use crate::application::{ENV_DIMENSIONS, ENV_RANK, ENV_SIZE, ENV_SOCKET, ENV_SOCKETS};
use crate::node::{NodeCommand, NodeMessage, SeventhOptions, socket_names};
use crate::service::TorusState;
use crate::traffic::TrafficCounters;
use applications::Applications;
pub use arguments::{ArgumentError, ProcessArguments};
use child::NodeChild;
pub use direct::{DirectError, run_direct};
use service_process::ServiceProcess;

/// How long the nodes may take to find each other.
const START: Duration = Duration::from_secs(90);
/// How long packets may stay on their way after the applications have ended.
const SETTLE: Duration = Duration::from_secs(10);
/// Interval of looks at the applications.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// A torus to launch.
#[derive(Clone, Debug)]
pub struct Launcher {
    /// Shape.
    pub dimensions: Dimensions,
    /// Program of all processes.
    pub program: PathBuf,
    /// Its arguments before `node`, `monitor` or `supervise`.
    pub arguments: Vec<OsString>,
    /// Further arguments of node processes.
    pub node_arguments: Vec<OsString>,
    /// Device for the node processes, as in `MILLSTREAM_DEVICE`.
    pub device: Option<String>,
    /// Name of each node's card; `{node}` stands for the node's number.
    pub card: Option<String>,
    /// The nodes' seventh ports for outside hosts; `{node}` in the address stands for the node's number.
    pub seventh: Option<SeventhOptions>,
    /// Program that starts each process, with the process's program and arguments: `ssh` by a script, for example. It finds
    /// the node's number in `MILLSTREAM_TORUS_RANK`.
    pub launcher: Option<PathBuf>,
    /// Where each node listens for its neighbours; empty: on this host only.
    pub addresses: Vec<String>,
    /// Where supervisors listen, if not on this host only.
    pub supervisor_address: Option<String>,
    /// Supervisors. With any, each node has a host monitor, and the torus survives the death of its processes.
    pub supervisors: usize,
    /// Factor of all monitoring periods.
    pub period_factor: u64,
}

/// A launched torus whose links are up.
#[derive(Debug)]
pub struct LaunchedTorus {
    launcher: Launcher,
    dimensions: Dimensions,
    key: u64,
    /// Where nodes and supervisors listen.
    addresses: Vec<String>,
    watched: String,
    // Dropped in this order: monitors leave before their nodes end.
    monitors: Vec<ServiceProcess>,
    nodes: Vec<NodeChild>,
    supervisors: Vec<ServiceProcess>,
    sockets: Vec<String>,
    /// Addresses of seventh ports.
    gateways: Vec<Option<String>>,
    /// Ends applications once it is true.
    end: Arc<AtomicBool>,
}

/// The application of a node that ended.
pub type Ended = (NodeNumber, ExitStatus);

/// Why a torus cannot be launched, or did not end well.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// A program cannot be started.
    #[error("cannot start {program:?}: {cause}")]
    Start {
        /// The program.
        program: OsString,
        /// The cause.
        cause: std::io::Error,
    },
    /// A node process failed.
    #[error("{node}: {reason}")]
    Node {
        /// The node.
        node: NodeNumber,
        /// Its error.
        reason: String,
    },
    /// An application failed.
    #[error("the application of {node} ended with {status}")]
    Application {
        /// The node.
        node: NodeNumber,
        /// Its status.
        status: ExitStatus,
    },
    /// It was asked to end the run ([`LaunchedTorus::end_if`]).
    #[error("the run was asked to end; its applications were ended")]
    Ended,
    /// A supervisor failed, or does not say where it listens.
    #[error("supervisor {index}: {reason}")]
    Supervisor {
        /// Its index.
        index: usize,
        /// The reason.
        reason: String,
    },
    /// The list of addresses has another length.
    #[error("{given} addresses for a torus of {dimensions}, which has {} nodes", .dimensions.nodes())]
    Addresses {
        /// Number of addresses.
        given: usize,
        /// The dimensions.
        dimensions: Dimensions,
    },
    /// Packets are missing in the counters.
    #[error("the packet counters do not balance: {counters}")]
    Unbalanced {
        /// The counters.
        counters: Box<TrafficCounters>,
    },
}

impl Launcher {
    /// Starts all processes and waits until all links are up.
    ///
    /// # Errors
    /// [`LaunchError`]; nothing is left behind.
    pub fn launch(&self) -> Result<LaunchedTorus, LaunchError> {
        if ![0, self.dimensions.nodes()].contains(&self.addresses.len()) {
            let (given, dimensions) = (self.addresses.len(), self.dimensions);
            return Err(LaunchError::Addresses { given, dimensions });
        }
        let key = millstream_shm::random_u64();
        let deadline = Instant::now() + START;
        let mut torus = LaunchedTorus {
            launcher: self.clone(),
            dimensions: self.dimensions,
            key,
            addresses: Vec::new(),
            watched: String::new(),
            monitors: Vec::new(),
            nodes: Vec::new(),
            supervisors: Vec::new(),
            sockets: Vec::new(),
            gateways: Vec::new(),
            end: Arc::default(),
        };
        let mut addresses: Vec<String> = Vec::new();
        for index in 0..self.supervisors {
            let command = self.supervisor_command(self.supervisor_address.as_deref(), &addresses);
            let mut supervisor = ServiceProcess::start(command, key)?;
            addresses.push(supervisor.address(index, deadline)?);
            torus.supervisors.push(supervisor);
        }
        let watched = addresses.join(",");
        torus.watched.clone_from(&watched);
        for node in self.dimensions.all() {
            let address = self.addresses.get(node.index()).map(String::as_str);
            let command = self.node_command(node, address, &watched);
            torus.nodes.push(NodeChild::start(node, command, &self.keys(key))?);
        }
        torus.connect(deadline)?;
        for node in self.dimensions.all().filter(|_| self.supervisors > 0) {
            let mut command = self.command(Some(node), "monitor");
            command.args(["--node", &node.0.to_string()]);
            self.watch(&mut command, &watched);
            torus.monitors.push(ServiceProcess::start(command, key)?);
        }
        Ok(torus)
    }

    /// The keys of a node process, in the order in which it reads them.
    fn keys(&self, of_run: u64) -> Vec<u64> {
        std::iter::once(of_run).chain(self.seventh.as_ref().map(|seventh| seventh.key)).collect()
    }

    fn node_command(&self, node: NodeNumber, address: Option<&str>, watched: &str) -> Command {
        let mut command = self.command(Some(node), "node");
        command.args(["--node", &node.0.to_string()]).args(&self.node_arguments);
        if let Some(address) = address {
            command.args(["--listen", address]);
        }
        if let Some(card) = &self.card {
            command.args(["--card", &card.replace("{node}", &node.0.to_string())]);
        }
        if let Some(seventh) = &self.seventh {
            let listen = seventh.listen.replace("{node}", &node.0.to_string());
            command.args(["--seventh", &listen, "--seventh-key-file", "-"]);
        }
        self.watch(&mut command, watched);
        command
    }

    fn supervisor_command(&self, listen: Option<&str>, lower: &[String]) -> Command {
        let mut command = self.command(None, "supervise");
        if let Some(address) = listen {
            command.args(["--listen", address]);
        }
        if !lower.is_empty() {
            command.args(["--lower", &lower.join(",")]);
        }
        command.args(["--period-factor", &self.period_factor.to_string()]);
        command
    }

    /// A process beside a node, or on this host. It reads its keys from standard input.
    fn command(&self, node: Option<NodeNumber>, role: &str) -> Command {
        let mut command = match &self.launcher {
            Some(launcher) if node.is_some() => {
                let mut command = Command::new(launcher);
                command.arg(&self.program);
                command
            }
            _ => Command::new(&self.program),
        };
        if let Some(node) = node {
            command.env(ENV_RANK, node.0.to_string());
        }
        command.args(&self.arguments).arg(role);
        command.args(["--dimensions", &self.dimensions.to_string(), "--key-file", "-"]);
        if let Some(device) = &self.device {
            command.env(millstream_rdma::loader::ENV_DEVICE, device);
        }
        command
    }

    fn watch(&self, command: &mut Command, supervisors: &str) {
        if self.supervisors > 0 {
            command.args(["--supervisors", supervisors]);
            command.args(["--period-factor", &self.period_factor.to_string()]);
        }
    }
}

impl LaunchedTorus {
    /// Shape.
    #[must_use]
    pub fn dimensions(&self) -> Dimensions {
        self.dimensions
    }

    /// The abstract socket for the application of a node.
    #[must_use]
    pub fn socket(&self, node: NodeNumber) -> Option<&str> {
        self.sockets.get(node.index()).map(String::as_str)
    }

    /// Address and key of a node's seventh port, for outside hosts.
    #[must_use]
    pub fn gateway(&self, node: NodeNumber) -> Option<(&str, u64)> {
        let address = self.gateways.get(node.index())?.as_deref()?;
        Some((address, self.launcher.seventh.as_ref()?.key))
    }

    /// Process id of a node.
    #[must_use]
    pub fn pid(&self, node: NodeNumber) -> Option<u32> {
        self.nodes.get(node.index()).map(NodeChild::pid)
    }

    /// Addresses of the supervisors, and the run's key, for watchers.
    #[must_use]
    pub fn watched_at(&self) -> (Vec<String>, u64) {
        (self.supervisors.iter().filter_map(ServiceProcess::listening).collect(), self.key)
    }

    /// Process id of a node's host monitor.
    #[must_use]
    pub fn monitor_pid(&self, node: NodeNumber) -> Option<u32> {
        self.monitors.get(node.index()).map(ServiceProcess::pid)
    }

    /// Process id of a supervisor.
    #[must_use]
    pub fn supervisor_pid(&self, index: usize) -> Option<u32> {
        self.supervisors.get(index).map(ServiceProcess::pid)
    }

    /// The newest state of the torus from the acting supervisor; `None` without one.
    #[must_use]
    pub fn state(&self) -> Option<TorusState> {
        let mut states = self.supervisors.iter().filter_map(|supervisor| supervisor.state(self.key));
        states.find(|state| state.acting)
    }

    fn connect(&mut self, deadline: Instant) -> Result<(), LaunchError> {
        let mut addresses = Vec::new();
        for node in &mut self.nodes {
            let NodeMessage::Listening { address, socket, seventh } = node.expect(deadline)? else {
                return Err(node.failure("did not say where it listens"));
            };
            addresses.push(address);
            self.sockets.push(socket);
            self.gateways.push(seventh);
        }
        self.addresses.clone_from(&addresses);
        for node in &mut self.nodes {
            node.send(&NodeCommand::Peers(addresses.clone()))?;
        }
        for node in &mut self.nodes {
            if node.expect(deadline)? != NodeMessage::Ready {
                return Err(node.failure("is not ready"));
            }
        }
        Ok(())
    }

    /// Once `asked` is true, applications are ended, and their run fails with [`LaunchError::Ended`].
    pub fn end_if(&mut self, asked: Arc<AtomicBool>) {
        self.end = asked;
    }

    /// Runs one application beside each node, and waits until all have ended.
    ///
    /// # Errors
    /// [`LaunchError`] of the first application or node that failed; the others are ended.
    pub fn run(&mut self, program: &[OsString]) -> Result<(), LaunchError> {
        let applications = self.start(program)?;
        self.watch_over(applications)
    }

    /// Runs applications as [`LaunchedTorus::run`] does, but to their own ends, whatever dies. `watch` is called again and
    /// again.
    ///
    /// # Errors
    /// [`LaunchError`] if one cannot be started.
    pub fn run_surviving(
        &mut self,
        program: &[OsString],
        mut watch: impl FnMut(&mut LaunchedTorus),
    ) -> Result<Vec<Ended>, LaunchError> {
        let mut applications = self.start(program)?;
        let mut ended = Vec::new();
        while applications.is_running() {
            ended.extend(applications.poll_ended(&self.end)?);
            watch(self);
        }
        ended.sort_by_key(|&(node, _)| node);
        Ok(ended)
    }

    /// Runs one program for the whole torus, for example `mpirun`: each of its processes attaches to the node of its rank.
    ///
    /// # Errors
    /// As [`LaunchedTorus::run`]; the program's failure is that of node 0.
    pub fn run_once(&mut self, program: &[OsString]) -> Result<(), LaunchError> {
        let mut applications = Applications::default();
        let Some((name, arguments)) = program.split_first() else { return Ok(()) };
        let mut command = Command::new(name);
        command
            .args(arguments)
            .env(ENV_SOCKETS, socket_names(self.key))
            .env(ENV_SIZE, self.dimensions.nodes().to_string())
            .env(ENV_DIMENSIONS, self.dimensions.to_string())
            .stdin(Stdio::null());
        applications.start(NodeNumber(0), command)?;
        self.watch_over(applications)
    }

    fn watch_over(&mut self, mut applications: Applications) -> Result<(), LaunchError> {
        while applications.is_running() {
            if let Some((node, status)) = applications.poll_ended(&self.end)?
                && !status.success()
            {
                return Err(LaunchError::Application { node, status });
            }
            self.nodes.iter_mut().try_for_each(NodeChild::check)?;
        }
        Ok(())
    }

    fn start(&self, program: &[OsString]) -> Result<Applications, LaunchError> {
        let mut applications = Applications::default();
        let Some((name, arguments)) = program.split_first() else { return Ok(applications) };
        for node in self.dimensions.all() {
            let environment = [
                (ENV_SOCKET, self.sockets[node.index()].clone()),
                (ENV_RANK, node.0.to_string()),
                (ENV_SIZE, self.dimensions.nodes().to_string()),
                (ENV_DIMENSIONS, self.dimensions.to_string()),
            ];
            let mut command = match &self.launcher.launcher {
                // A launcher such as ssh does not pass the environment on.
                Some(launcher) => {
                    let mut command = Command::new(launcher);
                    command
                        .arg("env")
                        .args(environment.iter().map(|(name, value)| format!("{name}={value}")));
                    command.arg(name);
                    command
                }
                None => Command::new(name),
            };
            command.args(arguments).envs(environment).stdin(Stdio::null());
            applications.start(node, command)?;
        }
        Ok(applications)
    }

    /// Starts the process of a node again in place of one that has ended. The supervisors take it back when its links are up.
    ///
    /// # Errors
    /// [`LaunchError`] if it cannot be started.
    pub fn restart_node(&mut self, node: NodeNumber) -> Result<(), LaunchError> {
        let address = self.addresses.get(node.index()).cloned();
        let mut command = self.launcher.node_command(node, address.as_deref(), &self.watched);
        command.arg("--rejoin");
        let Some(place) = self.nodes.get_mut(node.index()) else { return Ok(()) };
        let mut child = NodeChild::start(node, command, &self.launcher.keys(self.key))?;
        let deadline = Instant::now() + START;
        let NodeMessage::Listening { seventh, .. } = child.expect(deadline)? else {
            return Err(child.failure("did not say where it listens"));
        };
        if let Some(gateway) = self.gateways.get_mut(node.index()) {
            *gateway = seventh;
        }
        child.send(&NodeCommand::Peers(self.addresses.clone()))?;
        if child.expect(deadline)? != NodeMessage::Ready {
            return Err(child.failure("is not ready"));
        }
        *place = child;
        Ok(())
    }

    /// Starts a supervisor again, at its address, in place of one that has ended. Nodes and other supervisors find it there.
    ///
    /// # Errors
    /// [`LaunchError`] if it cannot be started.
    pub fn restart_supervisor(&mut self, index: usize) -> Result<(), LaunchError> {
        let (addresses, key) = self.watched_at();
        let Some(place) = self.supervisors.get_mut(index) else { return Ok(()) };
        let command =
            self.launcher.supervisor_command(addresses.get(index).map(String::as_str), &addresses[..index]);
        let mut supervisor = ServiceProcess::start(command, key)?;
        supervisor.address(index, Instant::now() + START)?;
        *place = supervisor;
        Ok(())
    }

    /// Supervisors whose process has ended, by index.
    #[must_use]
    pub fn ended_supervisors(&mut self) -> Vec<usize> {
        (self.supervisors.iter_mut().enumerate())
            .filter_map(|(index, supervisor)| supervisor.has_ended().then_some(index))
            .collect()
    }

    /// Nodes whose process has ended.
    #[must_use]
    pub fn ended_nodes(&mut self) -> Vec<NodeNumber> {
        let all = self.dimensions.all();
        self.nodes
            .iter_mut()
            .zip(all)
            .filter_map(|(node, number)| node.check().err().map(|_| number))
            .collect()
    }

    /// The counters of all live nodes, when nothing waits any more or after some time.
    ///
    /// # Errors
    /// [`LaunchError`] of a node that failed meanwhile.
    pub fn counters(&mut self) -> Result<Vec<TrafficCounters>, LaunchError> {
        let deadline = Instant::now() + SETTLE;
        let mut before = TrafficCounters::default();
        let ended = self.ended_nodes();
        loop {
            let mut counters = Vec::new();
            for node in self.nodes.iter_mut().filter(|node| !ended.contains(&node.node())) {
                node.send(&NodeCommand::Counters)?;
            }
            for node in self.nodes.iter_mut().filter(|node| !ended.contains(&node.node())) {
                let NodeMessage::Counters(of_node) = node.expect(deadline + SETTLE)? else {
                    return Err(node.failure("sent no counters"));
                };
                counters.push(of_node);
            }
            let total = TrafficCounters::total(&counters);
            // A node that was killed took its terms with it, also when it came back.
            let whole = !ended.is_empty() || total.epoch > 0 || total.on_links() == 0;
            if (total.idle && total.is_balanced() && whole && total == before) || Instant::now() >= deadline {
                return Ok(counters);
            }
            before = total;
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Ends the torus. Returns the counters of all live nodes. Each must balance; if no node died, all packets that were
    /// sent have been received.
    ///
    /// # Errors
    /// [`LaunchError::Unbalanced`] if packets are missing.
    pub fn finish(mut self) -> Result<Vec<TrafficCounters>, LaunchError> {
        let counters = self.counters()?;
        let total = TrafficCounters::total(&counters);
        let lost_on_links = counters.len() == self.nodes.len() && total.on_links() != 0 && total.epoch == 0;
        if lost_on_links || !counters.iter().all(TrafficCounters::is_balanced) {
            return Err(LaunchError::Unbalanced { counters: Box::new(total) });
        }
        Ok(counters)
    }
}

impl Drop for LaunchedTorus {
    fn drop(&mut self) {
        for node in &mut self.nodes {
            // One that has ended needs no message.
            let _ = node.send(&NodeCommand::Finish);
        }
    }
}
