//! `millstream evb control`: the run control process.

use std::collections::BTreeSet;
use std::error::Error;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use millstream_control::directory::{Directory, run_folders};
use millstream_control::http::{Server, ServerLimits};
use millstream_control::power::PowerMeter;
use millstream_control::token::Token;
use millstream_control::{Backend, FinishedRun, RunControl};
use millstream_evb::config::{ConfigFile, RunConfig};
use millstream_evb::core::StopCause;
use millstream_evb::process::RunOutcome;
use millstream_evb::process::launcher::{CommandReceiver, RunEvent, RunObserver};
use millstream_report::{Bytes, eprint_line};
use millstream_tls::Security;

use super::usage::Usages;
use super::{check, device_selector, files, folder, launcher, make_output_directory, outcome};
use crate::args::EvbControlOptions;
use crate::interrupt::Interrupt;
use crate::output::print_line;

/// Interval of looking for a signal.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);

pub(super) fn run(options: &EvbControlOptions) -> Result<ExitCode, Box<dyn Error>> {
    let interrupt = Interrupt::listen()?;
    let path = options.directory.clone().unwrap_or_else(|| folder(&options.config).join("run-control"));
    let directory = Directory::open(&path)?;
    let token_path = options.token_file.clone().unwrap_or_else(|| path.join("token"));
    let token = Token::load_or_create(&token_path)?;
    let backend = Processes { process_launcher: options.launcher.clone(), recovered: Mutex::default() };
    let control = RunControl::new(&options.config, directory, PowerMeter::host(), backend);
    let security = Security::from_environment()?;
    let scheme = if security.is_on() { "https" } else { "http" };
    let server = Server::start(control.clone(), (token, security), &options.listen, ServerLimits::default())?;
    print_line!("run control: {scheme}://{}/", server.address())?;
    print_line!("token: {}", token_path.display())?;
    match control.configure() {
        Ok(()) => print_line!("configured: {}", options.config.display())?,
        // The operator can correct the file and configure again.
        Err(error) => eprint_line!("not configured: {error}"),
    }
    while interrupt.flow() == ControlFlow::Continue(()) {
        std::thread::sleep(SIGNAL_INTERVAL);
    }
    // A second signal ends this process meanwhile.
    control.shut_down();
    drop(server);
    print_line!("run control ended")?;
    Ok(ExitCode::SUCCESS)
}

/// Runs of real processes.
struct Processes {
    process_launcher: Option<PathBuf>,
    /// Output directories in which earlier runs were looked for. Runs of this process complete their files themselves.
    recovered: Mutex<BTreeSet<PathBuf>>,
}

impl Backend for Processes {
    fn check(&self, file: ConfigFile) -> Result<RunConfig, String> {
        let config = check(file, self.process_launcher.is_some()).map_err(|error| error.to_string())?;
        // The units of a launcher open the devices of their own hosts.
        if self.process_launcher.is_none() {
            check_device(&config)?;
        }
        Ok(config)
    }

    fn run(
        &self,
        config: &RunConfig,
        commands: CommandReceiver,
        observe: &mut RunObserver<'_>,
    ) -> Result<FinishedRun, String> {
        make_output_directory(config).map_err(|error| error.to_string())?;
        self.recover_earlier_runs(config);
        let launcher = launcher(self.process_launcher.as_deref())?;
        let mut usages = Usages::default();
        let outcome = launcher.run_with_commands(config, commands, &mut |event| {
            usages.watch(event);
            if let RunEvent::ErrorLine { process, line } = event {
                eprint_line!("{}: {line}", outcome::name(config, process));
            }
            observe(event)
        });
        let problems = files::complete(config);
        let outcome = outcome.map_err(|error| error.to_string())?;
        let stopped_cleanly = stopped_cleanly(&outcome);
        let report = outcome::report(config, &outcome, &usages, (None, problems));
        Ok(FinishedRun { report, stopped_cleanly })
    }

    fn payload_per_event(&self, config: &RunConfig) -> Bytes {
        Bytes(outcome::payload_per_event(config) as u64)
    }
}

/// Looks for the run's RDMA device in a process of its own: it may need another verbs library than this process has loaded.
fn check_device(config: &RunConfig) -> Result<(), String> {
    let program = std::env::current_exe();
    let program = program.map_err(|error| format!("cannot find the path of this program: {error}"))?;
    let mut command = Command::new(program);
    let selector = device_selector(config).to_string();
    command.args(["--device", &selector, "devices", "--json"]).stdin(Stdio::null());
    let output = command.output().map_err(|error| format!("cannot look for RDMA devices: {error}"))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        let error = text.lines().find_map(|line| line.strip_prefix("millstream: "));
        return Err(format!("run.device: {}", error.unwrap_or(text.trim())));
    }
    match serde_json::from_slice::<Vec<serde_json::Value>>(&output.stdout) {
        Ok(devices) if devices.is_empty() => Err(format!("run.device: no RDMA device for {selector:?}")),
        _ => Ok(()),
    }
}

impl Processes {
    /// Completes what killed runs left in the folders of earlier runs, at the first run of an output directory. A run does not fail
    /// for them.
    fn recover_earlier_runs(&self, config: &RunConfig) {
        let Some(output) = &config.output else { return };
        let directory = folder(&output.directory);
        if !self.recovered.lock().unwrap_or_else(PoisonError::into_inner).insert(directory.clone()) {
            return;
        }
        let folders = run_folders(&directory).unwrap_or_else(|error| {
            eprint_line!("warning: {error}");
            Vec::new()
        });
        for earlier in folders.iter().filter(|earlier| **earlier != output.directory) {
            if let Err(error) = files::recover_earlier(earlier, &[]) {
                eprint_line!("warning: {error}");
            }
        }
    }
}

/// Whether the stop request is the only reason why the run is not complete. It may have gone on without a unit before.
fn stopped_cleanly(outcome: &RunOutcome) -> bool {
    let is_requested = |summary: &millstream_evb::core::RunSummary| {
        summary.cause == StopCause::Requested
            && summary.lost.iter().all(|unit| summary.recovered.contains(unit))
            && summary.is_balanced()
    };
    // Processes of a stopped run end with status 1 and no error.
    outcome.summary.as_ref().is_some_and(is_requested)
        && outcome
            .failures
            .iter()
            .filter(|failure| !failure.is_recovered)
            .all(|failure| failure.status.code() == Some(1) && failure.reason.trim().is_empty())
}
