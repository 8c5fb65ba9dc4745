//! The description of a run, in TOML, and everything that can be refused before it starts.
//!
//! [`Config::load`] reads the file: syntax, unknown keys, numbers out of range, names used twice or
//! not defined. [`Config::check`] looks at the world: inputs, sizes, the port. What comes out of it is
//! a [`Setup`], from which all units work. Every error names the file, the line, the field and the value.
//!
//! `docs/event-builder.md` lists all fields; relative paths count from the configuration file.

mod check;
mod error;
mod file;
mod setup;
mod size;

pub use error::{ConfigError, Problem};
pub use file::Config;
pub use setup::{BuilderSetup, CardSetup, KernelSetup, LandingTarget, OutputSetup, ReadoutSetup, Setup};
pub use size::Size;
