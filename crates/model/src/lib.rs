//! A discrete-event model of data paths into accelerator memory.
//!
//! It answers what a site will reach and where its bottleneck is. A site (crate `millstream-site`) and
//! named parameters make [`part`]s of the [`engine`]; the [`tool`]s measure on them as the real programs
//! do. [`calibrate`] fits parameters to published rows, [`predict`] answers others with intervals.
//!
//! ```text
//!   site ──┐
//!          ├─[setup]─► parts on the engine ◄─ tools ─► rows ─► calibrate, predict
//!   parameters ─┘
//! ```
//! `docs/model.md` explains the method, the parameters and what is off.
#![forbid(unsafe_code)]

pub mod benchmarks;
pub mod calibrate;
pub mod component;
pub mod engine;
pub mod engine_bench;
pub mod explain;
pub mod figures;
pub mod flow;
pub mod measure;
mod parallel;
pub mod parameters;
pub mod path;
pub mod predict;
pub mod result_table;
pub mod rows;
pub mod sites;
pub mod sweep;

pub use parameters::Parameters;
