//! Jobs on cards in this process: the result, what overlaps, and what happens when a card fails.

use std::num::NonZeroU64;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use millstream_card::region::stencil::StencilArguments;
use millstream_offload::grid::{Grid, Shape};
use millstream_offload::job::Failed;
use millstream_offload::plan::Plan;
use millstream_offload::recovery::{self, Crew, Order};
use millstream_offload::timeline::{JobReport, Kind};
use millstream_offload::worker::{Lane, LocalCard, Parcel, Worker, WorkerError};
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
    cards: usize,
    depth: Option<u64>,
) -> Result<JobReport, OffloadError> {
    let memory = (2 * grid.shape().bytes() + (1 << 20)).next_multiple_of(4096);
    let mut workers = LocalCard::row(cards, memory).unwrap();
    let plan = Plan::new(grid.shape(), iterations, &vec![memory; cards], depth)?;
    job::run(&plan, grid, None, &mut workers, &|_| {}, &AtomicBool::new(false)).map_err(|failed| failed.error)
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
fn rows_come_and_go_while_others_are_computed() {
    // Several bands a tile.
    let mut grid = generated(Shape { rows: 6000, columns: 256, double: false });
    let reference = grid.reference(40);
    let report = compute(&mut grid, 40, 2, None).unwrap();
    grid.compare(&reference).unwrap();
    let of = |kind: Kind| report.steps.iter().filter(move |step| step.kind == kind);
    let overlaps = |kind: Kind| {
        of(kind).any(|step| {
            of(Kind::Compute).any(|other| {
                other.card == step.card && other.start_s < step.end_s && step.start_s < other.end_s
            })
        })
    };
    assert!(overlaps(Kind::Write) && overlaps(Kind::Read) && overlaps(Kind::Halo), "{:#?}", report.steps);
    // All rows and the halos between the two cards go out, all rows come back.
    assert_eq!(report.bytes[0], (6000 + 2 * report.depth) * 1024);
    assert_eq!(report.bytes[2], 6000 * 1024);
    assert_eq!(report.blocks.len(), 3);
    assert_eq!(of(Kind::Halo).count(), 4);
    assert!(report.mean.compute_s > 0.0 && report.wall_s > 0.0);
}

/// A card that fails at its n-th step.
#[derive(Debug)]
struct Failing {
    card: LocalCard,
    left: AtomicUsize,
}

impl Failing {
    fn step(&self) -> Result<(), WorkerError> {
        match self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)) {
            Ok(1) => Err("it was killed".into()),
            _ => Ok(()),
        }
    }
}

impl Worker for Failing {
    fn name(&self) -> String {
        self.card.name()
    }

    fn memory_bytes(&self) -> u64 {
        self.card.memory_bytes()
    }

    fn start(&mut self, lane: Lane, arguments: &StencilArguments) -> Result<(), WorkerError> {
        self.step()?;
        self.card.start(lane, arguments)
    }

    fn wait(&mut self, lane: Lane) -> Result<Duration, WorkerError> {
        let took = self.card.wait(lane)?;
        self.step()?;
        Ok(took)
    }

    fn write(&mut self, grid: &Grid, bytes: Range<u64>, to: u64) -> Result<(), WorkerError> {
        self.step()?;
        self.card.write(grid, bytes, to)
    }

    unsafe fn read(&mut self, grid: &Grid, bytes: Range<u64>, from: u64) -> Result<(), WorkerError> {
        self.step()?;
        // SAFETY: the caller's.
        unsafe { self.card.read(grid, bytes, from) }
    }

    fn send(&mut self, parcels: &[Parcel]) -> Result<(), WorkerError> {
        self.step()?;
        self.card.send(parcels)
    }
}

#[test]
fn a_card_that_fails_at_any_step_ends_the_job_with_its_name() {
    let shape = Shape { rows: 90, columns: 20, double: false };
    let plan = Plan::new(shape, 20, &[1 << 20; 3], Some(5)).unwrap();
    let mut failures = 0;
    for at in 1..60 {
        let mut grid = generated(shape);
        let cards = LocalCard::row(3, 1 << 20).unwrap().into_iter().enumerate();
        let mut workers: Vec<_> = cards
            .map(|(number, card)| Failing { card, left: AtomicUsize::new(if number == 1 { at } else { 0 }) })
            .collect();
        match job::run(&plan, &mut grid, None, &mut workers, &|_| {}, &AtomicBool::new(false)) {
            Err(Failed { error: OffloadError::Card { card, cause, .. }, .. }) => {
                assert_eq!((card.as_str(), cause.to_string().as_str()), ("local 1", "it was killed"));
                failures += 1;
            }
            Ok(_) => assert!(failures > 10, "{at}"),
            Err(other) => panic!("{other}"),
        }
    }
    assert!(failures < 50, "some step is the last");
}

/// Cards of which one fails; the others go on.
struct Team(Vec<Failing>);

impl Team {
    fn new(count: usize, at: usize) -> Team {
        let cards = LocalCard::row(count, 1 << 20).unwrap().into_iter().enumerate();
        let left = |number| AtomicUsize::new(if number + 1 == count { at } else { 0 });
        Team(cards.map(|(number, card)| Failing { card, left: left(number) }).collect())
    }
}

impl Crew for Team {
    type Worker = Failing;

    fn workers(&mut self) -> &mut [Failing] {
        &mut self.0
    }

    fn regroup(&mut self) -> Result<Vec<String>, OffloadError> {
        let last = self.0.pop().unwrap();
        *self = Team::new(self.0.len(), 0);
        Ok(vec![last.name()])
    }
}

#[test]
fn a_job_that_loses_a_card_at_any_step_has_the_same_result() {
    let shape = Shape { rows: 90, columns: 20, double: false };
    let reference = generated(shape).reference(40);
    let mut from = Vec::new();
    for at in 1.. {
        let [mut grid, mut spare] = [generated(shape), Grid::zeros(shape, None).unwrap()];
        let order = Order { iterations: 40, depth: Some(5), checkpoint: NonZeroU64::new(8) };
        let never = AtomicBool::new(false);
        let report = recovery::run(&mut Team::new(3, at), &mut grid, &mut spare, &order, &|_| {}, &never);
        let report = report.unwrap();
        grid.compare(&reference).unwrap();
        assert_eq!(report.iterations, 40);
        match &report.losses[..] {
            [loss] => from.push(loss.sweeps),
            [] => break,
            more => panic!("{more:?}"),
        }
    }
    // Every checkpoint was gone on from, and the start.
    assert!(from.is_sorted() && from.len() > 30, "{from:?}");
    from.dedup();
    assert_eq!(from, [0, 10, 20, 30]);
}

#[test]
fn a_job_stops_when_told_to() {
    let shape = Shape { rows: 500, columns: 50, double: false };
    let plan = Plan::new(shape, 1000, &[1 << 20; 2], Some(1)).unwrap();
    let mut workers = LocalCard::row(2, 1 << 20).unwrap();
    let stop = AtomicBool::new(false);
    let progress = |blocks| stop.store(blocks >= 5, Ordering::Relaxed);
    let outcome = job::run(&plan, &mut generated(shape), None, &mut workers, &progress, &stop);
    assert!(matches!(outcome, Err(Failed { error: OffloadError::Stopped, .. })), "{outcome:?}");
}
