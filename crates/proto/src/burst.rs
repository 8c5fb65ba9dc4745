//! Packets in one buffer in the layout of UDP segmentation offload: all of one length, the last one may be
//! shorter.

use millstream_wire::icrc::FlowCrc;
use millstream_wire::{ICRC_LEN, bth};

/// The IPv4 identification that the sender's kernel will set. The ICRC covers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IpIdentification {
    /// Zero in each packet: single datagrams from a socket that forbids fragmentation.
    Zero,
    /// Counted from 0 in each burst: segmentation offload.
    Counted,
}

/// Limits of one call of `poll_transmit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransmitLimits {
    /// Packets in the buffer.
    pub packets: u32,
    /// Bytes that congestion control allows in requests and READ responses. Acknowledgements and single-word
    /// responses do not count. A packet may exceed the rest of the budget.
    pub byte_budget: u64,
    /// IPv4 identification of the packets.
    pub identification: IpIdentification,
}

impl TransmitLimits {
    /// No limit except the buffer.
    pub const NONE: Self =
        Self { packets: u32::MAX, byte_budget: u64::MAX, identification: IpIdentification::Zero };
}

/// Packets to send in order: the first `len` bytes of the buffer, cut every `segment` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transmit {
    /// Bytes of all packets.
    pub len: usize,
    /// Bytes of each packet; the last packet may be shorter.
    pub segment: usize,
    /// Number of packets.
    pub packets: u32,
    /// Bytes that count against the byte budget.
    pub paced_bytes: u64,
}

/// A buffer being filled with packets.
pub(crate) struct Burst<'a> {
    out: &'a mut [u8],
    flow: FlowCrc,
    limits: TransmitLimits,
    filled: Transmit,
    /// The last packet was shorter than the others, so no packet may follow.
    closed: bool,
}

impl<'a> Burst<'a> {
    pub(crate) fn new(out: &'a mut [u8], flow: FlowCrc, limits: TransmitLimits) -> Self {
        let filled = Transmit { len: 0, segment: 0, packets: 0, paced_bytes: 0 };
        Self { out, flow, limits, filled, closed: false }
    }

    /// Whether a packet of `len` bytes may follow.
    #[inline]
    pub(crate) fn has_room(&self, len: usize) -> bool {
        let fits = self.filled.packets == 0 || (len <= self.filled.segment && !self.closed);
        fits && self.filled.packets < self.limits.packets && self.out.len() - self.filled.len >= len
    }

    /// Whether the byte budget allows another packet.
    #[inline]
    pub(crate) fn is_allowed(&self) -> bool {
        self.filled.paced_bytes < self.limits.byte_budget
    }

    /// Starts a packet of `len` bytes, for which there is [room](Self::has_room). [`commit`](Self::commit)
    /// completes it.
    #[inline]
    pub(crate) fn begin(&mut self, bth: &bth::Repr, len: usize) -> &mut [u8] {
        let at = self.filled.len;
        let packet = &mut self.out[at..at + len];
        bth.emit(&mut bth::Packet::new_unchecked(&mut *packet));
        packet
    }

    /// Completes the current packet with a length of `len` bytes and seals it with its ICRC.
    #[inline]
    pub(crate) fn commit(&mut self, len: usize, counts: bool) {
        let identification = match self.limits.identification {
            IpIdentification::Zero => 0,
            IpIdentification::Counted => self.filled.packets as u16,
        };
        let at = self.filled.len;
        let (covered, icrc) = self.out[at..at + len].split_at_mut(len - ICRC_LEN);
        icrc.copy_from_slice(&self.flow.icrc(covered, identification));
        if self.filled.packets == 0 {
            self.filled.segment = len;
        }
        self.closed = len < self.filled.segment;
        self.filled.len += len;
        self.filled.packets += 1;
        if counts {
            self.filled.paced_bytes += len as u64;
        }
    }

    /// The packets in the buffer, if there are any.
    pub(crate) fn finish(self) -> Option<Transmit> {
        (self.filled.packets > 0).then_some(self.filled)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.filled.packets == 0
    }
}
