//! Errors of a configuration, with file, line and field.

use millstream_fragment::SourceId;
use std::fmt;
use std::path::PathBuf;

/// A configuration that is refused: `FILE:LINE: FIELD: problem`.
#[derive(Debug)]
pub struct ConfigError {
    /// The configuration file.
    pub file: PathBuf,
    /// The line, counted from 1; `None` if the problem is not in one line.
    pub line: Option<usize>,
    /// The field, for example `card.memory`; empty if the problem is not in one field.
    pub field: String,
    /// The problem, with the value.
    pub problem: Box<Problem>,
}

/// The problem.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// The file cannot be read.
    #[error("cannot read: {0}")]
    Unreadable(std::io::Error),
    /// Not TOML, an unknown key, a missing key or a value of the wrong type.
    #[error("{0}")]
    Syntax(String),
    /// A number out of range.
    #[error("{value} is out of range: must be {least} to {most}")]
    OutOfRange {
        /// The number.
        value: u64,
        /// The smallest valid value.
        least: u64,
        /// The largest valid value.
        most: u64,
    },
    /// A required table is missing.
    #[error("missing: at least one is required")]
    None,
    /// An invalid name.
    #[error("{0:?} is not a valid name: use 1 to 24 letters, digits, dots, dashes and underscores")]
    BadName(String),
    /// A duplicate name.
    #[error("{name:?} is already used in line {first}")]
    DuplicateName {
        /// The name.
        name: String,
        /// The line of its first use.
        first: usize,
    },
    /// A reference to an undefined card.
    #[error("no card {name:?}; defined cards: {}", .known.join(", "))]
    UnknownCard {
        /// The name.
        name: String,
        /// The defined cards.
        known: Vec<String>,
    },
    /// Two builder units on one card.
    #[error("card {card:?} is already used by builder unit {first:?}; each card serves one builder unit")]
    CardTaken {
        /// The card.
        card: String,
        /// The builder unit that uses it.
        first: String,
    },
    /// Settings that exclude each other, or a setting that requires another one.
    #[error("{0}")]
    Conflict(String),
    /// An unknown value.
    #[error("unknown value {value:?}; valid values: {}", .known.join(", "))]
    UnknownValue {
        /// The value.
        value: String,
        /// The valid values.
        known: &'static [&'static str],
    },
    /// An input that is refused; the error names the file and the problem.
    #[error(transparent)]
    Input(#[from] millstream_fragment::stream::ReadError),
    /// One source in two inputs.
    #[error("{id} is in both {} and {}; a source must be in one input only", .first.display(), .second.display())]
    DuplicateSource {
        /// The source.
        id: SourceId,
        /// The first file.
        first: PathBuf,
        /// The second file.
        second: PathBuf,
    },
    /// Inputs with different events.
    #[error(
        "events differ: {} has events {} to {}, {} has {} to {}",
        .first.display(), .first_events.0, .first_events.1, .second.display(), .second_events.0, .second_events.1
    )]
    DifferentEvents {
        /// The first file.
        first: PathBuf,
        /// Its first and last event.
        first_events: (u64, u64),
        /// The second file.
        second: PathBuf,
        /// Its first and last event.
        second_events: (u64, u64),
    },
    /// A source whose packets would exceed the format's limit.
    #[error(transparent)]
    PacketTooLong(#[from] crate::layout::PacketTooLong),
    /// A card's memory is too small.
    #[error("{} is too small: {slots} slots of {slot} B and the kernel areas need {needed} B", memory.binary())]
    MemoryTooSmall {
        /// The card's memory.
        memory: crate::core::Bytes,
        /// Slots of the builder unit.
        slots: u16,
        /// Size of a slot, in bytes.
        slot: u64,
        /// Required size, in bytes.
        needed: u64,
    },
    /// A parameter of the run is out of range.
    #[error(transparent)]
    Plan(#[from] crate::core::plan::PlanError),
    /// The camera geometry is refused; the error names the file and line.
    #[error(transparent)]
    Geometry(#[from] millstream_camera::TableError),
    /// The listen address cannot be bound.
    #[error("cannot listen on {address:?}: {cause}")]
    Listen {
        /// The address.
        address: String,
        /// The cause.
        cause: std::io::Error,
    },
    /// Keys cannot be used.
    #[error(transparent)]
    Keys(#[from] millstream_tls::KeysError),
    /// The output directory cannot be used.
    #[error("{}: {cause}", .path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// The cause.
        cause: std::io::Error,
    },
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.file.display())?;
        if let Some(line) = self.line {
            write!(f, "{line}:")?;
        }
        if !self.field.is_empty() {
            write!(f, " {}:", self.field)?;
        }
        write!(f, " {}", self.problem)
    }
}

impl std::error::Error for ConfigError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        // Display shows the problem; its source comes next.
        self.problem.source()
    }
}
