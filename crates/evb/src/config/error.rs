//! What is wrong with a configuration, and where.

use millstream_fragment::SourceId;
use std::fmt;
use std::path::PathBuf;

/// A configuration that is refused: `FILE:LINE: FIELD: what is wrong`.
#[derive(Debug)]
pub struct ConfigError {
    /// The configuration file.
    pub file: PathBuf,
    /// The line, counted from 1; none if it is not about one line.
    pub line: Option<usize>,
    /// The field, for example `card.memory`; empty if it is not about one field.
    pub field: String,
    /// What is wrong, with the offending value.
    pub problem: Box<Problem>,
}

/// What is wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// The configuration cannot be read.
    #[error("cannot read: {0}")]
    Unreadable(std::io::Error),
    /// Not TOML, an unknown key, a missing key or a value of the wrong type.
    #[error("{0}")]
    Syntax(String),
    /// A number out of range.
    #[error("{value} is not within {least} to {most}")]
    OutOfRange {
        /// The number.
        value: u64,
        /// The least possible.
        least: u64,
        /// The most possible.
        most: u64,
    },
    /// Nothing of a kind that is needed.
    #[error("there is none, at least one is needed")]
    None,
    /// A name that cannot be one.
    #[error("{0:?} is not a name: expected 1 to 24 letters, digits, dots, dashes and underscores")]
    BadName(String),
    /// A name used twice.
    #[error("{name:?} is used on line {first} already")]
    DuplicateName {
        /// The name.
        name: String,
        /// Where it is used first.
        first: usize,
    },
    /// A card that is not defined.
    #[error("{name:?} is not a card of this run, which has: {}", .known.join(", "))]
    UnknownCard {
        /// The name.
        name: String,
        /// The cards that there are.
        known: Vec<String>,
    },
    /// Two builder units on one card.
    #[error("{card:?} is the card of builder unit {first:?} already; a card serves one builder unit")]
    CardTaken {
        /// The card.
        card: String,
        /// Who has it.
        first: String,
    },
    /// Settings that exclude each other, or one that lacks another.
    #[error("{0}")]
    Conflict(String),
    /// A value that is not among the possible ones.
    #[error("{value:?} is none of: {}", .known.join(", "))]
    UnknownValue {
        /// The value.
        value: String,
        /// The possible ones.
        known: &'static [&'static str],
    },
    /// An input that is refused; the error names the file and what is wrong with it.
    #[error(transparent)]
    Input(#[from] millstream_fragment::stream::ReadError),
    /// The same source in two inputs.
    #[error("{id} is in {} and in {}", .first.display(), .second.display())]
    DuplicateSource {
        /// The source.
        id: SourceId,
        /// One file.
        first: PathBuf,
        /// The other.
        second: PathBuf,
    },
    /// Inputs that do not belong together.
    #[error(
        "{} has events {} to {}, {} has {} to {}",
        .first.display(), .first_events.0, .first_events.1, .second.display(), .second_events.0, .second_events.1
    )]
    DifferentEvents {
        /// One file.
        first: PathBuf,
        /// Its first and last event.
        first_events: (u64, u64),
        /// The other file.
        second: PathBuf,
        /// Its first and last event.
        second_events: (u64, u64),
    },
    /// A source whose packets would be too long.
    #[error(transparent)]
    PacketTooLong(#[from] crate::layout::PacketTooLong),
    /// A card's memory does not hold the slots.
    #[error("{memory} is too small: {slots} slots of {slot} B and the kernel's areas need {needed} B")]
    MemoryTooSmall {
        /// What the card has.
        memory: super::Size,
        /// Slots of its builder unit.
        slots: u16,
        /// Size of one, in bytes.
        slot: u64,
        /// What is needed, in bytes.
        needed: u64,
    },
    /// The run's numbers do not fit their types.
    #[error(transparent)]
    Plan(#[from] crate::core::plan::PlanError),
    /// The trigger's geometry is refused; the error names the file and line.
    #[error(transparent)]
    Geometry(#[from] millstream_camera::TableError),
    /// The address to listen on is taken, or is none.
    #[error("cannot listen on {address:?}: {cause}")]
    Listen {
        /// The address.
        address: String,
        /// Why.
        cause: std::io::Error,
    },
    /// The output directory cannot be one.
    #[error("{}: {cause}", .path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// Why.
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
        // The problem is shown as part of this error; what is behind it comes next.
        self.problem.source()
    }
}
