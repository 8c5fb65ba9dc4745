//! Where a builder unit's accepted events go.

use crate::config::Setup;
use crate::core::{BatchId, BuIndex, EventNumber};
use millstream_fragment::{Fragment, SourceId};

/// Why events cannot be stored; shown to people.
pub type SinkError = Box<dyn std::error::Error + Send + Sync>;

/// An accepted event, copied out of landing memory.
#[derive(Clone, Copy, Debug)]
pub struct AcceptedEvent<'a> {
    /// Its number.
    pub number: EventNumber,
    /// The batch in which it was built.
    pub batch: BatchId,
    /// Its fragments, in ascending order of their sources.
    pub fragments: &'a [(SourceId, Fragment<'a>)],
    /// The decision map as the kernel wrote it.
    pub decisions: &'a [u8],
}

/// Takes a builder unit's accepted events.
pub trait Sink {
    /// Takes one event. A slot is held meanwhile.
    ///
    /// # Errors
    /// Stops the run.
    fn store(&mut self, event: &AcceptedEvent<'_>) -> Result<(), SinkError>;

    /// The run is over, one way or another: what was taken is to be kept. Returns what to tell people,
    /// such as the name of a file.
    ///
    /// # Errors
    /// The run counts as failed.
    fn finish(self: Box<Self>) -> Result<Option<String>, SinkError>;
}

/// Makes a builder unit's sink; none if accepted events are only counted.
pub type MakeSink<'a> = dyn Fn(&Setup, BuIndex) -> Result<Option<Box<dyn Sink>>, SinkError> + 'a;
