//! The SST-1M camera, the detector that Millstream supports.
//!
//! Everything specific to this detector is in this crate. Its users need:
//!
//! - the event builder: the source kinds and fragment lengths in [`mod@format`], to check its inputs;
//! - the card's kernel `cluster7`: the trigger arithmetic in [`trigger`];
//! - the event file: the datasets in `columns` (feature `columns`);
//! - the run's pictures: the event display in `picture` (feature `picture`).
//!
//! A further detector gets its own crate beside this one, with the parts that it needs. The event builder,
//! the cards, `store` and `report` do not change.
//!
//! `data/README.md` describes the recorded data that the tests use.

#[cfg(feature = "columns")]
pub mod columns;
pub mod format;
#[cfg(feature = "picture")]
pub mod picture;
pub mod pixels;
mod table;
pub mod trigger;

pub use pixels::{Pixel, PixelGeometry};
pub use table::TableError;
