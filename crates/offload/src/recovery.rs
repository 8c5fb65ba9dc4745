//! Going on without a card: what a lost one was to compute is computed by the others, or by a spare one.
//!
//! ```text
//!   plan for all sweeps ─► job ─► done
//!                           │ a card fails
//!                           ▼
//!        the grid is the latest checkpoint's ─► who is left? ─► plan for the sweeps after it ─► job …
//! ```
//!
//! A point's value does not depend on the tile that it is in, so the result is the same bit for bit, whatever card
//! computed it.

use std::num::NonZeroU64;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use crate::OffloadError;
use crate::grid::Grid;
use crate::job::{self, Failed, Saves};
use crate::plan::{Plan, PlanError};
use crate::timeline::{JobReport, Loss};
use crate::worker::Worker;

/// Cards that compute a grid together, and what becomes of them when one fails.
pub trait Crew {
    /// One of the cards.
    type Worker: Worker;

    /// The cards, in the order in which their tiles follow each other.
    fn workers(&mut self) -> &mut [Self::Worker];

    /// Parts with cards that are gone, takes spare ones in their places as far as there are any, and makes those that
    /// follow each other neighbours. Nothing is computed meanwhile. Returns the names of those that are gone.
    ///
    /// # Errors
    /// What makes the cards that are left useless.
    fn regroup(&mut self) -> Result<Vec<String>, OffloadError>;
}

/// What is to be done.
#[derive(Clone, Copy, Debug)]
pub struct Order {
    /// Sweeps.
    pub iterations: u64,
    /// Most sweeps between two exchanges, as in [`Plan::new`].
    pub depth: Option<u64>,
    /// Sweeps from one checkpoint to the next, at least. None: a job that loses a card begins anew.
    pub checkpoint: Option<NonZeroU64>,
}

/// Computes the grid, in place, on the cards of a crew, and goes on with fewer when one fails. `progress` hears how many
/// sweeps are over: fewer than before after a loss. `spare` has the grid's shape.
///
/// # Errors
/// [`OffloadError::Card`] if a card fails and none is gone: it would fail again. [`OffloadError::Plan`] if the grid does
/// not fit on the cards that there are. [`OffloadError::Bereft`] if it does not fit on those that are left.
pub fn run<C: Crew>(
    crew: &mut C,
    grid: &mut Grid,
    spare: &mut Grid,
    order: &Order,
    progress: &(dyn Fn(u64) + Sync),
    stop: &AtomicBool,
) -> Result<JobReport, OffloadError> {
    let start = Instant::now();
    let (mut done, mut losses) = (0, Vec::<Loss>::new());
    loop {
        let memories: Vec<_> = crew.workers().iter().map(Worker::memory_bytes).collect();
        let plan = Plan::new(grid.shape(), order.iterations - done, &memories, order.depth);
        let plan = plan.map_err(|cause| bereft(&losses, cause))?;
        let ends: Vec<u64> = plan
            .blocks
            .iter()
            .scan(done, |sweeps, block| {
                *sweeps += block;
                Some(*sweeps)
            })
            .collect();
        let blocks_over = |blocks: usize| progress(ends[blocks - 1]);
        let saves = Saves { spare, every: order.checkpoint };
        let (error, saved) = match job::run(&plan, grid, Some(saves), crew.workers(), &blocks_over, stop) {
            Ok(report) => return Ok(report.after(losses, start.elapsed())),
            Err(Failed { error, saved }) => (error, saved),
        };
        if !matches!(error, OffloadError::Card { .. }) {
            return Err(error);
        }
        let gone = crew.regroup()?;
        if gone.is_empty() {
            return Err(error);
        }
        done += saved;
        losses.push(Loss {
            cards: gone,
            cause: error.to_string(),
            sweeps: done,
            at_s: start.elapsed().as_secs_f64(),
        });
        progress(done);
    }
}

/// Why a plan cannot be made: in the first place, or because cards are gone.
fn bereft(losses: &[Loss], cause: PlanError) -> OffloadError {
    match losses.last() {
        None => cause.into(),
        Some(Loss { cause: why, .. }) => OffloadError::Bereft {
            gone: losses.iter().flat_map(|loss| loss.cards.clone()).collect(),
            why: why.clone(),
            cause,
        },
    }
}
