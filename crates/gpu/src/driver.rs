//! The CUDA driver's functions, its errors, and the context of a GPU.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

/// Default name of the driver's library.
pub const CUDA: &str = "libcuda.so.1";

/// `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT`.
const ATTRIBUTE_MULTIPROCESSORS: c_int = 16;

/// `CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED`.
const ATTRIBUTE_DMA_BUF: c_int = 124;

/// `CU_STREAM_NON_BLOCKING`: the stream does not wait for other work of the GPU.
const NON_BLOCKING: c_uint = 1;

/// `CUDA_ERROR_NOT_READY`.
const NOT_READY: c_int = 600;

/// Identifies a GPU in all programming interfaces of its driver.
pub type Uuid = [u8; 16];

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

/// `CUDA_EXTERNAL_MEMORY_HANDLE_DESC`, for a descriptor.
#[repr(C)]
pub(crate) struct ExternalHandle {
    pub(crate) kind: c_int,
    /// The first member of a union of 16 bytes.
    pub(crate) fd: ExternalFd,
    pub(crate) size: u64,
    pub(crate) flags: c_uint,
    pub(crate) reserved: [c_uint; 16],
}

/// A union of handles that holds a descriptor.
#[repr(C, align(8))]
pub(crate) struct ExternalFd(pub(crate) c_int, pub(crate) [c_int; 3]);

/// `CUDA_EXTERNAL_MEMORY_BUFFER_DESC`.
#[repr(C)]
pub(crate) struct ExternalBuffer {
    pub(crate) offset: u64,
    pub(crate) size: u64,
    pub(crate) flags: c_uint,
    pub(crate) reserved: [c_uint; 16],
}

macro_rules! driver {
    ($($field:ident: $symbol:literal fn($($argument:ty),*);)+) => {
        /// The driver's functions; all return zero for success.
        pub(crate) struct Driver {
            $(pub(crate) $field: unsafe extern "C" fn($($argument),*) -> c_int,)+
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
    allocate: "cuMemAlloc_v2" fn(*mut u64, usize);
    free: "cuMemFree_v2" fn(u64);
    pointer_set: "cuPointerSetAttribute" fn(*const c_void, c_int, u64);
    copy_out: "cuMemcpyDtoH_v2" fn(*mut c_void, u64, usize);
    copy_in: "cuMemcpyHtoD_v2" fn(u64, *const c_void, usize);
    copy_within: "cuMemcpyDtoDAsync_v2" fn(u64, u64, usize, *mut c_void);
    set: "cuMemsetD8Async" fn(u64, u8, usize, *mut c_void);
    handle: "cuMemGetHandleForAddressRange" fn(*mut c_void, u64, usize, c_int, u64);
    device_uuid: "cuDeviceGetUuid" fn(*mut Uuid, c_int);
    external_import: "cuImportExternalMemory" fn(*mut *mut c_void, *const ExternalHandle);
    external_map: "cuExternalMemoryGetMappedBuffer" fn(*mut u64, *mut c_void, *const ExternalBuffer);
    external_destroy: "cuDestroyExternalMemory" fn(*mut c_void);
    module_load: "cuModuleLoadData" fn(*mut *mut c_void, *const c_void);
    module_unload: "cuModuleUnload" fn(*mut c_void);
    module_function: "cuModuleGetFunction" fn(*mut *mut c_void, *mut c_void, *const c_char);
    function_blocks: "cuOccupancyMaxActiveBlocksPerMultiprocessor" fn(*mut c_int, *mut c_void, c_int, usize);
    stream_create: "cuStreamCreate" fn(*mut *mut c_void, c_uint);
    stream_destroy: "cuStreamDestroy_v2" fn(*mut c_void);
    stream_query: "cuStreamQuery" fn(*mut c_void);
    stream_wait: "cuStreamSynchronize" fn(*mut c_void);
    launch: "cuLaunchKernel" fn(
        *mut c_void, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, *mut c_void, *mut *mut c_void, *mut *mut c_void
    );
}

impl Driver {
    pub(crate) fn check(&self, call: &'static str, code: c_int) -> Result<(), CudaError> {
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

    /// Makes a stream in the current context that does not wait for other work of the GPU.
    pub(crate) fn new_stream(&self) -> Result<*mut c_void, CudaError> {
        let mut stream = ptr::null_mut();
        // SAFETY: the result pointer is valid.
        let code = unsafe { (self.stream_create)(&raw mut stream, NON_BLOCKING) };
        self.check("cuStreamCreate", code)?;
        Ok(stream)
    }

    /// Whether all work in a stream of the current context has ended.
    pub(crate) fn is_idle(&self, stream: *mut c_void) -> Result<bool, CudaError> {
        // SAFETY: the caller's stream exists.
        match unsafe { (self.stream_query)(stream) } {
            NOT_READY => Ok(false),
            code => self.check("cuStreamQuery", code).map(|()| true),
        }
    }

    /// Waits for all work in a stream of the current context, no longer than `timeout`: `CUDA_ERROR_NOT_READY` then.
    pub(crate) fn wait(&self, stream: *mut c_void, timeout: Duration) -> Result<(), CudaError> {
        let deadline = Instant::now() + timeout;
        while !self.is_idle(stream)? {
            if Instant::now() > deadline {
                return self.check("cuStreamQuery", NOT_READY);
            }
            std::thread::yield_now();
        }
        Ok(())
    }
}

/// The retained primary context of a GPU.
struct Context {
    driver: Driver,
    device: c_int,
    handle: *mut c_void,
    /// For copies and fills: the default stream, and the context as a whole, would wait for kernels.
    stream: *mut c_void,
    name: String,
    uuid: Uuid,
    multiprocessors: u32,
}

// SAFETY: a context may be made current in any thread; the driver serialises calls.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Makes the context current in this thread, for the calls that follow.
    fn enter(&self) -> Result<&Driver, CudaError> {
        // SAFETY: the context is retained.
        self.driver.check("cuCtxSetCurrent", unsafe { (self.driver.context_set)(self.handle) })?;
        Ok(&self.driver)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if !self.stream.is_null() {
            // SAFETY: the context is retained; the stream was created once and is destroyed once.
            unsafe {
                (self.driver.context_set)(self.handle);
                (self.driver.stream_destroy)(self.stream);
            }
        }
        // SAFETY: retained once, released once.
        unsafe { (self.driver.context_release)(self.device) };
    }
}

/// A GPU that this process uses.
#[derive(Clone)]
pub struct Gpu {
    context: Arc<Context>,
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Gpu({})", self.name())
    }
}

impl Gpu {
    /// Opens GPU `index`. `library` is usually [`CUDA`].
    ///
    /// # Errors
    /// [`CudaError`] without driver or GPU.
    pub fn open(library: &str, index: u32) -> Result<Gpu, CudaError> {
        let driver = Driver::load(library)?;
        let (mut device, mut handle) = (0, ptr::null_mut());
        let (mut name, mut uuid, mut multiprocessors) = ([0u8; 128], [0; 16], 0);
        // SAFETY: calls of the driver's API in the required order, with valid result pointers.
        unsafe {
            driver.check("cuInit", (driver.init)(0))?;
            let mut count = 0;
            driver.check("cuDeviceGetCount", (driver.device_count)(&raw mut count))?;
            let count = count.max(0).cast_unsigned();
            if index >= count {
                return Err(CudaError::NoDevice { index, count });
            }
            driver.check("cuDeviceGet", (driver.device_get)(&raw mut device, index.cast_signed()))?;
            driver.check("cuDeviceGetName", (driver.device_name)(name.as_mut_ptr().cast(), 127, device))?;
            driver.check("cuDeviceGetUuid", (driver.device_uuid)(&raw mut uuid, device))?;
            let code = (driver.device_attribute)(&raw mut multiprocessors, ATTRIBUTE_MULTIPROCESSORS, device);
            driver.check("cuDeviceGetAttribute", code)?;
            let retained = (driver.context_retain)(&raw mut handle, device);
            driver.check("cuDevicePrimaryCtxRetain", retained)?;
        }
        let name = CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy().into_owned();
        let multiprocessors = multiprocessors.max(1).cast_unsigned();
        let stream = ptr::null_mut();
        let mut context = Context { driver, device, handle, stream, name, uuid, multiprocessors };
        context.stream = context.enter()?.new_stream()?;
        Ok(Gpu { context: Arc::new(context) })
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.context.name
    }

    /// Its identity.
    #[must_use]
    pub fn uuid(&self) -> Uuid {
        self.context.uuid
    }

    /// Number of its multiprocessors.
    #[must_use]
    pub fn multiprocessors(&self) -> u32 {
        self.context.multiprocessors
    }

    /// Whether the driver exports memory of this GPU as dma-bufs.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn exports_dmabufs(&self) -> Result<bool, CudaError> {
        let driver = &self.context.driver;
        let mut exports = 0;
        // SAFETY: the result pointer is valid.
        let code =
            unsafe { (driver.device_attribute)(&raw mut exports, ATTRIBUTE_DMA_BUF, self.context.device) };
        driver.check("cuDeviceGetAttribute", code)?;
        Ok(exports != 0)
    }

    /// Makes the context current in this thread, for the calls that follow.
    pub(crate) fn enter(&self) -> Result<&Driver, CudaError> {
        self.context.enter()
    }

    /// The stream for copies and fills.
    pub(crate) fn copy_stream(&self) -> *mut c_void {
        self.context.stream
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_driver_or_symbol_is_reported() {
        let missing = Gpu::open("libcuda-of-nobody.so.1", 0).unwrap_err();
        assert!(
            matches!(&missing, CudaError::Library { library, .. } if library == "libcuda-of-nobody.so.1")
        );
        assert!(missing.to_string().contains("cannot load NVIDIA's driver"), "{missing}");
        let other = Gpu::open("libc.so.6", 0).unwrap_err();
        assert_eq!(other, CudaError::Symbol { library: "libc.so.6".to_owned(), symbol: "cuInit" });
    }

    #[test]
    fn a_handle_has_the_layout_of_the_reference() {
        assert_eq!(std::mem::offset_of!(ExternalHandle, fd), 8);
        assert_eq!(std::mem::offset_of!(ExternalHandle, size), 24);
        assert_eq!(size_of::<ExternalHandle>(), 104);
        assert_eq!(size_of::<ExternalBuffer>(), 88);
    }
}
