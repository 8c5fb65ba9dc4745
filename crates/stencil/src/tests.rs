//! All vector units, depths, thread counts and shapes agree with the reference, bit for bit.

use proptest::prelude::*;

use super::*;

/// A grid of random cells, with gaps between its rows.
struct Grid<E> {
    cells: Vec<E>,
    pitch: usize,
    rows: usize,
    columns: usize,
}

const GAP: u32 = 0x7f7f_7f7f;

impl<E: Element + From<f32>> Grid<E> {
    fn noise(rows: usize, columns: usize, pitch: usize, seed: u32) -> Grid<E> {
        let mut state = seed | 1;
        let cells = (0..rows * pitch).map(|at| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let noise = (state >> 8) as f32 / 65536.0 - 100.0;
            E::from(if at % pitch < columns { noise } else { f32::from_bits(GAP) })
        });
        Grid { cells: cells.collect(), pitch, rows, columns }
    }

    fn plane(&mut self) -> Plane<E> {
        Plane { base: self.cells.as_mut_ptr(), pitch: self.pitch, rows: self.rows, columns: self.columns }
    }

    fn packed(&self) -> Vec<E> {
        self.cells.chunks(self.pitch).flat_map(|row| row[..self.columns].to_vec()).collect()
    }

    fn gaps_are_whole(&self) -> bool {
        let gap = E::from(f32::from_bits(GAP));
        self.cells.chunks(self.pitch).all(|row| row[self.columns..].iter().all(|&cell| cell == gap))
    }
}

fn check<E: Element + From<f32>>(
    (rows, columns, more): (usize, usize, usize),
    sweeps: usize,
    (threads, unit, depth): (usize, VectorUnit, usize),
    seed: u32,
) {
    let pitch = columns + more;
    let mut source = Grid::<E>::noise(rows, columns, pitch, seed);
    let mut destination = Grid::<E>::noise(rows, columns, pitch, seed ^ 55);
    let expected = reference(&source.packed(), rows, columns, sweeps);
    let mut jacobi = Jacobi::with(threads, unit, depth);
    // SAFETY: two distinct grids of this test.
    unsafe { jacobi.run(source.plane(), destination.plane(), sweeps, &|| true).unwrap() };
    assert!(destination.packed() == expected, "{rows}x{columns}+{more}, {sweeps} sweeps, {unit:?} {depth}");
    assert!(source.gaps_are_whole() && destination.gaps_are_whole());
}

fn units() -> impl Strategy<Value = VectorUnit> {
    let here: Vec<_> = VectorUnit::ALL.into_iter().filter(|unit| unit.is_available()).collect();
    proptest::sample::select(here)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn every_variant_computes_the_reference(
        shape in (1usize..90, 1usize..120, 0usize..20),
        sweeps in 0usize..40,
        how in (1usize..4, units(), 1usize..=MAX_DEPTH),
        double: bool,
        seed: u32,
    ) {
        if double {
            check::<f64>(shape, sweeps, how, seed);
        } else {
            check::<f32>(shape, sweeps, how, seed);
        }
    }

    #[test]
    fn a_range_of_rows_equals_that_of_the_whole_grid(
        (rows, columns) in (1usize..90, 1usize..80),
        range in (0usize..90, 0usize..90),
        depth in 1usize..=MAX_DEPTH,
        unit in units(),
        seed: u32,
    ) {
        let range = range.0.min(range.1).min(rows)..range.0.max(range.1).min(rows);
        let mut source = Grid::<f32>::noise(rows, columns, columns, seed);
        let mut destination = Grid::<f32>::noise(rows, columns, columns, !seed);
        let (before, untouched) = (source.cells.clone(), destination.cells.clone());
        let expected = reference(&source.cells, rows, columns, depth);
        let mut jacobi = Jacobi::with(2, unit, depth);
        // SAFETY: two distinct grids of this test.
        unsafe {
            jacobi.run_rows(source.plane(), destination.plane(), range.clone(), depth, &|| true).unwrap();
        }
        prop_assert!(source.cells == before);
        for row in 0..rows {
            let wanted = if range.contains(&row) { &expected } else { &untouched };
            let cells = row * columns..(row + 1) * columns;
            prop_assert!(destination.cells[cells.clone()] == wanted[cells], "row {row} of {range:?}");
        }
    }
}

#[test]
fn wide_and_tall_grids_are_cut_into_tiles() {
    for unit in VectorUnit::ALL.into_iter().filter(|unit| unit.is_available()) {
        check::<f32>((37, 9000, 0), 16, (2, unit, 16), 3);
        check::<f64>((2 * TILE_ROWS + 7, 40, 8), 33, (3, unit, 16), 4);
        // Large enough for non-temporal stores, with aligned and with unaligned rows.
        check::<f32>((2100, 2048, 0), 5, (2, unit, 4), 5);
        check::<f32>((2100, 2047, 0), 5, (2, unit, 4), 6);
    }
}

#[test]
fn stale_scratch_memory_does_not_reach_the_result() {
    // Scratch memory holds values of earlier tiles, which must not reach the result.
    let (rows, columns) = (70, 3000);
    let mut jacobi = Jacobi::<f32>::new(1);
    let mut poison = vec![f32::NAN; rows * columns];
    let mut other = poison.clone();
    let planes = [&mut poison, &mut other].map(|cells| Plane::of(cells, rows, columns));
    // SAFETY: two distinct grids of this test.
    unsafe { jacobi.run(planes[0], planes[1], 16, &|| true).unwrap() };
    let mut source = Grid::<f32>::noise(rows, columns, columns, 1);
    let expected = reference(&source.cells, rows, columns, 16);
    let mut destination = Grid::<f32>::noise(rows, columns, columns, 2);
    // SAFETY: two distinct grids of this test.
    unsafe { jacobi.run(source.plane(), destination.plane(), 16, &|| true).unwrap() };
    assert!(destination.cells == expected);
}

#[test]
fn a_run_stops_when_the_callback_returns_false() {
    let mut source = Grid::<f32>::noise(500, 500, 500, 1);
    let mut destination = Grid::<f32>::noise(500, 500, 500, 1);
    let asked = AtomicUsize::new(0);
    let go_on = || asked.fetch_add(1, Ordering::Relaxed) < 20;
    // SAFETY: two distinct grids of this test.
    let outcome = unsafe { Jacobi::new(2).run(source.plane(), destination.plane(), 1_000_000, &go_on) };
    assert_eq!(outcome, Err(Stopped));
    assert!(asked.into_inner() < 100);
}
