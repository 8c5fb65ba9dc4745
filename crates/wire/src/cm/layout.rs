//! Where the fields of the messages are (12.6.5 to 12.6.14, 12.11). Fields that are not whole bytes are in bytes
//! named after their place; [`Message`](super::Message) takes them apart.

use millstream_quantity::{Pkey, Psn, Qkey, Qpn};

header! {
    /// Request for communication (12.6.5).
    mod req, "REQ", 140 bytes {
        /// The asker's name for the connection.
        local_id / set_local_id: u32 = 0,
        /// What is asked for.
        service_id / set_service_id: u64 = 8,
        /// The asker's adapter.
        ca_guid / set_ca_guid: u64 = 16,
        /// The asker's key for datagrams.
        qkey / set_qkey: Qkey = 28,
        /// The asker's queue pair.
        qpn / set_qpn: Qpn = 32,
        /// READs and atomic operations that the asker takes at a time.
        responder_resources / set_responder_resources: u8 = 35,
        /// READs and atomic operations that the asker wants to send at a time.
        initiator_depth / set_initiator_depth: u8 = 39,
        /// Remote CM response timeout (5 bits), transport service type (2), end-to-end flow control (1).
        byte_43 / set_byte_43: u8 = 43,
        /// What the asker sends first.
        psn / set_psn: Psn = 44,
        /// Local CM response timeout (5), retry count (3).
        byte_47 / set_byte_47: u8 = 47,
        /// The partition.
        pkey / set_pkey: Pkey = 48,
        /// Path MTU (4), RDC exists (1), RNR retry count (3).
        byte_50 / set_byte_50: u8 = 50,
        /// Max CM retries (4), SRQ (1), extended transport type (3).
        byte_51 / set_byte_51: u8 = 51,
        /// Path: the asker's LID.
        local_lid / set_local_lid: u16 = 52,
        /// Path: the other's LID.
        remote_lid / set_remote_lid: u16 = 54,
        /// Path: the asker's GID.
        local_gid / set_local_gid: u128 = 56,
        /// Path: the other's GID.
        remote_gid / set_remote_gid: u128 = 72,
        /// Path: flow label (20), reserved (6), packet rate (6).
        word_88 / set_word_88: u32 = 88,
        /// Path: traffic class.
        traffic_class / set_traffic_class: u8 = 92,
        /// Path: hop limit.
        hop_limit / set_hop_limit: u8 = 93,
        /// Path: service level (4), subnet local (1), reserved (3).
        byte_94 / set_byte_94: u8 = 94,
        /// Path: local ACK timeout (5), reserved (3).
        byte_95 / set_byte_95: u8 = 95,
    }
}

header! {
    /// Message receipt acknowledgement (12.6.6).
    mod mra, "MRA", 10 bytes {
        /// The sender's name for the connection.
        local_id / set_local_id: u32 = 0,
        /// The receiver's.
        remote_id / set_remote_id: u32 = 4,
        /// About which message (2), reserved (6).
        byte_8 / set_byte_8: u8 = 8,
        /// Service timeout (5), reserved (3).
        byte_9 / set_byte_9: u8 = 9,
    }
}

header! {
    /// Reject (12.6.7).
    mod rej, "REJ", 84 bytes {
        /// The sender's name for the connection.
        local_id / set_local_id: u32 = 0,
        /// The receiver's.
        remote_id / set_remote_id: u32 = 4,
        /// About which message (2), reserved (6).
        byte_8 / set_byte_8: u8 = 8,
        /// Length of the additional information (7), reserved (1).
        byte_9 / set_byte_9: u8 = 9,
        /// Why.
        reason / set_reason: u16 = 10,
        /// More about that.
        additional / set_additional: [u8; 72] = 12,
    }
}

header! {
    /// Reply to a request for communication (12.6.8).
    mod rep, "REP", 36 bytes {
        /// The sender's name for the connection.
        local_id / set_local_id: u32 = 0,
        /// The receiver's.
        remote_id / set_remote_id: u32 = 4,
        /// The sender's key for datagrams.
        qkey / set_qkey: Qkey = 8,
        /// The sender's queue pair.
        qpn / set_qpn: Qpn = 12,
        /// What the sender sends first.
        psn / set_psn: Psn = 20,
        /// READs and atomic operations that the sender takes at a time.
        responder_resources / set_responder_resources: u8 = 24,
        /// READs and atomic operations that the sender wants to send at a time.
        initiator_depth / set_initiator_depth: u8 = 25,
        /// Target ACK delay (5), failover accepted (2), end-to-end flow control (1).
        byte_26 / set_byte_26: u8 = 26,
        /// RNR retry count (3), SRQ (1), reserved (4).
        byte_27 / set_byte_27: u8 = 27,
        /// The sender's adapter.
        ca_guid / set_ca_guid: u64 = 28,
    }
}

header! {
    /// Ready to use (12.6.9), and the reply to a request for release (12.6.11): nothing but the names.
    mod pair, "RTU or DREP", 8 bytes {
        /// The sender's name for the connection.
        local_id / set_local_id: u32 = 0,
        /// The receiver's.
        remote_id / set_remote_id: u32 = 4,
    }
}

header! {
    /// Request for communication release (12.6.10).
    mod dreq, "DREQ", 12 bytes {
        /// The sender's name for the connection.
        local_id / set_local_id: u32 = 0,
        /// The receiver's.
        remote_id / set_remote_id: u32 = 4,
        /// The receiver's queue pair.
        remote_qpn / set_remote_qpn: Qpn = 8,
    }
}

header! {
    /// Service ID resolution request (12.11.1).
    mod sidr_req, "SIDR_REQ", 16 bytes {
        /// The asker's name for the request.
        request_id / set_request_id: u32 = 0,
        /// The partition.
        pkey / set_pkey: Pkey = 4,
        /// What is asked for.
        service_id / set_service_id: u64 = 8,
    }
}

header! {
    /// Service ID resolution response (12.11.2).
    mod sidr_rep, "SIDR_REP", 96 bytes {
        /// The asker's name for the request.
        request_id / set_request_id: u32 = 0,
        /// Zero if there is such a service.
        status / set_status: u8 = 4,
        /// Length of the additional information.
        additional_len / set_additional_len: u8 = 5,
        /// Its queue pair.
        qpn / set_qpn: Qpn = 8,
        /// What was asked for.
        service_id / set_service_id: u64 = 12,
        /// The key that its queue pair asks for.
        qkey / set_qkey: Qkey = 20,
        /// More about the status.
        additional / set_additional: [u8; 72] = 24,
    }
}

header! {
    /// What rdma_cm puts in front of the private data of a REQ or SIDR_REQ (annex A11, 11.4): IP addresses.
    ///
    /// ```text
    ///  0         1         2           4                20            36
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
        /// Source address; IPv4 in the last four bytes.
        source / set_source: u128 = 4,
        /// Destination address.
        destination / set_destination: u128 = 20,
    }
}
