//! Memory registrations, including `ibv_reg_mr_iova`, which `sideway` does not provide.

use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_mummy_sys::{ibv_dereg_mr, ibv_mr, ibv_pd, ibv_reg_dmabuf_mr, ibv_reg_mr};
use sideway::ibverbs::protection_domain::ProtectionDomain;

use super::keys::Access;
use crate::device::Device;
use crate::loader;

/// A registered memory region; dropping it deregisters the region.
///
/// `sideway`'s region ignores a failed deregistration.
pub(super) struct Registration {
    mr: NonNull<ibv_mr>,
    is_registered: bool,
    /// Dropped after the region that is registered in it.
    _domain: Arc<ProtectionDomain>,
}

// SAFETY: verbs are thread-safe (ibv_reg_mr(3)).
unsafe impl Send for Registration {}
// SAFETY: as above; the keys never change.
unsafe impl Sync for Registration {}

/// `ibv_reg_mr_iova`, which is a macro in C and therefore not in `sideway`.
type RegMrIova = unsafe extern "C" fn(*mut ibv_pd, *mut c_void, usize, u64, c_int) -> *mut ibv_mr;

impl Registration {
    /// Registers memory by its address.
    ///
    /// # Safety
    /// The memory is `len` bytes, writable if `access` allows writes, and outlives the registration.
    pub(super) unsafe fn of_memory(
        device: &Device,
        start: *const u8,
        len: usize,
        access: Access,
    ) -> io::Result<Registration> {
        // SAFETY: `register` passes a domain that is alive; the caller guarantees the memory.
        Registration::register(device, access, |domain, access| unsafe {
            ibv_reg_mr(domain, start.cast_mut().cast(), len, access)
        })
    }

    /// Registers `len` bytes at `offset` of the memory behind a descriptor, with the I/O virtual address `iova` for the
    /// first of them.
    pub(super) fn of_descriptor(
        device: &Device,
        descriptor: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        iova: u64,
        access: Access,
    ) -> io::Result<Registration> {
        // SAFETY: `register` passes a domain that is alive. The device keeps a reference to the memory behind the
        // descriptor and checks offset and length against it; no address of this process is involved.
        Registration::register(device, access, |domain, access| unsafe {
            ibv_reg_dmabuf_mr(domain, offset, len, iova, descriptor.as_raw_fd(), access)
        })
    }

    /// Registers memory with the I/O virtual address `iova` for its first byte.
    ///
    /// # Safety
    /// The memory is `len` bytes, writable if `access` allows writes, and outlives the registration.
    pub(super) unsafe fn at_iova(
        device: &Device,
        start: *mut u8,
        len: usize,
        iova: u64,
        access: Access,
    ) -> io::Result<Registration> {
        let found = loader::symbol(c"ibv_reg_mr_iova").ok_or(io::ErrorKind::Unsupported)?;
        // SAFETY: the function of this name has this type (infiniband/verbs.h), and the library stays loaded.
        let reg_mr_iova = unsafe { std::mem::transmute::<*mut c_void, RegMrIova>(found.as_ptr()) };
        // SAFETY: `register` passes a domain that is alive; the caller guarantees the memory.
        Registration::register(device, access, |domain, access| unsafe {
            reg_mr_iova(domain, start.cast(), len, iova, access)
        })
    }

    fn register(
        device: &Device,
        access: Access,
        register: impl FnOnce(*mut ibv_pd, c_int) -> *mut ibv_mr,
    ) -> io::Result<Registration> {
        let domain = device.domain().clone();
        // SAFETY: the pointer is used only while `domain` is alive.
        let mr = register(unsafe { domain.pd() }.as_ptr(), access.flags().into());
        match NonNull::new(mr) {
            Some(mr) => Ok(Registration { mr, is_registered: true, _domain: domain }),
            None => Err(io::Error::last_os_error()),
        }
    }

    /// Deregisters the region. The call can be repeated after an error, and does nothing after a success.
    pub(super) fn deregister(&mut self) -> io::Result<()> {
        if self.is_registered {
            // SAFETY: the region is registered; an error leaves it so.
            match unsafe { ibv_dereg_mr(self.mr.as_ptr()) } {
                0 => self.is_registered = false,
                errno => return Err(io::Error::from_raw_os_error(errno)),
            }
        }
        Ok(())
    }

    /// The local key of a region that is registered.
    #[inline]
    pub(super) fn lkey(&self) -> u32 {
        // SAFETY: the owner does not use a region that it has deregistered, and the library does not change the key.
        unsafe { self.mr.as_ref() }.lkey
    }

    /// The remote key of a region that is registered.
    pub(super) fn rkey(&self) -> u32 {
        // SAFETY: as above.
        unsafe { self.mr.as_ref() }.rkey
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // After an error the device keeps the region, with what a peer may still access.
        let _ = self.deregister();
    }
}
