//! Ranks of jobs: `evb join` and `torus join`.

use std::error::Error;
use std::ffi::OsString;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::Duration;

use millstream_job::agent::{self, MakeCommand};
use millstream_job::{Hub, Job, JobError, StartRequest, relay as process};
use millstream_rdma::loader;

use crate::args::{JobOptions, RelayOptions};

/// Time for all ranks to come.
const RANKS: Duration = Duration::from_secs(60);

/// Environment variables that a process of another rank gets, if it may have them: these, and those of torus applications but
/// keys.
const FORWARDED: [&str; 2] = [loader::ENV_DEVICE, loader::ENV_PATH];
const FORWARDED_PREFIX: &str = "MILLSTREAM_TORUS_";

fn is_forwarded(name: &str) -> bool {
    FORWARDED.contains(&name) || (name.starts_with(FORWARDED_PREFIX) && !name.ends_with("_KEY"))
}

impl JobOptions {
    pub(crate) fn job(&self) -> Result<Job, JobError> {
        Job::from_environment(self.rank, self.ranks, self.at.as_deref())
    }
}

/// Serves rank 0 as any other rank.
pub(crate) fn serve(job: &Job, make: Arc<MakeCommand>) -> Result<ExitCode, Box<dyn Error>> {
    agent::serve(job, make)?;
    Ok(ExitCode::SUCCESS)
}

/// Opens the hub at rank 0, starts the agent of this rank, and waits for the others.
pub(crate) fn gather(
    job: &Job,
    place: impl Fn(&StartRequest) -> usize + Send + Sync + 'static,
    make: Arc<MakeCommand>,
) -> Result<Hub, JobError> {
    let hub = Hub::open(job, place)?;
    let job = job.clone();
    // Its end is that of the hub, which this thread sees first.
    std::thread::spawn(move || agent::serve_beside_hub(&job, make));
    hub.wait_for_ranks(RANKS)?;
    Ok(hub)
}

/// Arguments of this program that make it the relay of a process; the role follows. Other users read arguments, so they name a
/// file with the key.
pub(crate) fn relay_arguments(hub: &Hub) -> Vec<OsString> {
    let address = hub.address().to_string();
    vec![
        "relay".into(),
        "--hub".into(),
        address.into(),
        "--key-file".into(),
        hub.relay_key().into(),
        "--".into(),
    ]
}

pub(crate) fn relay(options: RelayOptions) -> Result<ExitCode, Box<dyn Error>> {
    // Others need not be UTF-8.
    let environment = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok().filter(|name| is_forwarded(name))?, value)))
        .map(|(name, value)| match value.into_string() {
            Ok(value) => Ok((name, value)),
            Err(value) => Err(format!("{name}={value:?} is not UTF-8")),
        })
        .collect::<Result<_, _>>()?;
    let request = StartRequest { arguments: options.words, environment };
    let key = std::fs::read(&options.key_file)
        .map_err(|error| format!("the key of relays in {}: {error}", options.key_file.display()))?;
    let code = process::run(&options.hub, &key, request)
        .map_err(|error| format!("the hub of the job at {}: {error}", options.hub))?;
    // Statuses of signals are above 128.
    Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)))
}

/// Gives a process the forwarded variables.
pub(crate) fn set_environment(command: &mut Command, request: &StartRequest) {
    let allowed = request.environment.iter().filter(|(name, _)| is_forwarded(name));
    command.envs(allowed.map(|(name, value)| (name, value)));
    millstream_shm::descriptors::restore_limit(command);
}
