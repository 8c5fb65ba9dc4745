//! `millstream site up`: the cards, tori and event builders of a site as processes of this host.

use std::error::Error;
use std::io::{BufRead as _, BufReader};
use std::net::ToSocketAddrs as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use millstream_rdma::device::DeviceSelector;
use millstream_site::{EventBuilder, NetworkCard, Site};
use millstream_torus::launch::{LaunchedTorus, Launcher};
use millstream_torus_core::Dimensions;
use rustix::process::Signal;
use serde::{Deserialize, Serialize};

use crate::interrupt::Interrupt;
use crate::output::print_line;

/// Memory of a card whose entry has no `memory`.
const MEMORY: u64 = 1 << 30;
/// Interval of looks at the processes.
const LOOK: Duration = Duration::from_millis(200);
/// Time for a card to end after SIGTERM.
const CARD_END: Duration = Duration::from_secs(5);

/// What runs, for `site check --live`; a file in the state folder of the user.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct LiveSite {
    /// Process of `site up`.
    pub(super) pid: u32,
    pub(super) tori: Vec<LiveTorus>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct LiveTorus {
    pub(super) name: String,
    pub(super) dimensions: String,
    /// Process of each node.
    pub(super) nodes: Vec<u32>,
    /// Socket for the application of each node.
    pub(super) sockets: Vec<String>,
}

/// A process that ends with this value.
struct Process {
    name: String,
    child: Child,
    /// Time for its end after SIGTERM. `None` for run control, which waits for the end of its run.
    end: Option<Duration>,
    /// It was asked to end. A second signal would end run control in the middle of its run.
    is_asked: bool,
}

impl Process {
    /// Asks it to end, unless it has ended: its identifier may then be another process's.
    fn ask(&mut self) {
        let is_running = matches!(self.child.try_wait(), Ok(None));
        if is_running && !std::mem::replace(&mut self.is_asked, true) {
            let pid = rustix::process::Pid::from_child(&self.child);
            let _ = rustix::process::kill_process(pid, Signal::TERM);
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.ask();
        let deadline = self.end.map(|end| Instant::now() + end);
        while matches!(self.child.try_wait(), Ok(None)) && deadline.is_none_or(|at| Instant::now() < at) {
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The processes of this host: event builders end first, because their runs may use the cards.
#[derive(Default)]
struct Processes {
    cards: Vec<Process>,
    builders: Vec<Process>,
}

impl Drop for Processes {
    fn drop(&mut self) {
        for processes in [&mut self.builders, &mut self.cards] {
            // All end at the same time.
            processes.iter_mut().for_each(Process::ask);
            processes.clear();
        }
    }
}

/// The file with the live state of a site.
pub(super) fn state_file(file: &Path) -> Result<PathBuf, Box<dyn Error>> {
    let whole = std::fs::canonicalize(file)?;
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".local/state"));
    let folder = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from).or_else(home);
    let folder = folder.ok_or("neither XDG_STATE_HOME nor HOME is set")?.join("millstream/sites");
    let name: String = whole.display().to_string().replace('/', "%");
    Ok(folder.join(format!("{name}.json")))
}

pub(super) fn run(
    site: &Site,
    file: &Path,
    device: Option<&DeviceSelector>,
) -> Result<ExitCode, Box<dyn Error>> {
    let interrupt = Interrupt::listen()?;
    let mut processes = Processes::default();
    for card in &site.cards {
        match card_process(card, device)? {
            Some((process, line)) => {
                print_line!("card {}: {line}", card.name)?;
                processes.cards.push(process);
            }
            None => print_line!(
                "card {}: not started, {} is not an address of this host",
                card.name,
                card.address
            )?,
        }
    }
    let mut tori = Vec::new();
    let mut live = LiveSite { pid: std::process::id(), ..LiveSite::default() };
    for torus in &site.tori {
        let launched = launch_torus(&torus.dimensions, device)?;
        let state = live_torus(&torus.name, &torus.dimensions, &launched)?;
        print_line!("torus {}: {} node processes, {}", torus.name, state.nodes.len(), state.dimensions)?;
        live.tori.push(state);
        tori.push(launched);
    }
    for builder in &site.event_builders {
        let name = format!("event builder {}", builder.name);
        if !is_here(&builder.control) {
            print_line!("{name}: not started, {} is not an address of this host", builder.control)?;
            continue;
        }
        let configuration = crate::evb::folder(file).join(&builder.configuration);
        let mut command = program(device)?;
        command.args(["evb", "control"]).arg(&configuration).args(["--listen", &builder.control]);
        if shares_folder(builder, site) {
            let directory = format!("run-control-{}", builder.name);
            command.arg("--directory").arg(crate::evb::folder(&configuration).join(directory));
        }
        let (process, line) = started(name.clone(), command, &builder.control, None)?;
        print_line!("{name}: {line}")?;
        processes.builders.push(process);
    }
    let state = state_file(file)?;
    std::fs::create_dir_all(state.parent().unwrap_or(Path::new(".")))?;
    millstream_report::save(&state, &serde_json::to_string_pretty(&live)?)?;
    print_line!("{} is up; Ctrl-C ends it", site.name)?;
    let ended = wait(&mut processes, &mut tori, &interrupt);
    let _ = std::fs::remove_file(state);
    ended.map(|()| ExitCode::SUCCESS)
}

/// Waits for Ctrl-C, or for the end of a process, which is an error.
fn wait(
    processes: &mut Processes,
    tori: &mut [LaunchedTorus],
    interrupt: &Interrupt,
) -> Result<(), Box<dyn Error>> {
    while interrupt.flow().is_continue() {
        for process in processes.cards.iter_mut().chain(&mut processes.builders) {
            if let Some(status) = process.child.try_wait()? {
                return Err(format!("{} has ended: {status}", process.name).into());
            }
        }
        for torus in &mut *tori {
            if let Some(node) = torus.ended_nodes().first() {
                return Err(format!("{node} of a torus has ended").into());
            }
        }
        std::thread::sleep(LOOK);
    }
    Ok(())
}

/// This program, on the chosen device. Ctrl-C in the terminal does not reach it, so that it ends in order and is asked once. It
/// is also asked if this process ends without waiting: a second Ctrl-C does that.
fn program(device: Option<&DeviceSelector>) -> Result<Command, std::io::Error> {
    let mut command = Command::new(std::env::current_exe()?);
    command.process_group(0);
    let with_this_process =
        || rustix::process::set_parent_process_death_signal(Some(Signal::TERM)).map_err(std::io::Error::from);
    // SAFETY: between fork and exec, the closure does one system call, which is async-signal-safe.
    unsafe { command.pre_exec(with_this_process) };
    if let Some(device) = device {
        command.args(["--device", &device.to_string()]);
    }
    Ok(command)
}

/// The process of an emulated card, and the line that it prints; none if its address is on another host.
fn card_process(
    card: &NetworkCard,
    device: Option<&DeviceSelector>,
) -> Result<Option<(Process, String)>, Box<dyn Error>> {
    if !is_here(&card.address) {
        return Ok(None);
    }
    let mut command = program(device)?;
    let (memory, banks) = (card.memory.map_or(MEMORY, |memory| memory.0), card.banks.unwrap_or(1));
    command.args(["card", "serve", &card.name, "--listen", &card.address]);
    command.args(["--memory", &memory.to_string(), "--banks", &banks.to_string()]);
    started(format!("card {}", card.name), command, &card.address, Some(CARD_END)).map(Some)
}

/// Starts a process that prints a line when it listens at its address; the process and that line.
fn started(
    name: String,
    mut command: Command,
    address: &str,
    end: Option<Duration>,
) -> Result<(Process, String), Box<dyn Error>> {
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
    let out = child.stdout.take().ok_or("no standard output")?;
    let process = Process { name, child, end, is_asked: false };
    let (mut out, mut line) = (BufReader::new(out), String::new());
    out.read_line(&mut line)?;
    if line.is_empty() {
        return Err(format!("{} at {address} does not start", process.name).into());
    }
    // It could not print to a closed pipe, and would wait at a full one.
    let drain = move || std::io::copy(&mut out, &mut std::io::sink());
    std::thread::Builder::new().name("output".to_owned()).spawn(drain)?;
    Ok((process, line.trim().to_owned()))
}

/// Whether another event builder of the site has its configuration in the same folder, where run control would have its
/// directory.
fn shares_folder(builder: &EventBuilder, site: &Site) -> bool {
    let folder = |builder: &EventBuilder| Path::new(&builder.configuration).parent().map(Path::to_owned);
    site.event_builders.iter().any(|other| other.name != builder.name && folder(other) == folder(builder))
}

/// Whether a listener of this host can have the address.
fn is_here(address: &str) -> bool {
    let Ok(mut addresses) = address.to_socket_addrs() else { return false };
    addresses.any(|address| std::net::UdpSocket::bind((address.ip(), 0)).is_ok())
}

fn launch_torus(
    dimensions: &[u32],
    device: Option<&DeviceSelector>,
) -> Result<LaunchedTorus, Box<dyn Error>> {
    let launcher = Launcher {
        dimensions: shape(dimensions)?,
        program: std::env::current_exe()?,
        arguments: vec!["torus".into()],
        launcher: None,
        addresses: Vec::new(),
        supervisor_address: None,
        node_arguments: Vec::new(),
        seventh: None,
        card: None,
        device: device.map(ToString::to_string),
        supervisors: 0,
        period_factor: 1,
    };
    Ok(launcher.launch()?)
}

/// A shape with three axes.
fn shape(dimensions: &[u32]) -> Result<Dimensions, Box<dyn Error>> {
    let axis = |index: usize| dimensions.get(index).copied().unwrap_or(1).to_string();
    Ok([axis(0), axis(1), axis(2)].join("x").parse::<Dimensions>().map_err(|error| error.to_string())?)
}

fn live_torus(name: &str, dimensions: &[u32], launched: &LaunchedTorus) -> Result<LiveTorus, Box<dyn Error>> {
    let shape = shape(dimensions)?;
    Ok(LiveTorus {
        name: name.to_owned(),
        dimensions: shape.to_string(),
        nodes: shape.all().filter_map(|node| launched.pid(node)).collect(),
        sockets: shape.all().filter_map(|node| launched.socket(node)).map(str::to_owned).collect(),
    })
}
