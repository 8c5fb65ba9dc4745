//! Opened devices, and the table of operations behind the inline functions of `verbs.h`.
//!
//! An `ibv_context` is the last field of a `verbs_context`, which grows towards lower addresses. If
//! `abi_compat` marks it as present, `verbs.h` finds it by stepping back from the context. An extended
//! operation is unsupported if `sz` does not reach it or its pointer is NULL. The operations inside the
//! `ibv_context` are called without a check, so none of them may be NULL.

use std::{
    cell::UnsafeCell,
    collections::BTreeMap,
    ffi::{c_int, c_void},
    io, mem,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
    ptr,
    sync::Arc,
};

use millstream_device as device;
use millstream_lockfree::{CancelGuard, SpinLock};
use millstream_shm::{Memfd, PAGE};

use crate::{
    cq, cq_ex,
    errno::{self, Errno},
    mr, mw, pd, port, qp, qp_ex, srq,
    sys::*,
    xrc,
};

/// An opened device: the program's struct and the device behind it.
#[repr(C)]
pub struct Context {
    /// The device behind it; None only in tests of the table.
    pub(crate) inner: Option<Arc<device::Context>>,
    /// The descriptor through which programs import the device.
    command: Option<OwnedFd>,
    /// In a cell, because programs hold a mutable pointer to it.
    verbs: UnsafeCell<verbs_context>,
}

/// Offset of the `ibv_context` in a [`Context`].
const TO_VERBS: usize = mem::offset_of!(Context, verbs) + mem::offset_of!(verbs_context, context);

impl Context {
    /// A context on `device`. `command` is the descriptor through which another process would import the
    /// device. `async_fd`, which the context does not own, is readable while an asynchronous event is queued.
    /// `comp_vectors` is the number of completion vectors.
    pub fn new(
        inner: Option<Arc<device::Context>>,
        device: *mut ibv_device,
        command: Option<OwnedFd>,
        async_fd: RawFd,
        comp_vectors: c_int,
    ) -> Box<Self> {
        let verbs = verbs_context {
            sz: mem::size_of::<verbs_context>(),
            query_port: Some(port::query_port),
            query_rt_values: Some(crate::device::query_rt_values),
            query_device_ex: Some(crate::device::query_device_ex),
            create_qp_ex: Some(qp_ex::create_qp_ex),
            advise_mr: Some(mr::advise_mr),
            alloc_null_mr: Some(mr::alloc_null_mr),
            reg_dm_mr: Some(mr::reg_dm_mr),
            alloc_dm: Some(mr::alloc_dm),
            free_dm: Some(mr::free_dm),
            alloc_td: Some(pd::alloc_td),
            dealloc_td: Some(pd::dealloc_td),
            alloc_parent_domain: Some(pd::alloc_parent_domain),
            create_cq_ex: Some(cq_ex::create_cq_ex),
            modify_cq: Some(cq::modify_cq),
            open_qp: Some(xrc::open_qp),
            open_xrcd: Some(xrc::open_xrcd),
            close_xrcd: Some(xrc::close_xrcd),
            create_srq_ex: Some(srq::create_srq_ex),
            get_srq_num: Some(srq::get_srq_num),
            context: ibv_context {
                device,
                ops: OPERATIONS,
                cmd_fd: command.as_ref().map_or(-1, AsRawFd::as_raw_fd),
                async_fd,
                num_comp_vectors: comp_vectors,
                mutex: libc::PTHREAD_MUTEX_INITIALIZER,
                abi_compat: __VERBS_ABI_IS_EXTENDED,
            },
            ..verbs_context::default()
        };
        Box::new(Self { inner, command, verbs: UnsafeCell::new(verbs) })
    }

    /// The pointer that programs hold.
    pub fn as_verbs(this: *mut Self) -> *mut ibv_context {
        this.wrapping_byte_add(TO_VERBS).cast()
    }

    /// The address of the context behind a program's pointer.
    pub fn address(context: *mut ibv_context) -> *mut Self {
        context.wrapping_byte_sub(TO_VERBS).cast()
    }

    /// The opened device behind a program's pointer.
    ///
    /// # Safety
    /// `context` comes from [`Context::as_verbs`] and is open.
    pub(crate) unsafe fn device<'a>(context: *mut ibv_context) -> &'a Arc<device::Context> {
        // SAFETY: the caller vouches for the pointer.
        unsafe { Self::from_verbs(context) }.inner.as_ref().expect("opened contexts have a device")
    }

    /// The context behind a program's pointer.
    ///
    /// # Safety
    /// `context` comes from [`Context::as_verbs`] and its `Context` outlives `'a`.
    pub unsafe fn from_verbs<'a>(context: *mut ibv_context) -> &'a Self {
        // SAFETY: the inverse of `as_verbs`; the caller vouches for the lifetime.
        unsafe { &*Self::address(context) }
    }
}

/// The operations that `verbs.h` calls without a check. The `_compat_*` entries belong to old versions of the
/// ABI; no supported program calls them.
const OPERATIONS: ibv_context_ops = ibv_context_ops {
    _compat_query_device: Some(crate::device::ibv_query_device),
    _compat_query_port: Some(port::ibv_query_port),
    _compat_alloc_pd: Some(no_object),
    _compat_dealloc_pd: Some(no_status),
    _compat_reg_mr: Some(no_object),
    _compat_rereg_mr: Some(no_status),
    _compat_dereg_mr: Some(no_status),
    alloc_mw: Some(mw::alloc_mw),
    bind_mw: Some(mw::bind_mw),
    dealloc_mw: Some(mw::dealloc_mw),
    _compat_create_cq: Some(no_object),
    poll_cq: Some(cq::poll_cq),
    req_notify_cq: Some(cq::req_notify_cq),
    _compat_cq_event: Some(no_status),
    _compat_resize_cq: Some(no_status),
    _compat_destroy_cq: Some(no_status),
    _compat_create_srq: Some(no_object),
    _compat_modify_srq: Some(no_status),
    _compat_query_srq: Some(no_status),
    _compat_destroy_srq: Some(no_status),
    post_srq_recv: Some(srq::post_srq_recv),
    _compat_create_qp: Some(no_object),
    _compat_query_qp: Some(no_status),
    _compat_modify_qp: Some(no_status),
    _compat_destroy_qp: Some(no_status),
    post_send: Some(qp::post_send),
    post_recv: Some(qp::post_recv),
    _compat_create_ah: Some(no_object),
    _compat_destroy_ah: Some(no_status),
    _compat_attach_mcast: Some(no_status),
    _compat_detach_mcast: Some(no_status),
    _compat_async_event: Some(no_status),
};

/// A former operation that made an object: NULL and errno.
unsafe extern "C" fn no_object() -> *mut c_void {
    errno::pointer(Err(Errno::UNSUPPORTED))
}

/// A former operation that returned an error number, in the register that a pointer returns in.
unsafe extern "C" fn no_status() -> *mut c_void {
    std::ptr::without_provenance_mut(errno::status(Err(Errno::UNSUPPORTED)) as usize)
}

/// Opens a device; NULL and errno on failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    let _uncancelled = CancelGuard::new();
    errno::pointer(open(device))
}

fn open(device: *mut ibv_device) -> Result<*mut ibv_context, Errno> {
    let inner = device::Context::open()?;
    // Only the identity of the file is used.
    let command = Memfd::new("millstream-device", PAGE)?.into_fd();
    Ok(publish(inner, device, command)?)
}

/// The devices that this process has open, by the files behind their command descriptors.
static OPEN: SpinLock<BTreeMap<FileId, Vec<Opened>>> = SpinLock::new(BTreeMap::new());
millstream_shm::lock_at_fork!(OpenDevices, OPEN);

/// Device and inode.
type FileId = (libc::dev_t, libc::ino_t);

/// One of the contexts on an open device.
struct Opened {
    inner: Arc<device::Context>,
    /// Addresses of the context and of the device behind it.
    context: usize,
    device: usize,
}

fn file_id(fd: RawFd) -> io::Result<FileId> {
    // SAFETY: fills in a structure on the stack.
    unsafe {
        let mut stat: libc::stat = mem::zeroed();
        if libc::fstat(fd, &raw mut stat) != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok((stat.st_dev, stat.st_ino))
    }
}

/// Makes a program's context on an open device.
fn publish(
    inner: Arc<device::Context>,
    device: *mut ibv_device,
    command: OwnedFd,
) -> io::Result<*mut ibv_context> {
    let file = file_id(command.as_raw_fd())?;
    let async_fd = inner.as_fd().as_raw_fd();
    let context = Context::new(Some(inner.clone()), device, Some(command), async_fd, COMP_VECTORS);
    let context = Context::as_verbs(Box::into_raw(context));
    let opened = Opened { inner, context: context.addr(), device: device.expose_provenance() };
    OPEN.lock().entry(file).or_default().push(opened);
    Ok(context)
}

/// The number of completion vectors.
pub(crate) const COMP_VECTORS: c_int = 1;

/// A further context on a device that this process has open, by the `cmd_fd` of another one; both report the same
/// asynchronous events. NULL and errno on failure; EOPNOTSUPP for a device that another process has opened.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_import_device(cmd_fd: c_int) -> *mut ibv_context {
    let _uncancelled = CancelGuard::new();
    errno::pointer(import(cmd_fd))
}

fn import(cmd_fd: c_int) -> Result<*mut ibv_context, Errno> {
    let file = file_id(cmd_fd)?;
    let known = OPEN.lock().get(&file).and_then(|contexts| {
        let first = contexts.first()?;
        Some((first.inner.clone(), first.device))
    });
    let (inner, device) = known.ok_or(Errno::UNSUPPORTED)?;
    // SAFETY: the caller passes an open descriptor.
    let command = unsafe { BorrowedFd::borrow_raw(cmd_fd) }.try_clone_to_owned()?;
    Ok(publish(inner, ptr::with_exposed_provenance_mut(device), command)?)
}

/// Closes an opened device. Returns 0, or -1 with errno.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_close_device(context: *mut ibv_context) -> c_int {
    let _uncancelled = CancelGuard::new();
    let mut closed = Vec::new();
    OPEN.lock().retain(|_, contexts| {
        closed.extend(contexts.extract_if(.., |opened| opened.context == context.addr()));
        !contexts.is_empty()
    });
    // The device ends without the lock.
    drop(closed);
    // SAFETY: boxed when it was published; the caller gives it up.
    drop(unsafe { Box::from_raw(Context::address(context)) });
    0
}

#[cfg(test)]
mod tests {
    use std::{ptr, slice};

    use super::*;

    fn with_context(check: impl FnOnce(*mut Context, &verbs_context)) {
        let context = Box::into_raw(Context::new(None, ptr::null_mut(), None, 7, 2));
        let verbs = Context::as_verbs(context);
        // The step back that `verbs_get_ctx` of verbs.h takes.
        let extended = verbs.wrapping_byte_sub(mem::offset_of!(verbs_context, context));
        // SAFETY: `extended` lies at the start of `verbs` in the live allocation of `context`.
        check(context, unsafe { &*extended.cast() });
        // SAFETY: the pointer of `Box::into_raw`, not used afterwards.
        drop(unsafe { Box::from_raw(context) });
    }

    #[test]
    fn a_program_finds_the_extended_part_and_the_way_back() {
        with_context(|context, extended| {
            assert_eq!(extended.context.abi_compat.addr(), usize::MAX);
            assert_eq!(extended.sz, mem::size_of::<verbs_context>());
            assert_eq!(extended.context.async_fd, 7);
            assert_eq!(extended.context.num_comp_vectors, 2);
            assert_eq!(Context::address(Context::as_verbs(context)), context);
            let size_before_context =
                mem::offset_of!(verbs_context, context) - mem::offset_of!(verbs_context, sz);
            assert_eq!(size_before_context, mem::size_of::<usize>());
        });
    }

    #[test]
    fn no_unchecked_operation_is_null() {
        with_context(|_, extended| {
            let words = mem::size_of::<ibv_context_ops>() / mem::size_of::<usize>();
            // SAFETY: the table consists of optional function pointers, each the size of a word.
            let table =
                unsafe { slice::from_raw_parts((&raw const extended.context.ops).cast::<usize>(), words) };
            assert!(table.iter().all(|&pointer| pointer != 0), "{table:x?}");
        });
    }

    #[test]
    fn what_is_not_there_says_so() {
        with_context(|_, extended| {
            let former = extended.context.ops._compat_resize_cq.expect("set for every context");
            // SAFETY: the function takes no arguments.
            let answer = unsafe { former() };
            assert_eq!(answer.addr(), libc::EOPNOTSUPP as usize);
        });
    }
}
