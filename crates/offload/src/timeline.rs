//! Reports of jobs: each step with its time, sums by block and by kind.

use std::time::Duration;

use serde::Serialize;

use crate::plan::Plan;

/// Kinds of steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum StepKind {
    /// The host writes rows to a card.
    Write,
    /// A card computes.
    Compute,
    /// Cards exchange boundary rows.
    Halo,
    /// The host reads result rows from a card.
    Read,
    /// The host reads rows for a checkpoint while the card computes.
    Checkpoint,
    /// A card waits for the other cards.
    Wait,
}

impl StepKind {
    /// All kinds, in the order of reports.
    pub const ALL: [StepKind; 6] = [
        StepKind::Write,
        StepKind::Compute,
        StepKind::Halo,
        StepKind::Read,
        StepKind::Checkpoint,
        StepKind::Wait,
    ];

    /// The name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            StepKind::Write => "write",
            StepKind::Compute => "compute",
            StepKind::Halo => "halo",
            StepKind::Read => "read",
            StepKind::Checkpoint => "checkpoint",
            StepKind::Wait => "wait",
        }
    }
}

/// One step of one card.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Step {
    /// The card's index.
    pub card: usize,
    /// The kind of step.
    pub kind: StepKind,
    /// The block's index.
    pub block: usize,
    /// Start, relative to the start of the job (s).
    pub start_s: f64,
    /// End, likewise (s).
    pub end_s: f64,
    /// Bytes transferred.
    pub bytes: u64,
}

impl Step {
    /// Duration (s).
    #[must_use]
    pub fn seconds(&self) -> f64 {
        self.end_s - self.start_s
    }
}

/// Times by kind of step (s).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Breakdown {
    /// Writing rows to cards.
    pub write_s: f64,
    /// Computing.
    pub compute_s: f64,
    /// Exchanging boundary rows between cards.
    pub halo_s: f64,
    /// Reading rows from cards.
    pub read_s: f64,
    /// Reading rows for checkpoints.
    pub checkpoint_s: f64,
    /// Waiting for other cards.
    pub wait_s: f64,
}

impl Breakdown {
    fn add(&mut self, kind: StepKind, seconds: f64) {
        *match kind {
            StepKind::Write => &mut self.write_s,
            StepKind::Compute => &mut self.compute_s,
            StepKind::Halo => &mut self.halo_s,
            StepKind::Read => &mut self.read_s,
            StepKind::Checkpoint => &mut self.checkpoint_s,
            StepKind::Wait => &mut self.wait_s,
        } += seconds;
    }

    /// The time of one kind (s).
    #[must_use]
    pub fn of(&self, kind: StepKind) -> f64 {
        match kind {
            StepKind::Write => self.write_s,
            StepKind::Compute => self.compute_s,
            StepKind::Halo => self.halo_s,
            StepKind::Read => self.read_s,
            StepKind::Checkpoint => self.checkpoint_s,
            StepKind::Wait => self.wait_s,
        }
    }
}

/// Sweeps and times of one block.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct BlockReport {
    /// Number of sweeps.
    pub sweeps: u64,
    /// From the start of its first step to the end of its last (s).
    pub wall_s: f64,
    /// `wall_s` per sweep (s).
    pub per_iteration_s: f64,
    /// Times by kind, averaged over the cards. Overlapping steps count in full, so the sum may exceed the wall time.
    pub mean: Breakdown,
}

/// The loss of cards during a job.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CardLoss {
    /// The lost cards.
    pub cards: Vec<String>,
    /// The failure that revealed the loss.
    pub cause: String,
    /// Sweeps of the checkpoint from which the job continued.
    pub sweeps: u64,
    /// When it continued, relative to the start of the job (s).
    pub at_s: f64,
}

/// The report of a job. After a loss of cards, `depth`, `cards`, `rows`, `bytes`, `mean`, `blocks` and
/// `steps` cover the time since the last loss. The other fields cover the whole job.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct JobReport {
    /// Rows and columns.
    pub grid: [u64; 2],
    /// `float32` or `float64`.
    pub element: &'static str,
    /// Number of sweeps.
    pub iterations: u64,
    /// The most sweeps between two halo exchanges.
    pub depth: u64,
    /// Names of the cards.
    pub cards: Vec<String>,
    /// Rows that each card computes.
    pub rows: Vec<u64>,
    /// From the first byte written to the last byte read (s).
    pub wall_s: f64,
    /// Points computed per second, without points that two cards compute.
    pub points_per_s: f64,
    /// Bytes written to cards, exchanged between cards, read from cards.
    pub bytes: [u64; 3],
    /// Times by kind over all blocks, averaged over the cards.
    pub mean: Breakdown,
    /// The blocks.
    pub blocks: Vec<BlockReport>,
    /// All steps.
    pub steps: Vec<Step>,
    /// Losses of cards.
    pub losses: Vec<CardLoss>,
}

impl JobReport {
    pub(crate) fn new(plan: &Plan, cards: Vec<String>, wall: Duration, mut steps: Vec<Step>) -> JobReport {
        steps.sort_by(|a, b| a.start_s.total_cmp(&b.start_s));
        let n = cards.len().max(1) as f64;
        let mean = |block: Option<usize>| {
            let mut sum = Breakdown::default();
            for step in steps.iter().filter(|step| block.is_none_or(|block| step.block == block)) {
                sum.add(step.kind, step.seconds() / n);
            }
            sum
        };
        let blocks = plan.blocks.iter().enumerate().map(|(index, &sweeps)| {
            let of = || steps.iter().filter(move |step| step.block == index);
            let start = of().map(|step| step.start_s).fold(f64::INFINITY, f64::min);
            let end = of().map(|step| step.end_s).fold(0.0, f64::max);
            let wall_s = (end - start).max(0.0);
            BlockReport { sweeps, wall_s, per_iteration_s: wall_s / sweeps as f64, mean: mean(Some(index)) }
        });
        let bytes = |kind| steps.iter().filter(|step| step.kind == kind).map(|step| step.bytes).sum();
        let wall_s = wall.as_secs_f64();
        let iterations = plan.iterations();
        JobReport {
            grid: [plan.shape.rows, plan.shape.columns],
            element: if plan.shape.double { "float64" } else { "float32" },
            iterations,
            depth: plan.blocks.iter().copied().max().unwrap_or(0),
            rows: plan.tiles.iter().map(|tile| tile.owned.end - tile.owned.start).collect(),
            wall_s,
            points_per_s: (plan.shape.points() * iterations) as f64 / wall_s.max(1e-9),
            bytes: [StepKind::Write, StepKind::Halo, StepKind::Read].map(bytes),
            mean: mean(None),
            blocks: blocks.collect(),
            cards,
            steps,
            losses: Vec::new(),
        }
    }

    /// The report of the whole job, given its losses and its total time.
    pub(crate) fn after(self, losses: Vec<CardLoss>, wall: Duration) -> JobReport {
        let Some(last) = losses.last() else { return self };
        let iterations = last.sweeps + self.iterations;
        let wall_s = wall.as_secs_f64();
        let points = (self.grid[0] * self.grid[1] * iterations) as f64;
        JobReport { iterations, wall_s, points_per_s: points / wall_s.max(1e-9), losses, ..self }
    }
}
