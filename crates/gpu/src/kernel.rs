//! Kernels of GPUs: modules of PTX, which the driver compiles for its GPU, and their launches.
//!
//! Read first: the CUDA Driver API reference, "Module Management", "Execution Control" and "Stream Management".

use std::ffi::{CStr, c_void};
use std::marker::PhantomData;
use std::ptr;

use crate::driver::{CudaError, Gpu};
use crate::memory::CudaMemory;

/// Threads of a block.
pub const BLOCK_THREADS: u32 = 256;

/// A module of kernels, loaded on a GPU, and the stream in which they run.
pub struct Module {
    gpu: Gpu,
    module: *mut c_void,
    stream: *mut c_void,
}

// SAFETY: the driver's handles may be used in any thread.
unsafe impl Send for Module {}
// SAFETY: as above; the driver serialises calls.
unsafe impl Sync for Module {}

impl std::fmt::Debug for Module {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Module({})", self.gpu.name())
    }
}

/// A kernel of a module.
#[derive(Clone, Copy, Debug)]
pub struct Function<'a> {
    handle: *mut c_void,
    /// Blocks of [`BLOCK_THREADS`] that fill the GPU.
    blocks: u32,
    module: PhantomData<&'a Module>,
}

/// A parameter of a kernel: an address in GPU memory or a number, eight bytes each.
#[derive(Clone, Copy, Debug)]
pub enum Parameter<'a> {
    /// The byte at an offset in memory.
    Address(&'a CudaMemory, u64),
    /// A number.
    Word(u64),
}

impl Module {
    /// Compiles and loads PTX.
    ///
    /// # Errors
    /// [`CudaError`] if the driver does not accept it.
    pub fn load(gpu: &Gpu, ptx: &CStr) -> Result<Module, CudaError> {
        let driver = gpu.enter()?;
        let mut module = ptr::null_mut();
        // SAFETY: the text ends with a zero byte.
        let code = unsafe { (driver.module_load)(&raw mut module, ptx.as_ptr().cast()) };
        driver.check("cuModuleLoadData", code)?;
        let mut loaded = Module { gpu: gpu.clone(), module, stream: ptr::null_mut() };
        loaded.stream = driver.new_stream()?;
        Ok(loaded)
    }

    /// The GPU.
    #[must_use]
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Finds a kernel by its name.
    ///
    /// # Errors
    /// [`CudaError`] if the module has none of this name.
    pub fn function(&self, name: &CStr) -> Result<Function<'_>, CudaError> {
        let driver = self.gpu.enter()?;
        let (mut handle, mut blocks) = (ptr::null_mut(), 0);
        // SAFETY: the module is loaded, and the result pointer valid.
        let code = unsafe { (driver.module_function)(&raw mut handle, self.module, name.as_ptr()) };
        driver.check("cuModuleGetFunction", code)?;
        // SAFETY: as above.
        let code =
            unsafe { (driver.function_blocks)(&raw mut blocks, handle, BLOCK_THREADS.cast_signed(), 0) };
        driver.check("cuOccupancyMaxActiveBlocksPerMultiprocessor", code)?;
        let blocks = blocks.max(1).cast_unsigned() * self.gpu.multiprocessors();
        Ok(Function { handle, blocks, module: PhantomData })
    }

    /// Launches a kernel with `blocks` blocks of [`BLOCK_THREADS`] threads, but at most as many as fill the GPU: a kernel
    /// distributes its work over the blocks that it finds. It runs after earlier launches of this module.
    ///
    /// # Safety
    /// The kernel accesses only memory that lives until the launch has ended (see [`Module::is_idle`] and
    /// [`Module::wait`]), and takes parameters of eight bytes, as many as given here.
    ///
    /// # Errors
    /// Those of the driver.
    pub unsafe fn launch(
        &self,
        function: Function<'_>,
        blocks: u32,
        parameters: &[Parameter<'_>],
    ) -> Result<(), CudaError> {
        let driver = self.gpu.enter()?;
        let mut words: Vec<u64> = parameters
            .iter()
            .map(|parameter| match *parameter {
                Parameter::Address(memory, offset) => memory.device_pointer(offset),
                Parameter::Word(word) => word,
            })
            .collect();
        let mut pointers: Vec<*mut c_void> =
            words.iter_mut().map(|word| ptr::from_mut(word).cast()).collect();
        let blocks = blocks.clamp(1, function.blocks);
        // SAFETY: the driver copies the parameters before it returns; the caller promises the rest.
        let code = unsafe {
            (driver.launch)(
                function.handle,
                blocks,
                1,
                1,
                BLOCK_THREADS,
                1,
                1,
                0,
                self.stream,
                pointers.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        driver.check("cuLaunchKernel", code)
    }

    /// Whether all launches have ended.
    ///
    /// # Errors
    /// Those of the driver, and of the kernels.
    pub fn is_idle(&self) -> Result<bool, CudaError> {
        self.gpu.enter()?.is_idle(self.stream)
    }

    /// Waits for all launches.
    ///
    /// # Errors
    /// Those of the driver, and of the kernels.
    pub fn wait(&self) -> Result<(), CudaError> {
        let driver = self.gpu.enter()?;
        // SAFETY: the stream exists.
        driver.check("cuStreamSynchronize", unsafe { (driver.stream_wait)(self.stream) })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let Ok(driver) = self.gpu.enter() else { return };
        if !self.stream.is_null() {
            // SAFETY: created once, destroyed once, when no kernel uses it any more.
            unsafe {
                (driver.stream_wait)(self.stream);
                (driver.stream_destroy)(self.stream);
            }
        }
        // SAFETY: loaded once, unloaded once.
        unsafe { (driver.module_unload)(self.module) };
    }
}
