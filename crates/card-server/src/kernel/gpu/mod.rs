//! Kernels that a GPU runs on its own memory: those for events, and images of PTX.

mod events;
mod image;

pub(crate) use self::events::{GpuEvent, GpuEvents, GpuFragment, GpuTrigger, NO_CHECKSUM};
pub(crate) use self::image::PtxLoader;
pub use self::image::check_ptx_for_events;

use millstream_card_abi::command::{Cause, Fault};
use millstream_gpu::{CudaError, CudaMemory, Gpu, Module};
use millstream_shm::PAGE;

use crate::kernel::KernelRun;

/// GPU memory for what a launch reads beside card memory, and for its results. Grows as needed.
#[derive(Debug, Default)]
pub(crate) struct Scratch(Option<CudaMemory>);

impl Scratch {
    /// Copies `bytes` to the start of the memory.
    pub(crate) fn upload(&mut self, gpu: &Gpu, bytes: &[u8]) -> Result<&CudaMemory, CudaError> {
        let kept = self.0.take().filter(|memory| memory.len() >= bytes.len());
        let memory = match kept {
            Some(memory) => memory,
            None => CudaMemory::allocate(gpu, bytes.len().next_power_of_two().max(PAGE))?,
        };
        memory.write(0, bytes)?;
        Ok(self.0.insert(memory))
    }

    /// Copies out of the memory that was uploaded last.
    pub(crate) fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), CudaError> {
        self.0.as_ref().map_or(Ok(()), |memory| memory.read(offset as u64, out))
    }
}

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
