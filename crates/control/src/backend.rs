//! What carries out runs: processes, or a simulation in tests.

use millstream_evb::config::{ConfigFile, RunConfig};
use millstream_evb::process::launcher::{CommandReceiver, RunObserver};
use millstream_report::{Bytes, RunReport};

/// Runs of the event builder, as run control needs them.
pub trait Backend: Send + Sync + 'static {
    /// Checks a configuration, also what depends on the host: devices, cards and modules of kernels.
    ///
    /// # Errors
    /// The first problem, with file, line, field and value.
    fn check(&self, file: ConfigFile) -> Result<RunConfig, String>;

    /// Carries out a run under `commands`, until all its processes have ended. Calls `observe` for each event.
    ///
    /// # Errors
    /// The run could not be started.
    fn run(
        &self,
        config: &RunConfig,
        commands: CommandReceiver,
        observe: &mut RunObserver<'_>,
    ) -> Result<FinishedRun, String>;

    /// Mean payload of an event of the inputs.
    fn payload_per_event(&self, config: &RunConfig) -> Bytes;
}

/// The end of a run.
#[derive(Clone, Debug)]
pub struct FinishedRun {
    /// Its report.
    pub report: RunReport,
    /// Whether a stop request is the only reason why the run is not complete.
    pub stopped_cleanly: bool,
}
