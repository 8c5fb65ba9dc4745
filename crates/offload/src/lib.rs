//! Tiled computation on remote cards: the five-point stencil.
//!
//! A grid is divided into tiles of rows, one a card ([`plan`]). Each card computes several sweeps of its tile; then the cards
//! exchange the rows at the tiles' boundaries ([`job`]). Transfers overlap with computation. A job drives cards through
//! [`card::StencilCard`]: leased cards on the network ([`leased`]), or cards in this process for tests. [`emulated`] starts
//! card processes for a job. Grids are read from files or generated ([`mod@file`], [`grid`]). [`timeline`] records each step with
//! its time. A job continues when it loses cards ([`recovery`]).

pub mod card;
pub mod emulated;
pub mod file;
pub mod grid;
pub mod job;
pub mod leased;
pub mod plan;
pub mod recovery;
pub mod timeline;

/// A job failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OffloadError {
    /// The grid and the cards do not fit together.
    #[error(transparent)]
    Plan(#[from] plan::PlanError),
    /// A file cannot be read or written.
    #[error(transparent)]
    File(#[from] file::FileError),
    /// The memory for the grid cannot be allocated on this host.
    #[error("cannot allocate a grid of {bytes} bytes: {cause}")]
    Memory {
        /// Size of the grid.
        bytes: u64,
        /// The operating system's error.
        cause: String,
    },
    /// A card failed.
    #[error("card {card}, {operation}: {cause}")]
    Card {
        /// The card's name.
        card: String,
        /// The operation that failed.
        operation: String,
        /// Why it failed.
        cause: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Cards were lost, and the remaining ones cannot hold the grid.
    #[error("lost {} (last failure: {last_failure}); the job cannot continue: {cause}", .lost.join(", "))]
    NoCardsLeft {
        /// The lost cards.
        lost: Vec<String>,
        /// The failure that revealed the last loss.
        last_failure: String,
        /// Why the remaining cards cannot hold the grid.
        cause: plan::PlanError,
    },
    /// The caller stopped the job.
    #[error("the job was stopped")]
    Stopped,
    /// The result differs from the reference.
    #[error("the result differs from the reference in {count} points, first in row {row}, column {column}")]
    Different {
        /// Number of differing points.
        count: u64,
        /// Row of the first one.
        row: u64,
        /// Column of the first one.
        column: u64,
    },
}
