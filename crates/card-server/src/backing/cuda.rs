//! GPU memory. Adapters access it by a dma-buf; the processor copies through the CUDA driver.

use std::os::fd::{AsFd, OwnedFd};

use millstream_card_abi::{AccessError, MappedMemory, MemoryRange};
use millstream_rdma::memory::MemoryError;
use millstream_rdma::{Access, Device, Region};
use millstream_shm::cuda::{CudaError, CudaMemory};

use super::{Backing, BackingError, DevicePaths, register_descriptor};

/// Buffer for a copy whose ranges overlap (bytes).
const PIECE: usize = 4 << 20;

#[derive(Debug)]
pub(crate) struct GpuMemory {
    memory: CudaMemory,
    dmabuf: OwnedFd,
}

impl GpuMemory {
    pub(crate) fn open(index: u32, paths: &DevicePaths, bytes: u64) -> Result<GpuMemory, BackingError> {
        let wrong = |cause| BackingError::Cuda { index, cause };
        let memory = CudaMemory::new(&paths.cuda, index, bytes as usize).map_err(wrong)?;
        let dmabuf = memory.export_dmabuf().map_err(wrong)?;
        let gpu = GpuMemory { memory, dmabuf };
        // Data of another program must not become visible.
        gpu.memory.zero(0, bytes as usize).map_err(wrong)?;
        Ok(gpu)
    }
}

/// Maps an error of the driver at an offset.
fn failed(offset: u64) -> impl Fn(CudaError) -> AccessError {
    move |error| AccessError::Device { offset, code: error.code() }
}

impl Backing for GpuMemory {
    fn size(&self) -> u64 {
        self.memory.len() as u64
    }

    fn mapped(&self) -> Option<&MappedMemory> {
        None
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), AccessError> {
        self.memory.read(offset, out).map_err(failed(offset))
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), AccessError> {
        self.memory.write(offset, bytes).map_err(failed(offset))
    }

    fn copy_within(&self, from: MemoryRange, to: u64) -> Result<(), AccessError> {
        if !from.overlaps(MemoryRange::new(to, from.len)) {
            let copied = self.memory.copy_within(from.offset, to, from.len as usize);
            return copied.map_err(failed(from.offset));
        }
        // In pieces through host memory, from the end that does not overwrite bytes still to be copied.
        let mut buffer = vec![0; PIECE.min(from.len as usize)];
        let pieces = from.len.div_ceil(PIECE as u64);
        for index in 0..pieces {
            let piece = if to > from.offset { pieces - 1 - index } else { index };
            let at = piece * PIECE as u64;
            let part = &mut buffer[..(from.len - at).min(PIECE as u64) as usize];
            self.read(from.offset + at, part)?;
            self.write(to + at, part)?;
        }
        Ok(())
    }

    fn clear(&self) -> Result<(), AccessError> {
        self.memory.zero(0, self.memory.len()).map_err(failed(0))
    }

    fn register(&self, device: &Device, access: Access) -> Result<Region, MemoryError> {
        register_descriptor(device, self.dmabuf.as_fd(), 0, self.memory.len(), access)
    }
}
