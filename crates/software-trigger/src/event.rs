//! An event in landing memory.

use millstream_fragment::mfp::Entry;

/// One event, as a worker sees it.
#[derive(Clone, Copy, Debug)]
pub struct Event<'a> {
    number: u64,
    fragments: &'a [EventFragment<'a>],
}

/// One source's part of an event.
#[derive(Clone, Copy, Debug)]
pub struct EventFragment<'a> {
    source: u32,
    kind: u32,
    /// The entry in its packet's header, and the payload.
    found: Option<(Entry, &'a [u8])>,
}

impl<'a> Event<'a> {
    pub(crate) fn new(number: u64, fragments: &'a [EventFragment<'a>]) -> Event<'a> {
        Event { number, fragments }
    }

    /// Its number.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// One entry per source, in the same order for all events, also for missing fragments.
    pub fn fragments(&self) -> &'a [EventFragment<'a>] {
        self.fragments
    }

    /// Whether every source has a fragment.
    pub fn is_complete(&self) -> bool {
        self.fragments.iter().all(|fragment| !fragment.is_missing())
    }

    /// The entry of a source.
    pub fn fragment(&self, source: u32) -> Option<&'a EventFragment<'a>> {
        self.fragments.iter().find(|fragment| fragment.source == source)
    }
}

impl<'a> EventFragment<'a> {
    pub(crate) fn new(source: u32, kind: u32, found: Option<(Entry, &'a [u8])>) -> EventFragment<'a> {
        EventFragment { source, kind, found }
    }

    /// Id of the source.
    pub fn source(&self) -> u32 {
        self.source
    }

    /// Kind of its payload.
    pub fn kind(&self) -> u32 {
        self.kind
    }

    /// Whether the source has no fragment for the event.
    pub fn is_missing(&self) -> bool {
        self.found.is_none()
    }

    /// The payload, in landing memory; empty if the fragment is missing.
    pub fn payload(&self) -> &'a [u8] {
        self.found.map_or(&[], |(_, payload)| payload)
    }

    /// CRC-32 that the payload should have; zero if the fragment is missing.
    pub fn crc(&self) -> u32 {
        self.found.map_or(0, |(entry, _)| entry.crc)
    }
}
