//! `millstream torus run`.

use std::error::Error;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::AsRawFd as _;
use std::path::PathBuf;
use std::process::ExitCode;

use millstream_rdma::device::DeviceSelector;
use millstream_report::eprint_line;
use millstream_torus::engine::EngineOptions;
use millstream_torus::key;
use millstream_torus::launch::{LaunchedTorus, Launcher, run_direct};
use millstream_torus::node::SeventhOptions;
use millstream_torus::traffic::TrafficCounters;
use millstream_torus_core::NodeNumber;
use rustix::fs::{MemfdFlags, Mode};

use super::{Network, TorusRunOptions};
use crate::interrupt::Interrupt;
use crate::output::print_line;

/// How often supervisors are started again in one run.
const SUPERVISOR_RESTARTS: u32 = 8;

pub(super) fn run(
    options: &TorusRunOptions,
    device: Option<&DeviceSelector>,
) -> Result<ExitCode, Box<dyn Error>> {
    if options.network == Network::Direct {
        return run_mesh(options, device);
    }
    // A launcher such as ssh does not pass the environment on.
    let device_arguments = device.map(|device| ["--device".into(), device.to_string().into()]);
    let arguments = device_arguments.into_iter().flatten().chain(["torus".into()]).collect();
    let launcher = launcher(options, device, std::env::current_exe()?, arguments)?;
    run_with(options, &launcher, &options.program)
}

/// A launcher of `program` with `arguments` before the role of each process.
pub(super) fn launcher(
    options: &TorusRunOptions,
    device: Option<&DeviceSelector>,
    program: PathBuf,
    arguments: Vec<OsString>,
) -> Result<Launcher, Box<dyn Error>> {
    let mut node_arguments: Vec<OsString> = Vec::new();
    let engine = options.engine.options(EngineOptions::of_processes());
    for (name, value) in [("--packet", engine.packet.to_string()), ("--slots", engine.slots.to_string())] {
        node_arguments.extend([name.into(), value.into()]);
    }
    node_arguments.extend(options.publish_card.then(|| "--publish-card".into()));
    let (dimensions, mut addresses) = options.shape.resolve()?;
    if let Some(listen) = &options.listen {
        addresses = dimensions.all().map(|node| listen.replace("{node}", &node.0.to_string())).collect();
    }
    let seventh_key = options.seventh_key_file.as_deref().map(key::read).transpose()?;
    Ok(Launcher {
        dimensions,
        program,
        arguments,
        launcher: options.launcher.clone(),
        addresses,
        supervisor_address: options.supervisor_listen.clone(),
        node_arguments,
        device: device.map(ToString::to_string),
        card: options.card.clone(),
        seventh: options.seventh.clone().map(|listen| SeventhOptions {
            listen,
            key: seventh_key.unwrap_or_else(millstream_shm::random_u64),
        }),
        supervisors: options.supervisors,
        period_factor: options.period_factor,
    })
}

/// Runs `application` beside each node of the launcher's torus, and prints the counters.
pub(super) fn run_with(
    options: &TorusRunOptions,
    launcher: &Launcher,
    application: &[OsString],
) -> Result<ExitCode, Box<dyn Error>> {
    let dimensions = launcher.dimensions;
    let mut torus = launcher.launch()?;
    // Without it, SIGTERM would leave applications behind.
    let interrupt = Interrupt::listen()?;
    torus.end_if(interrupt.asked());
    let mut files = KeyFiles::default();
    if options.supervisors > 0 {
        let (addresses, key) = torus.watched_at();
        let (file, addresses) = (files.path(key)?, addresses.join(","));
        eprint_line!("watch: millstream torus watch --supervisors {addresses} --key-file {file}");
    }
    if let Some((address, key)) = torus.gateway(NodeNumber(0)) {
        // A pipe or standard input cannot be read again.
        let named = options.seventh_key_file.as_deref().filter(|file| file.is_file());
        let file = named.map_or_else(|| files.path(key), |file| Ok(file.display().to_string()))?;
        eprint_line!("outside hosts: millstream torus outside --gateway {address} --key-file {file} list");
    }
    let mut failures = Vec::new();
    if options.supervisors > 0 {
        let mut restarts = 0;
        let ended = torus.run_surviving(application, |torus| restart_supervisors(torus, &mut restarts))?;
        for node in torus.ended_nodes() {
            failures.push(format!("{node} was lost"));
        }
        for (node, status) in ended.into_iter().filter(|(_, status)| !status.success()) {
            failures.push(format!("the application of {node} ended with {status}"));
        }
    } else if options.once {
        torus.run_once(application)?;
    } else {
        torus.run(application)?;
    }
    let counters = torus.finish()?;
    let total = TrafficCounters::total(&counters);
    if options.json {
        let report = serde_json::json!({
            "dimensions": dimensions.to_string(),
            "total": total,
            "nodes": counters,
        });
        print_line!("{}", serde_json::to_string_pretty(&report)?)?;
    } else {
        print_line!("{dimensions}: {total}")?;
    }
    if failures.is_empty() { Ok(ExitCode::SUCCESS) } else { Err(failures.join("; ").into()) }
}

/// Files with keys, which only this user reads, and which end with this process: others may read what it prints.
#[derive(Default)]
struct KeyFiles(Vec<File>);

impl KeyFiles {
    /// The name of a file with the key.
    fn path(&mut self, key: u64) -> io::Result<String> {
        let memory = rustix::fs::memfd_create("millstream-torus-key", MemfdFlags::CLOEXEC)?;
        rustix::fs::fchmod(&memory, Mode::RUSR | Mode::WUSR)?;
        let mut file = File::from(memory);
        writeln!(file, "{}", key::text(key))?;
        let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        self.0.push(file);
        Ok(path)
    }
}

/// Starts supervisors again that have ended, some times in a run.
fn restart_supervisors(torus: &mut LaunchedTorus, restarts: &mut u32) {
    for index in torus.ended_supervisors() {
        if *restarts == SUPERVISOR_RESTARTS {
            return;
        }
        *restarts += 1;
        match torus.restart_supervisor(index) {
            Ok(()) => eprint_line!("supervisor {index} ended and was started again"),
            Err(error) => eprint_line!("supervisor {index} ended and could not be started again: {error}"),
        }
    }
}

/// Runs the application on a full mesh, which has neither node processes nor supervisors.
fn run_mesh(options: &TorusRunOptions, device: Option<&DeviceSelector>) -> Result<ExitCode, Box<dyn Error>> {
    let without_nodes = [
        ("--supervisors", options.supervisors > 0),
        ("--launcher", options.launcher.is_some()),
        ("--listen", options.listen.is_some()),
        ("--card", options.card.is_some()),
        ("--seventh", options.seventh.is_some()),
        ("--once", options.once),
    ];
    if let Some((option, _)) = without_nodes.into_iter().find(|&(_, given)| given) {
        return Err(format!("{option} is about node processes, which --network direct does not have").into());
    }
    let (dimensions, _) = options.shape.resolve()?;
    let device = device.map(ToString::to_string);
    run_direct(dimensions, device.as_deref(), &options.program, &Interrupt::listen()?.asked())?;
    Ok(ExitCode::SUCCESS)
}
