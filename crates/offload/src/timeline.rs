//! What was done when, for people and programs.

use std::time::Duration;

use serde::Serialize;

use crate::plan::Plan;

/// Kinds of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Rows are written to a card.
    Write,
    /// A card computes.
    Compute,
    /// Cards send each other rows.
    Halo,
    /// Rows are read from a card.
    Read,
    /// A checkpoint: rows are read from a card that goes on.
    Save,
    /// A card waits for the others.
    Wait,
}

impl Kind {
    /// All of them, in the order in which they are listed.
    pub const ALL: [Kind; 6] = [Kind::Write, Kind::Compute, Kind::Halo, Kind::Read, Kind::Save, Kind::Wait];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Kind::Write => "write",
            Kind::Compute => "compute",
            Kind::Halo => "halo",
            Kind::Read => "read",
            Kind::Save => "save",
            Kind::Wait => "wait",
        }
    }
}

/// One piece of work of one card.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Step {
    /// Which card, from 0.
    pub card: usize,
    /// What.
    pub kind: Kind,
    /// In which block, from 0.
    pub block: usize,
    /// When it began, since the start of the job [s].
    pub start_s: f64,
    /// When it ended [s].
    pub end_s: f64,
    /// Bytes moved, if any were.
    pub bytes: u64,
}

impl Step {
    /// How long it took [s].
    #[must_use]
    pub fn seconds(&self) -> f64 {
        self.end_s - self.start_s
    }
}

/// Times by kind [s].
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Breakdown {
    /// Writing rows to cards.
    pub write_s: f64,
    /// Computing.
    pub compute_s: f64,
    /// Rows between cards.
    pub halo_s: f64,
    /// Reading rows from cards.
    pub read_s: f64,
    /// Reading rows for checkpoints.
    pub save_s: f64,
    /// Waiting for other cards.
    pub wait_s: f64,
}

impl Breakdown {
    fn add(&mut self, kind: Kind, seconds: f64) {
        *match kind {
            Kind::Write => &mut self.write_s,
            Kind::Compute => &mut self.compute_s,
            Kind::Halo => &mut self.halo_s,
            Kind::Read => &mut self.read_s,
            Kind::Save => &mut self.save_s,
            Kind::Wait => &mut self.wait_s,
        } += seconds;
    }

    /// The time of one kind [s].
    #[must_use]
    pub fn of(&self, kind: Kind) -> f64 {
        match kind {
            Kind::Write => self.write_s,
            Kind::Compute => self.compute_s,
            Kind::Halo => self.halo_s,
            Kind::Read => self.read_s,
            Kind::Save => self.save_s,
            Kind::Wait => self.wait_s,
        }
    }
}

/// The times of one block.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct BlockReport {
    /// Sweeps made.
    pub sweeps: u64,
    /// From its first step to its last [s].
    pub wall_s: f64,
    /// That for one sweep [s].
    pub per_iteration_s: f64,
    /// What cards did, on average over the cards. Overlapping work counts in full, so the sum may exceed the
    /// wall time.
    pub mean: Breakdown,
}

/// Cards that were lost on the way.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Loss {
    /// Which cards.
    pub cards: Vec<String>,
    /// How it was noticed.
    pub cause: String,
    /// The sweeps of the checkpoint from which the job went on.
    pub sweeps: u64,
    /// When it went on, since the start of the job [s].
    pub at_s: f64,
}

/// What came of a job. If cards were lost on the way, `depth`, `cards`, `rows`, `bytes`, `mean`, `blocks` and `steps` are
/// of the time after the latest loss; the others are of the whole job.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct JobReport {
    /// Rows and columns.
    pub grid: [u64; 2],
    /// `float32` or `float64`.
    pub element: &'static str,
    /// Sweeps.
    pub iterations: u64,
    /// Most sweeps between two exchanges.
    pub depth: u64,
    /// Cards by name.
    pub cards: Vec<String>,
    /// Rows of each card.
    pub rows: Vec<u64>,
    /// From the first byte written to the last one read [s].
    pub wall_s: f64,
    /// Points computed, without what cards computed twice, per second.
    pub points_per_s: f64,
    /// Bytes written to cards, sent between cards, read from cards.
    pub bytes: [u64; 3],
    /// All blocks together, on average over the cards.
    pub mean: Breakdown,
    /// Block by block.
    pub blocks: Vec<BlockReport>,
    /// Every step.
    pub steps: Vec<Step>,
    /// Cards that were lost.
    pub losses: Vec<Loss>,
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
            rows: plan.tiles.iter().map(|tile| tile.own.end - tile.own.start).collect(),
            wall_s,
            points_per_s: (plan.shape.points() * iterations) as f64 / wall_s.max(1e-9),
            bytes: [Kind::Write, Kind::Halo, Kind::Read].map(bytes),
            mean: mean(None),
            blocks: blocks.collect(),
            cards,
            steps,
            losses: Vec::new(),
        }
    }

    /// The report of a job that took `wall` with everything before the latest loss.
    pub(crate) fn after(self, losses: Vec<Loss>, wall: Duration) -> JobReport {
        let Some(last) = losses.last() else { return self };
        let iterations = last.sweeps + self.iterations;
        let wall_s = wall.as_secs_f64();
        let points = (self.grid[0] * self.grid[1] * iterations) as f64;
        JobReport { iterations, wall_s, points_per_s: points / wall_s.max(1e-9), losses, ..self }
    }
}
