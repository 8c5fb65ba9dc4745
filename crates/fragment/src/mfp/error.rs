//! Why bytes are no packet, or cannot become one.

use crate::InvalidAlignment;

/// The first thing in a packet that is not what it has to be. Fields are named as in
/// `docs/formats.md`; fragments are counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MfpError {
    /// The bytes at hand end before the part that is needed.
    #[error("{part}: needs {need} B, there are {have}")]
    Truncated {
        /// What was to be read or written.
        part: &'static str,
        /// Its length, in bytes.
        need: u64,
        /// The length at hand, in bytes.
        have: u64,
    },
    /// There is no packet here.
    #[error("magic: found \"{}\", expected \"MFPK\"", .0.escape_ascii())]
    Magic([u8; 4]),
    /// A packet of another version.
    #[error("version: found {0}, expected {version}", version = super::VERSION)]
    Version(u16),
    /// An alignment that packets do not have.
    #[error("alignment: {0}")]
    Alignment(#[from] InvalidAlignment),
    /// No events, or events past the greatest number.
    #[error("n_events: {n_events} events from event {first_event} on")]
    Events {
        /// First event of the batch.
        first_event: u64,
        /// Number of events in the batch.
        n_events: u32,
    },
    /// More fragments than events.
    #[error("n_fragments: {n_fragments} fragments of {n_events} events")]
    FragmentCount {
        /// Number of fragments.
        n_fragments: u32,
        /// Number of events in the batch.
        n_events: u32,
    },
    /// The header's length does not follow from the number of fragments.
    #[error("header_len: found {found}, expected {expected}")]
    HeaderLen {
        /// What the header says, in bytes.
        found: u32,
        /// What the fragments need, in bytes.
        expected: u64,
    },
    /// The header is damaged.
    #[error("header_crc: found {found:#010x}, expected {expected:#010x}")]
    HeaderCrc {
        /// What the header says.
        found: u32,
        /// CRC-32 of the header.
        expected: u32,
    },
    /// A field that has to be zero is not.
    #[error("reserved: found {0:#x}, expected 0")]
    Reserved(u32),
    /// A fragment's event is not in the batch, or does not follow the one before.
    #[error(
        "event_delta of fragment {fragment}: found {found}, expected {earliest} or more, below {n_events}"
    )]
    EventDelta {
        /// The fragment.
        fragment: u32,
        /// Its event, counted from the first of the batch.
        found: u32,
        /// The least that may come here.
        earliest: u32,
        /// Number of events in the batch.
        n_events: u32,
    },
    /// A fragment overlaps the one before, or leaves a gap after it.
    #[error("offset of fragment {fragment}: found {found}, expected {expected}")]
    Offset {
        /// The fragment.
        fragment: u32,
        /// Where the header says that it starts, in bytes.
        found: u32,
        /// Where the fragment before it ends, padded, in bytes.
        expected: u32,
    },
    /// Fragments reach past the end of the packet, or stop before it.
    #[error("total_len: found {found}, expected {expected}")]
    TotalLen {
        /// What the header says, in bytes.
        found: u32,
        /// Where the last fragment ends, padded, in bytes.
        expected: u32,
    },
    /// A packet of 4 GiB or more.
    #[error("{len} B do not fit into one packet")]
    TooLong {
        /// The length that was reached, in bytes.
        len: u64,
    },
    /// A builder got another number of fragments than it was made for.
    #[error("n_fragments: {pushed} fragments for a header with room for {n_fragments}")]
    WrongFragmentCount {
        /// Fragments that were given.
        pushed: u32,
        /// Fragments that were announced.
        n_fragments: u32,
    },
}
