//! Run configuration in TOML, and its checks.
//!
//! [`Config::load`] reads the file and checks syntax, keys, ranges and names. [`Config::check`] checks the inputs,
//! the sizes and the listen address, and returns the [`Setup`] for all units. Every error names the file, the line,
//! the field and the value.
//!
//! `docs/event-builder.md` lists all keys. Relative paths start at the configuration file.

mod check;
mod error;
mod file;
mod input;
mod setup;

pub use check::{CardField, InspectCard, RefusedCard};
pub use error::{ConfigError, Problem};
pub use file::Config;
pub use setup::{
    Arrival, BuilderSetup, Candidates, CardSetup, ChecksumPolicy, GeneratorSetup, InputSetup, KernelSetup,
    LandingTarget, OutputSetup, ReadoutSetup, RingSetup, Setup, SizeDistribution, StoredEvents, SyncPolicy,
    UdpSetup, WorkersSetup,
};
