//! Arguments and results of the kernels that work on events.
//!
//! An event kernel works on the packets of one batch of events, one packet per source. Its arguments are
//! followed by the list of packets; its result is a list of summaries, one per event.

use crate::MemoryRange;
use crate::command::{EventCounters, bits};
use crate::layout;

/// Most events of one command.
pub const MAX_EVENTS: u32 = 4096;

/// Most sources of one command.
pub const MAX_SOURCES: u32 = 1024;

layout! {
    /// The range of card memory that holds the packet of one source. A list of these follows a kernel's arguments.
    pub struct PacketBuffer[24] {
        0 offset: u64 = "offset of the packet in card memory (bytes)";
        8 capacity: u64 = "length of the range (bytes)";
        16 source: u32 = "id of the source";
        20 reserved: u32 = "zero";
    }
}

layout! {
    /// Result of a kernel for one event.
    pub struct EventSummary[32] {
        0 event: u64 = "event number";
        8 status: u32 = "zero, or status bits; see Event status";
        12 decisions_set: u32 = "decision bits set";
        16 accepted: u32 = "one if a decision bit is set, else zero";
        20 first_sample: u16 = "first sample with a decision bit set, 65535: none";
        22 first_patch: u16 = "patch of the lowest decision position set in that sample, 65535: none";
        24 missing: u16 = "missing fragments";
        26 corrupt: u16 = "fragments with a wrong checksum";
        28 reserved: u32 = "zero";
    }
}

bits! {
    /// Every bit of an event's status, for the documentation.
    EVENT_STATUSES: u32 {
        0 STATUS_MISSING = "a source has no fragment for the event";
        1 STATUS_BAD_PACKET = "a packet is damaged, or of another batch or source; its fragments count as missing";
        2 STATUS_CORRUPT = "a fragment has a wrong checksum";
        3 STATUS_UNDECIDED = "a trace fragment is missing, corrupt, or of a wrong length; the decision map is zero";
    }
}

impl EventSummary {
    /// Counts a missing fragment.
    pub fn note_missing(&mut self, bad_packet: bool) {
        self.missing = self.missing.saturating_add(1);
        self.status |= STATUS_MISSING | if bad_packet { STATUS_BAD_PACKET } else { 0 };
    }

    /// Counts a fragment with a wrong checksum.
    pub fn note_corrupt(&mut self, counters: &mut EventCounters) {
        self.corrupt = self.corrupt.saturating_add(1);
        self.status |= STATUS_CORRUPT;
        counters.corrupt_fragments += 1;
    }

    /// A summary of `event` without findings.
    pub fn of(event: u64) -> EventSummary {
        EventSummary { event, first_sample: u16::MAX, first_patch: u16::MAX, ..EventSummary::default() }
    }
}

impl PacketBuffer {
    /// The range of card memory.
    pub fn span(&self) -> MemoryRange {
        MemoryRange::new(self.offset, self.capacity)
    }
}

/// Appends a list of packets, as it follows the arguments of a kernel.
fn append_packets(packets: &[PacketBuffer], bytes: &mut Vec<u8>) {
    for packet in packets {
        bytes.extend(packet.to_bytes());
    }
}

/// Name of the kernel that checks fragments.
pub const VERIFY: &str = "verify";

layout! {
    /// Arguments of `verify`.
    pub struct VerifyArgs[16] {
        0 first_event: u64 = "first event of the batch";
        8 n_events: u32 = "number of events, 1 to 4096; each packet states the same batch";
        12 n_sources: u32 = "number of packets that follow, 1 to 1024";
    }
}

impl VerifyArgs {
    /// Appends the arguments and the list of packets to `bytes`; the list sets [`VerifyArgs::n_sources`].
    pub fn append_to(&self, packets: &[PacketBuffer], bytes: &mut Vec<u8>) {
        let args = VerifyArgs { n_sources: packets.len() as u32, ..*self };
        bytes.extend(args.to_bytes());
        append_packets(packets, bytes);
    }
}

/// Name of the kernel that computes the trigger of the SST-1M camera.
pub const CLUSTER7: &str = "cluster7";

/// Threshold of the camera's trigger.
pub const CAMERA_THRESHOLD: u32 = 336;

layout! {
    /// Arguments of `cluster7`.
    pub struct Cluster7Args[64] {
        0 first_event: u64 = "first event of the batch";
        8 n_events: u32 = "number of events, 1 to 4096; each packet states the same batch";
        12 n_sources: u32 = "number of packets that follow, 1 to 1024";
        16 trace_sources: [u32; 3] = "sources with the traces of crates 1, 2 and 3";
        28 threshold: u32 = "a decision bit is set where the sum is greater than this";
        32 geometry: u64 = "offset of the geometry table, 6912 bytes";
        40 decisions: u64 = "offset of the decision maps, 2700 bytes per event";
        48 reserved: [u64; 2] = "zero";
    }
}

impl Cluster7Args {
    /// Appends the arguments and the list of packets to `bytes`; the list sets [`Cluster7Args::n_sources`].
    pub fn append_to(&self, packets: &[PacketBuffer], bytes: &mut Vec<u8>) {
        let args = Cluster7Args { n_sources: packets.len() as u32, ..*self };
        bytes.extend(args.to_bytes());
        append_packets(packets, bytes);
    }
}

/// Arguments that a function for events gets from the configuration.
pub const FUNCTION_ARGUMENTS: usize = 8;

layout! {
    /// Arguments of a kernel that calls a function for each event (`docs/kernels.md`).
    pub struct FunctionArgs[80] {
        0 first_event: u64 = "first event of the batch";
        8 n_events: u32 = "number of events, 1 to 4096; each packet states the same batch";
        12 n_sources: u32 = "number of packets that follow, 1 to 1024";
        16 arguments: [u64; 8] = "argument words of the function";
    }
}

impl FunctionArgs {
    /// Appends the arguments and the list of packets to `bytes`; the list sets [`FunctionArgs::n_sources`].
    pub fn append_to(&self, packets: &[PacketBuffer], bytes: &mut Vec<u8>) {
        let args = FunctionArgs { n_sources: packets.len() as u32, ..*self };
        bytes.extend(args.to_bytes());
        append_packets(packets, bytes);
    }
}

layout! {
    /// One source's part of an event, as a function for events finds it in its memory.
    pub struct EventFragment[24] {
        0 source: u32 = "id of the source";
        4 kind: u32 = "kind of its payload; zero if the packet cannot be read";
        8 status: u32 = "zero: the fragment is there; else status bits: missing, bad packet, corrupt";
        12 address: u32 = "address of the payload; zero if the fragment is missing";
        16 len: u32 = "length of the payload (bytes)";
        20 crc: u32 = "CRC-32 that the payload should have";
    }
}
