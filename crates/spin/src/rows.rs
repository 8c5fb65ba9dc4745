//! The update of one row of sites of one parity.
//!
//! `h = ((x⁻ + x⁺) + (y⁻ + y⁺)) + (z⁻ + z⁺)` with `x⁺ = J·σ` of the neighbour, then `σ ← 2 (σ·h)/(h·h)·h − σ`. A site
//! with `h·h = 0` keeps its spin. No operations are fused, and all variants use this order, so all agree in every bit.

use std::ops::Range;

/// Values of a site: three of the spin, three of the couplings at the + sides.
pub(crate) const COMPONENTS: usize = 6;
/// First of the couplings among the components.
pub(crate) const COUPLINGS: usize = 3;

/// Addresses of the rows that an update needs: sites of index 0, first component.
#[derive(Debug)]
pub struct Rows<E> {
    /// Sites that change.
    pub(crate) own: *mut E,
    /// Sites of the other parity at the same y and z.
    pub(crate) same: *const E,
    /// Neighbours at − and + in y, − and + in z: the other parity, the same index.
    pub(crate) around: [*const E; 4],
    /// Values from one component to the next.
    pub(crate) pitch: usize,
    /// Index of the neighbour at + in x minus the site's index: 0 or 1. The one at − in x is one less.
    pub(crate) shift: usize,
}

/// Updates the sites of an index range.
///
/// # Safety
/// All components of `own` are writable in the range, those of the others readable; `same` also one before and after. No
/// other thread accesses these sites of `own` or writes the others. The processor has the vector unit of the function.
pub(crate) type RowUpdate<E> = unsafe fn(rows: &Rows<E>, range: Range<isize>);

/// A vector register.
///
/// # Safety of all functions
/// The processor has the instructions. Pointers are to [`LANES`](Self::LANES) values.
pub(crate) trait Vector: Copy {
    type Element: Copy;
    const LANES: isize;

    unsafe fn load(from: *const Self::Element) -> Self;
    unsafe fn store(self, to: *mut Self::Element);
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn subtract(self, other: Self) -> Self;
    unsafe fn multiply(self, other: Self) -> Self;
    unsafe fn divide(self, other: Self) -> Self;
    /// `old` where this is zero, else `new`.
    unsafe fn select_if_zero(self, old: Self, new: Self) -> Self;
}

/// A component of the sites from index `at` on.
///
/// # Safety
/// As for [`Vector`].
#[inline(always)]
unsafe fn load<V: Vector>(row: *const V::Element, pitch: usize, component: usize, at: isize) -> V {
    // SAFETY: the caller's promise.
    unsafe { V::load(row.offset((component * pitch) as isize + at)) }
}

/// The scalar product.
///
/// # Safety
/// As for [`Vector`].
#[inline(always)]
unsafe fn dot<V: Vector>(a: [V; 3], b: [V; 3]) -> V {
    // SAFETY: the caller's promise.
    unsafe { (a[0].multiply(b[0])).add(a[1].multiply(b[1])).add(a[2].multiply(b[2])) }
}

/// The six couplings of the sites from index `at` on: − and + in x, y, z. The one towards − is at the neighbour's + side.
///
/// # Safety
/// As for [`RowUpdate`].
#[inline(always)]
unsafe fn couplings<V: Vector>(rows: &Rows<V::Element>, at: isize) -> [V; 6] {
    let (own, pitch) = (rows.own.cast_const(), rows.pitch);
    let [y_minus, _, z_minus, _] = rows.around;
    let x_minus_at = at - 1 + rows.shift as isize;
    // SAFETY: the caller's promise.
    unsafe {
        [
            load(rows.same, pitch, COUPLINGS, x_minus_at),
            load(own, pitch, COUPLINGS, at),
            load(y_minus, pitch, COUPLINGS + 1, at),
            load(own, pitch, COUPLINGS + 1, at),
            load(z_minus, pitch, COUPLINGS + 2, at),
            load(own, pitch, COUPLINGS + 2, at),
        ]
    }
}

/// One component of the local field.
///
/// # Safety
/// As for [`RowUpdate`].
#[inline(always)]
unsafe fn field<V: Vector>(rows: &Rows<V::Element>, j: &[V; 6], c: usize, at: isize) -> V {
    let (pitch, x_plus_at) = (rows.pitch, at + rows.shift as isize);
    let [y_minus, y_plus, z_minus, z_plus] = rows.around;
    // SAFETY: the caller's promise.
    unsafe {
        let x = (j[0].multiply(load(rows.same, pitch, c, x_plus_at - 1)))
            .add(j[1].multiply(load(rows.same, pitch, c, x_plus_at)));
        let y = (j[2].multiply(load(y_minus, pitch, c, at))).add(j[3].multiply(load(y_plus, pitch, c, at)));
        let z = (j[4].multiply(load(z_minus, pitch, c, at))).add(j[5].multiply(load(z_plus, pitch, c, at)));
        x.add(y).add(z)
    }
}

/// Updates the sites from index `at` on, one vector.
///
/// # Safety
/// As for [`RowUpdate`].
#[inline(always)]
unsafe fn vector<V: Vector>(rows: &Rows<V::Element>, at: isize) {
    let (own, pitch) = (rows.own.cast_const(), rows.pitch);
    // SAFETY: the caller's promise.
    unsafe {
        let j = couplings::<V>(rows, at);
        let h = [field(rows, &j, 0, at), field(rows, &j, 1, at), field(rows, &j, 2, at)];
        let spin: [V; 3] = [load(own, pitch, 0, at), load(own, pitch, 1, at), load(own, pitch, 2, at)];
        let projection = dot(spin, h);
        let square = dot(h, h);
        let factor = projection.add(projection).divide(square);
        for c in 0..3 {
            let new = factor.multiply(h[c]).subtract(spin[c]);
            square.select_if_zero(spin[c], new).store(rows.own.offset((c * pitch) as isize + at));
        }
    }
}

/// The loop of all vector units: whole vectors, then single sites.
///
/// # Safety
/// As for [`RowUpdate`], and the processor has the instructions of `V`.
#[inline(always)]
pub(crate) unsafe fn update<V: Vector, S: Vector<Element = V::Element>>(
    rows: &Rows<V::Element>,
    range: Range<isize>,
) {
    let mut at = range.start;
    // Rows begin at multiples of the vector length where whole rows are updated.
    while at < range.end && at % V::LANES != 0 && range.end - range.start >= V::LANES {
        // SAFETY: the caller's promise.
        unsafe { vector::<S>(rows, at) };
        at += 1;
    }
    while at + V::LANES <= range.end {
        // SAFETY: the caller's promise.
        unsafe { vector::<V>(rows, at) };
        at += V::LANES;
    }
    while at < range.end {
        // SAFETY: the caller's promise.
        unsafe { vector::<S>(rows, at) };
        at += 1;
    }
}
