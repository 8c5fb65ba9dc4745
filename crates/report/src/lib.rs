//! Reports of event builder runs: tables, JSON, SVG charts, progress bars.
//!
//! - [`RunReport`] holds the counts and measurements of one run. [`RunReport::derived`] computes rates and
//!   problems for all outputs.
//! - [`table`] renders a report for a terminal, [`RunReport::to_json`] for programs.
//! - [`throughput`] draws the rate over time, [`timeline`] the activities of workers, [`chart`] any series.
//!   [`svg`], [`axis`] and [`colour`] are their parts.
//! - [`Progress`] is a progress bar, [`eprint_line!`] prints messages beside it.
//! - [`block`] replaces a generated part of a Markdown page.
//!
//! `docs/output.md` lists the fields of the JSON.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::print_stderr))]

pub mod axis;
pub mod block;
pub mod chart;
pub mod colour;
mod progress;
mod quantity;
mod run;
mod save;
mod stderr;
pub mod svg;
pub mod table;
pub mod throughput;
pub mod timeline;

pub use millstream_quantity::{Bytes, BytesPerSecond, Seconds};
pub use progress::Progress;
pub use quantity::count;
pub use run::{
    CorruptSource, Derived, FragmentAccounting, FragmentOutcome, LiveSource, MemcpyBaseline, OutcomeCount,
    ProgressSample, RecoveredFailure, RunReport, SoftwareTriggerReport, StorageReport, TriggerComparison,
    UnitReport, VERSION,
};
pub use save::{Replacement, SaveError, replace, save};
pub use stderr::eprint;
pub use table::Style;
