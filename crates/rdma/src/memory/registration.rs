//! Memory registrations, including `ibv_reg_mr_iova`, which `sideway` does not provide.

use std::ffi::{c_int, c_void};
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_mummy_sys::{ibv_dereg_mr, ibv_mr, ibv_pd};
use sideway::ibverbs::memory_region::MemoryRegion;
use sideway::ibverbs::protection_domain::ProtectionDomain;

use super::keys::Access;
use crate::device::Device;
use crate::loader;

/// A registered memory region; dropping it deregisters the region.
pub(super) enum Registration {
    Verbs(Arc<MemoryRegion>),
    Iova(IovaRegistration),
}

/// A registration with an I/O virtual address.
pub(super) struct IovaRegistration {
    mr: NonNull<ibv_mr>,
    /// Dropped after the region that is registered in it.
    _domain: Arc<ProtectionDomain>,
}

// SAFETY: verbs are thread-safe (ibv_reg_mr(3)).
unsafe impl Send for IovaRegistration {}
// SAFETY: as above; the keys never change.
unsafe impl Sync for IovaRegistration {}

impl Drop for IovaRegistration {
    fn drop(&mut self) {
        // SAFETY: registered once, deregistered once.
        let left = unsafe { ibv_dereg_mr(self.mr.as_ptr()) };
        debug_assert_eq!(left, 0, "ibv_dereg_mr");
    }
}

impl Registration {
    #[inline]
    pub(super) fn lkey(&self) -> u32 {
        match self {
            Registration::Verbs(region) => region.lkey(),
            // SAFETY: the region is alive, and the library does not change the key.
            Registration::Iova(region) => unsafe { region.mr.as_ref() }.lkey,
        }
    }

    pub(super) fn rkey(&self) -> u32 {
        match self {
            Registration::Verbs(region) => region.rkey(),
            // SAFETY: as above.
            Registration::Iova(region) => unsafe { region.mr.as_ref() }.rkey,
        }
    }
}

/// `ibv_reg_mr_iova`, which is a macro in C and therefore not in `sideway`.
type RegMrIova = unsafe extern "C" fn(*mut ibv_pd, *mut c_void, usize, u64, c_int) -> *mut ibv_mr;

/// Registers memory with the I/O virtual address `iova` for its first byte.
///
/// # Safety
/// The memory is `len` bytes, writable if `access` allows writes, and outlives the registration.
pub(super) unsafe fn register_at(
    device: &Device,
    start: *mut u8,
    len: usize,
    iova: u64,
    access: Access,
) -> io::Result<IovaRegistration> {
    let found = loader::symbol(c"ibv_reg_mr_iova").ok_or(io::ErrorKind::Unsupported)?;
    // SAFETY: the function of this name has this type (infiniband/verbs.h), and the library stays loaded.
    let register = unsafe { std::mem::transmute::<*mut c_void, RegMrIova>(found.as_ptr()) };
    let domain = device.domain().clone();
    let access: c_int = access.flags().into();
    // SAFETY: the domain is alive; the caller guarantees the memory.
    let mr = unsafe { register(domain.pd().as_ptr(), start.cast(), len, iova, access) };
    match NonNull::new(mr) {
        Some(mr) => Ok(IovaRegistration { mr, _domain: domain }),
        None => Err(io::Error::last_os_error()),
    }
}
