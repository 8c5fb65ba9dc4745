//! Memory of NVIDIA GPUs, by the CUDA driver's library, which is looked for at run time.
//!
//! Read first: the CUDA Driver API reference, "Initialization", "Primary Context Management" and "Memory
//! Management". Nothing is needed to build this; without the library [`CudaMemory::new`] says so. The memory has no
//! address that the processor could load from: bytes are copied by the driver, and network adapters reach it by a
//! dma-buf ([`CudaMemory::export`]).

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr;
use std::sync::Arc;

use crate::PAGE;

/// Name of the driver's library.
pub const LIBRARY: &str = "libcuda.so.1";

/// `CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED`.
const ATTRIBUTE_DMA_BUF: c_int = 124;

/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
const HANDLE_DMA_BUF: c_int = 1;

/// `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`: copies have ended when their calls return, so that other devices see them.
const POINTER_SYNC: c_int = 6;

/// Why GPU memory cannot be had or reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CudaError {
    /// The driver's library cannot be loaded.
    Library {
        /// Its name.
        library: String,
        /// What the loader says.
        reason: String,
    },
    /// It has not what is needed.
    Symbol {
        /// Its name.
        library: String,
        /// The missing function.
        symbol: &'static str,
    },
    /// There is no such GPU.
    NoDevice {
        /// The one asked for.
        index: u32,
        /// How many there are.
        count: u32,
    },
    /// The driver cannot export this GPU's memory.
    NoDmaBuf {
        /// The GPU.
        device: String,
    },
    /// The driver refused a call.
    Call {
        /// The function.
        call: &'static str,
        /// Its result.
        code: i32,
        /// The name of that.
        name: String,
    },
}

impl std::fmt::Display for CudaError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            CudaError::Library { library, reason } => {
                write!(f, "NVIDIA's driver is not here: cannot load {library}: {reason}")
            }
            CudaError::Symbol { library, symbol } => write!(f, "{library} has no {symbol}: it is too old"),
            CudaError::NoDevice { index, count } => {
                write!(f, "there is no GPU {index}, the driver has {count}")
            }
            CudaError::NoDmaBuf { device } => {
                write!(
                    f,
                    "the driver cannot export memory of {device} as a dma-buf: NVIDIA's open kernel modules can"
                )
            }
            CudaError::Call { call, code, name } => write!(f, "{call} failed: {name} ({code})"),
        }
    }
}

impl std::error::Error for CudaError {}

impl CudaError {
    /// The driver's error number, or zero if it was not even asked.
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
            fn load(library: &str) -> Result<Driver, CudaError> {
                let refused = |reason: String| CudaError::Library { library: library.to_owned(), reason };
                let name = CString::new(library).map_err(|_| refused("name with a zero byte".to_owned()))?;
                // SAFETY: the library's constructors are the driver's, which expects to be loaded like this. It is
                // never closed: contexts point into it.
                let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
                if handle.is_null() {
                    // SAFETY: the latest error of this thread, a C string that lives until the next one.
                    let reason = unsafe { libc::dlerror() };
                    // SAFETY: as above; `dlopen` failed, so there is one.
                    let reason = unsafe { CStr::from_ptr(reason) }.to_string_lossy().into_owned();
                    return Err(refused(reason));
                }
                let find = |symbol: &'static CStr| {
                    // SAFETY: a handle that was just opened, and a C string.
                    let found = unsafe { libc::dlsym(handle, symbol.as_ptr()) };
                    let missing = CudaError::Symbol {
                        library: library.to_owned(),
                        symbol: symbol.to_str().unwrap_or_default(),
                    };
                    if found.is_null() { Err(missing) } else { Ok(found) }
                };
                Ok(Driver {
                    // SAFETY: functions of the driver's API, with the types that its reference gives.
                    $($field: unsafe {
                        std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> c_int>(
                            find($symbol)?,
                        )
                    },)+
                    // SAFETY: as above.
                    error_name: unsafe {
                        std::mem::transmute::<
                            *mut c_void,
                            unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int,
                        >(find(c"cuGetErrorName")?)
                    },
                })
            }
        }
    };
}

driver! {
    init: c"cuInit" fn(c_uint);
    device_count: c"cuDeviceGetCount" fn(*mut c_int);
    device_get: c"cuDeviceGet" fn(*mut c_int, c_int);
    device_name: c"cuDeviceGetName" fn(*mut c_char, c_int, c_int);
    device_attribute: c"cuDeviceGetAttribute" fn(*mut c_int, c_int, c_int);
    context_retain: c"cuDevicePrimaryCtxRetain" fn(*mut *mut c_void, c_int);
    context_release: c"cuDevicePrimaryCtxRelease_v2" fn(c_int);
    context_set: c"cuCtxSetCurrent" fn(*mut c_void);
    context_wait: c"cuCtxSynchronize" fn();
    allocate: c"cuMemAlloc_v2" fn(*mut u64, usize);
    free: c"cuMemFree_v2" fn(u64);
    pointer_set: c"cuPointerSetAttribute" fn(*const c_void, c_int, u64);
    copy_out: c"cuMemcpyDtoH_v2" fn(*mut c_void, u64, usize);
    copy_in: c"cuMemcpyHtoD_v2" fn(u64, *const c_void, usize);
    copy_within: c"cuMemcpyDtoD_v2" fn(u64, u64, usize);
    set: c"cuMemsetD8_v2" fn(u64, u8, usize);
    handle: c"cuMemGetHandleForAddressRange" fn(*mut c_void, u64, usize, c_int, u64);
}

impl Driver {
    fn check(&self, call: &'static str, code: c_int) -> Result<(), CudaError> {
        if code == 0 {
            return Ok(());
        }
        let mut name = ptr::null();
        // SAFETY: the name, if there is one, is a constant of the library.
        let known = unsafe { (self.error_name)(code, &raw mut name) } == 0 && !name.is_null();
        let name = match known {
            // SAFETY: as above.
            true => unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned(),
            false => "unknown error".to_owned(),
        };
        Err(CudaError::Call { call, code, name })
    }
}

/// The primary context of a GPU, kept while it is used.
struct Context {
    driver: Driver,
    device: c_int,
    handle: *mut c_void,
    name: String,
}

// SAFETY: a context may be made current in any thread; the driver serialises calls by itself.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once, released once.
        unsafe { (self.driver.context_release)(self.device) };
    }
}

/// Memory of a GPU.
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
    /// Allocates `len` bytes, a multiple of the page size, of GPU `index`; `library` is usually [`LIBRARY`].
    ///
    /// # Errors
    /// [`CudaError`] without driver, GPU, memory, or the ability to export it.
    pub fn new(library: &str, index: u32, len: usize) -> Result<CudaMemory, CudaError> {
        assert!(len.is_multiple_of(PAGE) && len != 0, "whole pages");
        let driver = Driver::load(library)?;
        // SAFETY: plain calls of the driver's API in the order that it asks for, with places for their results.
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

    /// Makes the context this thread's.
    fn enter(&self) -> Result<&Driver, CudaError> {
        let driver = self.driver();
        // SAFETY: a context that is retained.
        driver.check("cuCtxSetCurrent", unsafe { (driver.context_set)(self.context.handle) })?;
        Ok(driver)
    }

    /// Address of a range in the driver's terms.
    fn at(&self, offset: u64, len: usize) -> u64 {
        let inside = len <= self.len && offset <= (self.len - len) as u64;
        assert!(inside, "{len} bytes at {offset:#x} of GPU memory of {} bytes", self.len);
        self.address + offset
    }

    /// Bytes.
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
    /// What the driver reports.
    ///
    /// # Panics
    /// If the range is not inside, here and in the functions that follow: callers check ranges.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), CudaError> {
        let from = self.at(offset, out.len());
        let driver = self.enter()?;
        // SAFETY: `out` takes as many bytes, and the range is the allocation's.
        let copied = unsafe { (driver.copy_out)(out.as_mut_ptr().cast(), from, out.len()) };
        driver.check("cuMemcpyDtoH", copied)
    }

    /// Copies bytes into the memory.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), CudaError> {
        let to = self.at(offset, bytes.len());
        let driver = self.enter()?;
        // SAFETY: as in `read`, the other way.
        driver.check("cuMemcpyHtoD", unsafe { (driver.copy_in)(to, bytes.as_ptr().cast(), bytes.len()) })
    }

    /// Copies inside the memory; the ranges may not overlap.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn copy_within(&self, from: u64, to: u64, len: usize) -> Result<(), CudaError> {
        let (from, to) = (self.at(from, len), self.at(to, len));
        let driver = self.enter()?;
        // SAFETY: both ranges are the allocation's.
        driver.check("cuMemcpyDtoD", unsafe { (driver.copy_within)(to, from, len) })?;
        // SAFETY: a plain call.
        driver.check("cuCtxSynchronize", unsafe { (driver.context_wait)() })
    }

    /// Writes zeros to a range.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn zero(&self, offset: u64, len: usize) -> Result<(), CudaError> {
        let to = self.at(offset, len);
        let driver = self.enter()?;
        // SAFETY: the range is the allocation's.
        driver.check("cuMemsetD8", unsafe { (driver.set)(to, 0, len) })?;
        // SAFETY: a plain call.
        driver.check("cuCtxSynchronize", unsafe { (driver.context_wait)() })
    }

    /// All of the memory as a dma-buf, which network adapters reach directly.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn export(&self) -> Result<OwnedFd, CudaError> {
        let driver = self.enter()?;
        let mut fd: c_int = -1;
        // SAFETY: the handle of this type is an int; address and length are whole pages of the allocation.
        let code =
            unsafe { (driver.handle)((&raw mut fd).cast(), self.address, self.len, HANDLE_DMA_BUF, 0) };
        driver.check("cuMemGetHandleForAddressRange", code)?;
        // SAFETY: a new descriptor that the driver has given to us.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        if self.address != 0 && self.enter().is_ok() {
            // SAFETY: allocated once, freed once; dma-bufs keep the memory for themselves.
            unsafe { (self.driver().free)(self.address) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_the_driver_is_told_so() {
        let missing = CudaMemory::new("libcuda-of-nobody.so.1", 0, PAGE).unwrap_err();
        assert!(
            matches!(&missing, CudaError::Library { library, .. } if library == "libcuda-of-nobody.so.1")
        );
        assert!(missing.to_string().contains("NVIDIA's driver is not here"), "{missing}");
        let other = CudaMemory::new("libc.so.6", 0, PAGE).unwrap_err();
        assert_eq!(other, CudaError::Symbol { library: "libc.so.6".to_owned(), symbol: "cuInit" });
    }
}
