//! Results for people: what a run did, as a table, as JSON and as pictures.
//!
//! - [`RunReport`] holds the numbers of one run; what follows from them (rates, agreement, whether the
//!   run is a success) is computed in one place, [`RunReport::derived`], and shown everywhere alike.
//! - [`table`] prints them for a terminal, [`RunReport::to_json`] writes them for programs.
//! - [`throughput`] draws the rate over time, [`timeline`] what was done when, both as SVG.
//! - [`Progress`] shows how far a run is.
//!
//! `docs/output.md` lists the fields of the JSON.
#![forbid(unsafe_code)]

pub mod axis;
pub mod chart;
pub mod colour;
mod progress;
mod quantity;
mod run;
mod save;
pub mod svg;
pub mod table;
pub mod throughput;
pub mod timeline;

pub use millstream_quantity::{Bytes, BytesPerSecond, Seconds};
pub use progress::Progress;
pub use quantity::count;
pub use run::{
    Conservation, Derived, Fate, Memcpy, RunReport, Sample, Term, TriggerCheck, UnitReport, VERSION,
};
pub use save::{SaveError, save};
pub use table::Style;
