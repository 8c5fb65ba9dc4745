//! Sinks for accepted events.

use crate::config::RunConfig;
use crate::core::{BatchId, BuIndex, Bytes, EventNumber};
use millstream_fragment::mfp::Header;
use millstream_fragment::{Fragment, SourceId, SourceKind};
use millstream_shm::Mapping;

/// Why events cannot be stored.
pub type SinkError = Box<dyn std::error::Error + Send + Sync>;

/// An accepted event, copied out of landing memory.
#[derive(Clone, Copy, Debug)]
pub struct AcceptedEvent<'a> {
    /// Its event number.
    pub number: EventNumber,
    /// The batch that it was in.
    pub batch: BatchId,
    /// Its fragments, in ascending order of their sources.
    pub fragments: &'a [(SourceId, Fragment<'a>)],
    /// The decision map of the kernel.
    pub decisions: &'a [u8],
    /// Whether it was built without the sources of a lost readout unit.
    pub readout_lost: bool,
}

/// A batch with accepted events, in landing memory.
#[derive(Clone, Copy, Debug)]
pub struct AcceptedBatch<'a> {
    /// Its number.
    pub id: BatchId,
    /// Its first event.
    pub first_event: EventNumber,
    /// Its number of events.
    pub n_events: u16,
    /// The accepted events, ascending.
    pub events: &'a [EventOfBatch],
    /// Their decision maps, one after the other; empty without decisions.
    pub decisions: &'a [u8],
    /// Whether it was built without the sources of a lost readout unit.
    pub readout_lost: bool,
    /// The packets of all sources, ascending in memory.
    pub packets: &'a [PacketPlace],
    /// The memory that holds them. Readout units can write it at any time, so its bytes are copied before they are used.
    pub memory: &'a Mapping,
}

impl AcceptedBatch<'_> {
    /// A copy of an event's fragments, in the order of the packets.
    pub fn fragments(&self, event: &EventOfBatch) -> Vec<(SourceId, Vec<u8>)> {
        let number = self.first_event.0 + u64::from(event.index);
        let copy = |offset: usize, len: u32| {
            let mut bytes = vec![0; len as usize];
            self.memory.copy_to_slice(offset, &mut bytes).then_some(bytes)
        };
        let fragment = |packet: &PacketPlace| {
            let header = copy(packet.offset, packet.header_len)?;
            let header = Header::new_checked(&header[..], packet.len.into()).ok()?;
            let entry = header.entries().find(|entry| entry.event == number)?;
            Some((packet.source, copy(packet.offset + entry.offset as usize, entry.len)?))
        };
        self.packets.iter().filter_map(fragment).collect()
    }

    /// The decision map of the event at a position of `events`; empty without decisions.
    pub fn decisions_of(&self, position: usize) -> &[u8] {
        let map = self.decisions.len().checked_div(self.events.len()).unwrap_or(0);
        &self.decisions[position * map..(position + 1) * map]
    }
}

/// An accepted event of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventOfBatch {
    /// Counted from the first event of the batch.
    pub index: u16,
    /// Whether a fragment is missing.
    pub incomplete: bool,
    /// Number of its fragments.
    pub fragments: u32,
    /// Payload of its fragments.
    pub payload: Bytes,
}

/// A packet in landing memory. Its header was checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketPlace {
    /// Its source.
    pub source: SourceId,
    /// Kind of the source.
    pub kind: SourceKind,
    /// Its place in the mapping (bytes).
    pub offset: usize,
    /// Its length (bytes).
    pub len: u32,
    /// Length of its header (bytes).
    pub header_len: u32,
    /// CRC-32 of its header.
    pub header_crc: u32,
}

/// Bytes of packets that a sink has written, by their way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WrittenBytes {
    /// Read by the storage device from the pages of landing memory.
    pub direct: Bytes,
    /// Copied by a processor.
    pub copied: Bytes,
}

/// Stores a builder unit's accepted events, on a thread of its own.
pub trait Sink: Send {
    /// Stores one event. The event's slot is in use during the call.
    ///
    /// # Errors
    /// The event cannot be stored; the run stops.
    fn store(&mut self, event: &AcceptedEvent<'_>) -> Result<(), SinkError>;

    /// Whether the sink stores batches instead of single events.
    fn takes_batches(&self) -> bool {
        false
    }

    /// Stores a batch, if the sink [takes batches](Self::takes_batches). The batch's slot is in use during the call.
    ///
    /// # Errors
    /// The batch cannot be stored; the run stops.
    fn store_batch(&mut self, batch: &AcceptedBatch<'_>) -> Result<WrittenBytes, SinkError> {
        Err(format!("this sink stores single events, not {}", batch.id).into())
    }

    /// Which of these events a builder unit of this run that was lost has stored, in their order. It is asked for the events
    /// of a batch that such a unit had, and decides whether they are stored again.
    ///
    /// # Errors
    /// The output of the lost unit cannot be read; the run stops.
    fn are_stored(&mut self, events: &[EventNumber]) -> Result<Vec<bool>, SinkError>;

    /// Writes the stored events to where they survive this process: their batch is then done. Called after one or
    /// more batches, and now and then without a new event.
    ///
    /// # Errors
    /// The events cannot be written; the run stops.
    fn flush(&mut self) -> Result<(), SinkError>;

    /// Closes the sink at the end of the run. Stored events are kept, also if the run failed. Returns a description of
    /// the result, such as a file name. A sink that has failed is dropped instead: what it has not flushed must not be
    /// written then, because other builder units store it.
    ///
    /// # Errors
    /// The sink cannot be closed; the run fails.
    fn finish(self: Box<Self>) -> Result<Option<String>, SinkError>;
}

/// Makes a builder unit's sink; `None` if accepted events are only counted.
pub type MakeSink<'a> = dyn Fn(&RunConfig, BuIndex) -> Result<Option<Box<dyn Sink>>, SinkError> + 'a;
