//! Errors of packets.

use crate::InvalidAlignment;

/// The first invalid field of a packet. Field names are those of `docs/formats.md`; fragments count from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MfpError {
    /// The buffer or the memory is too short.
    #[error("{part}: needs {need} B, only {have} B available")]
    Truncated {
        /// The part of the packet.
        part: &'static str,
        /// Its length, in bytes.
        need: u64,
        /// The available length, in bytes.
        have: u64,
    },
    /// Wrong magic: not a packet.
    #[error("magic: found \"{}\", expected \"MFPK\"", .0.escape_ascii())]
    Magic([u8; 4]),
    /// Another version.
    #[error("version: found {0}, expected {version}", version = super::VERSION)]
    Version(u16),
    /// An invalid alignment.
    #[error("alignment: {0}")]
    Alignment(#[from] InvalidAlignment),
    /// No events, or event numbers that overflow.
    #[error("n_events: {n_events} events from event {first_event}: must be at least 1 without overflow")]
    Events {
        /// First event of the batch.
        first_event: u64,
        /// Number of events in the batch.
        n_events: u32,
    },
    /// More fragments than events.
    #[error("n_fragments: {n_fragments} fragments for {n_events} events")]
    FragmentCount {
        /// Number of fragments.
        n_fragments: u32,
        /// Number of events in the batch.
        n_events: u32,
    },
    /// The header's length does not match the number of fragments.
    #[error("header_len: found {found}, expected {expected}")]
    HeaderLen {
        /// The length in the header, in bytes.
        found: u32,
        /// The length for that number of fragments, in bytes.
        expected: u64,
    },
    /// The header's checksum is wrong.
    #[error("header_crc: found {found:#010x}, expected {expected:#010x}")]
    HeaderCrc {
        /// The checksum in the header.
        found: u32,
        /// The computed checksum.
        expected: u32,
    },
    /// A reserved field is not zero.
    #[error("reserved: found {0:#x}, expected 0")]
    Reserved(u32),
    /// A fragment's event is outside of the batch, or not after the previous fragment's.
    #[error(
        "event_delta of fragment {fragment}: found {found}, expected {earliest} or more, below {n_events}"
    )]
    EventDelta {
        /// The fragment.
        fragment: u32,
        /// Its event, counted from the first of the batch.
        found: u32,
        /// The smallest valid value.
        earliest: u32,
        /// Number of events in the batch.
        n_events: u32,
    },
    /// A fragment overlaps the previous one, or leaves a gap.
    #[error("offset of fragment {fragment}: found {found}, expected {expected}")]
    Offset {
        /// The fragment.
        fragment: u32,
        /// The offset in the header, in bytes.
        found: u32,
        /// The padded end of the previous fragment, in bytes.
        expected: u32,
    },
    /// The packet's length does not match its fragments.
    #[error("total_len: found {found}, expected {expected}")]
    TotalLen {
        /// The length in the header, in bytes.
        found: u32,
        /// The padded end of the last fragment, in bytes.
        expected: u32,
    },
    /// A packet of 4 GiB or longer.
    #[error("packet of {len} B: packets must be shorter than 4 GiB; use smaller batches")]
    TooLong {
        /// The length, in bytes.
        len: u64,
    },
    /// Another number of fragments was added than the header was created for.
    #[error("n_fragments: {pushed} fragments added, header has {n_fragments}")]
    WrongFragmentCount {
        /// Fragments added.
        pushed: u32,
        /// Fragments of the header.
        n_fragments: u32,
    },
}
