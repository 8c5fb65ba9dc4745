//! Kernels that a GPU runs on its own memory: those for events, and images of PTX.

mod events;
mod image;

pub(crate) use self::events::{GpuEvent, GpuEvents, GpuFragment, GpuTrigger};
pub(crate) use self::image::PtxLoader;
pub use self::image::check_ptx_for_events;

use millstream_card_abi::command::{Cause, Fault};
use millstream_gpu::{CudaError, Module};

use crate::kernel::KernelRun;

/// Maps an error of the driver.
pub(crate) fn failed(error: &CudaError) -> Fault {
    tracing::debug!("kernel of a GPU: {error}");
    Fault::new(Cause::GpuFailed, u64::from(error.code().unsigned_abs()))
}

/// Waits for the launches of a module; the heartbeat advances meanwhile. A kernel of a GPU cannot be stopped: a run that has to
/// end does so after the launches.
pub(crate) fn wait(module: &Module, run: &KernelRun<'_>) -> Result<(), Fault> {
    let mut outcome = Ok(());
    while !module.is_idle().map_err(|error| failed(&error))? {
        outcome = outcome.and_then(|()| run.beat());
        std::hint::spin_loop();
    }
    outcome
}
