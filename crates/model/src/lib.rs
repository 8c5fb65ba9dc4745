//! Discrete-event model of RDMA data paths into accelerator memory.
//!
//! The model predicts the performance of a site and its bottleneck. A site (crate `millstream-site`) and [`parameters`]
//! define a [`path`]; its [`component`]s run on the [`engine`], and [`benchmarks`] measure on them as the real programs do.
//! [`calibrate`] fits parameters to published [`rows`]; [`predict`] answers other rows with intervals.
//!
//! ```text
//!   site ──┐
//!          ├─[path]─► components on the engine ◄─ benchmarks ─► rows ─► calibrate, predict
//!   parameters ─┘
//! ```
//! `docs/model.md` explains the method, the parameters and the residuals.
#![forbid(unsafe_code)]

pub mod benchmarks;
pub mod calibrate;
pub mod compare;
pub mod component;
pub mod congestion;
mod disk_end;
pub mod engine;
pub mod engine_bench;
pub mod explain;
pub mod figures;
pub mod fit_site;
pub mod flow;
pub mod flows;
pub mod interval;
pub mod max_min;
pub mod measure;
pub mod measurements;
mod parallel;
pub mod parameters;
pub mod path;
pub mod power;
pub mod precision;
pub mod predict;
pub mod result_table;
pub mod rows;
pub mod sites;
pub mod ssd;
pub mod sweep;

pub use parameters::Parameters;
pub use precision::Precision;
