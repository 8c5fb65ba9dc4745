//! Memory of a GPU that processes of the host map: its processors store to it over PCIe, as a network adapter does.
//!
//! Read first: the Vulkan specification, "Device Memory" and "External Memory Handle Types". CUDA has no memory of this kind
//! for GPUs on PCIe, and the kernel does not map its dma-bufs. Vulkan allocates memory that is local to the device and
//! visible to the host, and exports it by a descriptor, which CUDA and other processes import. The memory must fit into
//! BAR1 of the GPU.
//!
//! The mapping is write-combining: stores are fast, loads take a round trip over PCIe for each cache line ([`Mapping::copy_to_slice`]).
//! The driver copies faster ([`CudaMemory::read`](crate::CudaMemory::read)).

use std::fmt;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::sync::Arc;

use ash::{khr, vk};
use millstream_shm::{DriverMapping, Mapping};

use crate::driver::Uuid;

/// Environment variable with the path of the Vulkan loader, where it is not in a folder of libraries.
pub const ENV_VULKAN: &str = "MILLSTREAM_VULKAN";

/// The Vulkan loader: that of [`ENV_VULKAN`], else `libvulkan.so.1`.
#[must_use]
pub fn vulkan_loader() -> String {
    std::env::var(ENV_VULKAN).unwrap_or_else(|_| "libvulkan.so.1".to_owned())
}

/// Why memory of a GPU cannot be mapped.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum VulkanError {
    /// The loader cannot be loaded.
    #[error("cannot load {library}: {reason}; install the Vulkan loader (Debian: libvulkan1)")]
    Library {
        /// Name of the library.
        library: String,
        /// The dynamic loader's message.
        reason: String,
    },
    /// No Vulkan driver knows the GPU.
    #[error("no Vulkan driver offers the GPU; install the Vulkan part of NVIDIA's driver")]
    NoDevice,
    /// The GPU's memory cannot be mapped.
    #[error("memory of {device} is not visible to the host; enable resizable BARs in the firmware")]
    NotVisible {
        /// Name of the GPU.
        device: String,
    },
    /// A call failed.
    #[error("{call} failed: {result}")]
    Call {
        /// The function.
        call: &'static str,
        /// Its result.
        result: vk::Result,
    },
}

fn failed(call: &'static str) -> impl Fn(vk::Result) -> VulkanError {
    move |result| VulkanError::Call { call, result }
}

/// A GPU as Vulkan sees it.
struct VulkanDevice {
    device: ash::Device,
    external_memory: khr::external_memory_fd::Device,
    /// Index of the memory type that is local to the device, visible to the host and coherent.
    memory_type: u32,
    instance: ash::Instance,
    /// Keeps the library loaded.
    _entry: ash::Entry,
}

impl Drop for VulkanDevice {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once; no memory of the device is left, because it holds this value.
        unsafe {
            self.device.destroy_device(None);
            self.instance.destroy_instance(None);
        }
    }
}

impl VulkanDevice {
    fn open(library: &str, uuid: Uuid) -> Result<VulkanDevice, VulkanError> {
        // SAFETY: the loader's constructors permit loading at run time.
        let entry = unsafe { ash::Entry::load_from(library) }.map_err(|error| VulkanError::Library {
            library: library.to_owned(),
            reason: error.to_string(),
        })?;
        let application = vk::ApplicationInfo::default().api_version(vk::API_VERSION_1_1);
        let create = vk::InstanceCreateInfo::default().application_info(&application);
        // SAFETY: the structures are valid for the call.
        let instance = unsafe { entry.create_instance(&create, None) }.map_err(failed("vkCreateInstance"))?;
        let opened = open_device(&instance, uuid);
        match opened {
            Ok((device, memory_type)) => {
                let external_memory = khr::external_memory_fd::Device::new(&instance, &device);
                Ok(VulkanDevice { device, external_memory, memory_type, instance, _entry: entry })
            }
            Err(error) => {
                // SAFETY: nothing of the instance is left.
                unsafe { instance.destroy_instance(None) };
                Err(error)
            }
        }
    }
}

/// Opens the device `uuid`; with the index of its memory type.
fn open_device(instance: &ash::Instance, uuid: Uuid) -> Result<(ash::Device, u32), VulkanError> {
    // SAFETY: the instance exists.
    let devices =
        unsafe { instance.enumerate_physical_devices() }.map_err(failed("vkEnumeratePhysicalDevices"))?;
    let is_wanted = |device: &vk::PhysicalDevice| {
        let mut id = vk::PhysicalDeviceIDProperties::default();
        let mut properties = vk::PhysicalDeviceProperties2::default().push_next(&mut id);
        // SAFETY: the device belongs to the instance, and the structures are valid for the call.
        unsafe { instance.get_physical_device_properties2(*device, &mut properties) };
        id.device_uuid == uuid
    };
    let physical = devices.into_iter().find(is_wanted).ok_or(VulkanError::NoDevice)?;
    // SAFETY: as above.
    let types = unsafe { instance.get_physical_device_memory_properties(physical) };
    let wanted = vk::MemoryPropertyFlags::DEVICE_LOCAL
        | vk::MemoryPropertyFlags::HOST_VISIBLE
        | vk::MemoryPropertyFlags::HOST_COHERENT;
    let memory_type =
        types.memory_types_as_slice().iter().position(|kind| kind.property_flags.contains(wanted));
    let Some(memory_type) = memory_type else {
        // SAFETY: as above.
        let properties = unsafe { instance.get_physical_device_properties(physical) };
        let device = properties.device_name_as_c_str().unwrap_or_default().to_string_lossy().into_owned();
        return Err(VulkanError::NotVisible { device });
    };
    let priorities = [1.0];
    let queues = [vk::DeviceQueueCreateInfo::default().queue_family_index(0).queue_priorities(&priorities)];
    let extensions = [khr::external_memory_fd::NAME.as_ptr()];
    let create =
        vk::DeviceCreateInfo::default().queue_create_infos(&queues).enabled_extension_names(&extensions);
    // SAFETY: the structures are valid for the call; every device has a queue family 0.
    let device =
        unsafe { instance.create_device(physical, &create, None) }.map_err(failed("vkCreateDevice"))?;
    Ok((device, memory_type as u32))
}

/// Mapped memory of a GPU. Dropping it releases the memory, unless another process or CUDA has imported it.
pub struct HostVisible {
    device: Arc<VulkanDevice>,
    memory: vk::DeviceMemory,
    base: *mut u8,
    len: usize,
}

// SAFETY: the address may be used in any thread, and so may the device for the calls that are made here.
unsafe impl Send for HostVisible {}
// SAFETY: as above.
unsafe impl Sync for HostVisible {}

impl fmt::Debug for HostVisible {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostVisible({} bytes at {:?})", self.len, self.base)
    }
}

impl HostVisible {
    /// Allocates memory on the GPU `uuid`. `library` is usually [`vulkan_loader`].
    ///
    /// # Errors
    /// [`VulkanError`].
    pub fn allocate(library: &str, uuid: Uuid, len: usize) -> Result<HostVisible, VulkanError> {
        let device = Arc::new(VulkanDevice::open(library, uuid)?);
        let mut export = vk::ExportMemoryAllocateInfo::default()
            .handle_types(vk::ExternalMemoryHandleTypeFlags::OPAQUE_FD);
        let allocate = vk::MemoryAllocateInfo::default().push_next(&mut export);
        HostVisible::map(&device, allocate, len)
    }

    /// Maps `len` bytes of memory that another process has exported from the GPU `uuid`.
    ///
    /// # Errors
    /// [`VulkanError`].
    pub fn import(library: &str, uuid: Uuid, fd: OwnedFd, len: usize) -> Result<HostVisible, VulkanError> {
        let device = Arc::new(VulkanDevice::open(library, uuid)?);
        let fd = fd.into_raw_fd();
        let mut import = vk::ImportMemoryFdInfoKHR::default()
            .handle_type(vk::ExternalMemoryHandleTypeFlags::OPAQUE_FD)
            .fd(fd);
        let imported =
            HostVisible::map(&device, vk::MemoryAllocateInfo::default().push_next(&mut import), len);
        if matches!(&imported, Err(VulkanError::Call { call: ALLOCATE, .. })) {
            // SAFETY: a failed import leaves the descriptor with the caller.
            drop(unsafe { OwnedFd::from_raw_fd(fd) });
        }
        imported
    }

    fn map(
        device: &Arc<VulkanDevice>,
        allocate: vk::MemoryAllocateInfo<'_>,
        len: usize,
    ) -> Result<HostVisible, VulkanError> {
        let allocate = allocate.allocation_size(len as u64).memory_type_index(device.memory_type);
        // SAFETY: the structures are valid for the call.
        let memory = unsafe { device.device.allocate_memory(&allocate, None) }.map_err(failed(ALLOCATE))?;
        let mut mapped = HostVisible { device: device.clone(), memory, base: std::ptr::null_mut(), len };
        // SAFETY: the memory was allocated with this length, and is not mapped.
        let base =
            unsafe { device.device.map_memory(memory, 0, vk::WHOLE_SIZE, vk::MemoryMapFlags::empty()) };
        mapped.base = base.map_err(failed("vkMapMemory"))?.cast();
        Ok(mapped)
    }

    /// A descriptor by which CUDA and other processes import the memory.
    ///
    /// # Errors
    /// [`VulkanError`].
    pub fn export(&self) -> Result<OwnedFd, VulkanError> {
        let info = vk::MemoryGetFdInfoKHR::default()
            .memory(self.memory)
            .handle_type(vk::ExternalMemoryHandleTypeFlags::OPAQUE_FD);
        // SAFETY: the memory was allocated for this type of handle.
        let fd = unsafe { self.device.external_memory.get_memory_fd(&info) }
            .map_err(failed("vkGetMemoryFdKHR"))?;
        // SAFETY: the driver returned a new descriptor.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// The mapping, which keeps the memory.
    #[must_use]
    pub fn into_mapping(self) -> Mapping {
        let (base, len) = (self.base, self.len);
        // SAFETY: the memory stays mapped until `self` is dropped.
        unsafe { Mapping::of_driver(base, len, Box::new(self)) }
    }
}

const ALLOCATE: &str = "vkAllocateMemory";

impl DriverMapping for HostVisible {}

impl Drop for HostVisible {
    fn drop(&mut self) {
        // SAFETY: allocated once, freed once, which also unmaps it.
        unsafe { self.device.device.free_memory(self.memory, None) };
    }
}
