//! The checks of the over-relaxed spin glass: the same bits for every cut, conservation, reversibility, resumption.

use millstream_application::{ApplicationError, FailAt, run_on_threads};
use millstream_fabric::FabricError;
use millstream_spin::glass::{self, GlassOptions, GlassReport};
use millstream_spin::{Block, Extent, Lattice, Real, Reference, Sums, Sweeper, VectorUnit};
use millstream_torus_core::NodeNumber;
use proptest::prelude::*;

fn options(size: [usize; 3], sweeps: u64, depth: usize) -> GlassOptions {
    GlassOptions {
        lattice: Lattice::new(size, 42).unwrap(),
        sweeps,
        depth,
        threads: 1,
        measure_every: 1000,
        checkpoint: None,
        checkpoint_every: 10,
        resume: false,
        fail_at: None,
        plane: false,
        on_card: false,
    }
}

fn run_all<E: Real>(dimensions: &str, options: &GlassOptions) -> Vec<Result<GlassReport, ApplicationError>> {
    run_on_threads(dimensions.parse().unwrap(), |node| glass::run::<E, _>(node, options))
}

fn run<E: Real>(dimensions: &str, options: &GlassOptions) -> GlassReport {
    let mut reports: Vec<_> = run_all::<E>(dimensions, options).into_iter().map(Result::unwrap).collect();
    let first = reports.remove(0);
    assert!(reports.iter().all(|report| *report == first), "all nodes have the same report");
    first
}

fn whole(lattice: Lattice, depth: usize) -> Block<f32> {
    Block::new(lattice, Extent { origin: [0; 3], size: lattice.size }, depth)
}

#[test]
fn sweeps_equal_the_site_by_site_reference() {
    let lattice = Lattice::new([8; 3], 7).unwrap();
    let mut reference = Reference::new(lattice);
    assert_eq!(whole(lattice, 1).checksum(), reference.checksum());
    for sweep in 1..=12_u64 {
        reference.sweep();
        let report = run::<f32>("2x2x2", &GlassOptions { lattice, ..options([8; 3], sweep, 1) });
        assert_eq!(report.last().unwrap().checksum, reference.checksum(), "sweep {sweep}");
    }
}

#[test]
fn every_shape_depth_and_number_of_threads_gives_the_same_bits() {
    // Unequal, not powers of two, so that blocks differ in size.
    let size = [22, 18, 20];
    let mut reference = Reference::new(options(size, 0, 1).lattice);
    (0..13).for_each(|_| reference.sweep());
    for (dimensions, depth, threads) in [
        ("1x1x1", 1, 1),
        ("1x1x1", 3, 2),
        ("1x1x1", 8, 3),
        ("2x1x1", 2, 1),
        ("1x2x1", 3, 2),
        ("1x1x2", 4, 1),
        ("2x2x1", 2, 1),
        ("1x2x2", 3, 1),
        ("4x1x1", 2, 1),
        ("3x3x1", 1, 1),
        ("2x2x2", 2, 2),
        ("8x1x1", 1, 1),
        ("1x2x4", 2, 1),
    ] {
        let report = run::<f32>(dimensions, &GlassOptions { threads, ..options(size, 13, depth) });
        let last = *report.last().unwrap();
        assert_eq!(last.checksum, reference.checksum(), "{dimensions}, depth {depth}, {threads} threads");
        assert_eq!(last.sweep, 13);
    }
}

#[test]
fn energies_do_not_depend_on_the_cut() {
    let measured = |dimensions, depth| {
        let options = GlassOptions { measure_every: 5, ..options([12, 16, 8], 20, depth) };
        run::<f64>(dimensions, &options).measurements
    };
    let alone = measured("1x1x1", 4);
    assert_eq!(alone.iter().map(|m| m.sweep).collect::<Vec<_>>(), [0, 5, 10, 15, 20]);
    assert!((alone[0].overlap - 1.0).abs() < 1e-9 && alone[4].overlap < 0.9, "{alone:?}");
    for (dimensions, depth) in [("3x2x2", 2), ("2x4x1", 1), ("1x1x2", 2)] {
        assert_eq!(measured(dimensions, depth), alone, "{dimensions}");
    }
}

#[test]
fn energy_and_norms_are_conserved_over_a_thousand_sweeps() {
    let report = run::<f32>("1x1x2", &options([16; 3], 1000, 4));
    assert!(report.energy_drift <= 1e-6, "{}", report.energy_drift);
    assert!(report.last().unwrap().norm_deviation <= 1e-4, "{report:?}");
    let report = run::<f64>("1x1x2", &options([16; 3], 1000, 4));
    assert!(report.energy_drift <= 1e-13, "{}", report.energy_drift);
    assert!(report.last().unwrap().norm_deviation <= 1e-12, "{report:?}");
}

#[test]
fn a_half_sweep_done_twice_returns_the_spins() {
    let lattice = Lattice::new([16; 3], 3).unwrap();
    let mut block = whole(lattice, 1);
    let before = block.clone();
    let inside = block.inside();
    let sweeper = Sweeper::new(1);
    let largest = |block: &Block<f32>| {
        let mut largest = 0.0_f32;
        for z in 0..16 {
            for y in 0..16 {
                for x in 0..16 {
                    let (a, b) = (block.spin([x, y, z]), before.spin([x, y, z]));
                    (0..3).for_each(|c| largest = largest.max((a[c] - b[c]).abs()));
                }
            }
        }
        largest
    };
    sweeper.half_sweep(&mut block, &inside, 1);
    assert!(largest(&block) > 0.5, "the half-sweep moves spins");
    sweeper.half_sweep(&mut block, &inside, 1);
    let error = largest(&block);
    assert!(error <= 1e-6, "{error}");
}

#[test]
fn a_site_without_field_keeps_its_spin() {
    let lattice = Lattice::new([8; 3], 3).unwrap();
    let mut block = whole(lattice, 1);
    block.set_spins(|[x, y, z]| if (x + y + z) % 2 == 0 { [0.6, 0.0, 0.8] } else { [0.0; 3] });
    let before = block.checksum();
    Sweeper::new(1).half_sweep(&mut block, &[0..8, 0..8, 0..8], 0);
    assert_eq!(block.checksum(), before);
}

#[test]
fn a_lost_node_is_named_and_the_run_resumes_on_other_shapes() {
    let size = [16, 12, 20];
    let expected = run::<f32>("1x1x1", &GlassOptions { measure_every: 8, ..options(size, 40, 2) });
    for (first, then) in [("2x2x2", "7x1x1"), ("1x2x2", "3x1x2"), ("1x1x2", "1x1x1"), ("1x1x1", "2x1x1")] {
        let folder = tempfile::tempdir().unwrap();
        let saving = GlassOptions {
            measure_every: 8,
            checkpoint: Some(folder.path().to_owned()),
            ..options(size, 40, 1)
        };
        let failing =
            GlassOptions { fail_at: Some(FailAt { node: NodeNumber(0), step: 27 }), ..saving.clone() };
        for (node, result) in run_all::<f32>(first, &failing).into_iter().enumerate() {
            match (node, result.unwrap_err()) {
                (0, ApplicationError::ToldToFail { step: 27 }) => {}
                (1.., ApplicationError::Fabric(FabricError::NodeLost { .. })) => {}
                (node, error) => panic!("node {node}: {error}"),
            }
        }
        let resumed = run::<f32>(then, &GlassOptions { resume: true, ..saving });
        assert_eq!(resumed.resumed_after, Some(20), "{first} to {then}");
        assert_eq!(resumed.measurements, expected.measurements, "{first} to {then}");
    }
}

/// A run resumes with as many sweeps as its checkpoint has, and is refused with fewer.
#[test]
fn a_run_does_not_resume_behind_its_end() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Some(folder.path().to_owned());
    let saving = GlassOptions { checkpoint, measure_every: 10, ..options([8; 3], 20, 1) };
    let expected = run::<f32>("2x1x1", &saving);
    let resumed = run::<f32>("2x1x1", &GlassOptions { resume: true, ..saving.clone() });
    assert_eq!((resumed.resumed_after, resumed.measurements), (Some(20), expected.measurements));
    for result in run_all::<f32>("2x1x1", &GlassOptions { resume: true, sweeps: 7, ..saving }) {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("--sweeps 7: the checkpoint is that of sweep 20"), "{error}");
    }
}

#[test]
fn impossible_parameters_are_refused_on_every_node() {
    for result in run_all::<f32>("1x4x1", &options([8, 8, 8], 4, 2)) {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("4 nodes cut 8 sites in y into blocks of 2"), "{error}");
    }
    assert!(Lattice::new([8, 7, 8], 0).unwrap_err().to_string().contains("7 sites in y"));
    assert!(Lattice::new([1 << 20; 3], 0).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Any unit, tile height, threads and number of half-sweeps: the same bits as single half-sweeps.
    #[test]
    fn tiles_do_not_change_the_result(
        size in prop::array::uniform3(2..9_usize),
        half_sweeps in 1..12_usize,
        rows in prop::option::of(1..6_usize),
        threads in 1..4_usize,
        unit in prop::sample::select(VectorUnit::ALL.to_vec()),
        seed: u64,
    ) {
        let lattice = Lattice::new(size.map(|n| (2 * n).max(8)), seed).unwrap();
        let mut plain = whole(lattice, 4);
        let mut tiled = plain.clone();
        for h in 0..half_sweeps {
            let inside = plain.inside();
            Sweeper::with(1, VectorUnit::Portable, Some(1000)).half_sweep(&mut plain, &inside, h % 2);
        }
        Sweeper::with(threads, unit, rows).sweep(&mut tiled, half_sweeps);
        prop_assert_eq!(tiled.checksum(), plain.checksum());
    }

    #[test]
    fn sums_of_any_bytes_are_read(bytes in prop::collection::vec(any::<u8>(), millstream_spin::SUMS_BYTES)) {
        let bytes: [u8; millstream_spin::SUMS_BYTES] = bytes.try_into().unwrap();
        prop_assert_eq!(Sums::from_bytes(&bytes).to_bytes(), bytes);
    }
}
