//! Event files: accepted events in HDF5, and batch files: whole batches past the page cache.
//!
//! An [`EventWriter`] copies events from landing memory and appends them in blocks of rows. A [`Schema`]
//! describes the file. Fragments of a fixed length are assembled into typed arrays with one row per event, such
//! as a camera's `/camera/waveforms`. All others are stored as bytes with an offset per event. An
//! [`EventReader`] reads single events. An [`EventFileSequence`] rotates files and keeps an index of them. Read `docs/output.md` first: it lists every dataset with its shape, type
//! and unit. A [`BatchWriter`] stores whole batches; [`unpack`] makes an event file of them.
//!
//! **Crashes.** The file is called `NAME.h5.partial` until [`EventWriter::finish`] has synced and renamed it,
//! so a file called `NAME.h5` is complete. Events up to the last [`EventWriter::flush`] survive the writer.
//! [`recover_partials`] or the next writer of the same name completes the partial file of a dead writer and calls it
//! `NAME.recovered.h5`. A partial file that is still being written is left alone.
#![forbid(unsafe_code)]

mod batches;
mod column;
mod commit_record;
mod committed;
mod error;
mod index;
mod layout;
mod metadata;
mod partial;
mod read_back;
mod reader;
mod recover;
mod schema;
mod schema_text;
mod sequence;
mod sequence_files;
mod superblock;
mod writer;

pub use batches::{
    Batch, BatchEvent, BatchOptions, BatchPacket, BatchReader, BatchWriter, ClosedBatches, Record,
    RecordEvent, RecordHeader, RecordPacket, StoredEvent, UnpackError, WrittenBytes, unpack,
};
pub use committed::{CommittedReader, committed_numbers};
pub use error::{AppendError, EventError, FileError, SchemaError};
pub use index::{INDEX_SUFFIX, IndexEntry, append_to_index, event_numbers, index_path, read_index};
pub use reader::{Decision, EventReader, TriggerDecisions};
pub use recover::{Recovered, partials, recover_partial, recover_partials};
pub use schema::{
    Attribute, Compression, ConstantDataset, ConstantValues, DecisionSchema, ElementType, FragmentArray,
    InputFile, Run, Schema, Source, WriteOptions,
};
pub use sequence::{BatchFileSequence, EventFileSequence, FileSequence, SequenceOptions, SequencedFile};
pub use sequence_files::{
    FileState, base_of_complete, file_state, is_not_synced, refuse_earlier_events, remove_earlier_sequence,
};
pub use writer::{ClosedFile, Event, EventWriter, FragmentState, StoreSummary};
