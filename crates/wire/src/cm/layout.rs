//! Layouts of the messages (12.6.5 to 12.6.14, 12.11). Bytes with several fields are named after their
//! offset; [`Message`](super::Message) splits them.

use millstream_quantity::{Pkey, Psn, Qkey, Qpn};

header! {
    /// Request for communication (12.6.5).
    mod req, "REQ", 140 bytes {
        /// Local communication ID.
        local_id / set_local_id: u32 = 0,
        /// Service ID.
        service_id / set_service_id: u64 = 8,
        /// Local CA GUID.
        ca_guid / set_ca_guid: u64 = 16,
        /// Local Q_Key.
        qkey / set_qkey: Qkey = 28,
        /// Local queue pair number.
        qpn / set_qpn: Qpn = 32,
        /// Inbound READs and atomic operations that the sender accepts at a time.
        responder_resources / set_responder_resources: u8 = 35,
        /// Outbound READs and atomic operations that the sender issues at a time.
        initiator_depth / set_initiator_depth: u8 = 39,
        /// Remote CM response timeout (5 bits), transport service type (2), end-to-end flow control (1).
        byte_43 / set_byte_43: u8 = 43,
        /// Starting PSN.
        psn / set_psn: Psn = 44,
        /// Local CM response timeout (5), retry count (3).
        byte_47 / set_byte_47: u8 = 47,
        /// Partition key.
        pkey / set_pkey: Pkey = 48,
        /// Path MTU (4), RDC exists (1), RNR retry count (3).
        byte_50 / set_byte_50: u8 = 50,
        /// Max CM retries (4), SRQ (1), extended transport type (3).
        byte_51 / set_byte_51: u8 = 51,
        /// Primary path: local LID.
        local_lid / set_local_lid: u16 = 52,
        /// Primary path: remote LID.
        remote_lid / set_remote_lid: u16 = 54,
        /// Primary path: local GID.
        local_gid / set_local_gid: u128 = 56,
        /// Primary path: remote GID.
        remote_gid / set_remote_gid: u128 = 72,
        /// Primary path: flow label (20), reserved (6), packet rate (6).
        word_88 / set_word_88: u32 = 88,
        /// Primary path: traffic class.
        traffic_class / set_traffic_class: u8 = 92,
        /// Primary path: hop limit.
        hop_limit / set_hop_limit: u8 = 93,
        /// Primary path: service level (4), subnet local (1), reserved (3).
        byte_94 / set_byte_94: u8 = 94,
        /// Primary path: local ACK timeout (5), reserved (3).
        byte_95 / set_byte_95: u8 = 95,
    }
}

header! {
    /// Message receipt acknowledgement (12.6.6).
    mod mra, "MRA", 10 bytes {
        /// Local communication ID.
        local_id / set_local_id: u32 = 0,
        /// Remote communication ID.
        remote_id / set_remote_id: u32 = 4,
        /// Message type (2), reserved (6).
        byte_8 / set_byte_8: u8 = 8,
        /// Service timeout (5), reserved (3).
        byte_9 / set_byte_9: u8 = 9,
    }
}

header! {
    /// Reject (12.6.7).
    mod rej, "REJ", 84 bytes {
        /// Local communication ID.
        local_id / set_local_id: u32 = 0,
        /// Remote communication ID.
        remote_id / set_remote_id: u32 = 4,
        /// Message type (2), reserved (6).
        byte_8 / set_byte_8: u8 = 8,
        /// Length of the additional rejection information (7), reserved (1).
        byte_9 / set_byte_9: u8 = 9,
        /// Rejection reason.
        reason / set_reason: u16 = 10,
        /// Additional rejection information.
        additional / set_additional: [u8; 72] = 12,
    }
}

header! {
    /// Reply to a request for communication (12.6.8).
    mod rep, "REP", 36 bytes {
        /// Local communication ID.
        local_id / set_local_id: u32 = 0,
        /// Remote communication ID.
        remote_id / set_remote_id: u32 = 4,
        /// Local Q_Key.
        qkey / set_qkey: Qkey = 8,
        /// Local queue pair number.
        qpn / set_qpn: Qpn = 12,
        /// Local EE context number: the queue pair number of an XRC target.
        eecn / set_eecn: Qpn = 16,
        /// Starting PSN.
        psn / set_psn: Psn = 20,
        /// Inbound READs and atomic operations that the sender accepts at a time.
        responder_resources / set_responder_resources: u8 = 24,
        /// Outbound READs and atomic operations that the sender issues at a time.
        initiator_depth / set_initiator_depth: u8 = 25,
        /// Target ACK delay (5), failover accepted (2), end-to-end flow control (1).
        byte_26 / set_byte_26: u8 = 26,
        /// RNR retry count (3), SRQ (1), reserved (4).
        byte_27 / set_byte_27: u8 = 27,
        /// Local CA GUID.
        ca_guid / set_ca_guid: u64 = 28,
    }
}

header! {
    /// Ready to use (12.6.9) and reply to a release request (12.6.11): communication IDs only.
    mod comm_ids, "RTU or DREP", 8 bytes {
        /// Local communication ID.
        local_id / set_local_id: u32 = 0,
        /// Remote communication ID.
        remote_id / set_remote_id: u32 = 4,
    }
}

header! {
    /// Request for communication release (12.6.10).
    mod dreq, "DREQ", 12 bytes {
        /// Local communication ID.
        local_id / set_local_id: u32 = 0,
        /// Remote communication ID.
        remote_id / set_remote_id: u32 = 4,
        /// Remote queue pair number.
        remote_qpn / set_remote_qpn: Qpn = 8,
    }
}

header! {
    /// Service ID resolution request (12.11.1).
    mod sidr_req, "SIDR_REQ", 16 bytes {
        /// Request ID.
        request_id / set_request_id: u32 = 0,
        /// Partition key.
        pkey / set_pkey: Pkey = 4,
        /// Service ID.
        service_id / set_service_id: u64 = 8,
    }
}

header! {
    /// Service ID resolution response (12.11.2).
    mod sidr_rep, "SIDR_REP", 96 bytes {
        /// Request ID.
        request_id / set_request_id: u32 = 0,
        /// Status; zero if the service exists.
        status / set_status: u8 = 4,
        /// Length of the additional rejection information.
        additional_len / set_additional_len: u8 = 5,
        /// Queue pair of the service.
        qpn / set_qpn: Qpn = 8,
        /// Service ID of the request.
        service_id / set_service_id: u64 = 12,
        /// Q_Key of the service.
        qkey / set_qkey: Qkey = 20,
        /// Additional information.
        additional / set_additional: [u8; 72] = 24,
    }
}

header! {
    /// The header that rdma_cm puts in front of the private data of a REQ or SIDR_REQ (annex A11, 11.4).
    ///
    /// ```text
    /// 0         1         2           4                20            36
    /// ├─────────┼─────────┼───────────┼────────────────┼─────────────┤
    /// │ version │IP ver. 0│source port│ source address │ destination │
    /// ```
    mod addresses, "IP CM header", 36 bytes {
        /// Major (4) and minor (4) version of this header: 0.0.
        version / set_version: u8 = 0,
        /// IP version (4), reserved (4).
        byte_1 / set_byte_1: u8 = 1,
        /// Source port.
        port / set_port: u16 = 2,
        /// Source address; IPv4 addresses in the last four bytes.
        source / set_source: u128 = 4,
        /// Destination address.
        destination / set_destination: u128 = 20,
    }
}
