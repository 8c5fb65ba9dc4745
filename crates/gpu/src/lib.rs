//! Memory and kernels of GPUs.
//!
//! - [`Gpu`], [`CudaMemory`], [`Module`]: a GPU, its memory and its kernels, through the CUDA driver.
//! - [`HostVisible`]: memory of a GPU that processes of the host map, through Vulkan.
//!
//! Both libraries are loaded at run time; the build needs neither.

mod driver;
mod host_visible;
mod kernel;
mod memory;

pub use driver::{CUDA, CudaError, Gpu, Uuid};
pub use host_visible::{ENV_VULKAN, HostVisible, VulkanError, vulkan_loader};
pub use kernel::{BLOCK_THREADS, Function, Module, Parameter};
pub use memory::CudaMemory;
