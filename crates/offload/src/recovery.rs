//! Recovery from the loss of cards: the remaining and the spare cards compute the lost card's rows.
//!
//! ```text
//!   plan for all sweeps ─► job ─► done
//!                           │ a card fails
//!                           ▼
//!        the grid holds the latest checkpoint ─► remaining cards ─► plan for the sweeps after it ─► job …
//! ```
//!
//! A point's value does not depend on its tile, so the result is the same bit for bit on any cards.

use std::num::NonZeroU64;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use crate::OffloadError;
use crate::card::StencilCard;
use crate::grid::Grid;
use crate::job::{self, CheckpointPolicy, JobFailure};
use crate::plan::{Plan, PlanError};
use crate::timeline::{CardLoss, JobReport};

/// The cards of a job; cards may be lost while it runs.
pub trait CardGroup {
    /// One of the cards.
    type Card: StencilCard;

    /// The cards in the order of their tiles.
    fn cards_mut(&mut self) -> &mut [Self::Card];

    /// Removes lost cards, replaces them by spare cards if there are any, and reconnects neighbours. Call it
    /// while no job runs. Returns the names of the lost cards.
    ///
    /// # Errors
    /// An error that leaves the remaining cards unusable.
    fn replace_lost(&mut self) -> Result<Vec<String>, OffloadError>;
}

/// Options of a job.
#[derive(Clone, Copy, Debug)]
pub struct JobOptions {
    /// Number of sweeps.
    pub iterations: u64,
    /// The most sweeps between two halo exchanges, as in [`Plan::new`].
    pub depth: Option<u64>,
    /// The fewest sweeps between two checkpoints. `None`: a job that loses a card restarts.
    pub checkpoint_interval: Option<NonZeroU64>,
}

/// Computes the grid in place, and continues with other cards when cards are lost. `progress` gets the number of completed
/// sweeps, which drops after a loss. `spare` has the grid's shape.
///
/// # Errors
/// [`OffloadError::Card`] if a card fails and none is lost: it would fail again. [`OffloadError::Plan`] if
/// the grid does not fit on the given cards. [`OffloadError::NoCardsLeft`] if it does not fit on the
/// remaining cards.
pub fn run<G: CardGroup>(
    group: &mut G,
    grid: &mut Grid,
    spare: &mut Grid,
    options: &JobOptions,
    progress: &(dyn Fn(u64) + Sync),
    stop: &AtomicBool,
) -> Result<JobReport, OffloadError> {
    let start = Instant::now();
    let (mut done, mut losses) = (0, Vec::<CardLoss>::new());
    loop {
        let memories: Vec<_> = group.cards_mut().iter().map(StencilCard::memory_bytes).collect();
        let plan = Plan::new(grid.shape(), options.iterations - done, &memories, options.depth);
        let plan = plan.map_err(|cause| plan_error(&losses, cause))?;
        let ends: Vec<u64> = plan
            .blocks
            .iter()
            .scan(done, |sweeps, block| {
                *sweeps += block;
                Some(*sweeps)
            })
            .collect();
        let blocks_done = |blocks: usize| progress(ends[blocks - 1]);
        let checkpoints = CheckpointPolicy { spare, interval: options.checkpoint_interval };
        let (error, checkpoint_sweeps) =
            match job::run(&plan, grid, Some(checkpoints), group.cards_mut(), &blocks_done, stop) {
                Ok(report) => return Ok(report.after(losses, start.elapsed())),
                Err(JobFailure { error, checkpoint_sweeps }) => (error, checkpoint_sweeps),
            };
        if !matches!(error, OffloadError::Card { .. }) {
            return Err(error);
        }
        let lost = group.replace_lost()?;
        if lost.is_empty() {
            return Err(error);
        }
        done += checkpoint_sweeps;
        losses.push(CardLoss {
            cards: lost,
            cause: error.to_string(),
            sweeps: done,
            at_s: start.elapsed().as_secs_f64(),
        });
        progress(done);
    }
}

/// The error of a plan: of the given cards, or of the remaining ones.
fn plan_error(losses: &[CardLoss], cause: PlanError) -> OffloadError {
    match losses.last() {
        None => cause.into(),
        Some(CardLoss { cause: last_failure, .. }) => OffloadError::NoCardsLeft {
            lost: losses.iter().flat_map(|loss| loss.cards.clone()).collect(),
            last_failure: last_failure.clone(),
            cause,
        },
    }
}
