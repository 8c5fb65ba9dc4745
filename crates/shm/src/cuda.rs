//! Memory of NVIDIA GPUs, through the CUDA driver's library, which is loaded at run time.
//!
//! Read first: the CUDA Driver API reference, "Initialization", "Primary Context Management" and "Memory
//! Management". The build needs no CUDA; without the library [`CudaMemory::new`] fails. The processor cannot load
//! from this memory: the driver copies bytes, and network adapters access it by a dma-buf
//! ([`CudaMemory::export_dmabuf`]).

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr;
use std::sync::Arc;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::PAGE;

/// Default name of the driver's library.
pub const LIBRARY: &str = "libcuda.so.1";

/// `CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED`.
const ATTRIBUTE_DMA_BUF: c_int = 124;

/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
const HANDLE_DMA_BUF: c_int = 1;

/// `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`: copies are complete, and visible to other devices, when their calls return.
const POINTER_SYNC: c_int = 6;

/// An error of the CUDA driver, or of loading it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CudaError {
    /// The driver's library cannot be loaded.
    Library {
        /// Name of the library.
        library: String,
        /// The dynamic loader's message.
        reason: String,
    },
    /// The driver's library lacks a function.
    Symbol {
        /// Name of the library.
        library: String,
        /// The missing function.
        symbol: &'static str,
    },
    /// There is no GPU of this index.
    NoDevice {
        /// Index of the GPU.
        index: u32,
        /// Number of GPUs.
        count: u32,
    },
    /// The driver cannot export this GPU's memory.
    NoDmaBuf {
        /// Name of the GPU.
        device: String,
    },
    /// A call of the driver failed.
    Call {
        /// The function.
        call: &'static str,
        /// Its result (`CUresult`).
        code: i32,
        /// Name of the result.
        name: String,
    },
}

impl std::fmt::Display for CudaError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            CudaError::Library { library, reason } => {
                write!(f, "cannot load NVIDIA's driver {library}: {reason}")
            }
            CudaError::Symbol { library, symbol } => {
                write!(f, "{library} has no function {symbol}: install a newer NVIDIA driver")
            }
            CudaError::NoDevice { index, count } => {
                write!(f, "no GPU {index}: the driver has {count} GPUs")
            }
            CudaError::NoDmaBuf { device } => {
                write!(
                    f,
                    "the driver cannot export memory of {device} as a dma-buf: install NVIDIA's open kernel modules"
                )
            }
            CudaError::Call { call, code, name } => write!(f, "{call} failed: {name} ({code})"),
        }
    }
}

impl std::error::Error for CudaError {}

impl CudaError {
    /// The driver's error number; zero if no call was made.
    #[must_use]
    pub fn code(&self) -> i32 {
        match self {
            CudaError::Call { code, .. } => *code,
            _ => 0,
        }
    }
}

macro_rules! driver {
    ($($field:ident: $symbol:literal fn($($argument:ty),*);)+) => {
        /// The driver's functions; all return zero for success.
        struct Driver {
            $($field: unsafe extern "C" fn($($argument),*) -> c_int,)+
            error_name: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int,
        }

        impl Driver {
            fn load(name: &str) -> Result<Driver, CudaError> {
                // SAFETY: the driver's constructors permit loading at run time.
                let library = unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL) };
                let library = library.map_err(|error| CudaError::Library {
                    library: name.to_owned(),
                    reason: error.to_string(),
                })?;
                let missing = |symbol| CudaError::Symbol { library: name.to_owned(), symbol };
                let driver = Driver {
                    // SAFETY: functions of the driver's API, with the types of its reference.
                    $($field: *unsafe { library.get(concat!($symbol, "\0").as_bytes()) }
                        .map_err(|_| missing($symbol))?,)+
                    // SAFETY: as above.
                    error_name: *unsafe { library.get(b"cuGetErrorName\0") }
                        .map_err(|_| missing("cuGetErrorName"))?,
                };
                // The library stays loaded: contexts point into it.
                std::mem::forget(library);
                Ok(driver)
            }
        }
    };
}

driver! {
    init: "cuInit" fn(c_uint);
    device_count: "cuDeviceGetCount" fn(*mut c_int);
    device_get: "cuDeviceGet" fn(*mut c_int, c_int);
    device_name: "cuDeviceGetName" fn(*mut c_char, c_int, c_int);
    device_attribute: "cuDeviceGetAttribute" fn(*mut c_int, c_int, c_int);
    context_retain: "cuDevicePrimaryCtxRetain" fn(*mut *mut c_void, c_int);
    context_release: "cuDevicePrimaryCtxRelease_v2" fn(c_int);
    context_set: "cuCtxSetCurrent" fn(*mut c_void);
    context_wait: "cuCtxSynchronize" fn();
    allocate: "cuMemAlloc_v2" fn(*mut u64, usize);
    free: "cuMemFree_v2" fn(u64);
    pointer_set: "cuPointerSetAttribute" fn(*const c_void, c_int, u64);
    copy_out: "cuMemcpyDtoH_v2" fn(*mut c_void, u64, usize);
    copy_in: "cuMemcpyHtoD_v2" fn(u64, *const c_void, usize);
    copy_within: "cuMemcpyDtoD_v2" fn(u64, u64, usize);
    set: "cuMemsetD8_v2" fn(u64, u8, usize);
    handle: "cuMemGetHandleForAddressRange" fn(*mut c_void, u64, usize, c_int, u64);
}

impl Driver {
    fn check(&self, call: &'static str, code: c_int) -> Result<(), CudaError> {
        if code == 0 {
            return Ok(());
        }
        let mut name = ptr::null();
        // SAFETY: the name is a constant of the library.
        let known = unsafe { (self.error_name)(code, &raw mut name) } == 0 && !name.is_null();
        let name = match known {
            // SAFETY: the call succeeded.
            true => unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned(),
            false => "unknown error".to_owned(),
        };
        Err(CudaError::Call { call, code, name })
    }
}

/// The retained primary context of a GPU.
struct Context {
    driver: Driver,
    device: c_int,
    handle: *mut c_void,
    name: String,
}

// SAFETY: a context may be made current in any thread; the driver serialises calls.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once, released once.
        unsafe { (self.driver.context_release)(self.device) };
    }
}

/// An allocation in the memory of a GPU.
pub struct CudaMemory {
    context: Arc<Context>,
    address: u64,
    len: usize,
}

impl std::fmt::Debug for CudaMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CudaMemory({}, {} bytes)", self.context.name, self.len)
    }
}

impl CudaMemory {
    /// Allocates `len` bytes, a multiple of the page size, on GPU `index`. `library` is usually [`LIBRARY`].
    ///
    /// # Errors
    /// [`CudaError`] without driver, GPU or free memory, or if the driver cannot export the memory.
    pub fn new(library: &str, index: u32, len: usize) -> Result<CudaMemory, CudaError> {
        assert!(len.is_multiple_of(PAGE) && len != 0, "whole pages");
        let driver = Driver::load(library)?;
        // SAFETY: calls of the driver's API in the required order, with valid result pointers.
        let (device, name) = unsafe {
            driver.check("cuInit", (driver.init)(0))?;
            let mut count = 0;
            driver.check("cuDeviceGetCount", (driver.device_count)(&raw mut count))?;
            let count = count.max(0).cast_unsigned();
            if index >= count {
                return Err(CudaError::NoDevice { index, count });
            }
            let mut device = 0;
            driver.check("cuDeviceGet", (driver.device_get)(&raw mut device, index.cast_signed()))?;
            let mut name = [0u8; 128];
            driver.check("cuDeviceGetName", (driver.device_name)(name.as_mut_ptr().cast(), 127, device))?;
            let name = CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy().into_owned();
            let mut exports = 0;
            let code = (driver.device_attribute)(&raw mut exports, ATTRIBUTE_DMA_BUF, device);
            driver.check("cuDeviceGetAttribute", code)?;
            if exports == 0 {
                return Err(CudaError::NoDmaBuf { device: name });
            }
            (device, name)
        };
        let mut handle = ptr::null_mut();
        // SAFETY: as above.
        let retained = unsafe { (driver.context_retain)(&raw mut handle, device) };
        driver.check("cuDevicePrimaryCtxRetain", retained)?;
        let context = Arc::new(Context { driver, device, handle, name });
        let mut memory = CudaMemory { context, address: 0, len };
        let driver = memory.enter()?;
        let mut address = 0;
        // SAFETY: as above; the context is current.
        driver.check("cuMemAlloc", unsafe { (driver.allocate)(&raw mut address, len) })?;
        memory.address = address;
        let sync: c_int = 1;
        // SAFETY: the attribute is an int, and the address is that of an allocation.
        let set = unsafe { (memory.driver().pointer_set)((&raw const sync).cast(), POINTER_SYNC, address) };
        memory.driver().check("cuPointerSetAttribute", set)?;
        Ok(memory)
    }

    fn driver(&self) -> &Driver {
        &self.context.driver
    }

    /// Makes the context current in this thread.
    fn enter(&self) -> Result<&Driver, CudaError> {
        let driver = self.driver();
        // SAFETY: the context is retained.
        driver.check("cuCtxSetCurrent", unsafe { (driver.context_set)(self.context.handle) })?;
        Ok(driver)
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

    /// Name of the GPU.
    #[must_use]
    pub fn device(&self) -> &str {
        &self.context.name
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
        let driver = self.enter()?;
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
        let driver = self.enter()?;
        // SAFETY: `bytes` has the length of the copy, and the range is inside the allocation.
        driver.check("cuMemcpyHtoD", unsafe { (driver.copy_in)(to, bytes.as_ptr().cast(), bytes.len()) })
    }

    /// Copies within the memory. The ranges must not overlap.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn copy_within(&self, from: u64, to: u64, len: usize) -> Result<(), CudaError> {
        let (from, to) = (self.device_address(from, len), self.device_address(to, len));
        let driver = self.enter()?;
        // SAFETY: both ranges are inside the allocation.
        driver.check("cuMemcpyDtoD", unsafe { (driver.copy_within)(to, from, len) })?;
        // SAFETY: takes no arguments.
        driver.check("cuCtxSynchronize", unsafe { (driver.context_wait)() })
    }

    /// Fills a range with zeros.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn zero(&self, offset: u64, len: usize) -> Result<(), CudaError> {
        let to = self.device_address(offset, len);
        let driver = self.enter()?;
        // SAFETY: the range is inside the allocation.
        driver.check("cuMemsetD8", unsafe { (driver.set)(to, 0, len) })?;
        // SAFETY: takes no arguments.
        driver.check("cuCtxSynchronize", unsafe { (driver.context_wait)() })
    }

    /// Exports the allocation as a dma-buf, for direct access by network adapters.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn export_dmabuf(&self) -> Result<OwnedFd, CudaError> {
        let driver = self.enter()?;
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
        if self.address != 0 && self.enter().is_ok() {
            // SAFETY: allocated once, freed once; dma-bufs hold their own reference.
            unsafe { (self.driver().free)(self.address) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_driver_or_symbol_is_reported() {
        let missing = CudaMemory::new("libcuda-of-nobody.so.1", 0, PAGE).unwrap_err();
        assert!(
            matches!(&missing, CudaError::Library { library, .. } if library == "libcuda-of-nobody.so.1")
        );
        assert!(missing.to_string().contains("cannot load NVIDIA's driver"), "{missing}");
        let other = CudaMemory::new("libc.so.6", 0, PAGE).unwrap_err();
        assert_eq!(other, CudaError::Symbol { library: "libc.so.6".to_owned(), symbol: "cuInit" });
    }
}
