//! Event files: accepted events in HDF5.
//!
//! An [`EventWriter`] copies events from landing memory and appends them in blocks of rows. A [`Schema`]
//! describes the file. Fragments of a fixed length are assembled into typed arrays with one row per event, such
//! as a camera's `/camera/waveforms`. All others are stored as bytes with an offset per event. An
//! [`EventReader`] reads single events. Read `docs/output.md` first: it lists every dataset with its shape, type
//! and unit.
//!
//! **Crashes.** The file is called `NAME.h5.partial` until [`EventWriter::finish`] has synced and renamed it,
//! so a file called `NAME.h5` is complete. A dropped writer removes its partial file.
//! [`remove_stale_partials`] or the next writer of the same name removes the partial file of a killed writer. A
//! partial file that is still being written is never removed.
#![forbid(unsafe_code)]

mod column;
mod error;
mod layout;
mod metadata;
mod partial;
mod reader;
mod schema;
mod writer;

pub use error::{AppendError, EventError, FileError, SchemaError};
pub use partial::remove_stale_partials;
pub use reader::{Decision, EventReader, TriggerDecisions};
pub use schema::{
    Attribute, Compression, ConstantDataset, ConstantValues, DecisionSchema, ElementType, FragmentArray,
    InputFile, Run, Schema, Source, WriteOptions,
};
pub use writer::{Event, EventWriter, FragmentState, StoreSummary};
