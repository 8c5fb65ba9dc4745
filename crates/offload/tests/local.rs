//! Jobs on cards in this process: results, overlap of steps, failures of cards.

use std::num::NonZeroU64;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use millstream_card_abi::stencil::StencilArguments;
use millstream_offload::card::{CardError, ComputeRegion, HaloTransfer, InProcessCard, StencilCard};
use millstream_offload::grid::{Grid, Shape};
use millstream_offload::job::JobFailure;
use millstream_offload::plan::Plan;
use millstream_offload::recovery::{self, CardGroup, JobOptions};
use millstream_offload::timeline::{JobReport, StepKind};
use millstream_offload::{OffloadError, job};
use proptest::prelude::*;

fn generated(shape: Shape) -> Grid {
    let mut grid = Grid::zeros(shape, None).unwrap();
    grid.generate(9);
    grid
}

fn compute(
    grid: &mut Grid,
    iterations: u64,
    count: usize,
    depth: Option<u64>,
) -> Result<JobReport, OffloadError> {
    let memory = (2 * grid.shape().bytes() + (1 << 20)).next_multiple_of(4096);
    let mut cards = InProcessCard::adjacent(count, memory).unwrap();
    let plan = Plan::new(grid.shape(), iterations, &vec![memory; count], depth)?;
    job::run(&plan, grid, None, &mut cards, &|_| {}, &AtomicBool::new(false)).map_err(|failed| failed.error)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn the_result_is_the_reference_on_any_number_of_cards(
        (rows, columns) in (1u64..300, 1u64..80),
        iterations in 0u64..60,
        cards in 1usize..5,
        depth in prop_oneof![Just(None), (1u64..=16).prop_map(Some)],
        double: bool,
    ) {
        let mut grid = generated(Shape { rows, columns, double });
        let reference = grid.reference(iterations);
        match compute(&mut grid, iterations, cards, depth) {
            Ok(report) => {
                grid.compare(&reference).unwrap();
                prop_assert_eq!(report.iterations, iterations);
                prop_assert_eq!(report.blocks.iter().map(|block| block.sweeps).sum::<u64>(), iterations);
            }
            Err(error) => prop_assert!(matches!(error, OffloadError::Plan(_)), "{}", error),
        }
    }
}

#[test]
fn transfers_overlap_with_computation() {
    // Large enough for several bands a tile.
    let mut grid = generated(Shape { rows: 6000, columns: 256, double: false });
    let reference = grid.reference(40);
    let report = compute(&mut grid, 40, 2, None).unwrap();
    grid.compare(&reference).unwrap();
    let of = |kind: StepKind| report.steps.iter().filter(move |step| step.kind == kind);
    let overlaps = |kind: StepKind| {
        of(kind).any(|step| {
            of(StepKind::Compute).any(|other| {
                other.card == step.card && other.start_s < step.end_s && step.start_s < other.end_s
            })
        })
    };
    assert!(
        overlaps(StepKind::Write) && overlaps(StepKind::Read) && overlaps(StepKind::Halo),
        "{:#?}",
        report.steps
    );
    // All rows and the halos are written; all rows are read.
    assert_eq!(report.bytes[0], (6000 + 2 * report.depth) * 1024);
    assert_eq!(report.bytes[2], 6000 * 1024);
    assert_eq!(report.blocks.len(), 3);
    assert_eq!(of(StepKind::Halo).count(), 4);
    assert!(report.mean.compute_s > 0.0 && report.wall_s > 0.0);
}

/// A card that fails at its n-th operation.
#[derive(Debug)]
struct FailingCard {
    card: InProcessCard,
    left: AtomicUsize,
}

impl FailingCard {
    fn step(&self) -> Result<(), CardError> {
        match self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)) {
            Ok(1) => Err("it was killed".into()),
            _ => Ok(()),
        }
    }
}

impl StencilCard for FailingCard {
    fn name(&self) -> String {
        self.card.name()
    }

    fn memory_bytes(&self) -> u64 {
        self.card.memory_bytes()
    }

    fn start(&mut self, region: ComputeRegion, arguments: &StencilArguments) -> Result<(), CardError> {
        self.step()?;
        self.card.start(region, arguments)
    }

    fn wait(&mut self, region: ComputeRegion) -> Result<Duration, CardError> {
        let took = self.card.wait(region)?;
        self.step()?;
        Ok(took)
    }

    fn write(&mut self, grid: &Grid, bytes: Range<u64>, to: u64) -> Result<(), CardError> {
        self.step()?;
        self.card.write(grid, bytes, to)
    }

    unsafe fn read(&mut self, grid: &Grid, bytes: Range<u64>, from: u64) -> Result<(), CardError> {
        self.step()?;
        // SAFETY: the caller's promise.
        unsafe { self.card.read(grid, bytes, from) }
    }

    fn send(&mut self, transfers: &[HaloTransfer]) -> Result<(), CardError> {
        self.step()?;
        self.card.send(transfers)
    }
}

#[test]
fn the_error_of_a_failed_card_names_it_at_any_step() {
    let shape = Shape { rows: 90, columns: 20, double: false };
    let plan = Plan::new(shape, 20, &[1 << 20; 3], Some(5)).unwrap();
    let mut failures = 0;
    for at in 1..60 {
        let mut grid = generated(shape);
        let cards = InProcessCard::adjacent(3, 1 << 20).unwrap().into_iter().enumerate();
        let mut cards: Vec<_> = cards
            .map(|(number, card)| FailingCard {
                card,
                left: AtomicUsize::new(if number == 1 { at } else { 0 }),
            })
            .collect();
        match job::run(&plan, &mut grid, None, &mut cards, &|_| {}, &AtomicBool::new(false)) {
            Err(JobFailure { error: OffloadError::Card { card, cause, .. }, .. }) => {
                assert_eq!((card.as_str(), cause.to_string().as_str()), ("local 1", "it was killed"));
                failures += 1;
            }
            Ok(_) => assert!(failures > 10, "{at}"),
            Err(other) => panic!("{other}"),
        }
    }
    assert!(failures < 50, "some step is the last");
}

/// A group of cards whose last card fails.
struct FailingGroup(Vec<FailingCard>);

impl FailingGroup {
    fn new(count: usize, at: usize) -> FailingGroup {
        let cards = InProcessCard::adjacent(count, 1 << 20).unwrap().into_iter().enumerate();
        let left = |number| AtomicUsize::new(if number + 1 == count { at } else { 0 });
        FailingGroup(cards.map(|(number, card)| FailingCard { card, left: left(number) }).collect())
    }
}

impl CardGroup for FailingGroup {
    type Card = FailingCard;

    fn cards_mut(&mut self) -> &mut [FailingCard] {
        &mut self.0
    }

    fn replace_lost(&mut self) -> Result<Vec<String>, OffloadError> {
        let last = self.0.pop().unwrap();
        *self = FailingGroup::new(self.0.len(), 0);
        Ok(vec![last.name()])
    }
}

#[test]
fn the_result_is_the_same_after_a_loss_at_any_step() {
    let shape = Shape { rows: 90, columns: 20, double: false };
    let reference = generated(shape).reference(40);
    let mut from = Vec::new();
    for at in 1.. {
        let [mut grid, mut spare] = [generated(shape), Grid::zeros(shape, None).unwrap()];
        let options = JobOptions { iterations: 40, depth: Some(5), checkpoint_interval: NonZeroU64::new(8) };
        let never = AtomicBool::new(false);
        let report =
            recovery::run(&mut FailingGroup::new(3, at), &mut grid, &mut spare, &options, &|_| {}, &never);
        let report = report.unwrap();
        grid.compare(&reference).unwrap();
        assert_eq!(report.iterations, 40);
        match &report.losses[..] {
            [loss] => from.push(loss.sweeps),
            [] => break,
            more => panic!("{more:?}"),
        }
    }
    // The job continued from every checkpoint, and from the start.
    assert!(from.is_sorted() && from.len() > 30, "{from:?}");
    from.dedup();
    assert_eq!(from, [0, 10, 20, 30]);
}

#[test]
fn a_job_without_sweeps_leaves_the_grid_as_it_is() {
    let shape = Shape { rows: 90, columns: 20, double: false };
    let [mut grid, mut spare] = [generated(shape), Grid::zeros(shape, None).unwrap()];
    let options = JobOptions { iterations: 0, depth: None, checkpoint_interval: NonZeroU64::new(8) };
    let never = AtomicBool::new(false);
    recovery::run(&mut FailingGroup::new(3, 0), &mut grid, &mut spare, &options, &|_| {}, &never).unwrap();
    grid.compare(generated(shape).bytes()).unwrap();
}

#[test]
fn the_stop_flag_ends_a_job() {
    let shape = Shape { rows: 500, columns: 50, double: false };
    let plan = Plan::new(shape, 1000, &[1 << 20; 2], Some(1)).unwrap();
    let mut cards = InProcessCard::adjacent(2, 1 << 20).unwrap();
    let stop = AtomicBool::new(false);
    let progress = |blocks| stop.store(blocks >= 5, Ordering::Relaxed);
    let outcome = job::run(&plan, &mut generated(shape), None, &mut cards, &progress, &stop);
    assert!(matches!(outcome, Err(JobFailure { error: OffloadError::Stopped, .. })), "{outcome:?}");
}
