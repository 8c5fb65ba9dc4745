//! Options of single formats.

use std::num::NonZeroU64;

/// What a format cannot know from one file. Each format takes some of these; the others must be `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FormatOptions {
    /// The event id to import, for `midas`; by default the first one of the file.
    pub event_id: Option<u16>,
    /// Divisor of the indices of microslices, for `microslices` and `msa`; by default the greatest common divisor of the file's.
    pub index_divisor: Option<NonZeroU64>,
}

/// One of the [`FormatOptions`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FormatOption {
    /// [`FormatOptions::event_id`].
    EventId,
    /// [`FormatOptions::index_divisor`].
    IndexDivisor,
}

impl FormatOption {
    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            FormatOption::EventId => "--event-id",
            FormatOption::IndexDivisor => "--index-divisor",
        }
    }
}

impl FormatOptions {
    /// The options that are given.
    pub fn given(&self) -> impl Iterator<Item = FormatOption> {
        let event_id = self.event_id.map(|_| FormatOption::EventId);
        event_id.into_iter().chain(self.index_divisor.map(|_| FormatOption::IndexDivisor))
    }
}
