//! Stream files: fragments of one or more sources, source by source, ready to be mapped and sent.
//!
//! A file is written once ([`StreamWriter`]), from the first source to the last, and read by mapping
//! it ([`Stream`]). Opening checks everything except payload bytes, which
//! [`verify_payload`](Stream::verify_payload) compares with their checksums. `docs/formats.md`,
//! chapter "Stream file", is the specification.

mod error;
mod format;
mod layout;
mod reader;
mod writer;

pub use error::{Malformed, ReadError, WriteError};
pub use format::{IndexEntry, NAME_BYTES, VERSION};
pub use reader::{Fragments, Source, Stream};
pub use writer::{SourceWriter, StreamWriter};
