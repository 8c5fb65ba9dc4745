//! PCI Express: link rates, packet overheads, segmentation of requests.
//!
//! Read: PCI Express Base Specification, chapters 2 (transactions), 3 (data link) and 4 (physical).
//!
//! ```text
//!   MWr  ─ framing+seq+LCRC 8 B ─ header 4 B ─ address and requester 12 B ─ payload ≤ MPS
//!   MRd  ─ framing+seq+LCRC 8 B ─ header 4 B ─ address and requester 12 B, requests ≤ MRRS
//!   CplD ─ framing+seq+LCRC 8 B ─ header 4 B ─ completer and requester 8 B ─ payload ≤ MPS, cut at RCB
//! ```

use crate::engine::{BytesPerSecond, Channel, ChannelId, Pcie, Picos, Simulation};
use millstream_site::schema::PcieLink;

/// Packet kind: memory write (MWr).
pub const MEMORY_WRITE: u16 = 1;
/// Packet kind: memory read (MRd). Its size is 0, its tag holds the requested length.
pub const MEMORY_READ: u16 = 2;
/// Packet kind: completion with data (CplD).
pub const COMPLETION: u16 = 3;

/// Overhead bytes of a request with a 64-bit address before generation 6 (rows P02, P03).
const REQUEST_OVERHEAD: u32 = 24;
/// Overhead bytes of a completion before generation 6 (row P04).
const COMPLETION_OVERHEAD: u32 = 20;

/// First generation with flits instead of framed packets.
const FLIT_GENERATION: u8 = 6;

/// Bytes of framing, sequence number and LCRC of a packet before generation 6.
const LINK_OVERHEAD: u32 = 8;

/// Link rate after line code: 8b/10b in generations 1 and 2, 128b/130b in 3 to 5 (row P01). A flit of generation 6 has 236 bytes
/// of TLPs in 256.
#[must_use]
pub fn raw_rate(generation: u8, lanes: u8) -> BytesPerSecond {
    let (transfers, encoding) = match generation {
        1 => (2.5, 0.8),
        2 => (5.0, 0.8),
        3 => (8.0, 128.0 / 130.0),
        4 => (16.0, 128.0 / 130.0),
        5 => (32.0, 128.0 / 130.0),
        _ => (64.0, 236.0 / 256.0),
    };
    BytesPerSecond::gigabits(transfers * encoding * f64::from(lanes))
}

/// Overhead bytes by packet kind. Flits have framing, sequence number and LCRC of their own.
#[must_use]
pub const fn overhead(generation: u8) -> [u32; 4] {
    let framing = if generation < FLIT_GENERATION { 0 } else { LINK_OVERHEAD };
    let request = REQUEST_OVERHEAD - framing;
    [request, request, request, COMPLETION_OVERHEAD - framing]
}

/// Share of a link's rate that moves `size` bytes with these bytes on the link.
fn share(link: &PcieLink, size: u64, bytes: u64) -> BytesPerSecond {
    BytesPerSecond(raw_rate(link.generation.0, link.lanes.0).0 * size as f64 / bytes as f64)
}

/// Bytes of headers that packets of at most `most` bytes add to `size` bytes.
fn headers(link: &PcieLink, kind: u16, size: u64, most: u32) -> u64 {
    u64::from(overhead(link.generation.0)[usize::from(kind)]) * size.div_ceil(u64::from(most))
}

/// Upper bound of write bandwidth: payload share of the TLPs (row P07).
#[must_use]
pub fn write_ceiling(link: &PcieLink, size: u64) -> BytesPerSecond {
    share(link, size, size + headers(link, MEMORY_WRITE, size, link.max_payload.0))
}

/// Upper bound of the bandwidth of long writes, whose packets have the largest payload.
#[must_use]
pub fn payload_rate(link: &PcieLink) -> BytesPerSecond {
    write_ceiling(link, u64::from(link.max_payload.0))
}

/// Upper bound of read bandwidth: the slower of completions, of the largest payload, and requests (row P08).
#[must_use]
pub fn read_ceiling(link: &PcieLink, size: u64) -> BytesPerSecond {
    let down = size + headers(link, COMPLETION, size, link.max_payload.0);
    let up = headers(link, MEMORY_READ, size, link.max_read_request.0);
    share(link, size, down.max(up))
}

/// The two directions of a link.
#[derive(Clone, Copy, Debug)]
pub struct LinkChannels {
    /// Towards the root complex.
    pub upstream: ChannelId<Pcie>,
    /// Away from the root complex.
    pub downstream: ChannelId<Pcie>,
}

/// Adds both directions of a link. `efficiency` is the share of the rate that DLLPs and skip ordered sets leave.
/// `latency` is that of one direction between transaction layers; `buffer` is the payload queued for transmission.
pub fn add_link(
    simulation: &mut Simulation,
    name: &str,
    link: &PcieLink,
    efficiency: f64,
    latency: Picos,
    buffer: u64,
) -> LinkChannels {
    add_cut_through_link(simulation, name, link, efficiency, latency, buffer, [false; 2])
}

/// [`add_link`] of a switch's port: a packet enters the next link before its tail has arrived. `cut_through` is for the
/// upstream and the downstream direction; the next link must not be faster.
pub fn add_cut_through_link(
    simulation: &mut Simulation,
    name: &str,
    link: &PcieLink,
    efficiency: f64,
    latency: Picos,
    buffer: u64,
    cut_through: [bool; 2],
) -> LinkChannels {
    let raw = raw_rate(link.generation.0, link.lanes.0);
    let rate = BytesPerSecond(raw.0 * efficiency);
    let channel = |direction: &str, cut_through: bool| Channel {
        overhead: overhead(link.generation.0),
        cut_through,
        ..Channel::new(format!("{name} {direction}"), rate).latency(latency).capacity(buffer)
    };
    LinkChannels {
        upstream: simulation.add_channel(channel("upstream", cut_through[0])),
        downstream: simulation.add_channel(channel("downstream", cut_through[1])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use millstream_site::schema::{Generation, PayloadSize, PcieLanes};

    #[test]
    fn flits_have_no_framing_of_their_own_in_the_ceilings() {
        let link = |generation| PcieLink {
            generation: Generation(generation),
            lanes: PcieLanes(16),
            max_payload: PayloadSize(256),
            max_read_request: PayloadSize(512),
        };
        for (generation, write, completion) in [(5, 24.0, 20.0), (6, 16.0, 12.0)] {
            let (raw, link) = (raw_rate(generation, 16).0, link(generation));
            assert!((payload_rate(&link).0 / (raw * 256.0 / (256.0 + write)) - 1.0).abs() < 1e-12);
            let reads = raw * 512.0 / (512.0 + 2.0 * completion);
            assert!((read_ceiling(&link, 512).0 / reads - 1.0).abs() < 1e-12);
        }
    }
}
