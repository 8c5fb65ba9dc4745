//! Extended transport headers, which follow the base transport header (9.3), and the global route header.

use millstream_quantity::{Msn, Qkey, Qpn, Rkey, Srqn};

header! {
    /// XRC extended transport header (annex A14): the shared receive queue of a request.
    mod xrceth, "XRCETH", 4 bytes {
        /// The destination shared receive queue.
        srq / set_srq: Srqn = 1,
    }
}

header! {
    /// RDMA extended transport header (9.3.3): the remote memory of a WRITE or READ.
    ///
    /// ```text
    /// 0               8        12       16
    /// ├───────────────┼────────┼────────┤
    /// │ virtual addr. │ R_Key  │ length │
    /// ```
    mod reth, "RETH", 16 bytes {
        /// Virtual address.
        va / set_va: u64 = 0,
        /// Remote key.
        rkey / set_rkey: Rkey = 8,
        /// DMA length: bytes of the whole message.
        length / set_length: u32 = 12,
    }
}

header! {
    /// Acknowledge extended transport header (9.3.5).
    ///
    /// ```text
    /// 0          1        4
    /// ├──────────┼────────┤
    /// │ syndrome │  MSN   │
    /// ```
    mod aeth, "AETH", 4 bytes {
        /// ACK, RNR NAK or NAK, and its detail; see [`Syndrome`].
        syndrome / set_syndrome: u8 = 0,
        /// Message sequence number: messages completed so far.
        msn / set_msn: Msn = 1,
    }
}

/// An AETH syndrome (9.7.5.2.1, table 46).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Syndrome {
    /// ACK with a credit code: receive requests posted beyond the MSN.
    Ack {
        /// 5 bits; 31 means that credits are not counted.
        credit_code: u8,
    },
    /// RNR NAK: no receive request was posted.
    RnrNak {
        /// 5-bit timer code; see [`rnr_nanos`].
        timer_code: u8,
    },
    /// NAK.
    Nak(NakCode),
    /// A reserved value, which requesters ignore.
    Reserved(u8),
}

/// NAK codes (9.7.5.2.8, table 47).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NakCode {
    /// PSN sequence error: a packet before this one is missing.
    SequenceError,
    /// Invalid request.
    InvalidRequest,
    /// Remote access error: the R_Key does not permit the access.
    RemoteAccess,
    /// Remote operational error.
    RemoteOperational,
}

impl Syndrome {
    /// An ACK without end-to-end flow control.
    pub const ACK_UNLIMITED: Self = Self::Ack { credit_code: 31 };

    /// Decodes the syndrome byte.
    #[inline]
    #[must_use]
    pub const fn from_byte(byte: u8) -> Self {
        match byte >> 5 {
            0b000 => Self::Ack { credit_code: byte & 31 },
            0b001 => Self::RnrNak { timer_code: byte & 31 },
            0b011 => match byte & 31 {
                0 => Self::Nak(NakCode::SequenceError),
                1 => Self::Nak(NakCode::InvalidRequest),
                2 => Self::Nak(NakCode::RemoteAccess),
                3 => Self::Nak(NakCode::RemoteOperational),
                _ => Self::Reserved(byte),
            },
            _ => Self::Reserved(byte),
        }
    }

    /// Encodes the syndrome byte.
    #[inline]
    #[must_use]
    pub const fn to_byte(self) -> u8 {
        match self {
            Self::Ack { credit_code } => credit_code & 31,
            Self::RnrNak { timer_code } => 0x20 | (timer_code & 31),
            Self::Nak(NakCode::SequenceError) => 0x60,
            Self::Nak(NakCode::InvalidRequest) => 0x61,
            Self::Nak(NakCode::RemoteAccess) => 0x62,
            Self::Nak(NakCode::RemoteOperational) => 0x63,
            Self::Reserved(byte) => byte,
        }
    }
}

/// Receive requests that a credit code stands for (table 48); `None` if credits are not counted.
#[inline]
#[must_use]
pub const fn credits(code: u8) -> Option<u32> {
    match code & 31 {
        31 => None,
        0 => Some(0),
        1 => Some(1),
        code if code.is_multiple_of(2) => Some(1 << (code / 2)),
        code => Some(3 << (code / 2 - 1)),
    }
}

/// Nanoseconds of an RNR NAK timer code (table 45).
#[inline]
#[must_use]
pub const fn rnr_nanos(code: u8) -> u64 {
    match code & 31 {
        0 => 655_360_000,
        1 => 10_000,
        2 => 20_000,
        3 => 30_000,
        4 => 40_000,
        // The table continues in steps of half a power of two, in units of 10 µs.
        code if code.is_multiple_of(2) => 10_000 << (code / 2),
        code => 15_000 << (code / 2),
    }
}

header! {
    /// Atomic extended transport header (9.3.4.1).
    ///
    /// ```text
    ///  0               8        12              20              28
    /// ├───────────────┼────────┼───────────────┼───────────────┤
    /// │ virtual addr. │ R_Key  │ swap (or add) │ compare       │
    /// ```
    mod atomic_eth, "AtomicETH", 28 bytes {
        /// Virtual address of the remote word; a multiple of 8.
        va / set_va: u64 = 0,
        /// Remote key.
        rkey / set_rkey: Rkey = 8,
        /// Swap data of CmpSwap, or add data of FetchAdd.
        swap_or_add / set_swap_or_add: u64 = 12,
        /// Compare data of CmpSwap.
        compare / set_compare: u64 = 20,
    }
}

header! {
    /// Atomic acknowledge extended transport header (9.3.5.3).
    mod atomic_ack_eth, "AtomicAckETH", 8 bytes {
        /// The original value of the remote word.
        original / set_original: u64 = 0,
    }
}

header! {
    /// Immediate data (9.3.6): four bytes for the receiver's completion.
    mod imm_dt, "ImmDt", 4 bytes {
        /// The bytes in network order.
        data / set_data: [u8; 4] = 0,
    }
}

header! {
    /// Invalidate extended transport header (9.3.7).
    mod ieth, "IETH", 4 bytes {
        /// The R_Key to invalidate.
        rkey / set_rkey: Rkey = 0,
    }
}

header! {
    /// Datagram extended transport header (9.3.2).
    ///
    /// ```text
    ///  0        4   5        8
    /// ├────────┼───┼────────┤
    /// │ Q_Key  │ 0 │ src QP │
    /// ```
    mod deth, "DETH", 8 bytes {
        /// Q_Key of the destination.
        qkey / set_qkey: Qkey = 0,
        /// Source queue pair.
        src_qp / set_src_qp: Qpn = 5,
    }
}

header! {
    /// Global route header (8.3), laid out like an IPv6 header. RoCEv2 packets have an IP header instead.
    /// Datagram receivers find this header, or an IPv4 header in its last 20 bytes, in front of the payload
    /// (annex A17, 17.4.5.1).
    ///
    /// ```text
    /// 0                4          6         7      8           24          40
    /// ├────────────────┼──────────┼─────────┼──────┼───────────┼───────────┤
    /// │ver, class, flow│ pay. len │ nxt hdr │ hops │ source    │destination│
    /// ```
    mod grh, "GRH", 40 bytes {
        /// IP version 6 (4 bits), traffic class (8), flow label (20).
        version_class_flow / set_version_class_flow: u32 = 0,
        /// Payload length: bytes that follow the header.
        payload_len / set_payload_len: u16 = 4,
        /// Next header: 27 on InfiniBand, 17 (UDP) on RoCEv2.
        next_header / set_next_header: u8 = 6,
        /// Hop limit.
        hop_limit / set_hop_limit: u8 = 7,
        /// Source GID.
        source / set_source: u128 = 8,
        /// Destination GID.
        destination / set_destination: u128 = 24,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn syndromes_round_trip() {
        for byte in 0..=255 {
            assert_eq!(Syndrome::from_byte(byte).to_byte(), byte);
        }
    }

    #[test]
    fn credit_codes_match_table_48() {
        let table =
            [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048];
        for (code, credits) in table.into_iter().enumerate() {
            assert_eq!(super::credits(code as u8), Some(credits), "code {code}");
        }
        assert_eq!(super::credits(30), Some(32768));
        assert_eq!(super::credits(31), None);
    }

    #[test]
    fn rnr_timers_match_table_45() {
        let hundredths_of_ms = [
            65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536,
            2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
        ];
        for (code, time) in hundredths_of_ms.into_iter().enumerate() {
            assert_eq!(rnr_nanos(code as u8), time * 10_000, "code {code}");
        }
    }
}
