//! Stream files: fragments of one or more sources, source by source, for mapping and sending.
//!
//! [`StreamWriter`] writes a file once, from the first source to the last. [`Stream`] maps it. Opening checks everything
//! except payload, which [`verify_payload`](Stream::verify_payload) checks. `docs/formats.md`, chapter "Stream file", is
//! the specification.

mod error;
mod format;
mod layout;
mod reader;
mod writer;

pub use error::{Malformed, ReadError, WriteError};
pub use format::{IndexEntry, NAME_BYTES, VERSION};
pub use reader::{Fragments, Source, Stream};
pub use writer::{SourceWriter, StreamWriter};
