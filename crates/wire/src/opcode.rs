//! Opcodes and the headers that follow the base transport header of each (9.2, table 38).

use core::fmt;

use crate::{aeth, atomic_ack_eth, atomic_eth, deth, ieth, imm_dt, reth, xrceth};

/// A transport service: the high three bits of an opcode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Unreliable datagram.
    Ud,
    /// Extended reliable connection (annex A14).
    Xrc,
    /// Congestion notification (annex A17, 17.9).
    Cnp,
}

/// The operation of a packet, independent of transport service and position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// SEND.
    Send,
    /// RDMA WRITE.
    Write,
    /// RDMA READ request.
    ReadRequest,
    /// RDMA READ response.
    ReadResponse,
    /// Acknowledge: ACK, NAK or RNR NAK.
    Acknowledge,
    /// Selective acknowledgement: an extension between soft devices, not of IBTA.
    SelectiveAcknowledge,
    /// Atomic acknowledge.
    AtomicAcknowledge,
    /// Atomic compare and swap.
    CompareSwap,
    /// Atomic fetch and add.
    FetchAdd,
    /// Atomic WRITE of eight bytes (annex A19).
    AtomicWrite,
    /// Congestion notification packet.
    Congestion,
}

/// The position of a packet in its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Position {
    /// First of several packets.
    First,
    /// Neither first nor last.
    Middle,
    /// Last of several packets.
    Last,
    /// The only packet of its message.
    Only,
}

impl Position {
    /// Whether the packet begins a message.
    #[inline]
    #[must_use]
    pub const fn begins(self) -> bool {
        matches!(self, Self::First | Self::Only)
    }

    /// Whether the packet ends a message.
    #[inline]
    #[must_use]
    pub const fn ends(self) -> bool {
        matches!(self, Self::Last | Self::Only)
    }
}

/// A set of extended headers, which follow each other in the order of the constants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Headers(u16);

impl Headers {
    /// No extended header.
    pub const NONE: Self = Self(0);
    /// XRC extended transport header.
    pub const XRCETH: Self = Self(1);
    /// Datagram extended transport header.
    pub const DETH: Self = Self(2);
    /// RDMA extended transport header.
    pub const RETH: Self = Self(4);
    /// Atomic extended transport header.
    pub const ATOMIC_ETH: Self = Self(8);
    /// Acknowledge extended transport header.
    pub const AETH: Self = Self(16);
    /// Atomic acknowledge extended transport header.
    pub const ATOMIC_ACK_ETH: Self = Self(32);
    /// Immediate data.
    pub const IMM_DT: Self = Self(64);
    /// Invalidate extended transport header.
    pub const IETH: Self = Self(128);

    /// Each header with its length in bytes.
    const LENGTHS: [(Self, usize); 8] = [
        (Self::XRCETH, xrceth::LEN),
        (Self::DETH, deth::LEN),
        (Self::RETH, reth::LEN),
        (Self::ATOMIC_ETH, atomic_eth::LEN),
        (Self::AETH, aeth::LEN),
        (Self::ATOMIC_ACK_ETH, atomic_ack_eth::LEN),
        (Self::IMM_DT, imm_dt::LEN),
        (Self::IETH, ieth::LEN),
    ];

    /// Whether the set contains all of `other`.
    #[inline]
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// The union of two sets.
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Bytes of the headers in front of `other`.
    const fn len_before(self, other: Self) -> usize {
        let (mut sum, mut i) = (0, 0);
        while i < Self::LENGTHS.len() {
            let (header, len) = Self::LENGTHS[i];
            if header.0 < other.0 && self.contains(header) {
                sum += len;
            }
            i += 1;
        }
        sum
    }

    /// Bytes of all headers in the set.
    const fn len(self) -> usize {
        self.len_before(Self(256))
    }

    /// Offset of `header` behind the base transport header, if the set contains it.
    #[inline]
    #[must_use]
    pub const fn offset_of(self, header: Self) -> Option<usize> {
        if self.contains(header) { Some(self.len_before(header)) } else { None }
    }
}

/// One row of the opcode table.
#[derive(Clone, Copy, Debug)]
struct Entry {
    name: &'static str,
    service: Service,
    operation: Operation,
    position: Position,
    headers: Headers,
    headers_len: usize,
    payload: bool,
}

/// A supported opcode: transport service and operation.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Opcode(u8);

macro_rules! opcodes {
    ($($value:literal $name:ident: $service:ident $operation:ident $position:ident [$($header:ident)*] $payload:literal;)*) => {
        static TABLE: [Option<Entry>; 256] = {
            let mut table = [None; 256];
            $({
                let headers = Headers::NONE$(.union(Headers::$header))*;
                table[$value] = Some(Entry {
                    name: stringify!($name),
                    service: Service::$service,
                    operation: Operation::$operation,
                    position: Position::$position,
                    headers,
                    headers_len: headers.len(),
                    payload: $payload,
                });
            })*
            table
        };

        #[allow(missing_docs)]
        impl Opcode {
            $(pub const $name: Self = Self($value);)*

            /// All opcodes.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];
        }
    };
}

// 0xc0 to 0xff are the manufacturers'. Opcode, name, service, operation, position, extended headers, whether payload may follow.
opcodes! {
    0x00 RC_SEND_FIRST:             Rc Send First [] true;
    0x01 RC_SEND_MIDDLE:            Rc Send Middle [] true;
    0x02 RC_SEND_LAST:              Rc Send Last [] true;
    0x03 RC_SEND_LAST_IMM:          Rc Send Last [IMM_DT] true;
    0x04 RC_SEND_ONLY:              Rc Send Only [] true;
    0x05 RC_SEND_ONLY_IMM:          Rc Send Only [IMM_DT] true;
    0x06 RC_WRITE_FIRST:            Rc Write First [RETH] true;
    0x07 RC_WRITE_MIDDLE:           Rc Write Middle [] true;
    0x08 RC_WRITE_LAST:             Rc Write Last [] true;
    0x09 RC_WRITE_LAST_IMM:         Rc Write Last [IMM_DT] true;
    0x0a RC_WRITE_ONLY:             Rc Write Only [RETH] true;
    0x0b RC_WRITE_ONLY_IMM:         Rc Write Only [RETH IMM_DT] true;
    0x0c RC_READ_REQUEST:           Rc ReadRequest Only [RETH] false;
    0x0d RC_READ_RESPONSE_FIRST:    Rc ReadResponse First [AETH] true;
    0x0e RC_READ_RESPONSE_MIDDLE:   Rc ReadResponse Middle [] true;
    0x0f RC_READ_RESPONSE_LAST:     Rc ReadResponse Last [AETH] true;
    0x10 RC_READ_RESPONSE_ONLY:     Rc ReadResponse Only [AETH] true;
    0x11 RC_ACKNOWLEDGE:            Rc Acknowledge Only [AETH] false;
    0x12 RC_ATOMIC_ACKNOWLEDGE:     Rc AtomicAcknowledge Only [AETH ATOMIC_ACK_ETH] false;
    0x13 RC_COMPARE_SWAP:           Rc CompareSwap Only [ATOMIC_ETH] false;
    0x14 RC_FETCH_ADD:              Rc FetchAdd Only [ATOMIC_ETH] false;
    0x16 RC_SEND_LAST_INV:          Rc Send Last [IETH] true;
    0x17 RC_SEND_ONLY_INV:          Rc Send Only [IETH] true;
    0x1d RC_ATOMIC_WRITE:           Rc AtomicWrite Only [RETH] true;
    0x20 UC_SEND_FIRST:             Uc Send First [] true;
    0x21 UC_SEND_MIDDLE:            Uc Send Middle [] true;
    0x22 UC_SEND_LAST:              Uc Send Last [] true;
    0x23 UC_SEND_LAST_IMM:          Uc Send Last [IMM_DT] true;
    0x24 UC_SEND_ONLY:              Uc Send Only [] true;
    0x25 UC_SEND_ONLY_IMM:          Uc Send Only [IMM_DT] true;
    0x26 UC_WRITE_FIRST:            Uc Write First [RETH] true;
    0x27 UC_WRITE_MIDDLE:           Uc Write Middle [] true;
    0x28 UC_WRITE_LAST:             Uc Write Last [] true;
    0x29 UC_WRITE_LAST_IMM:         Uc Write Last [IMM_DT] true;
    0x2a UC_WRITE_ONLY:             Uc Write Only [RETH] true;
    0x2b UC_WRITE_ONLY_IMM:         Uc Write Only [RETH IMM_DT] true;
    0x64 UD_SEND_ONLY:              Ud Send Only [DETH] true;
    0x65 UD_SEND_ONLY_IMM:          Ud Send Only [DETH IMM_DT] true;
    0x81 CNP:                       Cnp Congestion Only [] true;
    0xa0 XRC_SEND_FIRST:             Xrc Send First [XRCETH] true;
    0xa1 XRC_SEND_MIDDLE:            Xrc Send Middle [XRCETH] true;
    0xa2 XRC_SEND_LAST:              Xrc Send Last [XRCETH] true;
    0xa3 XRC_SEND_LAST_IMM:          Xrc Send Last [XRCETH IMM_DT] true;
    0xa4 XRC_SEND_ONLY:              Xrc Send Only [XRCETH] true;
    0xa5 XRC_SEND_ONLY_IMM:          Xrc Send Only [XRCETH IMM_DT] true;
    0xa6 XRC_WRITE_FIRST:            Xrc Write First [XRCETH RETH] true;
    0xa7 XRC_WRITE_MIDDLE:           Xrc Write Middle [XRCETH] true;
    0xa8 XRC_WRITE_LAST:             Xrc Write Last [XRCETH] true;
    0xa9 XRC_WRITE_LAST_IMM:         Xrc Write Last [XRCETH IMM_DT] true;
    0xaa XRC_WRITE_ONLY:             Xrc Write Only [XRCETH RETH] true;
    0xab XRC_WRITE_ONLY_IMM:         Xrc Write Only [XRCETH RETH IMM_DT] true;
    0xac XRC_READ_REQUEST:           Xrc ReadRequest Only [XRCETH RETH] false;
    0xad XRC_READ_RESPONSE_FIRST:    Xrc ReadResponse First [AETH] true;
    0xae XRC_READ_RESPONSE_MIDDLE:   Xrc ReadResponse Middle [] true;
    0xaf XRC_READ_RESPONSE_LAST:     Xrc ReadResponse Last [AETH] true;
    0xb0 XRC_READ_RESPONSE_ONLY:     Xrc ReadResponse Only [AETH] true;
    0xb1 XRC_ACKNOWLEDGE:            Xrc Acknowledge Only [AETH] false;
    0xb2 XRC_ATOMIC_ACKNOWLEDGE:     Xrc AtomicAcknowledge Only [AETH ATOMIC_ACK_ETH] false;
    0xb3 XRC_COMPARE_SWAP:           Xrc CompareSwap Only [XRCETH ATOMIC_ETH] false;
    0xb4 XRC_FETCH_ADD:              Xrc FetchAdd Only [XRCETH ATOMIC_ETH] false;
    0xb6 XRC_SEND_LAST_INV:          Xrc Send Last [XRCETH IETH] true;
    0xb7 XRC_SEND_ONLY_INV:          Xrc Send Only [XRCETH IETH] true;
    0xbd XRC_ATOMIC_WRITE:           Xrc AtomicWrite Only [XRCETH RETH] true;
    0xd1 RC_SELECTIVE_ACKNOWLEDGE:   Rc SelectiveAcknowledge Only [AETH] true;
    0xf1 XRC_SELECTIVE_ACKNOWLEDGE:  Xrc SelectiveAcknowledge Only [AETH] true;
}

impl Opcode {
    /// The opcode of a byte, if it is supported.
    #[inline]
    #[must_use]
    pub const fn from_byte(byte: u8) -> Option<Self> {
        if TABLE[byte as usize].is_some() { Some(Self(byte)) } else { None }
    }

    /// The byte of the opcode.
    #[inline]
    #[must_use]
    pub const fn to_byte(self) -> u8 {
        self.0
    }

    /// The same operation over another connected service. Connected services share the low five bits, and among the
    /// manufacturer's opcodes, too.
    #[inline]
    #[must_use]
    pub const fn with_service(self, service: Service) -> Option<Self> {
        let high = match service {
            Service::Rc if self.0 >= 0xc0 => 0xc0,
            Service::Xrc if self.0 >= 0xc0 => 0xe0,
            _ if self.0 >= 0xc0 => return None,
            Service::Rc => 0x00,
            Service::Uc => 0x20,
            Service::Ud => 0x60,
            Service::Cnp => 0x80,
            Service::Xrc => 0xa0,
        };
        Self::from_byte(high | (self.0 & 0x1f))
    }

    #[inline]
    const fn entry(self) -> &'static Entry {
        TABLE[self.0 as usize].as_ref().expect("an Opcode is only made of what the table has")
    }

    /// The transport service.
    #[inline]
    #[must_use]
    pub const fn service(self) -> Service {
        self.entry().service
    }

    /// The operation.
    #[inline]
    #[must_use]
    pub const fn operation(self) -> Operation {
        self.entry().operation
    }

    /// The position of the packet in its message.
    #[inline]
    #[must_use]
    pub const fn position(self) -> Position {
        self.entry().position
    }

    /// The extended headers.
    #[inline]
    #[must_use]
    pub const fn headers(self) -> Headers {
        self.entry().headers
    }

    /// Length of the extended headers in bytes.
    #[inline]
    #[must_use]
    pub const fn headers_len(self) -> usize {
        self.entry().headers_len
    }

    /// Whether payload may follow.
    #[inline]
    #[must_use]
    pub const fn has_payload(self) -> bool {
        self.entry().payload
    }

    /// Whether the packet goes from responder to requester.
    #[inline]
    #[must_use]
    pub const fn is_response(self) -> bool {
        matches!(
            self.operation(),
            Operation::ReadResponse
                | Operation::Acknowledge
                | Operation::SelectiveAcknowledge
                | Operation::AtomicAcknowledge
        )
    }
}

impl fmt::Debug for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.entry().name)
    }
}
