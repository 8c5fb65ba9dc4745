//! The verbs objects of one run, made through the C ABI.

use std::ffi::{c_int, c_void};
use std::mem::offset_of;
use std::ptr;

use millstream_capi::sys::*;
use millstream_capi::{ah, context, cq, device, mr, pd, port, qp, srq};

/// Bytes of the registered regions, and of the guards around each of them.
pub(crate) const LEN: usize = 8 << 10;
const GUARD: usize = 4096;
/// Contents of memory that nothing may write.
const UNTOUCHED: u8 = 0x5a;

/// Access rights of the regions: everything; remote READs only; local writes only.
pub(crate) const RIGHTS: [u32; 3] = [
    IBV_ACCESS_LOCAL_WRITE
        | IBV_ACCESS_REMOTE_WRITE
        | IBV_ACCESS_REMOTE_READ
        | IBV_ACCESS_REMOTE_ATOMIC
        | IBV_ACCESS_MW_BIND,
    IBV_ACCESS_REMOTE_READ,
    IBV_ACCESS_LOCAL_WRITE,
];
/// The region that no request may change.
const READ_ONLY: usize = 1;

pub(crate) const QKEY: u32 = 7;

/// Type of each queue pair, the one that it is connected to, and its shared receive queue.
const QPS: [(ibv_qp_type, usize, Option<usize>); 8] = [
    (IBV_QPT_RC, 1, None),
    (IBV_QPT_RC, 0, Some(0)),
    (IBV_QPT_UC, 3, None),
    (IBV_QPT_UC, 2, Some(0)),
    (IBV_QPT_UD, 4, None),
    // Connected to itself.
    (IBV_QPT_RC, 5, None),
    (IBV_QPT_XRC_SEND, 7, None),
    (IBV_QPT_XRC_RECV, 6, None),
];
/// Queue pairs that have a send queue.
pub(crate) const SENDERS: usize = 7;
pub(crate) const UD: usize = 4;
pub(crate) const XRC: usize = 6;
/// The queue pair whose requests are all signaled.
const SIGNALS_ALL: usize = 3;
pub(crate) const SHARED: usize = 2;

/// An opened device, and what is used by all runs.
pub(crate) struct Device {
    pub(crate) context: *mut ibv_context,
    gid: ibv_gid,
    sgid_index: u8,
}

impl Device {
    pub(crate) fn open() -> Self {
        // SAFETY: the calls get pointers to locals, and objects that they have made.
        unsafe {
            let list = device::ibv_get_device_list(ptr::null_mut());
            assert!(!list.is_null(), "no device");
            let context = context::ibv_open_device(*list);
            device::ibv_free_device_list(list);
            assert!(!context.is_null(), "the device does not open: {}", std::io::Error::last_os_error());
            let mut gid = ibv_gid { raw: [0; 16] };
            let of_ipv4 = |index: &i32| {
                let found = port::ibv_query_gid(context, 1, *index, &raw mut gid) == 0;
                found && gid.raw[..12] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff]
            };
            let index = (0..16).find(of_ipv4);
            let sgid_index = index.expect("an IPv4 address") as u8;
            Self { context, gid, sgid_index }
        }
    }

    fn extended(&self) -> &verbs_context {
        // SAFETY: the library's contexts are the last field of a `verbs_context`, as `abi_compat` says.
        unsafe { &*self.context.byte_sub(offset_of!(verbs_context, context)).cast() }
    }

    /// The operations behind the inline functions of `verbs.h`.
    pub(crate) fn operations(&self) -> &ibv_context_ops {
        // SAFETY: an open context, which nothing writes to.
        unsafe { &(*self.context).ops }
    }

    fn address(&self) -> ibv_ah_attr {
        let grh = ibv_global_route {
            dgid: self.gid,
            sgid_index: self.sgid_index,
            hop_limit: 1,
            ..Default::default()
        };
        ibv_ah_attr { grh, is_global: 1, port_num: 1, ..Default::default() }
    }
}

/// The objects of one run.
pub(crate) struct Objects<'a> {
    pub(crate) device: &'a Device,
    pd: *mut ibv_pd,
    pub(crate) cq: *mut ibv_cq,
    pub(crate) srqs: [*mut ibv_srq; SHARED],
    xrcd: *mut ibv_xrcd,
    pub(crate) qps: Vec<*mut ibv_qp>,
    pub(crate) ah: *mut ibv_ah,
    /// One region a [`RIGHTS`].
    pub(crate) mrs: Vec<*mut ibv_mr>,
    pub(crate) mws: [*mut ibv_mw; 2],
    // Freed last: it is registered until then.
    memory: Vec<u8>,
}

/// The pointer, which a verb has returned.
fn made<T>(what: &str, pointer: *mut T) -> *mut T {
    assert!(!pointer.is_null(), "{what}: {}", std::io::Error::last_os_error());
    pointer
}

impl<'a> Objects<'a> {
    pub(crate) fn new(device: &'a Device) -> Self {
        let mut memory = vec![UNTOUCHED; GUARD + RIGHTS.len() * (LEN + GUARD)];
        let context = device.context;
        // SAFETY: the verbs get pointers to locals, and live objects.
        unsafe {
            let pd = made("ibv_alloc_pd", pd::ibv_alloc_pd(context));
            let cq =
                made("ibv_create_cq", cq::ibv_create_cq(context, 1024, ptr::null_mut(), ptr::null_mut(), 0));
            let mut mrs = Vec::new();
            for (i, rights) in RIGHTS.iter().enumerate() {
                let at = memory.as_mut_ptr().add(region_offset(i));
                mrs.push(made("ibv_reg_mr", mr::ibv_reg_mr(pd, at.cast(), LEN, *rights as c_int)));
            }
            let alloc_mw = device.operations().alloc_mw.expect("in the table");
            let mws = [IBV_MW_TYPE_1, IBV_MW_TYPE_2].map(|kind| made("ibv_alloc_mw", alloc_mw(pd, kind)));
            let mut domain = ibv_xrcd_init_attr {
                comp_mask: IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
                fd: -1,
                oflags: libc::O_CREAT,
            };
            let open_xrcd = device.extended().open_xrcd.expect("in the table");
            let xrcd = made("ibv_open_xrcd", open_xrcd(context, &raw mut domain));
            let ah = made("ibv_create_ah", ah::ibv_create_ah(pd, &mut device.address()));
            let srqs = [ptr::null_mut(); SHARED];
            let mut objects = Self { device, pd, cq, srqs, xrcd, qps: Vec::new(), ah, mrs, mws, memory };
            objects.make_shared_queues();
            objects.make_queue_pairs();
            objects
        }
    }

    /// A shared receive queue for queue pairs, and one of the XRC domain.
    unsafe fn make_shared_queues(&mut self) {
        let attr = ibv_srq_attr { max_wr: 8, max_sge: 2, srq_limit: 0 };
        let mut basic = ibv_srq_init_attr { attr, ..Default::default() };
        let mut xrc = ibv_srq_init_attr_ex {
            attr,
            comp_mask: IBV_SRQ_INIT_ATTR_TYPE
                | IBV_SRQ_INIT_ATTR_PD
                | IBV_SRQ_INIT_ATTR_XRCD
                | IBV_SRQ_INIT_ATTR_CQ,
            srq_type: IBV_SRQT_XRC,
            pd: self.pd,
            xrcd: self.xrcd,
            cq: self.cq,
            ..Default::default()
        };
        let create_srq_ex = self.device.extended().create_srq_ex.expect("in the table");
        // SAFETY: filled structs with live objects.
        unsafe {
            self.srqs = [
                made("ibv_create_srq", srq::ibv_create_srq(self.pd, &raw mut basic)),
                made("ibv_create_srq_ex", create_srq_ex(self.device.context, &raw mut xrc)),
            ];
        }
    }

    unsafe fn make_queue_pairs(&mut self) {
        let create_qp_ex = self.device.extended().create_qp_ex.expect("in the table");
        for (i, (qp_type, _, shared)) in QPS.into_iter().enumerate() {
            let target = qp_type == IBV_QPT_XRC_RECV;
            let mut init = ibv_qp_init_attr_ex {
                send_cq: self.cq,
                recv_cq: self.cq,
                srq: shared.map_or(ptr::null_mut(), |shared| self.srqs[shared]),
                cap: ibv_qp_cap {
                    max_send_wr: 8,
                    max_recv_wr: if shared.is_some() { 0 } else { 8 },
                    max_send_sge: 3,
                    max_recv_sge: 2,
                    max_inline_data: 64,
                },
                qp_type,
                sq_sig_all: (i == SIGNALS_ALL).into(),
                comp_mask: if target { IBV_QP_INIT_ATTR_XRCD } else { IBV_QP_INIT_ATTR_PD },
                pd: self.pd,
                xrcd: self.xrcd,
                ..Default::default()
            };
            // SAFETY: a filled struct with live objects.
            self.qps
                .push(made("ibv_create_qp_ex", unsafe { create_qp_ex(self.device.context, &raw mut init) }));
        }
        (0..QPS.len()).for_each(|qp| self.connect(qp));
    }

    /// Modifies a queue pair from RESET to RTS. Both ends of an XRC connection take all attributes of a reliable connection.
    ///
    /// It ends in ERR if its peer still retries a request that the queue pair refuses as soon as it is in RTR.
    pub(crate) fn connect(&self, qp: usize) {
        let (qp_type, peer, _) = QPS[qp];
        let ud = qp_type == IBV_QPT_UD;
        let reliable = matches!(qp_type, IBV_QPT_RC | IBV_QPT_XRC_SEND | IBV_QPT_XRC_RECV);
        let of = |yes: bool, mask: u32| if yes { mask } else { 0 };
        let rtr = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
        let responder = IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
        let requester = IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
        let rights = if ud { IBV_QP_QKEY } else { IBV_QP_ACCESS_FLAGS };
        for (state, needs) in [
            (IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | rights),
            (IBV_QPS_RTR, of(!ud, rtr) | of(reliable, responder)),
            (IBV_QPS_RTS, IBV_QP_SQ_PSN | of(reliable, requester)),
        ] {
            let mut attr = ibv_qp_attr {
                qp_state: state,
                path_mtu: IBV_MTU_256,
                qkey: QKEY,
                dest_qp_num: self.number(peer),
                qp_access_flags: RIGHTS[0] & !IBV_ACCESS_MW_BIND,
                ah_attr: self.device.address(),
                max_rd_atomic: 2,
                max_dest_rd_atomic: 2,
                min_rnr_timer: 1,
                port_num: 1,
                timeout: 6,
                retry_cnt: 1,
                rnr_retry: 1,
                ..Default::default()
            };
            let mask = (IBV_QP_STATE | needs) as c_int;
            // SAFETY: a live queue pair and a filled struct.
            let status = unsafe { qp::ibv_modify_qp(self.qps[qp], &raw mut attr, mask) };
            if state == IBV_QPS_RTS && status != 0 && self.state(qp) == IBV_QPS_ERR {
                return;
            }
            assert_eq!(status, 0, "ibv_modify_qp of queue pair {qp} to state {state}");
        }
    }

    /// Modifies the state of a queue pair only. True if that is a legal transition.
    pub(crate) fn modify(&self, qp: usize, state: ibv_qp_state) -> bool {
        let mut attr = ibv_qp_attr { qp_state: state, ..Default::default() };
        // SAFETY: a live queue pair and a filled struct.
        unsafe { qp::ibv_modify_qp(self.qps[qp], &raw mut attr, IBV_QP_STATE as c_int) == 0 }
    }

    /// The state of a queue pair, checked to be one of the specification's.
    pub(crate) fn state(&self, qp: usize) -> ibv_qp_state {
        let (mut attr, mut init) = (ibv_qp_attr::default(), ibv_qp_init_attr::default());
        // SAFETY: a live queue pair and writable structs.
        unsafe {
            assert_eq!(
                qp::ibv_query_qp(self.qps[qp], &raw mut attr, IBV_QP_STATE as c_int, &raw mut init),
                0
            );
        }
        assert!(attr.qp_state <= IBV_QPS_ERR, "queue pair {qp} is in state {}", attr.qp_state);
        attr.qp_state
    }

    pub(crate) fn number(&self, qp: usize) -> u32 {
        // SAFETY: a live queue pair.
        unsafe { (*self.qps[qp]).qp_num }
    }

    pub(crate) fn numbers(&self) -> Vec<u32> {
        (0..self.qps.len()).map(|qp| self.number(qp)).collect()
    }

    /// Whether the program set `sq_sig_all`.
    pub(crate) fn signals_all(&self, qp: usize) -> bool {
        qp == SIGNALS_ALL
    }

    /// Whether the queue pair has a receive queue of its own.
    pub(crate) fn has_receive_queue(&self, qp: usize) -> bool {
        QPS[qp].2.is_none() && !matches!(QPS[qp].0, IBV_QPT_XRC_SEND | IBV_QPT_XRC_RECV)
    }

    pub(crate) fn xrc_srq_number(&self) -> u32 {
        let mut number = 0;
        let get_srq_num = self.device.extended().get_srq_num.expect("in the table");
        // SAFETY: a live queue and a local.
        assert_eq!(unsafe { get_srq_num(self.srqs[1], &raw mut number) }, 0);
        number
    }

    /// Local and remote key of a region.
    pub(crate) fn keys(&self, region: usize) -> (u32, u32) {
        // SAFETY: a live region.
        unsafe { ((*self.mrs[region]).lkey, (*self.mrs[region]).rkey) }
    }

    /// Key of a window, bound or not.
    pub(crate) fn window_key(&self, window: usize) -> u32 {
        // SAFETY: a live window.
        unsafe { (*self.mws[window]).rkey }
    }

    pub(crate) fn start(&self, region: usize) -> u64 {
        self.memory.as_ptr() as u64 + region_offset(region) as u64
    }

    /// Shortens the element to memory that exists, from the start of the region on.
    pub(crate) fn readable(&self, sge: ibv_sge) -> ibv_sge {
        let (start, end) =
            (self.memory.as_ptr() as u64, self.memory.as_ptr() as u64 + self.memory.len() as u64);
        let addr = sge.addr.clamp(start, end);
        ibv_sge { addr, length: u64::from(sge.length).min(end - addr) as u32, lkey: sge.lkey }
    }

    /// Deregisters a region and registers it anew. A region with windows is not deregistered.
    pub(crate) fn register_again(&mut self, region: usize) {
        let at = self.start(region) as *mut c_void;
        // SAFETY: the region is not used after its deregistration, and its memory lives longer.
        unsafe {
            if mr::ibv_dereg_mr(self.mrs[region]) == 0 {
                self.mrs[region] =
                    made("ibv_reg_mr", mr::ibv_reg_mr(self.pd, at, LEN, RIGHTS[region] as c_int));
            }
        }
    }

    /// Destroys all objects, each without an error. Then checks that no memory has changed that no region covers, or whose
    /// region forbids it.
    pub(crate) fn destroy(self) {
        let dealloc_mw = self.device.operations().dealloc_mw.expect("in the table");
        let close_xrcd = self.device.extended().close_xrcd.expect("in the table");
        // SAFETY: each object is destroyed once, after those that use it.
        unsafe {
            self.qps.iter().for_each(|qp| assert_eq!(qp::ibv_destroy_qp(*qp), 0, "ibv_destroy_qp"));
            self.srqs.iter().for_each(|srq| assert_eq!(srq::ibv_destroy_srq(*srq), 0, "ibv_destroy_srq"));
            assert_eq!(close_xrcd(self.xrcd), 0, "ibv_close_xrcd");
            assert_eq!(ah::ibv_destroy_ah(self.ah), 0, "ibv_destroy_ah");
            self.mws.iter().for_each(|mw| assert_eq!(dealloc_mw(*mw), 0, "ibv_dealloc_mw"));
            self.mrs.iter().for_each(|mr| assert_eq!(mr::ibv_dereg_mr(*mr), 0, "ibv_dereg_mr"));
            assert_eq!(cq::ibv_destroy_cq(self.cq), 0, "ibv_destroy_cq");
            assert_eq!(pd::ibv_dealloc_pd(self.pd), 0, "ibv_dealloc_pd");
        }
        for (at, byte) in self.memory.iter().enumerate() {
            let writable = |region: usize| {
                region != READ_ONLY && (0..LEN).contains(&(at.wrapping_sub(region_offset(region))))
            };
            let allowed = (0..RIGHTS.len()).any(writable);
            assert!(
                allowed || *byte == UNTOUCHED,
                "the device wrote byte {at}, which no region lets it write"
            );
        }
    }
}

fn region_offset(region: usize) -> usize {
    GUARD + region * (LEN + GUARD)
}
