//! Structures and constants of the kernel's `rdma/rdma_user_cm.h`, version 4.
//!
//! A command is a header with the lengths of body and answer, followed by the body. The answer is written to
//! the address in the body. Integers are in host order unless noted otherwise.

/// Content of `/sys/class/misc/rdma_cm/abi_version`.
pub const ABI_VERSION: u32 = 4;

/// Longest private data of a command, in bytes.
pub const MAX_PRIVATE: usize = 256;

/// A type without padding for which every bit pattern is valid.
///
/// # Safety
/// Every bit pattern is a value, and the type has no padding.
pub unsafe trait Plain: Copy {
    /// Reads a value from `bytes`; missing bytes are zero, extra ones are ignored.
    fn from_prefix(bytes: &[u8]) -> Self {
        let mut value = std::mem::MaybeUninit::<Self>::zeroed();
        let len = bytes.len().min(size_of::<Self>());
        // SAFETY: `len` is inside both; all bit patterns are values.
        unsafe {
            value.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), len);
            value.assume_init()
        }
    }

    /// The bytes of the value.
    fn bytes(&self) -> &[u8] {
        // SAFETY: the type has no padding, so all of its bytes are initialised.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<Self>()) }
    }
}

macro_rules! plain {
    ($($(#[$meta:meta])* $name:ident($size:literal) { $($field:ident: $type:ty,)* })*) => {$(
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug)]
        #[allow(missing_docs, reason = "named as in the kernel's header")]
        pub struct $name { $(pub $field: $type,)* }
        const _: () = assert!(size_of::<$name>() == $size && size_of::<$name>() == 0 $(+ size_of::<$type>())*);
        // SAFETY: made of integers and arrays of them, which the assertion shows to leave no gap.
        unsafe impl Plain for $name {}
        impl $name {
            /// The value of zero bytes.
            pub const ZERO: Self = {
                // SAFETY: all bit patterns are values.
                unsafe { std::mem::zeroed() }
            };
        }
    )*};
}

plain! {
    /// Header of every command.
    Header(8) { cmd: u32, len_in: u16, len_out: u16, }
    /// CREATE_ID.
    CreateId(24) { uid: u64, response: u64, ps: u16, qp_type: u8, reserved: [u8; 5], }
    /// DESTROY_ID and LEAVE_MCAST.
    DestroyId(16) { response: u64, id: u32, reserved: u32, }
    /// BIND_IP.
    BindIp(40) { response: u64, addr: [u8; 28], id: u32, }
    /// BIND.
    Bind(136) { id: u32, addr_size: u16, reserved: u16, addr: [u8; 128], }
    /// RESOLVE_IP.
    ResolveIp(64) { src: [u8; 28], dst: [u8; 28], id: u32, timeout_ms: u32, }
    /// RESOLVE_ADDR.
    ResolveAddr(272) { id: u32, timeout_ms: u32, src_size: u16, dst_size: u16, reserved: u32,
                       src: [u8; 128], dst: [u8; 128], }
    /// RESOLVE_ROUTE.
    ResolveRoute(8) { id: u32, timeout_ms: u32, }
    /// QUERY and QUERY_ROUTE.
    Query(16) { response: u64, id: u32, option: u32, }
    /// A path in an answer; GIDs, LIDs, flow label and P_Key are in network order.
    PathRecord(64) { dgid: [u8; 16], sgid: [u8; 16], dlid: u16, slid: u16, raw_traffic: u32, flow_label: u32,
                     reversible: u32, mtu: u32, pkey: u16, hop_limit: u8, traffic_class: u8, numb_path: u8, sl: u8,
                     mtu_selector: u8, rate_selector: u8, rate: u8, packet_life_time_selector: u8,
                     packet_life_time: u8, preference: u8, }
    /// Answer to QUERY_ROUTE.
    RouteAnswer(208) { node_guid: u64, paths: [PathRecord; 2], src: [u8; 28], dst: [u8; 28], num_paths: u32,
                       port_num: u8, reserved: [u8; 3], ibdev_index: u32, reserved1: u32, }
    /// Answer to QUERY for addresses and for GIDs.
    AddrAnswer(280) { node_guid: u64, port_num: u8, reserved: u8, pkey: u16, src_size: u16, dst_size: u16,
                      src: [u8; 128], dst: [u8; 128], ibdev_index: u32, reserved1: u32, }
    /// A path record of a subnet manager (IBTA volume 1, 15.2.5.16), in network order.
    WirePath(64) { service_id: u64, dgid: [u8; 16], sgid: [u8; 16], dlid: u16, slid: u16, flow_hop: u32,
                   tclass: u8, reversible_numpath: u8, pkey: u16, qosclass_sl: u16, mtu: u8, rate: u8,
                   life_time: u8, preference: u8, reserved: [u8; 6], }
    /// Answer to QUERY for paths.
    PathAnswer(80) { num_paths: u32, reserved: u32, flags: u32, reserved1: u32, path: WirePath, }
    /// Connection parameters.
    ConnParam(272) { qp_num: u32, qkey: u32, private_data: [u8; MAX_PRIVATE], private_data_len: u8, srq: u8,
                     responder_resources: u8, initiator_depth: u8, flow_control: u8, retry_count: u8,
                     rnr_retry_count: u8, valid: u8, }
    /// Address handle attributes.
    AhAttr(32) { dgid: [u8; 16], flow_label: u32, sgid_index: u8, hop_limit: u8, traffic_class: u8, reserved: u8,
                 dlid: u16, sl: u8, src_path_bits: u8, static_rate: u8, is_global: u8, port_num: u8,
                 reserved1: u8, }
    /// Parameters of a datagram service.
    UdParam(304) { qp_num: u32, qkey: u32, ah_attr: AhAttr, private_data: [u8; MAX_PRIVATE],
                   private_data_len: u8, reserved: [u8; 7], }
    /// Enhanced connection establishment.
    Ece(8) { vendor_id: u32, attr_mod: u32, }
    /// CONNECT.
    Connect(288) { conn_param: ConnParam, id: u32, reserved: u32, ece: Ece, }
    /// LISTEN.
    Listen(8) { id: u32, backlog: u32, }
    /// ACCEPT.
    Accept(296) { uid: u64, conn_param: ConnParam, id: u32, reserved: u32, ece: Ece, }
    /// REJECT.
    Reject(264) { id: u32, private_data_len: u8, reason: u8, reserved: [u8; 2], private_data: [u8; MAX_PRIVATE], }
    /// DISCONNECT.
    Disconnect(4) { id: u32, }
    /// INIT_QP_ATTR: asks for the attributes of the transition to `qp_state`.
    InitQpAttr(16) { response: u64, id: u32, qp_state: u32, }
    /// Queue pair attributes.
    QpAttr(144) { mask: u32, qp_state: u32, cur_qp_state: u32, path_mtu: u32, path_mig_state: u32, qkey: u32,
                  rq_psn: u32, sq_psn: u32, dest_qp_num: u32, access: u32, ah: AhAttr, alt_ah: AhAttr,
                  cap: [u32; 5], pkey_index: u16, alt_pkey_index: u16, en_sqd_async_notify: u8, sq_draining: u8,
                  max_rd_atomic: u8, max_dest_rd_atomic: u8, min_rnr_timer: u8, port_num: u8, timeout: u8,
                  retry_cnt: u8, rnr_retry: u8, alt_port_num: u8, alt_timeout: u8, reserved: [u8; 5], }
    /// NOTIFY: reports a queue pair event.
    Notify(8) { id: u32, event: u32, }
    /// JOIN_IP_MCAST.
    JoinIpMcast(48) { response: u64, uid: u64, addr: [u8; 28], id: u32, }
    /// JOIN_MCAST.
    JoinMcast(152) { response: u64, uid: u64, id: u32, addr_size: u16, join_flags: u16, addr: [u8; 128], }
    /// GET_EVENT.
    GetEvent(8) { response: u64, }
    /// Answer to GET_EVENT; `param` holds a `ConnParam` or a `UdParam`.
    EventAnswer(336) { uid: u64, id: u32, event: u32, status: u32, param: [u8; 304], reserved: u32, ece: Ece, }
    /// SET_OPTION.
    SetOption(24) { optval: u64, id: u32, level: u32, optname: u32, optlen: u32, }
    /// MIGRATE_ID: moves an identifier from the channel `fd` to this one.
    MigrateId(16) { response: u64, id: u32, fd: u32, }
}

/// Command numbers.
#[allow(missing_docs, reason = "named as in the kernel's header")]
pub mod cmd {
    pub const CREATE_ID: u32 = 0;
    pub const DESTROY_ID: u32 = 1;
    pub const BIND_IP: u32 = 2;
    pub const RESOLVE_IP: u32 = 3;
    pub const RESOLVE_ROUTE: u32 = 4;
    pub const QUERY_ROUTE: u32 = 5;
    pub const CONNECT: u32 = 6;
    pub const LISTEN: u32 = 7;
    pub const ACCEPT: u32 = 8;
    pub const REJECT: u32 = 9;
    pub const DISCONNECT: u32 = 10;
    pub const INIT_QP_ATTR: u32 = 11;
    pub const GET_EVENT: u32 = 12;
    pub const GET_OPTION: u32 = 13;
    pub const SET_OPTION: u32 = 14;
    pub const NOTIFY: u32 = 15;
    pub const JOIN_IP_MCAST: u32 = 16;
    pub const LEAVE_MCAST: u32 = 17;
    pub const MIGRATE_ID: u32 = 18;
    pub const QUERY: u32 = 19;
    pub const BIND: u32 = 20;
    pub const RESOLVE_ADDR: u32 = 21;
    pub const JOIN_MCAST: u32 = 22;
    /// Number of commands.
    pub const COUNT: u32 = 23;
}

/// Event types, `RDMA_CM_EVENT_*`.
#[allow(missing_docs, reason = "named as in the kernel's header")]
pub mod event {
    pub const ADDR_RESOLVED: u32 = 0;
    pub const ADDR_ERROR: u32 = 1;
    pub const ROUTE_RESOLVED: u32 = 2;
    pub const CONNECT_REQUEST: u32 = 4;
    pub const CONNECT_RESPONSE: u32 = 5;
    pub const UNREACHABLE: u32 = 7;
    pub const REJECTED: u32 = 8;
    pub const ESTABLISHED: u32 = 9;
    pub const DISCONNECTED: u32 = 10;
    pub const MULTICAST_JOIN: u32 = 12;
    pub const TIMEWAIT_EXIT: u32 = 15;
}

/// Port spaces (IBTA volume 1, annex A11).
#[allow(missing_docs, reason = "named as in the kernel's header")]
pub mod ps {
    pub const IPOIB: u16 = 0x0002;
    pub const TCP: u16 = 0x0106;
    pub const UDP: u16 = 0x0111;
    pub const IB: u16 = 0x013f;
}

/// Rejection reasons (IBTA volume 1, table 112).
pub mod reason {
    /// Timeout.
    pub const TIMEOUT: u8 = 4;
    /// Invalid service ID: no listener.
    pub const INVALID_SERVICE_ID: u8 = 8;
    /// Consumer reject: rejected by the program, or the program ended.
    pub const CONSUMER: u8 = 28;
    /// Vendor option not supported.
    pub const VENDOR_OPTION: u8 = 35;
}

/// Status of a SIDR_REP (IBTA volume 1, table 126; the kernel's `ib_cm_sidr_status`).
pub mod sidr {
    /// Valid.
    pub const VALID: u8 = 0;
    /// Service not supported: no listener.
    pub const UNSUPPORTED: u8 = 1;
    /// Rejected by the program, or the program ended.
    pub const REJECTED: u8 = 2;
}

/// Options of QUERY.
#[allow(missing_docs, reason = "named as in the kernel's header")]
pub mod query {
    pub const ADDR: u32 = 0;
    pub const PATH: u32 = 1;
    pub const GID: u32 = 2;
}

/// `IBV_QPT_RC`
pub const QPT_RC: u8 = 2;
/// `IBV_QPT_UC`
pub const QPT_UC: u8 = 3;
/// `IBV_QPT_UD`
pub const QPT_UD: u8 = 4;
/// `IBV_QPT_XRC_SEND`
pub const QPT_XRC_SEND: u8 = 9;
/// `IBV_QPT_XRC_RECV`
pub const QPT_XRC_RECV: u8 = 10;
/// Default Q_Key of datagram identifiers.
pub const UDP_QKEY: u32 = 0x0123_4567;
/// Multicast queue pair number.
pub const MULTICAST_QPN: u32 = 0xff_ffff;
/// `IBV_MTU_4096`
pub const MTU_4096: u8 = 5;
