//! Queue pairs: creation, state, posting, multicast membership.

use std::{ffi::c_int, mem, ptr, slice, sync::Arc};

use millstream_device::{
    self as device, ObjectHandle, Qp,
    qp::{
        QpCap, QpType, RecvSource, SendOps, SendWrList, SingleSgeWr, WrBatchLock,
        state::{AddressVector, QpAttr, QpState},
    },
    send_wr::SendWr,
    types::Sge,
};
use millstream_lockfree::CancelGuard;
use millstream_quantity::{Psn, Qkey, Qpn, Rkey, Srqn};

use crate::{
    ah::AhObject,
    cq::CqObject,
    errno::{self, Errno},
    mw,
    pd::PdObject,
    qp_ex,
    srq::SrqObject,
    sys::*,
};

/// A queue pair: the program's struct and the device's object.
#[repr(C)]
pub(crate) struct QpObject {
    verbs: ibv_qp_ex,
    pub(crate) inner: Arc<Qp>,
    /// The batch in preparation, if the queue pair has the `ibv_wr_*` interface.
    pub(crate) wr_batch: Option<WrBatchLock>,
    /// The program's handle. An XRC target can be opened more than once.
    pub(crate) handle: Arc<ObjectHandle>,
}

impl QpObject {
    /// # Safety
    /// `qp` comes from [`ibv_create_qp`] and is alive.
    #[inline]
    pub(crate) unsafe fn of<'a>(qp: *mut ibv_qp) -> &'a Self {
        // SAFETY: `verbs` is the first field, and the `ibv_qp` its first; the caller vouches for the pointer.
        unsafe { &*qp.cast() }
    }
}

// Scatter/gather lists are read in place.
const _: () = {
    assert!(mem::size_of::<Sge>() == mem::size_of::<ibv_sge>());
    assert!(mem::offset_of!(Sge, length) == mem::offset_of!(ibv_sge, length));
    assert!(mem::offset_of!(Sge, lkey) == mem::offset_of!(ibv_sge, lkey));
};

/// # Safety
/// `list` has `count` elements, or `count` is not positive.
#[inline]
pub(crate) unsafe fn elements<'a>(list: *mut ibv_sge, count: c_int) -> &'a [Sge] {
    if count <= 0 {
        return &[];
    }
    // SAFETY: the caller vouches for the array; the types are laid out alike.
    unsafe { slice::from_raw_parts(list.cast::<Sge>(), count as usize) }
}

/// A new queue pair in state RESET; NULL and errno on failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_qp(pd: *mut ibv_pd, qp_init_attr: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    let _uncancelled = CancelGuard::new();
    // SAFETY: the caller passes a filled, writable struct.
    let init = unsafe { &mut *qp_init_attr };
    errno::pointer(create(pd, init, None))
}

/// Creates a queue pair, with the `ibv_wr_*` interface for `operations` if there are any.
pub(crate) fn create(
    pd: *mut ibv_pd,
    init: &mut ibv_qp_init_attr,
    operations: Option<SendOps>,
) -> Result<*mut ibv_qp, Errno> {
    let kind = match init.qp_type {
        IBV_QPT_RC => QpType::Rc,
        IBV_QPT_UC => QpType::Uc,
        IBV_QPT_UD => QpType::Ud,
        IBV_QPT_XRC_SEND => QpType::XrcSend,
        // Only `ibv_create_qp_ex` can name its domain.
        IBV_QPT_XRC_RECV => return Err(Errno::INVALID),
        _ => return Err(Errno::UNSUPPORTED),
    };
    let receives = if init.srq.is_null() {
        RecvSource::Own
    } else {
        // SAFETY: the caller of the verb passes a live queue.
        RecvSource::Shared(unsafe { SrqObject::of(init.srq) }.inner.clone())
    };
    if kind == QpType::XrcSend {
        // An initiator has no receive queue.
        init.recv_cq = init.send_cq;
    }
    if init.send_cq.is_null() || init.recv_cq.is_null() {
        return Err(Errno::INVALID);
    }
    // SAFETY: the caller of the verb passes live objects.
    let (domain, send_cq, recv_cq) = unsafe {
        (&PdObject::of(pd).inner, &CqObject::of(init.send_cq).inner, &CqObject::of(init.recv_cq).inner)
    };
    let asked = QpCap {
        max_send_wr: init.cap.max_send_wr,
        max_recv_wr: init.cap.max_recv_wr,
        max_send_sge: init.cap.max_send_sge,
        max_recv_sge: init.cap.max_recv_sge,
        max_inline_data: init.cap.max_inline_data,
    };
    let inner = Qp::new(domain, send_cq, recv_cq, asked, init.sq_sig_all != 0, kind, receives)?;
    let wr_batch = operations.map(|bits| WrBatchLock::new(kind, inner.capacity(), bits)).transpose()?;
    init.cap = verbs_capacity(&inner);
    let verbs = ibv_qp {
        // SAFETY: the caller's live domain.
        context: unsafe { (*pd).context },
        qp_context: init.qp_context,
        pd,
        send_cq: init.send_cq,
        recv_cq: if kind == QpType::XrcSend { ptr::null_mut() } else { init.recv_cq },
        srq: init.srq,
        state: IBV_QPS_RESET,
        qp_type: init.qp_type,
        ..ibv_qp::default()
    };
    Ok(publish(verbs, inner, wr_batch, None))
}

/// Makes the program's object of a queue pair, or of a further `handle` of it.
pub(crate) fn publish(
    base: ibv_qp,
    inner: Arc<Qp>,
    wr_batch: Option<WrBatchLock>,
    handle: Option<Arc<ObjectHandle>>,
) -> *mut ibv_qp {
    let base = ibv_qp { handle: inner.qpn().get(), qp_num: inner.qpn().get(), ..base };
    let handle = handle.unwrap_or_else(|| inner.handle().clone());
    let object = Box::leak(Box::new(QpObject { verbs: qp_ex::interface(base), inner, wr_batch, handle }));
    let address = std::ptr::from_mut(object).addr() as u64;
    object.handle.set_pointer(address);
    std::ptr::from_mut(object).cast()
}

fn verbs_capacity(qp: &Qp) -> ibv_qp_cap {
    let given = qp.capacity();
    ibv_qp_cap {
        max_send_wr: given.max_send_wr,
        max_recv_wr: given.max_recv_wr,
        max_send_sge: given.max_send_sge,
        max_recv_sge: given.max_recv_sge,
        max_inline_data: given.max_inline_data,
    }
}

fn from_verbs(attr: &ibv_qp_attr, mask: u32) -> Result<QpAttr, Errno> {
    let named = |bit| mask & bit != 0;
    let state =
        |raw, bit| if named(bit) { QpState::from_raw(raw).ok_or(Errno::INVALID) } else { Ok(QpState::Reset) };
    let dest_qpn = Qpn::new(attr.dest_qp_num);
    if named(IBV_QP_DEST_QPN) && dest_qpn.get() != attr.dest_qp_num {
        return Err(Errno::INVALID);
    }
    let av = &attr.ah_attr;
    // SAFETY: a GID is sixteen bytes through either field of the union.
    let dgid = unsafe { av.grh.dgid.raw };
    Ok(QpAttr {
        state: state(attr.qp_state, IBV_QP_STATE)?,
        cur_state: state(attr.cur_qp_state, IBV_QP_CUR_STATE)?,
        en_sqd_async_notify: attr.en_sqd_async_notify != 0,
        // Fields that the mask does not name may hold anything.
        path_mtu: if named(IBV_QP_PATH_MTU) {
            u8::try_from(attr.path_mtu).map_err(|_| Errno::INVALID)?
        } else {
            0
        },
        path_mig_state: attr.path_mig_state as u8,
        qkey: Qkey::new(attr.qkey),
        rq_psn: Psn::new(attr.rq_psn),
        sq_psn: Psn::new(attr.sq_psn),
        dest_qpn,
        access: attr.qp_access_flags,
        path: AddressVector {
            is_global: av.is_global != 0,
            dgid,
            sgid_index: av.grh.sgid_index,
            flow_label: av.grh.flow_label,
            hop_limit: av.grh.hop_limit,
            traffic_class: av.grh.traffic_class,
            dlid: av.dlid,
            sl: av.sl,
            src_path_bits: av.src_path_bits,
            static_rate: av.static_rate,
            port: av.port_num,
        },
        pkey_index: attr.pkey_index,
        max_rd_atomic: attr.max_rd_atomic,
        max_dest_rd_atomic: attr.max_dest_rd_atomic,
        min_rnr_timer: attr.min_rnr_timer,
        port: attr.port_num,
        timeout: attr.timeout,
        retry_cnt: attr.retry_cnt,
        rnr_retry: attr.rnr_retry,
    })
}

fn to_verbs(qp: &Qp) -> ibv_qp_attr {
    let attributes = qp.attributes();
    let path = &attributes.path;
    ibv_qp_attr {
        qp_state: attributes.state as u32,
        cur_qp_state: attributes.state as u32,
        path_mtu: u32::from(attributes.path_mtu),
        path_mig_state: u32::from(attributes.path_mig_state),
        qkey: attributes.qkey.get(),
        rq_psn: attributes.rq_psn.get(),
        sq_psn: attributes.sq_psn.get(),
        dest_qp_num: attributes.dest_qpn.get(),
        qp_access_flags: attributes.access,
        cap: verbs_capacity(qp),
        ah_attr: ibv_ah_attr {
            grh: ibv_global_route {
                dgid: ibv_gid { raw: path.dgid },
                flow_label: path.flow_label,
                sgid_index: path.sgid_index,
                hop_limit: path.hop_limit,
                traffic_class: path.traffic_class,
            },
            dlid: path.dlid,
            sl: path.sl,
            src_path_bits: path.src_path_bits,
            static_rate: path.static_rate,
            is_global: u8::from(path.is_global),
            port_num: path.port,
        },
        pkey_index: attributes.pkey_index,
        max_rd_atomic: attributes.max_rd_atomic,
        max_dest_rd_atomic: attributes.max_dest_rd_atomic,
        min_rnr_timer: attributes.min_rnr_timer,
        port_num: attributes.port,
        timeout: attributes.timeout,
        retry_cnt: attributes.retry_cnt,
        rnr_retry: attributes.rnr_retry,
        ..ibv_qp_attr::default()
    }
}

/// The `ibv_wr_*` interface of a queue pair; NULL if it was not created with it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex {
    // SAFETY: the caller passes a live queue pair.
    if unsafe { QpObject::of(qp) }.wr_batch.is_some() { qp.cast() } else { ptr::null_mut() }
}

/// Changes the attributes that `attr_mask` selects. Returns 0 or an error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, attr_mask: c_int) -> c_int {
    let _uncancelled = CancelGuard::new();
    let mask = attr_mask.cast_unsigned();
    // SAFETY: the caller passes a live queue pair and a readable struct.
    let (object, attr) = unsafe { (QpObject::of(qp), &*attr) };
    let result = from_verbs(attr, mask).and_then(|attributes| Ok(object.inner.modify(&attributes, mask)?));
    if result.is_ok() {
        // SAFETY: programs read the state here without a lock, as with rdma-core.
        unsafe { (&raw mut (*qp).state).write_volatile(object.inner.state() as u32) };
    }
    errno::status(result)
}

/// The attributes of a queue pair. Returns 0 or an error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    _attr_mask: c_int,
    init_attr: *mut ibv_qp_init_attr,
) -> c_int {
    let _uncancelled = CancelGuard::new();
    // SAFETY: the caller passes a live queue pair and two writable structs.
    unsafe {
        let object = QpObject::of(qp);
        let now = to_verbs(&object.inner);
        (&raw mut (*qp).state).write_volatile(now.qp_state);
        attr.write(now);
        init_attr.write(ibv_qp_init_attr {
            qp_context: (*qp).qp_context,
            send_cq: (*qp).send_cq,
            recv_cq: (*qp).recv_cq,
            srq: (*qp).srq,
            cap: now.cap,
            qp_type: (*qp).qp_type,
            sq_sig_all: c_int::from(object.inner.signal_all()),
        });
    }
    0
}

/// Whether the data of operation `op` is written to memory in order: 0, not guaranteed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_qp_data_in_order(
    _qp: *mut ibv_qp,
    _op: ibv_wr_opcode,
    _flags: u32,
) -> c_int {
    0
}

/// Destroys a queue pair. Returns 0 or an error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int {
    let _uncancelled = CancelGuard::new();
    // SAFETY: the caller passes a live queue pair.
    if unsafe { QpObject::of(qp) }.inner.is_attached() {
        return errno::status(Err(Errno::BUSY));
    }
    // SAFETY: boxed by `create`; the caller gives it up.
    let object = unsafe { Box::from_raw(qp.cast::<QpObject>()) };
    object.inner.close(&object.handle);
    0
}

/// Accepts a peer's enhanced-connection options. Returns 0 or an error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_set_ece(_qp: *mut ibv_qp, _ece: *mut ibv_ece) -> c_int {
    errno::status(Err(Errno::UNSUPPORTED))
}

/// The enhanced-connection options to offer a peer. Returns 0 or an error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_ece(_qp: *mut ibv_qp, _ece: *mut ibv_ece) -> c_int {
    errno::status(Err(Errno::UNSUPPORTED))
}

/// Attaches a UD queue pair to a multicast group. The local identifier counts on InfiniBand only (RoCE
/// annex A16.5.2). Returns 0 or an error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_attach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, _lid: u16) -> c_int {
    let _uncancelled = CancelGuard::new();
    // SAFETY: the caller passes a live queue pair and a readable GID of sixteen bytes.
    let result = unsafe { QpObject::of(qp).inner.attach((*gid).raw) };
    errno::status(result.map_err(Errno::from))
}

/// Detaches a UD queue pair from a multicast group. Returns 0 or an error number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_detach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, _lid: u16) -> c_int {
    let _uncancelled = CancelGuard::new();
    // SAFETY: as above.
    let result = unsafe { QpObject::of(qp).inner.detach((*gid).raw) };
    errno::status(result.map_err(Errno::from))
}

/// A position in a linked list of send requests: the next one, or NULL.
#[derive(Clone, Copy)]
struct LinkedWrs(*mut ibv_send_wr);

impl SendWrList for LinkedWrs {
    #[inline(always)]
    fn opcode(&self) -> Option<u32> {
        // SAFETY: made by `post_send` from a list of complete requests.
        unsafe { Some(self.0.as_ref()?.opcode) }
    }

    #[inline(always)]
    fn single_sge(&self, opcode: u32) -> Option<SingleSgeWr> {
        // SAFETY: as above; the element is read only if there is one, and every request has the RDMA fields' bytes.
        unsafe {
            let request = self.0.as_ref()?;
            if request.num_sge != 1 || request.opcode != opcode {
                return None;
            }
            // Field by field: a wide load would wait for all of the program's narrow stores.
            let sge = request.sg_list;
            let sge = Sge {
                addr: (&raw const (*sge).addr).read_volatile(),
                length: (&raw const (*sge).length).read_volatile(),
                lkey: (&raw const (*sge).lkey).read_volatile(),
            };
            Some(SingleSgeWr {
                wr_id: request.wr_id,
                flags: request.send_flags,
                sge,
                remote_addr: request.wr.rdma.remote_addr,
                rkey: Rkey::new(request.wr.rdma.rkey),
            })
        }
    }

    #[inline(always)]
    fn with_wr<R>(&self, qp_type: QpType, work: impl FnOnce(&SendWr<'_>) -> R) -> Result<R, device::Errno> {
        // SAFETY: as above; the types of queue pair and request determine the fields of the unions.
        unsafe {
            let request = self.0.as_ref().ok_or(device::Errno::INVAL)?;
            let mut wr = SendWr {
                wr_id: request.wr_id,
                opcode: request.opcode,
                flags: request.send_flags,
                imm: request.__bindgen_anon_1.imm_data,
                sges: elements(request.sg_list, request.num_sge),
                remote_addr: request.wr.rdma.remote_addr,
                rkey: Rkey::new(request.wr.rdma.rkey),
                compare_add: 0,
                swap: 0,
                to: None,
                bind: None,
                remote_srqn: Srqn::default(),
            };
            if qp_type == QpType::Ud {
                let ud = request.wr.ud;
                if !ud.ah.is_null() {
                    wr.to = Some(AhObject::destination(ud.ah, ud.remote_qpn, ud.remote_qkey));
                }
            } else if matches!(request.opcode, IBV_WR_ATOMIC_CMP_AND_SWP | IBV_WR_ATOMIC_FETCH_AND_ADD) {
                let atomic = request.wr.atomic;
                (wr.remote_addr, wr.rkey) = (atomic.remote_addr, Rkey::new(atomic.rkey));
                (wr.compare_add, wr.swap) = (atomic.compare_add, atomic.swap);
            } else if request.opcode == IBV_WR_BIND_MW {
                let bind = mw::requested_bind(request)?;
                let (wr_id, flags) = (request.wr_id, request.send_flags);
                let opcode = request.opcode;
                return Ok(work(&SendWr { wr_id, opcode, flags, bind: Some(&bind), ..SendWr::default() }));
            }
            if qp_type == QpType::XrcSend {
                wr.remote_srqn = Srqn::new(request.qp_type.xrc.remote_srqn);
            }
            Ok(work(&wr))
        }
    }

    fn accepted(&self) {
        // SAFETY: as above, and there is a next request.
        unsafe {
            if (*self.0).opcode == IBV_WR_BIND_MW {
                mw::show_bound_key(&*self.0);
            }
        }
    }

    #[inline(always)]
    fn advance(&mut self) {
        // SAFETY: as above, and there is a next request.
        self.0 = unsafe { (*self.0).next };
    }
}

/// Posts a list of send requests. Returns 0, or an error number with the first refused request in
/// `bad_wr`.
pub(crate) unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: the caller passes a live queue pair, a list of complete requests and a writable `bad_wr`.
    unsafe {
        let inner = &QpObject::of(qp).inner;
        let mut list = LinkedWrs(wr);
        match inner.post_list(&mut list) {
            Ok(()) => 0,
            Err(error) => {
                bad_wr.write(list.0);
                errno::status(Err(error.into()))
            }
        }
    }
}

/// Iterator over a linked list of receive requests.
struct RecvWrs {
    next: *mut ibv_recv_wr,
    /// The request that was yielded last.
    last: *mut ibv_recv_wr,
}

impl Iterator for &mut RecvWrs {
    type Item = (u64, &'static [Sge]);

    #[inline(always)]
    fn next(&mut self) -> Option<Self::Item> {
        self.last = self.next;
        // SAFETY: made by `post_recv` from a list of complete requests, and used up by it.
        unsafe {
            let request = self.next.as_ref()?;
            self.next = request.next;
            Some((request.wr_id, elements(request.sg_list, request.num_sge)))
        }
    }
}

/// Posts a list of receive requests. Returns 0, or an error number with the first refused request in
/// `bad_wr`.
pub(crate) unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    let mut list = RecvWrs { next: wr, last: wr };
    // SAFETY: the caller passes a live queue pair and a writable `bad_wr`.
    unsafe {
        match QpObject::of(qp).inner.post_recvs(&mut list) {
            Ok(()) => 0,
            Err(error) => {
                bad_wr.write(list.last);
                errno::status(Err(error.into()))
            }
        }
    }
}
