//! Sinks for accepted events.

use crate::config::RunConfig;
use crate::core::{BatchId, BuIndex, EventNumber};
use millstream_fragment::{Fragment, SourceId};

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

/// Stores a builder unit's accepted events, on a thread of its own.
pub trait Sink: Send {
    /// Stores one event. The event's slot is in use during the call.
    ///
    /// # Errors
    /// The event cannot be stored; the run stops.
    fn store(&mut self, event: &AcceptedEvent<'_>) -> Result<(), SinkError>;

    /// Whether a builder unit of this run that was lost has stored this event. It is asked for the events of batches that
    /// such a unit had, and decides whether they are stored again.
    ///
    /// # Errors
    /// The output of the lost unit cannot be read; the run stops.
    fn is_stored(&mut self, event: EventNumber) -> Result<bool, SinkError>;

    /// Writes the stored events to where they survive this process: their batch is then done. Called after one or
    /// more batches, and now and then without a new event.
    ///
    /// # Errors
    /// The events cannot be written; the run stops.
    fn flush(&mut self) -> Result<(), SinkError>;

    /// Closes the sink at the end of the run. Stored events are kept, also if the run failed. Returns a description of
    /// the result, such as a file name.
    ///
    /// # Errors
    /// The sink cannot be closed; the run fails.
    fn finish(self: Box<Self>) -> Result<Option<String>, SinkError>;
}

/// Makes a builder unit's sink; `None` if accepted events are only counted.
pub type MakeSink<'a> = dyn Fn(&RunConfig, BuIndex) -> Result<Option<Box<dyn Sink>>, SinkError> + 'a;
