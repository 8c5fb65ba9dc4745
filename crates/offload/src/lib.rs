//! Tiled computation on remote cards: the five-point stencil.
//!
//! A grid is cut into tiles of rows, one for each card. Every card computes several sweeps of its tile, the
//! cards send each other the rows at the edges, and so on ([`plan`] says which rows, [`job`] in which order).
//! Rows travel while others are computed. What the job needs of a card is [`worker::Worker`]: a leased card
//! over the network, or for tests one in this process. Grids come from files or are generated ([`grid`],
//! [`file`]); every step is noted with its time ([`timeline`]). A job outlives the loss of cards ([`recovery`]).

pub mod emulated;
pub mod file;
pub mod grid;
pub mod job;
pub mod plan;
pub mod recovery;
pub mod remote;
pub mod timeline;
pub mod worker;

/// Why a job could not be done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OffloadError {
    /// The grid and the cards do not fit together.
    #[error(transparent)]
    Plan(#[from] plan::PlanError),
    /// A file cannot be read or written.
    #[error(transparent)]
    File(#[from] file::FileError),
    /// There is no memory for the grid on this host.
    #[error("cannot hold a grid of {bytes} bytes: {cause}")]
    Memory {
        /// Its size.
        bytes: u64,
        /// What the system says.
        cause: String,
    },
    /// A card failed.
    #[error("card {card}, {doing}: {cause}")]
    Card {
        /// Which.
        card: String,
        /// What it was to do.
        doing: String,
        /// What is wrong.
        cause: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Cards are gone, and the others cannot do the job.
    #[error("lost {}, the latest by this: {why}; the others cannot go on: {cause}", .gone.join(", "))]
    Bereft {
        /// The cards that are gone.
        gone: Vec<String>,
        /// How the latest loss was noticed.
        why: String,
        /// Why those that are left cannot do it.
        cause: plan::PlanError,
    },
    /// Somebody asked it to stop.
    #[error("stopped")]
    Stopped,
    /// Another result than the reference's.
    #[error("the result differs from the reference in {count} points, first in row {row}, column {column}")]
    Different {
        /// In how many points.
        count: u64,
        /// Where first.
        row: u64,
        /// Where first.
        column: u64,
    },
}
