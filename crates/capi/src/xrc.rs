//! XRC domains and the receiving queue pairs in them.

use std::{
    ffi::c_int,
    fs::File,
    mem::ManuallyDrop,
    os::{
        fd::{FromRawFd, RawFd},
        unix::fs::MetadataExt,
    },
    ptr,
    sync::Arc,
};

use millstream_device::{Qp, Xrcd, XrcdOpenFlags};
use millstream_lockfree::CancelGuard;
use millstream_quantity::Qpn;

use crate::{
    context::Context,
    errno::{self, Errno},
    qp,
    sys::*,
};

/// An XRC domain: the program's struct and the device's object.
#[repr(C)]
pub(crate) struct XrcdObject {
    verbs: ibv_xrcd,
    pub(crate) inner: Arc<Xrcd>,
}

impl XrcdObject {
    /// # Safety
    /// `xrcd` comes from [`open_xrcd`] and is open.
    pub(crate) unsafe fn of<'a>(xrcd: *mut ibv_xrcd) -> &'a Self {
        // SAFETY: `verbs` is the first field; the caller vouches for the pointer.
        unsafe { &*xrcd.cast() }
    }
}

/// Opens the XRC domain of a file's inode, or a private one. NULL and errno on failure.
pub(crate) unsafe extern "C" fn open_xrcd(
    context: *mut ibv_context,
    init: *mut ibv_xrcd_init_attr,
) -> *mut ibv_xrcd {
    let _uncancelled = CancelGuard::new();
    // SAFETY: the caller passes an open context and a filled struct.
    let (device, init) = unsafe { (Context::device(context), &*init) };
    let needed = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS;
    if init.comp_mask != needed {
        return errno::pointer(Err(Errno::INVALID));
    }
    let opened = if init.fd == -1 {
        Xrcd::private(device).map_err(Errno::from)
    } else {
        let opening = XrcdOpenFlags {
            create: init.oflags & libc::O_CREAT != 0,
            exclusive: init.oflags & libc::O_EXCL != 0,
        };
        inode(init.fd).and_then(|(device_id, inode)| Ok(Xrcd::of_inode(device, device_id, inode, opening)?))
    };
    errno::pointer(opened.map(|inner| {
        let verbs = ibv_xrcd { context };
        Box::into_raw(Box::new(XrcdObject { verbs, inner })).cast()
    }))
}

fn inode(fd: RawFd) -> Result<(u64, u64), Errno> {
    if fd < 0 {
        return Err(Errno::new(libc::EBADF));
    }
    // SAFETY: the program's descriptor, which stays open: the file is never dropped.
    let file = ManuallyDrop::new(unsafe { File::from_raw_fd(fd) });
    let metadata = file.metadata()?;
    Ok((metadata.dev(), metadata.ino()))
}

/// Closes an XRC domain. Returns 0 or an error number.
pub(crate) unsafe extern "C" fn close_xrcd(xrcd: *mut ibv_xrcd) -> c_int {
    let _uncancelled = CancelGuard::new();
    // SAFETY: the caller passes an open domain.
    if unsafe { XrcdObject::of(xrcd) }.inner.in_use() {
        return errno::status(Err(Errno::BUSY));
    }
    // SAFETY: boxed by `open_xrcd`; the caller gives it up.
    drop(unsafe { Box::from_raw(xrcd.cast::<XrcdObject>()) });
    0
}

/// A new receiving queue pair of a domain.
///
/// # Safety
/// The struct is filled as far as its mask says, with live objects.
pub(crate) unsafe fn create_receiver(
    context: *mut ibv_context,
    init: &ibv_qp_init_attr_ex,
) -> Result<*mut ibv_qp, Errno> {
    if init.comp_mask & IBV_QP_INIT_ATTR_XRCD == 0 || init.xrcd.is_null() {
        return Err(Errno::INVALID);
    }
    // It sends nothing, so it has no batches.
    if init.comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS != 0 && init.send_ops_flags != 0 {
        return Err(Errno::UNSUPPORTED);
    }
    // SAFETY: the caller vouches for the domain.
    let inner = Qp::for_domain(unsafe { &XrcdObject::of(init.xrcd).inner })?;
    // It belongs to no protection domain, but reports the given one: librdmacm creates the connection's
    // shared receive queue there.
    let pd = if init.comp_mask & IBV_QP_INIT_ATTR_PD != 0 { init.pd } else { ptr::null_mut() };
    Ok(qp::publish(ibv_qp { pd, ..base(context, init.qp_context) }, inner, None, None))
}

fn base(context: *mut ibv_context, qp_context: *mut std::ffi::c_void) -> ibv_qp {
    ibv_qp { context, qp_context, state: IBV_QPS_RESET, qp_type: IBV_QPT_XRC_RECV, ..ibv_qp::default() }
}

/// A further handle of a domain's receiving queue pair; NULL and errno on failure.
pub(crate) unsafe extern "C" fn open_qp(
    context: *mut ibv_context,
    attr: *mut ibv_qp_open_attr,
) -> *mut ibv_qp {
    let _uncancelled = CancelGuard::new();
    // SAFETY: the caller passes a struct that is filled as far as its mask says.
    let attr = unsafe { &*attr };
    let needed = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE;
    let known = needed | IBV_QP_OPEN_ATTR_CONTEXT;
    if attr.comp_mask & needed != needed
        || attr.comp_mask & !known != 0
        || attr.qp_type != IBV_QPT_XRC_RECV
        || attr.xrcd.is_null()
    {
        return errno::pointer(Err(Errno::INVALID));
    }
    let qp_context = match attr.comp_mask & IBV_QP_OPEN_ATTR_CONTEXT {
        0 => ptr::null_mut(),
        _ => attr.qp_context,
    };
    // SAFETY: the caller passes an open domain.
    let opened = Qp::open(unsafe { &XrcdObject::of(attr.xrcd).inner }, Qpn::new(attr.qp_num));
    errno::pointer(opened.map_err(Errno::from).map(|(inner, handle)| {
        let state = inner.state() as u32;
        qp::publish(ibv_qp { state, ..base(context, qp_context) }, inner, None, Some(handle))
    }))
}
