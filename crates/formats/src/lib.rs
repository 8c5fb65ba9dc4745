//! Raw data formats of experiments: their files become stream files, the input of readout units.
//!
//! Each format is one file in [`mod@format`] and implements [`Format`]: it cuts a file into fragments and structure.
//! [`index`] checks that these parts cover every byte once, and sorts the fragments by source and event.
//! [`import`] writes the stream file. `docs/raw-data.md` has what a fragment, a source and an event are in each format.

mod cursor;
pub mod format;
pub mod import;
pub mod index;
mod indexer;
mod options;

pub use format::{Format, all, by_name, recognise};
pub use import::{Import, ImportError, Imported};
pub use index::Index;
pub use indexer::{FileIndexer, Structure};
pub use options::{FormatOption, FormatOptions};
