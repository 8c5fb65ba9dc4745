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

pub mod calibrate;
pub mod engine;
pub mod explain;
pub mod figures;
pub mod flow;
pub mod measure;
pub mod parameters;
pub mod part;
pub mod predict;
pub mod rows;
pub mod setup;
pub mod sheet;
pub mod sites;
pub mod speed;
pub mod table;
pub mod tool;
pub mod whatif;

pub use parameters::Parameters;
