//! Five-point Jacobi sweeps over a float32 grid: the same result as the built-in kernel `stencil`, bit for
//! bit. The run can stop after any 64 rows and resume on another card.
//!
//! Arguments: 0: rows, 1: columns, 2: offset of the grid, 3: offset of a second one of the same size, 4: sweeps.
//! Result: 0: offset of the grid that holds the result.
//!
//!     rustc --edition 2024 --target wasm32-unknown-unknown -O -C panic=abort -C strip=debuginfo \
//!         -C target-feature=+simd128 --crate-type cdylib -o jacobi.wasm jacobi.rs
#![no_std]

mod millstream;

use millstream::{argument, memory, progress, refuse, result, resume, safe_point, traffic};

/// Rows from one safe point to the next.
const ROWS: usize = 64;

#[unsafe(no_mangle)]
extern "C" fn run() {
    let (rows, columns) = (argument(0) as usize, argument(1) as usize);
    let grids = [argument(2), argument(3)];
    let sweeps = argument(4);
    let Some(cells) = argument(0).checked_mul(argument(1)) else { refuse(0) };
    if grids[0].abs_diff(grids[1]) < 4 * cells {
        refuse(3);
    }
    // SAFETY: two ranges that do not overlap; every bit pattern is a number.
    let mut planes: [&mut [f32]; 2] = unsafe { [memory(grids[0], cells), memory(grids[1], cells)] };

    // State: 1 if there is any, sweeps done, rows done of the next.
    let mut state = resume().unwrap_or_default();
    if state[0] == 0 {
        state[0] = 1;
        // The outermost cells never change: both grids need them.
        let [source, other] = &mut planes;
        other.copy_from_slice(source);
    }
    if state[1] % 2 == 1 {
        planes.swap(0, 1);
    }
    let (first_sweep, mut first_row) = (state[1], state[2] as usize);
    for sweep in first_sweep..sweeps {
        let [from, to] = &mut planes;
        let mut row = first_row.max(1);
        first_row = 0;
        while row + 1 < rows {
            let end = (row + ROWS).min(rows - 1);
            (row..end).for_each(|row| one(from, to, row, columns));
            traffic(((end - row + 2) * columns * 4) as u64, ((end - row) * columns * 4) as u64);
            row = end;
            (state[1], state[2]) = (sweep, row as u64);
            safe_point(&state);
        }
        planes.swap(0, 1);
        (state[1], state[2]) = (sweep + 1, 0);
        progress(sweep + 1);
        safe_point(&state);
    }
    result(0, grids[(sweeps % 2) as usize]);
}

fn one(from: &[f32], to: &mut [f32], row: usize, columns: usize) {
    if columns < 3 {
        return;
    }
    let line = |row: usize| &from[row * columns..][..columns];
    let (north, here, south) = (line(row - 1), line(row), line(row + 1));
    let inner = columns - 2;
    // Slices of equal length, so that the compiler vectorises the loop.
    let (north, south) = (&north[1..][..inner], &south[1..][..inner]);
    let (west, east) = (&here[..inner], &here[2..][..inner]);
    let to = &mut to[row * columns + 1..][..inner];
    for at in 0..inner {
        to[at] = ((north[at] + south[at]) + (west[at] + east[at])) * 0.25;
    }
}
