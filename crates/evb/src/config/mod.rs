//! Run configuration in TOML, and its checks.
//!
//! [`ConfigFile::load`] reads the file and checks syntax, keys, ranges and names. [`ConfigFile::check`] checks the inputs,
//! the sizes and the listen address, and returns the [`RunConfig`] for all units. Every error names the file, the line,
//! the field and the value.
//!
//! `docs/event-builder.md` lists all keys. Relative paths start at the configuration file.

mod check;
mod error;
mod file;
mod input;
mod run_config;
mod security;

pub use check::{CardField, InspectCard, RefusedCard};
pub use error::{ConfigError, Problem};
pub use file::ConfigFile;
pub use run_config::{
    Arrival, BuilderConfig, Candidates, ChecksumPolicy, FunctionLanguage, GeneratorConfig, InputConfig,
    KernelConfig, LandingCard, LandingTarget, OutputConfig, OutputFormat, ReadoutConfig, RingConfig,
    RunConfig, SizeDistribution, StoredEvents, SyncPolicy, UdpConfig, WorkersConfig,
};
pub use security::SecurityConfig;
