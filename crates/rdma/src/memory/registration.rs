//! Registrations, and the one that `sideway` does not make: by a mapping, with addresses of one's own.

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

/// Memory that a device knows, until this is dropped.
pub(super) enum Registration {
    Verbs(Arc<MemoryRegion>),
    Iova(IovaRegistration),
}

/// A registration whose addresses are not those of this process.
pub(super) struct IovaRegistration {
    mr: NonNull<ibv_mr>,
    /// It goes after what is registered in it.
    _domain: Arc<ProtectionDomain>,
}

// SAFETY: the verbs library may be called by any thread (ibv_reg_mr(3) names no other).
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
            // SAFETY: it lives, and the library does not change it.
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

/// Registers memory whose first byte is to have the address `iova` in work requests and for peers.
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
    // SAFETY: the domain lives, and the memory is as the caller promises.
    let mr = unsafe { register(domain.pd().as_ptr(), start.cast(), len, iova, access) };
    match NonNull::new(mr) {
        Some(mr) => Ok(IovaRegistration { mr, _domain: domain }),
        None => Err(io::Error::last_os_error()),
    }
}
