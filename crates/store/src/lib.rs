//! Accepted events to HDF5.
//!
//! An [`EventWriter`] takes events one by one, with their fragments where they lie in landing memory,
//! and appends them in blocks. What the file contains follows from a [`Schema`]: sources whose fragments
//! all have one length are assembled into typed arrays, one row per event (a camera's boards become
//! `/camera/waveforms`); all others are kept as flat bytes with an offset per event.
//! An [`EventReader`] reads single events back. Read `docs/output.md` first: it lists every dataset
//! with its shape, type and unit.
//!
//! **Crashes.** The file is written under the name `NAME.h5.partial` and gets its own name only when
//! [`EventWriter::finish`] has put it on the disk, so whatever is called `NAME.h5` is whole. A writer
//! that is dropped removes its partial file. One that was killed leaves it; [`clean_partials`] or the
//! next writer of the same name removes it, and a partial file that somebody still writes is left alone.
//!
//! Only accepted events come here: nothing in this crate is on the path of rejected ones.
#![forbid(unsafe_code)]

mod column;
mod error;
mod metadata;
mod partial;
mod plan;
mod reader;
mod schema;
mod writer;

pub use error::{AppendError, FileError, Refusal, SchemaError};
pub use partial::clean_partials;
pub use reader::{Decision, EventReader, Trigger};
pub use schema::{
    Array, Attribute, Compression, Constant, Decisions, Element, Input, Options, Run, Schema, Source, Values,
};
pub use writer::{Event, EventWriter, FragmentState, Stored};
