//! Structures and numbers of the kernel's `rdma/rdma_user_cm.h`, version 4, and those it refers to.
//!
//! A command is a header, which says how many bytes follow and how many the answer may take, and a body. An
//! answer goes to the address in the body. All integers are in host order unless a field says otherwise.

/// What `/sys/class/misc/rdma_cm/abi_version` says.
pub const ABI_VERSION: u32 = 4;

/// Longest private data that a command carries.
pub const MAX_PRIVATE: usize = 256;

/// A type that any bytes are a value of, without padding that could be looked at.
///
/// # Safety
/// Every bit pattern is a value, and the type has no padding.
pub unsafe trait Plain: Copy {
    /// The value whose first bytes are `bytes`; what is missing is zero, what is too much is left out.
    fn from_prefix(bytes: &[u8]) -> Self {
        let mut value = std::mem::MaybeUninit::<Self>::zeroed();
        let len = bytes.len().min(size_of::<Self>());
        // SAFETY: `len` is inside both; all bit patterns are values.
        unsafe {
            value.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), len);
            value.assume_init()
        }
    }

    /// Its bytes.
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
            /// All zeroes.
            pub const ZERO: Self = {
                // SAFETY: all bit patterns are values.
                unsafe { std::mem::zeroed() }
            };
        }
    )*};
}

plain! {
    /// What every command starts with.
    Header(8) { cmd: u32, len_in: u16, len_out: u16, }
    /// Makes an identifier.
    CreateId(24) { uid: u64, response: u64, ps: u16, qp_type: u8, reserved: [u8; 5], }
    /// DESTROY_ID and LEAVE_MCAST.
    DestroyId(16) { response: u64, id: u32, reserved: u32, }
    /// Binds to an IP address.
    BindIp(40) { response: u64, addr: [u8; 28], id: u32, }
    /// Binds to any kind of address.
    Bind(136) { id: u32, addr_size: u16, reserved: u16, addr: [u8; 128], }
    /// Resolves an IP address.
    ResolveIp(64) { src: [u8; 28], dst: [u8; 28], id: u32, timeout_ms: u32, }
    /// Resolves any kind of address.
    ResolveAddr(272) { id: u32, timeout_ms: u32, src_size: u16, dst_size: u16, reserved: u32,
                       src: [u8; 128], dst: [u8; 128], }
    /// Resolves the route.
    ResolveRoute(8) { id: u32, timeout_ms: u32, }
    /// QUERY and QUERY_ROUTE.
    Query(16) { response: u64, id: u32, option: u32, }
    /// A path as the kernel gives it to programs. The identifiers are in network order.
    PathRecord(64) { dgid: [u8; 16], sgid: [u8; 16], dlid: u16, slid: u16, raw_traffic: u32, flow_label: u32,
                     reversible: u32, mtu: u32, pkey: u16, hop_limit: u8, traffic_class: u8, numb_path: u8, sl: u8,
                     mtu_selector: u8, rate_selector: u8, rate: u8, packet_life_time_selector: u8,
                     packet_life_time: u8, preference: u8, }
    /// Answer of QUERY_ROUTE.
    RouteAnswer(208) { node_guid: u64, paths: [PathRecord; 2], src: [u8; 28], dst: [u8; 28], num_paths: u32,
                       port_num: u8, reserved: [u8; 3], ibdev_index: u32, reserved1: u32, }
    /// Answer of QUERY for addresses and for GIDs.
    AddrAnswer(280) { node_guid: u64, port_num: u8, reserved: u8, pkey: u16, src_size: u16, dst_size: u16,
                      src: [u8; 128], dst: [u8; 128], ibdev_index: u32, reserved1: u32, }
    /// A path as it travels between subnet managers (IBTA volume 1, 15.2.5.16), in network order.
    WirePath(64) { service_id: u64, dgid: [u8; 16], sgid: [u8; 16], dlid: u16, slid: u16, flow_hop: u32,
                   tclass: u8, reversible_numpath: u8, pkey: u16, qosclass_sl: u16, mtu: u8, rate: u8,
                   life_time: u8, preference: u8, reserved: [u8; 6], }
    /// Answer of QUERY for paths.
    PathAnswer(80) { num_paths: u32, reserved: u32, flags: u32, reserved1: u32, path: WirePath, }
    /// Parameters of a connection.
    ConnParam(272) { qp_num: u32, qkey: u32, private_data: [u8; MAX_PRIVATE], private_data_len: u8, srq: u8,
                     responder_resources: u8, initiator_depth: u8, flow_control: u8, retry_count: u8,
                     rnr_retry_count: u8, valid: u8, }
    /// Where packets go.
    AhAttr(32) { dgid: [u8; 16], flow_label: u32, sgid_index: u8, hop_limit: u8, traffic_class: u8, reserved: u8,
                 dlid: u16, sl: u8, src_path_bits: u8, static_rate: u8, is_global: u8, port_num: u8,
                 reserved1: u8, }
    /// Parameters of a datagram service.
    UdParam(304) { qp_num: u32, qkey: u32, ah_attr: AhAttr, private_data: [u8; MAX_PRIVATE],
                   private_data_len: u8, reserved: [u8; 7], }
    /// Enhanced connection establishment.
    Ece(8) { vendor_id: u32, attr_mod: u32, }
    /// Connects.
    Connect(288) { conn_param: ConnParam, id: u32, reserved: u32, ece: Ece, }
    /// Listens.
    Listen(8) { id: u32, backlog: u32, }
    /// Accepts.
    Accept(296) { uid: u64, conn_param: ConnParam, id: u32, reserved: u32, ece: Ece, }
    /// Rejects.
    Reject(264) { id: u32, private_data_len: u8, reason: u8, reserved: [u8; 2], private_data: [u8; MAX_PRIVATE], }
    /// Disconnects.
    Disconnect(4) { id: u32, }
    /// Asks for the attributes of a queue pair in `qp_state`.
    InitQpAttr(16) { response: u64, id: u32, qp_state: u32, }
    /// Attributes of a queue pair.
    QpAttr(144) { mask: u32, qp_state: u32, cur_qp_state: u32, path_mtu: u32, path_mig_state: u32, qkey: u32,
                  rq_psn: u32, sq_psn: u32, dest_qp_num: u32, access: u32, ah: AhAttr, alt_ah: AhAttr,
                  cap: [u32; 5], pkey_index: u16, alt_pkey_index: u16, en_sqd_async_notify: u8, sq_draining: u8,
                  max_rd_atomic: u8, max_dest_rd_atomic: u8, min_rnr_timer: u8, port_num: u8, timeout: u8,
                  retry_cnt: u8, rnr_retry: u8, alt_port_num: u8, alt_timeout: u8, reserved: [u8; 5], }
    /// Tells of an event that the program saw.
    Notify(8) { id: u32, event: u32, }
    /// Joins a multicast group by IP address.
    JoinIpMcast(48) { response: u64, uid: u64, addr: [u8; 28], id: u32, }
    /// Joins a multicast group.
    JoinMcast(152) { response: u64, uid: u64, id: u32, addr_size: u16, join_flags: u16, addr: [u8; 128], }
    /// Asks for the next event.
    GetEvent(8) { response: u64, }
    /// An event, with parameters of a connection or, cut into the same place, of a datagram service.
    EventAnswer(336) { uid: u64, id: u32, event: u32, status: u32, param: [u8; 304], reserved: u32, ece: Ece, }
    /// Sets an option.
    SetOption(24) { optval: u64, id: u32, level: u32, optname: u32, optlen: u32, }
    /// Moves an identifier to the channel that is written to, from the channel `fd`.
    MigrateId(16) { response: u64, id: u32, fd: u32, }
}

/// Commands.
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
    /// One more than the last.
    pub const COUNT: u32 = 23;
}

/// Events, `RDMA_CM_EVENT_*`.
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

/// Reasons of a rejection (IBTA volume 1, table 112).
pub mod reason {
    /// The peer gave up waiting.
    pub const TIMEOUT: u8 = 4;
    /// Nobody listens there.
    pub const INVALID_SERVICE_ID: u8 = 8;
    /// The program said no, or ended.
    pub const CONSUMER: u8 = 28;
    /// The program does not take the vendor's options.
    pub const VENDOR_OPTION: u8 = 35;
}

/// What a service's answer says (IBTA volume 1, table 126).
pub mod sidr {
    /// Here it is.
    pub const VALID: u8 = 0;
    /// The program said no.
    pub const REJECTED: u8 = 1;
    /// No such service.
    pub const UNSUPPORTED: u8 = 2;
}

/// What QUERY asks for.
#[allow(missing_docs, reason = "named as in the kernel's header")]
pub mod query {
    pub const ADDR: u32 = 0;
    pub const PATH: u32 = 1;
    pub const GID: u32 = 2;
}

/// `IBV_QPT_RC`
pub const QPT_RC: u8 = 2;
/// `IBV_QPT_UD`
pub const QPT_UD: u8 = 4;
/// `IBV_QPT_XRC_SEND`
pub const QPT_XRC_SEND: u8 = 9;
/// `IBV_QPT_XRC_RECV`
pub const QPT_XRC_RECV: u8 = 10;
/// The key of datagram queue pairs that ask for no other.
pub const UDP_QKEY: u32 = 0x0123_4567;
/// The queue pair number that stands for a group.
pub const MULTICAST_QPN: u32 = 0xff_ffff;
/// `IBV_MTU_4096`
pub const MTU_4096: u8 = 5;
