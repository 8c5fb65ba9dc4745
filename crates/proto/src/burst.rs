//! Packets side by side in one buffer, as segmentation offload takes them: all of one length, but the last one may
//! be shorter.

use millstream_wire::icrc::Prepared;
use millstream_wire::{ICRC_LEN, bth};

/// What the sender's IP identification will be. The ICRC covers it over IPv4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Identification {
    /// Zero in each packet: datagrams that are sent one by one through a socket that forbids fragmentation.
    Zero,
    /// Counted from 0 in each burst: what the kernel does when it cuts a long datagram into segments.
    Counted,
}

/// How much one call of `poll_transmit` may send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Packets in the buffer.
    pub packets: u32,
    /// Bytes of packets with requests or a READ's data: what congestion control allows. Acknowledgements and answers of
    /// one word do not count. One more packet is sent while there is any left.
    pub allowance: u64,
    /// See there.
    pub identification: Identification,
}

impl Limits {
    /// As many as fit into the buffer.
    pub const NONE: Self =
        Self { packets: u32::MAX, allowance: u64::MAX, identification: Identification::Zero };
}

/// Packets to be sent now, in order: the first `len` bytes of the buffer, cut every `segment` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transmit {
    /// Bytes of all packets.
    pub len: usize,
    /// Bytes of each packet; the last one may be shorter.
    pub segment: usize,
    /// How many.
    pub packets: u32,
    /// Bytes of those that count against the allowance.
    pub paced_bytes: u64,
}

/// A buffer that is being filled.
pub(crate) struct Burst<'a> {
    out: &'a mut [u8],
    flow: Prepared,
    limits: Limits,
    filled: Transmit,
    /// A shorter packet was the last one.
    closed: bool,
}

impl<'a> Burst<'a> {
    pub(crate) fn new(out: &'a mut [u8], flow: Prepared, limits: Limits) -> Self {
        let filled = Transmit { len: 0, segment: 0, packets: 0, paced_bytes: 0 };
        Self { out, flow, limits, filled, closed: false }
    }

    /// Whether a packet of that many bytes may follow.
    #[inline]
    pub(crate) fn has_room(&self, len: usize) -> bool {
        let fits = self.filled.packets == 0 || (len <= self.filled.segment && !self.closed);
        fits && self.filled.packets < self.limits.packets && self.out.len() - self.filled.len >= len
    }

    /// Whether congestion control allows one more packet that counts.
    #[inline]
    pub(crate) fn is_allowed(&self) -> bool {
        self.filled.paced_bytes < self.limits.allowance
    }

    /// Begins a packet of `len` bytes, for which there is [room](Self::has_room); it counts once it is
    /// [committed](Self::commit).
    #[inline]
    pub(crate) fn begin(&mut self, bth: &bth::Repr, len: usize) -> &mut [u8] {
        let at = self.filled.len;
        let packet = &mut self.out[at..at + len];
        bth.emit(&mut bth::Packet::new_unchecked(&mut *packet));
        packet
    }

    /// Completes the packet that was begun with `len` bytes.
    #[inline]
    pub(crate) fn commit(&mut self, len: usize, counts: bool) {
        let identification = match self.limits.identification {
            Identification::Zero => 0,
            Identification::Counted => self.filled.packets as u16,
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

    /// What was filled, if anything.
    pub(crate) fn finish(self) -> Option<Transmit> {
        (self.filled.packets > 0).then_some(self.filled)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.filled.packets == 0
    }
}
