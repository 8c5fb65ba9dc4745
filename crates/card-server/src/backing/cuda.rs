//! GPU memory. The driver copies for this process; devices and other processes store to it directly.
//!
//! - A network adapter accesses it by a dma-buf.
//! - The soft device and local clients map it ([`HostVisible`]) and store to it over PCIe, as an adapter does. Where
//!   Vulkan does not offer this, the soft device maps the dma-buf, which the drivers of integrated GPUs permit.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use millstream_card_abi::{AccessError, MappedMemory, MemoryRange};
use millstream_gpu::{CudaError, CudaMemory, Gpu, HostVisible, VulkanError};
use millstream_rdma::loader::ENV_PATH;
use millstream_rdma::memory::MemoryError;
use millstream_rdma::{Access, Device, Region};
use millstream_shm::PAGE;

use super::{AllocationOptions, Backing, BackingError, DevicePaths, register_descriptor};

/// Buffer for a copy whose ranges overlap (bytes).
const PIECE: usize = 4 << 20;

#[derive(Debug)]
pub(crate) struct GpuMemory {
    memory: CudaMemory,
    access: DeviceAccess,
}

/// How devices and other processes access the memory.
#[derive(Debug)]
enum DeviceAccess {
    /// By a mapping, and the descriptor that it can be imported from.
    Mapped { mapping: MappedMemory, fd: OwnedFd },
    /// By a dma-buf.
    Dmabuf(OwnedFd),
}

impl GpuMemory {
    pub(crate) fn open(
        index: u32,
        paths: &DevicePaths,
        options: AllocationOptions,
    ) -> Result<GpuMemory, BackingError> {
        let wrong = |cause| BackingError::Cuda { index, cause };
        let bytes = options.bytes as usize;
        let gpu = Gpu::open(&paths.cuda, index).map_err(wrong)?;
        let mapped = if options.for_adapter { None } else { map(&gpu, paths, bytes) };
        let (memory, access) = match mapped {
            Some((mapped, fd)) => {
                let imported = fd.try_clone().map_err(|cause| BackingError::Descriptor { index, cause })?;
                let memory = CudaMemory::import(&gpu, imported, bytes).map_err(wrong)?;
                let mapping = MappedMemory::new(Arc::new(mapped.into_mapping()));
                if std::env::var_os(ENV_PATH).is_none_or(|path| path != "wire") {
                    tracing::warn!(
                        "the kernel does not copy between processes in memory of {}: for RDMA within this host start the \
                         card with {ENV_PATH}=wire",
                        gpu.name()
                    );
                }
                (memory, DeviceAccess::Mapped { mapping, fd })
            }
            None => {
                let memory = CudaMemory::allocate(&gpu, bytes).map_err(wrong)?;
                let dmabuf = memory.export_dmabuf().map_err(wrong)?;
                (memory, DeviceAccess::Dmabuf(dmabuf))
            }
        };
        // Data of another program must not become visible.
        memory.zero(0, bytes).map_err(wrong)?;
        Ok(GpuMemory { memory, access })
    }
}

/// Whether processes can map memory of a GPU.
pub(super) fn check_mappable(index: u32, paths: &DevicePaths) -> Result<(), BackingError> {
    let gpu = Gpu::open(&paths.cuda, index).map_err(|cause| BackingError::Cuda { index, cause })?;
    HostVisible::allocate(&paths.vulkan, gpu.uuid(), PAGE)
        .map(drop)
        .map_err(|cause| BackingError::NotMappable { index, cause })
}

/// Memory of the GPU that processes can map, if Vulkan offers it.
fn map(gpu: &Gpu, paths: &DevicePaths, bytes: usize) -> Option<(HostVisible, OwnedFd)> {
    let open = || {
        let mapped = HostVisible::allocate(&paths.vulkan, gpu.uuid(), bytes)?;
        let fd = mapped.export()?;
        Ok::<_, VulkanError>((mapped, fd))
    };
    open()
        .inspect_err(|error| {
            tracing::warn!(
                "memory of {} cannot be mapped ({error}): the soft device and local clients cannot use this card",
                gpu.name()
            );
        })
        .ok()
}

/// Maps an error of the driver at an offset.
fn failed(offset: u64) -> impl Fn(CudaError) -> AccessError {
    move |error| AccessError::Device { offset, code: error.code() }
}

impl Backing for GpuMemory {
    fn size(&self) -> u64 {
        self.memory.len() as u64
    }

    /// None: code of this process that works on mapped memory loads from it, far slower than the driver copies.
    fn mapped(&self) -> Option<&MappedMemory> {
        None
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), AccessError> {
        self.memory.read(offset, out).map_err(failed(offset))
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), AccessError> {
        match &self.access {
            DeviceAccess::Mapped { mapping, .. } => mapping.write(offset, bytes),
            DeviceAccess::Dmabuf(_) => self.memory.write(offset, bytes).map_err(failed(offset)),
        }
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
        let len = self.memory.len();
        match &self.access {
            DeviceAccess::Mapped { mapping, .. } => {
                Region::mapped(device, mapping.mapping().clone(), 0, len, access)
            }
            DeviceAccess::Dmabuf(dmabuf) => register_descriptor(device, dmabuf.as_fd(), 0, len, access),
        }
    }

    fn shared_fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.access {
            DeviceAccess::Mapped { fd, .. } => Some(fd.as_fd()),
            DeviceAccess::Dmabuf(_) => None,
        }
    }

    fn gpu_memory(&self) -> Option<&CudaMemory> {
        Some(&self.memory)
    }
}
