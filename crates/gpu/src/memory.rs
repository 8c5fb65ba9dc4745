//! Memory of GPUs that the driver copies to and from.
//!
//! Read first: the CUDA Driver API reference, "Memory Management" and "External Resource Interoperability".

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::ptr;
use std::time::Duration;

use millstream_shm::PAGE;

use crate::driver::{CudaError, ExternalBuffer, ExternalFd, ExternalHandle, Gpu};

/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
const HANDLE_DMA_BUF: c_int = 1;

/// `CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD`.
const HANDLE_OPAQUE_FD: c_int = 1;

/// `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`: copies are complete, and visible to other devices, when their calls return.
const POINTER_SYNC: c_int = 6;

/// Longest wait for a copy within the memory or a fill. A kernel that takes the whole GPU and does not end holds them up; they
/// follow when it ends.
const COPY_TIMEOUT: Duration = Duration::from_secs(10);

/// Memory of a GPU.
pub struct CudaMemory {
    gpu: Gpu,
    address: u64,
    len: usize,
    /// The imported memory that the address belongs to; null for an allocation.
    imported: *mut c_void,
}

// SAFETY: the driver's handles may be used in any thread.
unsafe impl Send for CudaMemory {}
// SAFETY: as above.
unsafe impl Sync for CudaMemory {}

impl std::fmt::Debug for CudaMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaMemory({}, {} bytes)", self.gpu.name(), self.len)
    }
}

impl CudaMemory {
    /// Allocates `len` bytes, a multiple of the page size.
    ///
    /// # Errors
    /// [`CudaError`] without free memory.
    pub fn allocate(gpu: &Gpu, len: usize) -> Result<CudaMemory, CudaError> {
        assert!(len.is_multiple_of(PAGE) && len != 0, "whole pages");
        let driver = gpu.enter()?;
        let mut address = 0;
        // SAFETY: the context is current, and the result pointer valid.
        driver.check("cuMemAlloc", unsafe { (driver.allocate)(&raw mut address, len) })?;
        let memory = CudaMemory { gpu: gpu.clone(), address, len, imported: ptr::null_mut() };
        let sync: c_int = 1;
        // SAFETY: the attribute is an int, and the address is that of an allocation.
        let set = unsafe { (driver.pointer_set)((&raw const sync).cast(), POINTER_SYNC, address) };
        driver.check("cuPointerSetAttribute", set)?;
        Ok(memory)
    }

    /// Imports `len` bytes of memory of this GPU that Vulkan has exported: see [`HostVisible`](crate::HostVisible).
    ///
    /// # Errors
    /// [`CudaError`] if the driver refuses the descriptor.
    pub fn import(gpu: &Gpu, fd: OwnedFd, len: usize) -> Result<CudaMemory, CudaError> {
        let driver = gpu.enter()?;
        let size = len as u64;
        let handle = ExternalHandle {
            kind: HANDLE_OPAQUE_FD,
            fd: ExternalFd(fd.as_raw_fd(), [0; 3]),
            size,
            flags: 0,
            reserved: [0; 16],
        };
        let mut imported = ptr::null_mut();
        // SAFETY: the handle describes an open descriptor; after success it belongs to the driver.
        let code = unsafe { (driver.external_import)(&raw mut imported, &raw const handle) };
        driver.check("cuImportExternalMemory", code)?;
        let _ = fd.into_raw_fd();
        let mut memory = CudaMemory { gpu: gpu.clone(), address: 0, len, imported };
        let buffer = ExternalBuffer { offset: 0, size, flags: 0, reserved: [0; 16] };
        // SAFETY: the memory was imported with this size.
        let code = unsafe { (driver.external_map)(&raw mut memory.address, imported, &raw const buffer) };
        driver.check("cuExternalMemoryGetMappedBuffer", code)?;
        Ok(memory)
    }

    /// Address of a byte for kernels.
    pub(crate) fn device_pointer(&self, offset: u64) -> u64 {
        self.device_address(offset, 0)
    }

    /// Device address of a range.
    fn device_address(&self, offset: u64, len: usize) -> u64 {
        let inside = len <= self.len && offset <= (self.len - len) as u64;
        assert!(inside, "{len} bytes at {offset:#x} of GPU memory of {} bytes", self.len);
        self.address + offset
    }

    /// Size \[bytes\].
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The GPU.
    #[must_use]
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Copies bytes out of the memory.
    ///
    /// # Errors
    /// Those of the driver.
    ///
    /// # Panics
    /// If the range is not inside the allocation, here and in the functions below.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), CudaError> {
        let from = self.device_address(offset, out.len());
        let driver = self.gpu.enter()?;
        // SAFETY: `out` has the length of the copy, and the range is inside the allocation.
        let copied = unsafe { (driver.copy_out)(out.as_mut_ptr().cast(), from, out.len()) };
        driver.check("cuMemcpyDtoH", copied)
    }

    /// Copies bytes into the memory.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), CudaError> {
        let to = self.device_address(offset, bytes.len());
        let driver = self.gpu.enter()?;
        // SAFETY: `bytes` has the length of the copy, and the range is inside the allocation.
        driver.check("cuMemcpyHtoD", unsafe { (driver.copy_in)(to, bytes.as_ptr().cast(), bytes.len()) })
    }

    /// Copies within the memory. The ranges must not overlap.
    ///
    /// # Errors
    /// Those of the driver; `CUDA_ERROR_NOT_READY` after ten seconds.
    pub fn copy_within(&self, from: u64, to: u64, len: usize) -> Result<(), CudaError> {
        let (from, to) = (self.device_address(from, len), self.device_address(to, len));
        let driver = self.gpu.enter()?;
        let stream = self.gpu.copy_stream();
        // SAFETY: both ranges are inside the allocation, and the stream lives as long as the GPU's context.
        let code = unsafe { (driver.copy_within)(to, from, len, stream) };
        driver.check("cuMemcpyDtoDAsync", code)?;
        driver.wait(stream, COPY_TIMEOUT)
    }

    /// Fills a range with zeros.
    ///
    /// # Errors
    /// Those of the driver; `CUDA_ERROR_NOT_READY` after ten seconds.
    pub fn zero(&self, offset: u64, len: usize) -> Result<(), CudaError> {
        let to = self.device_address(offset, len);
        let driver = self.gpu.enter()?;
        let stream = self.gpu.copy_stream();
        // SAFETY: the range is inside the allocation, and the stream lives as long as the GPU's context.
        driver.check("cuMemsetD8Async", unsafe { (driver.set)(to, 0, len, stream) })?;
        driver.wait(stream, COPY_TIMEOUT)
    }

    /// Exports the allocation as a dma-buf, for direct access by network adapters.
    ///
    /// # Errors
    /// Those of the driver; [`CudaError::NoDmaBuf`] if it does not export memory of this GPU.
    pub fn export_dmabuf(&self) -> Result<OwnedFd, CudaError> {
        if !self.gpu.exports_dmabufs()? {
            return Err(CudaError::NoDmaBuf { device: self.gpu.name().to_owned() });
        }
        let driver = self.gpu.enter()?;
        let mut fd: c_int = -1;
        // SAFETY: the handle of this type is an int; address and length are whole pages of the allocation.
        let code =
            unsafe { (driver.handle)((&raw mut fd).cast(), self.address, self.len, HANDLE_DMA_BUF, 0) };
        driver.check("cuMemGetHandleForAddressRange", code)?;
        // SAFETY: the driver returned a new descriptor.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        let Ok(driver) = self.gpu.enter() else { return };
        if self.address != 0 {
            // SAFETY: allocated or mapped once, freed once; dma-bufs hold their own reference.
            unsafe { (driver.free)(self.address) };
        }
        if !self.imported.is_null() {
            // SAFETY: imported once, destroyed once, after its buffer.
            unsafe { (driver.external_destroy)(self.imported) };
        }
    }
}
