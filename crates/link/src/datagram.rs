//! Packets on their way out and in.

use std::net::IpAddr;

use millstream_wire::bth;
use millstream_wire::icrc::FlowCrc;

/// Packets to one destination, in one buffer: each of [`segment`](Outgoing::segment) bytes, the last perhaps
/// shorter. A packet is what follows the UDP header: BTH, extended headers, payload, padding and four bytes
/// for the ICRC, which [`Port`](crate::Port) fills in.
#[derive(Debug)]
pub struct Outgoing<'a> {
    /// Which of this host's addresses sends; of the same family as the destination.
    pub source: IpAddr,
    /// Who is to get them.
    pub destination: IpAddr,
    /// Interface for link-local and multicast destinations; zero where the routes decide.
    pub interface: u32,
    /// IPv4 type of service or IPv6 traffic class, its two low bits ECN (RFC 3168).
    pub tos: u8,
    /// Bytes of each packet but the last.
    pub segment: usize,
    /// The packets.
    pub bytes: &'a mut [u8],
}

impl Outgoing<'_> {
    /// How many packets there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.bytes.len().div_ceil(self.segment.max(1))
    }
}

/// Where a datagram came from, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// Who sent it.
    pub source: IpAddr,
    /// Its UDP port.
    pub source_port: u16,
    /// The address that it was sent to.
    pub destination: IpAddr,
    /// The interface that it came in by; zero if not known.
    pub interface: u32,
    /// IPv4 type of service or IPv6 traffic class.
    pub tos: u8,
}

/// The mark of a congested switch in a type of service (RFC 3168).
pub(crate) const CONGESTION_EXPERIENCED: u8 = 0b11;

impl Origin {
    /// Whether a switch on the way marked it: congestion experienced (RFC 3168).
    #[must_use]
    pub fn congestion_experienced(&self) -> bool {
        self.tos & CONGESTION_EXPERIENCED == CONGESTION_EXPERIENCED
    }
}

/// Packets that one system call delivered as one: the same origin, and one size but for the last
/// (generic receive offload).
#[derive(Clone, Copy, Debug)]
pub struct Received<'a> {
    /// Where they came from.
    pub origin: Origin,
    segment: usize,
    skip: u128,
    bytes: &'a [u8],
}

impl<'a> Received<'a> {
    /// The packets that are to be looked at, with their place among all.
    pub fn packets(&self) -> impl Iterator<Item = (usize, &'a [u8])> + use<'a> {
        let skip = self.skip;
        let packets = self.bytes.chunks(self.segment.max(1)).enumerate();
        packets.filter(move |(i, _)| *i >= MAX_PACKETS || skip >> i & 1 == 0)
    }
}

/// Packets in one datagram that can be told apart; the kernel coalesces 64, newer ones 128.
pub(crate) const MAX_PACKETS: usize = 128;

/// Room for one datagram: what the kernel coalesces stays below an IP packet's largest size.
pub(crate) const SLOT: usize = 1 << 16;

/// What is known of a filled slot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Filled {
    pub(crate) origin: Origin,
    pub(crate) len: usize,
    pub(crate) segment: usize,
    /// One bit for each packet that nobody is to see.
    pub(crate) skip: u128,
}

/// Room for received datagrams, reused from call to call.
#[derive(Debug)]
pub struct Inbox {
    pub(crate) memory: Box<[u8]>,
    pub(crate) filled: Vec<Filled>,
    slots: usize,
    /// How many datagrams the next call asks for.
    ask: usize,
    /// Where the last packet came from, for its ICRC: mostly where the next one comes from.
    pub(crate) last: Option<(Origin, FlowCrc)>,
}

impl Inbox {
    /// Room for `slots` datagrams of one call.
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

    /// Slots that are empty.
    pub(crate) fn vacant(&self) -> usize {
        self.slots - self.filled.len()
    }

    /// Datagrams to ask for. To find that there is one more costs the kernel as much as finding nothing, so it is not
    /// asked for one more than last time came, unless there were as many as were asked for.
    pub(crate) fn to_ask_for(&self) -> usize {
        self.ask.min(self.vacant())
    }

    /// So many of those that were asked for came.
    pub(crate) fn came(&mut self, asked: usize, came: usize) {
        self.ask = if came == asked { (2 * asked).min(self.slots) } else { came }.max(1);
    }

    /// Copies a datagram in; false if there is no room for it.
    pub(crate) fn push(&mut self, origin: Origin, segment: usize, bytes: &[u8]) -> bool {
        if self.vacant() == 0 || bytes.len() > SLOT {
            return false;
        }
        let start = self.filled.len() * SLOT;
        self.memory[start..start + bytes.len()].copy_from_slice(bytes);
        self.filled.push(Filled { origin, len: bytes.len(), segment, skip: 0 });
        true
    }

    /// What the last call received.
    pub fn received(&self) -> impl ExactSizeIterator<Item = Received<'_>> {
        self.filled.iter().zip(self.memory.chunks(SLOT)).map(|(filled, memory)| Received {
            origin: filled.origin,
            segment: filled.segment,
            skip: filled.skip,
            bytes: &memory[..filled.len],
        })
    }

    /// Marks packets that nobody is to see: those for which `keep` says no.
    pub(crate) fn retain(&mut self, mut keep: impl FnMut(&Origin, usize, &[u8]) -> bool) {
        for (filled, memory) in self.filled.iter_mut().zip(self.memory.chunks(SLOT)) {
            for (i, packet) in memory[..filled.len].chunks(filled.segment.max(1)).enumerate() {
                // What cannot be marked is not delivered at all: no kernel coalesces as many.
                if i >= MAX_PACKETS {
                    filled.len = i * filled.segment;
                    break;
                }
                if filled.skip >> i & 1 == 0 && !keep(&filled.origin, i, packet) {
                    filled.skip |= 1 << i;
                }
            }
        }
    }
}

/// Destination queue pair number in a packet's base transport header; None if the packet is shorter than that.
#[must_use]
pub fn destination_qpn(packet: &[u8]) -> Option<u32> {
    bth::Packet::new_checked(packet).ok().map(|header| header.dest_qp().get())
}
