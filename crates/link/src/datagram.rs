//! Outgoing and received packets.

use std::net::IpAddr;

use millstream_quantity::Qpn;
use millstream_wire::bth;
use millstream_wire::icrc::FlowCrc;

/// Packets to one destination in one buffer, each of [`segment`](Outgoing::segment) bytes; the last may be
/// shorter. A packet is a UDP payload: BTH, extended headers, payload, padding and four bytes for the ICRC,
/// which [`Port`](crate::Port) fills in.
#[derive(Debug)]
pub struct Outgoing<'a> {
    /// Local source address, of the same family as the destination.
    pub source: IpAddr,
    /// Destination address.
    pub destination: IpAddr,
    /// Interface index for link-local and multicast destinations; zero to use the routing table.
    pub interface: u32,
    /// IPv4 type of service or IPv6 traffic class; the two low bits are ECN (RFC 3168).
    pub tos: u8,
    /// Bytes of each packet but the last.
    pub segment: usize,
    /// The packets.
    pub bytes: &'a mut [u8],
}

impl Outgoing<'_> {
    /// Number of packets.
    #[must_use]
    pub fn count(&self) -> usize {
        self.bytes.len().div_ceil(self.segment.max(1))
    }
}

/// IP and UDP headers of a received datagram, as far as the socket reports them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketInfo {
    /// Source address.
    pub source: IpAddr,
    /// UDP source port.
    pub source_port: u16,
    /// Destination address.
    pub destination: IpAddr,
    /// Interface index; zero if unknown.
    pub interface: u32,
    /// IPv4 type of service or IPv6 traffic class.
    pub tos: u8,
}

/// ECN codepoint "congestion experienced" (RFC 3168).
pub(crate) const CONGESTION_EXPERIENCED: u8 = 0b11;

impl PacketInfo {
    /// Whether a switch marked the packet as congestion experienced (RFC 3168).
    #[must_use]
    pub fn congestion_experienced(&self) -> bool {
        self.tos & CONGESTION_EXPERIENCED == CONGESTION_EXPERIENCED
    }
}

/// Packets that one system call received in a coalesced datagram (GRO). They have one source and one size;
/// the last may be shorter.
#[derive(Clone, Copy, Debug)]
pub struct Received<'a> {
    /// IP and UDP headers of the datagram.
    pub info: PacketInfo,
    segment: usize,
    skip: u128,
    bytes: &'a [u8],
}

impl<'a> Received<'a> {
    /// The valid packets, each with its index in the datagram.
    pub fn packets(&self) -> impl Iterator<Item = (usize, &'a [u8])> + use<'a> {
        let skip = self.skip;
        let packets = self.bytes.chunks(self.segment.max(1)).enumerate();
        packets.filter(move |(i, _)| *i >= MAX_PACKETS || skip >> i & 1 == 0)
    }
}

/// Most packets of a datagram; kernels coalesce 64 or 128.
pub(crate) const MAX_PACKETS: usize = 128;

/// Buffer size of a datagram: coalesced datagrams do not exceed the largest IP packet.
pub(crate) const SLOT: usize = 1 << 16;

/// A received datagram in a slot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReceivedDatagram {
    pub(crate) info: PacketInfo,
    pub(crate) len: usize,
    pub(crate) segment: usize,
    /// One bit per packet that is not delivered.
    pub(crate) skip: u128,
}

/// Buffers for received datagrams, reused from call to call.
#[derive(Debug)]
pub struct RxBuffers {
    pub(crate) memory: Box<[u8]>,
    pub(crate) filled: Vec<ReceivedDatagram>,
    slots: usize,
    /// Number of datagrams that the next call requests.
    ask: usize,
    /// Headers of the last packet with its ICRC state, mostly that of the next packet as well.
    pub(crate) last: Option<(PacketInfo, FlowCrc)>,
}

impl RxBuffers {
    /// Buffers for `slots` datagrams per call.
    #[must_use]
    pub fn new(slots: usize) -> Self {
        let slots = slots.max(1);
        Self {
            memory: vec![0; slots * SLOT].into_boxed_slice(),
            filled: Vec::with_capacity(slots),
            slots,
            ask: 1,
            last: None,
        }
    }

    /// Number of empty slots.
    pub(crate) fn empty_slots(&self) -> usize {
        self.slots - self.filled.len()
    }

    /// Number of datagrams to request: the number that arrived last time, or more if all slots were filled.
    /// An extra slot would cost a failing receive in the kernel, as much as a small packet.
    pub(crate) fn next_batch(&self) -> usize {
        self.ask.min(self.empty_slots())
    }

    /// Records that `came` of `asked` datagrams arrived.
    pub(crate) fn record_received(&mut self, asked: usize, came: usize) {
        self.ask = if came == asked { (2 * asked).min(self.slots) } else { came }.max(1);
    }

    /// Copies a datagram into a slot; false if no slot is empty.
    pub(crate) fn push(&mut self, info: PacketInfo, segment: usize, bytes: &[u8]) -> bool {
        if self.empty_slots() == 0 || bytes.len() > SLOT {
            return false;
        }
        let start = self.filled.len() * SLOT;
        self.memory[start..start + bytes.len()].copy_from_slice(bytes);
        self.filled.push(ReceivedDatagram { info, len: bytes.len(), segment, skip: 0 });
        true
    }

    /// The datagrams of the last call.
    pub fn received(&self) -> impl ExactSizeIterator<Item = Received<'_>> {
        self.filled.iter().zip(self.memory.chunks(SLOT)).map(|(filled, memory)| Received {
            info: filled.info,
            segment: filled.segment,
            skip: filled.skip,
            bytes: &memory[..filled.len],
        })
    }

    /// Drops the packets for which `keep` is false.
    pub(crate) fn retain(&mut self, mut keep: impl FnMut(&PacketInfo, usize, &[u8]) -> bool) {
        for (filled, memory) in self.filled.iter_mut().zip(self.memory.chunks(SLOT)) {
            for (i, packet) in memory[..filled.len].chunks(filled.segment.max(1)).enumerate() {
                // No kernel coalesces that many; the rest of the datagram is dropped.
                if i >= MAX_PACKETS {
                    filled.len = i * filled.segment;
                    break;
                }
                if filled.skip >> i & 1 == 0 && !keep(&filled.info, i, packet) {
                    filled.skip |= 1 << i;
                }
            }
        }
    }
}

/// Destination queue pair number of a packet; `None` if it is shorter than a base transport header.
#[must_use]
pub fn destination_qpn(packet: &[u8]) -> Option<Qpn> {
    bth::Packet::new_checked(packet).ok().map(|header| header.dest_qp())
}
